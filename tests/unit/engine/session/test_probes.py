"""Models that keep packed samples apart or need a mask: tried on real ones of transformers, tiny and random."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from data.loader import MicroBatch, model_inputs
from engine.session.probes import boundary_problem, mask_problem, stop_asking
from tests.lib.host_waits import HostWaits
from tests.lib.tiny import tiny_model

SMALL: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
APART: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "llama": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},  # positions that are learned
    "gpt_neox": {},  # the mask of an older kind
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama4_text": {**EXPERTS, "head_dim": 16, "intermediate_size_mlp": 96},
    "granitemoe": EXPERTS,
    "mixtral": EXPERTS,
    "qwen3_moe": SMALL_EXPERTS,
}
SEEN: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4},
    "falcon": {},
    "gpt_oss": {**EXPERTS, "head_dim": 16, "sliding_window": 8},
    "afmoe": SMALL_EXPERTS,
    "granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 96, "layer_types": ["attention"] * 4},
    "lfm2": {"layer_types": ["full_attention", "conv"] * 2},
    "qwen3_5_text": {**HEADS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
}
BIDIRECTIONAL: dict[str, dict[str, Any]] = {"bert": {}, "roberta": {}}
CONFIGS = {**APART, **SEEN, **BIDIRECTIONAL}


def random_model(kind: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Make a model whose weights keep the size of what they multiply, so that attention moves hidden states."""
    config = CONFIG_MAPPING[kind](**{**SMALL, **CONFIGS[kind]})
    attention = "eager" if kind in ("bloom", "mpt", "gpt_oss", "mamba") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                size = 1 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    frequencies = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model = model.to(dtype).eval()
    for name, buffer in frequencies.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, buffer)
    return model


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
    if kind in APART:
        assert problem is None
    else:
        assert dtype == torch.float32 or "see the one before them in a row" in str(problem)


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
        (counted_from_the_mask, mask_problem, 1, "its hidden states are others"),
        (counted_from_the_mask, mask_problem, 2, "its hidden states are others"),
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
