"""Every distillation loss, and every form of data, through the loop: against formulas and against a plain loop."""

from dataclasses import replace

import pytest
import torch

from data.loader import valid_tokens
from engine.config.reading import load_recipe
from engine.losses.kd import KD_KINDS
from tests.lib.definitions import kd_loss
from tests.lib.plain import (
    assert_equals_plain_loop,
    inputs_of,
    load_result,
    plain_loaders,
    plain_model,
    plain_weights,
)
from tests.lib.recipes import write_chats
from tests.lib.tiny import TEXT, tiny_checkpoint
from tests.lib.variants import NO_TEACHER, Variant, run_variants


def without_targets(stage: int) -> Variant:
    sections = {"stage": stage, "loss": NO_TEACHER, "train": {"steps": 2}}
    return Variant(sections, "qwen3_moe", action="rank_1_without_targets")


CALIBRATED = {"stage": 3, "loss": NO_TEACHER, "train": {"steps": 2}}
PACKED = {"data": {"packing": True, "micro_batch_size": 1}}
RUNS = {
    "losses": Variant(
        {"stage": 3, "optim": {"lr": 0.0, "scale_lr": 0.0}, "train": {"steps": len(KD_KINDS)}}, action="losses"
    ),
    "fields": Variant({"stage": 3, "train": {"steps": 2}}),
    "text": Variant({"stage": 2, "train": {"steps": 2}, "loss": NO_TEACHER}),
    "packed": Variant({"stage": 3, "train": {"steps": 2, "activation_checkpointing": True}, "data": {"packing": True}}),
    "unmasked": Variant({"stage": 3, "train": {"steps": 2}}, "qwen3_moe", action="without_mask"),
    "waits": Variant(
        {"stage": 3, "train": {"steps": 3, "quant_stats_every": 3}, "loss": NO_TEACHER},
        "qwen3_moe",
        action="host_waits",
    ),
    # Logits go on after lm_head: through a soft cap, and times a factor. The teacher's do too.
    "capped": Variant({"stage": 3}, "gemma2"),
    "scaled": Variant({"stage": 1, "loss": {"kd": "rkl"}}, "cohere2"),
    # All samples calibrate: of the packed rows a rank has several samples, others than the other rank has.
    "calibrated_padded": Variant({**CALIBRATED, "quant": {"calibration_batches": 12}}, dtype="bfloat16"),
    "calibrated_packed": Variant({**CALIBRATED, **PACKED, "quant": {"calibration_batches": 16}}, dtype="bfloat16"),
    **{f"empty_{stage}": without_targets(stage) for stage in (1, 3)},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One launch for all runs."""
    directory = tmp_path_factory.mktemp("losses")
    # Far from the student, so that the directions of the divergences and the confidence matter.
    teacher = tiny_checkpoint(directory / "model-teacher", "qwen3", seed=1)
    fields = write_chats(directory / "fields.jsonl", question="question", answer="reply")
    text = directory / "text.txt"
    text.write_text(TEXT * 20)
    sections = {
        "losses": {"loss": {"teacher": str(teacher), "top_k": 5}},
        "fields": {"data": {"train": [str(fields)], "fields": {"input": "question", "output": "reply"}}},
        "text": {"data": {"train": [str(text)], "kind": "text", "max_length": 24}},
    }
    runs = {name: replace(run, sections={**run.sections, **sections.get(name, {})}) for name, run in RUNS.items()}
    return run_variants(directory, runs)


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


def test_padded_rows_without_a_mask_equal_a_plain_loop_with_one(paths):
    """Of a model that was asked, with its teacher, on both ranks."""
    seen = load_result(paths["unmasked"])["seen"]
    assert not seen["needs_mask"] and seen["given"] == {"input_ids", "use_cache"}
    batches = [batch for loader in plain_loaders(load_recipe(paths["unmasked"])) for batch in loader.step(0)]
    assert any((batch["attention_mask"] == 0).any() for batch in batches), "nothing is padded"
    assert_equals_plain_loop(paths["unmasked"])


# What asks for a value in a step: of tensors that lie on the host on a GPU too (batches before they are copied, the
# step counts of torch's Adam),
ON_THE_HOST = {
    "data/loader.py: on_device",
    "data/loader.py: <genexpr>",
    "data/loader.py: pad",
    "data/loader.py: real_tokens",
    "deepspeed/runtime/zero/stage3.py: step_with_gradscaler",
}
# on a CPU alone, where experts are multiplied in a loop,
ON_A_CPU = {"quant/gemm.py: _split"}
# and what remains: the counts before the first forward; DeepSpeed's look whether the norm is finite, before the update;
# the losses and the norm after it.
WAITS = {
    "engine/checks.py: sum_where_ranks_agree": 1,
    "deepspeed/runtime/utils.py: is_invalid_grad_norm": 1,
    "engine/step.py: _reduce": 1,
}


def test_a_step_waits_for_its_counts_and_for_its_losses_alone(paths):
    """Nothing between: no forward, loss, backward or update."""
    seen = load_result(paths["waits"])["seen"]
    found = {name: count for name, count in seen["plain"].items() if name not in ON_THE_HOST | ON_A_CPU}
    assert found == WAITS
    # A step that measures the quantization reads more, but of the scales' gradients one norm.
    assert seen["measured"]["model/zero/optimizer_state.py: gradient_norm"] == 1


@pytest.mark.parametrize("name", ("capped", "scaled"))
def test_models_that_change_their_logits_equal_a_plain_loop(paths, name):
    assert_equals_plain_loop(paths[name])


def test_samples_of_packed_rows_calibrate_as_they_do_by_themselves(paths):
    """On stage 3, where a forward is a collective, ranks have unequal numbers of samples to look at."""
    padded, packed = (load_result(paths[f"calibrated_{rows}"])["weights"] for rows in ("padded", "packed"))
    scales = [name for name in padded if name.endswith("input_s0")]
    assert scales and all(torch.equal(packed[name], padded[name]) for name in scales)


@pytest.mark.parametrize("stage", (1, 3))
def test_a_rank_without_targets_takes_part_with_zero(paths, stage):
    """The mean is over rank 0's tokens; the ranks stay together, with experts too."""
    assert_equals_plain_loop(paths[f"empty_{stage}"], without_targets=(1,))


@pytest.mark.full
def test_a_rank_without_targets_takes_part_with_zero_on_stage_2_too(tmp_path):
    (path,) = run_variants(tmp_path, {"empty_2": without_targets(2)}).values()
    assert_equals_plain_loop(path, without_targets=(1,))
