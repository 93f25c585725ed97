"""A user's own model.py or data/ is not taken for DeepQAT's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.root import ROOT

NO_SCRIPTS = ("__init__", "exits", "scripts")


def run(*words: object, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("file", "name"), [("model.py", "model"), ("data/__init__.py", "data")])
def test_what_shadows_is_named(tmp_path, file, name):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    script = tmp_path / "my_schedule.py"
    for imported in ("", f"import {name}\n"):  # by DeepQAT first, or by the script itself
        script.write_text(f"{imported}from engine.loop import Loop\n")
        result = run(script, cwd=tmp_path)
        assert result.returncode != 0
        assert f"DeepQAT's folder {ROOT / name} is shadowed: 'import {name}' finds {tmp_path / file}." in result.stderr
        assert "is not a package" not in result.stderr


def test_folders_without_modules_are_in_nobodys_way(tmp_path):
    """Python takes a package that comes later for a folder of data."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    result = run("-c", "import engine, data; print(data.__file__)", cwd=tmp_path)
    assert result.returncode == 0 and str(ROOT) in result.stdout, result.stderr


def test_scripts_of_launch_find_their_own(tmp_path):
    """The deepspeed launcher puts the current directory in front of the path."""
    for name in ("engine", "model", "data", "quant", "tools", "launch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    result = run(ROOT / "launch" / "train.py", "--optim.lr", "-1", cwd=tmp_path, path=tmp_path)
    assert result.returncode == 2 and "error: " in result.stderr, result.stderr
    first = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
    scripts = [path for path in (ROOT / "launch").glob("*.py") if path.stem not in NO_SCRIPTS]
    assert [path.name for path in scripts if first not in path.read_text(encoding="utf-8")] == []
