"""Ranks that share rows compute what ranks with whole rows compute: losses, gradient norms and weights.

Both runs have two ranks and the rows of a step in common: with whole rows each rank has half of these.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.engine.scripts.train import run_all
from tests.lib.launcher import on_ranks
from tests.lib.recipes import merged, write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

RECOMPUTED = {"activation_checkpointing": True, "activation_offload": True}
# AdamW whose updates are nearly proportional to gradients: else those near 0 move a weight as far as others.
LINEAR = {"eps": 1.0, "lr": 0.1}

# name: kind of the model, stage, dtype, sections of the recipe.
VARIANTS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "plain": ("llama", 1, "float32", {"quant": {"fake_quant_start": -1}, "loss": NO_TEACHER}),
    "1": ("llama", 1, "float32", {}),
    "2_packed": ("qwen3", 2, "float32", {"data": {"packing": True}}),
    "3": ("qwen3", 3, "float32", {"data": {"micro_batch_size": 1}}),
    "3_moe": ("qwen3_moe", 3, "float32", {"data": {"packing": True}, "eval": {"every": 2}}),
    "2_cache": ("qwen3", 2, "float32", {"quant": {"scheme": "fp8_static_kv"}, "learnable": {"act_scale": True}}),
    "3_dynamic": ("qwen3", 3, "float32", {"quant": {"scheme": "fp8_dynamic"}, "train": RECOMPUTED}),
    "2_fp4": ("llama", 2, "float32", {"quant": {"scheme": "nvfp4_w4a4"}}),
    "3_lora": ("llama", 3, "float32", {"adapter": {"kind": "lora"}, "learnable": {"weight": False}}),
    "3_bf16": ("qwen3", 3, "bfloat16", {"data": {"packing": True}}),
}
# Largest differences of losses, of gradient norms and of weights after two steps. Sums in another order differ by 1e-6;
# where one of them changes a code, by more. Other data, masks or positions change losses by 1e-2.
NEAR = {"float32": (2e-4, 2e-3, 2e-5), "bfloat16": (5e-2, 0.2, 1e-2)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all runs."""
    directory = tmp_path_factory.mktemp("sequence")
    chats = write_chats(directory / "chats.jsonl")
    paths = []
    for name, (kind, stage, dtype, sections) in VARIANTS.items():
        model = tiny_checkpoint(directory / f"{name}_model", kind, even=True, dtype=getattr(torch, dtype))
        for ranks, accumulation in ((1, 1), (2, 2)):
            train = {"steps": 2, "gradient_accumulation_steps": accumulation, **sections.get("train", {})}
            shared = merged(sections, {"train": train, "parallel": {"sequence": ranks}, "optim": LINEAR})
            shared = merged({"quant": {"calibration_batches": ranks}}, shared)  # the same rows for both
            if "eval" in sections:
                shared["data"] = {**sections["data"], "held_out": 5}
            paths.append(write_recipe(directory, f"{name}_{ranks}", model, chats, stage=stage, dtype=dtype, **shared))
    on_ranks(run_all, [(None, path) for path in paths])
    return directory


@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_that_share_rows_compute_what_others_do(runs: Path, name: str) -> None:
    """Every loss, the gradient norm of every step, and the weights at the end."""
    whole, shared = (torch.load(runs / f"{name}_{ranks}" / "result.pt") for ranks in (1, 2))
    near = dict(zip(("losses", "norms", "weights"), NEAR[VARIANTS[name][2]], strict=True))
    assert len(whole["losses"]) == len(shared["losses"]) > 1
    worst = dict.fromkeys(near, 0.0)
    for mine, theirs in zip(shared["losses"], whole["losses"], strict=True):
        assert mine.keys() == theirs.keys()
        worst["losses"] = max(worst["losses"], *(abs(mine[part] - theirs[part]) for part in mine))
    worst["norms"] = max(abs(a - b) for a, b in zip(shared["norms"], whole["norms"], strict=True))
    for part, weight in whole["weights"].items():
        worst["weights"] = max(worst["weights"], (weight.float() - shared["weights"][part].float()).abs().max().item())
    print(name, worst)
    assert all(worst[part] <= near[part] for part in near), worst
