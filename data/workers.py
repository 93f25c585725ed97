"""Call a function for many tasks in processes beside this one, with the results in the order of the tasks.

Processes are started, not forked: a rank has threads and a GPU, which a fork breaks. They import only what the function
needs, and end with this process.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from data.workers import serve; serve(int(sys.argv[2]))"


class WorkerError(OSError):
    """Error of a process that ended before its task."""


class Workers:
    """Context of processes that call a function; they start at the first call.

    Args:
        make: makes the function, once in each process; can be pickled if ``processes`` is not 1.
        processes: number of processes; 1: this process itself.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]], processes: int) -> None:
        self._make, self._processes = make, processes
        self._stack = ExitStack()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def in_order(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results for all tasks, in their order; only a few tasks are taken at a time.

        Raises:
            WorkerError: a process was killed.
            Exception: the first error of a task.
        """
        if self._processes == 1:
            yield from map(self._own, tasks)
            return
        pool, idle = self._pool

        def run(task: Any) -> Any:
            worker = idle.get()
            try:
                return worker.call(task)
            finally:
                idle.put(worker)

        waiting = deque[Future[Any]]()
        for task in tasks:
            waiting.append(pool.submit(run, task))
            if len(waiting) > 2 * self._processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    @cached_property
    def _own(self) -> Callable[[Any], Any]:
        return self._make()

    @cached_property
    def _pool(self) -> tuple[ThreadPoolExecutor, SimpleQueue["_Worker"]]:
        pool, idle = self._stack.enter_context(ThreadPoolExecutor(self._processes)), SimpleQueue[_Worker]()
        self._stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for _ in range(self._processes):
            worker = _Worker(self._make)
            self._stack.callback(worker.close)  # before the pool, whose threads wait for it
            idle.put(worker)
        return pool, idle


class _Worker:
    """Process that calls a function for the tasks that it is sent."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self._pipe, theirs = Pipe()
        # Each process has one core, and no GPU.
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with theirs:
            handle = theirs.fileno()
            command = [sys.executable, "-c", _START, str(_ROOT), str(handle)]
            self._process = subprocess.Popen(command, pass_fds=[handle], stdin=subprocess.DEVNULL, env=environment)
        self._pipe.send_bytes(pickle.dumps(make))

    def call(self, task: Any) -> Any:
        """Call the function. Raises its error, or WorkerError."""
        try:
            self._pipe.send(task)
            result, error = self._pipe.recv()
        except (EOFError, OSError) as lost:
            code = self._process.wait()
            raise WorkerError(
                f"a process that tokenizes ended with exit code {code}, expected it to finish"
                + "; -9 is a kill, as of a machine without memory" * (code == -9)
            ) from lost
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def serve(handle: int) -> None:
    """Call the function that is sent first for each task that is sent after it, until the other end closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the process that started this one decides
        signal.signal(number, signal.SIG_IGN)
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()  # a tokenizer may have code of its checkpoint
    with Connection(handle) as pipe:
        try:
            function = pickle.loads(pipe.recv_bytes())()
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
