"""Recipes with anything in them that are accepted run, or end in lines that name the key: no traceback, no hang."""

import json
import re

import pytest

from tests.lib.patience import PATIENCE
from tests.lib.processes import run_python
from tests.unit.engine.config.anything import options

PROGRAM = "from tests.distributed.engine.config.scripts.anything import main; main()"
KEYS = sorted({".".join(path) for path in options() if len(path) == 2} | {"output_dir", "schedule", "deepspeed"})
# What a run finds out that no recipe can tell.
FOUND = re.compile(
    r"steps (in a row )?were left out|the model diverged|\.jsonl(:\d+)?: |bad lines in the data|that one step takes"
    r"|so they need one scheme|weights with NaN or Inf cannot be quantized"
)


@pytest.mark.full
def test_accepted_recipes_run_or_say_what_is_wrong(tmp_path, seed, count=200):
    result = run_python(PROGRAM, tmp_path, count, seed, timeout=PATIENCE * count)
    assert result.returncode == 0, f"seed {seed}\n{result.stderr[-8000:]}"
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert len(codes) == count
    problems = []
    for name, ended in codes.items():
        log, recipe = (tmp_path / f"{name}.log").read_text(), (tmp_path / f"{name}.yaml").read_text()
        good = ended is not None and len(set(ended)) == 1 and "Traceback" not in log
        if not good or not (ended[0] == 0 or says_why(log)):
            problems.append(f"{name} ended with {ended}\n{recipe}\n{log[-3000:]}")
    assert not problems, f"seed {seed}, {len(problems)} of {count}:\n" + "\n\n".join(problems)


def says_why(log: str) -> bool:
    """Whether an error names a key of the recipe, or what the data or the steps did."""
    _, found, error = log.partition("error: ")  # it may stand behind a progress bar, and have several lines
    return bool(found) and (FOUND.search(error) is not None or any(key in error for key in KEYS))
