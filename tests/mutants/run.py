"""Run the tests that reach each mutant; say which mutants they kill.

python -m tests.mutants.run --tree . --minutes 9 [--names names.json] [--verdict killed] [--ranks]

Needs ``tests.mutants.measure`` of the same tree first. Goes on where it stopped; a line for each mutant is appended to
``results.jsonl`` in the folder of the measurement. With --ranks, mutants that the unit tests did not kill meet the
tests of several ranks, as far as those were measured. With --control, the tests that have killed mutants run without
any: those that fail have proved nothing.
"""

import argparse
import json
import os
import shutil
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.compare import read
from tests.mutants.find import Names, Tree
from tests.mutants.generate import Mutant
from tests.mutants.sites import Site
from tests.mutants.worker import prepare, run_tests

BUDGET, OF_A_FILE = 10.0, 0.3  # seconds of tests for one mutant; what collecting one more file of them takes


class Tests:
    """The tests of a tree, as measured."""

    def __init__(self, measured: Path, ranks: bool) -> None:
        rows = [json.loads(line) for line in measured.read_text(encoding="utf-8").splitlines()]
        self._files = [row for row in rows if row["file"].startswith("tests/unit/") != ranks]

    def reaching(self, module: str, qualname: str, budget: float) -> dict[str, list[str]]:
        """Tests by file that reach a function: the module's own first, then the quick ones, up to ``budget`` seconds.

        Code outside of functions, in a class's body too, is reached by every test of a file that imports the module.
        """
        is_class = qualname.rpartition(".")[2].lstrip("_")[:1].isupper()
        found: list[tuple[tuple[int, float], str, str]] = []
        for file in self._files:
            calls = file["calls"].get(f"{module}:{'' if is_class else qualname}")
            if calls is None:
                continue
            own = "test_" + Path(module).stem in file["file"] and Path(module).parts[-2] in file["file"]
            for number, (test, seconds) in enumerate(file["tests"].items()):
                indirect = number not in calls
                if not indirect or -1 in calls:
                    found.append(((2 * indirect + (not own), seconds), file["file"], test))
        spent, chosen = 0.0, defaultdict(list)
        for (_, seconds), name, test in sorted(found):
            cost = seconds + (0 if name in chosen else OF_A_FILE)
            if spent + cost <= budget:
                spent += cost
                chosen[name].append(test)
        return dict(chosen)

    def seconds(self, chosen: dict[str, list[str]]) -> float:
        """How long the chosen tests took."""
        return sum(file["tests"][test] for file in self._files for test in chosen.get(file["file"], ()))


def verdict(scratch: Path, module: str, site: Site, tests: Tests, budget: float) -> dict[str, Any]:
    """Put the fault into the copy of the tree, run the tests that reach it, take it out."""
    chosen = tests.reaching(module, site.qualname, budget)
    if not chosen:
        return {"verdict": "unreached"}
    wanted = [test for names in chosen.values() for test in names]
    path = scratch / module
    source = path.read_bytes()
    begin = time.monotonic()
    kernels = scratch.parent / "kernels_of_mutant"  # what a mutant may build badly
    shutil.rmtree(kernels, ignore_errors=True)
    shutil.copytree(scratch.parent / "kernels", kernels)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(kernels)
    try:
        path.write_bytes(site.apply(source))
        code, told = run_tests(scratch, [*chosen], wanted, 15 + 3 * tests.seconds(chosen))
    finally:
        path.write_bytes(source)
    killer = next((one["test"] for one in told if one["outcome"] in ("failed", "error")), None)
    found = {None: "timeout", 0: "survived", 5: "unreached"}.get(code, "killed")
    row = {"verdict": found, "code": code, "tests": len(wanted), "seconds": round(time.monotonic() - begin, 1)}
    return row | ({"killer": killer} if killer else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path())
    parser.add_argument("--work", type=Path, default=Path("build/mutants/base"), help="folder of measured.jsonl")
    parser.add_argument("--mutants", type=Path, default=Path(__file__).with_name("killed.json"))
    parser.add_argument("--names", type=Path, help="table of what was renamed and moved (see find.py)")
    parser.add_argument("--verdict", help="only mutants with this verdict in --mutants")
    parser.add_argument("--ranks", action="store_true", help="tests outside of tests/unit, on what survived those")
    parser.add_argument("--control", action="store_true", help="run the tests that killed on the tree as it is")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--budget", type=float, default=BUDGET)
    args = parser.parse_args()
    end, tree, work = time.monotonic() + 60 * args.minutes, args.tree.resolve(), args.work.resolve()
    out = work / "results.jsonl"
    done = read(out) if out.exists() else {}
    left = [one for one, old in read(args.mutants).items() if args.verdict in (None, old["verdict"])]
    left = [one for one in left if _is_due(done.get(one), args.ranks)]
    tests, names, whole = Tests(work / "measured.jsonl", args.ranks), Names(args.names), Tree(tree)
    prepare(tree, work / "mutated")
    if args.control:
        return _control(work / "mutated", sorted({str(row["killer"]) for row in done.values() if "killer" in row}))
    while left and time.monotonic() < end:
        mutant = left.pop(0)
        row = _run_one(work / "mutated", mutant, whole, names, tests, args.budget)
        with out.open("a", encoding="utf-8") as file:
            print(json.dumps({**asdict(mutant), **row, "ranks": args.ranks}, ensure_ascii=False), file=file)
        print(f"{row['verdict']:9} {row.get('seconds', 0):5} s  {str(mutant)[:150]}", flush=True)
    print(f"{len(left)} mutants left")


def _control(scratch: Path, killers: list[str]) -> None:
    files = sorted({test.partition("::")[0] for test in killers})
    _, told = run_tests(scratch, ["--maxfail=1000", *files], killers, 1000.0)
    print(f"{len(told)} tests that killed, on the tree as it is:")
    print("\n".join(f"{one['outcome']}: {one['test']}" for one in told if one["outcome"] != "passed"))


def _is_due(row: dict[str, Any] | None, ranks: bool) -> bool:
    """Tell if a mutant is still to be run, from the last row of its results."""
    if row is None or not ranks:
        return row is None and not ranks
    return not row["ranks"] and row["verdict"] in ("survived", "unreached")


def _run_one(scratch: Path, mutant: Mutant, whole: Tree, names: Names, tests: Tests, budget: float) -> dict[str, Any]:
    found = whole.find(mutant, names)
    if found is None:
        return {"verdict": "gone"}
    module, site, how = found
    return {"found": how, "at": f"{module}:{site.qualname}", **verdict(scratch, module, site, tests, budget)}


if __name__ == "__main__":
    main()
