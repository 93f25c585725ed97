"""Fused quantizers as torch operators; quant/reference.py in one pass over memory, on CPU and CUDA.

:mod:`quant.kernels.ops` is what the rest of the package calls, and :mod:`quant.kernels.registration` declares the
operators behind it. ``arithmetic.h`` is the arithmetic that both backends include, ``cpu/quantizers.cpp`` and
``cuda/quantizers.cu`` are the operations around it, with their loops in the headers that they include, ``bindings.cpp``
makes them operators, files ``fused*`` have norms and SwiGLU with the quantization of their result
(:mod:`quant.fused_reference`), and
:mod:`quant.kernels.build` compiles these files at first use.
"""

from quant.kernels.build import prepare_kernels
from quant.kernels.ops import (
    amax,
    dequantize,
    dequantize_and_mask_,
    dequantize_with_zeros,
    effective_scale,
    fake_quantize,
    fake_quantize_backward_,
    fake_quantize_tokens,
    fake_quantize_tokens_and_mask_,
    fake_quantize_tokens_backward,
    keep_tokens,
    kept_gradient_,
    masked_,
    quantize,
    quantize_tokens,
    quantize_with_scale,
    quantize_with_values,
    restore_tokens,
    rms_norm_backward,
    rms_norm_quantize,
    silu_mul_backward,
    silu_mul_quantize,
    sum_rows,
)

__all__ = [
    "amax",
    "dequantize",
    "dequantize_and_mask_",
    "dequantize_with_zeros",
    "effective_scale",
    "fake_quantize",
    "fake_quantize_backward_",
    "fake_quantize_tokens",
    "fake_quantize_tokens_and_mask_",
    "fake_quantize_tokens_backward",
    "keep_tokens",
    "kept_gradient_",
    "masked_",
    "prepare_kernels",
    "quantize",
    "quantize_tokens",
    "quantize_with_scale",
    "quantize_with_values",
    "restore_tokens",
    "rms_norm_backward",
    "rms_norm_quantize",
    "silu_mul_backward",
    "silu_mul_quantize",
    "sum_rows",
]
