"""Write the compressed checkpoint of a training checkpoint.

    deepspeed --num_gpus 8 launch/export.py --checkpoint runs/qwen3_4b/checkpoints/step_00001000 --out served/qwen3_4b

The run's recipe lies in the checkpoint. Use as many ranks as trained it.
"""

import argparse
from pathlib import Path

from engine.checkpoint import load_checkpoint
from engine.export import export
from engine.recipe import load_recipe
from engine.setup import set_up, start
from model.ranks import shut_down


def main() -> None:
    """Rebuild the run's engine, load its state, export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a step directory that train.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; it must not hold anything yet")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher appends it
    arguments = parser.parse_args()
    if not (arguments.checkpoint / "recipe.yaml").is_file():
        parser.error(f"{arguments.checkpoint} is not a training checkpoint: it has no recipe.yaml")
    recipe = load_recipe(arguments.checkpoint / "recipe.yaml")

    session, _ = set_up(recipe, start(recipe))
    load_checkpoint(session, arguments.checkpoint)
    export(session, arguments.out)
    shut_down()


if __name__ == "__main__":
    main()
