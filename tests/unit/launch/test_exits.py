"""How a script ends: what is printed, by which rank, and with which exit code."""

import errno
import os
import re

import pytest

from launch.exits import clean_exit, recipe_or_exit
from model.ranks import RankError, naming
from tests.lib.launcher import free_port
from tests.lib.patience import PATIENCE, until
from tests.lib.processes import run_python, start_python
from tests.lib.recipes import write_minimal


def test_a_bad_recipe_prints_one_line_and_exits_with_2(tmp_path):
    path = write_minimal(tmp_path, "optim: {lrr: 1}\n")
    said = f"error: {path}, line 5: optim.lrr: unknown key; did you mean optim.lr?\n"
    script = "from launch.exits import recipe_or_exit; recipe_or_exit()"
    for rank, text in (("0", said), ("1", "")):
        ended = run_python(script, "--config", path, f"--local_rank={rank}", cwd=tmp_path, LOCAL_RANK=rank)
        assert (ended.returncode, ended.stderr) == (2, text)


def test_every_problem_is_a_line_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = ["--config", str(write_minimal(tmp_path))]
    with pytest.raises(SystemExit, match="2"):
        recipe_or_exit([*config, "--optim.lr", "-1", "--data.max_length", "1"], check_files=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines), lines
    with pytest.raises(SystemExit, match="2"):
        recipe_or_exit(config)
    assert "error: data.train[0]: 'train.jsonl'" in capsys.readouterr().err


def test_what_a_rank_found_wrong_ends_with_1_and_a_defect_keeps_its_traceback(capsys):
    with pytest.raises(SystemExit, match="1"), clean_exit():
        raise RankError("a bad file")
    assert capsys.readouterr().err == "error: a bad file\n"
    with pytest.raises(ZeroDivisionError), clean_exit():
        _ = 1 / 0


def test_an_error_of_a_disk_is_one_line_with_the_path(tmp_path, capsys):
    """With the free bytes of a full disk, and the first folder that is missing of one that is no longer mounted."""
    file = tmp_path / "file"
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE):
        with pytest.raises(SystemExit, match="1"), clean_exit(), naming(file, 1234):
            raise OSError(number, os.strerror(number))
        text = f"error: {file}: {os.strerror(number)}"
        if number in (errno.ENOSPC, errno.EDQUOT):
            text = rf"{re.escape(text)}, the file takes 1,234 bytes; [\d,]+ bytes are free there"
        assert re.fullmatch(f"{text}\n", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="1"), clean_exit():
        (tmp_path / "mounted" / "run" / "file").touch()
    expected = f"{tmp_path} has no mounted: was it removed, or its disk unmounted?\n"
    assert capsys.readouterr().err == f"error: {tmp_path}/mounted/run/file: No such file or directory; {expected}"


FAILS = """
import sys
from engine.cluster import nodes
from engine.config.errors import RecipeError
from engine.session.context import init_ranks
from launch.exits import clean_exit
nodes.SHOWN_SECONDS = 1.0
with clean_exit():
    if sys.argv[1] == "1":
        raise {"RecipeError": RecipeError, "KeyError": KeyError}[sys.argv[2]]("nothing fits")
    init_ranks()
"""


@pytest.mark.parametrize(("kind", "said", "code"), [("RecipeError", "", 2), ("KeyError", "KeyError: ", 1)])
def test_a_rank_with_an_error_says_it_before_it_has_met_the_others(tmp_path, kind, said, code):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [tmp_path / "0", tmp_path / "1"]

    def start(rank: int):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return start_python(FAILS, rank, kind, cwd=tmp_path, out=logs[rank], err=logs[rank], environment=common | own)

    failed = start(1)
    until(lambda: logs[1].exists() and "nothing fits" in logs[1].read_text(), lambda: "rank 1 says nothing")
    assert failed.is_alive()
    other = start(0)
    for process in (failed, other):
        process.join(PATIENCE)
    assert (failed.exitcode, other.exitcode) == (code, 1)
    (line,) = [line for line in logs[1].read_text().splitlines() if line.startswith("error")]
    assert line.startswith(f"error on rank 1: {said}") and "nothing fits" in line
    assert "error: rank 1: on " in logs[0].read_text() and "nothing fits" in logs[0].read_text()
