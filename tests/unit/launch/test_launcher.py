"""DeepSpeed's launcher is found beside the interpreter first, then in PATH."""

import sys
from pathlib import Path

import pytest

from launch.launcher import find_launcher


def script(folder: Path) -> str:
    """An executable of the launcher's name."""
    folder.mkdir(parents=True)
    path = folder / "deepspeed"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_beside_the_interpreter_then_in_path(tmp_path, monkeypatch):
    """An environment that is not active, and one whose packages lie in another place than its interpreter."""
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    with pytest.raises(FileNotFoundError, match=f"no deepspeed launcher in {environment} or in PATH"):
        find_launcher()
    in_path = script(elsewhere)
    assert find_launcher() == in_path
    beside = script(environment)
    assert find_launcher() == beside
    monkeypatch.delenv("PATH")
    assert find_launcher() == beside
