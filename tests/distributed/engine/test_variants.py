"""What a recipe can switch on beside the defaults, and what a user's schedule can do: many small runs in one launch."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.chat import read_chat
from data.held_out import split
from data.loader import valid_tokens
from engine.checkpoint.save import best_checkpoint
from engine.losses.kd import KD_KINDS
from engine.recipe.reading import load_recipe
from quant import SCHEMES, Ranges
from quant.reference import absmax_scale, fake_quant
from tests.definitions import kd_loss
from tests.distributed.engine.scripts.variants import POISONED
from tests.distributed.launcher import run_ranks
from tests.distributed.plain import (
    QUANTIZED_RTOL,
    assert_equals_plain_loop,
    inputs_of,
    load_result,
    plain_loaders,
    plain_model,
    plain_weights,
)
from tests.distributed.recipes import write_chats, write_ds_config, write_recipe
from tests.root import ROOT
from tests.tiny import TEXT, tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "variants.py"
FIXED = {"weight": False, "weight_scale": False}
# Scales that clip part of every input, or an fp8 input scale may have nothing to learn.
CLIPPING = {"calibration_batches": 0, "initial_input_scale": 2e-4}
PLAIN = {"kd_weight": 0.0, "teacher": None}
ROUTER = {
    "stage": 3,
    "learnable": {"weight_scale": False, "router": True},
    "quant": {"fake_quant_start": -1},
    "train": {"steps": 3},
    "loss": PLAIN,
}
SWITCH = {
    "quant": {"fake_quant_start": 2, "calibration_batches": 0},
    "learnable": {"act_scale": True},
    "loss": PLAIN,
}
INTEGER = {"loss": PLAIN, "train": {"steps": 3, "quant_stats_every": 1}, "optim": {"lr": 1e-2}}
FIRST_LAYER = r"model\.layers\.0\..*"
EVENTS = {
    "quant": {"calibration_batches": 0, "fake_quant_start": 0, "initial_input_scale": 2e-4},
    "learnable": {"act_scale": True, "norm": True},
    "optim": {"schedule": "constant", "warmup_steps": 0, "norm_lr": 0.0, "embedding_lr": 1e-4, "act_scale_lr": 1e-3},
    "loss": PLAIN,
    "train": {"steps": 9, "gradient_accumulation_steps": 1, "quant_stats_every": 1},
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
HELD_OUT = {
    "data": {"held_out": 7, "max_length": 128, "micro_batch_size": 2},
    "learnable": {"act_scale": True},
    "optim": {"schedule": "constant", "lr": 3e-2, "warmup_steps": 0},
    "schedule": [{"at": 0, "fake_quant": False}, {"at": 2, "fake_quant": "weights"}, {"at": 3, "fake_quant": True}],
    "train": {"steps": 5, "checkpoint_every": 1, "keep_checkpoints": 1},
    "eval": {"every": 1, "best": "total"},
}
UNSEEN = {"eval": {"every": 0}, "train": {"steps": 5}}
CALIBRATED = {"stage": 3, "loss": PLAIN, "train": {"steps": 2}}
PACKED = {"data": {"packing": True, "micro_batch_size": 1}}
KV = {**SWITCH, "quant": {**SWITCH["quant"], "scheme": "fp8_static_kv"}, "train": {"steps": 4}}
# Keys and values alone, clipped.
ONLY_KV = {
    "stage": 3,
    "quant": {"scheme": "fp8_kv", "calibration_batches": 0, "initial_input_scale": 1e-3},
    "learnable": {"weight_scale": False, "act_scale": True},
    "data": {"packing": True},
    "train": {"steps": 2, "activation_checkpointing": True},
    "loss": PLAIN,
}
POISON = {"train": {"steps": 3, "gradient_accumulation_steps": 1}, "loss": PLAIN, "optim": {"lr": 1e-2}}


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


# name: model, dtype, and the sections of its recipe.
RUNS = {
    "scalesonly": ("qwen3", "bfloat16", scales_only()),
    "onlynorm": ("qwen3", "float32", {"stage": 2, "learnable": {**FIXED, "norm": True}, "train": {"steps": 2}}),
    "onlyact": (
        "qwen3",
        "float32",
        {"stage": 1, "learnable": {**FIXED, "act_scale": True}, "train": {"steps": 2}, "quant": CLIPPING},
    ),
    "noembed": ("qwen3", "float32", {"stage": 3, "learnable": {"embedding": False}, "train": {"steps": 2}}),
    "router": ("qwen3_moe", "float32", ROUTER),
    "router_recomputed": (
        "qwen3_moe",
        "float32",
        {**ROUTER, "train": {**ROUTER["train"], "activation_checkpointing": True}},
    ),
    "recomputed": ("qwen3", "float32", {"stage": 2, "train": {"activation_checkpointing": True, "steps": 3}}),
    "stored": ("qwen3", "float32", {"stage": 2, "train": {"steps": 3}}),
    "losses": (
        "qwen3",
        "float32",
        {"stage": 3, "optim": {"lr": 0.0, "scale_lr": 0.0}, "train": {"steps": len(KD_KINDS)}},
    ),
    "fields": ("qwen3", "float32", {"stage": 3, "train": {"steps": 2}}),
    "text": ("qwen3", "float32", {"stage": 2, "train": {"steps": 2}, "loss": PLAIN}),
    "packed": (
        "qwen3",
        "float32",
        {"stage": 3, "train": {"steps": 2, "activation_checkpointing": True}, "data": {"packing": True}},
    ),
    **{f"switch_{stage}": ("qwen3", "float32", {**SWITCH, "stage": stage}) for stage in range(4)},
    "switch_w4": ("even", "bfloat16", {**INTEGER, "stage": 3, "quant": {"fake_quant_start": 2, "scheme": "w4a16_g32"}}),
    "switch_w2": ("even", "bfloat16", {**INTEGER, "stage": 3, "quant": {"fake_quant_start": 2, "scheme": "w2a16_g32"}}),
    **{
        f"off_{stage}": ("qwen3", "float32", {"stage": stage, "loss": PLAIN, "optim": {"schedule": "constant"}})
        for stage in range(4)
    },
    # All samples calibrate: of the packed rows a rank has several samples, others than the other rank has.
    "calibrated_padded": ("qwen3", "bfloat16", {**CALIBRATED, "quant": {"calibration_batches": 12}}),
    "calibrated_packed": ("qwen3", "bfloat16", {**CALIBRATED, **PACKED, "quant": {"calibration_batches": 16}}),
    "eventually": (
        "qwen3",
        "bfloat16",
        {
            "stage": 3,
            "loss": PLAIN,
            "quant": {"fake_quant_start": -1},
            "train": {"steps": 3, "quant_stats_every": 0},
            "schedule": [{"at": 2, "fake_quant": True}],
            "export": {"enabled": True},
        },
    ),
    "off_bf16": ("qwen3", "bfloat16", {"stage": 0, "loss": PLAIN, "optim": {"schedule": "constant"}}),
    **{f"events_{stage}": ("qwen3", "float32", {**EVENTS, "stage": stage}) for stage in range(4)},
    **{f"kv_{stage}": ("qwen3", "float32", {**KV, "stage": stage}) for stage in (2, 3)},
    "onlykv": ("qwen3_moe", "float32", ONLY_KV),
    "blind": ("qwen3", "bfloat16", {"stage": 3, "loss": PLAIN, "quant": {"fake_quant_start": 3}}),
    "never": (
        "qwen3",
        "bfloat16",
        {"stage": 3, "quant": {"fake_quant_start": -1}, "export": {"enabled": True}, "train": {"steps": 2}},
    ),
    **{
        f"empty_{stage}": ("qwen3_moe", "float32", {"stage": stage, "loss": PLAIN, "train": {"steps": 2}})
        for stage in (1, 2, 3)
    },
    **{f"heldout_{stage}": ("qwen3", "float32", {**HELD_OUT, "stage": stage}) for stage in (1, 3)},
    **{f"unseen_{stage}": ("qwen3", "float32", {**HELD_OUT, **UNSEEN, "stage": stage}) for stage in (1, 3)},
    **{f"poison_{stage}": ("qwen3", "bfloat16", {**POISON, "stage": stage}) for stage in range(4)},
    "poison_fp32_0": ("qwen3", "float32", {**POISON, "stage": 0}),
    "poison_fp32_3": ("qwen3", "float32", {**POISON, "stage": 3}),
    "user": ("qwen3", "bfloat16", {"stage": 3, "train": {"quant_stats_every": 1}, "export": {"enabled": True}}),
    # The last: its groups of ranks are there until the process ends.
    "events_hpz": ("qwen3", "float32", {**EVENTS, "stage": 3}),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One launch for all runs."""
    directory = tmp_path_factory.mktemp("variants")
    models = {kind: tiny_checkpoint(directory / f"model-{kind}", kind) for kind in ("qwen3", "qwen3_moe")}
    models["even"] = tiny_checkpoint(directory / "model-even", "qwen3", even=True)
    data = write_chats(directory / "chats.jsonl")
    write_chats(directory / "fields.jsonl", question="question", answer="reply")
    (directory / "text.txt").write_text(TEXT * 20)
    written = {}
    for name, (kind, dtype, sections) in RUNS.items():
        sections = {key: dict(value) if isinstance(value, dict) else value for key, value in sections.items()}
        if name == "losses":
            # Far from the student, so that the directions of the divergences and the confidence matter.
            teacher = tiny_checkpoint(directory / "model-teacher", "qwen3", seed=1)
            sections["loss"] = {"teacher": str(teacher), "top_k": 5}
        if name == "events_hpz":
            sections["deepspeed"] = write_ds_config(directory, name, "zero3_hpz")
        if name == "fields":
            fields = {"input": "question", "output": "reply"}
            sections["data"] = {"train": [str(directory / "fields.jsonl")], "fields": fields}
        if name == "text":
            sections["data"] = {"train": [str(directory / "text.txt")], "kind": "text", "max_length": 24}
        written[name] = write_recipe(directory, name, models[kind], data, dtype=dtype, **sections)
    run_ranks(SCRIPT, *map(str, written.values()))
    return written


def start_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights that a run started with."""
    return dict(plain_weights(load_recipe(path).model.path).named_parameters())


def changed(path: Path) -> set[str]:
    """Which parameters have other values than at the start; theta starts at 0."""
    before, after = start_of(path), load_result(path)["weights"]
    trained = {name for name in after if name.endswith("_theta") and after[name].any()}
    return trained | {name for name in before if not torch.equal(after[name].float(), before[name])}


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


@pytest.mark.parametrize(("stored", "recomputed"), [("router", "router_recomputed"), ("stored", "recomputed")])
def test_activation_checkpointing_changes_no_bit(paths, stored, recomputed):
    expected, found = load_result(paths[stored]), load_result(paths[recomputed])
    assert found["losses"] == expected["losses"] and found["norms"] == expected["norms"]
    for name, weight in expected["weights"].items():
        assert name.endswith("_s0") or torch.equal(found["weights"][name], weight), name


def test_every_distillation_loss_through_the_loop_equals_its_formula(paths):
    settings = load_recipe(paths["losses"])
    found = load_result(paths["losses"])
    model, _ = plain_model(settings)
    teacher = plain_weights(settings.loss.teacher)
    loaders = plain_loaders(settings)
    for step, kind in enumerate(KD_KINDS):
        total, valid = 0.0, 0
        for batch in (batch for loader in loaders for batch in loader.step(step)):
            with torch.no_grad():
                ours, theirs = model(**inputs_of(batch)).logits, teacher(**inputs_of(batch)).logits
            mask = batch["labels"] != -100
            logits = ours[mask].double(), theirs[mask].double()
            temperature = 2.0 if kind == "kd" else 1.0
            values = kd_loss(kind, *logits, batch["labels"][mask], temperature=temperature, top_k=5)
            total, valid = total + float(values.sum()), valid + len(values)
        loss = found["losses"][step]
        assert set(loss) == {"loss/total", "loss/lm", f"loss/kd/{kind}"}
        # fp8 codes are discontinuous: where a GEMM of another batch shape rounds differently, a code may flip.
        assert loss[f"loss/kd/{kind}"] == pytest.approx(total / valid, rel=1e-3), kind
        assert loss["loss/total"] == pytest.approx(loss["loss/lm"] + 0.5 * loss[f"loss/kd/{kind}"], rel=1e-6)


def test_a_field_map_reads_the_same_samples(paths):
    mapped, plain = load_result(paths["fields"])["losses"][0], load_result(paths["losses"])["losses"][0]
    assert mapped["loss/lm"] == plain["loss/lm"]


def test_text_has_a_target_at_every_token(paths):
    settings = load_recipe(paths["text"])
    batches = [batch for loader in plain_loaders(settings) for batch in loader.step(0)]
    assert valid_tokens(batches) == sum(batch["input_ids"].numel() for batch in batches)
    assert_equals_plain_loop(paths["text"])


def test_packed_rows_equal_a_plain_loop_with_the_mask_written_out(paths):
    batches = plain_loaders(load_recipe(paths["packed"]))[0].step(0)
    assert max(len(batch["sample_ids"]) for batch in batches) > 2, "two rows of one sample each"
    assert_equals_plain_loop(paths["packed"])


@pytest.mark.parametrize("stage", range(4))
def test_fake_quant_that_starts_later_equals_a_plain_loop(paths, stage):
    """Theta's first step is its first, with Adam's state fresh, though the optimizer has taken two before."""
    assert_equals_plain_loop(paths[f"switch_{stage}"])


@pytest.mark.parametrize("name", [name for name in RUNS if "kv" in name])
def test_quantised_keys_and_values_train_like_a_plain_loop(paths, name):
    """Their scales are measured in the middle from what observers saw on both ranks, and learned."""
    assert_equals_plain_loop(paths[name])
    found = load_result(paths[name])
    scales = {key: value for key, value in found["weights"].items() if "_cache." in key}
    assert len(scales) == 2 * 4 and all(bool(value.isfinite().all()) for value in scales.values())
    assert {key for key in found["requires_grad"] if "_cache." in key} == {key for key in scales if "theta" in key}
    assert name != "onlykv" or all(value.any() for value in scales.values())


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("switch")])
def test_scales_are_measured_from_the_weights_at_the_start(paths, name):
    found = load_result(paths[name])
    seen, spec = found["seen"], SCHEMES[load_recipe(paths[name]).quant.scheme].weights
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


@pytest.mark.parametrize("stage", range(4))
def test_theta_rests_while_fake_quant_is_off(paths, stage):
    """No update, though Adam has moments of the steps before."""
    seen = load_result(paths[f"off_{stage}"])["seen"]
    thetas = [name for name in seen["off"] if name.endswith("_theta")]
    assert thetas and all(seen["off"][name].any() for name in thetas)
    for name in thetas:
        assert torch.equal(seen["on"][name], seen["off"][name]), name
    assert any(not torch.equal(seen["on"][name], seen["off"][name]) for name in seen["off"])


@pytest.mark.parametrize("stage", range(4))
def test_fake_quant_switched_off_and_on_equals_a_plain_loop(paths, stage):
    assert_equals_plain_loop(paths[f"off_{stage}"], off=range(2, 4))


def test_samples_of_packed_rows_calibrate_as_they_do_by_themselves(paths):
    """On stage 3, where a forward is a collective, ranks have unequal numbers of samples to look at."""
    padded, packed = (load_result(paths[f"calibrated_{rows}"])["weights"] for rows in ("padded", "packed"))
    scales = [name for name in padded if name.endswith("input_s0")]
    assert scales and all(torch.equal(packed[name], padded[name]) for name in scales)


def test_fake_quant_that_only_an_event_starts_is_observed_for_and_exported(paths):
    directory = paths["eventually"].with_suffix("")
    assert "quantization_config" in json.loads((directory / "export" / "config.json").read_text())


def test_theta_begins_anew_where_each_parameter_has_an_fp32_copy_of_its_own(paths):
    """Stage 0 under bf16. In the one step since, Adam with fresh moments takes the warm-up's half of the rate, where
    thetas had gone further before."""
    trained = load_result(paths["off_bf16"])
    before = [float(value) for name, value in trained["seen"]["on"].items() if name.endswith("_theta")]
    after = [float(value) for name, value in trained["weights"].items() if name.endswith("_theta")]
    assert max(map(abs, before)) > 1e-2 and max(map(abs, after)) == pytest.approx(5e-3, rel=1e-2)


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


@pytest.mark.parametrize("stage", (1, 3))
def test_evaluation_changes_nothing_that_trains(paths, stage):
    """Bit for bit, also while fake quant is off, for all but the scales that are not in use."""
    watched, unseen = (load_result(paths[f"{name}_{stage}"]) for name in ("heldout", "unseen"))
    assert watched["losses"] == unseen["losses"]
    for step, (found, expected) in enumerate(zip(watched["after"], unseen["after"], strict=True)):
        resting = () if step >= 3 else ("input_s0",) if step == 2 else ("input_s0", "weight_s0")
        for name, value in expected.items():
            assert name.endswith(resting or "no scale") or torch.equal(found[name], value), (step, name)


@pytest.mark.parametrize("stage", (1, 3))
def test_evaluation_is_of_the_held_out_samples_as_the_model_would_be_served(paths, stage):
    """Fake-quantised with scales that fit, in steps in which training is not, too; a mean over all ranks' tokens."""
    path = paths[f"heldout_{stage}"]
    found, settings = load_result(path), load_recipe(path)
    evaluations = found["seen"]["evaluations"]
    assert len(evaluations) == 5
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    samples, _ = read_chat(settings.data.train, tokenizer, max_length=settings.data.max_length)
    training, held_out = split(samples, settings.data.held_out, settings.data.seed)
    assert len(held_out) == 7 and len(training) == len(samples) - 7
    model, _ = plain_model(settings)
    teacher = plain_weights(settings.loss.teacher)
    parameters = dict(model.named_parameters())
    for step, evaluation in enumerate(evaluations):
        with torch.no_grad():
            for name, value in found["after"][step].items():
                parameters[name].copy_(value)
            sums = torch.zeros(2, dtype=torch.float64)
            for sample in held_out:
                ids, labels = (torch.from_numpy(array).long() for array in (sample.input_ids, sample.labels))
                logits, its = (each(input_ids=ids[None]).logits[0][labels >= 0] for each in (model, teacher))
                sums[0] += F.cross_entropy(logits.double(), labels[labels >= 0], reduction="sum")
                sums[1] += kd_loss("cakld", logits.double(), its.double(), labels[labels >= 0]).sum()
        lm, kd = (sums / sum(int((sample.labels >= 0).sum()) for sample in held_out)).tolist()
        assert evaluation["eval/lm"] == pytest.approx(lm, rel=QUANTIZED_RTOL), step
        assert evaluation["eval/kd/cakld"] == pytest.approx(kd, rel=10 * QUANTIZED_RTOL), step
        assert evaluation["eval/total"] == pytest.approx(lm + settings.loss.kd_weight * kd, rel=QUANTIZED_RTOL), step
        assert evaluation["eval/perplexity"] == pytest.approx(math.exp(evaluation["eval/lm"]))


@pytest.mark.parametrize("stage", (1, 3))
def test_the_checkpoint_of_the_best_evaluation_is_kept_beside_the_last(paths, stage):
    found, settings = load_result(paths[f"heldout_{stage}"]), load_recipe(paths[f"heldout_{stage}"])
    totals = [evaluation["eval/total"] for evaluation in found["seen"]["evaluations"]]
    step = 1 + totals.index(min(totals))
    directory = Path(settings.output_dir) / "checkpoints"
    best = best_checkpoint(directory)
    assert (best.step, best.metric, best.value) == (step, "eval/total", min(totals))
    assert {path.name for path in directory.glob("step_*")} == {f"step_{kept:08d}" for kept in (step, 5)}


def test_without_fake_quant_the_export_is_the_trained_model(paths):
    found = load_result(paths["never"])
    export = load_recipe(paths["never"]).export_dir()
    disk = load_file(export / "model.safetensors")
    names = {name for name in found["weights"] if not name.endswith(("_s0", "_theta"))}
    assert disk.keys() == names
    assert all(torch.equal(disk[name], found["weights"][name]) for name in names)
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    assert not any(found["weights"][name].any() for name in found["weights"] if name.endswith("_theta"))


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_rank_without_targets_takes_part_with_zero(paths, stage):
    """The mean is over rank 0's tokens; the ranks stay together on every stage, with experts too."""
    assert_equals_plain_loop(paths[f"empty_{stage}"], without_targets=(1,))


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("poison")])
def test_a_step_that_is_not_finite_is_counted_and_not_taken(paths, name):
    found = load_result(paths[name])
    assert found["skipped"] == [0] * POISONED + [1] * (len(found["skipped"]) - POISONED)
    before, after = found["seen"]["before"], found["seen"]["after"]
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(not torch.equal(after[key], found["weights"][key]) for key in after)
    assert all(weight.isfinite().all() for weight in found["weights"].values())
    assert math.isfinite(found["losses"][-1]["loss/total"])


def test_a_step_that_is_left_out_leaves_nothing_in_the_observers(paths):
    found = load_result(paths["blind"])
    assert found["skipped"] == [0, 1, 1, 1, 1]
    scales = [value for name, value in found["weights"].items() if name.endswith("input_s0")]
    assert scales and all(bool(scale.isfinite().all()) for scale in scales)


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
