"""The functions of quant.kernels are the operators, and translate specs."""

import pytest
import torch

from quant import kernels, reference
from quant.kernels import eager
from quant.scale import Quantizer, Scale
from quant.spec import TensorSpec
from tests.unit.quant.kernels.cases import Case, rows_to_sum
from tests.unit.quant.kernels.comparing import assert_same, check_theta_gradient

pytestmark = pytest.mark.usefixtures("compiled")


def test_sums_of_rows(seed):
    """One addition at a time, each rounded: a CPU's sum over a dimension rounds once."""
    for _ in range(200):
        rows, places = rows_to_sum()
        assert_same(kernels.sum_rows(rows, places), eager.sum_rows(rows, places), f"{rows.shape}, {places.shape}")
    with pytest.raises(RuntimeError, match="places are Int on cpu, expected int64 on cpu"):
        kernels.sum_rows(torch.randn(3, 4), torch.zeros(2, 2, dtype=torch.int32))


def test_the_functions_are_the_operators(seed):
    """quant.kernels translates specs: integers have their scale rounded to the model's dtype, others in fp32."""
    x, s0, theta = torch.randn(4, 32).bfloat16(), torch.rand(4) + 0.1, torch.randn(4).bfloat16()
    grad = torch.randn_like(x)
    for spec, grid, stored in (
        (TensorSpec("fp8_e4m3", 8, "channel"), 0, torch.float32),
        (TensorSpec("fp4_e2m1", 4, "group", 32), 1, torch.float8_e8m0fnu),
        (TensorSpec("fp4_e2m1", 4, "group", 16), 1, torch.float8_e4m3fn),
        (TensorSpec("fp8_e4m3", 8, "group", 32, mx=True), 0, torch.float8_e8m0fnu),
        (TensorSpec("int", 3, "channel"), 3, torch.bfloat16),
        (TensorSpec("int", 4, "group", 32, ggml=True), 4, torch.float16),
    ):
        above = torch.rand(1) * 100 if spec.has_global_scale else None
        scales, beside = (s0, theta), (None, above)
        quantizer = Quantizer(Scale(s0, theta, above), spec, torch.bfloat16)
        effective = reference.effective_scale(s0, theta, spec, torch.bfloat16, above)
        assert_same(kernels.effective_scale(quantizer), effective)
        codes, mask = kernels.quantize(x, quantizer, mask=True)
        expected_codes, expected_mask = eager.quantize(x, *scales, grid, stored, True, *beside)
        assert_same(codes, expected_codes)
        assert_same(mask, expected_mask)
        assert kernels.quantize(x, quantizer)[1].numel() == 0
        values = kernels.dequantize(codes, quantizer)
        assert_same(values, eager.dequantize(codes, *scales, stored, torch.bfloat16, None, *beside))
        halves = kernels.dequantize(codes, quantizer._replace(dtype=torch.float16))
        stored_in_halves = torch.float16 if stored == torch.bfloat16 else stored
        assert_same(halves, eager.dequantize(codes, *scales, stored_in_halves, torch.float16, None, *beside))
        assert_same(kernels.fake_quantize(x, quantizer), eager.fake_quantize(x, *scales, grid, stored, None, *beside))
        both = kernels.quantize_with_values(x, quantizer, mask=True)
        for ours, theirs in zip(both, (codes, mask, kernels.fake_quantize(x, quantizer)), strict=True):
            assert_same(ours, theirs)
        grad_x, again, overwritten = grad.clone(), grad.clone(), grad.clone()
        grad_theta = kernels.fake_quantize_backward_(grad_x, x, quantizer, factor=0.3, theta_gradient=True)
        assert kernels.masked_(overwritten, mask) is overwritten
        assert_same(grad_x, overwritten)
        check_theta_gradient(Case(x, grad, s0, theta, grid, stored, 0.3, None, above), grad_theta)
        assert kernels.fake_quantize_backward_(again, x, quantizer, factor=0.3, theta_gradient=False) is None
        assert_same(again, grad_x)
    assert_same(kernels.amax(x), eager.amax(x, 1))
    assert_same(kernels.amax(x, 8), eager.amax(x, 8))
    for spec, arguments in (
        (TensorSpec("int", 8, "token", symmetric=False, dynamic=True), (8, False)),
        (TensorSpec("fp8_e4m3", 8, "token", dynamic=True), (0, True)),
        (TensorSpec("fp8_e4m3", 8, "group", 16, dynamic=True), (0, True)),
    ):
        groups = (4, 32) if spec.group_size is None else (4, 2, 16)
        codes, scale, zero_point = kernels.quantize_tokens(x, spec)
        assert scale.shape == zero_point.shape == (4, 1 if spec.group_size is None else 2)
        theirs = eager.quantize_tokens(x.view(groups), *arguments)
        for ours, expected in zip((codes, scale, zero_point), theirs, strict=True):
            assert_same(ours, expected.view(ours.shape))
        for ours, expected in zip((codes, scale, zero_point), reference.quantize_tokens(x, spec), strict=True):
            assert_same(ours, expected)
        assert_same(kernels.fake_quantize_tokens(x, spec), reference.fake_quantize_tokens(x, spec))
        ours = kernels.fake_quantize_tokens_backward(grad, x, spec)
        assert_same(ours, reference.fake_quantize_tokens_backward(grad, x, spec))
