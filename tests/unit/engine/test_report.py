"""What people are told: the picture of the weights' errors, and the summary of a run."""

import numpy as np
import pytest

from engine.metrics import Summary
from engine.report import decibels, error_picture


def test_decibels():
    assert decibels(0.01) == pytest.approx(-20)
    assert decibels(0.0) == -100


def test_the_picture_has_a_square_for_each_place_and_layer_and_the_mean_of_experts():
    errors = {
        "model.layers.0.self_attn.q_proj": -30.0,
        "model.layers.2.self_attn.q_proj": -20.0,
        "model.layers.2.mlp.experts.0.up_proj": -10.0,
        "model.layers.2.mlp.experts.1.up_proj": -12.0,
        "lm_head": -1.0,
    }
    axes = error_picture(errors, 7).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["self_attn.q_proj", "mlp.experts.*.up_proj"]
    expected = np.array([[-30.0, np.nan, -20.0], [np.nan, np.nan, -11.0]])
    np.testing.assert_array_equal(np.ma.filled(axes.images[0].get_array(), np.nan), expected)
    assert "step 7" in axes.get_title()


def test_the_summary_adds_up_and_says_where_losses_began_and_ended():
    summary = Summary()
    summary.step({"loss/total": 3.0, "loss/lm": 3.0}, tokens=100, valid_tokens=40)
    summary.step({"loss/total": 2.0, "loss/lm": 1.5, "loss/kd/kl": 0.5}, tokens=50, valid_tokens=20)
    text = summary.text(devices=2, skipped=1, peak_bytes=2**30, evaluations=({"eval/lm": 4.0}, {"eval/lm": 2.5}))
    first, *rest = text.splitlines()
    assert first.startswith("2 steps, 150 tokens (60 with a target) in 00:00:00, ")
    assert first.endswith("at most 1.00 GiB on rank 0, 1 steps left out")
    assert [" ".join(line.split()) for line in rest] == [
        "loss/total 3.0000 -> 2.0000",
        "loss/lm 3.0000 -> 1.5000",
        "loss/kd/kl 0.5000 -> 0.5000",
        "eval/lm 4.0000 -> 2.5000",
    ]
