"""When fake quant comes on, goes off or never comes; events of a recipe, and the actions of a user's own script."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from model.ranks import gather_objects
from quant import SCHEMES, Ranges
from quant.reference import absmax_scale, fake_quant
from tests.distributed.engine.scripts.train import whole_parameters
from tests.lib.launcher import run_ranks
from tests.lib.plain import assert_equals_plain_loop, load_result
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import EVEN, NO_TEACHER, Variant, each, runs_of, start_of

# ---------------------------------------------------------------------------------------------------------------------
# What loops get beside their recipes
# ---------------------------------------------------------------------------------------------------------------------


def watch_start(loop: Loop, seen: dict[str, Any]) -> None:
    """Parameters before the step that precedes fake quant, and when it has come on: the loop does it first."""
    start = loop.recipe.quant.fake_quant_start
    loop.at(start - 1)(lambda state: seen.update(before=whole_parameters(state.model)))
    loop.at(start)(lambda state: seen.update(after=whole_parameters(state.model)))


def off_and_on(loop: Loop, seen: dict[str, Any]) -> None:
    """Fake quant is switched off in the middle, and on again."""

    @loop.at(2)
    def disable(state: LoopState) -> None:
        state.quant.disable()
        seen["off"] = whole_parameters(state.model)

    @loop.at(4)
    def enable(state: LoopState) -> None:
        seen["on"] = whole_parameters(state.model)
        state.quant.enable()


def user(loop: Loop, seen: dict[str, Any]) -> None:
    """Do what the README shows: an action at a step, one every few steps, values of one's own, an early end."""

    @loop.at(step=1)
    def weights_only(state: LoopState) -> None:
        state.quant.enable(activations=False)

    @loop.every(2)
    def probe(state: LoopState) -> None:
        state.log({"my/step": state.step})

    @loop.every(3)
    def stop(state: LoopState) -> None:
        seen["fake_quant"] = set(state.session.quantization.fake_quant_state().values())
        seen["seeds"] = set(gather_objects(torch.initial_seed()))
        state.stop()


# ---------------------------------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------------------------------

SWITCH: dict[str, Any] = {
    "quant": {"fake_quant_start": 2, "calibration_batches": 0},
    "learnable": {"act_scale": True},
    "loss": NO_TEACHER,
}
INTEGER = {"loss": NO_TEACHER, "train": {"steps": 3, "quant_stats_every": 1}, "optim": {"lr": 1e-2}}
KV = {**SWITCH, "quant": {**SWITCH["quant"], "scheme": "fp8_static_kv"}, "train": {"steps": 4}}
# Keys and values alone, clipped.
ONLY_KV = {
    "stage": 3,
    "quant": {"scheme": "fp8_kv", "calibration_batches": 0, "initial_input_scale": 1e-3},
    "learnable": {"weight_scale": False, "act_scale": True},
    "data": {"packing": True},
    "train": {"steps": 2, "activation_checkpointing": True},
    "loss": NO_TEACHER,
}
CONSTANT = {"loss": NO_TEACHER, "optim": {"schedule": "constant"}}
EXPORT = {"export": {"enabled": True}}
EVENTUALLY = {
    "quant": {"fake_quant_start": -1},
    "train": {"steps": 3, "quant_stats_every": 0},
    "schedule": [{"at": 2, "fake_quant": True}],
}
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
OBSERVED: dict[str, Any] = {
    "stage": 2,
    "quant": {"calibration_batches": 0, "fake_quant_start": 2},
    "loss": NO_TEACHER,
    "train": {"steps": 3, "gradient_accumulation_steps": 1},
}


def switch(stage: int) -> Variant:
    return Variant({**SWITCH, "stage": stage})


def off(stage: int, model: str = "qwen3", dtype: str = "float32", **sections: Any) -> Variant:
    return Variant({**CONSTANT, "stage": stage, **sections}, model, dtype, off_and_on)


def integer(bits: int) -> Variant:
    quant = {"fake_quant_start": 2, "scheme": f"w{bits}a16_g32"}
    return Variant({**INTEGER, "stage": 3, "quant": quant}, EVEN, "bfloat16", watch_start)


RUNS = {
    "switch_2": switch(2),
    "switch_3": switch(3),
    "switch_w4": integer(4),
    "switch_w2": integer(2),
    "kv_3": Variant({**KV, "stage": 3}),
    "onlykv": Variant(ONLY_KV, "qwen3_moe"),
    "off_0": off(0),
    "off_3": off(3),
    "off_bf16": off(0, dtype="bfloat16"),
    "off_gptq": off(3, EVEN, quant={"scheme": "w4a16_g32", "init": "gptq"}),
    "eventually": Variant({"stage": 3, "loss": NO_TEACHER, **EVENTUALLY, **EXPORT}, dtype="bfloat16"),
    "never": Variant(
        {"stage": 3, "quant": {"fake_quant_start": -1}, "train": {"steps": 2}, **EXPORT}, dtype="bfloat16"
    ),
    "user": Variant({"stage": 3, "train": {"quant_stats_every": 1}, **EXPORT}, dtype="bfloat16", action=user),
    **{f"watched_{kind}": Variant({**OBSERVED, "schedule": [{kind: 1, "observe": True}]}) for kind in ("at", "every")},
    "events_0": Variant({**EVENTS, "stage": 0}),
    "events_2": Variant({**EVENTS, "stage": 2}),
    # Looks at the quantization in every state that it can be in.
    "events_3": Variant({**EVENTS, "stage": 3, "train": {**EVENTS["train"], "quant_stats_every": 1}}),
    "events_hpz": Variant({**EVENTS, "stage": 3}, shipped="zero3_hpz"),
}
# They come with the large counts.
MORE = {
    "switch_0": switch(0),
    "switch_1": switch(1),
    "off_1": off(1),
    "off_2": off(2),
    "kv_2": Variant({**KV, "stage": 2}),
    "events_1": Variant({**EVENTS, "stage": 1}),
}


paths = runs_of(RUNS, MORE)


# ---------------------------------------------------------------------------------------------------------------------
# Fake quant that starts later, is switched off and on, or never comes; of keys and values, too
# ---------------------------------------------------------------------------------------------------------------------


@each(["switch_2", "switch_3"], ["switch_0", "switch_1"])
def test_fake_quant_that_starts_later_equals_a_plain_loop(paths, name):
    """Theta's first step is its first, with Adam's state fresh, though the optimizer has taken two before."""
    assert_equals_plain_loop(paths[name])


@each(["kv_3", "onlykv"], ["kv_2"])
def test_quantized_keys_and_values_train_like_a_plain_loop(paths, name):
    """Their scales are measured in the middle from what observers saw on both ranks, and learned."""
    assert_equals_plain_loop(paths[name])
    found = load_result(paths[name])
    scales = {key: value for key, value in found["weights"].items() if "_cache." in key}
    assert len(scales) == 2 * 4 and all(bool(value.isfinite().all()) for value in scales.values())
    assert {key for key in found["requires_grad"] if "_cache." in key} == {key for key in scales if "theta" in key}
    assert name != "onlykv" or all(value.any() for value in scales.values())


@pytest.mark.parametrize("bits", [4, 2])
def test_scales_of_groups_are_measured_at_the_start_and_take_little_of_the_norm_that_clips(paths, bits):
    """Under 1% of it with a scale for each 32 weights too; ``test_train`` has scales of whole tensors, and the plain
    loop those that are measured without a search."""
    found, spec = load_result(paths[f"switch_w{bits}"]), SCHEMES[f"w{bits}a16_g32"].weights
    assert 0 < found["scale_norms"][-1] < 0.01 * found["norms"][-1]
    seen, moved = found["seen"], 0
    for name in (name for name in seen["after"] if name.endswith("weight_theta")):
        assert not seen["after"][name].any() and found["weights"][name].any(), "trained from then on"
        layer, scale = name.removesuffix(".weight_theta"), seen["after"][name.replace("theta", "s0")]
        moved += not torch.equal(scale, seen["before"][name.replace("theta", "s0")])
        weight = seen["after"][f"{layer}.weight"].float()
        largest = absmax_scale(weight.unflatten(-1, (-1, 32)).abs().amax(-1), spec)
        if not Ranges().searches(spec):
            assert torch.equal(scale, largest), name
            continue
        errors = [
            (fake_quant(weight, s, spec) - weight).square().unflatten(-1, (-1, 32)).sum(-1) for s in (scale, largest)
        ]
        assert (errors[0] <= errors[1] * (1 + 1e-6)).all() and errors[0].sum() < 0.8 * errors[1].sum()
    assert moved > 0


@each(["off_0", "off_3"], ["off_1", "off_2"])
def test_fake_quant_switched_off_and_on_equals_a_plain_loop(paths, name):
    """Thetas get no update while fake quant is off, though Adam has moments of the steps before."""
    assert_equals_plain_loop(paths[name], off=range(2, 4))
    seen = load_result(paths[name])["seen"]
    thetas = [name for name in seen["off"] if name.endswith("_theta")]
    assert thetas and all(seen["off"][name].any() for name in thetas)
    for name in thetas:
        assert torch.equal(seen["on"][name], seen["off"][name]), name
    assert any(not torch.equal(seen["on"][name], seen["off"][name]) for name in seen["off"])


def test_theta_begins_anew_where_each_parameter_has_an_fp32_copy_of_its_own(paths):
    """Stage 0 under bf16. In the one step since, Adam with fresh moments takes the warm-up's half of the rate, where
    thetas had gone further before."""
    trained = load_result(paths["off_bf16"])
    before = [float(value) for name, value in trained["seen"]["on"].items() if name.endswith("_theta")]
    after = [float(value) for name, value in trained["weights"].items() if name.endswith("_theta")]
    assert max(map(abs, before)) > 1e-2 and max(map(abs, after)) == pytest.approx(5e-3, rel=1e-2)


def test_scales_that_were_brought_are_not_lost_without_a_line(paths):
    """The run with quant.init warns once, for its weights; runs whose events switch fake quant on again, for inputs."""
    lines = [line for line in paths.said().splitlines() if "are lost" in line]
    weights, inputs = ([line for line in lines if f"{kind} scales" in line] for kind in ("weight", "input"))
    assert len(weights) == 1 and inputs and len(lines) == 1 + len(inputs), lines
    assert re.search(r"warning: weight scales that quant.init gave are lost: (\d+) of \1 are measured again", *weights)
    assert all("warning: input scales that quant.initial_input_scale gave are lost: " in line for line in inputs)


def test_fake_quant_that_only_an_event_starts_is_observed_for_and_exported(paths):
    export = load_recipe(paths["eventually"]).export_dir()
    assert "quantization_config" in json.loads((export / "config.json").read_text())


def test_without_fake_quant_the_export_is_the_trained_model(paths):
    found = load_result(paths["never"])
    export = load_recipe(paths["never"]).export_dir()
    disk = load_file(export / "model.safetensors")
    names = {name for name in found["weights"] if not name.endswith(("_s0", "_theta"))}
    assert disk.keys() == names
    assert all(torch.equal(disk[name], found["weights"][name]) for name in names)
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    assert not any(found["weights"][name].any() for name in found["weights"] if name.endswith("_theta"))


# ---------------------------------------------------------------------------------------------------------------------
# Events and actions
# ---------------------------------------------------------------------------------------------------------------------


def test_what_was_seen_is_forgotten_when_the_next_step_begins(paths):
    """Observers that are emptied after every step have seen a step when fake quant starts, the one before it."""
    every, at = (load_result(paths[f"watched_{kind}"]) for kind in ("every", "at"))
    inputs = [name for name in every["weights"] if name.endswith("input_s0")]
    assert inputs and all(every["weights"][name] > 0 for name in inputs)
    assert all(torch.equal(value, at["weights"][name]) for name, value in every["weights"].items())


@each(["events_0", "events_2", "events_3"], ["events_1"])
def test_events_of_a_recipe_move_what_they_name_and_nothing_else(paths, name):
    """Step by step which parameters moved; a scale that rests stays where it is although it has trained before."""
    found, first = load_result(paths[name]), start_of(paths[name])
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
        weights | theta,  # of weights alone; all weight scales are measured again
        weights | theta | first_inputs,
        norms,  # scales frozen, weights at a learning rate of 0
        norms | theta | first_inputs,
        norms | theta,  # inputs off: no momentum moves them
        norms | theta | inputs,
    ]
    total = [step["loss/total"] / step["loss/lm"] for step in found["losses"]]
    assert total == pytest.approx([1.0] * 5 + [0.5] * 4)
    # Scales that are used again are measured from the weights as they are.
    steps, spec = found["after"], SCHEMES["fp8_static"].weights
    for name, value in steps[3].items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight_s0" and layer.endswith("down_proj"):  # which shares its scale with no other
            absmax = steps[2][f"{layer}.weight"].abs().amax()
            assert torch.equal(value, absmax_scale(absmax.view(1), spec)), name
        if leaf == "input_s0":
            assert torch.equal(value, steps[1][name]), name  # inputs are not in use yet
            assert torch.equal(steps[4][name], value) == (".layers.0." not in name), name
            assert torch.equal(steps[7][name], steps[4][name]) and not torch.equal(steps[8][name], steps[7][name]), name


def test_hpz_uses_the_scales_that_events_write(paths):
    """The second copies of the weights that hpZ gathers from hold scales too, which are measured again three times."""
    found, expected = (load_result(paths[f"events_{name}"]) for name in ("hpz", 3))
    assert found["losses"] == expected["losses"] and found["norms"] == expected["norms"]
    for step, (after, plain) in enumerate(zip(found["after"], expected["after"], strict=True)):
        assert all(torch.equal(after[name], value) for name, value in plain.items()), step


def kind_of(name: str) -> str | None:
    """Return the kind of a parameter by its name; thetas of inputs of the first layer are a kind of their own."""
    leaf = name.rpartition(".")[2]
    if leaf.endswith("_s0"):
        return None
    if leaf == "input_theta":
        return "input_theta 0" if ".layers.0." in name else leaf
    if leaf == "weight_theta":
        return leaf
    return "norm" if "norm" in name else "embedding" if "embed" in name or "lm_head" in name else "weight"


def test_a_users_schedule_acts_logs_and_stops(paths):
    found, settings = load_result(paths["user"]), load_recipe(paths["user"])
    assert len(found["losses"]) == 3 < settings.train.steps
    assert found["seen"]["fake_quant"] == {(True, False)}
    assert len(found["seen"]["seeds"]) == 2  # each rank draws dropout masks of its own
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
    histograms = {f"quant/{name}" for name in ("weight_scales_log2", "input_scales_log2", "weight_error_db")}
    assert histograms | {"quant/clipped_weights", "quant/clipped_inputs"} <= set(events.Tags()["histograms"])
    assert [event.step for event in events.Images("quant/weight_error_by_layer")] == [1, 2, 3]
    (recipe,) = events.Tensors("recipe/text_summary")
    written = (Path(settings.output_dir) / "recipe.yaml").read_text()
    assert recipe.tensor_proto.string_val[0].decode() == f"```yaml\n{written}\n```"


def test_an_unquantized_run_is_continued_with_fake_quant(tmp_path):
    """Its checkpoint has no statistics of inputs: they are observed from the resume on."""
    options = {"train": {"steps": 2, "checkpoint_every": 2, "gradient_accumulation_steps": 1}, "loss": NO_TEACHER}
    model, chats = tiny_checkpoint(tmp_path / "model"), write_chats(tmp_path / "chats.jsonl")
    quant = {"scheme": "fp8_static", "fake_quant_start": -1}
    recipe = write_recipe(tmp_path, "run", model, chats, stage=1, quant=quant, **options)
    train = ROOT / "launch" / "train.py"
    run_ranks(train, "--config", recipe)
    more = ["--train.resume", "true", "--train.steps", "5", "--quant.fake_quant_start", "4", "--export.enabled", "true"]
    run_ranks(train, "--config", recipe, *more)
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "float-quantized"
