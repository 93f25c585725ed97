"""The recipe: the values that its options take and those that are refused, by the key's path."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from engine.config.config import Recipe
from engine.config.errors import CHECK, RecipeError, parse_size, value_problems
from engine.config.reading import parse_recipe
from engine.config.sections import DataRecipe, EventRecipe, LearnableRecipe, LossRecipe, TrainRecipe
from tests.unit.engine.config.recipes import minimal, refusal, write

BESIDE = "--adapter.kind lora --adapter.merge false"
CACHED = "--loss.kd_weight 1 --loss.kd kl_top_k --loss.top_k 5 --loss.teacher_cache c"


def test_defaults_are_values_that_their_options_take() -> None:
    sections = [getattr(minimal(), item.name) for item in dataclasses.fields(Recipe)]
    sections = [section for section in sections if dataclasses.is_dataclass(section)]
    assert len(sections) == 10
    seen = 0
    for section in sections:  # Recipe.validate passes over defaults but for derived ones
        for item in dataclasses.fields(section):
            values = getattr(section, item.name)
            for value in values if "each" in item.metadata else [values]:
                seen += CHECK in item.metadata
                assert list(value_problems(item.name, value, item.metadata)) == []
    assert seen > 30


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"weights": [0.0]}, "data.weights: [0.0], expected numbers above 0"),
        ({"weights": [math.nan]}, "data.weights: [nan], expected numbers above 0"),
        (
            {"train": ["a", "./a"], "weights": [1.0, 1.0]},
            "data.train[1]: './a' is data.train[0], expected each file once (data.weights says",
        ),
        ({"held_out": -1}, "data.held_out: -1, expected a number of samples, or a share between 0 and 1"),
        ({"held_out": 1.0}, "data.held_out: 1.0, expected a number of samples, or a share between 0 and 1"),
        ({"held_out": math.nan}, "data.held_out: nan, expected a number of samples"),
        ({"eval": [""]}, "data.eval: [''], expected files"),
    ],
)
def test_bad_values_of_the_data_section(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError) as refused:
        minimal(data=DataRecipe(**({"train": ["a"]} | values)))
    found = str(refused.value).splitlines()
    assert len(found) == 1 and found[0].startswith(problem)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model.path=", "model.path: ''"),
        ("--quant.scheme fp9", "quant.scheme: 'fp9', expected one of fp8_static,"),
        ("--quant.exempt [a,(]", "quant.exempt[1]: '(', expected a regular expression"),
        ("--quant.calibration_batches -1", "quant.calibration_batches: -1, expected at least 0"),
        ("--quant.initial_input_scale 0 --quant.calibration_batches 0", "quant.initial_input_scale: 0.0, expected a"),
        ("--quant.fake_quant_start -2", "quant.fake_quant_start: -2, expected at least -1"),
        ("--data.train []", "data.train: [], expected at least one file"),
        ("--data.max_length 1", "data.max_length: 1, expected at least 2"),
        ("--data.micro_batch_size 0", "data.micro_batch_size: 0, expected at least 1"),
        ("--data.seed -1", "data.seed: -1, expected at least 0"),
        (f"--data.seed 1{'0' * 400}", "data.seed: 1000000"),
        (f"--optim.lr 1{'0' * 400}", "optim.lr: an integer beyond every float, expected a number that 64 bits hold"),
        (f"--train.log_every {2**63}", f"train.log_every: {2**63}, expected at least 1, and a number that 64 bits"),
        ("--optim.lr=-1e-5", "optim.lr: -1e-05, expected at least 0"),
        ("--optim.scale_lr -1", "optim.scale_lr: -1.0, expected at least 0"),
        ("--optim.min_lr_ratio 1.1", "optim.min_lr_ratio: 1.1, expected between 0 and 1"),
        ("--optim.weight_decay -1", "optim.weight_decay: -1.0, expected at least 0"),
        ("--optim.betas [0.9,1]", "optim.betas: (0.9, 1.0), expected two numbers in [0, 1)"),
        ("--optim.eps 0", "optim.eps: 0.0, expected at least 1e-30"),
        ("--optim.eps 1e-46", "optim.eps: 1e-46, expected at least 1e-30"),  # 0 in fp32
        ("--optim.grad_clip -1", "optim.grad_clip: -1.0, expected at least 0"),
        ("--optim.grad_clip .inf", "optim.grad_clip"),
        ("--loss.lm_weight -1", "loss.lm_weight: -1.0, expected at least 0"),
        ("--loss.lm_weight 1e38", "loss.lm_weight: 1e+38, expected at least 0, and a number that is at most 1e+15"),
        ("--loss.kd kd --loss.temperature 0", "loss.temperature: 0.0, expected a number above 0"),
        (
            "--loss.kd kd --loss.temperature 1e30",
            "loss.temperature: 1e+30, expected a number above 0, and a number that lies between 1e-15 and 1e+15",
        ),
        ("--loss.kd r_kl_top_k --loss.top_k 0", "loss.top_k: 0, expected at least 1"),
        ("--loss.diagnostics_every -1", "loss.diagnostics_every: -1, expected at least 0"),
        (f"{CACHED} --loss.teacher_cache=", "loss.teacher_cache: ''"),
        ("--adapter.kind lora --adapter.rank 0", "adapter.rank: 0, expected at least 1"),
        ("--adapter.kind lora --adapter.ranks {'(':3}", "adapter.ranks: {'(': 3}, expected regular expressions"),
        ("--adapter.base nf4", "adapter.base: Expected one of ['weights', 'quantized']. Got value: nf4"),
        *(
            (f"{BESIDE} --adapter.dropout {share}", f"adapter.dropout: {share}, expected a number of at")
            for share in (1.0, -0.1, 1.5)
        ),
        ("--loss.chunk_tokens 0", "loss.chunk_tokens: 0, expected at least 1"),
        ("--train.steps 0", "train.steps: 0, expected at least 1"),
        ("--train.seed 4294967296", "train.seed: 4294967296, expected 0 to 4294967295"),
        ("--train.gradient_accumulation_steps 0", "train.gradient_accumulation_steps: 0, expected at least 1"),
        ("--train.log_every 0", "train.log_every: 0, expected at least 1"),
        ("--train.quant_stats_every -1", "train.quant_stats_every: -1, expected at least 0"),
        ("--train.checkpoint_every -1", "train.checkpoint_every: -1, expected at least 0"),
        ("--train.keep_checkpoints 0", "train.keep_checkpoints: 0, expected at least 1"),
        ("--train.max_skipped_steps 0", "train.max_skipped_steps: 0, expected at least 1"),
        ("--train.resume step_12", "train.resume: 'step_12', expected true, false, best, or a name like step_00001000"),
        ("--train.resume ../step_00000012", "train.resume: '../step_00000012', expected true, false, best"),
        ("--export.max_shard_size 5XB", "export.max_shard_size: '5XB', expected a positive number and a unit"),
        ("--deepspeed=", "deepspeed: ''"),
        ("--output_dir=", "output_dir: ''"),
    ],
)
def test_bad_values(tmp_path: Path, options: str, said: str) -> None:
    """One problem, one line: a check that fires beside the right one would send the reader the wrong way."""
    lines = refusal("--config", str(write(tmp_path)), *options.split())
    assert len(lines) == 1, lines
    assert lines[0].startswith(said)


def test_all_problems_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        minimal(train=TrainRecipe(steps=10, log_every=0, keep_checkpoints=0), data=DataRecipe(train=[]))
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "data.train",
        "train.log_every",
        "train.keep_checkpoints",
    ]


def test_an_assignment_is_checked_by_validate() -> None:
    recipe = minimal()
    recipe.optim.eps = -1.0
    with pytest.raises(RecipeError, match=r"^optim\.eps: -1\.0, expected at least 1e-30$"):
        recipe.validate()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ({}, "none"),
        ({"teacher": "somewhere"}, "none"),
        ({"teacher_cache": "cache", "kd": "kl_top_k", "top_k": 5}, "none"),
        ({"kd_weight": 1.0, "teacher": "somewhere"}, "model"),
        ({"kd_weight": 1.0, "teacher": "self"}, "self"),
        ({"kd_weight": 1.0, "teacher": "somewhere", "teacher_cache": "cache", "kd": "kl_top_k", "top_k": 5}, "cache"),
    ],
)
def test_which_teacher_a_recipe_has(loss: dict[str, Any], kind: str) -> None:
    frozen = LearnableRecipe(weight=False)
    assert minimal(loss=LossRecipe(**loss), learnable=frozen).teacher_kind() == kind
    if kind == "model":
        later = minimal(loss=LossRecipe(**{**loss, "kd_weight": 0.0}), schedule=[EventRecipe(at=1, loss={"kd": 1.0})])
        assert later.teacher_kind() == kind


def test_parse_size() -> None:
    assert parse_size("5GB") == 5_000_000_000
    assert parse_size("500MB") == 500_000_000
    assert parse_size("1.5 kb") == 1500
    assert parse_size("2GiB") == 2 * 2**30
    assert parse_size("3MiB") == 3 * 2**20
    assert parse_size("17") == 17


@pytest.mark.parametrize("text", ["", "GB", "5 GBB", "-1GB", "0GB", "0.5", "1e9", "5G", "1.2.3MB"])
def test_what_is_no_size(text: str) -> None:
    assert parse_size(text) is None


def test_export_dir() -> None:
    recipe = minimal()
    assert recipe.export_dir() == Path("out/export")
    recipe.export.dir = "served"
    assert recipe.export_dir() == Path("served")


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("optim.lr", "1e300", "optim.lr: 1e+300, expected at least 0, and a number that is at most 10000"),
        ("optim.eps", "1e39", "optim.eps: 1e+39, expected at least 1e-30, and a number that fp32 holds"),
        (
            "output_dir",
            "a\0b",
            "output_dir: 'a\\x00b', expected a directory, in names of at most 255 bytes without NUL",
        ),
        ("output_dir", "x" * 256, "expected a directory, in names of at most 255 bytes without NUL"),
        ("output_dir", "x/" * 5000, "expected a directory, in names of at most 255 bytes without NUL"),
        ("schedule", "[{when: loss/lm < nan, fake_quant: true}]", "schedule[0].when: 'loss/lm < nan', expected like"),
        ("schedule", "[{when: loss/lm < inf, fake_quant: true}]", "schedule[0].when: 'loss/lm < inf', expected like"),
        (
            "schedule",
            "[{every: 1000000, fake_quant: true}]",
            "schedule[0].every: 1000000, expected at most train.steps",
        ),
        ("schedule", "[{at: 0, lr: {}}]", "schedule[0].lr: {}, expected one of weights"),
    ],
)
def test_values_that_no_run_can_use_are_named(option, value, problem, tmp_path):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(["--config", str(write(tmp_path)), f"--{option}", value], check_files=False)
    assert problem in str(caught.value)
