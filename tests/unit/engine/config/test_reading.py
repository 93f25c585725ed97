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

from engine.config.config import Recipe, recipe_options
from engine.config.errors import DERIVED, ONLY_WITH, RecipeError
from engine.config.quant import RuleRecipe, SchemeRecipe
from engine.config.reading import REPLACED, load_recipe, parse_recipe, save_recipe
from engine.config.sections import DataRecipe, EventRecipe, parse_condition
from quant import DEFAULT_EXEMPT, TensorSpec
from tests.lib.processes import run_python
from tests.lib.recipes import MINIMAL, minimal, refusal, write_minimal
from tests.lib.root import ROOT


def test_file_then_overrides_then_defaults(tmp_path: Path) -> None:
    path = write_minimal(tmp_path, "optim: {lr: 3e-4, warmup_steps: 2}\n")
    argv = ["--config", str(path), "--optim.lr", "2e-5", "--optim.betas=[0.8, 0.9]", "--local_rank=3"]
    argv += ["--data.fields", "{input: question, output: answer}", "--data.train", "[a.jsonl, b.jsonl]"]
    recipe = parse_recipe(argv, check_files=False)
    assert (recipe.optim.lr, recipe.optim.warmup_steps, recipe.optim.betas) == (2e-5, 2, (0.8, 0.9))
    assert recipe.optim.scale_lr == 1e-3 and recipe.quant.exempt == list(DEFAULT_EXEMPT)
    assert recipe.data.fields == {"input": "question", "output": "answer"}
    assert recipe.data.train == ["a.jsonl", "b.jsonl"]


def test_an_option_in_front_of_a_file_that_sets_it_is_named(tmp_path: Path, capfd) -> None:
    path = str(write_minimal(tmp_path, "optim: {lr: 3e-4}\n"))
    assert parse_recipe(["--optim.lr", "2e-5", "--config", path], check_files=False).optim.lr == 3e-4
    assert capfd.readouterr().err == f"warning: --optim.lr: {path}, which stands behind it, sets it again\n"
    assert (
        parse_recipe(["--optim.eps", "1e-7", "--config", path, "--optim.lr=2e-5"], check_files=False).optim.lr == 2e-5
    )
    assert capfd.readouterr().err == ""


OLD = """
schedule: [{at: 5, fake_quant: false, lr: {weights: 1e-6}}]
quant:
  scheme: w4a16_g32
  rules: [{layers: '.*up_proj', scheme: mine, first: 2}]
  schemes:
    mine:
      weights: {dtype: int, bits: 4, granularity: group, group_size: 32}
      activations: {dtype: int, bits: 8, granularity: token, dynamic: true}
"""
NEW = {
    "schedule": ("[{at: 9, lr: {weights: 1e-5}}]", [EventRecipe(at=9, lr={"weights": 1e-5})]),
    "quant.rules": (
        "[{layers: '.*down_proj', scheme: w8a16_channel}]",
        [RuleRecipe("w8a16_channel", layers=".*down_proj")],
    ),
    "quant.schemes": (
        "{mine: {weights: {dtype: int, bits: 8, granularity: channel}}}",
        {"mine": SchemeRecipe(TensorSpec("int", 8, "channel"))},
    ),
}


@pytest.mark.parametrize("by", ["option", "section", "file"])
@pytest.mark.parametrize("key", NEW)
def test_lists_of_sections_are_replaced_as_a_whole(tmp_path: Path, key: str, by: str) -> None:
    """jsonargparse fills what a new item leaves out from the item that had its place, or its name."""
    text, expected = NEW[key]
    section, _, name = key.rpartition(".")
    argv = ["--config", str(write_minimal(tmp_path, OLD))]
    (tmp_path / "new.yaml").write_text(f"{section}: {{{name}: {text}}}" if section else f"{name}: {text}")
    if by == "section" and section:
        argv += [f"--{section}", f"{{{name}: {text}}}"]
    else:
        argv += ["--config", str(tmp_path / "new.yaml")] if by == "file" else [f"--{key}", text]
    recipe = parse_recipe(argv, check_files=False)
    assert getattr(recipe.quant if section else recipe, name) == expected


def test_every_list_of_sections_is_replaced_as_a_whole() -> None:
    def sections(kind: Any) -> list[Any]:
        return [one for part in get_args(kind) for one in (part, *sections(part)) if dataclasses.is_dataclass(one)]

    nested = {key for key, _, item in recipe_options(minimal()) if sections(item.type)}
    assert nested == REPLACED.keys()


@pytest.mark.parametrize("words", [1, 2])
def test_a_plus_appends_to_the_default(tmp_path: Path, words: int) -> None:
    base = load_recipe(path := write_minimal(tmp_path))
    values = {"quant.exempt": ".*o_proj", "train.report_to": "wandb", "data.train": "b.jsonl"}
    lists = {key: found for key, owner, item in recipe_options(base) if (found := getattr(owner, item.name))}
    assert values.keys() == {key for key, found in lists.items() if isinstance(found, list)}
    for key, value in values.items():
        argv = [f"--{key}+={value}"] if words == 1 else [f"--{key}+", value]
        recipe = parse_recipe(["--config", str(path), *argv], check_files=False)
        assert getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) == [*lists[key], value]


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("data.held_out", "5", 5),
        ("data.held_out", "0.25", 0.25),
        ("train.resume", "true", True),
        ("train.resume", "false", False),
        ("train.resume", "best", "best"),
        ("train.resume", "step_00000012", "step_00000012"),
    ],
)
def test_options_of_several_types(tmp_path: Path, option: str, text: str, value: object) -> None:
    section, name = option.split(".")
    argv = ["--config", str(write_minimal(tmp_path)), f"--{option}", text]
    path = tmp_path / "one.yaml"
    path.write_text(re.sub(rf"({section}: {{.*)}}", rf"\1, {name}: {text}}}", MINIMAL))
    for recipe in (load_recipe(path), parse_recipe(argv, check_files=False)):
        found = getattr(getattr(recipe, section), name)
        assert found == value and type(found) is type(value)


def test_events_are_read_in_all_their_forms(tmp_path: Path) -> None:
    events = """\
schedule:
  - {at: 0, fake_quant: off}
  - {at: 2, fake_quant: on, layers: '.*mlp.*'}
  - {every: 3, fake_quant: weights, observe: false}
  - {when: loss/lm<=2.5, freeze_scales: true, lr: {weights: 1e-6}, loss: {lm: 2}}
"""
    assert load_recipe(write_minimal(tmp_path, events)).schedule == [
        EventRecipe(at=0, fake_quant=False),
        EventRecipe(at=2, fake_quant=True, layers=".*mlp.*"),
        EventRecipe(every=3, fake_quant="weights", observe=False),
        EventRecipe(when="loss/lm<=2.5", freeze_scales=True, lr={"weights": 1e-6}, loss={"lm": 2.0}),
    ]
    assert parse_condition("loss/lm<=2.5") == ("loss/lm", "<=", 2.5)


def other(value: Any) -> Any:
    """Draw another value of the same type, within the bounds of every number."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + random.randint(1, 5)
    return value * random.uniform(0.5, 0.99) if isinstance(value, float) else value


def test_save_then_load_gives_the_same(tmp_path: Path, seed: int) -> None:
    assert load_recipe(write_minimal(tmp_path)) == minimal()
    recipe = minimal(train={"steps": 1000}, deepspeed="zero1")
    for name in ("optim", "train", "data", "learnable"):
        section = getattr(recipe, name)
        for item in dataclasses.fields(section):
            setattr(section, item.name, other(getattr(section, item.name)))
    recipe.optim.schedule, recipe.optim.betas = "wsd", (random.random(), random.random())
    recipe.schedule = [
        EventRecipe(at=random.randrange(1000), fake_quant=random.choice([True, False, "weights"]), layers=r".*\.0\..*"),
        EventRecipe(when="loss/lm < 2.5", lr={"weights": random.random()}, loss={"lm": 0.1}, freeze_scales=True),
    ]
    for item in dataclasses.fields(DataRecipe):
        if "on_policy" in str(item.metadata.get(ONLY_WITH)):
            setattr(recipe.data, item.name, item.default)
    recipe.learnable.weight, recipe.learnable.kv_scale, recipe.optim.warmup_ratio = True, False, 0.0
    recipe.data.fields = {"input": "größe: {odd}", "output": "a'b"}
    recipe.validate()
    path = tmp_path / "saved.yaml"
    save_recipe(recipe, path)
    assert load_recipe(path) == recipe
    assert set(yaml.safe_load(path.read_text())) == {item.name for item in dataclasses.fields(Recipe)}


def run_script(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Parse in a process of its own, as train.py does."""
    return run_python("from engine.config.reading import parse_recipe; parse_recipe()", *argv, cwd=cwd, **environment)


def keys() -> list[tuple[str, str, bool]]:
    """Section and key of every option of a recipe, and if it takes null; a key outside all sections has section ""."""
    found = []
    for key, _, item in recipe_options(minimal()):
        section, _, name = key.rpartition(".")
        found.append((section, name, type(None) in get_args(item.type) or DERIVED in item.metadata))
    return found


def test_help_documents_every_field(tmp_path: Path) -> None:
    shown = run_script("--help", cwd=tmp_path, COLUMNS="400")
    assert shown.returncode == 0, shown.stderr
    options = "\n" + shown.stdout.split("\noptions:\n")[1]
    for section, name, _ in keys():
        key = f"--{section}.{name}" if section else f"--{name}"
        entry = re.search(rf"\n  {re.escape(key)}[ ,](.*?)(?=\n  --|\n\n|$)", options, re.DOTALL)
        assert entry, key
        # A sentence before type and default; a field without a docstring has the value's placeholder there.
        described = re.split(r"\((?:required|type)", " ".join(entry[1].split()))[0]
        assert re.search(r"\w[).\"]*\. *$", described), f"{key}: {entry[0]}"


def test_print_config_is_a_recipe(tmp_path: Path) -> None:
    path = write_minimal(tmp_path, "optim: {lr: 3e-4}\n")
    shown = run_script("--config", str(path), "--quant.scheme", "w4a16_g32", "--print_config", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "printed.yaml").write_text(shown.stdout)
    recipe = load_recipe(tmp_path / "printed.yaml")
    assert (recipe.optim.lr, recipe.quant.scheme) == (3e-4, "w4a16_g32")


def test_a_key_without_a_value_is_refused_unless_its_type_has_none(tmp_path: Path) -> None:
    """A file with every key: each on its line, and each section on the line above its keys."""
    path, lines, expected = tmp_path / "recipe.yaml", [""], []
    for section, key, takes_null in keys():
        if section and f"{section}:" not in lines:
            lines.append(f"{section}:")
        lines.append(f"  {key}:" if section else f"{key}:")
        name = f"{section}.{key}" if section else key
        expected += [] if takes_null else [f"{path}, line {len(lines)}: {name}: null, expected a value"]
    path.write_text("\n".join(lines))
    found = refusal("--config", str(path))
    assert [line.partition(" (")[0] for line in found] == expected


@pytest.mark.parametrize(
    ("extra", "line", "said"),
    [
        ("optimm: {lr: 1}", 5, "optimm: unknown key; did you mean optim?"),
        ("output: {}", 5, "output: unknown key; did you mean output_dir?"),
        ("xyz: 1", 5, "xyz: unknown key; expected one of model, data,"),
        ("optim:\n  eps: 1e-8\n  warmup: 3", 7, "optim.warmup: unknown key; did you mean optim.warmup_steps?"),
        ("output_dir: other", 5, "output_dir: this key is there twice"),
        ("optim: {lr: 1, eps: 1, lr: 2}", 5, "optim.lr: this key is there twice"),
        ("adapter: {ranks: {'.*': 8, 'a': 4, '.*': 32}}", 5, "adapter.ranks.'.*': this key is there twice"),
        ("schedule: [{at: 1, lr: {weights: 1, weights: 2}}]", 5, "schedule[0].lr.weights: this key is there twice"),
        ("optim: {warmup_steps: 0100}", 5, "optim.warmup_steps: 0100, which YAML reads in base 8 or 60, expected"),
        ("eval: {every: 1:30}", 5, "eval.every: 1:30, which YAML reads in base 8 or 60, expected a number"),
        ("optim:", 5, "optim: null, expected keys and values below it"),
        ("optim: 3", 5, "optim: 3, expected keys and values below it"),
        ("data.kind: text", 5, "data.kind: unknown key"),
        ("optim: {lr: ", 6, "not YAML"),
        (f"optim: {{lr: 1{'0' * 400}}}", 5, "optim.lr: 1000000"),
        ("optim: {betas: [0.9, null]}", 5, "optim.betas[1]: null, expected a value"),
        ("schedule:\n- at: 1\n  lr: {weights: }", 7, "schedule[0].lr.weights: null, expected a value"),
        # A recipe is plain data, and names no class to import.
        ("schedule: [evil.Evil]", 5, "schedule[0]: evil.Evil, expected keys and values below it"),
        ("quant:\n  rules: [evil.Evil]", 6, "quant.rules[0]: evil.Evil, expected keys"),
        ("quant:\n  schemes: {mine: evil.Evil}", 6, "quant.schemes.mine: evil.Evil, expected keys"),
        ("quant:\n  schemes:\n    mine:\n      weights: evil.Evil", 8, "quant.schemes.mine.weights: evil.Evil, expec"),
        ("quant:\n  schemes:\n    mine:\n      activations: evil.Evil", 8, "quant.schemes.mine.activations: evil."),
        ("quant:\n  schemes: {mine: {weights: {class_path: evil.Evil}}}", 6, "quant.schemes.mine.weights.class_path: "),
        ("loss: evil.Evil", 5, "loss: evil.Evil, expected keys and values below it"),
    ],
)
def test_bad_keys_in_the_file(tmp_path: Path, monkeypatch, extra: str, line: int, said: str) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write_minimal(tmp_path, extra + "\n")
    assert refusal("--config", str(path))[0].startswith(f"{path}, line {line}: {said}")
    assert "evil" not in sys.modules


LONG = "\n".join(["a0: &a0 [x]", *(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]" for i in range(40))])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ""),
        (b"- 1\n", ""),
        (b"text\n", ""),
        (b"\xff\xfe\x00", ""),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "nested too deep for a recipe"),
        (b"data: &a\n  train: *a\n", "more than 100,000 values, its aliases"),
        (LONG.encode(), "its aliases (*name)"),
    ],
    ids=range(7),
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    (line,) = refusal("--config", str(path))
    assert line.startswith(str(path)) and said in line


def test_a_file_that_is_not_there_or_never_ends(tmp_path: Path) -> None:
    assert refusal("--config", f"{tmp_path}/no") == [f"--config: '{tmp_path}/no': No such file or directory"]
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(RecipeError, match=rf"^--config: '{path}': expected a YAML file of at most "):
            load_recipe(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--optim.lrr 3", "unrecognized arguments: --optim.lrr 3; did you mean --optim.lr?"),
        ("--optim.l 3", "unrecognized arguments: --optim.l 3"),
        ("--optim.lr x", "optim.lr: Expected a float. Got value: x"),
        ("--train.steps 1.5", "train.steps: Expected a int. Got value: 1.5"),
        ("--train.steps true", "train.steps: Expected a int. Got value: True"),
        ("--learnable.norm 1", "learnable.norm: Expected a bool. Got value: 1"),
        ("--loss.kd foo", "loss.kd: Expected one of ['kl', 'rkl', 'mse', 'cakld', 'kd', 'kl_top_k', 'r_kl_top_k']. G"),
        ("--optim.betas [0.9]", "optim.betas: Expected a tuple with 2 elements. Got value: [0.9]"),
        ("--data.train a.jsonl", "data.train: Expected a list. Got value: a.jsonl; write [a.jsonl]"),
        ("left over", "unrecognized arguments: left over"),
    ],
)
def test_bad_options(tmp_path: Path, options: str, said: str) -> None:
    assert refusal("--config", str(write_minimal(tmp_path)), *options.split())[0].startswith(said)


def test_required_keys_are_named(tmp_path: Path) -> None:
    missing = ("data.train", "output_dir")
    (tmp_path / "recipe.yaml").write_text("model: {path: m}\n")
    lines = refusal("--config", str(tmp_path / "recipe.yaml"))
    assert lines == [f"{key}: missing, expected a value" for key in missing]


@pytest.mark.parametrize("options", [(), ("--model.path", "m"), ("--model.path=m", "--train.steps=3")])
def test_without_a_recipe_one_that_ships_is_named(options: tuple[str, ...]) -> None:
    (line,) = refusal(*options)
    found = re.fullmatch(r"--config: missing, expected --config RECIPE, for example --config (\S+) \(or .*\)", line)
    assert found and (ROOT / found[1]).is_file() and "output_dir" in line


@pytest.mark.parametrize("name", ["t", "steps", "r.yaml"])
def test_every_problem_has_its_file_however_short_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("train: {steps: 0}\nmodel: {path: m}\ndata: {train: [t.jsonl]}\noutput_dir: out\n")
    with pytest.raises(RecipeError) as refused:
        load_recipe(name)
    assert all(re.search(rf"(^|['\s]){name}['\s:,]", line) for line in str(refused.value).splitlines()), refused.value
