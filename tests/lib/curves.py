"""Read the logs of a run: TensorBoard's scalars, and the lines of metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def curves(output: Path) -> dict[str, list[tuple[int, float]]]:
    """Read steps and values of TensorBoard's scalars in an output directory, by tag."""
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def points(output: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl in an output directory."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
