"""Predicted memory against measured steps on CPU ranks.

    python benchmarks/memory.py measured [--cases REGEX] [--out DIR]

measured
    runs the cases of tests/distributed/tools/memory/test_memory.py, and prints each peak, predicted and measured.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.console import markdown_table
from tests.distributed.tools.memory.test_memory import CASES, measure, measured, predict


def compare_with_measured(directory: Path, pattern: str) -> str:
    """Run the cases whose names match, and make the table."""
    cases = [name for name in CASES if re.search(pattern, name)]
    table = [["case", "model", "stage", "ranks", "predicted", "measured", "difference"]]
    for name, path in measure(directory, cases).items():
        ranks, model, stage, *_ = CASES[name]
        peak, found = predict(path, ranks)[1], measured(path)["peak"]
        table.append(
            [name, model, str(stage), str(ranks), f"{peak:,}", f"{found:,}", f"{100 * (peak / found - 1):+.1f}%"]
        )
    return markdown_table(table)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("measured",))
    parser.add_argument("--cases", default="", metavar="REGEX", help="names of cases")
    parser.add_argument("--out", type=Path, metavar="DIR", help="measured: folder of the runs; default: temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(compare_with_measured(arguments.out or Path(folder), arguments.cases))


if __name__ == "__main__":
    main()
