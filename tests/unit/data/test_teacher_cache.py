"""The teacher's cache on disk: what is written is read back, and what is damaged or of something else is refused."""

import json
import random
import shutil

import numpy as np
import pytest
import torch

from data import teacher_cache
from data.samples import IGNORE, Sample, samples_of
from data.teacher_cache import CacheError, Manifest, TeacherCache, Writer
from engine.loop import Loop
from engine.losses.objective import DIAGNOSTICS
from engine.session.teacher import common_vocabulary, first_difference
from model.checkpoint.fingerprint import digest_of_checkpoint
from tests.lib.checkpoints import edit_json
from tests.lib.recipes import minimal
from tests.lib.tiny import tiny_checkpoint, tiny_tokenizer

K = 3


def random_samples(count):
    samples = []
    for _ in range(count):
        length = random.randint(2, 9)
        ids = np.random.randint(0, 300, length, dtype=np.int32)
        labels = np.where(np.random.rand(length) < 0.5, ids, IGNORE).astype(np.int32)
        samples.append(Sample(ids, labels))
    return samples


def write(directory, samples, teacher, ranks=2):
    """A cache of random numbers, written by several writers as ranks do; returns the numbers."""
    offsets = teacher_cache.offsets_of(samples)
    manifest = Manifest(
        top_k=K,
        vocabulary=300,
        samples=len(samples),
        positions=int(offsets[-1]),
        samples_digest=samples_of(samples).key,
        tokenizer_digest=teacher_cache.digest_of_tokenizer(tiny_tokenizer()),
        teacher_digest=digest_of_checkpoint(teacher),
        teacher=str(teacher),
        checksums={},
    )
    directory.mkdir()
    teacher_cache.create(directory, manifest)
    sign = {"log_probs": -1, "log_tail": -1}
    arrays = {name: np.random.rand(*shape) * 100 * sign.get(name, 1) for name, shape in manifest.shapes().items()}
    arrays = {name: array.astype(teacher_cache.CACHE_DTYPES[name]) for name, array in arrays.items()} | {
        "offsets": offsets
    }
    writers = [Writer(directory) for _ in range(ranks)]
    for index in random.sample(range(len(samples)), len(samples)):
        start, stop = offsets[index], offsets[index + 1]
        rows = {name: array[start:stop] for name, array in arrays.items() if name != "offsets"}
        writers[index % ranks].write(int(start), rows)
    writers[0].write(0, {"offsets": offsets})
    for writer in writers:
        writer.close()
    shares = [teacher_cache.checksums(directory, manifest, rank, ranks) for rank in range(ranks)]
    sums = {
        name: [value for _, value in sorted((index, v) for share in shares for index, v in share[name].items())]
        for name in teacher_cache.CACHE_DTYPES
    }
    teacher_cache.finish(directory, Manifest(**{**vars(manifest), "checksums": sums}))
    return arrays


@pytest.fixture
def made(tmp_path, monkeypatch):
    """samples, teacher, arrays, directory of a cache; checksums are of a few bytes, so that there are many."""
    monkeypatch.setattr(teacher_cache, "CHECKED_BYTES", 40)
    teacher = tiny_checkpoint(tmp_path / "teacher", "llama")
    samples = random_samples(20)
    samples[0].labels[0] = samples[0].input_ids[0]  # whatever was drawn, the first sample has something to mask
    arrays = write(tmp_path / "cache", samples, teacher)
    return samples, teacher, arrays, tmp_path / "cache"


def found_by_ranks(directory):
    """The errors of three ranks that verify a cache."""
    found = []
    for rank in range(3):
        try:
            TeacherCache(directory).verify(rank, 3)
        except CacheError as error:
            found.append(str(error))
    return found


def test_what_was_written_is_read_back(made):
    samples, teacher, arrays, directory = made
    assert not found_by_ranks(directory)
    cache = TeacherCache(directory)
    cache.check_samples(samples)
    cache.check_tokenizer(tiny_tokenizer())
    cache.check_teacher(str(teacher), digest_of_checkpoint(teacher))
    for name, array in arrays.items():
        assert np.array_equal(cache._arrays[name], array), name
    wanted = [7, 2, 7]
    rows = cache.rows(wanted)
    offsets = arrays["offsets"]
    assert rows.tolist() == [p for i in wanted for p in range(offsets[i], offsets[i + 1])]
    log_probs, indices, log_tail = cache.top_k(rows)
    assert (log_probs.dtype, indices.dtype, log_tail.dtype) == (torch.float32, torch.int64, torch.float32)
    assert np.array_equal(log_probs.numpy(), arrays["log_probs"][rows])
    assert np.array_equal(indices.numpy(), arrays["indices"][rows])
    assert np.array_equal(log_tail.numpy(), arrays["log_tail"][rows])
    assert len(cache.rows([])) == 0


def test_a_changed_byte_is_found_by_one_of_the_ranks(made):
    _, _, arrays, directory = made
    name = random.choice([name for name, array in arrays.items() if array.nbytes])
    contents = bytearray((directory / name).read_bytes())
    contents[random.randrange(len(contents))] ^= 1 << random.randrange(8)
    (directory / name).write_bytes(contents)
    found = found_by_ranks(directory)
    assert sum(f"{directory / name}: bytes" in text and "write it again" in text for text in found) == 1
    # Another rank may see it, too, if the byte turned a token or a log-probability into what is none.
    assert all(str(directory / name) in text and "write" in text for text in found)


def edit_manifest(**values):
    """A change of the manifest; None removes a key."""

    def edit(directory):
        contents = edit_json(directory / "manifest.json", **values)
        kept = {key: value for key, value in contents.items() if value is not None}
        (directory / "manifest.json").write_text(json.dumps(kept))

    return edit


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda d: (d / "log_probs").write_bytes(b"1234"), "log_probs has 4 bytes, expected"),
        (lambda d: (d / "indices").unlink(), "indices is not there, expected"),
        (lambda d: (d / "manifest.json").unlink(), "has no manifest.json"),
        (lambda d: (d / "manifest.json").write_text('{"format": 1,'), "manifest.json is damaged"),
        (edit_manifest(format=2), "is of format 2, expected 1"),
        (edit_manifest(format=None), "manifest.json is damaged"),
        (edit_manifest(top_k=None), "manifest.json is damaged"),
        (edit_manifest(extra=3), "manifest.json is damaged"),
        (edit_manifest(samples=3), "offsets has"),
        (edit_manifest(positions="x"), "manifest.json is damaged .positions is x, expected a number from 0 on"),
        (edit_manifest(positions=-1), "positions is -1"),
        (edit_manifest(positions=2**62), "positions is 4611686018427387904"),
        (edit_manifest(top_k=0), "top_k is 0, expected a number from 1 on"),
        (edit_manifest(top_k=3.0), "top_k is 3.0"),
        (edit_manifest(vocabulary=True), "vocabulary is True"),
        (edit_manifest(checksums=[]), "manifest.json is damaged"),
        (edit_manifest(checksums={"indices": 3}), "checksums holds something else than lists"),
        (shutil.rmtree, "has no manifest.json"),
    ],
)
def test_a_damaged_cache_is_refused_when_it_is_opened(made, damage, said):
    damage(made[3])
    with pytest.raises(CacheError, match=said):
        TeacherCache(made[3])


@pytest.mark.parametrize("name, value", [("indices", 300), ("indices", -1), ("log_probs", np.nan), ("log_tail", 7)])
def test_values_that_no_teacher_says_are_refused_whatever_their_checksum(made, name, value):
    """A token beyond the vocabulary is read beside the logits."""
    _, _, arrays, directory = made
    changed = arrays[name].copy()
    changed.reshape(-1)[random.randrange(changed.size)] = value
    (directory / name).write_bytes(changed.tobytes())
    refit(directory)
    found = found_by_ranks(directory)
    assert len(found) == 1 and str(directory / name) in found[0] and "again" in found[0]


def test_offsets_of_other_samples_are_refused(made):
    samples, _, arrays, directory = made
    offsets = arrays["offsets"].copy()
    offsets[3:-1] += 2**40
    (directory / "offsets").write_bytes(offsets.tobytes())
    refit(directory)
    with pytest.raises(CacheError, match=f"{directory / 'offsets'} does not fit the samples"):
        TeacherCache(directory).check_samples(samples)


def refit(directory):
    """Make the checksums fit again, as those of a forged cache do."""
    contents = json.loads((directory / "manifest.json").read_text())
    manifest = Manifest(**{key: value for key, value in contents.items() if key != "format"})
    sums = teacher_cache.checksums(directory, manifest, 0, 1)
    sums = {name: [found[index] for index in sorted(found)] for name, found in sums.items()}
    edit_json(directory / "manifest.json", checksums=sums)


def test_a_cache_of_something_else_is_refused(made, tmp_path):
    samples, _, _, directory = made
    cache, tokenizer = TeacherCache(directory), tiny_tokenizer()
    tokenizer.add_tokens("new")
    masked = Sample(samples[0].input_ids, np.full_like(samples[0].labels, IGNORE))
    for others, said in (
        (samples[1:], "has 20 samples, expected 19"),
        ([*samples[1:], samples[0]], "was made from other samples"),
        ([masked, *samples[1:]], r"was made from other samples .*data\.loss_on"),
    ):
        with pytest.raises(CacheError, match=said):
            cache.check_samples(others)
    with pytest.raises(CacheError, match="another tokenizer"):
        cache.check_tokenizer(tokenizer)
    other = tiny_checkpoint(tmp_path / "other", "llama", seed=5)
    with pytest.raises(CacheError, match="another teacher"):
        cache.check_teacher(str(other), digest_of_checkpoint(other))


def test_a_full_disk_shows_when_the_files_are_made(made, tmp_path):
    manifest = Manifest(**{**vars(TeacherCache(made[3]).manifest), "positions": 10**15})
    with pytest.raises(OSError):
        teacher_cache.create(tmp_path, manifest)


def test_samples_without_targets_make_an_empty_cache(tmp_path):
    teacher = tiny_checkpoint(tmp_path / "teacher", "llama")
    samples = [Sample(np.array([1, 2], np.int32), np.full(2, IGNORE, np.int32))]
    write(tmp_path / "cache", samples, teacher)
    cache = TeacherCache(tmp_path / "cache")
    cache.verify(0, 1)
    assert len(cache.rows([0])) == 0 and cache.top_k(cache.rows([0]))[0].shape == (0, K)


# ---- tokenizers


def test_the_first_token_that_differs_is_named():
    ours, theirs = tiny_tokenizer(), tiny_tokenizer()
    assert first_difference(ours, theirs) is None
    theirs.add_tokens(["one", "two"])
    assert first_difference(ours, theirs) == "token 300 is None to the student and 'one' to the teacher"


def test_common_tokens():
    tokenizer = tiny_tokenizer()  # 300 tokens
    assert common_vocabulary(tokenizer, 301, 301) is None
    assert common_vocabulary(tokenizer, 301, 320) == common_vocabulary(tokenizer, 320, 300) == 300
    with pytest.raises(ValueError, match="300 tokens, the student 310 logits and the teacher 299"):
        common_vocabulary(tokenizer, 310, 299)


def test_names_of_losses_are_taken():
    loop = Loop(minimal())
    loop.token_loss("mine", weight=0.5)(lambda chunk: chunk.student.sum(-1))
    for name in ("mine", "lm", "kd", "total", "router_aux", *DIAGNOSTICS):
        with pytest.raises(ValueError, match=f"loss '{name}': expected another name"):
            loop.token_loss(name, weight=1.0)
