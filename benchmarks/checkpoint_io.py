"""Load and export of a checkpoint of more than 1 GB, against reading and writing its bytes with plain safetensors.

    python benchmarks/checkpoint_io.py [--rounds 5] [--directory DIR] [--quick]

A dense Qwen3 and a Qwen3-MoE with 128 experts per layer and thousands of small tensors, bf16, under ZeRO-3 on one rank
and on two. In every round, one after the other on the same disk:

- read: safetensors' ``load_file`` of every file, and each tensor copied into memory of its own, by rank 0 alone;
- load: ``load_weights`` into the partitions of an empty model, which is built before;
- decode: the same of a checkpoint in int4 (w4a16_g32), whose codes become bf16 weights and are compared on the way;
- write: ``save_file`` of the same tensors in files of the same size, each forced to disk (fsync);
- export: ``export_model`` as bf16, which forces everything to disk too.

Elapsed time, median and least of the rounds, and how far rank 0's peak memory grew while loading and decoding in the
last round. Files are read from the page cache. Before each part a file of more than their size is written and removed:
a virtual machine that gave memory back to its host takes it again slowly. Writes
``benchmarks/results/checkpoint_io.md``.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing

BAR = 1.2
SHARD = 400 * 10**6
PAIRS = {"load": "read", "decode": "read", "export": "write"}
MODELS = ("dense", "moe")


def make_checkpoint(kind: str, directory: Path, quick: bool) -> None:
    """Random weights of 1.0 (dense) and 1.2 GB (MoE, 9434 tensors, most of 131 kB)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common: dict[str, Any] = {"vocab_size": 32_000, "tie_word_embeddings": True}
    with torch.device("meta"):
        if kind == "dense":
            sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128}
            layers = 2 if quick else 32
            model: Any = Qwen3ForCausalLM(
                Qwen3Config(**common, **sizes, num_key_value_heads=8, num_hidden_layers=layers)
            )
        else:
            sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
            sizes |= {"moe_intermediate_size": 128, "num_experts": 128, "num_experts_per_tok": 8}
            layers = 2 if quick else 24
            config = Qwen3MoeConfig(**common, **sizes, num_key_value_heads=4, num_hidden_layers=layers)
            model = Qwen3MoeForCausalLM(config)
    model = model.bfloat16().to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.save_pretrained(directory, max_shard_size=SHARD)


def read(source: Path) -> None:
    """All bytes into memory that is allocated for them."""
    from safetensors.torch import load_file

    kept = []
    for file in sorted(source.glob("*.safetensors")):
        kept += [torch.empty_like(tensor).copy_(tensor) for tensor in load_file(file).values()]


def write(tensors: dict[str, torch.Tensor], out: Path) -> None:
    """Files of a shard each, through to the disk."""
    from safetensors.torch import save_file

    out.mkdir()
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if size + tensor.nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    for number, shard in enumerate(shards):
        path = out / f"{number}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def take_memory(size: int, scratch: Path) -> None:
    """Have the system take this many bytes from its host, and hold them free."""
    zeros = bytes(2**26)
    with scratch.open("wb") as file:
        for _ in range(size // len(zeros) + 1):
            file.write(zeros)
    scratch.unlink()


def measure(source: Path, out: Path, results: Path, rounds: int) -> None:
    """On each rank; rank 0 writes the times of all rounds, by what was done."""
    from safetensors import safe_open

    from engine.session.context import init_ranks
    from model.build import build_model
    from model.checkpoint.load import load_weights
    from model.ranks import barrier, is_main, shut_down
    from model.save import export_model

    device = init_ranks()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    tensors = {}
    if is_main():
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                tensors |= {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    times: dict[str, list[float]] = {name: [] for pair in PAIRS.items() for name in pair}
    grown: dict[str, int] = {}
    coded = out.with_name("coded")
    make_coded(source, coded, config, device)
    memory = 3 * sum(file.stat().st_size for file in source.glob("*.safetensors")) // 2

    def done(name: str, action: Callable[[], object], everywhere: bool) -> None:
        if is_main():
            take_memory(memory, out.with_name("scratch"))
            os.sync()  # what was written before is not waited for in the time of this
        barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = peak_bytes()
        if everywhere or is_main():
            began = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - began)
        grown[name] = peak_bytes() - before
        barrier()
        if is_main():
            shutil.rmtree(out, ignore_errors=True)

    for _ in range(rounds + 1):
        done("read", lambda: read(source), everywhere=False)
        model = build_model(source, config, dtype=torch.bfloat16, device=device)
        done("load", lambda model=model: load_weights(model, source), everywhere=True)
        decoded = build_model(coded, config, dtype=torch.bfloat16, device=device)
        done("decode", lambda model=decoded: load_weights(model, coded), everywhere=True)
        del decoded
        done("write", lambda: write(tensors, out), everywhere=False)
        done(
            "export", lambda model=model: export_model(model, None, source, out, max_shard_size=SHARD), everywhere=True
        )
        del model
        gc.collect()
    if is_main():
        # The first round warms up.
        results.write_text(json.dumps({**{name: values[1:] for name, values in times.items()}, "grown": grown}))
    shut_down()


def peak_bytes() -> int:
    """The most memory that this process has held since its peak began again."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def make_coded(source: Path, coded: Path, config: dict[str, Any], device: torch.device) -> None:
    """The checkpoint in int4, in groups of 32; a collective."""
    from model.build import build_model
    from model.checkpoint.load import load_weights
    from model.save import export_model
    from model.scales import renew_weight_scales
    from model.zero import partition_new_parameters
    from quant import SCHEMES, replace_layers

    model = build_model(source, config, dtype=torch.bfloat16, device=device)
    load_weights(model, source)
    quantization = replace_layers(model, SCHEMES["w4a16_g32"], learn_weight_scale=False, learn_input_scale=False)
    partition_new_parameters(model, config)
    renew_weight_scales(quantization)
    export_model(model, quantization, source, coded, max_shard_size=SHARD, overwrite=True)


def rows(title: str, times: dict[str, list[float]]) -> list[list[str]]:
    """One row for load, for decode and for export: medians, and ratios of medians and of least times."""
    found = []
    for ours, plain in PAIRS.items():
        cells = [f"{title}, {ours}", f"{statistics.median(times[plain]):.2f}", f"{statistics.median(times[ours]):.2f}"]
        for of_rounds in (statistics.median, min):
            ratio = of_rounds(times[ours]) / of_rounds(times[plain])
            cells.append(f"{ratio:.2f}" if ratio <= BAR else f"**{ratio:.2f}**")
        found.append(cells)
    return found


def launched(kind: str, base: Path, rounds: int, quick: bool) -> tuple[list[list[str]], str]:
    """Rows of a checkpoint of this kind, loaded and exported by one rank and by two, and what else was seen."""
    from tests.lib.launcher import launch

    table: list[list[str]] = []
    seen: list[str] = []
    make_checkpoint(kind, base / "checkpoint", quick)
    for ranks in (1, 2):
        paths = [str(base / name) for name in ("checkpoint", "out", "results.json")]
        done = launch(Path(__file__), "--rounds", str(rounds), "--measure", *paths, ranks=ranks, timeout=3000)
        if done.returncode:
            raise SystemExit(done.stdout[-8000:])
        title = f"{kind}, {ranks} rank{'s' * (ranks > 1)}"
        found = json.loads((base / "results.json").read_text())
        table += rows(title, found)
        load, decode = (found["grown"][name] / timing.MIB for name in ("load", "decode"))
        seen.append(f"{title} {load:.0f} and {decode:.0f} MiB")
    for name in ("checkpoint", "coded"):
        size = sum(file.stat().st_size for file in (base / name).glob("*.safetensors"))
        seen.append(f"{name} {size / 1e9:.2f} GB")
    return table, "; ".join(seen)


def main() -> None:
    """Launched by a user: make the checkpoints, run the ranks, write Markdown. Launched by deepspeed: measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: that of temporary files")
    parser.add_argument("--quick", action="store_true", help="small models, to see that everything runs")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the table is written to")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        source, out, results = map(Path, options.measure)
        measure(source, out, results, options.rounds)
        return
    table: list[list[str]] = []
    seen: list[str] = []
    for kind in MODELS:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            found, text = launched(kind, Path(directory), options.rounds, options.quick)
        table += found
        seen.append(text)
    timing.write(
        options.results,
        "checkpoint_io",
        torch.device("cpu"),
        "# Load and export against plain safetensors",
        f"Elapsed seconds, {options.rounds} rounds in turn; ZeRO-3, gloo, one thread per rank, files of "
        f"{SHARD / 1e6:.0f} MB. Bold misses the bar of {BAR}.\n"
        + timing.head(torch.device("cpu"), "deepspeed", "transformers", "safetensors"),
        timing.table(("", "plain", "ours", "ratio", "ratio of the least times"), table),
        f"Growth of rank 0's peak memory, loading and decoding; sizes: {'. '.join(seen)}.",
    )


if __name__ == "__main__":
    main()
