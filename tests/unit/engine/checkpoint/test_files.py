"""Files of checkpoints: counted as they are written, replaced in one rename, and refused where they would run code."""

import io
import json
import os
import pickle
import random
import re
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from engine.checkpoint.files import CheckedFiles, file_crc32, read_object, replace_text
from engine.checkpoint.find import read_step_directory, verify_checkpoint
from model.ranks import RankError
from tests.unit.engine.checkpoint.steps import NOTHING, write_step


def test_what_is_counted_is_what_lies_on_the_disk(tmp_path, seed):
    files = CheckedFiles(NOTHING)
    tensors = {"a": torch.rand(random.randrange(1, 10**6)), "b": torch.randint(99, (3, 5)), "text": "x" * 1000}
    files.save(tensors, tmp_path / "file.pt")
    size, crc32 = files.written["file.pt"]
    assert files.bytes == size == (tmp_path / "file.pt").stat().st_size and crc32 == file_crc32(tmp_path / "file.pt")
    back = torch.load(tmp_path / "file.pt", weights_only=True)
    assert back["text"] == tensors["text"] and torch.equal(back["a"], tensors["a"])


def test_a_file_that_cannot_be_written_is_counted_removed_and_not_raised(tmp_path):
    files = CheckedFiles(NOTHING)
    files.save(torch.rand(10_000), tmp_path / "missing" / "file.pt")
    assert files.failure == "file.pt: No such file or directory"
    full = tmp_path / "full.pt"
    full.symlink_to("/dev/full")  # every write to it fails, as on a full disk
    files.save(torch.rand(10_000), full)
    assert not full.is_symlink()
    assert files.failure == "file.pt: No such file or directory"  # the first
    assert files.written == {} and files.bytes > 80_000


def test_one_bit_is_found_before_anything_is_loaded(tmp_path, seed):
    path = write_step(tmp_path, 1)
    file = path / random.choice(["a.pt", "b.pt"])
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    checkpoint = read_step_directory(path)
    with pytest.raises(RankError, match=f"is damaged: the content of {file.name} is not what was written"):
        verify_checkpoint(checkpoint)


def test_a_pointer_is_replaced_in_one_rename(tmp_path):
    path = tmp_path / "latest"
    replace_text(path, "one")
    other_name = tmp_path / "other"
    other_name.hardlink_to(path)
    replace_text(path, "two")
    assert path.read_text() == "two" and other_name.read_text() == "one"


class Evil:
    """Makes a directory where it is unpickled, as an attacker's class would."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def replace_file(path: Path, content: bytes) -> None:
    """Give a file of a checkpoint another content, and the manifest its size and CRC-32."""
    path.write_bytes(content)
    manifest = path.parent / "state.json"
    state = json.loads(manifest.read_text())
    state["files"][path.name] = (len(content), file_crc32(path))
    manifest.write_text(json.dumps(state))


def test_a_file_that_would_run_code_is_refused_by_name_and_runs_nothing(tmp_path):
    path, mark = write_step(tmp_path, 1), tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save({"tensor": torch.rand(3), "more": Evil(mark)}, buffer)
    replace_file(path / "b.pt", buffer.getvalue())
    checkpoint = read_step_directory(path)
    asks = re.escape(f"{path}/b.pt asks for posix.mkdir: ") + ".*could run code, and is not loaded"
    for read in (
        lambda: verify_checkpoint(checkpoint),
        lambda: CheckedFiles(NOTHING).load(path / "b.pt"),  # what DeepSpeed reads with
        lambda: read_object(path / "b.pt", mmap=True),
    ):
        with pytest.raises((RankError, ValueError), match=asks):
            read()
    replace_file(path / "b.pt", pickle.dumps(Evil(mark)))  # as torch wrote until 1.6
    with pytest.raises(RankError, match=r"b\.pt cannot be read"):
        verify_checkpoint(read_step_directory(path))
    assert not mark.exists()


def test_what_deepspeed_keeps_of_its_own_is_read(tmp_path):
    values = {"scaler": LossScaler(8.0), "stage": ZeroStageEnum.gradients, "at": fragment_address(3, 4)}
    torch.save(values, tmp_path / "file.pt")
    found = read_object(tmp_path / "file.pt")
    assert found["scaler"].cur_scale == 8.0 and (found["stage"], found["at"]) == (values["stage"], values["at"])


class ByName:
    """Pickled as ``getattr(kind, name)``, as Python 3.11.0 to 3.11.3 pickle the members of an enum."""

    def __init__(self, kind, name):
        self.asked = kind, name

    def __reduce__(self):
        return getattr, self.asked


def test_enums_of_the_first_pythons_3_11_are_read_and_getattr_does_nothing_else(tmp_path):
    torch.save({"stage": ByName(ZeroStageEnum, "gradients")}, tmp_path / "file.pt")
    assert read_object(tmp_path / "file.pt")["stage"] is ZeroStageEnum.gradients
    for kind, name in ((ZeroStageEnum, "mro"), (ZeroStageEnum, "__class__"), (LossScaler, "__init__"), ([], "append")):
        torch.save({"stage": ByName(kind, name)}, tmp_path / "file.pt")
        with pytest.raises(ValueError, match="asks for getattr"):
            read_object(tmp_path / "file.pt")


def test_mutated_files_are_refused_by_name(tmp_path, seed):
    """With a right CRC-32: somebody meant it. What still loads has other numbers in its tensors."""
    path = write_step(tmp_path, 1)
    content = (path / "b.pt").read_bytes()
    refused = 0
    for _ in range(60):
        changed = bytearray(content)
        if random.random() < 0.3:
            del changed[random.randrange(len(changed)) :]
        for _ in range(random.choice([1, 4, 40])):
            if changed:
                changed[random.randrange(min(len(changed), random.choice([600, 10**6])))] = random.randrange(256)
        replace_file(path / "b.pt", bytes(changed))
        try:
            verify_checkpoint(read_step_directory(path))
        except RankError as error:
            assert f"{path}/b.pt" in str(error)
            refused += 1
    assert refused > 10


def test_links_that_lie_ready_are_not_written_through(tmp_path):
    """As an output directory of somebody else may have them."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("latest", "best.json"):
        (tmp_path / f"{name}.partial").symlink_to(victim)
        (tmp_path / name).symlink_to(victim)
        replace_text(tmp_path / name, "ours")
        assert (tmp_path / name).read_text() == "ours" and not (tmp_path / name).is_symlink()
    assert victim.read_text() == "mine"
