"""Which models keep packed samples apart: tried on real models of transformers, tiny and random, in fp32 and bf16."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from data.loader import MicroBatch, model_inputs
from engine.session.probes import boundary_problem
from tests.lib.tiny import tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
STATE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
APART: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "llama": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},  # positions that are learned
    "gpt_neox": {},  # the mask of an older kind
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama4_text": {**EXPERTS, "head_dim": 16, "intermediate_size_mlp": 96},
    "lfm2": {"layer_types": ["full_attention"] * 4},
    "granitemoe": EXPERTS,
    "mixtral": EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
}
SEEN: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4},
    "falcon": {},
    "gpt_oss": {**EXPERTS, "head_dim": 16, "sliding_window": 8},
    "afmoe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 96, "layer_types": ["attention"] * 4},
    "lfm2": {"layer_types": ["full_attention", "conv"] * 2},
    "qwen3_5_text": {**STATE, "layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
}
BIDIRECTIONAL = {"bert": {}, "roberta": {}}


def random_model(kind: str, overrides: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A model whose weights keep the size of what they multiply, so that attention moves hidden states."""
    config = CONFIG_MAPPING[kind](**{**SMALL, **overrides})
    attention = "eager" if kind in ("bloom", "mpt", "gpt_oss", "mamba") else "sdpa"
    with torch.device("cpu"):
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


def problem_of(model: PreTrainedModel, *, rows: int = 2, length: int = 51) -> str | None:
    experts = any("expert" in name and "shared" not in name for name, _ in model.named_modules())

    def forward(batch: MicroBatch) -> torch.Tensor:
        return model.base_model(**model_inputs(batch), use_cache=False)[0]

    return boundary_problem(forward, torch.arange(3, 90), rows=rows, length=length, exact=not experts)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("kind", APART)
def test_models_that_keep_samples_apart_may_pack(kind, dtype):
    assert problem_of(random_model(kind, APART[kind], dtype)) is None


@pytest.mark.parametrize("kind", SEEN)
def test_models_that_see_the_sample_before_may_not(kind):
    model = random_model(kind, SEEN[kind], torch.bfloat16)
    assert "see the one before them in a row" in str(problem_of(model))


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
def test_models_that_see_what_follows_are_told_apart(kind):
    assert "it is not causal" in str(problem_of(random_model(kind, BIDIRECTIONAL[kind], torch.bfloat16)))


def test_a_sample_that_depends_on_its_place_in_a_row_is_found():
    """A learned position for each place in the row, behind attention that reads the borders."""
    model = tiny_model("qwen3").eval()
    table = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))

    def forward(batch: MicroBatch) -> torch.Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"])
        placed = (embedded + table[: embedded.shape[1]]).to(embedded.dtype)
        inputs = {"inputs_embeds": placed, "position_ids": batch["position_ids"]}
        return model.model(**inputs, use_cache=False).last_hidden_state

    with torch.no_grad():
        problem = boundary_problem(forward, torch.arange(3, 90), rows=1, length=40, exact=True)
    assert "depend on their place in a row" in str(problem)


@pytest.mark.parametrize("length", (2, 3, 17))
def test_short_rows_are_tried_too(length):
    assert problem_of(random_model("qwen3", APART["qwen3"], torch.float32), rows=1, length=length) is None
    assert problem_of(random_model("opt", SEEN["opt"], torch.float32), rows=1, length=length) is not None
