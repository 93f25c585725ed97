"""Train a model as a recipe says, and export it.

    deepspeed --num_gpus 8 launch/train.py --config launch/recipes/qwen3_4b_fp8.yaml [--section.field value ...]

``--help`` shows every knob, ``--print_config`` the recipe that results.
"""

from engine.recipe import parse_recipe


def main() -> None:
    """Check the recipe first, so that a bad one fails before torch and DeepSpeed are even imported."""
    recipe = parse_recipe()
    from engine.loop import Loop

    Loop(recipe).run()


if __name__ == "__main__":
    main()
