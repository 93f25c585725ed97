"""Predict memory per rank and collectives per step of a recipe, for every ZeRO strategy, before anything runs.

    python launch/memory.py --config launch/recipes/qwen3_30b_a3b.yaml --ranks 8 --gpu_gb 80
    python launch/memory.py --config runs/x/recipe.yaml --measured runs/x/memory.json

Needs the config.json of model.path (and of the teacher); no weights, no data, no GPU. Any option of the recipe can
follow, as for launch/train.py. ``--measured`` adds the memory that a run of the recipe measured, by item.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from collections.abc import Sequence

from engine.config.deepspeed import SHIPPED, DsConfigError
from engine.report import read_measured
from engine.session.student import quantized_share
from launch.exits import clean_exit, recipe_or_exit
from launch.scripts import int_from, option_parser, path_option
from model.console import progress_bar
from tools.memory.planner import (
    GB,
    RESERVE,
    Advisor,
    Planner,
    Prediction,
    advice,
    headline,
    measured_table,
    memory_table,
    traffic_table,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables. ``argv`` defaults to the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--ranks", type=int_from(1), help="of the whole run; default: those of --measured, else 8")
    parser.add_argument("--ranks_per_node", type=int_from(1), default=8, help="GPUs of a node, among which hpZ shares")
    parser.add_argument("--gpu_gb", type=float, help="memory of a GPU in 10^9 bytes: says what fits, and how many rows")
    parser.add_argument("--strategies", help="names in ds_configs/ or JSON files, by commas; default: all that ship")
    parser.add_argument("--measured", type=path_option, metavar="FILE", help="memory.json of a run of this recipe")
    arguments, rest = parser.parse_known_args(argv)
    recipe = recipe_or_exit(rest, check_files=False)
    if arguments.gpu_gb is not None and not 0 < arguments.gpu_gb < 1e6:
        parser.error(f"--gpu_gb: {arguments.gpu_gb}, expected the memory of a GPU in 10^9 bytes, like 80")
    for name in ("gpu_gb", "strategies") if arguments.measured is not None else ():
        if getattr(arguments, name) is not None:
            parser.error(f"--{name} has no effect with --measured, which compares with one run: leave one of them out")
    gpu_bytes = None if arguments.gpu_gb is None else int(arguments.gpu_gb * GB)
    with clean_exit():
        recipe.validate_models()
        measured = read_measured(arguments.measured) if arguments.measured is not None else None
        if measured is not None and arguments.ranks not in (None, measured.ranks):
            parser.error(f"--ranks {arguments.ranks}, expected {measured.ranks}, as in the run of --measured")
        ranks = arguments.ranks or (measured.ranks if measured is not None else 8)
        device = "cuda" if measured is None else measured.device
        planner = Planner(recipe, device=device, ranks_per_node=arguments.ranks_per_node)
        if measured is not None:
            print(measured_table(planner.predict(recipe.deepspeed, ranks), measured))
            return
        shipped = sorted(file.stem for file in SHIPPED.glob("*.json"))
        names = arguments.strategies.split(",") if arguments.strategies else shipped
        names += [] if arguments.strategies or recipe.deepspeed in names else [recipe.deepspeed]
        predictions, refused = predict_all(planner, names, ranks, gpu_bytes)
    total, trained = (sum(p.numel for p in some) for some in (planner.inventory.parameters, planner.inventory.trained))
    print(headline(recipe, ranks, total, trained))
    print(*quantized_share(planner.student.model, planner.student.quantization).lines(), sep="\n")
    print(f"\n{memory_table(predictions, gpu_bytes)}\n\n{traffic_table(predictions)}")
    own = next((one for one in predictions if one.strategy == recipe.deepspeed), None)
    if gpu_bytes is not None and own is not None and own.peak + RESERVE > gpu_bytes:
        print(f"\n{advice(Advisor(recipe, ranks, arguments.ranks_per_node), gpu_bytes)}")
    print(f"\nreserve: {RESERVE / GB:g} GB for CUDA, NCCL and holes in the allocator's memory, which are not modeled")
    print("".join(f"{name}: {why}\n" for name, why in refused.items()), end="")


def predict_all(
    planner: Planner, names: list[str], ranks: int, gpu_bytes: int | None
) -> tuple[list[Prediction], dict[str, str]]:
    """Predict the strategies in ``names`` that the recipe supports; return also, for each of the others, the reason why
    it is not supported. ``gpu_bytes``: memory of a GPU, to predict also the largest micro-batch that fits; None if not
    known. Raises DsConfigError if the recipe supports none of them."""
    predictions: list[Prediction] = []
    refused: dict[str, str] = {}
    for name in progress_bar(desc="memory", unit="strategy", over=names):
        try:
            predictions.append(planner.predict(name, ranks, gpu_bytes=gpu_bytes))
        except DsConfigError as error:
            refused[name] = str(error)
    if not predictions:
        raise DsConfigError("\n".join(refused.values()))
    return predictions, refused


if __name__ == "__main__":
    main()
