"""lm_head as a module that computes a task inside the model's own forward."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Gemma2Config, GraniteConfig, LlamaConfig

from engine.losses.chunked import TeacherHidden, chunked_losses
from engine.losses.objective import Objective
from model.head import (
    UNCHANGED,
    HiddenStates,
    LogitFunction,
    PlainHead,
    hidden_states,
    install_head,
    output_head,
    proposed_function,
    settle_function,
    take_out_head,
)
from model.ranks import RankError
from tests.families.variants import VARIANTS
from tests.lib.tiny import tiny_model

KINDS = ("qwen3", "llama", "qwen3_moe")


def tiny(kind, **options):
    """A tiny model whose experts take any size."""
    model = tiny_model(kind, **options)
    model.config._experts_implementation = "eager"
    return model


def batch_of(model):
    ids = torch.randint(0, model.config.vocab_size, (2, 7))
    labels = ids.roll(-1, 1)
    labels[:, -1], labels[0, :3] = -100, -100
    return ids, labels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_logits_and_losses_stay_what_they_were(seed, kind, tied):
    """Losses against torch's cross entropy of the model's logits, with the gradient of every parameter; fp64."""
    model = tiny(kind, tied=tied, seed=seed, dtype=torch.float64)
    ids, labels = batch_of(model)
    before, weight, names = model(ids).logits, model.lm_head.weight, [name for name, _ in model.named_parameters()]
    loss = F.cross_entropy(before.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    head = install_head(model)
    assert model.get_output_embeddings() is head and type(head) is PlainHead
    assert head.weight is weight and (head.weight is model.model.embed_tokens.weight) == tied
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(ids).logits, before)
    assert install_head(model) is head, "a second call changes nothing"

    def task(hidden, weight, bias):
        return chunked_losses(hidden, weight, bias, labels, objective=Objective(chunk_tokens=3)).total

    with head.computing(task):
        total = model(ids).logits
    total.backward()
    torch.testing.assert_close(total, loss.detach())
    for name, parameter in model.named_parameters():
        # An expert that no token chose has None in one and zeros in the other.
        reference, found = (torch.zeros_like(parameter) if x is None else x for x in (expected[name], parameter.grad))
        torch.testing.assert_close(found, reference, rtol=1e-7, atol=1e-9, msg=name)


def test_the_moe_forward_keeps_its_auxiliary_loss(seed):
    model = tiny("qwen3_moe", seed=seed, dtype=torch.float32)
    model.config.output_router_logits = True
    ids, labels = batch_of(model)
    expected = model(ids).aux_loss
    with install_head(model).computing(lambda *given: chunked_losses(*given, labels).total):
        assert torch.equal(model(ids).aux_loss, expected)


def test_a_task_lasts_as_long_as_its_block(seed):
    model = tiny("qwen3", seed=seed)
    head = install_head(model)
    ids, _ = batch_of(model)
    logits = model(ids).logits
    with pytest.raises(ZeroDivisionError), head.computing(hidden_states):
        with pytest.raises(RuntimeError, match="expected one at a time"), head.computing(hidden_states):
            pass
        assert model(ids).logits.shape[-1] == model.config.hidden_size
        raise ZeroDivisionError
    assert torch.equal(model(ids).logits, logits)


def test_a_model_without_its_head_returns_hidden_states(seed):
    model = tiny("llama", tied=True, seed=seed)
    ids, labels = batch_of(model)
    logits = model(ids).logits
    head, head_proxy = take_out_head(model)
    assert type(head_proxy) is HiddenStates and model.get_output_embeddings() is head_proxy
    hidden = model(ids).logits
    assert torch.equal(F.linear(hidden, head.weight), logits) and head.weight is model.model.embed_tokens.weight
    teacher = TeacherHidden(hidden, head.weight)
    assert chunked_losses(hidden, head.weight, None, labels, teacher).sums["kd"] == 0


def settled(model, head_proxy, factor=1.0):
    """The function of logits that the model's forward shows, whose result is multiplied by a factor."""
    settle_function(head_proxy, lambda ids: model(input_ids=ids, use_cache=False).logits * factor, model.config)
    return head_proxy.function


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "granite", "falcon_h1", "recurrent_gemma", "minicpm3", "llama"])
@pytest.mark.parametrize("taken_out", [False, True])
def test_the_function_of_logits_is_found_and_hidden_states_come_back(seed, name, taken_out):
    """minicpm3's configuration has a factor that its class applies before lm_head; llama's says nothing."""
    model = VARIANTS[name].model(seed=seed, dtype=torch.float64)
    # Random weights give logits near 0, where a soft cap is linear.
    model.get_output_embeddings().weight.data *= 50
    ids = torch.randint(3, 300, (2, 9))
    expected = model(input_ids=ids, use_cache=False).logits
    if taken_out:
        head, head_proxy = take_out_head(model)
        block = head_proxy.catching
    else:
        head = head_proxy = install_head(model)
        block = partial(head_proxy.computing, hidden_states)
    with block():
        assert (settled(model, head_proxy) == UNCHANGED) == (name in ("minicpm3", "llama"))
    with block():
        logits = model(input_ids=ids, use_cache=False).logits
    hidden = head_proxy.collect(logits, name)
    assert hidden.shape == (2, 9, 64)
    # In fp32 where the class says so: recurrent_gemma, gemma2 and others cast.
    torch.testing.assert_close(head_proxy.function(F.linear(hidden, head.weight)), expected, rtol=1e-5, atol=1e-5)


def test_a_configuration_that_says_something_else_than_its_class_does_is_refused(seed):
    model = VARIANTS["granite"].model(seed=seed)
    head_proxy = take_out_head(model)[1]
    model.config.logits_scaling = 8.5
    with pytest.raises(RankError, match=r"GraniteConfig \(granite\) changes its logits after lm_head in another way"):
        settled(model, head_proxy, 0.9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [0.99, 1.004, 1.015])
def test_a_factor_near_1_is_told_from_none(seed, dtype, factor):
    for name, expected in (("cohere", LogitFunction(factor)), ("llama", UNCHANGED)):
        model = VARIANTS[name].model(seed=seed, dtype=dtype)
        model.config.logit_scale = model.logit_scale = factor  # Llama has no such setting, and ignores it
        assert settled(model, take_out_head(model)[1]) == expected


def test_neutral_values_propose_nothing():
    for config in (LlamaConfig(), Gemma2Config(final_logit_softcapping=None), GraniteConfig(logits_scaling=1.0)):
        assert proposed_function(config) == UNCHANGED
    assert proposed_function(Gemma2Config(final_logit_softcapping=30.0)) == LogitFunction(1.0, 30.0)
    assert proposed_function(GraniteConfig(logits_scaling=8.0)) == LogitFunction(0.125)


def test_output_head_takes_plain_linears_alone():
    class Other(nn.Linear):
        pass

    model = tiny("llama")
    model.lm_head = Other(48, 301)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is a Other, expected an nn\.Linear"):
        output_head(model)


@pytest.mark.parametrize("taken_out", [False, True])
def test_a_model_that_goes_on_from_its_logits_is_refused_once_it_has_run(seed, taken_out):
    """Both replacements of lm_head check that the model returned their output."""
    model = tiny("llama", seed=seed)
    ids, _ = batch_of(model)
    head_proxy = take_out_head(model)[1] if taken_out else install_head(model)

    def logits():
        with nullcontext() if taken_out else head_proxy.computing(hidden_states):
            return model(ids).logits

    with pytest.raises(RankError, match="Llama changes its logits after lm_head in a way"):
        head_proxy.check(0.5 * logits(), "Llama")
    with pytest.raises(RankError, match="changes its logits"):  # of a forward that passes by
        head_proxy.check(torch.zeros(2, 7, 48), "Llama")
    head_proxy.check(logits(), "Llama")
    head_proxy.check(0.5 * logits(), "Llama")  # the first forward has shown it


def test_logits_that_are_not_finite_prove_nothing(seed):
    model = tiny("llama", seed=seed)
    head_proxy = take_out_head(model)[1]
    model.model.norm.weight.data.fill_(torch.nan)
    head_proxy.check(model(batch_of(model)[0]).logits, "Llama")
