"""Stages 0 to 3 on two ranks against each other and against a plain PyTorch loop in one process.

Losses and weights are compared step by step in fp32, where an error in a collective, a denominator or a gradient shows
in the first digits and rounding later; and in bf16, the way users train, stage against stage.
"""

import itertools
from pathlib import Path

import pytest
import torch

from engine.config.reading import load_recipe
from engine.session.optimizer import LossScale
from model.build import build_model
from model.checkpoint.load import load_weights
from tests.lib.launcher import run_ranks
from tests.lib.plain import assert_equals_plain_loop, load_result, plain_weights
from tests.lib.recipes import write_chats, write_ds_config, write_recipe
from tests.lib.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
SHIPPED = ("zero3", "zero3_offload")  # as users name them; here small parameters stay gathered between steps
LADDER = ("zero3_offload_param", "zero3_hpz")  # all of them: test_ladder
# Doubles twice in five steps, and overflows in none.
GROWING = {"initial_scale_power": 10, "loss_scale_window": 2}
OVERFLOWING = {"initial_scale_power": 20, "loss_scale_window": 2}
HALF = {("qwen3", 3)}
TWICE = {"quant_stats_every": 2}  # two looks at the quantization in five steps
# The rest comes with the large counts: 2 is 1 with gradients in partitions, and 3 partitions the experts themselves.
STAGES = {"qwen3": (0, 1, 3), "qwen3_moe": (3,)}
OTHERS = {"qwen3": (1, 2), "qwen3_moe": (0, 1, 2, 3)}
OTHER_HALF = {("qwen3", 0)}


def pairs(stages: dict[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    return [(kind, stage) for kind in stages for stage in stages[kind]]


def write_stages(directory: Path, data: Path, stages: dict[str, tuple[int, ...]]) -> dict[tuple, Path]:
    """A recipe for each model, stage and numeric type."""
    paths = {}
    for kind in stages:
        model = tiny_checkpoint(directory / kind, kind, tied=kind == "qwen3")
        for stage, dtype in itertools.product(stages[kind], ("float32", "bfloat16")):
            paths[kind, stage, dtype] = write_recipe(
                directory, f"{kind}_zero{stage}_{dtype}", model, data, stage=stage, dtype=dtype, train=TWICE
            )
    return paths


def write_half(directory: Path, data: Path, half: set[tuple[str, int]]) -> dict[tuple, Path]:
    """Recipes in fp16, with a loss scale that grows and with one that is too large."""
    paths = {}
    for kind, stage in sorted(half):
        for name, fp16 in (("float16", GROWING), ("overflow", OVERFLOWING)):
            train = {"steps": 8, "max_skipped_steps": 1} if name == "overflow" else TWICE
            paths[kind, stage, name] = write_recipe(
                directory,
                f"{kind}_zero{stage}_{name}",
                directory / kind,
                data,
                stage=stage,
                dtype="float16",
                deepspeed=write_ds_config(directory, f"{name}_{stage}", f"zero{stage}", fp16=fp16),
                train=train,
            )
    return paths


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One launch: dense and MoE on their stages in both numeric types, and the configurations that ship."""
    directory = tmp_path_factory.mktemp("train")
    data = write_chats(directory / "chats.jsonl")
    paths = write_stages(directory, data, STAGES)
    model = tiny_checkpoint(directory / "llama", "llama")
    for shipped in SHIPPED:
        paths["llama", shipped, "float32"] = write_recipe(
            directory, f"llama_{shipped}", model, data, stage=3, dtype="float32", deepspeed=shipped
        )
    paths["qwen3_moe", "coded", "float32"] = write_recipe(
        directory,
        "qwen3_moe_coded",
        directory / "qwen3_moe",
        data,
        stage=3,
        dtype="float32",
        quant={"calibration_batches": 2, "quantized_all_gather": True},
    )
    paths |= write_half(directory, data, HALF)
    for shipped in LADDER:  # hpZ last: its groups of ranks are there until the process ends
        paths["llama", shipped, "float32"] = write_recipe(
            directory,
            f"llama_{shipped}",
            model,
            data,
            stage=3,
            dtype="float32",
            deepspeed=write_ds_config(directory, f"every_{shipped}", shipped),
        )
    run_ranks(SCRIPT, *map(str, paths.values()))
    return paths


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """One launch: the rest of the stages, and the MoE on all four."""
    directory = tmp_path_factory.mktemp("others")
    data = write_chats(directory / "chats.jsonl")
    paths = write_stages(directory, data, OTHERS) | write_half(directory, data, OTHER_HALF)
    run_ranks(SCRIPT, *map(str, paths.values()))
    return paths


@pytest.mark.parametrize(("kind", "stage"), pairs(STAGES))
def test_fp32_equals_a_plain_loop_on_every_stage(results, kind, stage):
    assert_equals_plain_loop(results[kind, stage, "float32"])


@pytest.mark.full
@pytest.mark.parametrize(("kind", "stage"), pairs(OTHERS))
def test_fp32_equals_a_plain_loop_on_the_rest_of_the_stages(others, kind, stage):
    assert_equals_plain_loop(others[kind, stage, "float32"])


@pytest.mark.parametrize("shipped", SHIPPED + LADDER)
def test_shipped_configurations_equal_a_plain_loop(results, shipped):
    assert_equals_plain_loop(results["llama", shipped, "float32"])


def test_weights_gathered_as_codes_equal_a_plain_loop(results):
    """With learned scales, whose gradients are then summed up after the reduction."""
    assert_equals_plain_loop(results["qwen3_moe", "coded", "float32"])


@pytest.mark.parametrize("kind", ["qwen3"])
def test_bf16_stages_differ_less_from_each_other_than_bf16_from_fp32(results, kind):
    assert_bf16_stages_are_close(results, kind, STAGES[kind])


@pytest.mark.full
@pytest.mark.parametrize("kind", OTHERS)
def test_the_rest_of_the_bf16_stages_differ_less_from_each_other_than_bf16_from_fp32(others, kind):
    assert_bf16_stages_are_close(others, kind, OTHERS[kind])


def assert_bf16_stages_are_close(results, kind, stages):
    """Stages add bf16 gradients up in different orders, so they differ; what bf16 itself costs is the measure."""
    exact, first = load_result(results[kind, 1, "float32"]), load_result(results[kind, 1, "bfloat16"])
    loss_error = distance(first, exact, "losses")
    weight_error = distance(first, exact, "weights")
    for stage in (stage for stage in stages if stage != 1):
        found = load_result(results[kind, stage, "bfloat16"])
        assert distance(found, first, "losses") < loss_error, stage
        assert distance(found, first, "weights") < weight_error, stage


@pytest.mark.parametrize(("kind", "stage"), sorted(HALF))
def test_fp16_with_a_loss_scale_that_grows_trains_as_fp32_does(results, kind, stage):
    assert_fp16_trains_as_fp32(results, kind, stage)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "stage"), sorted(OTHER_HALF))
def test_fp16_on_the_rest_of_the_stages(others, kind, stage):
    assert_fp16_trains_as_fp32(others, kind, stage)
    assert_overflows_are_left_out(others[kind, stage, "overflow"])


def assert_fp16_trains_as_fp32(results, kind, stage):
    """The norms of all gradients, clipped later, and of the scales' are without it: within what 16 bits cost (2% and
    35%), where an error in the loss scale is a factor of 2, or of 1024."""
    exact, rounded = load_result(results[kind, 1, "float32"]), load_result(results[kind, 1, "bfloat16"])
    found = load_result(results[kind, stage, "float16"])
    assert found["skipped"][-1] == 0
    assert found["loss_scales"] == [2.0**10, 2.0**10, 2.0**11, 2.0**11, 2.0**12]
    assert found["norms"] == pytest.approx(exact["norms"], rel=0.1)
    # Later an fp8 scale hardly has a value that teaches it: those that were subnormal have grown.
    assert found["scale_norms"][1] == pytest.approx(exact["scale_norms"][1], rel=0.8)
    assert distance(found, exact, "weights") < distance(rounded, exact, "weights")


@pytest.mark.parametrize(("kind", "stage"), sorted(HALF))
def test_a_step_whose_gradients_overflow_in_fp16_is_left_out_and_halves_the_loss_scale(results, kind, stage):
    assert_overflows_are_left_out(results[kind, stage, "overflow"])


def assert_overflows_are_left_out(path):
    found, settings = load_result(path), load_recipe(path)
    assert len(found["losses"]) == settings.train.steps  # although one step without a lower scale would end the run
    counts = [0, *found["skipped"]]
    overflows = [later > before for before, later in itertools.pairwise(counts)]
    assert overflows[:2] == [True, True] and not all(overflows)
    scale = LossScale.from_config(OVERFLOWING)
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


def distance(a, b, what: str) -> float:
    """Largest difference of the total loss over the steps, or mean difference of the trained weights."""
    if what == "losses":
        return max(abs(x["loss/total"] - y["loss/total"]) for x, y in zip(a["losses"], b["losses"], strict=True))
    differences = [
        (a["weights"][name].float() - b["weights"][name].float()).abs().flatten() for name in a["requires_grad"]
    ]
    return float(torch.cat(differences).mean())


def test_rotary_frequencies_stay_fp32_and_no_step_is_skipped(results):
    for key, path in results.items():
        found = load_result(path)
        assert found["inv_freq"] and set(found["inv_freq"].values()) == {torch.float32}, key
        assert found["skipped"][-1] == 0 or "overflow" in key, key


@pytest.mark.parametrize(("kind", "stage"), [pair for pair in pairs(STAGES) if pair[1]])  # 0 in fp32 has no norms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_take_little_of_the_norm_that_clips(results, kind, stage, dtype):
    """Under 1% of it, so that clipping the whole gradient does not throttle the weights for the scales' sake."""
    found = load_result(results[kind, stage, dtype])
    measured = [(scales, whole) for scales, whole in zip(found["scale_norms"], found["norms"], strict=True) if scales]
    assert len(measured) == len(found["norms"]) // 2
    assert all(scales < 0.01 * whole for scales, whole in measured), measured


def test_exactly_what_is_learnable_trains(results):
    """Defaults: weights and weight scales. Norms, routers and initial scales keep their values, all else moves."""
    for (kind, _, dtype), path in results.items():
        if dtype != "float32":  # a step may round to nothing there
            continue
        found = load_result(path)
        start = build_model(load_recipe(path).model.path, {}, dtype=torch.float32, device=torch.device("cpu"))
        load_weights(start, load_recipe(path).model.path, progress=False)
        before = dict(start.named_parameters())
        for name, weight in found["weights"].items():
            leaf = name.rpartition(".")[2]
            frozen = "norm" in name or name.endswith("mlp.gate.weight") or leaf.endswith("_s0")
            assert (name in found["requires_grad"]) != frozen, name
            if leaf.endswith("_theta"):
                assert weight.any(), f"{kind}: {name} did not move"
            elif name in before:
                assert torch.equal(weight, before[name]) == frozen, f"{kind}: {name}"
        assert found["groups"] == ["weights", "embeddings", "weight_scales"]
