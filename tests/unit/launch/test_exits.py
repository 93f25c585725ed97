"""How a script ends: what is printed, by whom, and with which exit code."""

import subprocess
from pathlib import Path

import pytest

from launch.exits import clean_exit, recipe_or_exit
from model.ranks import RankError
from tests.lib.processes import run_python

RECIPE = """\
model: {path: model}
data: {train: [train.jsonl]}
train: {steps: 10}
output_dir: out
"""


def write(directory: Path, extra: str = "") -> Path:
    path = directory / "recipe.yaml"
    path.write_text(RECIPE + extra, encoding="utf-8")
    return path


def run_script(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script that only reads its recipe, in a process of its own, as train.py does."""
    return run_python("from launch.exits import recipe_or_exit; recipe_or_exit()", *argv, cwd=cwd, **environment)


def test_a_bad_recipe_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    path = write(tmp_path, "optim: {lrr: 1}\n")
    run = run_script("--config", str(path), "--local_rank=0", cwd=tmp_path, LOCAL_RANK="0")
    assert run.returncode == 2
    assert run.stderr == f"error: {path}, line 5: optim.lrr: unknown key; did you mean optim.lr?\n"
    silent = run_script("--config", str(path), "--local_rank=1", cwd=tmp_path, LOCAL_RANK="1")
    assert (silent.returncode, silent.stderr) == (2, "")


def test_every_problem_is_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config", str(write(tmp_path)), "--optim.lr", "-1", "--data.max_length", "1"]
    with pytest.raises(SystemExit, match="2"):
        recipe_or_exit(options, check_files=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines), lines


def test_a_missing_file_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        recipe_or_exit(["--config", str(write(tmp_path))])
    assert "error: data.train[0]: 'train.jsonl'" in capsys.readouterr().err


def test_what_a_rank_found_wrong_ends_with_1_and_a_defect_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="1"), clean_exit():
        raise RankError("a bad file")
    assert capsys.readouterr().err == "error: a bad file\n"
    with pytest.raises(ZeroDivisionError), clean_exit():
        _ = 1 / 0
