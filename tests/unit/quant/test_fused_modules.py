"""Norms and SwiGLU that pass codes to the layers that read them: in whole models, and with every switch."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

import quant
from quant.fused import FusedMLP, fuse
from tests.lib.saved import kept_for_backward, storages
from tests.lib.scales import fill_scales
from tests.lib.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("prepared")

CLIPS = 2.0  # of norms' outputs a few in a hundred lie beyond
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 50}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: tiny_model("qwen3", even=True),
}


def quantized(
    kind: str = "qwen3", *, scheme: str = "fp8_static", fp8_gemm: bool = False, dtype=torch.bfloat16, **others
) -> tuple[nn.Module, quant.Quantization]:
    torch.manual_seed(0)
    model = (FAMILIES[kind]() if kind in FAMILIES else tiny_model(kind, even=True)).to(dtype)
    others = {"learn_weight_scale": False, "learn_input_scale": False, **others}
    quantization = quant.replace_layers(model, quant.SCHEMES[scheme], fp8_gemm=fp8_gemm, **others)
    fill_scales(quantization, CLIPS if scheme == "fp8_static" else 0.02 * 127.5)
    return model, quantization


def pair(*arguments, **options):
    """Twice the same model and its quantization, the second fused."""
    (plain, theirs), (model, ours) = (quantized(*arguments, **options) for _ in range(2))
    before, done = dict(model.named_parameters()), fuse(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    return plain, theirs, model, ours, done


def run(model: nn.Module, tokens: int = 12) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of a loss that weighs them at random."""
    generator = torch.Generator().manual_seed(1)
    model.zero_grad()
    ids = torch.randint(0, 50, (2, tokens), generator=generator)
    logits = model(input_ids=ids, use_cache=False).logits
    (logits.float() * torch.randn(logits.shape, generator=generator)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize(
    ("kind", "scheme", "fp8_gemm"),
    [
        *((kind, "fp8_static", False) for kind in FAMILIES),
        ("qwen3", "fp8_static", True),
        ("qwen3", "w8a8_static", False),
    ],
)
def test_a_model_computes_the_same_but_for_roundings(kind, scheme, fp8_gemm):
    """In fp32, where a code that differs is rare; and of the same Parameters, by the same names."""
    dtype = torch.bfloat16 if fp8_gemm else torch.float32
    plain, _, model, _, done = pair(kind, scheme=scheme, fp8_gemm=fp8_gemm, dtype=dtype)
    layers = model.config.num_hidden_layers
    assert len(done.norms) == 2 * layers and len(done.mlps) == layers and not done.left
    assert [*dict(model.named_parameters())] == [*dict(plain.named_parameters())]
    names = [{name for name in one.state_dict() if "input_s0" not in name} for one in (model, plain)]
    assert names[0] == names[1]
    (logits, gradients), (expected, of_plain) = run(model), run(plain)
    assert distance(logits, expected) < (0.05 if fp8_gemm else 1e-3)
    assert gradients.keys() == of_plain.keys()
    for name, gradient in gradients.items():
        assert distance(gradient, of_plain[name]) < (0.2 if fp8_gemm else 1e-3), name
    for one in (model.get_submodule(name) for name in ("model.layers.0.input_layernorm", "model.layers.0.mlp")):
        assert type(one).__name__.startswith("Fused")


@pytest.mark.parametrize("fp8_gemm", [False, True])
def test_recomputed_evaluated_and_empty(fp8_gemm):
    """Activation checkpointing gives the same gradients bit for bit; so does a forward alone the logits, in inference
    mode too, whose Linears train afterwards; and no tokens are no error."""
    model, _ = quantized(fp8_gemm=fp8_gemm, learn_weight_scale=True)
    fuse(model)
    logits, gradients = run(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (2, 12), generator=generator)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    again, recomputed = run(model)
    assert torch.equal(again, logits) and gradients.keys() == recomputed.keys()
    assert all(torch.equal(one, recomputed[name]) for name, one in gradients.items())
    layer = model.model.layers[0]
    model.zero_grad()
    x = torch.randn(0, 64, dtype=torch.bfloat16, requires_grad=True)
    layer.mlp(layer.post_attention_layernorm(x)).sum().backward()
    assert x.grad is not None and not layer.post_attention_layernorm.weight.grad.any()


def test_what_is_kept_for_backward_is_less():
    kept = []
    for fused in (False, True):
        model, _ = quantized(fp8_gemm=True)
        if fused:
            fuse(model)
        with kept_for_backward(model.parameters()) as found:
            model(input_ids=torch.zeros(4, 64, dtype=torch.int64), use_cache=False)
        kept.append(sum(storages(found).values()))
    assert kept[1] < 0.9 * kept[0]


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.bfloat16) for kind in FAMILIES), ("llama", torch.float16)])
def test_while_fake_quant_is_off_or_inputs_are_watched_it_is_the_plain_model_bit_for_bit(kind, dtype):
    plain, theirs, model, ours, _ = pair(kind, dtype=dtype)
    handed, _ = run(model)
    for observe, switches in (
        (True, (False, False)),
        (True, (True, True)),  # observed while quantized
        (False, (True, False, r".*\.(k_proj|gate_proj|down_proj)")),  # some of the readers
    ):
        for one in (theirs, ours):
            one.set_fake_quant(*switches)
            one.observe(observe)
        (logits, gradients), (expected, of_plain) = run(model), run(plain)
        assert torch.equal(logits, expected) and all(torch.equal(one, of_plain[n]) for n, one in gradients.items())
        seen = [[group.observer.absmax for group in one.input_groups] for one in (ours, theirs)]
        assert seen[0] == seen[1]
    ours.set_fake_quant(weights=True, activations=True)
    assert torch.equal(run(model)[0], handed)


def test_weights_as_they_are_beside_inputs_as_codes():
    """Layers of the fp8 GEMM whose weights are not quantized now multiply values."""
    plain, theirs, model, ours, _ = pair(fp8_gemm=True)
    for one in (theirs, ours):
        one.set_fake_quant(weights=False, activations=True)
    assert distance(run(model)[0], run(plain)[0]) < 0.05


def test_a_scale_that_nothing_filled_shows_in_the_loss():
    model, quantization = quantized()
    fuse(model)
    quantization.input_groups[0].s0.data.fill_(torch.nan)
    assert run(model)[0].isnan().any()


def test_codes_survive_a_detach():
    """As in the Function that ZeRO-3 puts around the outputs of modules."""
    model, _ = quantized()
    fuse(model)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        expected = model(ids).logits
        model.model.layers[0].input_layernorm.register_forward_hook(lambda module, given, output: output.detach())
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    "read",
    [lambda x: nn.functional.linear(x, torch.ones(3, 64).bfloat16()), lambda x: x.abs().max(), lambda x: x + x],
    ids=["router", "hook", "residual"],
)
def test_reading_values_that_are_not_there_is_an_error(read):
    model, _ = quantized()
    fuse(model)
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, given, output: read(output))
    said = r"post_attention_layernorm returns .* has no values.* quant.fuse_norms: false"
    with pytest.raises(RuntimeError, match=said):
        run(model)


def test_a_switch_between_norm_and_layer_is_an_error():
    model, quantization = quantized(fp8_gemm=True)
    fuse(model)
    norm, q_proj = model.model.layers[0].input_layernorm, model.model.layers[0].self_attn.q_proj
    handed = norm(torch.randn(2, 64).bfloat16()).detach()  # as ZeRO-3's hooks do
    quantization.set_fake_quant(weights=False, activations=True)
    with pytest.raises(RuntimeError, match="fake quant was switched between them"):
        q_proj(handed)
    quantization.set_fake_quant(weights=False, activations=False)
    with pytest.raises(RuntimeError, match="has no values"):
        q_proj(handed)


def test_what_cannot_be_fused_stays_and_is_named():
    model, _ = quantized("qwen3_moe")
    done = fuse(model)
    assert done.norms == [f"model.layers.{i}.input_layernorm" for i in range(2)] and not done.mlps
    assert "as a router of experts does" in done.left["model.layers.0.post_attention_layernorm"]
    assert "2 norms and 0 MLPs" in done.summary() and "stay" in done.summary()

    model, quantization = quantized()
    quantization.layers["model.layers.0.mlp.down_proj"].rotation = 32
    assert "rotates its input" in fuse(model).left["model.layers.0.mlp"]
    assert isinstance(model.model.layers[1].mlp, FusedMLP) and not isinstance(model.model.layers[0].mlp, FusedMLP)


@pytest.mark.parametrize(
    ("learn", "scheme", "why"),
    [(True, "fp8_static", "learns"), (False, "fp8_dynamic", "no static scale"), (False, "w4a16_g32", "no static")],
)
def test_where_nothing_can_be_fused_it_is_an_error(learn, scheme, why):
    model, _ = quantized(scheme=scheme, learn_input_scale=learn)
    with pytest.raises(ValueError, match=rf"quant.fuse_norms: true, expected false: nothing can be fused.*{why}"):
        fuse(model)


def test_classes_that_are_unknown_or_compute_something_else():
    class Odd(type(FAMILIES["llama"]().model.layers[0].input_layernorm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model, _ = quantized("llama")
    model.model.layers[0].input_layernorm.__class__ = Odd
    model.model.layers[0].mlp.act_fn = nn.GELU()
    done = fuse(model)
    assert "computes something else" in done.left["model.layers.0.input_layernorm"]
    assert "computes something else" in done.left["model.layers.0.mlp"]
    assert done.norms == ["model.layers.0.post_attention_layernorm"]
    with pytest.raises(ValueError, match="the layers of Linear are none of LlamaDecoderLayer"):
        fuse(nn.Linear(2, 2))
