"""Store metrics of checkpoints in files, and compare bf16, PTQ and QAT side by side in Markdown tables.

The files make it possible to compare models that were evaluated on different machines:

    {"evaluations": [{"model": "runs/qwen3_4b/export", "weights_bytes": 4411359232, "measurements": {
        "perplexity per token": {"value": 12.31, "higher_is_better": false, "stderr": null,
                                 "conditions": "60,000 tokens of text 7b0c..., windows of 1024, bfloat16"}}}]}

``conditions`` describes everything that must be equal for two values to be comparable.

The recovered share (PTQ - QAT) / (PTQ - bf16) is the share of the loss from quantization that training recovered: 1 for
the unquantized model, 0 for PTQ, and less than 0 if training made the model worse than PTQ. The formula is the same for
perplexities and accuracies.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.checkpoint.checked_files import replace_text
from model.checkpoint.safetensors import parse_json, read_headers
from model.console import figure, markdown_table


@dataclass(frozen=True)
class Measurement:
    """One metric of one model. ``stderr`` is the standard error over the samples, None if unknown."""

    value: float
    higher_is_better: bool
    conditions: str
    stderr: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.value, int | float):
            raise TypeError(f"value: {self.value!r}, expected a number")


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one checkpoint, by name. ``model`` is its directory as given by the user."""

    model: str
    weights_bytes: int
    measurements: dict[str, Measurement]


def weights_size(directory: str | Path) -> int:
    """Sum the bytes of the safetensors files that a checkpoint is read from; a second copy of the weights beside them
    (``consolidated.safetensors``) does not count. Raises CheckpointError if there is no checkpoint."""
    files = {tensor.file for tensor in read_headers(Path(directory)).tensors.values()}
    return sum(file.stat().st_size for file in files)


def check_writable(path: Path, option: str) -> None:
    """Reject an unwritable results file before hours of evaluation; creates its directories. Raises ValueError if the
    file cannot be written; the message names the command-line ``option``, the file and the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "Is a directory")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        place = f"{option} {str(path)!r}"
        raise ValueError(f"{place}: cannot be written ({reason}), expected a file that can be written") from error


def write_evaluations(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations as JSON, without infinite metrics (the perplexity per word overflows if a text has few spaces).
    The file appears only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"evaluations": [asdict(evaluation) for evaluation in evaluations]}
    for entry in content["evaluations"]:
        entry["measurements"] = {name: one for name, one in entry["measurements"].items() if one["value"] != math.inf}
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read a results file (:func:`write_evaluations`). Raises ValueError if its content is of another form; the message
    names file and location of the error."""
    where = ""
    try:
        found = []
        for index, entry in enumerate(parse_json(path.read_bytes())["evaluations"]):
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


# On the same text these metrics rank models in the same order as the perplexity per token.
REDUNDANT = ("perplexity per word", "perplexity per byte", "bits per byte")
# A loss below this share of a metric without a standard error is noise, so no recovered share is computed.
NOISE = 0.005
# Name of the unquantized model, by the dtype of weights and GEMMs in the evaluation.
LEVELS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Comparison:
    """Metrics of the unquantized model, from which PTQ started, and of PTQ and QAT by scheme name."""

    bf16: Evaluation
    ptq: dict[str, Evaluation] = field(default_factory=dict)
    qat: dict[str, Evaluation] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """Return the name of the unquantized model in tables: the dtype of the evaluation, bf16 if it is not known."""
        ends = (found.conditions.rpartition(", ")[2] for found in self.bf16.measurements.values())
        return next((LEVELS[end] for end in ends if end in LEVELS), "bf16")

    def measures(self) -> list[str]:
        """Return the names of the compared metrics: those of the unquantized model, except :data:`REDUNDANT`."""
        return [name for name in self.bf16.measurements if name not in REDUNDANT]

    def left_out(self) -> list[str]:
        """Return the names of the metrics that PTQ or QAT has, but not the unquantized model."""
        others = dict.fromkeys(name for one in (*self.ptq.values(), *self.qat.values()) for name in one.measurements)
        return [name for name in others if name not in self.bf16.measurements and name not in REDUNDANT]

    def problems(self) -> list[str]:
        """List the reasons why models cannot be compared, a sentence each: a metric is missing or was measured
        differently."""
        found = []
        for other in (*self.ptq.values(), *self.qat.values()):
            for name in self.measures():
                ours, theirs = self.bf16.measurements[name], other.measurements.get(name)
                if theirs is None:
                    found.append(f"{other.model} has no {name}, {self.bf16.model} has")
                elif ours.conditions != theirs.conditions:
                    found.append(
                        f"{name} of {self.bf16.model} is of {ours.conditions}; of {other.model} {theirs.conditions}"
                    )
        return found

    def rows(self, measure: str) -> list[tuple[str, ...]]:
        """Return the cells of the table of the metric ``measure``: column names, the unquantized model, then a row per
        scheme."""
        bf16, size = self.bf16.measurements[measure], self.bf16.weights_bytes
        rows: list[tuple[str, ...]] = [("", self.level, "PTQ", "QAT", "recovered", "file", f"of {self.level}")]
        rows.append((self.level, shown_measurement(bf16), "", "", "", shown_size(size), ""))
        for scheme in dict.fromkeys([*self.ptq, *self.qat]):
            models = [side.get(scheme) for side in (self.ptq, self.qat)]
            ptq, qat = (None if model is None else model.measurements[measure] for model in models)
            own = [model.weights_bytes for model in models if model is not None][-1]
            figures = (*map(shown_measurement, (bf16, ptq, qat)), shown_share(bf16, ptq, qat))
            rows.append((scheme, *figures, shown_size(own), f"{own / size:.0%}"))
        return rows


def recovered(bf16: Measurement, ptq: Measurement, qat: Measurement) -> float | None:
    """Compute (PTQ - QAT) / (PTQ - bf16). Return None if PTQ's loss is noise: at most the standard error of ``bf16``,
    or, if that is unknown, at most :data:`NOISE` times the value of ``bf16``."""
    lost = bf16.value - ptq.value if bf16.higher_is_better else ptq.value - bf16.value
    noise = bf16.stderr if bf16.stderr is not None else NOISE * abs(bf16.value)
    return None if lost <= noise else (ptq.value - qat.value) / (ptq.value - bf16.value)


def shown_measurement(found: Measurement | None) -> str:
    """Format a metric with four digits, and its standard error if there is one; empty for None."""
    if found is None:
        return ""
    large = f"{found.value:,.0f}" if abs(found.value) < 1e4 else figure(found.value)
    value = large if abs(found.value) >= 1000 else f"{found.value:#.4g}"
    return value if found.stderr is None else f"{value} ±{found.stderr:.2g}"


def shown_share(bf16: Measurement, ptq: Measurement | None, qat: Measurement | None) -> str:
    """Format the recovered share in percent; ``(no loss)`` if :func:`recovered` returns None, empty if PTQ or QAT is
    missing."""
    if ptq is None or qat is None:
        return ""
    share = recovered(bf16, ptq, qat)
    return "(no loss)" if share is None else f"{share:.0%}"


def shown_size(size: int) -> str:
    """Format a size in MB (10^6 bytes) or GB (10^9 bytes)."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def comparison_tables(comparison: Comparison) -> str:
    """Format the comparison as Markdown: per metric a line with its conditions, and a table."""
    blocks = []
    for measure in comparison.measures():
        found = comparison.bf16.measurements[measure]
        better = "higher" if found.higher_is_better else "lower"
        blocks += [f"{measure} ({better} is better): {found.conditions}", markdown_table(comparison.rows(measure))]
    return "\n\n".join(blocks)


def markdown(comparison: Comparison) -> str:
    """Format the content of compare.md: tables, meaning of the columns, and directories of the models."""
    level = comparison.level
    legend = (
        f"recovered = (PTQ - QAT) / (PTQ - {level}); (no loss): PTQ lost less than the standard error of {level}, or "
        f"than {NOISE:.1%} of a figure without one. file: the weights on disk."
    )
    models = [f"- {level}: `{comparison.bf16.model}`"]
    for kind, side in (("PTQ", comparison.ptq), ("QAT", comparison.qat)):
        models += [f"- {kind} {name}: `{model.model}`" for name, model in side.items()]
    return "\n\n".join([f"# {level}, PTQ, QAT", comparison_tables(comparison), legend, "\n".join(models)]) + "\n"


def write_comparison(comparison: Comparison, directory: Path) -> Path:
    """Write ``compare.md``, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    text = directory / "compare.md"
    text.write_text(markdown(comparison), encoding="utf-8")
    return text
