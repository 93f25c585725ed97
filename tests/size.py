"""Print the size of a tree beside the targets of the redesign: python tests/size.py [--since COMMIT] [--root DIR]."""

import argparse
import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGES = ("launch", "tools", "engine", "quant", "model", "data")
SLIVER, SUBJECT = 60, 72  # lines of a file, characters of a commit's subject
OPENINGS = re.compile(r"(What|Whether|Of|Those|Where)\b")
WORDS = re.compile(r"\b(whoever|nobody|somebody|anew|for want of)\b", re.IGNORECASE)
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files_of(root: Path, folders: tuple[str, ...], endings: tuple[str, ...]) -> list[Path]:
    """Return the files in folders that end in one of ``endings``."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in endings)


def lines_of(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def total(paths: list[Path]) -> str:
    """Return the lines of all files."""
    return f"{sum(map(lines_of, paths)):,}"


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports; of ``from a import b`` it is ``a.b``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_by(root: Path, path: Path) -> list[Path]:
    """Return the project's files that ``path`` imports, in functions too, with packages' own but for empty ones."""
    found, left = {path}, [path]
    while left:
        for name in imports_of(left.pop()):
            parts = name.split(".") if name.split(".")[0] in PACKAGES else []
            for length in range(1, len(parts) + 1):
                base = root.joinpath(*parts[:length])
                new = {one for one in (base / "__init__.py", base.with_suffix(".py")) if one.is_file()} - found
                found |= new
                left += new
    return [one for one in found if lines_of(one)]


def defined_in(path: Path) -> Iterator[str]:
    """Yield the names of the classes, functions and variables of a module."""
    for node in tree_of(path).body:
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        yield from (getattr(one, "name", None) or getattr(one, "id", "_") for one in targets)


def repeated(names: list[str]) -> str:
    """Return how many names occur twice or more."""
    return str(sum(count > 1 for count in Counter(names).values()))


def rows(root: Path, since: str) -> list[tuple[str, str, str]]:
    """Return every measure: name, value now, target."""
    python, compiled = files_of(root, PACKAGES, (".py",)), files_of(root, PACKAGES, (".cu", ".cpp", ".h"))
    tests, headers = files_of(root, ("tests",), (".py",)), files_of(root, ("tests",), (".h",))
    log = ["git", "-C", str(root), "log", "--format=%s", f"{since}..HEAD" if since else "HEAD"]
    subjects = subprocess.run(log, capture_output=True, text=True, check=False).stdout.splitlines()
    benchmarks = files_of(root, ("benchmarks",), (".py", ".sh", ".md", ".jsonl"))
    train = imported_by(root, root / "launch" / "train.py")
    functions = [one for path in tests for one in ast.walk(tree_of(path)) if isinstance(one, DEFINITIONS[1:])]
    inside = sum((one.end_lineno or 0) - one.lineno + 1 for one in functions if one.name.startswith("test_"))
    documented = (
        one for path in python for one in ast.walk(tree_of(path)) if isinstance(one, (ast.Module, *DEFINITIONS))
    )
    texts = [text for text in map(ast.get_docstring, documented) if text]
    unclear = sum(bool(OPENINGS.match(text) or WORDS.search(text)) for text in texts)
    public = [name for path in python for name in defined_in(path) if not name.startswith("_") and name != "main"]
    slivers = sum(0 < lines_of(path) < SLIVER for path in python)
    names = [path.name for path in (*python, *compiled) if path.name != "__init__.py"]
    return [
        ("source lines, py + C++", total(python + compiled), "<= 37,000"),
        (f"py files; under {SLIVER} lines", f"{len(python)}; {slivers}", "<= 165; 0"),
        ("launch/train.py imports", f"{len(train)} files, {total(train)} lines", "<= 130, 25,500"),
        ("C++ lines, which are not in that", total(compiled), ""),
        ("test lines, py; C++ headers", f"{total(tests)}; {total(headers)}", "<= 28,000"),
        ("of these inside test functions", f"{inside:,}", ""),
        ("benchmarks and results, lines", total(benchmarks), "<= 3,800"),
        ("docstrings by opening or word", f"{unclear} of {len(texts)}, {unclear / len(texts):.0%}", "< 10%"),
        (f"commit subjects over {SUBJECT}", f"{sum(len(one) > SUBJECT for one in subjects)} of {len(subjects)}", "0"),
        ("public names defined twice", repeated(public), "0"),
        ("file names in several folders", repeated(names), "0"),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", default="", help="commit after which subjects count (default: all)")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="another tree to measure")
    options = parser.parse_args()
    for name, now, target in [("", "now", "target"), *rows(options.root.resolve(), options.since)]:
        print(f"{name:34}{now:28}{target}".rstrip())


if __name__ == "__main__":
    main()
