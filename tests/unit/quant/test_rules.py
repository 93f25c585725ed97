"""Which layer gets which scheme: exempt patterns, rules, and what serving could not follow."""

import pytest
from torch import nn

from quant import DEFAULT_EXEMPT, QuantLinear, Rule, prepare
from tests.unit.quant.trees import ATTENTION, FP8, INT2, INT4, Tree, fp8, members, moe_model


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r".*\.0\.self_attn\.v_proj", ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj is exempt"]),
        (r".*\.1\.mlp\.experts\.2\.up_proj", ["layers.1.mlp.experts.2.gate_proj", "experts.2.up_proj is exempt"]),
        (r".*experts\.1\.(gate_proj|up_proj)", ["experts.0.gate_proj", "experts.1.gate_proj", "are exempt"]),
        (r".*\.0\.mlp\.experts\.0\.down_proj", ["experts.1.gate_proj", "experts.0.down_proj is exempt"]),
        (r".*shared_expert\.gate_proj", ["shared_expert.up_proj", "shared_expert.gate_proj is exempt"]),
    ],
)
def test_an_incomplete_group_is_an_error(pattern, named):
    """Named in full, with what is missing; nothing was replaced."""
    model = moe_model()
    with pytest.raises(ValueError, match="served as one layer") as error:
        fp8(model, exempt=[*DEFAULT_EXEMPT, pattern])
    assert all(text in str(error.value) for text in named), str(error.value)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_a_whole_group_may_be_exempt():
    """But not a part of what serving fuses, also where nothing is shared: it has one scheme for the fused layer."""
    quantization = fp8(
        moe_model(), exempt=[*DEFAULT_EXEMPT, r".*\.0\.self_attn\.[qkv]_proj", r".*\.1\.mlp\.experts\..*"]
    )
    assert "model.layers.0.self_attn.o_proj" in quantization.layers
    assert not any(".0.self_attn.q_proj" in name or ".1.mlp.experts." in name for name in quantization.layers)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.v_proj is exempt"):
        prepare(
            moe_model(), INT4, exempt=[*DEFAULT_EXEMPT, r".*v_proj"], learn_weight_scale=True, learn_input_scale=False
        )


def test_a_pattern_that_matches_nothing_is_an_error():
    """A typo would quantize what was meant to be spared. The defaults may match nothing."""
    with pytest.raises(ValueError, match=r"'layers\.0' matches no module.*model\.layers\.0\.self_attn\.q_proj"):
        fp8(moe_model(), exempt=[*DEFAULT_EXEMPT, "layers.0"])
    with pytest.raises(ValueError, match="matches no module"):
        fp8(moe_model(), exempt=["self_attn"])  # must match the full name
    assert len(fp8(Tree(only=nn.Linear(4, 4))).layers) == 1
    with pytest.raises(ValueError, match="nothing to quantize"):
        fp8(Tree(only=nn.Linear(4, 4)), exempt=["only"])


def mixed(model: nn.Module, *rules: Rule, scheme=INT2, **kwargs):
    return prepare(model, scheme, rules=rules, learn_weight_scale=True, learn_input_scale=False, **kwargs)


def test_the_first_rule_that_matches_decides():
    """By layer index, by name, by both; the default for the rest; exempt layers are asked nothing."""
    model = moe_model()
    rules = (
        Rule(INT4, first=1, layers=r".*self_attn.*"),
        Rule(None, last=1, layers=r".*o_proj"),
        Rule(FP8, layers=r".*\.self_attn\..*"),
    )
    quantization = mixed(model, *rules)
    assert "model.layers.1.self_attn.o_proj" not in quantization.layers
    assert type(model.model.layers.get_submodule("1.self_attn.o_proj")) is nn.Linear
    for name, layer in quantization.layers.items():
        where = "self_attn" in name, ".0." in name.partition(".mlp")[0] + "."
        assert layer.scheme == {(True, True): INT4, (True, False): FP8}.get(where, INT2), name
    assert not any("gate" in name.rpartition(".")[2] and "proj" not in name for name in quantization.layers)
    # Weights of fp8 share a scale per fused set, integers none; stored input scales belong to fp8 alone.
    assert [group.spec for group in quantization.input_groups] == [FP8.activations]
    assert members(quantization.input_groups) == [[f"model.layers.1.self_attn.{name}" for name in ATTENTION]]
    shared = [group.members for group in quantization.weight_groups if len(group.members) > 1]
    assert shared == members(quantization.input_groups)
    order = list(quantization.layers)
    owners = [order.index(group.owner) for group in quantization.weight_groups]
    assert owners == sorted(owners)


def test_the_ends_of_a_model_and_single_layers_have_schemes_of_their_own():
    """first and last together; a name beats exempt patterns."""
    quantization = mixed(moe_model(), Rule(INT4, first=1, last=1))
    assert {layer.scheme for layer in quantization.layers.values()} == {INT4}  # it has two layers
    quantization = mixed(moe_model(), named={"lm_head": INT4})
    assert quantization.layers["lm_head"].scheme == INT4 and "lm_head" not in quantization.exempt
    only = mixed(moe_model(), scheme=None, named={"lm_head": INT4})
    assert list(only.layers) == ["lm_head"]


def test_rules_that_serving_could_not_follow_are_errors():
    """Half of a fused layer, some of the experts, a rule that decides nothing, a name that is no layer's."""
    with pytest.raises(ValueError, match=r"need one scheme, but \S+q_proj has w2a16_g32, \S+v_proj has w4a16_g32"):
        mixed(moe_model(), Rule(INT4, layers=r".*v_proj"))
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj has w2a16_g32, \S+experts\.2\.gate_proj has"):
        mixed(moe_model(), Rule(INT4, layers=r".*experts\.2\..*"))
    with pytest.raises(
        ValueError, match=r"experts\.0\.gate_proj has w2a16_g32, \S+experts\.0\.down_proj has w4a16_g32"
    ):
        mixed(moe_model(), Rule(INT4, layers=r".*experts\..*down_proj"))
    with pytest.raises(ValueError, match=r"rule 1 \(layers: lm_head\) matches no layer"):
        mixed(moe_model(), Rule(INT4, first=1), Rule(INT4, layers="lm_head"))
    with pytest.raises(ValueError, match=r"rule 1 \(layers: \.\*mlp\.\*, first: 1\) matches no layer"):
        mixed(moe_model(), Rule(INT4, first=1), Rule(FP8, first=1, layers=".*mlp.*"))
    with pytest.raises(ValueError, match=r"model\.head: no such nn\.Linear"):
        mixed(moe_model(), named={"model.head": INT4})
