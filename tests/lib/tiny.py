"""Tiny real checkpoints and tokenizers for the tests, made in milliseconds, of the architectures named by the project.

The sizes are odd on purpose (vocabulary and intermediate sizes that two ranks do not share evenly), so that partitions
cut through rows.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
TEXT = "The quick brown fox jumps over the lazy dog. What is 12 plus 30? 12 plus 30 is 42, said the assistant.\n"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 tokens and a ChatML template; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_config(kind: str, *, tied: bool = False, layers: int = 2, even: bool = False, wide: bool = False):
    """The transformers config of a tiny ``qwen3``, ``llama`` or ``qwen3_moe``.

    ``even``: sizes that 32 divides. ``wide``: in and out features that 128 divides, experts of several such blocks.
    """
    common = {
        "vocab_size": 301,
        "hidden_size": 128 if wide else 64 if even else 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4 if even or wide else 3,
        "num_key_value_heads": 4 if wide else 1,
        "head_dim": 32 if wide else 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    intermediate = 256 if wide else 96 if even else 83
    if kind == "qwen3":
        return Qwen3Config(intermediate_size=intermediate, **common)
    if kind == "llama":
        return LlamaConfig(intermediate_size=intermediate, **common)
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(
            intermediate_size=intermediate,
            moe_intermediate_size=256 if wide else 32 if even else 29,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            **common,
        )
    raise ValueError(f"no tiny checkpoint of kind {kind!r}: qwen3, llama or qwen3_moe")


def tiny_model(
    kind: str,
    *,
    tied: bool = False,
    seed: int = 0,
    layers: int = 2,
    even: bool = False,
    wide: bool = False,
    dtype=torch.bfloat16,
) -> PreTrainedModel:
    """A randomly initialized tiny model, the same one for the same seed; norms differ from 1."""
    classes = {"qwen3": Qwen3ForCausalLM, "llama": LlamaForCausalLM, "qwen3_moe": Qwen3MoeForCausalLM}
    config = tiny_config(kind, tied=tied, layers=layers, even=even, wide=wide)
    generator = torch.Generator().manual_seed(seed)
    model = classes[kind](config)
    # Wide layers of as large weights would have logits so large that one code more or less shows in them.
    size = 0.09 if wide else 0.15
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Where e4m3 is evenly spaced: with a scale that clips nothing, only such values move an fp8 scale.
            noise.view(-1)[::19] *= 1e-4
            parameter.copy_(1 + 0.1 * noise if "norm" in name else size * noise)
    return model.to(dtype)


def tiny_checkpoint(
    directory: Path | str,
    kind: str = "qwen3",
    *,
    tied: bool = False,
    seed: int = 0,
    layers: int = 2,
    even: bool = False,
    wide: bool = False,
    max_shard_size: str = "5GB",
    dtype=torch.bfloat16,
) -> Path:
    """Write a tiny checkpoint and its tokenizer as save_pretrained does; ``max_shard_size="100KB"`` gives shards."""
    directory = Path(directory)
    model = tiny_model(kind, tied=tied, seed=seed, layers=layers, even=even, wide=wide, dtype=dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(directory)
    return directory
