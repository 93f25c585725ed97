"""Quality by bytes of one model, quantized in several ways: rounding, GPTQ, blockwise, training, other tools.

    python benchmarks/recovery.py --model DIR --train FILE [FILE ...] --text FILE [FILE ...] --out DIR
        [--schemes w2a16_g32 w3a16_g32] [--ways rtn gptq blockwise qat torchao] [--seeds 3] [--set KEY=VALUE ...]
        [--other NAME=DIR_OR_GGUF ...]

rtn, gptq, blockwise
    post-training quantization by ``launch/calibrate.py``: nearest codes, GPTQ's, or those of ``quant.init blockwise``.
qat
    ``--recipe`` (launch/recipes/low_bits.yaml), trained on ``--train`` with the model as its own teacher.
torchao
    torchao's QAT in a plain loop with the same losses, samples, order, rates and steps.
other
    files of other tools: a checkpoint that transformers or this project reads (GPTQ, AWQ, AutoRound), or a GGUF file,
    which launch/convert_gguf.py dequantizes (pip install -e '.[gguf]').

``--set`` changes keys of the recipe in rtn to qat, and names the rows. Every model is written, read again and measured
in fp32 on the first ``--tokens`` tokens of each text: perplexity, and KL(unquantized || model) and equal top tokens per
token. Bits are those of the whole file, embeddings and scales included, for each parameter of the unquantized model.

Models and figures stay in ``--out``: a later call makes what is missing, resumes interrupted training, and its table
and picture contain everything in the folder. Writes ``benchmarks/results/recovery_MODEL.md`` and ``.png``.
"""

import argparse
import json
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoTokenizer

from benchmarks import timing
from benchmarks.torchao_qat import takes, train_torchao
from data.cache import digest
from engine.config.config import Recipe
from engine.config.reading import parse_recipe
from engine.loop import Loop
from launch.calibrate import calibrate
from quant import SCHEMES
from tools.evaluation.perplexity import AGREEMENT, KL, Questions, TextReference, evaluate_checkpoint, read_reference
from tools.evaluation.results import weights_size
from tools.gguf_to_checkpoint import convert_gguf

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INITS = ("rtn", "gptq", "blockwise")  # of quant.init; each is a way
TRAINED = ("qat", "torchao")
CHECKPOINT_EVERY = 100  # steps


@dataclass(frozen=True)
class Text:
    """Figures of a model on a text: perplexity and KL(unquantized || model) per token, share of equal top tokens."""

    perplexity: float
    kl: float
    top: float


@dataclass(frozen=True)
class Found:
    """A model of the table: how it was made, the bytes of its weights, and its figures by the name of the text."""

    scheme: str
    way: str
    steps: int
    seed: int
    bytes: int
    texts: dict[str, Text]


class Bench:
    """Makes models, measures them, and keeps both in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        self.out.mkdir(parents=True, exist_ok=True)

    def recipe(self, scheme: str, seed: int, directory: Path, **changes: Any) -> Recipe:
        """Return the recipe of a model that this project makes."""
        options = self.options
        keys = {
            "model.path": str(options.model),
            "loss.teacher": str(options.model),
            "data.kind": "text",
            "data.train": [str(file) for file in options.train],
            "data.max_length": options.length,
            "data.micro_batch_size": options.rows,
            "data.seed": seed,
            "train.seed": seed,
            "train.steps": options.steps,
            "train.quant_stats_every": 0,
            "loss.diagnostics_every": 0,
            "quant.scheme": scheme,
            "deepspeed": "zero0",
            "output_dir": str(directory),
            **changes,
        }
        if SCHEMES[scheme].weights.dtype != "int":
            keys["quant.signed_scales"] = False  # float codes have none
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
        words |= dict(options.set)
        return parse_recipe(["--config", str(options.recipe), *(f"--{key}={word}" for key, word in words.items())])

    def ours(self, scheme: str, way: str, seed: int) -> None:
        """Make and measure a model of a scheme, unless the folder has its figures."""
        trained = way in TRAINED
        steps = self.options.steps if trained else 0
        changed = [f"{key}={value}" for key, value in self.options.set if way != "torchao"]
        name = "_".join([scheme, way, *([f"{steps}_{seed}"] if trained else []), *changed])
        name = re.sub(r"[^\w.,=-]", "-", name)
        name = name if len(name) < 200 else f"{name[:180]}_{digest(name)[:8]}"  # file systems take 255 characters
        directory = self.out / name
        if not self.file(name).exists():
            changes: dict[str, Any] = {"quant.init": way} if way in INITS else {}
            if way == "qat":
                begun = (directory / "checkpoints").is_dir()
                changes = {"train.checkpoint_every": CHECKPOINT_EVERY, "train.resume": begun}
            recipe = self.recipe(scheme, seed, directory, **changes)
            if way == "qat":
                if Loop(recipe).run().step < steps:
                    raise SystemExit(f"{name}: stopped by a signal; the same command resumes it")
                shutil.rmtree(directory / "checkpoints", ignore_errors=True)
            elif way == "torchao":
                train_torchao(recipe, DEVICE).save_pretrained(directory / "export")
                AutoTokenizer.from_pretrained(self.options.model).save_pretrained(directory / "export")
            else:
                calibrate(recipe)
        export = directory / "export"
        # torchao's model holds the values of its codes, which our export of the same scheme stores in as many bytes.
        stored = self.out / f"{scheme}_rtn" / "export" if way == "torchao" else export
        self.keep(name, scheme, ", ".join([way, *changed]), steps, seed, export, weights_size(stored))

    def other(self, name: str, path: Path) -> None:
        """Measure a file or checkpoint of another tool."""
        directory = path
        if path.suffix == ".gguf" and not self.file(name).exists():
            directory = self.out / name
            convert_gguf(path, directory, dtype=torch.float32)
            for file in self.options.model.glob("tokenizer*.json"):  # a GGUF file may have no bos
                shutil.copy(file, directory)
        size = path.stat().st_size if path.is_file() else weights_size(path)
        self.keep(name, "", name, 0, 0, directory, size)

    def keep(self, name: str, scheme: str, way: str, steps: int, seed: int, export: Path, size: int) -> None:
        """Measure an export and store its figures, unless the folder has them."""
        if self.file(name).exists():
            return
        texts = {file.name: self.measured(export, file) for file in self.options.text}
        found = Found(scheme, way, steps, seed, size, texts)
        self.file(name).write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
        print(found, flush=True)

    def file(self, name: str) -> Path:
        """Return the file of a model's figures."""
        return self.out / f"{name}.json"

    def measured(self, export: Path, text: Path) -> Text:
        """Measure an export on a text."""
        found = evaluate_checkpoint(export, self.questions(text), DEVICE, self.reference(text)).measurements
        return Text(*(found[measure].value for measure in ("perplexity per token", KL, AGREEMENT)))

    @cache  # noqa: B019  one Bench a process
    def reference(self, text: Path) -> TextReference:
        """Return the predictions of the unquantized model."""
        return read_reference(self.options.model, self.questions(text), DEVICE)

    def questions(self, text: Path) -> Questions:
        """Return the questions about a text."""
        return Questions(text=text, tokens=self.options.tokens, length=self.options.length, dtype=torch.float32)

    def found(self) -> list[Found]:
        """Return everything in the folder, by bytes and KL."""
        read = [json.loads(file.read_text(encoding="utf-8")) for file in self.out.glob("*.json")]
        every = [Found(**one | {"texts": {key: Text(**text) for key, text in one["texts"].items()}}) for one in read]
        first = self.options.text[0].name
        return sorted(every, key=lambda one: (one.bytes, one.texts[first].kl))


def rows_of(found: list[Found], texts: list[str], parameters: float) -> list[list[str]]:
    """Return the cells of the table."""
    rows = []
    for one in found:
        cells = [f"{8 * one.bytes / parameters:.2f}", f"{one.bytes / 1e6:.1f}", one.scheme, one.way]
        cells.append(f"{one.steps:,}, seed {one.seed}" if one.steps else "")
        for text in texts:
            figures = one.texts[text]
            cells += [f"{figures.kl:.4f}", f"{figures.perplexity:,.2f}", f"{figures.top:.1%}"]
        rows.append(cells)
    return rows


def plot(found: list[Found], text: str, parameters: float, path: Path) -> None:
    """Draw KL on a text by bits, a mark for each way."""
    from matplotlib.figure import Figure  # takes a second to import; without pyplot no display is needed

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    ways = dict.fromkeys(one.way if one.scheme else "other tools" for one in found)
    for way, marker in zip(ways, "osD^vP*X<>hp" * len(ways), strict=False):
        points = [one for one in found if (one.way if one.scheme else "other tools") == way]
        bits = [8 * one.bytes / parameters for one in points]
        axes.plot(bits, [one.texts[text].kl for one in points], marker, label=way)
        for at, one in zip(bits, points, strict=True):
            label = one.scheme or one.way
            axes.annotate(label, (at, one.texts[text].kl), (4, 3), textcoords="offset points", fontsize=7)
    axes.set(yscale="log", xlabel="bits per weight, whole file", ylabel=f"KL divergence per token, {text}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def pair(text: str) -> tuple[str, str]:
    """Split KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=VALUE")
    return key, value


def main() -> None:
    """Make what is missing, then write the table and the picture of everything in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="unquantized checkpoint")
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="texts to train on")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="texts to measure on; the first is drawn")
    parser.add_argument("--out", type=Path, required=True, help="folder of models and figures")
    parser.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "launch/recipes/low_bits.yaml")
    parser.add_argument("--schemes", nargs="*", choices=SCHEMES, default=["w2a16_g32", "w3a16_g32", "w4a16_g32"])
    parser.add_argument("--ways", nargs="*", choices=(*INITS, *TRAINED), default=["rtn", "gptq"])
    parser.add_argument("--set", type=pair, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--other", type=pair, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--seeds", type=int, default=1, help="of the order of the samples, in training")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=2, help="of each step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, and of a window that is measured")
    parser.add_argument("--tokens", type=int, default=8192, help="of each text that is measured on")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the table and the picture")
    options = parser.parse_args()
    bench = Bench(options)
    for name, path in options.other:
        bench.other(name, Path(path))
    for scheme in options.schemes:
        for way in options.ways:
            if way != "torchao" or takes(scheme):
                for seed in range(options.seeds if way in TRAINED else 1):
                    bench.ours(scheme, way, seed)
    found, texts = bench.found(), [file.name for file in options.text]
    sources = ", ".join(file.name for file in options.train)
    name, parameters = f"recovery_{options.model.resolve().name}", weights_size(options.model) / 2
    columns = ["bits", "MB", "scheme", "way", "steps"]
    columns += [f"{measure}, {text}" for text in texts for measure in ("KL", "perplexity", "top token")]
    timing.write(
        options.results,
        name,
        DEVICE,
        f"# Quality by bytes: {options.model.resolve().name}",
        f"Training: {options.rows} x {options.length} tokens a step of {sources}.\n"
        f"Measured: the first {options.tokens:,} tokens of each text, windows of {options.length}, fp32.\n"
        + timing.head(DEVICE, "transformers", "deepspeed", "torchao"),
        f"![KL by bits]({name}.png)",
        timing.table(columns, rows_of(found, texts, parameters)),
    )
    plot(found, texts[0], parameters, options.results / f"{name}.png")


if __name__ == "__main__":
    main()
