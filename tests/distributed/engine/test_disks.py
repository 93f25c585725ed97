"""Disks that fill up, become read-only or are swapped for a file while a run trains: nothing is lost, no rank hangs."""

import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.find import best_checkpoint
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.session.optimizer import SCALE_EPS
from model.ranks import barrier, is_main, rank
from tests.distributed.engine.scripts.train import End, ends_of, run
from tests.lib.curves import curves
from tests.lib.garbage import collect
from tests.lib.launcher import on_ranks
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER, assert_same_weights

STEPS = 6
LOST = 3  # steps of runs whose output directory is lost after the first
DISK = "8m"  # holds a few checkpoints of the tiny model
NO_SERVER = "http://127.0.0.1:9"  # discards what it gets, where it is there at all
BALLAST = "ballast"  # a file on the disk that fills up
NO_LARGE_FILES = 100_000  # bytes of a file: less than a rank's part of a checkpoint, more than what the ranks print
LIMITS = resource.getrlimit(resource.RLIMIT_FSIZE)
OPTIONS: dict[str, Any] = {"weight_decay": 0.25, "eps": 1e-6, "betas": (0.8, 0.9)}
OFTEN = {"checkpoint_every": 1, "keep_checkpoints": 1}
# name: stage, section train.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "full_disk": (3, {"steps": STEPS, **OFTEN}),
    "straight": (3, {"steps": STEPS}),
    "replaced": (3, {"steps": LOST, "checkpoint_every": 1, "quant_stats_every": 0}),
    "read_only": (0, {"steps": LOST, "checkpoint_every": 1, "quant_stats_every": 0}),
    "uncurved": (1, {"steps": LOST}),
    "without_checkpoints": (1, {"steps": LOST, "quant_stats_every": 0}),
}


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, LIMITS[1]))


def fill(directory: Path) -> None:
    """Leave no room on the small disk that the test mounted there, if it could."""
    if not os.path.ismount(directory):
        # In its place a directory that takes no new entry would be root's to write all the same.
        limit(NO_LARGE_FILES)
        return
    try:
        with (directory / BALLAST).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


def empty(directory: Path) -> None:
    limit(LIMITS[0])
    (directory / BALLAST).unlink(missing_ok=True)


def full_disk(base: Path) -> dict[str, Any]:
    """An evaluation, a mark and a checkpoint after each step; those of steps 2, 3, 4 and 7, the last, fail on other
    ranks for other reasons. The last step is of a resumed run with other options of the optimizer, which exports. The
    model is published after steps 2, 4, 6 and 7, of which the second finds no space."""
    loop = Loop(load_recipe(base / "full_disk.yaml"))
    output = Path(loop.recipe.output_dir)
    seen: dict[str, Any] = {
        "imported": bool({"engine.publish", "engine.on_policy"} & sys.modules.keys()),
        "published": [],
    }

    def publish(state: LoopState) -> None:
        result = state.publish(output / "published", NO_SERVER)
        seen["imported"] |= "model.sequence" in sys.modules
        seen["published"].append((result, os.readlink(output / "published" / "current")))

    loop.every(2)(publish)
    checkpoints = output / "checkpoints"
    script = checkpoints / "zero_to_fp32.py"

    @loop.at(1)
    def no_large_files(state: LoopState) -> None:
        if rank() == 1:
            limit(NO_LARGE_FILES)

    @loop.at(2)
    def a_script_of_deepspeed(state: LoopState) -> None:
        limit(LIMITS[0])
        if is_main():
            script.unlink()
            script.mkdir()

    @loop.at(3)
    def no_space(state: LoopState) -> None:
        barrier()
        if is_main():
            script.rmdir()
            fill(output)

    @loop.at(4)
    def space(state: LoopState) -> None:
        seen["latest"] = (checkpoints / "latest").read_text()
        seen["left"] = sorted(path.name for path in checkpoints.iterdir())
        barrier()
        if is_main():
            empty(output)

    seen |= {"full_disk": run(loop), "straight": run(Loop(load_recipe(base / "straight.yaml")))}
    seen["end"] = sorted(path.name for path in checkpoints.iterdir())
    seen["best"] = best_checkpoint(checkpoints).name
    recipe = loop.recipe
    train = replace(recipe.train, steps=STEPS + 1, resume=True)
    export = replace(recipe.export, enabled=True, dir=f"{base}/unsaved")
    loop = Loop(replace(recipe, train=train, optim=replace(recipe.optim, **OPTIONS), export=export))
    loop.every(STEPS + 1)(publish)

    @loop.at(STEPS)
    def no_place(state: LoopState) -> None:
        groups = state.session.engine.optimizer.param_groups
        seen["groups"] = {group["name"]: {key: group[key] for key in OPTIONS} for group in groups}
        if is_main():
            taken = checkpoints / f"step_{STEPS + 1:08d}"
            taken.mkdir()  # it is moved aside, to where something is already
            (taken.with_name(f"{taken.name}.replaced.partial") / "something").mkdir(parents=True)

    try:
        loop.run()
    except Exception as error:
        seen["last"] = f"{type(error).__name__}: {error}", (checkpoints / "latest").read_text()
    return seen


def replaced(loop: Loop) -> None:
    """After the first step the output directory is somewhere else, and a file is in its place."""
    output = Path(loop.recipe.output_dir)

    @loop.at(1)
    def replace_it(state: LoopState) -> None:
        if is_main():
            output.rename(output.with_name(f"{output.name}_moved"))
            output.touch()
        barrier()


def read_only(loop: Loop) -> None:
    """After the first step nothing can be written any more, where mounting is allowed."""
    output = loop.recipe.output_dir

    @loop.at(1)
    def remount(state: LoopState) -> None:
        if is_main() and subprocess.run(["mount", "--bind", output, output], check=False).returncode == 0:
            subprocess.run(["mount", "-o", "remount,bind,ro", output], check=False)
        barrier()


def uncurved(loop: Loop) -> None:
    """After the first step the curves are gone."""

    @loop.at(1)
    def remove(state: LoopState) -> None:
        if is_main():
            curves = Path(loop.recipe.output_dir) / "tensorboard"
            while curves.exists():  # their own thread may write another file while they are removed
                shutil.rmtree(curves, ignore_errors=True)
        barrier()


def run_all(base: Path) -> tuple[dict[str, Any], dict[str, End]]:
    """All runs; the one whose files have limits comes first, while what the ranks have printed is short."""
    found = full_disk(base)
    collect()
    plants = {plant.__name__: plant for plant in (replaced, read_only, uncurved)}
    # That one would save a checkpoint only if its export fails.
    return found, ends_of(base, {**plants, "without_checkpoints": replaced})


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One job, with a small disk for one of the runs where mounting is allowed: directory, findings, ends, output."""
    base = tmp_path_factory.mktemp("disks")
    model, chats = tiny_checkpoint(base / "model"), write_chats(base / "chats.jsonl")
    for name, (stage, train) in RUNS.items():
        write_recipe(
            base,
            name,
            model,
            chats,
            stage=stage,
            train=train,
            optim={"schedule": "constant"},
            loss=NO_TEACHER,
            data={"held_out": 4},
            eval={"every": int(name == "full_disk")},
            export={"enabled": train["steps"] < STEPS},
        )
    disk = base / "full_disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", disk], check=False, capture_output=True)
    try:
        ((found, ends), (_, second)), output = on_ranks(run_all, base)
        assert ends == second
        yield base, found, ends, output
    finally:
        for mounted in (disk, base / "read_only"):
            subprocess.run(["umount", "-l", mounted], check=False, capture_output=True)


def test_a_save_that_fails_loses_neither_the_run_nor_the_checkpoint_before(ran):
    base, found, _, output = ran
    assert found["latest"] == "step_00000001"
    assert not [name for name in found["left"] if name.startswith("step_") and name != "step_00000001"]
    assert {f"step_{STEPS:08d}", found["best"]} == {name for name in found["end"] if name.startswith("step_")}
    disk = base / "full_disk"
    lines = [line for line in output.splitlines() if line.startswith("warning: ") and "was not written" in line]
    warnings = [line for line in lines if str(disk) in line]
    assert [warning.partition("step_")[2][:8] for warning in warnings] == [f"0000000{step}" for step in (2, 3, 4, 7)]
    assert "; the export follows" in warnings.pop()
    for warning, reason in zip(warnings, ("File too large", "Is a directory", "No space left on device"), strict=True):
        assert " MB are free there; training goes on" in warning
        assert reason in warning or not os.path.ismount(disk)
    assert_same_weights(found["full_disk"], found["straight"])
    assert f"warning: {disk / 'tensorboard'} cannot be written (" in output or not os.path.ismount(disk)
    assert "Traceback" not in output


def test_a_version_that_is_not_written_is_not_current_and_the_last_one_is_the_export(ran):
    """Publishing changes nothing in the training: see assert_same_weights above."""
    base, found, _, output = ran
    folder = base / "full_disk" / "published"
    assert not found["imported"], "a run imports what publishes when it publishes, and what shares rows never"
    names = ["step_00000002", None, "step_00000006", "step_00000007"]
    assert [(result.path and result.path.name) for result, _ in found["published"]] == names
    assert [result.step for result, _ in found["published"]] == [2, 4, 6, 7]
    assert [current for _, current in found["published"]] == ["step_00000002", "step_00000002", *names[2:]]
    assert not any(result.served for result, _ in found["published"])
    assert len(re.findall("^warning: step 4 was not published: .*; training goes on, and", output, re.MULTILINE)) == 1
    unreached = f"warning: {NO_SERVER} does not serve step_0000000"
    assert sum(line.startswith(unreached) for line in output.splitlines()) == 3
    assert sorted(os.listdir(folder)) == [".run", "current", *names[2:]]
    export = base / "unsaved"
    assert sorted(os.listdir(folder / "current")) == sorted(os.listdir(export))
    for path in export.iterdir():
        assert (folder / "current" / path.name).read_bytes() == path.read_bytes(), path.name


def test_at_the_end_of_a_run_a_save_that_fails_is_an_error_and_does_not_cost_the_export(ran):
    base, found, *_ = ran
    error, latest = found["last"]
    assert (base / "unsaved" / "config.json").is_file()
    assert error.startswith("SaveError: ") and f"step_{STEPS + 1:08d} was not written" in error
    assert latest == f"step_{STEPS:08d}"


def test_a_resumed_run_follows_the_optimizer_options_that_it_is_given(ran):
    groups = ran[1]["groups"]
    assert groups["weights"] == OPTIONS
    assert groups["weight_scales"] == {**OPTIONS, "weight_decay": 0.0, "eps": SCALE_EPS}


@pytest.mark.parametrize("name", ["replaced", "read_only"])
def test_an_output_directory_that_cannot_be_written_any_more(ran, name):
    """The run comes to its last step; what could not be written is an error that names it, on every rank."""
    base, _, ends, output = ran
    if name == "read_only" and not os.statvfs(base / name).f_flag & os.ST_RDONLY:
        pytest.skip("a disk that becomes read-only needs leave to mount one")
    assert ends[name].steps == LOST
    assert ends[name].text.startswith("RankError: ") and str(base / name) in ends[name].text
    lost = rf"^warning: {base / name}/checkpoints/step_0000000(\d) was not written"
    assert sorted(re.findall(lost, output, re.MULTILINE)) == [str(step) for step in range(2, LOST + 1)], output
    assert output.count(f"warning: {base / name / 'tensorboard'} cannot be written") == 1


def test_an_export_and_a_checkpoint_that_both_fail_are_both_in_the_error(ran):
    base, _, ends, output = ran
    folder = base / "without_checkpoints"
    of_export, of_checkpoint = ends[folder.name].text.splitlines()
    assert of_export == f"RankError: rank 0: {folder}: File exists"
    assert f"{folder}/checkpoints/step_0000000{LOST} was not written" in of_checkpoint
    assert "the export failed; saving a training checkpoint for launch/export.py" in output


def test_curves_that_are_removed_begin_again(ran):
    base, _, ends, output = ran
    assert ends["uncurved"] == End("", True, LOST)
    assert str(base / "uncurved" / "tensorboard") not in output
    assert [step for step, _ in curves(base / "uncurved")["loss/total"]] == [*range(2, LOST + 1)]
    assert (base / "uncurved" / "export" / "model.safetensors").is_file()
