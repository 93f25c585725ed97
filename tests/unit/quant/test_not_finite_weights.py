"""One weight that is NaN or infinite beside scales that are finite: no way of computing passes over it.

Every scheme is tried in every way that its layers can compute, and a new scheme with them. A step must show it: in the
output, which the loss is made of, or in a gradient, by which the step is left out.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from model.zero.quantized_gather import can_gather_quantized, part_gradients_, quantize_part
from quant import SCHEMES, QuantEmbedding, Quantizer, QuantLayer, QuantLinear, Scheme
from quant.linear import StackedLinear
from quant.lora import Adapter
from quant.packed_weight import placeholder
from quant.scale import lsq_factor

OUT, IN, EXPERTS, TOKENS, RANK = 128, 256, 3, 9, 4
NOT_FINITE = (math.nan, math.inf, -math.inf)


@dataclass
class Case:
    """A layer in some way of computing.

    Attributes:
        layer: the layer.
        run: what a step makes of it: its output, and gradients.
        parts: what its weight is made of, by name.
    """

    layer: QuantLayer
    run: Callable[[], list[Tensor]]
    parts: dict[str, Tensor]


def layer_of(scheme: Scheme, *, learns: bool, stack: bool = False, adapter: bool = False, **how: object) -> QuantLinear:
    """A layer with finite scales of its weights; no input is clipped."""
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False)).bfloat16()
    if stack:
        weight = nn.Parameter(torch.randn(EXPERTS, OUT, IN).div(16).bfloat16())
        model[0] = StackedLinear(weight, (EXPERTS, OUT, IN), ("up_proj",))
    of_input = learns and scheme.learns_input
    quantization = quant.prepare(model, scheme, learn_weight_scale=learns, learn_input_scale=of_input, exempt=(), **how)
    layer = model[0]
    with torch.no_grad():
        scales_of(layer)
        for group in quantization.input_groups:
            group.s0.fill_(448.0 if group.spec.has_global_scale else 6 / group.spec.qmax)
    if adapter:
        shape = (EXPERTS,) if stack else ()
        pair = torch.randn(*shape, RANK, IN).div(16), torch.randn(*shape, OUT, RANK).div(16)
        layer.weight.requires_grad_(False)
        layer.attach_adapter(Adapter(*(nn.Parameter(one.bfloat16()) for one in pair), 0.5))
    return layer


def scales_of(layer: QuantLayer) -> None:
    """Fill the scales of a weight, as its values are."""
    spec, weight = layer.scheme.weights, layer.weight.detach()
    stats = quant.partial_stats(weight.flatten(), 0, layer.weight_shape, spec)
    layer.weight_s0.copy_(quant.scales_from_stats(stats, spec))
    if layer.weight_zero is not None:
        layer.weight_zero.copy_(quant.zero_points_from_stats(stats, spec))
    if layer.weight_global is not None:
        layer.weight_global.fill_(448 * 6 / float(weight.abs().max()))


def gradients(layer: QuantLayer, *inputs: Tensor) -> list[Tensor]:
    return [one.grad for one in (*layer.parameters(), *inputs) if one.grad is not None]


def forward_of(layer: nn.Module, stack: bool) -> Callable[[], list[Tensor]]:
    x, grad = torch.randn(TOKENS, IN).bfloat16(), torch.randn(TOKENS, OUT).bfloat16()
    offsets = (torch.tensor([3, 3 + TOKENS // 3, TOKENS], dtype=torch.int32),) if stack else ()

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        output = layer(leaf, *offsets)
        output.backward(grad)
        return [output.detach(), *gradients(layer, leaf)]

    return run


def ways(scheme: Scheme, learns: bool) -> Iterator[tuple[str, Case]]:
    """Every way in which a layer of that scheme may compute."""
    gemms: list[dict[str, Any]] = [{}]
    if scheme.has_fp8_gemm:
        gemms.append({"fp8_gemm": True})
    for gemm, stack, adapter, kept in product(gemms, (False, True), (False, True), (False, True)):
        layer = layer_of(scheme, learns=learns, stack=stack, adapter=adapter, **gemm)
        layer.keeps_weight_codes = layer.dynamic_codes = kept
        parts = {UNSEEN: layer.weight, "A": layer.lora_a, "B": layer.lora_b} if adapter else {"weight": layer.weight}
        yield f"{gemm}, {stack=}, {kept=}", Case(layer, forward_of(layer, stack), parts)
    layer = layer_of(scheme, learns=learns)
    yield (
        "compiled",
        Case(layer, forward_of(torch.compile(layer, backend="aot_eager"), False), {"weight": layer.weight}),
    )
    layer = layer_of(scheme, learns=learns)
    yield "used by lm_head", Case(layer, used(layer), {"weight": layer.weight})
    if QuantEmbedding.takes(scheme):
        model = nn.Sequential(nn.Embedding(OUT, IN), nn.Linear(IN, OUT)).bfloat16()
        quant.prepare(model, scheme, named={"0": scheme}, exempt=(), learn_weight_scale=learns, learn_input_scale=False)
        with torch.no_grad():
            scales_of(model[0])
        yield "embedding", Case(model[0], looked_up(model[0]), {"weight": model[0].weight})
    layer = layer_of(scheme, learns=learns)
    if can_gather_quantized(layer):
        weight = layer.weight.detach().clone()
        yield "gathered as codes", Case(layer, gathered(layer, weight), {"weight": weight})


def used(layer: QuantLinear) -> Callable[[], list[Tensor]]:
    grad = torch.randn(OUT, IN).bfloat16()

    def run() -> list[Tensor]:
        weight = layer.used_weight()
        weight.backward(grad)
        return [weight.detach(), *gradients(layer)]

    return run


def looked_up(layer: QuantEmbedding) -> Callable[[], list[Tensor]]:
    grad = torch.randn(OUT, IN).bfloat16()

    def run() -> list[Tensor]:
        rows = layer(torch.arange(OUT))
        rows.backward(grad)
        return [rows.detach(), *gradients(layer)]

    return run


def gathered(layer: QuantLinear, whole: Tensor) -> Callable[[], list[Tensor]]:
    """As stage 3 does: codes stand in for the weight, and the rank that holds it completes the gradients."""
    forward = forward_of(layer, stack=False)

    def run() -> list[Tensor]:
        quantizer = Quantizer(layer.scale_of_weight, layer.scheme.weights, layer.weight.dtype)
        with torch.no_grad():
            codes = quantize_part(whole.flatten(), 0, whole.numel(), quantizer)
        layer.weight.data = placeholder(codes, layer.weight_shape, whole.dtype)
        output, *_ = forward()
        gradient = layer.weight.grad.float().flatten()
        factor = lsq_factor(layer.weight_numel, layer.scheme.weights)
        with torch.no_grad():
            share = part_gradients_(gradient, whole.flatten(), 0, whole.numel(), quantizer, factor=factor)
        return [output, gradient, *([] if share is None else [share])]

    return run


# What no step shows on a CPU, and what is looked at before anything is written
# (tests/unit/model/checkpoint/test_load.py): an infinity in what an adapter is added to, which does not train; and NaN,
# too, where the codes of their sum are kept. No step writes it (tests/distributed/engine/test_adapters.py), so that it
# stays what it was when it was looked at.
UNSEEN = "base"


@pytest.mark.parametrize("learns", (False, True))
@pytest.mark.parametrize("name", SCHEMES)
def test_a_step_shows_it(name, learns, seed):
    for way, case in ways(SCHEMES[name], learns):
        assert all(one.isfinite().all() for one in case.run()), way
        for what, tensor in case.parts.items():
            for value in NOT_FINITE:
                element = tensor.data.view(-1)[random.randrange(tensor.numel())]
                before = element.item()
                element.fill_(value)
                case.layer.zero_grad()
                case.layer.forget_codes()
                seen = not all(one.isfinite().all() for one in case.run())
                element.fill_(before)
                told = what != UNSEEN or (math.isnan(value) and "kept=False" in way)
                assert seen or not told, f"{value} in {what} goes unseen: {way}"
        case.layer.zero_grad()
