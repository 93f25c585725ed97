"""What training recovers of what quantization loses: perplexity of FT, PTQ and QAT by scheme, and torchao's QAT beside.

    python benchmarks/recovery.py --model DIR --train FILE --text FILE [--out DIR] [--schemes w2a16_g32 ...]

Three models per scheme, all from the same checkpoint, with the same samples in the same order and as many steps: FT,
trained in bf16; PTQ, FT quantized without training; QAT, trained as it will be served. They are made by the code of
launch/train.py and launch/calibrate.py, exported, loaded again, and measured as launch/evaluate.py does. The recovered
share is (PTQ - QAT) / (PTQ - FT).

Each way runs at every learning rate of the sweep, QAT at its best one with other seeds (of the samples' order) too. The
rate is chosen by the perplexity that is reported: all ways have the same choice, so they compare, but each figure is
that of a best of few. Then one change at a time, for the first scheme. torchao's QAT (see recovery_torchao.py) takes
part where torchao is installed and has the scheme.

With ``--out`` the models are kept there, and what the folder has already is not trained again: a full run takes hours.
With ``--known`` nothing is trained at all, and the tables say nan where a run is missing.
Writes ``benchmarks/results/recovery.md``; a person's remarks stand beside it, in ``recovery_remarks.md``.
"""

import argparse
import functools
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import recovery_torchao, timing
from benchmarks.markdown import table
from benchmarks.recovery_runs import DEVICE, FULL, QUICK, SETTINGS, Bench
from engine.loop import Loop
from engine.state import LoopState
from quant import SCHEMES, QuantLayer

# Perplexities of torchao's QAT on qwen3-11m and WikiText-2, 150 steps at a constant rate of 1e-4, and at 2 bits what
# would be 90% of the loss there. Ours have to be below by more than the spread of the seeds where that is said.
BARS = {"w2a16_g32": (46.12, False), "w3a16_g32": (45.83, True)}
ALSO = ["w4a16_g32", "fp8_static", "w3a16_channel", "w2a16_channel"]


def slug(text: str) -> str:
    """Its first words, for a folder's name."""
    return "-".join(re.findall(r"\w+", text)[:4])


@dataclass(frozen=True)
class Found:
    """Perplexities of one way for one scheme: by rate with seed 0, and at the best rate by seed."""

    by_rate: Mapping[float, float]
    by_seed: Sequence[float]

    @property
    def best(self) -> float:
        """The best rate."""
        return best_of(self.by_rate)

    @property
    def first(self) -> float:
        """With seed 0 at the best rate."""
        return self.by_seed[0]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.by_seed)

    @property
    def spread(self) -> float:
        """The largest minus the smallest of the seeds."""
        return max(self.by_seed) - min(self.by_seed)

    def text(self) -> str:
        """The mean, and how far the seeds lie apart."""
        if math.isnan(self.mean):
            return "nan"
        return f"{self.mean:.2f}, spread {self.spread:.2f}"


def best_of(by_rate: Mapping[float, float]) -> float:
    """The rate of the smallest perplexity that is known."""
    return min(by_rate, key=lambda rate: (math.isnan(by_rate[rate]), by_rate[rate]))


def sweep(run: Callable[[float, int], float], rates: Sequence[float], seeds: int) -> Found:
    """Every rate once, the best of them with the other seeds."""
    by_rate = {rate: run(rate, 0) for rate in rates}
    best = best_of(by_rate)
    return Found(by_rate, [by_rate[best], *(run(best, seed) for seed in range(1, seeds))])


def mask_on_v(loop: Loop) -> None:
    """Zero the gradient of every weight whose ``v`` lies outside the grid, also where ``round(v)`` is on it.

    Ours are zero for the latter only (see DESIGN's "inside the range"), which is a part of the former: so that a hook
    on the gradient makes one rule of the other. Gradients of the scales stay as they are.
    """

    @loop.at(step=0)
    def hook(state: LoopState) -> None:
        for layer in state.quant.quantization.layers.values():
            layer.weight.register_hook(functools.partial(zero_where_v_is_outside, layer))


def zero_where_v_is_outside(layer: QuantLayer, grad: torch.Tensor) -> torch.Tensor:
    """``grad [out, in]`` of a layer's weight, symmetric integers with a scale per group or channel."""
    spec, scale = layer.scheme.weights, layer.weight_scale()  # scale [out, groups]
    v = layer.weight.detach().float().unflatten(1, (scale.shape[1], -1)) * (1 / scale).unsqueeze(-1)
    return grad.masked_fill(((v < spec.qmin) | (v > spec.qmax)).flatten(1), 0)


def changes(bench: Bench, teacher: Path) -> dict[str, dict[str, Any] | Callable[[Loop], None]]:
    """What is changed in one run each: keys of the recipe, or something done to the loop."""
    distilled = {"loss.kd_weight": 1.0, "loss.kd": "kl"}
    absmax = {"quant.weight_range": "absmax"}
    follow = {"quant.scales_follow_weights": True}
    ends = [{"scheme": "none", "first": 1}, {"scheme": "none", "last": 1}]
    return {
        "fake quant off for the first third": {"quant.fake_quant_start": max(1, bench.size.steps // 3)},
        "first scales by absmax": absmax,
        "first scales signed": {"quant.signed_scales": True},
        "scales fixed, not learned": {"learnable.weight_scale": False},
        "weights' gradients masked on v, not on round(v)": mask_on_v,
        "scales by absmax of each step, not learned": {**absmax, **follow, "learnable.weight_scale": False},
        "learned share of each step's absmax (LWC)": {**absmax, **follow},
        "constant learning rate": {"optim.schedule": "constant"},
        "KD from the bf16 model, beside the LM loss": {**distilled, "loss.teacher": str(bench.model)},
        "KD from FT, beside the LM loss": {**distilled, "loss.teacher": str(teacher)},
        "first and last layer in bf16 (another size)": {"quant.rules": ends},
    }


def share(ptq: float, qat: Found, ft: Found) -> str:
    """The recovered share, with seed 0; none where there is nothing to recover."""
    return f"{(ptq - qat.first) / (ptq - ft.first):.2f}" if ptq > 1.001 * ft.first else "(no loss)"


def verdict(scheme: str, qat: Found) -> str | None:
    """Whether the scheme's bar is met."""
    if scheme not in BARS or math.isnan(qat.mean):
        return None
    bar, beyond_spread = BARS[scheme]
    met = qat.mean + qat.spread < bar if beyond_spread else qat.mean <= bar
    condition = f"under {bar} by more than the spread" if beyond_spread else f"at most {bar}"
    return f"- {scheme}: {qat.text()}, the bar is {condition}: {'met' if met else 'missed'}."


def report(bench: Bench, arguments: argparse.Namespace) -> str:
    """Everything that is run, as tables."""
    rates, seeds = arguments.rates, arguments.seeds
    base = bench.untrained()
    ft = sweep(lambda rate, seed: bench.trained(None, rate, seed), rates, 1)
    swept = {"FT": ft}
    rows, verdicts = [], []
    for scheme in arguments.schemes:
        ptq = bench.quantized(scheme, ft.best)
        qat = swept[f"QAT, {scheme}"] = sweep(lambda rate, seed, s=scheme: bench.trained(s, rate, seed), rates, seeds)
        cells = [scheme, f"{ft.first:.2f}", f"{ptq:.2f}", f"{qat.first:.2f}", qat.text(), share(ptq, qat, ft), "", ""]
        if recovery_torchao.takes(scheme):
            other = sweep(lambda rate, seed, s=scheme: bench.torchao(s, rate, seed), rates, 1)
            swept[f"torchao's QAT, {scheme}"] = other
            cells[-2:] = [f"{other.first:.2f}", share(ptq, other, ft)]
        rows.append(cells)
        verdicts.append(verdict(scheme, qat))
    for scheme in arguments.also:
        ptq, qat = bench.quantized(scheme, ft.best), Found({}, [bench.trained(scheme, ft.best)])
        rows.append([scheme, f"{ft.first:.2f}", f"{ptq:.2f}", f"{qat.first:.2f}", "", share(ptq, qat, ft), "", ""])
    parts = [
        f"The checkpoint as it is: {base:.2f}.",
        table(
            ("scheme", "FT", "PTQ", "QAT", f"mean of {seeds}", "recovered", "torchao's QAT", "recovered by it"), rows
        ),
        "\n".join(filter(None, verdicts)),
        "## Learning rates, seed 0",
        table(
            ("way", *(f"{rate:g}" for rate in rates)),
            [[name, *(f"{found.by_rate[rate]:.2f}" for rate in rates)] for name, found in swept.items()],
        ),
    ]
    if arguments.changes:
        parts += changed(bench, arguments.schemes[0], swept[f"QAT, {arguments.schemes[0]}"], ft)
    return "\n\n".join(filter(None, parts)) + "\n"


def changed(bench: Bench, scheme: str, qat: Found, ft: Found) -> list[str]:
    """The table of single changes."""
    plain = qat.by_rate[qat.best]
    rows = [["as above", f"{plain:.2f}", ""]]
    for name, change in changes(bench, bench.finetuned(ft.best)).items():
        perplexity = bench.trained(scheme, qat.best, 0, slug(name), change)
        difference = "" if math.isnan(perplexity) else f"{perplexity - plain:+.2f}"
        rows.append([name, f"{perplexity:.2f}", difference])
    return [f"## One change at a time: {scheme}, rate {qat.best:g}, seed 0", table(("change", "QAT", ""), rows)]


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that all training starts from")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--text", type=Path, required=True, help="text to measure perplexity on")
    parser.add_argument(
        "--out", type=Path, help="folder to keep models and perplexities in; none: they are thrown away"
    )
    parser.add_argument("--known", action="store_true", help="train nothing: only what is in --out")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["w2a16_g32", "w3a16_g32"])
    parser.add_argument("--also", nargs="*", choices=SCHEMES, default=ALSO, help="run once each")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3], help="learning rates")
    parser.add_argument("--seeds", type=int, default=3, help="of QAT at its best rate")
    parser.add_argument("--no-changes", dest="changes", action="store_false", help="without the single changes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the tables are written to")
    arguments = parser.parse_args()
    if arguments.known and arguments.out is None:
        parser.error("--known: nothing is known without --out")

    load = os.getloadavg()
    size = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        bench = Bench(arguments.model, arguments.train, arguments.text, size, out, only_known=arguments.known)
        tables = report(bench, arguments)
    head = f"""# What training recovers of what quantization loses

{arguments.model.name}, {size.steps} steps of {size.rows} x {size.length} tokens of {arguments.train.name}; perplexity
per token on the first {len(bench.text.token_ids):,} tokens of {arguments.text.name}, in windows of {size.length}.
{timing.machine(DEVICE, load, "transformers", "deepspeed", "torchao")}
`{timing.command()}`

FT: trained in bf16. PTQ: FT, quantized. QAT: trained as it is served. Recovered: (PTQ - QAT) / (PTQ - FT). All with
the same checkpoint, samples, order and steps: AdamW, {size.warmup} steps of warm-up, then cosine to 0, norms train,
scales (their logarithms) at {SETTINGS["optim.scale_lr"]:g}; everything else as recipes have it. Each figure is of
seed 0 at the rate that was best with it (nan: not run); the mean is over {arguments.seeds} seeds of the samples'
order, the spread from their smallest to their largest. Remarks on the run are in `recovery_remarks.md`.

"""
    timing.write(arguments.results, "recovery", DEVICE, head + tables)


if __name__ == "__main__":
    main()
