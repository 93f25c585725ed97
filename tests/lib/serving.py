"""Tables of docs/serving.md."""

import os
import re
from collections.abc import Iterable

from tests.lib.root import ROOT

PAGE = ROOT / "docs" / "serving.md"
ENGINE_LAYOUTS = {"llama.cpp": "gguf", "MLX": "mlx", "ExecuTorch": "executorch"}
WRITE = bool(os.environ.get("DEEPQAT_WRITE"))


def table(name: str) -> dict[str, list[str]]:
    """Cells of a table of the page, by the first of each row."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(f"<!-- {name}: begin -->") : text.index(f"<!-- {name}: end -->")].splitlines()
    return dict(cells(line) for line in lines[3:])


def cells(line: str) -> tuple[str, list[str]]:
    """First cell of a row, and the others."""
    first, *others = (cell.strip() for cell in line.strip(" |").split(" | "))
    return first, others


def write_table(name: str, head: list[str], rows: Iterable[Iterable[str]]) -> None:
    """Replace a table of the page."""
    write(name, [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)])


def write(name: str, lines: Iterable[str]) -> None:
    """Replace the lines between two marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = (text.index(f"<!-- {name}: {word} -->") for word in ("begin", "end"))
    PAGE.write_text("\n".join([f"{text[:begin]}<!-- {name}: begin -->", *lines, text[end:]]), encoding="utf-8")


def is_figure(cell: str) -> bool:
    """Tell a figure, which differs between machines, from a reason."""
    return re.fullmatch(r"\de-\d\d", cell) is not None
