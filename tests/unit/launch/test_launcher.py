"""DeepSpeed's launcher is found beside the interpreter first, then in PATH."""

import sys

import pytest

from launch.launcher import find_launcher


def test_beside_the_interpreter_then_in_path(tmp_path, monkeypatch):
    """An environment that is not active, and one whose packages lie in another place than its interpreter."""
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    with pytest.raises(FileNotFoundError, match=f"no deepspeed launcher in {environment} or in PATH"):
        find_launcher()
    for folder in (elsewhere, environment):
        folder.mkdir()
        (folder / "deepspeed").touch(mode=0o755)
        assert find_launcher() == str(folder / "deepspeed")
    monkeypatch.delenv("PATH")
    assert find_launcher() == str(environment / "deepspeed")
