"""launch/slurm/job.sbatch, run by bash with stand-ins for srun and scontrol: no Slurm is needed."""

import os
import subprocess
from pathlib import Path

from tests.lib.root import ROOT

# Two nodes of two tasks, as srun numbers them; its own options end where the command begins.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "srun $1"; shift; done
for task in 0 1 2 3; do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NTASKS=4 SLURM_NNODES=2 "$@" || exit $?
done
"""
# More names than a pipe holds: if the job reads the first name alone and closes the pipe, scontrol dies of SIGPIPE.
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[7-8]" ] || exit 1
echo node7
for i in {1..20000}; do echo node8; done
"""
RANK = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
print(*(os.environ[name] for name in names), sys.argv[1:])
"""


def submit(directory: Path, script: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the job on ``rank.py`` with this text; None: without a script."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("rank.py", script or "")):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", "HOME": str(directory)}
    environment |= {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "1234567", "SLURM_CPUS_PER_TASK": "3"}
    command = ["bash", str(ROOT / "launch" / "slurm" / "job.sbatch"), *(["rank.py"] if script else []), *arguments]
    return subprocess.run(command, cwd=directory, env=environment, text=True, capture_output=True, check=False)


def test_every_task_becomes_a_rank(tmp_path):
    result = submit(tmp_path, RANK, "--config", "with a blank.yaml")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("srun ")]
    rest = "node7 24567 3 ['--config', 'with a blank.yaml']"
    assert lines == [f"0 4 0 2 {rest}", f"1 4 1 2 {rest}", f"2 4 0 2 {rest}", f"3 4 1 2 {rest}"]
    assert "srun --kill-on-bad-exit=1" in result.stdout
    assert "srun --cpus-per-task=3" in result.stdout


def test_the_exit_code_of_a_rank_is_that_of_the_job(tmp_path):
    assert submit(tmp_path, "raise SystemExit(3)").returncode == 3
    result = submit(tmp_path, None)
    assert result.returncode == 2 and "usage: sbatch" in result.stderr
