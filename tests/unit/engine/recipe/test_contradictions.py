"""The rules between the sections of a recipe: each is broken by a recipe of its own, and only that rule."""

import pytest

from engine.recipe import contradictions
from engine.recipe.checks import RecipeError
from engine.recipe.contradictions import RULES
from engine.recipe.events import EventRecipe
from engine.recipe.recipe import Recipe
from engine.recipe.sections import DataRecipe, ModelRecipe, TrainRecipe

# By rule: settings that break it, by the path of the key.
BROKEN = {
    "an_event_that_distils_has_a_teacher": {"schedule": [EventRecipe(at=1, loss={"kd": 1.0})]},
    "a_student_that_teaches_itself_is_frozen": {"loss.kd_weight": 1.0, "loss.teacher": "self"},
    "events_happen_during_the_run": {"schedule": [EventRecipe(at=10, freeze_scales=True)]},
    "events_leave_a_loss": {"schedule": [EventRecipe(at=3, loss={"lm": 0.0})]},
    "events_switch_what_the_scheme_quantises": {
        "quant.scheme": "w4a16_g32",
        "schedule": [EventRecipe(at=1, fake_quant="activations")],
    },
    "flash_attention_packs_a_row_at_a_time": {
        "data.packing": True,
        "data.micro_batch_size": 2,
        "model.attn_implementation": "flash_attention_2",
    },
    "an_evaluation_has_samples": {"eval.every": 2},
    "checkpoints_fall_on_evaluations": {"eval.every": 2, "data.held_out": 5, "train.checkpoint_every": 3},
    "the_best_checkpoint_is_chosen_by_a_loss_that_is_measured": {"eval.best": "kd"},
    "one_place_says_when_fake_quant_starts": {
        "quant.fake_quant_start": 2,
        "schedule": [EventRecipe(at=1, fake_quant=True)],
    },
    "scales_of_activations_are_set_only_where_they_are_stored": {
        "quant.scheme": "w4a16_g32",
        "learnable.act_scale": True,
    },
    "fake_quant_starts_during_the_run": {"quant.fake_quant_start": 10},
    "the_fp8_gemm_has_fp8_codes": {"quant.compute": "fp8_gemm", "quant.scheme": "w4a16_g32"},
    "what_learns_gets_a_gradient": {"quant.fake_quant_start": -1, "learnable.weight": False},
    "one_source_gives_the_scales_of_activations": {"quant.calibration_batches": 0},
    "the_learning_rate_reaches_its_peak": {"optim.warmup_steps": 11},
}


def recipe() -> Recipe:
    return Recipe(ModelRecipe("model"), DataRecipe(["train.jsonl"]), TrainRecipe(steps=10), "out")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_is_broken_alone(rule):
    broken = recipe()
    for key, value in BROKEN[rule.__name__].items():
        section, _, name = key.rpartition(".")
        setattr(getattr(broken, section) if section else broken, name, value)
    assert [other.__name__ for other in RULES if list(other(broken))] == [rule.__name__]
    with pytest.raises(RecipeError) as refused:
        broken.validate()
    assert str(refused.value).splitlines() == list(rule(broken))


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


def test_every_rule_is_listed_and_says_what_must_hold():
    rules = {
        name: value
        for name, value in vars(contradictions).items()
        if callable(value) and value.__module__ == contradictions.__name__ and isinstance(value, type(recipe))
    }
    assert list(rules) == [rule.__name__ for rule in RULES] == list(BROKEN)
    assert all(rule.__doc__ and rule.__doc__.endswith(".") and "\n" not in rule.__doc__ for rule in RULES)
