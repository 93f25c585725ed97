"""Models of names and Linears alone, dense ones and a mixture of experts, and preparing them."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quant import get_scheme, prepare
from tests.lib.tiny import tiny_config

FP8, INT4, INT2 = get_scheme("fp8_static"), get_scheme("w4a16_g32"), get_scheme("w2a16_g32")
ATTENTION = ("q_proj", "k_proj", "v_proj")
HIDDEN, INNER, EXPERTS = 32, 64, 3


class Tree(nn.Module):
    """A module with the given children: only names and Linears matter here."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name.removeprefix("_"), child)


def mlp() -> Tree:
    return Tree(
        gate_proj=nn.Linear(HIDDEN, INNER, bias=False),
        up_proj=nn.Linear(HIDDEN, INNER, bias=False),
        down_proj=nn.Linear(INNER, HIDDEN, bias=False),
    )


def moe_layer() -> Tree:
    """Names as in a decomposed Qwen MoE: a router, experts, a shared expert with its own gate."""
    attention = Tree(**{name: nn.Linear(HIDDEN, HIDDEN) for name in (*ATTENTION, "o_proj")})
    block = Tree(
        gate=nn.Linear(HIDDEN, EXPERTS, bias=False),
        experts=Tree(**{f"_{index}": mlp() for index in range(EXPERTS)}),
        shared_expert=mlp(),
        shared_expert_gate=nn.Linear(HIDDEN, 1, bias=False),
    )
    return Tree(self_attn=attention, mlp=block)


def moe_model() -> Tree:
    layers = Tree(_0=moe_layer(), _1=moe_layer())
    model = Tree(embed_tokens=nn.Embedding(50, HIDDEN), layers=layers)
    return Tree(model=model, lm_head=nn.Linear(HIDDEN, 50, bias=False))


def causal_lm(kind: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.bfloat16)


def members(groups) -> list[list[str]]:
    return [group.members for group in groups]


def fp8(model: nn.Module, **options):
    return prepare(model, FP8, **{"learn_weight_scale": True, "learn_input_scale": True, **options})
