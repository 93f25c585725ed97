"""One weight that is NaN or infinite beside scales that are finite: no way of computing passes over it.

Every scheme is tried in every way that its layers can compute, and a new scheme with them. A step must show it: in the
output, which the loss is made of, or in a gradient, by which the step is left out.
"""

import math
import random
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import quant
from model.zero.quantized_gather import can_gather_quantized, part_gradients_, quantize_part
from quant import SCHEMES, QuantEmbedding, Quantizer, QuantLayer, QuantLinear, Scheme
from quant.adapters import Adapter
from quant.packed_weight import placeholder
from quant.scale import lsq_factor
from tests.lib.scales import fill_scales
from tests.unit.quant.one_linear import quantized_linear

OUT, IN, EXPERTS, TOKENS, RANK = 128, 256, 3, 9, 4
NOT_FINITE = (math.nan, math.inf, -math.inf)
Run = Callable[[], list[Tensor]]


def layer_of(scheme: Scheme, *, learns: bool, stack: bool = False, adapter: bool = False, **how: object) -> QuantLinear:
    """A layer with finite scales of its weights; no input is clipped."""
    spec = scheme.stored_input
    largest = 1.0 if spec is None else 448.0 if spec.has_global_scale else 6 / spec.qmax
    how |= {"learn_weight_scale": learns, "learn_input_scale": learns and scheme.learns_input}
    layer = quantized_linear(scheme, OUT, IN, experts=EXPERTS if stack else 0, largest=largest, **how)
    if adapter:
        shape = (EXPERTS,) if stack else ()
        pair = torch.randn(*shape, RANK, IN).div(16), torch.randn(*shape, OUT, RANK).div(16)
        layer.weight.requires_grad_(False)
        layer.attach_adapter(Adapter(*(nn.Parameter(one.bfloat16()) for one in pair), 0.5))
    return layer


def run_of(layer: nn.Module, compute: Callable[[Tensor], Tensor]) -> Run:
    """Make a step of the layer that returns its output and gradients."""
    x = torch.randn(TOKENS, IN).bfloat16()

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        output = compute(leaf)
        output.backward(torch.randn_like(output))
        return [output.detach(), *(one.grad for one in (*layer.parameters(), leaf) if one.grad is not None)]

    return run


def ways(scheme: Scheme, learns: bool) -> Iterator[tuple[str, QuantLayer, Run, dict[str, Tensor]]]:
    """Every way in which a layer of that scheme may compute: the layer, a step, and what its weight is made of."""
    gemms = (False, True) if scheme.has_fp8_gemm else (False,)
    for fp8_gemm, stack, adapter, kept in product(gemms, *[(False, True)] * 3):
        layer = layer_of(scheme, learns=learns, stack=stack, adapter=adapter, fp8_gemm=fp8_gemm)
        layer.keeps_weight_codes = layer.dynamic_codes = kept
        offsets = (torch.tensor([3, 3 + TOKENS // 3, TOKENS], dtype=torch.int32),) if stack else ()
        parts = {UNSEEN: layer.weight, "A": layer.lora_a, "B": layer.lora_b} if adapter else {"weight": layer.weight}
        run = run_of(layer, lambda x, layer=layer, offsets=offsets: layer(x, *offsets))
        yield f"{fp8_gemm=}, {stack=}, {kept=}", layer, run, parts
    layer = layer_of(scheme, learns=learns)
    parts = {"weight": layer.weight}
    yield "compiled", layer, run_of(layer, torch.compile(layer, backend="aot_eager")), parts
    yield "used by lm_head", layer, run_of(layer, lambda x: layer.used_weight()), parts
    if can_gather_quantized(layer):
        whole = layer.weight.detach().clone()
        yield "gathered as codes", layer, gathered(layer, whole), {"weight": whole}
    if QuantEmbedding.takes(scheme):
        model = nn.Sequential(nn.Embedding(OUT, IN), nn.Linear(IN, OUT)).bfloat16()
        options = {"learn_weight_scale": learns, "learn_input_scale": False, "exempt": ()}
        fill_scales(quant.replace_layers(model, scheme, named={"0": scheme}, **options))
        run = run_of(model[0], lambda x: model[0](torch.arange(OUT)))
        yield "embedding", model[0], run, {"weight": model[0].weight}


def gathered(layer: QuantLinear, whole: Tensor) -> Run:
    """As stage 3 does: codes stand in for the weight, and the rank that holds it completes the gradients."""
    forward = run_of(layer, layer)

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


@pytest.mark.parametrize(
    ("name", "learns"),
    [
        *((name, index % 2 == 0) for index, name in enumerate(SCHEMES)),
        *(pytest.param(name, index % 2 == 1, marks=pytest.mark.full) for index, name in enumerate(SCHEMES)),
    ],
)
def test_a_step_shows_it(name, learns, seed):
    for way, layer, run, parts in ways(SCHEMES[name], learns):
        assert all(one.isfinite().all() for one in run()), way
        for (what, tensor), value in product(parts.items(), NOT_FINITE):
            element = tensor.data.view(-1)[random.randrange(tensor.numel())]
            before = element.item()
            element.fill_(value)
            layer.zero_grad()
            layer.forget_codes()
            seen = not all(one.isfinite().all() for one in run())
            element.fill_(before)
            told = what != UNSEEN or (math.isnan(value) and "kept=False" in way)
            assert seen or not told, f"{value} in {what} goes unseen: {way}"
        layer.zero_grad()
        layer.forget_codes()
