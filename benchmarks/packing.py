"""Real tokens per second of training steps, packed against padded.

    python benchmarks/packing.py --data train.jsonl --model DIR [--fields question answer] [--length 512] [--rows 8]

A step is what a rank does for one micro-batch: the batch is built, forward, cross entropy of the valid tokens,
backward, AdamW. Real tokens are those of the samples; what is computed on padding counts for nothing. All ways take
rows of the same data, model and optimizer, each in the order that its loader gives it:

- packed: rows of ``length`` positions, filled with whole samples that do not see each other
- padded to the longest: of the micro-batch, as training does without packing
- padded to the maximum: to ``length``, as many recipes do
- the same two without a mask, for what the mask costs: samples that are padded on the right need none, as attention is
  causal; packed samples then see each other, so that is no way to train

Writes ``benchmarks/results/packing.md``, on CUDA ``packing_cuda.md``.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import timing
from data.chat import read_chat
from data.loader import Loader, MicroBatch, model_inputs, real_tokens
from data.samples import IGNORE, Sample

BAR = 2.0  # packed, of padded to the maximum

PACKED, LONGEST, MAXIMUM = "packed", "padded to the longest", "padded to the maximum"
WITHOUT_MASK = ", no mask"


@dataclass
class Way:
    """How batches are made, and what was seen of them."""

    loader: Loader
    change: Callable[[MicroBatch], MicroBatch] = lambda batch: batch
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def batch(self) -> MicroBatch:
        """The next one."""
        (batch,) = self.loader.step(len(self.tokens))
        batch = self.change(batch)
        self.tokens.append(real_tokens(batch))
        self.positions.append(batch["input_ids"].numel())
        return batch


def ways_of(samples: list[Sample], rows: int, length: int, pad_token_id: int) -> dict[str, Way]:
    """The ways by name."""
    sizes = {"micro_batch_size": rows, "gradient_accumulation_steps": 1, "rank": 0, "world": 1, "seed": 0}

    def padded() -> Loader:
        return Loader(samples, pad_token_id=pad_token_id, **sizes)

    def packed() -> Loader:
        return Loader(samples, pad_token_id=pad_token_id, packed_length=length, **sizes)

    fill = {"input_ids": pad_token_id, "labels": IGNORE, "attention_mask": 0}

    def to_maximum(batch: MicroBatch) -> MicroBatch:
        missing = length - batch["input_ids"].shape[1]
        return batch | {name: F.pad(batch[name], (0, missing), value=value) for name, value in fill.items()}

    def without(*names: str) -> Callable[[MicroBatch], MicroBatch]:
        return lambda batch: {name: tensor for name, tensor in batch.items() if name not in names}

    return {
        PACKED: Way(packed()),
        LONGEST: Way(padded()),
        MAXIMUM: Way(padded(), to_maximum),
        PACKED + WITHOUT_MASK: Way(packed(), without("position_ids")),
        MAXIMUM + WITHOUT_MASK: Way(padded(), lambda batch: without("attention_mask")(to_maximum(batch))),
    }


def measure(
    model: torch.nn.Module, ways: dict[str, Way], device: torch.device, rounds: int, warmup: int
) -> dict[str, timing.Timing]:
    """Seconds per real token of each way's steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(way: Way) -> None:
        batch = {name: tensor.to(device) for name, tensor in way.batch().items()}
        logits = model(**model_inputs(batch), use_cache=False).logits
        valid = batch["labels"] != IGNORE
        F.cross_entropy(logits[valid].float(), batch["labels"][valid]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(way: Way) -> float:
        way.seconds.append(timing.seconds_of(lambda: step(way), device))
        return way.seconds[-1] / way.tokens[-1]

    return timing.interleave({name: lambda way=way: timed(way) for name, way in ways.items()}, rounds, warmup)


def rows_of(ways: dict[str, Way], timings: dict[str, timing.Timing], warmup: int) -> list[list[str]]:
    """One row per way; rates are of the inverse of seconds per token, so that ratios are inverted."""
    found, base = [], timings[MAXIMUM]
    for name, way in ways.items():
        tokens, positions = sum(way.tokens[warmup:]), sum(way.positions[warmup:])
        low, high = base.quartiles(timings[name])
        rate, ratio = 1 / timings[name].median, base.ratio(timings[name])
        cells = [name, f"{rate:,.0f}", f"{ratio:.2f} ({low:.2f} to {high:.2f})"]
        cells += [f"{1000 * statistics.median(way.seconds[warmup:]):.0f}", f"{100 * (1 - tokens / positions):.1f}%"]
        found.append(cells)
    return found


def quick_inputs(folder: Path) -> list[str]:
    """Options that make the run tiny."""
    from tests.lib.tiny import tiny_checkpoint

    rng = random.Random(0)
    rows = [{"input": "What? " * rng.randint(1, 6), "output": "42. " * rng.randint(1, 6)} for _ in range(60)]
    data = folder / "chats.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    model = tiny_checkpoint(folder / "model", "qwen3")
    return ["--data", str(data), "--model", str(model), "--length", "64", "--rows", "2", "--rounds", "2"]


def options(folder: Path) -> argparse.Namespace:
    """Parse the command line; with --quick write small data and a small model first."""
    parser = timing.options_of(__doc__, rounds=20)
    parser.add_argument("--data", type=Path, help="chats in JSONL")
    parser.add_argument("--fields", nargs=2, metavar=("INPUT", "OUTPUT"), help="the file's keys, if it has its own")
    parser.add_argument("--model", type=Path, help="directory of a checkpoint with a tokenizer")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    arguments = parser.parse_args()
    if arguments.quick:
        return parser.parse_args([*sys.argv[1:], *quick_inputs(folder)])
    if arguments.data is None or arguments.model is None:
        parser.error("--data and --model are needed (or --quick)")
    return arguments


def main() -> None:
    """Measure and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = options(Path(folder))
        device = timing.device_of(arguments)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        fields = dict(zip(("input", "output"), arguments.fields, strict=True)) if arguments.fields else None
        samples, _ = read_chat([arguments.data], tokenizer, max_length=arguments.length, fields=fields)
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa")
        model = model.to(device).train()
        ways = ways_of(samples, arguments.rows, arguments.length, tokenizer.pad_token_id or 0)
        warmup = 1 if arguments.quick else 2
        timings = measure(model, ways, device, arguments.rounds, warmup)
    lengths = [len(sample.input_ids) for sample in samples]
    mean = sum(lengths) / len(lengths)
    ratio = timings[MAXIMUM].ratio(timings[PACKED])
    columns = ("way", "real tokens/s", "of padded to the maximum (quartiles)", "ms per step", "padding")
    timing.write(
        arguments.results,
        "packing",
        device,
        f"# Packed against padded training steps, {device.type.upper()}",
        f"{arguments.data.name}: {len(samples):,} samples of {min(lengths)} to {max(lengths)} tokens, mean {mean:.0f}. "
        f"{arguments.model.name} in bf16, {sum(p.numel() for p in model.parameters()):,} parameters, sdpa, "
        f"{arguments.rows} rows of at most {arguments.length} positions. A step: the batch is built, forward, cross "
        f"entropy of the valid tokens, backward, AdamW. Medians of {arguments.rounds} rounds in turn.\n"
        + timing.head(device, "transformers"),
        timing.table(columns, rows_of(ways, timings, warmup)),
        f"At most {arguments.length / mean:.2f} is possible. Bar: packed at least {BAR:.1f} of padded to the maximum: "
        f"{'met' if ratio >= BAR else f'missed, {ratio:.2f}'}. With either mask sdpa gets a dense one.",
    )


if __name__ == "__main__":
    main()
