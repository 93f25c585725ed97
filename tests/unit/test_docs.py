"""README and docs against the code: commands, recipes, scripts, links, names, error texts, schemes, the picture."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from torch import nn

from engine.config.config import Recipe
from engine.config.reading import load_recipe, parse_recipe
from model.save import not_loaded
from quant import PRESETS, Quantization
from quant.formats.compressed_tensors import packed_shapes
from tests.lib.root import ROOT

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "ds_configs" / "README.md"]
TEXTS = [README, *PAGES, *OTHERS]
SOURCES = ("data", "engine", "launch", "model", "quant", "tools")


def name(path: Path) -> str:
    """A page as a test's name shows it."""
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str


def blocks(language: str) -> list[Block]:
    """Every fenced block of a language, of all pages."""
    found = []
    for page in TEXTS:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if match[1] == language:
                found.append(Block(page, text[: match.start()].count("\n") + 1, language, match[2]))
    assert found, f"no block of {language}"
    return found


def block_name(block: Block) -> str:
    """A block as a test's name shows it."""
    return f"{name(block.page)}:{block.line}"


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# Links


def anchors(page: Path) -> set[str]:
    """Names under which the headings of a page can be linked, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Targets of the links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading, there are {sorted(anchors(target))}"


def test_every_page_is_one_click_from_the_readme() -> None:
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links(README)}
    assert {*PAGES, *OTHERS} <= linked


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 170


# Names


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, something in a module, or an option of a recipe."""
    parts = dotted.split(".")
    section: object = Recipe
    for part in parts:
        known = {item.name: item.type for item in fields(section)} if is_dataclass(section) else {}  # type: ignore[arg-type]
        if part not in known:
            break
        section = known[part]
    else:
        return True
    for length in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:length])
        if folder.is_dir() or folder.with_suffix(".py").is_file():
            if length == len(parts):
                return True
            thing: object = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                if not hasattr(thing, part):
                    return False
                thing = getattr(thing, part)
            return True
    return False


TOP = (*SOURCES, "tests", "benchmarks", "ds_configs", "docs")
OPTIONS = tuple(item.name for item in fields(Recipe))


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_paths_and_names_exist(page: Path) -> None:
    """Every ``path/like/this.py``, ``module.name`` and ``section.option`` between backticks."""
    wrong, code = [], texts_of_the_code()
    for text in re.findall(r"`([^`\n]+)`", prose(page)):
        first = text.split(":")[0].split(" ")[0].rstrip("/")
        if "*" in first or "NAME" in first or first.endswith("..."):
            continue
        if "/" in first and first.split("/")[0] in TOP:
            good = (ROOT / first).exists() or first in code  # the names of curves look like paths
        elif re.fullmatch(r"[a-z_]\w*(\.[A-Za-z_]\w*)+", first) and first.split(".")[0] in (*SOURCES, *OPTIONS):
            good = exists(first) or first.rpartition(".")[2] in ("json", "md", "yaml", "txt")
        else:
            continue
        if not good:
            wrong.append(text)
    assert wrong == []


# Commands


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block; comments and continuation lines are taken care of."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def script_options(script: Path) -> set[str]:
    """The options that a script's own parser shows under --help."""
    spec = importlib.util.spec_from_file_location(f"documented_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    arguments, path = sys.argv, list(sys.path)
    sys.argv = [str(script), "--help"]
    sys.path.insert(0, str(script.parent))  # as for a script that is run: its neighbors can be imported
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            spec.loader.exec_module(module)
            module.main()
    finally:
        sys.argv, sys.path[:] = arguments, path
        del sys.modules[spec.name]
    return set(re.findall(r"--\w+", out.getvalue()))


# With options of their own, and any option of the recipe.
WITH_OPTIONS = ("allocate.py", "cache_teacher.py", "memory.py", "study.py")
RECIPE_SCRIPTS = ("train.py", "calibrate.py", "custom_loss.py", "fake_quant_later.py", "layer_by_layer.py")
MINIMAL = {
    "model": {"path": "models/Qwen3-4B"},
    "data": {"train": ["datasets/train.jsonl"]},
    "train": {"steps": 10_000},
    "output_dir": "runs/x",
}


def check_script(words: list[str], tmp_path: Path) -> None:
    """The script exists, and its parser knows the options behind it."""
    script, arguments = ROOT / words[0], words[1:]
    if words[0] == "my_schedule.py":  # written by the reader, see the block before it
        assert arguments == []
        return
    assert script.is_file(), words[0]
    written = {"my_recipe.yaml": MINIMAL, "mixed.yaml": {"quant": {"scheme": "w2a16_g32"}}}
    for file, content in written.items():
        (tmp_path / file).write_text(yaml.safe_dump(content))
    given = [str(tmp_path / word) if word in written else word for word in arguments]
    given = [str(ROOT / word) if word.startswith("launch/recipes/") else word for word in given]
    if script.name in RECIPE_SCRIPTS:
        given = [word for word in given if word not in ("--help", "--print_config")]
        if given:
            parse_recipe(given, check_files=False)
        return
    options = {word.partition("=")[0] for word in arguments if word.startswith("--")} - {"--help"}
    if script.name in WITH_OPTIONS:
        own = set(re.findall(r'add_argument\("(--\w+)"', script.read_text(encoding="utf-8")))
        recipe, position = [], 0
        while position < len(given):
            taken = 2 if position + 1 < len(given) and not given[position + 1].startswith("--") else 1
            recipe += [] if given[position] in own else given[position : position + taken]
            position += taken
        if str(tmp_path / "my_recipe.yaml") in recipe:
            parse_recipe(recipe, check_files=False)
        return
    assert options <= script_options(script), f"{words[0]}: {options - script_options(script)}"


@pytest.mark.parametrize("block", blocks("bash"), ids=block_name)
def test_commands(block: Block, tmp_path: Path) -> None:
    for words in commands(block):
        program, rest = words[0], words[1:]
        if program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            assert set(rest) <= set(targets), rest
        elif program == "python" and rest[0] == "-m":
            paths = [word for word in rest[2:] if not word.startswith("-") and "/" in word]
            assert all((ROOT / path).exists() for path in paths), paths
        elif program in ("python", "deepspeed", "torchrun", "sbatch"):
            scripts = [index for index, word in enumerate(rest) if word.endswith(".py")]
            check_script(rest[scripts[0] :], tmp_path)
            if program == "sbatch":
                assert (ROOT / rest[scripts[0] - 1]).is_file()
        else:
            assert program in ("git", "pip", ".venv/bin/pip", "tensorboard"), words


# Recipes, JSON and Python


def merged(given: dict, defaults: dict) -> dict:
    """A part of a recipe with what a whole one must hold."""
    whole = dict(defaults)
    for key, value in given.items():
        both = isinstance(value, dict) and isinstance(whole.get(key), dict)
        whole[key] = {**whole[key], **value} if both else value
    return whole


@pytest.mark.parametrize("block", blocks("yaml"), ids=block_name)
def test_recipes_are_read(block: Block, tmp_path: Path) -> None:
    part = yaml.safe_load(block.text)
    path = tmp_path / "recipe.yaml"
    path.write_text(block.text)
    if not MINIMAL.keys() <= part.keys():
        path.write_text(yaml.safe_dump(merged(part, MINIMAL), sort_keys=False))
    load_recipe(path)


def test_the_recipe_of_low_bits_is_the_one_that_ships() -> None:
    block = next(one for one in blocks("yaml") if one.page.name == "low_bits.md")
    shipped = (ROOT / "launch" / "recipes" / "low_bits.yaml").read_text(encoding="utf-8")
    assert shipped.partition("\n\n")[2] == block.text


@pytest.mark.parametrize("block", blocks("json"), ids=block_name)
def test_json_is_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def imports(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Modules that a program imports, and the names that it takes from each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module), [alias.name for alias in node.names]


@pytest.mark.parametrize("block", blocks("python"), ids=block_name)
def test_python_compiles_and_imports_what_exists(block: Block) -> None:
    tree = ast.parse(block.text)
    compile(tree, block_name(block), "exec")
    for module, names in imports(tree):
        imported = importlib.import_module(module)
        assert all(hasattr(imported, one) for one in names), (module, names)


@pytest.mark.parametrize("block", [one for one in blocks("python") if "loop.run()" not in one.text], ids=block_name)
def test_python_runs(block: Block) -> None:
    """Scripts that train need a checkpoint and a launcher: those of launch/examples are run by other tests."""
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block.text, block_name(block), "exec"), {"__name__": "documented"})


# Error texts


@functools.cache
def texts_of_the_code() -> str:
    """Every piece of text in the sources; the pieces between the braces of an f-string are pieces of their own."""
    found = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    found.append((ROOT / "Makefile").read_text(encoding="utf-8"))
    return "\n".join(found)


FOREIGN = ("unrecognized arguments",)  # of argparse


def test_error_texts_are_those_of_the_code() -> None:
    """The first cell of every table of errors, and what a list "What goes wrong" opens its lines with."""
    code = texts_of_the_code()
    quoted = []
    for page in TEXTS:
        rows = re.findall(r"^\| error text \|.*\n\|.*\n((?:\|.*\n?)+)", prose(page), re.MULTILINE)
        cells = [line.split(" | ")[0] for table in rows for line in table.splitlines()]
        _, _, wrong = prose(page).partition("## What goes wrong")
        cells += re.findall(r"^- (`[^`]+`)", wrong, re.MULTILINE)
        quoted += [(name(page), text) for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 60
    missing = []
    for page, text in quoted:
        pieces = [piece.strip() for piece in text.split("...")]
        pieces = [piece for piece in pieces if len(piece) > 6 and piece not in FOREIGN]
        missing += [f"{page}: {text!r}" for piece in pieces if piece not in code]
    assert missing == []


# The tables of schemes


SIZE = 4096


def presets_of_the_table() -> dict[str, list[str]]:
    """Cells of the table of presets, by preset."""
    text = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
    lines = text.split("## The presets")[1].split("\n\n")[1].splitlines()
    assert lines[0].startswith("| preset | weights | inputs | bits per weight | transformers |")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_preset_has_its_row():
    assert list(presets_of_the_table()) == list(PRESETS)


def test_bits_per_weight_are_those_of_the_files():
    for preset_name, preset in PRESETS.items():
        bits = 16.0
        if preset.linear is not None:
            shapes = packed_shapes(SIZE, SIZE, preset.linear, torch.bfloat16)
            count = sum(
                torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
                for suffix, (dtype, shape) in shapes.items()
                if suffix not in ("input_scale", "weight_shape")
            )
            bits = 8 * count / SIZE**2
        assert presets_of_the_table()[preset_name][2] == f"{bits:.3f}", preset_name
    assert float(presets_of_the_table()["w4a16_g128"][2]) <= 4.2


def test_the_table_says_whose_experts_transformers_does_not_load():
    """As tools/verify/reader.py does, which the comparison with transformers proves."""

    class Layer:
        def __init__(self, scheme):
            self.scheme = scheme
            self.weight_zero = 0.0 if scheme.weights.has_zero_points else None

    for preset_name, preset in PRESETS.items():
        layers = {} if preset.linear is None else {"model.layers.0.mlp.experts.0.up_proj": Layer(preset.linear)}
        expected = "yes" if not_loaded(nn.Module(), Quantization(layers, [])) is None else "dense"
        assert presets_of_the_table()[preset_name][3] == expected, preset_name


def test_the_readme_names_every_preset_once():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Schemes")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(PRESETS)


# The picture


def drawing():
    """docs/draw.py as a module."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["draw"] = module
    spec.loader.exec_module(module)
    return module


def test_the_picture_shows_modules_that_exist() -> None:
    names = drawing().modules()
    assert len(names) > 10
    assert [one for one in names if not exists(one)] == []


def test_the_picture_is_what_the_script_draws() -> None:
    draw = drawing()
    assert draw.PICTURE.read_text(encoding="utf-8") == draw.picture(), "run: python docs/draw.py"
