"""Compare bf16, PTQ and QAT in one table: metrics, the share of PTQ's loss that QAT recovered, sizes of the weights.

    python launch/compare.py --bf16 FT --ptq w4=ptq/w4 --qat w4=runs/w4/export [--ptq w2=... --qat w2=...] --text FILE
    python launch/compare.py --bf16 FT --ptq w4=ptq/w4 --qat w4=runs/w4/export --results a.json --results b.json

``--bf16`` is the unquantized model that PTQ quantized; for a fair share it was trained for as long as QAT. Directories
whose results are in a file of ``--results`` (of ``launch/evaluate.py --json``, or an earlier comparison) are not
evaluated again and need not be on this machine. All other directories are evaluated on ``--text`` and ``--tasks``, as
by ``launch/evaluate.py``, on one or more ranks; on a text they are also compared with the unquantized model, by KL
divergence and equal top tokens. Metrics that were measured on different data are refused.

Written to ``--out``: compare.md, and compare.json with all results. If this compare.json is a file of ``--results``,
its other results stay in it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from collections.abc import Sequence
from contextlib import suppress

from engine.config.hub import local_paths, named
from launch.evaluate import add_questions, check_questions, check_results, read_questions, start_alike, write_results
from launch.exits import clean_exit
from launch.scripts import CheckpointName, NamedDirectories, fetch_checkpoints, option_parser, path_option
from model.quantized.quantization_config import is_quantized
from model.ranks import errors_on_all_ranks, is_main, listed, say
from tools.evaluation.perplexity import KL, check_checkpoint, evaluate_checkpoint, read_reference
from tools.evaluation.results import Comparison, Evaluation, comparison_tables, read_evaluations, write_comparison


def main() -> None:
    """Evaluate the checkpoints that have no results yet; print and write the comparison. Exits with an error if results
    cannot be compared."""
    parser = option_parser(__doc__, ranks=True)
    parser.add_argument("--bf16", type=CheckpointName, required=True, metavar="DIR", help="the unquantized checkpoint")
    parser.add_argument("--ptq", action=NamedDirectories, default={}, metavar="NAME=DIR", help="repeatable")
    parser.add_argument("--qat", action=NamedDirectories, default={}, metavar="NAME=DIR", help="repeatable")
    parser.add_argument("--results", type=path_option, action="append", default=[], metavar="FILE", help="repeatable")
    parser.add_argument(
        "--out", type=path_option, default=Path("comparison"), metavar="DIR", help="default: comparison"
    )
    add_questions(parser)
    arguments = parser.parse_args()
    check_questions(parser, arguments)
    if not arguments.ptq and not arguments.qat:
        parser.error("nothing to compare with: expected --ptq or --qat")

    with clean_exit():
        # Small files alone: results of an earlier evaluation may make the weights unnecessary.
        fetch_checkpoints(arguments, weights=False, known=recorded(arguments.results))
        bf16 = str(arguments.bf16)
        ptq, qat = ({name: str(one) for name, one in side.items()} for side in (arguments.ptq, arguments.qat))
        directories = list(dict.fromkeys([bf16, *ptq.values(), *qat.values()]))
        device = start_alike(arguments, directories)
        check_results(arguments.out / "compare.json", "--out")
        with errors_on_all_ranks(OSError, ValueError):
            if is_quantized(Path(bf16)):
                say(f"warning: --bf16: {bf16} is quantized, expected the model that PTQ quantized")
            known = read_results(arguments.results)
            own = arguments.out / "compare.json"
            kept = read_evaluations(own) if own.resolve() in [file.resolve() for file in arguments.results] else []
            missing = [directory for directory in directories if named(directory) not in known]
            asked = arguments.text is not None or arguments.tasks is not None
            check_missing(missing, asked=asked)
            if asked and not missing:
                say("nothing is measured, as --results has results of all models: --text and --tasks have no effect")
            for directory in missing:
                local_paths(named(directory))  # the weights, too
        if missing:
            questions = read_questions(arguments)
            for directory in missing:
                check_checkpoint(directory)
            reference = None
            if arguments.text is not None:
                # Only a figure that all models have is compared.
                measured = [known[named(one)] for one in directories if named(one) in known]
                without = [one.model for one in measured if KL not in one.measurements]
                if without:
                    say(
                        f"no KL divergence, as the results of {listed(without)} lack it: launch/evaluate.py "
                        "--reference measures it"
                    )
                else:
                    with errors_on_all_ranks(ValueError):  # its weights too, if only its results were needed so far
                        (unquantized,) = local_paths(named(bf16))
                    reference = read_reference(unquantized, questions, device)
            for directory in missing:
                say(f"evaluate: {directory}")
                known[named(directory)] = evaluate_checkpoint(directory, questions, device, reference)
                # After each: a later failure, or metrics that cannot be compared, must not lose results.
                done = [known[named(one)] for one in missing if named(one) in known]
                write_results(own, joined(kept, done))
        comparison = Comparison(
            known[named(bf16)],
            {name: known[named(directory)] for name, directory in ptq.items()},
            {name: known[named(directory)] for name, directory in qat.items()},
        )
        with errors_on_all_ranks(OSError, ValueError):
            if problems := comparison.problems():
                raise ValueError("the results cannot be compared:\n" + "\n".join(problems))
            written = write_comparison(comparison, arguments.out) if is_main() else None
        write_results(own, joined(kept, [known[named(directory)] for directory in directories]))
        if left := comparison.left_out():
            say(f"not compared: {listed(left)}, which {comparison.bf16.model} lacks")
        say(f"\n{comparison_tables(comparison)}\n\n{written}, {own}")


def joined(kept: Sequence[Evaluation], new: Sequence[Evaluation]) -> list[Evaluation]:
    """Return one evaluation of each model, that of ``new`` if both lists have one."""
    return list({evaluation.model: evaluation for evaluation in (*kept, *new)}.values())


def recorded(files: Sequence[Path]) -> set[str]:
    """Return the names of all checkpoints with results in ``files``. Files that cannot be read are skipped:
    :func:`read_results` reports them."""
    found: set[str] = set()
    for file in files:
        with suppress(OSError, ValueError):
            found |= {evaluation.model for evaluation in read_evaluations(file)}
    return found


def read_results(files: Sequence[Path]) -> dict[str, Evaluation]:
    """Read the evaluations in all files, by the directory of the evaluated checkpoint. Raises OSError if a
    file cannot be read, ValueError if it is no results file, or two results of one directory differ."""
    found: dict[str, Evaluation] = {}
    for file in files:
        for evaluation in read_evaluations(file):
            if found.setdefault(evaluation.model, evaluation) != evaluation:
                raise ValueError(
                    f"{file}: {evaluation.model} has other results in an earlier file of --results: give only one of "
                    "them"
                )
    return found


def check_missing(directories: Sequence[str], *, asked: bool) -> None:
    """Raise ValueError if ``directories``, which have no results, cannot be evaluated: no checkpoint is there, or
    neither a text nor tasks were ``asked`` for. The message names the directories."""
    if not directories:
        return
    if not asked:
        names = listed(named(directories))
        raise ValueError(f"no results of {names}: give --text or --tasks to measure them, or --results that has them")
    if absent := [name for name in directories if not (Path(name) / "config.json").is_file()]:
        raise ValueError(f"{listed(absent)}: neither a checkpoint directory nor a model in a file of --results")


if __name__ == "__main__":
    main()
