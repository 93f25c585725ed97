"""Codes with scales per group, multiplied: arguments for the GPU, and on the CPU the arithmetic against fp64."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import quant
from model.scales import renew_weight_scales
from quant import SCHEMES, block_gemm, kernels
from quant.block_gemm import BlockCodes
from quant.linear import QuantLinear
from quant.packing import unpack_nibbles

FORMATS = ("nvfp4_w4a4", "mxfp8")


@torch.no_grad()
def filled(quantization: quant.Quantization) -> None:
    """Scales of the weights as they are, and a global scale of inputs for magnitudes of 6."""
    renew_weight_scales(quantization)
    for group in quantization.input_groups:
        group.s0.fill_(448.0)


def layer_of(
    name: str, rows: int, columns: int, dtype: torch.dtype, bias: bool = True, learns: bool = False
) -> QuantLinear:
    """A layer with its scales; those that learn have moved, some of them so far that weights are clipped."""
    model = nn.Sequential(nn.Linear(columns, rows, bias=bias)).to(dtype)
    quantization = quant.prepare(
        model, SCHEMES[name], learn_weight_scale=learns, learn_input_scale=False, exempt=(), block_gemm=True
    )
    assert not quantization.simulated
    filled(quantization)
    if learns:
        with torch.no_grad():
            model[0].weight_theta.normal_(0, 0.5)
    return model[0]


def random_sides() -> tuple[int, int, int]:
    rows, out, groups = (int(torch.randint(1, limit, ())) for limit in (300, 12, 12))
    return rows, 16 * out, 32 * groups


def test_the_order_of_scales_is_that_of_its_definition(seed):
    """Scale (i, j) lies in tile (i div 128, j div 4), at 16 (i mod 32) + 4 (i mod 128 div 32) + j mod 4."""
    rows, columns = int(torch.randint(1, 400, ())), int(torch.randint(1, 20, ()))
    scales = torch.randint(0, 127, (rows, columns), dtype=torch.uint8)
    flat = block_gemm.swizzled(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
    tiles = -(-columns // 4)
    assert flat.numel() == -(-rows // 128) * tiles * 512
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    places = ((i // 128) * tiles + j // 4) * 512 + 16 * (i % 32) + 4 * (i % 128 // 32) + j % 4
    assert torch.equal(flat[places], scales)
    rest = torch.ones_like(flat)
    rest[places.flatten()] = 0
    assert not (flat * rest).any()


class Called(TorchDispatchMode):
    """Keeps the arguments of the GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::_scaled_mm_v2":
            self.arguments.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_those_that_cuda_checks(name, seed):
    """On the meta device; and once more for CUDA, whose checks of strides and sides torch makes without one."""
    tokens, out, width = random_sides()
    layer = layer_of(name, out, width, torch.bfloat16).to("meta")
    x = torch.empty(3, tokens, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Called() as called:
        output = layer(x)
        output.backward(torch.empty_like(output))
    assert output.shape == (3, tokens, out) and output.dtype == torch.bfloat16 and x.grad.shape == x.shape
    ((args, kwargs),) = called.arguments
    left, right, *_ = args
    four = name == "nvfp4_w4a4"
    assert left.dtype == right.dtype == (torch.float4_e2m1fn_x2 if four else torch.float8_e4m3fn)
    assert left.shape == (3 * tokens, width // (2 if four else 1)) and right.shape == (*left.shape[1:], out)
    scales = [[one.dtype for one in given] for given in (args[2], args[5])]
    assert scales == [[torch.float8_e4m3fn, torch.float32] if four else [torch.float8_e8m0fnu]] * 2

    def on_cuda(given):
        if isinstance(given, Tensor):
            return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cuda")
        return [on_cuda(one) for one in given] if isinstance(given, (list, tuple)) else given

    with FakeTensorMode():
        result = torch.ops.aten._scaled_mm_v2(*map(on_cuda, args), **{key: on_cuda(one) for key, one in kwargs.items()})
    assert result.shape == (3 * tokens, out) and result.dtype == torch.bfloat16


def values_of(operand: BlockCodes, four: bool) -> Tensor:
    """What the codes stand for, in fp64, by the definition of the formats."""
    if four:
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        low, high = operand.codes & 15, operand.codes >> 4  # the first of two in the low four bits
        codes = torch.stack([low, high], -1).flatten(-2).long()
        values = magnitudes[codes & 7] * (1 - 2 * (codes >> 3))
    else:
        values = operand.codes.double()
    size = values.shape[-1] // operand.scales.shape[-1]
    values = values * operand.scales.float().double().repeat_interleave(size, -1)
    return values if operand.above is None else values / operand.above.double()


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_the_product_is_that_of_the_values_in_fp64(name, dtype, learns, seed):
    tokens, out, width = random_sides()
    layer, four = layer_of(name, out, width, dtype, learns=learns), name == "nvfp4_w4a4"
    spec, quantizer = layer.scheme.weights, layer._weight_quantizer()
    x = (torch.randn(tokens, width) * torch.randn(tokens, 1).exp()).to(dtype)
    above = None if layer.input_s0 is None else layer.input_s0
    with torch.no_grad():
        _, codes, _, scales = kernels.keep_tokens(x, layer.scheme.activations, above, mask=False)
        weight = block_gemm.weight_codes(*kernels.quantize_with_scale(layer.weight, quantizer), quantizer)
        operand = BlockCodes(codes, scales.flatten(1), above)
        output = block_gemm.block_scaled_linear(operand, weight, layer.bias, spec, dtype)
        left, right = values_of(operand, four), values_of(weight, four)
        # The values are those that simulation rounds to the dtype; powers of two leave nothing to round.
        simulated = kernels.fake_quantize(layer.weight, quantizer)
        assert torch.equal(right.float().to(dtype), simulated) or four
        assert (right - simulated.double()).abs().max() <= torch.finfo(dtype).eps * right.abs().max()
        expected = left @ right.t() + layer.bias.double()
        size = left.abs() @ right.abs().t() + layer.bias.double().abs()
    bound = torch.finfo(dtype).eps / 2 * expected.abs() + 2**-24 * (width + 4) * size
    assert ((output.double() - expected).abs() <= bound).all()
    assert torch.equal(output, layer(x).detach())


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_simulation(name, learns, seed):
    """Bit for bit, also of an input in two dimensions more, without tokens, of a frozen weight, and of its theta."""
    _, out, width = random_sides()
    layer = layer_of(name, out, width, torch.bfloat16, learns=learns)
    for shape in ((2, 5, width), (0, width)):
        for trains in (True, False):
            layer.weight.requires_grad_(trains)
            x, found = torch.randn(shape).bfloat16().mul_(3), []
            grad = torch.randn(*shape[:-1], out).bfloat16()
            for layer.block_gemm in (False, True):
                leaf = x.clone().requires_grad_()
                output = layer(leaf)
                output.backward(grad)
                of_theta = layer.weight_theta.grad if learns else None
                found.append((output.detach(), leaf.grad, layer.bias.grad, layer.weight.grad, of_theta))
                layer.zero_grad()
            (simulated, *expected), (output, *gradients) = found
            for ours, theirs in zip(gradients, expected, strict=True):
                assert ours is theirs is None or torch.equal(ours, theirs)
            # Two operands rounded to bf16 there, and each of the sums.
            torch.testing.assert_close(
                output.float(), simulated.float(), rtol=2**-6, atol=2**-6 * max(1, width**0.5 / 8)
            )


def test_layers_that_share_an_input_share_its_codes(seed):
    """The second of them quantises nothing, and backward keeps the codes once."""
    model = nn.ModuleDict({name: nn.Linear(64, 32, bias=False) for name in ("gate_proj", "up_proj")}).bfloat16()
    quantization = quant.prepare(
        model, SCHEMES["mxfp8"], learn_weight_scale=False, learn_input_scale=False, block_gemm=True
    )
    filled(quantization)
    x = torch.randn(7, 64).bfloat16().requires_grad_()
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr()) if tensor.dtype == torch.float8_e4m3fn else None
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [model[name](x) for name in model]
    assert len(kept) == 1
    sum(output.sum() for output in outputs).backward()
    assert x.grad.isfinite().all()


def test_what_it_is_not_for(seed):
    """Refused by name where no layer has the formats; layers whose sides do not divide are listed, and simulate."""
    scales = {"learn_weight_scale": False, "learn_input_scale": False, "block_gemm": True}
    for name in ("mxfp4_w4a4", "mxfp4_mxfp8", "nvfp4", "fp8_static"):
        assert not SCHEMES[name].has_block_gemm
        with pytest.raises(ValueError, match=f"block_gemm needs NVFP4 or MXFP8 on both sides, and there is {name}"):
            quant.prepare(nn.Sequential(nn.Linear(64, 32)), SCHEMES[name], exempt=(), **scales)
    model = nn.Sequential(nn.Linear(64, 24, bias=False), nn.Linear(48, 32, bias=False), nn.Linear(64, 32, bias=False))
    quantization = quant.prepare(model, SCHEMES["nvfp4_w4a4"], exempt=(), **scales)
    assert quantization.simulated == ["0", "1"] and model[2].block_gemm
    filled(quantization)
    assert model[0](torch.randn(3, 64)).shape == (3, 24)


def test_packed_codes_are_unpacked_in_their_order(seed):
    """The bytes that go to the GPU, and those that the kernels read again, are one thing."""
    spec = SCHEMES["nvfp4_w4a4"].activations
    x = torch.randn(3, 32)
    codes, *_ = kernels.quantize_tokens(x, spec, torch.tensor([500.0]))
    _, packed, _, _ = kernels.keep_tokens(x, spec, torch.tensor([500.0]), mask=False)
    assert torch.equal(packed & 15, codes[:, ::2]) and torch.equal(packed >> 4, codes[:, 1::2])
    assert torch.equal(unpack_nibbles(packed), codes)
