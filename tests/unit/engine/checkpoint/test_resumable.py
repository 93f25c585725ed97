"""What must be as it was for a run to go on from a checkpoint."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint import resume as load
from engine.checkpoint.find import check_resumable, check_samples, read_step_directory
from engine.config.errors import RecipeError
from engine.config.quant import RuleRecipe, SchemeRecipe, TensorRecipe
from engine.config.reading import save_recipe
from engine.config.sections import AdapterRecipe
from model.checkpoint.fingerprint import digest_of_checkpoint, fingerprints
from model.ranks import RankError
from tests.unit.engine.checkpoint.steps import recipe, write_step


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
    one = read_step_directory(write_step(tmp_path, 1, samples="abc"))
    check_samples(one, "abc")
    with pytest.raises(RankError, match=r"data\.train: the samples are not those of the run that .*step_00000001"):
        check_samples(one, "abd")


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
            load.check_base(session, read_step_directory(step))
        else:
            with pytest.raises(RankError, match=rf"does not hold the frozen weights, and {wrong} as read from"):
                load.check_base(session, read_step_directory(step))
    (step / "state.json").write_text(json.dumps({**state, "left_out": {"weight": "x"}}))
    with pytest.raises(ValueError, match=r"is damaged: state\.json is not what was written"):
        read_step_directory(step)
