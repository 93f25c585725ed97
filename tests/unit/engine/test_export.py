"""Exports that are refused before any work."""

from pathlib import Path

import pytest

from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from engine.export import check_export
from tests.unit.engine.config.recipes import minimal


def test_a_layout_that_cannot_hold_a_scheme_is_refused_before_any_work(tmp_path: Path) -> None:
    recipe = minimal(output_dir=str(tmp_path / "out"))
    recipe.export.format = "vllm_fp8"
    check_export(recipe)
    recipe.quant.lm_head = "w8a16_channel"
    with pytest.raises(RecipeError, match=r"^export.format: .* got fp8_static, w8a16_channel"):
        check_export(recipe)
    recipe.export.format = "compressed"
    check_export(recipe)


def test_an_export_is_not_renamed_to_a_link(tmp_path):
    """The directory behind it may be there and empty, be elsewhere, or nowhere."""
    (tmp_path / "there").mkdir()
    for name, target in (("to", "there"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for name in ("to", "dangling", "loop", "loop/export"):
        made = load_recipe(write_links(tmp_path, name))
        with pytest.raises(RecipeError, match=rf"^export\.dir: '.*{name}': it is a link, or lies behind one"):
            check_export(made)
    check_export(load_recipe(write_links(tmp_path, "to/export")))


def write_links(directory, name):
    path = directory / "links.yaml"
    path.write_text(
        f"model: {{path: model}}\ndata: {{train: [a.jsonl]}}\ntrain: {{steps: 1}}\noutput_dir: {directory}/out\n"
        f"export: {{dir: {directory}/{name}}}\n"
    )
    return path
