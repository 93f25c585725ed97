"""Options and data that a resumed run must keep, and those that it may change."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.checkpoint import resume
from engine.checkpoint.find import (
    FIRST_VALUES,
    MAY_CHANGE,
    changes,
    check_resumable,
    check_samples,
    no_steps_left,
    read_step_directory,
    stays,
    without_effect,
)
from engine.config.config import recipe_options
from engine.config.errors import RecipeError
from engine.config.reading import save_recipe
from engine.config.sections import EventRecipe
from model.checkpoint.fingerprint import digest_of_checkpoint, fingerprints
from model.ranks import RankError
from tests.lib.checkpoints import edit_json
from tests.lib.recipes import minimal
from tests.unit.engine.checkpoint.steps import recipe, write_step


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")


def other(value: Any) -> Any:
    """A value that is not this one; it is not checked any more where a resume is checked."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return {**value, "x": 1} if isinstance(value, dict) else [*value, "x"]


def test_every_option_either_stays_and_is_refused_by_name_or_may_change(tmp_path):
    write_step(tmp_path, 1)
    (tmp_path / "config.json").write_text("{}")  # a digest of a model's directory is taken where there are adapters
    before = recipe(tmp_path)
    known = {key for key, _, _ in recipe_options(before)}
    assert {f"{section}.{name}" for section, names in MAY_CHANGE.items() for name in names} <= known
    skipped = {"data.micro_batch_size", "train.gradient_accumulation_steps"}  # belong together, see below
    skipped |= {"train.resume", "parallel.sequence"}  # says what checkpoint is meant; needs as many ranks
    skipped |= {"schedule", "quant.fake_quant_start"}  # may change from the checkpoint's step on, see below
    refused, taken = copy.deepcopy(before), copy.deepcopy(before)
    for key, owner, item in recipe_options(before):
        if key not in skipped:
            section, _, name = key.rpartition(".")
            wanted = refused if stays(key) else taken
            setattr(getattr(wanted, section) if section else wanted, name, other(getattr(owner, item.name)))
    named = {text.partition(" (was ")[0] for text in changes(before, refused)}
    assert named == {key for key in known - skipped if stays(key)} > {"train.seed", "data.seed"}
    refused.model.path = str(tmp_path)
    with pytest.raises(RecipeError, match=r"cannot be continued with other \w"):
        check_resumable(refused, tmp_path)
    assert check_resumable(taken, tmp_path).step == 1


def test_options_that_only_start_a_run_are_named(tmp_path):
    step = write_step(tmp_path, 1)
    found, wanted = read_step_directory(step), recipe(tmp_path)
    assert list(without_effect(found, wanted)) == []
    wanted.quant.init, wanted.adapter.start, wanted.optim.lr = "gptq", "other", 3e-5
    assert list(without_effect(found, wanted)) == [
        f"warning: quant.init (was 'rtn', is 'gptq') has no effect: {step} has its own values",
        f"warning: adapter.start (was None, is 'other') has no effect: {step} has its own values",
    ]
    assert all(key.partition(".")[2] in MAY_CHANGE[key.partition(".")[0]] for key in FIRST_VALUES)


def test_a_run_that_has_no_step_left_is_named(tmp_path):
    step = write_step(tmp_path, 7)
    found, wanted = read_step_directory(step), recipe(tmp_path)
    for steps, left in ((8, True), (7, False), (5, False)):
        wanted.train.steps = steps
        line = f"warning: {step} has 7 steps, and train.steps is {steps}: no step is left to train"
        assert list(no_steps_left(found, wanted)) == ([] if left else [line])


@pytest.mark.parametrize(
    ("micro", "world", "expected"),
    [
        (2, 1, None),  # 12 rows were 2 x 6 x 1
        (1, 2, None),
        (2, 2, "were 12, are 24 .*with 2 rank.s. set for example data.micro_batch_size 2 and .*steps 3"),
        (5, 3, "were 12, are 90 .*with 3 rank.s. set for example data.micro_batch_size 1 and .*steps 4"),
        (2, 5, "were 12, are 60 .*: 12 rows are not divisible by 5 ranks, expected one of 1, 2, 3, 4, 6, 12"),
    ],
)
def test_a_step_takes_the_rows_that_it_took(tmp_path, monkeypatch, micro, world, expected):
    write_step(tmp_path, 1, micro_batch_size=2)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    wanted = recipe(tmp_path, micro_batch_size=micro)
    if expected is None:
        assert check_resumable(wanted, tmp_path).step == 1
    else:
        with pytest.raises(RecipeError, match=expected):
            check_resumable(wanted, tmp_path)


RATE = {"at": 1, "lr": {"weights": 1e-6}}


@pytest.mark.parametrize(
    ("start", "events", "refused"),
    [
        (0, [RATE], r"are \['quant.fake_quant_start: 0', "),
        (1, [RATE], r"are \['quant.fake_quant_start: 1', "),
        (2, [RATE], None),
        (-1, [RATE, {**RATE, "at": 2}, {"every": 1, "freeze_scales": True}], None),
        (-1, [{**RATE, "lr": {"weights": 2e-6}}], r"were .* 1e-06\}\}\"\], are .* 2e-06\}\}\"\]\)"),
        (-1, [], r"are \[\]\)"),
        (-1, [{**RATE, "at": 0}, RATE], r"are \[\"\{'at': 0, "),
    ],
)
def test_events_that_have_happened_are_those_of_the_run(tmp_path, start, events, refused):
    """A resumed run would not do them, and their effects are in the checkpoint."""

    def scheduled(start: int, events: list[dict[str, Any]]):
        train = {"gradient_accumulation_steps": 6, "resume": True, "steps": 10}
        schedule = [EventRecipe(**event) for event in events]
        return minimal(train=train, output_dir=str(tmp_path), quant={"fake_quant_start": start}, schedule=schedule)

    step = write_step(tmp_path, 2)
    save_recipe(scheduled(-1, [RATE]), step / "recipe.yaml")
    if refused is None:
        assert check_resumable(scheduled(start, events), tmp_path).step == 2
    else:
        with pytest.raises(RecipeError, match=rf"cannot be continued with other events before step 2 \(.*{refused}"):
            check_resumable(scheduled(start, events), tmp_path)


def test_ranks_that_share_rows_count_as_one(tmp_path, monkeypatch):
    write_step(tmp_path, 1, micro_batch_size=2)
    wanted = recipe(tmp_path, micro_batch_size=2)
    wanted.parallel.sequence = 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_resumable(wanted, tmp_path).step == 1
    for ranks, expected in ((4, "with 2 groups of ranks that share rows set for"), (10, "by 5 groups of ranks that")):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        with pytest.raises(RecipeError, match=rf"accumulation_steps \* ranks / parallel\.sequence\).* {expected}"):
            check_resumable(wanted, tmp_path)


def test_other_samples_are_refused_and_other_folders_are_not(tmp_path):
    write_step(tmp_path, 1)
    with pytest.raises(RecipeError) as raised:
        check_resumable(recipe(tmp_path, seed=3, max_length=77), tmp_path)
    for text in ("data.seed (was 0, is 3)", "data.max_length (was 2048, is 77)"):
        assert text in str(raised.value)
    moved = recipe(tmp_path, train=["elsewhere/train.jsonl"])
    assert check_resumable(moved, tmp_path).step == 1
    moved.data.train.append("more.jsonl")
    with pytest.raises(RecipeError, match=r"data.train \(was \['train.jsonl'\], is \['train.jsonl', 'more.jsonl'\]\)"):
        check_resumable(moved, tmp_path)


def test_other_samples_under_the_same_file_names_are_refused(tmp_path):
    one = read_step_directory(write_step(tmp_path, 1, samples="abc"))
    check_samples(one, "abc")
    with pytest.raises(RankError, match=r"data\.train: the samples are not those of the run that .*step_00000001"):
        check_samples(one, "abd")


def test_adapters_go_on_on_their_base_alone(tmp_path):
    """Another strength or rank is refused by name, and another checkpoint under the same path."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"weights")
    step = write_step(tmp_path, 1)

    def adapted(**values):
        train = {"gradient_accumulation_steps": 6, "resume": True}
        adapter = {"kind": "lora", **values}
        return minimal(model={"path": str(base)}, train=train, output_dir=str(tmp_path), adapter=adapter)

    save_recipe(adapted(), step / "recipe.yaml")
    edit_json(step / "state.json", base=digest_of_checkpoint(base))
    assert check_resumable(adapted(), tmp_path).step == 1
    with pytest.raises(RecipeError) as raised:
        check_resumable(adapted(rank=8, alpha=3.0), tmp_path)
    for text in ("adapter.rank (was 16, is 8)", "adapter.alpha (was 32.0, is 3.0)"):
        assert text in str(raised.value)
    (base / "model.safetensors").write_bytes(b"others.")
    with pytest.raises(RecipeError, match=r"cannot be continued with other model.path .*: adapters of another base"):
        check_resumable(adapted(), tmp_path)


def test_frozen_weights_that_a_checkpoint_left_out_are_those_of_its_run(tmp_path):
    """One other bit is refused by the weight's name, and a weight that the model does not have."""
    step = write_step(tmp_path, 1)
    model = torch.nn.Linear(8, 8).requires_grad_(False)
    session = SimpleNamespace(model=model, recipe=recipe(tmp_path))
    known = fingerprints(model, ["weight", "bias"])
    edit_json(step / "state.json", left_out=known)
    resume.check_base(session, read_step_directory(step))
    model.bias[3] += 1
    for left_out, wrong in ((known, "bias"), ({**fingerprints(model, ["weight", "bias"]), "no": 3}, "no")):
        edit_json(step / "state.json", left_out=left_out)
        with pytest.raises(RankError, match=rf"does not hold the frozen weights, and {wrong} as read from"):
            resume.check_base(session, read_step_directory(step))


def test_a_value_that_no_recipe_has_is_named_with_its_file(tmp_path: Path):
    """The checkpoint's, or that of the run which resumes it."""
    path = write_step(tmp_path, 1) / "recipe.yaml"
    path.write_text(path.read_text().replace("input_range: absmax", "input_range: abcmax"))
    with pytest.raises(RecipeError, match=rf"{re.escape(str(path))}: quant.input_range: .*Got value: abcmax"):
        check_resumable(recipe(tmp_path), tmp_path)
