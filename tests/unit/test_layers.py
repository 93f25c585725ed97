"""Folders import each other only downwards: ``launch -> engine -> {model, data, quant}`` and ``model -> quant``.

Read from the sources, so that an import inside a function or under TYPE_CHECKING counts too.
"""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.root import ROOT

MAY_IMPORT = {
    "quant": set(),
    "data": set(),
    "model": {"quant"},
    "engine": {"model", "data", "quant"},
    "launch": {"engine", "model", "data", "quant"},
}
PROJECT = {*MAY_IMPORT, "tests", "benchmarks"}
# Numerics and data must run, and be tested, where there is no cluster.
WITHOUT_DEEPSPEED = ("quant", "data")


def imported_modules(source: str, module: str) -> list[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module imports; ``from a import b`` gives a and a.b."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, base), *((node.lineno, f"{base}.{alias.name}") for alias in node.names)]
    return found


def violations(source: str, module: str) -> list[str]:
    """Imports that break the rule, one text each."""
    folder = module.split(".")[0]
    problems = []
    for line, name in imported_modules(source, module):
        other = name.split(".")[0]
        if other in PROJECT - {folder} - MAY_IMPORT[folder]:
            problems.append(f"{module}, line {line}: {folder}/ must not import {name}")
        if other == "deepspeed" and folder in WITHOUT_DEEPSPEED:
            problems.append(f"{module}, line {line}: {folder}/ must not import DeepSpeed")
    return problems


def sources() -> dict[str, str]:
    """Dotted name (a package's own for its __init__.py) and text of every module in the five folders."""
    files = {path: path.relative_to(ROOT) for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")}
    return {
        ".".join(relative.with_suffix("").parts): path.read_text(encoding="utf-8") for path, relative in files.items()
    }


def test_folders_import_downwards_only() -> None:
    modules = sources()
    assert {name.split(".")[0] for name in modules} == set(MAY_IMPORT)
    assert [problem for name, text in modules.items() for problem in violations(text, name)] == []


def test_modules_do_not_import_in_circles() -> None:
    """A circle works or fails by who is imported first. A package's __init__.py may import its own modules."""
    modules = sources()
    graph = {
        name: {other for _, other in imported_modules(text, name) if other in modules and other != name}
        for name, text in modules.items()
        if not name.endswith(".__init__")
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circular imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("quant.spec", "import deepspeed"),
        ("data.chat", "def f():\n    from deepspeed.runtime import zero"),
        ("data.loader", "from quant import SCHEMES"),
        ("model.build", "from engine.recipe.recipe import Recipe"),
        ("model.load", "if TYPE_CHECKING:\n    import data.chat"),
        ("quant.linear", "from ..model import zero"),
        ("engine.loop", "from launch import train"),
        ("engine.loop", "import tests.tiny as tiny"),
    ],
)
def test_a_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("quant.linear", "from quant.spec import SCHEMES\nfrom .spec import SCHEMES\nimport torch"),
        ("model.build", "import deepspeed\nfrom quant import QuantLinear"),
        ("engine.session.data", "from data import Loader\nfrom model.zero import stage"),
        ("data.chat", "import modelling\nfrom datasets import quant"),
    ],
)
def test_what_the_rule_allows_passes(module: str, source: str) -> None:
    assert violations(source, module) == []
