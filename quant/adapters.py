"""Adapters: trained Parameters that change a frozen weight, or add to the output of its layer.

Low-rank adapters (LoRA, Hu et al. 2021). An :class:`Adapter` is merged into a layer's weight: every forward quantizes
``weight + scaling * lora_b @ lora_a``. As the sum is quantized, the codes of the last forward are the codes of an
export, and serving needs no adapter. Only :func:`merge` computes the sum: forward, backward, kept codes, scale
measurement and export call it and get the same bits. An :class:`AdapterBeside` leaves the weight unchanged and adds to
the layer's output, so that many adapters can be served on one quantized model.

Decoupled scales. With a :class:`DecoupledScale` a weight's codes are chosen with another scale than the one that is
stored::

    code = round(w * exp(code_theta) / s)     w_hat = code * s

The stored scale ``s`` alone is exported, so readers see an ordinary quantized weight. The gradients are those of the
quantizer (``quant/reference.py``) at the weight ``w * exp(code_theta)``; the gradient of an element of code_theta is
that weight's gradient times that weight, summed over the weights that share the element. AngelSlim calls this method
FOCUS. As in :func:`merge` the factor is computed in fp64, so that a GPU, another machine and any slice of the weight
get the same bits, and the product is rounded to the weight's dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import gemm, kernels
from quant.spec import TensorSpec, per_block, per_run

# Elements of a weight merged at a time: on a CPU few enough for its caches; on a GPU their fp64 copies take 64 MB.
CPU_ELEMENTS, GPU_ELEMENTS = 2**18, 2**22


@torch.no_grad()
def merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """Compute ``weight + scaling * lora_b @ lora_a`` in fp64, rounded once to the weight's dtype.

    In fp64 the summation order of a GEMM does not change the rounded result: a GPU, another machine and any slice of
    the rows get the same bits. The sum is rounded to the weight's dtype: all readers of a weight expect that dtype, and
    a weight that trains without an adapter is also rounded to it before quantization. No update is lost by the
    rounding, as the optimizer accumulates in fp32 copies of the adapter.

    Args:
        weight: ``[out, in]``, or some of its rows; or a stack ``[E, out, in]`` with an adapter per expert.
        lora_a: ``[rank, in]``, for a stack ``[E, rank, in]``.
        lora_b: ``[out, rank]``, or the rows that match ``weight``; for a stack ``[E, out, rank]``.
        scaling: factor of the adapter, such as ``alpha / rank``.

    Returns:
        A new tensor like ``weight``, without a gradient.
    """
    merged = torch.empty_like(weight, memory_format=torch.contiguous_format)
    parts = (
        zip(merged, weight, lora_a, lora_b, strict=True) if weight.dim() == 3 else [(merged, weight, lora_a, lora_b)]
    )
    for into, one, a, b in parts:
        a, b = a.double(), b.double() * scaling
        rows = max(1, (CPU_ELEMENTS if weight.device.type == "cpu" else GPU_ELEMENTS) // max(1, weight.shape[-1]))
        for out, old, up in zip(into.split(rows), one.split(rows), b.split(rows), strict=True):
            out.copy_(torch.addmm(old.double(), up, a))
            # -0 plus a product of 0 is 0, which has another code in floating-point formats.
            out.copy_(torch.where(out == 0, torch.copysign(out, old), out))
    return merged


class Adapter:
    """Adapter of one layer, merged into its weight.

    Attributes:
        parameters: names of the Parameters that the layer registers.
        merges: True if the adapter is part of the quantized weight.
        lora_a: ``[rank, in]``, or ``[E, rank, in]`` for a stack, in the weight's dtype.
        lora_b: ``[out, rank]`` or ``[E, out, rank]``, in the weight's dtype; starts as zeros, so that at step 0 the
            model computes the same as without the adapter.
        scaling: factor of ``lora_b @ lora_a``.
    """

    parameters = ("lora_a", "lora_b")
    merges = True

    def __init__(self, lora_a: nn.Parameter, lora_b: nn.Parameter, scaling: float) -> None:
        self.lora_a, self.lora_b, self.scaling = lora_a, lora_b, scaling

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight + scaling * lora_b @ lora_a`` in the weight's dtype. Parameters must be gathered."""
        return merge(weight, self.lora_a, self.lora_b, self.scaling)


class AdapterBeside(Adapter):
    """Adapter of one Linear that leaves its weight unchanged: adds ``lora_b @ (lora_a @ x) * scaling`` to the output.

    The adapter reads the unquantized input and computes in peft's order of operations, so that its output has the same
    bits as that of peft in the same dtype.

    Attributes:
        dropout: probability to zero an element of the input of ``lora_a`` in training; the remaining elements are
            divided by ``1 - dropout``. The random numbers come from torch's generator. Activation checkpointing
            restores its state before recomputing a layer.
    """

    merges = False

    def __init__(self, lora_a: nn.Parameter, lora_b: nn.Parameter, scaling: float, dropout: float = 0.0) -> None:
        super().__init__(lora_a, lora_b, scaling)
        self.dropout = dropout

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight unchanged, without a gradient."""
        return weight.detach()

    def added(self, x: Tensor, training: bool) -> Tensor:
        """Compute the adapter's output ``[..., out]`` for the layer's input ``x [..., in]``. Dropout is applied if
        ``training``. Stacks of experts are not supported."""
        if training and self.dropout:
            x = F.dropout(x, self.dropout)
        return F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scaling


@contextmanager
def without_adapters(quantization: Any) -> Iterator[None]:
    """Make the layers of a :class:`quant.Quantization` compute without their adapters inside the block. If adapters are
    merged, fake quant of weights must be off in the block, as kept codes contain the adapters. Do not run forwards with
    gradients in the block: under ZeRO-3 the adapters would get their last gradients again."""
    kept = [(layer, layer.adapter) for layer in quantization.layers.values() if layer.adapter is not None]
    for layer, _ in kept:
        layer.adapter = None
    try:
        yield
    finally:
        for layer, adapter in kept:
            layer.adapter = adapter


def low_rank_gradients(
    grad: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``lora_a`` and ``lora_b``, in this order, in their shapes, for a merged weight that is
    not quantized; the gradient of the weight itself is not computed. ``grad [rows, out]`` is the gradient of the
    layer's output, ``x [rows, in]`` the input of its GEMM. The adapter is given as in :func:`merge`, ``offsets`` as in
    :mod:`quant.gemm`."""
    # The GEMMs take the second operand in the layout of a Linear: [out, in].
    up = gemm.linear(x, lora_a, None, offsets)  # [rows, rank]
    down = gemm.input_gradient(grad, lora_b, offsets)  # [rows, rank]
    of_a, of_b = gemm.weight_gradient(down, x, offsets), gemm.weight_gradient(grad, up, offsets)
    return of_a.mul_(scaling), of_b.mul_(scaling)


class DecoupledScale:
    """Factors that multiply one layer's weight before its codes are chosen; used like an :class:`Adapter`.

    Attributes:
        parameters: names of the Parameters that the layer registers.
        merges: True, as the factors are part of the weight that is quantized.
        code_theta: logarithm of the factors, in the shape of the weight's scale and the weight's dtype; starts at 0.
        spec: number format of the weight.
    """

    parameters = ("code_theta",)
    merges = True

    def __init__(self, code_theta: nn.Parameter, spec: TensorSpec) -> None:
        self.code_theta, self.spec = code_theta, spec

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight * exp(code_theta)`` in the weight's dtype. Parameters must be gathered."""
        return weight_for_codes(weight, self.code_theta, self.spec)


@torch.no_grad()
def weight_for_codes(weight: Tensor, code_theta: Tensor, spec: TensorSpec) -> Tensor:
    """Compute ``weight * exp(code_theta)``, rounded once to the weight's dtype: a new tensor without a gradient. The
    weight is ``[out, in]``, or a stack ``[E, out, in]``; ``code_theta`` has the shape of the weight's scale."""
    return kernels.multiply_runs(weight, per_run(code_theta, weight.shape, spec))


@torch.no_grad()
def part_for_codes(
    part: Tensor, start: int, weight_shape: tuple[int, ...], code_theta: Tensor, spec: TensorSpec
) -> Tensor:
    """Compute the elements ``[start, start + len(part))`` of the flattened result of :func:`weight_for_codes`, with the
    same bits, from ``part``: these elements of the flattened weight. ``weight_shape`` is the whole weight's shape."""
    theta = per_run(code_theta, weight_shape, spec).to(part.device).flatten()
    factors = kernels.multiply_runs(torch.ones_like(theta, dtype=torch.float32), theta)
    places = torch.arange(start, start + part.numel(), device=part.device) // spec.run_length(weight_shape)
    return (part * factors[places]).to(part.dtype)


def code_theta_gradient(grad: Tensor, weight: Tensor, code_theta: Tensor, spec: TensorSpec, factor: float) -> Tensor:
    """Compute the gradient of code_theta, times ``factor`` (LSQ's gradient scale, as for theta), in the shape and dtype
    of code_theta. ``weight`` is the result of :func:`weight_for_codes`, ``grad`` the gradient of that result."""
    if spec.granularity != "block":
        return kernels.sum_products(grad, weight, code_theta, factor)
    sums = kernels.sum_products(grad, weight, per_run(code_theta.float(), weight.shape, spec), factor)
    return per_block(sums, weight.shape, spec).sum(-2).to(code_theta.dtype)
