"""Training checkpoints on two ranks: a run that is interrupted and resumed is the run that was not, bit for bit.

The runs switch fake quant on in the middle, so that a checkpoint holds what its start must not lose: what the observers
saw (interrupted before), the scales that were measured then (interrupted after), and which layers are quantized.
"""

import functools
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.find import LATEST
from engine.config.config import Recipe
from engine.config.reading import load_recipe
from engine.loop import Loop
from launch.export import export_checkpoint
from model.ranks import barrier, is_main
from tests.distributed.engine.scripts.train import run
from tests.lib.fp16_cpu import allow_fp16_on_cpu
from tests.lib.garbage import collect
from tests.lib.launcher import on_ranks
from tests.lib.recipes import STEPS, merged, write_chats, write_ds_config, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER, assert_same_weights, each

START = 2
STOPS = (1, 3, STEPS)  # steps after which the resumed run is interrupted: before and after fake quant starts
SPOILED = "plain-3"  # the case whose checkpoints are spoiled
SPLIT = "plain-3"  # the case that is resumed with other sub-groups of the optimizer, and goes on with the first ones
# Everything that a checkpoint keeps for quantization, in one run: histograms of inputs, keys and values, global scales
# of NVFP4, scales that follow the weights beside thetas that learn (LWC), lm_head and embeddings.
MIXED = {
    "quant": {
        "scheme": "fp8_static_kv",
        "rules": [{"first": 1, "scheme": "nvfp4"}, {"layers": ".*o_proj", "scheme": "w2a16_g32"}],
        "lm_head": "w8a16_channel",
        "embedding": "w4a16_g32",
        "weight_range": "absmax",
        "scales_follow_weights": True,
        "input_range": "mse",
    }
}
NVFP4 = {"quant": {"scheme": "nvfp4", "embedding": "w4a16_g32"}, "learnable": {"act_scale": False}}
ABSMAX = {
    "quant": {"scheme": "w4a16_g32", "weight_range": "absmax", "scales_follow_weights": True, "signed_scales": True},
    "learnable": {"weight_scale": False, "act_scale": False},
}
# Zero points that follow the weights, of channels and of groups.
GROUPS = {"dtype": "int", "bits": 4, "granularity": "group", "group_size": 32, "symmetric": False}
ASYM = {
    "quant": {
        "scheme": "w8a16_asym",
        "schemes": {"groups": {"weights": GROUPS}},
        "rules": [{"layers": ".*(q|k|v)_proj", "scheme": "groups"}],
        "weight_range": "absmax",
        "scales_follow_weights": True,
    },
    "learnable": {"act_scale": False},
}
DECOUPLED = {
    "quant": {"scheme": "mxfp4", "decoupled_scales": True},
    "learnable": {"weight": False, "act_scale": False},
    "schedule": [],  # the usual events set rates of weights
}
PACKED = {"data": {"packing": True}}
IN_8_BITS = {"optim": {"moments": "8bit"}}
# name: stage, kind of checkpoint, dtype, what differs in the recipe. Stage 3 with experts; the others are plain modules
# to it. Stage 0 keeps its optimizer in fp32 here, which is the case where DeepSpeed wraps nothing.
Case = tuple[int, str, str, dict[str, Any]]
CASES: dict[str, Case] = {
    "packed-0": (0, "qwen3", "float32", {**PACKED, **IN_8_BITS}),
    "mixed-2": (2, "llama", "bfloat16", MIXED),
    "plain-3": (3, "qwen3_moe", "bfloat16", {}),
}
MORE: dict[str, Case] = {
    "plain-0": (0, "qwen3", "float32", {}),
    "packed-1": (1, "qwen3", "bfloat16", PACKED),
    "mixed-0": (0, "qwen3", "float32", MIXED),
    "mixed-1": (1, "llama", "bfloat16", MIXED),
    "mixed-3": (3, "qwen3_moe", "bfloat16", MIXED),
    "nvfp4-3": (3, "qwen3", "bfloat16", NVFP4),
    "absmax-2": (2, "qwen3_moe", "bfloat16", ABSMAX),
    "absmax-3": (3, "qwen3", "bfloat16", ABSMAX),
    "asym-2": (2, "llama", "bfloat16", ASYM),
    "asym-3": (3, "qwen3_moe", "bfloat16", ASYM),
    "decoupled-2": (2, "llama", "bfloat16", DECOUPLED),
    "decoupled-3": (3, "qwen3_moe", "bfloat16", DECOUPLED),
    "fp16-2": (2, "llama", "float16", {}),
    **{f"8bit-{stage}": (stage, kind, "bfloat16", IN_8_BITS) for stage, kind in enumerate(("llama", "qwen3"), 1)},
    "8bit-3": (3, "qwen3_moe", "bfloat16", IN_8_BITS),
}
# Ends of the names of scales that move in a run.
SCALES = {
    "absmax": ["weight_s0"],
    "asym": ["weight_s0", "weight_zero", "weight_theta"],
    "decoupled": ["code_theta"],
    "nvfp4": ["weight_s0", "weight_global", "proj.weight_theta", "embed_tokens.weight_theta"],
    "plain": ["weight_s0", "weight_theta", "input_s0", "input_theta"],
    "mixed": ["weight_global", "lm_head.weight_theta", "embed_tokens.weight_theta", "cache.input_s0"],
}
# Links that are there when a run begins, and what is in their place at its end.
LINKED = {
    "recipe.yaml": "file",
    "recipe.yaml.partial": "nothing",
    "memory.json": "file",
    "checkpoints/latest.partial": "nothing",
    "checkpoints/step_00000005.partial": "nothing",
    "checkpoints/zero_to_fp32.py": "file",
    "checkpoints/zero_to_torch.py": "file",
}
# Some steps overflow, and the loss scale moves from checkpoint to checkpoint.
FP16 = {"initial_scale_power": 15, "loss_scale_window": 2}
# What they set before the first stop holds after it, and a condition that was met is not met again.
EVENTS = [
    {"at": 0, "lr": {"weights": 5e-3}},
    {"when": "loss/total < 1e9", "loss": {"lm": 0.7}, "lr": {"embeddings": 0.0}},
    {"at": STEPS - 1, "freeze_scales": True},
]


def write_cases(directory: Path, cases: dict[str, Case]) -> None:
    """Recipes of straight and resumed runs."""
    data = write_chats(directory / "chats.jsonl")
    write_ds_config(directory, "split", "zero3", zero_optimization={"sub_group_size": 5000})
    for case, (stage, kind, dtype, changes) in cases.items():
        # Groups of 32 where there are any.
        model = tiny_checkpoint(directory / f"{kind}_{case}", kind, even="quant" in changes)
        fp16 = {"deepspeed": write_ds_config(directory, case, f"zero{stage}", fp16=FP16)} if dtype == "float16" else {}
        for name, every in (("straight", STEPS), ("resumed", 1)):
            sections = {
                "train": {"steps": STEPS, "gradient_accumulation_steps": 2, "checkpoint_every": every},
                "quant": {"fake_quant_start": START, "calibration_batches": 0},
                "optim": {"lr": 1e-2},  # one step must show in bf16 weights, and in their maxima
                "learnable": {"act_scale": True, "norm": True},
                "loss": NO_TEACHER,
                "export": {"enabled": True},
                "schedule": EVENTS,
                # What reads its tokens from a cache has the samples of what reads the files.
                "data": {"cache": str(directory / "tokens") if name == "resumed" else None},
                **fp16,
            }
            own = merged(sections, changes)
            write_recipe(directory, f"{name}_{case}", model, data, stage=stage, dtype=dtype, **own)


def run_cases(directory: Path, cases: Iterable[str]) -> dict[str, Any]:
    """Run each case straight through, and in parts, whose last checkpoint is exported."""
    allow_fp16_on_cpu()
    found: dict[str, Any] = {}
    for case in cases:
        straight = run(Loop(load_recipe(directory / f"straight_{case}.yaml")))
        recipe, parts = load_recipe(directory / f"resumed_{case}.yaml"), []
        checkpoints = Path(recipe.output_dir) / "checkpoints"
        for stop in STOPS:
            train = replace(recipe.train, resume=stop > STOPS[0])
            loop = Loop(replace(recipe, train=train, export=replace(recipe.export, enabled=stop == STEPS)))
            if case == SPLIT and stop == STOPS[1]:
                loop.recipe.deepspeed = str(directory / "split.json")
            loop.every(stop)(lambda state: state.stop())
            parts.append(run(loop))
            if stop == STOPS[0] and is_main():
                os.link(checkpoints / LATEST, checkpoints / "first_latest")  # another name of the very file
            barrier()
        trained = load_recipe(checkpoints / "step_00000005" / "recipe.yaml")
        trained.export.dir = f"{directory}/out_{case}"
        export_checkpoint(trained, checkpoints / "step_00000005")
        found[case] = {"straight": straight, "parts": parts}
        if case == SPOILED:
            found |= resume_spoiled(directory, recipe, checkpoints)
    return found


def resume_spoiled(directory: Path, recipe: Recipe, checkpoints: Path) -> dict[str, Any]:
    """Errors of runs to be resumed from spoiled checkpoints, and the run from the one that such an error offers."""
    if is_main():
        shutil.copytree(checkpoints, directory / "flipped" / "checkpoints")
        file = "*zero_pp_rank_1_mp_rank_00_optim_states.pt"  # bf16_ may stand before it
        flipped = next((directory / "flipped" / "checkpoints" / "step_00000005").glob(file))
        content = bytearray(flipped.read_bytes())
        content[len(content) // 2] ^= 4
        flipped.write_bytes(content)
    barrier()

    def resumed(name: str, which: bool | str) -> Loop:
        train, export = replace(recipe.train, resume=which), replace(recipe.export, enabled=False)
        return Loop(replace(recipe, output_dir=str(directory / name), train=train, export=export))

    errors = {}
    for name, which in {"flipped": True, Path(recipe.output_dir).name: False}.items():
        try:
            resumed(name, which).run()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        collect()
    return {"errors": errors, "offered": run(resumed("flipped", "step_00000004"))}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that runs all cases beside one in one job: its directory, and what both ranks found.

    In the directory of the first job links to another file are at every name that a run writes.
    """

    @functools.cache
    def of(more: bool) -> tuple[Path, list[dict[str, Any]]]:
        directory, cases = tmp_path_factory.mktemp("checkpoint"), MORE if more else CASES
        write_cases(directory, cases)
        (directory / "precious").write_text("another's")
        for name in () if more else LINKED:
            link = directory / f"straight_{SPOILED}" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(directory / "precious")
        return directory, on_ranks(run_cases, directory, list(cases))[0]

    return lambda case: of(case in MORE)


@each(CASES, MORE)
def test_resumed_equals_straight_bit_for_bit(runs, name):
    """Losses, norms, Parameters; and the exports of both and of the last checkpoint."""
    directory, (found, _) = runs(name)
    straight, parts = found[name]["straight"], found[name]["parts"]
    assert [len(part["losses"]) for part in parts] == [1, 2, 2]
    for what in ("losses", "norms", "loss_scales"):
        assert [value for part in parts for value in part[what]] == straight[what], what
    assert not name.startswith("fp16") or len(set(straight["loss_scales"])) > 1
    assert_same_weights(parts[-1], straight)
    # What would make the comparison empty: nothing measured at START, or nothing learned since.
    first, kind = parts[0]["weights"], name.partition("-")[0]
    for end in [*SCALES.get(kind, SCALES["plain"]), *(SCALES["plain"] if kind == "mixed" else [])]:
        scales = [scale for scale in first if scale.endswith(end)]
        assert any(not torch.equal(first[scale], straight["weights"][scale]) for scale in scales), end
    for file in ("model.safetensors", "config.json"):
        expected = (directory / f"straight_{name}" / "export" / file).read_bytes()
        assert (directory / f"out_{name}" / file).read_bytes() == expected
        assert (directory / f"resumed_{name}" / "export" / file).read_bytes() == expected
    checkpoints = directory / f"resumed_{name}" / "checkpoints"
    assert [path.name for path in sorted(checkpoints.glob("step*"))] == ["step_00000004", "step_00000005"]
    assert (checkpoints / LATEST).read_text() == "step_00000005"
    # Written in place, the file's other name would show the new text too.
    assert (checkpoints / "first_latest").read_text() == "step_00000001"


def test_what_cannot_be_resumed_is_refused_on_every_rank(runs):
    """Beside what units show of files that are damaged or missing."""
    directory, (found, second) = runs(SPOILED)
    errors = found["errors"]
    assert errors == second["errors"]
    assert errors["flipped"].startswith("RankError: rank ") and "CRC-32" in errors["flipped"]
    assert f"{directory}/flipped/checkpoints/step_00000005 is damaged: the content of " in errors["flipped"]
    assert "set train.resume to step_00000004 to go on from there" in errors["flipped"]
    begun = errors[f"resumed_{SPOILED}"]
    assert begun.startswith("RecipeError") and "output_dir" in begun and "train.resume" in begun
    # What is offered leads to the same end.
    assert found["offered"]["losses"] == found[SPOILED]["straight"]["losses"][4:]
    assert_same_weights(found["offered"], found[SPOILED]["straight"])


def test_nothing_is_written_through_links_that_lie_ready(runs):
    directory, _ = runs(SPOILED)
    assert (directory / "precious").read_text() == "another's"
    for name, left in LINKED.items():
        path = directory / f"straight_{SPOILED}" / name
        assert not path.is_symlink() and path.is_file() == (left == "file"), name
