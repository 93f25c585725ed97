"""NVFP4 and MX: scales of small groups, against compressed-tensors, vLLM's quantizer, exact numbers and differences."""

import math
from fractions import Fraction

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam

from quant import kernels, reference
from quant.formats.config_groups import quantization_args
from quant.observers import Observer
from quant.scale import Quantizer, Scale, first_input_scale
from quant.spec import SCHEMES, TensorSpec

NVFP4, MXFP8, MXFP4 = (SCHEMES[name].activations for name in ("nvfp4_w4a4", "mxfp8", "mxfp4_w4a4"))
WEIGHTS = {MXFP8: SCHEMES["mxfp8"].weights, MXFP4: SCHEMES["mxfp4"].weights, NVFP4: SCHEMES["nvfp4_w4a4"].weights}
MX = pytest.mark.parametrize("spec", [MXFP8, MXFP4], ids=["mxfp8", "mxfp4"])
# Values of e2m1, and the midpoints of neighbors.
STEPS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
ONE = torch.ones(1)


def million(size: int, least: float, most: float, rows: int = 4096) -> torch.Tensor:
    """Groups of all sizes between powers of ten, a third of the rows bf16 numbers, whose largest is often on the edge
    between two scales."""
    x = torch.randn(rows, 256) * 10 ** torch.empty(rows, 256 // size).uniform_(least, most).repeat_interleave(size, -1)
    x[::3] = x[::3].bfloat16().float()
    return x


def args_of(spec: TensorSpec) -> QuantizationArgs:
    return QuantizationArgs(**quantization_args(spec))


def theirs(x: torch.Tensor, spec: TensorSpec, above: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """compressed-tensors' fake quantization, and the scales that it used."""
    scale, zero = compute_dynamic_scales_and_zp(x, args_of(spec), torch.nn.Identity(), above)
    return fake_quantize(x, scale, zero, args_of(spec), above), scale if above is None else scale / above


def far_from_ties(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Find ``x / s`` further than a rounding from a tie: compressed-tensors divides by ``s``, training and vLLM
    multiply with the reciprocal. Ties are rare but where bf16 holds the largest value."""
    v = (x / scale.repeat_interleave(16, -1)).abs()
    near = ((v.unsqueeze(-1) - TIES).abs() <= 2**-22 * TIES).any(-1)
    assert near.sum() < near.numel() // 100
    return ~near


@MX
def test_a_million_mx_weights_are_those_of_compressed_tensors(spec, seed):
    """Scales and values bit for bit."""
    x = million(32, -30, 30)
    expected, scale = theirs(x, WEIGHTS[spec])
    ours = reference.absmax_scale(x.unflatten(-1, (-1, 32)).abs().amax(-1), WEIGHTS[spec])
    assert torch.equal(ours, scale) and torch.equal(reference.fake_quant(x, ours, WEIGHTS[spec]), expected)


def test_a_million_nvfp4_weights_are_those_of_compressed_tensors(seed):
    """Scales bit for bit, and values but near ties. A group of zeros has another scale there, and zeros in both."""
    spec, w = WEIGHTS[NVFP4], million(16, -3, 0)
    w[5, :16] = 0
    groups = w.unflatten(-1, (-1, 16))
    above = reference.global_scale(w.abs().max(), spec).view(1)
    assert torch.equal(above, generate_gparam(w.min(), w.max()))
    codes, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args_of(spec), global_scale=above)
    ours = reference.round_scale(reference.absmax_scale(groups.abs().amax(-1), spec), spec, above)
    filled = groups.abs().amax(-1) > 0
    assert filled.sum() == filled.numel() - 1
    assert torch.equal(ours[filled], (codes.float() / above)[filled])
    expected, found = fake_quantize(w, codes, zero, args_of(spec), above), reference.fake_quant(w, ours, spec)
    far = far_from_ties(w, ours)
    assert torch.equal(found[far], expected[far]) and not found[5, :16].any()
    assert torch.equal(kernels.fake_quantize(w, Quantizer(Scale(ours, None, above), spec, torch.float32)), found)


def test_a_million_nvfp4_inputs_are_those_of_compressed_tensors(seed):
    """Scales bit for bit, and values but near ties; some groups are larger than calibration saw."""
    x = million(16, -5, 1)
    seen = x[: len(x) // 2]
    above = reference.global_scale(seen.abs().max(), NVFP4).view(1)
    assert torch.equal(above, generate_gparam(seen.min(), seen.max()))
    expected, scale = theirs(x, NVFP4, above)
    far = far_from_ties(x, scale)
    codes, ours, _ = reference.quantize_tokens(x, NVFP4, above)
    assert torch.equal(ours, scale)
    for module in (reference, kernels):
        values = module.fake_quantize_tokens(x, NVFP4, above)
        assert torch.equal(values[far], expected[far])
        assert torch.equal(values.abs(), STEPS[(codes & 7).long()] * scale.repeat_interleave(16, -1))


@MX
def test_a_million_mx_inputs_have_the_scales_of_vllm_and_the_values_of_compressed_tensors_for_them(spec, seed):
    """As vLLM 0.33's ``_mxfp8_e4m3_quantize_torch`` (model_executor/layers/quantization/utils/mxfp8_utils.py),
    which FlashInfer 0.7.2 agrees with for either format, in fp64."""
    x = million(32, -30, 30)
    absmax = x.unflatten(-1, (-1, 32)).abs().amax(-1).double().clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.exp2(torch.ceil(torch.log2(absmax / spec.qmax)).clamp(-127, 127)).float()
    expected = fake_quantize(x, scale, None, args_of(spec), None)
    codes, ours, _ = reference.quantize_tokens(x, spec)
    assert torch.equal(ours, scale) and codes.dtype == (torch.float8_e4m3fn if spec is MXFP8 else torch.uint8)
    for module in (reference, kernels):
        assert torch.equal(module.fake_quantize_tokens(x, spec), expected)
    assert reference.tokens_inside(x, spec).all(), "nothing is clipped"


@MX
def test_mx_scales_in_exact_numbers(spec, seed):
    """The smallest power of two with ``absmax / scale <= qmax``; of weights that of the half-open range."""
    edge = Fraction(448 if spec is MXFP8 else 7)
    sizes = [1.5, 1.75, math.nextafter(1.5, 2), 1.75 - 2.0**-23, 1.75 + 2.0**-23, 1.0, 2 - 2.0**-23]
    absmax = torch.tensor([m * 2.0**e for m in sizes for e in (-100, -7, 0, 8, 120)] + torch.rand(200).tolist())
    inputs, weights = reference.absmax_scale(absmax, spec), reference.absmax_scale(absmax, WEIGHTS[spec])
    for size, of_input, of_weight in zip(absmax.tolist(), inputs.tolist(), weights.tolist(), strict=True):
        assert Fraction(size) / Fraction(of_input) <= Fraction(spec.qmax) < 2 * Fraction(size) / Fraction(of_input)
        assert edge / 2 <= Fraction(size) / Fraction(of_weight) < edge


@MX
def test_mx_groups_at_the_edges(spec):
    """Zeros, an infinity, a NaN, groups too small for a scale, subnormal codes and ties, by both definitions."""
    x = torch.zeros(7, 32)
    x[1, :3] = torch.tensor([torch.inf, 1.0, -900.0])
    x[2, :3] = torch.tensor([torch.nan, 1.0, 2.0])
    x[3] = torch.linspace(-1, 1, 32) * 1e-40
    x[4, :2] = torch.tensor([spec.qmax, -spec.qmax])  # a scale of 1
    x[4, 2:6] = torch.tensor([0.25, 0.75, -1.25, -0.0] if spec is MXFP4 else [17.0, 19.0, -(2.0**-10), -0.0])
    x[5, :1] = spec.qmax * (1 + 2.0**-20)  # a scale of 2
    x[6, 0], x[6, 1] = 2e38, 1e-38
    for module in (reference, kernels):
        values = module.fake_quantize_tokens(x, spec)
        assert values[[1, 2]].isnan().all() and not values[[0, 3]].any()
        expected = [0, 1, -1, 0] if spec is MXFP4 else [16, 20, 0, 0]
        assert values[4, :6].tolist() == [spec.qmax, -spec.qmax, *expected] and values[4, 5].signbit()
        assert values[5, 0] == spec.qmax
        assert values[6, 0].isfinite() and values[6, 1] == 0
    inside = reference.tokens_inside(x, spec)
    assert not inside[[1, 2]].any() and inside[[0, 3, 4, 5, 6]].all()
    scale = reference.quantize_tokens(x, spec)[1].flatten()
    assert scale[[0, 3, 4, 5]].tolist() == [1, 1, 1, 2] and scale[[1, 2]].isnan().all()


def test_nvfp4_groups_at_the_edges():
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
    expected, _ = theirs(x, NVFP4, ONE)
    for module in (reference, kernels):
        values = module.fake_quantize_tokens(x, NVFP4, ONE)
        assert torch.equal(values.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
        assert values[1, 0] == 448 * 6 and values[1, 2] == -896 and values[1, 1] == 0
        assert values[2].isnan().all() and not values[[0, 3, 4]].any()
        assert values[5].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]
        assert values[7].abs().max() == 448 * 6
    inside = reference.tokens_inside(x, NVFP4, ONE)
    assert not inside[1, 0] and inside[1, 1:].all() and not inside[2].any()
    assert inside[[0, 3, 4, 5, 6]].all(), "a group that becomes 0 has a gradient"
    assert torch.equal(inside[7], x[7].abs() < 448 * 7)
    codes = reference.quantize_tokens(x, NVFP4, ONE)[0]
    assert not codes[2].any() and codes[1, 0] == 7


@pytest.mark.parametrize("spec", WEIGHTS, ids=["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_the_kernels_are_the_reference(spec, dtype, seed):
    """Bit for bit in every dtype and layout, without values too: values and gradients."""
    above = torch.empty(1).uniform_(100, 2000) if spec is NVFP4 else None
    for shape in ((2, 5, 32), (2, 5, 96), (2, 5, 2080), (0, 64), (3, 0, 32)):
        x = (torch.randn(shape) * 3).to(dtype)
        x = torch.cat([x, x], dim=-1)[..., ::2] if shape[-1] > 64 else x
        if shape[-1] == 96 and spec is not NVFP4:
            x[0, 1, 7], x[1, 2, 40] = torch.nan, torch.inf
        grad = torch.randn(x.shape).to(dtype)
        values, expected = (module.fake_quantize_tokens(x, spec, above) for module in (kernels, reference))
        assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))
        masked = reference.fake_quantize_tokens_backward(grad, x, spec, above)
        kernels.fake_quantize_tokens_and_mask_(grad, x, spec, above, values=False)
        assert torch.equal(grad, masked)


def test_nothing_clips_between_the_smallest_nvfp4_scales_and_the_largest(seed):
    """Rounding a scale that is a normal number of e4m3 leaves every value inside the range."""
    x = torch.randn(4096, 16)
    above = reference.global_scale(x.abs().max(), NVFP4).view(1)
    assert reference.tokens_inside(x, NVFP4, above).all()
    small = x / x.abs().amax(-1, keepdim=True) * 6 * 1.45 * 2.0**-9  # scales of 1.45 steps become 1
    observer = Observer(NVFP4)
    observer.update(small, ONE)
    assert observer.clipped == (~reference.tokens_inside(small, NVFP4, ONE)).sum() > 0


@pytest.mark.parametrize("headroom", [2.0, 8.0])
def test_headroom_of_a_power_of_two_changes_no_code_of_nvfp4_inputs(headroom, seed):
    """And larger inputs than in calibration are not clipped."""
    x = torch.randn(4096, 16)
    exact, roomy = (first_input_scale(x.abs().max().view(1), NVFP4, factor) for factor in (1.0, headroom))
    assert torch.equal(kernels.fake_quantize_tokens(x, NVFP4, exact), kernels.fake_quantize_tokens(x, NVFP4, roomy))
    assert reference.tokens_inside(x * headroom, NVFP4, roomy).all()
    assert not reference.tokens_inside(x * headroom, NVFP4, exact).all()
