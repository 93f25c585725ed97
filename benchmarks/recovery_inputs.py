"""What training recovers where inputs have four or eight bits too, with and without rotated weights.

    python benchmarks/recovery_inputs.py --model DIR --train FILE --text FILE [--rotated DIR] [--out DIR]

All models start from one checkpoint, with the same samples, order and steps, in float32: FT, trained without fake
quant; PTQ, FT quantised without training; QAT, trained as it is served. ``--rotated`` is the checkpoint after
launch/rotate.py: the same function of its tokens, so that FT of the plain one is the reference of both, and PTQ of
rotated weights is of FT's weights, rotated by that script with the same seed.

Beside perplexity stand what it is blind to at four bits: KL(FT || model) per token, and how often the likeliest token
is FT's. The recovered share is (PTQ - QAT) / PTQ of the perplexities' distances from FT's, and the same of KL. KL
counts what QAT learnt otherwise than FT as loss, so that its share is the smaller one.

With ``--out`` what was measured stays there, and is not run again. Writes ``benchmarks/results/recovery_inputs.md``.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks import timing
from benchmarks.recovery import table
from engine.loop import Loop
from engine.recipe.reading import parse_recipe
from engine.verify.check import Comparison, windows
from launch.calibrate import calibrate
from launch.launcher import ROOT
from model.build import build_model
from model.compressed import load_compressed
from model.load import load_weights
from quant import SCHEMES

DEVICE = torch.device("cpu")
FT, PTQ, QAT = "ft", "ptq", "qat"
CLOSE = 0.005  # of FT's perplexity: less than this PTQ has lost nothing that could be recovered


@dataclass(frozen=True)
class Found:
    """What a model makes of the text, beside FT of its seed."""

    perplexity: float
    kl: float
    top1: float


class Bench:
    """Trains, quantises and measures, and remembers in a folder what was found."""

    def __init__(self, arguments: argparse.Namespace, out: Path) -> None:
        self.arguments, self.out = arguments, out
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        ids = tokenizer(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        whole = min(arguments.tokens, len(ids)) // arguments.length * arguments.length
        self.batches = windows(ids[:whole], arguments.length)
        self._reference: dict[int, list[Tensor]] = {}

    def found(self, part: str, scheme: str, seed: int, *, rotated: bool = False) -> Found:
        """Train or quantise, measure, keep the figures."""
        settings = self._settings(part, scheme, seed, rotated)
        name = "_".join([part, scheme, "rotated" if rotated else "plain", str(seed)])
        file = self.out / f"{name}.json"
        if file.exists() and (known := json.loads(file.read_text()))["settings"] == settings:
            return Found(**known["found"])
        export = self._made(name, part, settings)
        found = self._measured(load(export), seed)
        file.write_text(json.dumps({"settings": settings, "found": vars(found)}, indent=1))
        print(f"{name}: {found}", flush=True)
        return found

    def _made(self, name: str, part: str, settings: Mapping[str, Any]) -> Path:
        """The export of a run, which is made unless it is there."""
        directory = self.out / name
        if not (directory / "export").is_dir():
            shutil.rmtree(directory, ignore_errors=True)  # of a run that was interrupted
            options = {**settings, "output_dir": str(directory)}
            words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
            recipe = parse_recipe([f"--{key}={word}" for key, word in words.items()])
            if part == PTQ:
                calibrate(recipe)
            elif Loop(recipe).run().step < settings["train.steps"]:
                raise SystemExit("a signal ended the run: nothing is written of it")
        return directory / "export"

    def _finetuned(self, seed: int, rotated: bool) -> Path:
        """FT of a seed; rotated, if asked for, as the rotated checkpoint was."""
        plain = self._made(f"{FT}_none_plain_{seed}", FT, self._settings(FT, "none", seed, False))
        turned = self.out / f"{FT}_none_rotated_{seed}"
        if rotated and not turned.is_dir():
            script = [sys.executable, str(ROOT / "launch" / "rotate.py")]
            subprocess.run([*script, "--model", str(plain), "--output", str(turned)], check=True)
        return turned if rotated else plain

    def _settings(self, part: str, scheme: str, seed: int, rotated: bool) -> dict[str, Any]:
        """The recipe of a run, by key."""
        arguments = self.arguments
        start = arguments.rotated if rotated else arguments.model
        return {
            "model.path": str(self._finetuned(seed, rotated) if part == PTQ else start),
            "model.dtype": "float32",
            "data.kind": "text",
            "data.train": [str(arguments.train)],
            "data.max_length": arguments.length,
            "data.micro_batch_size": arguments.rows,
            "data.seed": seed,
            "train.seed": seed,
            "train.steps": arguments.steps,
            "train.quant_stats_every": 0,
            "learnable.norm": True,
            "optim.lr": arguments.rate,
            "optim.scale_lr": 1e-2,
            "optim.warmup_steps": min(10, arguments.steps),
            "optim.schedule": "cosine",
            "optim.min_lr_ratio": 0.0,
            "deepspeed": "zero0",
            **({"quant.fake_quant_start": -1} if part == FT else {"quant.scheme": scheme}),
        }

    @torch.no_grad()
    def _measured(self, model: PreTrainedModel, seed: int) -> Found:
        if seed not in self._reference:
            reference = load(self._finetuned(seed, rotated=False))
            self._reference = {seed: [reference(input_ids=ids, use_cache=False).logits for ids in self.batches]}
        compared = Comparison("")
        for ids, theirs in zip(self.batches, self._reference[seed], strict=True):
            compared.add(model(input_ids=ids, use_cache=False).logits, theirs, ids)
        return Found(compared.perplexity("ours"), compared.kl, compared.top1)


def load(export: Path) -> PreTrainedModel:
    """An export, plain or compressed, that computes in fp32 as in training."""
    if "quantization_config" in json.loads((export / "config.json").read_text(encoding="utf-8")):
        return load_compressed(export)[0]
    model = build_model(export, {}, dtype=torch.float32, device=DEVICE)
    load_weights(model, export, progress=False)
    return model


def tables(bench: Bench) -> str:
    """A row for each scheme and checkpoint, the mean of the seeds."""
    seeds, rows = range(bench.arguments.seeds), []
    tuned = [bench.found(FT, "none", seed).perplexity for seed in seeds]
    for scheme in bench.arguments.schemes:
        for rotated in (False, True) if bench.arguments.rotated else (False,):
            ptq, qat = ([bench.found(part, scheme, seed, rotated=rotated) for seed in seeds] for part in (PTQ, QAT))
            rows.append(row(f"{scheme}, rotated" if rotated else scheme, tuned, ptq, qat))
    lines = ("scheme", "FT", "PTQ", "QAT", "spread", "recovered", "KL: PTQ", "QAT", "less", "top token: PTQ", "QAT")
    return table(lines, rows) + "\n"


def row(name: str, tuned: list[float], ptq: list[Found], qat: list[Found]) -> list[str]:
    """Means over the seeds; the spread of QAT is from its smallest perplexity to its largest."""
    before, after = ([one.perplexity for one in found] for found in (ptq, qat))
    ft, lost = statistics.mean(tuned), statistics.mean(before) - statistics.mean(tuned)
    recovered = (statistics.mean(before) - statistics.mean(after)) / lost if lost > CLOSE * ft else None
    kls = [statistics.mean(one.kl for one in found) for found in (ptq, qat)]
    tops = [statistics.mean(one.top1 for one in found) for found in (ptq, qat)]
    return [
        name,
        f"{ft:.2f}",
        f"{statistics.mean(before):.2f}",
        f"{statistics.mean(after):.2f}",
        f"{max(after) - min(after):.2f}" if len(after) > 1 else "",
        "(no loss)" if recovered is None else f"{recovered:.2f}",
        *(f"{kl:.4f}" for kl in kls),
        f"{1 - kls[1] / kls[0]:.2f}",
        *(f"{top:.1%}" for top in tops),
    ]


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that all training starts from")
    parser.add_argument("--rotated", type=Path, help="the same, rotated by launch/rotate.py")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    parser.add_argument("--out", type=Path, help="folder to keep what was found in; none: it is thrown away")
    default = ["w4a16_g32", "nvfp4_w4a4", "mxfp4_mxfp8", "mxfp4_w4a4"]
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=default)
    parser.add_argument("--rate", type=float, default=1e-3, help="of the weights")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=8, help="of each step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=60_000, help="of the text, at most")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the table is written to")
    arguments = parser.parse_args()
    began = os.getloadavg()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        found = tables(Bench(arguments, out))
    head = f"""# What training recovers where inputs are quantised too

{arguments.model.name} in float32, {arguments.steps} steps of {arguments.rows} x {arguments.length} tokens of
{arguments.train.name}; {arguments.tokens:,} tokens of {arguments.text.name} in rows of {arguments.length}; means of
{arguments.seeds} seeds (of the samples' order).
{timing.machine(DEVICE, began, "transformers", "deepspeed")}
`{timing.command()}`

FT: trained without fake quant. PTQ: FT, quantised. QAT: trained as it is served, at FT's rate ({arguments.rate:g},
cosine to 0; scales 0.01). Recovered: (PTQ - QAT) / (PTQ - FT) of the perplexities. KL(FT || model), nats per token, and
less: the share of PTQ's that QAT does not have. Top token: how often the likeliest token is FT's.

"""
    timing.write(arguments.results, "recovery_inputs", DEVICE, head + found)


if __name__ == "__main__":
    main()
