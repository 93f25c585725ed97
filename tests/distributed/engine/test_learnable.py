"""What trains is what the recipe names: weights, scales, norms, embeddings, the router; with recomputation too."""

import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM

from data.loader import valid_tokens
from engine.config.reading import load_recipe
from launch import study
from tests.lib.plain import inputs_of, load_result, plain_loaders
from tests.lib.root import ROOT
from tests.lib.variants import DROPOUT, NO_TEACHER, Variant, changed, run_variants

FIXED = {"weight": False, "weight_scale": False}
# Scales that clip part of every input, or an fp8 input scale may have nothing to learn.
CLIPPING = {"calibration_batches": 0, "initial_input_scale": 2e-4}
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


def scales_only() -> dict:
    """The shipped recipe of frozen weights, made small."""
    shipped = yaml.safe_load((ROOT / "launch/recipes/qwen3_4b_fp8_scales_only.yaml").read_text())
    assert set(shipped) == {"model", "quant", "learnable", "data", "optim", "loss", "train", "deepspeed", "output_dir"}
    small = {"steps": 3, "gradient_accumulation_steps": 2}
    return {
        "stage": 3,
        "quant": {**shipped["quant"], **CLIPPING},
        "learnable": shipped["learnable"],
        "optim": {**shipped["optim"], "warmup_steps": 0},
        "loss": {key: value for key, value in shipped["loss"].items() if key != "teacher"},
        "train": {**shipped["train"], **small},
    }


RUNS = {
    "scalesonly": Variant(scales_only(), dtype="bfloat16"),
    "onlynorm": Variant({"stage": 2, "learnable": {**FIXED, "norm": True}, "train": {"steps": 2}}),
    "onlyact": Variant(
        {"stage": 1, "learnable": {**FIXED, "act_scale": True}, "train": {"steps": 2}, "quant": CLIPPING}
    ),
    "noembed": Variant({"stage": 3, "learnable": {"embedding": False}, "train": {"steps": 2}}),
    "router": Variant(ROUTER, "qwen3_moe"),
    "router_recomputed": Variant(
        {**ROUTER, "train": {**ROUTER["train"], "activation_checkpointing": True}}, "qwen3_moe"
    ),
    "recomputed": Variant({"stage": 2, "train": {"activation_checkpointing": True, "steps": 3}}),
    "stored": Variant({"stage": 2, "train": {"steps": 3}}),
    "itself": Variant(ITSELF, dtype="bfloat16"),
    "itself_dropping": Variant(ITSELF, DROPOUT, dtype="bfloat16"),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One launch for all runs."""
    return run_variants(tmp_path_factory.mktemp("learnable"), RUNS)


@pytest.mark.parametrize(
    ("name", "pattern", "groups"),
    [
        ("scalesonly", ("weight_theta", "input_theta"), ["weight_scales", "act_scales"]),
        ("onlynorm", ("norm.weight",), ["norms"]),
        ("onlyact", ("input_theta",), ["act_scales"]),
        ("noembed", ("proj.weight", "weight_theta"), ["weights", "weight_scales"]),
    ],
)
def test_exactly_what_is_learnable_is_in_the_optimizer_and_changes(paths, name, pattern, groups):
    found = load_result(paths[name])
    expected = {key for key in found["weights"] if key.endswith(pattern)}
    assert len(expected) >= 8 and set(found["requires_grad"]) == expected
    assert set(found["optimized"]) == expected
    assert changed(paths[name]) == expected
    assert found["groups"] == groups


def test_scales_only_lowers_the_distillation_loss_from_its_first_step_on(paths):
    losses = load_result(paths["scalesonly"])["losses"]
    assert set(losses[0]) == {"loss/total", "loss/lm", "loss/kd/cakld"}
    assert losses[0]["loss/total"] == losses[0]["loss/kd/cakld"] > 0


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
    expected, found = load_result(paths[stored]), load_result(paths[recomputed])
    assert found["losses"] == expected["losses"] and found["norms"] == expected["norms"]
    for name, weight in expected["weights"].items():
        assert name.endswith("_s0") or torch.equal(found["weights"][name], weight), name
