"""Ways to compute the same training: kept weight codes, the fp8 GEMM, compiled layers. One launch on two ranks."""

from pathlib import Path

import pytest
import torch

from tests.lib.launcher import run_ranks
from tests.lib.plain import load_result
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import TEXT, tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "compute.py"
PLAIN = {"kd_weight": 0.0, "teacher": None}
THREE = {"train": {"steps": 3, "gradient_accumulation_steps": 3, "quant_stats_every": 0}, "loss": PLAIN}
# Steps so large that weights leave the range of a scale that does not learn; a layer switched, and evaluations.
CLIPS = {
    "learnable": {"weight_scale": False},
    "optim": {"lr": 0.1, "warmup_steps": 0, "schedule": "constant"},
    "data": {"held_out": 4},
    "eval": {"every": 2},
    "train": {**THREE["train"], "steps": 4},
    "schedule": [{"at": at, "fake_quant": at == 2, "layers": r"model\.layers\.0\..*"} for at in (1, 2)],
}
INT4 = {"scheme": "w4a16_g32"}
LAYERS = 14  # two decoder layers
STEPS = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Writes one: its name, the model's kind, its dtype, and the sections beside those of all."""
    directory = tmp_path_factory.mktemp("compute")
    models = {kind: tiny_checkpoint(directory / kind, "qwen3", even=kind == "even") for kind in ("odd", "even")}
    chats = write_chats(directory / "chats.jsonl")

    def write(name, kind, dtype, **sections):
        return write_recipe(directory, name, models[kind], chats, dtype=dtype, **{**THREE, **sections})

    return write


@pytest.fixture(scope="module")
def results(recipe):
    paths = {}

    def add(name, *arguments, **sections):
        paths[name] = recipe(name, *arguments, **sections)

    for stage in (0, 1, 3):
        add(f"kept_{stage}", "even", "bfloat16", stage=stage)
    for stage in (0, 1):
        add(f"unkept_{stage}", "even", "bfloat16", stage=stage)
    add("kept_int4", "even", "bfloat16", stage=2, quant=INT4)
    add("unkept_int4", "even", "bfloat16", stage=2, quant=INT4)
    for stage in (1, 3):
        add(f"gemm_{stage}", "even", "bfloat16", stage=stage, quant={"compute": "fp8_gemm"})
    add(
        "gemm_recomputed",
        "even",
        "bfloat16",
        stage=3,
        quant={"compute": "fp8_gemm"},
        train={**THREE["train"], "activation_checkpointing": True},
    )
    fused = {"compute": "fp8_gemm", "fuse_norms": True}
    for stage in (1, 3):
        add(f"fused_{stage}", "even", "bfloat16", stage=stage, quant=fused)
    recomputed = {**THREE["train"], "activation_checkpointing": True}
    add("fused_recomputed", "even", "bfloat16", stage=3, quant=fused, train=recomputed)
    add("fused_switched", "odd", "bfloat16", stage=3, **CLIPS, quant={"fuse_norms": True})
    for name in ("values", "codes"):
        dynamic = {"scheme": "mxfp4_w4a4", "keep_codes": name == "codes"}
        add(f"{name}_3", "even", "bfloat16", stage=3, quant=dynamic)
    add("codes_recomputed", "even", "bfloat16", stage=3, quant=dynamic, train=recomputed)
    add("gemm_odd", "odd", "bfloat16", stage=3, quant={"compute": "fp8_gemm"})
    for name in ("whole", "coded"):
        add(name, "odd", "bfloat16", stage=3, **CLIPS, quant={"quantized_all_gather": name == "coded"})
    output = run_ranks(SCRIPT, *map(str, paths.values()))
    return paths, output


def result(results, name):
    return load_result(results[0][name])


@pytest.mark.parametrize("name", ["0", "1", "int4"])
def test_kept_weight_codes_change_nothing_but_the_number_of_passes(results, name):
    """Bit for bit the same training; a weight is quantized once per step, not once per forward and backward."""
    kept, unkept = result(results, f"kept_{name}"), result(results, f"unkept_{name}")
    assert kept["seen"]["keeps"]
    assert kept["losses"] == unkept["losses"]
    for parameter, value in kept["weights"].items():
        assert torch.equal(value, unkept["weights"][parameter]), parameter
    assert kept["seen"]["calls"] == [{"deepqat.quantize": LAYERS}] * STEPS
    passes = 3 * 2 * LAYERS  # micro-batches, forward and backward
    assert unkept["seen"]["calls"] == [{"deepqat.fake_quantized": passes}] * STEPS
    assert kept["seen"]["left"] == [0] * STEPS, "codes of the weights before the step would be used after it"


def test_kept_codes_of_inputs_change_nothing_and_spare_what_attention_keeps(results):
    """On stage 3 a Function of DeepSpeed's lies between o_proj and attention, in the same memory. Bit for bit the same
    training as without kept codes, where layers are recomputed too."""
    shown = result(results, "codes_3")["seen"]["shown"]
    assert len(shown) == LAYERS and all(shown[layer] == layer.endswith("o_proj") for layer in shown)
    plain = result(results, "values_3")
    assert not plain["seen"]["shown"]
    for name in ("codes_3", "codes_recomputed"):
        kept = result(results, name)
        assert kept["losses"] == plain["losses"]
        assert all(torch.equal(value, kept["weights"][key]) for key, value in plain["weights"].items())


def test_stage_3_keeps_no_codes(results):
    assert not result(results, "kept_3")["seen"]["keeps"]


def test_weights_gathered_as_codes_train_the_same_bit_for_bit(results):
    whole, coded = result(results, "whole"), result(results, "coded")
    assert f"gathered as codes: the weights of {LAYERS} layers" in results[1]
    assert coded["losses"] == whole["losses"] and coded["norms"] == whole["norms"]
    assert coded["seen"]["evaluations"] == whole["seen"]["evaluations"]
    clipped = 0
    for name, value in whole["weights"].items():
        assert torch.equal(value, coded["weights"][name]), name
    for name, scale in whole["scales"].items():
        clipped += int((whole["weights"][f"{name}.weight"].float().abs() > 464 * scale).sum())
    assert clipped > 100, "nothing shows whether clipped weights get a gradient"


def test_codes_are_half_the_bytes_in_as_many_gathers(results):
    whole, coded = (result(results, name)["seen"] for name in ("whole", "coded"))
    weights = result(results, "whole")["weights"]
    linear = sum(weights[f"{name}.weight"].numel() for name in result(results, "whole")["scales"])
    for step in (1, 3):  # 0 and 2 begin after an evaluation, from which weights as they are stay gathered
        before, after = whole["gathered"][step], coded["gathered"][step]
        assert before.keys() == {"calls", "torch.bfloat16"} and after.keys() == {"calls", "torch.uint8"}
        assert before["calls"] == after["calls"]
        # Three micro-batches and an evaluation, which quantizes all layers; in step 1 training quantizes half of them.
        saved = before["torch.bfloat16"] - after["torch.uint8"]
        assert saved == linear * (4 if step == 3 else 2.5), (before, after)


def test_a_step_after_calibration_gathers_ahead(results):
    """Few large gathers, and each weight once per micro-batch: forwards alone must not teach DeepSpeed otherwise."""
    gathered = result(results, "kept_3")["seen"]["gathered"][-1]
    assert gathered["calls"] <= 3 * 4, gathered
    model = sum(value.numel() for value in result(results, "kept_3")["weights"].values())
    assert gathered["torch.bfloat16"] < 3 * 2 * 1.1 * model


def test_the_fp8_gemm_trains_like_simulate(results):
    """Other rounding (codes against values in bf16), the same training; and it is really another computation."""
    for stage in (1, 3):
        gemm, simulated = result(results, f"gemm_{stage}"), result(results, f"kept_{stage}")
        assert len(gemm["seen"]["fp8_gemm"]) == LAYERS and not simulated["seen"]["fp8_gemm"]
        assert gemm["losses"] != simulated["losses"]
        for ours, theirs in zip(gemm["losses"], simulated["losses"], strict=True):
            # bf16 has 8 bits; the losses of a whole batch differ by a few units of the last one.
            assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=2e-2)


def test_norms_that_write_codes_train_like_those_that_do_not(results):
    """Other roundings of the norms, the same training; where layers are recomputed bit for bit, and where fake quant of
    a layer goes and comes between steps and evaluations."""
    for stage in (1, 3):
        fused, plain = result(results, f"fused_{stage}"), result(results, f"gemm_{stage}")
        assert fused["weights"].keys() == plain["weights"].keys() and fused["losses"] != plain["losses"]
        for ours, theirs in zip(fused["losses"], plain["losses"], strict=True):
            assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=2e-2)
    stored, recomputed = result(results, "fused_3"), result(results, "fused_recomputed")
    assert stored["losses"] == recomputed["losses"]
    assert all(torch.equal(value, recomputed["weights"][name]) for name, value in stored["weights"].items())
    switched, plain = result(results, "fused_switched"), result(results, "whole")
    for step, (ours, theirs) in enumerate(zip(switched["losses"], plain["losses"], strict=True)):
        # Steps as large as these carry a rounding far.
        assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=0.1 if step else 2e-2)
    assert "fused: 4 norms and 2 MLPs hand codes to the layers behind them" in results[1]


def test_activation_checkpointing_changes_nothing_where_codes_are_multiplied(results):
    stored, recomputed = result(results, "gemm_3"), result(results, "gemm_recomputed")
    assert stored["losses"] == recomputed["losses"]
    for name, value in stored["weights"].items():
        assert torch.equal(value, recomputed["weights"][name]), name


def test_layers_that_the_fp8_gemm_cannot_take_simulate_and_are_listed_once(results):
    """Hidden 48 is a multiple of 16, the intermediate size 83 is not."""
    assert len(result(results, "gemm_odd")["seen"]["fp8_gemm"]) == LAYERS - 2 * 3
    said = [line for line in results[1].splitlines() if "simulated, for the fp8 GEMM" in line]
    assert len(said) == 1 and "model.layers.1.mlp.down_proj" in said[0]


@pytest.mark.full  # inductor takes a minute; tests/unit/quant/kernels/test_compile.py has a layer by itself
def test_compiled_layers_train_like_eager_ones(recipe, tmp_path):
    """fp32, the first step on the same weights: what differs is the order of sums in fused norms and attention."""
    (text := tmp_path / "text.txt").write_text(TEXT * 20)
    # Weight-only: an fp8 input one bit apart may get another code, an eighth apart.
    paths = [
        recipe(
            name,
            "even",
            "float32",
            stage=1,
            data={"train": [str(text)], "kind": "text", "max_length": 24},
            quant=INT4,
            train={**THREE["train"], "compile": name == "compiled"},
        )
        for name in ("eager", "compiled")
    ]
    output = run_ranks(SCRIPT, *map(str, paths))
    eager, compiled = map(load_result, paths)
    assert "compiled: 2 of 2 decoder layers" in output
    assert compiled["losses"][0]["loss/total"] == pytest.approx(eager["losses"][0]["loss/total"], rel=2e-6)
    assert compiled["norms"][0] == pytest.approx(eager["norms"][0], rel=1e-4)
    for ours, theirs in zip(compiled["losses"], eager["losses"], strict=True):
        # A code that flips moves a weight by a whole step of the grid: later steps agree less.
        assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=1e-3)
