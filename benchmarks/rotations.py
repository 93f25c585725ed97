"""What rotations spare quantized inputs before any training, with and without outliers where they are.

    python benchmarks/rotations.py --model DIR --text FILE [--outliers 64]

Of a checkpoint: as it is, its weights rotated (launch/rotate.py), the inputs of down_proj turned while it runs
(``quant.rotate``), and both. Small models have none of the outliers of large ones, so a second table plants some: a few
channels of every up_proj are multiplied by a power of two and their columns of down_proj divided by it, which is the
same function exactly, and the shape that the massive activations of large models have before down_proj.

KL(checkpoint || quantized), nats per token, how often the likeliest token is the checkpoint's, and perplexity, in fp32,
without training. Scales of inputs that are stored are measured on the first rows of the text, which are not compared.
Writes ``benchmarks/results/rotations.md``.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks import timing
from benchmarks.markdown import table
from model.build import build_model
from model.checkpoint.load import load_weights
from model.rotation import rotate_checkpoint, rotate_weights
from model.scales import renew_weight_scales, write_scales
from quant import SCHEMES, prepare
from quant.rotation import rotate_inputs
from quant.scale import first_input_scale
from tools.verify.comparison import Comparison, windows

DEVICE = torch.device("cpu")
CHANNELS = 4  # of each layer that get outliers
ROWS = 4  # that stored scales are measured on
DOWN = [r".*\.mlp\.down_proj"]


def plant(source: Path, out: Path, factor: float) -> None:
    """Write ``source`` with channels of up_proj ``factor`` times as large, a power of two, and the same function."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    out.chmod(0o755)
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for index, name in enumerate(sorted(key for key in tensors if key.endswith("mlp.up_proj.weight"))):
            down = tensors[name.replace("up_proj", "down_proj")]
            generator = torch.Generator().manual_seed(index)
            channels = torch.randperm(len(tensors[name]), generator=generator)[:CHANNELS]
            tensors[name][channels] *= factor
            down[:, channels] /= factor
        save_file(tensors, out / file.name, metadata={"format": "pt"})


def load(directory: Path) -> PreTrainedModel:
    """A plain checkpoint in fp32."""
    model = build_model(directory, {}, dtype=torch.float32, device=DEVICE)
    load_weights(model, directory, progress=False)
    return model.eval()


@torch.no_grad()
def quantized(directory: Path, scheme: str, block: int | None, first: list[Tensor]) -> PreTrainedModel:
    """The checkpoint quantized without training, the inputs of down_proj turned in blocks of ``block``."""
    model = load(directory)
    quantization = prepare(model, SCHEMES[scheme], learn_weight_scale=False, learn_input_scale=False)
    if block is not None:
        rotate_inputs(quantization, DOWN, block)
        rotate_weights(model, quantization)
    renew_weight_scales(quantization)
    if quantization.input_groups:
        quantization.set_fake_quant(weights=False, activations=False)
        quantization.observe(True)
        for ids in first:
            model(input_ids=ids, use_cache=False)
        quantization.observe(False)
        observed = {group.owner: group for group in quantization.input_groups if group.observer is not None}
        scales = {
            name: first_input_scale(group.observer.absmax.reshape(1), group.spec)  # type: ignore[union-attr]
            for name, group in observed.items()
        }
        write_scales(quantization.input_groups, scales)
        quantization.set_fake_quant(weights=True, activations=True)
    return model


def rows_of(model: Path, arguments: argparse.Namespace, first: list[Tensor], batches: list[Tensor]) -> list[list[str]]:
    """A row for each scheme and rotation."""
    rotated = model.with_name(f"{model.name}-rotated")
    rotate_checkpoint(model, rotated, progress=False)
    with torch.no_grad():
        plain = load(model)
        expected = [plain(input_ids=ids, use_cache=False).logits for ids in batches]
    rows = []
    ways: dict[str, tuple[Path, int | None]] = {"plain": (model, None), "weights rotated": (rotated, None)}
    if not hasattr(plain.config, "num_experts"):  # whose inputs nothing turns
        ways |= {"down_proj turned": (model, arguments.block), "both": (rotated, arguments.block)}
    for scheme in arguments.schemes:
        for way, (directory, block) in ways.items():
            ours, compared = quantized(directory, scheme, block, first), Comparison()
            for ids, theirs in zip(batches, expected, strict=True):
                with torch.no_grad():
                    compared.add(ours(input_ids=ids, use_cache=False).logits, theirs, ids)
            figures = compared.perplexity("theirs"), compared.perplexity("ours"), compared.kl, compared.top1
            rows.append(
                [scheme, way, *(f"{figures[0]:.2f} {figures[1]:.2f} {figures[2]:.4f} {figures[3]:.1%}".split())]
            )
            print(" ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Quantize, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a plain checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    default = ["nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8"]
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=default)
    parser.add_argument("--outliers", type=float, default=64, help="factor of those that are planted, a power of two")
    parser.add_argument("--block", type=int, default=256, help="quant.rotate_block")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, at most")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the table is written to")
    arguments = parser.parse_args()
    began = os.getloadavg()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenizer(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    rows = windows(ids[: (ROWS * arguments.length) + arguments.tokens], arguments.length)
    first, batches = rows[:ROWS], [row for row in rows[ROWS:] if row.shape[1] == arguments.length]
    sections = []
    with tempfile.TemporaryDirectory() as temporary:
        for title, factor in (("As it is", 1.0), (f"Outliers of {arguments.outliers:g} planted", arguments.outliers)):
            model = Path(temporary) / title.split()[0].lower()
            plant(arguments.model, model, factor)
            found = rows_of(model, arguments, first, batches)
            head = ["scheme", "rotation", "checkpoint", "quantized", "KL", "top token"]
            sections.append(f"## {title}\n\n{table(head, found)}\n")
    layers = json.loads((arguments.model / "config.json").read_text())["num_hidden_layers"]
    text = f"""# What rotations spare quantized inputs, without training

{arguments.model.name} in fp32, {len(batches) * arguments.length:,} tokens of {arguments.text.name} in rows of
{arguments.length}; perplexity of the checkpoint and of what it becomes, KL(checkpoint || quantized) in nats per token.
Weights rotated: launch/rotate.py, seed 0. down_proj turned: `quant.rotate` in blocks of {arguments.block}.
Planted: {CHANNELS} channels of up_proj in each of {layers} layers, {arguments.outliers:g} times as large.
{timing.machine(DEVICE, began, "transformers")}
`{timing.command()}`

"""
    timing.write(arguments.results, "rotations", DEVICE, text + "\n".join(sections))


if __name__ == "__main__":
    main()
