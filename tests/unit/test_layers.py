"""Allowed imports: folders import only downwards, and the packages of engine/ only those that their row names.

Imports are read from the sources, so that one inside a function or under TYPE_CHECKING counts too.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.lib.root import ROOT

MAY_IMPORT = {
    "quant": set(),
    "data": set(),
    "model": {"quant"},
    "engine": {"model", "data", "quant"},
    "tools": {"engine", "model", "data", "quant"},
    "launch": {"tools", "engine", "model", "data", "quant"},
}
PROJECT = {*MAY_IMPORT, "tests", "benchmarks"}
# The packages of engine/. The modules of engine/ itself import them and are imported by none of them.
PACKAGES = {
    "losses": set(),
    "config": {"losses"},
    "cluster": {"config"},
    "session": {"cluster", "config", "losses"},
    "checkpoint": {"config", "session"},
}
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
        package = package_of(module)
        if package is not None and name.startswith("engine.") and package_of(name) not in {package, *PACKAGES[package]}:
            problems.append(f"{module}, line {line}: engine/{package}/ must not import {name}")
    return problems


def package_of(name: str) -> str | None:
    """Package of engine/ that holds a module; None in engine/ itself and outside of it."""
    folder, _, below = name.partition(".")
    package = below.partition(".")[0]
    return package if folder == "engine" and package in PACKAGES else None


def sources() -> dict[str, str]:
    """Dotted name (a package's own for its __init__.py) and text of every module in the six folders."""
    files = {path: path.relative_to(ROOT) for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")}
    return {
        ".".join(relative.with_suffix("").parts): path.read_text(encoding="utf-8") for path, relative in files.items()
    }


def test_folders_and_packages_import_what_their_rows_name() -> None:
    modules = sources()
    assert {name.split(".")[0] for name in modules} == set(MAY_IMPORT)
    assert [problem for name, text in modules.items() for problem in violations(text, name)] == []


def test_every_folder_and_every_package_has_its_row() -> None:
    """And every row has its folder."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= PROJECT
    assert {path.parent.name for path in (ROOT / "engine").glob("*/*.py")} == set(PACKAGES)


def test_few_ask_torch_for_a_gpu() -> None:
    """Where ranks compute is DeepSpeed's to say, and DS_ACCELERATOR's: a machine with GPUs may train on its CPU."""
    asks = re.compile(r"cuda\.(is_available|device_count)\(")
    found = {name for name, text in sources().items() if asks.search(text)}
    assert found == {"launch.quickstart", "model.zero.parameters", "quant.kernels.build"}


@pytest.mark.parametrize("kind", ["unit", "distributed"])
def test_tests_mirror_the_source(kind: str) -> None:
    """A folder with tests has the path of the folder that they test. What ranks run lies under scripts/ beside them."""
    tests = ROOT / "tests" / kind
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path()}
    assert len(folders) > 5 and [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
    scripts = {path.parent for path in tests.rglob("scripts/*.py")}
    assert [str(folder) for folder in scripts if not any(folder.parent.glob("test_*.py"))] == []


def test_rows_do_not_form_a_circle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()
    TopologicalSorter(PACKAGES).prepare()
    assert set().union(*PACKAGES.values()) <= set(PACKAGES)


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
        ("model.build", "from engine.config.config import Recipe"),
        ("model.load", "if TYPE_CHECKING:\n    import data.chat"),
        ("quant.linear", "from ..model import zero"),
        ("engine.loop", "from launch import train"),
        ("engine.loop", "import tests.lib.tiny as tiny"),
        ("engine.losses.kd", "from engine.config.config import Recipe"),
        ("engine.config.reading", "def f():\n    from engine.cluster.job import connect"),
        ("engine.session.context", "from ..schedule import Schedule"),
        ("engine.checkpoint.find", "from engine import state"),
        ("engine.loop", "from tools.compressed import load_compressed"),
        ("model.save.export", "def f():\n    import tools.verify.check"),
        ("tools.evaluation.score", "from launch.exits import clean_exit"),
    ],
)
def test_a_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("quant.linear", "from quant.spec import SCHEMES\nfrom .spec import SCHEMES\nimport torch"),
        ("model.build", "import deepspeed\nfrom quant import QuantLinear"),
        ("engine.session.context", "from data import Loader\nfrom model.zero import stage"),
        ("data.chat", "import modeling\nfrom datasets import quant"),
        ("tools.memory.plan", "from tools.memory.trace import Event\nfrom engine.session.optimizer import classify"),
        ("engine.losses.kd", "from . import teacher\nfrom model.head import LMHead"),
        ("engine.loop", "from engine.checkpoint.save import LATEST\nfrom engine import schedule"),
        ("launch.train", "from engine.loop import Loop\nimport engine.config.reading"),
        ("launch.verify", "from tools.verify.comparison import windows"),
        ("tools.teacher_cache", "from engine.session.context import start_ranks\nfrom engine import held_out"),
    ],
)
def test_what_the_rule_allows_passes(module: str, source: str) -> None:
    assert violations(source, module) == []
