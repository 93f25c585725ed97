"""Specs and schemes that cannot be are refused, what makes an MX spec, and scales per block of weights of any shape:
the kernels against the reference, and sums of gradients in fp64."""

import random

import pytest
import torch
from torch import Tensor

from quant import kernels
from quant.formats.packing import unpack_bits
from quant.reference import fake_quant, fake_quant_backward, inside_range, quantize
from quant.scale import Quantizer, Scale
from quant.spec import SCHEMES, Scheme, TensorSpec, get_scheme, per_block, per_run
from tests.unit.quant.oracle import DTYPES, FP8, expand, per_scale

GROUP_SIZE, ASYMMETRIC = "group_size", "only int codes per channel or group"
NARROW, MX = "only symmetric int weights have a narrow grid", r"powers of two \(mx\) are of floats in groups of 32"


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (("fp8_e4m3", 4, "tensor"), {}, "fp8_e4m3 has 8 bits"),
        (("int", 9, "tensor"), {}, "2 to 8 bits, got .*bits=9"),
        (("int", 4, "group"), {}, GROUP_SIZE),
        (("int", 4, "tensor", 32), {}, GROUP_SIZE),
        (("int", 8, "tensor"), {"symmetric": False}, ASYMMETRIC),
        (("fp8_e4m3", 8, "channel"), {"symmetric": False}, ASYMMETRIC),
        (("int", 8, "block", 16), {"symmetric": False}, ASYMMETRIC),
        (("fp8_e4m3", 8, "tensor"), {"narrow": True}, NARROW),
        (("int", 4, "channel"), {"symmetric": False, "narrow": True}, NARROW),
        (("int", 8, "token"), {"dynamic": True, "narrow": True}, NARROW),
        (("fp4_e2m1", 4, "group", 16), {"mx": True}, MX),
        (("int", 8, "group", 32), {"mx": True}, MX),
        (("fp8_e4m3", 8, "group", 128), {"mx": True}, MX),
        (("fp8_e4m3", 8, "tensor"), {"mx": True}, MX),
    ],
)
def test_specs_that_cannot_be_are_refused(spec, options, said):
    with pytest.raises(ValueError, match=said):
        TensorSpec(*spec, **options)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (TensorSpec("int", 8, "tensor", narrow=True), "inputs cannot have narrow range"),
        (TensorSpec("int", 4, "tensor"), "inputs with a stored scale must have 8 bits"),
    ],
)
def test_schemes_that_cannot_be_are_refused(inputs, said):
    with pytest.raises(ValueError, match=said):
        Scheme("bad", FP8, inputs)


def test_names_and_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="in_features 48 is not divisible by group_size 32"):
        get_scheme("w4a16_g32").weights.scale_shape((8, 48))
    with pytest.raises(ValueError, match="w4a16_g32") as error:
        get_scheme("w4a16")
    assert all(name in str(error.value) for name in SCHEMES)
    with pytest.raises(ValueError, match=r"^'fp8_static_kv' quantizes keys and values, expected .* fp8_static,"):
        get_scheme("fp8_static_kv")


def test_fp4_in_groups_of_32_is_mx_and_fp8_where_it_says_so():
    assert TensorSpec("fp4_e2m1", 4, "group", 32) == TensorSpec("fp4_e2m1", 4, "group", 32, mx=True)
    assert TensorSpec("fp4_e2m1", 4, "group", 32, dynamic=True).scale_format == "e8m0"
    assert TensorSpec("fp8_e4m3", 8, "group", 32).scale_format == "float32"
    assert TensorSpec("fp8_e4m3", 8, "group", 32, mx=True).scale_format == "e8m0"


PRESETS = [scheme.weights for scheme in SCHEMES.values() if scheme.weights.granularity == "block"]
SPECS = [*PRESETS, TensorSpec("fp8_e4m3", 8, "block", 16), *(TensorSpec("int", n, "block", 12) for n in (2, 4, 8))]
BIT16 = torch.bfloat16, torch.float16


def side(size: int) -> int:
    """Any number of elements, also of less than a block, or of whole blocks and one element more or less."""
    return max(1, random.choice((random.randint(1, 3 * size), size * random.randint(1, 3) + random.randint(-1, 1))))


def blocks(spec: TensorSpec, dtype: torch.dtype, stack: tuple[int, ...] = ()) -> tuple[Tensor, Scale]:
    """A weight, and learned scales that clip some of each block."""
    weight = torch.randn(*stack, side(spec.group_size), side(spec.group_size)).to(dtype)
    shape = spec.scale_shape(tuple(weight.shape))
    return weight, Scale(torch.empty(shape).uniform_(1, 2) / spec.qmax, (torch.randn(shape) / 10).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_kernels_are_the_reference(spec, dtype, seed):
    """Codes, masks, values and the weight's gradient bit for bit; theta's gradient as the sum of its terms in fp64."""
    for _ in range(4):
        weight, scale = blocks(spec, dtype)
        quantizer, grad = Quantizer(scale, spec, dtype), torch.randn(weight.shape).to(dtype)
        effective = kernels.effective_scale(quantizer)
        codes, mask, values = kernels.quantize_with_values(weight, quantizer, mask=True)
        assert torch.equal(codes.view(torch.uint8), quantize(weight, effective, spec).view(torch.uint8))
        inside = inside_range(weight, effective, spec)
        assert torch.equal(unpack_bits(mask, weight.shape), inside)
        expected = fake_quant(weight, effective, spec)
        for found in (values, kernels.dequantize(codes, quantizer), kernels.fake_quantize(weight, quantizer)):
            assert torch.equal(found, expected)

        of_weight, factor = grad.clone(), random.uniform(0.1, 1)
        of_theta = kernels.fake_quantize_backward_(of_weight, weight, quantizer, factor=factor, theta_gradient=True)
        assert torch.equal(of_weight, grad * inside)
        formed = scale.s0 * scale.theta.double().exp().float()
        terms = element_terms(grad, weight, effective, spec) * expand(formed, weight, spec).double() * factor
        error = (of_theta.double() - per_scale(terms, spec).sum(-1)).abs()
        size = per_scale(terms.abs(), spec).sum(-1)
        assert (error <= 1e-5 * size + torch.finfo(dtype).eps * of_theta.abs() + torch.finfo(dtype).tiny).all()
        alone = grad.clone()
        kernels.fake_quantize_backward_(alone, weight, quantizer, factor=factor, theta_gradient=False)
        assert torch.equal(alone, of_weight)


def element_terms(grad: Tensor, weight: Tensor, effective: Tensor, spec: TensorSpec) -> Tensor:
    """Each element's term of the gradient of its scale, fp64."""
    columns = [one.float().reshape(-1, 1) for one in (grad, weight, expand(effective, weight, spec))]
    _, found = fake_quant_backward(*columns, TensorSpec(spec.dtype, spec.bits, "channel"), scale_gradient=True)
    assert found is not None
    return found.double().view(weight.shape)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_stack_is_its_experts(spec, seed):
    """Blocks never span two experts."""
    dtype = random.choice(DTYPES)
    weight, scale = blocks(spec, dtype, (3,))
    grad = torch.randn(weight.shape).to(dtype)
    quantizer, of_weight = Quantizer(scale, spec, dtype), grad.clone()
    values = kernels.fake_quantize(weight, quantizer)
    of_theta = kernels.fake_quantize_backward_(of_weight, weight, quantizer, factor=1.0, theta_gradient=True)
    for expert in range(3):
        own = Quantizer(Scale(scale.s0[expert], scale.theta[expert]), spec, dtype)
        assert torch.equal(values[expert], kernels.fake_quantize(weight[expert], own))
        alone = grad[expert].clone()
        theta = kernels.fake_quantize_backward_(alone, weight[expert], own, factor=1.0, theta_gradient=True)
        assert torch.equal(of_weight[expert], alone)
        torch.testing.assert_close(of_theta[expert], theta, rtol=1e-2 if dtype in BIT16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scales_of_runs(spec, seed):
    """Each run has the scale of its block, and what runs have is summed up by block; whole blocks are views."""
    shape = (*random.choice(((), (2,))), side(spec.group_size), side(spec.group_size))
    run, size = spec.run_length(shape), spec.group_size
    scale = torch.randn(spec.scale_shape(shape))
    runs = per_run(scale, shape, spec)
    assert runs.shape == (*shape[:-1], shape[-1] // run) and runs.is_contiguous() and run * runs.shape[-1] == shape[-1]
    rows, columns = torch.arange(shape[-2]) // size, torch.arange(shape[-1]) // size
    assert torch.equal(runs.repeat_interleave(run, -1), scale[..., rows[:, None], columns])
    counts = per_block(torch.ones_like(runs), shape, spec).sum(-2) * run
    heights, widths = (torch.bincount(one) for one in (rows, columns))
    assert torch.equal(counts, (heights[:, None] * widths).expand(counts.shape).float())
    whole = (3 * size, 2 * size)
    values = torch.randn(3 * size, 2)
    assert spec.run_length(whole) == size
    assert per_block(values, whole, spec).data_ptr() == values.data_ptr()
    assert torch.equal(per_block(values, whole, spec), values.view(3, size, 2))
