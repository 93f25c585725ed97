"""Evaluations of held-out samples while a run trains: they change nothing, and are of the model as it is served."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from data.chat import read_chat
from data.held_out import split_held_out
from engine.checkpoint.find import best_checkpoint
from engine.config.reading import load_recipe
from tests.lib.definitions import kd_loss
from tests.lib.plain import QUANTIZED_RTOL, load_result, plain_model, plain_weights
from tests.lib.variants import Variant, run_variants

HELD_OUT = {
    "data": {"held_out": 7, "max_length": 128, "micro_batch_size": 2},
    "learnable": {"act_scale": True},
    "optim": {"schedule": "constant", "lr": 3e-2, "warmup_steps": 0},
    "schedule": [{"at": 0, "fake_quant": False}, {"at": 2, "fake_quant": "weights"}, {"at": 3, "fake_quant": True}],
    "train": {"steps": 5, "checkpoint_every": 1, "keep_checkpoints": 1},
    "eval": {"every": 1, "best": "total"},
}
UNSEEN = {"eval": {"every": 0}, "train": {"steps": 5}}


@pytest.fixture(scope="module", params=(pytest.param(1, marks=pytest.mark.full), 3))
def paths(tmp_path_factory, request):
    """One launch for a run that evaluates and one that does not."""
    runs = {
        "heldout": Variant({**HELD_OUT, "stage": request.param}, action="keep_evaluations"),
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


def test_evaluation_is_of_the_held_out_samples_as_the_model_would_be_served(paths):
    """Fake-quantized with scales that fit, in steps in which training is not, too; a mean over all ranks' tokens."""
    path = paths["heldout"]
    found, settings = load_result(path), load_recipe(path)
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
        assert evaluation["eval/total"] == pytest.approx(lm + settings.loss.kd_weight * kd, rel=QUANTIZED_RTOL), step
        assert evaluation["eval/perplexity"] == pytest.approx(math.exp(evaluation["eval/lm"]))


def test_the_checkpoint_of_the_best_evaluation_is_kept_beside_the_last(paths):
    found, settings = load_result(paths["heldout"]), load_recipe(paths["heldout"])
    totals = [evaluation["eval/total"] for evaluation in found["seen"]["evaluations"]]
    step = 1 + totals.index(min(totals))
    directory = Path(settings.output_dir) / "checkpoints"
    best = best_checkpoint(directory)
    assert (best.step, best.metric, best.value) == (step, "eval/total", min(totals))
    assert {path.name for path in directory.glob("step_*")} == {f"step_{kept:08d}" for kept in (step, 5)}
