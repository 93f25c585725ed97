"""Codes with scales per group, multiplied, beside everything else that a recipe may ask of a layer.

What such a layer computes is in test_block_gemm.py, from held codes in test_held.py, with adapters in
test_adapted_export.py, compiled in kernels/test_compile.py, on two ranks in distributed/engine/test_compute.py. Here
the other knobs must not change a bit of it, and where it has no place the layer simulates.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

import quant
from benchmarks.step import kept_bytes
from quant import SCHEMES
from quant.adapter import AdapterBeside
from quant.experts import StackedLinear
from quant.hadamard import rotate
from tests.tiny import tiny_config
from tests.unit.quant.test_block_gemm import FORMATS, filled, layer_of, random_sides

SCALES = {"learn_weight_scale": True, "learn_input_scale": False}


def results(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    output = layer(leaf)
    output.backward(grad)
    return [output.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.fixture(params=FORMATS)
def case(request, seed) -> tuple[quant.QuantLinear, Tensor, Tensor]:
    """A layer, an input some of which is clipped, and a gradient."""
    tokens, out, width = random_sides()
    layer = layer_of(request.param, out, width, torch.bfloat16, learns=True)
    x = (torch.randn(tokens, width) * torch.randn(tokens, 1).exp()).bfloat16()
    return layer, x, torch.randn(tokens, out).bfloat16()


def test_weight_codes_that_are_kept_from_forward_to_forward(case):
    """With gradient accumulation: the same bits in each micro-batch, and after the weight has changed."""
    layer, x, grad = case
    found = []
    for kept in (False, True):
        one = copy.deepcopy(layer)
        one.keeps_weight_codes = kept
        both = results(one, x, grad) + results(one, x.flip(0), grad)
        assert (one._weight_codes is not None) == kept
        with torch.no_grad():
            one.weight.mul_(1.5)
        one.forget_codes()
        found.append(both + results(one, x, grad))
    assert_equal(*found)


def test_codes_of_inputs_are_kept_with_and_without_the_knob(case):
    layer, x, grad = case
    plain, kept = [], []
    for layer.dynamic_codes in (False, True):
        plain.append(results(layer, x, grad))
        kept.append(kept_bytes(lambda: layer(x.clone().requires_grad_()), layer))
    assert_equal(*plain)
    assert kept[0] == kept[1] < 1.2 * x.numel()


def test_an_adapter_beside_the_weight_is_added(case):
    """To what the layer computes without it, and its gradients are added to the input's."""
    layer, x, grad = case
    rank = 4
    a, b = torch.randn(rank, layer.in_features), torch.randn(layer.out_features, rank)
    adapted = copy.deepcopy(layer)
    adapted.attach_adapter(AdapterBeside(nn.Parameter(a.bfloat16()), nn.Parameter(b.bfloat16()), 0.5))
    leaf = x.clone().requires_grad_()
    beside = (leaf @ adapted.lora_a.t()) @ adapted.lora_b.t() * 0.5
    own, _, *gradients = results(layer, x, grad)
    output, of_x, *found = results(adapted, x, grad)
    assert torch.equal(output, own + beside.detach())
    assert_equal(found[: len(gradients)], gradients)
    torch.testing.assert_close(of_x, results(layer, x, grad)[1] + torch.autograd.grad(beside, leaf, grad)[0])


def test_inputs_that_are_turned(seed):
    """The codes are those of the turned input, and its gradient is turned back."""
    for name in FORMATS:
        layer = layer_of(name, 48, 128, torch.bfloat16)
        x, grad = torch.randn(7, 128).bfloat16(), torch.randn(7, 48).bfloat16()
        leaf = x.clone().requires_grad_()
        turned = rotate(leaf, 64)
        output, of_turned, *expected = results(layer, turned.detach(), grad)
        turned.backward(of_turned)
        layer.rotation = 64
        assert_equal(results(layer, x, grad), [output, leaf.grad, *expected])


def test_what_is_switched_off_is_not_multiplied_as_codes(case):
    """One operand or both as they are: the bits of a layer that never multiplies codes; and back."""
    layer, x, grad = case
    simulating = copy.deepcopy(layer)
    simulating.block_gemm = False
    before = results(layer, x, grad)
    for weights, inputs in ((True, False), (False, True), (False, False)):
        for one in (layer, simulating):
            one.weight_fake_quant, one.input_fake_quant = weights, inputs
        assert_equal(results(layer, x, grad), results(simulating, x, grad))
    layer.weight_fake_quant = layer.input_fake_quant = True
    assert_equal(results(layer, x, grad), before)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_forwards_without_gradients_are_the_same(case, mode):
    layer, x, grad = case
    expected = results(layer, x, grad)[0]
    with mode():
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_stacked_experts_simulate(name, seed):
    """They are listed, and compute as where nobody asked for the GEMM."""
    stack = StackedLinear(nn.Parameter(torch.randn(3, 32, 64).bfloat16() / 8), (3, 32, 64), ("gate_proj", "up_proj"))
    outputs = []
    for asked in (False, True):
        model = nn.ModuleDict({"experts": nn.ModuleDict({"gate_up_proj": copy.deepcopy(stack)}), "o_proj": None})
        model["o_proj"] = nn.Linear(64, 32, bias=False).bfloat16()
        quantization = quant.prepare(model, SCHEMES[name], **SCALES, block_gemm=asked)
        filled(quantization)
        layer = quantization.layers["experts.gate_up_proj"]
        assert not layer.block_gemm and quantization.layers["o_proj"].block_gemm == asked
        assert quantization.simulated == (["experts.gate_up_proj"] if asked else [])
        torch.manual_seed(3)
        outputs.append(layer(torch.randn(9, 64).bfloat16(), torch.tensor([2, 2, 9], dtype=torch.int32)))
    assert torch.equal(*outputs)


def test_layers_that_read_one_input_and_compute_in_two_ways(seed):
    """The height of one does not divide: it simulates, beside one that shares the input's codes with no one."""
    found = []
    for shares in (True, False):
        torch.manual_seed(4)
        model = nn.ModuleDict({"gate_proj": nn.Linear(64, 32), "up_proj": nn.Linear(64, 24)}).bfloat16()
        quantization = quant.prepare(model, SCHEMES["nvfp4_w4a4"], **SCALES, block_gemm=True)
        filled(quantization)
        assert quantization.simulated == ["up_proj"] and model["gate_proj"].block_gemm
        assert model["gate_proj"].shared_input is model["up_proj"].shared_input is not None
        if not shares:
            model["gate_proj"].shared_input = model["up_proj"].shared_input = None
        x = torch.randn(9, 64).bfloat16().requires_grad_()
        outputs = [layer(x) for layer in model.values()]
        torch.cat(outputs, -1).float().square().sum().backward()
        found.append(
            [*(one.detach() for one in outputs), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        )
    assert_equal(*found)


# ---- a model


def model_of(name: str, block_gemm: bool) -> tuple[Qwen3ForCausalLM, quant.Quantization]:
    """A tiny Qwen3 whose ends are quantised too, with the same weights whatever it computes; one layer has another
    scheme, and one is exempt."""
    config = tiny_config("qwen3", even=True)
    config._attn_implementation = "sdpa"
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(config).bfloat16().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    ends = {"lm_head": SCHEMES["w8a16_channel"], "model.embed_tokens": SCHEMES["w8a16_channel"]}
    quantization = quant.prepare(
        model,
        SCHEMES[name],
        rules=[quant.Rule(SCHEMES["fp8_dynamic"], layers=r".*\.0\..*o_proj")],
        named=ends,
        exempt=[r".*\.1\..*down_proj"],
        **SCALES,
        block_gemm=block_gemm,
    )
    filled(quantization)
    return model, quantization


def losses(model: nn.Module, rows: int = 2) -> list[Tensor]:
    """The loss of each micro-batch, and all gradients of their sum."""
    model.zero_grad()
    ids = torch.randint(301, (rows, 12), generator=torch.Generator().manual_seed(6))
    found = []
    for row in ids:
        found.append(model(input_ids=row[None], labels=row[None], use_cache=False).loss)
        found[-1].backward()
    return [*(loss.detach() for loss in found), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_whose_ends_are_quantised_trains_as_it_would(name, seed):
    """Layers with another scheme simulate. Losses are those of simulation to within roundings of bf16, gradients point
    where its do (an input one bit apart may get another code, of four bits up to a third apart); recomputed, with kept
    codes of weights and of inputs they are the same bit for bit."""
    model, quantization = model_of(name, True)
    multiplied = [one for one, layer in quantization.layers.items() if layer.block_gemm]
    assert len(multiplied) == 2 * 7 - 2 and len(quantization.layers) == len(multiplied) + 3
    assert not quantization.simulated
    ours, simulated = losses(model), losses(model_of(name, False)[0])
    assert len(ours) == len(simulated)
    if name == "nvfp4_w4a4":  # MXFP8's operands are exact in bf16: sums of as few products often are the same
        assert not torch.equal(ours[0], simulated[0])
    for mine, other in zip(ours[:2], simulated[:2], strict=True):
        assert mine.item() == pytest.approx(other.item(), rel=2e-2)
    alike = [
        torch.cosine_similarity(mine.double().flatten(), other.double().flatten(), dim=0).item()
        for mine, other in zip(ours[2:], simulated[2:], strict=True)
        if mine.numel() > 64
    ]
    assert sorted(alike)[len(alike) // 2] > 0.9, sorted(alike)
    for layer in quantization.layers.values():
        layer.keeps_weight_codes = True
        layer.dynamic_codes = True
    assert_equal(losses(model), ours)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    assert_equal(losses(model), ours)
