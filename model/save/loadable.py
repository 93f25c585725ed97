"""Check that the programs that read an export support its model, and find all its tensors.

:func:`check_support` checks that a layout, and the program that reads its files (ExecuTorch, mlx-lm, ...), support the
model and its schemes.

:func:`check_loadable` checks that the class in a checkpoint's config.json finds all its tensors in the checkpoint, and
no others. The class is built on the meta device, and transformers' own loader loads the planned tensors, on the meta
device too: renaming, merging experts and concatenating all run, but only on shapes. So any family whose files need a
layout that the export does not write is detected, without a list of families, before a run and before the export. After
the export :func:`check_written` compares the headers of its files with the plan. No tensor is read.

:func:`weights_read` detects classes whose code reads the ``weight`` of packed layers, which compressed-tensors replaces
by ``weight_packed`` for integer and fp4 codes: during loading, to initialize it (Falcon, NanoChat's ``o_proj``), or in
their forward (RWKV). It runs initialization and forward on the meta device.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from model.checkpoint.names import concatenates, module_name_on_disk
from model.checkpoint.safetensors import read_headers
from model.families import model_class
from model.quantized.tensor import QuantizedTensor
from model.ranks import listed
from model.save.finish import full_attention_interval
from model.save.plan import EXPERT, Item, linears_of_quantized
from quant import Quantization
from quant.attention import QuantCache
from quant.formats.compressed_tensors import (
    FLOAT_QUANTIZED,
    INT_QUANTIZED,
    MXFP8_QUANTIZED,
    NVFP4_PACKED,
    Shapes,
    export_format,
)
from quant.formats.layouts import Layout, check_layout
from quant.formats.torchao import check_intx_of
from quant.linear import QuantEmbedding, StackedLinear
from quant.rules import exempt_line

_META = torch.device("meta")
UNPACKED = (FLOAT_QUANTIZED, INT_QUANTIZED, MXFP8_QUANTIZED)
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


def check_loadable(source: Path, items: Sequence[Item], *, trust_remote_code: bool = False) -> None:
    """Raise ValueError if the class in the config.json of ``source`` would find tensors of a planned export missing,
    unknown or of another shape. ``trust_remote_code`` allows running Python code in ``source``; a class from such code
    is not checked."""
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    kind = model_class(config)
    if kind is None:
        return
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with _META, no_init_weights():
        model: PreTrainedModel = kind(config)
        if any(item.layout not in (None, "dequantized") for item in items):
            # as transformers does before it loads a quantized checkpoint
            for name, module in list(model.named_modules()):
                if (linears := linears_of_quantized(type(module).__name__)) is not None:
                    model.set_submodule(name, linears(model.config.get_text_config()))
    model.tie_weights()
    problems = _problems(model, _unquantized(items))
    if problems:
        raise ValueError(
            f"config.json of {source} names {kind.__name__}, whose weights transformers would not find in the export: "
            f"{'; '.join(problems)}"
        )


def check_written(directory: Path, items: Iterable[Item]) -> None:
    """Raise ValueError unless the files of ``directory`` have exactly the tensors of ``items``, by key, dtype and
    shape; reads only headers."""
    planned = {key: expected for item in items for key, expected in item.shapes.items()}
    checkpoint = read_headers(directory)
    found = {key: (tensor.dtype, tensor.shape) for key, tensor in checkpoint.tensors.items()}
    problems = checkpoint.problems
    if wrong := sorted(key for key in planned.keys() | found.keys() if planned.get(key) != found.get(key)):
        problems = [*problems, f"{directory}: these tensors are not as planned: {listed(wrong)}"]
    if problems:
        raise ValueError("; ".join(problems))


def _unquantized(items: Iterable[Item]) -> Shapes:
    """Return the tensors' shapes as in a plain export: weights in place of codes and scales."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for item in items:
        if item.stored:
            if isinstance(item.copied, QuantizedTensor):
                shapes[item.copied.key] = torch.bfloat16, item.copied.shape
            continue
        if item.layout == "gpt_oss":
            shapes |= {stack.key: (torch.bfloat16, stack.shape) for stack in item.fused}
            continue
        if item.layout in (None, "dequantized") or item.fused:
            if not isinstance(item.module, QuantCache):
                shapes |= item.shapes
            continue
        for name, part in item.linears.items():
            shapes[f"{name}.weight"] = torch.bfloat16, (part.out_features, part.in_features)
            shapes |= {key: item.shapes[key] for key in [f"{name}.bias"] if key in item.shapes}
    return shapes


def _problems(model: PreTrainedModel, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[str]:
    state = {key: torch.empty(shape, dtype=dtype, device=_META) for key, (dtype, shape) in shapes.items()}
    rules: list[Any] = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(device_map={"": _META}, weight_mapping=rules)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(model, state, options)
    finally:
        if shown:
            logging.enable_progress_bar()
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    kinds = {
        "missing": info.missing_keys,
        "unknown": info.unexpected_keys,
        "of another shape": [name for name, *_ in info.mismatched_keys],
        "not converted": info.conversion_errors,
    }
    return [f"{kind}: {listed(sorted(map(str, names)), 6)}" for kind, names in kinds.items() if names]


def is_expert(name: str) -> bool:
    """Return True if the name of a module or tensor belongs to the routed experts of a MoE."""
    return ".experts." in name


def fused_there(model: PreTrainedModel) -> Callable[[str], bool]:
    """Create a function that returns True for the name of a module of experts that transformers dequantizes into fused
    parameters when it loads a quantized checkpoint. It returns False for other modules, and for experts of the classes
    for which transformers creates quantized Linears."""
    kinds = ((name, getattr(module, "replaces", "")) for name, module in model.named_modules())
    linears = tuple(f"{name}." for name, kind in kinds if linears_of_quantized(kind) is not None)
    return lambda name: is_expert(name) and not name.startswith(linears)


def not_loaded(model: PreTrainedModel, quantization: Quantization) -> str | None:
    """Return the reason why transformers cannot correctly load an export of ``model`` in layout ``compressed``; None if
    it can."""
    layers = quantization.layers
    if any(isinstance(layer, QuantEmbedding) for layer in layers.values()):
        return "transformers does not load quantized embeddings"
    is_fused = fused_there(model)
    schemes = {layer.scheme for name, layer in layers.items() if is_fused(name)}
    plain = any(isinstance(one, nn.Linear | StackedLinear) and is_fused(name) for name, one in model.named_modules())
    packed = any(export_format(layer.scheme) != FLOAT_QUANTIZED for layer in layers.values())
    if packed and concatenates(model):
        return "transformers does not put the parts of a tensor together in a checkpoint with packed layers"
    if len(schemes) > 1 or (plain and packed):
        return "transformers decodes all experts with one scheme"
    has_zero_points = any(layer.weight_zero is not None for layer in layers.values())
    if has_zero_points and len({layer.scheme for layer in layers.values()}) > 1:
        return "transformers decodes all layers with one scheme if weights have zero points"
    for scheme in schemes:
        if scheme.weights.has_zero_points:
            return "transformers does not load zero points of experts"
        if scheme.weights.granularity == "block":
            return "transformers does not load experts with a scale per block"
        if export_format(scheme) == NVFP4_PACKED:
            return (
                "transformers reads NVFP4 experts without their global scales (its issue 48371): their weights become "
                "noise, without an error"
            )
        if export_format(scheme) in (INT_QUANTIZED, MXFP8_QUANTIZED):
            return f"transformers does not load experts stored as {export_format(scheme)}"
    alone = {name: export_format(layer.scheme) for name, layer in layers.items() if not is_fused(name)}
    if read := weights_read(model, [name for name, kind in alone.items() if kind not in UNPACKED]):
        return (
            f"transformers reads the weights of packed layers of a {type(model).__name__}, which have none: "
            f"{listed(read, 2)} (it loads with {exempt_line(read)})"
        )
    return None


def weights_read(model: PreTrainedModel, packed: Collection[str]) -> list[str]:
    """List the layers whose attribute ``weight`` the code of ``model``'s class reads, although a packed layer has none.

    Tries the class's initialization and a forward on the meta device, with packed layers. If the forward fails for a
    missing weight, its error does not say of which layer: then all packed Linears are returned. Only the config of
    ``model`` is read. ``packed`` names the Linears that an export packs; names that are no Linears in transformers,
    such as experts, are ignored.
    """
    if not packed:
        return []
    with _META, no_init_weights():
        empty: PreTrainedModel = type(model)(model.config)
    linears = {name: one for name, one in empty.named_modules() if isinstance(one, nn.Linear) and name in packed}
    if read := sorted(name for name in linears if _initialized(empty, name)):
        return read
    for linear in linears.values():
        _pack(linear)
    return sorted(linears) if linears and _forward_lacks_a_weight(empty) else []


def _initialized(model: PreTrainedModel, name: str) -> bool:
    """Return True if transformers' initialization of a layer and its parents reads the layer's ``weight``: if it fails
    without the weight, but not with it."""
    parts = name.split(".")
    above = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]
    holders = [module for module in above if not isinstance(module, PreTrainedModel)]

    def fails() -> bool:
        try:
            with _META:
                for module in holders:
                    model._init_weights(module)
        except AttributeError:
            return True
        return False

    if fails():
        return False
    weight = holders[-1]._parameters.pop("weight")
    found = fails()
    holders[-1]._parameters["weight"] = weight
    return found


def _pack(linear: nn.Linear) -> None:
    """Change a layer as compressed-tensors does: remove its weight, and replace its forward."""

    def forward(hidden: Tensor) -> Tensor:
        return hidden.new_empty(*hidden.shape[:-1], linear.out_features)

    del linear._parameters["weight"]
    linear.forward = forward  # type: ignore[method-assign, assignment]


@torch.no_grad()
def _forward_lacks_a_weight(model: PreTrainedModel) -> bool:
    ids = torch.zeros(1, 8, dtype=torch.long, device=_META)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        # A finished mask: to create one, most classes read values, which tensors on the meta device do not have.
        inputs["attention_mask"] = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=_META)
    try:
        model.bfloat16().eval()(**inputs)  # experts have kernels for bf16 alone
    except Exception as error:  # a forward that needs values cannot test this
        return isinstance(error, AttributeError) and "no attribute 'weight'" in str(error)
    return False


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
    """Raise ValueError for a layer of a dtype whose scales, or their products with codes, the layout's reader rounds.
    GGUF needs no check here: packing fails if fp16 does not represent a scale exactly."""
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
    """Raise ValueError for untested model types, Linears with unquantized inputs, a quantized embedding tied to
    lm_head, and layers whose name on disk differs from transformers'."""
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
    """Raise ValueError for untested model types or RoPE, activations, orders of layers and sliding attention that
    mlx-lm does not compute, and experts that are quantized as separate modules or only in part."""
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
    """Raise ValueError unless the quantized layers are exactly the stacks of experts of a gpt-oss model."""
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
