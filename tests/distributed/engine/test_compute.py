"""Ways to compute the same training: kept weight codes, the fp8 GEMM, the quantized all-gather, compiled layers."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.loop import Loop, LoopState
from model.zero import gradient_norm
from quant import QuantLayer, QuantLinear
from quant.inputs import kept_by_attention
from tests.lib.plain import load_result
from tests.lib.tiny import TEXT
from tests.lib.variants import (
    EVEN,
    NO_TEACHER,
    SAID,
    Variant,
    assert_same_run,
    assert_same_weights,
    each,
    run_variants,
    runs_of,
)

THREE = {"steps": 3, "gradient_accumulation_steps": 3, "quant_stats_every": 0}
# Steps so large that weights leave the range of a scale that does not learn; a layer switched, and evaluations.
LARGE = {"lr": 0.1, "warmup_steps": 0, "schedule": "constant"}
CLIPS = {
    "learnable": {"weight_scale": False},
    "optim": LARGE,
    "data": {"held_out": 4},
    "eval": {"every": 2},
    "train": {**THREE, "steps": 4},
    "schedule": [{"at": at, "fake_quant": at == 2, "layers": r"model\.layers\.0\..*"} for at in (1, 2)],
}
INT4 = {"scheme": "w4a16_g32"}
GEMM = {"compute": "fp8_gemm"}
LAYERS = 14  # two decoder layers


class CountWeightPasses(TorchDispatchMode):
    """How often tensors of the weights' shapes are quantized, by operator, and what is gathered: bytes by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()
        self.calls: Counter[str] = Counter()
        self.gathered: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if name in ("deepqat.quantize", "deepqat.fake_quantize") and args[0].shape in self.shapes:
            self.calls[name] += 1
        if name == "c10d._allgather_base_":
            self.gathered["calls"] += 1
            self.gathered[str(args[0].dtype)] += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def note_shown(shown: dict[str, bool], name: str, layer: QuantLinear, inputs: tuple[Tensor, ...]) -> None:
    """Note if a layer's rule says that attention saved its input; tests/unit/quant has the rule."""
    shown[name] = torch.is_grad_enabled() and kept_by_attention(inputs[0], layer.aliases)


def watch(loop: Loop, seen: dict[str, Any], *, keep: bool = True) -> None:
    """How the layers compute; unless ``keep`` they quantize their weights in every forward."""
    counter = CountWeightPasses()
    seen |= {"calls": [], "left": [], "gathered": [], "evaluations": [], "shown": {}}

    def begin(state: LoopState) -> None:
        if counter.shapes:
            return
        layers = state.session.quantization.layers
        counter.shapes = {torch.Size((layer.out_features, layer.in_features)) for layer in layers.values()}
        seen["fp8_gemm"] = [name for name, layer in layers.items() if layer.fp8_gemm]
        seen["keeps"] = all(layer.keeps_weight_codes for layer in layers.values())
        for name, layer in layers.items():
            if getattr(layer, "dynamic_codes", False):  # behind ZeRO-3's hooks, so that it sees what the layer sees
                layer.register_forward_pre_hook(partial(note_shown, seen["shown"], name))
            layer.keeps_weight_codes &= keep
        counter.__enter__()

    for step in range(loop.recipe.train.steps):  # a resumed run does not begin at 0
        loop.at(step)(begin)

    @loop.every(1)
    def after(state: LoopState) -> None:
        for name, counts in (("calls", counter.calls), ("gathered", counter.gathered)):
            seen[name].append(dict(counts))
            counts.clear()
        seen["evaluations"].append(dict(state.evaluation))
        seen["left"].append(sum(one._weight_codes is not None for one in state.session.quantization.layers.values()))

    loop.every(loop.recipe.train.steps)(lambda state: counter.__exit__(None, None, None))


def watch_unkept(loop: Loop, seen: dict[str, Any]) -> None:
    watch(loop, seen, keep=False)


def keep_theta_gradients(loop: Loop, seen: dict[str, Any]) -> None:
    """The norms of the gradients of the weights' scales in every step, by layer."""
    seen["gradients"] = []

    def keep(layers: Mapping[str, QuantLayer]) -> None:
        thetas = {name: layer.weight_theta for name, layer in layers.items() if layer.weight_theta is not None}
        seen["gradients"].append({name: gradient_norm([theta]) for name, theta in thetas.items()})

    @loop.at(0)
    def begin(state: LoopState) -> None:
        state.session.after_backward.append(partial(keep, state.session.quantization.layers))


def run(stage: int, model: str = EVEN, *, keep: bool = True, recompute: bool = False, **sections: Any) -> Variant:
    train = {**THREE, "activation_checkpointing": recompute}
    action = watch if keep else watch_unkept
    return Variant({"stage": stage, "loss": NO_TEACHER, "train": train, **sections}, model, "bfloat16", action)


FUSED = {"quant": {**GEMM, "fuse_norms": True}}
DYNAMIC = {"scheme": "mxfp4_w4a4", "keep_codes": True}
RUNS = {
    **{f"kept_{stage}": run(stage) for stage in (1, 3)},
    "unkept_1": run(1, keep=False),
    "kept_int4": run(0, quant=INT4),
    "unkept_int4": run(0, quant=INT4, keep=False),
    **{f"gemm_{stage}": run(stage, quant=GEMM) for stage in (1, 3)},
    "gemm_odd": run(3, "qwen3", quant=GEMM),
    **{f"fused_{stage}": run(stage, **FUSED) for stage in (1, 3)},
    "fused_recomputed": run(3, recompute=True, **FUSED),
    "fused_switched": run(3, "qwen3", quant={"fuse_norms": True}, **CLIPS),
    "values": run(3, quant={**DYNAMIC, "keep_codes": False}),
    "codes": run(3, quant=DYNAMIC),
    "codes_recomputed": run(3, quant=DYNAMIC, recompute=True),
    "whole": run(3, "qwen3", **CLIPS),
    "coded": run(3, "qwen3", quant={"quantized_all_gather": True}, **CLIPS),
}


# The weight of q alone is gathered as codes: those of k and v, which share its scale, are small and stay gathered.
SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 2000}}
SHARED = {
    f"shared_{coded}": Variant(
        {
            "stage": 3,
            "loss": NO_TEACHER,
            "train": {"steps": 2, "quant_stats_every": 1},
            "quant": {"quantized_all_gather": coded},
        },
        dtype="bfloat16",
        action=keep_theta_gradients,
        shipped="zero3",
        ds=SMALL,
    )
    for coded in (False, True)
}


paths = runs_of(RUNS, SHARED)


@pytest.fixture(scope="module")
def results(paths):
    return {name: load_result(paths[name]) for name in RUNS}


@each(["1", "int4"])
def test_kept_weight_codes_change_nothing_but_the_number_of_passes(results, name):
    """Bit for bit the same training; a weight is quantized once per step, not once per forward and backward."""
    kept, unkept = results[f"kept_{name}"], results[f"unkept_{name}"]
    assert kept["seen"]["keeps"]
    assert_same_run(kept, unkept)
    steps = THREE["steps"]
    assert kept["seen"]["calls"] == [{"deepqat.quantize": LAYERS}] * steps
    passes = 3 * 2 * LAYERS  # micro-batches, forward and backward
    assert unkept["seen"]["calls"] == [{"deepqat.fake_quantize": passes}] * steps
    assert kept["seen"]["left"] == [0] * steps, "codes of the weights before the step would be used after it"
    assert not results["kept_3"]["seen"]["keeps"], "under stage 3 none are kept"


def test_kept_codes_of_inputs_change_nothing_and_spare_what_attention_keeps(results):
    """On stage 3 a Function of DeepSpeed's is between o_proj and attention, in the same memory. Bit for bit the same
    training as without kept codes, where layers are recomputed too."""
    shown = results["codes"]["seen"]["shown"]
    assert len(shown) == LAYERS and all(shown[layer] == layer.endswith("o_proj") for layer in shown)
    assert not results["values"]["seen"]["shown"]
    for name in ("codes", "codes_recomputed"):
        assert_same_run(results[name], results["values"])


def test_weights_gathered_as_codes_train_the_same_bit_for_bit(results, paths):
    whole, coded = results["whole"], results["coded"]
    assert f"gathered as codes: the weights of {LAYERS} layers" in paths.said()
    assert_same_run(coded, whole)
    assert coded["seen"]["evaluations"] == whole["seen"]["evaluations"]
    ratios = [whole["weights"][f"{name}.weight"].float().abs() / scale for name, scale in whole["scales"].items()]
    assert sum(int((ratio > 464).sum()) for ratio in ratios) > 100, "nothing shows what gradient clipped weights get"


def test_a_scale_gets_the_gradients_of_all_its_layers_if_some_are_gathered_as_codes(paths):
    whole, coded = (load_result(paths[f"shared_{coded}"])["seen"]["gradients"][0] for coded in (False, True))
    assert coded == pytest.approx(whole, rel=0.05, abs=0.02 * max(whole.values()))


def test_codes_are_half_the_bytes_in_as_many_gathers(results):
    whole, coded = results["whole"]["seen"], results["coded"]["seen"]
    linear = sum(results["whole"]["weights"][f"{name}.weight"].numel() for name in results["whole"]["scales"])
    for step in (1, 3):  # 0 and 2 begin after an evaluation, from which weights as they are stay gathered
        before, after = whole["gathered"][step], coded["gathered"][step]
        assert before.keys() == {"calls", "torch.bfloat16"} and after.keys() == {"calls", "torch.uint8"}
        assert before["calls"] == after["calls"]
        # Three micro-batches and an evaluation, which quantizes all layers; in step 1 training quantizes half of them.
        saved = before["torch.bfloat16"] - after["torch.uint8"]
        assert saved == linear * (4 if step == 3 else 2.5), (before, after)


def test_a_step_after_calibration_gathers_ahead(results):
    """Few large gathers, and each weight once per micro-batch: forwards alone must not teach DeepSpeed otherwise."""
    gathered = results["kept_3"]["seen"]["gathered"][-1]
    assert gathered["calls"] <= 3 * 4, gathered
    model = sum(value.numel() for value in results["kept_3"]["weights"].values())
    assert gathered["torch.bfloat16"] < 3 * 2 * 1.1 * model


def assert_close_losses(found: dict[str, Any], expected: dict[str, Any], later: float = 2e-2) -> None:
    """bf16 has 8 bits: the losses of a whole batch differ by a few units of the last one, and really differ."""
    assert found["losses"] != expected["losses"] and found["weights"].keys() == expected["weights"].keys()
    for step, (ours, theirs) in enumerate(zip(found["losses"], expected["losses"], strict=True)):
        assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=later if step else 2e-2)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_fp8_gemm_trains_like_simulate_and_with_norms_that_write_codes(results, stage):
    """Other rounding (codes against values in bf16, norms), the same training."""
    gemm, simulated = results[f"gemm_{stage}"], results[f"kept_{stage}"]
    assert len(gemm["seen"]["fp8_gemm"]) == LAYERS and not simulated["seen"]["fp8_gemm"]
    assert_close_losses(gemm, simulated)
    assert_close_losses(results[f"fused_{stage}"], gemm)


def test_norms_write_codes_where_layers_are_recomputed_and_switched(results, paths):
    """Recomputed bit for bit; where fake quant of a layer goes and comes between steps and evaluations."""
    assert_same_run(results["fused_recomputed"], results["fused_3"])
    # Steps as large as these carry a rounding far.
    assert_close_losses(results["fused_switched"], results["whole"], later=0.1)
    assert "fused: 4 norms and 2 MLPs pass codes to the layers that read them" in paths.said()


def test_layers_that_the_fp8_gemm_cannot_take_simulate_and_are_listed_once(results, paths):
    """Hidden 48 is a multiple of 16, the intermediate size 83 is not."""
    assert len(results["gemm_odd"]["seen"]["fp8_gemm"]) == LAYERS - 2 * 3
    said = [line for line in paths.said().splitlines() if "simulated, for the fp8 GEMM" in line]
    assert len(said) == 1 and "model.layers.1.mlp.down_proj" in said[0]


@pytest.mark.full  # inductor takes a minute; tests/unit/quant/kernels/test_compile.py has a single layer
def test_compiled_layers_train_like_eager_ones(tmp_path):
    """fp32, the first step on the same weights: what differs is the order of sums in fused norms and attention."""
    (text := tmp_path / "text.txt").write_text(TEXT * 20)
    # Weight-only: an fp8 input one bit apart may get another code, an eighth apart.
    sections = {"stage": 1, "loss": NO_TEACHER, "quant": INT4}
    sections["data"] = {"train": [str(text)], "kind": "text", "max_length": 24}
    ways = {"eager": False, "compiled": True}
    paths = run_variants(
        tmp_path,
        {name: Variant({**sections, "train": {**THREE, "compile": way}}, EVEN) for name, way in ways.items()},
    )
    eager, compiled = (load_result(paths[name]) for name in ways)
    assert "compiled: 2 of 2 decoder layers" in (tmp_path / SAID).read_text()
    assert compiled["losses"][0]["loss/total"] == pytest.approx(eager["losses"][0]["loss/total"], rel=2e-6)
    assert compiled["norms"][0] == pytest.approx(eager["norms"][0], rel=1e-4)
    for ours, theirs in zip(compiled["losses"], eager["losses"], strict=True):
        # A code that flips moves a weight by a whole step of the grid: later steps agree less.
        assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# The quantized all-gather in every arrangement
# ---------------------------------------------------------------------------------------------------------------------

FEW = {"steps": 3, "gradient_accumulation_steps": 2, "quant_stats_every": 0}
# name: model, dtype, sections of the recipe. Nothing learns its scale: equal bit for bit.
ARRANGEMENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "stacked": ("qwen3_moe", "bfloat16", {}),
    "per_expert": ("qwen3_moe", "bfloat16", {"model": {"experts": "per_expert"}}),
    "recomputed": ("qwen3", "bfloat16", {"train": {**FEW, "activation_checkpointing": True}}),
    "fp8_gemm": ("qwen3", "bfloat16", {"quant": GEMM}),
    "rows": ("qwen3", "float32", {"quant": {"scheme": "fp8_dynamic"}}),
    "int4": ("qwen3", "bfloat16", {"quant": {"scheme": "w4a16_channel"}}),
    "offload": ("qwen3", "float32", {}),
    "followed": ("qwen3", "bfloat16", {"quant": {"scales_follow_weights": True, "weight_range": "absmax"}}),
    # Frozen weights, used as they are and quantized in turn.
    "self": (
        "qwen3",
        "bfloat16",
        {
            "learnable": {"weight": False, "weight_scale": False, "act_scale": True},
            "loss": {"kd_weight": 1.0, "kd": "kl", "teacher": "self"},
        },
    ),
}
CHANGES = {1: True, 2: False, 4: True}  # steps of a run that is resumed: whether it gathers codes until then


def gathering(coded: bool, kind: str = "qwen3", dtype: str = "bfloat16", name: str = "", **sections: Any) -> Variant:
    shared = {"stage": 3, "learnable": {"weight_scale": False}, "optim": LARGE, "train": FEW, "loss": NO_TEACHER}
    quant = {"calibration_batches": 2, **sections.get("quant", {}), "quantized_all_gather": coded}
    # As shipped, but norms and the smaller weights alone stay gathered between steps.
    ds = {"zero_optimization": {"stage3_param_persistence_threshold": 2000}}
    offload = {"shipped": "zero3_offload", "ds": ds} if name == "offload" else {}
    return Variant({**shared, **sections, "quant": quant}, kind, dtype, watch, **offload)


def arranged(directory: Path) -> dict[str, Variant]:
    """The pairs, and a run that changes at each resume how it gathers and what it keeps for backward."""
    runs = {
        f"{name}_{coded}": gathering(coded, model, dtype, name, **sections)
        for name, (model, dtype, sections) in ARRANGEMENTS.items()
        for coded in (False, True)
    }
    runs["unchanged"] = gathering(False, train={**FEW, "steps": 4})
    for steps, coded in CHANGES.items():
        train = {
            **FEW,
            "steps": steps,
            "checkpoint_every": 1,
            "resume": steps > 1,
            "activation_checkpointing": not coded,
        }
        runs[f"changed_{steps}"] = gathering(coded, train=train, output_dir=f"{directory}/changed")
    return runs


@pytest.mark.full
def test_the_quantized_all_gather_trains_the_same_in_every_arrangement(tmp_path):
    """A resumed run may gather otherwise than before: that is no part of what a checkpoint holds."""
    paths = run_variants(tmp_path, arranged(tmp_path))
    said = (tmp_path / SAID).read_text()
    assert said.count("gathered as codes") == len(ARRANGEMENTS) + sum(CHANGES.values())
    for name in ARRANGEMENTS:
        whole, codes = (load_result(paths[f"{name}_{coded}"]) for coded in (False, True))
        assert_same_run(codes, whole)
        assert any("torch.uint8" in step for step in codes["seen"]["gathered"]), name
    straight, last = load_result(paths["unchanged"]), load_result(paths["changed_4"])
    assert last["losses"] == straight["losses"][2:]
    assert_same_weights(last, straight)
    assert any("torch.uint8" in step for step in last["seen"]["gathered"])
