"""Checkpoints as files: the manifest, what is damaged and what is offered instead, what is kept."""

import io
import json
import math
import os
import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from data.teacher_cache import digest_of_checkpoint
from engine.checkpoint import load, save
from engine.checkpoint.files import CheckedFiles, file_crc32, read_object, replace_text
from engine.checkpoint.find import (
    Best,
    best_checkpoint,
    check_resumable,
    check_samples,
    find_checkpoint,
    read_checkpoint,
    verify_checkpoint,
)
from engine.checkpoint.save import _make_current
from engine.recipe.adapter import AdapterRecipe
from engine.recipe.checks import RecipeError
from engine.recipe.quant import RuleRecipe, SchemeRecipe, TensorRecipe
from engine.recipe.reading import save_recipe
from engine.recipe.recipe import Recipe
from engine.recipe.sections import DataRecipe, ModelRecipe, TrainRecipe
from engine.report import best_line
from model.frozen import fingerprints
from model.ranks import RankError
from model.zero import LeftOut
from tests.patience import ends

NOTHING = LeftOut(torch.nn.Module(), ())


def recipe(directory: Path, *, resume: bool | str = True, **data) -> Recipe:
    return Recipe(
        model=ModelRecipe(path="model"),
        data=DataRecipe(train=["train.jsonl"], **data),
        train=TrainRecipe(steps=10, gradient_accumulation_steps=6, resume=resume),
        output_dir=str(directory),
    )


def write_step(
    directory: Path, step: int, *, keep: int = 10, world: int = 1, measured=None, samples=None, **data
) -> Path:
    """A checkpoint of two small files and a recipe, made current as a run does."""
    name = f"step_{step:08d}"
    partial = directory / f"{name}.partial"
    partial.mkdir(parents=True)
    files = CheckedFiles(NOTHING)
    for file in ("a.pt", "b.pt"):
        files.save({"tensor": torch.rand(1000), "file": file}, partial / file)
    assert files.failure is None
    save_recipe(recipe(directory, **data), partial / "recipe.yaml")
    state = {"step": step, "world_size": world, "stage": 3, "files": files.written, "samples": samples}
    (partial / "state.json").write_text(json.dumps(state))
    _make_current(directory, partial, directory / name, keep, measured)
    return directory / name


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step_*"))


def test_what_is_counted_is_what_lies_on_the_disk(tmp_path, seed):
    files = CheckedFiles(NOTHING)
    tensors = {"a": torch.rand(random.randrange(1, 10**6)), "b": torch.randint(99, (3, 5)), "text": "x" * 1000}
    files.save(tensors, tmp_path / "file.pt")
    size, crc32 = files.written["file.pt"]
    assert files.bytes == size == (tmp_path / "file.pt").stat().st_size and crc32 == file_crc32(tmp_path / "file.pt")
    back = torch.load(tmp_path / "file.pt", weights_only=True)
    assert back["text"] == tensors["text"] and torch.equal(back["a"], tensors["a"])


def test_a_file_that_cannot_be_written_is_counted_removed_and_not_raised(tmp_path):
    files = CheckedFiles(NOTHING)
    files.save(torch.rand(10_000), tmp_path / "missing" / "file.pt")
    assert files.failure == "file.pt: No such file or directory"
    full = tmp_path / "full.pt"
    full.symlink_to("/dev/full")  # every write to it fails, as on a full disk
    files.save(torch.rand(10_000), full)
    assert not full.is_symlink()
    assert files.failure == "file.pt: No such file or directory"  # the first
    assert files.written == {} and files.bytes > 80_000


def test_latest_and_best_and_names_are_found(tmp_path):
    for step in (1, 2, 3):
        write_step(tmp_path, step, measured=("eval/perplexity", 5.5 if step == 2 else 6.0))
    assert best_checkpoint(tmp_path) == Best("step_00000002", 2, "eval/perplexity", 5.5)
    assert best_line(tmp_path) == f"best checkpoint: {tmp_path}/step_00000002, eval/perplexity 5.5000"
    found = {which: find_checkpoint(tmp_path, which) for which in (True, "best", "step_00000001")}
    assert [checkpoint.step for checkpoint in found.values()] == [3, 2, 1]
    for checkpoint in found.values():
        verify_checkpoint(checkpoint)


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    kept, losses = {}, {2: 1.0, 4: 1.5, 5: 0.5}
    for step in range(1, 7):
        write_step(tmp_path, step, keep=2, measured=("loss", losses[step]) if step in losses else None)
        kept[step] = [int(name[-8:]) for name in names(tmp_path)]
    assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [4, 5], 6: [5, 6]}
    assert not list(tmp_path.glob("*.partial"))


def test_the_best_is_the_one_of_the_smallest_value_that_is_still_there(tmp_path, capsys):
    def marked(step, value, metric="eval/lm"):
        write_step(tmp_path, step, keep=9, measured=(metric, value))
        best = best_checkpoint(tmp_path)
        return best.step, best.value

    assert [marked(1, 3.0), marked(2, 2.0), marked(3, 2.5)] == [(1, 3.0), (2, 2.0), (2, 2.0)]
    # Resumed from before it, the run comes to step 2 again: what was the best is not there any more.
    assert marked(2, 2.2) == (2, 2.2)
    assert marked(3, 5.0, "eval/total") == (3, 5.0)
    # A loss that is not finite is no best one, and a mark with one does not stay for ever.
    assert marked(4, math.nan, "eval/total") == (3, 5.0)
    (tmp_path / "best.json").write_text('{"name": "step_00000004", "step": 4, "metric": "eval/total", "value": NaN}')
    assert marked(5, 9.0, "eval/total") == (5, 9.0)
    write_step(tmp_path, 5, measured=("eval/total", math.inf))
    assert best_checkpoint(tmp_path) is None  # it marked a checkpoint that is not there any more
    (tmp_path / "best.json").write_text("{")
    assert marked(6, 4.0) == (6, 4.0)
    assert f"warning: {tmp_path}/best.json is damaged: expected name" in capsys.readouterr().out


def test_a_mark_that_cannot_be_written_costs_a_warning(tmp_path, capsys):
    (tmp_path / "best.json.partial").mkdir()  # as a full disk does: the mark cannot be written aside
    write_step(tmp_path, 1, measured=("eval/lm", 1.0))
    assert find_checkpoint(tmp_path).step == 1
    assert "best.json was not written (Is a directory): the best checkpoint is not marked" in capsys.readouterr().out


@pytest.mark.parametrize("at", ["best.json", "latest"])
def test_killed_before_a_mark_or_a_pointer_the_step_is_done_again(tmp_path, monkeypatch, at):
    """And marked again: the mark is written before the pointer."""
    write_step(tmp_path, 1, keep=1, measured=("eval/lm", 2.0))

    def killed(path: Path, text: str) -> None:
        if path.name == at:
            raise KeyboardInterrupt
        replace_text(path, text)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(save, "replace_text", killed)
        write_step(tmp_path, 2, keep=1, measured=("eval/lm", 1.0))
    assert find_checkpoint(tmp_path).step == 1
    write_step(tmp_path, 2, keep=1, measured=("eval/lm", 1.0))
    assert find_checkpoint(tmp_path).step == find_checkpoint(tmp_path, "best").step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "latest", "step_00000002"]


def test_killed_before_the_first_pointer_the_checkpoint_is_found(tmp_path):
    for step in (1, 2):
        write_step(tmp_path, step)
    (tmp_path / "latest").unlink()
    assert find_checkpoint(tmp_path).step == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "a"}', '{"name": "a", "step": 1, "metric": "b", "value": "c"}'])
def test_a_damaged_mark_of_the_best_is_refused_before_a_run_goes_on(tmp_path, text):
    write_step(tmp_path, 1)
    check_resumable(recipe(tmp_path), tmp_path)
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(RecipeError, match=r"train\.resume: .*best\.json is damaged: expected name, step, metric"):
        check_resumable(recipe(tmp_path), tmp_path)
    # Damaged while it runs, it does not end a run whose work is done.
    assert (best_line(tmp_path) or "").startswith(f"warning: {tmp_path}/best.json is damaged")


def test_a_run_that_goes_on_from_an_older_step_does_not_lose_it_to_later_ones(tmp_path):
    for step in (1, 2, 3, 4):
        write_step(tmp_path, step, keep=4)
    write_step(tmp_path, 2, keep=1)  # resumed from step 1
    assert names(tmp_path) == ["step_00000002", "step_00000003", "step_00000004"]
    assert find_checkpoint(tmp_path).step == 2


def test_a_checkpoint_that_is_not_there_is_no_best_one(tmp_path):
    assert best_checkpoint(tmp_path) is None and best_line(tmp_path) is None
    with pytest.raises(ValueError, match=r"has no best\.json"):
        find_checkpoint(tmp_path, "best")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda path: (path / "b.pt").unlink(), "is damaged: b.pt is missing"),
        (lambda path: (path / "b.pt").write_bytes(b""), "is damaged: b.pt has 0 bytes, expected "),
        (lambda path: (path / "state.json").unlink(), "is not a whole checkpoint: it has no state.json"),
        (lambda path: (path / "state.json").write_text('{"step": 3, "fil'), "is damaged: state.json is not what"),
        (lambda path: (path / "state.json").write_text("{}"), "is damaged: state.json is not what"),
        (lambda path: path.rename(path.with_name("elsewhere")), "is not there"),
    ],
)
def test_what_is_damaged_is_named_and_the_one_before_it_offered(tmp_path, spoil, expected):
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    spoil(tmp_path / "step_00000003")
    with pytest.raises(ValueError) as raised:
        find_checkpoint(tmp_path)
    assert f"{tmp_path}/step_00000003 {expected}" in str(raised.value)
    assert "the one before it is step_00000002: set train.resume to step_00000002" in str(raised.value)
    (tmp_path / "step_00000002" / "a.pt").unlink()  # that one is no better: the next
    with pytest.raises(ValueError, match=r"the one before it is step_00000001: set train.resume to step_00000001"):
        find_checkpoint(tmp_path)
    (tmp_path / "step_00000001" / "a.pt").unlink()
    with pytest.raises(ValueError, match="there is no whole checkpoint before it"):
        find_checkpoint(tmp_path)


def test_one_bit_is_found_before_anything_is_loaded(tmp_path, seed):
    path = write_step(tmp_path, 1)
    file = path / random.choice(["a.pt", "b.pt"])
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    checkpoint = read_checkpoint(path)
    with pytest.raises(RankError, match=f"is damaged: the content of {file.name} is not what was written"):
        verify_checkpoint(checkpoint)


def test_a_pointer_is_replaced_in_one_rename(tmp_path):
    path = tmp_path / "latest"
    replace_text(path, "one")
    other_name = tmp_path / "other"
    other_name.hardlink_to(path)
    replace_text(path, "two")
    assert path.read_text() == "two" and other_name.read_text() == "one"


@pytest.mark.parametrize(
    ("micro", "world", "expected"),
    [
        (2, 1, None),  # 12 rows were 2 x 6 x 1
        (1, 2, None),
        (2, 2, "were 12, are 24 .*with 2 rank.s. set for example data.micro_batch_size 2 and .*steps 3"),
        (5, 3, "were 12, are 90 .*with 3 rank.s. set for example data.micro_batch_size 1 and .*steps 4"),
        (2, 5, "were 12, are 60 .*: 12 rows do not share out over 5 ranks, expected one of 1, 2, 3, 4, 6, 12"),
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


def test_other_samples_or_another_dtype_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    write_step(tmp_path, 1, micro_batch_size=2)
    changed = recipe(tmp_path, micro_batch_size=2, seed=3, max_length=77)
    changed.model.dtype = "float32"
    with pytest.raises(RecipeError) as raised:
        check_resumable(changed, tmp_path)
    for text in ("data.seed (was 0, is 3)", "data.max_length (was 2048, is 77)", "model.dtype (was 'bfloat16', is"):
        assert text in str(raised.value)
    moved = recipe(tmp_path, micro_batch_size=2)
    moved.data.train = ["elsewhere/train.jsonl"]
    assert check_resumable(moved, tmp_path).step == 1
    moved.data.train.append("more.jsonl")
    with pytest.raises(RecipeError, match=r"data.train \(was \['train.jsonl'\], is \['train.jsonl', 'more.jsonl'\]\)"):
        check_resumable(moved, tmp_path)


def test_other_samples_under_the_same_file_names_are_refused(tmp_path):
    one = read_checkpoint(write_step(tmp_path, 1, samples="abc"))
    check_samples(one, "abc")
    with pytest.raises(RankError, match=r"data\.train: the samples are not those of the run that .*step_00000001"):
        check_samples(one, "abd")
    check_samples(read_checkpoint(write_step(tmp_path, 2)), "abd")  # written before there was a digest


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda wanted: setattr(wanted.quant, "scheme", "w2a16_g32"),
            "quant.scheme (was 'fp8_static', is 'w2a16_g32')",
        ),
        (lambda wanted: wanted.quant.exempt.append("a"), "quant.exempt (was ["),
        (lambda wanted: wanted.quant.rules.append(RuleRecipe("none", first=1)), "quant.rules (was [], is [RuleRecipe("),
        (
            lambda wanted: wanted.quant.schemes.update(mine=SchemeRecipe(TensorRecipe("int", 3, "channel"))),
            "quant.schemes (was {}, is {'mine': ",
        ),
        (lambda wanted: setattr(wanted.quant, "lm_head", "w8a16_channel"), "quant.lm_head (was None, is"),
        (lambda wanted: setattr(wanted.quant, "embedding", "w8a16_channel"), "quant.embedding (was None, is"),
        (lambda wanted: setattr(wanted.quant, "input_range", "mse"), "quant.input_range (was 'absmax', is 'mse')"),
        (
            lambda wanted: setattr(wanted.quant, "scales_follow_weights", True),
            "quant.scales_follow_weights (was False, is",
        ),
        (lambda wanted: setattr(wanted.learnable, "norm", True), "learnable.norm (was False, is True)"),
        (lambda wanted: setattr(wanted.model, "dtype", "float32"), "model.dtype (was 'bfloat16', is 'float32')"),
    ],
)
def test_what_the_saved_scales_and_the_optimizer_are_of_must_stay(tmp_path, change, expected):
    write_step(tmp_path, 1, micro_batch_size=1)
    wanted = recipe(tmp_path, micro_batch_size=1)
    change(wanted)
    with pytest.raises(RecipeError, match=re.escape(expected)):
        check_resumable(wanted, tmp_path)


class Evil:
    """Makes a directory where it is unpickled, as an attacker's class would."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def replace_file(path: Path, content: bytes) -> None:
    """Give a file of a checkpoint another content, and the manifest its size and CRC-32."""
    path.write_bytes(content)
    manifest = path.parent / "state.json"
    state = json.loads(manifest.read_text())
    state["files"][path.name] = (len(content), file_crc32(path))
    manifest.write_text(json.dumps(state))


def test_a_file_that_would_run_code_is_refused_by_name_and_runs_nothing(tmp_path):
    path, mark = write_step(tmp_path, 1), tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save({"tensor": torch.rand(3), "more": Evil(mark)}, buffer)
    replace_file(path / "b.pt", buffer.getvalue())
    checkpoint = read_checkpoint(path)
    asks = re.escape(f"{path}/b.pt asks for posix.mkdir: ") + ".*could run code, and is not loaded"
    for read in (
        lambda: verify_checkpoint(checkpoint),
        lambda: CheckedFiles(NOTHING).load(path / "b.pt"),  # what DeepSpeed reads with
        lambda: read_object(path / "b.pt", mmap=True),
    ):
        with pytest.raises((RankError, ValueError), match=asks):
            read()
    replace_file(path / "b.pt", pickle.dumps(Evil(mark)))  # as torch wrote until 1.6
    with pytest.raises(RankError, match=r"b\.pt cannot be read"):
        verify_checkpoint(read_checkpoint(path))
    assert not mark.exists()


def test_what_deepspeed_keeps_of_its_own_is_read(tmp_path):
    values = {"scaler": LossScaler(8.0), "stage": ZeroStageEnum.gradients, "at": fragment_address(3, 4)}
    torch.save(values, tmp_path / "file.pt")
    found = read_object(tmp_path / "file.pt")
    assert found["scaler"].cur_scale == 8.0 and (found["stage"], found["at"]) == (values["stage"], values["at"])


class ByName:
    """Pickled as ``getattr(kind, name)``, as Python 3.11.0 to 3.11.3 pickle the members of an enum."""

    def __init__(self, kind, name):
        self.asked = kind, name

    def __reduce__(self):
        return getattr, self.asked


def test_enums_of_the_first_pythons_3_11_are_read_and_getattr_does_nothing_else(tmp_path):
    torch.save({"stage": ByName(ZeroStageEnum, "gradients")}, tmp_path / "file.pt")
    assert read_object(tmp_path / "file.pt")["stage"] is ZeroStageEnum.gradients
    for kind, name in ((ZeroStageEnum, "mro"), (ZeroStageEnum, "__class__"), (LossScaler, "__init__"), ([], "append")):
        torch.save({"stage": ByName(kind, name)}, tmp_path / "file.pt")
        with pytest.raises(ValueError, match="asks for getattr"):
            read_object(tmp_path / "file.pt")


def test_mutated_files_are_refused_by_name(tmp_path, seed):
    """With a right CRC-32: somebody meant it. What still loads has other numbers in its tensors."""
    path = write_step(tmp_path, 1)
    content = (path / "b.pt").read_bytes()
    refused = 0
    for _ in range(60):
        changed = bytearray(content)
        if random.random() < 0.3:
            del changed[random.randrange(len(changed)) :]
        for _ in range(random.choice([1, 4, 40])):
            if changed:
                changed[random.randrange(min(len(changed), random.choice([600, 10**6])))] = random.randrange(256)
        replace_file(path / "b.pt", bytes(changed))
        try:
            verify_checkpoint(read_checkpoint(path))
        except RankError as error:
            assert f"{path}/b.pt" in str(error)
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    "values",
    [
        {"files": {"../../a.pt": [3, 4]}},
        {"files": {"/etc/passwd": [3, 4]}},
        {"files": {"a.pt": 3}},
        {"files": []},
        {"world_size": 10**12},
        {"world_size": 0},
        {"stage": "weights"},
        {"step": None},
        {"step": float("inf")},
    ],
)
def test_a_manifest_says_only_what_was_written(tmp_path, values):
    path = write_step(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | values))
    with pytest.raises(ValueError, match=r"is damaged: state\.json is not what was written"):
        read_checkpoint(path)


@pytest.mark.parametrize("text", ["../../elsewhere", "", "/etc", "step_1"])
def test_a_pointer_leads_to_a_step_of_its_directory(tmp_path, text):
    write_step(tmp_path, 1)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(ValueError, match=r"latest is damaged: .*, expected a name like step_00001000"):
        find_checkpoint(tmp_path)
    (tmp_path / "best.json").write_text(json.dumps({"name": text, "step": 1, "metric": "eval/lm", "value": 1.0}))
    with pytest.raises(ValueError, match=r"best\.json is damaged"):
        best_checkpoint(tmp_path)


def test_adapters_go_on_on_their_base_alone(tmp_path, monkeypatch):
    """Another strength or rank is refused by name, and another checkpoint under the same path."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"weights")
    step = write_step(tmp_path, 1)

    def adapted(**values):
        changed = recipe(tmp_path)
        changed.model.path, changed.learnable.weight = str(base), False
        changed.adapter = AdapterRecipe(kind="lora", **values)
        return changed

    save_recipe(adapted(), step / "recipe.yaml")
    state = json.loads((step / "state.json").read_text())
    (step / "state.json").write_text(json.dumps({**state, "base": digest_of_checkpoint(base)}))
    assert check_resumable(adapted(), tmp_path).step == 1
    with pytest.raises(RecipeError) as raised:
        check_resumable(adapted(rank=8, alpha=3.0), tmp_path)
    for text in ("adapter.rank (was 16, is 8)", "adapter.alpha (was 32.0, is 3.0)"):
        assert text in str(raised.value)
    (base / "model.safetensors").write_bytes(b"others.")
    with pytest.raises(RecipeError, match=r"cannot be continued with other model.path .*: adapters of another base"):
        check_resumable(adapted(), tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["a.pt", "state.json"])
def test_what_never_ends_when_it_is_read_is_no_file_of_a_checkpoint(tmp_path, make, name):
    step = write_step(tmp_path, 1)
    state = json.loads((step / "state.json").read_text())
    path = step / name
    path.unlink()
    make(path)
    if name != "state.json":
        state["files"] = {**state["files"], name: [0, 0]}
        (step / "state.json").write_text(json.dumps(state))
    with ends(name), pytest.raises(ValueError, match=rf"{step.name} is (damaged: a.pt is missing|not a whole)"):
        read_checkpoint(step)


def test_links_that_lie_ready_are_not_written_through(tmp_path):
    """As an output directory of somebody else may have them."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("latest", "best.json"):
        (tmp_path / f"{name}.partial").symlink_to(victim)
        (tmp_path / name).symlink_to(victim)
        replace_text(tmp_path / name, "ours")
        assert (tmp_path / name).read_text() == "ours" and not (tmp_path / name).is_symlink()
    assert victim.read_text() == "mine"


def test_frozen_weights_that_a_checkpoint_left_out_are_those_of_its_run(tmp_path):
    """One other bit is refused by the weight's name, and a weight that the model does not have."""
    step = write_step(tmp_path, 1)
    state = json.loads((step / "state.json").read_text())
    model = torch.nn.Linear(8, 8).requires_grad_(False)
    session = SimpleNamespace(model=model, recipe=recipe(tmp_path))
    for names, wrong in ((["weight", "bias"], None), (["weight", "bias"], "bias"), (["weight", "bias", "no"], "no")):
        left_out = {**fingerprints(model, ["weight", "bias"]), "no": 3}
        (step / "state.json").write_text(json.dumps({**state, "left_out": {name: left_out[name] for name in names}}))
        if wrong == "bias":
            model.bias[3] += 1
        if wrong is None:
            load.check_base(session, read_checkpoint(step))
        else:
            with pytest.raises(RankError, match=rf"does not hold the frozen weights, and {wrong} as read from"):
                load.check_base(session, read_checkpoint(step))
    (step / "state.json").write_text(json.dumps({**state, "left_out": {"weight": "x"}}))
    with pytest.raises(ValueError, match=r"is damaged: state\.json is not what was written"):
        read_checkpoint(step)
