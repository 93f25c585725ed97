"""Several machines: what may not differ between them, what ends a job of two ranks, and a machine that dies."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.cluster import nodes
from engine.config.reading import load_recipe
from engine.loop import Loop
from engine.session.context import init_ranks
from engine.state import LoopState
from launch.evaluate import main as evaluate
from launch.exits import clean_exit
from launch.train import main as train
from tests.lib.checkpoints import edit_tensors
from tests.lib.curves import curves
from tests.lib.forked import Job
from tests.lib.hosts import Host, NoNamespaces, network
from tests.lib.patience import PATIENCE, until
from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_ds_config, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

# ---------------------------------------------------------------------------------------------------------------------
# Jobs forked from one process: two ranks in directories of their own, to which a recipe's paths are relative
# ---------------------------------------------------------------------------------------------------------------------


def run_jobs(directory: Path) -> None:
    """Run all jobs; of each keep the exit codes, what each rank printed, and the files that it left."""
    nodes.PATIENCE_SECONDS, nodes.PIECE, nodes.PIECES_AT_ONCE = 0.5, 2**25, 2
    template = directory / "template"
    Job(1, lambda: write_machine(template), directory / "setup.log").finish()
    found = {}
    for name, case in CASES.items():
        machines = [directory / name / f"machine{number}" for number in range(2)]
        for machine in machines:
            shutil.copytree(template, machine)
            if name != "output":
                (directory / name / "out").mkdir(exist_ok=True)
                (machine / "out").symlink_to(directory / name / "out")
        job = Job(2, lambda machines=machines, case=case: rank(machines, case), directory / f"{name}.log")
        codes = job.wait(PATIENCE)
        if codes is None:
            job.kill()
        logs = [machine / "log" for machine in machines]
        found[name] = {
            "codes": codes,
            "said": [log.read_text() if log.exists() else job.log.read_text() for log in logs],
            "left": [str(path) for machine in machines for path in (machine / "out").glob(".*")],
        }
    (directory / "jobs.json").write_text(json.dumps(found))


def write_machine(machine: Path) -> None:
    """Write model, data and recipe, which each machine has."""
    machine.mkdir()
    os.chdir(machine)
    write_recipe(
        Path(),
        "out",
        tiny_checkpoint(Path("model")),
        write_chats(Path("chats.jsonl")),
        train={"steps": 1, "checkpoint_every": 1, "gradient_accumulation_steps": 1},
        optim={"warmup_steps": 0},
        quant={"fake_quant_start": -1},
        loss=NO_TEACHER,
    )


def rank(machines: list[Path], case: "Case") -> None:
    """Run a rank as torchrun starts it on each machine, in a terminal of its own."""
    number = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.chdir(machines[number])
    with open("log", "w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.argv = ["train.py", "--config", "out.yaml"]
    if case.change is not None and (number == 1 or case.both):
        case.change()
    train()


def other_files() -> None:
    """Change one element of a tensor on rank 1, which has others on both sides, and in its file too; and give each
    machine a large file in the model's folder, of which a byte in the middle differs."""
    name = "model.layers.1.mlp.up_proj.weight"

    def one(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][40, 20] += int(os.environ["RANK"])

    edit_tensors(Path("model"), name, one)
    with Path("model/large.bin").open("wb") as file:
        file.truncate(2**26 + 2**25)
        file.seek(2**25 + 2**23 + 2**22)
        file.write(os.environ["RANK"].encode())


def another_order() -> None:
    lines = Path("chats.jsonl").read_text().splitlines()
    Path("chats.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")


def several() -> None:
    """Give rank 1 another option, an event, a variable, and another version of a module of the user's."""
    number, settings = os.environ["RANK"], load_recipe("out.yaml")
    Path("my_losses.py").write_text(f"WEIGHT = {number}\n")
    sys.path.insert(0, os.getcwd())
    __import__("my_losses")
    settings.train.steps += int(number)
    loop = Loop(settings)
    if number == "1":
        os.environ["DS_X"] = "1"
        loop.at(0)(several)
    with clean_exit():
        loop.run()


def another_script() -> None:
    sys.argv = ["evaluate.py", "--model", "model", "--text", "chats.jsonl"]
    evaluate()


def ends_early(end: Callable[[Loop], None]) -> Callable[[], None]:
    """Run three steps, in which something ends the job; after its end comes a signal, too late to change anything."""

    def run() -> None:
        settings = load_recipe("out.yaml")
        loop = Loop(replace(settings, train=replace(settings.train, steps=3, checkpoint_every=0)))
        with clean_exit():
            end(loop)
            loop.run()
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(0)

    return run


def interrupted(loop: Loop) -> None:
    """Ctrl-C in the second step, and once more when the run has ended."""

    @loop.at(1)
    def interrupt(state: LoopState) -> None:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)


def interrupted_early(loop: Loop) -> None:
    """Ctrl-C before there is a model."""
    init_ranks()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs in its background ignore it
    os.kill(os.getpid(), signal.SIGINT)


def peer_lost(loop: Loop) -> None:
    """Rank 1 is gone in the second step, without a word."""
    loop.at(1)(lambda state: os._exit(3) if os.environ["RANK"] == "1" else None)


def orphaned(loop: Loop) -> None:
    """The launcher is gone in the second step; the ranks run on without it."""
    launcher = os.getppid()

    @loop.at(1)
    def kill(state: LoopState) -> None:
        if os.environ["RANK"] == "1":
            os.kill(launcher, signal.SIGKILL)
        while os.getppid() == launcher:
            time.sleep(0.01)


class Case(NamedTuple):
    """A job of two ranks.

    Attributes:
        codes: exit codes, sorted.
        said: parts of the line in which a rank says why it ended.
        change: runs on rank 1 before its script.
        both: ``change`` runs on both ranks.
        everywhere: both ranks say it, not rank 0 alone.
    """

    codes: list[int]
    said: tuple[str, ...] = ()
    change: Callable[[], object] | None = None
    both: bool = False
    everywhere: bool = True


EARLY = {
    "interrupted": Case([0, 0], ("asked to stop: step 2 is saved",), ends_early(interrupted), True, False),
    "interrupted_early": Case([130, 130], ("interrupted\n",), ends_early(interrupted_early), True, False),
    "peer_lost": Case(
        [1, 3], ("error on rank 0: another rank has ended, and its",), ends_early(peer_lost), True, False
    ),
    "orphaned": Case([0, 0], ("step 2 is saved",), ends_early(orphaned), True, False),
}
DIFFER = "error: the ranks differ: "
CASES = {
    "nothing": Case([0, 0]),
    "output": Case([1, 1], ("error: output_dir: 'out' of {host} (rank 1) is not that of {host} (rank 0), expected a",)),
    "data_missing": Case([1, 2], ("data.train[0]: 'chats.jsonl' (in ",), Path("chats.jsonl").unlink),
    "data": Case([1, 1], (DIFFER, "data (tokens and labels): 48 samples, digest "), another_order),
    "files": Case(
        [1, 1],
        (f"{DIFFER}model.path model (files): large.bin: ", "; model.path model (files): model.safetensors: "),
        other_files,
        both=True,
    ),
    "bad_argument": Case([1, 2], ("optim.lr: -1.0, expected",), lambda: sys.argv.extend(("--optim.lr", "-1"))),
    "several": Case(
        [1, 1],
        (
            f"{DIFFER}train.steps: 1 on {{host}} (rank 0), 2 on {{host}} (rank 1); events of the script: [",
            "; environment variable DS_X: not there on {host} (rank 0), 1 on",
            "; module my_losses (my_losses.py): ",
            ". Start every rank with",
        ),
        several,
        both=True,
    ),
    "script": Case([1, 1], (f"{DIFFER}script: train.py on {{host}} (rank 0), evaluate.py on",), another_script),
    **EARLY,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Run the jobs; return their directory."""
    base = tmp_path_factory.mktemp("nodes")
    result = run_python(f"from pathlib import Path; from {__name__} import run_jobs; run_jobs(Path({str(base)!r}))")
    assert result.returncode == 0, result.stderr[-8000:]
    return base


@pytest.fixture(scope="module")
def found(base) -> dict[str, dict[str, Any]]:
    return json.loads((base / "jobs.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_ranks_end_with_their_exit_codes_and_the_reason_in_one_line(base, found, name):
    """Ranks that differ say so before weights are read. A second signal changes nothing, nor does one after the end."""
    case, result = CASES[name], found[name]
    said = result["said"]
    assert sorted(result["codes"]) == case.codes and "Traceback" not in "".join(said), said
    for one in said if case.everywhere else said[:1]:
        lines = [line for line in one.splitlines() if line.startswith("error")]
        assert all(part.format(host=os.uname().nodename) in one for part in case.said), one
        assert len(lines) == (case.codes[0] == 1), one
        assert name in ("nothing", *EARLY) or "weights:" not in one, one
    assert name in EARLY or result["left"] == []
    latest = base / name / "out" / "checkpoints" / "latest"
    saved = {"nothing": "step_00000001", "interrupted": "step_00000002", "orphaned": "step_00000002"}.get(name, "")
    assert (latest.read_text() if latest.exists() else "") == saved


# ---------------------------------------------------------------------------------------------------------------------
# Two hosts in network namespaces, and torchrun
# ---------------------------------------------------------------------------------------------------------------------

MINUTES = "3"  # that a rank waits for another, in the start too, where another may be that much slower


class Cluster:
    """Two hosts that share a disk, and one job of torchrun at a time on them, of one agent on each."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.port = 29500
        self.model, self.chats = (
            tiny_checkpoint(directory / "model", "qwen3_moe"),
            write_chats(directory / "chats.jsonl"),
        )

    def start(self, name: str, *options: str, ranks: int = 1, **environment: str) -> Path:
        """``launch/train.py`` on both, with as many ``ranks`` on each; the output directory."""
        train = {"steps": 6, "checkpoint_every": 2, "gradient_accumulation_steps": 1}
        sections = {"train": train, "loss": NO_TEACHER, "export": {"enabled": True}}
        recipe = write_recipe(self.directory, name, self.model, self.chats, **sections)
        self.port += 1  # a port that was in use stays taken for a while
        self.logs = [self.directory / f"{name}.{number}.log" for number in range(2)]
        self.processes = []
        for number, host in enumerate(self.hosts):
            place = f"--nnodes 2 --nproc_per_node {ranks} --node_rank {number}"
            place += f" --master_addr {self.hosts[0].address} --master_port {self.port}"
            torchrun = [str(Path(sys.executable).parent / "torchrun"), *place.split()]
            torchrun += ["launch/train.py", "--config", str(recipe), *options]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
            # gloo takes the interface that the host's name resolves to, and these names resolve to nothing.
            env |= {"GLOO_SOCKET_IFNAME": host.interface, **environment}
            self.processes.append(host.start(torchrun, self.logs[number], cwd=ROOT, env=env))
        return self.directory / name

    def end(self) -> tuple[list[int], list[str]]:
        """Exit codes of the agents, which end, and what they printed."""
        codes = [process.wait(PATIENCE) for process in self.processes]
        return codes, [log.read_text() for log in self.logs]

    def wait_for_checkpoint(self, output: Path) -> None:
        latest = output / "checkpoints" / "latest"

        def is_there() -> bool:
            assert self.processes[0].poll() is None, self.logs[0].read_text()[-6000:]
            return latest.is_file() and "step_0000000" in latest.read_text()

        until(is_there, lambda: self.logs[0].read_text()[-6000:])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    try:
        with network(2) as hosts:
            yield Cluster(hosts, tmp_path)
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.mark.full
@pytest.mark.parametrize("dies", [1, 0])
def test_a_host_dies_and_the_run_goes_on_to_the_same_export(cluster, dies):
    straight = cluster.start("straight")
    codes, said = cluster.end()
    assert codes == [0, 0], said

    killed = cluster.start("killed")
    cluster.wait_for_checkpoint(killed)
    cluster.hosts[dies].kill()
    # Its connections are closed, so that the other rank's collective fails at once; torchrun gives it 30 s to end.
    codes, said = cluster.end()
    assert all(codes) and f"error on rank {1 - dies}" in said[1 - dies], said
    assert not (killed / "export").exists()
    saved = (killed / "checkpoints" / "latest").read_text()

    cluster.start("killed", "--train.resume", "true")
    codes, said = cluster.end()
    assert codes == [0, 0] and f"resumed: {killed}/checkpoints/{saved}" in said[0], said
    exports = [
        {file.name: file.read_bytes() for file in (run / "export").glob("*.[sj]*")} for run in (straight, killed)
    ]
    assert exports[0] == exports[1] and "model.safetensors" in exports[0]


@pytest.mark.full
def test_a_host_that_falls_silent_is_noticed_when_a_collective_times_out(cluster):
    run = cluster.start("silent", "--train.steps", "100000", DEEPSPEED_TIMEOUT=MINUTES)
    cluster.wait_for_checkpoint(run)
    cluster.hosts[1].unplug()
    codes, said = cluster.end()
    assert all(codes) and f"{int(MINUTES) * 60_000}ms" in said[0], said
    assert "error on rank 0" in said[0] and "error on rank 1" in said[1]


@pytest.mark.full
def test_the_strategy_for_slow_networks_trains_as_zero3_does_and_sends_less(cluster):
    """Two ranks on each host, so that hpZ's second copy of the weights is shared by the two of a host."""
    losses, exports, sent = [], [], []
    for name in ("zero3", "zeropp"):
        before = cluster.hosts[0].sent()
        strategy = write_ds_config(cluster.directory, f"{name}_ds", name)
        run = cluster.start(
            name, "--deepspeed", strategy, "--train.steps", "3", "--train.checkpoint_every", "0", ranks=2
        )
        codes, said = cluster.end()
        assert codes == [0, 0], said
        sent.append(cluster.hosts[0].sent() - before)
        losses.append(curves(run)["loss/total"])
        exports.append({file.name: file.read_bytes() for file in (run / "export").glob("*.[sj]*")})
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert exports[0] == exports[1] and "model.safetensors" in exports[0]
    assert sent[1] < sent[0], "backward gathers within each host"
