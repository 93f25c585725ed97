"""Batches and lines of a run whose tokens come from data.cache: those of the files, whatever the options are."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from transformers import PreTrainedTokenizerBase

from data.loader import HeldOut, Loader
from data.samples import load_tokenizer, samples_of
from engine.config.sections import DataRecipe
from engine.session.context import build_loader, read_samples
from model.ranks import RankError
from tests.lib.recipes import minimal
from tests.lib.tiny import TEXT, tiny_checkpoint

TURNS = [("system", "be"), ("user", "a" * 40), ("assistant", "b<|im_end|>"), ("user", "c"), ("assistant", "d")]
FIELDS = {"input": "question", "output": "answer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    tiny_checkpoint(directory / "model", "qwen3")
    for name, count in (("a", 30), ("b", 10), ("c", 6)):
        rows: list[dict[str, Any]] = [
            {"input": f"{name} {i}?" + " hm" * (3 * i), "output": str(i), "question": "q", "answer": "a", "id": i}
            for i in range(count)
        ]
        rows.append({"messages": [{"role": role, "content": f"{name}{text}"} for role, text in TURNS], **rows[0]})
        for key in ("input", "output"):
            del rows[-1][key]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "a.txt").write_text(TEXT * 9 + "<|endoftext|>")
    (directory / "b.txt").write_text("Another. " + TEXT * 3)
    return directory


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder / "model")


def recipe_of(folder: Path, files: tuple[str, ...] = ("a.jsonl", "b.jsonl"), **data: Any):
    return minimal(
        model={"path": str(folder / "model")},
        data={"train": [str(folder / file) for file in files], "max_length": 128, **data},
        eval={"every": int("eval" in data)},
    )


def content(loader: Loader, held_out: HeldOut | None) -> list[Any]:
    """All that a run takes from its data."""
    batches = [batch for k in (0, 1, 5, 40) for batch in loader.step(k)]
    tensors = [tensor for batch in [*batches, *(held_out or ())] for tensor in batch.values()]
    said = [loader.describe(3), loader.epoch_of(7), loader.steps_of(2.5), loader.digest]
    return [*said, *(tensor.tolist() for tensor in tensors), [tensor.dtype for tensor in tensors]]


KINDS: dict[str, dict[str, Any]] = {
    "last": {},
    "all": {"loss_on": "all", "too_long": "truncate", "max_length": 90},
    "packed": {"packing": True, "seed": 3},
    "weights": {"weights": [1.0, 3.0], "micro_batch_size": 3},
    "held out": {"held_out": 7, "eval": ["c.jsonl"], "skip": ["a.jsonl:3", "b.jsonl:11"], "held_out_seed": 0},
    "as text": {"special_tokens": "text", "loss_on": "all"},
    "text": {"kind": "text", "files": ("a.txt", "b.txt"), "max_length": 16},
    "packed text": {"kind": "text", "files": ("b.txt", "a.txt"), "max_length": 16, "packing": True, "held_out": 0.2},
    "mixed": {
        "kind": "mixed",
        "files": ("a.txt", "a.jsonl", "b.txt"),
        "weights": [1.0, 2.0, 1.0],
        "max_length": 40,
        "too_long": "truncate",
        "held_out": 3,
    },
    "weighted text": {"kind": "text", "files": ("a.txt", "b.txt"), "max_length": 7, "weights": [1.0, 1.0]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_lines_are_those_of_the_files(folder, tokenizer, kind, tmp_path, capsys):
    """From the first start on; a second start reads no file. Also of other ranks, and where a step fills no epoch."""
    data = dict(KINDS[kind])
    data.pop("held_out_seed", None)
    files = data.pop("files", ("a.jsonl", "b.jsonl"))
    data |= {key: [str(folder / name) for name in data[key]] for key in ("eval", "skip") if key in data}
    found, said = [], []
    for cache in (None, str(tmp_path / "cache"), str(tmp_path / "cache")):
        recipe = recipe_of(folder, files, cache=cache, show=1, **data)
        found.append(content(*build_loader(recipe, tokenizer, {"model.path": 301})))
        lines = capsys.readouterr().out.splitlines()
        said.append([line for line in lines if not line.startswith("data.cache: ")])
        kept = len(lines) - len(said[-1])
        assert kept == (len(files) + len(data.get("eval", ())) if len(found) == 2 else 0)
    assert found[1] == found[0] == found[2] and said[1] == said[0] == said[2] and said[0]


NOT_OF_SAMPLES = {
    *("weights", "held_out", "eval", "packing", "micro_batch_size", "seed", "show", "skip", "cache"),
    *("server", "new_tokens", "temperature", "max_age", "server_seconds"),  # of answers that are not in the files
}
"""Options that select, order or print samples, and change none."""
OF_TEXT = ("train", "max_length", "special_tokens")
"""Options that change samples of text, too."""
VALUES = {"train": ["c.jsonl"], "fields": FIELDS, "max_length": 60}


def others(item: dataclasses.Field) -> list[Any]:
    """Other values of an option of the recipe."""
    if item.name in VALUES:
        return [VALUES[item.name]]
    kind: Any = item.type
    if get_origin(kind) is not None and isinstance(get_args(kind)[0], str):
        return [value for value in get_args(kind) if value != item.default]
    assert kind is bool, f"data.{item.name}: give it another value here, or name it in NOT_OF_SAMPLES"
    return [not item.default]


def test_every_option_that_changes_samples_tells_them_apart(folder, tokenizer, tmp_path):
    """Each option's samples are read where those of all others are kept: none gets another one's."""
    changes: list[tuple[str, dict[str, Any]]] = [("", {})]
    for item in dataclasses.fields(DataRecipe):
        if item.name not in NOT_OF_SAMPLES:
            changes += [(item.name, {item.name: value}) for value in others(item)]
    of_text = [(f"text {name}", {"kind": "text", **one}) for name, one in changes if name in ("", *OF_TEXT)]
    told: dict[str, set[str]] = {}
    for name, change in [*changes, *of_text] * 2:
        data = {"max_length": 110, **change}
        if prompts := data.get("kind") == "on_policy":  # a recipe of it needs more
            del data["kind"]
        recipe = recipe_of(folder, tuple(data.pop("train", ["a.jsonl"])), **data)
        found = []
        for cache in (None, str(tmp_path / "cache")):
            recipe.data.cache = cache
            try:
                found.append(samples_of([*read_samples(recipe, tokenizer, recipe.data.train, prompts=prompts)]).key)
            except RankError as error:
                found.append(str(error))
        assert found[0] == found[1], (name, change)
        told.setdefault(name, set()).add(found[0])
    silent = [name for name, digests in told.items() if name and digests <= told[""]]
    assert not silent, f"give {silent} values that change samples, or name them in NOT_OF_SAMPLES"
