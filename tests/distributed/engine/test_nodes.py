"""Several machines: what may not differ between them, what ends a job of two ranks, and a machine that dies."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.cluster import nodes
from engine.config.reading import load_recipe
from engine.loop import Loop
from engine.session.context import init_ranks
from engine.state import LoopState
from launch.evaluate import main as evaluate
from launch.exits import clean_exit
from launch.train import main as train
from tests.lib.checkpoints import edit_json, edit_tensors
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
    """Jobs on machines that differ, then jobs on one machine that end early; of each the exit codes, what was printed
    and the files that it left."""
    nodes.PATIENCE_SECONDS = 0.5
    template = directory / "template"
    Job(1, lambda: write_machine(template), directory / "setup.log").finish()
    found: dict[str, dict[str, Any]] = {}
    for case in (
        nothing,
        output,
        data_missing,
        data,
        recipe,
        weights,
        weights_in_the_middle,
        tokenizer,
        interrupted,
        interrupted_early,
        peer_lost,
        orphaned,
    ):
        name, ends_early = case.__name__, case in (interrupted, interrupted_early, peer_lost, orphaned)
        machines = [directory / name / f"machine{number}" for number in range(1 if ends_early else 2)]
        for machine in machines:
            shutil.copytree(template, machine)
        if case is not output:
            (directory / name / "out").mkdir()
            for machine in machines:
                (machine / "out").symlink_to(directory / name / "out")
        if ends_early:
            job = Job(2, lambda machine=machines[0], case=case: end_early(machine, case), directory / f"{name}.log")
        else:
            case(machines[1])
            job = Job(2, lambda machines=machines: rank(machines), directory / f"{name}.log")
        codes = job.wait(PATIENCE)
        if codes is None:
            job.kill()
        left = sorted(str(path.relative_to(machine)) for machine in machines for path in (machine / "out").glob(".*"))
        found[name] = {"codes": codes, "said": job.log.read_text(), "left": left}
    for name, start in BY_HAND.items():
        machine = directory / name
        shutil.copytree(template, machine)
        job = Job(2, lambda machine=machine, start=start: by_hand(machine, start), directory / f"{name}.log")
        codes = job.wait(PATIENCE)
        if codes is None:
            job.kill()
        found[name] = {
            "codes": codes,
            "said": "".join((machine / f"{rank}.log").read_text() for rank in range(2)),
            "each": [(machine / f"{rank}.log").read_text() for rank in range(2)],
            "left": [str(path) for path in (machine / "out").rglob("*") if path.is_file()],
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
        stage=3,
        dtype="bfloat16",
        train={"steps": 1, "checkpoint_every": 1, "gradient_accumulation_steps": 1},
        optim={"warmup_steps": 0},
        quant={"fake_quant_start": -1},
        loss=NO_TEACHER,
    )


def rank(machines: list[Path]) -> None:
    """Run launch/train.py as torchrun starts it on each machine."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.chdir(machines[int(os.environ["RANK"])])
    sys.argv = ["train.py", "--config", "out.yaml"]
    train()


def nothing(machine: Path) -> None:
    """The machines agree, and share the output directory."""


def output(machine: Path) -> None:
    """The output directory is one of each machine's own."""


def data_missing(machine: Path) -> None:
    (machine / "chats.jsonl").unlink()


def data(machine: Path) -> None:
    lines = (machine / "chats.jsonl").read_text().splitlines()
    (machine / "chats.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")


def recipe(machine: Path) -> None:
    text = (machine / "out.yaml").read_text()
    assert "lr: 0.001\n" in text
    (machine / "out.yaml").write_text(text.replace("lr: 0.001\n", "lr: 0.002\n"))


def weights(machine: Path) -> None:
    edit_tensors(machine / "model", "model.norm.weight", lambda tensors: tensors["model.norm.weight"].fill_(0.5))


def weights_in_the_middle(machine: Path) -> None:
    """One element of a tensor that has others on both sides, and in its file too."""
    name = "model.layers.1.mlp.up_proj.weight"

    def one(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][40, 20] += 1

    edit_tensors(machine / "model", name, one)


def tokenizer(machine: Path) -> None:
    edit_json(machine / "model" / "tokenizer_config.json", model_max_length=100)


def elsewhere(machine: Path) -> None:
    """Go to another directory of this machine, in which the same paths are another model."""
    other = machine / "elsewhere"
    other.mkdir()
    for name in ("out.yaml", "chats.jsonl", "zero3.json"):
        shutil.copy(machine / name, other)
    tiny_checkpoint(other / "model", seed=1)
    os.chdir(other)


def with_a_module(machine: Path) -> None:
    """Import a module of the user's, of which each rank has another version."""
    (machine / os.environ["RANK"]).mkdir()
    (machine / os.environ["RANK"] / "my_losses.py").write_text(f"WEIGHT = {os.environ['RANK']}\n")
    sys.path.insert(0, str(machine / os.environ["RANK"]))
    __import__("my_losses")


def with_an_event(machine: Path) -> None:
    """Give the loop of rank 1 an event that rank 0 lacks."""
    loop = Loop(load_recipe("out.yaml"))
    if os.environ["RANK"] == "1":
        loop.at(0)(end_early)
    with clean_exit():
        loop.run()


def other_script(machine: Path) -> None:
    sys.argv = ["evaluate.py", "--model", "model", "--text", "chats.jsonl"]
    evaluate()


@dataclass(frozen=True)
class Start:
    """A start of two ranks by hand on one machine.

    Attributes:
        said: of the one line that each rank prints.
        words: more words of rank 1's command line.
        before: runs on rank 1 before its script; on both ranks if ``both``.
        code: exit code of rank 1.
    """

    said: str
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[Path], None] | None = None
    both: bool = False
    code: int = 1


BY_HAND = {
    "arguments": Start(
        "train.steps: 1 on {host} (rank 0), 3 on {host} (rank 1); train.seed: 0 on {host} (rank 0), 7 on {host} "
        '(rank 1); quant.scheme: "fp8_static" on {host} (rank 0), "fp8_dynamic" on {host} (rank 1). Start every rank',
        ("--train.steps", "3", "--train.seed", "7", "--quant.scheme", "fp8_dynamic"),
    ),
    "other_model": Start('model.path: "model" on {host} (rank 0), "chats" on', ("--model.path", "chats")),
    "bad_argument": Start("optim.lr: -1.0, expected", ("--optim.lr", "-1"), code=2),
    "no_model": Start("model.path: 'none' (in ", ("--model.path", "none"), code=2),
    "directory": Start("model.path model (files): model.safetensors: ", before=elsewhere),
    "variable": Start("environment variable DS_X: not there on {host} (rank 0), 1 on", environment={"DS_X": "1"}),
    "module": Start("module my_losses (my_losses.py): ", before=with_a_module, both=True),
    "event": Start("events of the script: [", before=with_an_event, both=True),
    "script": Start("script: train.py on {host} (rank 0), evaluate.py on {host} (rank 1)", before=other_script),
}


def by_hand(machine: Path, start: Start) -> None:
    """Start a rank as in a terminal of its own, in which it prints."""
    number = os.environ["RANK"]
    os.chdir(machine)
    with open(f"{number}.log", "w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    if machine.name == "other_model":
        (machine / "chats").mkdir(exist_ok=True)
        if number == "1":
            tiny_checkpoint(machine / "chats", seed=1)
    sys.argv = ["train.py", "--config", "out.yaml"]
    if number == "1":
        sys.argv += start.words
        os.environ.update(start.environment)
    if start.before is not None and (start.both or number == "1"):
        start.before(machine)
    train()


def end_early(machine: Path, end: Callable[[Loop], None]) -> None:
    """A rank of a run of three steps; behind its end comes a signal, which is too late to change anything."""
    os.chdir(machine)
    recipe = load_recipe("out.yaml")
    loop = Loop(replace(recipe, train=replace(recipe.train, steps=3, checkpoint_every=0)))
    with clean_exit():
        end(loop)
        loop.run()
    os.kill(os.getpid(), signal.SIGTERM)


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


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The directory of the jobs."""
    base = tmp_path_factory.mktemp("nodes")
    program = f"from pathlib import Path; from {__name__} import run_jobs; run_jobs(Path({str(base)!r}))"
    result = run_python(program)
    assert result.returncode == 0, result.stderr[-8000:]
    return base


@pytest.fixture(scope="module")
def found(base) -> dict[str, dict[str, Any]]:
    return json.loads((base / "jobs.json").read_text())


@pytest.mark.parametrize(
    ("case", "codes", "said"),
    [
        ("nothing", [0, 0], ""),
        ("output", [1, 1], "error: output_dir: 'out' of {host} (rank 1) is not that of {host} (rank 0), expected a"),
        ("data_missing", [1, 2], "error: rank 1: on {host}: data.train[0]: 'chats.jsonl' (in "),
        ("data", [1, 1], "data (tokens and labels): 48 samples, digest "),
        ("recipe", [1, 1], "optim.lr: 0.001 on {host} (rank 0), 0.002 on {host} (rank 1)"),
        ("weights", [1, 1], "model.path model (files): model.safetensors: "),
        ("weights_in_the_middle", [1, 1], "model.path model (files): model.safetensors: "),
        ("tokenizer", [1, 1], "model.path model (files): tokenizer_config.json: "),
    ],
)
def test_machines_that_differ_end_with_the_difference_on_every_rank(found, case, codes, said):
    result = found[case]
    assert sorted(result["codes"]) == codes, result["said"]
    assert said.format(host=os.uname().nodename) in result["said"]
    assert "Traceback" not in result["said"]
    assert case == "nothing" or "weights:" not in result["said"], "before weights are read"
    assert result["left"] == []


@pytest.mark.parametrize("case", BY_HAND)
def test_ranks_of_one_machine_that_are_not_started_alike_end_with_the_difference_in_each_terminal(found, case):
    result, start = found[case], BY_HAND[case]
    assert sorted(result["codes"]) == [1, start.code], result["said"]
    for said in result["each"]:
        assert start.said.format(host=os.uname().nodename) in said and "Traceback" not in said, result["said"]
        assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1, said
        assert "weights:" not in said, "before weights are read"
    assert result["left"] == []


@pytest.mark.parametrize(
    ("case", "codes", "said"),
    [
        ("interrupted", [0, 0], "asked to stop: step 2 is saved"),
        ("interrupted_early", [130, 130], "interrupted\n"),
        ("peer_lost", [1, 3], "error on rank 0: another rank has ended, and its connection is closed"),
        ("orphaned", [0, 0], "step 2 is saved"),
    ],
)
def test_a_job_that_ends_early_says_in_one_line_why(base, found, case, codes, said):
    """A second signal changes nothing, nor does one behind the end."""
    end = found[case]
    assert sorted(end["codes"]) == codes, end["said"]
    assert end["said"].count(said) == 1 and "Traceback" not in end["said"], end["said"]
    latest = base / case / "out" / "checkpoints" / "latest"
    assert latest.exists() == ("is saved" in said) and (not latest.exists() or latest.read_text() == "step_00000002")


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
        recipe = write_recipe(self.directory, name, self.model, self.chats, stage=3, dtype="bfloat16", **sections)
        self.port += 1  # a port that was in use stays taken for a while
        self.logs = [self.directory / f"{name}.{number}.log" for number in range(2)]
        self.processes = []
        for number, host in enumerate(self.hosts):
            torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nnodes", "2"]
            torchrun += [
                "--nproc_per_node",
                str(ranks),
                "--node_rank",
                str(number),
                "--master_addr",
                self.hosts[0].address,
            ]
            torchrun += ["--master_port", str(self.port), "launch/train.py", "--config", str(recipe), *options]
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
        events = EventAccumulator(str(run / "tensorboard"))
        events.Reload()
        losses.append([point.value for point in events.Scalars("loss/total")])
        exports.append({file.name: file.read_bytes() for file in (run / "export").glob("*.[sj]*")})
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert exports[0] == exports[1] and "model.safetensors" in exports[0]
    assert sent[1] < sent[0], "backward gathers within each host"
