"""Training on two ranks against a plain PyTorch loop in one process, and stage against stage.

Losses and weights are compared step by step in fp32, where an error in a collective, a denominator or a gradient shows
in the first digits and rounding later; and in bf16, the way users train, stage against stage.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from data.loader import valid_tokens
from engine.config.reading import load_recipe
from engine.session.optimizer import LossScale
from launch import study
from tests.lib.plain import assert_equals_plain_loop, inputs_of, load_result, plain_loaders, plain_weights
from tests.lib.variants import DROPOUT, EVEN, NO_TEACHER, Variant, assert_same_run, changed, each, runs_of

TWICE = {"quant_stats_every": 2}  # two looks at the quantization in five steps
# Doubles twice in five steps, and overflows in none.
GROWING = {"fp16": {"initial_scale_power": 10, "loss_scale_window": 2}}
OVERFLOWING = {"fp16": {"initial_scale_power": 20, "loss_scale_window": 2}}


def stages(model: str, chosen: tuple[int, ...], dtypes: tuple[str, ...]) -> dict[str, Variant]:
    return {
        f"{model}-{stage}-{dtype}": Variant({"stage": stage, "train": TWICE}, model, dtype)
        for stage in chosen
        for dtype in dtypes
    }


def half(stage: int) -> dict[str, Variant]:
    """In fp16, with a loss scale that grows and with one that is too large."""
    long = {"steps": 8, "max_skipped_steps": 1}
    options = {"model": DENSE, "dtype": "float16", "shipped": f"zero{stage}"}
    return {
        f"{DENSE}-{stage}-float16": Variant({"stage": stage, "train": TWICE}, **options, ds=GROWING),
        f"{DENSE}-{stage}-overflow": Variant({"stage": stage, "train": long}, **options, ds=OVERFLOWING),
    }


DENSE, MOE = "qwen3 tied", "qwen3_moe"
BOTH = ("float32", "bfloat16")
CODED = {"stage": 3, "train": TWICE, "quant": {"calibration_batches": 2, "quantized_all_gather": True}}
# The rest comes with the large counts: 2 is 1 with gradients in partitions.
RUNS = {
    **stages(DENSE, (0, 1, 3), BOTH),
    **stages(MOE, (3,), ("float32",)),
    **half(3),
    # With learned scales, whose gradients are then summed up after the reduction.
    "coded": Variant(CODED, MOE),
    # Layers are gathered as codes, lm_head is not, since its weight is also looked up.
    "tied": Variant({**CODED, "quant": {**CODED["quant"], "embedding": "w8a16_channel", "lm_head": "tied"}}, DENSE),
    # As users name it: small parameters stay gathered between steps.
    "offload": Variant({"stage": 3, "deepspeed": "zero3_offload"}, "llama"),
    "offload_param": Variant({"stage": 3}, "llama", shipped="zero3_offload_param"),
    "hpz": Variant({"stage": 3, "train": TWICE}, "llama", shipped="zero3_hpz"),
}
MIXED = {
    "scheme": "w4a16_g32",
    "weight_range": "absmax",
    "rules": [{"first": 1, "scheme": "w8a16_channel"}, {"layers": ".*down_proj", "scheme": "none"}],
    "lm_head": "w8a16_channel",
    "embedding": "w4a16_g32",
}
FOLLOWING = {"scheme": "w3a16_g32", "weight_range": "absmax", "scales_follow_weights": True}
SHIFTED = {"weights": {"dtype": "int", "bits": 3, "granularity": "group", "group_size": 32, "symmetric": False}}
ROTATED = {"scheme": "mxfp4_mxfp8", "rotate": [r".*\.o_proj"], "rotate_block": 64, "keep_codes": True}


def scheme(stage: int, quant: dict[str, Any], **sections: Any) -> Variant:
    return Variant({"stage": stage, "quant": quant, **sections, "train": {**TWICE, **sections.get("train", {})}}, EVEN)


SCHEMES = {
    "mixed-0": scheme(0, MIXED),
    "mixed-3": scheme(3, MIXED),
    "tied-1": Variant({"stage": 1, "quant": {**MIXED, "lm_head": "tied"}}, f"{DENSE} even"),
    "clipping-1": scheme(1, FOLLOWING),
    "clipping-3": scheme(3, FOLLOWING),
    "shifted-3": scheme(3, {**FOLLOWING, "scheme": "shifted", "schemes": {"shifted": SHIFTED}}),
    "absmax-2": scheme(2, FOLLOWING, learnable={"weight_scale": False}),
    # Its statistics need the global scales that no rank holds whole.
    "nvfp4-3": scheme(3, {"scheme": "nvfp4"}),
    # Global scales of inputs are measured over both ranks' batches; the scales below them follow every token.
    "nvfp4-inputs-3": scheme(3, {"scheme": "nvfp4_w4a4", "calibration_batches": 2}),
    "nvfp4-inputs-1": scheme(1, {"scheme": "nvfp4_w4a4", "calibration_batches": 2, "keep_codes": True}),
    # Weights are turned before their scales are measured, inputs of 64 = 2 x 32 in one block, also when recomputed.
    "rotated-3": scheme(3, ROTATED, train={"activation_checkpointing": True}),
    "rotated-1": scheme(1, ROTATED),
    "signed-3": scheme(3, {"scheme": "w2a16_g32", "weight_range": "absmax", "signed_scales": True}),
}
MORE = {**stages(DENSE, (2,), BOTH), **stages(MOE, (0, 1, 2, 3), BOTH), **half(0), **SCHEMES}
MORE = {name: variant for name, variant in MORE.items() if name not in RUNS}


FIXED = {"weight": False, "weight_scale": False}
# Scales that clip part of every input, or an fp8 input scale may have nothing to learn.
CLIPPING = {"calibration_batches": 0, "initial_input_scale": 2e-4}
STATIC_KV = {**CLIPPING, "scheme": "fp8_static_kv"}
ROUTER = {
    "stage": 3,
    "learnable": {"weight_scale": False, "router": True},
    "quant": {"fake_quant_start": -1},
    "train": {"steps": 3},
    "loss": NO_TEACHER,
}
# What launch/study.py takes as it is, without training: a plain model that learns its own logits alone.
ITSELF = {
    "stage": 2,
    "quant": {"fake_quant_start": -1},
    "optim": {"weight_decay": 0.0, "warmup_steps": 0},
    "loss": {"lm_weight": 0.0},
    "train": {"steps": 2},
}


# Scales of weights and inputs alone, which follow the model itself.
SCALES_ONLY = {
    "stage": 3,
    "quant": CLIPPING,
    "learnable": {"weight": False, "weight_scale": True, "act_scale": True},
    "optim": {"scale_lr": 1e-3, "warmup_steps": 0},
    "loss": {"lm_weight": 0.0, "kd_weight": 1.0, "teacher": "self"},
    "train": {"steps": 3, "activation_checkpointing": True},
}
LEARNABLE = {
    "scalesonly": Variant(SCALES_ONLY, dtype="bfloat16"),
    "onlynorm": Variant({"stage": 2, "learnable": {**FIXED, "norm": True}, "train": {"steps": 2}}),
    "onlyact": Variant(
        {"stage": 1, "learnable": {**FIXED, "act_scale": True}, "train": {"steps": 2}, "quant": CLIPPING}
    ),
    **{
        f"onlykv-{stage}": Variant(
            {"stage": stage, "learnable": {**FIXED, "kv_scale": True}, "train": {"steps": 2}, "quant": STATIC_KV}
        )
        for stage in range(4)
    },
    "noembed": Variant({"stage": 3, "learnable": {"embedding": False}, "train": {"steps": 2}}),
    "router": Variant(ROUTER, MOE),
    "router_recomputed": Variant({**ROUTER, "train": {"steps": 3, "activation_checkpointing": True}}, MOE),
    "recomputed": Variant({"stage": 2, "train": {"activation_checkpointing": True, "steps": 3}}),
    "stored": Variant({"stage": 2, "train": {"steps": 3}}),
    "itself": Variant(ITSELF, dtype="bfloat16"),
    "itself_dropping": Variant(ITSELF, DROPOUT, dtype="bfloat16"),
}


paths = runs_of(LEARNABLE | RUNS, MORE)
FP32, MORE_FP32, BF16, MORE_BF16 = (
    [name for name, run in runs.items() if run.dtype == dtype and "-1-bf" not in name]
    for dtype in BOTH
    for runs in (RUNS, MORE)
)


@each(FP32, MORE_FP32)
def test_every_step_equals_a_plain_one(paths, name):
    assert_equals_plain_loop(paths[name])


def test_deepspeed_prints_no_lines_about_memory(paths):
    assert "Max_MA" not in paths.said()


@each(BF16, MORE_BF16)
def test_bf16_stages_differ_less_from_stage_1_than_bf16_from_fp32(paths, name):
    """Stages add bf16 gradients up in different orders, so they differ; what bf16 itself costs is the measure."""
    exact, first = (load_result(paths[f"{name.partition('-')[0]}-1-{dtype}"]) for dtype in BOTH)
    found = load_result(paths[name])
    for what in ("losses", "weights"):
        assert distance(found, first, what) < distance(first, exact, what), what


def distance(a: dict[str, Any], b: dict[str, Any], what: str) -> float:
    """Largest difference of the total loss over the steps, or mean difference of the trained weights."""
    if what == "losses":
        return max(abs(x["loss/total"] - y["loss/total"]) for x, y in zip(a["losses"], b["losses"], strict=True))
    differences = [
        (a["weights"][name].float() - b["weights"][name].float()).abs().flatten() for name in a["requires_grad"]
    ]
    return float(torch.cat(differences).mean())


@each([f"{DENSE}-3"], [f"{DENSE}-0"])
def test_fp16_trains_as_fp32_does_and_leaves_out_what_overflows(paths, name):
    """The norms of all gradients, clipped later, and of the scales' are without it: within what 16 bits cost (2% and
    35%), where an error in the loss scale is a factor of 2, or of 1024."""
    exact, rounded = (load_result(paths[f"{DENSE}-1-{dtype}"]) for dtype in BOTH)
    found = load_result(paths[f"{name}-float16"])
    assert found["skipped"][-1] == 0
    assert found["loss_scales"] == [2.0**10, 2.0**10, 2.0**11, 2.0**11, 2.0**12]
    assert found["norms"] == pytest.approx(exact["norms"], rel=0.1)
    # Later an fp8 scale hardly has a value that teaches it: those that were subnormal have grown.
    assert found["scale_norms"][1] == pytest.approx(exact["scale_norms"][1], rel=0.8)
    assert distance(found, exact, "weights") < distance(rounded, exact, "weights")

    path = paths[f"{name}-overflow"]
    found, settings = load_result(path), load_recipe(path)
    assert len(found["losses"]) == settings.train.steps  # although one step without a lower scale would end the run
    counts = [0, *found["skipped"]]
    overflows = [later > before for before, later in itertools.pairwise(counts)]
    assert overflows[:2] == [True, True] and not all(overflows)
    scale = LossScale.from_config(OVERFLOWING["fp16"])
    for own, overflow in zip(found["loss_scales"], overflows, strict=True):
        assert own == scale.value
        scale.stepped(overflow=overflow)
    assert any(later > before for before, later in itertools.pairwise(found["loss_scales"]))
    start = dict(plain_weights(settings.model.path).half().named_parameters())
    before = {name: start.get(name, torch.zeros_like(value)) for name, value in found["after"][0].items()}
    for overflow, after in zip(overflows, found["after"], strict=True):
        moved = {n for n, value in after.items() if not n.endswith("_s0") and not torch.equal(value, before[n])}
        assert all(value.isfinite().all() for value in after.values())
        assert bool(moved) != overflow
        before = after
    assert found["losses"][-1]["loss/lm"] < found["losses"][0]["loss/lm"]


@each(RUNS)
def test_nothing_is_skipped_and_scales_take_little_of_the_norm_that_clips(paths, name):
    """Under 1% of it, so that clipping the whole gradient does not throttle the weights for the scales' sake."""
    found = load_result(paths[name])
    assert found["inv_freq"] and set(found["inv_freq"].values()) == {torch.float32}
    assert found["skipped"][-1] == 0 or "overflow" in name
    if RUNS[name].sections.get("train") == TWICE and not name.endswith(("0-float32", "float16")):  # 0 has no norms
        norms = zip(found["scale_norms"], found["norms"], strict=True)
        measured = [(scales, whole) for scales, whole in norms if scales]
        assert len(measured) == len(found["norms"]) // 2
        assert all(scales < 0.01 * whole for scales, whole in measured), measured


@each(FP32)
def test_exactly_what_is_learnable_trains(paths, name):
    """Defaults: weights and weight scales. Norms, routers and initial scales keep their values, all else moves."""
    found = load_result(paths[name])
    frozen = {
        name
        for name in found["weights"]
        if "norm" in name or name.endswith("mlp.gate.weight") or name.rpartition(".")[2].endswith("_s0")
    }
    assert set(found["requires_grad"]) == found["weights"].keys() - frozen == changed(paths[name])
    assert found["groups"] == ["weights", "embeddings", "weight_scales"]


@pytest.mark.full
def test_what_is_quantized_and_what_moves(paths):
    """lm_head and embeddings have scales that train, one down_proj has none; scales that follow change in every step,
    and signed ones have both signs."""
    mixed = load_result(paths["mixed-3"])
    assert {"lm_head", "model.embed_tokens"} <= mixed["scales"].keys()
    assert not any("layers.1.mlp.down_proj" in name for name in mixed["scales"])
    for name in ("lm_head", "model.embed_tokens"):
        assert mixed["weights"][f"{name}.weight_theta"].any(), name
    clipping = load_result(paths["clipping-3"])
    name = "model.layers.1.mlp.up_proj"
    starts = [step[f"{name}.weight_s0"] for step in clipping["after"]]
    # The first step of the warm-up moves by half a learning rate, which shows in every absmax.
    assert all((a != b).float().mean() > 0.9 for a, b in itertools.pairwise(starts))
    assert clipping["weights"][f"{name}.weight_theta"].any()
    shifted = [step[f"{name}.weight_zero"] for step in load_result(paths["shifted-3"])["after"]]
    assert shifted[0].unique().numel() > 2 and not torch.equal(shifted[0], shifted[-1]), "zero points follow as well"
    assert not any(key.endswith("weight_theta") for key in load_result(paths["absmax-2"])["weights"])
    signs = torch.cat([scale.sign().flatten() for scale in load_result(paths["signed-3"])["scales"].values()])
    assert 0.3 < (signs < 0).float().mean() < 0.7


# ---------------------------------------------------------------------------------------------------------------------
# What trains is what the recipe names: weights, scales, norms, embeddings, the router; with recomputation too
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pattern", "groups"),
    [
        ("scalesonly", ("weight_theta", "input_theta"), ["weight_scales", "act_scales"]),
        ("onlynorm", ("norm.weight",), ["norms"]),
        ("onlyact", ("input_theta",), ["act_scales"]),
        *((f"onlykv-{stage}", ("k_cache.input_theta", "v_cache.input_theta"), ["act_scales"]) for stage in range(4)),
        ("noembed", ("proj.weight", "weight_theta"), ["weights", "weight_scales"]),
    ],
)
def test_exactly_what_is_learnable_is_in_the_optimizer_and_changes(paths, name, pattern, groups):
    found = load_result(paths[name])
    expected = {key for key in found["weights"] if key.endswith(pattern)}
    assert len(expected) >= 4 and set(found["requires_grad"]) == expected
    assert set(found["optimized"]) == expected
    assert changed(paths[name]) == expected
    assert found["groups"] == groups
    if name == "scalesonly":  # the distillation loss alone, from the first step on
        losses = found["losses"][0]
        assert set(losses) == {"loss/total", "loss/lm", "loss/kd/cakld"}
        assert losses["loss/total"] == losses["loss/kd/cakld"] > 0


def test_a_trainable_router_adds_the_auxiliary_loss_of_transformers(paths):
    """``LossFn + router_aux_loss_coef * aux`` is what transformers trains on; here of a fused model of its own."""
    found = load_result(paths["router"])
    assert any("mlp.gate.weight" in name for name in found["requires_grad"])
    assert {name for name in changed(paths["router"]) if name.endswith("mlp.gate.weight")}
    settings = load_recipe(paths["router"])
    model = AutoModelForCausalLM.from_pretrained(
        settings.model.path, dtype=torch.float32, experts_implementation="eager"
    )
    batches = [batch for loader in plain_loaders(settings) for batch in loader.step(0)]
    aux, lm = 0.0, 0.0
    for batch in batches:
        with torch.no_grad():
            output = model(**inputs_of(batch), output_router_logits=True)
        aux += float(output.aux_loss) * model.config.router_aux_loss_coef * valid_tokens([batch])
        lm += float(F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"))
    first, valid = found["losses"][0], valid_tokens(batches)
    assert first["loss/router_aux"] == pytest.approx(aux / valid, rel=1e-5)
    assert first["loss/lm"] == pytest.approx(lm / valid, rel=1e-5)
    assert first["loss/total"] == pytest.approx((lm + aux) / valid, rel=1e-5)


def test_a_model_that_learns_its_own_logits_moves_where_training_drops_values_alone(paths):
    """The student is in training mode, the teacher is not."""
    assert not changed(paths["itself"]) and load_result(paths["itself"])["losses"][0]["loss/total"] == 0
    assert changed(paths["itself_dropping"])
    for name in ("itself", "itself_dropping"):
        recipe = load_recipe(paths[name])
        assert study.teaches_itself(recipe) == (name == "itself")


@pytest.mark.parametrize(("stored", "recomputed"), [("router", "router_recomputed"), ("stored", "recomputed")])
def test_activation_checkpointing_changes_no_bit(paths, stored, recomputed):
    assert_same_run(load_result(paths[recomputed]), load_result(paths[stored]), skip=("_s0",))
