"""Low-rank adapters (LoRA, Hu et al. 2021): the weight is frozen, and the adapter trains.

An :class:`Adapter` is part of a layer's weight: every forward quantizes ``weight + scaling * lora_b @ lora_a``. As the
sum is what is quantized, the codes of the last forward are the codes of an export, and whoever serves the export needs
no adapter. :func:`merge` is the one definition of that sum. The forward, its backward, kept codes, the measurement of
scales and the export all call it, so that they see the same bits.

An :class:`AdapterBeside` leaves the weight as it is and adds to the layer's output, so that many of them are served on
one quantized model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quant import gemm
from quant.autograd import Arguments, Plan, QuantLinearFunction, Saved, apply_function, keep, product
from quant.inputs import used_input

# Elements of a weight that are added at a time: few on a CPU, so that they stay in its caches; on a GPU the fp64
# copies of them take 64 MB.
CPU_ELEMENTS, GPU_ELEMENTS = 2**18, 2**22


@torch.no_grad()
def merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """``weight + scaling * lora_b @ lora_a``, summed in fp64 and rounded once, to the weight's dtype.

    In fp64 the order in which a GEMM adds its products does not show after the rounding, so that the forward on a GPU,
    an export on another machine and any piece of the rows by itself give the same bits; a GEMM in the weight's dtype
    would depend on all of these. The sum is rounded to the weight's dtype because everything that reads a weight takes
    it so, and because a weight that trains without an adapter is rounded to it before it is quantized, too. Nothing is
    lost from step to step: what accumulates are the optimizer's fp32 copies of the adapter.

    Args:
        weight: ``[out, in]``, or some of its rows; or a stack ``[E, out, in]``, with an adapter for each expert.
        lora_a: ``[rank, in]``, of a stack ``[E, rank, in]``.
        lora_b: ``[out, rank]``, or the same rows; of a stack ``[E, out, rank]``.
        scaling: the adapter's factor, such as ``alpha / rank``.

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
    return merged


class Adapter:
    """The adapter of one layer, merged into its weight.

    Attributes:
        merges: whether it is part of what is quantized.
        lora_a: ``[rank, in]``, or ``[E, rank, in]`` of a stack, in the weight's dtype.
        lora_b: ``[out, rank]`` or ``[E, out, rank]``, likewise; zeros at the start, so that step 0 computes the model
            without it.
        scaling: what their product is multiplied by.
    """

    merges = True

    def __init__(self, lora_a: nn.Parameter, lora_b: nn.Parameter, scaling: float) -> None:
        self.lora_a, self.lora_b, self.scaling = lora_a, lora_b, scaling

    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight with the adapter, see :func:`merge`; the Parameters are gathered."""
        return merge(weight, self.lora_a, self.lora_b, self.scaling)

    def apply(self, training: bool, plan: Plan, *tensors: Tensor | None) -> Tensor:
        """Stands for :func:`quant.autograd.apply_function`: takes the same, with the weight as it is without the
        adapter, after whether the layer is in training mode."""
        output: Tensor = MergedLinearFunction.apply(self.scaling, self.lora_a, self.lora_b, plan, *tensors)
        return output


class AdapterBeside(Adapter):
    """The adapter of one Linear, beside its weight: it adds ``lora_b @ (lora_a @ x) * scaling`` to the output.

    It reads the input before that is quantized, and adds in the order of operations that peft has, so that in one dtype
    the sums have the same bits.

    Attributes:
        dropout: the share of the input's elements that ``lora_a`` does not see in a forward of training, while those
            that it sees are divided by ``1 - dropout``. The generator is torch's own, which activation checkpointing
            sets back before it computes a layer again.
    """

    merges = False

    def __init__(self, lora_a: nn.Parameter, lora_b: nn.Parameter, scaling: float, dropout: float = 0.0) -> None:
        super().__init__(lora_a, lora_b, scaling)
        self.dropout = dropout

    def merged(self, weight: Tensor) -> Tensor:
        """The weight itself."""
        return weight.detach()

    def apply(self, training: bool, plan: Plan, *tensors: Tensor | None) -> Tensor:
        """Stands for :func:`quant.autograd.apply_function`, of a layer that is no stack of experts."""
        output = apply_function(plan, *tensors)
        x = Arguments(*tensors).x
        if training and self.dropout:
            x = F.dropout(x, self.dropout)
        return output + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scaling


@contextmanager
def without_adapters(quantization: Any) -> Iterator[None]:
    """Inside the block the layers of a :class:`quant.Quantization` compute as if they had no adapters; then as before.

    A forward with gradients has no place there: under ZeRO-3 the adapters would get their last ones again.
    """
    kept = [(layer, layer.adapter) for layer in quantization.layers.values() if layer.adapter is not None]
    for layer, _ in kept:
        layer.adapter = None
    try:
        yield
    finally:
        for layer, adapter in kept:
            layer.adapter = adapter


class MergedLinearFunction(torch.autograd.Function):
    """:class:`quant.autograd.QuantLinearFunction` of a weight with its adapter.

    ``apply(scaling, lora_a, lora_b, plan, *Arguments)``. The sum exists while the layer runs: backward keeps the three
    Parameters and forms it again. The gradients of the adapter are made from the sum's, which exists while the layer
    runs, too::

        grad_b = scaling * grad @ lora_a.t()    [out, rank]
        grad_a = scaling * lora_b.t() @ grad    [rank, in]

    Of a stack each expert's are made so. Where the weight is not quantized, see :func:`low_rank_gradients`. The weight
    itself gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, scaling: float, lora_a: Tensor, lora_b: Tensor, plan: Plan, *tensors: Tensor | None
    ) -> Tensor:
        given, needs = Arguments(*tensors), Arguments(*ctx.needs_input_grad[4:])
        trains = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        inner = _Context((False, *needs._replace(weight=trains)))
        ctx.save_for_backward(lora_a, lora_b, *keep(inner, plan, given, needs._replace(weight=trains)))
        ctx.scaling, ctx.plan, ctx.needs = scaling, plan, inner.needs_input_grad
        ctx.keeps_codes, ctx.input_shape = inner.keeps_codes, inner.input_shape
        weight = given.weight
        if plan.weight is None or given.weight_codes is None:  # else its codes say what it is
            weight = merge(weight, lora_a, lora_b, scaling)
        return product(plan, given._replace(weight=weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        lora_a, lora_b, *rest = ctx.saved_tensors  # once, see QuantLinearFunction
        saved, inner = Saved(*rest), _Context(ctx.needs)
        inner.plan, inner.keeps_codes, inner.input_shape = ctx.plan, ctx.keeps_codes, ctx.input_shape
        saved = saved._replace(weight=merge(saved.weight, lora_a, lora_b, ctx.scaling))
        needs = Arguments(*ctx.needs[1:])
        low_rank = needs.weight and ctx.plan.weight is None
        if low_rank:
            inner.needs_input_grad = (False, *needs._replace(weight=False))
        inner.save_for_backward(*saved)
        _, *found = QuantLinearFunction.backward(inner, grad_output)
        gradients = Arguments(*found)
        grad_a = grad_b = None
        if low_rank:
            grad = grad_output.reshape(-1, grad_output.shape[-1])
            x = used_input(inner, saved, after=grad)
            x = x.reshape(-1, x.shape[-1])
            grad_a, grad_b = low_rank_gradients(grad, x, lora_a, lora_b, ctx.scaling, saved.offsets)
        elif gradients.weight is not None:
            a, b, of_sum = lora_a.transpose(-2, -1), lora_b.transpose(-2, -1), gradients.weight
            grad_a, grad_b = (b @ of_sum).mul_(ctx.scaling), (of_sum @ a).mul_(ctx.scaling)
        grad_a, grad_b = (
            one if wanted else None for one, wanted in zip((grad_a, grad_b), ctx.needs_input_grad[1:3], strict=True)
        )
        return None, grad_a, grad_b, None, *gradients._replace(weight=None)


def low_rank_gradients(
    grad: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of ``lora_a`` and ``lora_b`` of a sum that is multiplied as it is, without a product as large as it.

    Args:
        grad, x: ``[rows, out]`` and ``[rows, in]``, the gradient of the layer's output and its input as it was
            multiplied.
        lora_a, lora_b, scaling: as of :func:`merge`.
        offsets: of a stack, where the rows of each expert end.
    """
    # A GEMM takes the second operand as it lies in a Linear: [out, in].
    up = gemm.linear(x, lora_a, None, offsets)  # [rows, rank]
    down = gemm.input_gradient(grad, lora_b, offsets)  # [rows, rank]
    of_a, of_b = gemm.weight_gradient(down, x, offsets), gemm.weight_gradient(grad, up, offsets)
    return of_a.mul_(scaling), of_b.mul_(scaling)


class _Context:
    """What :class:`quant.autograd.QuantLinearFunction` uses of an autograd context, for a call without one."""

    plan: Plan
    keeps_codes: bool
    input_shape: torch.Size

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors
