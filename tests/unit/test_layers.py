"""Rules of the sources: folders import only downwards, packages of engine/ what their rows name, docstrings are plain.

Imports are read from the sources, so that one inside a function or under TYPE_CHECKING counts too.
"""

import ast
import re
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.lib.root import ROOT

MAY_IMPORT: dict[str, set[str]] = {
    "quant": set(),
    "data": set(),
    "model": {"quant"},
    "engine": {"model", "data", "quant"},
    "tools": {"engine", "model", "data", "quant"},
    "launch": {"tools", "engine", "model", "data", "quant"},
}
PROJECT = {*MAY_IMPORT, "tests", "benchmarks"}
# The packages of engine/. The modules of engine/ itself import them and are imported by none of them.
PACKAGES: dict[str, set[str]] = {
    "losses": set(),
    "config": {"losses"},
    "cluster": {"config"},
    "session": {"cluster", "config", "losses"},
    "checkpoint": {"config", "session"},
}
# Numerics and data must run, and be tested, where there is no cluster.
WITHOUT_DEEPSPEED = ("quant", "data")
OPENING = re.compile(r"(What|Whether|Of|Those|Where|Who)\b")
PHRASES = re.compile(r"\b(whoever|nobody|somebody|anew|for want of)\b", re.IGNORECASE)
PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "ds_configs").glob("*.md"), *ROOT.glob("*.md")]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
    for folder in MAY_IMPORT
    for path in (ROOT / folder).rglob("*.py")
}


def at_start(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported: none in functions, and none for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not typing:
            yield node
            yield from at_start(node)


def imported_modules(
    source: str, module: str, nodes: Callable[[ast.AST], Iterator[ast.AST]] = ast.walk
) -> list[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module imports; ``from a import b`` gives a and a.b."""
    found = []
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, base), *((node.lineno, f"{base}.{alias.name}") for alias in node.names)]
    return found


def package_of(name: str) -> str | None:
    """Package of engine/ that holds a module; None in engine/ itself and outside of it."""
    folder, package = [*name.split("."), ""][:2]
    return package if folder == "engine" and package in PACKAGES else None


def violations(source: str, module: str) -> list[str]:
    """Imports that break the rule, one text each."""
    folder, package, problems = module.split(".")[0], package_of(module), []
    for line, name in imported_modules(source, module):
        other = name.split(".")[0]
        wrong = other in PROJECT - {folder} - MAY_IMPORT[folder]
        wrong |= other == "deepspeed" and folder in WITHOUT_DEEPSPEED
        if package is not None and name.startswith("engine."):
            wrong |= package_of(name) not in {package, *PACKAGES[package]}
        problems += [f"{module}, line {line}: must not import {name}"] if wrong else []
    return problems


def test_folders_and_packages_import_what_their_rows_name() -> None:
    assert {name.split(".")[0] for name in SOURCES} == set(MAY_IMPORT)
    assert [problem for name, text in SOURCES.items() for problem in violations(text, name)] == []


def test_every_folder_and_every_package_has_its_row() -> None:
    """And every row has its folder; rows form no circle."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= PROJECT
    assert {path.parent.name for path in (ROOT / "engine").glob("*/*.py")} == set(PACKAGES)
    TopologicalSorter(MAY_IMPORT).prepare()
    TopologicalSorter(PACKAGES).prepare()


def test_modules_do_not_import_in_circles() -> None:
    """A circle works or fails by the order of imports. A package's __init__.py may import its own modules."""
    graph = {
        name: {other for _, other in imported_modules(text, name) if other in SOURCES and other != name}
        for name, text in SOURCES.items()
        if not name.endswith(".__init__")
    }
    TopologicalSorter(graph).prepare()


def test_runs_import_what_only_some_options_need_when_they_need_it() -> None:
    """Such modules are imported in functions of the run's own modules: then nothing imports them at the start."""
    found, left = {"launch.train"}, ["launch.train"]
    while left:
        name = left.pop()
        new = {other for _, other in imported_modules(SOURCES[name], name, at_start) if other in SOURCES} - found
        found |= new
        left += new
    late = {
        other
        for name in found
        if name.startswith("engine.") and package_of(name) != "config"  # its own are for where there is no torch
        for _, other in {*imported_modules(SOURCES[name], name)} - {*imported_modules(SOURCES[name], name, at_start)}
        if other in SOURCES
    }
    assert {"engine.on_policy", "engine.publish", "model.sequence"} <= late
    assert not late & found


def test_progress_bars_are_made_in_one_place() -> None:
    """A bar of tqdm's own fills a log file with carriage returns."""
    assert {name for name, text in SOURCES.items() if re.search(r"tqdm\(|class .*\(tqdm\)", text)} == {
        "data.samples",
        "model.console",
    }
    makes = "def no_bar(total: int, description: str, unit: str) -> tqdm:"
    assert makes in SOURCES["data.samples"] and SOURCES["data.samples"].count("tqdm(") == 1


def test_few_ask_torch_for_a_gpu() -> None:
    """DeepSpeed, and DS_ACCELERATOR, say where ranks compute: a machine with GPUs may train on its CPU."""
    asks = re.compile(r"cuda\.(is_available|device_count)\(")
    found = {name for name, text in SOURCES.items() if asks.search(text)}
    assert found == {"launch.quickstart", "model.zero.parameters", "quant.kernels.build_kernels"}


@pytest.mark.parametrize("kind", ["unit", "distributed"])
def test_tests_mirror_the_source(kind: str) -> None:
    """A folder with tests has the path of the folder that they test. What ranks run lies under scripts/ beside them."""
    tests = ROOT / "tests" / kind
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path()}
    assert len(folders) > 5 and [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
    scripts = {path.parent for path in tests.rglob("scripts/*.py")}
    assert [str(folder) for folder in scripts if not any(folder.parent.glob("test_*.py"))] == []


def test_docstrings_are_plain() -> None:
    """They open with a verb, or the thing itself."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = {
        f"{name}, line {getattr(node, 'lineno', 1)}": ast.get_docstring(node) or ""
        for name, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds)
    }
    assert [place for place, text in texts.items() if OPENING.match(text)] == []


DAMAGED = re.compile(r"damaged|truncated or|not readable|ended while|is not a \w+ file|is incomplete|cannot be read")
REMEDY = re.compile(r"\bagain\b|AGAIN|DamagedError|_offer|remove|\bset |start (over|from)")
OFFERED_BY_CALLERS = ("_read_manifest", "verify_checkpoint")  # the end of these texts is added in one place


def test_errors_of_damaged_files_say_what_to_do() -> None:
    found = [
        f"{name}, line {node.lineno}: {text}"
        for name, source in SOURCES.items()
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and function.name not in OFFERED_BY_CALLERS
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and DAMAGED.search(text := ast.unparse(node)) and not REMEDY.search(text)
    ]
    assert found == []


def test_words_that_must_be_read_twice_are_in_no_text() -> None:
    texts = SOURCES | {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert [(name, found[0]) for name, text in texts.items() if (found := PHRASES.search(text))] == []
