"""The table of presets in the README."""

import torch
from torch import nn

from engine.verify.reader import not_loaded
from quant.export import packed_shapes
from quant.quantization import Quantization
from quant.spec import PRESETS
from tests.root import ROOT

README = ROOT / "README.md"
SIZE = 4096


def rows() -> dict[str, list[str]]:
    """Cells of the table of presets, by preset."""
    lines = README.read_text(encoding="utf-8").split("## What works")[1].split("\n\n")[1].splitlines()
    assert lines[0].startswith("| preset | weights | inputs | bits per weight | transformers |")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_preset_has_its_row():
    assert list(rows()) == list(PRESETS)


def test_bits_per_weight_are_those_of_the_files():
    for name, preset in PRESETS.items():
        bits = 16.0
        if preset.linear is not None:
            shapes = packed_shapes(SIZE, SIZE, preset.linear, torch.bfloat16)
            count = sum(
                torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
                for suffix, (dtype, shape) in shapes.items()
                if suffix not in ("input_scale", "weight_shape")
            )
            bits = 8 * count / SIZE**2
        assert rows()[name][2] == f"{bits:.3f}", name
    assert float(rows()["w4a16_g128"][2]) <= 4.2


def test_the_table_says_whose_experts_transformers_does_not_load():
    """As engine/verify/reader.py does, which the comparison with transformers proves."""

    class Layer:
        def __init__(self, scheme):
            self.scheme = scheme
            self.weight_zero = 0.0 if scheme.weights.has_zero_points else None

    for name, preset in PRESETS.items():
        layers = {} if preset.linear is None else {"model.layers.0.mlp.experts.0.up_proj": Layer(preset.linear)}
        expected = "yes" if not_loaded(nn.Module(), Quantization(layers, [])) is None else "dense"
        assert rows()[name][3] == expected, name
