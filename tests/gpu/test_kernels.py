"""The CUDA kernels against the CPU's, bit for bit, and against fp64; under other streams and in CUDA graphs.

The cases are those of the CPU kernels' test, where the CPU's results are compared with the reference.
"""

import random
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from quant.kernels.build_kernels import build
from quant.reference import absmax_scale, asymmetric_grid
from quant.spec import TensorSpec
from tests.unit.quant.kernels.cases import DTYPES, GRIDS, Case, every_value, random_case, rows_to_sum
from tests.unit.quant.kernels.comparing import (
    OPS,
    TOKEN_GRIDS,
    assert_same,
    check_operators,
    check_theta_gradient,
    gradients,
    results,
)
from tests.unit.quant.kernels.test_fused import check_layers


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The compiled kernels; without nvcc the tests would run torch.compile."""
    if torch.cuda.is_available():
        built = build()
        assert built.cuda, built.why


def on_gpu(x: Tensor | None) -> Tensor | None:
    """The same values on the GPU, in the same memory layout: the kernels have a path of their own for odd addresses."""
    if x is None:
        return None
    if x.numel() == 0 or not x.is_contiguous():
        return x.cuda()
    shift = x.storage_offset() % 8
    return torch.cat([x.new_zeros(shift), x.reshape(-1)]).cuda()[shift:].view(x.shape)


def same(name: str, *arguments: object, what: str = "") -> list[Tensor]:
    """Results of an operator on the CPU, which are those on the GPU."""
    theirs = results(OPS, name, *arguments)
    on_device = [on_gpu(one) if isinstance(one, Tensor) else one for one in arguments]
    for ours, other in zip(results(OPS, name, *on_device), theirs, strict=True):
        assert ours.is_cuda
        assert_same(ours.cpu(), other, f"{name}, {what}")
    return theirs


def check(case: Case) -> None:
    """Every operator on one case."""
    of_case = partial(same, what=str(case))
    check_operators(case, of_case)
    given = (case.grad, case.x, *case.scales, case.grid, case.scale_dtype, case.factor)
    for wanted in (False, True) if case.theta is not None else (False,):
        for of_weight in (False, True):
            of_case("fake_quantize_backward_", *given, wanted, case.zero, case.above, of_weight)
    if case.theta is not None:
        of_case("sum_products", case.x, case.grad, case.theta, case.factor)
    of_case("keep_tokens", case.x, 0, False)
    for tokens in TOKEN_GRIDS:
        of_case("fake_quantize_tokens", case.x, *tokens)
        of_case("fake_quantize_tokens_and_mask_", case.grad, case.x, *tokens, True)


def test_random_tensors(seed):
    for _ in range(300):
        check(random_case())
    for _ in range(20):
        check(random_case(3_000_000))


def test_sums_of_rows(seed):
    for _ in range(100):
        same("sum_rows", *rows_to_sum())


def test_norms_and_swiglu(seed):
    for _ in range(120):
        check_layers(random.choice(DTYPES), random.random() < 0.3, same)


def test_every_bf16_and_fp16_value():
    """All bit patterns, with scales that put ties, subnormals and saturation everywhere."""
    for dtype, scale, grid in product((torch.bfloat16, torch.float16), (1.0, 0.37, 2.0**-9, 1e-3, 300.0), GRIDS):
        arguments = (every_value(dtype), torch.tensor([scale]), None, grid, torch.float32)
        same("fake_quantize", *arguments)
        same("quantize", *arguments, True, False, False)


def test_measured_scales_are_those_of_a_cpu(seed):
    """CUDA divides by a number of Python's by multiplying with its reciprocal, an ulp off in half the cases."""
    absmax = torch.rand(10_000)
    for spec in (TensorSpec("fp8_e4m3", 8, "tensor"), TensorSpec("int", 4, "channel"), TensorSpec("int", 8, "channel")):
        assert_same(absmax_scale(absmax.cuda(), spec).cpu(), absmax_scale(absmax, spec))
    spec = TensorSpec("int", 8, "token", symmetric=False, dynamic=True)
    on_device = asymmetric_grid(-absmax.cuda(), absmax.flip(0).cuda(), spec)
    for ours, theirs in zip(on_device, asymmetric_grid(-absmax, absmax.flip(0), spec), strict=True):
        assert_same(ours.cpu(), theirs)


def test_theta_gradient_against_fp64(seed):
    """A large bf16 weight with one scale: two stages of addition, within fp32 rounding of the exact sum."""
    x, grad = torch.randn(4096, 4099).bfloat16(), torch.randn(4096, 4099).bfloat16()
    case = Case(x, grad, torch.tensor([0.004]), torch.tensor([0.1]), 0, torch.float32, 1e-3)
    arguments = (grad.cuda(), x.cuda(), case.s0.cuda(), case.theta.cuda(), 0, torch.float32, 1e-3, True)
    found = [gradients(OPS, *arguments)[1].cpu() for _ in range(5)]
    check_theta_gradient(case, found[0])
    assert all(torch.equal(one, found[0]) for one in found), "the order of addition is not fixed"


def test_more_than_2_to_the_31_elements():
    """Index arithmetic: elements beyond 2^31 are computed, and nothing else is written."""
    numel = 2**31 + 12_345
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.tensor([0.3, -2.0, 1000.0])
    s0 = torch.tensor([0.01], device="cuda")
    assert OPS.amax(x, 1).item() == 1000
    values = OPS.fake_quantize(x, s0, None, 0, torch.float32)
    expected = OPS.fake_quantize(x[-3:].cpu(), s0.cpu(), None, 0, torch.float32)
    assert torch.equal(values[-3:].cpu(), expected) and values.count_nonzero() == 3
    del values
    codes, mask, *_ = OPS.quantize(x, s0, None, 0, torch.float32, True, False, False)
    assert codes.view(torch.uint8).count_nonzero() == 3
    assert mask[-1] == 0 and (mask != 255).sum() == 1, "of the last element, alone in its byte, and it clips"
    del codes, mask
    grad_x = torch.ones_like(x)
    OPS.fake_quantize_backward_(grad_x, x, s0, None, 0, torch.float32, 1.0, False)
    assert grad_x[-3:].tolist() == [1, 1, 0] and grad_x.count_nonzero() == numel - 1


def test_the_current_stream_and_cuda_graphs(seed):
    """A captured graph computes again on what its inputs hold then; nothing waits for the device."""
    x, grad = (torch.randn(512, 1024, device="cuda").bfloat16() for _ in range(2))
    s0, theta = torch.tensor([0.01], device="cuda"), torch.tensor([0.1], device="cuda")
    groups = torch.full((512, 32), 0.02, device="cuda")

    def all_of_them() -> list[Tensor]:
        codes, mask, *others = OPS.quantize(x, s0, theta, 0, torch.float32, True, True, True)
        return [
            codes,
            mask,
            *others,
            *results(OPS, "fake_quantize_backward_", grad, x, groups, None, 4, torch.float32, 1.0, False),
            *results(OPS, "fake_quantize_backward_", grad, x, s0, theta, 0, torch.float32, 1.0, True),
            *results(OPS, "masked_", grad, mask),
            OPS.fake_quantize(x, groups, None, 4, torch.float32),
            OPS.fake_quantize(x, s0, theta, 0, torch.float32),
            *OPS.dequantize(codes, s0, theta, torch.float32, torch.bfloat16, True),
            OPS.multiply_runs(x, theta),
            OPS.sum_products(x, grad, theta, 1.0),
            OPS.amax(x, 4),
            OPS.fake_quantize_tokens(x, 8, False),
            OPS.fake_quantize_tokens(x, 0, True),
        ]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        all_of_them()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = all_of_them()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    x.copy_(torch.randn_like(x))
    theta.fill_(-0.2)
    graph.replay()
    for ours, expected in zip(captured, all_of_them(), strict=True):
        assert_same(ours, expected, "replayed")
