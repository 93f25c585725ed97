"""Time of a step of on-policy distillation that a vLLM server takes to write its answers, by rows and length.

    python benchmarks/on_policy.py VLLM_PYTHON [--rows 4 16] [--tokens 32 128] [--steps 4]

One rank trains a tiny random model on the CPU, with another one as teacher, and publishes to a server on the same
cores before the first step. The first step is not counted. Writes ``benchmarks/results/on_policy.md``.
"""

import argparse
import json
import statistics
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


def measure(base: Path, python: str, rows: int, tokens: int, steps: int) -> Figures:
    """Train some steps; medians of the seconds of a step and of its answers, and the tokens that were written."""
    name, address = f"rows{rows}_tokens{tokens}", f"127.0.0.1:{free_port()}"
    path = write_recipe(
        base,
        name,
        base / "model",
        base / "chats.jsonl",
        stage=0,
        data={
            **{"kind": "on_policy", "server": f"http://{address}", "new_tokens": tokens, "max_age": steps},
            **{"micro_batch_size": 4, "max_length": 64 + tokens, "server_seconds": 1500},
        },
        train={"steps": steps, "gradient_accumulation_steps": rows // 4, "quant_stats_every": 0, "report_to": []},
        loss={"lm_weight": 0.0, "kd_weight": 1.0, "kd": "rkl", "teacher": str(base / "teacher")},
        quant={"scheme": "w4a16_g32"},
    )
    loop, ends = Loop(load_recipe(path)), list[float]()
    with ExitStack() as stack:

        @loop.at(0)
        def publish(state: LoopState) -> None:
            state.publish(base / f"{name}_published", f"http://{address}")
            more = ("--enable-scale-out", "--max-num-seqs", "64")
            stack.enter_context(server(python, base / f"{name}_published" / "current", address, base / "log", *more))

        loop.every(1)(lambda _: ends.append(time.perf_counter()))
        loop.run()
    lines = map(json.loads, (base / name / "metrics.jsonl").read_text().splitlines())
    points = [line for line in lines if "on_policy/seconds" in line][1:]
    whole = statistics.median(end - begin for begin, end in pairwise(ends))
    return {
        "written": statistics.median(point["on_policy/new_tokens"] for point in points) * rows,
        "seconds": statistics.median(point["on_policy/seconds"] for point in points),
        "whole": whole,
    }


def main() -> None:
    """Measure all sizes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="multiples of 4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as directory, clean_exit():
        base = Path(directory)
        tiny_checkpoint(base / "model", wide=True)
        tiny_checkpoint(base / "teacher", wide=True, seed=3)
        write_chats(base / "chats.jsonl")
        for rows, tokens in ((rows, tokens) for rows in given.rows for tokens in given.tokens):
            found = measure(base, given.python, rows, tokens, given.steps)
            share = found["seconds"] / found["whole"]
            speed = found["written"] / found["seconds"]
            written = f"{found['written']:.0f}"
            lines.append([str(rows), str(tokens), written, f"{speed:.0f}", f"{found['whole']:.2f} s", f"{share:.0%}"])
            print(*lines[-1], flush=True)
        columns = ["rows", "data.new_tokens", "tokens of a step", "tokens/s", "step", "of it writing"]
        model = "Tiny random models of 2 layers (hidden size 128), w4a16_g32, one rank and vLLM on the same cores."
        title, device = "# Writing the answers of on-policy distillation, vLLM on the CPU", torch.device("cpu")
        timing.write(
            timing.RESULTS, "on_policy", device, title, timing.head(device), model, timing.table(columns, lines)
        )


if __name__ == "__main__":
    main()
