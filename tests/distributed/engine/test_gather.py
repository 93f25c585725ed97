"""Weights gathered as codes against weights gathered as they are: the same training in every arrangement."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.engine.test_compute import CLIPS
from tests.lib.launcher import run_ranks
from tests.lib.plain import load_result
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parent / "scripts" / "compute.py"
FEW = {"steps": 3, "gradient_accumulation_steps": 2, "quant_stats_every": 0}
STATIC = {
    "learnable": {"weight_scale": False},
    "optim": CLIPS["optim"],
    "train": FEW,
    "loss": {"kd_weight": 0.0, "teacher": None},
}
# name: model, dtype, sections of the recipe. Nothing learns its scale: equal bit for bit.
ARRANGEMENTS = {
    "stacked": ("qwen3_moe", "bfloat16", {}),
    "per_expert": ("qwen3_moe", "bfloat16", {"model": {"experts": "per_expert"}}),
    "recomputed": ("qwen3", "bfloat16", {"train": {**FEW, "activation_checkpointing": True}}),
    "fp8_gemm": ("qwen3", "bfloat16", {"quant": {"compute": "fp8_gemm"}}),
    "rows": ("qwen3", "float32", {"quant": {"scheme": "fp8_dynamic"}}),
    "int4": ("qwen3", "bfloat16", {"quant": {"scheme": "w4a16_channel"}}),
    "offload": ("qwen3", "float32", {"deepspeed": "offload"}),
    "followed": ("qwen3", "bfloat16", {"quant": {"scales_follow_weights": True, "weight_range": "absmax"}}),
    # Frozen weights, used as they are and quantized in turn.
    "self": (
        "qwen3",
        "bfloat16",
        {
            "learnable": {"weight": False, "weight_scale": False, "act_scale": True},
            "loss": {"kd_weight": 1.0, "kd": "kl", "teacher": "self"},
        },
    ),
}

CHANGES = {1: True, 2: False, 4: True}  # steps of a run that is resumed: whether it gathers codes until then


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One launch; after the pairs, a run of codes in two parts, and one that changes at each resume how it gathers and
    what it keeps for backward."""
    directory = tmp_path_factory.mktemp("gather")
    models = {kind: tiny_checkpoint(directory / kind, kind) for kind in ("qwen3", "qwen3_moe")}
    # As shipped, but norms and the smaller weights alone stay gathered between steps.
    offload = json.loads((ROOT / "ds_configs/zero3_offload.json").read_text())
    offload["zero_optimization"]["stage3_param_persistence_threshold"] = 2000
    (directory / "offload.json").write_text(json.dumps(offload))
    chats = write_chats(directory / "chats.jsonl")
    written = {}

    def add(name, kind, dtype, codes, sections):
        quant = {"calibration_batches": 2, **sections.get("quant", {}), "quantized_all_gather": codes}
        sections = {**STATIC, **sections, "quant": quant}
        if "deepspeed" in sections:
            sections["deepspeed"] = str(directory / f"{sections['deepspeed']}.json")
        written[name] = write_recipe(directory, name, models[kind], chats, dtype=dtype, **{"stage": 3, **sections})

    for name, (kind, dtype, sections) in ARRANGEMENTS.items():
        for codes in (False, True):
            add(f"{name}_{codes}", kind, dtype, codes, sections)
    parts = {"learnable": {"weight_scale": True}, "train": {**FEW, "checkpoint_every": 2}}
    resumed = {**parts, "train": {**parts["train"], "steps": 4, "resume": True}, "output_dir": str(directory / "begun")}
    add("straight", "qwen3", "bfloat16", True, {**parts, "train": {**FEW, "steps": 4}})
    add("begun", "qwen3", "bfloat16", True, {**parts, "train": {**parts["train"], "steps": 2}})
    add("resumed", "qwen3", "bfloat16", True, resumed)
    add("unchanged", "qwen3", "bfloat16", False, {"train": {**FEW, "steps": 4}})
    for steps, codes in CHANGES.items():
        train = {"checkpoint_every": 1, "resume": steps > 1, "activation_checkpointing": not codes}
        output_dir = {"output_dir": str(directory / "changed")}
        add(f"changed_{steps}", "qwen3", "bfloat16", codes, {"train": {**FEW, **train, "steps": steps}, **output_dir})
    output = run_ranks(SCRIPT, *map(str, written.values()))
    assert output.count("gathered as codes") == len(ARRANGEMENTS) + 3 + sum(CHANGES.values())
    return written


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_the_same_training_bit_for_bit(paths, name):
    whole, codes = (load_result(paths[f"{name}_{codes}"]) for codes in (False, True))
    assert codes["losses"] == whole["losses"] and codes["norms"] == whole["norms"]
    for parameter, value in whole["weights"].items():
        assert torch.equal(value, codes["weights"][parameter]), parameter
    assert any("torch.uint8" in step for step in codes["seen"]["gathered"])


def test_a_resumed_run_goes_on_bit_for_bit(paths):
    straight, resumed = load_result(paths["straight"]), load_result(paths["resumed"])
    assert resumed["losses"] == straight["losses"][2:]
    for parameter, value in straight["weights"].items():
        assert torch.equal(value, resumed["weights"][parameter]), parameter


def test_a_resumed_run_may_gather_otherwise_and_goes_on_bit_for_bit(paths):
    """quant.quantized_all_gather and train.activation_checkpointing are no part of what a checkpoint holds."""
    straight, last = load_result(paths["unchanged"]), load_result(paths["changed_4"])
    assert last["losses"] == straight["losses"][2:]
    assert any("torch.uint8" in step for step in last["seen"]["gathered"])
    for parameter, value in straight["weights"].items():
        assert torch.equal(value, last["weights"][parameter]), parameter
