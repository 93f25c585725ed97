"""Files of checkpoints: counted as they are written, replaced in one rename, and refused where they would run code."""

import io
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

from engine.checkpoint.checked_files import CheckedFiles, file_crc32, read_object, replace_text
from engine.checkpoint.find import read_step_directory, verify_checkpoint
from model.ranks import RankError
from tests.unit.engine.checkpoint.steps import NOTHING, refit, write_step


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
    write_step(tmp_path, 1)
    path = write_step(tmp_path, 2)
    file = path / random.choice(["a.pt", "b.pt"])
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    with pytest.raises(
        RankError, match=f"the content of {file.name} is not what was written.*train.resume to step_00000001"
    ):
        verify_checkpoint(read_step_directory(path))


def test_a_pointer_is_replaced_in_one_rename_and_no_link_is_written_through(tmp_path):
    """An output directory may have links in it, put there by another user."""
    path, same, victim = tmp_path / "latest", tmp_path / "same", tmp_path / "victim"
    replace_text(path, "one")
    same.hardlink_to(path)
    replace_text(path, "two")
    assert path.read_text() == "two" and same.read_text() == "one"
    victim.write_text("mine")
    for name in ("latest", "best.json"):
        (tmp_path / name).unlink(missing_ok=True)
        for link in (name, f"{name}.partial"):
            (tmp_path / link).symlink_to(victim)
        replace_text(tmp_path / name, "ours")
        assert (tmp_path / name).read_text() == "ours" and not (tmp_path / name).is_symlink()
    assert victim.read_text() == "mine"


class Calls:
    """Pickled as a call: of ``os.mkdir``, as an attacker's class would be, or of ``getattr``."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_file_that_would_run_code_is_refused_by_name_and_runs_nothing(tmp_path: Path):
    path, mark = write_step(tmp_path, 1), tmp_path / "ran"
    evil = Calls(os.mkdir, str(mark))
    buffer = io.BytesIO()
    torch.save({"tensor": torch.rand(3), "more": evil}, buffer)
    (path / "b.pt").write_bytes(buffer.getvalue())
    refit(path)
    asks = re.escape(f"{path}/b.pt asks for posix.mkdir: ") + ".*could run code, and is not loaded"
    for read in (
        lambda: verify_checkpoint(read_step_directory(path)),
        lambda: CheckedFiles(NOTHING).load(path / "b.pt"),  # what DeepSpeed reads with
        lambda: read_object(path / "b.pt", mmap=True),
    ):
        with pytest.raises((RankError, ValueError), match=asks):
            read()
    (path / "b.pt").write_bytes(pickle.dumps(evil))  # as torch wrote until 1.6
    refit(path)
    with pytest.raises(RankError, match=r"b\.pt cannot be read"):
        verify_checkpoint(read_step_directory(path))
    assert not mark.exists()


def test_objects_of_deepspeed_are_read_and_getattr_is_of_members_of_enums_alone(tmp_path):
    """Python 3.11.0 to 3.11.3 pickle the members of an enum as ``getattr(kind, name)``."""
    values = {"scaler": LossScaler(8.0), "stage": ZeroStageEnum.gradients, "at": fragment_address(3, 4)}
    torch.save({**values, "again": Calls(getattr, ZeroStageEnum, "gradients")}, tmp_path / "file.pt")
    found = read_object(tmp_path / "file.pt")
    assert found["scaler"].cur_scale == 8.0 and (found["stage"], found["at"]) == (values["stage"], values["at"])
    assert found["again"] is ZeroStageEnum.gradients
    for kind, name in ((ZeroStageEnum, "mro"), (ZeroStageEnum, "__class__"), (LossScaler, "__init__"), ([], "append")):
        torch.save({"stage": Calls(getattr, kind, name)}, tmp_path / "file.pt")
        with pytest.raises(ValueError, match="asks for getattr"):
            read_object(tmp_path / "file.pt")
