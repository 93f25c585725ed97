"""bf16, PTQ and QAT side by side: a table, its Markdown and a picture.

The recovered share (PTQ - QAT) / (PTQ - bf16) is how much of what quantizing cost training has won back: 1 is the
unquantized model, 0 is PTQ, below 0 training did harm. It is the same formula for perplexities and for accuracies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.evaluation.results import Evaluation, Measurement

# Of the same text these order models as the perplexity per token does.
REDUNDANT = ("perplexity per word", "perplexity per byte", "bits per byte")
# A loss below this share of a figure without a standard error is noise: a share of it would say nothing.
NOISE = 0.005

# What the unquantized model is called: by the type of weights and GEMMs in which all were measured.
LEVELS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Comparison:
    """The unquantized model, which PTQ started from, and what became of it under each scheme."""

    bf16: Evaluation
    ptq: dict[str, Evaluation] = field(default_factory=dict)
    qat: dict[str, Evaluation] = field(default_factory=dict)

    @property
    def schemes(self) -> list[str]:
        """The names of the schemes, in the order in which they came."""
        return list(dict.fromkeys([*self.ptq, *self.qat]))

    @property
    def level(self) -> str:
        """The name of the unquantized model in tables: the type in which it was measured, bf16 where none is named."""
        ends = (found.conditions.rpartition(", ")[2] for found in self.bf16.measurements.values())
        return next((LEVELS[end] for end in ends if end in LEVELS), "bf16")

    def header(self) -> tuple[str, ...]:
        """The names of the columns of a table."""
        return ("", self.level, "PTQ", "QAT", "recovered", "file", f"of {self.level}")

    def measures(self) -> list[str]:
        """The names of the figures that are compared: all of the unquantized model but the redundant ones."""
        return [name for name in self.bf16.measurements if name not in REDUNDANT]

    def problems(self) -> list[str]:
        """Why figures cannot be compared, one sentence each: one is missing, or was measured in another way."""
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
        """The rows of a table under :meth:`header`: the unquantized model, then a row per scheme."""
        bf16 = self.bf16.measurements[measure]
        size = self.bf16.weights_bytes
        rows: list[tuple[str, ...]] = [(self.level, shown(bf16), "", "", "", shown_size(size), "")]
        for scheme in self.schemes:
            models = [side.get(scheme) for side in (self.ptq, self.qat)]
            ptq, qat = (model.measurements[measure] if model is not None else None for model in models)
            own = next(model.weights_bytes for model in reversed(models) if model is not None)
            rows.append(
                (
                    scheme,
                    shown(bf16),
                    shown(ptq) if ptq is not None else "",
                    shown(qat) if qat is not None else "",
                    shown_share(bf16, ptq, qat),
                    shown_size(own),
                    f"{own / size:.0%}",
                )
            )
        return rows


def recovered(bf16: Measurement, ptq: Measurement, qat: Measurement) -> float | None:
    """(PTQ - QAT) / (PTQ - bf16); None where PTQ lost no more than noise: see :data:`NOISE`."""
    lost = bf16.value - ptq.value if bf16.higher_is_better else ptq.value - bf16.value
    noise = bf16.stderr if bf16.stderr is not None else NOISE * abs(bf16.value)
    return None if lost <= noise else (ptq.value - qat.value) / (ptq.value - bf16.value)


def shown(found: Measurement) -> str:
    """A figure with four digits, and its standard error where there is one."""
    value = f"{found.value:,.0f}" if abs(found.value) >= 1000 else f"{found.value:#.4g}"
    return value if found.stderr is None else f"{value} ±{found.stderr:.2g}"


def shown_share(bf16: Measurement, ptq: Measurement | None, qat: Measurement | None) -> str:
    """The recovered share in percent, ``(no loss)`` where PTQ lost nothing to recover, nothing without both."""
    if ptq is None or qat is None:
        return ""
    share = recovered(bf16, ptq, qat)
    return "(no loss)" if share is None else f"{share:.0%}"


def shown_size(size: int) -> str:
    """A size in MB (10^6 bytes) or GB (10^9 bytes)."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def table(comparison: Comparison) -> str:
    """The comparison as text for a terminal: a block per figure, with aligned columns."""
    blocks = []
    for measure in comparison.measures():
        cells = [comparison.header(), *comparison.rows(measure)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in cells
        ]
        blocks.append("\n".join([heading(comparison, measure), "", *(line.rstrip() for line in lines)]))
    return "\n\n".join(blocks)


def heading(comparison: Comparison, measure: str) -> str:
    """The line above a table: what was measured, and how."""
    found = comparison.bf16.measurements[measure]
    better = "higher" if found.higher_is_better else "lower"
    return f"{measure} ({better} is better): {found.conditions}"


def markdown(comparison: Comparison) -> str:
    """The comparison as tables of a Markdown file."""
    level, header = comparison.level, comparison.header()
    blocks = [f"# {level}, PTQ, QAT"]
    for measure in comparison.measures():
        cells = [header, ("---", *("---:" for _ in header[1:])), *comparison.rows(measure)]
        blocks.append(f"## {measure}")
        blocks.append(heading(comparison, measure).removeprefix(f"{measure} "))
        blocks.append("\n".join(f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in cells))
    blocks.append(
        f"recovered = (PTQ - QAT) / (PTQ - {level}); (no loss): PTQ lost less than the standard error of {level}, or "
        f"than {NOISE:.1%} of a figure without one. file: the weights on disk."
    )
    models = [(level, "", comparison.bf16)]
    models += [("PTQ", name, model) for name, model in comparison.ptq.items()]
    models += [("QAT", name, model) for name, model in comparison.qat.items()]
    blocks.append(
        "\n".join(f"- {kind} {_escaped(name)}: `{model.model}`".replace(" :", ":") for kind, name, model in models)
    )
    return "\n\n".join(blocks) + "\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def plot(comparison: Comparison, path: Path) -> None:
    """Write a PNG with a panel per figure: PTQ and QAT of each scheme, joined by a line, and the unquantized level."""
    from matplotlib.figure import Figure  # takes a second to import; without pyplot no window is needed

    measures, schemes = comparison.measures(), comparison.schemes
    columns = min(3, len(measures))
    rows = math.ceil(len(measures) / columns)
    width = max(4.0, 1.2 * len(schemes) + 2)
    figure = Figure(figsize=(width * columns, 4.2 * rows), layout="constrained")
    for index, measure in enumerate(measures):
        axes = figure.add_subplot(rows, columns, index + 1)
        bf16 = comparison.bf16.measurements[measure]
        axes.axhline(bf16.value, color="0.4", linestyle="--", label=comparison.level)
        for side, label, color, marker in (
            (comparison.ptq, "PTQ", "#d55e00", "o"),  # of a palette that color-blind readers tell apart
            (comparison.qat, "QAT", "#0072b2", "s"),
        ):
            points = [(at, side[name].measurements[measure]) for at, name in enumerate(schemes) if name in side]
            if not points:
                continue
            highest = max(found.value for _, found in points)
            if not bf16.higher_is_better and highest > 10 * bf16.value > 0:
                axes.set_yscale("log")  # a scheme that fails would press the others onto one line
            axes.errorbar(
                [at for at, _ in points],
                [found.value for _, found in points],
                yerr=[found.stderr or 0.0 for _, found in points],
                color=color,
                marker=marker,
                linestyle="none",
                label=label,
            )
        _join(axes, comparison, measure)
        axes.set_xticks(range(len(schemes)), schemes, rotation=20, ha="right")
        axes.set_xlim(-0.6, len(schemes) - 0.4)
        better = "higher" if bf16.higher_is_better else "lower"
        axes.set_title(measure)
        axes.set_ylabel(f"{measure} ({better} is better)")
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def _join(axes: object, comparison: Comparison, measure: str) -> None:
    """The way from PTQ to QAT of each scheme that has both, with the recovered share beside it."""
    bf16 = comparison.bf16.measurements[measure]
    for at, name in enumerate(comparison.schemes):
        if name not in comparison.ptq or name not in comparison.qat:
            continue
        ptq, qat = (side[name].measurements[measure] for side in (comparison.ptq, comparison.qat))
        axes.plot([at, at], [ptq.value, qat.value], color="0.6", zorder=0)  # type: ignore[attr-defined]
        axes.annotate(  # type: ignore[attr-defined]
            shown_share(bf16, ptq, qat), (at, (ptq.value + qat.value) / 2), (6, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip


def write_comparison(comparison: Comparison, directory: Path) -> Sequence[Path]:
    """Write ``compare.md`` and ``compare.png``, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    text, picture = directory / "compare.md", directory / "compare.png"
    text.write_text(markdown(comparison), encoding="utf-8")
    plot(comparison, picture)
    return text, picture
