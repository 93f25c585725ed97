"""Compare two runs: mutants that were killed before and are not now. Also packs a run into one small file.

python -m tests.mutants.compare tests/mutants/killed.json build/mutants/base/results.jsonl
python -m tests.mutants.compare --pack build/mutants/base/results.jsonl tests/mutants/killed.json
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.mutants.generate import Mutant

FIELDS = ("module", "qualname", "operator", "ordinal", "statement", "before", "after")


def read(path: Path) -> dict[Mutant, dict[str, Any]]:
    """Mutants in their order, with what a run says of each; from a list of them, a packed run, or results.jsonl."""
    text = path.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    rows = [_unpacked(row) if isinstance(row, list) else row for row in rows]
    return {Mutant(**{name: row[name] for name in FIELDS}): {"verdict": "", **row} for row in rows}


def pack(source: Path, target: Path) -> None:
    """Put the verdicts of a run into a packed list, a line for each; a statement that is dropped is written once."""
    found = read(target) | read(source)
    rows = [
        [row["verdict"], *(row[name] for name in FIELDS[:5]), *(["", ""] if same else [row["before"], row["after"]])]
        for row in found.values()
        for same in [row["before"] == row["statement"] and row["after"] == "pass"]
    ]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    target.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _unpacked(row: list[Any]) -> dict[str, Any]:
    verdict, *values = row
    if not values[-1]:
        values[-2:] = [values[4], "pass"]
    return {"verdict": verdict, **dict(zip(FIELDS, values, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--pack", action="store_true", help="put the first run's verdicts into the second, packed one")
    args = parser.parse_args()
    if args.pack:
        pack(args.before, args.after)
        return
    before, after = read(args.before), read(args.after)
    print("before:", dict(Counter(row["verdict"] for row in before.values())))
    print("after: ", dict(Counter(row["verdict"] for row in after.values())))
    print("killed before, now:", dict(Counter(after[one]["verdict"] for one in _killed(before) if one in after)))
    print("killed before, not run yet:", sum(one not in after for one in _killed(before)))
    for verdict in ("survived", "unreached", "timeout", "gone"):
        for mutant in [one for one in _killed(before) if one in after and after[one]["verdict"] == verdict]:
            print(f"{verdict} ({after[mutant].get('at', '')}): {mutant}")


def _killed(run: dict[Mutant, dict[str, Any]]) -> list[Mutant]:
    return [mutant for mutant, row in run.items() if row["verdict"] == "killed"]


if __name__ == "__main__":
    main()
