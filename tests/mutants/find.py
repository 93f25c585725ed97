"""Find a mutant again in a tree whose files have moved and whose names have changed.

A table of names is JSON: ``patterns``, pairs of a regular expression and what it becomes, applied to the texts in this
order, and ``modules``, a map of old to new paths of files or folders.
"""

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.mutants.generate import Mutant, modules
from tests.mutants.sites import Site, sites

ALIKE = 0.7  # of a statement's text that must have stayed, where the rest was renamed without a line in the table


class Names:
    """Rename old texts and paths by the table of names."""

    def __init__(self, path: Path | None = None) -> None:
        table = json.loads(path.read_text(encoding="utf-8")) if path else {}
        self._patterns: list[tuple[str, str]] = table.get("patterns", [])
        self._modules: dict[str, str] = table.get("modules", {})

    def text(self, text: str) -> str:
        """Rename the identifiers of a text."""
        for old, new in self._patterns:
            text = re.sub(old, new, text)
        return text

    def module(self, path: str) -> str:
        """Rename a path by the longest line that names it or a folder above it."""
        fits = [old for old in self._modules if path == old or path.startswith(old.rstrip("/") + "/")]
        old = max(fits, key=len, default="")
        return self._modules[old].rstrip("/") + path[len(old.rstrip("/")) :] if old else path


class Tree:
    """All sites of a tree."""

    def __init__(self, tree: Path) -> None:
        found = [(module, site) for module in modules(tree) for site in sites((tree / module).read_bytes())]
        self._sites: dict[str, list[tuple[str, Site]]] = {}
        for module, site in found:
            self._sites.setdefault(site.operator, []).append((module, site))

    def find(self, mutant: Mutant, names: Names) -> tuple[str, Site, str] | None:
        """Module and site of a mutant, and how sure it is: "same", "moved" to another function, or "alike"."""
        module, qualname = names.module(mutant.module), names.text(mutant.qualname)
        statement, before = names.text(mutant.statement), names.text(mutant.before)
        of_operator = self._sites.get(mutant.operator, [])
        same = [one for one in of_operator if (one[1].statement, one[1].before) == (statement, before)]
        function = qualname.rpartition(".")[2]
        closeness: list[Callable[[str, Site], bool]] = [
            lambda path, site: path == module and site.qualname == qualname,
            lambda path, site: site.qualname == qualname and bool(qualname),
            lambda path, site: path.rpartition("/")[2] == module.rpartition("/")[2] and site.qualname == qualname,
            lambda path, site: bool(function) and site.qualname.rpartition(".")[2] == function,
        ]
        for close in closeness:
            if (fits := [one for one in same if close(*one)]) and len({path for path, _ in fits}) == 1:
                return *fits[min(mutant.ordinal, len(fits) - 1)], "same"
        if len(same) == 1 or (same and len({(path, site.qualname) for path, site in same}) == 1):
            return *same[min(mutant.ordinal, len(same) - 1)], "moved"
        for close in closeness[:3]:
            scored = [(_alike(one[1], statement, before), one) for one in of_operator if close(*one)]
            score, best = max(scored, key=lambda pair: pair[0], default=(0.0, None))
            if best is not None and score >= ALIKE:
                return *best, "alike"
        return None


def _alike(site: Site, statement: str, before: str) -> float:
    """How much of the statement and of the expression has stayed, from 0 to 1."""
    return min(
        difflib.SequenceMatcher(None, old, new, autojunk=False).ratio()
        for old, new in ((statement, site.statement), (before, site.before))
    )
