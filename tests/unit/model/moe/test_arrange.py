"""Routers are found by what they compute, not by their names; Llama 4's MoE block computes what transformers' does."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from model.moe.arrange import Routed, arrange_experts, routers_of
from model.moe.experts import router_names
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


@pytest.mark.parametrize("name", EXPECTED)
def test_the_routers_of_transformers(name: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(VARIANTS[name].config(), attn_implementation="eager")
    arrange_experts(model, "stacked")
    assert [router for router in router_names(model) if ".1." in router] == EXPECTED[name]


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


SIZES = {"hidden_size": 24, "intermediate_size": 16, "intermediate_size_mlp": 16}
LLAMA_4 = Llama4TextConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2)


def test_llama_4_in_bf16_adds_up_as_theirs_does():
    theirs = Llama4TextMoe(LLAMA_4).bfloat16()
    theirs.experts.act_fn = nn.ReLU()
    model = nn.ModuleDict({"moe": copy.deepcopy(theirs)})
    assert arrange_experts(model, "stacked") == 1
    ours, hidden = model["moe"], torch.randint(-1, 2, (1, 40, 24)).bfloat16()
    assert isinstance(ours, Routed)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):  # products that are exact in any order
            stack = getattr(theirs.experts, name).copy_(torch.randint(-1, 2, getattr(theirs.experts, name).shape))
            getattr(ours.experts, name).weight.copy_(stack.transpose(1, 2))
        ours.router.weight.copy_(theirs.router.weight.copy_(torch.randn(5, 24)))
        found, expected = ours(hidden)[0], theirs(hidden)[0]
    # bmm and grouped products may round the same sum to neighbors where scores are no powers of two.
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def test_a_block_of_another_class_is_refused():
    class Other(Llama4TextMoe): ...

    with pytest.raises(ValueError, match=r"moe \(Other\) .*passes all tokens to every expert, .*Llama4TextMoe"):
        arrange_experts(nn.ModuleDict({"moe": Other(LLAMA_4)}), "stacked")
