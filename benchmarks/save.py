"""What an export costs: seconds, and how far the memory of each rank grows, against the arithmetic.

    python benchmarks/save.py [--repeats 3]

Makes a Qwen3 checkpoint of 569 MB (random weights), shards it over two ranks under ZeRO-3, and exports it as bf16 and
as fp8. Growth is the high-water mark of the resident set during the export over the resident set before it. The
arithmetic says: on rank 0 what is gathered at a time, what comes meanwhile, and one Linear as packed, on the other
nothing; some 20 MB for the weights that are being quantized come on top. Writes ``benchmarks/results/save.md``.
"""

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SHARD = 100 * 10**6
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


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
    from engine.session.context import init_ranks
    from model.build import build_model
    from model.checkpoint.load import load_weights
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
            ctypes.CDLL(None).malloc_trim(0)  # what was freed, and is kept for later, must not hide growth
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
    # Left to the interpreter's exit, gloo's threads abort the process now and then.
    torch.distributed.destroy_process_group()


def table(settings: dict[str, list[dict]]) -> str:
    """Medians, one row per format and malloc setting."""
    rows = [
        "| export | malloc | written | files | time | rank 0 grows by | counted | rank 1 grows by | counted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("bf16", "fp8_static"):
        for setting, measured in settings.items():
            runs = [entry for entry in measured if entry["name"] == name]

            def middle(rank: int, key: str, runs=runs) -> float:
                return statistics.median(run["ranks"][rank][key] for run in runs)

            cells = [name, setting, f"{runs[0]['bytes'] / 1e6:.0f} MB", str(runs[0]["files"])]
            cells.append(f"{middle(0, 'seconds'):.2f} s")
            cells += [f"{middle(rank, key) / 1e6:.0f} MB" for rank in (0, 1) for key in ("growth", "counted")]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def write_floor(directory: Path, size: int) -> float:
    """Seconds to write and fsync ``size`` bytes in files of a shard each, with nothing else: what the disk allows."""
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

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        make_checkpoint(base / "checkpoint")
        floor = statistics.median(write_floor(base, 569 * 10**6) for _ in range(3))
        settings = {}
        for setting, threshold in (("freed blocks returned", "1000000"), ("as it is", None)):
            os.environ.pop(THRESHOLD, None)
            if threshold is not None:
                os.environ[THRESHOLD] = threshold
            paths = [str(base / name) for name in ("checkpoint", "out", "results.json")]
            run_ranks(Path(__file__), "--repeats", str(arguments.repeats), "--measure", *paths, timeout=600)
            settings[setting] = json.loads((base / "results.json").read_text())
    machine = f"{platform.machine()} with {os.cpu_count()} cores, no GPU"
    versions = f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, safetensors {safetensors.__version__}"
    text = f"""# Export of a 569 MB checkpoint from ZeRO-3

{date.today()}, {machine}; {versions}.
Two ranks (gloo), one thread each, shards of {SHARD / 1e6:.0f} MB, medians of {arguments.repeats};
load average {load:.1f} when it began (times grow with it, memory does not). `python benchmarks/save.py`

{table(settings)}

Growth is the high-water mark of the resident set over the resident set before. "Counted" is what the arithmetic says:
the bytes of the tensors gathered (the largest module, an embedding, and on their way 32 MiB of layers behind it) and
packed (one Linear), added up while exporting. The chunks in which weights are quantized come on top, and with them the
freed blocks below 32 MB that glibc keeps for later, unless `{THRESHOLD}` makes it give every one back.
Writing and syncing 569 MB in files of this size, and nothing else, takes {floor:.2f} s here.
"""
    print(text)
    (ROOT / "benchmarks" / "results" / "save.md").write_text(text)


if __name__ == "__main__":
    main()
