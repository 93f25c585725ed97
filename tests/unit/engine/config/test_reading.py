"""Recipes from files and command lines: what is read, written back, and refused by the line it stands in."""

import dataclasses
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from engine.config.config import Recipe
from engine.config.errors import DERIVED, RecipeError
from engine.config.reading import load_recipe, parse_recipe, save_recipe
from engine.config.sections import EventRecipe, TrainRecipe
from quant import DEFAULT_EXEMPT
from tests.lib.processes import run_python
from tests.unit.engine.config.recipes import MINIMAL, minimal, refusal, write


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


def test_save_then_load_gives_the_same(tmp_path: Path, seed: int) -> None:
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
    assert load_recipe(path) == recipe
    assert set(yaml.safe_load(path.read_text())) == {item.name for item in dataclasses.fields(Recipe)}


def run_script(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script that only parses, in a process of its own, as train.py does."""
    return run_python("from engine.config.reading import parse_recipe; parse_recipe()", *argv, cwd=cwd, **environment)


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


def options() -> list[tuple[str, str, bool]]:
    """Every section and key of a recipe, and whether it takes null; a key outside all sections has section ""."""
    found = []
    for section in dataclasses.fields(Recipe):
        keys = dataclasses.fields(section.type) if dataclasses.is_dataclass(section.type) else ()
        found += [(section.name, key.name, type(None) in get_args(key.type) or DERIVED in key.metadata) for key in keys]
        if not keys:
            found.append(("", section.name, type(None) in get_args(section.type)))
    return found


@pytest.mark.parametrize(("section", "key", "takes_null"), options())
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


def test_what_would_be_read_for_ever_is_no_recipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(RecipeError, match=rf"^--config: '{path}': expected a YAML file of at most "):
            load_recipe(path)


@pytest.mark.parametrize("name", ["t", "steps", "r.yaml"])
def test_every_problem_has_its_file_however_short_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("train: {steps: 0}\nmodel: {path: m}\ndata: {train: [t.jsonl]}\noutput_dir: out\n")
    with pytest.raises(RecipeError) as refused:
        load_recipe(name)
    assert all(re.search(rf"(^|['\s]){name}['\s:,]", line) for line in str(refused.value).splitlines()), refused.value
