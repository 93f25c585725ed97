"""Sums of few bits, emulated, against fp64; and whether the option reaches the GEMM."""

import torch
from torch import nn

from benchmarks.fast_accum import BITS, INSTRUCTION, codes_of, emulated
from quant import SCHEMES, prepare
from tests.unit.quant.test_gemm import Called


def test_sums_that_fit_are_exact(seed):
    """1024 products of -1, 0 and 1 never sum to what 14 bits do not hold."""
    x, weight = (torch.randint(-1, 2, (5, 1024)).double() for _ in range(2))
    for fast in (False, True):
        assert torch.equal(emulated(x, weight, fast=fast), x @ weight.t())


def test_no_sum_is_off_by_more_than_what_is_cut_off(seed):
    """Each instruction cuts less than one unit of the last of 14 bits from each of 33 terms, and from their sum, whose
    leading bit is at most six above the largest term's. No term is larger than the sum of all magnitudes."""
    inner = 128 * int(torch.randint(1, 9, ()))
    x, weight = codes_of(torch.randn(6, inner).double()), codes_of(torch.randn(7, inner).double())
    exact, size = x @ weight.t(), x.abs() @ weight.abs().t()
    per_instruction = (INSTRUCTION + 1 + 2**6) * 2.0 ** (1 - BITS)
    for fast, window in ((True, inner), (False, 128)):
        windows = zip(x.abs().split(window, dim=1), weight.abs().split(window, dim=1), strict=True)
        largest = torch.stack([a @ b.t() for a, b in windows])
        bound = window // INSTRUCTION * per_instruction * largest.sum(0) + inner // 128 * 2.0**-24 * size
        off = (emulated(x, weight, fast=fast) - exact).abs()
        assert off.any() and (off <= bound).all()


def test_fast_sums_lose_more_the_longer_they_are(seed):
    """Of magnitudes, whose sum grows: truncation is always towards zero, so that it adds up."""
    x, weight = (codes_of(torch.randn(4, 4096).abs().double()) for _ in range(2))
    exact = x @ weight.t()
    fast, slow = (exact - emulated(x, weight, fast=fast) for fast in (True, False))
    assert (fast > 0.01 * exact).all() and (slow.abs() < 0.002 * exact).all()


def test_the_layer_says_how_its_gemm_adds_and_a_cpu_does_not_care(seed):
    outputs = []
    for fast in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"up_proj": nn.Linear(64, 32, dtype=torch.bfloat16)})
        scales = {"learn_weight_scale": False, "learn_input_scale": False}
        prepare(model, SCHEMES["fp8_static"], **scales, fp8_gemm=True, fast_accum=fast)
        for name in ("weight_s0", "input_s0"):
            getattr(model["up_proj"], name).data.fill_(0.01)
        with Called() as called:
            outputs.append(model["up_proj"](torch.randn(16, 64).bfloat16()))
        (args, kwargs), *_ = called.arguments["aten::_scaled_mm"]
        assert any(one is True for one in [*args, *kwargs.values()]) == fast
    assert torch.equal(*outputs) and outputs[0].isfinite().all()
