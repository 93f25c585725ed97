"""From the recipe's data section to batches; on one rank, without a process group."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from data.loader import HeldOut, Loader, pack_rows, pad
from data.samples import Sample
from engine.session.context import build_loader, samples_on_all_ranks
from model.ranks import RankError
from tests.lib.recipes import minimal
from tests.lib.tiny import TEXT, tiny_checkpoint
from tests.unit.engine.session.test_cached_data import recipe_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    tiny_checkpoint(directory / "model", "qwen3")
    for name, count in (("a", 30), ("b", 10), ("c", 6)):
        rows = [{"input": f"{name} {i}?" + " hm" * (i % 5), "output": str(i)} for i in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "a.txt").write_text(TEXT * 9)
    (directory / "b.txt").write_text(TEXT * 3)
    return directory


def build(folder: Path, files=("a.jsonl", "b.jsonl"), **data: Any) -> tuple[Loader, HeldOut | None]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return build_loader(recipe_of(folder, files, **data), tokenizer, {"model.path": 301})


def test_held_out_samples_are_not_trained_on(folder):
    loader, held_out = build(folder, held_out=8, eval=[str(folder / "c.jsonl")], micro_batch_size=2)
    assert held_out is not None and len(held_out.samples) == 14
    # The six of the evaluation file come behind those that were held out.
    assert [Path(sample.file).name for sample in held_out.samples[8:]] == ["c.jsonl"] * 6
    trained = {(s.file, s.line) for s in loader.samples}
    assert len(trained) == 32 and not trained & {(s.file, s.line) for s in held_out.samples}
    assert build(folder)[1] is None


def test_a_run_shows_its_first_samples_if_asked(folder, capsys):
    """Each file's, with its counts; the targets are marked."""
    build(folder, eval=[str(folder / "c.jsonl")], show=2)
    said = capsys.readouterr().out
    assert [line.split(":")[0].split("/")[-1] for line in said.splitlines() if line.startswith("--- ")] == [
        name for name in ("a.jsonl", "b.jsonl", "c.jsonl") for _ in range(2)
    ]
    assert f"data: {folder}/b.jsonl: 10 samples of 10 lines" in said
    assert "<|im_start|>user\nb 1? hm<|im_end|>\n<|im_start|>assistant\n[[1<|im_end|>]]\n" in said
    build(folder)
    assert "[[" not in capsys.readouterr().out


def test_samples_that_are_trained_on_are_no_test(folder, tmp_path, capsys):
    """Copies under other names, whole or in part."""
    (folder / "copy.jsonl").write_bytes((folder / "a.jsonl").read_bytes())
    few = (folder / "a.jsonl").read_text().splitlines()[20:]
    (folder / "few.jsonl").write_text("\n".join([*few, *(folder / "c.jsonl").read_text().splitlines()]))
    copies = f"{folder}/(few|copy|a).jsonl:[0-9]+ is {folder}/(few|copy|a).jsonl:[0-9]+"
    with pytest.raises(RankError, match=f"8 of 8 held-out samples .*{copies}; remove the copies"):
        build(folder, ("a.jsonl", "copy.jsonl"), held_out=8, seed=3)
    loader, held_out = build(folder, ("a.jsonl", "few.jsonl"), held_out=23)
    said = capsys.readouterr().out
    assert f" of 23 held-out samples (data.held_out) are trained on too, as copies of the same tokens: {folder}" in said
    assert held_out is not None and 0 < len(held_out.samples) < 23
    assert len(loader.samples) == 46 - 23
    trained = {sample.input_ids.tobytes() for sample in loader.samples}
    assert not trained & {sample.input_ids.tobytes() for sample in held_out.samples}
    with pytest.raises(RankError, match=r"data\.eval: 10 of 16 samples are in data\.train too, like .*few\.jsonl:1, "):
        build(folder, ("a.jsonl",), eval=[str(folder / "few.jsonl")])


def test_the_digest_is_of_the_samples_in_their_order(folder):
    digests = [build(folder, files)[0].digest for files in (("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl"))]
    assert build(folder)[0].digest == digests[0] != digests[1]


def test_packing_weights_and_loss_on(folder):
    loader, _ = build(folder, packing=True, weights=[1.0, 3.0], loss_on="all")
    (batch,) = loader.step(0)
    assert "position_ids" in batch and batch["input_ids"].shape == (1, 128)
    ids = [i for row in range(loader._order.rows_in_epoch(0)) for i in loader._order.row(row)]
    assert sum(loader.samples[i].file.endswith("b.jsonl") for i in ids) == 30 and len(ids) == 40


def test_weights_of_text_files(folder):
    loader, _ = build(folder, ("a.txt", "b.txt"), kind="text", max_length=16, weights=[1.0, 1.0])
    names = [Path(sample.file).name for sample in loader.samples]
    assert set(names) == {"a.txt", "b.txt"} and names == sorted(names)
    taken = [names[loader.step(k)[0]["sample_ids"][0]] for k in range(len(names))]
    assert abs(taken.count("a.txt") - taken.count("b.txt")) <= 1


@pytest.mark.parametrize("packed", [False, True])
def test_samples_of_equal_length_go_together(packed):
    """All of them without padding, in groups that are full but for the last of each length, by their first ones."""
    lengths = [random.choice((3, 5, 8)) for _ in range(24)]
    samples = [Sample(*(np.full(length, index, dtype=np.int32),) * 2) for index, length in enumerate(lengths)]
    rows = [[3 * row, 3 * row + 1, 3 * row + 2] for row in range(8)] if packed else [[row] for row in range(24)]
    batches = [
        pack_rows(samples, rows[first : first + 4], 0, 24) if packed else pad(samples, rows[first : first + 4], 0)
        for first in range(0, len(rows), 4)
    ]
    for together in (1, random.randint(2, 9)):
        groups = list(samples_on_all_ranks(batches, together))
        assert all(counts for _, counts in groups)
        found = [ids[:, 0].tolist() for ids, _ in groups]
        assert [one[0] for one in found] == sorted(one[0] for one in found)
        for (ids, _), members in zip(groups, found, strict=True):
            assert ids.tolist() == [[one] * lengths[one] for one in members]
        for length in set(lengths):
            alike = [members for members in found if lengths[members[0]] == length]
            assert [one for members in alike for one in members] == [i for i in range(24) if lengths[i] == length]
            assert all(len(members) == together for members in alike[:-1]) and len(alike[-1]) <= together
    assert list(samples_on_all_ranks([])) == []
    ranks = random.randint(2, 4)
    divided = [
        ids[0, 0].item()
        for index in range(ranks)
        for ids, _ in samples_on_all_ranks(batches, shared=SimpleNamespace(index=index, ranks=ranks))
    ]
    assert sorted(divided) == list(range(24))


def test_tokens_without_embeddings_are_named_with_their_line(folder):
    """The model that has the fewest decides; tokens that no sample has do not matter."""
    recipe = minimal(
        model={"path": str(folder / "model")}, loss={"teacher": "t"}, data={"train": [str(folder / "a.jsonl")]}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    loader, _ = build_loader(recipe, tokenizer, {"model.path": 301, "loss.teacher": 301})
    most = max(int(max(sample.input_ids.max(), sample.labels.max())) for sample in loader.samples)
    build_loader(recipe, tokenizer, {"model.path": most + 1})
    token = tokenizer.convert_ids_to_tokens(most)
    with pytest.raises(RankError) as raised:
        build_loader(recipe, tokenizer, {"model.path": 301, "loss.teacher": most})
    text = str(raised.value)
    assert (
        f"a.jsonl:1: found token {most} ({token!r}), expected ids below {most}, the number of tokens of loss.teacher t"
        in text
    )
    assert "\n" not in text and "(30 samples have 1 such tokens)" in text


def test_a_pad_token_without_an_embedding_is_not_looked_up(folder, capsys):
    recipe = minimal(
        model={"path": str(folder / "model")}, data={"train": [str(folder / "a.jsonl")], "micro_batch_size": 2}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    loader, _ = build_loader(recipe, tokenizer, {"model.path": 300})
    assert (
        "data: rows are padded with token 0: the tokenizer's pad token 300 has no embedding (of 300)"
        in capsys.readouterr().out
    )
    assert max(int(batch["input_ids"].max()) for batch in loader.step(0)) < 300
