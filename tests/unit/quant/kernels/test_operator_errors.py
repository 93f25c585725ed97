"""An operator refuses what it cannot compute, and says what it got and what it expected."""

import pytest
import torch

from tests.unit.quant.kernels.comparing import OPS

pytestmark = pytest.mark.usefixtures("compiled")

X, S0, THETA = torch.randn(4, 6), torch.ones(4), torch.zeros(4)
ONE = torch.ones(1)
QUANTIZE = (X, S0, THETA, 0, torch.float32)
BACKWARD = (X, X, S0, THETA, 0, torch.float32, 1.0, True)


def changed(arguments: tuple, position: int, value) -> tuple:
    return (*arguments[:position], value, *arguments[position + 1 :])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fake_quantize", changed(QUANTIZE, 1, torch.ones(5)), "5 scales do not divide 24 elements"),
        ("fake_quantize", changed(QUANTIZE, 1, torch.ones(0)), "0 scales do not divide 24 elements"),
        ("fake_quantize", changed(QUANTIZE, 1, S0.double()), "s0 is Double, expected float32"),
        ("fake_quantize", changed(QUANTIZE, 1, S0.bfloat16()), "s0 is BFloat16, expected float32"),
        ("fake_quantize", changed(QUANTIZE, 1, torch.ones(8)[::2]), "s0 must be contiguous"),
        ("fake_quantize", changed(QUANTIZE, 2, torch.zeros(3)), "theta has 3 elements, s0 has 4"),
        (
            "fake_quantize",
            changed(QUANTIZE, 2, THETA.double()),
            "theta is Double, expected float32, bfloat16 or float16",
        ),
        ("fake_quantize", changed(QUANTIZE, 2, torch.ones(8)[::2]), "theta must be contiguous"),
        ("fake_quantize", changed(QUANTIZE, 0, X.double()), "x is Double, expected float32, bfloat16 or float16"),
        ("fake_quantize", changed(QUANTIZE, 0, X.int()), "x is Int, expected float32, bfloat16 or float16"),
        ("fake_quantize", changed(QUANTIZE, 3, -1), "grid -1 is neither 0 .e4m3., 1 .e2m1. nor 2 to 8 bits"),
        ("fake_quantize", changed(QUANTIZE, 3, -9), "grid -9 is neither"),
        ("fake_quantize", (X, S0, None, -4, torch.float32, None, S0), "a narrow grid has no zero points"),
        ("fake_quantize", changed(QUANTIZE, 3, 9), "grid 9 is neither"),
        ("fake_quantize", changed(QUANTIZE, 4, torch.float64), "scale_dtype is Double, expected float32"),
        ("quantize", (torch.randn(7), S0, None, 4, torch.float32, True), "4 scales do not divide 7 elements"),
        (
            "dequantize",
            (X.short(), S0, None, torch.float32, torch.float32),
            "codes are Short, expected float8_e4m3fn, uint8 .e2m1. or int8",
        ),
        ("dequantize", (X.char(), S0, None, torch.float32, torch.float64), "dtype is Double, expected float32"),
        ("fake_quantize_backward", changed(BACKWARD, 0, X[:2]), r"grad is \[2, 6\] Float, x is \[4, 6\] Float"),
        ("fake_quantize_backward", changed(BACKWARD, 0, X.t()), r"grad is \[6, 4\] Float, x is \[4, 6\] Float"),
        ("fake_quantize_backward", changed(BACKWARD, 0, X.half()), r"grad is \[4, 6\] Half, x is \[4, 6\] Float"),
        ("fake_quantize_backward", changed(BACKWARD, 3, None), "there is no theta"),
        ("fake_quantize_backward_", changed(BACKWARD, 0, torch.randn(6, 4).t()), "grad has strides"),
        (
            "fake_quantize_backward_",
            changed(BACKWARD, 0, X[:2].clone()),
            r"grad is \[2, 6\] Float, x is \[4, 6\] Float",
        ),
        ("masked_", (torch.randn(6, 4).t(), torch.zeros(3, dtype=torch.uint8)), "grad has strides"),
        ("masked_", (X, torch.zeros(2, dtype=torch.uint8)), r"a mask of 2 bytes \(Byte\) does not belong to 24"),
        ("effective_scale", (S0.double(), None, torch.float32), "s0 is Double, expected float32"),
        ("effective_scale", (S0, torch.zeros(5), torch.float32), "theta has 5 elements, s0 has 4"),
        (
            "quantize_with_values",
            (*QUANTIZE[:1], torch.ones(5), None, 0, torch.float32, True),
            "5 scales do not divide",
        ),
        (
            "masked",
            (X, torch.zeros(2, dtype=torch.uint8)),
            r"a mask of 2 bytes \(Byte\) does not belong to 24 elements",
        ),
        ("masked", (X, torch.zeros(24, dtype=torch.bool)), r"a mask of 24 bytes \(Bool\) does not belong"),
        ("amax", (X, 5), "5 parts do not divide 24 elements"),
        ("amax", (X, 0), "0 parts do not divide 24 elements"),
        ("amax", (X.double(), 1), "x is Double, expected float32, bfloat16 or float16"),
        ("quantize_tokens", (torch.tensor(1.0), 8, True), "at least one dimension"),
        ("quantize_tokens", (X, 9, True), "grid 9 of tokens is neither 0 .e4m3., 1 .e2m1. nor 2 to 8 bits"),
        ("quantize_tokens", (X, 1, True), "scales of tokens are float32, of floats powers of two, of e2m1 also e4m3"),
        ("quantize_tokens", (X, 8, True, torch.float8_e8m0fnu), "scales of tokens are float32, of floats powers"),
        ("quantize_tokens", (X.view(1, 24).repeat(1, 2), 1, True, torch.float8_e8m0fnu), "at most 32 features, got 48"),
        ("quantize_tokens", (X, 1, True, torch.float8_e4m3fn), "scales in e4m3, and no others, lie below a global one"),
        ("quantize_tokens", (X, 1, True, torch.float8_e8m0fnu, ONE), "scales in e4m3, and no others, lie below"),
        ("quantize_tokens", (X, 1, True, torch.float8_e4m3fn, ONE.expand(2)), "tokens have one global scale, got 2"),
        ("fake_quantize", (X, ONE, None, 1, torch.float8_e4m3fn), "scales in e4m3, and no others, lie below a global"),
        ("fake_quantize", (X, ONE, None, 1, torch.float32, None, None, ONE), "scales in e4m3, and no others, lie"),
        ("fake_quantize_tokens", (X, 0, False), "codes of tokens that are floats are symmetric"),
        ("fake_quantize_tokens_backward", (X[:, :3], X, 8, True), r"grad is \[4, 3\] Float, x is \[4, 6\] Float"),
        ("fake_quantize_tokens_and_mask_", (X[:3], X, 8, True, True), r"grad is \[3, 6\] Float on cpu, x is \[4, 6\]"),
        ("fake_quantize_tokens_and_mask_", (X.t(), X.t(), 8, True, True), "must be contiguous, grad has strides"),
        ("quantize_with_scale", (X, ONE.double(), None, 8, torch.float32), "s0 is Double, expected float32"),
    ],
)
def test_errors_name_what_is_wrong(name, arguments, message):
    """An operator refuses what it cannot compute, and says what it got and what it expected."""
    with pytest.raises((RuntimeError, TypeError), match=message):
        getattr(OPS, name)(*arguments)
