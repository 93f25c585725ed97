"""Several machines: what may not differ between them, and what becomes of a run when one of them dies."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.hosts import Host, NoNamespaces, network
from tests.lib.patience import PATIENCE, until
from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint

STEPS = 6
MINUTES = "3"  # that a rank waits for another, in the start too, where another may be that much slower


# ---------------------------------------------------------------------------------------------------------------------
# Differences: two ranks in directories of their own
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    directory = tmp_path_factory.mktemp("nodes")
    result = run_python("from tests.distributed.engine.cluster.scripts.nodes import main; main()", directory)
    assert result.returncode == 0, result.stderr[-8000:]
    return json.loads((directory / "nodes.json").read_text())


def test_machines_that_agree_train(found):
    assert found["nothing"]["codes"] == [0, 0], found["nothing"]["said"]
    assert found["nothing"]["left"] == []


def test_ctrl_c_ends_with_a_checkpoint_and_one_line(found):
    """A second signal changes nothing, nor does one behind the end."""
    end = found["interrupted"]
    assert end["codes"] == [0, 0], end["said"]
    assert end["said"].count("asked to stop: step 2 is saved") == 1 and "Traceback" not in end["said"]


def test_ctrl_c_before_training_is_one_line(found):
    end = found["interrupted_early"]
    assert end["codes"] == [130, 130] and end["said"].splitlines().count("interrupted") == 1, end["said"]
    assert "Traceback" not in end["said"]


def test_the_ranks_that_are_left_say_in_one_line_that_another_has_ended(found):
    end = found["peer_lost"]
    assert sorted(end["codes"]) == [1, 3], end["said"]
    assert "error on rank 0: another rank has ended, and its connection is closed" in end["said"]
    assert "Traceback" not in end["said"]


@pytest.mark.parametrize(
    ("case", "codes", "said"),
    [
        ("output", [1, 1], "error: output_dir: 'out' of {host} (rank 1) is not that of {host} (rank 0), expected a"),
        ("data_missing", [1, 2], "error: rank 1: on {host}: data.train[0]: 'chats.jsonl' (in "),
        ("data", [1, 1], "data (tokens and labels): 48 samples, digest "),
        ("recipe", [1, 1], "optim.lr: 0.001 on {host} (rank 0), 0.002 on {host} (rank 1)"),
        ("weights", [1, 1], "model.path model (files): "),
    ],
)
def test_machines_that_differ_end_with_the_difference_on_every_rank(found, case, codes, said):
    result = found[case]
    assert sorted(result["codes"]) == codes, result["said"]
    assert said.format(host=os.uname().nodename) in result["said"]
    assert "Traceback" not in result["said"]
    assert "weights:" not in result["said"], "before weights are read"
    assert result["left"] == []


# ---------------------------------------------------------------------------------------------------------------------
# Two hosts in network namespaces, and torchrun
# ---------------------------------------------------------------------------------------------------------------------


class Cluster:
    """Two hosts that share a disk, and jobs of torchrun on them: one agent and one rank on each."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self.port = 29500
        self.model = tiny_checkpoint(directory / "model", "qwen3_moe")
        self.chats = write_chats(directory / "chats.jsonl")

    def start(self, name: str, *options: str, empty: Path | None = None, **environment: str) -> "Run":
        """``launch/train.py`` on both, with ``runs/<name>`` as output directory."""
        output = self.directory / "runs" / name
        recipe = write_recipe(
            self.directory,
            name,
            self.model,
            self.chats,
            stage=3,
            dtype="bfloat16",
            train={"steps": STEPS, "checkpoint_every": 2, "gradient_accumulation_steps": 1},
            loss={"kd_weight": 0.0, "teacher": None},
            export={"enabled": True},
            output_dir=str(output),
        )
        self.port += 1  # a port that was in use stays taken for a while
        processes = []
        for number, host in enumerate(self.hosts):
            torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nnodes", "2", "--nproc_per_node", "1"]
            torchrun += ["--node_rank", str(number), "--master_addr", self.hosts[0].address]
            torchrun += ["--master_port", str(self.port), "launch/train.py", "--config", str(recipe), *options]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
            # gloo takes the interface that the host's name resolves to, and these names resolve to nothing.
            env |= {"GLOO_SOCKET_IFNAME": host.interface, **environment}
            hidden = [empty] if empty is not None and number == 1 else []
            processes.append(host.start(torchrun, self.log(name, number), cwd=ROOT, env=env, empty=hidden))
        return Run(self, name, output, processes)

    def log(self, name: str, host: int) -> Path:
        return self.directory / f"{name}.{host}.log"


class Run:
    """A job of the cluster."""

    def __init__(self, cluster: Cluster, name: str, output: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self.cluster, self.name, self.output, self.processes = cluster, name, output, processes

    def said(self, host: int) -> str:
        return self.cluster.log(self.name, host).read_text()

    def codes(self) -> list[int]:
        """Exit codes of the agents, which end."""
        try:
            return [process.wait(PATIENCE) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{self.name} hangs:\n{self.said(0)[-4000:]}\n{self.said(1)[-4000:]}") from error

    def finish(self) -> None:
        assert self.codes() == [0, 0], f"{self.said(0)[-6000:]}\n{self.said(1)[-6000:]}"

    def wait_for(self, path: Path, text: str = "") -> None:
        """Until a file is there, with this text."""

        def is_there() -> bool:
            assert self.processes[0].poll() is None, self.said(0)[-6000:]
            return path.is_file() and text in path.read_text()

        until(is_there, lambda: self.said(0)[-6000:])

    def exported(self) -> dict[str, bytes]:
        files = sorted((self.output / "export").iterdir())
        return {path.name: path.read_bytes() for path in files if path.suffix != ".md"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    try:
        with network(2) as hosts:
            (tmp_path / "runs").mkdir()
            yield Cluster(hosts, tmp_path)
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.mark.full
@pytest.mark.parametrize("dies", [1, 0])
def test_a_host_dies_and_the_run_goes_on_to_the_same_export(cluster, dies):
    straight = cluster.start("straight")
    straight.finish()

    killed = cluster.start("killed")
    killed.wait_for(killed.output / "checkpoints" / "latest", "step_0000000")
    cluster.hosts[dies].kill()
    # Its connections are closed, so that the other rank's collective fails at once; torchrun gives it 30 s to end.
    codes = killed.codes()
    assert all(codes), f"{killed.said(1 - dies)[-6000:]}"
    assert f"error on rank {1 - dies}" in killed.said(1 - dies)
    assert not (killed.output / "export").exists()
    saved = (killed.output / "checkpoints" / "latest").read_text()

    resumed = cluster.start("killed", "--train.resume", "true")
    resumed.finish()
    assert f"resumed: {killed.output}/checkpoints/{saved}" in resumed.said(0)
    assert resumed.exported() == straight.exported()


@pytest.mark.full
def test_a_host_that_falls_silent_is_noticed_when_a_collective_times_out(cluster):
    run = cluster.start("silent", "--train.steps", "100000", DEEPSPEED_TIMEOUT=MINUTES)
    run.wait_for(run.output / "checkpoints" / "latest", "step_0000000")
    cluster.hosts[1].unplug()
    codes = run.codes()
    assert all(codes), run.said(0)[-6000:]
    assert f"{int(MINUTES) * 60_000}ms" in run.said(0), run.said(0)[-6000:]
    assert "error on rank 0" in run.said(0) and "error on rank 1" in run.said(1)


@pytest.mark.full
def test_an_output_directory_that_a_host_has_by_itself_is_refused(cluster):
    run = cluster.start("local", empty=cluster.directory / "runs")
    assert run.codes() == [1, 1]
    names = [host.name for host in cluster.hosts]
    said = f"output_dir: '{run.output}' of {names[1]} (rank 1) is not that of {names[0]} (rank 0)"
    assert said in run.said(0)
    assert not any(run.output.iterdir())


@pytest.mark.full
def test_data_that_one_host_lacks_end_the_run_on_both(cluster):
    apart = cluster.directory / "data"
    apart.mkdir()
    shutil.move(cluster.chats, apart / "chats.jsonl")
    cluster.chats = apart / "chats.jsonl"
    run = cluster.start("absent", empty=apart)
    assert run.codes() == [1, 1]
    said = f"on {cluster.hosts[1].name}: data.train[0]: '{cluster.chats}', expected a file"
    assert f"error: rank 1: {said}" in run.said(0)
    assert f"error: data.train[0]: '{cluster.chats}', expected a file" in run.said(1)
