"""The recipe: what is read, what is refused, and what the refusal says. Every error names the key's path."""

import dataclasses
import itertools
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from engine.export import check_export
from engine.recipe.checks import CHECK, RecipeError, parse_size, value_problems
from engine.recipe.events import EventRecipe
from engine.recipe.loss import LossRecipe
from engine.recipe.paths import checkpoint_problems
from engine.recipe.reading import load_recipe, parse_recipe, save_recipe
from engine.recipe.recipe import Recipe
from engine.recipe.sections import DataRecipe, LearnableRecipe, ModelRecipe, TrainRecipe
from quant import DEFAULT_EXEMPT, PRESETS, Preset, Rule, Scheme, TensorSpec, get_scheme
from tests.processes import run_python
from tests.root import ROOT

SHIPPED = sorted((ROOT / "launch" / "recipes").glob("*.yaml"))
OF_SCHEMES = sorted((ROOT / "launch" / "recipes" / "schemes").glob("*.yaml"))

CACHED = "--loss.kd_weight 1 --loss.kd kl_top_k --loss.top_k 5 --loss.teacher_cache c"
FROZEN = "--learnable.weight false"
FOLLOW = "--quant.scales_follow_weights true --quant.weight_range absmax"

MINIMAL = """\
model: {path: model}
data: {train: [train.jsonl]}
train: {steps: 10}
output_dir: out
"""


def minimal(**sections: Any) -> Recipe:
    """The smallest valid recipe, with whole sections replaced."""
    values: dict[str, Any] = {
        "model": ModelRecipe(path="model"),
        "data": DataRecipe(train=["train.jsonl"]),
        "train": TrainRecipe(steps=10),
        "output_dir": "out",
    }
    return Recipe(**(values | sections))


def write(directory: Path, extra: str = "") -> Path:
    path = directory / "recipe.yaml"
    path.write_text(MINIMAL + extra, encoding="utf-8")
    return path


def refusal(*argv: str) -> list[str]:
    """What is wrong with a bad command line, a line each; reading it must only raise."""
    with pytest.raises(RecipeError) as refused:
        parse_recipe(argv, check_files=False)
    lines = str(refused.value).splitlines()
    assert lines
    assert all(lines), lines
    return lines


# ---------------------------------------------------------------------------------------------------------- reading


def test_file_then_overrides_then_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "optim: {lr: 3e-4, warmup_steps: 2}\n")
    recipe = parse_recipe(
        ["--config", str(path), "--optim.lr", "2e-5", "--optim.betas=[0.8, 0.9]", "--local_rank=3"], check_files=False
    )
    assert recipe.optim.lr == 2e-5
    assert recipe.optim.warmup_steps == 2
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.optim.scale_lr == 1e-3
    assert recipe.quant.exempt == list(DEFAULT_EXEMPT)


def test_python_and_yaml_give_the_same(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path)) == minimal()


def test_field_map_and_lists_from_the_command_line(tmp_path: Path) -> None:
    argv = ["--config", str(write(tmp_path)), "--data.fields", "{input: question, output: answer}"]
    recipe = parse_recipe([*argv, "--data.train", "[a.jsonl, b.jsonl]"], check_files=False)
    assert recipe.data.fields == {"input": "question", "output": "answer"}
    assert recipe.data.train == ["a.jsonl", "b.jsonl"]


def test_held_out_is_a_number_or_a_share(tmp_path: Path) -> None:
    for text, value in (("5", 5), ("0.25", 0.25)):
        recipe = parse_recipe(["--config", str(write(tmp_path)), "--data.held_out", text], check_files=False)
        assert recipe.data.held_out == value and type(recipe.data.held_out) is type(value)


def test_defaults_are_values_that_their_knobs_take() -> None:
    sections = [getattr(minimal(), item.name) for item in dataclasses.fields(Recipe)]
    sections = [section for section in sections if dataclasses.is_dataclass(section)]
    assert len(sections) == 10
    seen = 0
    for section in sections:  # Recipe.validate passes over defaults
        for item in dataclasses.fields(section):
            values = getattr(section, item.name)
            for value in values if "each" in item.metadata else [values]:
                seen += CHECK in item.metadata
                assert list(value_problems(item.name, value, item.metadata)) == []
    assert seen > 30


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"kind": "text", "loss_on": "all"}, "data.loss_on: 'all', expected last with data.kind text"),
        ({"weights": [1.0, 2.0]}, "data.weights: [1.0, 2.0], expected one per file of data.train"),
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


def random_value(rng: random.Random, value: Any) -> Any:
    """Another value of the same type, within the bounds of every number."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.randint(1, 5)
    if isinstance(value, float):
        return value * rng.uniform(0.5, 0.99)
    return value


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("best", "best"), ("step_00000012", "step_00000012")]
)
def test_what_to_resume_from(tmp_path: Path, text: str, value: bool | str) -> None:
    argv = ["--config", str(write(tmp_path)), "--train.resume", text]
    path = write(tmp_path)
    path.write_text(MINIMAL.replace("steps: 10", f"steps: 10, resume: {text}"), encoding="utf-8")
    for recipe in (load_recipe(path), parse_recipe(argv, check_files=False)):
        assert recipe.train.resume == value and type(recipe.train.resume) is type(value)


def test_save_then_load_gives_the_same(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    recipe = minimal(train=TrainRecipe(steps=1000), deepspeed="zero1")
    for name in ("optim", "train", "data", "learnable"):
        section = getattr(recipe, name)
        for item in dataclasses.fields(section):
            setattr(section, item.name, random_value(rng, getattr(section, item.name)))
    recipe.optim.schedule = "wsd"
    recipe.schedule = [
        EventRecipe(at=rng.randrange(1000), fake_quant=rng.choice([True, False, "weights"]), layers=r".*\.0\..*"),
        EventRecipe(when="loss/lm < 2.5", lr={"weights": rng.random()}, loss={"lm": rng.random()}, freeze_scales=True),
    ]
    recipe.optim.betas = (rng.random(), rng.random())
    recipe.learnable.weight = True
    recipe.data.fields = {"input": "größe: {odd}", "output": "a'b"}
    recipe.validate()
    path = tmp_path / "saved.yaml"
    save_recipe(recipe, path)
    assert load_recipe(path) == recipe, f"seed {seed}"
    assert set(yaml.safe_load(path.read_text())) == {item.name for item in dataclasses.fields(Recipe)}


def run_script(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script that only parses, in a process of its own, as train.py does."""
    return run_python("from engine.recipe.reading import parse_recipe; parse_recipe()", *argv, cwd=cwd, **environment)


def test_help_documents_every_field(tmp_path: Path) -> None:
    shown = run_script("--help", cwd=tmp_path, COLUMNS="400")
    assert shown.returncode == 0, shown.stderr
    options = "\n" + shown.stdout.split("\noptions:\n")[1]
    for section in dataclasses.fields(Recipe):
        nested = dataclasses.fields(section.type) if dataclasses.is_dataclass(section.type) else ()
        for key in [f"--{section.name}.{item.name}" for item in nested] or [f"--{section.name}"]:
            entry = re.search(rf"\n  {re.escape(key)}[ ,](.*?)(?=\n  --|\n\n|$)", options, re.DOTALL)
            assert entry, key
            # A sentence before type and default; a field without a docstring has the value's placeholder there.
            described = re.split(r"\((?:required|type)", " ".join(entry[1].split()))[0]
            assert re.search(r"\w[).\"]*\. *$", described), f"{key}: {entry[0]}"


def test_print_config_is_a_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, "optim: {lr: 3e-4}\n")
    shown = run_script("--config", str(path), "--quant.scheme", "w4a16_g32", "--print_config", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "printed.yaml").write_text(shown.stdout)
    recipe = load_recipe(tmp_path / "printed.yaml")
    assert (recipe.optim.lr, recipe.quant.scheme) == (3e-4, "w4a16_g32")


# --------------------------------------------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("extra", "line", "said"),
    [
        ("optimm: {lr: 1}", 5, "optimm: unknown key; did you mean optim?"),
        ("output: {}", 5, "output: unknown key; did you mean output_dir?"),
        ("xyz: 1", 5, "xyz: unknown key; expected one of model, data,"),
        ("optim:\n  eps: 1e-8\n  warmup: 3", 7, "optim.warmup: unknown key; did you mean optim.warmup_steps?"),
        ("output_dir: other", 5, "output_dir: this key is there twice"),
        ("optim: {lr: 1, eps: 1, lr: 2}", 5, "optim.lr: this key is there twice"),
        ("optim:", 5, "optim: expected keys and values below it"),
        ("optim: 3", 5, "optim: expected keys and values below it"),
        ("data.kind: text", 5, "data.kind: unknown key"),
        ("optim: {lr: ", 6, "not YAML"),
        (f"optim: {{lr: 1{'0' * 400}}}", 5, "optim.lr: 1000000"),
        ("optim: {betas: [0.9, null]}", 5, "optim.betas[1]: null, expected a value"),
    ],
)
def test_bad_keys_in_the_file(tmp_path: Path, extra: str, line: int, said: str) -> None:
    path = write(tmp_path, extra + "\n")
    assert refusal("--config", str(path))[0].startswith(f"{path}, line {line}: {said}")


def knobs() -> list[tuple[str, str, bool]]:
    """Every section and key of a recipe, and whether its type has None; a key outside all sections has section ""."""
    found = []
    for section in dataclasses.fields(Recipe):
        keys = dataclasses.fields(section.type) if dataclasses.is_dataclass(section.type) else ()
        found += [(section.name, key.name, type(None) in get_args(key.type)) for key in keys]
        if not keys:
            found.append(("", section.name, type(None) in get_args(section.type)))
    return found


@pytest.mark.parametrize(("section", "key", "takes_null"), knobs())
def test_a_key_without_a_value_is_refused_unless_its_type_has_none(tmp_path, section, key, takes_null) -> None:
    """Every key that there is, so that a new one cannot be forgotten."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{section}:\n  {key}:\n" if section else f"{key}:\n")
    said = "\n".join(refusal("--config", str(path)))
    line, name = (2, f"{section}.{key}") if section else (1, key)
    assert (f"{path}, line {line}: {name}: null, expected a value" in said) is not takes_null


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ("schedule: [evil_module.Evil]", 1, "schedule[0]"),
        ("schedule:\n- at: 1\n  lr: {weights: }", 3, "schedule[0].lr.weights"),
        ("quant:\n  rules: [evil_module.Evil]", 2, "quant.rules[0]"),
        ("quant:\n  schemes: {mine: evil_module.Evil}", 2, "quant.schemes.mine"),
        ("quant:\n  schemes:\n    mine:\n      weights: evil_module.Evil", 4, "quant.schemes.mine.weights"),
        ("quant:\n  schemes:\n    mine:\n      activations: evil_module.Evil", 4, "quant.schemes.mine.activations"),
        (
            "quant:\n  schemes:\n    mine: {weights: {class_path: evil_module.Evil}}",
            3,
            "quant.schemes.mine.weights.class_path",
        ),
        ("model: evil_module.Evil", 1, "model"),
        ("data: {train: [evil.jsonl, null]}", 1, "data.train[1]"),
    ],
)
def test_a_recipe_is_plain_data_that_imports_nothing(tmp_path, monkeypatch, text: str, line: int, name: str) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')\nclass Evil: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "recipe.yaml"
    path.write_text(text + "\n")
    assert refusal("--config", str(path))[0].startswith(f"{path}, line {line}: {name}: ")
    assert "evil_module" not in sys.modules


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"text\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert str(path) in refusal("--config", str(path))[0]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert refusal("--config", str(path)) == [f"--config: '{path}': No such file or directory"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--optim.lrr 3", "unrecognized arguments: --optim.lrr 3; did you mean --optim.lr?"),
        ("--optim.l 3", "unrecognized arguments: --optim.l 3"),
        ("--optim.lr x", "optim.lr: Expected a float. Got value: x"),
        ("--train.steps 1.5", "train.steps: Expected a int. Got value: 1.5"),
        ("--train.steps true", "train.steps: Expected a int. Got value: True"),
        ("--learnable.norm 1", "learnable.norm: Expected a bool. Got value: 1"),
        (
            "--loss.kd foo",
            "loss.kd: Expected one of ['kl', 'rkl', 'mse', 'cakld', 'kd', 'kl_top_k', 'r_kl_top_k']. Got",
        ),
        ("--optim.betas [0.9]", "optim.betas: Expected a tuple with 2 elements. Got value: [0.9]"),
        ("--data.train a.jsonl", "data.train: Expected a list. Got value: a.jsonl"),
        ("left over", "unrecognized arguments: left over"),
    ],
)
def test_bad_options(tmp_path: Path, options: str, said: str) -> None:
    assert refusal("--config", str(write(tmp_path)), *options.split())[0].startswith(said)


def test_required_keys_are_named() -> None:
    missing = ("data.train", "train.steps", "output_dir")
    assert refusal("--model.path", "m") == [f"{key}: missing, expected a value" for key in missing]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model.path=", "model.path: ''"),
        ("--quant.scheme fp9", "quant.scheme: 'fp9', expected one of fp8_static,"),
        ("--quant.exempt [a,(]", "quant.exempt[1]: '(', expected a regular expression"),
        ("--quant.calibration_batches -1", "quant.calibration_batches: -1, expected at least 0"),
        ("--quant.initial_input_scale 0 --quant.calibration_batches 0", "quant.initial_input_scale: 0.0, expected a"),
        (
            "--quant.initial_input_scale .5",
            "quant.initial_input_scale: 0.5, expected null or quant.calibration_batches 0",
        ),
        ("--quant.calibration_batches 0", "quant.calibration_batches: 0, expected 1 or more"),
        ("--quant.fake_quant_start -2", "quant.fake_quant_start: -2, expected at least -1"),
        ("--quant.fake_quant_start 10", "quant.fake_quant_start: 10, expected below train.steps (10)"),
        ("--learnable.weight false --learnable.weight_scale false", "learnable: nothing is learnable"),
        ("--learnable.weight false --quant.fake_quant_start -1", "quant.fake_quant_start: -1 (never)"),
        ("--learnable.act_scale true --quant.scheme w4a16_g32", "learnable.act_scale: True, expected false"),
        ("--quant.initial_input_scale 1 --quant.scheme w4a16_g32", "quant.initial_input_scale: 1.0, expected null"),
        (f"{FOLLOW} --quant.weight_range auto", "quant.weight_range: 'auto', expected absmax, since quant.scales_foll"),
        (f"{FOLLOW} --quant.scales ptq", "quant.scales: 'ptq', expected null: quant.scales_follow_weights replaces"),
        (f"{FOLLOW} --quant.scheme fp8_kv", "quant.scales_follow_weights: True, expected false: quant.scheme fp8_kv"),
        (
            "--quant.signed_scales true --quant.scheme w4a16_asym",
            "quant.signed_scales: True, expected false: no scheme",
        ),
        (
            "--quant.scheme fp8_kv --learnable.weight false",
            "learnable: only weight_scale is true, expected act_scale, weight or norm too: quant.scheme fp8_kv has no",
        ),
        ("--data.train []", "data.train: [], expected at least one file"),
        ("--data.kind text --data.fields {input:a}", "data.fields"),
        ("--data.max_length 1", "data.max_length: 1, expected at least 2"),
        ("--data.micro_batch_size 0", "data.micro_batch_size: 0, expected at least 1"),
        ("--data.seed -1", "data.seed: -1, expected at least 0"),
        (f"--data.seed 1{'0' * 400}", "data.seed: 1000000"),
        (f"--optim.lr 1{'0' * 400}", "optim.lr: an integer beyond every float, expected a number that 64 bits hold"),
        (f"--train.log_every {2**63}", f"train.log_every: {2**63}, expected at least 1, and a number that 64 bits"),
        ("--optim.lr=-1e-5", "optim.lr: -1e-05, expected at least 0"),
        ("--optim.scale_lr -1", "optim.scale_lr: -1.0, expected at least 0"),
        ("--optim.min_lr_ratio 1.1", "optim.min_lr_ratio: 1.1, expected between 0 and 1"),
        ("--optim.warmup_steps 11", "optim.warmup_steps: 11, expected at most 10 (train.steps)"),
        ("--optim.weight_decay -1", "optim.weight_decay: -1.0, expected at least 0"),
        ("--optim.betas [0.9,1]", "optim.betas: (0.9, 1.0), expected two numbers in [0, 1)"),
        ("--optim.eps 0", "optim.eps: 0.0, expected at least 1e-30"),
        ("--optim.eps 1e-46", "optim.eps: 1e-46, expected at least 1e-30"),  # 0 in fp32
        ("--optim.grad_clip -1", "optim.grad_clip: -1.0, expected at least 0"),
        ("--optim.grad_clip .inf", "optim.grad_clip"),
        ("--loss.lm_weight 0", "loss.lm_weight, loss.kd_weight: both 0"),
        ("--loss.lm_weight -1", "loss.lm_weight: -1.0, expected at least 0"),
        ("--loss.kd_weight 1", "loss.teacher: None, expected a directory since loss.kd_weight is 1.0"),
        ("--loss.kd kd --loss.temperature 0", "loss.temperature: 0.0, expected a number above 0"),
        ("--loss.kd kl --loss.temperature 2", "loss.temperature: 2.0, expected 1.0: loss.kd kl has no temperature"),
        ("--loss.kd kl_top_k", "loss.top_k: None, expected a number of tokens, like 100: loss.kd is kl_top_k"),
        ("--loss.kd r_kl_top_k --loss.top_k 0", "loss.top_k: 0, expected at least 1"),
        ("--loss.kd kl --loss.tail true", "loss.tail: True, expected false: loss.kd kl is of the whole vocabulary"),
        ("--loss.diagnostics_every -1", "loss.diagnostics_every: -1, expected at least 0"),
        ("--loss.kd_weight 1 --loss.teacher self", "loss.teacher: 'self', expected learnable.weight"),
        (f"{CACHED} --loss.kd cakld", "loss.kd: 'cakld', expected kl_top_k: with loss.teacher_cache"),
        (f"{CACHED} --loss.kd r_kl_top_k", "loss.kd: 'r_kl_top_k', expected kl_top_k"),
        (f"{CACHED} --loss.diagnostics_every 5", "loss.diagnostics_every: 5, expected 0"),
        (
            f"{CACHED} --eval.every 2 --data.held_out 5 --eval.best total",
            "eval.best: 'total', expected lm: loss.teacher_cache holds no held-out samples",
        ),
        (f"{CACHED} --loss.teacher_cache=", "loss.teacher_cache: ''"),
        (f"{CACHED} {FROZEN} --loss.teacher self", "loss.teacher: 'self', expected a directory or null"),
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


@pytest.mark.parametrize(
    "options",
    [
        "--quant.fake_quant_start 9",
        "--quant.fake_quant_start -1",
        "--quant.calibration_batches 0 --quant.fake_quant_start 3",
        "--quant.calibration_batches 0 --quant.initial_input_scale 0.1",
        "--quant.calibration_batches 0 --quant.scales ptq",
        "--quant.calibration_batches 0 --quant.scheme w2a16_g32",
        "--learnable.weight false --learnable.weight_scale false --learnable.norm true",
        "--learnable.weight false --learnable.act_scale true",
        "--loss.lm_weight 0 --loss.kd_weight 1 --loss.teacher t",
        "--loss.kd_weight 1 --loss.teacher t --loss.kd kd --loss.temperature 2",
        "--loss.kd_weight 1 --loss.teacher t --loss.kd r_kl_top_k --loss.top_k 5 --loss.tail true",
        f"--loss.kd_weight 1 --loss.teacher self {FROZEN}",
        CACHED,
        f"{CACHED} --loss.teacher t --loss.tail true",
        "--optim.grad_clip 0",
        "--optim.warmup_steps 10",
    ],
)
def test_values_at_the_edge_pass(tmp_path: Path, options: str) -> None:
    parse_recipe(["--config", str(write(tmp_path)), *options.split()], check_files=False)


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


# ------------------------------------------------------------------------------------------------------------ files


def test_files_are_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "teacher"):
        (tmp_path / name).mkdir()
    recipe = minimal()
    recipe.loss.kd_weight, recipe.loss.teacher, recipe.quant.scales = 1.0, "teacher", "ptq"
    recipe.data.eval = ["eval.jsonl"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as error:
        recipe.validate_files()
    here = f"(in {os.getcwd()})"
    assert str(error.value).splitlines() == [
        f"model.path: 'model' {here}, expected config.json in that directory (a Hugging Face checkpoint)",
        f"loss.teacher: 'teacher' {here}, expected config.json in that directory (a Hugging Face checkpoint)",
        f"quant.scales: 'ptq' {here}, expected the directory of a PTQ checkpoint",
        f"data.train[0]: 'train.jsonl' {here}, expected a file",
        f"data.eval[0]: 'eval.jsonl' {here}, expected a file",
    ]
    for name in ("model", "teacher"):
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "ptq").mkdir()
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "eval.jsonl").write_text("")
    recipe.validate_files()
    recipe.model.path = str(tmp_path / "no")
    with pytest.raises(RecipeError, match=r"no', expected a directory with config\.json"):
        recipe.validate_files()


def test_a_teacher_that_is_not_used_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("")
    recipe = minimal()
    recipe.loss.teacher = "nowhere"
    recipe.validate_files()


def test_a_cached_teacher_is_looked_for_and_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("")
    recipe = minimal()
    recipe.loss.kd_weight, recipe.loss.teacher, recipe.loss.teacher_cache = 1.0, "nowhere", "cache"
    with pytest.raises(RecipeError, match=r"loss.teacher_cache: 'cache' .*cache_teacher\.py wrote"):
        recipe.validate_files()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "manifest.json").write_text("{}")
    recipe.validate_files()


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


def test_the_student_is_no_teacher_while_it_changes() -> None:
    recipe = minimal()
    recipe.loss.kd_weight, recipe.loss.teacher = 1.0, "self"
    recipe.learnable.norm = True
    with pytest.raises(RecipeError, match=r"expected learnable\.weight and learnable\.norm to be false"):
        recipe.validate()
    recipe.learnable.weight = recipe.learnable.norm = False
    recipe.validate()


def test_parse_recipe_checks_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"data\.train\[0\]: 'train\.jsonl'"):
        parse_recipe(["--config", str(write(tmp_path))])


# ---------------------------------------------------------------------------------------------------- sizes, shipped


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


@pytest.mark.parametrize("target", [None, "nowhere"])
def test_an_output_directory_that_is_a_file_is_named_before_ranks_meet(tmp_path: Path, target: str | None) -> None:
    path = tmp_path / "out"
    if target is None:
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path / target)
    recipe = minimal(output_dir=str(path))
    with pytest.raises(RecipeError, match=rf"output_dir: '{path}', expected a directory, or no file of that name"):
        recipe.validate_files()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_a_gigabyte_of_json_is_not_read(tmp_path: Path, name: str) -> None:
    for file in {"config.json", name}:
        (tmp_path / file).write_text("{}")
    with (tmp_path / name).open("r+b") as stream:
        stream.truncate(2**30)
    (problem,) = checkpoint_problems("model.path", str(tmp_path))
    assert problem == f"model.path: '{tmp_path / name}' has 1,073,741,824 bytes, expected at most 268,435,456"


def test_a_layout_that_cannot_hold_a_scheme_is_refused_before_any_work(tmp_path: Path) -> None:
    recipe = minimal(output_dir=str(tmp_path / "out"))
    recipe.export.format = "vllm_fp8"
    check_export(recipe)
    recipe.quant.lm_head = "w8a16_channel"
    with pytest.raises(RecipeError, match=r"^export.format: .* got fp8_static, w8a16_channel"):
        check_export(recipe)
    recipe.export.format = "compressed"
    check_export(recipe)


def test_a_recipe_is_shipped_per_preset_and_model() -> None:
    assert {path.stem for path in OF_SCHEMES} == set(PRESETS)
    sizes = {"qwen3_0_6b", "qwen3_4b", "qwen3_30b_a3b", "llama3_2_1b", "llama3_8b", "llama3_70b"}
    assert {path.stem for path in SHIPPED} == {
        *sizes,
        "qwen3_4b_fp8_scales_only",
        "llama3_70b_lora",
        "qwen3_30b_a3b_lora",
        "low_bits",
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    relative = path.relative_to(ROOT)
    assert f"launch/train.py --config {relative}" in path.read_text().split("\n\n")[0], "it opens with its command"
    assert recipe.output_dir == f"runs/{path.stem}"
    assert (ROOT / "ds_configs" / f"{recipe.deepspeed}.json").is_file()
    if "scales_only" in path.stem:
        learn = recipe.learnable
        assert dataclasses.astuple(learn) == (False, True, True, True, False, False, [])
    if "lora" in path.stem:  # in which a step meets the bar of benchmarks/adapters.py
        assert recipe.adapter.merge and not recipe.learnable.weight_scale


@pytest.mark.parametrize("path", OF_SCHEMES, ids=lambda path: path.stem)
def test_recipe_of_a_scheme(path: Path) -> None:
    """It opens with its command, which works on the files that are there."""
    text = path.read_text()
    command = " ".join(line.strip("# \\") for line in text.split("\n\n")[0].splitlines()[2:])
    words = command.split()
    named = [ROOT / word for before, word in itertools.pairwise(words) if before == "--config"]
    assert named[1] == path and all(file.is_file() for file in named), command
    assert words[-1] == f"runs/qwen3_4b_{path.stem}"
    # On one of the models: what a scheme sets, no model does.
    whole = [one for one in SHIPPED if not any(word in one.stem for word in ("only", "lora", "low_bits"))]
    model = whole[OF_SCHEMES.index(path) % len(whole)]
    recipe = parse_recipe(["--config", str(model), "--config", str(path)], check_files=False)
    assert recipe.quant.preset() == PRESETS[path.stem] and recipe.output_dir == f"runs/{model.stem}"


# --------------------------------------------------------------------------------------------------- several schemes

SCHEMES_OF_ONES_OWN = """\
quant:
  scheme: mine
  schemes:
    mine: {weights: {dtype: int, bits: 4, granularity: group, group_size: 64}, activations: {dtype: fp8_e4m3,
      granularity: token, dynamic: true}}
  rules:
    - {first: 1, last: 2, scheme: none}
    - {layers: '.*mlp.*', scheme: w3a16_channel}
  lm_head: w8a16_channel
"""


def test_schemes_are_composed_and_given_by_rules(tmp_path: Path) -> None:
    """And the file that a run keeps reads back equal."""
    recipe = load_recipe(write(tmp_path, SCHEMES_OF_ONES_OWN))
    mine = Scheme("mine", TensorSpec("int", 4, "group", 64), TensorSpec("fp8_e4m3", 8, "token", dynamic=True))
    assert recipe.quant.preset() == Preset(mine)
    assert recipe.quant.chosen_rules() == [
        Rule(None, first=1, last=2),
        Rule(get_scheme("w3a16_channel"), layers=".*mlp.*"),
    ]
    assert recipe.quant.head_scheme() == get_scheme("w8a16_channel")
    assert recipe.quant.quantises_activations() and not recipe.quant.stores_input_scales()
    save_recipe(recipe, tmp_path / "again.yaml")
    assert load_recipe(tmp_path / "again.yaml") == recipe


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("bits: 4", "bits: 9", "quant.schemes.mine: int codes have 2 to 8 bits, got bits=9"),
        ("bits: 4", "bitts: 4", "line 8: quant.schemes.mine.weights.bitts: unknown key; did you mean quant."),
        ("granularity: group,", "granularity: tensor,", "quant.schemes.mine: group_size goes with granularity"),
        ("first: 1", "frist: 1", "line 11: quant.rules[0].frist: unknown key; did you mean quant.rules[0].first?"),
        ("first: 1, last: 2, ", "", "quant.rules[0]: every layer, expected layers, first or last"),
        ("last: 2", "last: 0", "quant.rules[0].last: 0, expected at least 1"),
        ("scheme: none", "scheme: nope", "quant.rules[0].scheme: 'nope', expected one of none, fp8_static, "),
        ("'.*mlp.*'", "'('", "quant.rules[1].layers: '(', expected a regular expression"),
        ("lm_head: w8a16_channel", "lm_head: mine", "quant.lm_head: 'mine', expected one of w8a16_g128, "),
        ("    mine: {w", "    fp8_kv: {w", "quant.schemes.fp8_kv: a name that is taken, expected another one"),
        ("lm_head: w8a16_channel", "compute: fp8_gemm", "quant.compute: 'fp8_gemm', expected auto or simulate"),
    ],
)
def test_a_scheme_that_cannot_be_is_named(tmp_path: Path, old: str, new: str, line: str) -> None:
    text = SCHEMES_OF_ONES_OWN.replace(old, new)
    assert text != SCHEMES_OF_ONES_OWN
    with pytest.raises(RecipeError, match=re.escape(line)):
        load_recipe(write(tmp_path, text))


def test_a_file_is_named_once_whatever_its_path(tmp_path: Path) -> None:
    """Twice, every sample that is held out would be trained on."""
    data = tmp_path / "a.jsonl"
    data.touch()
    (tmp_path / "link.jsonl").symlink_to(data)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    recipe = minimal()
    recipe.model.path = str(model)
    recipe.data.train = [str(data)]
    recipe.validate_files()
    recipe.data.eval = [str(tmp_path / "link.jsonl")]
    with pytest.raises(RecipeError, match=r"^data\.eval\[0\]: .*link\.jsonl' is data\.train\[0\], expected each"):
        recipe.validate_files()
    recipe.data.eval = [f"{tmp_path}/model/../a.jsonl"]
    with pytest.raises(RecipeError, match=r"^data\.eval\[0\]: "):
        recipe.validate()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deep for a recipe"),
        ("data: &a\n  train: *a\n", "more than 100,000 values, its aliases"),
        (
            "\n".join(["a0: &a0 [x]", *(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]" for i in range(40))]),
            "its aliases (*name)",
        ),
    ],
)
def test_a_text_that_stands_for_billions_of_values_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as refused:
        load_recipe(file)
    assert str(refused.value).startswith(f"{file}: ") and said in str(refused.value)


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("optim.lr", "1e300", "optim.lr: 1e+300, expected at least 0, and a number that fp32 holds"),
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


def test_what_would_be_read_for_ever_is_no_recipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(RecipeError, match=rf"^--config: '{path}': expected a YAML file of at most "):
            load_recipe(path)


def test_an_export_is_not_renamed_to_a_link(tmp_path):
    """The directory behind it may be there and empty, be elsewhere, or nowhere."""
    (tmp_path / "there").mkdir()
    for name, target in (("to", "there"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for name in ("to", "dangling", "loop", "loop/export"):
        made = load_recipe(write_links(tmp_path, name))
        with pytest.raises(RecipeError, match=rf"^export\.dir: '.*{name}': it is a link, or lies behind one"):
            check_export(made)
    check_export(load_recipe(write_links(tmp_path, "to/export")))


def write_links(directory, name):
    path = directory / "links.yaml"
    path.write_text(
        f"model: {{path: model}}\ndata: {{train: [a.jsonl]}}\ntrain: {{steps: 1}}\noutput_dir: {directory}/out\n"
        f"export: {{dir: {directory}/{name}}}\n"
    )
    return path
