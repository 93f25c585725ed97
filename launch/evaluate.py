"""Perplexity of a text: per token, word and byte, and bits per byte.

    python launch/evaluate.py --model DIR [--model DIR2 ...] --text FILE
    deepspeed --num_gpus 8 launch/evaluate.py --model DIR --text FILE --sharded

A directory is a plain Hugging Face checkpoint or a compressed one (a PTQ or QAT export), which is computed with the
arithmetic of training. With several ranks the text is shared out; with ``--sharded`` the weights of a plain checkpoint
too (ZeRO-3).
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

from engine.evaluate import Perplexity, evaluate_text, load_for_evaluation, read_eval_text
from engine.setup import DTYPES, init_ranks, say
from launch.exits import clean_exit
from model.ranks import errors_on_all_ranks


def main() -> None:
    """One table row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", required=True, help="checkpoint directory; repeatable")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text file")
    parser.add_argument("--tokens", type=int, help="only the first so many tokens of the text")
    parser.add_argument("--length", type=int, default=1024, help="tokens per window (default 1024)")
    parser.add_argument("--batch_size", type=int, default=4, help="windows per forward (default 4)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and GEMMs (default bfloat16)")
    parser.add_argument("--sharded", action="store_true", help="partition a plain checkpoint over the ranks (ZeRO-3)")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher appends it
    arguments = parser.parse_args()
    for name in ("tokens", "length", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: {value}, expected 1 or more")

    with clean_exit():
        device = init_ranks()
        say(f"{'model':40} {'tokens':>8} {'ppl/token':>10} {'ppl/word':>10} {'ppl/byte':>9} {'bits/byte':>9}")
        for directory in arguments.model:
            result = evaluate(directory, arguments, device)
            say(
                f"{directory!s:40} {result.tokens:8,} {result.per_token:10.4f} {result.per_word:10.3f} "
                f"{result.per_byte:9.4f} {result.bits_per_byte:9.4f}"
            )


def evaluate(directory: Path, arguments: argparse.Namespace, device: torch.device) -> Perplexity:
    """Perplexity of one checkpoint; its memory is free again afterwards. A collective."""
    with errors_on_all_ranks(OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        text = read_eval_text(arguments.text, tokenizer, arguments.tokens)
    model = load_for_evaluation(directory, DTYPES[arguments.dtype], device, sharded=arguments.sharded)

    def forward(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    return evaluate_text(forward, text, length=arguments.length, batch_size=arguments.batch_size, device=device)


if __name__ == "__main__":
    main()
