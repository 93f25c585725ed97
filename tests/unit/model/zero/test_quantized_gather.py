"""Codes and gradients of slices of a weight compared with those of the whole weight; moments of the optimizer."""

import pytest
import torch
from torch.nn import Parameter

from model.zero import reset_moments
from model.zero.quantized_gather import part_gradients_, quantize_part
from quant import Quantizer, Scale, TensorSpec, get_scheme, kernels
from quant.packed_weight import codes_of_placeholder, placeholder

FP8 = {name: TensorSpec("fp8_e4m3", 8, name) for name in ("tensor", "channel")}
SPECS = {**{f"fp8_{name}": spec for name, spec in FP8.items()}, "int8": TensorSpec("int", 8, "channel")}
SPECS["int3"] = TensorSpec("int", 3, "channel")
SHAPE = (7, 13)


def random_quantizer(spec, dtype, *, stack=0, theta=True):
    """Scales that clip some elements of a unit Gaussian."""
    shape = ((stack,) if stack else (1,)) if spec.granularity == "tensor" else (SHAPE[0], 1)
    s0 = (1 + torch.rand(shape)) / spec.qmax
    learned = (torch.randn(shape) / 10).to(dtype) if theta else None
    return Quantizer(Scale(s0, learned), spec, dtype)


def parts_of(flat, ranks):
    """``start, part`` as stage 3 shares it out; the last parts may be empty."""
    size = -(-flat.numel() // ranks)
    return [(min(rank * size, flat.numel()), flat[rank * size : (rank + 1) * size]) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SPECS)
def test_the_codes_of_all_parts_are_those_of_the_whole(name, dtype, ranks):
    """With what follows the last part where the ranks do not divide the weight, they stand in for it."""
    scale = random_quantizer(SPECS[name], dtype)
    weight = torch.randn(SHAPE).to(dtype)
    codes = torch.cat([quantize_part(p, s, weight.numel(), scale) for s, p in parts_of(weight.flatten(), ranks)])
    assert torch.equal(codes.view(SHAPE), kernels.quantize(weight, scale)[0].view(torch.uint8))
    size = -(-weight.numel() // ranks)
    gathered = torch.nn.functional.pad(codes, (0, ranks * size - len(codes))).view(ranks, size)
    found = codes_of_placeholder(placeholder(gathered, SHAPE, dtype), scale.spec)
    assert torch.equal(kernels.dequantize(found, scale), kernels.fake_quantize(weight, scale))


def test_every_code_is_its_own_value_s_code_at_every_scale():
    """bf16 rounds the value of a code by 2^-9 of it, which must not change the code."""
    every = torch.arange(256, dtype=torch.uint8)
    for exponent in range(-40, 10):
        s0 = (1 + torch.rand(1)) * 2.0**exponent
        for spec, codes in ((FP8["tensor"], every[(every & 127) != 127]), (TensorSpec("int", 8, "tensor"), every)):
            scale = Quantizer(Scale(s0), spec, torch.bfloat16)
            dtype = torch.int8 if spec.dtype == "int" else torch.float8_e4m3fn
            values = kernels.dequantize(codes.view(dtype), scale)
            assert torch.equal(kernels.quantize(values, scale)[0].view(torch.uint8), codes), (spec, s0)


@pytest.mark.parametrize(("name", "stack"), [*((name, 0) for name in SPECS), ("fp8_tensor", 7)])
def test_gradients_of_parts_of_a_sum_are_the_sums_of_gradients(name, stack):
    """The mask bit for bit. A theta's gradient: the same fp32 terms, added up in another order. ``stack``: scales of so
    many experts, of which a part may hold one and a half."""
    scale = random_quantizer(SPECS[name], torch.bfloat16, stack=stack)
    weight = torch.randn(SHAPE).to(torch.bfloat16)
    weight[3, 5], weight[3, 6] = 9.0, 0.0  # one that every scale clips, and one that none does
    grads = torch.randn(2, *SHAPE)
    exact = scale._replace(scale=Scale(scale.scale.s0, scale.scale.theta.float()))
    each = [grad.clone() for grad in grads]
    thetas = sum(
        kernels.fake_quantize_backward_(grad, weight.float(), exact, factor=0.5, theta_gradient=True).double()
        for grad in each
    ).flatten()
    whole = grads.sum(0).flatten()
    found = torch.zeros_like(thetas)
    for (start, part), (_, grad) in zip(parts_of(weight.flatten(), 3), parts_of(whole, 3), strict=True):
        found += part_gradients_(grad, part, start, weight.numel(), scale, factor=0.5)
    assert torch.equal(whole.view(SHAPE), sum(each))
    assert (whole == 0).any() and (whole != 0).any()
    # Terms are at most |g| * qmax * s * 0.5 with |g| under 6 here; a sum of 91 of them is off by 91 * 2^-24 of that.
    bound = 4 * 91 * 2.0**-24 * 6 * SPECS[name].qmax * float(kernels.effective_scale(scale).max())
    assert (found - thetas).abs().max() <= bound


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["fp8_static", "w4a16_channel"])
def test_a_weight_that_is_not_finite_has_a_nan_as_its_gradient(name, bad, learned):
    spec = get_scheme(name).weights
    weight = torch.ones(2, 8)
    weight[1, 3] = bad
    shape = 2 if spec.granularity == "channel" else 1
    scale = Quantizer(Scale(torch.ones(shape), torch.zeros(shape) if learned else None), spec, torch.float32)
    grad = torch.ones(16)
    part_gradients_(grad, weight.flatten(), 0, 16, scale, factor=1.0)
    assert grad.isnan().nonzero().tolist() == [[11]]


def test_a_part_without_a_learned_scale_has_no_share():
    scale = random_quantizer(FP8["tensor"], torch.float32, theta=False)
    assert part_gradients_(torch.ones(3), torch.ones(3), 2, 91, scale, factor=1.0) is None


def test_a_parameter_without_a_gradient_yet_has_no_moments():
    """As the scale of a frozen embedding, while fake quant is off."""
    seen, unseen = Parameter(torch.rand(3)), Parameter(torch.rand(2))
    optimizer = torch.optim.AdamW([seen, unseen])
    seen.grad = torch.rand(3)
    optimizer.step()
    reset_moments(optimizer, [unseen, seen])
    assert not optimizer.state[seen]["exp_avg"].any() and not optimizer.state[seen]["exp_avg_sq"].any()
    assert not optimizer.state.get(unseen)
    unseen.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[unseen]["exp_avg"].all()
