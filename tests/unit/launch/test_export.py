"""launch/export.py: what it refuses before any rank starts."""

import sys

import pytest

from engine.config.config import Recipe
from engine.config.reading import save_recipe
from launch import export
from tests.lib.recipes import minimal


@pytest.fixture
def asked(monkeypatch) -> list[Recipe]:
    """Recipes of what is exported; no rank starts."""
    found = []
    monkeypatch.setattr(export, "export_checkpoint", lambda recipe, _: found.append(recipe))
    return found


def test_a_checkpoint_cannot_ask_for_trust(tmp_path, monkeypatch, capsys, asked):
    """Its recipe lies in it, and came with the checkpoint."""
    save_recipe(minimal(model={"trust_remote_code": True}), tmp_path / "recipe.yaml")
    words = ["export.py", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        export.main()
    assert asked == []
    said = "asks to run the Python files of model: read them, then give --trust_remote_code"
    assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--trust_remote_code"])
    export.main()
    assert [recipe.model.trust_remote_code for recipe in asked] == [True]


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path, monkeypatch, capsys, asked):
    """It has a recipe.yaml, too."""
    save_recipe(minimal(), tmp_path / "recipe.yaml")
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(sys, "argv", ["export.py", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        export.main()
    assert asked == []
    assert f"{tmp_path} is a run's output_dir, expected a step directory in" in capsys.readouterr().err


def test_a_format_that_contradicts_the_run_is_refused(tmp_path, monkeypatch, capsys, asked):
    """The run has checked the format of its own recipe only."""
    words = ["export.py", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out"), "--format", "dequantized"]
    monkeypatch.setattr(sys, "argv", words)
    save_recipe(minimal(export={"enabled": False}), tmp_path / "recipe.yaml")
    export.main()
    assert [recipe.export.format for recipe in asked] == ["dequantized"]
    rotated = {"rotate": [r".*\.down_proj"]}
    save_recipe(minimal(quant=rotated, export={"enabled": False}), tmp_path / "recipe.yaml")
    with pytest.raises(SystemExit, match="2"):
        export.main()
    said = "error: export.format: 'dequantized', expected compressed with quant.rotate"
    assert len(asked) == 1 and capsys.readouterr().err.startswith(said)
