"""launch/export.py: what it refuses before any rank starts."""

import sys

import pytest

from engine.config.config import Recipe
from engine.config.reading import save_recipe
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe
from launch import export


@pytest.mark.parametrize("trusts", [False, True])
def test_a_checkpoint_cannot_ask_for_trust(tmp_path, monkeypatch, capsys, trusts):
    """Its recipe lies in it, written by whoever made the checkpoint."""
    recipe = Recipe(
        model=ModelRecipe(path="model", trust_remote_code=True),
        data=DataRecipe(train=["train.jsonl"]),
        train=TrainRecipe(steps=1),
        output_dir="run",
    )
    save_recipe(recipe, tmp_path / "recipe.yaml")
    words = ["export.py", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*words, *(["--trust_remote_code"] if trusts else [])])
    asked = []
    monkeypatch.setattr(export, "export_checkpoint", lambda recipe, _: asked.append(recipe.model.trust_remote_code))
    if trusts:
        export.main()
        assert asked == [True]
        return
    with pytest.raises(SystemExit) as ended:
        export.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and asked == []
    assert "asks to run the Python files of model: read them, then give --trust_remote_code" in error
