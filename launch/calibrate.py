"""Measure scales and write a PTQ checkpoint, without training; reads the recipe's model, scheme, data and export.

    deepspeed --num_gpus 8 launch/calibrate.py --config launch/recipes/qwen3_4b.yaml --export.dir ptq/qwen3_4b

Weight scales are measured on the partitions of the weights, and activation scales on ``quant.calibration_batches``
micro-batches per rank, under the recipe's ZeRO stage. The result can be served directly, and read by ``quant.scales``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from launch import check_model_path, end_quietly

if __name__ == "__main__":
    end_quietly()
    check_model_path()  # before the imports, which take many seconds

from dataclasses import replace

from data.loader import Loader
from engine.config.config import Recipe
from engine.config.sections import ParallelRecipe
from engine.fake_quant import FakeQuant, check_inputs
from engine.session.context import RunContext, build_loader, start_ranks
from engine.session.session import CheckedModels, Session, build_session, check_models
from engine.session_export import check_export, check_exportable, export
from launch.exits import clean_exit, recipe_or_exit


def main() -> None:
    """Check the recipe, then measure and write."""
    recipe = recipe_or_exit()
    with clean_exit():
        calibrate(recipe)


def calibrate(recipe: Recipe) -> None:
    """Measure the scales that the recipe's scheme needs, and write the PTQ checkpoint; a collective. Raises RecipeError
    for a problem that is found before the process group starts, RankError on every rank for any later one."""
    check_export(recipe)
    context = start_ranks(recipe)
    models = check_models(recipe, context, losses=False)
    check_exportable(recipe, models.model, models.quantization)
    session, _ = calibrated(recipe, context, models)
    export(session, recipe.export_dir())


def calibrated(recipe: Recipe, context: RunContext, models: CheckedModels) -> tuple[Session, Loader]:
    """Build the quantized model in its engine, with all scales in place, and the loader; a collective. Raises RankError
    on every rank for a problem, such as scales of inputs in files that do not fit the inputs."""
    # Only training shares rows and resumes.
    recipe = replace(recipe, parallel=ParallelRecipe(), train=replace(recipe.train, resume=False))
    loader, _ = build_loader(recipe, context.tokenizer, models.tokens)
    session = build_session(recipe, context, None, loader.first, optimizer=False)
    FakeQuant(session).calibrate(loader.first(recipe.quant.calibration_batches))
    check_inputs(session, loader.first)
    return session, loader


if __name__ == "__main__":
    main()
