"""Teachers that are refused: quantized ones in int8, and caches of another teacher or another number of tokens."""

import pytest

from engine.checkpoint.find import changes
from engine.config.errors import RecipeError
from engine.session.build_teacher import check_cache, empty_teacher
from engine.session.context import META, stage_0
from model.ranks import RankError
from tests.lib.checkpoints import edit_json
from tests.lib.recipes import minimal
from tests.lib.tiny import tiny_checkpoint, tiny_tokenizer
from tests.unit.data.test_teacher_cache import edit_manifest, random_samples, write
from tools.write_teacher_cache import check_recipe


def test_a_cache_of_another_teacher_or_number_of_tokens_is_refused(tmp_path):
    """301 logits, 300 tokens."""
    model, samples = tiny_checkpoint(tmp_path / "model"), random_samples(5)
    write(tmp_path / "cache", samples, model)
    recipe = minimal(model={"path": str(model)})
    recipe.loss.teacher_cache = str(tmp_path / "cache")
    for vocabulary, recipe.loss.teacher in ((300, str(model)), (301, "not/there/any/more")):
        edit_manifest(vocabulary=vocabulary)(tmp_path / "cache")
        check_cache(recipe, tiny_tokenizer(), 301)
    recipe.loss.teacher = str(tiny_checkpoint(tmp_path / "other", seed=5))
    with pytest.raises(RankError, match="another teacher"):
        check_cache(recipe, tiny_tokenizer(), 301)
    recipe.loss.teacher = None
    edit_manifest(vocabulary=10**6)(tmp_path / "cache")
    with pytest.raises(RankError, match="cache is for a vocabulary of 1,000,000 tokens, expected 301, as"):
        check_cache(recipe, tiny_tokenizer(), 301)


def test_a_teacher_that_is_quantized_is_not_held_in_int8_too(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    taught = {"teacher": str(model), "kd_weight": 1.0, "teacher_weights": "int8"}
    recipe = minimal(model={"path": str(model)}, loss=taught)
    held = [
        name for name, own in empty_teacher(recipe, stage_0(recipe), META).named_parameters() if hasattr(own, "held")
    ]
    assert held and all(name.endswith("_proj.weight") for name in held)
    edit_json(model / "config.json", quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})
    with pytest.raises(RankError, match=r"loss.teacher_weights: int8: .*model is quantized: remove that option"):
        empty_teacher(recipe, stage_0(recipe), META)


def test_answers_that_are_not_written_yet_have_no_cache(tmp_path):
    """A cache of the prompts would be empty."""
    taught = {"teacher": "model", "lm_weight": 0.0, "kd_weight": 1.0, "kd": "kl_top_k", "top_k": 4}
    data = {"kind": "on_policy", "server": "http://localhost:8000", "new_tokens": 8}
    with pytest.raises(
        RecipeError, match=r"data\.kind: 'on_policy', expected chat, text or mixed: a teacher cannot be"
    ):
        check_recipe(minimal(data=data, loss=taught), tmp_path / "cache")


def test_a_teacher_in_int8_is_one_of_the_whole_run_and_of_no_cache(tmp_path):
    taught = {"teacher": "model", "kd_weight": 1.0}
    full, coded = (minimal(loss={**taught, "teacher_weights": held}) for held in ("full", "int8"))
    assert changes(full, coded) == ["loss.teacher_weights (was 'full', is 'int8')"]
    with pytest.raises(
        RecipeError, match=r"loss\.teacher_weights: 'int8', expected full: a cache is read by many runs"
    ):
        check_recipe(coded, tmp_path / "cache")
    with pytest.raises(
        RecipeError, match=r"loss\.teacher_weights: 'int8' has no effect unless loss.teacher is a direc"
    ):
        minimal(loss={"teacher": "self", "kd_weight": 1.0, "teacher_weights": "int8"}, learnable={"weight": False})
