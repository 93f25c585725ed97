"""A writer removes the leftovers of killed writers, and no files of running ones."""

import os
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from model.save.aside import QUIET_SECONDS, WRITING, Aside, remove_left


def left(path: Path, host: str | None, *, age: float = 0) -> Path:
    """A directory with a file, as a process on ``host`` leaves it; None: killed before it said where it ran."""
    (path / "folder").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"half")
    if host is not None:
        (path / WRITING).write_text(host)
    for each in (*path.rglob("*"), path):
        os.utime(each, (time.time() - age,) * 2)
    return path


def test_the_next_writer_removes_what_killed_ones_left(tmp_path, capsys):
    old = QUIET_SECONDS + 60
    mine = left(tmp_path / "out.tmp-01234567", socket.gethostname())
    theirs = left(tmp_path / "out.tmp-89abcdef", "elsewhere", age=old)
    (empty := tmp_path / "out.tmp-00000000").mkdir()
    os.utime(empty, (time.time() - old,) * 2)
    with closing(Aside(tmp_path / "out", 1)) as aside:
        assert [path.name for path in tmp_path.iterdir()] == [aside.path.name]
        (aside.path / "file").write_text("x")
        aside.publish()
    assert not mine.exists() and not theirs.exists() and not empty.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]
    assert capsys.readouterr().out == ""


def test_what_may_be_in_use_or_is_something_else_stays(tmp_path, capsys):
    """Kept: files of a running process, of another machine that wrote just now, of a user or another output; links."""
    names = [f"out.tmp-{digit * 8}" for digit in "1234"]
    fresh, users = left(tmp_path / names[0], "elsewhere"), left(tmp_path / names[1], None, age=2 * QUIET_SECONDS)
    elsewhere = left(tmp_path / "target", socket.gethostname())
    (tmp_path / names[2]).symlink_to(elsewhere)
    others = [left(tmp_path / name, socket.gethostname()) for name in ("out.tmp-backup00", "out2.tmp-01234567")]
    with closing(Aside(tmp_path / "out", 1)) as running:
        capsys.readouterr()
        remove_left(tmp_path / "out")
        assert all((path / "model.safetensors").exists() for path in (fresh, users, elsewhere, *others))
        assert (running.path / WRITING).exists()
        said = capsys.readouterr().out.splitlines()
        text = "warning: {} belongs to another run that writes {}: remove it if no such run is active"
        assert sorted(said) == sorted(text.format(path, tmp_path / "out") for path in (fresh, users, running.path))
    assert not running.path.exists()


def test_the_space_that_a_killed_writer_took_is_free_before_it_is_counted(tmp_path):
    mine = left(tmp_path / "out.tmp-01234567", socket.gethostname())
    with pytest.raises(ValueError, match=r"bytes free, the weights alone need 1,000,000,000,000,000,000: free"):
        Aside(tmp_path / "out", 10**18)
    assert not mine.exists()
