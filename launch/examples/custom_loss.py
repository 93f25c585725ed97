"""Add a custom loss to the recipe's: the z-loss, which keeps the softmax's normalizer near 1.

    deepspeed --num_gpus 8 launch/examples/custom_loss.py --config my_recipe.yaml

z = (log sum_v exp(logit_v))^2 per token (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5). It is computed
with the other losses, on a few tokens' logits at a time; autograd computes its gradient. TensorBoard shows ``loss/z``.
"""

from engine.loop import Loop
from launch.exits import clean_exit, recipe_or_exit


def main():
    """Train with the recipe's losses and the z-loss."""
    loop = Loop(recipe_or_exit())

    @loop.token_loss("z", weight=1e-4)
    def z_loss(chunk):
        """Compute the z-loss [C] of fp32 logits [C, V]; ``chunk.teacher`` (or None) and ``chunk.labels`` are unused."""
        return chunk.student.logsumexp(-1).square()

    with clean_exit():
        loop.run()


if __name__ == "__main__":
    main()
