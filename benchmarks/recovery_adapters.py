"""What is left of adapters when the model is served at 2 and 3 bits: LoRA quantized afterwards, QLoRA, an adapter that
was trained beside a fake-quantized weight and merged, merged QAT LoRA, and QAT of all weights beside them.

    python benchmarks/recovery_adapters.py --model DIR --train FILE --text FILE [--out DIR] [--schemes w2a16_g32 ...]

Each way trains with the same samples in the same order and as many steps:

- *LoRA, then PTQ*: merged adapters without fake quant; the sum is quantized at the end, with scales measured then.
- *QLoRA*: an adapter beside the quantized weight, which is served with it: more than the codes.
- *QLoRA from the error*: the same, which begins with the error of quantization (``adapter.init: error``).
- *QLoRA, merged*: QLoRA after training, with the sum of quantized weight and adapter quantized once more.
- *torchao-style*: likewise, with the adapter added to the weight as it was before it was fake-quantized: so torchtune
  merges its ``QATLoRALinear`` (``torchtune/modules/peft/_utils.py: get_merged_lora_ckpt``).
- *merged QAT LoRA*: ``adapter.merge: true``, with learned scales; what is served has codes alone.
- *QAT*: all weights and scales.

Every way runs at every rate with seed 0, and with other seeds (of the samples' order and of A) at the rate that was
best of these by the perplexity that is reported. With ``--out`` what was measured stays there, and is not run again;
with ``--known`` nothing is run, and the table says nan where something is missing.
Writes ``benchmarks/results/recovery_adapters.md``.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import timing
from benchmarks.markdown import table
from engine.config.reading import parse_recipe
from engine.loop import Loop
from engine.schedule import evaluate_held_out
from engine.state import LoopState
from model.scales import renew_weight_scales
from quant import SCHEMES, weights_changed
from quant.lora import merge

DEVICE = torch.device("cpu")
PERPLEXITY = "eval/perplexity"
LORA = {"adapter.kind": "lora", "adapter.rank": 16, "adapter.alpha": 32.0, "learnable.weight": False}
FIXED = {"learnable.weight_scale": False}
WAYS: dict[str, dict[str, Any]] = {
    "LoRA, then PTQ": {**LORA, **FIXED, "schedule": [{"at": 0, "fake_quant": False}]},
    "QLoRA": {**LORA, **FIXED, "adapter.merge": False},
    "QLoRA from the error": {**LORA, **FIXED, "adapter.merge": False, "adapter.init": "error"},
    "merged QAT LoRA": LORA,
    "QAT": {},
}
# What the tables show: which run, and which of its perplexities.
SHOWN = {
    "LoRA, then PTQ": ("LoRA, then PTQ", "after"),
    "torchao-style": ("QLoRA", "into weights"),
    "QLoRA, merged": ("QLoRA", "into codes"),
    "merged QAT LoRA": ("merged QAT LoRA", "after"),
    "QLoRA": ("QLoRA", "after"),
    "QLoRA from the error": ("QLoRA from the error", "after"),
    "QAT": ("QAT", "after"),
}


def settings_of(arguments: argparse.Namespace, way: str, scheme: str, rate: float, seed: int) -> dict[str, Any]:
    """The recipe of a run, by key."""
    return {
        "model.path": str(arguments.model),
        "model.dtype": arguments.dtype,
        "data.kind": "text",
        "data.train": [str(arguments.train)],
        "data.eval": [str(arguments.text)],
        "data.max_length": arguments.length,
        "data.micro_batch_size": arguments.rows,
        "data.seed": seed,
        "quant.scheme": scheme,
        "train.seed": seed,
        "train.steps": arguments.steps,
        "train.quant_stats_every": 0,
        "optim.lr": rate,
        "optim.scale_lr": 1e-2,
        "optim.warmup_steps": min(5, arguments.steps),
        "optim.schedule": "cosine",
        "optim.min_lr_ratio": 0.0,
        "eval.every": arguments.steps,
        "export.enabled": False,
        "deepspeed": "zero0",
        **WAYS[way],
    }


def run(settings: Mapping[str, Any], directory: Path) -> dict[str, float]:
    """Perplexities as served: before the first step, after the last, and of an adapter beside its weight once more
    when it is merged into the weight, or into what its codes stand for, and the sum is quantized."""
    options = {**settings, "output_dir": str(directory)}
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
    state = Loop(parse_recipe([f"--{key}={word}" for key, word in words.items()])).run()
    if state.step < settings["train.steps"]:
        raise SystemExit("a signal ended the run: nothing is written of it")
    found = {"before": state.evaluations.first[PERPLEXITY], "after": state.evaluations.last[PERPLEXITY]}
    if state.recipe.adapter.beside:
        found |= merged_afterwards(state)
    state.session.engine.destroy()
    return found


@torch.no_grad()
def merged_afterwards(state: LoopState) -> dict[str, float]:
    """Perplexities with each adapter added to the weight beside which it was trained, or to what that weight's codes
    stand for, and scales measured of the sum."""
    quantization, found = state.session.quantization, {}
    layers = [layer for layer in quantization.layers.values() if layer.adapter is not None]
    adapters = [layer.adapter for layer in layers if layer.adapter is not None]
    bases = {
        "into weights": [layer.merged_weight().clone() for layer in layers],
        "into codes": [layer.quantized_weight() for layer in layers],
    }
    for into, weights in bases.items():
        for layer, adapter, weight in zip(layers, adapters, weights, strict=True):
            layer.weight.copy_(merge(weight, adapter.lora_a, adapter.lora_b, adapter.scaling))
            layer.adapter = None
        renew_weight_scales(quantization)
        weights_changed(state.model)
        state.evaluations.step = None  # it has to be evaluated again
        evaluate_held_out(state)
        found[into] = state.evaluations.last[PERPLEXITY]
    return found


class Bench:
    """Runs, and remembers in a folder what was found, a file for each run."""

    def __init__(self, arguments: argparse.Namespace, out: Path) -> None:
        self.arguments, self.out = arguments, out

    def found(self, way: str, scheme: str, rate: float, seed: int) -> dict[str, float]:
        """What :func:`run` gives; NaN for all that is not known, where nothing is to be run."""
        settings = settings_of(self.arguments, way, scheme, rate, seed)
        name = f"{way.replace(', ', '_').replace(' ', '_')}_{scheme}_{rate:g}_{seed}"
        file = self.out / f"{name}.json"
        if file.exists():
            known = json.loads(file.read_text())
            if known["settings"] == settings:
                found: dict[str, float] = known["found"]
                return found
        if self.arguments.known:
            return dict.fromkeys(("before", "after", "into weights", "into codes"), math.nan)
        with tempfile.TemporaryDirectory() as directory:
            found = run(settings, Path(directory))
        file.write_text(json.dumps({"settings": settings, "found": found}, indent=1))
        print(f"{name}: {found}", flush=True)
        return found

    def seeds(self, shown: str, scheme: str) -> tuple[float, list[float], dict[float, dict[str, float]]]:
        """Of a row of the table: the best rate, the perplexity at it for each seed, and all of seed 0 by rate."""
        way, key = SHOWN[shown]
        rates = self.arguments.weight_rates if way == "QAT" else self.arguments.rates
        first = {rate: self.found(way, scheme, rate, 0) for rate in rates}
        best = min(first, key=lambda rate: (math.isnan(first[rate][key]), first[rate][key]))
        others = [self.found(way, scheme, best, seed) for seed in range(1, self.arguments.seeds)]
        return best, [found[key] for found in (first[best], *others)], first


def tables(bench: Bench) -> str:
    """The perplexities, and the rates behind them."""
    rows, swept = [], []
    for scheme in bench.arguments.schemes:
        for way in bench.arguments.ways:
            _, key = SHOWN[way]
            best, values, first = bench.seeds(way, scheme)
            mean = statistics.mean(values)
            spread = f"{max(values) - min(values):.2f}" if len(values) > 1 else ""
            cells = [f"{value:.2f}" for value in values]
            rows.append([scheme, way, f"{first[best]['before']:.2f}", *cells, f"{mean:.2f}", spread, f"{best:g}"])
            swept.append([scheme, way, ", ".join(f"{rate:g}: {found[key]:.2f}" for rate, found in first.items())])
    seeds = [f"seed {seed}" for seed in range(bench.arguments.seeds)]
    parts = [
        table(("scheme", "way", "before training", *seeds, "mean", "spread", "rate"), rows),
        "## Learning rates, seed 0",
        table(("scheme", "way", "perplexity by rate"), swept),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that all training starts from")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--text", type=Path, required=True, help="text to measure perplexity on")
    parser.add_argument("--out", type=Path, help="folder to keep what was found in; none: it is thrown away")
    parser.add_argument("--known", action="store_true", help="run nothing: only what is in --out")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["w2a16_g32", "w3a16_g32"])
    parser.add_argument("--ways", nargs="+", choices=SHOWN, default=list(SHOWN), help="rows of the table")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3], help="of adapters")
    parser.add_argument("--weight-rates", nargs="+", type=float, default=[1e-4, 2e-4, 5e-4], help="of all weights")
    parser.add_argument("--seeds", type=int, default=3, help="of each way at its best rate")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="that the model computes in"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=4, help="of each step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the tables are written to")
    arguments = parser.parse_args()
    if arguments.known and arguments.out is None:
        parser.error("--known: nothing is known without --out")
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        found = tables(Bench(arguments, out))
    head = f"""# What is left of adapters at 2 and 3 bits

{arguments.model.name} in {arguments.dtype}, {arguments.steps} steps of {arguments.rows} x {arguments.length} tokens of
{arguments.train.name}; perplexity per token of {arguments.text.name}, in rows of {arguments.length}, of the model as it
is served.
{timing.machine(DEVICE, load, "transformers", "deepspeed")}
`{timing.command()}`

Same checkpoint, samples, order and steps: AdamW, warm-up, then cosine to 0; norms are frozen; adapters of rank 16 and
alpha 32 on every quantized layer; scales learn at 0.01 in merged QAT LoRA and in QAT. LoRA, then PTQ: trained without
fake quant, the sum quantized at the end. QLoRA: Q(W) x + s B (A x), where A and B stay as they are; from the error: B A
begins as the best matrix of its rank for W - Q(W). QLoRA, merged: the sum of Q(W) and s B A quantized again;
torchao-style: that of W and s B A. The rate is that of the smallest perplexity with seed 0; the spread is from the
smallest to the largest of the seeds.

"""
    timing.write(arguments.results, "recovery_adapters", DEVICE, head + found)


if __name__ == "__main__":
    main()
