"""Routers are found by what they compute, whatever they are called."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from model.moe.arrange import arrange_experts
from model.moe.experts import router_names
from model.moe.routers import routers_of
from tests.families.variants import VARIANTS

BLOCK = "model.layers.1.mlp"
EXPECTED = {
    "qwen3_moe": [f"{BLOCK}.gate"],
    "qwen2_moe": [f"{BLOCK}.gate", f"{BLOCK}.shared_expert_gate"],
    "qwen3_next": [f"{BLOCK}.gate", f"{BLOCK}.shared_expert_gate"],
    "deepseek_v3": [f"{BLOCK}.gate"],
    "hunyuan_v1_moe": [f"{BLOCK}.gate"],  # an nn.Linear below it: gate.wg
    "afmoe": [f"{BLOCK}.expert_bias", f"{BLOCK}.router"],  # router.gate
    "zaya": [f"{BLOCK}.gate"],  # an MLP of its own
    "phimoe": [f"{BLOCK}.router"],
    "granitemoe": ["model.layers.1.block_sparse_moe.router"],
    "jamba": ["model.layers.1.feed_forward.router"],
    "gpt_oss": [f"{BLOCK}.router"],
    "aria_text": [f"{BLOCK}.router"],
    "llama4_text": ["model.layers.1.feed_forward.router"],
    "dbrx": ["transformer.blocks.1.ffn.router"],
    "gemma4_text, experts": ["model.layers.1.router"],  # beside attention, in the layer itself
}


def arranged(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(VARIANTS[name].config(), attn_implementation="eager")
    arrange_experts(model, "stacked")
    return model


@pytest.mark.parametrize("name", EXPECTED)
def test_the_routers_of_transformers(name: str):
    assert [router for router in router_names(arranged(name)) if ".1." in router] == EXPECTED[name]


class Experts(nn.Module):
    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden * weights.sum(-1, keepdim=True)


class Odd(nn.Module):
    """A shared MLP as wide as there are experts, and a picker that is named like a projection."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.experts = Experts()
        self.gate_proj = nn.Linear(width, experts, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, experts), nn.Linear(experts, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.norm(hidden).view(-1, hidden.shape[-1])
        weights, index = self.gate_proj(rows).softmax(-1).topk(2)
        return self.experts(rows, index, weights / weights.sum(-1, keepdim=True)) + self.mlp(rows)


def test_the_picker_is_told_from_matrices_of_its_shape():
    block = Odd(8, 16)
    assert routers_of(block, block.experts, num_experts=8, hidden_dim=16) == ["gate_proj"]


def test_a_block_in_which_nothing_chooses_is_refused():
    block = nn.Module()
    block.experts, block.other = Experts(), nn.Linear(16, 5)
    with pytest.raises(ValueError, match="which of the 8 experts are chosen"):
        routers_of(block, block.experts, num_experts=8, hidden_dim=16)
