"""Models of names and Linears alone, dense ones and a mixture of experts, and preparing them."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quant import get_scheme, replace_layers
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


def linears(bias: bool = False, **sizes: tuple[int, int]) -> dict[str, nn.Module]:
    return {name: nn.Linear(*size, bias=bias) for name, size in sizes.items()}


def mlp() -> Tree:
    return Tree(**linears(gate_proj=(HIDDEN, INNER), up_proj=(HIDDEN, INNER), down_proj=(INNER, HIDDEN)))


def moe_model() -> Tree:
    """Names as in a decomposed Qwen MoE: a router, experts, a shared expert with its own gate."""
    layers = {}
    for name in ("_0", "_1"):
        attention = Tree(**linears(True, **dict.fromkeys((*ATTENTION, "o_proj"), (HIDDEN, HIDDEN))))
        experts = Tree(**{f"_{index}": mlp() for index in range(EXPERTS)})
        gates = linears(gate=(HIDDEN, EXPERTS), shared_expert_gate=(HIDDEN, 1))
        layers[name] = Tree(self_attn=attention, mlp=Tree(experts=experts, shared_expert=mlp(), **gates))
    model = Tree(embed_tokens=nn.Embedding(50, HIDDEN), layers=Tree(**layers))
    return Tree(model=model, **linears(lm_head=(HIDDEN, 50)))


def causal_lm(kind: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.bfloat16)


def members(groups) -> list[list[str]]:
    return [group.members for group in groups]


def fp8(model: nn.Module, **options):
    return replace_layers(model, FP8, **{"learn_weight_scale": True, "learn_input_scale": True, **options})
