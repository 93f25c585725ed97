"""Which checkpoint is the latest, the best, or that of a name; what is kept, and what is offered for a damaged one."""

import json
import math
import os
from pathlib import Path

import pytest

from engine.checkpoint import save
from engine.checkpoint.checked_files import replace_text
from engine.checkpoint.find import (
    Best,
    best_checkpoint,
    check_resumable,
    find_checkpoint,
    read_step_directory,
    verify_checkpoint,
)
from engine.config.errors import RecipeError
from engine.report import best_line
from tests.lib.checkpoints import edit_json
from tests.lib.patience import ends
from tests.unit.engine.checkpoint.steps import recipe, write_step


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name[-8:]) for path in directory.glob("step_*"))


def test_latest_and_best_and_names_are_found(tmp_path):
    assert best_checkpoint(tmp_path) is None and best_line(tmp_path) is None
    with pytest.raises(ValueError, match=r"has no checkpoint to resume from .*set train\.resume: false to start over"):
        find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"has no best\.json"):
        find_checkpoint(tmp_path, "best")
    for step in (1, 2, 3):
        write_step(tmp_path, step, measured=("eval/perplexity", 5.5 if step == 2 else 6.0))
    assert best_checkpoint(tmp_path) == Best("step_00000002", 2, "eval/perplexity", 5.5)
    assert best_line(tmp_path) == f"best checkpoint: {tmp_path}/step_00000002, eval/perplexity 5.5000"
    found = [find_checkpoint(tmp_path, which) for which in (True, "best", "step_00000001")]
    assert [checkpoint.step for checkpoint in found] == [3, 2, 1]
    for checkpoint in found:
        verify_checkpoint(checkpoint)
    (tmp_path / "latest").unlink()  # as if killed before the first pointer
    assert find_checkpoint(tmp_path).step == 3


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    kept, losses = {}, {2: 1.0, 4: 1.5, 5: 0.5}
    for step in range(1, 7):
        write_step(tmp_path, step, keep=2, measured=("loss", losses[step]) if step in losses else None)
        kept[step] = steps(tmp_path)
    assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [4, 5], 6: [5, 6]}
    # A step that was saved at a signal is evaluated when the run is resumed.
    save.mark_best(tmp_path, 6, save.BestMetric("loss", 0.7), keep=1)
    assert steps(tmp_path) == [5, 6] and best_checkpoint(tmp_path).step == 5
    save.mark_best(tmp_path, 6, save.BestMetric("loss", 0.3), keep=1)
    assert steps(tmp_path) == [6] and best_checkpoint(tmp_path).step == 6
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_that_goes_on_from_an_older_step_does_not_lose_it_to_later_ones(tmp_path):
    for step in (1, 2, 3, 4):
        write_step(tmp_path, step, keep=4)
    write_step(tmp_path, 2, keep=1)  # resumed from step 1
    assert steps(tmp_path) == [2, 3, 4] and find_checkpoint(tmp_path).step == 2


def test_values_that_were_computed_otherwise_are_not_compared(tmp_path, capsys):
    """With other weights of the losses, or other samples."""
    for step, (value, of) in enumerate([(3.0, "a"), (2.0, "a"), (9.0, "b"), (9.5, "b"), (8.0, "b")], 1):
        write_step(tmp_path, step, measured=("eval/total", value, of))
        assert best_checkpoint(tmp_path).step == [1, 2, 3, 3, 5][step - 1]
    said = (
        "best checkpoint: step_00000002 was measured with other losses, loss weights or held-out samples, or without "
        "quantization; step_00000003"
    )
    assert capsys.readouterr().out == f"{said} takes its place\n"


def test_the_best_is_the_one_of_the_smallest_value_that_is_still_there(tmp_path, capsys):
    def marked(step, value, metric="eval/lm"):
        write_step(tmp_path, step, keep=9, measured=(metric, value))
        best = best_checkpoint(tmp_path)
        return best.step, best.value

    assert [marked(1, 3.0), marked(2, 2.0), marked(3, 2.5)] == [(1, 3.0), (2, 2.0), (2, 2.0)]
    # Resumed from before it, the run comes to step 2 again: what was the best is not there any more.
    assert marked(2, 2.2) == (2, 2.2)
    # Resumed from before it, the run comes to step 1 again, and later to step 2: that one is not its own.
    assert [marked(1, 2.4), marked(2, 2.6), marked(2, 2.2)] == [(1, 2.4), (1, 2.4), (2, 2.2)]
    assert marked(3, 5.0, "eval/total") == (3, 5.0)
    # A loss that is not finite is no best one, and a mark with one does not stay for ever.
    assert marked(4, math.nan, "eval/total") == (3, 5.0)
    (tmp_path / "best.json").write_text('{"name": "step_00000004", "step": 4, "metric": "eval/total", "value": NaN}')
    assert marked(5, 9.0, "eval/total") == (5, 9.0)
    write_step(tmp_path, 5, measured=("eval/total", math.inf))
    assert best_checkpoint(tmp_path) is None  # it marked a checkpoint that is not there any more
    (tmp_path / "best.json").write_text("{")
    assert marked(6, 4.0) == (6, 4.0)
    assert f"warning: {tmp_path}/best.json is damaged: expected name" in capsys.readouterr().out


def test_a_mark_that_cannot_be_written_costs_a_warning(tmp_path, capsys):
    (tmp_path / "best.json.partial").mkdir()  # as a full disk does: the mark cannot be written aside
    write_step(tmp_path, 1, measured=("eval/lm", 1.0))
    assert find_checkpoint(tmp_path).step == 1
    assert "best.json was not written (Is a directory): the best checkpoint is not marked" in capsys.readouterr().out


@pytest.mark.parametrize("at", ["best.json", "latest"])
def test_killed_before_a_mark_or_a_pointer_the_step_is_done_again(tmp_path, monkeypatch, at):
    """And marked again: the mark is written before the pointer."""
    write_step(tmp_path, 1, keep=1, measured=("eval/lm", 2.0))

    def killed(path: Path, text: str) -> None:
        if path.name == at:
            raise KeyboardInterrupt
        replace_text(path, text)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(save, "replace_text", killed)
        write_step(tmp_path, 2, keep=1, measured=("eval/lm", 1.0))
    assert find_checkpoint(tmp_path).step == 1
    write_step(tmp_path, 2, keep=1, measured=("eval/lm", 1.0))
    assert find_checkpoint(tmp_path).step == find_checkpoint(tmp_path, "best").step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "latest", "step_00000002"]


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "a"}', '{"name": "a", "step": 1, "metric": "b", "value": "c"}'])
def test_a_damaged_mark_of_the_best_is_refused_before_a_run_goes_on(tmp_path, text):
    write_step(tmp_path, 1)
    check_resumable(recipe(tmp_path), tmp_path)
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(RecipeError, match=r"train\.resume: .*best\.json is damaged: expected name, step, metric"):
        check_resumable(recipe(tmp_path), tmp_path)
    # Damaged while it runs, it does not end a run whose work is done.
    assert (best_line(tmp_path) or "").startswith(f"warning: {tmp_path}/best.json is damaged")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda path: (path / "b.pt").unlink(), "is damaged: b.pt is missing"),
        (lambda path: (path / "b.pt").write_bytes(b""), "is damaged: b.pt has 0 bytes, expected "),
        (lambda path: (path / "state.json").unlink(), "is incomplete: it has no state.json"),
        (lambda path: (path / "state.json").write_text('{"step": 3, "fil'), "is damaged: state.json is not what"),
        (lambda path: (path / "state.json").write_text("{}"), "is damaged: state.json is not what"),
        (lambda path: path.rename(path.with_name("elsewhere")), "is not there"),
    ],
)
def test_what_is_damaged_is_named_and_the_one_before_it_offered(tmp_path, spoil, expected):
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    spoil(tmp_path / "step_00000003")
    with pytest.raises(ValueError) as raised:
        find_checkpoint(tmp_path)
    assert f"{tmp_path}/step_00000003 {expected}" in str(raised.value)
    assert "the one before it is step_00000002: set train.resume to step_00000002" in str(raised.value)
    (tmp_path / "step_00000002" / "a.pt").unlink()  # that one is no better: the next
    with pytest.raises(ValueError, match=r"the one before it is step_00000001: set train.resume to step_00000001"):
        find_checkpoint(tmp_path)
    (tmp_path / "step_00000001" / "a.pt").unlink()
    with pytest.raises(ValueError, match="there is no complete checkpoint before it: start over in another output_dir"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        *({"files": files} for files in ({"../../a.pt": [3, 4]}, {"/etc/passwd": [3, 4]}, {"a.pt": 3}, [])),
        *({"world_size": size} for size in (10**12, 0)),
        *({"step": step} for step in (None, float("inf"))),
        {"stage": "weights"},
        {"left_out": {"weight": "x"}},
    ],
)
def test_a_manifest_says_only_what_was_written(tmp_path, values):
    path = write_step(tmp_path, 1)
    edit_json(path / "state.json", **values)
    with pytest.raises(ValueError, match=r"is damaged: state\.json is not what was written"):
        read_step_directory(path)


@pytest.mark.parametrize("text", ["../../elsewhere", "", "/etc", "step_1"])
def test_a_pointer_leads_to_a_step_of_its_directory(tmp_path, text):
    write_step(tmp_path, 1)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"latest is damaged: .*, expected a name like step_00001000.*set train.resume to step_00000001",
    ):
        find_checkpoint(tmp_path)
    (tmp_path / "best.json").write_text(json.dumps({"name": text, "step": 1, "metric": "eval/lm", "value": 1.0}))
    with pytest.raises(ValueError, match=r"best\.json is damaged"):
        best_checkpoint(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["a.pt", "state.json"])
def test_what_never_ends_when_it_is_read_is_no_file_of_a_checkpoint(tmp_path, make, name):
    step = write_step(tmp_path, 1)
    (step / name).unlink()
    make(step / name)
    if name == "a.pt":
        edit_json(step / "state.json", lambda state: state["files"].update({name: [0, 0]}))
    with ends(name), pytest.raises(ValueError, match=rf"{step.name} is (damaged: a.pt is missing|incomplete)"):
        read_step_directory(step)
