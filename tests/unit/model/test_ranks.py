"""The end of a process: nobody leaves while one of gloo's threads still has something to do."""

from tests.lib.processes import run_python

# A thread of gloo's name that works without Python's lock, as one does that has told who waits for it and has not yet
# dropped its tensors. The abort itself comes once in some twenty ends, and cannot be asked for.
PROGRAM = """
import hashlib, sys, threading
from pathlib import Path
import torch.distributed as dist
from model.ranks import _runs, shut_down

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
named, done, end = threading.Event(), [], threading.Event()

def work():
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
    named.set()
    hashlib.sha256(data)
    done.append(True)
    end.wait()

data = bytes(2**29)
thread = threading.Thread(target=work, daemon=True)
thread.start()
named.wait()
while not done and not _runs(Path(f"/proc/self/task/{thread.native_id}")):
    pass
shut_down()
assert done, "left before the thread was idle"
end.set()
thread.join()
"""


def test_a_process_waits_for_gloos_threads_before_it_ends(tmp_path):
    ended = run_python(PROGRAM, tmp_path / "store")
    assert ended.returncode == 0, ended.stderr
