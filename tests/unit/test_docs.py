"""README and docs against the code: links, names, commands, recipes, Python, bits of the presets, the picture."""

import ast
import contextlib
import functools
import importlib
import io
import json
import os
import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from engine.config.config import Recipe
from engine.config.deepspeed import DsConfigError, resolve
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe, parse_recipe
from model.ranks import OF_DISKS
from quant import PRESETS
from quant.formats.compressed_tensors import packed_shapes
from tests.lib.root import ROOT

README = ROOT / "README.md"
OTHERS = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
PAGES = [README, *OTHERS, ROOT / "ds_configs" / "README.md"]
SOURCES = ("data", "engine", "launch", "model", "quant", "tools")
CODE = [path.read_text("utf-8") for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    name: str
    text: str


def blocks(language: str) -> Any:
    """Parametrize a test by every fenced block of a language, of all pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCED.finditer(text):
            if match[1] == language:
                line = text[: match.start()].count("\n") + 1
                found.append(Block(f"{page.relative_to(ROOT)}:{line}", match[2]))
    assert found, f"no block of {language}"
    return pytest.mark.parametrize("block", found, ids=lambda block: block.name)


def prose(page: Path) -> str:
    """Text of a page without its fenced blocks."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# Links and names


def anchors(page: Path) -> set[str]:
    """Names under which the headings of a page can be linked, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """Files of the project to which a page links, and the headings there."""
    found = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    return [((page.parent / path).resolve() if path else page, at) for path, _, at in found if "https:" not in path]


@of_each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.is_file(), f"{target}: no such file"
        assert not anchor or anchor in anchors(target), (
            f"{anchor}: no such heading, there are {sorted(anchors(target))}"
        )


def test_every_page_is_one_click_from_the_readme() -> None:
    assert set(PAGES[1:]) <= {target for target, _ in links(README)}


def exists(dotted: str) -> bool:
    """Tell if a dotted name is a module, something in a module, or an option of a recipe."""
    parts, section = dotted.split("."), Recipe
    for part in parts:
        section = {item.name: item.type for item in fields(section)}.get(part) if is_dataclass(section) else None
    if section is not None:
        return True
    for length in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:length])
        if folder.is_dir() or folder.with_suffix(".py").is_file():
            thing: object = importlib.import_module(".".join(parts[:length]))
            return all((thing := getattr(thing, part, None)) is not None for part in parts[length:])
    return False


@of_each_page
def test_paths_and_names_exist(page: Path) -> None:
    """Every ``path/like/this.py``, ``module.name`` and ``section.option`` between backticks."""
    folders, dotted = (
        (*SOURCES, "tests", "benchmarks", "ds_configs", "docs"),
        {*SOURCES, *(f.name for f in fields(Recipe))},
    )
    wrong = []
    for text in re.findall(r"`([^`\n]+)`", prose(page)):
        first = text.split(":")[0].split(" ")[0].rstrip("/")
        if "*" in first or "NAME" in first or first.endswith("..."):
            continue
        if "/" in first and first.split("/")[0] in folders:
            good = (ROOT / first).exists() or any(first in text for text in CODE)  # the names of curves look like paths
        elif re.fullmatch(r"[a-z_]\w*(\.[A-Za-z_]\w*)+", first) and first.split(".")[0] in dotted:
            good = exists(first) or first.rpartition(".")[2] in ("json", "md", "yaml", "txt")
        else:
            continue
        wrong += [] if good else [text]
    assert wrong == []


def test_the_walk_to_the_first_step_is_short_and_names_functions_that_exist() -> None:
    text = prose(ROOT / "docs" / "reading_the_code.md").partition("## A walk")[2].partition("\n## ")[0]
    assert len(set(re.findall(r"`([a-z_]+/[\w/]+\.py)`", text))) <= 35
    rows = re.findall(r"^\| `([\w/]+)\.py` \| (.+?) \|", text, re.MULTILINE)
    named = [f"{file.replace('/', '.')}.{name}" for file, cell in rows for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(named) > 20 and [name for name in named if not exists(name)] == []


# Commands

MINIMAL = {
    "model": {"path": "models/Qwen3-4B"},
    "data": {"train": ["datasets/train.jsonl"]},
    "train": {"steps": 10_000},
    "output_dir": "runs/x",
}
PARTS = {"mixed.yaml": {"quant": {"scheme": "w2a16_g32"}}}  # beside another recipe


@functools.cache
def options_of(*files: Path) -> set[str]:
    """Options that scripts, or modules that scripts share, add to their parsers."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return {"--help", "--print_config", *re.findall(r'add_argument\(\s*"(--[\w-]+)"', "".join(texts))}


def check_script(words: list[str], tmp_path: Path) -> None:
    """The script exists and has the options behind it, or they are those of a recipe, with values that these take."""
    if words == ["my_schedule.py"]:  # written by the reader, see the block before it
        return
    script = ROOT / words[0]
    own, recipe, option = options_of(script), [], words[0]
    for word in words[1:]:
        option = word.partition("=")[0] if word.startswith("--") else option
        if option in own or not option.startswith("--"):
            continue
        if word.endswith(".yaml"):
            content = yaml.safe_load((ROOT / word).read_text()) if (ROOT / word).exists() else PARTS.get(word, MINIMAL)
            word = str(tmp_path / word.replace("/", "_"))
            Path(word).write_text(yaml.safe_dump(content))
        recipe.append(word)
    if recipe and re.search(r"recipe_or_exit|parse_recipe|start\(", script.read_text(encoding="utf-8")):
        parse_recipe(recipe, check_files=False)
    else:
        shared = [*(ROOT / "tools").rglob("*.py"), *script.parent.glob("*.py"), *script.parent.glob("gpu/*.py")]
        assert {word for word in recipe if word.startswith("--")} <= options_of(*shared), recipe


@blocks("bash")
def test_commands(block: Block, tmp_path: Path) -> None:
    lines = [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()]
    for program, *rest in filter(None, lines):
        if program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            assert set(rest) <= set(targets), rest
        elif program == "python" and rest[0] == "-m":
            assert all((ROOT / word).exists() for word in rest[2:] if not word.startswith("-") and "/" in word), rest
        elif program in ("python", "deepspeed", "torchrun", "sbatch"):
            script = next(index for index, word in enumerate(rest) if word.endswith(".py"))
            check_script(rest[script:], tmp_path)
            assert program != "sbatch" or (ROOT / rest[script - 1]).is_file()
        else:
            assert program in ("git", "pip", ".venv/bin/pip", "tensorboard"), program


# Recipes, JSON and Python


@blocks("yaml")
def test_recipes_are_read(block: Block, tmp_path: Path) -> None:
    path, part = tmp_path / "recipe.yaml", yaml.safe_load(block.text)
    path.write_text(block.text)
    if not MINIMAL.keys() <= part.keys():
        whole = {name: {**one, **part.get(name, {})} if isinstance(one, dict) else one for name, one in MINIMAL.items()}
        path.write_text(yaml.safe_dump({**part, **whole}, sort_keys=False))
    load_recipe(path)


# Options that pages name with a value hold in one of these settings, all of a table's row or of a sentence's line.
SETTINGS = [
    "",
    "--quant.scheme w4a16_g32",
    "--quant.scheme w2a16_g32",
    "--quant.scheme fp8_dynamic",
    "--quant.scheme nvfp4_w4a4",
    "--adapter.kind lora",
    "--adapter.kind lora --adapter.merge false --quant.scheme w4a16_g32",
    "--train.activation_checkpointing true",
    "--quant.embedding w8a16_g32",
    "--loss.kd_weight 1 --loss.teacher t",
    "--loss.kd_weight 1 --loss.teacher t --loss.top_k 5",
    "--data.kind on_policy --data.server http://a:1 --loss.lm_weight 0 --loss.kd_weight 1 --loss.teacher t",
]


def options_on(line: str) -> list[str]:
    """Options with values in a line of a page, as words of a command line."""
    found = re.findall(r"`([a-z_]+\.[a-z_]+): ([^`,]+)`", line)
    return [f"--{key}={value}" for key, value in found if exists(key) and value != "source" and "..." not in value]


@of_each_page
def test_options_that_a_page_names_are_taken_together(page: Path, tmp_path: Path) -> None:
    """A page must not promise what the recipe refuses."""
    path, refused = tmp_path / "recipe.yaml", []
    path.write_text(yaml.safe_dump(MINIMAL))
    for line in prose(page).splitlines():
        options = options_on(line)
        for words in filter(None, [options] if line.startswith("|") else [[one] for one in options]):
            keys = {word.partition("=")[0] for word in words}
            for setting in SETTINGS:
                beside = setting.split()
                pairs = zip(beside[::2], beside[1::2], strict=True)
                rest = [part for pair in pairs if pair[0] not in keys for part in pair]
                with contextlib.suppress(RecipeError):
                    parse_recipe(["--config", str(path), *rest, *words], check_files=False)
                    break
            else:
                refused.append(words)
    assert refused == []


@pytest.mark.parametrize("scheme", [name for name, preset in PRESETS.items() if preset.linear is not None])
@pytest.mark.parametrize("learned", ["true", "false"])
def test_scales_of_every_step_are_for_every_scheme(tmp_path: Path, scheme: str, learned: str) -> None:
    """Learnable clipping and absmax in every step, as docs/schemes.md has them, with the default quant.weight_range."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(MINIMAL))
    options = ["--quant.scheme", scheme, "--quant.scales_follow_weights", "true", "--learnable.weight_scale", learned]
    recipe = parse_recipe(["--config", str(tmp_path / "recipe.yaml"), *options], check_files=False)
    assert recipe.quant.weight_range == "auto" and recipe.quant.ranges().weights == "absmax"


def test_the_recipe_of_low_bits_is_the_one_that_ships() -> None:
    _, _, shipped = (ROOT / "launch" / "recipes" / "low_bits.yaml").read_text(encoding="utf-8").partition("\n\n")
    assert f"```yaml\n{shipped}```" in (ROOT / "docs" / "low_bits.md").read_text(encoding="utf-8")


@blocks("json")
def test_json_is_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


@blocks("python")
def test_python_runs(block: Block) -> None:
    """Scripts that need a checkpoint only import here: other tests run those of launch/examples."""
    tree = ast.parse(block.text)
    compile(tree, block.name, "exec")
    if "loop.run()" in block.text or "models/mine" in block.text:
        tree.body = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(tree, block.name, "exec"), {"__name__": "documented"})


# The table of presets, and the picture


FOREIGN = ("unrecognized arguments", *map(os.strerror, OF_DISKS))  # of argparse and the system
# Provoke the errors of the first two tables of docs/troubleshooting.md: more YAML, options, or a DeepSpeed file.
BAD_YAML = ("lr: 3", "train: {}", "quant:", "quant: {scheme: [}", "model: {path: [}")
BAD_OPTIONS = """
--optim.leer 3
--model.path nowhere
--eval.every 3 --data.held_out 5 --train.checkpoint_every 4
--learnable.weight false --learnable.weight_scale false
--quant.calibration_batches 0
--quant.scheme w4a16_g32 --schedule "[{at: 1, fake_quant: activations}]"
--quant.scheme nvfp4_w4a4 --quant.initial_input_scale 0.1
--loss.kd_weight 1 --loss.teacher t --schedule "[{at: 1, loss: {lm: 0}}, {at: 2, loss: {kd: 0}}]"
--quant.exempt_more "['(a+)+b']"
--quant.fake_quant_start 3 --schedule "[{at: 1, fake_quant: true}]"
--adapter.rank 3
"""
BAD_FILES: list[dict[str, Any]] = [
    {"zero_optimization": {"stage": 2}, "eigenvalue": {"enabled": True}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
    {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lion"}},
    {"zero_optimization": {"stage": 2}, "scheduler": {"params": {"warmup_num_steps": 9}}},
    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}},
]
# Texts of these tables that come later: from a model's layers, or from the files of another run.
LATER = (
    "nothing trains: every switch under learnable is off",
    "expected false: no scheme stores a scale of inputs",
    "runs in it; wait for its end",
    "libaio or a compiler is missing",
    "the limit of locked memory is",
    "this run writes neither an export",
    "transformers ... is installed, expected",
    "DeepQAT's folder ... is shadowed",
    "has checkpoints of an earlier run",
    "is not empty: name another directory",
)


def refusals(tmp_path: Path) -> str:
    """Return the lines of the errors of everything above."""
    lines, good = [], tmp_path / "good.yaml"
    good.write_text(yaml.safe_dump(MINIMAL))
    commands = [["--config", str(good), *shlex.split(line)] for line in BAD_OPTIONS.strip().splitlines()] + [[]]
    for text in BAD_YAML:
        (path := tmp_path / f"{len(commands)}.yaml").write_text(yaml.safe_dump(MINIMAL) + text)
        commands.append(["--config", str(path)])
    for words in commands:
        with pytest.raises(RecipeError) as refused:
            parse_recipe(words, check_files="nowhere" in words)
        lines.append(str(refused.value))
    named = {"zero9": None, **{str(tmp_path / f"{index}.json"): content for index, content in enumerate(BAD_FILES)}}
    for name, content in named.items():
        if content is not None:
            Path(name).write_text(json.dumps(content))
        with pytest.raises(DsConfigError) as wrong:
            resolve(parse_recipe(["--config", str(good), "--deepspeed", name], check_files=False), 2)
        lines.append(str(wrong.value))
    return "\n".join(lines)


def test_the_errors_of_recipes_are_what_a_recipe_gets(tmp_path: Path) -> None:
    """A text that is in the source, but that another check keeps from being reached, sends the reader nowhere."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = page.partition("## Recipe")[2].partition("## Model")[0]
    cells = [line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| `")]
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    said = refusals(tmp_path)
    pieces = [piece.strip() for text in quoted if text not in LATER for piece in text.split("...")]
    assert len(pieces) > 20 and set(LATER) <= set(quoted)
    assert [piece for piece in pieces if len(piece) > 6 and piece not in said] == []


def test_error_texts_are_those_of_the_code() -> None:
    """The first cell of every table of errors, and the start of every line of a list below "What goes wrong"."""
    texts = [(ROOT / "Makefile").read_text(encoding="utf-8")]
    for source in CODE:
        nodes = ast.walk(ast.parse(source))  # an f-string's parts are constants of their own
        texts += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    code, quoted = "\n".join(texts), []
    for page in PAGES:
        tables = re.findall(r"^\| error text \|.*\n\|.*\n((?:\|.*\n?)+)", prose(page), re.MULTILINE)
        cells = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
        cells += re.findall(r"^- (`[^`]+`)", prose(page).partition("## What goes wrong")[2], re.MULTILINE)
        quoted += [(page.name, text) for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 60
    pieces = [(page, piece.strip()) for page, text in quoted for piece in text.split("...")]
    assert [one for one in pieces if len(one[1]) > 6 and one[1] not in FOREIGN and one[1] not in code] == []


def test_every_preset_has_its_row_with_the_bits_of_its_files() -> None:
    size, expected = 4096, {}
    for name, preset in PRESETS.items():
        shapes = {} if preset.linear is None else packed_shapes(size, size, preset.linear, torch.bfloat16)
        count = sum(
            torch.Size(shape).numel() * dtype.itemsize
            for suffix, (dtype, shape) in shapes.items()
            if suffix not in ("input_scale", "weight_shape")
        )
        expected[name] = f"{8 * count / size**2 or 16:.3f}"
    text = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8").split("## The presets")[1]
    rows = re.findall(r"^\| `(\w+)` \|.*?\|.*?\| ([\d.]+) \|", text.split("\n\n")[1], re.MULTILINE)
    assert rows == list(expected.items())


def test_the_picture_is_what_the_script_draws_of_modules_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    draw: Any = importlib.import_module("draw")
    assert len(draw.modules()) > 10 and [one for one in draw.modules() if not exists(one)] == []
    assert draw.PICTURE.read_text(encoding="utf-8") == draw.picture(), "run: python docs/draw.py"
