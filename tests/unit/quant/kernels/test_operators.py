"""The operators as torch sees them: schemas, shapes, errors, and the reference in place of the kernels."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.unit.quant.kernels.cases import calls_of_layers, calls_with_scales, eager
from tests.unit.quant.kernels.comparing import OPS, results

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
    codes, *_ = eager.quantize(x, s0, None, 0, torch.float32, False, False, False)
    for module in (eager, OPS):  # the last argument is there for torch.compile
        values = module.fake_quantize(x, s0, None, 0, torch.float32, x)
        assert torch.equal(values, module.dequantize(codes, s0, None, torch.float32, torch.float32, False, x)[0])
        assert torch.equal(module.fake_quantize_tokens(x, 0, True, x), module.fake_quantize_tokens(x, 0, True))


# ---- refusals


X, S0, THETA, ONE = torch.randn(4, 6), torch.ones(4), torch.zeros(4), torch.ones(1)
ROWS, WEIGHT = torch.randn(4, 16), torch.ones(16)
BYTES, FP32, E8M0, E4M3 = torch.zeros(8, dtype=torch.uint8), torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn
FLOATS = "expected float32, bfloat16 or float16"
# Arguments that are right. A case changes one of them, by its position, or gives all.
RIGHT = {
    "fake_quantize": (X, S0, THETA, 0, FP32),
    "quantize": (X, S0, THETA, 0, FP32, True, True, True),
    "fake_quantize_backward_": (X, X, S0, THETA, 0, FP32, 1.0, True),
    "dequantize": (X.char(), S0, None, FP32, FP32, False),
    "effective_scale": (S0, None, FP32),
    "masked_": (X, BYTES[:3]),
    "multiply_runs": (X, THETA),
    "sum_products": (X, X, THETA, 1.0),
    "amax": (X, 1),
    "fake_quantize_tokens": (X, 8, True),
    "rms_norm_quantize": (ROWS, WEIGHT, 1e-6, ONE, 0, FP32, True, True),
    "rms_norm_backward": (ROWS, ROWS, WEIGHT, S0, BYTES, True),
    "silu_mul_quantize": (ROWS, ROWS, ONE, 0, FP32, True, True),
    "silu_mul_backward": (ROWS, ROWS, ROWS, BYTES),
}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("fake_quantize", (1, torch.ones(5)), "24 elements are not divisible by 5 scales"),
        ("fake_quantize", (1, torch.ones(0)), "24 elements are not divisible by 0 scales"),
        ("fake_quantize", (1, S0.double()), "s0 is Double, expected float32"),
        ("fake_quantize", (1, torch.ones(8)[::2]), "s0 must be contiguous"),
        ("fake_quantize", (2, torch.zeros(3)), "theta has 3 elements, s0 has 4"),
        ("fake_quantize", (2, THETA.double()), f"theta is Double, {FLOATS}"),
        ("fake_quantize", (2, torch.ones(8)[::2]), "theta must be contiguous"),
        ("fake_quantize", (0, X.double()), f"x is Double, {FLOATS}"),
        ("fake_quantize", (0, X.int()), f"x is Int, {FLOATS}"),
        ("fake_quantize", (3, -1), "grid -1 is neither 0 .e4m3., 1 .e2m1. nor 2 to 8 bits"),
        ("fake_quantize", (3, -9), "grid -9 is neither"),
        ("fake_quantize", (3, 9), "grid 9 is neither"),
        ("fake_quantize", (4, torch.float64), "scale_dtype is Double, expected float32"),
        ("fake_quantize", (X, S0, None, -4, FP32, None, S0), "a narrow grid has no zero points"),
        ("fake_quantize", (X, ONE, None, 1, E4M3), "scales in e4m3, and only these, need a global scale"),
        ("fake_quantize", (X, ONE, None, 1, FP32, None, None, ONE), "scales in e4m3, and only these, need"),
        ("quantize", (0, torch.randn(7)), "7 elements are not divisible by 4 scales"),
        ("quantize", (1, S0.double()), "s0 is Double, expected float32"),
        ("dequantize", (0, X.short()), "codes are Short, expected float8_e4m3fn, uint8 .e2m1. or int8"),
        ("dequantize", (4, torch.float64), "dtype is Double, expected float32"),
        ("dequantize", (5, True), "there is no theta to have zeros"),
        ("fake_quantize_backward_", (0, X[:2]), r"grad is \[2, 6\] Float on cpu, expected \[4, 6\] Float"),
        ("fake_quantize_backward_", (0, X.half()), r"grad is \[4, 6\] Half on cpu, expected \[4, 6\] Float"),
        ("fake_quantize_backward_", (3, None), "there is no theta"),
        ("fake_quantize_backward_", (0, torch.randn(6, 4).t()), "grad is overwritten and must be contiguous"),
        ("masked_", (0, torch.randn(6, 4).t()), "grad is overwritten and must be contiguous"),
        ("masked_", (1, BYTES[:2]), r"a mask of 2 bytes \(Byte\) on cpu does not belong to 24 elements"),
        ("masked_", (1, torch.zeros(24, dtype=torch.bool)), r"a mask of 24 bytes \(Bool\) on cpu does not belong"),
        ("effective_scale", (0, S0.double()), "s0 is Double, expected float32"),
        ("effective_scale", (1, torch.zeros(5)), "theta has 5 elements, s0 has 4"),
        ("multiply_runs", (0, X.double()), f"x is Double, {FLOATS}"),
        ("multiply_runs", (1, torch.zeros(5)), "24 elements are not divisible by 5 scales"),
        ("multiply_runs", (1, torch.zeros(0)), "24 elements are not divisible by 0 scales"),
        ("multiply_runs", (1, THETA.double()), f"theta is Double, {FLOATS}"),
        ("multiply_runs", (1, torch.ones(8)[::2]), "theta must be contiguous"),
        ("sum_products", (1, X[:2]), r"y is \[2, 6\] Float on cpu, expected \[4, 6\] Float"),
        ("sum_products", (1, X.half()), r"y is \[4, 6\] Half on cpu, expected \[4, 6\] Float"),
        ("sum_products", (2, torch.zeros(5)), "24 elements are not divisible by 5 scales"),
        ("amax", (1, 5), "24 elements are not divisible by 5 parts"),
        ("amax", (1, 0), "24 elements are not divisible by 0 parts"),
        ("amax", (0, X.double()), f"x is Double, {FLOATS}"),
        ("sum_rows", (X, torch.zeros(2, 2, dtype=torch.int32)), "places are Int on cpu, expected int64 on cpu"),
        ("fake_quantize_tokens", (0, torch.tensor(1.0)), "at least one dimension"),
        ("fake_quantize_tokens", (1, 9), "grid 9 of tokens is neither 0 .e4m3., 1 .e2m1. nor 2 to 8 bits"),
        ("fake_quantize_tokens", (1, 1), "scales of tokens are float32, of floats powers of two, of e2m1 also e4m3"),
        ("fake_quantize_tokens", (X, 8, True, None, E8M0), "scales of tokens are float32, of floats powers"),
        ("fake_quantize_tokens", (X.view(1, 24).repeat(1, 2), 1, True, None, E8M0), "at most 32 features, got 48"),
        ("fake_quantize_tokens", (X, 1, True, None, E4M3), "scales in e4m3, and only these, need a global scale"),
        ("fake_quantize_tokens", (X, 1, True, None, E8M0, ONE), "scales in e4m3, and only these, need"),
        ("fake_quantize_tokens", (X, 1, True, None, E4M3, ONE.expand(2)), "tokens have one global scale, got 2"),
        ("fake_quantize_tokens", (X, 0, False), "codes of tokens that are floats are symmetric"),
        ("fake_quantize_tokens_and_mask_", (X[:3], X, 8, True, True), r"grad is \[3, 6\] Float on cpu, expected \[4"),
        ("fake_quantize_tokens_and_mask_", (X.t(), X.t(), 8, True, True), "grad is overwritten and must be contiguous"),
        # Integers, and codes or masks that end inside a byte.
        ("keep_tokens", (torch.randn(3, 12), 1, False, E8M0), "floats are kept, e2m1 and masks in eights"),
        ("keep_tokens", (torch.randn(3, 16), 8, False), "floats are kept, e2m1 and masks in eights"),
        ("keep_tokens", (torch.randn(3, 12), 0, True), "floats are kept, e2m1 and masks in eights"),
        ("rms_norm_quantize", (ROWS[:, :12], WEIGHT[:12], 1e-6, ONE, 0, FP32, True, True), "a multiple of 8 and"),
        ("rms_norm_quantize", (1, WEIGHT[:8]), r"weight is \[8\] Float on cpu"),
        ("rms_norm_quantize", (1, WEIGHT.half()), r"expected \[16\] Float on"),
        ("rms_norm_quantize", (3, S0), "one scale, got 4"),
        ("rms_norm_quantize", (3, ONE.half()), "s0 is Half, expected float"),
        ("rms_norm_backward", (0, ROWS[:2]), r"grad is \[2, 16\] Float on cpu, expected"),
        ("rms_norm_backward", (3, S0[:2]), "rstd must have one number per row"),
        ("rms_norm_backward", (4, BYTES[:2]), "a mask of 2 bytes"),
        ("silu_mul_quantize", (1, ROWS[:2]), r"up is \[2, 16\] Float on cpu"),
        ("silu_mul_backward", (0, ROWS.half()), r"grad is \[4, 16\] Half on cpu, expected \[4, 16\] Float"),
    ],
)
def test_errors_name_what_is_wrong(name, wrong, message):
    arguments = wrong
    if name in RIGHT and len(wrong) == 2:
        arguments = (*RIGHT[name][: wrong[0]], wrong[1], *RIGHT[name][wrong[0] + 1 :])
    with pytest.raises((RuntimeError, TypeError), match=message):
        getattr(OPS, name)(*arguments)
