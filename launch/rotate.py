"""Rotate a checkpoint's weights: the same function, whose inputs have no outliers for a few bits to choke on.

    python launch/rotate.py --model Qwen/Qwen3-8B --output rotated/qwen3_8b
    deepspeed --num_gpus 8 launch/train.py --config my.yaml --quant.scheme nvfp4_w4a4 --model.path rotated/qwen3_8b

Hadamard matrices with random signs turn the residual stream and the values of each head, and are multiplied into the
weights, after those of the norms. What comes out is an ordinary checkpoint, which everything reads as it is; nothing is
computed in addition when the model runs. See docs/rotations.md. Needs no GPU, and the memory of one tensor.

    python launch/rotate.py --model Qwen/Qwen3-8B --output rotated/qwen3_8b --learn text.txt --scheme nvfp4_w4a4

learns the matrices, from these on, for a scheme: those with which the quantised model is nearest to the model on the
text. That takes a model which is three times in the memory of one process, in fp32.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

import argparse

import torch
from torch import Tensor

from data.samples import load_tokenizer
from data.text import read_text
from launch.exits import clean_exit
from model.ranks import errors_on_all_ranks
from model.rotation import rotate_checkpoint
from model.rotation.learn import Learned, learn_rotations
from model.zero.accelerator import own_device
from quant import SCHEMES

ROWS, LENGTH = 4, 256  # of a step


def rows_of(model: Path, text: Path, steps: int, seed: int) -> list[Tensor]:
    """Token ids ``[ROWS, LENGTH]`` of each step: blocks of the text in an order drawn from ``seed``, over and over."""
    samples = read_text([text], load_tokenizer(model), LENGTH)
    blocks = [torch.as_tensor(sample.input_ids).long() for sample in samples if len(sample.input_ids) == LENGTH]
    if len(blocks) < ROWS:
        raise ValueError(f"{text} has {len(blocks)} blocks of {LENGTH} tokens, expected at least {ROWS}")
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = [order[index % len(order)] for index in range(steps * ROWS)]
    return [torch.stack([blocks[index] for index in chosen[at : at + ROWS]]) for at in range(0, len(chosen), ROWS)]


def learn(arguments: argparse.Namespace) -> Learned | None:
    """What --learn asks for."""
    if arguments.learn is None:
        return None
    rows = rows_of(arguments.model, arguments.learn, arguments.steps, arguments.seed)
    device = own_device(0)
    learned = learn_rotations(arguments.model, SCHEMES[arguments.scheme], rows, seed=arguments.seed, device=device)
    print(f"learned for {arguments.scheme}: KL {learned.first:.4f} -> {learned.last:.4f} nats per token")
    return learned


def main() -> None:
    """Rotate, and say what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory, not quantised")
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="of the matrices' signs (default 0)")
    parser.add_argument("--learn", type=Path, metavar="TEXT", help="text to learn the matrices on, with --scheme")
    parser.add_argument("--scheme", choices=SCHEMES, help="that the model is going to be quantised with")
    parser.add_argument("--steps", type=int, default=100, help="of learning (default 100)")
    arguments = parser.parse_args()
    if (arguments.learn is None) != (arguments.scheme is None):
        parser.error("--learn and --scheme go together: matrices are learned for a scheme")
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: expected at least 1")
    with clean_exit():
        with errors_on_all_ranks(ValueError, OSError):
            learned = learn(arguments)
            rotations = None if learned is None else learned.rotations
            report = rotate_checkpoint(arguments.model, arguments.output, seed=arguments.seed, rotations=rotations)
        for name, (order, size) in report.orders.items():
            blocks = (
                f" in {size // order} blocks of {order}: of {size} no Hadamard matrix is known here"
                if order < size
                else ""
            )
            print(f"rotated: {name}, {size} wide{blocks}")
        if report.untied:
            print(
                "lm_head was the embedding, and is a tensor of its own now: the weights of the last norm went into it"
            )
        print(f"{arguments.output}: {report.tensors:,} tensors")


if __name__ == "__main__":
    main()
