"""Smooth a checkpoint's weights: the same function, with smaller outliers in the inputs of layers.

    python launch/smooth.py --model models/Qwen3-8B --out smoothed/qwen3_8b --text sample.txt
    deepspeed --num_gpus 8 launch/smooth.py --model models/Qwen3-32B --out smoothed/qwen3_32b --text sample.txt
    deepspeed --num_gpus 8 launch/train.py --config launch/recipes/fp4_scales_only.yaml --model.path smoothed/qwen3_8b

The features of each norm's outputs are multiplied by factors, and the columns of the weights that read them are
divided by the same factors (SmoothQuant). The factors come from the largest magnitudes of the features for a sample
text. The result is an ordinary checkpoint for every reader, at no extra cost when the model runs. See
docs/rotations.md. The model runs on a GPU if there is one; several ranks share its weights.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from engine.session.context import init_ranks
from launch.exits import clean_exit
from launch.scripts import add_plain_model, fetch_checkpoints, int_from, option_parser, path_option
from model.ranks import say
from tools.outliers import smooth_checkpoint


def main() -> None:
    """Measure inputs, smooth, and print a summary."""
    parser = option_parser(__doc__, ranks=True)
    add_plain_model(parser)
    parser.add_argument("--text", type=path_option, required=True, metavar="FILE", help="sample, a UTF-8 text file")
    parser.add_argument(
        "--tokens",
        type=int_from(1),
        default=2048,
        help="use this many tokens from the start of the text (default 2048)",
    )
    parser.add_argument(
        "--strength", type=float, default=0.5, help="from 0 (nothing) to 1 (features of one magnitude; default 0.5)"
    )
    arguments = parser.parse_args()
    if not 0 <= arguments.strength <= 1:
        parser.error(f"--strength {arguments.strength}, expected a number from 0 to 1")
    with clean_exit():
        fetch_checkpoints(arguments)
        device = init_ranks(vars(arguments), {"--text": arguments.text, "--model": arguments.model})
        tensors, norms = smooth_checkpoint(
            arguments.model,
            arguments.out,
            arguments.text,
            tokens=arguments.tokens,
            strength=arguments.strength,
            device=device,
        )
        say(f"{arguments.out}: {tensors:,} tensors, inputs behind {norms} norms smoothed")


if __name__ == "__main__":
    main()
