"""Adapters merged into a base that is packed (QLoRA), in every native layout: back on the grid of the files."""

import pytest
import torch
from torch import Tensor, nn

from model.quantized.quantization_config import source_layout
from model.ranks import RankError
from model.save.export_model import export_model
from quant import Quantization
from quant.adapters import Adapter
from quant.reference import fake_quant
from tests.lib.checkpoints import hold_packed, load_quantized, read_tensors, same_bits
from tests.lib.native import layouts

LAYOUTS = {name: layout for name, layout in layouts().items() if layout.scheme is None}
RANK, SCALING = 4, 0.5


def attach(quantization: Quantization) -> None:
    """An adapter for each layer, with B of 0."""
    for layer in quantization.layers.values():
        *stack, out, columns = layer.weight_shape
        dtype = layer.weight.dtype
        a = nn.Parameter((torch.rand(*stack, RANK, columns) - 0.5).to(dtype) / columns**0.5)
        layer.attach_adapter(Adapter(a, nn.Parameter(torch.zeros(*stack, out, RANK, dtype=dtype)), SCALING))


def train(quantization: Quantization, rows: dict[str, tuple[Tensor, Tensor | None]]) -> dict[str, list[Tensor]]:
    """Outputs, and gradients of A and B, of each layer alone."""
    found = {}
    for name, layer in quantization.layers.items():
        output = layer(*rows[name])
        output.float().square().sum().backward()
        found[name] = [output.detach(), layer.lora_a.grad, layer.lora_b.grad]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_sum_is_quantized_to_the_files_grid(tmp_path, name):
    """With B of 0 an export has the codes and scales of the source. Then all bits are those of a base in weights; and
    the export's weights are the nearest codes, by the file's scales, of what the file decodes to plus B A."""
    path = LAYOUTS[name].write(tmp_path)
    layout, dtype = source_layout(path) or "compressed", torch.bfloat16
    try:
        model, packed, _ = load_quantized(path, dtype, learn=False, hold=hold_packed(path))
    except RankError as error:
        assert "set model.dtype to float32" in str(error)
        dtype = torch.float32
        model, packed, _ = load_quantized(path, dtype, learn=False, hold=hold_packed(path))
    _, plain, _ = load_quantized(path, dtype, learn=False)
    attach(packed)
    export_model(model, packed, path, tmp_path / "first", layout=layout)
    if source_layout(path) is not None:
        source, first = read_tensors(path), read_tensors(tmp_path / "first")
        assert source.keys() == first.keys()
        names = [key for key in source if "_proj" in key and not key.endswith("bias")]
        assert names and all(same_bits(source[key].to(first[key].dtype), first[key]) for key in names)

    rows, sums = {}, {}
    for each, layer in packed.layers.items():
        own = plain.layers[each]
        assert layer.held is not None and layer.weight.nbytes < own.weight.nbytes
        with torch.no_grad():
            layer.lora_b.normal_(std=3)
        own.attach_adapter(
            Adapter(*(nn.Parameter(one.detach().clone()) for one in (layer.lora_a, layer.lora_b)), SCALING)
        )
        many = layer.num_experts
        x = torch.randn(7, layer.in_features).to(dtype).requires_grad_()
        rows[each] = x, torch.arange(8 - many, 8, dtype=torch.int32).clamp(min=0) if many else None
        product = layer.lora_b.detach().double() @ layer.lora_a.detach().double() * SCALING
        sums[each] = (own.weight.detach().double() + product).to(dtype)
    found, expected = (train(one, rows) for one in (packed, plain))
    for each in packed.layers:
        assert all(torch.equal(*pair) for pair in zip(found[each], expected[each], strict=True)), each
    for one in (packed, plain):
        one.set_fake_quant(weights=False, activations=True)
    for each, layer in packed.layers.items():
        with torch.no_grad():
            assert torch.equal(layer(*rows[each]), plain.layers[each](*rows[each])), each
    packed.set_fake_quant(weights=True, activations=True)

    export_model(model, packed, path, tmp_path / "again", layout=layout)
    _, again, _ = load_quantized(tmp_path / "again", dtype, learn=False)
    changed = 0
    for each, layer in packed.layers.items():
        spec, scale, zero, whole = layer.scheme.weights, layer.weight_scale(), layer.weight_zero, sums[each]
        if layer.projections:
            parts = zip(whole, scale, [None] * len(whole) if zero is None else zero, strict=True)
            nearest = torch.stack([fake_quant(one, s if s.dim() else s.view(1), spec, z) for one, s, z in parts])
        else:
            nearest = fake_quant(whole, scale, spec, zero)
        assert torch.equal(again.layers[each].weight, nearest), each
        assert torch.equal(again.layers[each].weight_scale(), scale), each
        changed += int((nearest != plain.layers[each].weight).sum())
    assert changed
