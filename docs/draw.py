"""Draws way_of_the_data.svg, the picture in the README: python docs/draw.py

The picture is drawn and not painted so that a test can hold it to the code: tests/unit/test_docs.py checks that every
module named here exists and that the committed file is what this script writes. Colors follow the reader's light or
dark mode; the picture brings its own background, so that it stays legible where that mode is not known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("way_of_the_data.svg")
WIDTH, HEIGHT = 1200, 622
BOX_HEIGHT, GAP = 60, 20

STYLE = """
  .back { fill: #ffffff; }
  .frame { fill: #f3f5f8; stroke: #c9d1d9; stroke-width: 1; }
  .disk { fill: #fff6e0; stroke: #c08a1e; stroke-width: 1.5; }
  .code { fill: #e7f0ff; stroke: #3b6fc4; stroke-width: 1.5; }
  .served { fill: #e6f6ea; stroke: #2f8a4a; stroke-width: 1.5; }
  .arrow { fill: none; stroke: #57606a; stroke-width: 1.8; marker-end: url(#head); }
  .tip { fill: #57606a; }
  text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 14px; font-weight: 600; }
  .name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13.5px; font-weight: 600; }
  .note { font-size: 12.5px; fill: #4a535d; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; }
    .frame { fill: #161b22; stroke: #3d444d; }
    .disk { fill: #2d2410; stroke: #d2a13a; }
    .code { fill: #12243f; stroke: #5b92e5; }
    .served { fill: #11281a; stroke: #46a862; }
    .arrow { stroke: #9aa4af; }
    .tip { fill: #9aa4af; }
    text { fill: #e6edf3; }
    .note { fill: #b1bac4; }
  }
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with a first line and a note below it.

    Attributes:
        kind: ``code`` (the first line names modules), ``disk`` (files) or ``served`` (other programs).
        first: the first line; modules are separated by a comma.
        note: what happens there, in a few words.
        x, y, width: in pixels.
    """

    kind: str
    first: str
    note: str
    x: int
    y: int
    width: int

    def svg(self) -> str:
        """Rectangle and texts."""
        middle, cls = self.x + self.width // 2, "name" if self.kind == "code" else "title"
        return (
            f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" height="{BOX_HEIGHT}" rx="8"/>\n'
            f'<text class="{cls}" x="{middle}" y="{self.y + 25}" text-anchor="middle">{escape(self.first)}</text>\n'
            f'<text class="note" x="{middle}" y="{self.y + 46}" text-anchor="middle">{escape(self.note)}</text>\n'
        )


def row(index: int) -> int:
    """The upper edge of the boxes of a row."""
    return 62 + index * (BOX_HEIGHT + GAP)


DISK, SET_UP, STEP, AFTER = (24, 184), (264, 264), (600, 244), (926, 236)  # x and width of the columns

FILES = [
    Box("disk", "Hugging Face model", "config.json, safetensors", DISK[0], row(0), DISK[1]),
    Box("disk", "PTQ checkpoint", "scales, if there are any", DISK[0], row(3), DISK[1]),
    Box("disk", "JSONL or text", "chats, plain text", DISK[0], row(5), DISK[1]),
]
PREPARE = [
    Box("code", "model.build", "an empty model, in partitions", SET_UP[0], row(0), SET_UP[1]),
    Box("code", "model.load", "each rank reads its own slices", SET_UP[0], row(1), SET_UP[1]),
    Box("code", "quant.replace_layers", "Linears become QuantLinears", SET_UP[0], row(2), SET_UP[1]),
    Box("code", "model.scales", "first scales, read or measured", SET_UP[0], row(3), SET_UP[1]),
    Box("code", "engine.fake_quant", "activation scales, if none were read", SET_UP[0], row(4), SET_UP[1]),
    Box("code", "data.chat, data.text", "tokens, and which are learned", SET_UP[0], row(5), SET_UP[1]),
    Box("code", "data.loader", "batches by step and rank", SET_UP[0], row(6), SET_UP[1]),
]
LOOP = [
    Box("code", "quant.linear", "forward: fake quant or fp8 GEMM", STEP[0], row(1), STEP[1]),
    Box("code", "engine.losses.chunked", "LM loss and distillation", STEP[0], row(2), STEP[1]),
    Box("code", "quant.autograd", "backward: weights and scales", STEP[0], row(3), STEP[1]),
    Box("code", "engine.session.optimizer", "AdamW under DeepSpeed ZeRO", STEP[0], row(4), STEP[1]),
]
RESULTS = [
    Box("code", "engine.checkpoint.save", "save, and resume exactly", AFTER[0], row(1), AFTER[1]),
    Box("disk", "training checkpoint", "every rank its part", AFTER[0], row(2), AFTER[1]),
    Box("code", "model.save, quant.formats", "codes and scales, in shards", AFTER[0], row(3), AFTER[1]),
    Box("disk", "compressed checkpoint", "what the last forward used", AFTER[0], row(4), AFTER[1]),
    Box("served", "vLLM, SGLang, transformers", "load it as it is", AFTER[0], row(5), AFTER[1]),
    Box("code", "tools.verify.check", "the same logits in transformers?", AFTER[0], row(6), AFTER[1]),
]
BOXES = [*FILES, *PREPARE, *LOOP, *RESULTS]
LOOP_MODULE = "engine.loop"  # named above the frame of every step


def modules() -> list[str]:
    """Dotted names of the modules in the picture."""
    return [LOOP_MODULE, *(name for box in BOXES if box.kind == "code" for name in box.first.split(", "))]


def right(box: Box) -> tuple[int, int]:
    """The middle of a box' right side."""
    return box.x + box.width, box.y + BOX_HEIGHT // 2


def left(box: Box) -> tuple[int, int]:
    """The middle of a box' left side."""
    return box.x, box.y + BOX_HEIGHT // 2


def arrow(*points: tuple[int, int]) -> str:
    """A line through the points, with a head at the last one."""
    path = " L ".join(f"{x} {y}" for x, y in points)
    return f'<path class="arrow" d="M {path}"/>\n'


def down(upper: Box, lower: Box) -> str:
    """From the lower edge of a box to the upper one of the box below it."""
    x = upper.x + upper.width // 2
    return arrow((x, upper.y + BOX_HEIGHT), (x, lower.y - 2))


def across(one: Box, other: Box) -> str:
    """From the right side of a box to the left side of another in the same row."""
    return arrow(right(one), (other.x - 2, left(other)[1]))


def arrows() -> Iterator[str]:
    """Every arrow of the picture."""
    model, ptq, texts = FILES
    build, load, prepare, scales, calibrate, read, loader = PREPARE
    forward, losses, backward, update = LOOP
    checkpoint, saved, save, export, served, verify = RESULTS
    yield across(model, build)
    x = model.x + model.width // 2
    yield arrow((x, model.y + BOX_HEIGHT), (x, left(load)[1]), (load.x - 2, left(load)[1]))
    yield from (down(build, load), down(load, prepare), down(prepare, scales), down(scales, calibrate))
    yield across(ptq, scales)
    yield from (across(texts, read), down(read, loader))
    # The model and the batches enter the loop where it begins, in the forward.
    gutter, (_, y) = SET_UP[0] + SET_UP[1] + 24, left(forward)
    yield arrow(right(calibrate), (gutter, right(calibrate)[1]), (gutter, y), (forward.x - 2, y))
    yield f'<path class="arrow" style="marker-end:none" d="M {loader.x + loader.width} {right(loader)[1]} '
    yield f'L {gutter} {right(loader)[1]} L {gutter} {right(calibrate)[1]}"/>\n'
    yield from (down(forward, losses), down(losses, backward), down(backward, update))
    back = STEP[0] + STEP[1] + 20
    yield arrow(right(update), (back, right(update)[1]), (back, y), (forward.x + forward.width + 2, y))
    frame = STEP[0] + STEP[1] + 36
    yield arrow((frame, left(checkpoint)[1]), (checkpoint.x - 2, left(checkpoint)[1]))
    yield arrow((frame, left(save)[1]), (save.x - 2, left(save)[1]))
    yield from (down(checkpoint, saved), down(save, export), down(export, served))
    side = AFTER[0] + AFTER[1] + 20
    yield arrow(
        right(export), (side, right(export)[1]), (side, right(verify)[1]), (right(verify)[0] + 2, right(verify)[1])
    )


def picture() -> str:
    """The SVG as text."""
    heads = [("On disk", DISK), ("Once, before the first step", SET_UP), ("Afterwards", AFTER)]
    titles = "".join(
        f'<text class="title" x="{x + width // 2}" y="40" text-anchor="middle">{text}</text>\n'
        for text, (x, width) in heads
    )
    top, bottom = row(0) - 4, row(4) + BOX_HEIGHT + 20
    frame = (
        f'<rect class="frame" x="{STEP[0] - 20}" y="{top}" width="{STEP[1] + 56}" height="{bottom - top}" rx="12"/>\n'
        f'<text class="title" x="{STEP[0] + STEP[1] // 2 + 8}" y="40" text-anchor="middle">Every step</text>\n'
        f'<text class="name" x="{STEP[0] + STEP[1] // 2}" y="{row(0) + 26}" text-anchor="middle">{LOOP_MODULE}</text>\n'
        f'<text class="note" x="{STEP[0] + STEP[1] // 2}" y="{row(0) + 47}" text-anchor="middle">'
        "the algorithm; schedules hang on it</text>\n"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        "<title>The way of the data through DeepQAT</title>\n"
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        'orient="auto"><path class="tip" d="M 0 0 L 10 5 L 0 10 z"/></marker></defs>\n'
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="12"/>\n'
        f"{frame}{titles}{''.join(arrows())}{''.join(box.svg() for box in BOXES)}</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)
