"""Allocate bits per part (mixed precision): measure each part's cost under several schemes, and write a mixed recipe.

    deepspeed --num_gpus 8 launch/allocate.py --config launch/recipes/qwen3_4b.yaml \
        --schemes w2a16_g32 w4a16_g32 --budget_bits 2.75 --out mixed.yaml
    deepspeed --num_gpus 8 launch/train.py --config launch/recipes/qwen3_4b.yaml --config mixed.yaml

For each scheme the recipe's model is loaded and quantized as in ``launch/calibrate.py``. Then the parts (layers that
serving fuses, or the experts of a MoE layer) are quantized one at a time: a part's cost is the effect on the logits of
``--batches`` micro-batches per rank. The schemes of the parts minimize the sum of the costs, while the weights have at
most ``--budget_bits`` bits on average, scales included. Then the mixed recipe is measured as a whole.

Takes two more forwards per scheme and sample than there are parts, and one load of the model per scheme. Costs are
always measured with round-to-nearest: ``quant.init: gptq`` changes weights, so there would be no original model to
compare with. Use GPTQ in the training run with the written recipe.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from launch import check_model_path, end_quietly
from launch.scripts import int_from, option_parser, path_option

if __name__ == "__main__":
    end_quietly()
    check_model_path()  # before the imports, which take many seconds

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace

import yaml

from engine.config.config import Recipe
from engine.session.context import TORCH_DTYPES, RunContext, start_ranks
from engine.session.session import check_models
from launch.calibrate import calibrated
from launch.exits import clean_exit, recipe_or_exit
from model.ranks import errors_on_all_ranks, is_main, raise_everywhere, say
from tools.memory.model import meta_student
from tools.mixed_precision import LayerSet, allocate, check_budget, divergences, layer_sets, rules_of_choice

MIX = "mixed"  # table row of the written recipe
HEAD = "# | part |"  # with which that recipe begins
NEAREST = ["--quant.init", "rtn"]  # GPTQ changes the weights that costs are measured from


def main() -> None:
    """Check options and recipes, then measure, choose and write."""
    arguments, rest = options()
    recipes = {name: recipe_or_exit([*rest, "--quant.scheme", name, *NEAREST]) for name in arguments.schemes}
    with clean_exit():
        context = start_ranks(recipes[arguments.schemes[0]], vars(arguments))
        own = check_options(recipes, arguments.budget_bits)
        parts: list[LayerSet] = []
        costs: dict[str, float] = {}
        for name, recipe in recipes.items():
            say(f"measuring {name}")
            found, costs[name] = measured(recipe, context, name, own, arguments.batches)
            parts = joined(parts, found)
        with errors_on_all_ranks(ValueError):
            schemes = allocate(parts, arguments.budget_bits)
        most, chosen = rules_of_choice(parts, schemes)
        own_rules = [
            {key: value for key, value in asdict(rule).items() if value is not None} for rule in recipe.quant.rules
        ]
        rules = [*own_rules, *chosen]  # the first that matches a layer decides
        say("measuring the recipe")
        mixed = recipe_or_exit([*rest, "--quant.scheme", most, "--quant.rules", yaml.safe_dump(rules), *NEAREST])
        session, loader = calibrated(mixed, context, check_models(mixed, context, losses=False))
        sets, batches = [[*session.quantization.layers]], loader.first(arguments.batches)
        (costs[MIX],) = divergences(session.engine, session.quantization, sets, batches, session.device)
        text = allocation_table(parts, schemes, costs)
        say(text)
        if is_main():
            recipe_text = yaml.safe_dump({"quant": {"scheme": most, "rules": rules}}, sort_keys=False, width=1000)
            head = "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
            arguments.out.write_text(f"{head}\n{recipe_text}", encoding="utf-8")


def options() -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of this script, and return the rest, which belong to the recipe."""
    parser = option_parser(__doc__)
    parser.add_argument("--schemes", nargs="+", required=True, help="names as of quant.scheme, two or more")
    parser.add_argument("--budget_bits", type=float, required=True, help="per weight at most, with scales")
    parser.add_argument(
        "--batches", type=int_from(1), default=4, help="micro-batches per rank that are measured (default 4)"
    )
    parser.add_argument(
        "--out", type=path_option, required=True, help="the recipe that is written, to be added to yours"
    )
    arguments, rest = parser.parse_known_args()
    if len({*arguments.schemes}) < len(arguments.schemes) or len(arguments.schemes) < 2:
        parser.error(f"--schemes: {' '.join(arguments.schemes)}, expected two or more, each once")
    if not arguments.budget_bits > 0:
        parser.error(f"--budget_bits: {arguments.budget_bits}, expected a number above 0")
    if arguments.out.is_dir() or not os.access(arguments.out.resolve().parent, os.W_OK):
        parser.error(f"--out: {arguments.out}, expected a file in a folder that can be written")
    if arguments.out.is_file() and arguments.out.open("rb").read(len(HEAD)) != HEAD.encode():
        parser.error(f"--out: {arguments.out} exists and was not written by this script: name another file")
    return arguments, rest


def check_options(recipes: Mapping[str, Recipe], budget_bits: float) -> set[str]:
    """Refuse recipes (by scheme name) whose schemes are for different layers, quantize no weights, or exceed the
    budget; only shapes are read; a collective. Return the names of the layers whose scheme does not depend on
    quant.scheme, but on a rule, for example. Raises RankError on every rank."""
    students = {name: meta_student(recipe) for name, recipe in recipes.items()}
    given = [
        {(layer, module.scheme.name) for layer, module in student.quantization.layers.items()}
        for student in students.values()
    ]
    own = {layer for layer, _ in set.intersection(*given)}
    parts: list[LayerSet] = []
    for name, recipe in recipes.items():
        student = students[name]
        found = layer_sets(student.model, student.quantization, name, own, TORCH_DTYPES[recipe.model.dtype])
        raise_everywhere(None if found else f"--schemes: {name} quantizes no weights, expected schemes of Linears")
        raise_everywhere(
            None
            if not parts or [part.layers for part in parts] == [part.layers for part in found]
            else f"--schemes: {name} quantizes other layers than those before it, expected schemes of the same layers"
        )
        parts = joined(parts, found)
    with errors_on_all_ranks(ValueError):
        check_budget(parts, budget_bits)
    return own


def measured(
    recipe: Recipe, context: RunContext, scheme: str, own: Collection[str], batches: int
) -> tuple[list[LayerSet], float]:
    """Measure the costs (:func:`tools.mixed_precision.divergences`) of each part alone under ``scheme``, the recipe's
    quant.scheme, and of all layers together; a collective. Return the parts with their costs, and the cost of all.
    Layers in ``own`` belong to no part."""
    session, loader = calibrated(recipe, context, check_models(recipe, context, losses=False))
    quantization = session.quantization
    parts = layer_sets(session.model, quantization, scheme, own, TORCH_DTYPES[recipe.model.dtype])
    sets = [*(part.layers for part in parts), [*quantization.layers]]
    *each, whole = divergences(session.engine, quantization, sets, loader.first(batches), session.device)
    return [part.costing(scheme, cost) for part, cost in zip(parts, each, strict=True)], whole


def joined(parts: Sequence[LayerSet], more: Sequence[LayerSet]) -> list[LayerSet]:
    """Merge the options (schemes with sizes and costs) of ``parts`` and ``more``, which are the same parts in the same
    order; return ``more`` if ``parts`` is empty."""
    if not parts:
        return [*more]
    return [replace(one, options={**one.options, **other.options}) for one, other in zip(parts, more, strict=True)]


def allocation_table(parts: Sequence[LayerSet], schemes: Sequence[str], costs: Mapping[str, float]) -> str:
    """Format measurements and choice as Markdown. ``schemes``: the scheme chosen for each part; ``costs``: KL
    divergence with all layers quantized, by scheme and for the mixed recipe (``MIX``)."""
    names = [name for name in costs if name != MIX]
    lines = [f"{HEAD[2:]} weights | " + " | ".join(names) + " | chosen |", "| --- " * (len(names) + 3) + "|"]
    for part, chosen in zip(parts, schemes, strict=True):
        cells = [f"{part.options[name].cost:.3g}" for name in names]
        lines.append(f"| {part} | {part.weights:,} | {' | '.join(cells)} | {chosen} |")
    weights = sum(part.weights for part in parts)
    lines += ["", "| all | bits per weight | KL divergence | sum of the parts |", "| --- | --- | --- | --- |"]
    for name, cost in costs.items():
        options = [part.options[chosen if name == MIX else name] for part, chosen in zip(parts, schemes, strict=True)]
        bits, added = sum(option.bits for option in options) / weights, sum(option.cost for option in options)
        lines.append(f"| {name} | {bits:.4f} | {cost:.3g} | {added:.3g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
