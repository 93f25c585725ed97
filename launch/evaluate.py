"""Evaluate plain and compressed checkpoints: perplexity of a text, and tasks of lm-evaluation-harness.

    python launch/evaluate.py --model DIR [--model DIR2 ...] --text FILE
    python launch/evaluate.py --model EXPORT --text FILE --reference BF16
    python launch/evaluate.py --model DIR --tasks hellaswag,arc_easy [--task_dir FOLDER] [--limit 200] [--num_fewshot 5]
    deepspeed --num_gpus 8 launch/evaluate.py --model DIR --text FILE --sharded

DIR is a directory, or a name on the Hugging Face Hub (Qwen/Qwen3-4B, Qwen/Qwen3-4B@main): a plain checkpoint or a
compressed one (a PTQ or QAT export), which is computed with the numerics of training. Several ranks share the work, and
with ``--sharded`` also the weights of a plain checkpoint (ZeRO-3). With ``--reference``, the mean KL divergence from a
reference model and the share of equal top tokens are measured on the text, too. ``--json FILE`` keeps the results for
``launch/compare.py``.

Tasks need lm-evaluation-harness (pip install lm-eval==0.4.13); only tasks that compare log-likelihoods are supported.
It loads task data from the Hugging Face Hub or, with --task_dir, task files and data from a folder.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

import argparse
from collections.abc import Sequence

import torch

from engine.session.context import TORCH_DTYPES, init_ranks
from launch.exits import clean_exit
from launch.scripts import CheckpointName, fetch_checkpoints, int_from, option_parser, path_option
from model.console import figure
from model.ranks import errors_on_all_ranks, is_main, say
from tools.evaluation.perplexity import DEFAULT_LENGTH, Questions, check_checkpoint, evaluate_checkpoint, read_reference
from tools.evaluation.results import Evaluation, check_writable, write_evaluations


def main() -> None:
    """Evaluate every model; print its table rows, and write the results to the file of ``--json``, if given."""
    parser = option_parser(__doc__, ranks=True)
    parser.add_argument("--model", type=CheckpointName, action="append", required=True, help="checkpoint; repeatable")
    parser.add_argument(
        "--reference",
        type=CheckpointName,
        metavar="DIR",
        help="unquantized checkpoint: KL divergence and equal top tokens",
    )
    parser.add_argument("--json", type=path_option, metavar="FILE", help="write the results there")
    add_questions(parser)
    arguments = parser.parse_args()
    check_questions(parser, arguments)
    if arguments.text is None and arguments.tasks is None:
        parser.error("nothing to evaluate: expected --text, --tasks or both")
    if arguments.reference is not None and arguments.text is None:
        parser.error("--reference has no effect without --text")

    with clean_exit():
        fetch_checkpoints(arguments)
        directories = [*arguments.model, *filter(None, [arguments.reference])]
        device = start_alike(arguments, directories)
        if arguments.json is not None:
            check_results(arguments.json, "--json")
        questions = read_questions(arguments)
        for directory in dict.fromkeys(directories):
            check_checkpoint(directory)
        reference = None
        if arguments.reference is not None:
            reference = read_reference(arguments.reference, questions, device)
        found: list[Evaluation] = []
        for directory in arguments.model:
            found.append(evaluate_checkpoint(directory, questions, device, reference))
            say("\n".join(lines(found[-1], arguments.text is not None, first=len(found) == 1)))
            if arguments.json is not None:
                write_results(arguments.json, found)  # after each: a later failure must not lose results


def start_alike(arguments: argparse.Namespace, models: Sequence[str | Path]) -> torch.device:
    """Start the process group and return this rank's device; a collective. Raises RankError on every rank if ranks
    differ in the arguments, or in the files of ``--text`` and of ``models``."""
    files = {"--text": arguments.text, **{f"model {number}": one for number, one in enumerate(models)}}
    return init_ranks(vars(arguments), files)


def add_questions(parser: argparse.ArgumentParser) -> None:
    """Add the options that select what is measured, and how."""
    parser.add_argument("--text", type=path_option, metavar="FILE", help="perplexity of this UTF-8 text file")
    parser.add_argument("--tokens", type=int_from(1), help="use only this many tokens from the start of the text")
    parser.add_argument("--tasks", help="tasks or groups of lm-evaluation-harness, separated by commas")
    parser.add_argument(
        "--task_dir", type=path_option, metavar="FOLDER", help="with task files (YAML); its Python code is run"
    )
    parser.add_argument("--limit", type=int_from(1), help="use only this many samples from the start of each task")
    parser.add_argument(
        "--num_fewshot", type=int_from(0), help="examples before each question (default: as the task says)"
    )
    parser.add_argument(
        "--length",
        type=int_from(1),
        help=f"tokens that the model sees at a time (default: {DEFAULT_LENGTH} of a text, the context in tasks)",
    )
    parser.add_argument("--batch_size", type=int_from(1), default=4, help="windows per forward (default 4)")
    parser.add_argument(
        "--dtype", choices=TORCH_DTYPES, default="bfloat16", help="of weights and GEMMs (default bfloat16)"
    )
    parser.add_argument("--sharded", action="store_true", help="partition plain checkpoints over the ranks (ZeRO-3)")


def check_questions(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a message if an option of :func:`add_questions` has no effect, like ``--limit`` without ``--tasks``."""
    for name, needed in (("tokens", "text"), ("task_dir", "tasks"), ("limit", "tasks"), ("num_fewshot", "tasks")):
        if getattr(arguments, name) is not None and getattr(arguments, needed) is None:
            parser.error(f"--{name} has no effect without --{needed}")


def read_questions(arguments: argparse.Namespace) -> Questions:
    """Convert the options to questions. Tasks are looked up here, before any model is loaded. Raises RankError on every
    rank if lm-evaluation-harness is missing, or a task cannot be run."""
    tasks = None
    if arguments.tasks is not None:
        with errors_on_all_ranks(ModuleNotFoundError):
            try:
                from tools.evaluation.tasks import load_tasks
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(
                    f"--tasks needs lm-evaluation-harness ({error}): pip install lm-eval==0.4.13"
                ) from error
        names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
        tasks = load_tasks(names, arguments.task_dir, limit=arguments.limit, num_fewshot=arguments.num_fewshot)
    return Questions(
        text=arguments.text,
        tokens=arguments.tokens,
        tasks=tasks,
        length=arguments.length,
        batch_size=arguments.batch_size,
        dtype=TORCH_DTYPES[arguments.dtype],
        sharded=arguments.sharded,
    )


def check_results(path: Path, option: str) -> None:
    """Raise RankError on every rank, with the option's name, if rank 0 cannot write a results file; a collective."""
    with errors_on_all_ranks(ValueError):
        if is_main():
            check_writable(path, option)


def write_results(path: Path, found: Sequence[Evaluation]) -> None:
    """Write the results as JSON on rank 0; a collective. Raises RankError on every rank if the file cannot be
    written."""
    with errors_on_all_ranks(OSError, ValueError):
        if is_main():
            write_evaluations(path, found)


def lines(evaluation: Evaluation, text: bool, *, first: bool) -> list[str]:
    """Format the table rows of one model: perplexities if a text was evaluated (below the header, if this is the first
    model), and one row per other metric."""
    rows = []
    figures = dict(evaluation.measurements)
    if text:
        per_token, per_word, per_byte, bits = (
            figures.pop(name)
            for name in ("perplexity per token", "perplexity per word", "perplexity per byte", "bits per byte")
        )
        if first:
            rows.append(
                f"{'model':40} {'ppl/token':>10} {'ppl/word':>10} {'ppl/byte':>9} {'bits/byte':>9}  measured on"
            )
        rows.append(
            f"{evaluation.model:40} {figure(per_token.value):>10} {figure(per_word.value, 3):>10} "
            f"{figure(per_byte.value):>9} {figure(bits.value):>9}  {per_token.conditions}"
        )
    for name, found in figures.items():
        error = f"{'':9}" if found.stderr is None else f"± {found.stderr:<7.4f}"
        rows.append(f"{evaluation.model:40} {name:30} {figure(found.value):>10} {error}  {found.conditions}")
    return rows


if __name__ == "__main__":
    main()
