"""Training, quantizing and measuring one model after another, for benchmarks of what training recovers.

A run is known by its name and settings; what a folder has already is not trained again.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import recovery_torchao
from engine.config.config import Recipe
from engine.config.reading import parse_recipe
from engine.loop import Loop
from launch.calibrate import calibrate
from tools.evaluation.perplexity import evaluate_text, load_for_evaluation, read_eval_text
from tools.evaluation.score import ScoringModel, scoring_model

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
    """Trains, quantizes and measures; remembers in ``out`` what it has done.

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
        """Perplexity of PTQ: FT of that rate and seed, which exists, quantized."""
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
