"""The jobs of the half hour on a new GPU ask for files, tests and keys that exist (`make test-half-hour` runs them)."""

import re

import pytest

from benchmarks.gpu.half_hour import MORE_TRAININGS, STAGES, TRAININGS, Place
from benchmarks.gpu.train import recipe_of
from engine.config.reading import parse_recipe
from tests.lib.root import ROOT


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_jobs_ask_for_what_there_is(stage, dry, tmp_path):
    """Scripts and tests exist; names are unique; limits leave no job without its time where all others are quick."""
    jobs = STAGES[stage](Place(tmp_path / "out", tmp_path / "work", dry))
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        words = [word for word in job.command if word.endswith(".py") or word.startswith("tests/")]
        assert words and all((ROOT / word).exists() for word in words), job.command
        assert 0 < job.limit < 570 and re.compile(job.shown)


@pytest.mark.parametrize("name", [*TRAININGS, *MORE_TRAININGS])
def test_overrides_of_every_training_are_keys_of_a_recipe(name, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(str(recipe_of(name, tmp_path, dry=True)).replace("True", "true").replace("False", "false"))
    overrides = [word for word in {**TRAININGS, **MORE_TRAININGS}[name] if word != "--profile"]
    parse_recipe(["--config", str(path), *overrides], check_files=False)
