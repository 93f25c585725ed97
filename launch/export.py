"""Write the compressed checkpoint of a training checkpoint.

    deepspeed --num_gpus 8 launch/export.py --checkpoint runs/qwen3_4b/checkpoints/step_00001000 --out served/qwen3_4b

The run's recipe is read from the checkpoint. Any number of ranks with enough memory will do. ``--format`` overrides the
recipe's ``export.format``, for example with ``vllm_fp8``, ``dequantized`` (a plain checkpoint), ``mlx`` (mlx-lm),
``gguf`` (llama.cpp; it needs ``--template``), ``executorch`` (XNNPACK) or ``peft`` (an adapter without its base).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

import copy
from typing import get_args

from data.cache import digest
from engine.checkpoint.find import check_stage, read_step_directory, verify_checkpoint
from engine.checkpoint.resume import load_checkpoint
from engine.config.config import Recipe, contradictions
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from engine.config.sections import ExportFormat
from engine.fake_quant import FakeQuant
from engine.session.context import start_ranks
from engine.session.session import build_session
from engine.session_export import check_export, export_trained
from launch.exits import clean_exit
from launch.scripts import option_parser, path_option
from model.ranks import errors_on_all_ranks
from model.zero import stage


def main() -> None:
    """Check the arguments, then export."""
    parser = option_parser(__doc__, ranks=True)
    parser.add_argument("--checkpoint", type=path_option, required=True, help="a step directory that train.py wrote")
    parser.add_argument(
        "--out", type=path_option, required=True, help="directory to write; it must not hold anything yet"
    )
    parser.add_argument(
        "--format", choices=get_args(ExportFormat), help="layout of the files; that of the recipe by default"
    )
    parser.add_argument("--template", help="of --format gguf: a GGUF file of the base model, see docs/gguf.md")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the Python files of the model's directory; a checkpoint's own recipe cannot ask for that",
    )
    arguments = parser.parse_args()
    with clean_exit():
        if not (arguments.checkpoint / "recipe.yaml").is_file():
            raise RecipeError(f"{arguments.checkpoint} is not a training checkpoint: it has no recipe.yaml")
        if (steps := arguments.checkpoint / "checkpoints").is_dir():
            raise RecipeError(f"{arguments.checkpoint} is a run's output_dir, expected a step directory in {steps}")
        recipe = load_recipe(arguments.checkpoint / "recipe.yaml")
        if recipe.model.trust_remote_code and not arguments.trust_remote_code:
            raise RecipeError(
                f"model.trust_remote_code: the recipe in {arguments.checkpoint} asks to run the Python files of "
                f"{recipe.model.path}: read them, then give --trust_remote_code; only the command line may"
            )
        recipe.model.trust_remote_code = arguments.trust_remote_code
        recipe.export.dir = str(arguments.out)
        recipe.export.format = arguments.format or recipe.export.format
        if arguments.template and recipe.export.format != "gguf":
            raise RecipeError(f"--template: has no effect with --format {recipe.export.format}, expected --format gguf")
        recipe.export.template = arguments.template or recipe.export.template
        check_format(recipe)
        export_checkpoint(recipe, arguments.checkpoint)


def check_format(recipe: Recipe) -> None:
    """Refuse an ``export.format`` that contradicts other options of the recipe: when the run started, it checked only
    the format that its recipe had then. Raises RecipeError."""
    run = copy.deepcopy(recipe)
    run.export.enabled = True
    run.data.kind = "chat"  # on_policy restricts only what a run publishes
    if problems := [line for line in contradictions(run) if line.startswith("export.format")]:
        raise RecipeError("\n".join(problems))


def export_checkpoint(recipe: Recipe, checkpoint: Path) -> None:
    """Rebuild the run's engine without its teacher, load the checkpoint, and export. Raises RecipeError if the export
    cannot be written to its place, RankError on every rank for other problems."""
    recipe.fetch(("model", "quant", "adapter"))  # the format of a source is read from its files
    check_export(recipe)
    manifest = checkpoint / "state.json"  # of a copy on each node
    content = manifest.read_text(encoding="utf-8", errors="replace") if manifest.is_file() else None
    context = start_ranks(recipe, {"--checkpoint": checkpoint, f"{checkpoint}/state.json": digest([content])})
    with errors_on_all_ranks(OSError, ValueError):
        found = read_step_directory(checkpoint)
    check_stage(found, stage(context.ds_config))
    verify_checkpoint(found)
    session = build_session(recipe, context, None, None)
    quant = FakeQuant(session)
    load_checkpoint(session, {**session.stateful(), "fake_quant": quant}, found)
    export_trained(session, quant)


if __name__ == "__main__":
    main()
