"""Draw mutants of the project's Python source: a seeded sample of each module, by its size, at least one of each.

python -m tests.mutants.generate --tree . --out mutants.json
"""

import argparse
import json
import random
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.sites import FOLDERS, Site, sites


@dataclass(frozen=True)
class Mutant:
    """A fault by what it is, not by where it is; ``ordinal`` counts equal ones of a function."""

    module: str
    qualname: str
    operator: str
    ordinal: int
    statement: str
    before: str
    after: str

    def __str__(self) -> str:
        text = f"{self.module}:{self.qualname or '<module>'} [{self.operator}] {self.before}"
        return f"{text}  =>  {self.after}" + ("" if self.before == self.statement else f"  in  {self.statement}")


def modules(tree: Path) -> list[str]:
    """Python files of the project, by their paths in the tree."""
    return sorted(str(path.relative_to(tree)) for folder in FOLDERS for path in (tree / folder).rglob("*.py"))


def draw(tree: Path, module: str, count: int, seed: int) -> list[Mutant]:
    """Draw ``count`` mutants of a module: collectives first, else an operator that it has, then a site of that."""
    rng = random.Random(f"{seed}:{module}")
    by_operator: dict[str, list[tuple[Site, int]]] = defaultdict(list)
    seen: dict[tuple[str, ...], int] = defaultdict(int)
    for site in sites((tree / module).read_bytes()):
        by_operator[site.operator].append((site, seen[site.key]))
        seen[site.key] += 1
    drawn = []
    while by_operator and len(drawn) < count:
        operator = "drop collective" if "drop collective" in by_operator else rng.choice(sorted(by_operator))
        choices = by_operator[operator]
        site, ordinal = choices.pop(rng.randrange(len(choices)))
        if not choices:
            del by_operator[operator]
        drawn.append(
            Mutant(module, site.qualname, operator, ordinal, site.statement, site.before, " ".join(site.text.split()))
        )
    return drawn


def generate(tree: Path, total: int, seed: int) -> list[Mutant]:
    """Draw about ``total`` mutants, in a seeded order: the first of them are a fair sample, too."""
    lines = {module: len((tree / module).read_text(encoding="utf-8").splitlines()) for module in modules(tree)}
    lines = {module: count for module, count in lines.items() if any(True for _ in sites((tree / module).read_bytes()))}

    def quotas(each: int) -> dict[str, int]:
        return {module: max(1, round(count / each)) for module, count in lines.items()}

    each = next(each for each in range(20, 10**6) if sum(quotas(each).values()) <= total)
    found = [mutant for module, count in quotas(each).items() for mutant in draw(tree, module, count, seed)]
    random.Random(seed).shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--total", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write(args.out, [asdict(mutant) for mutant in generate(args.tree, args.total, args.seed)])


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write a list as JSON, a row in a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
