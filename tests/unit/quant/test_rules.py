"""Which layer gets which scheme: patterns, exempt layers, rules, and what serving could not follow."""

import json
import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.utils.match import is_match
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from quant import DEFAULT_EXEMPT, SCHEMES, QuantLinear, Rule, replace_layers
from quant.rules import FUSED, VLLM_VERSION, name_patterns, pattern_problem
from tests.families.make import composite
from tests.families.variants import VARIANTS
from tests.unit.quant.trees import ATTENTION, FP8, INT2, INT4, Tree, fp8, members, moe_model

NAME = "model.language_model.layers.117.mlp.experts.127.shared_expert_gate_proj_weight!"


@pytest.mark.parametrize(
    "pattern",
    [
        *DEFAULT_EXEMPT,
        r".*layers\.(\d+)\..*mlp\.experts\.\d+\..*_proj",
        r"model\.layers\.(0|1|2|17)\.self_attn\.(q|k|v)_proj",
        r"(?:.*\.)?visual(?:\..*)?$",
        r"(?!.*lm_head).*",
        r"[a-z_.]{1,8}",
        "",
    ],
)
def test_what_people_write_is_taken(pattern):
    assert pattern_problem(pattern) is None
    re.fullmatch(pattern, NAME)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(a+)+b", "a repetition contains a repetition"),
        (r"(\w+\.?)*x", "a repetition contains a repetition"),
        ("((.*)*)*", "a repetition contains a repetition"),
        ("(.|_.)*x", "or alternatives"),
        ("(?:a*){20}b", "a repetition contains a repetition"),
        ("(?=(a+)+b)", "a repetition contains a repetition"),
        (".*" * 5 + "x", "it has 5 repetitions like .*, at most 4 are allowed"),
        ("a{0,65000}" * 9, "it has 9 repetitions"),
        ("a" * 3000, "it has 3,000 characters"),
        ("(" * 900 + ")" * 900, "maximum recursion depth"),
        ("(", "missing ), unterminated subpattern"),
    ],
)
def test_what_may_take_for_ever_is_refused(pattern, said):
    problem = pattern_problem(pattern)
    assert problem is not None and said in problem


def test_name_patterns_of_random_sets_match_those_and_no_others(seed):
    """Any subset of the names of a model, with and without an end that follows them."""
    names, linear = ["lm_head", "embed", *(f"m.{i}.a{leaf}" for i in range(4) for leaf in ("", "_b"))], nn.Linear(1, 1)
    names += [f"m.{i}.experts.{e}.{leaf}" for i in range(4) for e in range(3) for leaf in ("up", "down")]
    for _ in range(50):
        chosen = torch.rand(len(names)) < torch.rand(())
        mine = [name for name, is_mine in zip(names, chosen, strict=True) if is_mine]
        others = [name for name in names if name not in mine]
        entries = name_patterns(mine, others)
        assert [name for name in names if is_match(name, linear, entries)] == mine
        with_end = name_patterns(mine, others, r"\.end")
        assert [name for name in names if is_match(f"{name}.end", linear, with_end)] == mine
        assert all(entry.startswith("re:") and re.compile(entry[3:]) for entry in with_end)


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
    """Named in full, with what is missing; nothing was replaced. Also where nothing is shared: serving has one scheme
    for the fused layer."""
    for scheme in (FP8, INT4):
        model = moe_model()
        with pytest.raises(ValueError, match="served as one layer") as error:
            mixed(model, scheme=scheme, exempt=[*DEFAULT_EXEMPT, pattern])
        assert all(text in str(error.value) for text in named), str(error.value)
        assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_a_whole_group_may_be_exempt():
    spared = [r".*\.0\.self_attn\.[qkv]_proj", r".*\.1\.mlp\.experts\..*"]
    quantization = fp8(moe_model(), exempt=[*DEFAULT_EXEMPT, *spared])
    assert "model.layers.0.self_attn.o_proj" in quantization.layers
    assert not any(".0.self_attn.q_proj" in name or ".1.mlp.experts." in name for name in quantization.layers)


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
    return replace_layers(model, scheme, rules=rules, learn_weight_scale=True, learn_input_scale=False, **kwargs)


def test_the_first_rule_that_matches_decides():
    """By layer index, by name, by both; the default for the rest; exempt layers are asked nothing."""
    model = moe_model()
    rules = (
        Rule(INT4, first=1, layers=r".*self_attn.*"),
        Rule(None, last=1, layers=r".*o_proj"),
        Rule(FP8, layers=r".*\.self_attn\..*"),
    )
    quantization = mixed(model, *rules)
    assert type(model.model.layers.get_submodule("1.self_attn.o_proj")) is nn.Linear
    assert "model.layers.1.self_attn.o_proj" not in quantization.layers
    for name, layer in quantization.layers.items():
        where = "self_attn" in name, ".0." in name.partition(".mlp")[0] + "."
        assert layer.scheme == {(True, True): INT4, (True, False): FP8}.get(where, INT2), name
        assert not name.endswith(("gate", "shared_expert_gate"))
    # Weights of fp8 share a scale per fused set, integers none; stored input scales belong to fp8 alone.
    assert [group.spec for group in quantization.input_groups] == [FP8.activations]
    assert members(quantization.input_groups) == [[f"model.layers.1.self_attn.{name}" for name in ATTENTION]]
    shared = [group.members for group in quantization.weight_groups if len(group.members) > 1]
    assert shared == members(quantization.input_groups)
    owners = [list(quantization.layers).index(group.owner) for group in quantization.weight_groups]
    assert owners == sorted(owners)


def test_the_ends_of_a_model_and_single_layers_have_schemes_of_their_own():
    """first and last together; a name beats exempt patterns."""
    quantization = mixed(moe_model(), Rule(INT4, first=1, last=1))
    assert {layer.scheme for layer in quantization.layers.values()} == {INT4}  # it has two layers
    quantization = mixed(moe_model(), named={"lm_head": INT4})
    assert quantization.layers["lm_head"].scheme == INT4 and "lm_head" not in quantization.exempt
    assert list(mixed(moe_model(), scheme=None, named={"lm_head": INT4}).layers) == ["lm_head"]


EXPERT = r"experts\.0\.gate_proj has w2a16_g32, \S+experts"


@pytest.mark.parametrize(
    ("rules", "named", "said"),
    [
        ([Rule(INT4, layers=r".*v_proj")], {}, r"one scheme, but \S+q_proj has w2a16_g32, \S+v_proj has w4a16_g32"),
        ([Rule(INT4, layers=r".*experts\.2\..*")], {}, rf"{EXPERT}\.2\.gate_proj has"),
        ([Rule(INT4, layers=r".*experts\..*down_proj")], {}, rf"{EXPERT}\.0\.down_proj has w4a16_g32"),
        ([Rule(INT4, first=1), Rule(INT4, layers="lm_head")], {}, r"rule 1 \(layers: lm_head\) decides for no layer"),
        (
            [Rule(INT4, first=1), Rule(FP8, first=1, layers=".*mlp.*")],
            {},
            r"rule 1 \(layers: \.\*mlp\.\*, first: 1\) decides for no layer",
        ),
        ([], {"model.head": INT4}, r"model\.head: no such nn\.Linear"),
    ],
)
def test_rules_that_serving_could_not_follow_are_errors(rules, named, said):
    """Half of a fused layer, some of the experts, a rule that decides nothing, a name that is no layer's."""
    with pytest.raises(ValueError, match=said):
        mixed(moe_model(), *rules, named=named)


# ---- the table of layers that serving fuses, against what vLLM's source says (vllm_groups.py reads it)

RECORDED = json.loads((Path(__file__).parent / "vllm_groups.json").read_text())
# How names on disk, which vLLM's are, differ from those of transformers' modules.
FORGET = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj")
RENAMED = {FORGET: "forget_gate.f_a_proj", (*FORGET, "g_a_proj"): "forget_gate.f_a_proj"}
MIX = ("input_mix_weight_down", "block_inject_weight")
SAME = {
    ("q_proj", "k_proj", "v_proj", "index_qk_proj"): ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj"),
    ("q_proj", "k_proj", "v_proj", "o_gate_proj"): ("q_proj", "k_proj", "v_proj", "gate_proj"),
    ("q_proj", "k_proj", "v_proj", "output_gate_proj"): ("q_proj", "k_proj", "v_proj", "gate_proj"),
    (*MIX, "_input_mix_padding"): MIX,
    ("wq_a", "wkv"): ("q_a_proj", "kv_proj"),
    ("wkv", "wgate"): ("kv_proj", "gate_proj"),
    ("wq_du", "wk_dv", "wv_dv", "wr_du"): ("q_proj", "k_proj", "v_proj", "r_proj"),
    ("q_proj", "k_proj"): ("q_proj", "k_proj", "v_proj"),  # of one that has no values of its own
}
NOT_HERE = {
    ("c_fc_0", "c_fc_1"): "EXAONE 3, which transformers does not have",
    ("fc1", "fc3"): "a vision tower",
    ("gate_proj", "dense_h_to_4h"): "the tower of a model that needs its own code",
    ("k_proj", "v_proj"): "cross-attention of speech models, and a vision tower",
    ("key_net", "value_net"): "a speech encoder",
    ("query_net", "key_net", "value_net"): "a speech encoder",
    ("q", "k", "v"): "vision towers",
    ("query", "key", "value"): "BERT and RoBERTa, which generate nothing",
    ("wq", "wk", "wv"): "a vision tower",
    ("q_conv1d", "k_conv1d", "v_conv1d"): "convolutions, which are not quantized",
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"): "Kimi K3, whose g_proj transformers' class does not have",
    ("wk", "weights_proj"): "the indexer of sparse attention, which vLLM does not quantize",
}


def test_every_group_of_vllm_is_in_the_table_or_has_a_reason_not_to_be():
    assert RECORDED["version"] == VLLM_VERSION
    ours = {frozenset(row.members) for row in FUSED}
    unknown = []
    for group in RECORDED["groups"]:
        names = tuple(group["layers"])
        longer = RENAMED.get(names)
        spelled = tuple(longer if longer and longer.endswith(f".{name}") else name for name in SAME.get(names, names))
        if frozenset(spelled) not in ours and names not in NOT_HERE:
            unknown.append((names, group["files"][:3]))
    assert not unknown, "vLLM fuses layers that no row of quant/rules.py has"


def test_rows_of_a_class_come_before_those_of_any_class():
    general = [index for index, row in enumerate(FUSED) if not row.classes]
    assert general == list(range(general[0], len(FUSED)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", {"gate_proj up_proj", "q_proj k_proj v_proj"}),
        ("deepseek_v3", {"gate_proj up_proj", "q_a_proj kv_a_proj_with_mqa"}),
        ("glm4_moe_lite", {"gate_proj up_proj", "q_a_proj kv_a_proj_with_mqa"}),
        ("lfm2", {"q_proj k_proj v_proj", "w1 w3"}),
        ("kimi_linear", {"gate_proj up_proj", "q_a_proj kv_a_proj_with_mqa", "q_proj k_proj v_proj f_a_proj b_proj"}),
        ("olmo_hybrid", {"gate_proj up_proj", "q_proj k_proj v_proj", "q_proj k_proj v_proj g_proj"}),
        ("qwen3_5", {"gate_proj up_proj", "in_proj_b in_proj_a", "in_proj_qkv in_proj_z", "q_proj k_proj v_proj"}),
    ],
)
def test_the_groups_of_a_family_are_those_that_serving_fuses(name: str, expected: set[str]):
    """Compare groups of several layers, by the last names of their members; none reaches over decoder layers."""
    config = VARIANTS[name].config()
    auto = AutoModelForImageTextToText if composite(config) else AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        model = auto.from_config(config)
    exempt = (*DEFAULT_EXEMPT, *([r".*visual\..+"] if name == "qwen3_5" else []))
    quantization = replace_layers(
        model, SCHEMES["fp8_static"], exempt=exempt, learn_weight_scale=False, learn_input_scale=False
    )
    for group in (*quantization.weight_groups, *quantization.input_groups):
        assert len({member.partition(".layers.")[2].split(".")[0] for member in group.members}) == 1, group.members
    several = [group.members for group in quantization.weight_groups if len(group.members) > 1]
    assert {" ".join(one.rpartition(".")[2] for one in members) for members in several} == expected


def test_a_name_that_other_classes_have_does_not_join_their_groups():
    """An MLP's gate and an attention's gate have one name; only the classes named in the table fuse the latter."""

    model = nn.Module()
    for name, kind in (("beam", "BeamAttention"), ("other", "Attention")):
        parent = type(kind, (nn.Module,), {})()
        for leaf in ("q_proj", "k_proj", "v_proj", "gate_proj"):
            parent.add_module(leaf, nn.Linear(32, 32))
        model.add_module(name, parent)
    quantization = replace_layers(model, SCHEMES["fp8_static"], learn_weight_scale=False, learn_input_scale=False)
    found = [[member.rpartition(".")[2] for member in group.members] for group in quantization.weight_groups]
    assert found == [["q_proj", "k_proj", "v_proj", "gate_proj"], ["q_proj", "k_proj", "v_proj"], ["gate_proj"]]
