"""Recipes: the smallest ones and what is said of bad ones, and those of the distributed tests with their data."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe, parse_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_config

STEPS = 5


def write_chats(path: Path, *, question: str = "input", answer: str = "output") -> Path:
    """Conversations of very different lengths: ranks and micro-batches differ in valid tokens and in routing."""
    lines = [
        {
            question: f"What is {a} plus {b}? " + "Think. " * (a % 7),
            answer: f"{a} plus {b} is {a + b}." + " Yes!" * (b % 9),
        }
        for a in range(8)
        for b in range(6)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def merged(contents: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The contents of a recipe with other values in its sections."""
    return contents | {
        name: {**contents.get(name, {}), **values} if isinstance(values, dict) else values
        for name, values in sections.items()
    }


def bare_recipe(directory: Path, kind: str | Path = "qwen3", **sections: Any) -> Recipe:
    """Read a recipe of a model that is nothing but a config.json: of a kind of tiny model, or a file."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    if isinstance(kind, Path):
        (model / "config.json").write_text(kind.read_text())
    else:
        tiny_config(kind, layers=6).save_pretrained(model)
    contents = {
        "model": {"path": str(model)},
        "data": {"train": ["none"], "kind": "text", "max_length": 64},
        "train": {"steps": 5},
        "output_dir": str(directory / "out"),
    }
    return load_recipe(write_sections(directory, **merged(contents, sections)))


def write_ds_config(directory: Path, name: str, shipped: str, /, **sections: Any) -> str:
    """``<directory>/<name>.json``: the ``shipped`` configuration, with ``sections`` merged into it.

    Under stage 3 persistence is off, so that even tiny parameters are partitioned.
    """
    config = json.loads((ROOT / "ds_configs" / f"{shipped}.json").read_text())
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path = directory / f"{name}.json"
    path.write_text(json.dumps(merged(config, sections)))
    return str(path)


def write_recipe(
    directory: Path, name: str, model: Path, chats: Path, /, *, stage: int = 3, dtype: str = "bfloat16", **sections: Any
) -> Path:
    """``<directory>/<name>.yaml``, whose output goes to ``<directory>/<name>``.

    Persistence is off, so that ZeRO-3 partitions even tiny parameters. ``sections`` are merged into its contents.
    """
    ds_config = directory / f"zero{stage}.json"
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    ds_config.write_text(json.dumps({"zero_optimization": zero}))
    contents: dict[str, Any] = {
        "model": {"path": str(model), "dtype": dtype},
        "data": {"train": [str(chats)], "max_length": 128, "micro_batch_size": 2},
        "train": {"steps": STEPS, "gradient_accumulation_steps": 2},
        "optim": {"lr": 1e-3, "scale_lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "grad_clip": 0.5},
        "loss": {"kd_weight": 0.5, "kd": "cakld", "teacher": str(model)},
        "quant": {"calibration_batches": 1},
        "export": {"enabled": False},
        "deepspeed": str(ds_config),
        "output_dir": str(directory / name),
    }
    contents = merged(contents, sections)
    contents["train"].setdefault("quant_stats_every", 0)  # each look draws a picture: a quarter of a run's time
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(contents))
    return path


MINIMAL = """\
model: {path: model}
data: {train: [train.jsonl]}
train: {steps: 10}
output_dir: out
"""


def minimal(**sections: Any) -> Recipe:
    """Build the smallest valid recipe; a dict changes options of a section, another value takes its place."""
    contents = merged(yaml.safe_load(MINIMAL), sections)
    kinds: dict[str, Any] = {item.name: item.type for item in fields(Recipe)}
    return Recipe(**{name: kinds[name](**one) if isinstance(one, dict) else one for name, one in contents.items()})


def write_minimal(directory: Path, more: str = "") -> Path:
    """Write ``<directory>/recipe.yaml``: the smallest valid recipe, and more YAML below it."""
    path = directory / "recipe.yaml"
    path.write_text(MINIMAL + more, encoding="utf-8")
    return path


def write_sections(directory: Path, name: str = "recipe", /, **sections: Any) -> Path:
    """Write ``<directory>/<name>.yaml``: the smallest valid recipe, with ``sections`` merged into it."""
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merged(yaml.safe_load(MINIMAL), sections), sort_keys=False))
    return path


def refusal(*argv: str) -> list[str]:
    """Return the lines of the error for a bad command line; reading it must only raise, with a line per problem."""
    with pytest.raises(RecipeError) as refused:
        parse_recipe(argv, check_files=False)
    lines = str(refused.value).splitlines()
    assert lines and all(lines), lines
    return lines
