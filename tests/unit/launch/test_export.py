"""launch/export.py: what it refuses before any rank starts."""

import sys

import pytest

from engine.config.reading import save_recipe
from launch import export
from tests.lib.recipes import minimal


def test_a_checkpoint_cannot_ask_for_trust(tmp_path, monkeypatch, capsys):
    """Its recipe lies in it, and came with the checkpoint."""
    save_recipe(minimal(model={"trust_remote_code": True}), tmp_path / "recipe.yaml")
    words = ["export.py", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out")]
    asked = []
    monkeypatch.setattr(export, "export_checkpoint", lambda recipe, _: asked.append(recipe.model.trust_remote_code))
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        export.main()
    assert ended.value.code == 2 and asked == []
    said = "asks to run the Python files of model: read them, then give --trust_remote_code"
    assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--trust_remote_code"])
    export.main()
    assert asked == [True]


@pytest.mark.parametrize(
    ("sections", "form", "said"),
    [
        (
            {"quant": {"rotate": [r".*\.down_proj"]}},
            "dequantized",
            "'dequantized', expected compressed with quant.rotate",
        ),
        ({}, "dequantized", None),
    ],
)
def test_a_format_that_contradicts_the_run_is_refused(tmp_path, monkeypatch, capsys, sections, form, said):
    """The run has checked the format of its own recipe only."""
    save_recipe(minimal(**sections, export={"enabled": False}), tmp_path / "recipe.yaml")
    words = ["export.py", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out"), "--format", form]
    asked = []
    monkeypatch.setattr(export, "export_checkpoint", lambda recipe, _: asked.append(recipe.export.format))
    monkeypatch.setattr(sys, "argv", words)
    if said is None:
        export.main()
        assert asked == [form]
        return
    with pytest.raises(SystemExit) as ended:
        export.main()
    assert ended.value.code == 2 and asked == []
    assert capsys.readouterr().err.startswith(f"error: export.format: {said}")
