"""Call a function for many tasks in processes beside this one, with the results in the order of the tasks.

Processes are started, not forked: a rank has threads and a GPU, which a fork breaks. They import only what the function
needs, and end with this process. (Processes of multiprocessing would first import the script that trains.)
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from data.workers import serve; serve(int(sys.argv[2]))"


class WorkerError(OSError):
    """Error of a process that ended before it had finished its task."""


class Workers(ExitStack):
    """Context of processes that call a function; they start with their first task.

    Args:
        make: returns the function, called once in each process; must be picklable if ``processes`` is not 1.
        processes: number of processes; 1: this process itself.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]], processes: int) -> None:
        super().__init__()
        self._make, self._processes = make, processes
        self._function: Callable[[Any], Any] | None = None
        self._workers = list[_Worker]()

    def in_order(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of all tasks, in their order; all must be read before the next call. The processes take
        turns, a task at a time. Raises the first error of a task, and WorkerError if a process was killed."""
        if self._processes == 1:
            self._function = self._function or self._make()
            yield from map(self._function, tasks)
            return
        busy = deque[_Worker]()
        for number, task in enumerate(tasks):
            done = [busy.popleft().result()] if number >= self._processes else []
            turn = number % self._processes
            if turn == len(self._workers):
                self._workers.append(self.enter_context(closing(_Worker(self._make))))
            self._workers[turn].send(task)
            busy.append(self._workers[turn])
            yield from done
        yield from (worker.result() for worker in busy)


class _Worker:
    """Process that receives tasks and calls a function for each."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self._pipe, theirs = Pipe()
        # Each process has one core, and no GPU.
        alone = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            handle = theirs.fileno()
            command = [sys.executable, "-c", _START, str(_ROOT), str(handle)]
            environment = os.environ | alone
            self._process = subprocess.Popen(command, pass_fds=[handle], stdin=subprocess.DEVNULL, env=environment)
        self.send(pickle.dumps(make))

    def send(self, task: Any) -> None:
        """Begin a task. The result of the previous task must have been read. Raises WorkerError if the process has
        ended."""
        with self._alive():
            self._pipe.send(task)

    def result(self) -> Any:
        """Return the result of the task. Raises the task's error, or WorkerError if the process has ended."""
        with self._alive():
            result, error = self._pipe.recv()
        if error is not None:
            raise error
        return result

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as lost:
            code = self._process.wait()
            raise WorkerError(
                f"a process that tokenizes ended with exit code {code}, expected it to finish"
                + "; -9: it was killed, perhaps because memory ran out" * (code == -9)
            ) from lost

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def serve(handle: int) -> None:
    """Serve `Workers` at the pipe ``handle``: receive the pickled function ``make`` of `Workers`, then tasks; send each
    task's result or error. Return when the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the process that started this one decides
        signal.signal(number, signal.SIG_IGN)
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()  # a tokenizer may have code of its checkpoint
    with Connection(handle) as pipe:
        try:
            function = pickle.loads(pipe.recv())()
            while True:
                task = pipe.recv()
                result, problem = None, None
                try:
                    result = function(task)
                except Exception as error:
                    problem = error
                pipe.send((result, problem))
        except (EOFError, BrokenPipeError):
            pass
