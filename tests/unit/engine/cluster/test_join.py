"""A rank that does not meet the others says so in one line: there is no process group yet that could."""

import contextlib
import os
import signal
import socket
import time

import pytest
from torch.distributed import TCPStore

from tests.lib.patience import PATIENCE
from tests.lib.processes import CPU, run_python, start_python

PROGRAM = """
from launch.exits import clean_exit
from engine.cluster.job import join_ranks
with clean_exit():
    join_ranks()
"""


def environment(rank: int, port: int) -> dict[str, str]:
    """Of a rank of two."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return {**CPU, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_a_peer_dies_before_the_process_group_exists(tmp_path):
    """Rank 0, which dies when rank 1 has found it and waits for what it will say."""
    read, write = os.pipe()
    if (first := os.fork()) == 0:
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        signal.pause()
    port = int(os.read(read, 10))
    out, err = tmp_path / "out", tmp_path / "err"
    second = start_python(PROGRAM, cwd=tmp_path, out=out, err=err, environment=environment(1, port))
    watching = TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
    until = time.monotonic() + PATIENCE
    while not any("default_pg" in key for key in watching.list_keys()) and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    second.join(PATIENCE)
    said = err.read_text()
    assert second.exitcode == 1 and "Traceback" not in said, said
    *before, last = said.splitlines()  # before it torch's own warnings, from its C++ code
    assert last.startswith(f"error: rank 1 of 2 has not met the others at 127.0.0.1:{port} (") and not any(
        "error:" in line for line in before
    )
    assert "what ended another rank" in last


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_what_a_launcher_sets_is_a_number(tmp_path, name):
    result = run_python(PROGRAM, cwd=tmp_path, **{**environment(0, 1), name: "x"})
    assert result.returncode == 1
    assert result.stderr == f"error: {name} is 'x' in the environment, expected a number, of a launcher's\n"


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ("mps", "DeepSpeed's accelerator is 'mps', expected cuda or cpu: DS_ACCELERATOR chooses one"),
        ("cuda", "LOCAL_RANK is 0, but torch finds 0 CUDA devices here: start as many ranks on a machine as it has"),
    ],
)
def test_a_device_that_is_not_there(tmp_path, accelerator, expected):
    """The processes of tests have imported DeepSpeed, which has made its choice: this one makes it anew."""
    choose = f"""
from deepspeed.accelerator import set_accelerator, {accelerator}_accelerator as chosen
set_accelerator(chosen.{accelerator.upper()}_Accelerator())
"""
    result = run_python(choose + PROGRAM, cwd=tmp_path, **environment(0, 1))
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith(f"error: {expected}"), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("port", "expected"), [("taken", "EADDRINUSE"), ("abc", "invalid literal for int()")])
def test_no_port_to_meet_at(tmp_path, port, expected):
    with contextlib.closing(socket.socket()) as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1] if port == "taken" else port
        result = run_python(PROGRAM, cwd=tmp_path, **environment(0, port))
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1 and expected in result.stderr, result.stderr
    assert result.stderr.startswith(f"error: rank 0 of 2 has not met the others at 127.0.0.1:{port} ("), result.stderr
    assert ("set another MASTER_PORT" in result.stderr) == (expected == "EADDRINUSE")
