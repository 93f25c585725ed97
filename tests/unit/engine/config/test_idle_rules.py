"""The rules of options that would do nothing: each is broken by a recipe of its own, and only that rule."""

import pytest

from engine.config.contradictions import contradictions
from engine.config.idle_rules import RULES_OF_IDLE
from tests.unit.engine.config.test_input_rules import recipe

LORA = {"adapter.kind": "lora", "learnable.weight": False}
EVALUATED = {"eval.every": 2, "data.held_out": 5}
DISTILLED = {"loss.kd_weight": 1.0, "loss.teacher": "teacher"}
# By rule: what breaks it, and what beside that lets the option act.
BROKEN = {
    "ranges of weights are of weights that are quantized": (
        {"quant.weight_range": "mse", "quant.scheme": "fp8_kv"},
        {"quant.scheme": "fp8_static_kv"},
    ),
    "percentages are of inputs that percentiles measure": (
        {"quant.percentile": 99.0},
        {"quant.input_range": "percentile"},
    ),
    "scales that are given are used before they are measured": (
        {"quant.initial_input_scale": 0.1, "quant.calibration_batches": 0, "quant.fake_quant_start": 2},
        {"quant.fake_quant_start": 0},
    ),
    "rank is of adapters": ({"adapter.rank": 4}, LORA),
    "alpha is of adapters": ({"adapter.alpha": 8.0}, LORA),
    "rslora is of adapters": ({"adapter.rslora": True}, LORA),
    "rates of adapters have adapters": ({"optim.adapter_lr": 1e-4}, LORA),
    "rates of embeddings have embeddings that train": (
        {"optim.embedding_lr": 1e-4, "learnable.weight": False},
        {"learnable.weight": True},
    ),
    "rates of norms have norms that train": ({"optim.norm_lr": 1e-4}, {"learnable.norm": True}),
    "rates of activation scales have scales that train": (
        {"optim.act_scale_lr": 1e-4},
        {"learnable.act_scale": True},
    ),
    "student and teacher are compared where there is a teacher": ({"loss.diagnostics_every": 2}, DISTILLED),
    "plain text is cut into samples": ({"data.kind": "text", "data.too_long": "truncate"}, {"data.kind": "chat"}),
    "files to evaluate on are evaluated on": ({"data.eval": ["heldout.jsonl"]}, {"eval.every": 2}),
    "the best checkpoint has been evaluated": ({**DISTILLED, "eval.best": "kd"}, EVALUATED),
}


@pytest.mark.parametrize("rule", RULES_OF_IDLE, ids=lambda rule: rule.name)
def test_each_is_broken_alone(rule):
    settings, beside = BROKEN[rule.name]
    broken = recipe(settings)
    assert list(contradictions(broken)) == [rule.text(broken)]
    assert list(contradictions(recipe({**settings, **beside}))) == []
