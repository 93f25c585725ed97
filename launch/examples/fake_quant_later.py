"""Train the plain model first: fake quant is off for a quarter of the run, then on for weights, then for all.

    deepspeed --num_gpus 8 launch/examples/fake_quant_later.py --config my_recipe.yaml

While fake quant is off, scales are inactive and observers watch the activations. Scales are measured when their fake
quant is switched on, from the current weights and activations.
"""

from engine.config.errors import RecipeError
from engine.loop import Loop
from launch.exits import clean_exit, recipe_or_exit


def main():
    """Train the recipe with fake quant switched on in two steps."""
    recipe = recipe_or_exit()
    loop = Loop(recipe)
    steps = recipe.train.steps

    @loop.at(step=0)
    def off(state):
        """Train the bf16 model."""
        state.quant.disable()

    @loop.at(step=steps // 4)
    def weights_on(state):
        """Fake-quantize weights; activations stay unquantized."""
        state.quant.enable(activations=False)

    @loop.at(step=steps // 2)
    def all_on(state):
        """Train with serving numerics, and half the peak rate of weights, from here on."""
        state.quant.enable()
        state.set_peak_rates(weights=recipe.optim.lr / 2)

    with clean_exit():
        if not steps:  # known only after the data are read
            raise RecipeError("train.steps: 0, expected a number, which this script divides, in place of train.epochs")
        loop.run()


if __name__ == "__main__":
    main()
