"""The text of the quickstart, and a random Qwen3 with the widths of the 8B and 12 layers (3.5e9 parameters).

    python benchmarks/gpu/random_model.py DIRECTORY [--dry]

Nothing is made that is there. Weights are random, so that losses mean nothing; times and memory do.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, initialization

from launch.quickstart import make_corpus, make_model

FULL: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,  # matrices above DeepSpeed's threshold, which are partitioned
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def main() -> None:
    """Write ``train.txt`` and the checkpoint ``random``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dry", action="store_true", help="a tiny model")
    options = parser.parse_args()
    out: Path = options.directory
    if (out / "random" / "config.json").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    make_corpus(out)
    make_model(out)  # for its tokenizer
    config = Qwen3Config(
        **(TINY if options.dry else FULL),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.device("cpu" if options.dry else "cuda"), initialization.no_init_weights():
        model = Qwen3ForCausalLM(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(out / "random")
    for file in (out / "init").glob("*token*"):
        shutil.copy(file, out / "random")
    print(f"{model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
