"""Convert a GGUF file of llama.cpp to a Hugging Face checkpoint, which a recipe's model.path then names.

    python launch/convert_gguf.py --gguf qwen3-4b-q4_0.gguf --out models/qwen3_4b
    deepspeed --num_gpus 8 launch/train.py --config my.yaml --model.path models/qwen3_4b

Weights are dequantized once; configuration, tokenizer and chat template come from the file. See docs/gguf.md. Runs
without a GPU, in the memory of a slice of a tensor. Needs the package gguf: pip install -e '.[gguf]'.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

import torch

from launch.exits import clean_exit
from launch.scripts import option_parser, path_option
from model.ranks import errors_on_all_ranks
from tools.gguf_to_checkpoint import convert_gguf


def main() -> None:
    """Convert, and print a summary."""
    parser = option_parser(__doc__)
    parser.add_argument("--gguf", type=path_option, required=True, help="file to convert; of several, the merged one")
    parser.add_argument("--out", type=path_option, required=True, help="directory to make")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of quantized tensors (default bfloat16; float32 is exact); F32, F16 and BF16 tensors keep theirs",
    )
    arguments = parser.parse_args()
    with clean_exit():
        with errors_on_all_ranks(ValueError, OSError):
            done = convert_gguf(arguments.gguf, arguments.out, dtype=getattr(torch, arguments.dtype))
        print(f"{arguments.out}: {done.summary()}")


if __name__ == "__main__":
    main()
