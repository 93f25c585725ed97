"""Reading safetensors by byte ranges, compared with the format's own library; and damaged files."""

import json
import math
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model.checkpoint.safetensors import (
    PAGE_BYTES,
    CheckpointError,
    Reader,
    read_header,
    read_headers,
    warn_of_zero_tails,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn]


def test_headers_and_ranges_equal_the_library(tmp_path: Path, seed: int):
    file, tensors = tmp_path / "model.safetensors", {"empty": torch.empty(0, 3)}
    for number, dtype in enumerate(DTYPES):  # of 0 to 3 dimensions
        shape = [random.randint(1, 9) for _ in range(number % 4)]
        tensors[f"t{number}"] = (50 * torch.randn(shape)).abs().to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    found = {tensor.key: tensor for tensor in read_header(file)}
    with safe_open(file, "pt") as reference, Reader(chunk_bytes=random.randint(1, 40)) as reader:
        assert set(found) == set(reference.keys())
        expected_bytes = 0
        for key, tensor in found.items():
            whole = reference.get_tensor(key)
            assert tensor.shape == tuple(whole.shape) and tensor.dtype == whole.dtype
            start = random.randint(0, whole.numel())
            stop = random.randint(start, whole.numel())
            expected = whole.flatten()[start:stop]
            for dtype in (whole.dtype, torch.float32):
                into = torch.zeros(stop - start, dtype=dtype)
                reader.read(tensor, start, into)
                assert torch.equal(into, expected.to(dtype)), f"{key} [{start}, {stop}) as {dtype}"
                expected_bytes += expected.nbytes
        assert reader.bytes == expected_bytes


def test_progress_adds_up_to_the_bytes(tmp_path: Path):
    save_file({"w": torch.zeros(1000, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tensor,) = read_header(tmp_path / "model.safetensors")
    seen: list[int] = []
    with Reader(seen.append, chunk_bytes=512) as reader:
        reader.read(tensor, 100, torch.empty(900))
    assert sum(seen) == 1800 and max(seen) == 512


def damaged(header: dict | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes) -> dict:
    """The header of a file with two fp32 numbers."""
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


FILES = {
    "nothing in it": (b"", "truncated or not a safetensors file"),
    "a length and no header": (struct.pack("<Q", 100), "truncated or not a safetensors file"),
    "an absurd length": (b"\xff" * 20, "truncated or not a safetensors file"),
    "a pickle": (b"\x80\x02}q\x00(X\x04\x00\x00\x00" * 9, "truncated or not a safetensors file"),
    "no JSON": (damaged(b"{oops"), "damaged header"),
    "a list": (damaged(b"[1, 2]"), "damaged header"),
    "200,000 brackets": (damaged(b'{"w": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "damaged header.*nested too"),
    "a name twice": (damaged(b'{"w": {}, "w": {}}'), "damaged header: 'w' occurs twice"),
    "half of a surrogate pair": (damaged(rb'{"w\ud800": {}}'), r"damaged header: a key or value has half.*'w\\ud800'"),
    "one of many names": (
        damaged(b'{"' + b'": 0, "'.join(b"w%d" % i for i in range(99)) + rb'\ud800": 0}'),
        r"'w98\\ud800'",
    ),
    "a dtype that is no text": (damaged(rb'{"w": {"dtype": "F32\ud800"}}'), r"value has half.*'F32\\ud800'"),
    "NaN": (damaged(entry(shape=[math.nan])), "damaged header.*w has shape"),
    "5,000 digits": (damaged(b'{"w": {"shape": [' + b"9" * 5000 + b"]}}"), "damaged header.*digits"),
    "no offsets": (damaged({"w": {"dtype": "F32", "shape": [2]}}, b"x" * 8), "damaged header"),
    "a shape of another size": (damaged(entry(shape=[3]), b"x" * 8), "damaged header.*w has shape.* take 12 bytes"),
    "a negative shape": (damaged(entry(shape=[-2]), b"x" * 8), "damaged header"),
    "two negative sizes": (damaged(entry(shape=[-1, -2]), b"x" * 8), "damaged header.*w has shape"),
    "a shape that is no integer": (damaged(entry(shape=[2.5]), b"x" * 8), "damaged header.*w has shape"),
    "offsets that are no integers": (damaged(entry(data_offsets=[0.0, 8.0]), b"x" * 8), "damaged.*w has"),
    "a gap": (damaged(entry(data_offsets=[4, 12]), b"x" * 12), "damaged header.*w begins at"),
    "an overlap": (damaged({**entry(data_offsets=[4, 12]), "v": entry()["w"]}, b"x" * 12), "damaged header.*begins at"),
    "metadata that the library refuses": (damaged({"__metadata__": {"a": 3}, **entry()}, b"x" * 8), "__metadata__"),
    "metadata that are a list": (damaged({"__metadata__": [], **entry()}, b"x" * 8), "damaged header"),
    "data cut short": (damaged(entry(), b"x" * 5), "truncated: it has .* bytes, expected"),
    "data too long": (damaged(entry(), b"x" * 9), "too long"),
}


@pytest.mark.parametrize("what", FILES)
def test_damaged_files_are_named(what: str, tmp_path: Path):
    content, message = FILES[what]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        list(read_header(file))
    assert str(file) in str(caught.value) and str(caught.value).endswith(": copy or download it again")


def test_a_dtype_that_torch_does_not_have_is_kept_by_name(tmp_path: Path):
    """Such as the scales of mxfp4: the loader says that the checkpoint is quantized, which is better than "damaged"."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged({"scales": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}, b"abcd"))
    (tensor,) = read_header(file)
    assert tensor.dtype is None and tensor.kind == "F8_E8M0"
    with pytest.raises(CheckpointError, match="F8_E8M0"), Reader() as reader:
        reader.read(tensor, 0, torch.empty(4))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(100)}, file)
    (tensor,) = read_header(file)
    with file.open("r+b") as stream:
        stream.truncate(tensor.begin + 10)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ended while w was read"), Reader() as reader:
        reader.read(tensor, 0, torch.empty(100))


def test_no_checkpoint(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        read_headers(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: pickled weights can run code"):
        read_headers(tmp_path)


NO_INDEX = [b'{"weight_map": ' + b"[" * 200_000, rb'{"weight_map": {"w": "a", "w": "b"}}']
NO_INDEX += [rb'{"weight_map": {"w\ud800": "a.safetensors"}}', rb'{"weight_map": {"w": "a\ud800.safetensors"}}']
NO_INDEX += [b"{", b"[]", b"{}", b'{"weight_map": 3}']
OUTSIDE = [b'{"weight_map": {"w": "../../other.safetensors"}}', b'{"weight_map": {"w": ".."}}']


@pytest.mark.parametrize("index", NO_INDEX + OUTSIDE)
def test_an_index_that_is_none(index: bytes, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    said = "names files outside" if index in OUTSIDE else "is no index"
    with pytest.raises(CheckpointError, match=rf"index\.json {said}"):
        read_headers(tmp_path)


def test_an_index_and_its_shards_disagree(tmp_path: Path):
    """Everything is found in one go: an absent shard, a key in another shard, one in no shard, one in two."""
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1), "c": torch.zeros(1)}, tmp_path / "two.safetensors")
    placed = {"a": "one", "b": "two", "c": "two", "d": "two", "e": "three"}
    weight_map = {key: f"{file}.safetensors" for key, file in placed.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = read_headers(tmp_path)
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert checkpoint.lost == {"b", "d", "e"}
    text = "\n".join(checkpoint.problems)
    for part in ("three.safetensors does not exist", "maps b to two", "maps d to two", "a is in two files"):
        assert part in text
    assert len(checkpoint.problems) == 4 and all(one.endswith("download it again") for one in checkpoint.problems)


@pytest.mark.parametrize(
    ("rows", "zeros", "named"), [(64, 0, ""), (64, 3, ""), (64, 40, "last"), (64, 64, "last"), (64, 80, "first, last")]
)
def test_files_that_end_in_zeros_are_named(rows: int, zeros: int, named: str, tmp_path: Path, capsys):
    """Rows of 64 fp32 numbers: what a file system lost is some pages, and rows that fill up a vocabulary are few."""
    tensors = torch.ones(2 * rows, 64)
    tensors[2 * rows - zeros :] = 0
    first, last = tensors.split(rows)
    file = tmp_path / "model.safetensors"
    save_file({"first": first.contiguous(), "last": last.contiguous(), "z": torch.zeros(30)}, file)
    warn_of_zero_tails(tmp_path)
    said = capsys.readouterr().out
    if named:
        assert f"warning: the last {zeros * 256 + 120:,} bytes of {file} are zeros, and with them {named}:" in said
        assert said.endswith("with that of the original, or copy or download it again\n")
    else:
        assert not said and zeros * 256 < PAGE_BYTES
