"""launch/allocate.py before it measures: the layers whose scheme the recipe gives are none of the parts."""

import sys

import pytest

from engine.config.reading import parse_recipe
from launch.allocate import HEAD, check_options, options
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

SCHEMES = ["w4a16_channel", "w8a16_channel", "w3a16_channel"]


@pytest.mark.parametrize(
    ("option", "layers"),
    [
        (["--quant.lm_head", "w8a16_channel"], {"lm_head"}),
        (["--quant.lm_head", "w2a16_channel"], {"lm_head"}),
        (
            ["--quant.rules", "[{layers: '.*o_proj', scheme: w4a16_channel}]"],
            {f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)},
        ),
        ([], set()),
    ],
)
def test_layers_with_a_scheme_of_their_own_are_no_parts(tmp_path, option, layers):
    """Also if it is one of --schemes, under which alone they were parts."""
    model = tiny_checkpoint(tmp_path / "model")
    settings = {"loss": {"kd_weight": 0.0, "teacher": None}}
    recipe = write_recipe(tmp_path, "base", model, write_chats(tmp_path / "chats.jsonl"), **settings)
    words = ["--config", str(recipe), "--quant.init", "rtn", *option]
    recipes = {name: parse_recipe([*words, "--quant.scheme", name]) for name in SCHEMES}
    assert check_options(recipes, 8.5) == layers


def test_a_file_of_the_user_is_not_overwritten(tmp_path, monkeypatch, capsys):
    """But a recipe of an earlier call is."""
    words = ["--config", "a.yaml", "--schemes", *SCHEMES, "--budget_bits", "4", "--out", str(tmp_path / "a.yaml")]
    monkeypatch.setattr(sys, "argv", ["allocate.py", *words])
    (tmp_path / "a.yaml").write_text("quant: {}\n")
    with pytest.raises(SystemExit):
        options()
    assert "a.yaml exists and was not written by this script" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text(f"{HEAD} weights | ...")
    assert options()[1] == ["--config", "a.yaml"]
