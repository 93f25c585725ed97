"""The switches and the observers of a prepared model, and pauses of both."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from quant import SCALE_PARAMETERS, SCHEMES, QuantLinear, Scheme, replace_layers
from quant.linear import StackedLinear
from tests.families.variants import VARIANTS
from tests.unit.quant.trees import (
    ATTENTION,
    EXPERTS,
    FP8,
    HIDDEN,
    INNER,
    INT4,
    Tree,
    causal_lm,
    fp8,
    members,
    moe_model,
)


def test_switches():
    """By pattern or all; what a scheme does not quantize stays off."""
    quantization = fp8(moe_model())
    states = quantization.fake_quant_state()
    assert set(states.values()) == {(True, True)}
    quantization.set_fake_quant(weights=True, activations=False)
    quantization.set_fake_quant(weights=False, activations=True, pattern=r".*\.0\..*o_proj")
    changed = quantization.fake_quant_state()
    assert changed.pop("model.layers.0.self_attn.o_proj") == (False, True)
    assert set(changed.values()) == {(True, False)}
    with pytest.raises(ValueError, match=r"'o_proj' matches no quantized layer.*self_attn\.q_proj"):
        quantization.set_fake_quant(True, True, pattern="o_proj")
    quantization.restore_fake_quant(states)
    assert quantization.fake_quant_state() == states
    weight_only = replace_layers(moe_model(), INT4, learn_weight_scale=True, learn_input_scale=False)
    weight_only.set_fake_quant(weights=True, activations=True)
    assert set(weight_only.fake_quant_state().values()) == {(True, False)}


def test_observers(seed):
    """Shared by the members of a group, and watching only while switched on; starting again forgets."""
    quantization = fp8(model := moe_model())
    quantization.set_fake_quant(weights=False, activations=False)
    quantization.observe(True)
    x, layer = torch.randn(5, HIDDEN), model.model.layers.get_submodule("0")
    for name in ATTENTION:
        layer.self_attn.get_submodule(name)(x)
    layer.mlp.experts.get_submodule("0").gate_proj(x)
    layer.mlp.experts.get_submodule("2").up_proj(3 * x)
    seen = {group.owner: group.observer.absmax.item() for group in quantization.input_groups}
    assert seen.pop("model.layers.0.self_attn.q_proj") == x.abs().max().item()
    assert seen.pop("model.layers.0.mlp.experts.0.gate_proj") == (3 * x).abs().max().item()
    assert set(seen.values()) == {0.0}
    quantization.observe(False)
    layer.self_attn.q_proj(9 * x)
    assert quantization.input_groups[0].observer.absmax.item() == x.abs().max().item()
    quantization.observe(True)
    assert quantization.input_groups[0].observer.absmax.item() == 0


@pytest.mark.parametrize(("observing", "raises"), [(False, False), (True, True)])
def test_after_a_pause_switches_and_observers_are_what_they_were(seed, observing, raises):
    quantization = fp8(moe_model())
    quantization.set_fake_quant(weights=True, activations=False, pattern=r".*o_proj")
    quantization.observe(True)
    layer, observer = next(iter(quantization.layers.values())), quantization.input_groups[0].observer
    layer(torch.randn(5, HIDDEN))
    if not observing:
        quantization.observe(False)
    before = quantization.state_dict()
    with pytest.raises(KeyError) if raises else nullcontext(), quantization.paused():
        assert set(quantization.fake_quant_state().values()) == {(False, False)} and not quantization.observing
        quantization.observe(True)
        quantization.set_fake_quant(weights=True, activations=True)
        layer(torch.full((5, HIDDEN), 100.0))
        with quantization.paused():
            layer(torch.full((5, HIDDEN), 1000.0))
        assert quantization.observing and set(quantization.fake_quant_state().values()) == {(True, True)}
        assert observer.absmax == 100
        if raises:
            raise KeyError
    after = quantization.state_dict()
    assert after["fake_quant"] == before["fake_quant"] and after["observing"] == before["observing"] == observing
    for owner, seen in before["observers"].items():
        assert all(torch.equal(value, after["observers"][owner][name]) for name, value in seen.items())
    assert 0 < observer.absmax < 100

    resumed = fp8(moe_model())
    resumed.load_state_dict(before)
    assert resumed.fake_quant_state() == before["fake_quant"] and resumed.observing == observing
    assert torch.equal(resumed.input_groups[0].observer.absmax, observer.absmax)


# ---- which Linears become QuantLinears, which of them share a scale, and what is refused


def int4(model: nn.Module):
    return replace_layers(model, INT4, learn_weight_scale=True, learn_input_scale=False)


@pytest.mark.parametrize("kind", ("llama", "qwen3"))
def test_a_dense_model_of_transformers(kind):
    """q/k/v and gate/up share both scales, o and down have their own, in module order; the rest is left alone."""
    model = causal_lm(kind)
    before = dict(model.named_parameters())
    quantization = fp8(model)
    layer = [
        [f"self_attn.{name}" for name in ATTENTION],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    expected = [[f"model.layers.{index}.{name}" for name in group] for index in (0, 1) for group in layer]
    assert members(quantization.weight_groups) == members(quantization.input_groups) == expected
    assert quantization.exempt == ["model.embed_tokens", "lm_head"]
    assert list(quantization.layers) == [name for name, m in model.named_modules() if isinstance(m, QuantLinear)]
    assert sorted(quantization.layers) == sorted(itertools.chain(*expected))
    assert [name for name, module in model.named_modules() if type(module) is nn.Linear] == ["lm_head"]
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items()), "weights are the same objects"
    for group in (*quantization.weight_groups, *quantization.input_groups):
        kind = "weight" if group.observer is None else "input"
        assert group.owner == group.members[0]
        for name in group.members:
            layer = quantization.layers[name]
            assert getattr(layer, f"{kind}_s0") is group.s0 and getattr(layer, f"{kind}_theta") is group.theta
        assert group.s0.dtype == torch.float32 and group.s0.shape == (1,)
        assert not group.s0.requires_grad and group.s0.isnan().all()
        assert group.theta.dtype == torch.bfloat16 and group.theta.requires_grad and not group.theta.any()
        # Owned by the first member: that is the name under which the Parameter is listed, once.
        assert after[f"{group.owner}.{kind}_s0"] is group.s0 and after[f"{group.owner}.{kind}_theta"] is group.theta
    scales = [parameter for name, parameter in after.items() if name.rpartition(".")[2] in SCALE_PARAMETERS]
    assert len(scales) == 4 * len(expected) and len({id(p) for p in model.parameters()}) == len(after)


def test_experts_share_input_scales_over_the_layer_and_weight_scales_within_each():
    """One input scale for all gate/up of an MoE layer and one for all down; shared experts are dense. The LSQ factor
    counts the elements of a group."""
    quantization = fp8(moe_model())
    block = "model.layers.1.mlp"
    experts = [f"{block}.experts.{index}" for index in range(EXPERTS)]
    weight_groups, input_groups = members(quantization.weight_groups), members(quantization.input_groups)
    for expert in (*experts, f"{block}.shared_expert"):
        assert [f"{expert}.gate_proj", f"{expert}.up_proj"] in weight_groups
        assert [f"{expert}.down_proj"] in weight_groups
    assert [f"{expert}.{name}" for expert in experts for name in ("gate_proj", "up_proj")] in input_groups
    assert [f"{expert}.down_proj" for expert in experts] in input_groups
    assert [f"{block}.shared_expert.gate_proj", f"{block}.shared_expert.up_proj"] in input_groups
    # Per layer: q/k/v, o, and (gate/up, down) of each expert, of the shared one; for inputs the experts count once.
    assert len(weight_groups) == 2 * (2 + 2 * (EXPERTS + 1)) and len(input_groups) == 2 * (2 + 2 * 2)
    for groups in (weight_groups, input_groups):
        assert sorted(itertools.chain(*groups)) == sorted(quantization.layers), "each layer in exactly one group"
    assert f"{block}.gate" in quantization.exempt and f"{block}.shared_expert_gate" in quantization.exempt
    numel = {name: layer.weight_numel for name, layer in quantization.layers.items()}
    assert all(numel[f"model.layers.0.self_attn.{name}"] == 3 * HIDDEN * HIDDEN for name in ATTENTION)
    assert numel["model.layers.0.self_attn.o_proj"] == HIDDEN * HIDDEN
    assert numel["model.layers.0.mlp.experts.2.up_proj"] == 2 * HIDDEN * INNER


def test_the_routers_of_transformers_are_exempt_and_listed():
    """Its router is a class of its own, no nn.Linear, but serving takes it for one."""
    model = causal_lm("qwen3_moe")
    quantization = replace_layers(model, FP8, learn_weight_scale=True, learn_input_scale=False)
    assert "model.layers.0.mlp.gate" in quantization.exempt
    assert not isinstance(model.get_submodule("model.layers.0.mlp.gate"), QuantLinear | nn.Linear)


def test_finer_weight_scales_are_not_shared():
    """A row belongs to one layer; without input quantization there are no input groups."""
    quantization = int4(moe_model())
    assert members(quantization.weight_groups) == [[name] for name in quantization.layers]
    assert quantization.input_groups == []
    for group in quantization.weight_groups:
        layer = quantization.layers[group.owner]
        assert group.s0.shape == group.theta.shape == (layer.out_features, layer.in_features // 32)
        assert layer.weight_numel == 32 and layer.input_s0 is None and not layer.input_fake_quant


def test_static_scales_have_no_theta():
    """Nothing is created that would not train."""
    for weight, input_ in itertools.product((True, False), repeat=2):
        model = moe_model()
        quantization = fp8(model, learn_weight_scale=weight, learn_input_scale=input_)
        assert all((group.theta is not None) == weight for group in quantization.weight_groups)
        assert all((group.theta is not None) == input_ for group in quantization.input_groups)
        names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
        assert ("weight_theta" in names, "input_theta" in names) == (weight, input_)
    for scheme in (INT4, SCHEMES["nvfp4_w4a4"]):
        said = rf"learnable.act_scale: true, expected false: .*inputs that can be learned \({scheme.name}\)"
        with pytest.raises(ValueError, match=said):
            replace_layers(moe_model(), scheme, learn_weight_scale=True, learn_input_scale=True)


def test_meta_and_partitioned_weights_will_do():
    """Shapes come from in_features and out_features; device and dtype from the weight."""
    with torch.device("meta"):
        model = moe_model()
    group = fp8(model).weight_groups[0]
    assert group.s0.device.type == group.theta.device.type == "meta"
    model = moe_model()
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=torch.bfloat16)  # as ZeRO-3 leaves it
    group = int4(model).weight_groups[0]
    assert group.s0.shape == (HIDDEN, HIDDEN // 32) and group.theta.dtype == torch.bfloat16


def test_layers_without_their_fused_partners_stand_alone():
    """An ungated MLP has no gate to share with; in attention without values of its own the keys are the values, as in
    some layers of Gemma 4, and serving fuses the other two."""
    model = Tree(mlp=Tree(up_proj=nn.Linear(32, 64), down_proj=nn.Linear(64, 32)))
    assert members(fp8(model).weight_groups) == [["mlp.up_proj"], ["mlp.down_proj"]]
    model = Tree(self_attn=Tree(q_proj=nn.Linear(32, 32), k_proj=nn.Linear(32, 16), o_proj=nn.Linear(32, 32)))
    assert members(fp8(model).weight_groups) == [["self_attn.q_proj", "self_attn.k_proj"], ["self_attn.o_proj"]]


class Grouped(nn.Linear):
    def forward(self, input):
        return (input.unflatten(-1, (2, -1)) * self.weight).sum(-1)


def test_layers_that_cannot_be_quantized_are_named():
    """Tied weights, subclasses of nn.Linear, and widths that a group size or a shared input does not fit."""
    tied = causal_lm("llama")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    subclass = Tree(mlp=Tree(of=Grouped(4, 4), down_proj=nn.Linear(4, 4)))
    crossed = Tree(**{name: nn.Linear(32 if name == "q_proj" else 64, 32) for name in ATTENTION})
    for model, options, said in (
        (tied, {"exempt": []}, r"model\.embed_tokens and lm_head share one weight; leave lm_head unquantized"),
        (subclass, {}, r"mlp\.of is a Grouped, a subclass.*set quant\.exempt_more: \['mlp\\.of'\]"),
        (crossed, {}, r"different in_features .*'q_proj': 32.*'k_proj': 64"),
    ):
        with pytest.raises(ValueError, match=said):
            fp8(model, **options)


def test_all_that_does_not_fit_is_named_at_once_with_what_is_fused_with_it():
    """Group sizes of 32; gate and up are served as one layer, so that both stay as they are."""
    with pytest.raises(ValueError, match=r"mlp\.odd: in_features 33 is not divisible by group_size 32"):
        int4(Tree(mlp=Tree(odd=nn.Linear(33, 4))))
    narrow = Tree(gate_proj=nn.Linear(64, 8), up_proj=nn.Linear(40, 8), down_proj=nn.Linear(64, 8))
    layers = nn.ModuleList(Tree(mlp=narrow, dt_proj=nn.Linear(8, 64)) for _ in range(2))
    line = r"quant.exempt_more: ['layers\.\d+\.mlp\.up_proj', 'layers\.\d+\.dt_proj', 'layers\.\d+\.mlp\.gate_proj']"
    with pytest.raises(ValueError, match=r"mlp\.up_proj: in_features 40 .*dt_proj: in_features 8 ") as caught:
        int4(Tree(layers=layers))
    assert set(str(caught.value).partition("set ")[2][:-1].split(", ")) == set(line[:-1].split(", "))


def test_sizes_that_blocks_or_groups_of_inputs_do_not_divide(seed):
    """Blocks need not divide a Linear, except where servers put another one behind it."""
    alone, scheme = SCHEMES["fp8_block"].weights, SCHEMES["fp8_block"]
    weights = Scheme("weights alone", alone)
    linear = Tree(up_proj=nn.Linear(200, 72))
    quantization = replace_layers(linear, weights, learn_weight_scale=True, learn_input_scale=False)
    assert quantization.layers["up_proj"].weight_s0.shape == (1, 2)
    with pytest.raises(ValueError, match=r"up_proj: in_features 200 is not divisible by the inputs' group_size 128"):
        replace_layers(Tree(up_proj=nn.Linear(200, 72)), scheme, learn_weight_scale=True, learn_input_scale=False)
    for k_rows in (128, 72):
        attention = Tree(q_proj=nn.Linear(128, 256), k_proj=nn.Linear(128, k_rows), v_proj=nn.Linear(128, 72))
        model = Tree(layers=nn.ModuleList([Tree(self_attn=attention)]))
        if k_rows == 128:
            replace_layers(model, scheme, learn_weight_scale=True, learn_input_scale=False)
            continue
        said = r"k_proj: out_features 72 is not divisible by the block size 128, and servers put the rows of v_proj"
        with pytest.raises(ValueError, match=rf"{said}.*quant\.exempt_more: .*k_proj', .*q_proj', .*v_proj'\]"):
            replace_layers(model, scheme, learn_weight_scale=True, learn_input_scale=False)
    for projections, rows in ((("down_proj",), 72), (("gate_proj", "up_proj"), 144), (("gate_proj", "up_proj"), 256)):
        stack = StackedLinear(nn.Parameter(torch.randn(3, rows, 128)), (3, rows, 128), projections)
        model = Tree(mlp=Tree(experts=Tree(all=stack)))
        if rows == 144:
            with pytest.raises(ValueError, match=r"all: out_features 72 is not divisible by the block size 128, and"):
                replace_layers(model, weights, learn_weight_scale=True, learn_input_scale=False)
            continue
        quantization = replace_layers(model, weights, learn_weight_scale=True, learn_input_scale=False)
        assert quantization.layers["mlp.experts.all"].weight_s0.shape == (3, -(-rows // 128), 1)


def test_a_subclass_that_computes_what_a_linear_does_is_one(seed):
    model = VARIANTS["falcon"].model(seed=seed)
    ids = torch.randint(3, 300, (2, 9))
    expected = model(input_ids=ids, use_cache=False).logits
    quantization = fp8(model)
    assert any(name.endswith("self_attention.query_key_value") for name in quantization.layers)
    quantization.set_fake_quant(weights=False, activations=False)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_scale_that_nothing_filled_shows_in_the_output():
    """NaN, not a model that quietly computes with a scale of 1."""
    int4(model := Tree(only=nn.Linear(32, 32)))
    assert model.only(torch.randn(2, 32)).isnan().all()
