"""The table of layers that serving fuses, against what vLLM's source says (vllm_groups.py reads it)."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from quant import DEFAULT_EXEMPT, SCHEMES, prepare
from quant.rules import FUSED, VLLM_VERSION
from tests.families.make import composite
from tests.families.variants import VARIANTS

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
    quantization = prepare(
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
    quantization = prepare(model, SCHEMES["fp8_static"], learn_weight_scale=False, learn_input_scale=False)
    found = [[member.rpartition(".")[2] for member in group.members] for group in quantization.weight_groups]
    assert found == [["q_proj", "k_proj", "v_proj", "gate_proj"], ["q_proj", "k_proj", "v_proj"], ["gate_proj"]]
