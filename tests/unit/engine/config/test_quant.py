"""Schemes of one's own, and rules that give them to layers."""

from pathlib import Path

import pytest

from engine.config.errors import RecipeError
from engine.config.reading import load_recipe, save_recipe
from quant import Preset, Rule, Scheme, TensorSpec, get_scheme
from tests.lib.recipes import write_minimal

OWN_SCHEMES = """\
quant:
  scheme: mine
  schemes:
    mine: {weights: {dtype: int, bits: 4, granularity: group, group_size: 64}, activations: {dtype: fp8_e4m3,
      granularity: token, dynamic: true}}
  rules:
    - {first: 1, last: 2, scheme: none}
    - {layers: '.*mlp.*', scheme: w3a16_channel}
  lm_head: w8a16_channel
"""


def test_schemes_are_composed_and_given_by_rules(tmp_path: Path) -> None:
    """And the file that a run keeps reads back equal."""
    recipe = load_recipe(write_minimal(tmp_path, OWN_SCHEMES))
    mine = Scheme("mine", TensorSpec("int", 4, "group", 64), TensorSpec("fp8_e4m3", 8, "token", dynamic=True))
    assert recipe.quant.preset() == Preset(mine)
    assert recipe.quant.chosen_rules() == [
        Rule(None, first=1, last=2),
        Rule(get_scheme("w3a16_channel"), layers=".*mlp.*"),
    ]
    assert recipe.quant.head_scheme() == get_scheme("w8a16_channel")
    assert recipe.quant.quantizes_activations() and not recipe.quant.stores_input_scales()
    save_recipe(recipe, tmp_path / "again.yaml")
    assert load_recipe(tmp_path / "again.yaml") == recipe


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("bits: 4", "bits: 9", "quant.schemes: int codes have 2 to 8 bits, got dtype=int, bits=9"),
        ("bits: 4", "bits: 4, dynamic: true", "quant.schemes.mine: scheme 'mine': weights cannot have dynamic scales"),
        ("bits: 4", "bitts: 4", "line 8: quant.schemes.mine.weights.bitts: unknown key; did you mean quant."),
        ("granularity: group,", "granularity: tensor,", "quant.schemes: group_size goes with granularity"),
        ("first: 1", "frist: 1", "line 11: quant.rules[0].frist: unknown key; did you mean quant.rules[0].first?"),
        ("first: 1, last: 2, ", "", "quant.rules[0]: every layer, expected layers, first or last"),
        ("last: 2", "last: 0", "quant.rules[0].last: 0, expected at least 1"),
        ("scheme: none", "scheme: nope", "quant.rules[0].scheme: 'nope', expected one of none, fp8_static, "),
        ("'.*mlp.*'", "'('", "quant.rules[1].layers: '(', expected a regular expression"),
        ("lm_head: w8a16_channel", "lm_head: mine", "quant.lm_head: 'mine', expected one of w8a16_g128, "),
        ("lm_head: w8a16_channel", "lm_head: tied", "quant.embedding: null, expected the scheme of the weight that is"),
        ("    mine: {w", "    tied: {w", "quant.schemes.tied: this name is taken, expected"),
        ("    mine: {w", "    fp8_kv: {w", "quant.schemes.fp8_kv: this name is taken, expected"),
        ("lm_head: w8a16_channel", "compute: fp8_gemm", "quant.compute: 'fp8_gemm', expected auto or simulate"),
    ],
)
def test_a_scheme_that_cannot_be_is_named(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert old in OWN_SCHEMES
    with pytest.raises(RecipeError) as refused:
        load_recipe(write_minimal(tmp_path, OWN_SCHEMES.replace(old, new)))
    assert line in str(refused.value)
