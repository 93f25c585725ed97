"""Defaults never contradict what a user has set: each option alone, with each of its values, on each shipped recipe."""

import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from engine.config.config import recipe_options
from engine.config.errors import RecipeError
from engine.config.quant import RuleRecipe, SchemeRecipe
from engine.config.reading import parse_recipe
from engine.config.sections import EventRecipe
from quant import PRESETS, TensorSpec
from tests.lib.recipes import MINIMAL, minimal
from tests.lib.root import ROOT

# Values of the options whose type does not list them.
VALUES: dict[str, list[Any]] = {
    f"{section}.{name}": values
    for section, options in yaml.safe_load(r"""
    model: {path: [other], attn_implementation: [eager]}
    data: {train: [[a.jsonl]], weights: [[1.0]], held_out: [4, 0.1], eval: [[b.jsonl]], max_length: [64],
      cache: [tokens],
      fields: [{input: question, output: answer}], micro_batch_size: [3], seed: [1],
      skip: [['a.jsonl:1']], show: [3], server: ['http://localhost:8000'], new_tokens: [64], temperature: [0.5],
      max_age: [5], server_seconds: [9.0]}
    train: {steps: [5000], epochs: [0.5], gradient_accumulation_steps: [3], seed: [1], log_every: [2],
      quant_stats_every: [0, 1], checkpoint_every: [0, 1000], resume: [true, best], keep_checkpoints: [1],
      max_skipped_steps: [1], report_to: [[], [tensorboard, wandb]]}
    parallel: {sequence: [2]}
    quant: {lm_head: [w8a16_channel], embedding: [w8a16_channel], exempt: [[]], exempt_more: [[.*o_proj]],
      scales: [ptq], start: [gptq], percentile: [90.0], calibration_batches: [0, 4], initial_input_scale: [0.1],
      input_headroom: [2.0],
      rotate: [[.*o_proj]], rotate_block: [64], fake_quant_start: [-1, 0, 3]}
    learnable: {freeze: [[.*norm.*]]}
    adapter: {start: [adapter], rank: [4], alpha: [8.0], dropout: [0.1], targets: [[.*q_proj]], ranks: [{.*q_proj: 4}]}
    optim: {lr: [1.0e-4], embedding_lr: [1.0e-4], norm_lr: [1.0e-4], scale_lr: [1.0e-4], act_scale_lr: [1.0e-4],
      adapter_lr: [1.0e-4], min_lr_ratio: [0.0], warmup_steps: [0, 10], warmup_ratio: [0.1],
      decay_steps: [3], weight_decay: [0.1], betas: [[0.9, 0.99]], eps: [1.0e-6], grad_clip: [0.0]}
    loss: {lm_weight: [0.0, 0.5], kd_weight: [0.0, 0.5], temperature: [2.0], top_k: [5], teacher: [teacher, self],
      teacher_cache: [cache], diagnostics_every: [5], chunk_tokens: [64]}
    eval: {every: [0, 100]}
    export: {dir: [served], template: [base.gguf], max_shard_size: [1GB]}
    """).items()
    for name, values in options.items()
} | {
    "output_dir": ["elsewhere"],
    "deepspeed": ["zero1"],
    "quant.scheme": [*PRESETS],
    "quant.schemes": [{"mine": SchemeRecipe(TensorSpec("int", 4, "group", 32))}],
    "quant.rules": [[RuleRecipe("none", first=1)]],
    "schedule": [
        [EventRecipe(1, fake_quant=False)],
        [EventRecipe(1, lr={"weights": 1e-5})],
        [EventRecipe(1, loss={"lm": 1})],
    ],
}
# What an option needs beside it that no default can give: a path, a number, another scheme.
NEEDS: dict[str, dict[str, Any]] = {
    "data.kind": {"data.server": "http://a:1", "loss.lm_weight": 0.0, "loss.kd_weight": 1.0, "loss.teacher": "teacher"},
    "loss.lm_weight": {"loss.kd_weight": 1.0, "loss.teacher": "teacher"},
    "loss.kd_weight": {"loss.teacher": "teacher"},
    "loss.kd": {"loss.top_k": 5},
    "loss.teacher_cache": {"loss.top_k": 5},
    "eval.every": {"data.held_out": 4},
    "quant.init": {"quant.scheme": "w4a16_g32"},
    "quant.calibration_batches": {"quant.scales": "ptq"},
    "export.format": {"adapter.kind": "lora", "adapter.merge": False},
}
RECIPES = [[path] for path in sorted((ROOT / "launch" / "recipes").glob("*.yaml"))]
SCHEMES = sorted((ROOT / "launch" / "recipes" / "schemes").glob("*.yaml"))


def cases() -> Iterator[tuple[str, Any]]:
    """Every option with each of its values, null left out."""
    for key, _, item in recipe_options(minimal()):
        kinds = [kind for one in (item.type, *get_args(item.type)) for kind in (one, *get_args(one))]
        listed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        values = VALUES.get(key) or listed or ([False, True] if item.type is bool else [])
        assert values, f"{key} is new: give it values in VALUES"
        yield from ((key, value) for value in values)


def problems(said: dict[str, Any]) -> list[str]:
    """What is refused of a recipe with these options, built in Python."""
    sections: dict[str, Any] = {key: value for key, value in said.items() if "." not in key}
    for section, name in (key.split(".") for key in said if "." in key):
        sections.setdefault(section, {})[name] = said[f"{section}.{name}"]
    try:
        minimal(**sections)
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
        lines = problems({key: value})
        if lines and not all(map(is_idle, lines)):
            refused[key] = lines
            assert problems({key: value, **NEEDS.get(key, {})}) == [], (key, value, lines)
    assert refused.keys() == NEEDS.keys()


@pytest.mark.parametrize("files", [*RECIPES, *([path] for path in SCHEMES)], ids=lambda files: files[0].stem)
def test_an_option_on_a_shipped_recipe_contradicts_only_what_that_sets(tmp_path: Path, files: list[Path]) -> None:
    """Each line that refuses names two options that were set, one of them the option itself."""
    (tmp_path / "minimal.yaml").write_text(MINIMAL)
    files = files if files in RECIPES else [tmp_path / "minimal.yaml", *files]
    base = said_by(tmp_path, files)
    for key, value in cases():
        if key == "quant.schemes" and key in base:
            continue  # other schemes of its own take the place of the one that it names
        said = {**base, key: value}
        for line in problems(said):
            text = re.sub(r"\b(weight|weight_scale|norm)\b", r"learnable.\1", line) if "learnable: " in line else line
            named = {name for name in said if re.search(rf"\b{re.escape(name)}\b", text)}
            assert is_idle(line) or key in NEEDS or (key in named and len(named) >= 2), (key, value, line)
