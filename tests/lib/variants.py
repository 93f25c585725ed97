"""Many small runs in one launch: recipes that differ from the defaults, each with the actions that its loop gets."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config.reading import load_recipe
from tests.families.variants import VARIANTS
from tests.lib.launcher import run_ranks
from tests.lib.plain import load_result, plain_weights
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint

SAID = "said.txt"  # what both ranks printed, beside the recipes
SCRIPT = ROOT / "tests" / "distributed" / "engine" / "scripts" / "variants.py"
TINY = ("qwen3", "llama", "qwen3_moe")
EVEN = "even"  # a model whose sizes are multiples of 32
DROPOUT = "dropout"  # a model whose attention drops in training
NO_TEACHER = {"kd_weight": 0.0, "teacher": None}


@dataclass(frozen=True)
class Variant:
    """A run.

    Attributes:
        sections: of its recipe, ``stage`` among them.
        model: the architecture of a tiny checkpoint, ``EVEN``, or the name of one of tests.families.
        dtype: of the model.
        action: a name in ``ACTIONS`` of the script that runs it.
    """

    sections: dict[str, Any]
    model: str = "qwen3"
    dtype: str = "float32"
    action: str = "none"


def run_variants(directory: Path, variants: Mapping[str, Variant]) -> dict[str, Path]:
    """Launch all of them at once, in this order; the recipe of each by its name."""
    models = {
        kind: VARIANTS[kind].checkpoint(directory / f"model-{kind}")
        if kind in VARIANTS and kind not in TINY
        else dropping(tiny_checkpoint(directory / f"model-{kind}"))
        if kind == DROPOUT
        else tiny_checkpoint(directory / f"model-{kind}", "qwen3" if kind == EVEN else kind, even=kind == EVEN)
        for kind in dict.fromkeys(variant.model for variant in variants.values())
    }
    data = write_chats(directory / "chats.jsonl")
    written = {
        name: write_recipe(directory, name, models[variant.model], data, dtype=variant.dtype, **variant.sections)
        for name, variant in variants.items()
    }
    said = run_ranks(SCRIPT, *(f"{variants[name].action}:{path}" for name, path in written.items()))
    (directory / SAID).write_text(said)
    return written


def dropping(checkpoint: Path, share: float = 0.1) -> Path:
    """The checkpoint, with dropout of attention in its configuration."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": share}))
    return checkpoint


def start_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights that a run started with."""
    return dict(plain_weights(load_recipe(path).model.path).named_parameters())


def changed(path: Path) -> set[str]:
    """Which parameters have other values than at the start; theta starts at 0."""
    before, after = start_of(path), load_result(path)["weights"]
    trained = {name for name in after if name.endswith("_theta") and after[name].any()}
    return trained | {name for name in before if not torch.equal(after[name].float(), before[name])}
