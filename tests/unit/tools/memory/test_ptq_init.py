"""Predicted memory of choosing the first codes against what torch's profiler counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.config.config import Recipe
from engine.config.quant import QuantRecipe
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe
from model.build import build_model
from model.checkpoint.load import load_weights
from model.ptq_init import blockwise as tuning
from model.ptq_init import choose_initial_codes
from model.scales import renew_weight_scales
from quant import SCHEMES, prepare
from tests.distributed.tools.memory.scripts.memory import most_bytes
from tools.memory.plan import RESERVE, Planner

CPU = torch.device("cpu")
SIZES = {"hidden_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40}
SIZES |= {"vocab_size": 1201, "tie_word_embeddings": False, "bos_token_id": None}
EXPERTS = {"moe_intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[type, PreTrainedConfig]] = {
    "dense": (Qwen3ForCausalLM, Qwen3Config(intermediate_size=480, **SIZES)),
    "moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(intermediate_size=416, **EXPERTS, **SIZES)),
}
ROWS, LENGTH, BATCHES = 4, 128, 4


@pytest.mark.parametrize(
    ("kind", "codes", "scheme", "rel"),
    [
        ("dense", "gptq", "w2a16_g32", 0.05),
        ("moe", "gptq", "w2a16_g32", 0.05),
        ("dense", "blockwise", "w2a16_g32", 0.05),
        ("moe", "blockwise", "nvfp4", 0.05),
    ],
)
def test_prediction(
    tmp_path: Path, kind: str, codes: str, scheme: str, rel: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: 3% too much for GPTQ; what stage 3 gathers, and shares among ranks, is not in one process."""
    monkeypatch.setattr(tuning, "STEPS", 2)
    made, config = KINDS[kind]
    made(config).to(torch.bfloat16).save_pretrained(tmp_path)
    recipe = Recipe(
        model=ModelRecipe(path=str(tmp_path)),
        data=DataRecipe(train=["text.txt"], max_length=LENGTH, micro_batch_size=ROWS),
        train=TrainRecipe(steps=100),
        output_dir="out",
        quant=QuantRecipe(scheme=scheme, init=codes, calibration_batches=BATCHES),  # type: ignore[arg-type]
        deepspeed="zero0",
    )
    predicted = Planner(recipe).predict("zero0", 1)

    model = build_model(tmp_path, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=CPU)
    load_weights(model, tmp_path, progress=False)
    quantization = prepare(model, SCHEMES[scheme], learn_weight_scale=True, learn_input_scale=False)
    renew_weight_scales(quantization)
    samples = [(torch.randint(1201, (ROWS, LENGTH)), True) for _ in range(BATCHES)]
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profile:
        choose_initial_codes(model, quantization, samples, CPU, tuned_rows=ROWS if codes == "blockwise" else None)
    found = predicted.held.device["parameters"] + most_bytes(profile)
    print(f"{kind}: predicted {predicted.init:,}, measured {found:,}, {predicted.init / found - 1:+.1%}")
    assert predicted.init == pytest.approx(found, rel=rel)


def test_nothing_without_it_and_shares_with_stage_3(tmp_path: Path) -> None:
    """Nearest codes take nothing; under stage 3 a rank has its rows alone, but Gram matrices of its own."""
    KINDS["dense"][1].save_pretrained(tmp_path)
    quant = QuantRecipe(scheme="w2a16_g32", init="gptq")
    recipe = Recipe(
        model=ModelRecipe(path=str(tmp_path)),
        data=DataRecipe(train=["text.txt"], max_length=LENGTH, micro_batch_size=ROWS),
        train=TrainRecipe(steps=100),
        output_dir="out",
        quant=quant,
    )
    planner = Planner(recipe)
    whole, shared = (planner.predict(name, 4).init for name in ("zero1", "zero3"))
    assert 6 * 8 * 480**2 < shared < whole
    assert Planner(replace(recipe, quant=replace(quant, init="rtn"))).predict("zero1", 4).init == 0


def test_the_largest_micro_batch_leaves_room_for_its_samples(tmp_path: Path) -> None:
    """Samples are micro-batches, so that larger ones hold more hidden states while codes are chosen."""
    KINDS["dense"][1].save_pretrained(tmp_path)
    recipe = Recipe(
        model=ModelRecipe(path=str(tmp_path)),
        data=DataRecipe(train=["text.txt"], max_length=LENGTH, micro_batch_size=1),
        train=TrainRecipe(steps=100, activation_checkpointing=True),
        output_dir="out",
        quant=QuantRecipe(scheme="w2a16_g32", init="gptq", calibration_batches=2000),
    )

    def peak(rows: int) -> int:
        one = replace(recipe, data=replace(recipe.data, micro_batch_size=rows))
        found = Planner(one).predict("zero1", 1)
        assert found.peak == found.init
        return found.peak

    limit = (peak(3) + peak(4)) // 2
    assert Planner(recipe).predict("zero1", 1, gpu_bytes=limit + RESERVE).largest_micro_batch == 3
