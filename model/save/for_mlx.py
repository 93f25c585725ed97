"""Checks, names of stacked experts and config.json entries of a checkpoint for mlx-lm."""

import re
from typing import Any

from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.ranks import listed
from quant import Quantization
from quant.formats.mlx import affine_config
from quant.linear import linears_of

# Model types whose tensors mlx-lm reads under transformers' names, with the same numerics:
# tests/distributed/engine/test_mlx.py runs each in mlx-lm 0.32.2.
MLX_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "llama3", "yarn")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def check_mlx(model: PreTrainedModel, quantization: Quantization) -> None:
    """Reject models that mlx-lm would not read.

    Raises:
        ValueError: the model has an untested type or RoPE, sliding attention, or experts that are quantized
            individually or only in part.
    """
    if model.config.model_type not in MLX_MODELS:
        raise ValueError(
            f"layout 'mlx' is known to be read by mlx-lm for {', '.join(MLX_MODELS)}, and not for "
            f"{model.config.model_type}: set export.format to dequantized and quantize it with mlx_lm.convert, which "
            "chooses codes of its own"
        )
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise ValueError(f"layout 'mlx' is known to be read with rope_type {', '.join(ROPE_TYPES)}, got {rope!r}")
    kinds: list[str] = getattr(config, "layer_types", None) or []
    if getattr(config, "use_sliding_window", False) or "sliding_attention" in kinds:
        raise ValueError(f"layout 'mlx': mlx-lm computes {config.model_type} without its sliding window")
    alone = [name for name in quantization.layers if _EXPERT.search(f"{name}.")]
    if alone:
        raise ValueError(
            f"layout 'mlx' has the experts of a layer together, not {listed(alone)}: set model.experts to stacked"
        )
    for name, module in model.named_modules():
        stacks = [f"{name}.{leaf}" for leaf, child in module.named_children() if getattr(child, "projections", ())]
        if 0 < len(quantization.layers.keys() & set(stacks)) < len(stacks):
            raise ValueError(f"{name}: layout 'mlx' holds experts that are all quantized, or none: {listed(stacks)}")


def mlx_place(linear: str) -> tuple[str, int | None]:
    """Find mlx-lm's module for a Linear, by the Linear's name on disk, and the expert's index in it (or None)."""
    expert = _EXPERT.search(linear)
    return (linear, None) if expert is None else (_EXPERT.sub(".switch_mlp.", linear), int(expert[1]))


def write_for_mlx(config: dict[str, Any], model: PreTrainedModel, quantization: Quantization) -> None:
    """Add to a config.json the entries that mlx-lm reads: ``quantization``, and keys as in published checkpoints.

    From version 5 on, transformers writes ``rope_parameters``, which most of mlx-lm's classes silently ignore, instead
    of ``rope_theta`` and ``rope_scaling``, and ``num_local_experts`` instead of ``num_experts``.
    """
    schemes = {
        mlx_place(module_name_on_disk(model, part.name))[0]: layer.scheme
        for name, layer in quantization.layers.items()
        for part in linears_of(name, layer)
    }
    config["quantization"] = affine_config(schemes)
    if hasattr(model.config, "num_experts"):
        config.setdefault("num_experts", model.config.num_experts)
    if config.get("head_dim") is None:
        config["head_dim"] = model.config.hidden_size // model.config.num_attention_heads
    if rope := config.get("rope_parameters"):
        config.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            config.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
