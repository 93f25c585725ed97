"""Schedules: events of a recipe on every stage and under hpZ, and the actions of a user's own script."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.config.reading import load_recipe
from quant import SCHEMES
from quant.reference import absmax_scale
from tests.lib.plain import load_result
from tests.lib.recipes import write_ds_config
from tests.lib.variants import NO_TEACHER, Variant, run_variants, start_of

FIRST_LAYER = r"model\.layers\.0\..*"
EVENTS: dict[str, Any] = {
    "quant": {"calibration_batches": 0, "fake_quant_start": 0, "initial_input_scale": 2e-4},
    "learnable": {"act_scale": True, "norm": True},
    "optim": {"schedule": "constant", "warmup_steps": 0, "norm_lr": 0.0, "embedding_lr": 1e-4, "act_scale_lr": 1e-3},
    "loss": NO_TEACHER,
    "train": {"steps": 9, "gradient_accumulation_steps": 1},
    "schedule": [
        {"at": 2, "fake_quant": False},
        {"at": 3, "fake_quant": "weights"},
        {"at": 4, "fake_quant": True, "layers": FIRST_LAYER},
        {"at": 5, "freeze_scales": True, "lr": {"norms": 1e-3, "weights": 0.0}, "loss": {"lm": 0.5}},
        {"when": "loss/total < 1e9", "lr": {"embeddings": 0.0}},
        {"at": 6, "freeze_scales": False},
        {"at": 7, "fake_quant": "weights"},  # observers watch the inputs again, from which those at 8 get their scales
        {"at": 8, "fake_quant": True},
    ],
}
RUNS = {
    **{f"events_{stage}": Variant({**EVENTS, "stage": stage}) for stage in range(3)},
    # Looks at the quantization in every state that it can be in.
    "events_3": Variant({**EVENTS, "stage": 3, "train": {**EVENTS["train"], "quant_stats_every": 1}}),
    "user": Variant(
        {"stage": 3, "train": {"quant_stats_every": 1}, "export": {"enabled": True}}, dtype="bfloat16", action="user"
    ),
    **{
        f"watched_{kind}": Variant(
            {
                "stage": 2,
                "quant": {"calibration_batches": 0, "fake_quant_start": 2},
                "loss": NO_TEACHER,
                "train": {"steps": 3, "gradient_accumulation_steps": 1},
                "schedule": [{kind: 1, "observe": True}],
            }
        )
        for kind in ("at", "every")
    },
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One launch for all runs."""
    directory = tmp_path_factory.mktemp("events")
    hpz = Variant({**EVENTS, "stage": 3, "deepspeed": write_ds_config(directory, "events_hpz", "zero3_hpz")})
    # The last: its groups of ranks are there until the process ends.
    return run_variants(directory, {**RUNS, "events_hpz": hpz})


def test_what_was_seen_is_forgotten_when_the_next_step_begins(paths):
    """Observers that begin anew after every step have seen a step when fake quant starts, the one before it."""
    every, at = (load_result(paths[f"watched_{kind}"]) for kind in ("every", "at"))
    inputs = [name for name in every["weights"] if name.endswith("input_s0")]
    assert inputs and all(every["weights"][name] > 0 for name in inputs)
    assert all(torch.equal(value, at["weights"][name]) for name, value in every["weights"].items())


@pytest.mark.parametrize("stage", range(4))
def test_events_of_a_recipe_move_what_they_name_and_nothing_else(paths, stage):
    """Step by step which parameters moved; a scale that rests stays where it is although it has trained before."""
    found = load_result(paths[f"events_{stage}"])
    first = start_of(paths[f"events_{stage}"])
    before = {name: first.get(name, torch.zeros_like(value)) for name, value in found["after"][0].items()}
    moves: list[set[str]] = []
    for after in found["after"]:
        moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
        moves.append({kind for name in moved if (kind := kind_of(name))})
        before = after
    weights, embedding, norms = {"weight"}, {"embedding"}, {"norm"}
    theta, inputs, first_inputs = {"weight_theta"}, {"input_theta", "input_theta 0"}, {"input_theta 0"}
    assert moves == [
        weights | embedding | theta | inputs,  # the condition holds after this step: embeddings stop
        weights | theta | inputs,
        weights,  # off
        weights | theta,  # of weights alone; all weight scales begin anew
        weights | theta | first_inputs,
        norms,  # scales frozen, weights at a learning rate of 0
        norms | theta | first_inputs,
        norms | theta,  # inputs off: no momentum moves them
        norms | theta | inputs,
    ]
    total = [step["loss/total"] / step["loss/lm"] for step in found["losses"]]
    assert total == pytest.approx([1.0] * 5 + [0.5] * 4)


def test_hpz_uses_the_scales_that_events_write(paths):
    """The second copies of the weights that hpZ gathers from hold scales too, which are measured anew three times."""
    found, expected = (load_result(paths[f"events_{name}"]) for name in ("hpz", 3))
    assert found["losses"] == expected["losses"] and found["norms"] == expected["norms"]
    for step, (after, plain) in enumerate(zip(found["after"], expected["after"], strict=True)):
        assert all(torch.equal(after[name], value) for name, value in plain.items()), step


def kind_of(name: str) -> str | None:
    """What the name of a parameter says that it is; theta of an input with the first layer apart."""
    leaf = name.rpartition(".")[2]
    if leaf.endswith("_s0"):
        return None
    if leaf == "input_theta":
        return "input_theta 0" if ".layers.0." in name else leaf
    if leaf == "weight_theta":
        return leaf
    return "norm" if "norm" in name else "embedding" if "embed" in name or "lm_head" in name else "weight"


@pytest.mark.parametrize("stage", range(4))
def test_scales_that_begin_anew_are_measured_from_the_weights_as_they_are(paths, stage):
    found, spec = load_result(paths[f"events_{stage}"])["after"], SCHEMES["fp8_static"].weights
    for name, value in found[3].items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight_s0" and layer.endswith("down_proj"):  # which shares its scale with no other
            absmax = found[2][f"{layer}.weight"].abs().amax()
            assert torch.equal(value, absmax_scale(absmax.view(1), spec)), name
        if leaf == "input_s0":
            assert torch.equal(value, found[1][name]), name  # inputs are not in use yet
            assert torch.equal(found[4][name], value) == (".layers.0." not in name), name
            assert torch.equal(found[7][name], found[4][name]) and not torch.equal(found[8][name], found[7][name]), name


def test_a_users_schedule_acts_logs_and_stops(paths):
    found, settings = load_result(paths["user"]), load_recipe(paths["user"])
    assert len(found["losses"]) == 3 < settings.train.steps
    assert found["seen"]["fake_quant"] == {(True, False)}
    assert (settings.export_dir() / "model.safetensors").is_file()
    events = EventAccumulator(str(Path(settings.output_dir) / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    losses = [event.value for event in events.Scalars("loss/total")]
    assert losses == pytest.approx([step["loss/total"] for step in found["losses"]])
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3]
    assert [(event.step, event.value) for event in events.Scalars("my/step")] == [(2, 2.0)]
    assert {"loss/lm", "loss/kd/cakld", "lr/weights", "lr/weight_scales"} <= tags
    assert {"train/grad_norm", "train/grad_norm_scales", "train/skipped_steps"} <= tags
    assert {"quant/weight_error_db_worst", "quant/clipped_weights_most", "quant/clipped_inputs_most"} <= tags
    histograms = {
        "quant/weight_scales_log2",
        "quant/input_scales_log2",
        "quant/clipped_weights",
        "quant/clipped_inputs",
    }
    assert histograms | {"quant/weight_error_db"} <= set(events.Tags()["histograms"])
    assert [event.step for event in events.Images("quant/weight_error_by_layer")] == [1, 2, 3]
    (recipe,) = events.Tensors("recipe/text_summary")
    assert (
        recipe.tensor_proto.string_val[0].decode()
        == f"```yaml\n{(Path(settings.output_dir) / 'recipe.yaml').read_text()}\n```"
    )
