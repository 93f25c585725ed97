"""Fake quant that starts later, is switched off and on, or never comes; of keys and values, too."""

import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config.reading import load_recipe
from quant import SCHEMES, Ranges
from quant.reference import absmax_scale, fake_quant
from tests.lib.plain import assert_equals_plain_loop, load_result
from tests.lib.variants import EVEN, NO_TEACHER, SAID, Variant, run_variants

STAGES = (0, 2, 3)  # 1 is 2 without gradients in partitions, and comes with the large counts
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
WATCHED = {
    **{f"switch_{stage}": Variant({**SWITCH, "stage": stage}, action="watch_start") for stage in STAGES},
    **{
        f"switch_w{bits}": Variant(
            {**INTEGER, "stage": 3, "quant": {"fake_quant_start": 2, "scheme": f"w{bits}a16_g32"}},
            EVEN,
            "bfloat16",
            "watch_start",
        )
        for bits in (4, 2)
    },
}
KEYS_AND_VALUES = {
    "kv_3": Variant({**KV, "stage": 3}),
    "onlykv": Variant(ONLY_KV, "qwen3_moe"),
}
CONSTANT = {"loss": NO_TEACHER, "optim": {"schedule": "constant"}}
EXPORT = {"export": {"enabled": True}}
RUNS = {
    **WATCHED,
    **{f"off_{stage}": Variant({**CONSTANT, "stage": stage}, action="off_and_on") for stage in STAGES},
    "off_bf16": Variant({**CONSTANT, "stage": 0}, dtype="bfloat16", action="off_and_on"),
    "off_gptq": Variant(
        {**CONSTANT, "stage": 3, "quant": {"scheme": "w4a16_g32", "init": "gptq"}}, EVEN, action="off_and_on"
    ),
    "eventually": Variant(
        {
            "stage": 3,
            "loss": NO_TEACHER,
            "quant": {"fake_quant_start": -1},
            "train": {"steps": 3, "quant_stats_every": 0},
            "schedule": [{"at": 2, "fake_quant": True}],
            **EXPORT,
        },
        dtype="bfloat16",
    ),
    "never": Variant(
        {"stage": 3, "quant": {"fake_quant_start": -1}, "train": {"steps": 2}, **EXPORT}, dtype="bfloat16"
    ),
    **KEYS_AND_VALUES,
}


OTHERS = {
    "switch_1": Variant({**SWITCH, "stage": 1}, action="watch_start"),
    "off_1": Variant({**CONSTANT, "stage": 1}, action="off_and_on"),
    "kv_2": Variant({**KV, "stage": 2}),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One launch for all runs."""
    return run_variants(tmp_path_factory.mktemp("switching"), RUNS)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """One launch for the rest of the stages."""
    return run_variants(tmp_path_factory.mktemp("others"), OTHERS)


@pytest.mark.full
def test_the_rest_of_the_stages_equal_a_plain_loop(others):
    assert_equals_plain_loop(others["switch_1"])
    assert_equals_plain_loop(others["off_1"], off=range(2, 4))
    assert_equals_plain_loop(others["kv_2"])
    assert_scales_of_keys_and_values_train(others["kv_2"])
    assert_scales_are_those_of_the_weights(others["switch_1"])
    assert_theta_rested(others["off_1"])


@pytest.mark.parametrize("stage", STAGES)
def test_fake_quant_that_starts_later_equals_a_plain_loop(paths, stage):
    """Theta's first step is its first, with Adam's state fresh, though the optimizer has taken two before."""
    assert_equals_plain_loop(paths[f"switch_{stage}"])


@pytest.mark.parametrize("name", KEYS_AND_VALUES)
def test_quantized_keys_and_values_train_like_a_plain_loop(paths, name):
    """Their scales are measured in the middle from what observers saw on both ranks, and learned."""
    assert_equals_plain_loop(paths[name])
    assert_scales_of_keys_and_values_train(paths[name])
    found = load_result(paths[name])
    clipped = [value for key, value in found["weights"].items() if "_cache." in key]
    assert name != "onlykv" or all(value.any() for value in clipped)


def assert_scales_of_keys_and_values_train(path):
    found = load_result(path)
    scales = {key: value for key, value in found["weights"].items() if "_cache." in key}
    assert len(scales) == 2 * 4 and all(bool(value.isfinite().all()) for value in scales.values())
    assert {key for key in found["requires_grad"] if "_cache." in key} == {key for key in scales if "theta" in key}


@pytest.mark.parametrize("name", WATCHED)
def test_scales_are_measured_from_the_weights_at_the_start(paths, name):
    assert_scales_are_those_of_the_weights(paths[name])


def assert_scales_are_those_of_the_weights(path):
    found = load_result(path)
    seen, spec = found["seen"], SCHEMES[load_recipe(path).quant.scheme].weights
    assert seen["enabled"]
    thetas = [key for key in found["weights"] if key.endswith("_theta")]
    assert thetas and not any(seen["after"][key].any() for key in thetas)
    # Trained from then on; an fp8 tensor without a clipped or a tiny value has nothing to teach its scale.
    trained = [bool(found["weights"][key].any()) for key in thetas]
    assert any(trained) and (spec.dtype == "fp8_e4m3" or all(trained))
    moved = 0
    for owner, members in seen["groups"].items():
        whole = [seen["after"][f"{member}.weight"].float() for member in members]
        scale = seen["after"][f"{owner}.weight_s0"]
        moved += not torch.equal(scale, seen["before"][f"{owner}.weight_s0"])
        if spec.granularity == "tensor":
            expected = absmax_scale(torch.stack([weight.abs().max() for weight in whole]).amax().view(1), spec)
        else:
            (weight,) = whole
            expected = absmax_scale(weight.unflatten(-1, (-1, 32)).abs().amax(-1), spec)
        if Ranges().searches(spec):
            errors = [
                (fake_quant(weight, s, spec) - weight).square().unflatten(-1, (-1, 32)).sum(-1)
                for s in (scale, expected)
            ]
            assert (errors[0] <= errors[1] * (1 + 1e-6)).all() and errors[0].sum() < 0.8 * errors[1].sum()
        else:
            assert torch.equal(scale, expected), owner
    assert moved > 0


@pytest.mark.parametrize("name", ["switch_w4", "switch_w2"])
def test_scales_of_groups_take_little_of_the_norm_that_clips(paths, name):
    """Under 1% with a scale for each 32 weights too; ``test_train`` has scales of whole tensors."""
    found = load_result(paths[name])
    assert 0 < found["scale_norms"][-1] < 0.01 * found["norms"][-1]


@pytest.mark.parametrize("stage", STAGES)
def test_theta_rests_while_fake_quant_is_off(paths, stage):
    assert_theta_rested(paths[f"off_{stage}"])


def assert_theta_rested(path):
    """No update, though Adam has moments of the steps before."""
    seen = load_result(path)["seen"]
    thetas = [name for name in seen["off"] if name.endswith("_theta")]
    assert thetas and all(seen["off"][name].any() for name in thetas)
    for name in thetas:
        assert torch.equal(seen["on"][name], seen["off"][name]), name
    assert any(not torch.equal(seen["on"][name], seen["off"][name]) for name in seen["off"])


@pytest.mark.parametrize("stage", STAGES)
def test_fake_quant_switched_off_and_on_equals_a_plain_loop(paths, stage):
    assert_equals_plain_loop(paths[f"off_{stage}"], off=range(2, 4))


def test_theta_begins_anew_where_each_parameter_has_an_fp32_copy_of_its_own(paths):
    """Stage 0 under bf16. In the one step since, Adam with fresh moments takes the warm-up's half of the rate, where
    thetas had gone further before."""
    trained = load_result(paths["off_bf16"])
    before = [float(value) for name, value in trained["seen"]["on"].items() if name.endswith("_theta")]
    after = [float(value) for name, value in trained["weights"].items() if name.endswith("_theta")]
    assert max(map(abs, before)) > 1e-2 and max(map(abs, after)) == pytest.approx(5e-3, rel=1e-2)


def test_scales_that_were_brought_are_not_lost_without_a_line(paths):
    """One line, of the one run that had any."""
    lines = [line for line in (paths["off_gptq"].parent / SAID).read_text().splitlines() if "are lost" in line]
    assert len(lines) == 1, lines
    assert re.search(r"warning: weight scales that quant.init gave are lost: (\d+) of \1 are measured again", *lines)


def test_fake_quant_that_only_an_event_starts_is_observed_for_and_exported(paths):
    directory = paths["eventually"].with_suffix("")
    assert "quantization_config" in json.loads((directory / "export" / "config.json").read_text())


def test_without_fake_quant_the_export_is_the_trained_model(paths):
    found = load_result(paths["never"])
    export = load_recipe(paths["never"]).export_dir()
    disk = load_file(export / "model.safetensors")
    names = {name for name in found["weights"] if not name.endswith(("_s0", "_theta"))}
    assert disk.keys() == names
    assert all(torch.equal(disk[name], found["weights"][name]) for name in names)
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    assert not any(found["weights"][name].any() for name in found["weights"] if name.endswith("_theta"))
