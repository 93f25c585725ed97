"""Checkpoints of adapters on two ranks, which do not hold the frozen weights, on every ZeRO stage."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.engine.test_adapters import LORA
from tests.distributed.model.save.test_lora import NO_EXPORT, Runs, train_all
from tests.lib.plain import load_result
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import assert_same_weights

STAGES = (0, 1, 2, 3)
# What the action of the runs changes in the first step, as a user's script may.
CHANGED = "model.layers.1.input_layernorm.weight"
TRAIN = {"gradient_accumulation_steps": 2, "checkpoint_every": 2}
ADAPTER, QUANT = {**LORA["adapter"], "merge": True}, {"scheme": "fp8_static", "calibration_batches": 1}
LEARNABLE = {"weight": False, "weight_scale": True}
STEPS = {"straight": 3, "begun": 2, "resumed": 3}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    """For each stage a run of three steps, one of two, and one that goes on from it; in one job."""
    directory = tmp_path_factory.mktemp("frozen")
    models = {"tied": tiny_checkpoint(directory / "tied", "qwen3", tied=True, even=True)}
    runs: Runs = {}
    for stage in STAGES:
        for name, steps in STEPS.items():
            sections = {**LORA, **NO_EXPORT, "adapter": ADAPTER, "learnable": LEARNABLE, "quant": QUANT}
            sections["train"] = {**TRAIN, "steps": steps, "resume": name == "resumed"}
            sections["output_dir"] = f"{name.replace('resumed', 'begun')}_{stage}"
            runs[f"{name}_{stage}"] = ("tied", stage, "bfloat16", sections)
    return train_all(directory, runs, "changes_frozen", models)


def step_of(paths: dict[str, Path], stage: int) -> Path:
    return paths[f"begun_{stage}"].with_suffix("") / "checkpoints" / "step_00000002"


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_goes_on_bit_for_bit(paths, stage):
    """Including a frozen parameter that changed after it was read, which is in no file of the model."""
    straight, resumed = load_result(paths[f"straight_{stage}"]), load_result(paths[f"begun_{stage}"])
    assert resumed["losses"] == straight["losses"][2:]
    source = load_file(paths[f"begun_{stage}"].parent / "tied" / "model.safetensors")
    assert_same_weights(resumed, straight)
    for name, value in straight["weights"].items():
        assert name not in source or torch.equal(value, source[name]) == (name != CHANGED), name


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_what_is_not_in_the_files_of_the_model(paths, stage):
    """Scales, and the parameter that was changed; of each weight a number, the same on every stage."""
    step = step_of(paths, stage)
    state, weights = json.loads((step / "state.json").read_text()), load_result(paths[f"begun_{stage}"])["weights"]
    files = {file.name: torch.load(file, weights_only=False) for file in step.glob("*model_states.pt")}
    assert len(files) == (2 if stage == 3 else 1)
    held = {}
    for file in files.values():
        # Under stage 3 the model's own state has nothing of a parameter.
        for part in (file["module"], *([file["frozen_param_fragments"]] if stage == 3 else [])):
            held |= {name: value.numel() for name, value in part.items() if value.numel()}
    scales = {name for name in weights if name.rpartition(".")[2] in ("weight_s0", "input_s0")}
    trained = {name for name in weights if "lora" in name or "theta" in name}
    assert scales and scales | {CHANGED} <= held.keys()
    left_out = set(weights) - scales - trained - {CHANGED} | {"lm_head.weight"}
    assert not left_out & held.keys() and state["left_out"].keys() == left_out
    assert state["left_out"] == json.loads((step_of(paths, 3) / "state.json").read_text())["left_out"]
