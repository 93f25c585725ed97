"""What each part of the recipe of two and three bits costs: of a step, and once at the start.

    python benchmarks/low_bit_costs.py --model DIR --train FILE [--rounds 8]

Real training runs in one process, ZeRO stage 0, that take turns step by step: the same samples, dtype and rates, and
one option more or another one each. A step is all of it: batches, forward, backward, the update. The start is from the
recipe to the first step, and is measured once. Bytes are what a run holds between two steps: its weights, scales,
states of the optimizer, and the teacher.

Writes ``benchmarks/results/low_bit_costs.md``.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.markdown import table
from benchmarks.recovery_runs import SETTINGS
from engine.cluster.job import RunLock
from engine.config.reading import parse_recipe
from engine.losses.teacher import ModelTeacher
from engine.schedule import Schedule, add_recipe_events
from engine.start import start_run
from engine.state import LoopState
from engine.step import train_step

CPU = torch.device("cpu")
OWN_LOGITS = {"loss.lm_weight": 0.0, "loss.kd_weight": 1.0, "loss.kd": "kl"}


def ways(model: Path, scheme: str) -> dict[str, dict[str, Any]]:
    """The runs by name: what their recipes have beside the common settings. A teacher is the model itself."""
    quantized: dict[str, Any] = {"quant.scheme": scheme}
    taught = {**quantized, **OWN_LOGITS, "loss.teacher": str(model)}
    recipe = {**taught, "quant.signed_scales": True, "quant.init": "gptq"}
    return {
        "labels, not quantized": {"quant.fake_quant_start": -1},
        "labels": quantized,
        "labels, scales fixed": {**quantized, "learnable.weight_scale": False},
        "labels, scales signed": {**quantized, "quant.signed_scales": True},
        "labels, scales by absmax of each step": {
            **quantized,
            "learnable.weight_scale": False,
            "quant.scales_follow_weights": True,
            "quant.weight_range": "absmax",
        },
        "labels and its own logits": {**taught, "loss.lm_weight": 1.0},
        "its own logits": taught,
        "its own logits, from GPTQ's codes, signed: the recipe": recipe,
        "the recipe, scales fixed": {**recipe, "learnable.weight_scale": False},
        "the recipe, from the codes of blocks": {**recipe, "quant.init": "blockwise"},
        "the recipe, nvfp4_w4a4": {**recipe, "quant.scheme": "nvfp4_w4a4", "quant.signed_scales": False},
    }


def started(settings: Mapping[str, Any], directory: Path, stack: ExitStack) -> LoopState:
    """A run before its first step."""
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    recipe = parse_recipe([f"--{key}={word}" for key, word in (words | {"output_dir": str(directory)}).items()])
    schedule: Schedule[LoopState] = Schedule()
    add_recipe_events(schedule, recipe)
    return start_run(recipe, schedule, [], stack.enter_context(RunLock()))


def step(state: LoopState) -> None:
    """One step, as the loop makes it."""
    state.owners["schedule"].run_before(state.step, state)  # type: ignore[attr-defined]
    state.last = train_step(state)
    state.step += 1


def held(state: LoopState) -> int:
    """Bytes of all tensors that the run holds, each storage once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in _tensors(state)}
    return sum(storages.values())


def _tensors(state: LoopState) -> Iterator[Tensor]:
    session = state.session
    teacher = session.teacher
    of_teacher = [teacher.module, teacher.head] if isinstance(teacher, ModelTeacher) else []
    for module in (session.model, *of_teacher):
        yield from module.parameters()
        yield from module.buffers()
    optimizer = session.engine.optimizer
    for one in (optimizer, getattr(optimizer, "optimizer", None)):
        for values in getattr(one, "state", {}).values():
            yield from (value for value in values.values() if isinstance(value, Tensor))
    yield from (one for group in optimizer.param_groups for one in group["params"])


def costs(measured: Mapping[str, timing.Timing], starts: Mapping[str, float], held: Mapping[str, int]) -> str:
    """The table: a line for each run, of the first one's."""
    first, lines = next(iter(measured)), []
    for name, one in measured.items():
        low, high = one.spread(measured[first])
        ratio = f"{one.ratio(measured[first]):.2f} ({low:.2f} to {high:.2f})"
        of_bytes = f"{held[name] / held[first]:.2f}"
        lines.append([name, f"{1000 * one.median:.0f}", ratio, f"{starts[name]:.1f}", of_bytes])
    return table(("what it learns from", "ms", "ratio", "start", "bytes"), lines) + "\n"


def main() -> None:
    """Start all runs, let them take turns, write."""
    parser = timing.arguments_of(__doc__, rounds=8)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that all start from")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--scheme", default="w2a16_g32")
    parser.add_argument("--rows", type=int, default=8, help="of each step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--samples", type=int, default=128, help="that GPTQ and the tuning of decoder layers look at")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        raise SystemExit("the clock that this benchmark reads is the process's on a CPU: run it without --device")
    torch.set_num_threads(arguments.threads)
    rows, length = (2, 32) if arguments.quick else (arguments.rows, arguments.length)
    began = os.getloadavg()
    common = {
        **SETTINGS,
        "model.path": str(arguments.model),
        "data.train": [str(arguments.train)],
        "data.max_length": length,
        "data.micro_batch_size": rows,
        "train.steps": arguments.rounds + 3,
        "optim.lr": 1e-5,
        "optim.warmup_steps": 1,
        "quant.calibration_batches": 1 if arguments.quick else max(1, arguments.samples // rows),
    }
    starts: dict[str, float] = {}
    states: dict[str, LoopState] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        for name, special in ways(arguments.model, arguments.scheme).items():
            directory = Path(temporary) / str(len(states))

            def start(name: str = name, settings: dict[str, Any] = common | special, at: Path = directory) -> None:
                states[name] = started(settings, at, stack)

            starts[name] = timing.seconds_of(start, CPU)
        turns = {
            name: lambda state=state: timing.seconds_of(lambda: step(state), CPU) for name, state in states.items()
        }
        measured = timing.interleave(turns, arguments.rounds, warmup=2)
        bytes_held = {name: held(state) for name, state in states.items()}
    head = f"""# What the recipe of two and three bits costs

{arguments.model.name}, {arguments.scheme}, steps of {rows} x {length} tokens, {SETTINGS["deepspeed"]}, bfloat16.
{timing.machine(CPU, began, "transformers", "deepspeed")}
`{timing.command()}`

ms of a step: medians of {arguments.rounds} rounds in which the runs take turns; ratio: of the first line's, with the
quartiles of single rounds; start: seconds from the recipe to the first step, once; bytes: held between two steps, of
the first line's. {timing.clock_text(CPU)}

"""
    timing.write(arguments.results, "low_bit_costs", CPU, head + costs(measured, starts, bytes_held))


if __name__ == "__main__":
    main()
