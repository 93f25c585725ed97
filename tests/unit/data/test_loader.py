"""The loader: every sample once per epoch, the same stream however it is split, packed rows, files with weights, and
samples that are held out."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from data.loader import (
    PACKING_WINDOW,
    HeldOut,
    Loader,
    MicroBatch,
    Order,
    _moved,
    model_inputs,
    on_device,
    pack,
    pad,
    real_tokens,
    sample_inputs,
    seen_in_training,
    split_held_out,
    valid_tokens,
    without_wait,
)
from data.samples import IGNORE, DataError, Sample, samples_of
from tests.lib.tiny import tiny_model

PAD = 7  # a token like any other: what keeps padding apart must not be its id


def make(rng: random.Random, n: int, longest: int = 10) -> list[Sample]:
    """Random samples, some of one position, some of the greatest length, with holes in the labels."""
    samples = []
    for _ in range(n):
        length = rng.choice([1, min(2, longest), longest, *(rng.randint(1, longest) for _ in range(9))])
        ids, labels = (np.array([rng.randrange(300) for _ in range(length)], np.int32) for _ in range(2))
        labels[[i for i in range(length - 1) if rng.random() < 0.3]] = IGNORE
        samples.append(Sample(ids, labels))
    return samples


def loaders(samples: list[Sample], world: int = 1, **args: Any) -> list[Loader]:
    sizes = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "seed": 0, "pad_token_id": PAD} | args
    return [Loader(samples, rank=rank, world=world, **sizes) for rank in range(world)]


def rows_of(mine: list[Loader], step: int) -> list[list[int]]:
    """Samples of each row of a step in the order of the stream: by micro-batch, in each of them by rank."""
    batches = [batch for group in zip(*(one.step(step) for one in mine), strict=True) for batch in group]
    return [
        batch["sample_ids"][batch["spans"][:, 0] == row].tolist()
        for batch in batches
        for row in range(len(batch["labels"]))
    ]


# ---- the stream


def test_another_epoch_and_another_seed_have_another_order(rng):
    n, seed = rng.randint(20, 60), rng.randrange(2**32)
    samples = make(rng, n)
    (loader,), (other,) = loaders(samples, seed=seed), loaders(samples, seed=seed + 1)
    first, second = ([rows_of([loader], epoch * n + i) for i in range(n)] for epoch in range(2))
    # Equal only by chance, at most 3 in 20!
    assert second != first != [rows_of([other], i) for i in range(n)] and first != [[[i]] for i in range(n)]


def test_epoch_of(rng):
    loader, _ = loaders(make(rng, 15), world=2, micro_batch_size=2, gradient_accumulation_steps=3)
    assert loader.epoch_of(0) == 0
    assert loader.epoch_of(15) == 12  # n steps take n samples, 12 times over
    assert loader.epoch_of(1) == pytest.approx(12 / 15)


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_takes_the_same_rows_however_it_is_split_and_from_any_step_on(packed, rng):
    for _ in range(10):
        longest = rng.randint(2, 30)
        samples = make(rng, rng.randint(80, 120), longest)  # more packed rows than the 27 of the largest step
        more = {"seed": rng.randrange(2**32), "packed_length": longest if packed else None}
        factors = [rng.choice([1, 2, 3]) for _ in range(3)]
        whole = int(np.prod(factors))
        steps = int(np.ceil(2 * len(samples) / whole))
        streams = []
        for micro, accumulation, world in (factors, factors[::-1], [1, 1, whole], [whole, 1, 1]):
            args = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "world": world, **more}
            mine = loaders(samples, **args)
            streams.append([rows_of(mine, k) for k in range(steps)])
            # Asked for out of order, by a loader that has seen nothing yet.
            k = rng.randrange(steps)
            for batch, again in zip(mine[-1].step(k), loaders(samples, **args)[-1].step(k), strict=True):
                assert batch.keys() == again.keys() and all(torch.equal(batch[key], again[key]) for key in batch)
        assert all(stream == streams[0] for stream in streams) and all(len(step) == whole for step in streams[0])
        rows, seen = [row for step in streams[0] for row in step], list[int]()
        for epoch in range(2):  # whole rows end an epoch
            while len(seen) < (epoch + 1) * len(samples):
                seen += rows.pop(0)
            assert Counter(seen) == dict.fromkeys(range(len(samples)), epoch + 1)


def test_an_epoch_may_have_other_packed_rows_than_the_last(rng):
    (loader,) = loaders(make(rng, 400, 20), packed_length=20, seed=rng.randrange(1000))
    rows = [loader._order.rows_in_epoch(epoch) for epoch in range(3)]
    for epoch, before in enumerate(np.cumsum([0, *rows])[:3].tolist()):
        assert loader.epoch_of(before) == epoch
        assert loader.epoch_of(before + 1) == pytest.approx(epoch + 1 / rows[epoch])
    first, second = ([rows_of([loader], start + k)[0] for k in range(5)] for start in (0, rows[0]))
    assert first != second


SIZES = {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "world": 2, "seed": 0}


@pytest.mark.parametrize(
    ("lengths", "args", "message"),
    [
        ([3] * 11, SIZES, "found 11 samples, expected at least the 12 that one step takes"),
        ([3, 12], {"packed_length": 10}, r"^a\.jsonl:9: found 12 tokens, expected at most the 10 that a packed row"),
        (
            [3, 12],
            {"packed_length": 12, "micro_batch_size": 3},
            "found 2 packed rows of 12 tokens, expected at least the 3 that one step",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(lengths, args, message):
    samples = [Sample(*(np.arange(length, dtype=np.int32),) * 2, file="a.jsonl", line=9) for length in lengths]
    with pytest.raises(DataError, match=message):
        loaders(samples, **args)


# ---- the content of a batch


def test_padding_and_valid_tokens(rng):
    samples = make(rng, 30)
    for loader in loaders(samples, world=2, micro_batch_size=4, gradient_accumulation_steps=3):
        batches = loader.step(rng.randrange(10))
        expected = 0
        for batch in batches:
            rows = [samples[number] for number in batch["sample_ids"].tolist()]
            longest = max(len(row.input_ids) for row in rows)
            per_row = {name: batch[name] for name in ("input_ids", "labels", "attention_mask")}
            assert all(value.shape == (4, longest) for value in per_row.values())
            assert all(value.dtype == torch.int64 for value in batch.values())
            for index, row in enumerate(rows):
                length = len(row.input_ids)
                assert batch["input_ids"][index].tolist() == row.input_ids.tolist() + [PAD] * (longest - length)
                assert batch["labels"][index].tolist() == row.labels.tolist() + [IGNORE] * (longest - length)
                assert batch["attention_mask"][index].tolist() == [1] * length + [0] * (longest - length)
                expected += int((row.labels != IGNORE).sum())
        assert valid_tokens(batches) == expected


def test_the_content_of_a_packed_batch(rng):
    longest = rng.randint(10, 30)
    samples = make(rng, 80, longest)
    (loader,) = loaders(samples, micro_batch_size=3, packed_length=longest)
    for k in range(10):
        (batch,) = loader.step(k)
        assert set(batch) == {"input_ids", "labels", "position_ids", "sample_ids", "spans"}
        assert set(model_inputs(batch)) == {"input_ids", "position_ids"}
        assert all(value.dtype == torch.int64 for value in batch.values())
        covered = torch.zeros(3, longest, dtype=torch.bool)
        for index, (row, start, end) in zip(batch["sample_ids"], batch["spans"].tolist(), strict=True):
            sample, place = samples[index], (row, slice(start, end))
            assert batch["input_ids"][place].tolist() == sample.input_ids.tolist()
            assert batch["labels"][place].tolist() == sample.labels.tolist()
            assert batch["position_ids"][place].tolist() == list(range(end - start))
            assert not covered[place].any()
            covered[place] = True
        assert (batch["input_ids"][~covered] == PAD).all() and (batch["labels"][~covered] == IGNORE).all()
        for row, used in enumerate(covered.sum(1).tolist()):
            assert batch["position_ids"][row, used:].tolist() == list(range(longest - used))
        assert real_tokens(batch) == covered.sum()
        ids = [tokens.flatten().tolist() for tokens in sample_inputs(batch)]
        assert ids == [samples[index].input_ids.tolist() for index in batch["sample_ids"]]
        assert valid_tokens([batch]) == sum((samples[i].labels != IGNORE).sum() for i in batch["sample_ids"])


@pytest.mark.parametrize("packed_length", [None, 16])
@pytest.mark.parametrize("weights", [None, {"a": 3.0, "b": 1.0}])
@pytest.mark.parametrize("epochs", [0.01, 0.5, 1, 2, 2.75])
def test_epochs_in_steps_use_every_row_and_no_step_more(rng, packed_length, weights, epochs):
    """Weights change the samples of an epoch, but not their number; skipped samples change neither."""
    samples = [replace(sample, file=rng.choice("ab")) for sample in make(rng, 40)]
    options = {"gradient_accumulation_steps": 3, "seed": 3, "packed_length": packed_length, "weights": weights}
    (loader, _), (skipping, _) = loaders(samples, 2, **options), loaders(samples, 2, **options, skip={0, 7, 39})
    steps = loader.steps_of(epochs)
    assert loader.epoch_of(steps) >= epochs - 1e-9 and (steps == 1 or loader.epoch_of(steps - 1) < epochs)
    assert (skipping.steps_of(epochs), skipping.epoch_of(steps)) == (steps, loader.epoch_of(steps))


@pytest.mark.parametrize("packed_length", [None, 16])
def test_skipped_samples_keep_their_place_and_have_no_target(rng, packed_length):
    samples, skip = make(rng, 40), {3, 17, 18, 39}
    options = {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "seed": 1, "packed_length": packed_length}
    (plain,), (skipping,) = loaders(samples, **options), loaders(samples, **options, skip=skip)
    seen = set()
    for step in range(10):
        for before, after in zip(plain.step(step), skipping.step(step), strict=True):
            learned = torch.tensor([index not in skip for index in before["sample_ids"].tolist()])
            for name in before.keys() - {"labels"}:
                expected = before[name][learned] if name in ("sample_ids", "spans") else before[name]
                assert torch.equal(after[name], expected)
            for index, (row, start, end) in zip(before["sample_ids"].tolist(), before["spans"].tolist(), strict=True):
                expected = before["labels"][row, start:end]
                expected = torch.full_like(expected, IGNORE) if index in skip else expected
                assert torch.equal(after["labels"][row, start:end], expected)
                seen.add(index)
    assert seen >= skip and plain.digest == skipping.digest


def test_a_step_of_skipped_samples_takes_the_rows_of_the_next_one(rng):
    samples = make(rng, 12)
    options = {"micro_batch_size": 2, "seed": 1}
    plain = loaders(samples, 2, **options)
    rows = [rows_of(plain, step) for step in range(3)]
    skip = {i for row in rows[1] for i in row}
    skipping = loaders(samples, 2, **options, skip=skip)
    assert [rows_of(skipping, step) for step in range(3)] == [rows[0], rows[2], rows[2]]
    assert all(
        valid_tokens(one.step(1)) == valid_tokens(other.step(2)) for one, other in zip(skipping, plain, strict=True)
    )
    assert skipping[0].describe(1).removeprefix("rank 0, step 1") == plain[0].describe(2).removeprefix("rank 0, step 2")
    with pytest.raises(DataError, match=r"data\.skip: excludes all 12 training samples"):
        loaders(samples, packed_length=24, skip=range(12))  # in fewer rows


def test_a_step_is_described_by_its_lines():
    samples = [*files({"a.jsonl": 50}), Sample(np.zeros(1, np.int32), np.zeros(1, np.int32))]
    for rank, loader in enumerate(loaders(samples, 2, micro_batch_size=2, gradient_accumulation_steps=2, seed=3)):
        ids = [i for batch in loader.step(7) for i in batch["sample_ids"].tolist()]
        names = ", ".join(f"{i} (a.jsonl:{i + 1})" if i < 50 else "50" for i in ids)
        assert loader.describe(7) == f"rank {rank}, step 7, samples {names}"
    (loader,) = loaders(samples, micro_batch_size=20, gradient_accumulation_steps=2)
    assert loader.describe(0).endswith(" and 8 more") and loader.describe(0).count(", ") == 33


@pytest.mark.parametrize("packed_length", [None, 16])
def test_one_copy_of_what_the_device_reads(packed_length, rng):
    (loader,) = loaders(make(rng, 60), micro_batch_size=3, packed_length=packed_length)
    for batch in (batch for k in range(2) for batch in loader.step(k)):
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


# ---- files with weights


def files(sizes: dict[str, int]) -> list[Sample]:
    """Samples of files of these numbers of lines."""
    one = np.zeros(3, dtype=np.int32)
    return [Sample(one, one, file, line) for file, size in sizes.items() for line in range(1, size + 1)]


def epochs(order: Order, count: int) -> list[list[int]]:
    """The samples of the first epochs."""
    ends = np.cumsum([0, *(order.rows_in_epoch(epoch) for epoch in range(count))]).tolist()
    return [[i for position in range(*span) for i in order.row(position)] for span in pairwise(ends)]


@pytest.mark.parametrize("packed_length", [None, 10])
def test_an_epoch_is_shared_out_by_weight(packed_length, rng):
    for _ in range(20):
        sizes = {f"{name}.jsonl": rng.randint(1, 60) for name in "abc"[: rng.randint(1, 3)]}
        samples, total = files(sizes), sum(sizes.values())
        weights = {file: rng.uniform(0.5, 2) * rng.choice([1, 10]) for file in sizes}
        exact = {file: total * weight / sum(weights.values()) for file, weight in weights.items()}
        if min(exact.values()) < 1:
            continue
        order = Order(samples, seed=rng.randrange(1000), weights=weights, packed_length=packed_length)
        uses: Counter[int] = Counter()
        for epoch in epochs(order, 4):
            assert len(epoch) == total
            here = Counter(epoch)
            shares = Counter(samples[i].file for i in epoch)
            uses.update(here)
            for file, size in sizes.items():
                mine = [i for i, sample in enumerate(samples) if sample.file == file]
                assert abs(shares[file] - exact[file]) < 1
                assert {here[i] for i in mine} <= {shares[file] // size, -(-shares[file] // size)}
                # Over the epochs, too, no sample is used more than once more than another.
                assert max(uses[i] for i in mine) - min(uses[i] for i in mine) <= 1


def test_weights_in_the_ratio_of_the_sizes_take_every_sample_once(rng):
    sizes = {"a": rng.randint(5, 20), "b": rng.randint(5, 20)}
    order = Order(files(sizes), seed=0, weights={file: size / 7 for file, size in sizes.items()})
    assert all(sorted(epoch) == list(range(sum(sizes.values()))) for epoch in epochs(order, 3))


def test_another_epoch_and_another_seed_take_other_samples(rng):
    samples, seed = files({"a": 200, "b": 20}), rng.randrange(1000)
    orders = [Order(samples, seed=one, weights={"a": 1, "b": 1}) for one in (seed, seed, seed + 1)]
    (first, second), (again,), (other,) = (epochs(order, n) for order, n in zip(orders, (2, 1, 1), strict=True))
    assert first == again
    for epoch in (second, other):
        # 110 of 200: equal by chance once in 10^58.
        assert {i for i in first if i < 200} != {i for i in epoch if i < 200}


def test_weights_that_do_not_fit_the_files_are_refused():
    samples = files({"a": 5, "b": 5})
    with pytest.raises(DataError, match=r"but no samples: \['c'\]; files with samples but no weight: \['b'\]"):
        Order(samples, seed=0, weights={"a": 1, "c": 1})
    with pytest.raises(DataError, match=r"the weights of \['b'\] are too small: none of an epoch's 10 samples"):
        Order(samples, seed=0, weights={"a": 1, "b": 0.01})


# ---- packing


def test_bins_hold_every_sample_and_no_more_than_fits(rng):
    for _ in range(20):
        capacity = rng.randint(1, 60)
        lengths = np.array([rng.randint(1, capacity) for _ in range(rng.randint(1, 2 * PACKING_WINDOW + 50))])
        bins = pack(lengths, capacity)
        filled = np.bincount(bins, weights=lengths)
        assert len(bins) == len(lengths) and filled.min() > 0 and filled.max() <= capacity
        # Two bins of one window that are both at most half full would have been one.
        firsts = [bins[start : start + PACKING_WINDOW] for start in range(0, len(lengths), PACKING_WINDOW)]
        assert all((filled[np.unique(window)] <= capacity / 2).sum() <= 1 for window in firsts)
        assert (bins == pack(lengths, capacity)).all()


def test_best_fit():
    """10 | 7 + 3 | 5: the 3 goes where it leaves nothing, not where there is most room."""
    assert pack(np.array([3, 5, 10, 7]), 10).tolist() == [1, 2, 0, 1]


def compute(model: torch.nn.Module, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """Summed loss of some samples, logits of each (in their own order), gradients of the sum; fp32."""
    losses, logits, gradients = [], {}, 0
    for batch in batches:
        output = model(**model_inputs(batch), use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        model.zero_grad()
        loss.backward()
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        gradients = gradients + torch.cat([g.flatten() for g in flat]).float()
        losses.append(loss.detach())
        for index, (row, start, end) in zip(batch["sample_ids"].tolist(), batch["spans"].tolist(), strict=True):
            logits[index] = output[row, start:end].detach()
    return {"loss": sum(losses), "logits": torch.cat([logits[i] for i in sorted(logits)]), "gradients": gradients}


# The most of 200 seeds of each case: 1e-6 in fp32; in bf16 2e-3, 7e-3 and 2e-2, where bf16 itself is 2e-2 (logits) and
# 5e-2 (gradients) from fp32. Without the borders the logits are 0.3 to 1.5 apart, unless every row is one sample.
BOUNDS = {
    torch.float32: {"loss": 1e-5, "logits": 1e-5, "gradients": 1e-5},
    torch.bfloat16: {"loss": 2e-2, "logits": 3e-2, "gradients": 6e-2},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "attention", "dtype"),
    [
        ("qwen3", "sdpa", torch.float32),
        ("qwen3", "eager", torch.bfloat16),
        ("llama", "eager", torch.float32),
        ("qwen3_moe", "sdpa", torch.bfloat16),
        ("qwen3_moe", "eager", torch.float32),
    ],
)
def test_packed_samples_compute_what_each_computes_alone(kind, attention, dtype, checkpointing, rng):
    model = tiny_model(kind, seed=rng.randrange(1000), dtype=dtype)
    model.config._attn_implementation = attention
    model.config._experts_implementation = "eager"  # takes the tiny experts' odd sizes
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = module.num_experts  # all of them: which experts are the best two may turn on the last bit
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    longest = rng.randint(12, 40)
    samples = make(rng, 14, longest)
    (loader,) = loaders(samples, micro_batch_size=rng.randint(1, 3), packed_length=longest, seed=rng.randrange(1000))
    batch = max((loader.step(k)[0] for k in range(3)), key=lambda batch: len(batch["sample_ids"]))
    alone = compute(model, [pad(samples, [[index]], PAD) for index in batch["sample_ids"].tolist()])
    for name, packed in compute(model, [batch]).items():
        assert (packed - alone[name]).norm() < BOUNDS[dtype][name] * alone[name].norm(), name


def test_samples_are_the_same_one_by_one_and_all_at_once(rng, monkeypatch):
    """Also those that were taken from others, in any order, and those of two lists."""
    monkeypatch.setattr("data.samples._AT_ONCE", 7)
    given = [Sample(one.input_ids, one.labels, f"{n % 3}.jsonl", n) for n, one in enumerate(make(rng, 60))]
    samples = samples_of(given)
    for _ in range(10):
        indices = rng.sample(range(60), rng.randint(1, 60))
        for taken in (samples.take(np.array(indices)), samples[:9] + samples.take(np.array(indices))):
            numbers = [*range(9)] * (len(taken) > len(indices)) + indices
            for found in ([*taken], [taken[place] for place in range(len(taken))]):
                for sample, number in zip(found, numbers, strict=True):
                    assert sample.where() == given[number].where()
                    assert sample.input_ids.tolist() == given[number].input_ids.tolist()
                    assert sample.labels.tolist() == given[number].labels.tolist()


# ---- samples that are held out


def numbered(rng: random.Random, n: int) -> list[Sample]:
    """Samples of random lengths whose tokens are their numbers."""
    return [Sample(*(np.full(rng.randint(1, 12), i, np.int32),) * 2) for i in range(n)]


def numbers_of(samples: list[Sample]) -> list[int]:
    return [int(sample.input_ids[0]) for sample in samples]


def test_the_split(rng):
    for _ in range(10):
        samples = numbered(rng, rng.randint(2, 80))
        held_out = rng.choice([rng.randint(1, len(samples) - 1), rng.uniform(0.01, 0.49)])
        seed = rng.randrange(1000)
        training, out = split_held_out(samples, held_out, seed)
        assert len(out) == (max(1, round(held_out * len(samples))) if isinstance(held_out, float) else held_out)
        numbers = [numbers_of(part) for part in (training, out)]
        assert sorted([*numbers[0], *numbers[1]]) == list(range(len(samples)))
        assert all(part == sorted(part) for part in numbers)
        assert [numbers_of(part) for part in split_held_out(samples, held_out, seed)] == numbers
    samples = numbered(rng, 300)
    chosen = [set(numbers_of(split_held_out(samples, 0.5, seed)[1])) for seed in range(3)]
    assert chosen[0] != chosen[1] != chosen[2]  # by chance once in 10^88


def test_something_must_be_left_to_train_on(rng):
    for held_out in (5, 6, 0.95):
        with pytest.raises(
            DataError, match=rf"data\.held_out: {held_out} is \d of 5 samples, expected some to be left"
        ):
            split_held_out(numbered(rng, 5), held_out, 0)
    with pytest.raises(DataError, match="no samples to evaluate on"):
        HeldOut([], micro_batch_size=1, rank=0, world=1, pad_token_id=0)


def test_every_held_out_sample_counts_once_over_all_ranks(rng):
    for _ in range(30):
        samples = numbered(rng, rng.randint(1, 40))
        size, world = rng.randint(1, 5), rng.randint(1, 5)
        ranks = [HeldOut(samples, micro_batch_size=size, rank=r, world=world, pad_token_id=99) for r in range(world)]
        batches = [list(rank) for rank in ranks]
        assert len({len(b) for b in batches}) == len({len(rank) for rank in ranks}) == 1
        assert all(len(b) == len(rank) for b, rank in zip(batches, ranks, strict=True))
        assert len(batches[0]) == math.ceil(len(samples) / (size * world))
        every = [batch for b in batches for batch in b]
        seen = Counter(i for batch in every for i in batch["sample_ids"].tolist())
        assert seen == dict.fromkeys(range(len(samples)), 1)
        assert valid_tokens(every) == sum(len(sample.labels) for sample in samples)
        for batch in every:
            assert set(model_inputs(batch)) == {"input_ids", "attention_mask"}
            assert len(batch["input_ids"]) <= size and batch["attention_mask"].any(1).all()
            for i, (row, start, end) in zip(batch["sample_ids"].tolist(), batch["spans"].tolist(), strict=True):
                assert batch["labels"][row, start:end].tolist() == samples[i].labels.tolist()
            if not len(batch["sample_ids"]):
                assert len(batch["input_ids"]) == 1 and (batch["labels"] == IGNORE).all()


def test_copies_are_found_among_samples_that_differ_in_one_place(rng):
    """In one token or one label, anywhere; the first copy of each is found."""
    tokens = np.random.default_rng(rng.randrange(2**32)).integers(0, 2, (400, 2, 40), dtype=np.int32)
    given = []
    for inputs, labels in tokens:
        length = rng.choice([1, 2, 39, 40])
        given += [Sample(inputs[:length].copy(), labels[:length].copy())]
        near = given[-1 - rng.randrange(min(3, len(given)))]
        for name in rng.choices(["input_ids", "labels", "neither"], k=2):
            changed = {part: getattr(near, part).copy() for part in ("input_ids", "labels")}
            if name != "neither":
                changed[name][rng.randrange(len(changed[name]))] ^= 1
            given.append(Sample(**changed))
    rng.shuffle(given)
    training, held_out = given[:1000], given[1000:]
    content = [(one.input_ids.tolist(), one.labels.tolist()) for one in given]
    expected = [index for index, one in enumerate(content[1000:]) if one in content[:1000]]
    found = seen_in_training(training, held_out)
    assert sorted(found) == expected and 20 < len(found) < len(held_out)
    for index, sample in found.items():
        assert (sample.input_ids.tolist(), sample.labels.tolist()) == content[1000 + index]
