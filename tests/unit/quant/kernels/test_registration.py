"""What torch must know of the operators: schemas, shapes, gradients by autograd, and a reference that can stand in."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from quant.kernels import eager
from tests.unit.quant.kernels.cases import DTYPES, Case, calls_of_layers, calls_with_scales, spec_of
from tests.unit.quant.kernels.comparing import OPS, TOKEN_GRIDS, assert_same, check_theta_gradient, results

pytestmark = pytest.mark.usefixtures("compiled")


def samples() -> list[tuple[str, tuple]]:
    """Arguments of every operator, with one scale and several, not contiguous and empty."""
    found = []
    for x, s0 in (
        (torch.randn(6, 16), torch.full((1,), 0.1)),
        (torch.randn(2, 16, 5).bfloat16().transpose(0, 2), torch.full((5, 4), 0.1)),
        (torch.randn(16, 5).t(), torch.full((5, 1), 0.1)),
        (torch.randn(0, 8).half(), torch.full((3,), 0.1)),
    ):
        found += calls_with_scales(x, s0)
    for x in (torch.randn(16, 5).t(), torch.randn(2, 16, 5).bfloat16().transpose(1, 2), torch.randn(0, 8).half()):
        found += calls_of_layers(x)
    for places in (torch.tensor([[0, 2], [1, 1], [2, 0]]), torch.zeros(4, 0, dtype=torch.int64)):
        found.append(("sum_rows", (torch.randn(5, 3).t(), places.t().contiguous().t())))
    return found


def test_schemas_shapes_and_registrations():
    """Nothing is written in place, shapes and strides are what torch.compile is told, in every sample."""
    called = set()
    for name, arguments in samples():
        tests = ["test_autograd_registration", "test_faketensor"]
        if arguments[0].dtype != torch.float8_e4m3fn:  # the check itself does arithmetic with the inputs
            tests.append("test_schema")
        opcheck(getattr(OPS, name).default, arguments, test_utils=tests)
        called.add(name)
    every = [name for name in torch._C._dispatch_get_all_op_names() if "deepqat::" in name]
    assert called == {name.removeprefix("deepqat::") for name in every}
    # Those with a gradient also traced, with dynamic shapes.
    x, theta = torch.randn(3, 8, requires_grad=True), torch.randn(3, requires_grad=True)
    opcheck(OPS.fake_quantize.default, (x, torch.full((3,), 0.1), theta, 4, torch.float32))
    opcheck(OPS.fake_quantize_tokens.default, (x, 8, False))


def test_results_are_contiguous_and_new_and_the_reference_can_stand_in(seed):
    """Whatever the strides: torch.compile relies on it, and a result that shared memory would change with x."""
    for name, arguments in samples():
        theirs = getattr(eager, name)(*arguments)
        assert all(one is None or one.is_contiguous() for one in (theirs if isinstance(theirs, tuple) else (theirs,)))
        if name.endswith("_"):
            continue
        before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        inputs = [a.data_ptr() for a in arguments if isinstance(a, Tensor) and a.numel()]
        for result in results(OPS, name, *arguments):
            assert result.is_contiguous() and (result.numel() == 0 or result.data_ptr() not in inputs), name
            result.zero_()
        for a, b in zip(arguments, before, strict=True):
            assert not isinstance(a, Tensor) or torch.equal(a.float(), b.float()), name
    x, s0 = torch.randn(4, 8), torch.full((1,), 0.1)
    codes, _ = eager.quantize(x, s0, None, 0, torch.float32, False)
    for module in (eager, OPS):  # the last argument is there for torch.compile
        values = module.fake_quantize(x, s0, None, 0, torch.float32, x)
        assert torch.equal(values, module.dequantize(codes, s0, None, torch.float32, torch.float32, x))
        assert torch.equal(module.fake_quantize_tokens(x, 0, True, x), module.fake_quantize_tokens(x, 0, True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("grid", "shifted"), [(0, False), (1, False), (2, False), (4, False), (-4, False), (4, True), (8, True)]
)
def test_gradients_of_fake_quantize(grid, shifted, dtype, seed):
    """Autograd through the operator is the reference's backward; only what needs a gradient gets one."""
    zero = torch.randint(-(2 ** (grid - 1)), 2 ** (grid - 1), (6, 5)).float() if shifted else None
    x, grad, theta = torch.randn(6, 40).to(dtype), torch.randn(6, 40).to(dtype), (0.3 * torch.randn(6, 5)).to(dtype)
    case = Case(x, grad, (torch.rand(6, 5) + 0.5) / spec_of(grid).qmax, theta, grid, dtype, 1.0, zero)

    def gradients(*wanted: Tensor) -> tuple[Tensor, ...]:
        for one in (x, theta):
            one.requires_grad_(any(one is other for other in wanted))
        return torch.autograd.grad(OPS.fake_quantize(x, case.s0, theta, grid, dtype, None, zero), wanted, grad)

    grad_x, grad_theta = gradients(x, theta)
    assert torch.equal(gradients(x)[0], grad_x) and torch.equal(gradients(theta)[0], grad_theta)
    gradients_of = (grad, x.detach(), case.s0, theta.detach_(), grid, dtype, 1.0, False, zero)
    assert_same(grad_x, eager.fake_quantize_backward(*gradients_of)[0])
    check_theta_gradient(case, grad_theta)
    assert (grad_x == 0).any() and grad_theta.any(), "some must be clipped"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_fake_quantize_tokens(dtype, seed):
    """Straight-through within the range of each token; of a token that is not finite nothing."""
    x, grad = torch.randn(50, 33).to(dtype), torch.randn(50, 33).to(dtype)
    x[3, 5], x[4, 6] = math.nan, math.inf
    leaf = x.clone().requires_grad_()
    for tokens in TOKEN_GRIDS:
        (ours,) = torch.autograd.grad(OPS.fake_quantize_tokens(leaf, *tokens), leaf, grad)
        assert_same(ours, eager.fake_quantize_tokens_backward(grad, x, *tokens))
        assert not ours[3:5].any() and ours[:3].any()
