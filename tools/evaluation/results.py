"""What was measured of a checkpoint, as a file: models on different machines are compared without evaluating again.

    {"evaluations": [{"model": "runs/qwen3_4b/export", "weights_bytes": 4411359232, "measurements": {
        "perplexity per token": {"value": 12.31, "higher_is_better": false, "stderr": null,
                                 "conditions": "60,000 tokens of text 7b0c..., windows of 1024, bfloat16"}}}]}

``conditions`` names what else has to be equal for two values to be comparable.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One figure of one model. ``stderr``: its standard error over the samples, where one is known."""

    value: float
    higher_is_better: bool
    conditions: str
    stderr: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """All figures of one checkpoint, by name. ``model``: the directory, as it was given."""

    model: str
    weights_bytes: int
    measurements: dict[str, Measurement]


def weights_size(directory: str | Path) -> int:
    """The bytes of the safetensors files of a checkpoint."""
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))


def check_writable(path: str | Path, option: str) -> None:
    """Refuse before hours of evaluation a file that could not be written after them. Its directories are made.

    Raises:
        ValueError: names the ``option`` of the command line, the file and the reason.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "Is a directory")
        aside = _aside(path)
        aside.touch()
        aside.unlink()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{option} {str(path)!r}: cannot be written ({reason}), expected a place for results"
        ) from error


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def write_evaluations(path: str | Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations as JSON, aside first, so that an interrupted write leaves what was there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    content = {"evaluations": [asdict(evaluation) for evaluation in evaluations]}
    aside.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


def read_evaluations(path: str | Path) -> list[Evaluation]:
    """What :func:`write_evaluations` wrote.

    Raises:
        ValueError: the file is something else; names the file and what is wrong.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON that launch/evaluate.py --json wrote ({error})") from error
    found = content.get("evaluations") if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"{path}: no list 'evaluations', expected JSON that launch/evaluate.py --json wrote")
    return [_evaluation(entry, f"{path}: evaluations[{index}]") for index, entry in enumerate(found)]


def _evaluation(entry: Any, where: str) -> Evaluation:
    _expect_keys(entry, {field.name for field in fields(Evaluation)}, where)
    if not isinstance(entry["measurements"], dict):
        raise ValueError(f"{where}.measurements: expected an object")
    measurements = {}
    for name, measurement in entry["measurements"].items():
        place = f"{where}.measurements[{name!r}]"
        _expect_keys(measurement, {field.name for field in fields(Measurement)}, place)
        measurements[name] = Measurement(**measurement)
        if not isinstance(measurement["value"], int | float):
            raise ValueError(f"{place}.value: {measurement['value']!r}, expected a number")
    return Evaluation(entry["model"], entry["weights_bytes"], measurements)


def _expect_keys(entry: Any, expected: set[str], where: str) -> None:
    found = set(entry) if isinstance(entry, dict) else None
    if found != expected:
        raise ValueError(f"{where}: {sorted(found) if found else entry!r}, expected an object of {sorted(expected)}")
