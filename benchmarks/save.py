"""What an export costs: seconds, and how far the memory of each rank grows, against the arithmetic.

    python benchmarks/save.py [--repeats 3] > benchmarks/results/save.md

Makes a Qwen3 checkpoint of 569 MB (random weights), shards it over two ranks under ZeRO-3, and exports it as bf16 and
as fp8. Growth is the high-water mark of the resident set during the export over the resident set before it. The
arithmetic says: rank 0 one shard and the largest module, rank 1 the largest module; the chunks in which weights are
quantised come on top, some 20 MB.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SHARD = 100 * 10**6


def make_checkpoint(directory: Path) -> None:
    """284M parameters: 16 layers of Qwen3-0.6B's shape, a vocabulary of 32,000."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
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
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.bfloat16().to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.save_pretrained(directory)


def status(field: str) -> int:
    """Bytes of one field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(checkpoint: str, out: Path, results: Path, repeats: int) -> None:
    """On each rank: build, load, and export several times; rank 0 writes the results of all."""
    from engine.setup import init_ranks
    from model.build import build_model
    from model.load import load_weights
    from model.ranks import gather_objects, is_main
    from model.save import export_model
    from model.scales import measure_weight_scales, write_scales
    from model.zero import partition_new_parameters
    from quant import SCHEMES, prepare

    device = init_ranks()
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = build_model(checkpoint, config, dtype=torch.bfloat16, device=device)
    load_weights(model, checkpoint, progress=False)
    quantization = prepare(model, SCHEMES["fp8_static"], learn_weight_scale=True, learn_input_scale=False)
    partition_new_parameters(model, config)
    write_scales(quantization.weight_groups, measure_weight_scales(quantization))
    write_scales(quantization.input_groups, {group.owner: torch.ones(1) for group in quantization.input_groups})
    measured: list[dict] = []
    for repeat in range(repeats):
        for name, chosen in (("bf16", None), ("fp8_static", quantization)):
            before = status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
            directory = out / f"{name}{repeat}"
            report = export_model(model, chosen, checkpoint, directory, max_shard_size=SHARD)
            growth = status("VmHWM") - before
            mine = {"growth": growth, "counted": report.peak_bytes, "seconds": report.seconds}
            if is_main():
                shutil.rmtree(directory)
            measured.append(
                {"name": name, "bytes": report.bytes, "files": len(report.files), "ranks": gather_objects(mine)}
            )
    if is_main():
        results.write_text(json.dumps(measured))


def table(measured: list[dict]) -> str:
    """Medians, one row per format."""
    rows = [
        "| export | written | files | time | rank 0 grows by | a shard and a module | rank 1 grows by | a module |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(entry["name"] for entry in measured):
        runs = [entry for entry in measured if entry["name"] == name]

        def middle(rank: int, key: str, runs=runs) -> float:
            return statistics.median(run["ranks"][rank][key] for run in runs)

        megabytes = [f"{middle(rank, key) / 1e6:.0f} MB" for rank in (0, 1) for key in ("growth", "counted")]
        written = f"{runs[0]['bytes'] / 1e6:.0f} MB | {runs[0]['files']}"
        rows.append(f"| {name} | {written} | {middle(0, 'seconds'):.2f} s | {' | '.join(megabytes)} |")
    return "\n".join(rows)


def write_floor(directory: Path, size: int) -> float:
    """Seconds to write and fsync ``size`` bytes in files of a shard each, with nothing else: what the disk allows."""
    import os
    import time

    block = os.urandom(SHARD)
    begin = time.perf_counter()
    for start in range(0, size, SHARD):
        with (directory / f"floor{start}").open("wb") as file:
            file.write(block[: size - start])
            file.flush()
            os.fsync(file.fileno())
    return time.perf_counter() - begin


def main() -> None:
    """Launched by a user: make the checkpoint, run the ranks, print Markdown. Launched by deepspeed: measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        checkpoint, out, results = arguments.measure
        measure(checkpoint, Path(out), Path(results), arguments.repeats)
        return

    import deepspeed
    import safetensors

    from tests.distributed.launcher import run_ranks

    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        make_checkpoint(base / "checkpoint")
        floor = statistics.median(write_floor(base, 569 * 10**6) for _ in range(3))
        paths = [str(base / "checkpoint"), str(base / "out"), str(base / "results.json")]
        run_ranks(Path(__file__), "--repeats", str(arguments.repeats), "--measure", *paths, timeout=600)
        measured = json.loads((base / "results.json").read_text())
    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=True).stdout.strip()
    print("# Export of a 569 MB checkpoint from ZeRO-3\n")
    print(
        f"{date.today()}, {platform.machine()} with {cores} cores, no GPU; torch {torch.__version__}, deepspeed "
        f"{deepspeed.__version__}, safetensors {safetensors.__version__}. Two ranks (gloo), one thread each, shards of "
        f"{SHARD / 1e6:.0f} MB, medians of {arguments.repeats}. `python benchmarks/save.py`\n"
    )
    print(table(measured))
    print(
        "\nGrowth is measured (high-water mark of the resident set over the resident set before), what it is compared with is "
        "counted while exporting: bytes of the tensors collected and gathered. The chunks in which weights are quantised "
        f"come on top. Writing and syncing 569 MB in such files, and nothing else, takes {floor:.2f} s on this disk."
    )


if __name__ == "__main__":
    main()
