"""Every rank, with everything imported (see tests/lib/processes.py): forks a process for each job that it is sent.

Messages are lines of JSON. tests/lib/waiting.py sends jobs, ``{"argv", "environment", "log"}``; the rank
answers with ``{"pid"}`` of the process that runs one and, when it has ended, with ``{"code"}``. The rank ends when the
other side of the socket does.
"""

import json
import os
import random
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.lib.forked import become
from tests.lib.seeds import seed_of

OF_THE_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR")


def main() -> None:
    """See above. The program's argument is the path of a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[-1])
        with connection.makefile("rw") as lines:

            def answer(**message: Any) -> None:
                print(json.dumps(message), file=lines, flush=True)

            answer(rank=int(os.environ["RANK"]))
            for line in lines:
                job = json.loads(line)
                if (pid := os.fork()) == 0:
                    connection.close()
                    become(lambda job=job: run(job), Path(job["log"]))
                answer(pid=pid)
                answer(code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def run(job: dict[str, Any]) -> None:
    """In a process of its own: what the launcher's process would do from its first line on."""
    mine = {name: os.environ[name] for name in OF_THE_RANK}
    os.environ.clear()
    os.environ.update(job["environment"] | mine)
    script, *arguments = job["argv"]
    for seeder in (random.seed, np.random.seed):
        seeder(seed_of(f"{Path(script).name} {mine['RANK']}"))
    sys.argv = [script, f"--local_rank={mine['LOCAL_RANK']}", *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
