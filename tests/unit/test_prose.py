"""Plain words in docstrings: openings and phrases that a reader must read twice."""

import ast
import re

import pytest

from tests.lib.root import ROOT

FOLDERS = ("launch", "tools", "engine", "model", "quant", "data")
OPENING = re.compile(r"(What|Whether|Of|Those|Where|Who)\b")
PHRASES = re.compile(r"\b(whoever|nobody|somebody|anew|for want of)\b", re.IGNORECASE)


def problems(source: str) -> list[str]:
    """Line and reason of each docstring with a banned opening or phrase."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            line = getattr(node, "lineno", 1)
            if OPENING.match(text):
                found.append(f"line {line}: opens with {text.split()[0]!r}; say what it does, verb first")
            if phrase := PHRASES.search(text):
                found.append(f"line {line}: {phrase[0]!r}")
    return found


def test_docstrings_are_plain() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    named = [f"{path.relative_to(ROOT)}, {one}" for path in files for one in problems(path.read_text(encoding="utf-8"))]
    assert named == []


@pytest.mark.parametrize(
    "text", ["What is left.", "Whether it holds.", "Start anew.", "Tell whoever asks.", "Rest for want of work."]
)
def test_a_banned_word_is_found(text: str) -> None:
    assert len(problems(f'def f():\n    """{text}"""\n')) == 1


@pytest.mark.parametrize("text", ["Sum over ranks.", "Offset of a row.", "Whatever."])
def test_other_words_pass(text: str) -> None:
    assert problems(f'"""{text}"""\n') == []
