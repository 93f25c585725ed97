"""Show the samples that a recipe trains on, before it trains: their text, with what the model learns of it marked.

    python launch/show_data.py --config R.yaml [--rows 10] [--section.field value ...]
    python launch/show_data.py --config R.yaml --json > rows.jsonl

Reads the model's config.json, its tokenizer and the data as training does; no weights, no GPU. A run prints the same
before it trains if its recipe has ``data.show: 3``. ``--json`` prints a JSON object per sample: its ``file`` and
``line`` (null in plain text), its ``split`` (train, skip, held_out or eval), ``text``, and ``targets``, a list with
each contiguous part of the text that is learned.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from launch import end_quietly
from launch.scripts import int_from, option_parser

if __name__ == "__main__":
    end_quietly()

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout

from data.samples import Samples
from data.show import Detokenizer, Split, described, first_rows

with redirect_stdout(sys.stderr):  # where DeepSpeed logs from now on: stdout is for the samples
    from engine.config.errors import RecipeError
    from engine.session.context import read_data, read_tokenizer
    from launch.exits import clean_exit, recipe_or_exit
    from model.console import progress_bar


def main(argv: list[str] | None = None) -> None:
    """Read the data and print samples. ``argv`` defaults to the command line."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--rows", type=int_from(0), metavar="N", help="samples of each file (default: 3; all with --json)"
    )
    parser.add_argument("--line", metavar="FILE:LINE", help="only the sample of this line")
    parser.add_argument("--json", action="store_true", help="print a JSON object per sample")
    arguments, rest = parser.parse_known_args(argv)
    recipe = recipe_or_exit(rest, check_files=False)
    recipe.data.show = 1
    with clean_exit():
        recipe.validate_data()
        with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
            tokenizer = read_tokenizer(recipe)
            splits = read_data(recipe, tokenizer).splits()
        if arguments.line is not None:
            splits = only_line(splits, arguments.line)
        decoder = Detokenizer(tokenizer)
        rows = 3 if arguments.rows is None and not arguments.json else arguments.rows
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        lines = json_lines(splits, decoder, rows) if arguments.json else described(splits, decoder, rows, color=color)
        try:
            for line in lines:
                print(line)
            sys.stdout.flush()
        except BrokenPipeError:  # head has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def only_line(splits: dict[Split, Samples], place: str) -> dict[Split, Samples]:
    """Select the sample that was made from the line ``place``, given as FILE:NUMBER. Raises RecipeError if there is
    none."""
    file, _, line = place.rpartition(":")
    place = f"{Path(file)}:{line}"  # as readers name files
    found = {split: samples.take(samples.named(place)) for split, samples in splits.items()}
    if not any(found.values()):
        raise RecipeError(
            f"--line: {place}, expected a file of data.train or data.eval as the recipe names it, a colon and the "
            "number of a line that became a sample: blank and dropped lines did not, nor do lines of plain text"
        )
    return found


def json_lines(splits: dict[Split, Samples], decoder: Detokenizer, rows: int | None) -> Iterator[str]:
    """Yield a line of JSON for each of the first ``rows`` samples of each file (all if None). Then print on stderr how
    many of them have a character that is cut in two, if any."""
    cut = 0
    with progress_bar(sum(map(len, splits.values())), "show", "sample") as bar:
        for split, samples in splits.items():
            for _, its_own, shown in first_rows(samples, rows):
                for sample in shown:
                    parts = decoder.parts(sample)
                    row = {"file": sample.file, "line": sample.line or None, "split": split}
                    row |= {"text": "".join(part.text for part in parts)}
                    yield json.dumps(row | {"targets": [part.text for part in parts if part.target]})
                    cut += any(part.cut for part in parts)
                    bar.update()
                bar.update(len(its_own) - len(shown))
    if cut:
        have = "1 sample has" if cut == 1 else f"{cut:,} samples have"
        print(rf"{have} a character that is cut in two: its bytes are written as \x..", file=sys.stderr)


if __name__ == "__main__":
    main()
