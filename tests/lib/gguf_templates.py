"""GGUF files as llama.cpp's converter makes them of the tiny checkpoints: what an export takes as its template."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer


def metadata(config) -> dict[str, Any]:
    """Entries of the architecture that every model has, by the end of their names."""
    head, rope = getattr(config, "head_dim", None), config.rope_parameters
    head = head or config.hidden_size // config.num_attention_heads
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }


def _tensors(config) -> dict[str, tuple[int, ...]]:
    """Shapes by llama.cpp's names, which are spelled out here: the export has them from the package gguf."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_norm": (hidden,),
        }
        if config.model_type.startswith("qwen3"):
            of_layer |= {"attn_q_norm": (config.head_dim,), "attn_k_norm": (config.head_dim,)}
        if config.model_type == "qwen3_moe":
            experts, narrow = config.num_experts, config.moe_intermediate_size
            of_layer |= {
                "ffn_gate_inp": (experts, hidden),
                "ffn_gate_exps": (experts, narrow, hidden),
                "ffn_up_exps": (experts, narrow, hidden),
                "ffn_down_exps": (experts, hidden, narrow),
            }
        else:
            of_layer |= {"ffn_gate": (wide, hidden), "ffn_up": (wide, hidden), "ffn_down": (hidden, wide)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["output.weight"] = (config.vocab_size, hidden)
    return shapes


def gguf_template(source: Path, path: Path, *, without: str = "", **values: float) -> Path:
    """Write the template of a checkpoint: metadata, vocabulary, and tensors of zeros.

    ``without``: a tensor that is left out. ``values``: metadata, without the architecture before them and with ``__``
    for the point, instead of the right ones.
    """
    gguf = pytest.importorskip("gguf")
    config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    architecture = config.model_type.replace("_", "")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("template")
    writer.add_uint32("general.file_type", 32)
    right = metadata(config)
    if config.model_type == "qwen3_moe":
        right |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    for key, value in (right | {key.replace("__", "."): value for key, value in values.items()}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    vocabulary = tokenizer.get_vocab()
    by_id = {index: token for token, index in vocabulary.items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1 if index in by_id else 5 for index in range(config.vocab_size)])
    writer.add_token_merges(["a b"])
    for name, shape in _tensors(config).items():
        if name != without:
            writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
