"""What half an hour on a new GPU shows: is it right, how fast are its parts, how fast does it train.

    python benchmarks/gpu/half_hour.py A --out runs/gpu        (then B, then C; docs/gpu.md says what each decides)

Each stage ends within ``--limit`` seconds, so that a machine that is lent for minutes at a time runs one after the
other. Its jobs (stages.py) are commands; each has a limit of its own, and what fails does not stop the rest. Their
output goes to ``OUT/logs``, tables to ``OUT``, and what matters of both to ``OUT/summary_<stage>.txt``. With
``--dry`` all jobs run in tiny sizes on the CPU, to see that they run.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.stages import STAGES, Job, Place

ROOT = Path(__file__).resolve().parents[2]
LEAST = 15  # seconds: a job that has fewer is left out
ROOM = 40 * 2**30  # bytes that the model of stage B and its export take
SLOWER = 4  # limits of jobs on a CPU, where torch.compile has a C++ compiler to wait for
LINES = 12  # of a job that failed, for the summary


def main() -> None:
    """Run one stage; exit code 1 if a job of it failed or was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=sorted(STAGES))
    parser.add_argument("--out", type=Path, required=True, help="folder for summary, tables and logs")
    parser.add_argument("--work", type=Path, help="folder for models, 40 GB (default: in /dev/shm if it is that large)")
    parser.add_argument("--limit", type=int, default=570, help="seconds of the stage")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    options = parser.parse_args()
    place = Place(options.out.resolve(), (options.work or _room()).resolve(), options.dry)
    for folder in (place.out / "logs", place.work):
        folder.mkdir(parents=True, exist_ok=True)
    failed = Stage(options.stage, place, options.limit).run(STAGES[options.stage](place))
    sys.exit(1 if failed else 0)


def _room() -> Path:
    """Memory where there is enough: models are written and read more often than disks of such machines are fast."""
    memory = Path("/dev/shm")
    enough = memory.is_dir() and shutil.disk_usage(memory).free > ROOM
    return (memory if enough else Path.home()) / "deepqat_gpu"


class Stage:
    """Runs jobs one after the other, within a limit, and keeps a summary."""

    def __init__(self, name: str, place: Place, limit: int) -> None:
        self.name, self.place, self.limit = name, place, limit
        self.began = time.monotonic()
        self.summary = place.out / f"summary_{name}.txt"
        self.summary.write_text("")

    def run(self, jobs: list[Job]) -> list[str]:
        """Run all of them; the names of those that failed or were left out."""
        failed = [job.name for job in jobs if not self._run(job)]
        self.note(f"stage {self.name}: {self._elapsed():.0f} s; failed or left out: {', '.join(failed) or 'none'}")
        return failed

    def note(self, text: str) -> None:
        """Print a text, and keep it in the summary."""
        print(text, flush=True)
        with open(self.summary, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _run(self, job: Job) -> bool:
        left = self.limit - self._elapsed()
        if left < LEAST:
            self.note(f"[{job.name}] left out: {left:.0f} s left")
            return False
        log = self.place.out / "logs" / f"{self.name}_{job.name}.log"
        began = time.monotonic()
        code = self._end_of(job, log, min(job.limit * (SLOWER if self.place.dry else 1), left))
        self.note(f"[{job.name}] exit code {code}, {time.monotonic() - began:.0f} s")
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = lines[-LINES:] if code else [line for line in lines if re.match(job.shown, line)]
        for line in shown:
            self.note(f"    {line[:200]}")
        return code == 0

    def _end_of(self, job: Job, log: Path, limit: float) -> int:
        """The job's exit code, 124 when it was stopped at its limit with all that it had started."""
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                job.command, cwd=ROOT, env=self._environment(), stdout=file, stderr=file, start_new_session=True
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks and compilers that it left behind, too
                process.wait()

    def _environment(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1" if self.place.dry else "8",
            "DS_ACCELERATOR": "cpu" if self.place.dry else "cuda",
        }
        return {**os.environ, **own}


if __name__ == "__main__":
    main()
