"""TensorBoard files are no reason to end a run, wherever they lie."""

import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine import metrics
from engine.config.config import Recipe
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe
from engine.metrics import Metrics

RECIPE = Recipe(model=ModelRecipe("model"), data=DataRecipe(["a"]), train=TrainRecipe(steps=1), output_dir="run")


def write_all(found: Metrics, step: int) -> None:
    """Everything that a run writes in a step."""
    found.log({"loss/total": 1.0}, step)
    found.histogram("quant/scales", [1.0, 2.0], step)
    found.picture("quant/picture", Figure, step)
    found.results(RECIPE, {"loss/total": 1.0})
    found.flush()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_directory_that_goes_costs_one_warning_and_a_few_points(tmp_path, monkeypatch, capsys):
    recipe, directory = tmp_path / "recipe.yaml", tmp_path / "tensorboard"
    recipe.write_text("a: 1")
    found = Metrics(directory, recipe)
    write_all(found, 1)
    shutil.rmtree(directory)
    directory.touch()  # nor can it be made again
    for step in (2, 3, 4):
        write_all(found, step)
    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.0)
    write_all(found, 5)
    directory.unlink()
    write_all(found, 6)
    found.close()
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 and f"warning: {directory} cannot be written (" in said
    curves = EventAccumulator(str(directory))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss/total")] == [6]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_from_the_start(tmp_path, capsys):
    recipe, directory = tmp_path / "recipe.yaml", tmp_path / "tensorboard"
    recipe.write_text("a: 1")
    directory.touch()
    found = Metrics(Path(directory), recipe)
    write_all(found, 1)
    found.close()
    assert capsys.readouterr().out.count("points are missing in TensorBoard") == 1
