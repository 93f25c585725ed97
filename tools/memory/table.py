"""Format predictions as tables: strategies side by side, and measured bytes next to predicted bytes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from engine.config.config import Recipe
from engine.memory import Measured
from tools.memory.planner import RESERVE, Prediction
from tools.memory.zero import ITEMS

GB = 10**9
UNSET = "-"


def headline(recipe: Recipe, ranks: int, parameters: int, trained: int) -> str:
    """Format the line above the table: the model, the ranks, the micro-batches."""
    checkpointing = "with" if recipe.train.activation_checkpointing else "without"
    return (
        f"{recipe.model.path}: {parameters / 1e9:.3f}e9 parameters, {trained / 1e9:.3f}e9 of them trained, "
        f"{recipe.model.dtype}; {ranks} ranks; {recipe.data.micro_batch_size} x {recipe.data.max_length:,} tokens per "
        f"micro-batch, {recipe.train.gradient_accumulation_steps} per step, {checkpointing} activation checkpointing"
    )


def memory_table(predictions: Sequence[Prediction], gpu_bytes: int | None) -> str:
    """Format a table of GB (10^9 bytes) per rank, with a column per strategy. Items that are 0 everywhere are left
    out."""
    rows: list[tuple[str, Callable[[Prediction], str]]] = []

    def row(name: str, value: Callable[[Prediction], float]) -> None:
        if any(value(one) for one in predictions):
            rows.append((name, lambda one: _gigabytes(value(one))))

    for item in ITEMS:
        row(item, lambda one, item=item: one.held.device[item])  # type: ignore[misc]
    row("gathered at most", lambda one: one.cost.gathered)
    row("activations, losses", lambda one: max(_part(one, phase, "activations") for phase in ("forward", "backward")))
    row("copies in the step", lambda one: one.moments["step"].parts["copies"])
    for phase, name in (("forward", "peak in forward"), ("backward", "peak in backward"), ("step", "peak in the step")):
        row(name, lambda one, phase=phase: one.moments[phase].total)  # type: ignore[misc]
    row("peak of the first codes (GPTQ)", lambda one: one.init)
    row("peak", lambda one: one.peak)
    if gpu_bytes is not None:
        row("peak + reserve", lambda one: one.peak + RESERVE)
        rows.append((f"fits {gpu_bytes / GB:g} GB", lambda one: "yes" if one.peak + RESERVE <= gpu_bytes else "no"))
        rows.append(("largest micro-batch", lambda one: str(one.largest_micro_batch or UNSET)))
    row("host memory", lambda one: one.host)
    return _aligned(
        [["GB per rank", *(one.strategy for one in predictions)]] + [[n, *map(v, predictions)] for n, v in rows]
    )


def _part(prediction: Prediction, phase: str, name: str) -> int:
    return prediction.moments[phase].parts[name]


def traffic_table(predictions: Sequence[Prediction]) -> str:
    """Format a table of the collectives of one optimizer step on each rank: GB of the whole tensors."""
    kinds = list(dict.fromkeys(kind for one in predictions for kind in one.cost.traffic))
    rows = [["GB per step", *(one.strategy for one in predictions)]]
    rows += [[kind, *(_gigabytes(one.cost.traffic[kind]) for one in predictions)] for kind in kinds]
    return _aligned(rows)


def comparison_table(prediction: Prediction, measured: Measured) -> str:
    """Format a table of predicted and measured bytes by item, and of the peak on CUDA. On the CPU, device and host are
    one memory."""
    on_host = measured.device == "cpu"
    rows = [
        (item, prediction.held.device[item] + (prediction.held.host[item] if on_host else 0), size)
        for item, size in measured.items.items()
    ]
    if measured.device == "cuda":
        predicted, found = sum(expected for _, expected, _ in rows), sum(size for _, _, size in rows)
        rows.append(("all else at the peak", prediction.peak - predicted, measured.peak - found))
        rows.append(("peak", prediction.peak, measured.peak))
    table = [["bytes on rank 0", "predicted", "measured", "difference", "of the prediction"]]
    for name, expected, found in rows:
        share = f"{100 * (found - expected) / expected:+.1f}%" if expected else UNSET
        table.append([name, f"{expected:,}", f"{found:,}", f"{found - expected:+,}", share])
    return _aligned(table)


def as_json(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return all predicted values by strategy, in bytes."""
    return {
        one.strategy: {
            "device": one.held.device,
            "host": one.held.host,
            "moments": {phase: asdict(moment) for phase, moment in one.moments.items()},
            "gathered": one.cost.gathered,
            "init": one.init,
            "peak": one.peak,
            "reserve": RESERVE,
            "largest_micro_batch": one.largest_micro_batch,
            "collectives": dict(one.cost.traffic),
        }
        for one in predictions
    }


def _gigabytes(size: float) -> str:
    return f"{size / GB:,.2f}" if size >= GB / 100 or not size else f"{size / GB:.1g}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table whose columns are also aligned in the text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = "| " + " | ".join("-" * (width - bool(i)) + ":" * bool(i) for i, width in enumerate(widths)) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])
