"""What training recovers where inputs have four or eight bits too, with and without rotated weights.

    python benchmarks/recovery_inputs.py --model DIR --train FILE --text FILE [--rotated] [--out DIR]

FT is the checkpoint, trained on the text without fake quant, and the model that is to stay what it is. PTQ is FT,
quantized without training, by the codes of ``--init``. QAT starts from FT with these codes and learns FT's
logits alone (KL), in fake quant: FT itself would stay as it is under these losses, in however many steps, so that it is
a fair reference. ``--rotated`` adds PTQ and QAT of FT that launch/rotate.py has turned, which computes the same
function of its tokens; their teacher is FT as it was.

Beside perplexity stand what it is blind to at four bits: KL(FT || model) per token, and how often the likeliest token
is FT's. The recovered share is (PTQ - QAT) / (PTQ - FT) of the perplexities, and the same of KL. Both are given for
each seed (of the samples' order), as mean and range.

With ``--out`` what was made and measured stays there, and is not run again. With ``--minutes`` no run begins after so
many, and what is missing is blank. Writes ``benchmarks/results/recovery_inputs.md``.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks import timing
from benchmarks.markdown import table
from benchmarks.recovery_runs import SETTINGS
from engine.config.reading import parse_recipe
from engine.loop import Loop
from launch.calibrate import calibrate
from launch.launcher import ROOT
from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.config import is_quantized, weights_alone
from quant import SCHEMES
from tools.compressed import load_compressed
from tools.verify.comparison import Comparison, windows

DEVICE = torch.device("cpu")
FT, PTQ, QAT = "ft", "ptq", "qat"
CLOSE = 0.002  # of FT's perplexity: of a smaller loss a share says nothing
ROWS = 8  # of a forward that measures


@dataclass(frozen=True)
class Found:
    """What a model makes of the text: perplexity, KL(FT || model), and the share of tokens with FT's likeliest."""

    perplexity: float
    kl: float
    top1: float


class Bench:
    """Trains, quantizes and measures until its time is over, and remembers in a folder what was found."""

    def __init__(self, arguments: argparse.Namespace, out: Path) -> None:
        self.arguments, self.out = arguments, out
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        ids = tokenizer(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        whole = min(arguments.tokens, len(ids)) // arguments.length * arguments.length
        pieces = windows(ids[:whole], arguments.length)
        self.batches = [torch.cat(pieces[index : index + ROWS]) for index in range(0, len(pieces), ROWS)]
        self._end = time.monotonic() + 60 * arguments.minutes
        self._reference: list[Tensor] = []

    def found(self, part: str, scheme: str = "none", seed: int = 0, *, rotated: bool = False) -> Found | None:
        """Train or quantize unless it is there, measure, keep the figures; None where the time is over."""
        settings = self._settings(part, scheme, seed, rotated)
        name = "_".join([part, scheme, "rotated" if rotated else "plain", str(seed)])
        file = self.out / f"{name}.json"
        if file.exists() and (known := json.loads(file.read_text()))["settings"] == settings:
            return Found(**known["found"])
        if time.monotonic() > self._end:
            return None
        found = self._measured(load(self._made(name, part, settings)))
        file.write_text(json.dumps({"settings": settings, "found": vars(found)}, indent=1))
        print(f"{name}: {found}", flush=True)
        return found

    def _made(self, name: str, part: str, settings: Mapping[str, Any]) -> Path:
        """The export of a run, which is made unless it is there."""
        directory = self.out / name
        if not (directory / "export").is_dir():
            shutil.rmtree(directory, ignore_errors=True)  # of a run that was interrupted
            self._tuned(rotated="rotated" in name)
            options = {**settings, "output_dir": str(directory)}
            words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
            recipe = parse_recipe([f"--{key}={word}" for key, word in words.items()])
            if part == PTQ:
                calibrate(recipe)
            elif Loop(recipe).run().step < settings["train.steps"]:
                raise SystemExit("a signal ended the run: nothing is written of it")
        return directory / "export"

    def _tuned(self, *, rotated: bool) -> None:
        """Turn FT, if a run is of rotated weights and it is not there; FT itself is measured before anything else."""
        turned = self.out / f"{FT}_rotated"
        if rotated and not turned.is_dir():
            script = [sys.executable, str(ROOT / "launch" / "rotate.py")]
            subprocess.run([*script, "--model", str(self._reference_at), "--output", str(turned)], check=True)

    @property
    def _reference_at(self) -> Path:
        return self.out / f"{FT}_none_plain_0" / "export"

    def _settings(self, part: str, scheme: str, seed: int, rotated: bool) -> dict[str, Any]:
        """The recipe of a run, by key."""
        arguments = self.arguments
        if part == FT:
            steps, rate = arguments.tune_steps, arguments.tune_rate
            special = {"model.path": str(arguments.model), "quant.fake_quant_start": -1}
        else:
            steps, rate = arguments.steps, arguments.rate
            start = self.out / f"{FT}_rotated" if rotated else self._reference_at
            special = {"model.path": str(start), "quant.scheme": scheme, "loss.lm_weight": 0.0, "loss.kd_weight": 1.0}
            special |= {"loss.kd": "kl", "loss.teacher": str(self._reference_at)}
            special |= {"quant.init": arguments.init}
        return {
            **SETTINGS,
            "model.dtype": arguments.dtype,
            "data.train": [str(arguments.train)],
            "data.max_length": arguments.length,
            "data.micro_batch_size": arguments.rows,
            "data.seed": seed,
            "train.seed": seed,
            "train.steps": steps,
            "optim.lr": rate,
            "optim.scale_lr": arguments.scale_rate,
            "optim.warmup_steps": min(10, steps),
            **special,
        }

    @torch.no_grad()
    def _measured(self, model: PreTrainedModel) -> Found:
        if not self._reference:
            reference = load(self._reference_at)
            self._reference = [reference(input_ids=ids, use_cache=False).logits for ids in self.batches]
        compared = Comparison()
        for ids, theirs in zip(self.batches, self._reference, strict=True):
            compared.add(model(input_ids=ids, use_cache=False).logits, theirs, ids)
        return Found(compared.perplexity("ours"), compared.kl, compared.top1)


def load(export: Path) -> PreTrainedModel:
    """An export, plain or compressed, that computes in fp32 as in training; of other writers' files, which quantize
    weights alone, a model of what the codes stand for."""
    if is_quantized(export) and not weights_alone(export):
        return load_compressed(export)[0]
    model = build_model(export, {}, dtype=torch.float32, device=DEVICE)
    load_weights(model, export, progress=False)
    return model


def tables(bench: Bench) -> str:
    """A row for each scheme and checkpoint."""
    tuned = bench.found(FT)
    rows = []
    for scheme in bench.arguments.schemes if tuned else ():
        for rotated in (False, True) if bench.arguments.rotated else (False,):
            ptq = bench.found(PTQ, scheme, rotated=rotated)
            qat = [bench.found(QAT, scheme, seed, rotated=rotated) for seed in range(bench.arguments.seeds)]
            if tuned and ptq:
                known = [one for one in qat if one]
                rows.append(row(f"{scheme}, rotated" if rotated else scheme, tuned, ptq, known))
    names = ("scheme", "FT", "PTQ", "QAT", "recovered", "KL: PTQ", "QAT", "recovered", "top token: PTQ", "QAT", "seeds")
    return table(names, rows) + "\n"


def row(name: str, tuned: Found, ptq: Found, qat: list[Found]) -> list[str]:
    """The figures of a scheme; QAT's are means over the seeds and ranges."""
    lost = ptq.perplexity - tuned.perplexity
    shares = [(ptq.perplexity - one.perplexity) / lost for one in qat]
    return [
        name,
        f"{tuned.perplexity:.2f}",
        f"{ptq.perplexity:.2f}",
        spread([one.perplexity for one in qat], ".2f"),
        spread(shares, ".2f") if lost > CLOSE * tuned.perplexity else "(no loss)",
        f"{ptq.kl:.4f}",
        spread([one.kl for one in qat], ".4f"),
        spread([1 - one.kl / ptq.kl for one in qat], ".2f"),
        f"{ptq.top1:.1%}",
        spread([one.top1 for one in qat], ".1%"),
        str(len(qat)),
    ]


def spread(values: list[float], form: str) -> str:
    """The mean, and the range where there are several."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that all training starts from")
    parser.add_argument("--rotated", action="store_true", help="also of FT, rotated by launch/rotate.py")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    parser.add_argument("--out", type=Path, help="folder to keep what was found in; none: it is thrown away")
    default = ["w4a16_g32", "nvfp4_w4a4", "mxfp4_mxfp8", "mxfp4_w4a4"]
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=default)
    parser.add_argument("--tune_steps", type=int, default=150, help="of FT")
    parser.add_argument("--tune_rate", type=float, default=1e-3, help="of FT's weights")
    parser.add_argument("--steps", type=int, default=150, help="of QAT")
    parser.add_argument("--rate", type=float, default=3e-4, help="of QAT's weights")
    parser.add_argument("--scale_rate", type=float, default=1e-3, help="of QAT's scales")
    parser.add_argument("--seeds", type=int, default=3, help="of QAT")
    parser.add_argument("--init", choices=("rtn", "gptq", "blockwise"), default="gptq", help="of PTQ and QAT")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all models")
    parser.add_argument("--rows", type=int, default=8, help="of each step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=57_344, help="of the text, at most")
    parser.add_argument("--minutes", type=float, default=1e6, help="after which no run begins")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the table is written to")
    arguments = parser.parse_args()
    began = os.getloadavg()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        bench = Bench(arguments, out)
        found = tables(bench)
    head = f"""# What training recovers where inputs are quantized too

{arguments.model.name} in {arguments.dtype}. FT: {arguments.tune_steps} steps on {arguments.train.name}, LM loss, at a
rate of {arguments.tune_rate:g}. PTQ: FT, quantized, `quant.init: {arguments.init}`. QAT: from FT and
these codes, KL to FT's logits alone, {arguments.steps} steps at {arguments.rate:g} (scales {arguments.scale_rate:g}),
cosine to 0. Steps of {arguments.rows} x {arguments.length} tokens. Measured on
{sum(ids.numel() for ids in bench.batches):,} tokens of {arguments.text.name}, in rows as long.
{timing.machine(DEVICE, began, "transformers", "deepspeed")}
`{timing.command()}`

Means over seeds of the samples' order, in brackets their range. Recovered: (PTQ - QAT) / (PTQ - FT) of the
perplexities, then of KL(FT || model), which is in nats per token. Top token: how often the likeliest token is FT's.

"""
    timing.write(arguments.results, "recovery_inputs", DEVICE, head + found)


if __name__ == "__main__":
    main()
