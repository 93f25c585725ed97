"""What the first codes are worth: PTQ and QAT of one scheme from the nearest codes and from GPTQ's, fairly compared.

    python benchmarks/recovery_start.py --model DIR --train FILE --text FILE --out DIR [--minutes 10]
    python benchmarks/recovery_start.py --text FILE --known DIR_OR_JSONL ... [--other FILE ...]

FT is the checkpoint, trained without fake quant; PTQ is FT, quantized; QAT trains as it is served. PTQ and QAT are made
from the nearest codes and from those of ``quant.init``, each with positive and with signed scales, all in
the same bytes. FT is a fair reference in each of the ways to train (``--losses``):

lm      QAT starts from the checkpoint, with FT's samples, order, losses and steps.
distil  The same, and all learn from the checkpoint's logits too, FT as well.
ft      QAT starts from FT and learns FT's logits alone. FT itself would stay as it is under these losses, in however
        many steps. Rates and steps are those of ``--ft_...``.

``--ptq NAME=DIR`` adds a PTQ checkpoint of FT that another tool made; ``qat_from_NAME`` is trained from the original
weights with its codes then. ``--torchao`` adds torchao's QAT, trained by the same losses (see recovery_torchao.py).

The text is cut in two: what is best is chosen by the first half, and figures are of the second and of both. Beside
perplexity stand KL(FT || model) per token and how often the likeliest token is FT's; with ``--other`` these two on
other texts, too. The recovered share is (PTQ - QAT) / (PTQ - FT) of the best PTQ of the table, and the same of KL.

With ``--minutes`` no run begins after so many, and what is missing is blank: what is in ``--out`` is not made again.
With ``--known`` nothing is made at all: the tables are of all that these folders hold, one for each model, and of what
earlier tables kept (``benchmarks/results/recovery_start.jsonl``). Writes ``benchmarks/results/recovery_start.md`` and
what it is made of, ``recovery_start.jsonl``; remarks stand beside it.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks import recovery_start_kept, recovery_torchao, timing
from benchmarks.recovery_inputs import load
from benchmarks.recovery_runs import SETTINGS
from benchmarks.recovery_start_table import Found, Run, read_runs, tables
from engine.config.reading import parse_recipe
from engine.loop import Loop
from launch.calibrate import calibrate
from launch.compare import named
from quant import SCHEMES
from tools.verify.comparison import Comparison, windows

STARTS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "nearest, signed": {"quant.signed_scales": True},
    "gptq": {"quant.init": "gptq"},
    "gptq, signed": {"quant.init": "gptq", "quant.signed_scales": True},
    "blocks": {"quant.init": "blockwise"},
    "blocks, signed": {"quant.init": "blockwise", "quant.signed_scales": True},
}
ROWS = 8  # of a forward that measures


class Text:
    """A text in windows, cut in two halves, and what FT makes of it."""

    def __init__(self, file: Path, model: Path, tokens: int, length: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        whole = min(tokens, len(ids)) // (2 * ROWS * length) * 2 * ROWS * length
        self.batches = [torch.cat(pieces) for pieces in _by(windows(ids[:whole], length), ROWS)]
        self._reference: tuple[Path, list[Tensor]] | None = None

    @property
    def tokens(self) -> int:
        """How many it has."""
        return sum(ids.numel() for ids in self.batches)

    @torch.no_grad()
    def halves(self, export: Path, reference: Path) -> tuple[Comparison, Comparison]:
        """A model compared with FT on both halves."""
        if self._reference is None or self._reference[0] != reference.resolve():
            model = load(reference)
            self._reference = (
                reference.resolve(),
                [model(input_ids=ids, use_cache=False).logits for ids in self.batches],
            )
        model, half = load(export), len(self.batches) // 2
        compared = Comparison(), Comparison()
        for index, (ids, theirs) in enumerate(zip(self.batches, self._reference[1], strict=True)):
            compared[index >= half].add(model(input_ids=ids, use_cache=False).logits, theirs, ids)
        return compared


class Bench:
    """Trains, quantizes and measures until its time is over, and remembers in a folder what was found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.out = arguments, arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.text = Text(arguments.text, arguments.model, arguments.tokens, arguments.length)
        self.loss = arguments.losses
        self._end = time.monotonic() + 60 * arguments.minutes

    def found(self, name: str, settings: Mapping[str, Any]) -> Found | None:
        """Make a model unless it is there, measure it unless it was; None where the time is over. Settings that are a
        directory alone are of a model that is there."""
        name = name.replace(", ", "_")
        file = self.out / f"{name}.json"
        if file.exists():
            known = json.loads(file.read_text())
            if known["settings"] == settings:
                return Found(**known["found"])
            shutil.rmtree(self.out / name, ignore_errors=True)  # of another recipe
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

    def quantized(self, scheme: str, start: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe of a PTQ of FT."""
        return self.trained(scheme, start) | {"model.path": str(self.out / self.ft / "export")}

    def _make(self, name: str, settings: Mapping[str, Any]) -> None:
        shutil.rmtree(self.out / name, ignore_errors=True)  # of a run that was interrupted
        options = {**settings, "output_dir": str(self.out / name)}
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
        recipe = parse_recipe([f"--{key}={word}" for key, word in words.items()])
        if name.startswith("ptq"):
            calibrate(recipe)
        elif name.startswith("torchao"):
            model = recovery_torchao.train(recipe, learned="_learned_" in name)
            recovery_torchao.settle(model)
            model.save_pretrained(self.out / name / "export")
        elif Loop(recipe).run().step < settings["train.steps"]:
            raise SystemExit("a signal ended the run: nothing is written of it")

    def _measured(self, export: Path) -> Found:
        choose, report = self.text.halves(export, self.out / self.ft / "export")
        return Found(choose.perplexity("ours"), report.perplexity("ours"), report.kl, report.top1)


def _by(pieces: list[Tensor], size: int) -> list[list[Tensor]]:
    return [pieces[index : index + size] for index in range(0, len(pieces), size)]


def run_all(bench: Bench, scheme: str) -> None:
    """Make and measure FT, every PTQ and every QAT of a scheme, as far as time allows."""
    loss, arguments = bench.loss, bench.arguments
    bench.found(bench.ft, bench.trained(None, {}))
    for start, changes in STARTS.items():
        bench.found(f"ptq_{scheme}_{start}_{loss}", bench.quantized(scheme, changes))
    for name, directory in arguments.ptq:
        bench.found(f"ptq_{scheme}_{name}_{loss}", {"directory": directory})
    for start in (*reversed(arguments.starts), *STARTS):
        bench.found(f"qat_{scheme}_{start}_{loss}", bench.trained(scheme, STARTS[start]))
    for name, directory in arguments.ptq:
        inside = {"quant.start": directory, "quant.snap_to_codes": True}
        bench.found(f"qat_{scheme}_from_{name}_{loss}", bench.trained(scheme, inside))
    for way in arguments.torchao if recovery_torchao.takes(scheme) else ():
        bench.found(f"torchao_{scheme}_{way}_{loss}", bench.trained(scheme, {}))


def read_known(known: Sequence[Path]) -> dict[str, list[Run]]:
    """The runs of some folders and files by their models, each once: the first of them counts."""
    groups: dict[str, dict[str, Run]] = {}
    for model, run in (one for source in known for one in recovery_start_kept.read(source)):
        groups.setdefault(model, {}).setdefault(run.label + run.scheme, run)
    return {model: list(runs.values()) for model, runs in groups.items()}


def measure_elsewhere(folder: Path, file: Path, tokens: int, length: int) -> None:
    """KL and top token of a folder's exports on another text, kept beside what is known of them."""
    ft = next(folder.glob("ft_*/export"), None)
    if ft is None:
        raise SystemExit(f"{folder}: no FT (ft_*/export) to compare with on {file}")
    text = Text(file, ft, tokens, length)
    for run in read_runs(folder):
        kept = folder / f"{run.name}.on_{file.stem}.json"
        export = Path(run.settings.get("directory", folder / run.name / "export"))
        if run.part == "ft" or kept.exists() or not export.is_dir():
            continue
        halves = text.halves(export, ft)
        kl, top1 = (sum(getattr(half, key) for half in halves) / 2 for key in ("kl", "top1"))
        kept.write_text(json.dumps({"found": {"kl": kl, "top1": top1}, "tokens": text.tokens}, indent=1))


def main() -> None:
    """Train, measure, write."""
    arguments = options()
    load_average = os.getloadavg()
    if arguments.known:
        known, tokens = arguments.known, f"at most {arguments.tokens:,}"
    else:
        bench = Bench(arguments)
        for scheme in arguments.schemes:
            run_all(bench, scheme)
        known, tokens = [arguments.out], f"the first {bench.text.tokens:,}"
    for folder in (one for one in known if one.is_dir()):
        for file in arguments.other:
            measure_elsewhere(folder, file, arguments.other_tokens, arguments.length)
    groups = read_known(known)
    dates = [run.date for runs in groups.values() for run in runs]
    machines = sorted({run.machine for runs in groups.values() for run in runs})
    beside = "".join(f" Beside it {file.name}, {arguments.other_tokens:,} tokens at most." for file in arguments.other)
    head = f"""# What the first codes are worth

Measured on {tokens} tokens of {arguments.text.name}, in windows of {arguments.length}, one half to
choose by, one to report.{beside} The runs are of {min(dates)} to {max(dates)}, on {" and ".join(machines)}.
{timing.machine(torch.device("cpu"), load_average, "transformers", "deepspeed", "torchao")}
`{timing.command()}`

"""
    found = "\n".join(tables(runs) for runs in groups.values())
    timing.write(arguments.results, "recovery_start", torch.device("cpu"), head + found)
    recovery_start_kept.write(arguments.results / "recovery_start.jsonl", groups)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint that all training starts from")
    parser.add_argument("--train", type=Path, help="text to train on")
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    parser.add_argument("--out", type=Path, help="folder of the models and of what was found")
    parser.add_argument("--known", type=Path, nargs="+", help="make nothing: write the tables of these folders")
    parser.add_argument("--other", type=Path, nargs="*", default=[], help="more texts, for KL and the likeliest token")
    parser.add_argument("--other_tokens", type=int, default=16384, help="of each of them, at most")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["w2a16_g32"])
    parser.add_argument("--ptq", type=named, action="append", default=[], metavar="NAME=DIR", help="repeatable")
    parser.add_argument(
        "--torchao", nargs="*", choices=("absmax", "learned"), default=[], help="scales of torchao's QAT"
    )
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
    if not arguments.known and None in (arguments.model, arguments.train, arguments.out):
        parser.error("expected --model, --train and --out, or --known")
    return arguments


if __name__ == "__main__":
    main()
