"""`prepare` and `convert` in a loop of their caller's, against the layers of the project's own loop."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3Config, GPT2Config, GPT2LMHeadModel

from model.moe.arrange import arrange_experts
from quant import DEFAULT_EXEMPT, QuantLayer, Ranges, Rule, get_scheme
from quant.prepared import convert, find_quantization, prepare
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import quantize, same_bits
from tests.lib.tiny import tiny_model

IDS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(model: Any, steps: int = 3) -> Any:
    """Train with torch alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    found, expected = one.state_dict(), other.state_dict()
    assert list(found) == list(expected)
    assert [name for name, value in found.items() if not same_bits(value, expected[name])] == []


@pytest.mark.parametrize(
    ("kind", "scheme", "learned"),
    [
        ("qwen3", "w4a16_g32", True),
        ("llama", "fp8_static", True),
        ("llama", "w2a16_g32", False),
        ("llama", "nvfp4_w4a4", False),
        ("llama", "w4a16_asym", False),
        ("llama", "fp8_block", False),
        ("qwen3_moe", "8da4w", True),
    ],
)
def test_training_has_the_bits_of_the_layers_of_the_loop(kind: str, scheme: str, learned: bool) -> None:
    mine, theirs = (tiny_model(kind, wide=True) for _ in range(2))
    if kind == "qwen3_moe":
        assert arrange_experts(mine, "stacked") == arrange_experts(theirs, "stacked") == 2
    assert prepare(mine, scheme, learn_weight_scale=learned, calibrate=run) is mine
    quantization = quantize(theirs, scheme, learn=learned, exempt=[*DEFAULT_EXEMPT, "lm_head"])
    quantization.set_fake_quant(False, False)  # scales of inputs as the loop measures them
    quantization.observe(True)
    run(theirs)
    quantization.observe(False)
    quantization.set_fake_quant(True, True)
    for group in quantization.input_groups:
        largest = group.observer.absmax
        group.s0.data.fill_(448 * 6 / largest if group.spec.has_global_scale else largest / group.spec.qmax)
    assert find_quantization(mine).layers.keys() == quantization.layers.keys()
    assert_same_state(mine, theirs)
    assert torch.equal(run(mine), run(theirs))
    trained(mine), trained(theirs)
    assert_same_state(mine, theirs)
    assert learned == any("theta" in name and bool(p.any()) for name, p in mine.named_parameters())


@pytest.mark.parametrize("scheme", ["w4a16_g32", "fp8_static", "w8a16_asym", "mxfp4_mxfp8"])
def test_codes_compute_the_same_bits(scheme: str) -> None:
    model = trained(prepare(tiny_model("llama", wide=True), scheme, learn_weight_scale=True, calibrate=run))
    before, weight = run(model), model.model.layers[0].mlp.up_proj.weight.nbytes
    other = copy.deepcopy(model)
    assert convert(model) is model and torch.equal(run(model), before) and torch.equal(run(other), before)
    assert model.model.layers[0].mlp.up_proj.weight.nbytes <= weight / 2
    fresh = convert(prepare(tiny_model("llama", wide=True), scheme, learn_weight_scale=True, calibrate=run))
    fresh.load_state_dict(copy.deepcopy(model).state_dict())
    assert torch.equal(run(fresh), before)
    assert not [name for name, p in model.named_parameters() if "proj" in name and p.requires_grad]
    with pytest.raises(TypeError, match=r"packed weights of torch.bfloat16 cannot be cast to torch.float32"):
        model.float()


def test_a_cast_keeps_the_scales_and_autocast_keeps_the_dtype_of_weights() -> None:
    model = prepare(tiny_model("llama", dtype=torch.float32), "fp8_dynamic", learn_weight_scale=True)
    layer = model.model.layers[0].mlp.up_proj
    scale = layer.weight_s0.clone()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32 and bool(layer.weight_theta.grad.any())
    with torch.no_grad():
        assert float(loss.detach()) == pytest.approx(float(model(input_ids=IDS, labels=IDS).loss), rel=0.01)
    model.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16 and torch.equal(layer.weight_s0, scale)
    assert torch.isfinite(run(model)).all()


def test_the_modules_that_stay_as_they_are_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"rules": [Rule(None, first=1)], "exempt_more": [r".*\.o_proj"]}
    model = prepare(tiny_model("llama", even=True), "w4a16_g32", **options, ranges=Ranges(weights="mse"))
    said = capsys.readouterr().out
    assert len(find_quantization(model).layers) == 6 and "quantized: 6 layers, w4a16_g32; unquantized: 1 Emb" in said
    assert "9 Linear (model.layers.0.self_attn.q_proj and 8 more), 5 LlamaRMSNorm" in said


class Positions(nn.Sequential):
    """A matrix in the model itself."""

    def __init__(self, rows: int = 32) -> None:
        super().__init__(nn.Linear(32, 32))
        self.table = nn.Parameter(torch.zeros(rows, 32))


class Bypassed(nn.Module):
    """A forward that multiplies the weight of a Linear without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x) @ self.read.weight


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32))


def broken(value: float) -> nn.Module:
    model = linear()
    model[0].weight.data[3, 4] = value
    return model


def with_attribute(place: Callable[[nn.Module], Any], name: str, value: Any) -> nn.Module:
    model = linear()
    setattr(place(model), name, value)
    return model


UNREACHED = {"scheme": "fp8_static", "calibrate": lambda model: None}
GPT2 = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (linear, {"scheme": "w5"}, "unknown quantization scheme .*'w5'"),
        (linear, {"scheme": "fp8_static"}, "pass calibrate=.* such as fp8_dynamic"),
        (linear, {"rules": [Rule(get_scheme("w8a8_static"), "0")]}, "scheme 'w8a8_static' stores scales of inputs"),
        (linear, UNREACHED, r"calibrate did not reach.* 0 \(largest magnitude 0\); run more batches"),
        (linear, {"exempt_more": ["1"]}, "pattern '1' matches no module"),
        (linear, {"exempt_more": ["0"]}, "nothing to quantize"),
        (lambda: nn.Sequential(nn.Linear(33, 32)), {}, "0: in_features 33 is not divisible"),
        (lambda: linear().double(), {}, "0.weight is torch.float64"),
        (lambda: nn.Sequential(nn.Linear(32, 32, device="meta")), {}, "0.weight is on the meta device"),
        (lambda: nn.Sequential(nn.LazyLinear(32)), {}, "0.weight is a UninitializedParameter"),
        (lambda: nn.Linear(32, 32), {}, "a single nn.Linear"),
        (lambda: with_attribute(lambda m: m[0].weight, "ds_id", 0), {}, "0.weight is partitioned by ZeRO-3"),
        (lambda: with_attribute(lambda m: m, "config", Gemma3Config()), {}, "has towers beside its text model"),
        (lambda: with_attribute(lambda m: m, "base_layer", None), {}, "layers with adapters of peft"),
        (lambda: prepare(linear(), "w4a16_g32"), {}, "has quantized layers"),
        (lambda: broken(torch.nan), {}, "NaN or Inf cannot be quantized: 0"),
        (lambda: broken(-torch.inf), {"scheme": "nvfp4"}, "NaN or Inf cannot be quantized: 0"),
        (lambda: GPT2LMHeadModel(GPT2), {}, "4 Conv1D, which are not supported"),
        (
            lambda: tiny_model("qwen3_moe", wide=True),
            {},
            r"2 Qwen3MoeExperts would stay unquantized, with 983,040 weights .*arrange_experts.*pass "
            r"exempt_more=\['model\\.layers\\.\\d\+\\.mlp\\.experts'\]",
        ),
        (Positions, {}, r"1 Positions would .* 1,024 weights .*holds: the model itself.* pass exempt_more=\[''\]"),
        (lambda: nn.Sequential(nn.MultiheadAttention(32, 2), nn.Linear(32, 32)), {}, "1 MultiheadAttention would stay"),
    ],
)
def test_it_is_refused_and_the_model_is_unchanged(model: Callable[[], nn.Module], options: Any, said: str) -> None:
    given = model()
    modules = {name: id(module) for name, module in given.named_modules()}
    with pytest.raises(ValueError, match=said):
        prepare(given, **{"scheme": "w4a16_g32", **options})
    assert {name: id(module) for name, module in given.named_modules()} == modules


def test_a_name_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"model: found 'Qwen/Qwen3-4B', expected an nn\.Module: load it"):
        prepare("Qwen/Qwen3-4B", "w4a16_g32")  # type: ignore[arg-type]


def test_experts_named_in_exempt_more_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tiny_model("qwen3_moe", wide=True), "w4a16_g32", exempt_more=[r".*\.mlp\.experts"])
    assert "quantized: 8 layers" in (said := capsys.readouterr().out) and "2 Qwen3MoeExperts" in said
    assert find_quantization(prepare(Positions(), "w4a16_g32", exempt_more=[""])).layers.keys() == {"0"}
    prepare(Positions(31), "w4a16_g32")  # smaller than any layer: a norm of several heads, a decay
    assert "unquantized: 1 Positions" in capsys.readouterr().out


def test_biases_of_arranged_experts_are_no_matrices() -> None:
    model = VARIANTS["gpt_oss"].model()
    arrange_experts(model, "stacked")
    layers = find_quantization(prepare(model, "int8_dynamic")).layers
    assert sum(name.endswith(("gate_up_proj", "down_proj")) for name in layers) == 4


def test_a_layer_that_is_not_called_is_found_in_the_second_step_of_any_copy() -> None:
    model = prepare(Bypassed(), "w4a16_g32")
    for one in (copy.deepcopy(model), model):
        one(torch.randn(4, 32)).sum().backward()
        with pytest.raises(ValueError, match=r"^read: the model's forward did not call them in training"):
            one(torch.randn(4, 32))
    assert not model._forward_hooks and not trained(prepare(tiny_model("llama"), "int8_dynamic"))._forward_hooks


def test_conversion_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no quantized layer: call prepare first"):
        convert(nn.Linear(32, 32))
    model = prepare(Bypassed(), "w4a16_g32")
    model(torch.randn(4, 32)).sum().backward()
    with pytest.raises(ValueError, match=r"read: the model's forward did not call them in training"):
        convert(model)
    model = prepare(linear(), "w4a16_g32")
    model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"0: weights or scales with NaN or Inf have no codes"):
        convert(model)
    assert isinstance(model[0], QuantLayer) and model[0].held is None
    odd = prepare(nn.Sequential(nn.Linear(33, 32)).bfloat16(), "fp8_dynamic")
    with pytest.raises(ValueError, match=r"the 33 bytes of codes in a row of \[32, 33\] do not fill.* without convert"):
        convert(odd)
