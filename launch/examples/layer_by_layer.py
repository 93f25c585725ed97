"""Quantize progressively: decoder layers are fake-quantized one after the other, the first one first.

    deepspeed --num_gpus 8 launch/examples/layer_by_layer.py --config my_recipe.yaml

Layers that are still unquantized can compensate for the error of quantized layers. All layers are quantized after half
of the run, and train together in the other half. A layer's scales are measured when its fake quant is switched on.
"""

import re

from engine.loop import Loop
from launch.exits import clean_exit, recipe_or_exit

LAYER = re.compile(r"(.*?\.)(\d+)\..*")  # model.layers.0.mlp.up_proj, transformer.h.0.attn.q_proj


def main():
    """Train the recipe with fake quant switched on layer by layer."""
    recipe = recipe_or_exit()
    loop = Loop(recipe)

    @loop.at(step=0)
    def unquantized(state):
        """Start from the unquantized model."""
        state.quant.disable()

    @loop.every(1)
    def next_layers(state):
        """Fake-quantize the layers that are due: all of them after half of the run."""
        layers = state.session.quantization.layers
        found = sorted({(int(match[2]), match[1]) for name in layers if (match := LAYER.fullmatch(name))})
        due = min(len(found), len(found) * 2 * state.step // recipe.train.steps)
        quantized = state.session.quantization.fake_quant_state()
        for index, prefix in found[:due]:
            pattern = re.escape(f"{prefix}{index}.") + ".*"
            if not any(quantized[name][0] for name in layers if re.fullmatch(pattern, name)):
                state.quant.enable(layers=pattern)
        if due == len(found) and not all(any(on) for on in state.session.quantization.fake_quant_state().values()):
            state.quant.enable()  # also lm_head, embeddings, keys and values
        state.log({"quant/layers_quantized": due})

    with clean_exit():
        loop.run()


if __name__ == "__main__":
    main()
