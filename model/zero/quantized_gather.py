"""Quantized weights travel as their codes (``quant.quantized_all_gather``): one byte per weight instead of two, and the
same training.

Forward and backward of a quantized layer use its weight only through the quantizer. Where every rank knows the scales,
which are few, the rank that holds a part of a weight can quantize it before it is sent; a layer then finds the codes
in place of its weight (:func:`quant.packed_weight.placeholder`), and quantizes nothing: the fp8 GEMM takes them as they
are. What the layer cannot know any more is the weight's distance from its code, on which its gradient's mask and
theta's gradient depend. So the weight gets the gradient with respect to the quantized weight, theta gets zeros, and
after the reduction the rank that holds the part applies the quantizer's rule to it, and makes theta's gradient, which
takes the place of the layer's (``parts.py``).

Against gathering the weights themselves: forward, the gradients of inputs and of weights are the same bit for bit. The
gradient of a learned scale is the sum of the same terms in another order, in fp32, where each micro-batch and rank
would have rounded its own to the model's dtype.

The rest of the project knows none of this. It offers, in general terms, ``Session.after_backward``, which runs between
the last backward and the update; ``QuantLayer.when_changed``, which is called when weights, scales or switches have
changed; and in the memory planner ``Inventory.gatherer`` and ``Inventory.beside``. All of them work without this
feature, and have no other user today.
To delete the feature:

* delete this folder, ``model/zero/as_bytes.py`` and ``engine/memory/coded.py``, the tests in
  ``tests/unit/model/coded/`` and ``tests/distributed/engine/test_gather.py``, and what other tests and ``docs/``
  say of ``quantized_all_gather``;
* ``quant``: the two functions of stand-ins in ``held.py``, and what ``function.py`` does where there is one;
* ``engine/recipe``: the field ``quantized_all_gather`` in ``quant.py``, and ``_gather_problems`` in ``ds_config.py``;
* ``engine/session/session.py``: the import and the construction;
* ``engine/memory``: what ``plan.py`` does with ``QuantizedGather``, and the item "scales of codes" in
  ``zero_states.py``;
* ``model/zero/gather.py``: the import from ``as_bytes.py``, the call of ``release_decoded``, and in place of
  ``gather_as_they_are(small)`` DeepSpeed's own ``small[0].all_gather_coalesced(small)``.

Chooses the weights that travel as codes, encodes them, and completes their gradients after the reduction.

What a rank that holds some consecutive elements of a weight computes without the others.

The quantizer works on single elements. So codes can be made before a partition is sent, a byte each; and of the
gradient with respect to the quantized weight, both what the quantizer lets through (a mask) and what a learned scale
gets (a sum over elements) can be taken after the reduction: neither changes while the gradients of ranks and
micro-batches are added up.
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
from model.zero.as_bytes import ByteForm, gather_as_bytes, release_decoded
from quant import Quantization, QuantLayer, QuantLinear, kernels
from quant.observers import by_run
from quant.packed_weight import placeholder
from quant.scale import Quantizer, Scale, lsq_factor
from quant.spec import FP8_TENSOR

__all__ = ["NONE_GATHERED_QUANTIZED", "can_gather_quantized", "gather_quantized"]


NONE_GATHERED_QUANTIZED = (
    "quant.quantized_all_gather: true, expected false: no layer has a weight in bfloat16 or float32, larger than "
    "stage3_param_persistence_threshold, with one scale per tensor or row and no zero point, that trains if its scale "
    "does"
)


@dataclass(frozen=True)
class _Coded:
    """A weight and its scales, which are kept here because looking a Parameter up in a module that is not running makes
    DeepSpeed gather it, inside a forward."""

    layer: QuantLinear
    weight: Parameter
    s0: Parameter
    theta: Parameter | None

    @property
    def numel(self) -> int:
        return math.prod(self.layer.weight_shape)


def gather_quantized(model: nn.Module, quantization: Quantization) -> Callable[[], None]:
    """Have stage 3 gather codes in place of the weights of every layer for which that is possible; a collective.

    Args:
        model: after ``deepspeed.initialize``.
        quantization: what ``quant.prepare`` returned for it.

    Returns:
        What must run after the last backward of every optimizer step, before the update.

    Raises:
        RankError: on every rank: there is no such layer, or DeepSpeed is configured to change what is gathered.
    """
    with errors_on_all_ranks(ValueError):
        coded = QuantizedGather(model, quantization.layers.values())
    say(f"gathered as codes: the weights of {len(coded)} layers")
    return coded.finish_gradients


class QuantizedGather:
    """The weights of a model under stage 3 that are gathered as codes."""

    def __init__(self, model: nn.Module, layers: Iterable[QuantLayer]) -> None:
        """Take over the gathering of the weights of those layers for which that is possible (see
        :func:`can_gather_quantized`).

        Args:
            model: after ``deepspeed.initialize``.
            layers: its quantized layers. Weights that stay gathered need not travel, and are left out.

        Raises:
            ValueError: there is no such layer, or DeepSpeed is configured to change what is gathered.
        """
        self._weights = {
            id(layer.weight): _Coded(layer, layer.weight, layer.weight_s0, layer.weight_theta)
            for layer in layers
            if can_gather_quantized(layer) and is_partitioned(layer.weight) and not layer.weight.ds_persist  # type: ignore[attr-defined]
        }
        if not self._weights:
            raise ValueError(NONE_GATHERED_QUANTIZED)
        gather_as_bytes(model, self._form_of)
        self._scales: dict[int, Quantizer] | None = None
        self._formed: Tensor | None = None
        for one in self._weights.values():
            one.layer.when_changed = self._changed

    def __len__(self) -> int:
        """How many weights travel as codes."""
        return len(self._weights)

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Apply the quantizers' rules to the reduced gradients; a collective where scales learn.

        To be called after the last backward of an optimizer step, before the update.
        """
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
                self._known()[key],
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
            set_local_gradient(theta, gradient[slice(*local_range(theta))])

    def _form_of(self, parameter: Parameter) -> ByteForm | None:
        one = self._weights.get(id(parameter))
        if one is None or not one.layer.weight_fake_quant:
            return None
        scale = self._known()[id(parameter)]
        start, numel = local_range(parameter)[0], one.numel
        return ByteForm(
            encode=lambda flat: quantize_part(flat, start, numel, scale),
            decode=lambda parts: placeholder(parts, one.layer.weight_shape, parameter.dtype),
        )

    def _known(self) -> dict[int, Quantizer]:
        """The whole scales by their weights' ids. After a change, the first gather that needs them is a collective."""
        if self._scales is None:
            # The optimizer wrote them on another stream than the one that gathers.
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
            self._form_scales()
        return self._scales

    def _form_scales(self) -> None:
        """The effective scales of all layers that multiply codes, in one launch; each layer would form its own.

        They stay in the same memory from step to step: it is filled on the stream that gathers, read on another, and
        would be free for the former as soon as it is dropped.
        """
        assert self._scales is not None
        layers = [(one.layer, self._scales[key].scale) for key, one in self._weights.items() if one.layer.fp8_gemm]
        if not layers:
            return
        s0 = [scale.s0 for _, scale in layers]
        theta = [torch.zeros_like(scale.s0) if scale.theta is None else scale.theta for _, scale in layers]
        formed = kernels.effective_scale(Quantizer(Scale(torch.cat(s0), torch.cat(theta)), FP8_TENSOR, torch.float32))
        sizes = [len(one) for one in s0]
        whole = [-(-size // 4) * 4 for size in sizes]  # each from an address that 16 divides, as GEMMs on CUDA like it
        if self._formed is None:
            self._formed = formed.new_empty(sum(whole))
        places = [place[:size] for place, size in zip(self._formed.split(whole), sizes, strict=True)]
        torch._foreach_copy_(places, list(formed.split(sizes)))
        get_accelerator().synchronize()
        for (layer, _), place in zip(layers, places, strict=True):
            layer.known_weight_scale = place

    def _changed(self) -> None:
        """Drop everything that was made of weights, scales or switches before they changed."""
        if self._scales is None:
            return  # all layers tell of one change
        self._scales = None
        for one in self._weights.values():
            one.layer.known_weight_scale = None
        release_decoded(one.weight for one in self._weights.values())


def can_gather_quantized(layer: QuantLayer) -> TypeGuard[QuantLinear]:
    """Whether the weight of a layer can travel as codes.

    Scales of groups and blocks are too many to be whole on every rank. A layer that computes in another way than
    :class:`QuantLinear` forms its weight's gradient in another way. A scale that learns beside a weight that does not
    has no reduced gradient to be computed from. In fp16 the product of a small code and its scale may not be a number
    that the same code belongs to.
    """
    weights, theta = layer.scheme.weights, layer.weight_theta
    return (
        type(layer) is QuantLinear
        and weights.granularity in ("tensor", "channel")
        and weights.symmetric
        and layer.weight.dtype in (torch.bfloat16, torch.float32)
        and (layer.weight.requires_grad or theta is None or not theta.requires_grad)
    )


def quantize_part(flat: Tensor, start: int, numel: int, quantizer: Quantizer) -> Tensor:
    """Quantize part of a weight.

    Args:
        flat: its elements ``[start, start + len(flat))``, 1-D, in the weight's dtype.
        start: where the part begins in the row-major weight.
        numel: how many elements the whole weight has.
        quantizer: of the whole weight; each of its scales belongs to as many consecutive elements as every other.

    Returns:
        uint8, as many as there are elements: the bytes of the codes (``float8_e4m3fn`` or ``int8``).
    """
    codes = flat.new_empty(flat.numel(), dtype=torch.uint8)
    for runs, rows, out in _runs(flat, codes, start, numel, quantizer):
        out.copy_(kernels.quantize(rows, _of(quantizer, runs))[0].view(torch.uint8))
    return codes


def part_gradients_(
    grad: Tensor, flat: Tensor, start: int, numel: int, quantizer: Quantizer, *, factor: float
) -> Tensor | None:
    """Turn the gradient of part of a quantized weight into those of the weight and of its theta.

    Args:
        grad: the gradient with respect to the quantized elements, fp32, 1-D. That of the weight takes its place, with
            NaN where the weight is not finite: no code says so, and the step must be seen to have gone wrong.
        flat, start, numel, quantizer: as in :func:`quantize_part`.
        factor: what theta's gradient is multiplied with, see :func:`quant.autograd.lsq_factor`.

    Returns:
        The part's share of theta's gradient, fp32, 1-D, one per scale; None if there is no theta.
    """
    theta = quantizer.scale.theta
    shares = None if theta is None else torch.zeros(theta.numel(), device=grad.device)
    for runs, rows, grads in _runs(flat, grad, start, numel, quantizer):
        # The operator takes both in one dtype; its theta's gradient is of theta's.
        operands, wanted = (grads, rows.float(), _of(quantizer, runs)), shares is not None
        share = kernels.fake_quantize_backward_(*operands, factor=factor, theta_gradient=wanted, of_weight=True)
        if shares is not None:
            grads.masked_fill_(rows.isnan(), torch.nan)  # the operator says it in the share, which may go nowhere
            assert share is not None
            shares[runs] = share.flatten()
    return shares


def _runs(
    flat: Tensor, other: Tensor, start: int, numel: int, quantizer: Quantizer
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """:func:`by_run` of two tensors that belong to the same elements, in runs of one scale."""
    size = numel // quantizer.scale.s0.numel()
    for (runs, rows), (_, others) in zip(by_run(flat, start, size), by_run(other, start, size), strict=True):
        yield runs, rows, others


def _of(quantizer: Quantizer, runs: slice) -> Quantizer:
    """The scales of these runs, theta in fp32, so that nothing of a share is rounded."""
    s0, theta, *_ = quantizer.scale
    part = Scale(s0.flatten()[runs], None if theta is None else theta.flatten()[runs].float())
    return quantizer._replace(scale=part)
