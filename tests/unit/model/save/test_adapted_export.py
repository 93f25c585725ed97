"""Merged adapters with every scheme that there is: the export holds the codes that the forward multiplied, and
gradients are those of the sum. A scheme that is added is tested here without being named."""

import copy
import random

import pytest
import torch
from torch import nn

from model.build import build_model
from model.checkpoint.load import load_weights
from model.ranks import RankError
from model.save import export_model
from model.scales import renew_weight_scales, write_scales
from quant import SCHEMES, QuantLinear, prepare, weights_changed
from quant.linear import linears_of
from quant.lora import Adapter
from tests.lib.thinned import thinned
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed

KINDS = ("qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints whose layers have room for every group and block."""
    directory = tmp_path_factory.mktemp("sources")
    return {kind: tiny_checkpoint(directory / kind, kind, wide=True, layers=1) for kind in KINDS}


def adapted(source, scheme, dtype, *, adapters=True):
    """A quantized model whose layers have adapters with values, and whose scales are those of the sums."""
    engine = {"bf16": {"enabled": dtype == torch.bfloat16}}
    model = build_model(source, engine, dtype=dtype, device=torch.device("cpu"))
    load_weights(model, source, progress=False)
    quantization = prepare(model, SCHEMES[scheme], learn_weight_scale=True, learn_input_scale=False)
    model.requires_grad_(False)
    for name, layer in quantization.layers.items():
        if adapters and isinstance(layer, QuantLinear):
            attach(layer, name)
        if layer.weight_theta is not None:
            layer.weight_theta.requires_grad_(True)
    renew_weight_scales(quantization)
    write_scales(quantization.input_groups, {group.owner: torch.tensor([0.02]) for group in quantization.input_groups})
    weights_changed(model)
    return model, quantization


def attach(layer, name):
    """An adapter that moves the weight by about half of its size."""
    *stack, out, in_ = layer.weight_shape
    rank, size = 3, float(layer.weight.float().std())
    draw = torch.Generator().manual_seed(len(name))
    lora_a, lora_b = (torch.randn(*stack, *one, generator=draw) for one in ((rank, in_), (out, rank)))
    lora_b *= size / 4
    pair = (nn.Parameter(one.to(layer.weight.dtype)) for one in (lora_a, lora_b))
    layer.attach_adapter(Adapter(*pair, 0.75))


WAYS = {"fp8_static": "fp8_gemm", "nvfp4_w4a4": "dynamic_codes", "mxfp4_mxfp8": "dynamic_codes"}


def multiplied(quantization):
    """What each Linear multiplies with, and the scale of it, as the forward says: its output for the unit matrix."""
    found = {}
    for name, layer in quantization.layers.items():
        quantizes, layer.input_fake_quant = layer.input_fake_quant, False
        codes, layer.fp8_gemm = layer.fp8_gemm, False
        experts, units = layer.num_experts, torch.eye(layer.in_features, dtype=layer.weight.dtype)
        ends = torch.arange(1, experts + 1, dtype=torch.int32) * layer.in_features if experts else None
        with torch.no_grad():
            columns = layer(units.repeat(experts or 1, 1), ends)
        layer.input_fake_quant, layer.fp8_gemm = quantizes, codes
        whole = columns.view(*layer.weight_shape[:-2], layer.in_features, -1).transpose(-2, -1)
        for part in linears_of(name, layer):
            scale = part.scale(layer.weight_scale(), layer.scheme.weights)
            found[part.name] = part.weight(whole).clone(), scale.clone()
    return found


def written(model, quantization, source, out):
    """The export as it is read, or why there is none."""
    try:
        export_model(model, quantization, source, out)
        return load_compressed(out, dtype=torch.bfloat16)[1], ""
    except (RankError, ValueError) as error:
        return None, str(error)


@pytest.mark.parametrize("scheme, kind", thinned((scheme, kind) for scheme in SCHEMES for kind in KINDS))
def test_the_export_is_what_the_forward_multiplied(sources, tmp_path, scheme, kind):
    """Every element, of stacked experts too. What cannot be exported with adapters cannot be without."""
    source = sources[kind]
    model, quantization = adapted(source, scheme, torch.bfloat16)
    read, why = written(model, quantization, source, tmp_path / "export")
    if read is None:
        plain = adapted(source, scheme, torch.bfloat16, adapters=False)
        assert written(*plain, source, tmp_path / "plain") == (None, why)
        return
    served, trained = multiplied(read), multiplied(quantization)
    assert served.keys() == trained.keys()
    for name, (weight, scale) in trained.items():
        assert torch.equal(served[name][0], weight), name
        assert torch.equal(served[name][1], scale), name
    base = multiplied(adapted(source, scheme, torch.bfloat16, adapters=False)[1])
    assert not any(torch.equal(weight, base[name][0]) for name, (weight, _) in trained.items())


@pytest.mark.parametrize("learns", (False, True), ids=("fixed", "learned"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_sum(sources, scheme, learns, seed):
    """Against the layer that has the sum as its weight, whose gradients are tested for themselves, in fp32; and outputs
    bit for bit. Of a Linear and of a stack of experts."""
    for kind in KINDS:
        _, quantization = adapted(sources[kind], scheme, torch.float32)
        name = next(one for one in quantization.layers if one.endswith(("o_proj", "gate_up_proj")[kind != "qwen3"]))
        layer = quantization.layers[name]
        if layer.weight_theta is not None:
            layer.weight_theta.requires_grad_(learns)
        plain = copy.deepcopy(layer)
        plain.adapter = None
        plain.weight = nn.Parameter(layer.merged_weight())
        experts, rows = layer.num_experts, 12
        ends = torch.tensor([*sorted(random.choices(range(rows + 1), k=experts - 1)), rows]) if experts else None
        ends = None if ends is None else ends.int()
        x = torch.randn(rows, layer.in_features, requires_grad=True)
        direction = torch.randn(rows, layer.out_features)
        outputs, gradients = [], []
        for one, trained in ((layer, ("lora_a", "lora_b")), (plain, ("weight",))):
            theta = [one.weight_theta] if learns and one.weight_theta is not None else []
            outputs.append(one(x, ends))
            wanted = [x, *theta, *(getattr(one, key) for key in trained)]
            gradients.append(torch.autograd.grad(outputs[-1], wanted, direction))
        assert torch.equal(*outputs)
        (*mine, of_a, of_b), (*expected, of_sum) = gradients
        for own, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5 * float(1e-9 + other.abs().max()))
        a, b, whole = layer.lora_a.double(), layer.lora_b.double(), of_sum.double()
        for own, other in ((of_a, 0.75 * b.mT @ whole), (of_b, 0.75 * whole @ a.mT)):
            torch.testing.assert_close(own.double(), other, rtol=1e-3, atol=1e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize("scheme", WAYS)
def test_other_ways_to_multiply_have_the_gradients_of_the_sum(sources, scheme, seed):
    """Products of codes, and codes that are kept of inputs: bit for bit the outputs of the layer that has the sum as
    its weight, and gradients within what bf16 rounds."""
    for kind in KINDS:
        _, quantization = adapted(sources[kind], scheme, torch.bfloat16)
        name = next(one for one in quantization.layers if one.endswith(("o_proj", "gate_up_proj")[kind != "qwen3"]))
        layer = quantization.layers[name]
        setattr(layer, WAYS[scheme], True)
        plain = copy.deepcopy(layer)
        plain.adapter, plain.weight = None, nn.Parameter(layer.merged_weight())
        ends = torch.tensor([3, 3, 7, 11, 16], dtype=torch.int32) if layer.num_experts else None
        x = torch.randn(16, layer.in_features).bfloat16().requires_grad_()
        direction = torch.randn(16, layer.out_features).bfloat16()
        outputs = layer(x, ends), plain(x, ends)
        assert torch.equal(*outputs)
        of_x, of_a, of_b = torch.autograd.grad(outputs[0], [x, layer.lora_a, layer.lora_b], direction)
        expected_x, of_sum = torch.autograd.grad(outputs[1], [x, plain.weight], direction)
        a, b, whole = layer.lora_a.double(), layer.lora_b.double(), of_sum.double()
        for own, other in ((of_x, expected_x), (of_a, 0.75 * b.mT @ whole), (of_b, 0.75 * whole @ a.mT)):
            assert (own.double() - other).norm() <= 0.01 * other.double().norm()
