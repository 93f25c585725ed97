"""Defaults never contradict what a user has set: each option alone, with each of its values, on each shipped recipe."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import pytest
import yaml

from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.quant import RuleRecipe, SchemeRecipe, TensorRecipe
from engine.config.reading import parse_recipe
from engine.config.rules import options
from engine.config.sections import EventRecipe
from quant import PRESETS
from tests.lib.root import ROOT
from tests.unit.engine.config.recipes import MINIMAL, minimal

# Values of the options whose type does not list them.
VALUES: dict[str, list[Any]] = {
    "model.path": ["other"],
    "model.attn_implementation": ["eager"],
    "data.train": [["a.jsonl"]],
    "data.weights": [[1.0]],
    "data.held_out": [4, 0.1],
    "data.eval": [["b.jsonl"]],
    "data.fields": [{"input": "question", "output": "answer"}],
    "data.max_length": [64],
    "data.micro_batch_size": [3],
    "data.seed": [1],
    "train.steps": [5000],
    "train.gradient_accumulation_steps": [3],
    "train.seed": [1],
    "train.log_every": [2],
    "train.quant_stats_every": [0, 1],
    "train.checkpoint_every": [0, 1000],
    "train.resume": [True, "best"],
    "train.keep_checkpoints": [1],
    "train.max_skipped_steps": [1],
    "output_dir": ["elsewhere"],
    "deepspeed": ["zero1"],
    "quant.scheme": [*PRESETS],
    "quant.schemes": [{"mine": SchemeRecipe(TensorRecipe("int", 4, "group", 32))}],
    "quant.rules": [[RuleRecipe("none", first=1)]],
    "quant.lm_head": ["w8a16_channel"],
    "quant.embedding": ["w8a16_channel"],
    "quant.exempt": [[]],
    "quant.exempt_more": [[".*o_proj"]],
    "quant.scales": ["ptq"],
    "quant.start": ["gptq"],
    "quant.percentile": [90.0],
    "quant.calibration_batches": [0, 4],
    "quant.initial_input_scale": [0.1],
    "quant.rotate": [[".*o_proj"]],
    "quant.rotate_block": [64],
    "quant.fake_quant_start": [-1, 0, 3],
    "learnable.freeze": [[".*norm.*"]],
    "adapter.start": ["adapter"],
    "adapter.rank": [4],
    "adapter.alpha": [8.0],
    "adapter.dropout": [0.1],
    "adapter.targets": [[".*q_proj"]],
    "adapter.ranks": [{".*q_proj": 4}],
    "optim.lr": [1e-4],
    "optim.embedding_lr": [1e-4],
    "optim.norm_lr": [1e-4],
    "optim.scale_lr": [1e-4],
    "optim.act_scale_lr": [1e-4],
    "optim.adapter_lr": [1e-4],
    "optim.min_lr_ratio": [0.0],
    "optim.warmup_steps": [0, 10],
    "optim.decay_steps": [3],
    "optim.weight_decay": [0.1],
    "optim.betas": [(0.9, 0.99)],
    "optim.eps": [1e-6],
    "optim.grad_clip": [0.0],
    "loss.lm_weight": [0.0, 0.5],
    "loss.kd_weight": [0.0, 0.5],
    "loss.temperature": [2.0],
    "loss.top_k": [5],
    "loss.teacher": ["teacher", "self"],
    "loss.teacher_cache": ["cache"],
    "loss.diagnostics_every": [5],
    "loss.chunk_tokens": [64],
    "schedule": [
        [EventRecipe(at=1, fake_quant=False)],
        [EventRecipe(at=1, lr={"weights": 1e-5})],
        [EventRecipe(at=1, loss={"lm": 0.5})],
    ],
    "eval.every": [0, 100],
    "export.dir": ["served"],
    "export.template": ["base.gguf"],
    "export.max_shard_size": ["1GB"],
}
# What an option needs beside it that no default can give: a path, a number, another scheme.
NEEDS: dict[str, dict[str, Any]] = {
    "loss.lm_weight": {"loss.kd_weight": 1.0, "loss.teacher": "teacher"},
    "loss.kd_weight": {"loss.teacher": "teacher"},
    "loss.kd": {"loss.top_k": 5},
    "loss.teacher_cache": {"loss.top_k": 5},
    "eval.every": {"data.held_out": 4},
    "quant.init": {"quant.scheme": "w4a16_g32"},
    "quant.calibration_batches": {"quant.scales": "ptq"},
    "export.format": {"adapter.kind": "lora", "adapter.merge": False},
}
SAID = {"model.path": "model", "data.train": ["train.jsonl"], "train.steps": 10, "output_dir": "out"}
RECIPES = [[path] for path in sorted((ROOT / "launch" / "recipes").glob("*.yaml"))]
SCHEMES = sorted((ROOT / "launch" / "recipes" / "schemes").glob("*.yaml"))


def cases() -> Iterator[tuple[str, Any]]:
    """Every option with each of its values, null left out."""
    for key, _, item in options(minimal()):
        kinds = [kind for one in (item.type, *get_args(item.type)) for kind in (one, *get_args(one))]
        listed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        values = VALUES.get(key) or listed or ([False, True] if item.type is bool else [])
        assert values, f"{key} is new: give it values in VALUES"
        yield from ((key, value) for value in values)


def problems(said: dict[str, Any]) -> list[str]:
    """What is refused of a recipe with these options, built in Python."""
    sections: dict[str, Any] = {}
    for item in fields(Recipe):
        if is_dataclass(item.type):
            given = {key.rpartition(".")[2]: said[key] for key in said if key.startswith(f"{item.name}.")}
            sections[item.name] = cast(type, item.type)(**given)
        elif item.name in said:
            sections[item.name] = said[item.name]
    try:
        Recipe(**sections)
    except RecipeError as error:
        return str(error).splitlines()
    return []


def said_by(tmp_path: Path, files: list[Path]) -> dict[str, Any]:
    """The options that files set, typed."""
    recipe = parse_recipe([word for path in files for word in ("--config", str(path))], check_files=False)
    keys = set()
    for path in files:
        for name, section in yaml.safe_load(path.read_text()).items():
            keys |= {f"{name}.{key}" for key in section} if isinstance(section, dict) else {name}
    return {key: attrgetter(key)(recipe) for key in keys}


def is_idle(line: str) -> bool:
    return " has no effect unless " in line


def test_an_option_alone_is_refused_if_it_has_no_effect_or_needs_a_value() -> None:
    refused = {}
    for key, value in cases():
        lines = problems({**SAID, key: value})
        if lines and not all(map(is_idle, lines)):
            refused[key] = lines
            assert problems({**SAID, key: value, **NEEDS.get(key, {})}) == [], (key, value, lines)
    assert refused.keys() == NEEDS.keys()


@pytest.mark.parametrize("files", [*RECIPES, *([path] for path in SCHEMES)], ids=lambda files: files[0].stem)
def test_an_option_on_a_shipped_recipe_contradicts_only_what_that_sets(tmp_path: Path, files: list[Path]) -> None:
    """Each line that refuses names two options that were set, one of them the option itself."""
    (tmp_path / "minimal.yaml").write_text(MINIMAL)
    files = files if files in RECIPES else [tmp_path / "minimal.yaml", *files]
    base = said_by(tmp_path, files)
    for key, value in cases():
        said = {**base, key: value}
        for line in problems(said):
            text = re.sub(r"\b(weight|weight_scale|norm)\b", r"learnable.\1", line) if "learnable: " in line else line
            named = {name for name in said if re.search(rf"\b{re.escape(name)}\b", text)}
            assert is_idle(line) or len(named) >= 2 or key in NEEDS, (key, value, line)


def test_defaults_that_follow() -> None:
    """Of two options, too."""
    for said in (
        {"adapter.kind": "lora"},
        {"adapter.kind": "lora", "adapter.merge": False},
        {"loss.kd_weight": 1.0, "loss.teacher": "self"},
        {"loss.teacher_cache": "cache", "loss.top_k": 5, "loss.kd_weight": 1.0},
        {"quant.initial_input_scale": 0.1},
        {"optim.schedule": "wsd", "optim.warmup_steps": 10},
    ):
        assert problems(SAID | said) == []
