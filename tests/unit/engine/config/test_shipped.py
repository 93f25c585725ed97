"""The recipes that ship: one per model, and one per preset that wants more than its name."""

import itertools
from pathlib import Path

import pytest
import yaml

from engine.config.reading import load_recipe, parse_recipe
from quant import PRESETS
from tests.lib.root import ROOT

SHIPPED = sorted((ROOT / "launch" / "recipes").glob("*.yaml"))
OF_SCHEMES = sorted((ROOT / "launch" / "recipes" / "schemes").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    assert f"launch/train.py --config {path.relative_to(ROOT)}" in path.read_text().split("\n\n")[0], "its command"
    assert recipe.output_dir == f"runs/{path.stem}"
    assert (ROOT / "ds_configs" / f"{recipe.deepspeed}.json").is_file()
    learn = recipe.learnable
    if "scales_only" in path.stem:
        assert (learn.weight, learn.weight_scale, learn.norm) == (False, True, False)
    if "lora" in path.stem:
        assert recipe.adapter.merge and not learn.weight_scale


@pytest.mark.parametrize("path", OF_SCHEMES, ids=lambda path: path.stem)
def test_recipe_of_a_scheme(path: Path) -> None:
    """It opens with its command, which works on the files that are there."""
    text = path.read_text()
    command = " ".join(line.strip("# \\") for line in text.split("\n\n")[0].splitlines()[2:])
    words = command.split()
    named = [ROOT / word for before, word in itertools.pairwise(words) if before == "--config"]
    assert named[1] == path and all(file.is_file() for file in named), command
    assert words[-1] == f"runs/qwen3_4b_{path.stem}"
    assert yaml.safe_load(text) != {"quant": {"scheme": path.stem}}, "--quant.scheme says as much"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_goes_with_a_model(name: str) -> None:
    """By its recipe, or by its name alone: what a scheme sets, no model does."""
    whole = [one for one in SHIPPED if not any(word in one.stem for word in ("only", "lora", "low_bits", "qat", "qad"))]
    model = whole[list(PRESETS).index(name) % len(whole)]
    own = [path for path in OF_SCHEMES if path.stem == name]
    words = ["--config", str(own[0])] if own else ["--quant.scheme", name]
    recipe = parse_recipe(["--config", str(model), *words], check_files=False)
    assert recipe.quant.preset() == PRESETS[name] and recipe.output_dir == f"runs/{model.stem}"
