"""Train the plain model first: fake quant is off for a quarter of the run, then comes on for weights, then for all.

    deepspeed --num_gpus 8 launch/examples/fake_quant_later.py --config my_recipe.yaml

While it is off, the scales rest and observers watch the activations; what is switched on is measured first, from the
weights and activations as they are then.
"""

from engine.loop import Loop
from launch.exits import clean_exit, recipe_or_exit

recipe = recipe_or_exit()
loop = Loop(recipe)
steps = recipe.train.steps


@loop.at(step=0)
def off(state):
    """The bf16 model trains."""
    state.quant.disable()


@loop.at(step=steps // 4)
def weights_on(state):
    """Weights adapt to their grid, with activations still exact."""
    state.quant.enable(activations=False)


@loop.at(step=steps // 2)
def all_on(state):
    """From here on the model trains as it will be served."""
    state.quant.enable()
    state.set_peak_rates(weights=recipe.optim.lr / 2)


with clean_exit():
    loop.run()
