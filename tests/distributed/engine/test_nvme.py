"""The optimizer on NVMe: bit for bit the run with the optimizer in host memory, also when killed and resumed."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.reading import load_recipe
from engine.loop import Loop
from model.ranks import barrier, is_main
from tests.distributed.engine.scripts.train import End, end_of, run
from tests.lib.garbage import collect
from tests.lib.launcher import on_ranks
from tests.lib.nvme import needs_libaio
from tests.lib.recipes import merged, write_chats, write_ds_config, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER, assert_same_run, assert_same_weights

STEPS, KILLED, START = 4, 3, 2
# Weights in two sub-groups of more than 1 MB on a rank of two; embeddings, norms and scales in smaller ones.
SUB_GROUPS = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 270_000}
SMALL_GROUPS = {"weights": {"dtype": "int", "bits": 4, "granularity": "group", "group_size": 2}}
FROZEN = [{"at": 3, "freeze_scales": True}]
# What else reads and writes the optimizer's states or gradients: name, DeepSpeed's options, sections of the recipe.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "parameters": ({"offload_param": {"device": "cpu"}}, {"model": {"dtype": "float32"}}),
    "codes": ({}, {"quant": {"scheme": "w8a16_channel", "quantized_all_gather": True}}),
    # Scales of more than 1 MB, which are reset where fake quant starts, and frozen later.
    "scales": ({}, {"quant": {"scheme": "small", "schemes": {"small": SMALL_GROUPS}}, "schedule": FROZEN}),
}


def write(directory: Path, name: str, device: str, zero: dict[str, Any], sections: dict[str, Any]) -> None:
    """A recipe with the optimizer on a device."""
    model, chats = directory / "model", directory / "chats.jsonl"
    if not model.exists():
        tiny_checkpoint(model, "qwen3", wide=True, layers=8)
        write_chats(chats)
    offload = {"device": device, **({"nvme_path": str(directory / "drive")} if device == "nvme" else {})}
    contents: dict[str, Any] = {
        "train": {"steps": STEPS, "gradient_accumulation_steps": 2},
        "quant": {"scheme": "w4a16_g32", "fake_quant_start": START, "calibration_batches": 0},
        "learnable": {"act_scale": False, "norm": True},
        "optim": {"lr": 1e-2},
        "loss": NO_TEACHER,
    }
    zero = {"zero_optimization": {**SUB_GROUPS, "offload_optimizer": offload, **zero}}
    deepspeed = write_ds_config(directory, f"{name}_ds", "zero3", **zero)
    write_recipe(directory, name, model, chats, deepspeed=deepspeed, **merged(contents, sections))


def run_job(directory: Path, *jobs: tuple[str, str | None], kill: int = -1) -> None:
    """Run recipes; rank 0 writes the result of each.

    Args:
        directory: where the recipes are.
        jobs: names of recipes, and the run from whose checkpoint of step ``KILLED`` each is resumed.
        kill: the step before which SIGKILL ends all ranks.
    """
    for name, source in jobs:
        recipe = load_recipe(directory / f"{name}.yaml")
        if source is not None:
            recipe.train.resume = f"step_{KILLED:08d}"
            if is_main() and source != name:
                shutil.copytree(directory / source / "checkpoints", directory / name / "checkpoints")
            barrier()
        loop = Loop(recipe)
        if kill >= 0:
            loop.at(kill)(lambda state: os.kill(os.getpid(), signal.SIGKILL))
        result = run(loop)
        if is_main():
            torch.save(result, directory / f"{name}.pt")
        collect()


def result_of(directory: Path, name: str) -> dict[str, Any]:
    """Load the result of a run: losses, norms and weights."""
    found: dict[str, Any] = torch.load(directory / f"{name}.pt", weights_only=False)
    return found


def files_of(directory: Path) -> set[str]:
    """The kinds of files on the drive."""
    return {file.name.split("-")[0] for file in (directory / "drive").rglob("*.swp") if "gradient" not in file.name}


def refused(directory: Path) -> End:
    """End of a run on a machine without a C compiler."""
    os.environ["CC"] = "/bin/false"
    return end_of(directory / "nvme.yaml")


def test_without_libaio_every_rank_says_so_before_any_work(tmp_path: Path) -> None:
    write(tmp_path, "nvme", "nvme", {}, {})
    ends, _ = on_ranks(refused, tmp_path)
    for text, began, _ in ends:
        assert "zero_optimization.offload_optimizer: device 'nvme': libaio or a compiler is missing" in text
        assert "\n" not in text and not began
    assert not (tmp_path / "drive").exists() and not (tmp_path / "nvme").exists()


@pytest.mark.full
@needs_libaio
def test_killed_and_resumed(tmp_path: Path) -> None:
    """Also from a checkpoint of NVMe in host memory, the other way round, and at another number of ranks."""
    for name in ("cpu", "nvme", "to_cpu", "to_nvme", "one_cpu", "one_nvme"):
        train = {"checkpoint_every": 1, "keep_checkpoints": STEPS}
        train |= {"gradient_accumulation_steps": 4} if "one" in name else {}
        write(tmp_path, name, name.split("_")[-1], {}, {"train": train})
    with pytest.raises(AssertionError, match=f"failed with -{signal.SIGKILL.value}"):
        on_ranks(partial(run_job, kill=KILLED), tmp_path, ("nvme", None))
    assert {"exp_avg", "exp_avg_sq"} < files_of(tmp_path)
    on_ranks(run_job, tmp_path, ("cpu", None), ("nvme", "nvme"), ("to_cpu", "nvme"), ("to_nvme", "cpu"))
    straight = result_of(tmp_path, "cpu")
    for name in ("nvme", "to_cpu", "to_nvme"):
        resumed = result_of(tmp_path, name)
        assert resumed["losses"] == straight["losses"][KILLED:] and resumed["norms"] == straight["norms"][KILLED:]
        assert_same_weights(resumed, straight)
    on_ranks(run_job, tmp_path, ("one_cpu", "cpu"), ("one_nvme", "nvme"), ranks=1)
    assert_same_run(result_of(tmp_path, "one_nvme"), result_of(tmp_path, "one_cpu"))


@pytest.mark.full
@needs_libaio
def test_the_same_run_as_in_host_memory(tmp_path: Path) -> None:
    """Bit for bit, with whatever reads and writes states or gradients between two steps or within one."""
    names = []
    for variant, (zero, sections) in VARIANTS.items():
        for device in ("cpu", "nvme"):
            names.append(f"{variant}_{device}")
            write(tmp_path, names[-1], device, zero, sections)
    on_ranks(run_job, tmp_path, *((name, None) for name in names))
    for variant in VARIANTS:
        assert_same_run(result_of(tmp_path, f"{variant}_nvme"), result_of(tmp_path, f"{variant}_cpu"))
