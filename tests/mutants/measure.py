"""Measure the tests of a tree: how long each takes, and which functions of the project it calls.

python -m tests.mutants.measure --tree . --minutes 9

Goes on where it stopped; the result is ``build/mutants/NAME/measured.jsonl``, a line for each test file.
"""

import argparse
import ast
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.generate import modules
from tests.mutants.worker import prepare, run_tests

HITS = '''"""Append the number of every function that runs to a file, once in each phase of a test."""
import os
seen = set()
os.register_at_fork(after_in_child=seen.clear)
_open, _write, _close, _file = os.open, os.write, os.close, FILE
def _hit(number):
    if number not in seen:
        seen.add(number)
        file = _open(_file, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        _write(file, b"%d\\n" % number)
        _close(file)
'''


class Hits:
    """pytest's hooks that tell which functions ran, in a file's import and fixtures or in a test itself."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._file = Path(os.environ["MUTANTS_HITS"])
        self._read = 0

    def _take(self, test: str | None) -> None:
        text = self._file.read_bytes()[self._read :] if self._file.exists() else b""
        self._read += len(text)
        if found := sorted({int(line) for line in text.split()}):
            self._tell(hits=found, test=test)
        if module := __import__("sys").modules.get("_hits"):
            module.seen.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        self._take(None)
        try:
            yield
        finally:
            self._take(item.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._take(None)


def instrument(tree: Path, scratch: Path) -> list[tuple[str, str]]:
    """Let every function of the copy tell that it runs; module and qualified name by number, "" for a module."""
    names: list[tuple[str, str]] = []
    (scratch / "_hits.py").write_text(HITS.replace("FILE", repr(os.environ["MUTANTS_HITS"])))
    header = f"import sys\nsys.path.append({str(scratch)!r})\nfrom _hits import _hit\nsys.path.pop()\n"
    for module in modules(tree):
        source = (scratch / module).read_text(encoding="utf-8")
        body = ast.parse(source).body
        lines, added = source.splitlines(keepends=True), []
        docstring = bool(body) and isinstance(body[0], ast.Expr)
        skip = sum(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body[:3]) + docstring
        for first, qualname in [*([(body[skip], "")] if body[skip:] else []), *_functions(body, "")]:
            added.append((first.lineno, first.col_offset, f"{'' if qualname else header}_hit({len(names)})\n"))
            names.append((module, qualname))
        for line, column, text in sorted(added, reverse=True):
            if not lines[line - 1][:column].strip():
                lines.insert(line - 1, " " * column + text)
        (scratch / module).write_text("".join(lines), encoding="utf-8")
    return names


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[ast.stmt, str]]:
    """First statement after the docstring, and qualified name, of every function."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if rest:
                    first = rest[0]
                    decorators = getattr(first, "decorator_list", [])
                    yield (decorators[0] if decorators else first), name
            yield from _functions(node.body, f"{name}.")
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from _functions(getattr(node, block, []), prefix)


def measure(scratch: Path, file: str, names: list[tuple[str, str]], limit: float) -> dict[str, Any]:
    """Seconds of each passing test of a file, and the numbers of the tests that call each function (-1: a fixture)."""
    hits = Path(os.environ["MUTANTS_HITS"])
    hits.unlink(missing_ok=True)
    begin = time.monotonic()
    code, told = run_tests(scratch, ["--maxfail=1000", file], (), limit, [Hits])
    tests = {one["test"]: one["seconds"] for one in told if one.get("outcome") == "passed"}
    number = {test: index for index, test in enumerate(tests)}
    called = defaultdict(set)
    for one in told:
        for hit in one.get("hits", ()):
            called[":".join(names[hit])].add(-1 if one["test"] is None else number.get(one["test"], -2))
    failed = [one["test"] for one in told if one.get("outcome") in ("failed", "error")]
    print(
        f"{file}: {len(tests)} tests, {len(failed)} failed, {time.monotonic() - begin:.0f} s, code {code}", flush=True
    )
    calls = {name: sorted(found - {-2}) for name, found in called.items()}
    return {"file": file, "code": code, "tests": tests, "failed": failed, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path())
    parser.add_argument("--work", type=Path, default=Path("build/mutants/base"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a file of tests")
    parser.add_argument("files", nargs="*", help="files of tests below --tree, those of tests/unit by default")
    args = parser.parse_args()
    end, tree, work = time.monotonic() + 60 * args.minutes, args.tree.resolve(), args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    out = work / "measured.jsonl"
    done = {json.loads(line)["file"] for line in out.read_text().splitlines()} if out.exists() else set()
    below = sorted((tree / "tests" / "unit").glob("*/**/test_*.py"))
    files = [file for file in args.files or [str(path.relative_to(tree)) for path in below] if file not in done]
    os.environ["MUTANTS_HITS"] = str(work / "hits")
    prepare(tree, work / "measured")
    names = instrument(tree, work / "measured")
    while files and time.monotonic() < end:
        row = measure(work / "measured", files.pop(0), names, args.limit)
        with out.open("a") as file:
            print(json.dumps(row), file=file)
    print(f"{len(files)} files left")


if __name__ == "__main__":
    main()
