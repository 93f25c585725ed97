"""Checks that a layout, and the programs that read its files, support a model."""

from typing import Any

import torch
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.ranks import listed
from model.save.finish import full_attention_interval
from model.save.plan import EXPERT
from quant import Quantization
from quant.formats.layouts import Layout, check_layout
from quant.formats.torchao import check_intx_of
from quant.linear import QuantEmbedding

# Model types that transformers loads with torchao's tensors, that torch.export traces and that XNNPACK computes:
# tests/distributed/tools/verify/test_engines.py lowers each with ExecuTorch 1.5.1.
EXECUTORCH_MODELS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2")
# Model types whose tensors mlx-lm reads under transformers' names, with the same numerics, and their types of RoPE: the
# same tests run each in mlx-lm 0.32.2.
MLX_MODELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"), ("default", "llama3", "yarn")),
    **dict.fromkeys(("gemma4_text", "gemma4"), ("default", "proportional")),
    **dict.fromkeys(("lfm2", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"), ("default",)),
}
_WITH_WINDOWS = ("gemma4_text", "gemma4")  # of which mlx-lm computes sliding attention
# Factors of attention with YaRN: mlx-lm ignores the first, and has other defaults for the others.
_YARN_FACTORS = ("attention_factor", "mscale", "mscale_all_dim")


def check_support(model: PreTrainedModel, quantization: Quantization, layout: Layout) -> None:
    """Raise ValueError if a layout cannot store the schemes of a model, or if the program that reads it (ExecuTorch,
    mlx-lm, ...) does not support the model."""
    check_layout(layout, (layer.scheme for layer in quantization.layers.values()))
    if layout == "executorch":
        _check_executorch(model, quantization)
    elif layout == "mlx":
        _check_mlx(model, quantization)
    elif layout == "gpt_oss":
        _check_gpt_oss(model, quantization)
    _check_dtypes(quantization, layout)


def _check_dtypes(quantization: Quantization, layout: Layout) -> None:
    """Raise ValueError for a layer in whose dtype scales are stored, if the reader rounds scales or products of this
    dtype. GGUF needs no check here: each of its scales is compared with what fp16 holds when it is written."""
    for name, layer in quantization.layers.items():
        dtype, stored = layer.weight.dtype, layer.scheme.weights.scale_format == "model"
        found = f"{name} is {str(dtype).removeprefix('torch.')}, expected"
        if layout == "mlx" and stored and dtype == torch.float32:
            raise ValueError(
                f"{found} bfloat16 or float16: layout 'mlx' adds a bias to codes times scales, which fp32 rounds"
            )
        if layout == "executorch" and dtype != torch.bfloat16:
            raise ValueError(f"{found} bfloat16: layout 'executorch' is for XNNPACK, which keeps scales in bf16")


def _check_executorch(model: PreTrainedModel, quantization: Quantization) -> None:
    """Raise ValueError for untested model types, Linears with unquantized inputs, and a quantized embedding tied to
    lm_head."""
    kind = model.config.model_type
    if kind not in EXECUTORCH_MODELS:
        raise ValueError(
            f"layout 'executorch' was tested with models of type {', '.join(EXECUTORCH_MODELS)}, not with {kind}: set "
            "export.format to dequantized and quantize it with torchao, which chooses codes of its own"
        )
    for name, layer in quantization.layers.items():
        embedding = isinstance(layer, QuantEmbedding)
        check_intx_of(name, layer.scheme, embedding=embedding)
        if embedding and model.get_output_embeddings().weight is layer.weight:
            raise ValueError(
                f"{name}: the model's head has the same weight, and ExecuTorch has no operator for a head with an "
                "embedding's codes: set quant.embedding to null"
            )
        if (on_disk := module_name_on_disk(model, name)) != name:
            raise ValueError(
                f"{name}: layout 'executorch' needs transformers' names, but this layer is {on_disk} on disk: set "
                "export.format to compressed"
            )


def _check_mlx(model: PreTrainedModel, quantization: Quantization) -> None:
    """Raise ValueError for untested model types or RoPE, activations and sliding attention that mlx-lm does not
    compute, and experts that are not all quantized as stacks."""
    kind, config = model.config.model_type, model.config.get_text_config()
    if kind not in MLX_MODELS:
        raise ValueError(
            f"layout 'mlx' was tested with models of type {', '.join(MLX_MODELS)}, not with {kind}: set export.format "
            "to dequantized and quantize it with mlx_lm.convert, which chooses codes of its own"
        )
    if getattr(config, "enable_moe_block", False):
        raise ValueError(f"layout 'mlx' was not tested with {kind} with experts: set export.format to another layout")
    usual = ("gelu_pytorch_tanh",) if kind.startswith("gemma") else ("silu", "swish")
    if (found := getattr(config, "hidden_activation", getattr(config, "hidden_act", usual[0]))) not in usual:
        raise ValueError(
            f"layout 'mlx': mlx-lm computes {kind} with {usual[0]}, whatever config.json says, got {found!r}: set "
            "export.format to another one"
        )
    _check_mlx_rope(kind, getattr(config, "rope_parameters", None) or {})
    full_attention_interval(config)
    layers: list[str] = getattr(config, "layer_types", None) or []
    window = getattr(config, "use_sliding_window", kind == "mistral" and config.sliding_window is not None)
    if kind not in _WITH_WINDOWS and (window or "sliding_attention" in layers):
        raise ValueError(
            f"layout 'mlx': mlx-lm computes {kind} without its sliding window: set export.format to another one"
        )
    alone = [name for name in quantization.layers if EXPERT.search(f"{name}.")]
    if alone:
        raise ValueError(
            f"layout 'mlx' stores all experts of a layer in one tensor, but {listed(alone)} are modules of their own: "
            "set model.experts to stacked"
        )
    for name, module in model.named_modules():
        stacks = [f"{name}.{leaf}" for leaf, child in module.named_children() if getattr(child, "projections", ())]
        if 0 < len(quantization.layers.keys() & set(stacks)) < len(stacks):
            raise ValueError(f"{name}: layout 'mlx' needs all of the experts quantized, or none: {listed(stacks)}")


def _check_mlx_rope(kind: str, parameters: dict[str, Any]) -> None:
    """Raise ValueError for RoPE that mlx-lm does not compute in a model of type ``kind``, or that was not tested.
    ``parameters`` are rope_parameters of its configuration, or those of each type of layers by name."""
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        if (found := rope.get("rope_type", "default")) not in MLX_MODELS[kind]:
            raise ValueError(
                f"layout 'mlx' was tested for {kind} with rope_type {', '.join(MLX_MODELS[kind])}, got {found!r}: set "
                "export.format to another one"
            )
        if factors := [name for name in _YARN_FACTORS if rope.get(name) is not None]:
            raise ValueError(
                f"layout 'mlx': rope_parameters has {', '.join(factors)}, which mlx-lm does not compute as "
                "transformers does: set export.format to another one"
            )
        if not rope.get("truncate", True):
            raise ValueError(
                f"layout 'mlx': mlx-lm computes {found} as with truncate true, got false in rope_parameters: set "
                "export.format to another one"
            )


def _check_gpt_oss(model: PreTrainedModel, quantization: Quantization) -> None:
    """Raise ValueError unless exactly the experts are quantized, all of them, as stacks."""
    held = {
        name
        for name, module in model.named_modules()
        if getattr(module, "projections", ())
        and getattr(model.get_submodule(name.rpartition(".")[0]), "replaces", "") == "GptOssExperts"
    }
    if held != set(quantization.layers):
        wrong = sorted(held ^ set(quantization.layers))
        raise ValueError(
            "layout 'gpt_oss' needs a gpt-oss with model.experts: stacked, all of its experts quantized and nothing "
            f"else, which is not so for {listed(wrong)}: set quant.exempt_more: ['.*\\.self_attn\\..+'], or another "
            "export.format"
        )
