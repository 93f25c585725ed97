"""The tables of recovery_start.py, of whatever its folders hold: schemes and ways side by side, and line by line."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from quant import SCHEMES

# Share of the best PTQ's loss of perplexity that is to be won back: by bits of integers; where inputs have 4 bits, too.
GOALS, GOAL_OF_INPUTS = {2: 0.95, 3: 0.90}, 0.90
CLOSE = 0.002  # of FT's perplexity: less than this the best PTQ has lost nothing that could be recovered
_NAME = re.compile(r"(?P<start>.+?)_(?P<loss>lm|distil|ft)(?P<tag>_.*)?")


@dataclass(frozen=True)
class Found:
    """What a model makes of the text: perplexity of the half to choose by, and of the other; there also KL(FT || model)
    and the share of tokens for which it has FT's likeliest."""

    choose: float
    report: float
    kl: float
    top1: float

    @property
    def both(self) -> float:
        """Perplexity of both halves, which are of one size."""
        return math.sqrt(self.choose * self.report)


@dataclass(frozen=True)
class Run:
    """A model that was measured.

    Attributes:
        name: of its file.
        part: ft, ptq, qat or torchao.
        scheme: how it is quantized; empty of FT.
        settings: the recipe that it was made by.
        found: what was measured.
        elsewhere: KL and top token on other texts, by their names.
        date, machine: of the measurement.
    """

    name: str
    part: str
    scheme: str
    settings: Mapping[str, Any]
    found: Found
    elsewhere: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    date: str = ""
    machine: str = ""

    @property
    def way(self) -> str:
        """What was done, without the steps: runs of one way are compared."""
        if self.part == "ft":
            return "FT"
        match = _NAME.fullmatch(self.name.removeprefix(f"{self.part}_{self.scheme}_"))
        start, loss, tag = match.group("start", "loss", "tag") if match else (self.name, "", None)
        start = start.replace("_signed", ", signed").replace("from_", "codes of ") + (tag or "").replace("_", ", ")
        if self.part == "ptq":
            return f"PTQ, {start}"
        return f"{'torchao' if self.part == 'torchao' else 'QAT'}{' from FT' if loss == 'ft' else ''}, {start}"

    @property
    def changed(self) -> bool:
        """Whether its name says more than scheme, start and losses."""
        match = _NAME.fullmatch(self.name)
        return match is not None and match["tag"] is not None

    @property
    def steps(self) -> int:
        """Of training after FT; 0 of PTQ."""
        return int(self.settings["train.steps"]) if self.part in ("qat", "torchao") else 0

    @property
    def label(self) -> str:
        """What was done."""
        return f"{self.way}, {self.steps} steps" if self.steps else self.way


def read_runs(folder: Path) -> Iterator[Run]:
    """All that a folder knows, FT first."""
    for file in sorted(folder.glob("*.json"), key=lambda file: (not file.stem.startswith("ft_"), file.name)):
        name, known = file.stem, json.loads(file.read_text(encoding="utf-8"))
        if "found" not in known or "." in name:
            continue
        part, scheme = scheme_of(name)
        yield Run(name, part, scheme, known["settings"], Found(**known["found"]), _elsewhere(folder, name))


def scheme_of(name: str) -> tuple[str, str]:
    """Part and scheme of a run, from its name."""
    part, _, rest = name.partition("_")
    fits = [one for one in SCHEMES if rest.startswith(f"{one}_")] if part != "ft" else []
    return part, max(fits, key=len, default="")


def _elsewhere(folder: Path, name: str) -> dict[str, tuple[float, float]]:
    found = {}
    for file in sorted(folder.glob(f"{name}.on_*.json")):
        known = json.loads(file.read_text(encoding="utf-8"))["found"]
        found[file.stem.partition(".on_")[2]] = known["kl"], known["top1"]
    return found


def best_ptq(runs: Sequence[Run]) -> Run | None:
    """The PTQ of the smallest perplexity of the half to choose by."""
    return min((run for run in runs if run.part == "ptq"), key=lambda run: run.found.choose, default=None)


def shares(ft: Found, ptq: Found, qat: Found) -> tuple[float | None, float]:
    """What of the best PTQ's loss is won back: of the perplexity of both halves, None where it lost nothing; of KL."""
    lost = ptq.both - ft.both
    return (ptq.both - qat.both) / lost if lost > CLOSE * ft.both else None, 1 - qat.kl / ptq.kl


def tables(runs: Sequence[Run]) -> str:
    """Ways side by side, what was won back, and all lines; of one model."""
    ft = next((run for run in runs if run.part == "ft"), None)
    if ft is None:
        return "FT is not there yet.\n"
    schemes = [one for one in SCHEMES if any(run.scheme == one for run in runs)]
    of = {scheme: [run for run in runs if run.scheme == scheme] for scheme in schemes}
    return "\n".join([_heading(ft.settings), _side_by_side(of), _won_back(ft, of), _lines(ft, of)])


def _heading(settings: Mapping[str, Any]) -> str:
    """The model, and what FT is."""
    files = ", ".join(Path(file).name for file in settings["data.train"])
    size = f"{settings['data.micro_batch_size']} x {settings['data.max_length']} tokens"
    steps, rate = settings["train.steps"], settings["optim.lr"]
    return f"## {Path(settings['model.path']).name}\n\nFT: {steps} steps of {size} of {files} at a rate of {rate:g}.\n"


def _side_by_side(of: Mapping[str, Sequence[Run]]) -> str:
    """KL, and perplexity of both halves, by scheme and way; runs in which something else was changed are left to the
    lines."""
    plain = [run for runs in of.values() for run in runs if not run.changed]
    labels = sorted({run.label for run in plain}, key=_order)
    rows = []
    for scheme, runs in of.items():
        found = {run.label: f"{run.found.kl:.4f} / {run.found.both:.2f}" for run in runs}
        rows.append([scheme, *(found.get(label, "") for label in labels)])
    return f"KL to FT / perplexity:\n\n{table(['scheme', *labels], rows)}\n"


def _order(label: str) -> tuple[int, int, bool, bool, str]:
    """PTQ, torchao, QAT from the checkpoint, QAT from FT; fewer steps first, and nearest codes."""
    parts = ("PTQ", "torchao", "QAT,", "QAT from")
    steps = re.search(r"(\d+) steps$", label)
    part = next(index for index, one in enumerate(parts) if label.startswith(one))
    return part, int(steps[1]) if steps else 0, ", nearest" not in label, ", gptq" not in label, label


def _won_back(ft: Run, of: Mapping[str, Sequence[Run]]) -> str:
    """Of each scheme the best PTQ, and the best QAT by as many steps, chosen by the half to choose by."""
    rows = []
    for scheme, runs in of.items():
        best = best_ptq(runs)
        trained = [run for run in runs if run.part == "qat"]
        if best is None:
            continue
        for steps in sorted({run.steps for run in trained}):
            run = min((run for run in trained if run.steps == steps), key=lambda run: run.found.choose)
            of_perplexity, of_kl = shares(ft.found, best.found, run.found)
            weights, inputs = SCHEMES[scheme].weights, SCHEMES[scheme].activations
            goal = GOALS.get(weights.bits) if weights.dtype == "int" else None
            goal = GOAL_OF_INPUTS if inputs is not None and inputs.bits == 4 else goal
            met = "" if goal is None or of_perplexity is None else "met" if of_perplexity >= goal else "missed"
            share = "(no loss)" if of_perplexity is None else f"{of_perplexity:.2f}"
            lost = f"{best.found.both - ft.found.both:.2f}"
            goal_text = "" if goal is None else f"{goal:.2f}"
            rows.append([scheme, best.way, lost, run.label, share, f"{of_kl:.2f}", goal_text, met])
    names = ("scheme", "best PTQ", "loses", "best QAT of as many steps", "won back", "of KL", "goal", "")
    return f"What training wins back of the best PTQ's loss of perplexity, and of its KL:\n\n{table(names, rows)}\n"


def _lines(ft: Run, of: Mapping[str, Sequence[Run]]) -> str:
    texts = sorted({text for runs in of.values() for run in runs for text in run.elsewhere})
    rows = [_line(ft, None, texts)]
    for runs in of.values():
        best = best_ptq(runs)
        for run in sorted(runs, key=lambda run: _order(run.label)):
            shown = shares(ft.found, best.found, run.found) if best is not None and run.part != "ptq" else None
            rows.append(_line(run, shown, texts, best=run is best))
    names = [
        "scheme",
        "model",
        "perplexity: to choose by",
        "reported",
        "of both",
        "KL",
        "top token",
        "recovered",
        "of KL",
    ]
    return f"All of them:\n\n{table([*names, *(f'{text}: KL, top token' for text in texts)], rows)}\n"


def _line(
    run: Run, recovered: tuple[float | None, float] | None, texts: Sequence[str], *, best: bool = False
) -> list[str]:
    found = run.found
    share = ["", ""]
    if recovered is not None:
        share = ["(no loss)" if recovered[0] is None else f"{recovered[0]:.2f}", f"{recovered[1]:.2f}"]
    there = [
        f"{run.elsewhere[text][0]:.4f}, {run.elsewhere[text][1]:.1%}" if text in run.elsewhere else "" for text in texts
    ]
    figures = [
        f"{found.choose:.2f}",
        f"{found.report:.2f}",
        f"{found.both:.2f}",
        f"{found.kl:.4f}",
        f"{found.top1:.1%}",
    ]
    return [run.scheme, run.label + (" (best PTQ)" if best else ""), *figures, *share, *there]
