"""Measure scales and write a PTQ checkpoint, without training: the recipe's model, scheme, data and export section.

    deepspeed --num_gpus 8 launch/calibrate.py --config launch/recipes/qwen3_4b_fp8.yaml --export.dir ptq/qwen3_4b

Weight scales come from the partitions, activation scales from ``quant.calibration_batches`` micro-batches per rank, all
in place under the recipe's ZeRO stage. The result is served as it is, and is what ``quant.scales`` reads.
"""

from engine.calibrate import calibrate_inputs
from engine.export import export
from engine.recipe import parse_recipe
from engine.setup import build_loader, say, set_up


def main() -> None:
    """Check the recipe, measure, write."""
    recipe = parse_recipe()
    session, inputs_missing = set_up(recipe, training=False)
    if inputs_missing:
        loader = build_loader(recipe, session.tokenizer)
        say(f"calibrating activations on {recipe.quant.calibration_batches} micro-batches per rank")
        calibrate_inputs(
            session.engine, session.quantization, loader.first(recipe.quant.calibration_batches), session.device
        )
    export(session, recipe.export_dir())


if __name__ == "__main__":
    main()
