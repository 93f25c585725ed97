"""The end of a process: gloo's threads are waited for while they still have something to do."""

import hashlib
import threading
from pathlib import Path

from model.ranks import _wait_for_gloo


def test_a_thread_of_gloo_that_works_is_waited_for():
    """It works without Python's lock, as one does that has told who waits for it and has not yet dropped its tensors.
    The abort itself comes once in some twenty ends, and cannot be asked for."""
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
