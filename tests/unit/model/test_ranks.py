"""Wait for gloo's threads at the end of a process."""

import hashlib
import threading
from pathlib import Path

from model.ranks import _wait_for_gloo


def test_a_thread_of_gloo_that_works_is_waited_for():
    """The thread works without Python's GIL, like one that has woken its waiter and has not yet dropped its tensors.
    The abort itself occurs once in about twenty exits, and cannot be provoked."""
    named, done, end, data = threading.Event(), [], threading.Event(), bytes(2**28)

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        named.set()
        hashlib.sha256(data)
        done.append(True)
        end.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    named.wait()
    _wait_for_gloo()
    assert done, "left before the thread was idle"
    end.set()
    thread.join()
