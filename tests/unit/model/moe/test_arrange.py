"""Llama 4's MoE block with the tokens that chose an expert, against transformers', which hands it all of them."""

import copy

import pytest
import torch
from torch import nn
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from model.moe.arrange import Routed, arrange_experts


def block(top_k: int, dtype: torch.dtype) -> Llama4TextMoe:
    config = Llama4TextConfig(
        hidden_size=24, intermediate_size=16, intermediate_size_mlp=16, num_local_experts=5, num_experts_per_tok=top_k
    )
    made = Llama4TextMoe(config).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return made


def arranged(theirs: Llama4TextMoe) -> nn.Module:
    model = nn.ModuleDict({"moe": copy.deepcopy(theirs)})
    assert arrange_experts(model, "stacked") == 1
    ours = model["moe"]
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(ours.experts, name).weight.copy_(getattr(theirs.experts, name).transpose(1, 2))
    return ours


@pytest.mark.parametrize("top_k", [1, 2])
def test_results_and_gradients_are_those_of_all_tokens_in_every_expert(seed, top_k: int):
    theirs = block(top_k, torch.float64)
    ours = arranged(theirs)
    assert isinstance(ours, Routed) and ours.experts.routers == ("moe.router",)
    given = [torch.randn(2, 7, 24, dtype=torch.float64).requires_grad_()]
    given.append(given[0].detach().clone().requires_grad_())
    for module, hidden in zip((ours, theirs), given, strict=True):
        module.output, module.logits = module(hidden)
        (module.output.square().sum() + module.logits.square().sum()).backward()
    # Scores are made in fp32 on both sides.
    assert torch.equal(ours.logits, theirs.logits)
    torch.testing.assert_close(ours.output, theirs.output, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours.router.weight.grad, theirs.router.weight.grad, rtol=1e-9, atol=1e-11)
    for name in ("gate_up_proj", "down_proj"):
        found, expected = getattr(ours.experts, name).weight.grad, getattr(theirs.experts, name).grad
        torch.testing.assert_close(found.transpose(1, 2), expected, rtol=1e-9, atol=1e-11)


def test_bf16_adds_up_as_theirs_does(seed):
    theirs = block(2, torch.bfloat16)
    with torch.no_grad():
        for parameter in theirs.experts.parameters():  # products that are exact in any order
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    theirs.experts.act_fn = nn.ReLU()
    ours = arranged(theirs)
    hidden = torch.randint(-1, 2, (1, 40, 24)).bfloat16()
    with torch.no_grad():
        theirs.router.weight.copy_(torch.randn(5, 24))
        ours.router.weight.copy_(theirs.router.weight)
        found, expected = ours(hidden)[0], theirs(hidden)[0]
    # bmm and grouped products may round the same sum to neighbors where scores are no powers of two.
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def test_a_block_of_another_class_is_refused():
    class Other(Llama4TextMoe):
        pass

    config = Llama4TextConfig(hidden_size=24, intermediate_size=16, intermediate_size_mlp=16, num_local_experts=5)
    with pytest.raises(ValueError, match=r"moe \(Other\) hands all tokens to every expert, expected .*Llama4TextMoe"):
        arrange_experts(nn.ModuleDict({"moe": Other(config)}), "stacked")
