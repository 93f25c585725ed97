"""A quantized Linear on a GPU: the fp8 GEMM and simulate against fp64."""

import random

import pytest
import torch
from torch import Tensor, nn

from quant import gemm
from quant.autograd import Plan, quant_linear
from quant.reference import fake_quant
from quant.scale import Scale
from quant.spec import TensorSpec

FP8 = TensorSpec("fp8_e4m3", 8, "tensor")


def make(tokens: int, in_: int, out: int):
    """Operands on the GPU, with scales that clip a few values."""
    x = torch.randn(tokens, in_, device="cuda").bfloat16().requires_grad_()
    weight = nn.Parameter((0.02 * torch.randn(out, in_, device="cuda")).bfloat16())
    bias = nn.Parameter(torch.randn(out, device="cuda").bfloat16())
    scales = [torch.tensor([value], device="cuda") for value in (0.08 / 448, 4.0 / 448)]
    thetas = [nn.Parameter(torch.zeros(1, device="cuda").bfloat16()) for _ in range(2)]
    return x, weight, bias, scales, thetas


def check_both_ways(
    operands: tuple, numel: int, grad: Tensor, wanted: list, exact: Tensor, size: Tensor, **how: Tensor
):
    """Codes are exact; simulate rounds each operand to bf16 (2^-9 relative), both add up in fp32 and round once.
    Backward is the same function in both."""
    gradients, width = [], operands[0].shape[-1]
    for fp8_gemm in (False, True):
        output = quant_linear(*operands, Plan(FP8, FP8, numel, width, fp8_gemm), **how)
        operand_rounding = 0 if fp8_gemm else 2 * 2.0**-9
        bound = 2.0**-8 * exact.abs() + (operand_rounding + width * 2.0**-24 + 2.0**-13) * size
        assert ((output.double() - exact).abs() <= bound).all(), f"fp8_gemm {fp8_gemm}"
        gradients.append(torch.autograd.grad(output, wanted, grad))
    for simulated, ours in zip(*gradients, strict=True):
        assert torch.equal(simulated, ours)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("shape", [(64, 256, 128), (1, 16, 16), (777, 1024, 3072)])
def test_the_fp8_gemm_and_simulate_against_fp64(shape, learned, seed):
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip(f"fp8 tensor cores begin with compute capability 8.9, this is {capability}")
    x, weight, bias, (weight_s0, input_s0), (weight_theta, input_theta) = make(*shape)
    operands = [fake_quant(t.detach().double(), s.double(), FP8) for t, s in ((x, input_s0), (weight, weight_s0))]
    exact = operands[0] @ operands[1].t() + bias.double()
    size = operands[0].abs() @ operands[1].abs().t() + bias.double().abs()
    grad = torch.randn(shape[0], shape[2], device="cuda").bfloat16()
    operands = (x, weight, bias, Scale(weight_s0, weight_theta), Scale(input_s0, input_theta if learned else None))
    wanted = [x, weight, bias, weight_theta, *([input_theta] if learned else [])]
    check_both_ways(operands, weight.numel(), grad, wanted, exact, size)


@pytest.mark.parametrize("counts", [[0, 5, 16, 0], [300, 1, 77, 130], [1, 0, 0, 0]])
def test_the_fp8_gemm_of_stacked_experts_against_fp64(counts, seed):
    """Experts without rows, and numbers of rows that are not divisible by 16."""
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"the grouped fp8 GEMM is for compute capability 9.0, this is {capability}")
    experts, in_, out = len(counts), 256, 384
    x = torch.randn(sum(counts), in_, device="cuda").bfloat16().requires_grad_()
    weight = nn.Parameter((0.02 * torch.randn(experts, out, in_, device="cuda")).bfloat16())
    weight_s0 = (torch.rand(experts, device="cuda") + 0.5) * 0.08 / 448
    input_s0 = torch.tensor([4.0 / 448], device="cuda")
    offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
    used_x = fake_quant(x.detach().double(), input_s0.double(), FP8).split(counts)
    used_weight = [
        fake_quant(one.detach().double(), s.double().view(1), FP8) for one, s in zip(weight, weight_s0, strict=True)
    ]
    exact = torch.cat([rows @ one.t() for rows, one in zip(used_x, used_weight, strict=True)])
    size = torch.cat([rows.abs() @ one.abs().t() for rows, one in zip(used_x, used_weight, strict=True)])
    grad = torch.randn(sum(counts), out, device="cuda").bfloat16()
    operands = (x, weight, None, Scale(weight_s0), Scale(input_s0))
    check_both_ways(operands, weight.numel() // experts, grad, [x, weight], exact, size, offsets=offsets)


def at_an_odd_address(tensor: Tensor) -> Tensor:
    """The tensor, behind one element of a larger one: ZeRO-3 gathers Parameters anywhere."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("fast", [True, False])
def test_the_fp8_gemm_takes_operands_at_any_address(fast, seed):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 tensor cores begin with compute capability 8.9")
    x, weight = (torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    bias, scales = torch.randn(64, device="cuda").bfloat16(), torch.rand(2, 1, device="cuda") + 0.5
    operands = (x, scales[0], weight, scales[1].clone(), bias)
    expected = gemm.scaled_linear(*operands, torch.bfloat16, fast_accum=fast)
    for index, operand in enumerate(operands):
        moved = (*operands[:index], at_an_odd_address(operand), *operands[index + 1 :])
        assert torch.equal(gemm.scaled_linear(*moved, torch.bfloat16, fast_accum=fast), expected), index


@pytest.mark.parametrize("fast", [True, False])
def test_the_fp8_gemm_of_random_stacks(fast, seed):
    """Experts of any number of rows, also none, at the addresses that this gives.

    If ``fast``, each step of 32 products may lose 2^-13 of the largest sum so far (benchmarks/results/fast_accum.md).
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the grouped fp8 GEMM is for compute capability 9.0")
    for _ in range(40):
        experts, rows = random.randint(1, 40), random.choice([1, 15, 16, 17, 300, 5000])
        width, out = (16 * random.randint(1, 40) for _ in range(2))
        counts = torch.multinomial(torch.rand(experts) ** 4 + 1e-9, rows, replacement=True).bincount(minlength=experts)
        x, weight = torch.randn(rows, width, device="cuda"), torch.randn(experts, out, width, device="cuda")
        x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        scale, scales = torch.rand(1, device="cuda") + 0.5, torch.rand(experts, device="cuda") + 0.5
        offsets = counts.cumsum(0).int().cuda()
        garbage = torch.full((rows, out), torch.nan, device="cuda").bfloat16()
        del garbage  # the result gets its memory
        output = gemm.scaled_linear(x, scale, weight, scales, None, torch.bfloat16, offsets, fast_accum=fast)
        parts = zip(x.double().split(counts.tolist()), weight.double(), scales.double(), strict=True)
        exact = torch.cat([part @ one.t() * its for part, one, its in parts]) * scale.double()
        parts = zip(x.double().abs().split(counts.tolist()), weight.double().abs(), scales.double(), strict=True)
        size = torch.cat([part @ one.t() * its for part, one, its in parts]) * scale.double()
        bound = 2.0**-8 * exact.abs() + (width / 32 * 2.0**-13 if fast else width * 2.0**-24 + 2.0**-13) * size
        assert ((output.double() - exact).abs() <= bound).all(), (experts, rows, width, out)


def test_zero_tokens(seed):
    x, weight, bias, (weight_s0, input_s0), (weight_theta, _) = make(0, 64, 32)
    plan = Plan(FP8, FP8, weight.numel(), 64, True)
    output = quant_linear(x, weight, bias, Scale(weight_s0, weight_theta), Scale(input_s0), plan)
    assert output.shape == (0, 32)
    output.sum().backward()
    assert not weight.grad.any() and not weight_theta.grad.any()
