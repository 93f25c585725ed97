"""Micro-batches on their way to a GPU: one copy of what it reads, views of it, positions that the host has counted."""

import numpy as np
import pytest
import torch

from data.loader import Loader, _moved, model_inputs, on_device, without_wait
from data.samples import IGNORE, Sample


def loader(packed_length: int | None, rng: np.random.Generator) -> Loader:
    """Of samples of random lengths, some of whose tokens have no label."""
    samples = []
    for _ in range(20):
        ids = rng.integers(1, 99, rng.integers(2, 13))
        labels = np.where(rng.random(len(ids)) < 0.4, IGNORE, np.roll(ids, -1))
        samples.append(Sample(ids, labels))
    sizes = {"micro_batch_size": 3, "gradient_accumulation_steps": 2, "rank": 0, "world": 1, "seed": 1}
    return Loader(samples, **sizes, pad_token_id=0, packed_length=packed_length)


@pytest.mark.parametrize("packed_length", [None, 16])
def test_one_copy_of_what_the_device_reads(packed_length, seed):
    for batch in loader(packed_length, np.random.default_rng(seed)).step(0):
        copies = []
        whole = on_device(batch, torch.device("cpu"))
        moved = _moved(whole, lambda flat, copies=copies: copies.append(flat.clone()) or copies[-1])
        assert len(copies) == 1 and moved.keys() == batch.keys() | {"positions"}
        for name, tensor in moved.items():
            assert torch.equal(tensor, whole[name]) and tensor.shape == whole[name].shape
            shares = tensor.untyped_storage().data_ptr() == copies[0].untyped_storage().data_ptr()
            assert shares == (name not in ("sample_ids", "spans"))
        labels = whole["labels"].flatten()
        assert whole["positions"].tolist() == [place for place, label in enumerate(labels.tolist()) if label != IGNORE]
        assert set(model_inputs(moved)) == set(model_inputs(batch))


def test_on_a_cpu_nothing_is_copied():
    tensor = torch.arange(3)
    assert without_wait(tensor, torch.device("cpu")) is tensor
