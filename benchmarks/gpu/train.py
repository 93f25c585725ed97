"""Ten steps of real training under ZeRO-3, one rank: seconds per step, tokens per second, peak memory.

    python benchmarks/gpu/train.py model --work DIRECTORY [--dry]
    python benchmarks/gpu/train.py NAME --work DIRECTORY [--profile] [--dry] [--section.field value ...]

The first writes a Qwen3 with the widths of the 8B, 8 layers and random weights (2.8e9 parameters), unless it is there,
and the text of the quickstart: losses mean nothing, times and memory do. The others train it by one recipe and the
overrides behind. ``--profile`` takes two of the steps below torch's profiler, which are left out of the times.
"""

import argparse
import gzip
import shutil
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import yaml
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM, initialization

from benchmarks.timing import synchronize
from engine.loop import Loop
from engine.state import LoopState
from launch.exits import clean_exit, recipe_or_exit
from launch.quickstart import make_corpus, make_model

STEPS, FIRST = 10, 2  # steps, and how many of them warm up
PROFILED = range(5, 7)
FULL = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
}  # 64 GB in training
FULL |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
# Matrices above DeepSpeed's threshold, which are partitioned.
TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LONGEST = 40  # kernels that are listed by name
# The first kind of which a word is in a kernel's name.
KINDS = {
    "our kernels": ("deepqat",),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "mkldnn", "aten::mm", "addmm"),
    "attention": ("flash", "fmha", "attention", "cudnn"),
    "communication": ("nccl", "gloo", "all_reduce", "reduce_scatter", "all_gather"),
    "optimizer": ("adam", "multi_tensor"),
    "copy and fill": ("memcpy", "memset", "copy", "fill"),
}


def main() -> None:
    """Make the model, or train it and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the run, for its folder and its line; or model")
    parser.add_argument("--work", type=Path, required=True, help="folder of model/ and of runs")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dry", action="store_true", help="a tiny model, short rows")
    options, overrides = parser.parse_known_args()
    if options.name == "model":
        make_random(options.work / "model", options.dry)
        return
    path = options.work / f"{options.name}.yaml"
    path.write_text(yaml.safe_dump(recipe_of(options.name, options.work, options.dry)), encoding="utf-8")
    with clean_exit():
        loop = Loop(recipe_or_exit(["--config", str(path), *overrides]))
        watch = Watch(loop, Profile(options.work / f"trace_{options.name}.json") if options.profile else None)
        state = loop.run()
        print(watch.line(options.name, state), flush=True)


def make_random(out: Path, dry: bool) -> None:
    """Write ``train.txt`` and the checkpoint ``random``."""
    if (out / "random" / "config.json").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    make_corpus(out)
    make_model(out)  # for its tokenizer
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = Qwen3Config(**(TINY if dry else FULL), **tokens, max_position_embeddings=4096, tie_word_embeddings=False)
    with torch.device("cpu" if dry else "cuda"), initialization.no_init_weights():
        model = Qwen3ForCausalLM(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(out / "random")
    for file in (out / "init").glob("*token*"):
        shutil.copy(file, out / "random")
    print(f"{model.num_parameters():,} parameters")


def recipe_of(name: str, work: Path, dry: bool) -> dict[str, Any]:
    """The recipe that all runs share: fp8 with learned scales, no calibration beyond one micro-batch."""
    output = work / "runs" / f"{name}_{time.time_ns()}"
    return {
        "model": {"path": str(work / "model" / "random")},
        "deepspeed": "zero3",
        "output_dir": str(output),
        "data": {
            "kind": "text",
            "train": [str(work / "model" / "train.txt")],
            "max_length": 64 if dry else 2048,
            "micro_batch_size": 2 if dry else 4,
        },
        "quant": {"scheme": "fp8_static", "calibration_batches": 1},
        "train": {"steps": STEPS, "quant_stats_every": 0},
        "optim": {"lr": 1.0e-5},
        "export": {"enabled": False, "dir": str(output / "export")},
    }


class Profile:
    """Watches from :meth:`start` to :meth:`stop`, then prints what it saw; on a GPU it writes a trace too."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self.on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
        self._profile = profile(activities=activities)
        self._began = 0.0

    def start(self) -> None:
        self._profile.start()
        self._began = time.perf_counter()

    def stop(self) -> None:
        wall = time.perf_counter() - self._began
        self._profile.stop()
        events = list(self._profile.key_averages())
        print("\n".join(self._report(events, wall)), flush=True)
        if self.on_gpu:
            self._profile.export_chrome_trace(str(self.trace))
            with open(self.trace, "rb") as plain, gzip.open(f"{self.trace}.gz", "wb") as packed:
                shutil.copyfileobj(plain, packed)
            self.trace.unlink()

    def _report(self, events: list[Any], wall: float) -> list[str]:
        kernels = [event for event in events if event.device_type == DeviceType.CUDA] if self.on_gpu else events
        seconds, calls = Counter[str](), Counter[str]()
        for event in kernels:
            seconds[kind_of(event.key)] += self._seconds(event)
            calls[kind_of(event.key)] += event.count
        launches = sum(event.count for event in events if "LaunchKernel" in event.key)
        waits = {event.key: event.count for event in events if "Synchronize" in event.key}
        longest = sorted(kernels, key=self._seconds, reverse=True)[:LONGEST]
        return [
            f"profile of two steps: {wall:.3f} s under the profiler, device busy {seconds.total():.3f} s, "
            f"{launches} launches, waits of the host {waits}",
            *(f"  {name}: {1e3 * time:.1f} ms, {calls[name]} calls" for name, time in seconds.most_common()),
            *(f"    {1e3 * self._seconds(one):9.2f} ms {one.count:6d}  {one.key[:150]}" for one in longest),
        ]

    def _seconds(self, event: Any) -> float:
        """Return an event's own seconds on the device, which may be the CPU."""
        return (event.self_device_time_total if self.on_gpu else event.self_cpu_time_total) / 1e6


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "elementwise and rest")


class Watch:
    """Takes the time between steps, after waiting for the device; profiles some of them."""

    def __init__(self, loop: Loop, profile: Profile | None) -> None:
        self.times: list[float] = []
        self.profile = profile
        self._last: float | None = None
        loop.every(1)(self._tick)

    def _tick(self, state: LoopState) -> None:
        synchronize(state.session.device)
        now = time.perf_counter()
        profiled = self.profile is not None and state.step - 1 in PROFILED
        if self._last is not None and not profiled:
            self.times.append(now - self._last)
        if self.profile is not None and state.step == PROFILED.start:
            self.profile.start()
        if self.profile is not None and state.step == PROFILED.stop:
            self.profile.stop()
        self._last = time.perf_counter()

    def line(self, name: str, state: LoopState) -> str:
        """The result of the run in one line."""
        assert state.last is not None
        kept = self.times[FIRST - 1 :]
        median, device = statistics.median(kept), state.session.device
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0
        return (
            f"step of {name}: median {1e3 * median:.1f} ms, least {1e3 * min(kept):.1f} ms, "
            f"{state.last.tokens / median:.0f} tokens/s, loss {state.last.losses['loss/total']:.4f}, "
            f"peak {peak:.1f} GiB"
        )


if __name__ == "__main__":
    main()
