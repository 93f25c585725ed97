"""Evaluation while training on two ranks: of the model as it is served; it moves nothing, and the best is kept.

A run that a signal ends is resumed: it knows its last evaluation, and goes on bit for bit.
"""

import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from data.chat import read_chat
from data.loader import split_held_out
from engine.checkpoint.find import best_checkpoint
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.report import MEASURED, read_measured
from model.ranks import rank
from tests.distributed.engine.scripts.train import run
from tests.lib.curves import curves
from tests.lib.definitions import kd_loss
from tests.lib.launcher import on_ranks
from tests.lib.plain import QUANTIZED_RTOL, load_result, plain_model, plain_weights
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import Variant, assert_same_weights, run_variants

HELD_OUT = {
    "data": {"held_out": 7, "max_length": 128, "micro_batch_size": 2},
    "learnable": {"act_scale": True},
    "optim": {"schedule": "constant", "lr": 3e-2, "warmup_steps": 0},
    "schedule": [
        *({"at": 0, "fake_quant": False}, {"at": 2, "fake_quant": "weights"}, {"at": 3, "fake_quant": True}),
        {"at": 3, "loss": {"kd": 20.0}},
    ],
    "train": {"steps": 5, "checkpoint_every": 1, "keep_checkpoints": 1},
    "eval": {"every": 1, "best": "total"},
}
UNSEEN = {"eval": {"every": 0}, "train": {"steps": 5}}


def keep_evaluations(loop: Loop, seen: dict[str, Any]) -> None:
    """Keep the results of each evaluation, which comes before the actions of its step."""
    seen["evaluations"] = []
    loop.every(1)(lambda state: seen["evaluations"].append(dict(state.evaluation)))


@pytest.fixture(scope="module", params=(pytest.param(1, marks=pytest.mark.full), 3))
def paths(tmp_path_factory, request):
    """One job for a run that evaluates and one that does not."""
    runs = {
        "heldout": Variant({**HELD_OUT, "stage": request.param}, action=keep_evaluations),
        "unseen": Variant({**HELD_OUT, **UNSEEN, "stage": request.param}),
    }
    return run_variants(tmp_path_factory.mktemp("in_training"), runs)


def test_evaluation_changes_nothing_that_trains(paths):
    """Bit for bit, also while fake quant is off, for all but the scales that are not in use."""
    watched, unseen = (load_result(paths[name]) for name in ("heldout", "unseen"))
    assert watched["losses"] == unseen["losses"]
    for step, (found, expected) in enumerate(zip(watched["after"], unseen["after"], strict=True)):
        resting = () if step >= 3 else ("input_s0",) if step == 2 else ("input_s0", "weight_s0")
        for name, value in expected.items():
            assert name.endswith(resting or "no scale") or torch.equal(found[name], value), (step, name)


def test_memory_json_counts_no_parameters_that_an_evaluation_gathers(paths):
    watched, unseen = (read_measured(Path(load_recipe(path).output_dir, MEASURED)).items for path in paths.values())
    assert watched == unseen


def test_evaluation_is_of_the_held_out_samples_as_the_model_would_be_served(paths):
    """Fake-quantized with scales that fit, in steps in which training is not, too; a mean over all ranks' tokens."""
    found, settings = load_result(paths["heldout"]), load_recipe(paths["heldout"])
    evaluations = found["seen"]["evaluations"]
    assert len(evaluations) == 5
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    samples, _ = read_chat(settings.data.train, tokenizer, max_length=settings.data.max_length)
    training, held_out = split_held_out(samples, settings.data.held_out, settings.data.seed)
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
        weight = 20.0 if step >= 3 else settings.loss.kd_weight
        assert evaluation["eval/total"] == pytest.approx(lm + weight * kd, rel=10 * QUANTIZED_RTOL), step
        assert evaluation["eval/perplexity"] == pytest.approx(math.exp(evaluation["eval/lm"]))


def test_the_checkpoint_of_the_best_evaluation_is_kept_beside_the_last(paths):
    """Only evaluations with the same loss weights are compared. Here an event raises a weight, so the totals before it
    are smaller but do not count."""
    found, settings = load_result(paths["heldout"]), load_recipe(paths["heldout"])
    totals = [evaluation["eval/total"] for evaluation in found["seen"]["evaluations"]]
    assert max(totals[:3]) < min(totals[3:])
    step = 1 + totals.index(min(totals[3:]))
    directory = Path(settings.output_dir) / "checkpoints"
    best = best_checkpoint(directory)
    assert (best.step, best.metric, best.value) == (step, "eval/total", min(totals[3:]))
    assert {path.name for path in directory.glob("step_*")} == {f"step_{kept:08d}" for kept in (step, 5)}


# ---------------------------------------------------------------------------------------------------------------------
# Runs that are stopped and resumed
# ---------------------------------------------------------------------------------------------------------------------

STEPS, EVERY, START = 6, 2, 3
STOP = 3  # steps done when signals stop the run, between two evaluations


def keep(loop: Loop) -> dict[str, Any]:
    """Run a loop; keep the evaluation that each step began with."""
    evaluations: list[dict[str, Any]] = []
    for step in range(loop.recipe.train.steps):
        loop.at(step)(lambda state: evaluations.append(dict(state.evaluation)))
    return {**run(loop), "evaluations": evaluations}


def stop_and_resume(directory: Path) -> dict[str, Any]:
    """A run straight through, and one in three parts: signals to rank 1 alone end the first, one the second behind the
    last step, so that the third has nothing left but its evaluation and the export."""
    found: dict[str, Any] = {"straight": keep(Loop(load_recipe(directory / "straight.yaml")))}
    recipe = load_recipe(directory / "parts.yaml")
    loop = Loop(recipe)

    @loop.at(STOP - 1)
    def stop(state: LoopState) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1) if rank() == 1 else ():
            os.kill(os.getpid(), number)

    found["first"] = keep(loop)
    found["handlers"] = [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGUSR1)]
    found["too early"] = (directory / "parts" / "export").exists()
    recipe = replace(recipe, train=replace(recipe.train, resume=True))
    loop = Loop(recipe)
    loop.at(STEPS - 1)(lambda state: os.kill(os.getpid(), signal.SIGTERM))
    found["second"] = keep(loop)
    run(Loop(recipe))
    found["mark"] = best_checkpoint(directory / "parts" / "checkpoints")
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One job; what rank 0 found, and the output. Fake quant starts in the middle, so that evaluations before it
    measure scales of their own."""
    directory = tmp_path_factory.mktemp("stopped")
    model, chats = tiny_checkpoint(directory / "model"), write_chats(directory / "chats.jsonl")
    for name in ("straight", "parts"):
        write_recipe(
            directory,
            name,
            model,
            chats,
            # Batches of two: one rank runs out of samples, and its last batch has fewer than the other's.
            data={"held_out": 5},
            train={"steps": STEPS, "checkpoint_every": EVERY, "keep_checkpoints": 1},
            optim={"lr": 1e-2},
            learnable={"act_scale": True},
            quant={"fake_quant_start": START, "calibration_batches": 2},
            loss={"diagnostics_every": 1},
            eval={"every": EVERY},
            export={"enabled": name == "parts"},
        )
    (found, _), output = on_ranks(stop_and_resume, directory)
    return directory, found, output


def test_signals_to_one_rank_stop_all_after_the_step_with_a_checkpoint(ran):
    directory, found, output = ran
    assert len(found["first"]["losses"]) == STOP and f"asked to stop: step {STOP} is saved" in output
    assert found["handlers"] == [True, True]
    assert not found["too early"] and (directory / "parts" / "export").is_dir()


def test_other_libraries_are_silent(ran):
    """In runs with evaluations, checkpoints, a resume and an export."""
    *_, output = ran
    heard = [line for line in output.splitlines() if re.search(r"\[(DEBUG|INFO|WARNING)\]|Warning: |^\[\w+\] ", line)]
    assert heard == [] and "resumed: " in output


def test_a_resumed_run_goes_on_bit_for_bit_and_knows_the_last_evaluation(ran):
    _, found, _ = ran
    straight, first, second = (found[name] for name in ("straight", "first", "second"))
    assert len(straight["evaluations"]) == STEPS and all(straight["evaluations"])
    assert second["evaluations"] == straight["evaluations"][STOP:]
    assert first["losses"] + second["losses"] == straight["losses"]
    assert_same_weights(second, straight)


def test_the_best_checkpoint_is_the_one_of_the_smallest_loss(ran):
    """Also where a signal ended the last step, which was saved without an evaluation: the run that goes on makes it."""
    directory, found, _ = ran
    values = dict(curves(directory / "straight")["eval/lm"])
    best = best_checkpoint(directory / "straight" / "checkpoints")
    assert best is not None and best.step == min(values, key=values.__getitem__) == STEPS
    assert (directory / "straight" / "checkpoints" / best.name / "state.json").is_file()
    assert found["mark"] == best


def test_curves_have_one_point_at_a_step(ran):
    """Diagnostics are those of training; what is measured on held-out samples has tags of its own."""
    steps = {tag: [step for step, _ in points] for tag, points in curves(ran[0] / "straight").items()}
    assert steps["kd/forward_kl"] == steps["loss/lm"] == list(range(1, STEPS + 1))
    assert steps["eval/lm"] == steps["eval/kd/cakld"] == list(range(0, STEPS + 1, EVERY))
