"""Does each rank reading its own bytes pay? Time and memory of both ways of loading a checkpoint of more than 500 MB.

    python benchmarks/load.py [--ranks 2] [--repeats 5] [--write benchmarks/results/load.md]

Makes a Qwen3 checkpoint (bf16, the 0.6B one's geometry with fewer layers and tokens) in a temporary directory and
starts ranks on it with the deepspeed launcher, ZeRO-3:

- time: build and load, both methods in turn, several times; the slowest rank counts, medians are reported. The files
  have just been written and are in the page cache, so that storage is left out of the comparison.
- memory: each method in fresh processes; the growth of the peak RSS over that before the build (VmHWM, reset through
  /proc/self/clear_refs), beside the arithmetic: the partitions, one parameter, one chunk of a read. glibc is told to
  give every freed block of 1 MiB or more back at once (MALLOC_MMAP_THRESHOLD_). By default it keeps blocks of up to
  32 MiB, up to some 200 MiB of them here, which the RSS would count as used.
"""

import argparse
import gc
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from launch.launcher import find_launcher
from model.build import build_model
from model.checkpoint.load import load_weights
from model.checkpoint.safetensors import CHUNK_BYTES
from model.ranks import barrier, gather_objects, is_main
from model.zero import full_numel, init_process_group, local_range

METHODS = ("direct", "rank0")
MIB = 2**20
BAR = 5.0  # how many times faster than rank0 direct must be
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def make_checkpoint(directory: Path) -> int:
    """Write the checkpoint; its number of bytes. Values do not matter, but are not all the same."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with transformers.initialization.no_init_weights():
        model = Qwen3ForCausalLM(config).bfloat16()
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1).copy_(torch.arange(parameter.numel()) % 251)
    model.save_pretrained(directory, max_shard_size="200MB")
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def status(field: str) -> int:
    """Bytes that Linux reports for this process: VmRSS (now) or VmHWM (at most)."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def build_and_load(path: Path, method: str) -> tuple[float, float, torch.nn.Module]:
    """Seconds to build, seconds to load (of the slowest rank, both), and the model."""
    barrier()
    begin = time.perf_counter()
    model = build_model(path, DS_CONFIG, dtype=torch.bfloat16, device=torch.device("cpu"))
    barrier()
    middle = time.perf_counter()
    load_weights(model, path, method=method, progress=False)  # type: ignore[arg-type]
    seconds = middle - begin, time.perf_counter() - middle
    build, load = (max(values) for values in zip(*gather_objects(seconds), strict=True))
    return build, load, model


def measure_memory(path: Path, method: str) -> dict[str, Any]:
    """Growth of this rank's peak RSS over build and load, with the arithmetic for it."""
    build_and_load(path / "small", method)  # imports modules and opens connections
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmHWM")
    _, _, model = build_and_load(path, method)
    parameters = list(model.parameters())
    partitions = sum(2 * (stop - start) for start, stop in map(local_range, parameters))
    return {
        "growth": status("VmHWM") - before,
        "partitions": partitions,
        "parameter": max(2 * full_numel(parameter) for parameter in parameters),
    }


def work(path: Path, what: str, repeats: int) -> None:
    """On every rank: measure, and let rank 0 write the result beside the checkpoint."""
    init_process_group()
    deepspeed.utils.logger.setLevel("WARNING")
    transformers.logging.disable_progress_bar()
    if what in METHODS:
        result: Any = gather_objects(measure_memory(path, what))
    else:
        result = {method: [] for method in METHODS} | {"build": []}
        for repeat in range(repeats + 1):
            for method in METHODS:
                build, load, model = build_and_load(path, method)
                del model
                gc.collect()
                if repeat:  # the first round warms up
                    result[method].append(load)
                    result["build"].append(build)
    if is_main():
        (path / f"{what}.json").write_text(json.dumps(result))


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(path: Path, what: str, ranks: int, repeats: int) -> Any:
    """Run :func:`work` on ``ranks`` ranks and return what rank 0 wrote."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if what in METHODS:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
    arguments = ["--worker", str(path), "--what", what, "--repeats", str(repeats)]
    command = [find_launcher(), "--num_gpus", str(ranks), "--master_port", str(free_port()), __file__, *arguments]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads((path / f"{what}.json").read_text())


def report(
    size: int, ranks: int, load: float, times: dict[str, list[float]], memory: dict[str, list[dict[str, int]]]
) -> str:
    """The tables; ``load`` is the machine's load average before the start."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["rank0"] / medians["direct"]
    lines = [
        "# Loading: each rank its own bytes, against rank 0 all of them",
        "",
        f"{size / 1e6:.0f} MB checkpoint in shards, ZeRO-3 on {ranks} ranks, {len(times['direct'])} repeats, "
        f"{date.today()}, {os.cpu_count()}-core {platform.machine()} CPU (gloo), Python {platform.python_version()}, "
        f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, transformers {transformers.__version__}, "
        f"load average {load:.1f} before the start",
        "",
        "| seconds | median | least | most |",
        "| --- | --- | --- | --- |",
    ]
    for name, title in (
        ("build", "build the empty model"),
        ("direct", "load, direct"),
        ("rank0", "load, rank 0 reads"),
    ):
        values = times[name]
        lines.append(f"| {title} | {medians[name]:.2f} | {min(values):.2f} | {max(values):.2f} |")
    lines += [
        "",
        f"Direct is {ratio:.1f} times as fast as rank 0 reading (bar: {BAR:.0f}).",
        "",
        "| MiB, most of the ranks | peak RSS growth, build and load | partitions | + one parameter | + one chunk |",
        "| --- | --- | --- | --- | --- |",
    ]
    for method, ranks_memory in memory.items():
        worst = max(ranks_memory, key=lambda entry: entry["growth"])
        total, row = 0, [f"{worst['growth'] / MIB:.0f}"]
        for part in (worst["partitions"], worst["parameter"], CHUNK_BYTES):
            total += part
            row.append(f"{total / MIB:.0f}")
        lines.append(f"| {method} | {' | '.join(row)} |")
    lines += [
        "",
        "The limit is the partitions and one parameter, and one chunk where bytes pass through a buffer (another dtype",
        "on disk, or a GPU). In this model the largest parameter comes first, while there are few partitions yet.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the launcher passes it
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.what, arguments.repeats)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        size = make_checkpoint(path)
        small = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        Qwen3ForCausalLM(small).bfloat16().save_pretrained(path / "small")
        memory = {method: launch(path, method, arguments.ranks, 1) for method in METHODS}
        times = launch(path, "times", arguments.ranks, arguments.repeats)
    text = report(size, arguments.ranks, load, times, memory)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
