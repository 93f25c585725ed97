"""The share of what quantization loses that training recovers: FT, PTQ and QAT by scheme, torchao's QAT beside.

    python benchmarks/recovery.py --model DIR --train FILE --text FILE [--out DIR] [--schemes w2a16_g32 ...]
        [--losses ft] [--starts rtn gptq blockwise] [--signed] [--seeds 3] [--set adapter.kind=lora ...]

FT is the checkpoint, trained without fake quant. PTQ is FT, quantized with the codes of each start. QAT trains with
serving numerics, from each start. FT is a fair reference in both ways to train (``--losses``):

lm  QAT starts from the checkpoint, with FT's samples, order, losses and steps.
ft  QAT starts from FT and learns FT's logits alone (KL); FT would stay as it is under these losses. A third of
    ``--ft-rate`` is a good ``--rate`` then.

``--set`` changes keys of QAT's recipe, and names the rows. Models are exported and loaded again. KL is KL(FT || model)
in nats per token, top token how often the likeliest token is FT's. Recovered: (PTQ - QAT) / (PTQ - FT) of the
perplexities, and the same of KL, for the best PTQ of the scheme.

With ``--out`` models and figures are kept, and not made again. Writes ``benchmarks/results/recovery.md``.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks import timing
from benchmarks.torchao_qat import takes, train_torchao
from engine.config.config import Recipe
from engine.config.reading import parse_recipe
from engine.loop import Loop
from launch.calibrate import calibrate
from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.quantization_config import is_quantized, weights_alone
from quant import SCHEMES
from tools.compressed import load_compressed

DEVICE = torch.device("cpu")
STARTS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "gptq": {"quant.init": "gptq"},
    "blockwise": {"quant.init": "blockwise"},
}
ROWS = 8  # of a forward that measures
CLOSE = 0.002  # of FT's perplexity: of a smaller loss a share says nothing


@dataclass(frozen=True)
class Found:
    """Perplexity of a model on the text; KL(FT || model) per token, and the share of tokens with FT's likeliest."""

    perplexity: float
    kl: float
    top1: float


class Bench:
    """Makes and measures models, and keeps them in a folder."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.options, self.out = options, out
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        whole = min(options.tokens, len(ids)) // options.length * options.length
        self.batches = torch.tensor(ids[:whole]).view(-1, options.length).split(ROWS)
        self.reference: list[Tensor] = []
        self.ft = self.found("ft", self.recipe(None, 0, options.ft_rate))

    def recipe(self, scheme: str | None, seed: int, rate: float, **changes: Any) -> dict[str, Any]:
        """The keys of a run; without a scheme fake quant never starts."""
        options = self.options
        return {
            "model.path": str(options.model),
            "data.kind": "text",
            "data.train": [str(options.train)],
            "data.max_length": options.length,
            "data.micro_batch_size": options.rows,
            "data.seed": seed,
            "train.seed": seed,
            "train.steps": options.steps,
            "train.quant_stats_every": 0,
            "learnable.norm": True,
            "optim.lr": rate,
            "optim.scale_lr": options.scale_rate,
            "optim.schedule": "cosine",
            "optim.min_lr_ratio": 0.0,
            "optim.warmup_steps": min(10, options.steps),
            "loss.chunk_tokens": 2048,
            "deepspeed": "zero0",
            **({"quant.scheme": scheme} if scheme else {"quant.fake_quant_start": -1}),
            **changes,
        }

    def ptq(self, scheme: str, start: str) -> Found:
        """FT, quantized."""
        changes = self.start(start) | {"model.path": str(self.out / "ft" / "export")}
        return self.found(f"ptq_{scheme}_{start}", self.recipe(scheme, 0, 0.0, **changes))

    def qat(self, scheme: str, start: str, seed: int, *, torchao: bool = False) -> Found:
        """Ours, or torchao's."""
        losses: dict[str, Any] = {}
        if self.options.losses == "ft":
            ft = str(self.out / "ft" / "export")
            losses = {
                "model.path": ft,
                "loss.lm_weight": 0.0,
                "loss.kd_weight": 1.0,
                "loss.kd": "kl",
                "loss.teacher": ft,
            }
        changes = losses if torchao else losses | self.start(start) | dict(self.options.set)
        name = f"{'torchao' if torchao else 'qat'}_{scheme}_{start}_{seed}"
        return self.found(name, self.recipe(scheme, seed, self.options.rate, **changes))

    def start(self, start: str) -> dict[str, Any]:
        """Keys of the codes that training starts with."""
        return STARTS[start] | ({"quant.signed_scales": True} if self.options.signed else {})

    def found(self, name: str, settings: Mapping[str, Any]) -> Found:
        """Make and measure a model, unless the folder has the figures of the same settings."""
        file, directory = self.out / f"{name}.json", self.out / name
        if file.exists() and (known := json.loads(file.read_text()))["settings"] == settings:
            return Found(**known["found"])
        shutil.rmtree(directory, ignore_errors=True)
        given = {**settings, "output_dir": str(directory)}
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        make(name, parse_recipe([f"--{key}={word}" for key, word in words.items()]), directory / "export")
        found = self.measured(directory / "export")
        file.write_text(json.dumps({"settings": settings, "found": asdict(found)}, indent=1))
        print(f"{name}: {found}", flush=True)
        return found

    @torch.no_grad()
    def measured(self, export: Path) -> Found:
        """Figures of an export in fp32."""
        model, kl, agree, nll = load(export), 0.0, 0, 0.0
        if not self.reference:
            ft = load(self.out / "ft" / "export")
            self.reference = [ft(input_ids=ids, use_cache=False).logits.log_softmax(-1) for ids in self.batches]
        for ids, theirs in zip(self.batches, self.reference, strict=True):
            ours = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            kl += F.kl_div(ours.double(), theirs.double(), log_target=True, reduction="sum").item()
            agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            nll += F.nll_loss(ours[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        tokens = sum(ids.numel() for ids in self.batches)
        predicted = sum(ids[:, 1:].numel() for ids in self.batches)
        return Found(math.exp(nll / predicted), kl / tokens, agree / tokens)


def make(name: str, recipe: Recipe, export: Path) -> None:
    """Train or quantize, by the first word of the name."""
    if name.startswith("ptq"):
        calibrate(recipe)
    elif name.startswith("torchao"):
        train_torchao(recipe).save_pretrained(export)
    elif Loop(recipe).run().step < recipe.train.steps:
        raise SystemExit("a signal ended the run: nothing is written of it")


def load(export: Path) -> PreTrainedModel:
    """An export that computes in fp32, inputs quantized as in training."""
    if is_quantized(export) and not weights_alone(export):
        return load_compressed(export)[0]
    model = build_model(export, {}, dtype=torch.float32, device=DEVICE)
    load_weights(model, export, progress=False)
    return model


def rows_of(bench: Bench, scheme: str) -> list[list[str]]:
    """One row per model of a scheme, FT first."""
    options, ft = bench.options, bench.ft
    ptq = {start: bench.ptq(scheme, start) for start in options.starts}
    best = min(ptq.values(), key=lambda found: found.perplexity)
    rows = [row(scheme, "FT", [ft]), *(row(scheme, f"PTQ, {start}", [found]) for start, found in ptq.items())]
    changed = "".join(f", {key}={value}" for key, value in options.set)
    for start in options.starts:
        seeds = [bench.qat(scheme, start, seed) for seed in range(options.seeds)]
        rows.append(row(scheme, f"QAT, {start}{changed}", seeds, ft, best))
    if not options.no_torchao and takes(scheme):
        rows.append(row(scheme, "torchao's QAT", [bench.qat(scheme, "absmax", 0, torchao=True)], ft, best))
    return rows


def row(scheme: str, name: str, found: list[Found], ft: Found | None = None, ptq: Found | None = None) -> list[str]:
    """Means over the seeds, with their range."""
    cells = [scheme, name, spread([one.perplexity for one in found], ".2f"), spread([one.kl for one in found], ".4f")]
    cells.append(spread([one.top1 for one in found], ".1%"))
    if ft is None or ptq is None:
        return [*cells, "", ""]
    lost = ptq.perplexity - ft.perplexity
    shares = spread([(ptq.perplexity - one.perplexity) / lost for one in found], ".2f")
    of_kl = spread([1 - one.kl / ptq.kl for one in found], ".2f")
    return [*cells, shares if lost > CLOSE * ft.perplexity else "(no loss)", of_kl]


def spread(values: list[float], form: str) -> str:
    """The mean, and the range where there are several."""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def changed_key(text: str) -> tuple[str, str]:
    """The two parts of KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}, expected KEY=VALUE")
    return key, value


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that all training starts from")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    parser.add_argument("--out", type=Path, help="folder to keep models and figures in; none: they are thrown away")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["w2a16_g32", "w3a16_g32"])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["rtn"])
    parser.add_argument("--signed", action="store_true", help="signed scales of integers")
    parser.add_argument("--losses", choices=("lm", "ft"), default="lm", help="see above")
    parser.add_argument("--set", type=changed_key, action="append", default=[], metavar="KEY=VALUE", help="of QAT")
    parser.add_argument("--no-torchao", action="store_true")
    parser.add_argument("--seeds", type=int, default=1, help="of the samples' order, of QAT")
    parser.add_argument("--ft-rate", type=float, default=1e-3, help="of FT's weights")
    parser.add_argument("--rate", type=float, default=1e-3, help="of QAT's weights")
    parser.add_argument("--scale-rate", type=float, default=1e-3, help="of scales")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=8, help="of each step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=57_344, help="of the text, at most")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the table is written to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, out)
        rows = [cells for scheme in options.schemes for cells in rows_of(bench, scheme)]
    timing.write(
        options.results,
        "recovery",
        DEVICE,
        "# What training recovers of what quantization loses",
        f"{options.model.name}, {options.steps} steps of {options.rows} x {options.length} tokens of "
        f"{options.train.name}; {sum(ids.numel() for ids in bench.batches):,} tokens of {options.text.name}.\n"
        + timing.head(DEVICE, "transformers", "deepspeed", "torchao"),
        timing.table(("scheme", "model", "perplexity", "KL", "top token", "recovered", "of KL"), rows),
    )


if __name__ == "__main__":
    main()
