"""The tables of schemes in README and docs against the presets, and against what their files weigh."""

import re

import torch
from torch import nn

from model.save import not_loaded
from quant import PRESETS, Quantization
from quant.formats.compressed_tensors import packed_shapes
from tests.root import ROOT

SIZE = 4096


def rows() -> dict[str, list[str]]:
    """Cells of the table of presets, by preset."""
    text = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
    lines = text.split("## The presets")[1].split("\n\n")[1].splitlines()
    assert lines[0].startswith("| preset | weights | inputs | bits per weight | transformers |")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_preset_has_its_row():
    assert list(rows()) == list(PRESETS)


def test_bits_per_weight_are_those_of_the_files():
    for preset_name, preset in PRESETS.items():
        bits = 16.0
        if preset.linear is not None:
            shapes = packed_shapes(SIZE, SIZE, preset.linear, torch.bfloat16)
            count = sum(
                torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
                for suffix, (dtype, shape) in shapes.items()
                if suffix not in ("input_scale", "weight_shape")
            )
            bits = 8 * count / SIZE**2
        assert rows()[preset_name][2] == f"{bits:.3f}", preset_name
    assert float(rows()["w4a16_g128"][2]) <= 4.2


def test_the_table_says_whose_experts_transformers_does_not_load():
    """As tools/verify/reader.py does, which the comparison with transformers proves."""

    class Layer:
        def __init__(self, scheme):
            self.scheme = scheme
            self.weight_zero = 0.0 if scheme.weights.has_zero_points else None

    for preset_name, preset in PRESETS.items():
        layers = {} if preset.linear is None else {"model.layers.0.mlp.experts.0.up_proj": Layer(preset.linear)}
        expected = "yes" if not_loaded(nn.Module(), Quantization(layers, [])) is None else "dense"
        assert rows()[preset_name][3] == expected, preset_name


def test_the_readme_names_every_preset_once():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Schemes")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(PRESETS)
