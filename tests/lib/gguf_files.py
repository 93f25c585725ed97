"""GGUF files of tiny checkpoints, as llama.cpp's converter makes them; names and changes are spelled out here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.lib.tiny import CHAT_TEMPLATE, TEXT

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
COMMON = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"head_dim": 32, "max_position_embeddings": 512, "vocab_size": 330, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
GEMMA = {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32, "final_logit_softcapping": 30.0}
GEMMA |= {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL}, "tie_word_embeddings": True}
GEMMA4 = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
GEMMA4 |= {"global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 330}
GEMMA4 |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}
GEMMA4_KEYS = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "attention_k_eq_v": True}
GEMMA4_KEYS |= {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 128}
QWEN35 = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 64}
QWEN35 |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
QWEN35 |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
QWEN35 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
QWEN35MOE = QWEN35 | EXPERTS | {"shared_expert_intermediate_size": 128, "intermediate_size": None}
OPENAI = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
OPENAI |= {"original_max_position_embeddings": 64, "truncate": False}
# Options of transformers' configuration by variant; its first word is the model_type.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "llama biases": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 64},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3 yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                       "original_max_position_embeddings": 128}},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": OPENAI},
    "gemma3_text": GEMMA,
    "gemma4_text": GEMMA4,
    "gemma4_text keys": GEMMA4 | GEMMA4_KEYS,
    "gemma4_text experts": GEMMA4 | GEMMA4_KEYS | GEMMA4_EXPERTS,
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": QWEN35MOE,
    "lfm2": {"layer_types": ["conv", "full_attention"], "head_dim": 64, "block_multiple_of": 32},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "head_dim": 64,
                           "num_dense_layers": 1},
}  # fmt: skip
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gpt_oss": "gpt-oss",
    "lfm2_moe": "lfm2moe",
}
_LEAVES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "w1": "ffn_gate",
    "w2": "ffn_down",
    "w3": "ffn_up",
    "model.embedding_norm": "token_embd_norm",
}
_NAMELESS = {"sinks": "attn_sinks.weight", "layer_scalar": "layer_output_scale.weight", "A_log": "ssm_a"}
_NAMELESS |= {"dt_bias": "ssm_dt.bias", "expert_bias": "exp_probs_b.bias"}
_NAMELESS |= {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
_GEMMA_LEAVES = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
_GEMMA_LEAVES |= {"post_feedforward_layernorm": "post_ffw_norm"}
_GEMMA4_LEAVES = {"per_layer_input_gate": "inp_gate", "per_layer_projection": "proj"}
_GEMMA4_LEAVES |= {"post_per_layer_input_norm": "post_norm", "embed_tokens_per_layer": "per_layer_token_embd"}
_GEMMA4_LEAVES |= {"per_layer_model_projection": "per_layer_model_proj"}
_GEMMA4_LEAVES |= {"router.proj": "ffn_gate_inp", "pre_feedforward_layernorm_2": "pre_ffw_norm_2"}
_GEMMA4_LEAVES |= {f"post_feedforward_layernorm_{at}": f"post_ffw_norm_{at}" for at in (1, 2)}
_GEMMA4_LEAVES |= {"per_layer_projection_norm": "per_layer_proj_norm"}
_OTHER_LEAVES = {"gemma3_text": _GEMMA_LEAVES, "gemma4_text": _GEMMA_LEAVES | _GEMMA4_LEAVES}
_QWEN35_LEAVES = {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta"}
_QWEN35_LEAVES |= {"in_proj_a": "ssm_alpha", "conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm"}
_QWEN35_LEAVES |= {"linear_attn.out_proj": "ssm_out", "post_attention_layernorm": "post_attention_norm"}
_OTHER_LEAVES |= dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _QWEN35_LEAVES)
_OTHER_LEAVES |= {"gpt_oss": {"post_attention_layernorm": "post_attention_norm"}}

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_START, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
_END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = rf"{_START}{_UPPER}*{_LOWER}+{_END}|{_START}{_UPPER}+{_LOWER}*{_END}|\p{{N}}{{1,3}}|{_SLASHES}"
# The pattern that splits text by tokenizer.ggml.pre; None: GPT-2's, after single digits unless it is gpt-2.
PATTERNS = {
    **dict.fromkeys(("gpt-2", "smollm", "starcoder", "refact")),
    "qwen2": _QWEN2,
    "qwen35": _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),
    **dict.fromkeys(("llama-bpe", "lfm2"), _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")),
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer(pre: str) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that splits text as the models do whose GGUF files have this ``tokenizer.ggml.pre``."""
    whole, pattern = pre in ("llama-bpe", "lfm2", "tekken"), PATTERNS[pre]
    made = Tokenizer(models.BPE(ignore_merges=whole))
    # Merges across what the pattern splits, so that another pattern gives other tokens.
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.normalizer = normalizers.NFC() if pre in ("qwen2", "qwen35") else None
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=325, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    lines = ["x12345 1234 67", "it's It'S", "THEY'LLgo", "\n\n  \n  x", "oneTwo", "ONEtwo", "?/\n", "the quick don't"]
    made.train_from_iterator([TEXT, *lines * 20], trainer)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first: Any = pre_tokenizers.Digits(individual_digits=True)
    if pattern is not None:
        first = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    made.pre_tokenizer = last if pre == "gpt-2" else pre_tokenizers.Sequence([first, last])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.add_tokens(["<think>"])
    if whole:
        wrapped.bos_token = "<|endoftext|>"
        wrapped.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=["<|endoftext|>", "$A"], special_tokens=[("<|endoftext|>", 0)]
        )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def checkpoint(directory: Path, variant: str, pre: str = "qwen2", dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint and its tokenizer; biases and norms are random, too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(variant.split()[0], **({"num_hidden_layers": 2} | COMMON | VARIANTS[variant]))
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, scalar in model.named_buffers():
            scalar.mul_(torch.rand(()) + 0.5 if name.endswith("layer_scalar") else 1)
            scalar.add_(torch.rand_like(scalar) / 4 if name.endswith("expert_bias") else 0)
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(
                noise * 0.1 + ("norm" in name and "gemma" not in variant) if noise.dim() == 1 else noise / 12
            )
    model.save_pretrained(directory)
    tokenizer(pre).save_pretrained(directory)
    return directory


def tensors(source: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by llama.cpp's names, in its order of rows."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, found, stacks = model.config, {}, {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        if ".experts" in name:
            gate_up, suffix = "gate_up_proj" in name, "bias" if name.endswith("_bias") else "weight"
            if gate_up and config.model_type == "gemma4_text":
                stacks[f"{block}ffn_gate_up_exps.weight"] = value
                continue
            halves = value.chunk(2, 1) if gate_up else (value,)
            if config.model_type == "gpt_oss":
                halves = (value[..., ::2], value[..., 1::2]) if gate_up else (value,)
            for part, half in zip(("gate", "up") if gate_up else ("down",), halves, strict=True):
                turned = config.model_type == "gpt_oss" and suffix == "weight"
                stacks[f"{block}ffn_{part}_exps.{suffix}"] = half.mT if turned else half
            continue
        if ".linear_attn." in name:
            value = tiled(config, name.rpartition("linear_attn.")[2].removesuffix(".weight"), value)
        if suffix in _NAMELESS:
            found[block + _NAMELESS[suffix]] = value
            continue
        leaf, its_name = leaf_of(config, stem)
        value = rotated(config, leaf, value)
        if config.model_type.startswith(("gemma3", "qwen3_5")) and "norm" in leaf and leaf != "linear_attn.norm":
            value = value.float() + 1
        found[f"{block}{its_name}.{suffix}"] = value.squeeze(1) if "conv" in leaf else value
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        plain = 500000.0 ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        rotary = model.model.rotary_emb.inv_freq.double()
        found["rope_freqs.weight"] = (plain / rotary).float()
    if config.model_type == "gemma4_text":
        rope, size = config.rope_parameters["full_attention"], config.per_layer_config[1].head_dim
        turned = int(size * rope["partial_rotary_factor"] / 2)
        found["rope_freqs.weight"] = torch.tensor([1.0] * turned + [1e30] * (size // 2 - turned))
    return found | stacks


def leaf_of(config, stem: str) -> tuple[str, str]:
    """Return the end of a module's name, and llama.cpp's name for it."""
    leaves = _LEAVES | _OTHER_LEAVES.get(config.model_type, {})
    return next((leaf, name) for leaf, name in leaves.items() if stem == leaf or stem.endswith("." + leaf))


def rotated(config, leaf: str, weight: torch.Tensor) -> torch.Tensor:
    """In Llama's q and k, row ``2 i + j`` of a head is its row ``i + j half``: llama.cpp turns neighbors, transformers
    halves."""
    if architecture_of(config) != "llama" or leaf not in ("q_proj", "k_proj"):
        return weight
    heads = config.num_attention_heads if leaf == "q_proj" else config.num_key_value_heads
    half = len(weight) // heads // 2
    return weight[[head * 2 * half + i + j * half for head in range(heads) for i in range(half) for j in range(2)]]


def tiled(config, leaf: str, value: torch.Tensor) -> torch.Tensor:
    """The heads of values of Qwen3.5 by turns of the heads of keys; A_log as the decay."""
    keys, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    order = [key * (heads // keys) + at for at in range(heads // keys) for key in range(keys)]
    rows = torch.tensor([head * size + at for head in order for at in range(size)])
    if leaf in ("in_proj_qkv", "conv1d"):
        before = 2 * keys * config.linear_key_head_dim
        return torch.cat([value[:before], value[before:][rows]])
    if leaf == "out_proj":
        return value[:, rows]
    value = value[rows] if leaf == "in_proj_z" else value if leaf == "norm" else value[order]
    return -value.float().exp() if leaf == "A_log" else value


def architecture_of(config) -> str:
    """Return llama.cpp's name of a model's architecture."""
    return _ARCHITECTURES.get(config.model_type, config.model_type)


def metadata(config) -> dict[str, Any]:
    """Entries of the architecture, by the end of their names."""
    architecture, rope = architecture_of(config), config.rope_parameters
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    first = config.per_layer_config[0] if architecture == "gemma4" else config
    head = getattr(first, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": first.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "norm_eps", None) or config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if local is not None:
        values["rope.freq_base_swa"] = float(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        values |= {f"rope.scaling.yarn_{end}": rope[end] for end in ("beta_fast", "beta_slow") if end in rope}
    if architecture == "llama":
        values |= {"rope.dimension_count": head, "vocab_size": config.vocab_size}
    if architecture in ("gemma3", "gpt-oss"):
        values["attention.sliding_window"] = config.sliding_window
    if hasattr(config, "final_logit_softcapping"):  # without it, Gemma 4 has 30 in llama.cpp
        values["final_logit_softcapping"] = float(config.final_logit_softcapping or 0)
    if hasattr(config, "num_experts") and architecture != "gemma4":
        values |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    if architecture in ("qwen3moe", "qwen35moe", "lfm2moe", "gpt-oss"):
        values["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", values["feed_forward_length"])
    if getattr(config, "enable_moe_block", False):
        values |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "gemma4":
        sliding = [kind == "sliding_attention" for kind in config.layer_types]
        full = config.per_layer_config[1]
        shared, inner = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
        wide = [inner * (1 + (config.use_double_wide_mlp and at >= shared)) for at in range(len(sliding))]
        per_layer = {"embedding_length_per_layer_input": config.hidden_size_per_layer_input}
        per_layer |= {"attention.shared_kv_layers": config.num_kv_shared_layers}
        per_layer |= {"feed_forward_length": wide, "attention.sliding_window_pattern": sliding}
        heads = [(first if one else full).num_key_value_heads for one in sliding]
        values |= per_layer | {"attention.sliding_window": config.sliding_window, "attention.head_count_kv": heads}
        for part in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            values |= {part: full.head_dim, f"{part}_swa": head}
    if architecture == "qwen35moe":
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture.startswith("qwen35"):
        values |= {"full_attention_interval": 2, "rope.dimension_sections": [11, 11, 10, 0]}
        values |= {"rope.dimension_count": int(head * rope["partial_rotary_factor"])}
        names = ("conv_kernel_dim", "key_head_dim", "num_key_heads", "num_value_heads")
        ends = ("conv_kernel", "state_size", "group_count", "time_step_rank")
        values |= {f"ssm.{end}": getattr(config, f"linear_{name}") for end, name in zip(ends, names, strict=True)}
        values["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
    if architecture == "lfm2":  # two thirds of the size in config.json, rounded up
        multiple = config.block_multiple_of
        values["feed_forward_length"] = -(-(2 * config.intermediate_size // 3) // multiple) * multiple
    if architecture == "lfm2moe":
        values |= {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
    if architecture.startswith("lfm2"):
        values["attention.head_count_kv"] = [2 * (kind == "full_attention") for kind in config.layer_types]
        values |= {"shortconv.l_cache": config.conv_L_cache, "vocab_size": config.vocab_size}
    return {key: value for key, value in values.items() if value is not None}


def write_gguf(
    source: Path,
    path: Path,
    kind: str = "F32",
    pre: str = "qwen2",
    *,
    weights: bool = True,
    without: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """Write a checkpoint's GGUF file: matrices in ``kind``, others in F32; without ``weights`` zeros in their place.
    ``changes`` is metadata, with ``__`` for the point, and without the architecture; ``without`` names entries or
    tensors to leave out."""
    gguf = pytest.importorskip("gguf")
    config = AutoConfig.from_pretrained(source)
    architecture = architecture_of(config)
    values = metadata(config)
    values = {f"{architecture}.{key}": value for key, value in values.items()} | _vocabulary(source, pre)
    for key, value in changes.items():
        name = key.replace("__", ".")
        values[name if name.startswith(("tokenizer", "general", "split")) else f"{architecture}.{name}"] = value
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if key in without or value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, value in tensors(source).items():
        if name not in without:
            plain = value.dim() == 1 or name.endswith("bias")
            plain |= any(part in name for part in ("norm", "ffn_gate_inp", "shortconv.conv", "ssm_conv1d", "ssm_a"))
            quantized = gguf.GGMLQuantizationType["F32" if plain else kind]
            value = value if weights or name == "rope_freqs.weight" else torch.zeros_like(value)
            data = gguf.quants.quantize(value.float().contiguous().numpy(), quantized)
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_template(source: Path, path: Path, **options: Any) -> Path:
    """Write what an export takes as its template: metadata, vocabulary, and tensors of zeros."""
    return write_gguf(source, path, weights=False, general__name="template", general__file_type=32, **options)


def _vocabulary(source: Path, pre: str) -> dict[str, Any]:
    """Metadata of a checkpoint's tokenizer."""
    data = json.loads((source / "tokenizer.json").read_text())
    config = AutoConfig.from_pretrained(source)
    added = {token["id"]: token for token in data["added_tokens"]}
    by_id = {index: token for token, index in data["model"]["vocab"].items()}
    by_id |= {index: token["content"] for index, token in added.items()}
    types = [
        5 if i not in by_id else 1 if i not in added else 3 if added[i]["special"] else 4
        for i in range(config.vocab_size)
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in range(config.vocab_size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
