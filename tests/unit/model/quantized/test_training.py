"""Training from every native layout: gradients against fp64, and an export of what was trained."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.quantized.quantization_config import is_quantized, source_layout
from model.save.export_model import export_model
from quant import Quantization, TensorSpec
from quant.linear import QuantLinear, weights_changed
from quant.reference import fake_quantize_tokens, tokens_inside
from tests.lib.checkpoints import load_model, load_quantized, quantize
from tests.lib.native import layouts
from tests.unit.quant.oracle import Surrogate, expand, per_scale

LAYOUTS = layouts()
STEPS = 12
CLOSE = 1e-5  # of a gradient's norm: sums of fp32 products, of at most 256 terms


def fake_quantized(x: Tensor, exact: Tensor, scale: Tensor, formed: Tensor, spec: TensorSpec, zero=None) -> Tensor:
    """The surrogate of a tensor, of the fp64 ``exact`` and ``formed``. Values that round to an end of the grid are
    moved inwards by 1e-7 steps, from the kink where fp64 rounding would decide."""
    surrogate = Surrogate(x, scale, spec, zero)
    return surrogate(exact + 1e-7 * expand(scale.double(), x, spec) * surrogate.inwards, formed)


def used_input(layer: QuantLinear, x: Tensor, exact: Tensor) -> Tensor:
    """The input as the layer multiplies it, fp64, straight-through to ``exact``."""
    spec, scale = layer.scheme.activations, layer.input_scale()
    if spec is None:
        return exact
    if not spec.dynamic:
        return fake_quantized(x, exact, scale, scale.double(), spec)
    values, inside = fake_quantize_tokens(x, spec, scale), tokens_inside(x, spec, scale)
    return values.double() + inside * (exact - exact.detach())


def gradients(layer: QuantLinear, x: Tensor, offsets: Tensor | None, grad: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the gradients of a layer's weight, theta and input in fp64 from the surrogates of :mod:`quant.reference`,
    and the sum of the magnitudes of the terms of theta's gradient."""
    spec, scales, shape = layer.scheme.weights, layer.weight_scale(), (-1, layer.out_features, layer.in_features)
    weight = layer.weight.detach().double().view(shape).requires_grad_()
    theta = layer.weight_theta.detach().double().requires_grad_()
    formed = layer.weight_s0.double() * theta.exp()
    exact, x = x.flatten(0, -2).double().requires_grad_(), x.flatten(0, -2)
    rows, ends = used_input(layer, x, exact), [len(x)] if offsets is None else offsets.tolist()
    outputs, of_elements = [], []
    for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        of_expert = (scales, formed, layer.weight_zero)
        if layer.projections:
            of_expert = [None if each is None else each[expert].view(each.shape[1:] or (1,)) for each in of_expert]
        scale, own, zero = of_expert
        plain = weight[expert].detach().float()
        # The rounding of a scale is straight-through.
        each = expand(scale.double() + own - own.detach(), plain, spec)
        each.retain_grad()
        used = fake_quantized(plain, weight[expert], scale, each, spec, zero)
        outputs.append(F.linear(rows[begin:end], used))
        of_elements.append((each, own))
    torch.cat(outputs).backward(grad.flatten(0, -2)[: ends[-1]].double())
    factor = 1 / math.sqrt(layer.weight_numel * spec.qmax)
    sizes = [per_scale((each.grad * each).abs(), spec).sum(-1).view(own.shape) for each, own in of_elements]
    found = {"weight": weight.grad.view(layer.weight_shape), "theta": theta.grad * factor, "input": exact.grad}
    return found, torch.stack(sizes).view(theta.shape) * factor


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    difference, size = float((found.double().view_as(expected) - expected).norm()), float(expected.norm())
    assert difference <= CLOSE * size, (what, difference, size)


def train(model: torch.nn.Module, quantization: Quantization, seen: dict[str, list]) -> list[float]:
    """Take all steps on one batch; the last backward's gradients stay."""
    ids = torch.randint(3, 301, (2, 24))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    losses = []

    def see(name: str, layer: QuantLinear, arguments: tuple, output: Tensor) -> None:
        seen[name] = [*arguments, None][:2]
        output.register_hook(lambda grad: seen[name].append(grad.detach()))

    for step in range(STEPS):
        optimizer.zero_grad()
        hooks = []
        if step == STEPS - 1:
            for name, layer in quantization.layers.items():
                hook = lambda layer, arguments, output, name=name: see(name, layer, arguments, output)  # noqa: E731
                hooks.append(layer.register_forward_hook(hook))
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        if step < STEPS - 1:
            optimizer.step()
            weights_changed(model)
        for hook in hooks:
            hook.remove()
    return losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_after_steps_are_those_of_fp64(tmp_path, name):
    """Every layer's gradients of weight, scales and input equal those in fp64, and the export in the file's format has
    the weights that the forward multiplies."""
    layout = LAYOUTS[name]
    path = layout.write(tmp_path)
    if layout.scheme is None:
        model, quantization, report = load_quantized(path, torch.float32)
        assert report.weights_loaded and not report.weights_measured
    else:
        model = load_model(path, torch.float32)
        quantization = quantize(model, layout.scheme)
    seen: dict[str, list] = {}
    before = {name: layer.weight.detach().clone() for name, layer in quantization.layers.items()}
    losses = train(model, quantization, seen)
    assert losses[-1] < losses[0] - 0.1, losses
    thetas: dict[Tensor, Tensor] = {}
    for each, layer in quantization.layers.items():
        x, offsets, grad = seen[each]
        expected, terms = gradients(layer, x.detach(), offsets, grad)
        assert not torch.equal(before[each], layer.weight), each
        assert_close(layer.weight.grad, expected["weight"], f"{each}.weight")
        of_theta = thetas.setdefault(layer.weight_theta, torch.zeros(2, *terms.shape, dtype=torch.float64))
        of_theta += torch.stack([expected["theta"], terms])  # layers may share it
        alone = x.detach().clone().requires_grad_()
        (of_input,) = torch.autograd.grad(layer(alone, offsets), alone, grad)
        assert_close(of_input.flatten(0, -2), expected["input"], f"{each} input")
    for theta, (expected, terms) in thetas.items():
        # A scale whose terms are all 0 has fp64 rounding errors in their place.
        assert ((theta.grad.double() - expected).abs() <= 10 * CLOSE * terms + CLOSE * terms.max() + 1e-15).all()
    if is_quantized(path):
        written = source_layout(path) or "compressed"
        export_model(model, quantization, path, tmp_path / "again", layout=written)
        _, read, _ = load_quantized(tmp_path / "again", torch.float32)
        for each, layer in quantization.layers.items():
            assert torch.equal(layer.quantized_weight(), read.layers[each].weight), each
