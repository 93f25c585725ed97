"""SIGKILL at random moments: nothing is lost. The run that goes on ends with the files of the one undisturbed, its best
checkpoint marked like there, and nothing left behind."""

import json

import pytest

from tests.lib.patience import PATIENCE
from tests.lib.processes import run_python
from tests.lib.root import ROOT

# Each as users name it, and both kinds of 16-bit numbers.
LADDER = (
    *(f"{name}:bfloat16" for name in sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))),
    *(f"zero{stage}:float16" for stage in range(4)),
)


@pytest.mark.parametrize(
    ("kills", "strategies"),
    [
        pytest.param(3, ("zero3_hpz:bfloat16",), id="3"),
        pytest.param(60, LADDER, id="60", marks=pytest.mark.full),
    ],
)
def test_killed_at_random_moments_the_run_goes_on_to_the_same_export(tmp_path, seed, kills, strategies):
    program = "from tests.distributed.engine.checkpoint.scripts.kills import main; main()"
    result = run_python(program, tmp_path, kills, seed, *strategies, timeout=PATIENCE * kills)
    assert result.returncode == 0, f"seed {seed}\n{result.stderr[-8000:]}"
    found = json.loads((tmp_path / "kills.json").read_text())
    assert len(found["kills"]) == kills == sum(run["kills"] for run in found["runs"])
    # Which come depends on the machine, but of many none stays out.
    assert kills < 60 or {when for _, when in found["kills"]} == set(found["when"]), found["kills"]
    assert all(all(run["same"].values()) and not run["left"] for run in found["runs"]), f"seed {seed}: {found}"
