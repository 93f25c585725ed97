"""No file is longer than 400 lines, no function longer than 60, and none has more than 15 branches, in tests and
benchmarks too.

Lines are counted as they stand, docstrings and comments included; decorators and C++ template headers are not part of a
function. A branch is an ``if`` or ``elif``, a loop, an ``except`` or ``catch``, a ``case``, a conditional expression,
or the ``if`` of a comprehension. ``else``, ``with``, ``and`` and ``or`` are none. A function's nested functions count
as part of it, too.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.root import ROOT

FOLDERS = ("engine", "model", "quant", "data", "tools", "launch", "tests", "benchmarks")
FILE_LINES, FUNCTION_LINES, BRANCHES = 400, 60, 15
BRANCHING = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
CPP = (".h", ".cpp", ".cu")


@dataclass(frozen=True)
class Function:
    """A function's name, its lines and its branches."""

    name: str
    lines: int
    branches: int


def python_functions(source: str) -> Iterator[Function]:
    """Every function and method, nested ones by themselves too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            parts = list(ast.walk(node))
            branches = sum(isinstance(part, BRANCHING) for part in parts)
            branches += sum(len(part.ifs) for part in parts if isinstance(part, ast.comprehension))
            yield Function(node.name, node.end_lineno - node.lineno + 1, branches)


def cpp_functions(source: str) -> Iterator[Function]:
    """Every function that is defined in a namespace, a class or at file level; lambdas belong to the one around them.

    A brace opens a function if what stands before it, since the last statement or block, has parentheses and neither
    names a type or namespace nor assigns a value.
    """
    text = _without_comments(source)
    start = depth = 0
    function: tuple[int, str] | None = None  # where it begins, and what stands before its brace
    containers: list[bool] = []  # for each brace that is open outside of functions, whether it is a namespace or a type
    for at, character in enumerate(text):
        if function is not None:
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                began, header = function
                body = text[began : at + 1]
                branches = len(re.findall(r"\b(?:if|for|while|case|catch)\b|\?", body))
                names = re.findall(r"([\w~:]+)\s*\(", re.sub(r"__\w+__\s*\([^()]*\)", "", header))
                yield Function(names[0], body.count("\n") + 1, branches)
                function, start = None, at + 1
        elif character == "{":
            header = re.sub(r"^\s*template\s*<[^{]*?>\s*\n", "", text[start:at])
            container = re.search(r"\b(?:namespace|struct|class|union|enum|extern)\b", header) is not None
            if "(" in header and not container and "=" not in header.split("(")[0]:
                function, depth = (at - len(header.lstrip()), header), 1
            else:
                containers.append(container)
            start = at + 1
        elif character == "}" and containers:
            containers.pop()
            start = at + 1
        elif character == ";":
            start = at + 1


def _without_comments(source: str) -> str:
    """C++ without comments, literals and preprocessor lines; every line stays where it is."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:\\\n|[^\n])*'
    return re.sub(pattern, lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL | re.MULTILINE)


def findings(path: str, source: str) -> list[str]:
    """What is too long or branches too often, one text each."""
    found = []
    if (lines := source.count("\n")) > FILE_LINES:
        found.append(f"{path}: {lines} lines, at most {FILE_LINES}")
    for function in (python_functions if path.endswith(".py") else cpp_functions)(source):
        if function.lines > FUNCTION_LINES:
            found.append(f"{path}: {function.name} has {function.lines} lines, at most {FUNCTION_LINES}")
        if function.branches > BRANCHES:
            found.append(f"{path}: {function.name} has {function.branches} branches, at most {BRANCHES}")
    return found


def sources() -> dict[str, str]:
    """Text of every file of code by its path in the repository."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", *CPP)]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def test_files_and_functions_are_small() -> None:
    found = sources()
    assert {Path(path).suffix for path in found} == {".py", *CPP}
    assert [finding for path, text in found.items() for finding in findings(path, text)] == []


def test_python_is_counted_as_it_says() -> None:
    source = (
        "@decorated\n"
        "def f(x):\n"
        "    if x and x:\n        pass\n    elif x:\n        pass\n    else:\n        pass\n"
        "    for y in [z if z else 0 for z in x if z]:\n        with y:\n            pass\n"
        "    try:\n        pass\n    except OSError:\n        pass\n"
        "    def g():\n        while x:\n            pass\n"
    )
    assert list(python_functions(source)) == [Function("f", 17, 7), Function("g", 3, 1)]


def test_cpp_is_counted_as_it_says() -> None:
    source = (
        "#define LOOP for (;;) \\\n  { }\n"
        "namespace a {\nconstexpr int table[] = {1, 2};  // if {\n"
        "struct S {\n  int value{0};\n  int get() const { return value ? 1 : 0; }\n};\n"
        "template <typename T>\nvoid f(T x) {\n  if (x) {\n  } else if (x) {\n  }\n"
        '  auto g = [&](int y) {\n    for (;;) {}\n  };\n  say("while {");\n}\n}  // namespace a\n'
    )
    assert list(cpp_functions(source)) == [Function("get", 1, 1), Function("f", 9, 3)]


@pytest.mark.parametrize(
    ("path", "source", "text"),
    [
        ("a.py", "x = 1\n" * 401, "a.py: 401 lines, at most 400"),
        ("a.py", "def f():\n" + "    x = 1\n" * 60, "a.py: f has 61 lines, at most 60"),
        ("a.py", "def f(x):\n" + "    x = 1 if x else 0\n" * 16, "a.py: f has 16 branches, at most 15"),
        ("a.cpp", "int f() {\n" + "  g();\n" * 59 + "}\n", "a.cpp: f has 61 lines, at most 60"),
    ],
)
def test_what_is_too_large_is_found(path: str, source: str, text: str) -> None:
    assert findings(path, source) == [text]
