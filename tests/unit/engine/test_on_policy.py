"""Steps whose samples a server writes: which tokens are learned, what is stored, and what no step goes on without."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from data.loader import Loader, MicroBatch, valid_tokens
from data.samples import IGNORE, Sample
from engine import on_policy
from engine.cluster.job import StopRequests
from engine.on_policy import OnPolicyLoader
from engine.publish import RUN, UPDATING, ServerError, VllmServer
from engine.state import NoSamplesError
from tests.lib.fake_vllm import FakeVllm, listening, versions
from tests.lib.recipes import minimal

PAD, VOCABULARY, ROWS = 3, 100, 4
PROMPTS = [[10 + index, *range(20, 21 + index)] for index in range(7)]


class Place:
    """A run's directory, the versions that it has published, and a server that was started on the newest."""

    def __init__(self, base: Path, broken: str = "", **data: Any) -> None:
        self.output, self.url = base / "run", "http://127.0.0.1:9"
        self.output.mkdir()
        self.versions = versions(base / "published", 3)
        (base / "published" / RUN).write_text(os.path.realpath(self.output))
        self.current = base / "published" / "current"
        self.current.symlink_to(self.versions[1].name)
        self.server = FakeVllm(self.current, broken)
        self.data = {"kind": "on_policy", "new_tokens": 9, "max_age": 5, "server_seconds": 1.0, **data}

    def loader(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        asked_to_stop: bool = False,
        optim: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """This rank's loader; 4 rows a step at any number of ranks."""
        recipe = minimal(
            data={**self.data, "server": self.url},
            loss={"lm_weight": 0.0, "kd_weight": 1.0, "teacher": "teacher"},
            train={"seed": 11},
            optim=optim or {},
            output_dir=str(self.output),
        )
        stop = cast("StopRequests", SimpleNamespace(requested=asked_to_stop))
        samples = [
            Sample(np.array(ids, np.int32), np.full(len(ids), IGNORE, np.int32), "p.jsonl", index + 1)
            for index, ids in enumerate(PROMPTS)
        ]
        sharded = {"micro_batch_size": 1, "gradient_accumulation_steps": ROWS // world, "rank": rank, "world": world}
        return OnPolicyLoader(recipe, VOCABULARY, stop, samples, seed=5, pad_token_id=PAD, **sharded, **options)

    def stored(self) -> list[str]:
        return sorted(path.name for path in (self.output / "samples").glob("*"))


@contextmanager
def up(place: Place) -> Iterator[FakeVllm]:
    with listening(place.server) as url:
        place.url = url.rstrip("/")
        yield place.server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_policy, "AGAIN_SECONDS", 0.02)


def rows_of(batches: list[MicroBatch]) -> list[tuple[int, list[int], list[int]]]:
    """Sample, tokens and labels of each row."""
    return [
        (sample, batch["input_ids"][row, :end].tolist(), batch["labels"][row, :end].tolist())
        for batch in batches
        for sample, (row, _, end) in zip(batch["sample_ids"].tolist(), batch["spans"].tolist(), strict=True)
    ]


def same(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


def test_a_step_learns_exactly_the_tokens_that_the_published_version_has_written(tmp_path):
    place = Place(tmp_path)
    with up(place) as server:
        loader = place.loader()
        steps = [loader.step(k) for k in (1, 2, 3)]
        asked = {json.dumps(body["sampling_params"], sort_keys=True) for body in server.asked}
        assert server.version == str(place.versions[1]), "the newest one, which it was started with"
        for k, batches in enumerate(steps, 1):
            expected = [row for row in Loader.step(loader, k) for row in row["sample_ids"].tolist()]
            for index, (sample, ids, labels) in enumerate(rows_of(batches)):
                prompt, bodies = PROMPTS[sample], server.asked[ROWS * (k - 1) : ROWS * k]
                assert sample == expected[index]
                (answer,) = [
                    server.written(prompt, body["sampling_params"])["token_ids"]
                    for body in bodies
                    if body["token_ids"] == prompt
                ]
                assert ids == [*prompt, *answer][:-1]
                assert labels == [*[IGNORE] * (len(prompt) - 1), *answer]
            assert loader.curves["on_policy/age"] == 2
    parameters = [json.loads(one) for one in asked]
    assert len(parameters) == 3 * ROWS, "a seed for each row of each step"
    seeds = {one.pop("seed") for one in parameters}
    assert len(seeds) == 3 * ROWS and all(0 <= seed < 2**63 for seed in seeds)
    assert all(one == {"max_tokens": 9, "temperature": 1.0, "detokenize": False} for one in parameters)


def test_a_restart_has_the_same_batches_without_a_server_at_any_number_of_ranks(tmp_path, capsys):
    place = Place(tmp_path)
    with up(place):
        loader = place.loader()
        before = loader.step(3)
        curves = loader.curves
    again = place.loader()
    assert same(again.step(3), before)
    assert {**again.curves, "on_policy/seconds": 0} == {**curves, "on_policy/seconds": 0}
    assert capsys.readouterr().out.count("its samples were stored before the restart, and are used again") == 1
    halves = [place.loader(rank=rank, world=2).step(3) for rank in (0, 1)]
    split = [row for pair in zip(*map(rows_of, halves), strict=True) for row in pair]
    assert split == rows_of(before)


def test_a_run_resumed_with_another_recipe_asks_for_other_answers(tmp_path, capsys):
    """The stored ones are of the abandoned continuation, whose weights may have gone astray."""
    place = Place(tmp_path)
    with up(place) as server:
        place.loader().step(3)
        place.loader(optim={"lr": 1e-7}).step(3)
        assert len(server.asked) == 2 * ROWS
        place.loader(optim={"lr": 1e-7}).step(3)
        assert len(server.asked) == 2 * ROWS
    said = capsys.readouterr().out
    assert said.count("its samples were stored before the restart, and are used again") == 1
    assert said.count("step 3: its stored samples are of a run with another recipe: new ones are sampled") == 1


def test_a_new_run_removes_no_file_of_the_user(tmp_path):
    place = Place(tmp_path)
    (place.output / "samples").mkdir()
    for name in ("step_00000007.json", "mine.jsonl"):
        (place.output / "samples" / name).write_text("{}")
    (place.current.parent / "step_00000000").touch()
    place.current.unlink()
    place.current.symlink_to("step_00000000")
    with up(place):
        place.loader().step(0)
    assert place.stored() == ["mine.jsonl", "step_00000000.json"]


def test_answers_stay_until_no_checkpoint_repeats_their_step(tmp_path):
    place = Place(tmp_path)
    checkpoints = place.output / "checkpoints"
    names = [f"step_{k:08d}.json" for k in range(6)]
    (place.output / "samples").mkdir()
    for name in names:
        (place.output / "samples" / name).write_text("of a run that ended before its first checkpoint")
    (place.current.parent / "step_00000000").touch()
    place.current.unlink()
    place.current.symlink_to("step_00000000")
    with up(place):
        loader = place.loader()
        kept = []
        for k in range(5):
            loader.step(k)
            kept.append(place.stored())
            if k == 1:
                (checkpoints / "step_00000002").mkdir(parents=True)
            if k == 3:
                (checkpoints / "step_00000004").mkdir()
                (checkpoints / "step_00000002").rename(checkpoints / "step_00000002.partial")
    assert kept == [names[:1], names[1:2], names[2:3], names[2:4], names[4:5]]


BROKEN = {
    "other version": r"an answer is of version \S+009, expected \S+001: let nothing .*; waited 1 s \(data\.ser",
    "aborts": r"an answer of \d tokens ended with 'abort', expected stop or length; not waited",
    "short context": r"was cut after \d of 9 tokens, expected a server with a larger --max-model-len; not waited",
    "wide": r"the student wrote token 1000000, expected ids below 100, which student and teacher have: name",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_answers_that_cannot_be_learned_end_the_run_with_one_line(tmp_path, capsys, broken):
    place = Place(tmp_path, broken)
    place.server.version = str(place.versions[1])
    with up(place), pytest.raises(NoSamplesError, match=rf"^step 3 has no samples: .*{BROKEN[broken]}") as error:
        place.loader(asked_to_stop=broken != "other version").step(3)  # else it would wait
    assert "\n" not in str(error.value) and place.stored() == []
    waits = [line for line in capsys.readouterr().out.splitlines() if "step 3 waits for samples, 1 s at most" in line]
    assert bool(waits) == (broken == "other version")


def test_versions_that_a_step_may_not_learn_from(tmp_path):
    place = Place(tmp_path)
    cases = {
        "current, of the start": (
            place.versions[0],
            6,
            r"6 steps old, expected 5 at most \(data.max_age\): publish more often",
        ),
        "of a later step": (
            place.versions[2],
            1,
            r"a version of a later step, expected one of step 1 or before: publish at step 1",
        ),
        "of no publish": (tmp_path / "model", 3, r"expected a version that this run has published: .*'current'"),
    }
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / RUN).write_text("/another/run")
    cases["of another run"] = (
        tmp_path / "other" / "step_00000003",
        3,
        r"a version that this run has published: .*'current'",
    )
    with up(place) as server:
        for name, (version, k, expected) in cases.items():
            server.version = str(version)
            with pytest.raises(NoSamplesError, match=rf"^step {k} has no samples: {place.url} serves .*{expected}$"):
                place.loader().step(k)
            assert not server.asked, name
        server.version = str(place.versions[0])
        assert len(place.loader().step(5)) == ROWS, "as old as data.max_age"


def test_a_server_that_comes_later_is_waited_for(tmp_path, capsys):
    place = Place(tmp_path, server_seconds=60.0)
    place.server.version = UPDATING
    with up(place) as server:
        served = VllmServer.serving

        def restarted(self: VllmServer) -> Any:
            try:
                return served(self)
            finally:
                server.version = str(place.versions[1])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VllmServer, "serving", restarted)
            assert len(place.loader().step(3)) == ROWS
    assert re.search(r"^step 3 waits for samples, 60 s at most .* it is paused: restart", capsys.readouterr().out)
    with pytest.raises(NoSamplesError, match=r"Connection refused; not waited for, as the run was asked to stop$"):
        place.loader(asked_to_stop=True).step(4)


def test_answers_that_came_are_not_asked_for_again(tmp_path, monkeypatch):
    place = Place(tmp_path, server_seconds=60.0)
    place.server.version = str(place.versions[1])
    generate, failed = VllmServer.generate, []

    def fails_once(self: VllmServer, *given: Any, **sampling: Any) -> Any:
        if len(place.server.asked) == 2 and not failed:
            failed.append(True)
            raise ServerError("busy")
        return generate(self, *given, **sampling)

    monkeypatch.setattr(on_policy, "AT_ONCE", 1)
    monkeypatch.setattr(VllmServer, "generate", fails_once)
    with up(place) as server:
        assert len(place.loader().step(3)) == ROWS
    assert failed and len(server.asked) == ROWS


def test_stored_answers_that_are_not_of_this_step_are_refused(tmp_path):
    place = Place(tmp_path)
    with up(place):
        place.loader().step(3)
    path = place.output / "samples" / "step_00000003.json"
    whole = path.read_text()
    path.rename(path.with_name("step_00000004.json"))
    with pytest.raises(NoSamplesError, match=r"step_00000004.json has answers to other prompts: remove it to sample"):
        place.loader().step(4)
    for text in (whole[:-9], "{}", "[]"):
        path.write_text(text)
        with pytest.raises(NoSamplesError, match=r"step_00000003.json is damaged \(.*\): remove it to sample again"):
            place.loader().step(3)


def test_skipped_prompts_are_not_learned_and_calibration_needs_no_server(tmp_path):
    place = Place(tmp_path)
    (first,) = place.loader().first(1)
    skipped = int(first["sample_ids"][0])
    assert rows_of([first])[0][1] == PROMPTS[skipped] and not (first["labels"] != IGNORE).any()
    with up(place):
        batches = place.loader(skip=(skipped,)).step(3) + place.loader(skip=(skipped,)).step(4)
    targets = [(sample, sum(label != IGNORE for label in labels)) for sample, _, labels in rows_of(batches)]
    prompts = [i for k in (3, 4) for batch in Loader.step(place.loader(), k) for i in batch["sample_ids"].tolist()]
    assert skipped in prompts and [sample for sample, _ in targets] == [i for i in prompts if i != skipped]
    assert all(count for _, count in targets) and sum(count for _, count in targets) == valid_tokens(batches)


def test_ranks_that_share_rows_learn_their_part_of_them(tmp_path):
    place = Place(tmp_path)
    with up(place):
        whole = place.loader().step(3)
    for half, batch in zip(
        place.loader(share=lambda size: slice(0, size // 2), together=2).step(3), whole, strict=True
    ):
        own = batch["labels"].shape[1] // 2
        assert torch.equal(half["input_ids"], batch["input_ids"]) and own
        assert torch.equal(half["labels"], batch["labels"][:, :own])
