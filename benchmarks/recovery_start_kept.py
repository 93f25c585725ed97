"""What recovery_start.py found, kept beside its table: runs take days, and the next machine has only this repository.

A line of JSON for each run: the model that FT was trained from, the run's name and recipe, figures, date and machine.
Directories stand there by their names alone.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.recovery_start_table import Found, Run, read_runs, scheme_of


def read(known: Path) -> Iterator[tuple[str, Run]]:
    """The runs of a folder, or of a file that :func:`write` made, each with the name of its model."""
    if known.is_file():
        for line in known.read_text(encoding="utf-8").splitlines():
            kept = json.loads(line)
            found, elsewhere = Found(**kept["found"]), {text: tuple(two) for text, two in kept["elsewhere"].items()}
            part, scheme = scheme_of(kept["name"])
            yield (
                kept["model"],
                Run(kept["name"], part, scheme, kept["settings"], found, elsewhere, kept["date"], kept["machine"]),
            )
        return
    runs = list(read_runs(known))
    if not runs or runs[0].part != "ft":
        raise SystemExit(f"{known}: no FT (ft_*.json) that the others were made of")
    for run in runs:
        made = datetime.fromtimestamp((known / f"{run.name}.json").stat().st_mtime)
        dated = {"date": made.strftime("%Y-%m-%d"), "machine": timing.processor()}
        yield Path(runs[0].settings["model.path"]).name, Run(**{**vars(run), **dated})


def write(file: Path, groups: Mapping[str, Iterable[Run]]) -> None:
    """Keep the runs of each model."""
    lines = []
    for model, runs in groups.items():
        for run in runs:
            kept = {"model": model, **asdict(run), "settings": _named(run.settings)}
            lines.append(json.dumps({key: kept[key] for key in kept if key not in ("part", "scheme")}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with the names of what it reads in place of paths."""

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(one) for one in value]
        if not isinstance(value, str) or "/" not in value:
            return value
        path = Path(value)
        return path.parent.name if path.name == "export" else path.name

    return {key: name(value) for key, value in settings.items()}
