"""Inputs with dynamic scales kept as codes in one pass: what several operators make of them, bit for bit."""

import pytest
import torch

from quant import SCHEMES, kernels
from quant.kernels import eager, ops

SHAPES = ((3, 5, 1024), (7, 128), (33, 384))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "fp8_dynamic", "fp8_block"])
def test_the_kernel_is_the_operators_one_by_one(scheme, dtype, seed):
    """Values, packed codes, mask and scales as stored; with values that a global scale clips, zeros, NaN, infinity."""
    ops.ensure_ready()
    spec = SCHEMES[scheme].activations
    above = torch.empty(1).uniform_(300, 1000) if spec.has_global_scale else None
    for shape in SHAPES:
        x = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
        flat = x.view(-1)
        flat[3], flat[200], flat[32:64], flat[-16:] = float("inf"), float("nan"), 0, flat[-16:] * 1e3
        groups = ops._token_groups(x, spec)
        for mask in (False, True) if above is not None else (False,):
            arguments = (groups, ops.grid_of(spec), mask, *ops._stored(spec, above))
            ours = torch.ops.deepqat.keep_tokens(*arguments)
            for one, other in zip(ours, eager.keep_tokens(*arguments), strict=True):
                assert one.dtype == other.dtype and one.shape == other.shape and one.is_contiguous()
                torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
        values, codes, mask, scales = kernels.keep_tokens(x, spec, above, mask=True)
        plain = kernels.fake_quantize_tokens(x, spec, above)
        torch.testing.assert_close(values, plain, rtol=0, atol=0, equal_nan=True)
        restored = kernels.restore_tokens(codes, scales, spec, dtype, above, after=None)
        assert torch.equal(torch.nan_to_num(restored), torch.nan_to_num(values))
        grad = torch.randn(shape).to(dtype)
        expected = kernels.fake_quantize_tokens_backward(grad, x, spec, above)
        assert torch.equal(kernels.kept_gradient_(grad, scales, mask), expected)
        x = torch.randn(shape).to(dtype)  # no group of which is masked as a whole
        _, _, mask, scales = kernels.keep_tokens(x, spec, above, mask=True)
        expected = kernels.fake_quantize_tokens_backward(grad, x, spec, above)
        assert torch.equal(kernels.kept_gradient_(grad, scales, mask), expected)


def test_what_it_does_not_take(seed):
    """Integers, and codes or masks that end inside a byte."""
    ops.ensure_ready()
    for arguments in (
        (torch.randn(3, 12), 1, False, torch.float8_e8m0fnu),
        (torch.randn(3, 16), 8, False),
        (torch.randn(3, 12), 0, True),
    ):
        with pytest.raises(RuntimeError, match="floats are kept, e2m1 and masks in eights"):
            torch.ops.deepqat.keep_tokens(*arguments)
