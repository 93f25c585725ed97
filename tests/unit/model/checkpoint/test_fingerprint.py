"""Fingerprints of frozen weights: every difference changes them, and the size of the chunks does not."""

import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from model.checkpoint import fingerprint as frozen
from model.checkpoint.fingerprint import digest_of_file, digests, fingerprints, frozen_weights, identity


def model_of(**tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
    return model


def number(tensor: torch.Tensor) -> int:
    return fingerprints(model_of(weight=tensor), ["weight"])["weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_and_every_place_counts(dtype, monkeypatch, seed):
    """One changed bit, two exchanged elements, the sign of a 0, and other chunks."""
    tensor = torch.randn(37, 11).to(dtype)
    tensor[3, 4] = 0.0
    bits = tensor.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    changed = []
    for bit in range(8 * dtype.itemsize - 1):
        other = bits.clone()
        other.view(-1)[random.randrange(other.numel())] ^= 1 << bit
        changed.append(other.view(dtype))
    minus, swapped = tensor.clone(), tensor.clone()
    minus[3, 4] = -0.0
    swapped[0, 0], swapped[36, 10] = 1.0, 2.0
    back = swapped.clone()
    back[0, 0], back[36, 10] = 2.0, 1.0
    first, numbers = number(tensor), [number(one) for one in (*changed, minus, swapped, back)]
    assert len({*numbers, first}) == len(numbers) + 1
    assert first == number(tensor)
    monkeypatch.setattr(frozen, "_CHUNK", 13)
    assert first == number(tensor)


def test_what_is_frozen_and_of_the_files():
    model = model_of(weight=torch.ones(3), weight_s0=torch.ones(1), other=torch.ones(2))
    model.other.requires_grad_(True)
    assert frozen_weights(model) == ["weight"]
    assert fingerprints(model, []) == {}


def test_every_tensor_of_a_large_file_is_sampled_and_little_is_read(tmp_path, monkeypatch):
    """A change at either end of any tensor, of the header alone, and of the size; each is read once."""
    path = tmp_path / "model.safetensors"
    tensors = {f"layers.{n}.weight": torch.full((2**20 + n,), n, dtype=torch.uint8) for n in range(9)}
    tensors |= {f"layers.{n}.scale": torch.ones(3) for n in range(9)}
    read, pread = [], frozen.os.pread
    monkeypatch.setattr(frozen, "WHOLE_BYTES", 2**20)
    monkeypatch.setattr(frozen.os, "pread", lambda file, size, at: read.append(size) or pread(file, size, at))

    def digest(changed=(), **metadata) -> str:
        save_file(tensors | dict(changed), path, metadata)
        return digest_of_file(path)

    first = digest()
    assert sum(read) < path.stat().st_size / 50
    found = [first, digest(made="by another")]
    for name, tensor in tensors.items():
        for place in (0, -1):
            other = tensor.clone()
            other[place] += 1
            found.append(digest({name: other}))
    found.append(digest({"layers.9.weight": torch.zeros(5)}))
    assert len({*found}) == len(found) and digest() == first


def test_a_copy_has_another_identity_and_the_same_digests(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "README.md").write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one, two, link = (tmp_path / name for name in ("one", "two", "link"))
    assert identity(one) == identity(link) != identity(two)
    assert digests(one) == digests(two) and digests(one).keys() == {"config.json"}
    assert identity(tmp_path / "none") == () and digests(tmp_path / "none") == {}
