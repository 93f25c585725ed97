"""Advice for a recipe that does not fit: the changes, their figures, and a set of changes that fits."""

from copy import deepcopy

import pytest

from launch.memory import main
from tests.lib.recipes import bare_recipe
from tools.memory.planner import GB, RESERVE, Advisor, Planner, Saving, possible

TAUGHT = {"kd_weight": 1.0}


@pytest.fixture
def advisor(tmp_path):
    """A run on two ranks of two rows, with a teacher."""
    loss = {**TAUGHT, "teacher": str(tmp_path / "model")}
    data = {"micro_batch_size": 2, "max_length": 512}
    return Advisor(bare_recipe(tmp_path, loss=loss, data=data, deepspeed="zero2"), 2)


def test_each_change_has_the_figure_of_the_recipe_with_it(advisor):
    """Changes that fit come first, in the order in which to try them; changes that save nothing are left out."""
    before = advisor.predict([]).peak
    limit = (before + advisor.predict([Saving({"deepspeed": "zero3"}, "")]).peak) // 2
    found = advisor.alone(limit)
    fits = [one.peak <= limit for _, one in found]
    assert fits == sorted(fits, reverse=True) and True in fits and all(one.peak < before for _, one in found)
    order = [str(change) for change in possible(advisor.recipe)]
    assert [str(change) for change, one in found if one.peak <= limit] == [
        name for name in order if name in {str(change) for change, one in found if one.peak <= limit}
    ]
    figures = {str(change): one.peak for change, one in found}
    recipe = deepcopy(advisor.recipe)
    recipe.loss.teacher_weights = "int8"
    recipe.validate()
    assert figures["loss.teacher_weights: int8"] == Planner(recipe).predict("zero2", 2).peak < before
    assert "data.micro_batch_size: 1, train.gradient_accumulation_steps: 2" in figures


def test_changes_that_fit_together_are_all_needed(advisor):
    least = min(one.peak for _, one in advisor.alone(0))
    changes, best = advisor.together(least - 1)
    assert len(changes) > 1 and best.peak < least
    for change in changes:
        left = advisor.predict([one for one in changes if one is not change])
        assert left is None or left.peak > least - 1
    assert advisor.together(0) is None


def test_the_command_says_what_to_change(advisor, tmp_path, capsys):
    peak = advisor.predict([]).peak
    arguments = ["--config", str(tmp_path / "recipe.yaml"), "--ranks", "2", "--strategies", "zero2", "--gpu_gb"]
    main([*arguments, str((RESERVE + peak) / GB + 1)])
    assert "best first" not in capsys.readouterr().out
    main([*arguments, str((RESERVE + peak - 1) / GB)])
    said = capsys.readouterr().out
    assert "zero2 does not fit" in said and "| optim.moments: 8bit " in said
