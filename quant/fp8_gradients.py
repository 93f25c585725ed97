"""The gradients of a Linear that multiplies fp8 codes, from fp8 codes as well (``quant.fp8_gradients``).

Of the gradient dY ``[tokens, out]`` of a layer's output, Q(dY) are the codes that :mod:`quant.reference_gradient`
defines, with one scale for all of it. Backward multiplies them with the codes that the forward multiplied::

    dX = Q(dY) Wq        times both scales        [tokens, in]
    dW = Q(dY).t() Xq    times both scales        [out, in]

This is the backward of the layer for another gradient, Q(dY), and that to within the rounding of its results: what the
straight-through rules and LSQ make of dX and dW (masks, the gradients of the scales' thetas) is made of these. The
gradient of the bias is a sum, no product, and is that of dY itself.

torch's fp8 GEMM takes a matrix by rows and another by columns. The products sum over ``out`` and over tokens, so that
each of them wants an operand, or both, turned over: Q(dY) is made in both layouts in one pass, and codes of weight and
input are transposed, 2 bytes of traffic for each where dequantising takes 3; a weight without codes is quantised into
that layout.

Sums of gradients go to fp32 in every case (no "fast accumulation"), as in torchao's float8 training (``config.py``:
``gemm_config_grad_input`` and ``gemm_config_grad_weight``) and Transformer Engine (``recipe/__init__.py``:
``use_split_accumulator`` of ``fp8_gemm_dgrad`` and ``fp8_gemm_wgrad``).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant import gemm, kernels
from quant.scale import Quantizer


class GradientCodes(NamedTuple):
    """What :func:`quant.kernels.quantize_gradient` makes of dY.

    Attributes:
        codes: ``[tokens, out]``.
        transposed: ``[out, tokens]``, with zeros up to a multiple of 16.
        scale: fp32 ``[1]``.
    """

    codes: Tensor
    transposed: Tensor
    scale: Tensor


def codes_of(grad: Tensor, dtype: torch.dtype) -> GradientCodes:
    """Q(dY) of ``grad [tokens, out]`` in a format of :data:`quant.reference_gradient.FORMATS`."""
    return GradientCodes(*kernels.quantize_gradient(grad, dtype))


def of_input(grad: GradientCodes, saved: Any, quantizer: Quantizer | None, scale: Tensor | None) -> Tensor:
    """dX; of what a :class:`quant.function.Saved` has, the weight's ``quantizer``, and its effective scale if known."""
    assert quantizer is not None, "the forward multiplied its codes"
    if saved.weight_codes is None:
        turned, scale = kernels.quantize_transposed(saved.weight, quantizer, after=grad.codes)
    else:
        turned = kernels.transpose_codes(saved.weight_codes)
        scale = kernels.effective_scale(quantizer) if scale is None else scale
    return gemm.scaled_linear(grad.codes, grad.scale, turned, scale, None, quantizer.dtype)


def turned_input(ctx: Any, saved: Any, unmasked: Tensor | None, after: Tensor) -> Tensor:
    """The input's codes ``[in, tokens]``, made once for all layers that share it; as :func:`quant.inputs.used_input`,
    whose arguments these are."""
    if unmasked is not None:
        kernels.masked_(unmasked, saved.mask)
    rows, restored = saved.x.reshape(-1, saved.x.shape[-1]), ctx.plan.restored
    quantizer = saved.input_quantizer(ctx.plan.input)

    def make() -> Tensor:
        if ctx.keeps_codes:
            return kernels.transpose_codes(rows)
        return kernels.quantize_transposed(rows, quantizer, after=after)[0]

    # The view says in what layout it is: a layer that restored the same memory as values is not taken for this one.
    return make() if restored is None else restored.get(rows.t(), make)


def of_weight(grad: GradientCodes, transposed: Tensor, quantizer: Quantizer) -> Tensor:
    """dW, of :func:`turned_input` and the input's ``quantizer``."""
    scale = kernels.effective_scale(quantizer)
    return gemm.scaled_linear(grad.transposed, grad.scale, transposed, scale, None, quantizer.dtype)
