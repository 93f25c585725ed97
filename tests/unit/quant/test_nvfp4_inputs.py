"""NVFP4 inputs: dynamic scales of groups of 16 below a global one, against compressed-tensors and in their gradient."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

from quant import kernels
from quant.formats.config import quantization_args
from quant.observers import Observer
from quant.reference import (
    fake_quantize_tokens,
    fake_quantize_tokens_backward,
    global_scale,
    quantize_tokens,
    tokens_inside,
)
from quant.spec import SCHEMES

SPEC = SCHEMES["nvfp4_w4a4"].activations
ARGS = QuantizationArgs(**quantization_args(SPEC))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Halfway between neighbors of the grid.
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
ONE = torch.ones(1)


def theirs(x: torch.Tensor, above: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """compressed-tensors' fake quantization and the scales that it used."""
    scale, zero = compute_dynamic_scales_and_zp(x, ARGS, torch.nn.Identity(), above)
    return fake_quantize(x, scale, zero, ARGS, above), scale / above


def test_the_arguments_are_those_of_their_preset():
    preset = preset_name_to_scheme("NVFP4", ["Linear"])
    for ours, preset_args in ((SCHEMES["nvfp4_w4a4"].weights, preset.weights), (SPEC, preset.input_activations)):
        args = QuantizationArgs(**quantization_args(ours))
        for name in ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "scale_dtype"):
            assert getattr(args, name) == getattr(preset_args, name), name


def test_a_million_values_are_those_of_compressed_tensors(seed):
    """Scales bit for bit, and values but where ``x / s`` lies within a rounding of a tie: it divides by ``s``, this and
    vLLM's kernel multiply with the reciprocal. Groups of all sizes, some of them larger than calibration saw."""
    x = torch.randn(2**20 // 256, 256) * 10 ** torch.empty(2**20 // 256, 16).uniform_(-5, 1).repeat_interleave(16, -1)
    x[::7] = x[::7].bfloat16().float()
    above = global_scale(x[: len(x) // 2].abs().max(), SPEC).view(1)
    assert torch.equal(above, generate_gparam(x[: len(x) // 2].min(), x[: len(x) // 2].max()))
    expected, scale = theirs(x, above)
    v = (x / scale.repeat_interleave(16, -1)).abs()
    near = ((v.unsqueeze(-1) - TIES).abs() <= 2**-22 * TIES).any(-1)
    assert near.sum() < near.numel() // 100  # of bf16 rows many where the global scale is a round number
    for module in (None, kernels):
        codes, ours, _ = (module.quantize_tokens if module else quantize_tokens)(x, SPEC, above)
        assert torch.equal(ours, scale)
        values = (module.fake_quantize_tokens if module else fake_quantize_tokens)(x, SPEC, above)
        assert torch.equal(values[~near], expected[~near])
        steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()]
        assert torch.equal(values.abs(), steps * scale.repeat_interleave(16, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_are_the_reference(dtype, seed):
    """Bit for bit in every dtype, and layout; and in the mask."""
    for columns in (16, 48, 1040):
        x = (torch.randn(2, 5, columns) * 3).to(dtype)
        x = torch.cat([x, x], dim=-1)[..., ::2] if columns > 16 else x
        above, grad = torch.empty(1).uniform_(100, 2000), torch.randn_like(x)
        for ours, reference in zip(
            kernels.quantize_tokens(x, SPEC, above), quantize_tokens(x, SPEC, above), strict=True
        ):
            assert torch.equal(ours, reference) and ours.dtype == reference.dtype
        assert torch.equal(kernels.fake_quantize_tokens(x, SPEC, above), fake_quantize_tokens(x, SPEC, above))
        expected = fake_quantize_tokens_backward(grad, x, SPEC, above)
        assert torch.equal(kernels.fake_quantize_tokens_backward(grad, x, SPEC, above), expected)
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(kernels.fake_quantize_tokens(leaf, SPEC, above), leaf, grad)
        assert torch.equal(found, expected)


def test_groups_at_the_edges():
    """Zeros, an infinity, a NaN, numbers too small for a scale, the smallest fp32 numbers, and ties; by both, and by
    compressed-tensors."""
    x = torch.zeros(8, 16)
    x[1, :3] = torch.tensor([torch.inf, 1.0, -900.0])
    x[2, :3] = torch.tensor([torch.nan, 1.0, 2.0])
    x[3] = torch.linspace(-1, 1, 16) * 6 * 2.0**-10  # the scale would be a tie of 0 and the smallest one
    x[4] = torch.linspace(-1, 1, 16) * 1e-40
    x[5] = torch.tensor([6, *TIES, *-TIES, -0.0])  # a scale of 1
    x[6] = torch.linspace(-1, 1, 16) * 9 * 2.0**-9  # the scale is rounded from 1.5 steps to 2
    x[7] = torch.linspace(-1, 1, 16) * 5000  # the scale saturates at 448
    expected, _ = theirs(x, ONE)
    for module in (None, kernels):
        values = (module.fake_quantize_tokens if module else fake_quantize_tokens)(x, SPEC, ONE)
        assert torch.equal(values.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
        assert values[1, 0] == 448 * 6 and values[1, 2] == -896 and values[1, 1] == 0
        assert values[2].isnan().all() and not values[[0, 3, 4]].any()
        assert values[5].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]
        assert values[7].abs().max() == 448 * 6
    inside = tokens_inside(x, SPEC, ONE)
    assert not inside[1, 0] and inside[1, 1:].all() and not inside[2].any()
    assert inside[[0, 3, 4, 5, 6]].all(), "a group that becomes 0 has a gradient"
    assert torch.equal(inside[7], x[7].abs() < 448 * 7)
    codes = kernels.quantize_tokens(x, SPEC, ONE)[0]
    assert not codes[2].any() and codes[1, 0] == 7


def test_nothing_clips_between_the_smallest_scales_and_the_largest(seed):
    """Where the scale is a normal number of e4m3, rounding it leaves every value inside the range."""
    x = torch.randn(4096, 16)
    above = global_scale(x.abs().max(), SPEC).view(1)
    assert tokens_inside(x, SPEC, above).all()
    small = x / x.abs().amax(-1, keepdim=True) * 6 * 1.45 * 2.0**-9  # scales of 1.45 steps become 1
    assert not tokens_inside(small, SPEC, ONE).all()
    observer = Observer(SPEC)
    observer.update(small, ONE)
    assert observer.clipped == (~tokens_inside(small, SPEC, ONE)).sum() > 0


def test_the_gradient_against_finite_differences(seed):
    """In fp64 of ``s * clamp(v + e, -6, 6)``, scales and rounding errors e held as they are: piecewise linear, so that
    differences are exact to rounding. Half of the groups saturate."""
    x = torch.randn(64, 16) * torch.linspace(0.1, 2, 64).unsqueeze(-1)
    above = global_scale(torch.tensor([1.5]), SPEC)
    codes, scale, _ = quantize_tokens(x, SPEC, above)
    s = scale.repeat_interleave(16, -1).double()
    rounded = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[(codes & 7).long()]
    rounded = torch.where(codes >= 8, -rounded, rounded)
    inside = tokens_inside(x, SPEC, above)
    error = torch.where(inside, rounded - x.double() / s, 0.0)

    def surrogate(x: torch.Tensor) -> torch.Tensor:
        return s * torch.clamp(x / s + error, -6, 6)

    step = torch.where(x > 0, -1e-7, 1e-7).double()  # inwards: what rounds to an end of the grid is inside
    differences = (surrogate(x.double() + step) - surrogate(x.double())) / step
    gradient = fake_quantize_tokens_backward(torch.ones_like(x), x, SPEC, above)
    torch.testing.assert_close(gradient.double(), differences, rtol=0, atol=1e-6)
    assert 0 < (~inside).sum() < x.numel() / 2


def test_no_values():
    for shape in ((0, 32), (3, 0, 16)):
        x = torch.empty(shape, dtype=torch.bfloat16)
        assert kernels.fake_quantize_tokens(x, SPEC, ONE).shape == x.shape
        assert kernels.fake_quantize_tokens_backward(x, x, SPEC, ONE).shape == x.shape
