"""The whole way under ZeRO-3 on one device: calibrate, train, resume, gather codes, offload, export, verify.

Each is a process of its own, as a user would start it. What must agree does so bit for bit, on a GPU as on the CPU,
where it is one of the large counts: there the tests of the engine show the same on two ranks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.lib.checkpoints import differing
from tests.lib.recipes import write_ds_config
from tests.lib.root import ROOT
from tests.lib.tiny import TEXT, tiny_checkpoint

STATIC = ("--learnable.weight_scale", "false")


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=pytest.mark.full), "cuda"])
def run(request, tmp_path_factory) -> "Runs":
    """Runs on a device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return Runs(tmp_path_factory.mktemp("engine"), request.param)


class Runs:
    """Scripts of launch/ on a tiny model, one recipe for all."""

    def __init__(self, directory: Path, device: str) -> None:
        self.directory, self.device = directory, device
        (directory / "text.txt").write_text(TEXT * 100)
        # Small frozen parameters stay whole, as in a run of any size; weights do not.
        zero = {"zero_optimization": {"stage3_param_persistence_threshold": 200}}
        self.strategies = {name: write_ds_config(directory, name, name, **zero) for name in ("zero3", "zero3_offload")}
        recipe = {
            "model": {"path": str(tiny_checkpoint(directory / "model", even=True))},
            "data": {"kind": "text", "train": [str(directory / "text.txt")], "max_length": 32, "micro_batch_size": 2},
            "quant": {"scheme": "fp8_static", "calibration_batches": 2},
            "train": {"steps": 4, "quant_stats_every": 2},
            "optim": {"lr": 1e-3, "schedule": "constant"},
            "output_dir": str(directory / "run"),
        }
        (directory / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML

    def __call__(self, script: str, *arguments: str) -> str:
        """Run a script and return its output; an AssertionError unless it succeeds."""
        environment = {**os.environ, "DS_ACCELERATOR": self.device, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "launch" / script), *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
        return ended.stdout

    def train(
        self, name: str, *options: str, script: str = "train.py", strategy: str = "zero3", export: str = "export"
    ) -> dict[str, Tensor]:
        """Train and return the exported tensors."""
        served = self.directory / name / export
        places = ["--output_dir", str(self.directory / name), "--deepspeed", self.strategies[strategy]]
        self(script, "--config", str(self.directory / "recipe.yaml"), *places, *options, "--export.dir", str(served))
        return load_file(served / "model.safetensors")


def test_calibrate_then_verify(run):
    run.train("ptq", script="calibrate.py")
    assert "error" not in run("verify.py", "--export", str(run.directory / "ptq" / "export"))


def test_a_resumed_run_is_the_run(run):
    straight = run.train("straight", "--train.checkpoint_every", "2")
    run.train("parts", "--train.checkpoint_every", "2", "--train.steps", "2")
    parts = run.train("parts", "--train.checkpoint_every", "2", "--train.resume", "true", export="whole")
    assert not differing(parts, straight)
    run("verify.py", "--export", str(run.directory / "straight" / "export"))


def test_weights_gathered_as_codes_train_as_weights_do(run):
    codes = run.train("codes", *STATIC, "--quant.quantized_all_gather", "true")
    assert not differing(codes, run.train("weights", *STATIC))


def test_an_offloaded_optimizer_trains(run):
    """Adam is another kernel there, on the CPU: codes may differ where a weight is between two."""
    offloaded = run.train("offloaded", *STATIC, strategy="zero3_offload")
    here = run.train("here", *STATIC)
    for name, tensor in here.items():
        if tensor.dtype == torch.float8_e4m3fn:
            assert (tensor.view(torch.uint8) != offloaded[name].view(torch.uint8)).float().mean() < 0.01, name
