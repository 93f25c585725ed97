"""Metrics of a checkpoint as a file, to compare models on different machines without evaluating again.

    {"evaluations": [{"model": "runs/qwen3_4b/export", "weights_bytes": 4411359232, "measurements": {
        "perplexity per token": {"value": 12.31, "higher_is_better": false, "stderr": null,
                                 "conditions": "60,000 tokens of text 7b0c..., windows of 1024, bfloat16"}}}]}

``conditions``: all else that has to be equal for two values to be comparable.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.checkpoint.files import replace_text


@dataclass(frozen=True)
class Measurement:
    """One metric of one model. ``stderr``: standard error over the samples, if known."""

    value: float
    higher_is_better: bool
    conditions: str
    stderr: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.value, int | float):
            raise TypeError(f"value: {self.value!r}, expected a number")


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one checkpoint, by name. ``model``: the directory, as it was given."""

    model: str
    weights_bytes: int
    measurements: dict[str, Measurement]


def weights_size(directory: str | Path) -> int:
    """Sum the bytes of a checkpoint's safetensors files."""
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))


def check_writable(path: Path, option: str) -> None:
    """Refuse an unwritable results file before hours of evaluation; creates its directories.

    Raises:
        ValueError: names the ``option`` of the command line, the file and the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "Is a directory")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        place = f"{option} {str(path)!r}"
        raise ValueError(f"{place}: cannot be written ({reason}), expected a place for results") from error


def write_evaluations(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations as JSON, in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"evaluations": [asdict(evaluation) for evaluation in evaluations]}
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read the file of :func:`write_evaluations`.

    Raises:
        ValueError: the file has another content; names the file and the location of the error.
    """
    where = ""
    try:
        found = []
        for index, entry in enumerate(json.loads(path.read_text(encoding="utf-8"))["evaluations"]):
            where = place = f" in evaluations[{index}]"
            measurements = {}
            for name, measurement in entry["measurements"].items():
                where = f"{place}.measurements[{name!r}]"
                measurements[name] = Measurement(**measurement)
            where = place
            found.append(Evaluation(**{**entry, "measurements": measurements}))
        return found
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}{where}"
        raise ValueError(f"{path}: expected JSON that launch/evaluate.py --json wrote ({reason})") from error
