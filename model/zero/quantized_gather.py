"""Quantized all-gather (``quant.quantized_all_gather``): gather weights as codes, one byte per weight instead of two.

Forward and backward of a quantized layer use its weight only through the quantizer. All ranks have the few scales, so
the rank with a slice of a weight quantizes it before sending. The layer finds the codes in place of its weight
(:func:`quant.packed_weight.placeholder`) and does not quantize; the fp8 GEMM takes the codes directly. Without the
weight, the layer cannot compute the weight's gradient mask, or the gradient of theta (a learned scale's parameter),
which depend on the rounding error. So at first the weight gets the gradient with respect to the quantized weight, and
theta gets zeros. After the reduction each rank applies the quantizer's rule to its slice, and computes theta's
gradient, which is added to the zeros (or to the gradients of layers that share this theta and whose weights are
gathered whole). This is exact: the quantizer works per element, and neither the mask nor the sum for theta changes
while ranks and micro-batches add up gradients.

Compared with gathering the weights, the forward, the gradients of inputs and the gradients of weights have the same
bits. The gradient of a learned scale sums the same terms in another order and in fp32, while without this feature each
micro-batch and rank rounds its own sum to the model's dtype.

The rest of the project has two general hooks that only this feature uses: ``Session.after_backward``, which runs
between the last backward and the update, and ``QuantLayer.when_changed``, called when weights, scales or switches have
changed. Only :func:`model.zero.gather.gather_as_bytes` replaces a function of DeepSpeed for it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import Parameter

from model.ranks import errors_on_all_ranks, say
from model.zero import is_partitioned, local_data, local_gradient, local_range, set_local_gradient, whole_values
from model.zero.gather import ByteForm, gather_as_bytes, release_decoded
from quant import QuantEmbedding, Quantization, QuantLayer, QuantLinear, kernels
from quant.observers import by_run
from quant.packed_weight import placeholder
from quant.scale import Quantizer, Scale, lsq_factor
from quant.spec import FP8_TENSOR

NONE_GATHERED_QUANTIZED = (
    "quant.quantized_all_gather: true, expected false: no layer has all of these: a weight in bfloat16 or float32 that "
    "is larger than stage3_param_persistence_threshold and trains if its scale does, and one scale per tensor or row "
    "without zero points"
)


@dataclass(frozen=True)
class _WeightAndScales:
    """Weight and scales of a layer. They are stored here because inside a forward, looking up a Parameter of a module
    that is not running makes DeepSpeed gather it."""

    layer: QuantLinear
    weight: Parameter
    s0: Parameter
    theta: Parameter | None

    @property
    def numel(self) -> int:
        return math.prod(self.layer.weight_shape)


def gather_quantized(model: nn.Module, quantization: Quantization) -> Callable[[], None]:
    """Make stage 3 gather codes in place of the weights of every supported layer, after ``deepspeed.initialize``; a
    collective. Returns a function to call after the last backward of every optimizer step, before the update. Raises
    RankError on every rank if there is no supported layer, or hpZ is on."""
    with errors_on_all_ranks(ValueError):
        return QuantizedGather(model, quantization.layers.values()).finish_gradients


class QuantizedGather:
    """Weights of a stage 3 model that are gathered as codes."""

    def __init__(self, model: nn.Module, layers: Iterable[QuantLayer]) -> None:
        """Make the weights of supported ``layers`` (:func:`can_gather_quantized`) be gathered as codes, except small
        weights that stay gathered, and weights of embeddings. Raises ValueError if no layer is left, or if hpZ is on
        (:func:`gather_as_bytes`)."""
        layers = list(layers)
        tables = {id(layer.weight) for layer in layers if isinstance(layer, QuantEmbedding)}
        self._weights = {
            id(layer.weight): _WeightAndScales(layer, layer.weight, layer.weight_s0, layer.weight_theta)
            for layer in layers
            if can_gather_quantized(layer) and id(layer.weight) not in tables
            if is_partitioned(layer.weight) and not layer.weight.ds_persist  # type: ignore[attr-defined]
        }
        if not self._weights:
            raise ValueError(NONE_GATHERED_QUANTIZED)
        gather_as_bytes(model, self._form_of)
        self._scales: dict[int, Quantizer] | None = None
        self._scale_memory: Tensor | None = None
        for one in self._weights.values():
            one.layer.when_changed = self._invalidate
        say(f"gathered as codes: the weights of {len(self._weights)} layers")

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Apply the quantizers' rules to the reduced gradients, in place, after the last backward of an optimizer step
        and before the update; a collective."""
        thetas: dict[int, tuple[Parameter, Tensor]] = {}
        for key, one in self._weights.items():
            gradient = local_gradient(one.weight)
            if gradient is None or not one.layer.weight_fake_quant:
                continue
            share = part_gradients_(
                gradient,
                local_data(one.weight).to(gradient.device),
                local_range(one.weight)[0],
                one.numel,
                self._quantizers()[key],
                factor=lsq_factor(one.layer.weight_numel, one.layer.scheme.weights),
            )
            set_local_gradient(one.weight, gradient)
            if one.theta is not None and one.theta.requires_grad and share is not None:
                _, sum_so_far = thetas.get(id(one.theta), (None, torch.zeros_like(share)))  # layers may share one
                thetas[id(one.theta)] = (one.theta, sum_so_far + share)
        if not thetas:
            return
        whole = torch.cat([share for _, share in thetas.values()])
        dist.all_reduce(whole)
        places = whole.split([share.numel() for _, share in thetas.values()])
        for (theta, _), gradient in zip(thetas.values(), places, strict=True):
            # Zeros, unless layers whose weights are gathered whole share this theta: small or frozen weights.
            others = local_gradient(theta)
            assert others is not None, "theta trains"
            set_local_gradient(theta, others + gradient[slice(*local_range(theta))].to(others))

    def _form_of(self, parameter: Parameter) -> ByteForm | None:
        one = self._weights.get(id(parameter))
        if one is None or not one.layer.weight_fake_quant:
            return None
        scale = self._quantizers()[id(parameter)]
        start, numel = local_range(parameter)[0], one.numel
        return ByteForm(
            encode=lambda flat: quantize_part(flat, start, numel, scale),
            decode=lambda parts: placeholder(parts, one.layer.weight_shape, parameter.dtype),
        )

    def _quantizers(self) -> dict[int, Quantizer]:
        """Return the quantizer of each weight, with whole scales, by the Parameter's id. After a change, the first call
        runs a collective."""
        if self._scales is None:
            # The optimizer wrote the scales on another stream than the gather's.
            get_accelerator().synchronize()
            weights = self._weights.values()
            parameters = {id(one.s0): one.s0 for one in weights}
            parameters |= {id(one.theta): one.theta for one in weights if one.theta is not None}
            values = dict(zip(parameters, whole_values(list(parameters.values())), strict=True))
            get_accelerator().synchronize()
            self._scales = {
                key: Quantizer(
                    Scale(values[id(one.s0)], values.get(id(one.theta))), one.layer.scheme.weights, one.weight.dtype
                )
                for key, one in self._weights.items()
            }
            self._effective_scales()
        return self._scales

    def _effective_scales(self) -> None:
        """Compute the effective scales of all layers with an fp8 GEMM in one launch instead of one per layer.

        The scales keep the same memory from step to step. It is filled on the gather's stream and read on another: if
        it were freed after a step, the gather's stream could overwrite it before the other stream has read it.
        """
        assert self._scales is not None
        layers = [(one.layer, self._scales[key].scale) for key, one in self._weights.items() if one.layer.fp8_gemm]
        if not layers:
            return
        s0 = [scale.s0 for _, scale in layers]
        theta = [torch.zeros_like(scale.s0) if scale.theta is None else scale.theta for _, scale in layers]
        formed = kernels.effective_scale(Quantizer(Scale(torch.cat(s0), torch.cat(theta)), FP8_TENSOR, torch.float32))
        sizes = [len(one) for one in s0]
        whole = [-(-size // 4) * 4 for size in sizes]  # 16-byte aligned, for GEMMs on CUDA
        if self._scale_memory is None:
            self._scale_memory = formed.new_empty(sum(whole))
        places = [place[:size] for place, size in zip(self._scale_memory.split(whole), sizes, strict=True)]
        torch._foreach_copy_(places, list(formed.split(sizes)))
        get_accelerator().synchronize()
        for (layer, _), place in zip(layers, places, strict=True):
            layer.known_weight_scale = place

    def _invalidate(self) -> None:
        """Drop everything that was derived from weights, scales or switches, after one of them changed."""
        if self._scales is None:
            return  # every layer reports the same change
        self._scales = None
        for one in self._weights.values():
            one.layer.known_weight_scale = None
        release_decoded(one.weight for one in self._weights.values())


def can_gather_quantized(layer: QuantLayer) -> TypeGuard[QuantLinear]:
    """Return True if the weight of a layer can be gathered as codes. The layer must be a plain :class:`QuantLinear`, as
    others compute their weight's gradient differently; with one scale per tensor or channel, as those of groups and
    blocks are too many to keep whole on every rank; and without zero points. A weight with a learned scale must be
    trained: a frozen one has no reduced gradient from which the scale's could be computed. The dtype must be bf16 or
    fp32: in fp16 the product of a small code and its scale may round to a number with another code."""
    weights, theta = layer.scheme.weights, layer.weight_theta
    return (
        type(layer) is QuantLinear
        and weights.granularity in ("tensor", "channel")
        and weights.symmetric
        and layer.weight.dtype in (torch.bfloat16, torch.float32)
        and (layer.weight.requires_grad or theta is None or not theta.requires_grad)
    )


def quantize_part(flat: Tensor, start: int, numel: int, quantizer: Quantizer) -> Tensor:
    """Quantize a slice of a weight to bytes of codes (``float8_e4m3fn`` or ``int8``) as uint8, one per element.

    Args:
        flat: elements ``[start, start + len(flat))`` of the weight, 1-D, in its dtype.
        start: first element of the slice in the row-major weight.
        numel: number of elements of the whole weight.
        quantizer: quantizer of the whole weight; all of its scales belong to equally many consecutive elements.
    """
    codes = flat.new_empty(flat.numel(), dtype=torch.uint8)
    for runs, rows, out in _runs(flat, codes, start, numel, quantizer):
        out.copy_(kernels.quantize(rows, _of(quantizer, runs))[0].view(torch.uint8))
    return codes


def part_gradients_(
    grad: Tensor, flat: Tensor, start: int, numel: int, quantizer: Quantizer, *, factor: float
) -> Tensor | None:
    """Convert the gradient with respect to a slice of a quantized weight into the gradients of the unquantized slice
    (in place) and of the weight's theta (returned).

    Args:
        grad: gradient with respect to the quantized elements, fp32, 1-D. Overwritten by the weight's gradient, with NaN
            where the weight is not finite: codes cannot express it, and the step must be detected as failed.
        flat, start, numel, quantizer: slice of the weight, index of its first element, number of elements of the whole
            weight, and the whole weight's quantizer.
        factor: multiplier of theta's gradient: :func:`quant.scale.lsq_factor` of the number of elements that share a
            scale.

    Returns:
        The slice's share of theta's gradient, fp32, 1-D, one per scale; None if there is no theta.
    """
    theta = quantizer.scale.theta
    shares = None if theta is None else torch.zeros(theta.numel(), device=grad.device)
    for runs, rows, grads in _runs(flat, grad, start, numel, quantizer):
        # The operator takes both in one dtype, and returns theta's gradient in theta's dtype.
        operands, wanted = (grads, rows.float(), _of(quantizer, runs)), shares is not None
        share = kernels.fake_quantize_backward_(*operands, factor=factor, theta_gradient=wanted, of_weight=True)
        if shares is not None:
            grads.masked_fill_(~rows.isfinite(), torch.nan)  # the operator shows them in the share, which may be unused
            assert share is not None
            shares[runs] = share.flatten()
    return shares


def _runs(
    flat: Tensor, other: Tensor, start: int, numel: int, quantizer: Quantizer
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Split two flat tensors, of the same range of a weight, into runs of elements with one scale: yield a slice of
    scale indices, one per run, and both views ``[runs, elements of a run]``."""
    size = numel // quantizer.scale.s0.numel()
    for (runs, rows), (_, others) in zip(by_run(flat, start, size), by_run(other, start, size), strict=True):
        yield runs, rows, others


def _of(quantizer: Quantizer, runs: slice) -> Quantizer:
    """Select the scales of these runs; theta is converted to fp32 so that partial gradients are not rounded."""
    s0, theta, *_ = quantizer.scale
    part = Scale(s0.flatten()[runs], None if theta is None else theta.flatten()[runs].float())
    return quantizer._replace(scale=part)
