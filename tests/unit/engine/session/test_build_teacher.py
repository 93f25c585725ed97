"""A teacher's cache is of the teacher that is named, and of as many tokens as the student or its tokenizer has."""

import pytest

from engine.session.build_teacher import check_cache
from model.ranks import RankError
from tests.lib.recipes import minimal
from tests.lib.tiny import tiny_checkpoint, tiny_tokenizer
from tests.unit.data.test_teacher_cache import edit_manifest, random_samples, write


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
    with pytest.raises(RankError, match="cache covers 1,000,000 tokens, expected 301, as many as the student has"):
        check_cache(recipe, tiny_tokenizer(), 301)
