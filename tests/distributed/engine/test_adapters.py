"""Adapters that are merged before the weight is quantized, trained on two ranks on every ZeRO stage: against a plain
loop, and the codes of the export against what the last forward multiplied."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quant import SCHEMES
from quant.lora import merge
from tests.lib.launcher import run_ranks
from tests.lib.plain import assert_equals_plain_loop, load_result
from tests.lib.recipes import write_chats, write_ds_config, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed

SCRIPT = Path(__file__).parent / "scripts" / "variants.py"
FEW = {"steps": 3, "gradient_accumulation_steps": 2, "quant_stats_every": 2}
LORA = {
    "adapter": {"kind": "lora", "rank": 4, "alpha": 8.0, "ranks": {".*down_proj": 6}},
    "learnable": {"weight": False},
    "optim": {"lr": 1e-2, "scale_lr": 1e-2},
    "loss": {"kd_weight": 0.0, "teacher": None},
    "train": FEW,
}
# A scheme of each kind in each of two layers.
MIXED = {
    "scheme": "fp8_static",
    "schemes": {
        "int2_channel": {"weights": {"dtype": "int", "bits": 2, "granularity": "channel"}},
        "int4_asym": {
            "weights": {"dtype": "int", "bits": 4, "granularity": "group", "group_size": 32, "symmetric": False}
        },
    },
    "rules": [
        {"layers": r".*\.0\..*o_proj", "scheme": "w2a16_g32"},
        {"layers": r".*\.0\..*(gate|up)_proj", "scheme": "w4a16_g32"},
        {"layers": r".*\.0\..*down_proj", "scheme": "int4_asym"},
        {"layers": r".*\.1\..*(q|k|v)_proj", "scheme": "w8a16_channel"},
        {"layers": r".*\.1\..*o_proj", "scheme": "w3a16_g32"},
        {"layers": r".*\.1\..*(gate|up)_proj", "scheme": "8da4w"},
        {"layers": r".*\.1\..*down_proj", "scheme": "int2_channel"},
    ],
    "calibration_batches": 1,
}
FOLLOWED = {"scheme": "w4a16_g32", "weight_range": "absmax", "scales_follow_weights": True}
# fp8 attention beside experts in int4.
STATIC = {"rules": [{"layers": ".*self_attn.*", "scheme": "fp8_static"}], "calibration_batches": 1}
# Experts in fp8 and in two bits, to which the ranks send different tokens, beside kinds that MIXED has not.
MORE = {
    "scheme": "w4a16_channel",
    "rules": [
        {"layers": r".*\.0\..*experts.*", "scheme": "fp8_static"},
        {"layers": r".*\.1\..*experts.*", "scheme": "w2a16_g32"},
        {"layers": r".*\.0\..*(q|k|v)_proj", "scheme": "fp8_dynamic"},
        {"layers": r".*\.0\..*o_proj", "scheme": "w3a16_channel"},
        {"layers": r".*\.1\..*(q|k|v)_proj", "scheme": "int8_dynamic"},
    ],
    "calibration_batches": 1,
}
MANY = 8  # decoder layers, each with a scheme of its own


def every_scheme(names: Iterable[str] = SCHEMES) -> list[dict]:
    """Sections ``quant`` that together have all schemes of these names, each of them in a decoder layer of its own."""
    names = list(names)
    parts = [names[begin : begin + MANY] for begin in range(0, len(names), MANY)]
    return [
        {
            "scheme": part[0],
            "rules": [{"layers": rf"model\.layers\.{layer}\..*", "scheme": name} for layer, name in enumerate(part)],
            "calibration_batches": 1,
        }
        for part in parts
    ]


EXPORT = {"export": {"enabled": True}}
INT4 = {"quant": {"scheme": "w4a16_g32"}}
SELF = {"kd_weight": 1.0, "kd": "kl"}
PARTS = {"train": {**FEW, "steps": 2, "checkpoint_every": 2}, **INT4}
# name: kind, stage, dtype, what the recipe has beside LORA.
RUNS = {
    **{f"plain_{stage}": ("qwen3", stage, "float32", {}) for stage in (0, 3)},
    "mixed_3": ("qwen3", 3, "bfloat16", {"quant": MIXED, **EXPORT}),
    "followed_3": ("qwen3", 3, "bfloat16", {"quant": FOLLOWED, "learnable": {"weight_scale": False}, **EXPORT}),
    "later_3": (
        "qwen3",
        3,
        "bfloat16",
        {"quant": {**FOLLOWED, "scales_follow_weights": False, "fake_quant_start": 2}, "optim": {"scale_lr": 0.0}},
    ),
    "stacked_3": ("qwen3_moe", 3, "bfloat16", {"quant": {**FOLLOWED, **STATIC}, **EXPORT}),
    "more_3": ("qwen3_moe", 3, "bfloat16", {"quant": MORE, **EXPORT}),
    "plain_moe": ("qwen3_moe", 3, "float32", {}),
    "experts_3": ("qwen3_moe", 3, "bfloat16", {**INT4, "model": {"experts": "per_expert"}, **EXPORT}),
    "recomputed_3": ("qwen3", 3, "bfloat16", {**INT4, "train": {**FEW, "activation_checkpointing": True}}),
    "kept_3": ("qwen3", 3, "bfloat16", INT4),
    "self_2": ("qwen3", 2, "float32", {**INT4, "loss": {**SELF, "teacher": "self"}}),
    "teacher_2": ("qwen3", 2, "float32", {**INT4, "loss": SELF}),
    "straight_3": ("qwen3", 3, "bfloat16", {**INT4, "train": {**FEW, "steps": 4}}),
    "begun_3": ("qwen3", 3, "bfloat16", PARTS),
}
# They come with the large counts.
OTHERS = {
    **{f"plain_{stage}": ("qwen3", stage, "float32", {}) for stage in (1, 2)},
    **{f"mixed_{stage}": ("qwen3", stage, "bfloat16", {"quant": MIXED, **EXPORT}) for stage in (0, 1, 2)},
    **{f"more_{stage}": ("qwen3_moe", stage, "bfloat16", {"quant": MORE, **EXPORT}) for stage in (0, 1, 2)},
    "stacked_2": ("qwen3_moe", 2, "bfloat16", {"quant": {**FOLLOWED, **STATIC}, **EXPORT}),
    **{
        f"every_{part}_{stage}": (
            ("wide", "wide_moe")[(part + stage) % 2],
            stage,
            "bfloat16",
            {"quant": quant, "train": {"steps": 2}, **EXPORT},
        )
        for part, quant in enumerate(every_scheme())
        for stage in range(4)
    },
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One job for all of them."""
    directory = tmp_path_factory.mktemp("adapters")
    written = write_runs(directory, RUNS)
    resumed = {"steps": 4, "checkpoint_every": 2, "gradient_accumulation_steps": 2, "resume": True}
    sections = {**LORA, **INT4, "train": {**FEW, **resumed}, "output_dir": str(directory / "begun_3")}
    written["resumed_3"] = write_recipe(
        directory, "resumed_3", directory / "qwen3", directory / "chats.jsonl", stage=3, dtype="bfloat16", **sections
    )
    run_ranks(SCRIPT, *(f"used_weights:{path}" for path in written.values()))
    return written


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """One job likewise."""
    written = write_runs(tmp_path_factory.mktemp("others"), OTHERS)
    run_ranks(SCRIPT, *(f"used_weights:{path}" for path in written.values()))
    return written


def write_runs(directory, runs):
    """A recipe of each."""
    models = {kind: tiny_checkpoint(directory / kind, kind, even=True) for kind in ("qwen3", "qwen3_moe")}
    if any(kind.startswith("wide") for kind, *_ in runs.values()):
        for kind in ("qwen3", "qwen3_moe"):
            wide = kind.replace("qwen3", "wide")
            models[wide] = tiny_checkpoint(directory / wide, kind, wide=True, layers=MANY)
    chats = write_chats(directory / "chats.jsonl")
    written = {}
    for name, (kind, stage, dtype, sections) in runs.items():
        merged = {**LORA, **sections}
        for section in ("learnable", "optim"):
            merged[section] = {**LORA[section], **sections.get(section, {})}
        if name == "teacher_2":
            merged["loss"] = {**SELF, "teacher": str(models[kind])}
        written[name] = write_recipe(directory, name, models[kind], chats, stage=stage, dtype=dtype, **merged)
    return written


@pytest.mark.parametrize("name", (0, 3, "moe"))
def test_training_equals_a_plain_loop_on_every_stage(paths, name):
    """Dense on each, and on stage 3 stacked experts, to which the ranks send different tokens."""
    assert_equals_plain_loop(paths[f"plain_{name}"])


@pytest.mark.full
def test_the_rest_of_the_stages_are_alike(others):
    for stage in (1, 2):
        assert_equals_plain_loop(others[f"plain_{stage}"])
    every = [name for name in others if name.startswith("every_")]
    for name in ("stacked_2", *(f"{kind}_{stage}" for kind in ("mixed", "more") for stage in (0, 1, 2)), *every):
        assert_export_is_of_the_last_forward(others[name])
    assert_scales_are_those_of_the_sum(others["stacked_2"])


@pytest.mark.full
def test_training_equals_a_plain_loop_in_other_configurations(tmp_path):
    """Offload of the optimizer and of parameters, and hpZ, whose copies of what is frozen must be those of now."""
    model = tiny_checkpoint(tmp_path / "qwen3_moe", "qwen3_moe", even=True)
    chats = write_chats(tmp_path / "chats.jsonl")
    configurations = ("zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_hpz")  # hpZ last
    paths = []
    for shipped in configurations:
        ds_config = write_ds_config(tmp_path, f"every_{shipped}", shipped)
        sections = {**LORA, "deepspeed": ds_config}
        paths.append(write_recipe(tmp_path, shipped, model, chats, stage=3, dtype="float32", **sections))
    run_ranks(SCRIPT, *(f"none:{path}" for path in paths))
    for path in paths:
        assert_equals_plain_loop(path)


def test_adapters_and_scales_train_and_nothing_else(paths):
    source = AutoModelForCausalLM.from_pretrained(paths["mixed_3"].parent / "qwen3", dtype=torch.bfloat16).state_dict()
    found = load_result(paths["mixed_3"])
    assert set(found["groups"]) == {"weight_scales", "adapters"}
    for name, value in found["weights"].items():
        if name in source:
            assert torch.equal(value, source[name]), name
        elif name.endswith("lora_b"):
            assert value.any(), name
    trained = sum(found["weights"][name].numel() for name in found["optimized"] if "lora" in name)
    layers = [(64, 64), (64, 16), (64, 16), (64, 64), (64, 96), (64, 96)]  # q k v o gate up
    assert trained == 2 * (4 * sum(map(sum, layers)) + 6 * (96 + 64))


@pytest.mark.parametrize("name", ("mixed_3", "more_3", "followed_3", "experts_3", "stacked_3"))
def test_the_export_holds_what_the_last_forward_multiplied(paths, name):
    assert_export_is_of_the_last_forward(paths[name])


def assert_export_is_of_the_last_forward(path):
    """Codes and scales, of a model that has no adapter any more."""
    result = load_result(path)
    model, quantization = load_compressed(path.with_suffix("") / "export", dtype=torch.bfloat16)
    assert not [key for key in model.state_dict() if "lora" in key]
    assert quantization.layers.keys() == result["seen"]["used"].keys()
    for layer_name, layer in quantization.layers.items():
        layer.input_fake_quant = False
        with torch.no_grad():
            served = layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).t()
        used, scale = (result["seen"][key][layer_name] for key in ("used", "scales"))
        assert torch.equal(layer.weight_scale(), scale), layer_name
        assert torch.equal(served, used), layer_name


@pytest.mark.parametrize("name", ("followed_3", "stacked_3", "later_3"))
def test_scales_are_measured_from_the_sum(paths, name):
    """Where they follow the weights, and where fake quant starts after steps in which the adapters moved."""
    assert_scales_are_those_of_the_sum(paths[name])


def assert_scales_are_those_of_the_sum(path):
    weights = load_result(path)["weights"]
    layers = [key.removesuffix(".lora_a") for key in weights if key.endswith("lora_a")]
    for layer in [one for one in layers if "stacked" not in path.stem or "experts" in one]:
        base, lora_a, lora_b = (weights[f"{layer}.{key}"] for key in ("weight", "lora_a", "lora_b"))
        merged = merge(base, lora_a, lora_b, 8 / lora_a.shape[-2])
        of_sum, of_base = (one.float().unflatten(-1, (-1, 32)).abs().amax(-1) / 7.5 for one in (merged, base))
        s0 = weights[f"{layer}.weight_s0"]
        if path.stem == "later_3":  # a step was made since they were measured
            assert (s0 - of_sum).abs().mean() < (s0 - of_base).abs().mean(), layer
        else:
            torch.testing.assert_close(s0, of_sum, rtol=1e-6, atol=0)
        assert not torch.equal(s0, of_base), layer


def test_recomputed_layers_train_bit_for_bit_alike(paths):
    kept, recomputed = (load_result(paths[name]) for name in ("kept_3", "recomputed_3"))
    assert kept["losses"] == recomputed["losses"]
    assert all(torch.equal(value, recomputed["weights"][name]) for name, value in kept["weights"].items())


def test_the_student_without_adapter_is_the_teacher_that_it_was(paths):
    """Every loss is that of a second model with the base's weights, in fp32."""
    own, other = (load_result(paths[name])["losses"] for name in ("self_2", "teacher_2"))
    assert len(own) == FEW["steps"] and "loss/kd/kl" in own[0]
    for mine, theirs in zip(own, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_resumed_run_goes_on_bit_for_bit(paths):
    straight, resumed = load_result(paths["straight_3"]), load_result(paths["begun_3"])
    assert resumed["losses"] == straight["losses"][2:]
    for name, value in straight["weights"].items():
        assert torch.equal(value, resumed["weights"][name]), name
