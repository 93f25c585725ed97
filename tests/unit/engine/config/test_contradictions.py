"""The rules between the options of a recipe: each is broken by a recipe of its own, and only that rule."""

from operator import attrgetter

import pytest

from engine.config import contradictions
from engine.config.config import Recipe
from engine.config.contradictions import WALKS_OF_EVENTS
from engine.config.decay_rules import RULES_OF_DECAY
from engine.config.errors import RecipeError
from engine.config.events import EventRecipe
from engine.config.ptq_init_rules import RULES_OF_INIT
from engine.config.rules import RULES, RULES_OF_SCHEMES
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe

# By rule: settings that break it, by the path of the key.
CACHE = {"loss.teacher_cache": "cache", "loss.kd": "kl_top_k", "loss.top_k": 5}
FOLLOW = {"quant.scales_follow_weights": True, "quant.weight_range": "absmax"}
GPTQ = {"quant.init": "gptq", "quant.scheme": "w4a16_g32"}
BROKEN = {
    "an event that distils has a teacher": {"schedule": [EventRecipe(at=1, loss={"kd": 1.0})]},
    "a student that teaches itself is frozen": {"loss.kd_weight": 1.0, "loss.teacher": "self"},
    "events_happen_during_the_run": {"schedule": [EventRecipe(at=10, freeze_scales=True)]},
    "events_leave_a_loss": {"schedule": [EventRecipe(at=3, loss={"lm": 0.0})]},
    "events_switch_what_the_scheme_quantizes": {
        "quant.scheme": "w4a16_g32",
        "schedule": [EventRecipe(at=1, fake_quant="activations")],
    },
    "flash attention reads where packed samples end in batches of one row alone": {
        "data.packing": True,
        "data.micro_batch_size": 2,
        "model.attn_implementation": "flash_attention_2",
    },
    "decay leaves weights their signs": {"optim.weight_decay": 2.0, "optim.embedding_lr": 1.0},
    "an evaluation has samples": {"eval.every": 2},
    "checkpoints fall on evaluations": {"eval.every": 2, "data.held_out": 5, "train.checkpoint_every": 3},
    "the best checkpoint has a teacher to be judged by": {"eval.best": "kd", "eval.every": 2, "data.held_out": 5},
    "one place says when fake quant starts": {
        "quant.fake_quant_start": 2,
        "schedule": [EventRecipe(at=1, fake_quant=True)],
    },
    "scales of activations that learn are stored": {
        "quant.scheme": "w4a16_g32",
        "learnable.act_scale": True,
    },
    "fake quant starts during the run": {"quant.fake_quant_start": 10},
    "the fp8 GEMM has fp8 codes": {"quant.compute": "fp8_gemm", "quant.scheme": "w4a16_g32"},
    "scales that alone learn get a gradient": {"quant.fake_quant_start": -1, "learnable.weight": False},
    "something gives the scales of activations": {"quant.calibration_batches": 0},
    "the warm-up ends during the run": {"optim.warmup_steps": 11},
    "formats without a quantized KV cache get none": {"export.format": "mlx", "quant.scheme": "fp8_kv"},
    "one format has a template": {"export.template": "base.gguf"},
    "plain text has no keys": {"data.kind": "text", "data.fields": {"input": "a"}},
    "a map of fields names the fields of one form of conversations": {"data.fields": {"prompt": "question"}},
    "plain text has no turns": {"data.kind": "text", "data.loss_on": "all"},
    "every file has a weight, or none has": {"data.weights": [1.0, 2.0]},
    "something learns": {"learnable.weight": False, "learnable.weight_scale": False},
    "wsd decays": {"optim.schedule": "wsd"},
    "wsd alone has steps of decay": {"optim.decay_steps": 2},
    "the decay begins during the run": {"optim.schedule": "wsd", "optim.decay_steps": 11},
    "the learning rate reaches its peak": {
        "optim.schedule": "wsd",
        "optim.warmup_steps": 6,
        "optim.decay_steps": 5,
    },
    "there is a loss": {"loss.lm_weight": 0.0},
    "distillation has a teacher": {"loss.kd_weight": 1.0},
    "kd alone has a temperature": {"loss.temperature": 2.0},
    "losses on the likeliest tokens know how many": {"loss.kd": "kl_top_k"},
    "losses on the whole vocabulary have no tail": {"loss.tail": True},
    "a cache holds the teacher's likeliest tokens": {"loss.teacher_cache": "cache"},
    "a cache has no teacher that runs": {"loss.teacher": "self", **CACHE},
    "a cache holds no distributions to compare": {"loss.diagnostics_every": 2, "loss.kd_weight": 1.0, **CACHE},
    "offload is of recomputed blocks": {"train.activation_offload": True},
    "the best checkpoint's teacher knows held-out samples": {
        "loss.kd_weight": 1.0,
        "eval.best": "kd",
        "eval.every": 2,
        "data.held_out": 5,
        **CACHE,
    },
    "scales that follow the weights are measured by absmax": {"quant.scales_follow_weights": True},
    "scales that follow the weights come from no checkpoint": {**FOLLOW, "quant.scales": "ptq"},
    "scales come from one checkpoint": {"quant.start": "gptq", "quant.scales": "ptq"},
    "a quantized start is used as it is": {"quant.start": "gptq", "quant.fake_quant_start": 2},
    "cells are those of a quantized start": {"quant.snap_to_codes": True},
    "codes that are read are not chosen": {**GPTQ, "quant.scales": "ptq"},
    "codes that are chosen stay": {**GPTQ, "quant.fake_quant_start": 2},
    "scales that are brought do not rest": {**GPTQ, "schedule": [EventRecipe(at=2, fake_quant=False)]},
    "weights below adapters do not move": {**GPTQ, "adapter.kind": "lora", "learnable.weight": False},
    "codes are chosen by samples": {**GPTQ, "quant.calibration_batches": 0},
    "a student that teaches itself starts as the original": {
        **GPTQ,
        "learnable.weight": False,
        "learnable.norm": False,
        "loss.kd_weight": 1.0,
        "loss.teacher": "self",
    },
    "codes are chosen of weights that are quantized": {**GPTQ, "quant.scheme": "fp8_kv"},
    "codes are chosen row by row": {**GPTQ, "quant.scheme": "fp8_block"},
    "weights that have scales are followed by them": {**FOLLOW, "quant.scheme": "fp8_kv"},
    "symmetric integers alone have signed scales": {"quant.signed_scales": True},
    "inputs that are measured have stored scales": {"quant.scheme": "w4a16_g32", "quant.input_range": "mse"},
    "scales of activations that are given are stored": {
        "quant.scheme": "w4a16_g32",
        "quant.initial_input_scale": 1.0,
    },
    "global scales of inputs fit the largest magnitude": {
        "quant.scheme": "nvfp4_w4a4",
        "quant.input_range": "percentile",
    },
    "global scales of inputs are measured": {
        "quant.scheme": "nvfp4_w4a4",
        "quant.initial_input_scale": 1.0,
        "quant.calibration_batches": 0,
    },
    "one source gives the scales of activations": {"quant.initial_input_scale": 1.0},
    "the fp8 GEMM gives bfloat16": {"quant.compute": "fp8_gemm", "model.dtype": "float32"},
    "weight scales that alone learn exist": {"quant.scheme": "fp8_kv", "learnable.weight": False},
}


ALL_RULES = (*RULES, *RULES_OF_INIT, *RULES_OF_DECAY, *RULES_OF_SCHEMES)
NAMES = [rule.name for rule in ALL_RULES] + [walk.__name__ for walk in WALKS_OF_EVENTS]


def recipe() -> Recipe:
    return Recipe(ModelRecipe("model"), DataRecipe(["train.jsonl"]), TrainRecipe(steps=10), "out")


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_broken_alone(name):
    broken = recipe()
    for key, value in BROKEN[name].items():
        section, _, option = key.rpartition(".")
        setattr(getattr(broken, section) if section else broken, option, value)
    found = {rule.name: [rule.text(broken)] for rule in ALL_RULES if rule.broken(broken)}
    found |= {walk.__name__: lines for walk in WALKS_OF_EVENTS if (lines := list(walk(broken)))}
    assert list(found) == [name]
    with pytest.raises(RecipeError) as refused:
        broken.validate()
    assert str(refused.value).splitlines() == found[name]


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
def test_a_rule_names_keys_that_there_are(rule):
    """And its line can be written for any recipe."""
    line = rule.text(recipe())
    assert line.startswith(f"{rule.key}: ") and ", expected " in line
    for key in rule.key.split(", "):
        attrgetter(key)(recipe())


@pytest.mark.parametrize(
    ("start", "events", "refused"),
    [
        ((1.0, 0.0), [EventRecipe(at=3, loss={"lm": 0.0, "kd": 1.0})], []),
        ((1.0, 1.0), [EventRecipe(at=2, loss={"kd": 0.0}), EventRecipe(at=5, loss={"lm": 0.0})], [1]),
        ((1.0, 1.0), [EventRecipe(at=5, loss={"kd": 0.0}), EventRecipe(at=2, loss={"lm": 0.0})], [0]),
        ((1.0, 1.0), [EventRecipe(at=2, loss={"kd": 0.0}), EventRecipe(when="loss/lm < 2", loss={"lm": 0.0})], [0, 1]),
        ((1.0, 0.0), [EventRecipe(at=2, loss={"kd": 1.0}), EventRecipe(when="loss/lm < 2", loss={"lm": 0.0})], [1]),
        ((1.0, 0.0), [EventRecipe(every=2, loss={"kd": 1.0}), EventRecipe(at=4, loss={"lm": 0.0, "kd": 0.5})], []),
        (
            (1.0, 0.0),
            [EventRecipe(every=2, loss={"lm": 2.0}), EventRecipe(when="loss/lm < 1", lr={"weights": 0.0})],
            [],
        ),
        ((0.0, 1.0), [EventRecipe(every=2, loss={"kd": 0.0})], [0]),
    ],
)
def test_the_weights_are_followed_through_the_events(start, events, refused):
    """Which leave no loss at the time at which one comes, or may come."""
    found = recipe()
    found.loss.lm_weight, found.loss.kd_weight = start
    found.schedule = events
    problems = list(contradictions.events_leave_a_loss(found))
    assert [problem.partition(".")[0] for problem in problems] == [f"schedule[{index}]" for index in refused]
    assert all("expected a weight above 0 for the other loss in the same event" in problem for problem in problems)


def test_every_rule_has_its_example_and_says_what_must_hold():
    assert len(set(NAMES)) == len(NAMES) and set(NAMES) == set(BROKEN)
    walks = {
        name: value
        for name, value in vars(contradictions).items()
        if isinstance(value, type(recipe)) and value.__module__ == contradictions.__name__
    }
    assert [*walks.values()] == [contradictions.contradictions, *WALKS_OF_EVENTS]
    assert all(walk.__doc__ and "\n" not in walk.__doc__ for walk in WALKS_OF_EVENTS)
