"""Quantize a model for a training loop outside of this project, and convert it to codes after training.

:func:`prepare` replaces layers as the project's own loop does, and fills their scales at once, so that the model trains
in any loop. Stored scales of inputs are measured in forwards that the caller runs (``calibrate``). All state is in the
model: :func:`find_quantization` collects the layers again, also from a copy. :func:`convert` replaces weights by their
codes, and ``model.save.save_quantized`` writes a checkpoint before or after :func:`convert`.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from quant import kernels
from quant.linear import QuantLayer, StackedLinear
from quant.observers import Ranges, measured_scales, partial_stats, scale_from_histogram
from quant.packed_weight import PackedCodes
from quant.quantization import Quantization, replace_layers
from quant.reference import global_scale
from quant.rules import DEFAULT_EXEMPT, Rule, examples, exempt_line
from quant.scale import Quantizer, first_input_scale
from quant.spec import FP8_TENSOR, Scheme, get_scheme

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Modules of torch whose matrices stay unquantized without being named in exempt_more.
_PLAIN = (nn.Linear, StackedLinear, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.modules.conv._ConvNd)


def prepare(
    model: nn.Module,
    scheme: Scheme | str,
    *,
    rules: Sequence[Rule] = (),
    exempt: Sequence[str] = DEFAULT_EXEMPT,
    exempt_more: Sequence[str] = (),
    learn_weight_scale: bool = False,
    learn_input_scale: bool = False,
    ranges: Ranges = Ranges(),  # noqa: B008 (frozen)
    fp8_gemm: bool = False,
    calibrate: Callable[[Any], object] | None = None,
) -> Any:
    """Quantize the Linears of ``model`` in place, with scales measured from their weights, and return the model.

    The weights stay the same Parameters. Learned scales are new Parameters (``weight_theta``, ``input_theta``): create
    the optimizer afterwards. Rank 0 prints which modules stay unquantized. If an error is raised, the model is
    unchanged. The second forward with gradients raises ValueError if these forwards called only some quantized layers.

    Args:
        model: any module with its weights, whole on this rank; before DistributedDataParallel wraps it.
        scheme: scheme of the Linears, or its name: a preset without a KV cache format.
        rules, exempt: as in :func:`quant.rules.assign`; the output head and routers are always exempt.
        exempt_more: regexes on full names of further modules to leave unquantized.
        learn_weight_scale, learn_input_scale: learn the scales of weights, and the stored scales of inputs.
        ranges: method to measure scales.
        fp8_gemm: multiply codes in the fp8 GEMM where the scheme and the GPU allow it.
        calibrate: function that runs the model, its argument, on a few batches; called once without gradients. Needed
            if the scheme stores scales of inputs; unused otherwise.

    Raises:
        ValueError: as :func:`quant.quantization.replace_layers`; or the scheme is unknown, ``calibrate`` is missing,
            the model is quantized, composite, not whole on this rank, of another dtype than fp32, bf16 and fp16, has
            adapters of peft or matrices that no nn.Linear holds (stacked experts), a weight has NaN or Inf, or an input
            is not reached by ``calibrate``, all 0 or not finite.
    """
    scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    _check(model)
    stored = [one.name for one in (scheme, *(rule.scheme for rule in rules)) if one is not None and one.stored_input]
    if stored and calibrate is None:
        raise ValueError(
            f"scheme {stored[0]!r} stores scales of inputs: pass calibrate=, a function that runs the model on a few "
            "batches, such as lambda model: model(ids); or choose a scheme with dynamic scales, such as fp8_dynamic"
        )
    before = dict(model.named_modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    routers = [name for module in before.values() for name in getattr(module, "routers", ()) if name in before]
    own = [rf"{re.escape(name)}(\..+)?" for name in routers]
    own += [re.escape(name) for name, module in before.items() if module is head]
    quantization = replace_layers(
        model,
        scheme,
        rules=rules,
        exempt=[*exempt, *exempt_more, *own],
        learn_weight_scale=learn_weight_scale,
        learn_input_scale=learn_input_scale,
        ranges=ranges,
        fp8_gemm=fp8_gemm,
    )
    try:
        left = _left(model, quantization)
        _measure_weights(quantization)
        if quantization.input_groups and calibrate is not None:
            _measure_inputs(model, quantization, calibrate)
    except BaseException:
        for name in quantization.layers:
            model.set_submodule(name, before[name])
        raise
    called = _CalledLayers()
    called.handle = model.register_forward_hook(called)
    if not dist.is_initialized() or dist.get_rank() == 0:
        schemes = ", ".join(dict.fromkeys(layer.scheme.name for layer in quantization.layers.values()))
        print(f"quantized: {len(quantization.layers)} layers, {schemes}; unquantized: {left}", flush=True)
    return model


class _CalledLayers:
    """Forward hook that raises in the second forward of training if a quantized layer was not called until then: the
    model's code reads the layer's weight, and trains it unquantized. Recomputed layers are called in backward."""

    handle: Any = None
    forwards = 0

    def __call__(self, model: nn.Module, *_: Any) -> None:
        self.forwards += torch.is_grad_enabled()
        if self.forwards == 2:
            self.handle.remove()
            find_quantization(model)


def _check(model: nn.Module) -> None:
    """Reject models that cannot be quantized outside of the project's loop."""
    if not isinstance(model, nn.Module):
        found = f"{model!r:.80}, expected an nn.Module: load it, as with AutoModelForCausalLM.from_pretrained"
        raise ValueError(f"model: found {found}")
    if any(isinstance(module, QuantLayer) for module in model.modules()):
        raise ValueError("the model has quantized layers: call prepare once, on a model of plain layers")
    if isinstance(model, nn.Linear):
        raise ValueError("the model is a single nn.Linear, which cannot be replaced in place: pass its parent")
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config") and config.get_text_config() is not config:
        raise ValueError(
            f"{type(model).__name__} has towers beside its text model: train it with launch/train.py, which quantizes "
            "the text model and copies the rest"
        )
    if adapted := [name for name, module in model.named_modules() if hasattr(module, "base_layer")]:
        raise ValueError(
            f"{examples(adapted)}: layers with adapters of peft: merge them (merge_and_unload), or use adapter.kind in "
            "a recipe of launch/train.py"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            found = "partitioned by ZeRO-3: use launch/train.py, or quantize before deepspeed partitions the model"
        elif parameter.is_meta:
            found = "on the meta device, without values: load the weights first"
        elif type(parameter) is not nn.Parameter:
            found = f"a {type(parameter).__name__}: quantize before the model is sharded, and from plain weights"
        else:
            continue
        raise ValueError(f"{name} is {found}")
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    for name, linear in linears:
        if linear.weight.dtype not in _DTYPES:
            raise ValueError(f"{name}.weight is {linear.weight.dtype}, expected float32, bfloat16 or float16")


def _left(model: nn.Module, quantization: Quantization) -> str:
    """Count the modules with unquantized weights by class. Raises ValueError for matrices that no pattern exempts, at
    least as large as the smallest quantized layer, in modules other than linears, embeddings and convolutions."""
    names: dict[str, list[str]] = {}
    unknown: dict[str, nn.Module] = {}
    smallest = min(layer.weight.numel() for layer in quantization.layers.values())
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        if isinstance(module, QuantLayer) or not own:
            continue
        names.setdefault(type(module).__name__, []).append(name)
        if isinstance(module, _PLAIN) or name in quantization.exempt or hasattr(module, "routers"):
            continue  # also the biases of arranged experts
        # Smaller ones are no layers: norms of several heads, decays, position tables.
        if sum(p.numel() for p in own if p.dim() > 1) >= smallest:
            unknown[name] = module
    if unknown:
        count = sum(p.numel() for module in unknown.values() for p in module.parameters(recurse=False))
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(type(one).__name__ for one in unknown.values()).items())
        where = [name or "the model itself" for name in unknown]
        line = exempt_line(unknown).removeprefix("quant.").replace(": ", "=", 1)
        raise ValueError(
            f"{kinds} would stay unquantized, with {count:,} weights that no nn.Linear holds: {examples(where)}. "
            "For experts call arrange_experts(model, 'stacked') of model.moe.arrange first; to leave them as they are, "
            f"pass {line}"
        )
    return ", ".join(f"{len(some)} {kind} ({examples(some, 1)})" for kind, some in names.items()) or "none"


@torch.no_grad()
def _measure_weights(quantization: Quantization) -> None:
    layers, bad = quantization.layers, list[str]()
    for group in quantization.weight_groups:
        weights = [layers[name].weight for name in group.members]
        scales, zero = measured_scales(weights, group.spec, quantization.ranges)
        group.s0.copy_(scales)
        if group.zero is not None and zero is not None:
            group.zero.copy_(zero)
        bad += [] if bool(scales.isfinite().all()) else [group.owner]
    for group in quantization.global_groups:
        weights = [layers[name].weight for name in group.members]
        absmax = [partial_stats(one.reshape(-1), 0, tuple(one.shape), FP8_TENSOR).amax(0) for one in weights]
        group.s0.copy_(global_scale(torch.stack(absmax).amax(0), group.spec))
    if bad:
        raise ValueError(f"weights with NaN or Inf cannot be quantized: {examples(bad)}; load other weights")


@torch.no_grad()
def _measure_inputs(model: nn.Module, quantization: Quantization, calibrate: Callable[[Any], object]) -> None:
    quantization.set_fake_quant(weights=False, activations=False)
    quantization.observe(True)
    calibrate(model)
    quantization.observe(False)
    quantization.set_fake_quant(weights=True, activations=True)
    bad = []
    for group in quantization.input_groups:
        seen, ranges = group.observer, quantization.ranges
        assert seen is not None
        if not 0 < float(seen.absmax) < torch.inf:
            bad.append(f"{group.owner} (largest magnitude {float(seen.absmax):g})")
        elif seen.histogram is None:
            group.s0.copy_(first_input_scale(seen.absmax.reshape(1), group.spec, ranges.headroom))
        else:
            group.s0.copy_(scale_from_histogram(seen.histogram, ranges, group.spec))
    if bad:
        raise ValueError(
            f"inputs that calibrate did not reach, or that are all 0, NaN or Inf: {examples(bad)}; run more batches in "
            "it, or exempt these layers"
        )


def find_quantization(model: nn.Module) -> Quantization:
    """Collect the quantized layers of a prepared or converted model, or of a copy of such a model. With the result,
    callers switch fake quantization or export the layers; it has no scale groups.

    Raises:
        ValueError: the model has no quantized layer, or its training forwards called only some of them.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no quantized layer: call prepare first")
    unused = [name for name, layer in layers.items() if not layer.trained]
    if 0 < len(unused) < len(layers):
        raise ValueError(
            f"{examples(unused)}: the model's forward did not call them in training, so that their weights trained "
            f"unquantized: prepare the model with exempt_more for them, and train again"
        )
    for layer in layers.values():
        if layer.held is not None:
            layer.weight.held = layer.held  # type: ignore[attr-defined]  # a copy of a Parameter lacks attributes
    return Quantization(layers, [])


@torch.no_grad()
def convert(model: Any) -> Any:
    """Replace the weights of all quantized layers by their packed codes, in place, and return the model.

    The forward computes with the codes' values, the same bits as before. Codes and scales no longer train. Cast the
    model before, not after: the packed weights have the model's dtype, but contain codes.

    Raises:
        ValueError: as :func:`find_quantization`; a weight or scale is not finite; or the codes of a row do not fill
            whole elements of the model's dtype. The model is unchanged after an error.
    """
    layers = {name: layer for name, layer in find_quantization(model).layers.items() if layer.held is None}
    bad = [name for name, one in layers.items() if not all(p.isfinite().all() for p in one.parameters(recurse=False))]
    if bad:
        raise ValueError(f"{examples(bad)}: weights or scales with NaN or Inf have no codes: load an earlier state")
    packings = {name: PackedCodes(layer.scheme.weights, layer.weight_shape) for name, layer in layers.items()}
    shapes = {name: held.packed_shape(layers[name].weight.dtype) for name, held in packings.items()}
    for name, layer in layers.items():
        quantizer = Quantizer(layer.scale_of_weight, layer.scheme.weights, layer.weight.dtype)
        held, shape = packings[name], shapes[name]
        codes, _ = kernels.quantize(layer.weight, quantizer)
        packed = held.pack(codes.view(-1, layer.in_features)).contiguous().view(-1).view(quantizer.dtype).view(shape)
        layer.weight, layer.held = nn.Parameter(packed, requires_grad=False), held
        for theta in (layer.weight_theta, layer.input_theta):
            if theta is not None:
                theta.requires_grad_(False)
    find_quantization(model)
    return model
