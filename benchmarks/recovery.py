"""What training recovers of what quantisation loses: perplexity of FT, PTQ and QAT by scheme, and torchao's QAT beside.

    python benchmarks/recovery.py --model DIR --train FILE --text FILE [--out DIR] [--schemes w2a16_g32 ...]

Three models per scheme, all from the same checkpoint, with the same samples in the same order and as many steps: FT,
trained in bf16; PTQ, FT quantised without training; QAT, trained as it will be served. They are made by the code of
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
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoTokenizer

from benchmarks import recovery_torchao, timing
from engine.evaluation.perplexity import evaluate_text, load_for_evaluation, read_eval_text
from engine.evaluation.score import ScoringModel, scoring_model
from engine.loop import Loop
from engine.recipe.reading import parse_recipe
from engine.recipe.recipe import Recipe
from engine.state import LoopState
from launch.calibrate import calibrate
from quant import SCHEMES, QuantLayer

# Perplexities of torchao's QAT on qwen3-11m and WikiText-2, 150 steps at a constant rate of 1e-4, and at 2 bits what
# would be 90% of the loss there. Ours have to be below by more than the spread of the seeds where that is said.
BARS = {"w2a16_g32": (46.12, False), "w3a16_g32": (45.83, True)}
ALSO = ["w4a16_g32", "fp8_static", "w3a16_channel", "w2a16_channel"]
DTYPE, DEVICE = torch.bfloat16, torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "data.kind": "text",
    "learnable.norm": True,
    "optim.schedule": "cosine",
    "optim.min_lr_ratio": 0.0,
    "optim.scale_lr": 1e-2,
    "train.quant_stats_every": 0,
    "loss.chunk_tokens": 2048,
    "deepspeed": "zero0",
}


@dataclass(frozen=True)
class Size:
    """Of the training and of the evaluation."""

    steps: int
    rows: int
    length: int
    warmup: int
    tokens: int
    """Of the text, at most."""


FULL = Size(steps=150, rows=8, length=256, warmup=10, tokens=60_000)
QUICK = Size(steps=2, rows=2, length=16, warmup=1, tokens=100)


class Bench:
    """Trains, quantises and measures; remembers in ``out`` what it has done.

    Args:
        model, train, text: checkpoint, text to train on, text to measure perplexity on.
        size: how much of it.
        out: folder of the models, and of ``perplexities.json``.
        only_known: give NaN instead of training.
    """

    def __init__(
        self, model: Path, train: Path, text: Path, size: Size, out: Path, *, only_known: bool = False
    ) -> None:
        self.model, self.train, self.size, self.out, self._only_known = model, train, size, out, only_known
        self.text = read_eval_text(text, AutoTokenizer.from_pretrained(model), size.tokens)
        self._source = {"model": str(model), "train": str(train), "text": str(text), "size": str(size)}
        self._file = out / "perplexities.json"
        self._known: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def untrained(self) -> float:
        """Perplexity of the checkpoint that everything starts from."""
        return self._once("untrained", {}, lambda: self._perplexity(load_for_evaluation(self.model, DTYPE, DEVICE)))

    def trained(
        self,
        scheme: str | None,
        rate: float,
        seed: int = 0,
        label: str = "",
        change: Mapping[str, Any] | Callable[[Loop], None] | None = None,
    ) -> float:
        """Perplexity after training: QAT, or FT where there is no scheme.

        Args:
            scheme, rate, seed: of the run.
            label: of what is changed in it, for the folder.
            change: keys of the recipe, or what is done to the loop before it runs.
        """
        settings, noted = self._settings(scheme, rate, seed), {}
        if callable(change):
            noted = {"change": change.__name__}
        else:
            settings |= dict(change or {})

        def run(recipe: Recipe) -> None:
            loop = Loop(recipe)
            if callable(change):
                change(loop)
            loop.run()

        return self._measured(name_of(scheme, rate, seed, label), settings, run, noted)

    def quantized(self, scheme: str, rate: float, seed: int = 0) -> float:
        """Perplexity of PTQ: FT of that rate and seed, which exists, quantised."""
        settings = self._settings(scheme, 0.0, seed) | {"model.path": str(self.finetuned(rate, seed))}
        return self._measured(name_of("ptq", scheme, rate, seed), settings, calibrate)

    def finetuned(self, rate: float, seed: int = 0) -> Path:
        """Where :meth:`trained` leaves the checkpoint of FT."""
        return self.out / name_of(None, rate, seed) / "export"

    def torchao(self, scheme: str, rate: float, seed: int = 0) -> float:
        """Perplexity of torchao's QAT."""
        settings = self._settings(scheme, rate, seed)
        recipe = self._recipe(settings, self.out / "torchao")
        name = name_of("torchao", scheme, rate, seed)
        return self._once(
            name, settings, lambda: self._perplexity(scoring_model(recovery_torchao.train(recipe), DEVICE))
        )

    def _settings(self, scheme: str | None, rate: float, seed: int) -> dict[str, Any]:
        size = self.size
        quantized = {"quant.scheme": scheme} if scheme else {"quant.fake_quant_start": -1}
        return (
            SETTINGS
            | quantized
            | {
                "model.path": str(self.model),
                "data.train": [str(self.train)],
                "data.max_length": size.length,
                "data.micro_batch_size": size.rows,
                "data.seed": seed,
                "train.seed": seed,
                "train.steps": size.steps,
                "optim.warmup_steps": size.warmup,
                "optim.lr": rate,
            }
        )

    def _recipe(self, settings: Mapping[str, Any], directory: Path) -> Recipe:
        options = {**settings, "output_dir": str(directory)}
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
        return parse_recipe([f"--{key}={word}" for key, word in words.items()])

    def _measured(
        self,
        name: str,
        settings: Mapping[str, Any],
        make: Callable[[Recipe], object],
        noted: Mapping[str, Any] | None = None,
    ) -> float:
        """Perplexity of what ``make`` exports; ``noted`` is what the settings do not say."""

        def run() -> float:
            shutil.rmtree(self.out / name, ignore_errors=True)  # of a run that was interrupted
            recipe = self._recipe(settings, self.out / name)
            make(recipe)
            return self._perplexity(load_for_evaluation(recipe.export_dir(), DTYPE, DEVICE))

        return self._once(name, {**settings, **(noted or {})}, run)

    def _perplexity(self, model: ScoringModel) -> float:
        return evaluate_text(model, self.text, length=self.size.length, batch_size=16).per_token

    def _once(self, name: str, settings: Mapping[str, Any], run: Callable[[], float]) -> float:
        """What ``run`` gives, or gave with the same settings before."""
        settings = self._source | settings
        known = self._known.get(name)
        if known is None or known["settings"] != settings:
            if self._only_known:
                return math.nan
            began = time.perf_counter()
            perplexity = run()
            seconds = round(time.perf_counter() - began)
            self._known[name] = {"settings": settings, "perplexity": perplexity, "seconds": seconds}
            self._file.write_text(json.dumps(self._known, indent=1))
        print(f"{name}: perplexity {self._known[name]['perplexity']:.3f}", flush=True)
        return float(self._known[name]["perplexity"])


def name_of(*words: object) -> str:
    """Of a run, for its folder."""
    return "_".join(str("ft" if word is None else word) for word in words if word != "")


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
    head = f"""# What training recovers of what quantisation loses

{arguments.model.name}, {size.steps} steps of {size.rows} x {size.length} tokens of {arguments.train.name}; perplexity
per token on the first {len(bench.text.token_ids):,} tokens of {arguments.text.name}, in windows of {size.length}.
{timing.machine(DEVICE, load, "transformers", "deepspeed", "torchao")}
`{timing.command()}`

FT: trained in bf16. PTQ: FT, quantised. QAT: trained as it is served. Recovered: (PTQ - QAT) / (PTQ - FT). All with
the same checkpoint, samples, order and steps: AdamW, {size.warmup} steps of warm-up, then cosine to 0, norms train,
scales (their logarithms) at {SETTINGS["optim.scale_lr"]:g}; everything else as recipes have it. Each figure is of
seed 0 at the rate that was best with it (nan: not run); the mean is over {arguments.seeds} seeds of the samples'
order, the spread from their smallest to their largest. Remarks on the run are in `recovery_remarks.md`.

"""
    timing.write(arguments.results, "recovery", DEVICE, head + tables)


if __name__ == "__main__":
    main()
