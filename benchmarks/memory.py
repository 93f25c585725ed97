"""Predicted memory: against measured steps on CPU ranks, and of models on sets of cards.

    python benchmarks/memory.py cards [--cases REGEX]
    python benchmarks/memory.py measured [--cases REGEX] [--out DIR]
    python benchmarks/memory.py long

cards
    for models of 0.6 to 235 billion parameters and four sets of cards: the first changes of a recipe that fit together
    (:mod:`tools.memory.planner`), in docs/memory.md. The recipe trains all weights in w4a16_g32 at stage 3 with
    fp32 moments, a teacher of the same size, activation checkpointing, and 4 micro-batches of a row of 2,048 tokens.
measured
    runs the cases of tests/distributed/tools/memory/test_memory.py, and prints each peak, predicted and measured.
long
    the same of a row of 32,768 tokens on two ranks, whole and shared, of a model so narrow that nearly all of it are
    activations.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig

from engine.config.config import Recipe
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe
from model.console import markdown_table
from tests.distributed.tools.memory.test_memory import CASES, SCRIPT, SIZES, measure, measured, predict, recipe
from tests.lib.launcher import run_ranks
from tests.lib.tiny import TEXT, tiny_tokenizer
from tools.memory.planner import GB, RESERVE, Advisor

LONG = 32_768  # tokens of a row
CARDS = [(2, 24), (8, 80), (8, 141), (64, 80)]  # ranks, GB


def dense(kind: type[PretrainedConfig], layers: int, hidden: int, inner: int, heads: int, **more: Any) -> Any:
    """Shape of a model with 8 heads of keys and values and heads of 128."""
    own = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    own |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    return kind(**{**own, "tie_word_embeddings": False, **more})


def sparse(layers: int, hidden: int, heads: int, inner: int) -> Any:
    """Shape of a Qwen3 with 128 experts, of which a token uses 8."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": inner, "num_key_value_heads": 4}
    return dense(Qwen3MoeConfig, layers, hidden, 3 * hidden, heads, **experts)


MODELS = {  # shapes from the models' published configurations
    "Qwen3-0.6B": dense(Qwen3Config, 28, 1024, 3072, 16, tie_word_embeddings=True),
    "Qwen3-1.7B": dense(Qwen3Config, 28, 2048, 6144, 16, tie_word_embeddings=True),
    "Qwen3-4B": dense(Qwen3Config, 36, 2560, 9728, 32, tie_word_embeddings=True),
    "Qwen3-8B": dense(Qwen3Config, 36, 4096, 12288, 32),
    "Qwen3-14B": dense(Qwen3Config, 40, 5120, 17408, 40),
    "Qwen3-30B-A3B": sparse(48, 2048, 32, 768),
    "Qwen3-32B": dense(Qwen3Config, 64, 5120, 25600, 64),
    "Llama-3.3-70B": dense(LlamaConfig, 80, 8192, 28672, 64, vocab_size=128_256),
    "Qwen3-235B-A22B": sparse(94, 4096, 64, 1536),
}


def recipe_of(directory: Path, config: PretrainedConfig) -> Recipe:
    """The recipe whose changes are tried, of a model that is nothing but its config.json."""
    config.save_pretrained(directory)
    data = DataRecipe(["data.jsonl"], max_length=2048, packing=True)
    train = TrainRecipe(steps=100, gradient_accumulation_steps=4, activation_checkpointing=True)
    made = Recipe(ModelRecipe(str(directory)), data, train, "out")
    made.quant.scheme, made.loss.teacher, made.loss.kd_weight = "w4a16_g32", str(directory), 1.0
    made.validate()
    return made


def fitting(directory: Path, pattern: str) -> str:
    """Make the table of models and cards."""
    table = [["model", *(f"{ranks} x {size} GB" for ranks, size in CARDS)]]
    for name, config in MODELS.items():
        if not re.search(pattern, name):
            continue
        advisor, row = Advisor(recipe_of(directory / name, config), 1), [name]
        for advisor.ranks, size in CARDS:
            found = advisor.together(size * GB - RESERVE)
            if found is None:
                row.append("-")
                continue
            changes, best = found
            host = f" (host {best.host / GB:,.0f})" if best.host else ""
            text = "; ".join(map(str, changes)).replace("train.activation_checkpointing: true, ", "")  # it is on
            row.append(f"{(best.peak + RESERVE) / GB:.0f}{host}: {text or 'as it is'}")
        table.append(row)
        print(markdown_table([table[0], row]).splitlines()[-1], file=sys.stderr, flush=True)
    return markdown_table(table)


def compare_with_measured(directory: Path, pattern: str) -> str:
    """Run the cases whose names match, and make the table."""
    cases = [name for name in CASES if re.search(pattern, name)]
    table = [["case", "model", "stage", "ranks", "predicted", "measured", "difference"]]
    for name, path in measure(directory, cases).items():
        ranks, model, stage, *_ = CASES[name]
        peak, found = predict(path, ranks)[1], measured(path)["peak"]
        table.append(
            [name, model, str(stage), str(ranks), f"{peak:,}", f"{found:,}", f"{100 * (peak / found - 1):+.1f}%"]
        )
    return markdown_table(table)


def long_rows(directory: Path, _: str = "") -> str:
    """Train two layers on long rows, and make the table."""
    sizes = {**SIZES, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    model = Qwen3ForCausalLM(Qwen3Config(intermediate_size=256, **{**sizes, "max_position_embeddings": LONG}))
    model.bfloat16().save_pretrained(directory / "narrow")
    tiny_tokenizer().save_pretrained(directory / "narrow")
    (directory / "text.txt").write_text(TEXT * LONG)  # of many rows, so that the short last one is not met
    table = [["parallel.sequence", "activation checkpointing", "predicted", "measured", "difference"]]
    for ranks, checkpointing in ((1, True), (2, True), (2, False)):
        sections = {
            "data": {"max_length": LONG, "micro_batch_size": 1},
            "train": {"activation_checkpointing": checkpointing},
            "parallel": {"sequence": ranks},
        }
        path = recipe(directory, f"{ranks}_{checkpointing}", "narrow", 3, sections)
        run_ranks(SCRIPT, path)
        peak, found = predict(path, 2)[1], measured(path)["peak"]
        said = "on" if checkpointing else "off"
        table.append([str(ranks), said, f"{peak:,}", f"{found:,}", f"{100 * (peak / found - 1):+.1f}%"])
    return markdown_table(table)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("measured", "cards", "long"))
    parser.add_argument("--cases", default="", metavar="REGEX", help="names of cases or models")
    parser.add_argument("--out", type=Path, metavar="DIR", help="measured: folder of the runs; default: temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make = {"cards": fitting, "measured": compare_with_measured, "long": long_rows}[arguments.table]
        print(make(arguments.out or Path(folder), arguments.cases))


if __name__ == "__main__":
    main()
