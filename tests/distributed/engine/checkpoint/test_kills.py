"""SIGKILL at random moments: nothing is lost. The run that goes on ends with the files of the one undisturbed, its best
checkpoint marked like there, and nothing left behind."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.root import ROOT

SCRIPT = Path(__file__).parent / "scripts" / "kills.py"


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
def test_killed_at_random_moments_the_run_goes_on_to_the_same_export(tmp_path, kills, strategies):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    seed = random.SystemRandom().randrange(2**31)
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(kills), str(seed), *strategies]
    result = subprocess.run(
        command,
        env=environment,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE * kills,
    )
    assert result.returncode == 0, f"seed {seed}\n{result.stdout[-8000:]}"
    found = json.loads((tmp_path / "kills.json").read_text())
    assert len(found["kills"]) == kills == sum(run["kills"] for run in found["runs"])
    assert all(run["same"] and not run["left"] for run in found["runs"]), f"seed {seed}: {found}"
