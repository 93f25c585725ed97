"""What the first codes are worth: PTQ and QAT of one scheme from the nearest codes and from GPTQ's, fairly compared.

    python benchmarks/recovery_start.py --model DIR --train FILE --text FILE --out DIR [--minutes 10]

FT is the checkpoint, trained without fake quant; PTQ is FT, quantised; QAT trains as it is served. PTQ and QAT are made
from the nearest codes and from those of ``quant.first_codes: gptq``, each with positive and with signed scales, all in
the same bytes. FT is a fair reference in each of the ways to train (``--losses``):

lm      QAT starts from the checkpoint, with FT's samples, order, losses and steps.
distil  The same, and all learn from the checkpoint's logits too, FT as well.
ft      QAT starts from FT and learns FT's logits alone. FT itself would stay as it is under these losses, in however
        many steps. Rates and steps are those of ``--ft_...``.

``--ptq NAME=DIR`` adds a PTQ checkpoint of FT that another tool made; ``qat_from_NAME`` is trained from the original
weights with its codes then.

The text is cut in two: what is best is chosen by the first half, and figures are of the second. Beside perplexity
stand KL(FT || model) per token and how often the likeliest token is FT's. The recovered share is (PTQ - QAT) / (PTQ -
FT) of the best PTQ of the table, and the same of KL.

With ``--minutes`` no run begins after so many, and what is missing is blank: what is in ``--out`` is not made again.
Writes ``benchmarks/results/recovery_start.md``; remarks stand beside it.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks import timing
from benchmarks.recovery import SETTINGS, table
from benchmarks.recovery_inputs import load
from engine.loop import Loop
from engine.recipe.reading import parse_recipe
from engine.verify.check import Comparison, windows
from launch.calibrate import calibrate
from launch.compare import named
from quant import SCHEMES

STARTS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "nearest, signed": {"quant.signed_scales": True},
    "gptq": {"quant.first_codes": "gptq"},
    "gptq, signed": {"quant.first_codes": "gptq", "quant.signed_scales": True},
}
ROWS = 8  # of a forward that measures


@dataclass(frozen=True)
class Found:
    """What a model makes of the text: perplexity of the half to choose by, and of the other; there also KL(FT || model)
    and the share of tokens for which it has FT's likeliest."""

    choose: float
    report: float
    kl: float
    top1: float


class Bench:
    """Trains, quantises and measures until its time is over, and remembers in a folder what was found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.out = arguments, arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        ids = tokenizer(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        whole = min(arguments.tokens, len(ids)) // (2 * ROWS * arguments.length) * 2 * ROWS * arguments.length
        self.batches = [torch.cat(pieces) for pieces in _by(windows(ids[:whole], arguments.length), ROWS)]
        self.loss = arguments.losses
        self._end = time.monotonic() + 60 * arguments.minutes
        self._reference: list[Tensor] = []

    def found(self, name: str, settings: Mapping[str, Any]) -> Found | None:
        """Make a model unless it is there, measure it unless it was; None where the time is over. Settings that are a
        directory alone are of a model that is there."""
        name = name.replace(", ", "_")
        file = self.out / f"{name}.json"
        if file.exists():
            known = json.loads(file.read_text())
            if known["settings"] == settings:
                return Found(**known["found"])
        if time.monotonic() > self._end:
            return None
        directory = Path(settings.get("directory", self.out / name / "export"))
        if not directory.is_dir():
            self._make(name, settings)
        found = self._measured(directory)
        file.write_text(json.dumps({"settings": settings, "found": asdict(found)}, indent=1))
        print(f"{name}: {found}", flush=True)
        return found

    @property
    def ft(self) -> str:
        """The name of FT, which has the same losses as QAT unless QAT learns from it."""
        return "ft_kd" if self.loss == "distil" else "ft_lm"

    def trained(self, scheme: str | None, start: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe of FT, or of QAT of a scheme."""
        arguments = self.arguments
        losses: dict[str, Any] = {}
        if self.loss == "distil":
            losses = {"loss.kd_weight": 1.0, "loss.kd": "kl", "loss.teacher": str(arguments.model)}
        elif self.loss == "ft" and scheme:
            reference = str(self.out / self.ft / "export")
            losses = {
                "model.path": reference,
                "train.steps": arguments.ft_steps,
                "optim.lr": arguments.ft_rate,
                "optim.scale_lr": arguments.ft_scale_rate,
                "loss.lm_weight": 0.0,
                "loss.kd_weight": 1.0,
                "loss.kd": "kl",
                "loss.teacher": reference,
            }
        return {
            **SETTINGS,
            "model.path": str(arguments.model),
            "data.train": [str(arguments.train)],
            "data.max_length": arguments.length,
            "data.micro_batch_size": arguments.rows,
            "data.seed": arguments.seed,
            "train.seed": arguments.seed,
            "train.steps": arguments.steps,
            "optim.warmup_steps": min(10, arguments.steps),
            "optim.lr": arguments.rate,
            **({"quant.scheme": scheme} if scheme else {"quant.fake_quant_start": -1}),
            **losses,
            **start,
        }

    def quantised(self, scheme: str, start: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe of a PTQ of FT."""
        return self.trained(scheme, start) | {"model.path": str(self.out / self.ft / "export")}

    def _make(self, name: str, settings: Mapping[str, Any]) -> None:
        shutil.rmtree(self.out / name, ignore_errors=True)  # of a run that was interrupted
        options = {**settings, "output_dir": str(self.out / name)}
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
        recipe = parse_recipe([f"--{key}={word}" for key, word in words.items()])
        if name.startswith("ptq"):
            calibrate(recipe)
        elif Loop(recipe).run().step < settings["train.steps"]:
            raise SystemExit("a signal ended the run: nothing is written of it")

    @torch.no_grad()
    def _measured(self, export: Path) -> Found:
        if not self._reference:
            reference = load(self.out / self.ft / "export")
            self._reference = [reference(input_ids=ids, use_cache=False).logits for ids in self.batches]
        model, half = load(export), len(self.batches) // 2
        halves = Comparison(""), Comparison("")
        for index, (ids, theirs) in enumerate(zip(self.batches, self._reference, strict=True)):
            halves[index >= half].add(model(input_ids=ids, use_cache=False).logits, theirs, ids)
        choose, report = halves
        return Found(choose.perplexity("ours"), report.perplexity("ours"), report.kl, report.top1)


def _by(pieces: list[Tensor], size: int) -> list[list[Tensor]]:
    return [pieces[index : index + size] for index in range(0, len(pieces), size)]


def rows_of(bench: Bench, scheme: str) -> list[list[str]]:
    """The lines of a scheme: FT, every PTQ, every QAT; the recovered shares are of the best PTQ."""
    loss, arguments = bench.loss, bench.arguments
    found: dict[str, Found | None] = {"FT": bench.found(bench.ft, bench.trained(None, {}))}
    for start, changes in STARTS.items():
        found[f"PTQ, {start}"] = bench.found(f"ptq_{scheme}_{start}_{loss}", bench.quantised(scheme, changes))
    found |= {
        f"PTQ, {name}": bench.found(f"ptq_{scheme}_{name}_{loss}", {"directory": directory})
        for name, directory in arguments.ptq
    }
    for start in (*reversed(arguments.starts), *STARTS):
        found[f"QAT, {start}"] = bench.found(f"qat_{scheme}_{start}_{loss}", bench.trained(scheme, STARTS[start]))
    for name, directory in arguments.ptq:
        inside = {"quant.start": directory, "quant.start_inside": True}
        found[f"QAT, {name}"] = bench.found(f"qat_{scheme}_from_{name}_{loss}", bench.trained(scheme, inside))
    known = {name: one for name, one in found.items() if one is not None}
    ptqs = {name: one for name, one in known.items() if name.startswith("PTQ")}
    best = min(ptqs, key=lambda name: ptqs[name].choose) if ptqs else None
    lines = []
    for name, one in known.items():
        shares = ["", ""]
        if best is not None and name.startswith("QAT"):
            lost = ptqs[best].report - known["FT"].report
            shares = [f"{(ptqs[best].report - one.report) / lost:.2f}", f"{1 - one.kl / ptqs[best].kl:.2f}"]
        mark = " (best PTQ)" if name == best else ""
        figures = [f"{one.choose:.2f}", f"{one.report:.2f}", f"{one.kl:.4f}", f"{one.top1:.1%}"]
        lines.append([scheme, name + mark, *figures, *shares])
    return lines


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that all training starts from")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the models and of what was found")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["w2a16_g32"])
    parser.add_argument("--ptq", type=named, action="append", default=[], metavar="NAME=DIR", help="repeatable")
    parser.add_argument("--starts", nargs="*", choices=STARTS, default=[], help="of QAT, those that are trained first")
    parser.add_argument("--losses", choices=("lm", "distil", "ft"), default="lm", help="see above")
    parser.add_argument("--rate", type=float, default=1e-3, help="of the weights")
    parser.add_argument("--ft_rate", type=float, default=3e-4, help="of the weights of QAT that learns FT's logits")
    parser.add_argument("--ft_scale_rate", type=float, default=1e-3, help="of its scales")
    parser.add_argument("--ft_steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=8, help="of each step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=16384, help="of the text, at most")
    parser.add_argument("--minutes", type=float, default=1e6, help="after which no run begins")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the table is written to")
    arguments = parser.parse_args()
    load_average = os.getloadavg()
    bench = Bench(arguments)
    rows = [row for scheme in arguments.schemes for row in rows_of(bench, scheme)]
    losses = {
        "lm": "LM loss",
        "distil": "LM loss and KL to the checkpoint's logits",
        "ft": f"LM loss; QAT of FT by KL to FT's logits alone, {arguments.ft_steps} steps at a rate of "
        f"{arguments.ft_rate:g} (scales {arguments.ft_scale_rate:g})",
    }[arguments.losses]
    size = f"{arguments.steps} steps of {arguments.rows} x {arguments.length} tokens of {arguments.train.name}"
    head = f"""# What the first codes are worth

{arguments.model.name}, {size}, {losses};
measured on the first {sum(ids.numel() for ids in bench.batches):,} tokens of {arguments.text.name}, in windows of
{arguments.length}, one half to choose by, one to report.
{timing.machine(torch.device("cpu"), load_average, "transformers", "deepspeed")}
`{timing.command()}`

"""
    names = ("scheme", "model", "perplexity: to choose by", "reported", "KL", "top token", "recovered", "of KL")
    timing.write(arguments.results, "recovery_start", torch.device("cpu"), head + table(names, rows) + "\n")


if __name__ == "__main__":
    main()
