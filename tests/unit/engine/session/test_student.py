"""What of a student is quantised, and what trains: families of transformers on the meta device, built as for a run."""

from pathlib import Path
from typing import Any

import pytest

from engine.memory.meta_model import MetaStudent, meta_student
from engine.recipe.recipe import Recipe
from engine.recipe.sections import DataRecipe, LearnableRecipe, ModelRecipe, TrainRecipe
from engine.session.optimizer import classify
from tests.families.variants import VARIANTS


def student_of(name: str, directory: Path, **sections: Any) -> MetaStudent:
    VARIANTS[name].config().save_pretrained(directory)
    recipe = Recipe(
        model=ModelRecipe(str(directory)),
        data=DataRecipe(["unread"]),
        train=TrainRecipe(steps=1),
        output_dir="out",
        **sections,
    )
    return meta_student(recipe)


@pytest.mark.parametrize("name", ("hunyuan_v1_moe", "afmoe", "qwen2_moe", "phimoe"))
def test_routers_are_neither_quantised_nor_trained(name: str, tmp_path: Path):
    student = student_of(name, tmp_path, learnable=LearnableRecipe(norm=True))
    routers = {owned.name: owned.parameter for owned in classify(student.model) if owned.kind == "router"}
    assert any(parameter.dim() > 1 for parameter in routers.values())
    assert not any(parameter.requires_grad for parameter in routers.values())
    below = {router.rpartition(".")[0] for router in routers}
    assert below.isdisjoint(student.quantization.layers)
    assert not any(
        ".gate" in layer or "router" in layer for layer in student.quantization.layers if "_proj" not in layer
    )
