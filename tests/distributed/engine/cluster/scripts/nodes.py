"""Jobs of two machines of one rank each: ranks in directories of their own, to which a recipe's paths are relative.

    scripts/nodes.py DIRECTORY

Writes ``DIRECTORY/nodes.json``: exit codes and what was printed, by the name of what differs between the machines. Then
come jobs of two ranks on one machine which end early, by the name of what ends them.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  imported by the engine at first, which takes 2 s
import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from safetensors.torch import load_file, save_file

from engine.cluster import nodes
from engine.config.reading import load_recipe
from engine.loop import Loop
from engine.session.context import init_ranks
from engine.state import LoopState
from launch.exits import clean_exit
from launch.train import main as train
from tests.lib.forked import Job
from tests.lib.patience import PATIENCE
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

nodes.PATIENCE_SECONDS = 0.5


def main() -> None:
    """See above."""
    directory = Path(sys.argv[1])
    template = directory / "template"
    Job(1, lambda: write_machine(template), directory / "setup.log").finish()
    found = {}
    for case in (nothing, output, data_missing, data, recipe, weights):
        name = case.__name__
        machines = [directory / name / f"machine{number}" for number in range(2)]
        for machine in machines:
            shutil.copytree(template, machine)
        if case is not output:
            (directory / name / "out").mkdir()
            for machine in machines:
                (machine / "out").symlink_to(directory / name / "out")
        case(machines[1])
        job = Job(2, lambda machines=machines: rank(machines), directory / f"{name}.log")
        codes = job.wait(PATIENCE)
        if codes is None:
            job.kill()
        left = sorted(str(path.relative_to(machine)) for machine in machines for path in (machine / "out").glob(".*"))
        found[name] = {"codes": codes, "said": job.log.read_text(), "left": left}
    for end in (interrupted, interrupted_early, peer_lost):
        machine = directory / end.__name__
        shutil.copytree(template, machine)
        job = Job(2, lambda machine=machine, end=end: end_early(machine, end), directory / f"{end.__name__}.log")
        codes = job.wait(PATIENCE)
        if codes is None:
            job.kill()
        found[end.__name__] = {"codes": codes, "said": job.log.read_text()}
    (directory / "nodes.json").write_text(json.dumps(found))


def write_machine(machine: Path) -> None:
    """What each has: model, data and recipe."""
    machine.mkdir()
    os.chdir(machine)
    model = tiny_checkpoint(Path("model"), "qwen3")
    write_chats(Path("chats.jsonl"))
    write_recipe(
        Path(),
        "out",
        model,
        Path("chats.jsonl"),
        stage=3,
        dtype="bfloat16",
        train={"steps": 1, "checkpoint_every": 1, "gradient_accumulation_steps": 1},
        optim={"warmup_steps": 0},
        quant={"fake_quant_start": -1},
        loss={"kd_weight": 0.0, "teacher": None},
    )


def rank(machines: list[Path]) -> None:
    """What torchrun starts on each machine."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.chdir(machines[int(os.environ["RANK"])])
    sys.argv = ["train.py", "--config", "out.yaml"]
    train()


def end_early(machine: Path, end: Callable[[Loop], None]) -> None:
    """A rank of a run of three steps; behind its end comes a signal, which is too late to change anything."""
    os.chdir(machine)
    recipe = load_recipe("out.yaml")
    loop = Loop(replace(recipe, train=replace(recipe.train, steps=3)))
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

    @loop.at(1)
    def die(state: LoopState) -> None:
        if os.environ["RANK"] == "1":
            os._exit(3)


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
    file = machine / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 0.5)
    save_file(tensors, file, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
