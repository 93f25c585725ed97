"""Write the teacher's most likely tokens for every target of the training samples, so that training needs no teacher.

    deepspeed --num_gpus 8 launch/cache_teacher.py --config R.yaml [--out DIR] [--section.field value ...]

Reads ``model`` (for its tokenizer), ``data``, ``loss.teacher`` and ``loss.top_k`` of the recipe; under ZeRO stage 3
the teacher is sharded. DIR defaults to ``loss.teacher_cache``, and must be on a disk shared by all ranks.
Training with the same recipe and ``loss.teacher_cache: DIR`` then reads this cache.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

import argparse

from launch.exits import clean_exit, recipe_or_exit
from launch.scripts import path_option
from tools.write_teacher_cache import check_recipe, write_cache


def main() -> None:
    """Check the recipe, then run the teacher."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--out", type=path_option)
    given, rest = options.parse_known_args(sys.argv[1:])
    recipe = recipe_or_exit(rest, check_files=False)
    with clean_exit():
        write_cache(recipe, check_recipe(recipe, given.out))


if __name__ == "__main__":
    main()
