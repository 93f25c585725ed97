"""Train a model with a recipe, and export it.

    deepspeed --num_gpus 8 launch/train.py --config launch/recipes/qwen3_4b.yaml [--section.field value ...]

``--help`` shows every option, ``--print_config`` the resulting recipe.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from launch import check_model_path, end_quietly

if __name__ == "__main__":
    end_quietly()
    check_model_path()  # before the imports, which take many seconds

from engine.loop import Loop
from launch.exits import clean_exit, recipe_or_exit


def main() -> None:
    """Check the recipe, then train: a bad recipe ends every process before a process group starts."""
    recipe = recipe_or_exit()
    with clean_exit():
        state = Loop(recipe).run()
    del state  # not in the context: freeing takes a moment, in which a signal would look like a failure


if __name__ == "__main__":
    main()
