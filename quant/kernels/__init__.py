"""Fused quantizers as torch operators: quant/reference.py in one pass over memory, on CPU and CUDA.

The package calls :mod:`quant.kernels.ops`; :mod:`quant.kernels.registration` declares the operators;
:mod:`quant.kernels.build` compiles the sources at first use. ``arithmetic.h`` contains the arithmetic shared by both
backends, ``cpu/quantizers.cpp`` and ``cuda/quantizers.cu`` with their headers the kernels, ``bindings.cpp`` their
binding as operators. The files ``fused*`` contain RMSNorm and SwiGLU with quantized results.
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
