"""Rows that ranks share: shares of rows, their labels, models that are refused before any weight is read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.loader import HeldOut, Loader, on_device, pad, valid_tokens, with_own_labels
from data.samples import IGNORE, Sample
from engine.losses.chunked import TeacherTopK
from engine.session.teacher import CachedTeacher
from model.sequence import SharedRows
from tests.lib.tiny import tiny_model


class Place(SharedRows):
    """One of the ranks that share rows, without a process group."""

    index = 0  # type: ignore[assignment]

    def __init__(self, index: int, ranks: int) -> None:
        super().__init__(ranks)
        self.index = index


def samples(*lengths: int) -> list[Sample]:
    """Samples whose labels are all different, with some positions that predict nothing."""
    made, start = [], 0
    for length in lengths:
        labels = np.arange(start, start + length)
        labels[::3] = IGNORE
        made.append(Sample(np.arange(start, start + length), labels))
        start += length
    return made


@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (7, 2), (10, 4), (4, 4), (31, 8)])
def test_shares_are_the_whole_row_in_order(length: int, ranks: int) -> None:
    shares = [Place(index, ranks).share(length) for index in range(ranks)]
    assert [token for share in shares for token in range(length)[share]] == list(range(length))
    assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1


@pytest.mark.parametrize("packed", [None, 13])
def test_ranks_that_share_rows_have_all_labels_once(packed: int | None) -> None:
    """Each of three ranks gets the inputs of whole rows; every target is counted on one rank."""
    given: dict[str, Any] = {"micro_batch_size": 2, "rank": 0, "world": 1, "seed": 0, "pad_token_id": 0}
    given |= {"gradient_accumulation_steps": 2, "packed_length": packed}
    data = samples(2, 9, 5, 13, 7, 1, 11, 12)
    whole = Loader(data, **given).step(0)
    shares = [Loader(data, **given, share=Place(index, 3).share, together=3).step(0) for index in range(3)]
    assert sum(map(valid_tokens, shares)) == valid_tokens(whole)
    for batch, *parts in zip(whole, *shares, strict=True):
        labels = torch.cat([part["labels"] for part in parts], 1)
        assert torch.equal(labels[:, : batch["labels"].shape[1]], batch["labels"])
        targets = batch["labels"][batch["labels"] != IGNORE]
        for part in parts:
            assert torch.equal(part["input_ids"], parts[0]["input_ids"])
            assert torch.equal(targets[part["own_targets"]], part["labels"][part["labels"] != IGNORE])


def test_a_rank_that_shares_rows_with_none_has_no_rows() -> None:
    """Else fewer ranks than parallel.sequence would take the same rows in every step."""
    with pytest.raises(AssertionError, match="rank 0 of 0"):
        Loader(
            samples(2, 9), rank=0, world=0, micro_batch_size=1, gradient_accumulation_steps=1, seed=0, pad_token_id=0
        )


def test_targets_of_shared_rows_are_those_of_the_teachers_cache() -> None:
    """A cache of other targets is refused, also if it has as many as this rank by chance."""
    whole = pad(samples(6), [[0]], 0)
    batch = on_device(with_own_labels(whole, Place(1, 2).share), torch.device("cpu"))
    count = len(batch["own_targets"])
    cache = SimpleNamespace(
        directory="cache",
        manifest=SimpleNamespace(vocabulary=9),
        rows=lambda ids: np.arange(count),
        top_k=lambda rows: (torch.tensor(rows)[:, None], torch.tensor(rows)[:, None], torch.tensor(rows)),
    )
    found = CachedTeacher(cache).forward({}, batch).teacher  # type: ignore[arg-type]
    assert isinstance(found, TeacherTopK) and found.top.log_tail.tolist() == [2, 3]
    for wrong in (count + 1, len(batch["positions"])):
        cache.rows = lambda ids, wrong=wrong: np.arange(wrong)
        with pytest.raises(ValueError, match=f"have {count} targets in this batch"):
            CachedTeacher(cache).forward({}, batch)  # type: ignore[arg-type]


def test_rows_are_as_long_as_there_are_ranks() -> None:
    """Else a rank would have no token."""
    for batch in HeldOut(samples(1, 2), micro_batch_size=1, rank=0, world=1, pad_token_id=0, together=4):
        assert batch["input_ids"].shape == (1, 4)


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    model = tiny_model("qwen3")
    with pytest.raises(
        ValueError, match=r"parallel\.sequence: 2, expected a divisor of the 3 attention heads of Qwen3"
    ):
        SharedRows(2).attach(model)


def test_models_without_positions_are_refused() -> None:
    model = tiny_model("qwen3", even=True)

    def forward(input_ids: Tensor) -> Tensor:
        return input_ids

    model.forward = forward
    with pytest.raises(ValueError, match="takes no position_ids"):
        SharedRows(2).attach(model)


def test_forwards_with_a_cache_are_refused() -> None:
    model, rows = tiny_model("llama", even=True), SharedRows(2)
    rows.attach(model)
    rows.start()
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def test_a_model_computes_whole_rows_until_ranks_share_them() -> None:
    model = tiny_model("llama", even=True)
    ids = torch.arange(20)[None]
    before = model(input_ids=ids).logits
    SharedRows(2).attach(model)
    assert torch.equal(model(input_ids=ids).logits, before)
