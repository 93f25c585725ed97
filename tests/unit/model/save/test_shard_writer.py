"""Files that are written tensor by tensor."""

import os
import random
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.save import shard_writer
from model.save.shard_writer import KINDS, ShardWriter


def some_tensors() -> dict[str, torch.Tensor]:
    """Two of every dtype that is written, in an order that is not that of the file; odd sizes, empty ones."""
    tensors = {}
    for index, dtype in enumerate(KINDS):
        for name, shape in (("z", (3, index + 1)), ("ä", (0, 4) if index % 2 else (index,))):
            values = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(-100, 100, shape)
            tensors[f"{name}.{index}"] = values.to(dtype)
    return tensors


def test_the_file_is_that_of_the_library(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(shard_writer, "SYNC_BYTES", 64)  # several times on the way
    stacked = [f"experts.{index}.weight" for index in range(11)]
    tensors = some_tensors() | {key: torch.randn(3, 5).bfloat16() for key in stacked}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    writer = ShardWriter(tmp_path / "ours", {key: (one.dtype, tuple(one.shape)) for key, one in tensors.items()})
    for key in random.sample(sorted(tensors.keys() - stacked), len(tensors) - len(stacked)):
        lent = tensors[key].clone()
        writer.write(key, lent)
        lent.zero_()
    for key in stacked:  # of 15 elements, in two parts
        writer.write_part(key, 7, tensors[key].flatten()[7:])
        writer.write_part(key, 0, tensors[key].flatten()[:7])
    writer.finish()
    writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert load_file(tmp_path / "ours").keys() == tensors.keys()


def test_the_umask_decides_who_reads_it(tmp_path):
    before = os.umask(0o027)
    try:
        ShardWriter(tmp_path / "file", {}).close()
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_missing_or_unplanned_tensor_is_an_error(tmp_path):
    writer = ShardWriter(tmp_path / "file", {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))})
    writer.write("b", torch.zeros(2))
    with pytest.raises(KeyError):
        writer.write("b", torch.zeros(2))
    for unlike in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"file: a at element 0 is .*, planned torch\.float32 \[2\]"):
            writer.write("a", unlike)
    with pytest.raises(ValueError, match="1 planned tensors were not written, for example a"):
        writer.finish()
    writer.close()
    with pytest.raises(ValueError, match=r"cannot store the dtypes torch\.complex64"):
        ShardWriter(tmp_path / "complex", {"a": (torch.complex64, (2,))})


def test_a_full_disk_is_an_oserror(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        writer = ShardWriter(tmp_path / "file", {"a": (torch.uint8, (10_000,))})
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
        with pytest.raises(OSError, match="File too large"):
            writer.write("a", torch.zeros(10_000, dtype=torch.uint8))
        writer.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        opened = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="File too large"):
            ShardWriter(tmp_path / "header", {"a": (torch.uint8, (10_000,))})
        assert os.listdir("/proc/self/fd") == opened
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
