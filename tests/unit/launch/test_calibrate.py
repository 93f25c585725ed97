"""A PTQ checkpoint is the export of the run with the same recipe that learns nothing."""

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.lib.processes import run_python
from tests.lib.recipes import merged, write_chats, write_sections
from tests.lib.tiny import tiny_checkpoint

RUN = """
import sys
from engine.config.reading import load_recipe
from engine.loop import Loop
from launch.calibrate import calibrate

for argument in sys.argv[1:]:
    kind, _, path = argument.partition(":")
    recipe = load_recipe(path)
    calibrate(recipe) if kind == "calibrate" else Loop(recipe).run()
"""
BESIDE = {"adapter": {"kind": "lora", "merge": False, "rank": 8, "alpha": 8}}
ERROR = merged(BESIDE, {"adapter": {"init": "error"}})
GPTQ = {"quant": {"init": "gptq"}, "adapter": {"kind": "none"}}
# A name, and what differs from the recipe of them all.
RECIPES: dict[str, dict[str, Any]] = {
    "error_train": ERROR,
    "error_calibrate": ERROR,
    "start_train": merged(BESIDE, {"quant": {"scheme": "fp8_static"}, "adapter": {"start": "{error_train}"}}),
    "start_calibrate": merged(BESIDE, {"quant": {"scheme": "fp8_static"}, "adapter": {"start": "{error_train}"}}),
    "gptq_calibrate": GPTQ,
    "resume_calibrate": {**GPTQ, "train": {"resume": True}},
    "rtn_calibrate": {"adapter": {"kind": "none"}},
}


BAD = """
import sys
from safetensors.torch import load_file, save_file
from engine.config.reading import load_recipe
from launch.calibrate import calibrate

recipe = load_recipe(sys.argv[1])
calibrate(recipe)
file = f"{recipe.export.dir}/model.safetensors"
tensors = load_file(file)
save_file({key: one / 448 if "input_scale" in key else one for key, one in tensors.items()}, file, {"format": "pt"})
recipe.quant.scales, recipe.export.dir = recipe.export.dir, recipe.export.dir + "_again"
calibrate(recipe)
"""


def test_scales_of_inputs_that_training_refuses_are_refused(tmp_path: Path) -> None:
    path = write_sections(
        tmp_path,
        model={"path": str(tiny_checkpoint(tmp_path / "model", "qwen3"))},
        data={"train": [str(write_chats(tmp_path / "chats.jsonl"))], "max_length": 64},
        train={"steps": 1},
        quant={"scheme": "fp8_static", "calibration_batches": 2},
        export={"dir": str(tmp_path / "ptq")},
        output_dir=str(tmp_path / "out"),
        deepspeed="zero0",
    )
    done = run_python(BAD, path)
    assert done.returncode and "ptq do not fit the inputs of the first samples" in done.stderr
    assert (tmp_path / "ptq").is_dir() and not (tmp_path / "ptq_again").exists()


def test_calibrated_is_trained_without_learning(tmp_path: Path) -> None:
    """Both export the same base and the same adapter beside it; train.resume does not change calibrate.py's codes."""
    model = tiny_checkpoint(tmp_path / "model", "qwen3", even=True, dtype=torch.bfloat16)
    shared = {
        "model": {"path": str(model)},
        "data": {"train": [str(write_chats(tmp_path / "chats.jsonl"))], "max_length": 64},
        "train": {"steps": 1},
        "optim": {"lr": 0.0, "weight_decay": 0.0, "warmup_steps": 0},
        "quant": {"scheme": "w2a16_g32", "calibration_batches": 2},
        "deepspeed": "zero0",
    }
    for name, sections in RECIPES.items():
        contents = merged({**shared, "output_dir": str(tmp_path / name)}, sections)
        text = yaml.safe_dump(contents).replace("{error_train}", str(tmp_path / "error_train/export/adapter"))
        (tmp_path / f"{name}.yaml").write_text(text)
    done = run_python(RUN, *(f"{name.partition('_')[2]}:{tmp_path / name}.yaml" for name in RECIPES))
    assert done.returncode == 0, done.stderr
    found = {name: load_file(tmp_path / name / "export" / "model.safetensors") for name in RECIPES}
    beside = [name for name in RECIPES if name.startswith(("error", "start"))]
    adapters = {name: load_file(tmp_path / name / "export/adapter/adapter_model.safetensors") for name in beside}
    assert all(tensor.any() for tensor in adapters["error_train"].values())
    for part, kind in ((adapters, "error"), (found, "error"), (adapters, "start"), (found, "start")):
        trained, calibrated = part[f"{kind}_train"], part[f"{kind}_calibrate"]
        assert trained.keys() == calibrated.keys()
        assert all(torch.equal(trained[key].float(), calibrated[key].float()) for key in trained), kind
    assert all(torch.equal(adapters["start_train"][key], value) for key, value in adapters["error_train"].items())
    equal = {
        name: all(torch.equal(found[name][key], value) for key, value in found["gptq_calibrate"].items())
        for name in ("resume_calibrate", "rtn_calibrate")
    }
    assert equal == {"resume_calibrate": True, "rtn_calibrate": False}
