"""Put small faults (mutants) into the project's source, one at a time, and see if the unit tests kill them.

    python -m tests.mutants.run                          # again until nothing is left
    python -m tests.mutants.run --draw 100 --seed 1      # new mutants in place of those of killed.json

``killed.json`` lists mutants that tests killed, by statement and function and not by line: after a restructuring the
tests must still kill all that are found again ("gone": the statement is no longer there). First every test file is
run once, to note which functions each test calls and how long it takes; then each mutant meets the quickest tests that
reach it. Results are kept in ``--work``; remove it to begin again.
"""

import argparse
import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tests.mutants.sites import FOLDERS, Mutant, Site, Tree
from tests.mutants.worker import prepare, run_tests

KILLED = Path(__file__).with_name("killed.json")
BUDGET, OF_A_FILE = 10.0, 0.3  # seconds of tests for one mutant; what collecting one more file of them takes
LIMIT = 300.0  # seconds for a test file without a mutant


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read what was kept in a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def keep(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(row, ensure_ascii=False), file=file)


def measure(scratch: Path, file: str) -> dict[str, Any]:
    """Return the seconds of each passing test of a file, and the tests that call each function ("": a fixture or an
    import, which all of them share)."""
    code, told = run_tests(scratch, ["--maxfail=1000", file], (), LIMIT, trace=True)
    seconds = {one["test"]: one["seconds"] for one in told if one.get("outcome") == "passed"}
    calls = defaultdict(list)
    for one in told:
        for name in one.get("calls", ()):
            calls[name].append(one["test"])
    print(f"{file}: {len(seconds)} tests, code {code}", flush=True)
    return {"file": file, "tests": seconds, "calls": calls}


def reaching(measured: list[dict[str, Any]], module: str, qualname: str) -> dict[str, float]:
    """Return the tests that reach a function, with their seconds: those of the module's own test file first, then the
    quick ones, up to ``BUDGET`` seconds."""
    found: list[tuple[tuple[bool, bool, float], str, str]] = []
    for row in measured:
        calls = row["calls"].get(f"{module}:{qualname}", ())
        own = f"test_{Path(module).stem}" in row["file"] and Path(module).parts[-2] in row["file"]
        for test, seconds in row["tests"].items():
            if test in calls or "" in calls:
                found.append(((test not in calls, not own, seconds), row["file"], test))
    chosen: dict[str, float] = {}
    files: set[str] = set()
    spent = 0.0
    for (_, _, seconds), file, test in sorted(found):
        cost = seconds + OF_A_FILE * (file not in files)
        if spent + cost <= BUDGET:
            spent += cost
            files.add(file)
            chosen[test] = seconds
    return chosen


def verdict(scratch: Path, module: str, site: Site, tests: dict[str, float]) -> str:
    """Put the fault into the copy of the tree, run the tests that reach it, take it out."""
    if not tests:
        return "unreached"
    path, built = scratch / module, scratch.parent / "kernels"
    source, kernels = path.read_bytes(), scratch.parent / "kernels_before"
    shutil.copytree(built, kernels)
    try:
        path.write_bytes(site.apply(source))
        files = sorted({test.partition("::")[0] for test in tests})
        code, _ = run_tests(scratch, files, list(tests), 15 + 3 * sum(tests.values()))
    finally:
        path.write_bytes(source)
        shutil.rmtree(built)
        kernels.rename(built)  # a mutant may have built them badly
    return {None: "timeout", 0: "survived", 5: "unreached"}.get(code, "killed")


def mutants_of(draw: int, seed: int, tree: Tree) -> Iterator[Mutant]:
    """Yield the mutants of killed.json, or with ``draw`` so many random ones."""
    if not draw:
        yield from (Mutant(*row) for row in json.loads(KILLED.read_text(encoding="utf-8")))
    else:
        yield from random.Random(seed).sample(tree.mutants(), draw)


def main() -> None:
    """Measure the tests, then run the mutants, for as long as the time lasts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/mutants"))
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="run N random mutants instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0)
    args = parser.parse_args()
    end, work, tree = time.monotonic() + 60 * args.minutes, args.work.resolve(), Tree(Path())
    scratch = work / "tree"
    prepare(Path(), scratch)
    done = {row["file"] for row in rows_of(work / "measured.jsonl")}
    files = sorted(str(path) for folder in FOLDERS for path in Path("tests/unit", folder).rglob("test_*.py"))
    files = [file for file in files if file not in done]
    while files and time.monotonic() < end:
        keep(work / "measured.jsonl", measure(scratch, files.pop(0)))
    measured, results = rows_of(work / "measured.jsonl"), work / "results.jsonl"
    found = {Mutant(*row["mutant"]): row["verdict"] for row in rows_of(results)}
    left = [] if files else [one for one in mutants_of(args.draw, args.seed, tree) if one not in found]
    while left and time.monotonic() < end:
        mutant = left.pop(0)
        place = tree.find(mutant)
        found[mutant] = verdict(scratch, *place, reaching(measured, place[0], place[1].qualname)) if place else "gone"
        keep(results, {"mutant": astuple(mutant), "verdict": found[mutant]})
    for mutant, said in found.items():
        if said != "killed":
            print(f"{said}: {mutant}")
    print(f"{len(files)} test files and {len(left)} mutants left")


if __name__ == "__main__":
    main()
