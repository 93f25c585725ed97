"""Rotate a checkpoint's weights: the same function, without outliers in the inputs of layers.

    python launch/rotate.py --model models/Qwen3-8B --out rotated/qwen3_8b
    deepspeed --num_gpus 8 launch/train.py --config my.yaml --quant.scheme 8da4w --model.path rotated/qwen3_8b

Hadamard matrices with random signs rotate the residual stream and the values of each head. The layers' weights are
multiplied by the norms' weights, and then by these matrices. The result is an ordinary checkpoint for every reader,
at no extra cost when the model runs. See docs/rotations.md. Runs without a GPU, in the memory of one tensor.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from launch.exits import clean_exit
from launch.scripts import add_plain_model, fetch_checkpoints, option_parser
from model.ranks import errors_on_all_ranks
from tools.outliers import rotate_checkpoint


def main() -> None:
    """Rotate, and print a summary."""
    parser = option_parser(__doc__)
    add_plain_model(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the matrices' signs (default 0)")
    arguments = parser.parse_args()
    with clean_exit():
        fetch_checkpoints(arguments)
        with errors_on_all_ranks(ValueError, OSError):
            report = rotate_checkpoint(arguments.model, arguments.out, seed=arguments.seed)
        for name, (order, size) in report.orders.items():
            blocks = f" in {size // order} blocks of {order}" if order < size else ""
            print(f"rotated: {name}, {size} wide{blocks}")
        if report.untied:
            print(
                "lm_head was the embedding, and is a tensor of its own now: the weights of the last norm went into it"
            )
        print(f"{arguments.out}: {report.tensors:,} tensors")


if __name__ == "__main__":
    main()
