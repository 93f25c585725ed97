"""Many small runs in one job: recipes that differ from the defaults, each with the action that its loop gets."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config.reading import load_recipe
from tests.distributed.engine.scripts.train import Action, run_all
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import edit_json
from tests.lib.launcher import on_ranks
from tests.lib.plain import load_result, plain_weights
from tests.lib.recipes import write_chats, write_ds_config, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint

SAID = "said.txt"  # what both ranks printed, beside the recipes
SCRIPT = ROOT / "tests" / "distributed" / "engine" / "scripts" / "variants.py"
TINY = ("qwen3", "llama", "qwen3_moe")
EVEN = "qwen3 even"  # a model whose sizes are multiples of 32
DROPOUT = "qwen3 config.attention_dropout=0.1"  # a model whose attention drops in training
NO_TEACHER = {"kd_weight": 0.0, "teacher": None}


@dataclass(frozen=True)
class Variant:
    """A run.

    Attributes:
        sections: of its recipe, ``stage`` among them.
        model: an architecture of tests.lib.tiny, with its options (``"qwen3_moe wide layers=8"``) and values of its
            config.json (``"config.attention_dropout=0.1"``), or one of tests.families.
        dtype: of the model.
        action: a function of a module, see ``run_all``.
        shipped: the name of a file in ds_configs/, for persistence is off (see ``write_ds_config``).
        ds: what differs in that file.
    """

    sections: Mapping[str, Any]
    model: str = "qwen3"
    dtype: str = "float32"
    action: Action | None = None
    shipped: str = ""
    ds: Mapping[str, Any] = field(default_factory=dict)


def run_variants(directory: Path, variants: Mapping[str, Variant]) -> dict[str, Path]:
    """Run all of them in one job, in this order; the recipe of each by its name.

    A run under hpZ must be the last: its groups of ranks are there until the process ends.
    """
    models = {model: checkpoint(directory, model) for model in {variant.model for variant in variants.values()}}
    data = write_chats(directory / "chats.jsonl")
    written = {}
    for name, variant in variants.items():
        sections = dict(variant.sections)
        if variant.shipped:
            sections["deepspeed"] = write_ds_config(directory, f"{name}_ds", variant.shipped, **variant.ds)
        written[name] = write_recipe(directory, name, models[variant.model], data, dtype=variant.dtype, **sections)
    _, said = on_ranks(run_all, [(variants[name].action, path) for name, path in written.items()])
    (directory / SAID).write_text(said)
    return written


def checkpoint(directory: Path, model: str) -> Path:
    """Write the checkpoint of a variant's ``model``."""
    kind, *words = model.split()
    path = directory / f"model-{model.replace(' ', '-')}"
    if kind not in TINY:
        return VARIANTS[kind].checkpoint(path)
    options = {name: json.loads(value or "true") for name, _, value in (word.partition("=") for word in words)}
    changes = {name.removeprefix("config."): options.pop(name) for name in list(options) if name.startswith("config.")}
    tiny_checkpoint(path, kind, **options)
    edit_json(path / "config.json", **changes)
    return path


def start_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights that a run started with."""
    return dict(plain_weights(load_recipe(path).model.path).named_parameters())


def changed(path: Path) -> set[str]:
    """The parameters that have other values than at the start; theta starts at 0."""
    before, after = start_of(path), load_result(path)["weights"]
    trained = {name for name in after if name.endswith("_theta") and after[name].any()}
    return trained | {name for name in before if not torch.equal(after[name].float(), before[name])}


def assert_same_run(found: Mapping[str, Any], expected: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """Losses, grad norms and Parameters of two results are equal bit for bit, but for those that end in ``skip``."""
    assert found["losses"] == expected["losses"] and found["norms"] == expected["norms"]
    assert_same_weights(found, expected, skip=skip)


def assert_same_weights(found: Mapping[str, Any], expected: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """Parameters of two results are equal bit for bit, but for those that end in ``skip``."""
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert name.endswith(skip or "none") or torch.equal(found["weights"][name], value), name
