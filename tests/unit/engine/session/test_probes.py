"""Models that keep packed samples apart or need a mask: tried on real ones of transformers, tiny and random."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.loader import MicroBatch, model_inputs
from engine.session.probes import boundary_problem, mask_problem, stop_asking
from tests.families.make import Variant
from tests.families.variants import VARIANTS
from tests.lib.host_waits import HostWaits
from tests.lib.tiny import tiny_model

APART = ("qwen3", "llama", "gpt2", "gpt_neox", "gemma3_text", "llama4_text", "granitemoe", "mixtral", "qwen3_moe")
SEEN = ("opt", "bloom", "mpt", "falcon", "gpt_oss", "afmoe", "granitemoehybrid, dense", "lfm2", "qwen3_5_text", "mamba")
BIDIRECTIONAL = {kind: Variant(kind, kind) for kind in ("bert", "roberta")}


def random_model(kind: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    attention = "eager" if kind in ("bloom", "mpt", "gpt_oss", "mamba") else "sdpa"
    return {**VARIANTS, **BIDIRECTIONAL}[kind].model(dtype=dtype, attention=attention)


def forward_of(model):
    return lambda batch: model.base_model(**model_inputs(batch), use_cache=False)[0]


def probe(find, model: PreTrainedModel, *, rows: int, length: int = 51) -> str | None:
    experts = any("expert" in name and "shared" not in name for name, _ in model.named_modules())
    return find(forward_of(model), torch.arange(3, 90), rows=rows, length=length, exact=not experts)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("kind", [*APART, *SEEN])
def test_causal_models_need_no_mask_and_some_may_pack(kind, dtype):
    """Convolutions and states see other samples in a row, and nothing of what follows."""
    model = random_model(kind, dtype)
    assert probe(mask_problem, model, rows=3) is None and probe(mask_problem, model, rows=1) is None
    problem = probe(boundary_problem, model, rows=2)
    assert problem is None if kind in APART else "see the one before them in a row" in str(problem)


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
def test_models_that_see_what_follows_are_told_apart(kind):
    model = random_model(kind)
    assert "it is not causal" in str(probe(boundary_problem, model, rows=2))
    assert "see the padding behind them" in str(probe(mask_problem, model, rows=3))


@pytest.mark.parametrize("length", (2, 3, 17))
def test_short_rows_are_tried_too(length):
    assert probe(boundary_problem, random_model("qwen3", torch.float32), rows=1, length=length) is None
    assert probe(boundary_problem, random_model("opt", torch.float32), rows=1, length=length) is not None


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
def test_borders_are_not_asked_for_where_nothing_is_masked(kind, length, stops):
    model = random_model(kind)
    batch = {"input_ids": torch.arange(3, 3 + 2 * length).view(2, length) % 90}
    before, own = forward_of(model)(batch), model.config._attn_implementation
    assert stop_asking(model, forward_of(model), batch) is stops
    with HostWaits() as waits:
        after = forward_of(model)(batch)
    assert torch.equal(after, before)
    asked = [name for name in waits.by_function if "masking_utils" in name]
    assert not (stops and asked) and (model.config._attn_implementation == own) is not stops


# Models that no configuration names


def place_in_the_row(batch: MicroBatch) -> Tensor:
    """A learned position for each place in the row, behind attention that reads the borders."""
    return torch.arange(batch["input_ids"].shape[1])


def counted_from_the_mask(batch: MicroBatch) -> Tensor:
    """Positions that start to count elsewhere without a mask: nothing is seen of the padding."""
    mask = batch.get("attention_mask")
    return torch.arange(batch["input_ids"].shape[1]) + 1 if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize(
    ("places", "find", "rows", "said"),
    [
        (place_in_the_row, boundary_problem, 1, "depend on their place in a row"),
        (counted_from_the_mask, mask_problem, 1, "its hidden states differ by"),
        (counted_from_the_mask, mask_problem, 2, "its hidden states differ by"),
    ],
)
def test_other_positions_are_found(places, find, rows, said):
    model = tiny_model("qwen3").eval()
    table = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))

    def forward(batch: MicroBatch) -> Tensor:
        embedded = (model.get_input_embeddings()(batch["input_ids"]) + table[places(batch)]).to(model.dtype)
        inputs = {**model_inputs(batch), "inputs_embeds": embedded}
        del inputs["input_ids"]
        return model.model(**inputs, use_cache=False).last_hidden_state

    with torch.no_grad():
        problem = find(forward, torch.arange(3, 90), rows=rows, length=40, exact=True)
    assert said in str(problem)


def test_one_layer_that_mixes_the_last_tokens_in_is_found():
    """The mean over the row, of which the mask takes the padding out."""
    model = tiny_model("llama").eval()

    def forward(batch: MicroBatch) -> Tensor:
        hidden = forward_of(model)(batch)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None].to(hidden.dtype)
        return hidden + 0.05 * (hidden * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

    problem = mask_problem(forward, torch.arange(3, 90), rows=2, length=40, exact=True)
    assert "see the padding behind them" in str(problem)
