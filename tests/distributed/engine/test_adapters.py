"""Adapters and decoupled scales, which are merged before the weight is quantized, trained on two ranks on every ZeRO
stage: against a plain loop, and the codes of the export against what the last forward multiplied."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from quant import SCHEMES
from quant.adapters import merge
from tests.distributed.engine.scripts.variants import used_weights
from tests.lib.plain import assert_equals_plain_loop, load_result
from tests.lib.variants import (
    EVEN,
    NO_TEACHER,
    Variant,
    assert_export_is_of_the_last_forward,
    assert_same_run,
    each,
    runs_of,
    start_of,
)

MOE = "qwen3_moe even"
FEW = {"steps": 3, "gradient_accumulation_steps": 2}
LORA = {
    "adapter": {"kind": "lora", "rank": 4, "alpha": 8.0, "ranks": {".*down_proj": 6}},
    "learnable": {"weight": False},
    "optim": {"lr": 1e-2, "scale_lr": 1e-2},
    "loss": NO_TEACHER,
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


def adapted(stage: int, kind: str = EVEN, dtype: str = "bfloat16", shipped: str = "", **sections: Any) -> Variant:
    merged = {name: {**values, **sections.pop(name, {})} for name, values in LORA.items()}
    return Variant({"stage": stage, **merged, **sections}, kind, dtype, used_weights, shipped)


def decoupled(stage: int, kind: str = EVEN, dtype: str = "bfloat16", **quant: Any) -> Variant:
    sections = {name: LORA[name] for name in ("learnable", "optim", "loss", "train")}
    quant = {"scheme": "mxfp4_w4a4", **quant, "decoupled_scales": True}
    return Variant({"stage": stage, **sections, "quant": quant, **EXPORT}, kind, dtype, used_weights)


EXPORT = {"export": {"enabled": True}}
WATCHED = {"quant_stats_every": 2}
INT4 = {"quant": {"scheme": "w4a16_g32"}}
SELF = {"kd_weight": 1.0, "kd": "kl"}
LATER = {**FOLLOWED, "scales_follow_weights": False, "fake_quant_start": 2}
PER_EXPERT = {"model": {"experts": "per_expert"}}


def runs(directory: Path) -> dict[str, Variant]:
    return {
        "plain_0": adapted(0, dtype="float32"),
        "plain_3": adapted(3, dtype="float32"),
        "plain_moe": adapted(3, MOE, "float32"),
        "mixed": adapted(3, quant=MIXED, train=WATCHED, **EXPORT),
        "followed": adapted(3, quant=FOLLOWED, learnable={"weight_scale": False}, **EXPORT),
        "later": adapted(3, quant=LATER, optim={"scale_lr": 0.0}),
        "stacked": adapted(3, MOE, quant={**FOLLOWED, **STATIC}, train=WATCHED, **EXPORT),
        "more": adapted(3, MOE, quant=MORE, **EXPORT),
        "experts": adapted(3, MOE, **INT4, **PER_EXPERT, **EXPORT),
        "self": adapted(2, dtype="float32", **INT4, loss={**SELF, "teacher": "self"}),
        "teacher": adapted(2, dtype="float32", **INT4, loss={**SELF, "teacher": f"{directory}/model-qwen3-even"}),
        "stored": adapted(3, **INT4),
        "recomputed": adapted(3, **INT4, train={"activation_checkpointing": True}),
        "plain_decoupled": decoupled(3, dtype="float32"),
        "plain_decoupled_moe": decoupled(3, MOE, "float32", scheme="nvfp4"),
        "decoupled": decoupled(3, **MIXED),
        "decoupled_moe": decoupled(3, MOE, **MORE),
    }


# They come with the large counts. Offload of the optimizer and of parameters, and hpZ, whose copies of what is frozen
# must be those of now.
OTHERS = {
    **{f"plain_{stage}": adapted(stage, dtype="float32") for stage in (1, 2)},
    **{f"mixed_{stage}": adapted(stage, quant=MIXED, **EXPORT) for stage in (0, 1, 2)},
    **{f"plain_decoupled_{stage}": decoupled(stage, dtype="float32") for stage in (0, 1, 2)},
    **{f"decoupled_{stage}": decoupled(stage, **MIXED) for stage in (0, 1, 2)},
    **{f"more_{stage}": adapted(stage, MOE, quant=MORE, **EXPORT) for stage in (0, 1, 2)},
    "stacked_2": adapted(2, MOE, quant={**FOLLOWED, **STATIC}, **EXPORT),
    **{
        f"every_{part}_{stage}": adapted(
            stage,
            ("qwen3", "qwen3_moe")[(part + stage) % 2] + f" wide layers={MANY}",
            quant=quant,
            train={"steps": 2},
            **EXPORT,
        )
        for part, quant in enumerate(every_scheme())
        for stage in range(4)
    },
    **{
        f"plain_{shipped}": adapted(3, MOE, "float32", shipped)
        for shipped in ("zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_hpz")
    },
}


paths = runs_of(runs, OTHERS)
PLAIN = [name for name in OTHERS if name.startswith("plain")]


@each(["plain_0", "plain_3", "plain_moe", "plain_decoupled", "plain_decoupled_moe"], PLAIN)
def test_training_equals_a_plain_loop(paths, name):
    """Dense, and on stage 3 stacked experts, to which the ranks send different tokens."""
    assert_equals_plain_loop(paths[name])


def test_adapters_and_scales_train_and_nothing_else(paths):
    found, source = load_result(paths["mixed"]), start_of(paths["mixed"])
    assert set(found["groups"]) == {"weight_scales", "adapters"}
    for name, value in found["weights"].items():
        if name in source:
            assert torch.equal(value.float(), source[name]), name
        elif name.endswith("lora_b"):
            assert value.any(), name
    trained = sum(found["weights"][name].numel() for name in found["optimized"] if "lora" in name)
    layers = [(64, 64), (64, 16), (64, 16), (64, 64), (64, 96), (64, 96)]  # q k v o gate up
    assert trained == 2 * (4 * sum(map(sum, layers)) + 6 * (96 + 64))


@each(["mixed", "more", "followed", "experts", "stacked", "decoupled", "decoupled_moe"], sorted(OTHERS.keys() - PLAIN))
def test_the_export_holds_what_the_last_forward_multiplied(paths, name):
    assert_export_is_of_the_last_forward(paths[name])


@each(["decoupled", "decoupled_moe", "plain_decoupled"], [])
def test_both_scales_train_and_nothing_else(paths, name):
    found, source = load_result(paths[name]), start_of(paths[name])
    assert set(found["groups"]) == {"weight_scales"}
    assert {name.rpartition(".")[2] for name in found["optimized"]} == {"weight_theta", "code_theta"}
    thetas = [value for name, value in found["weights"].items() if name.endswith("code_theta")]
    assert thetas and all(value.any() for value in thetas)
    assert all(torch.equal(found["weights"][name].float(), value) for name, value in source.items())


@each(["followed", "stacked", "later"], ["stacked_2"])
def test_scales_are_measured_from_the_sum(paths, name):
    """If scales follow the weights, and if fake quant starts after steps in which the adapters moved."""
    path = paths[name]
    weights = load_result(path)["weights"]
    layers = [key.removesuffix(".lora_a") for key in weights if key.endswith("lora_a")]
    for layer in [one for one in layers if "stacked" not in path.stem or "experts" in one]:
        base, lora_a, lora_b = (weights[f"{layer}.{key}"] for key in ("weight", "lora_a", "lora_b"))
        merged = merge(base, lora_a, lora_b, 8 / lora_a.shape[-2])
        of_sum, of_base = (one.float().unflatten(-1, (-1, 32)).abs().amax(-1) / 7.5 for one in (merged, base))
        s0 = weights[f"{layer}.weight_s0"]
        if path.stem == "later":  # a step was made since they were measured
            assert (s0 - of_sum).abs().mean() < (s0 - of_base).abs().mean(), layer
        else:
            torch.testing.assert_close(s0, of_sum, rtol=1e-6, atol=0)
        assert not torch.equal(s0, of_base), layer


def test_recomputed_runs_train_bit_for_bit_alike(paths):
    assert_same_run(load_result(paths["recomputed"]), load_result(paths["stored"]))


def test_the_student_without_adapter_is_the_teacher_that_it_was(paths):
    """Every loss is that of a second model with the base's weights, in fp32."""
    own, other = (load_result(paths[name])["losses"] for name in ("self", "teacher"))
    assert len(own) == FEW["steps"] and "loss/kd/kl" in own[0]
    for mine, theirs in zip(own, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
