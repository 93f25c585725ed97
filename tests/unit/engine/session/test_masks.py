"""Which models need an attention mask for rows padded behind their samples: tried on real ones, tiny and random."""

import pytest
import torch
from torch import Tensor

from data.loader import MicroBatch, model_inputs
from engine.session.probes import mask_problem, stop_asking
from tests.lib.host_waits import HostWaits
from tests.lib.tiny import tiny_model
from tests.unit.engine.session.test_borders import APART, BIDIRECTIONAL, SEEN, random_model


def problem_of(model, *, rows: int = 3, length: int = 51) -> str | None:
    experts = any("expert" in name and "shared" not in name for name, _ in model.named_modules())

    return mask_problem(forward_of(model), torch.arange(3, 90), rows=rows, length=length, exact=not experts)


# What is seen of other samples in a row is not seen of what follows: convolutions and states are causal too.
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("kind", [*APART, *SEEN])
def test_causal_models_need_none(kind, dtype):
    model = random_model(kind, {**APART, **SEEN}[kind], dtype)
    assert problem_of(model) is None
    assert problem_of(model, rows=1) is None


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
def test_models_that_see_what_follows_need_one(kind):
    assert "see the padding behind them" in str(problem_of(random_model(kind, BIDIRECTIONAL[kind], torch.bfloat16)))


def forward_of(model):
    return lambda batch: model.base_model(**model_inputs(batch), use_cache=False)[0]


@pytest.mark.parametrize(
    ("kind", "length", "stops"),
    [
        ("qwen3", 51, True),
        ("mixtral", 51, True),
        ("gemma3_text", 51, False),  # a window of 8 tokens
        ("gemma3_text", 7, True),  # rows that it does not cut
        ("bloom", 51, False),  # whose attention is eager
    ],
)
def test_nobody_asks_for_borders_where_nothing_is_masked(kind, length, stops):
    model = random_model(kind, {**APART, **SEEN}[kind], torch.bfloat16)
    batch = {"input_ids": torch.arange(3, 3 + 2 * length).view(2, length) % 90}
    before, own = forward_of(model)(batch), model.config._attn_implementation
    assert stop_asking(model, forward_of(model), batch) is stops
    with HostWaits() as waits:
        after = forward_of(model)(batch)
    assert torch.equal(after, before)
    asked = [name for name in waits.by_function if "masking_utils" in name]
    assert not (stops and asked) and (model.config._attn_implementation == own) is not stops


@pytest.mark.parametrize("rows", [1, 2])
def test_positions_counted_from_the_mask_are_found(rows):
    """A class that starts to count elsewhere without one: nothing is seen of the padding."""
    model = tiny_model("qwen3").eval()
    table = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))

    def forward(batch: MicroBatch) -> Tensor:
        mask = batch.get("attention_mask")
        counted = torch.arange(batch["input_ids"].shape[1]) + 1 if mask is None else mask.cumsum(-1)
        shift = 0 if mask is None else -1
        embedded = model.get_input_embeddings()(batch["input_ids"]) + table[(counted + shift).clamp(min=0)]
        inputs = {"inputs_embeds": embedded.to(model.dtype), "attention_mask": mask}
        return model.model(**inputs, use_cache=False).last_hidden_state

    problem = mask_problem(forward, torch.arange(3, 90), rows=rows, length=40, exact=True)
    assert "its hidden states are others" in str(problem)


def test_one_layer_that_mixes_the_last_tokens_in_is_found():
    """What no configuration names: the mean over the row, of which the mask takes the padding out."""
    model = tiny_model("llama").eval()

    def forward(batch: MicroBatch) -> Tensor:
        hidden = model.model(**model_inputs(batch), use_cache=False).last_hidden_state
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None].to(hidden.dtype)
        return hidden + 0.05 * (hidden * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

    problem = mask_problem(forward, torch.arange(3, 90), rows=2, length=40, exact=True)
    assert "see the padding behind them" in str(problem)
