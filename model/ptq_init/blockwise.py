"""Train weights and scales of one decoder layer to reproduce its unquantized outputs: block-wise reconstruction (BRECQ,
Li et al. 2021, arXiv 2102.05426), of all weights at once (EfficientQAT's first phase, Chen et al. 2024, arXiv
2407.11062).

GPTQ compensates errors within each Linear. Training a whole decoder layer also compensates errors between its Linears,
and errors of earlier layers. The weights are rounded in every forward, as in training, and trained by Adam on fp32
masters of each rank's own elements; gradients are summed over ranks. Norms, routers and biases are frozen. The loss of
a token is ``|y - t|^2 / |t|^2``, with ``y`` the quantized layer's output for the quantized model's hidden states, and
``t`` the original layer's output for the original model's hidden states. It is relative to the token's size because a
norm follows, and so that few tokens with huge states do not dominate.

Afterwards each weight returns to its original value if this is rounded to the trained code; otherwise it gets the
code's value, as after GPTQ (:mod:`quant.scale`). Learning rates are in units of the scale, as in AutoRound (Cheng et
al. 2023, arXiv 2309.05516), so that they fit any model.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.ptq_init.layer_samples import LayerSamples
from model.ranks import reduce_over_ranks
from model.scales.in_place import write_scales
from model.zero import forget_secondary_copies, gathered, local_data, local_range
from quant import Quantization, Quantizer, QuantLayer, kernels
from quant.linear import linears_of
from quant.scale import have_codes, snap_to_codes

STEPS = 200
WEIGHT_RATE = 0.02  # of weights, in scales, decaying to 0
SCALE_RATE = 1e-3  # of the logarithm of a scale, decaying to 0
BETAS = (0.9, 0.95)


@dataclass
class LayerErrors:
    """Squared errors of decoder layers' outputs relative to the squared outputs, per token: sums over layers and all
    ranks' tokens.

    Attributes:
        before, after: errors before and after the training of each layer.
        tokens: number of tokens, counted once per layer.
        kept: number of layers that were restored, as training did not help.
    """

    before: float = 0.0
    after: float = 0.0
    tokens: float = 0.0
    kept: int = 0

    def text(self) -> str:
        """Format the mean errors per token for the log."""
        tokens = max(self.tokens, 1.0)
        kept = f", {self.kept} of them left as they were" if self.kept else ""
        return f"of decoder layers {self.after / tokens:.3g}, before they were tuned {self.before / tokens:.3g}{kept}"


def own_weights(quantization: Quantization, name: str) -> dict[nn.Parameter, Tensor]:
    """Copy this rank's elements, flat, of each quantized weight in the decoder layer called ``name``."""
    weights = [layer.weight for one, layer in quantization.layers.items() if one.startswith(f"{name}.")]
    return {weight: local_data(weight).clone() for weight in weights}


def tune(
    quantization: Quantization,
    block: nn.Module,
    name: str,
    samples: LayerSamples,
    targets: Sequence[Tensor],
    originals: Mapping[nn.Parameter, Tensor],
    rows: int,
    *,
    errors: LayerErrors,
    progress: Callable[[], object],
) -> None:
    """Train the quantized weights of a decoder layer, and their scales if these are learned; a collective. If the
    summed error of the samples does not decrease, weights and scales are restored. Trained scales of integer formats
    are written to s0, with theta 0; those of float formats keep their s0 and the trained theta.

    Args:
        quantization: the model's quantized layers. Those of this decoder layer must be fake-quantized, and the decoder
            layers before it must be finished.
        block, name: the decoder layer.
        samples: inputs of the decoder layer, from the quantized layers before it.
        targets: output of the original model's layer for each batch of samples, ``[n, T, H]``.
        originals: result of :func:`own_weights` before any codes were chosen.
        rows: samples per step and rank, rounded up to whole batches.
        errors: the errors of this layer are added to it.
        progress: called after each step.
    """
    layers = {one: layer for one, layer in quantization.layers.items() if one.startswith(f"{name}.")}
    with gathered(block.parameters()):
        before, tokens = _error(block, name, samples, targets)
        tuned = _Tuned(layers)
    order = _Order(samples.sizes)
    for step in range(STEPS):
        with gathered(block.parameters()):
            tuned.show_scales()
            gradients = _gradients(block, name, samples, targets, order.take(rows), tuned.parameters)
        tuned.step(gradients, 1 - step / STEPS)
        forget_secondary_copies(block)
        progress()
    with gathered(block.parameters()):
        tuned.show_scales()
        after, _ = _error(block, name, samples, targets)
    if after < before:
        tuned.settle(quantization, originals)
    else:  # NaN is not
        tuned.put_back()
    forget_secondary_copies(block)
    errors.before += before
    errors.after += min(before, after)
    errors.tokens += tokens
    errors.kept += not after < before


class _Order:
    """Endless sequence of batch indices: epochs, each in a new random order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._left: list[int] = []
        self._sizes = sizes
        self._random = random.Random(0)

    def take(self, rows: int) -> list[int]:
        """Take the next batches of the sequence until they have at least ``rows`` samples (or as many as one epoch, if
        that has fewer), and return their indices."""
        taken: list[int] = []
        wanted = min(rows, sum(self._sizes))
        while wanted > 0:
            if not self._left:
                self._left = self._random.sample(range(len(self._sizes)), len(self._sizes))
            taken.append(self._left.pop(0))
            wanted -= self._sizes[taken[-1]]
        return taken


class _Tuned:
    """Trained parameters of a decoder layer (weights, then thetas), which must be gathered on construction."""

    def __init__(self, layers: dict[str, QuantLayer]) -> None:
        self._layers = layers
        self._weights = list(dict.fromkeys(layer.weight for layer in layers.values()))
        thetas = dict.fromkeys(layer.weight_theta for layer in layers.values())
        self._thetas = [theta for theta in thetas if theta is not None and theta.requires_grad]
        self.parameters = [*self._weights, *self._thetas]
        self._trained = [parameter.requires_grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self._own = [slice(*local_range(weight)) for weight in self._weights]
        self._first = [
            weight.detach().flatten()[own].clone() for weight, own in zip(self._weights, self._own, strict=True)
        ]
        self._masters = [weight.float() for weight in self._first]
        self._first_thetas = [theta.detach().clone() for theta in self._thetas]
        self._values = [theta.float() for theta in self._first_thetas]
        rates = {layer.weight: WEIGHT_RATE * float(_effective(layer).abs().mean()) for layer in layers.values()}
        self._rates = [rates[weight] for weight in self._weights] + [SCALE_RATE] * len(self._values)
        masters = zip([*self._masters, *self._values], self._rates, strict=True)
        self._adam = torch.optim.Adam([{"params": [one], "lr": rate} for one, rate in masters], betas=BETAS)

    def show_scales(self) -> None:
        """Copy the fp32 masters of the thetas into the gathered Parameters: each gather fills these with the values
        from before training."""
        for theta, value in zip(self._thetas, self._values, strict=True):
            theta.detach().copy_(value)
        self._forget()

    def step(self, gradients: Sequence[Tensor], share: float) -> None:
        """Run one Adam step with ``gradients``, whole and summed over ranks, at ``share`` (0 to 1) of the learning
        rates; call it outside of a gather."""
        of_weights, of_scales = gradients[: len(self._weights)], gradients[len(self._weights) :]
        for master, gradient, own in zip(self._masters, of_weights, self._own, strict=True):
            master.grad = gradient.flatten()[own].to(master.device)
        for value, gradient in zip(self._values, of_scales, strict=True):
            value.grad = gradient
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._adam.step()
        self._write(self._masters)

    def settle(self, quantization: Quantization, originals: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the final values: each weight returns to its element of ``originals`` if that rounds to the trained
        code, otherwise it gets the code's value; scales of integer formats are written to s0."""
        integers = {one: layer for one, layer in self._layers.items() if layer.scheme.weights.dtype == "int"}
        read = [parameter for layer in self._layers.values() for parameter in layer.parameters(recurse=False)]
        with gathered(dict.fromkeys(read)):
            self.show_scales()
            scales = {one: _with_zero(layer) for one, layer in integers.items()}
            inside = {
                layer.weight: _snapped(one, layer, originals[layer.weight]) for one, layer in self._layers.items()
            }
        folded = {id(layer.weight_theta) for layer in integers.values()}
        pairs = zip(self._thetas, self._values, strict=True)
        thetas = [torch.zeros_like(value) if id(theta) in folded else value for theta, value in pairs]
        self._end([inside[weight] for weight in self._weights], thetas)
        write_scales(quantization.weight_groups, scales)
        self._forget()

    def put_back(self) -> None:
        """Restore weights and scales from before training."""
        self._end(self._first, self._first_thetas)

    def _write(self, weights: Sequence[Tensor]) -> None:
        for weight, values in zip(self._weights, weights, strict=True):
            local_data(weight).copy_(values)

    def _end(self, weights: Sequence[Tensor], thetas: Sequence[Tensor]) -> None:
        """Write the final values, restore ``requires_grad``, and clear the layers' ``trained``; a collective."""
        self._write(weights)
        with gathered(self._thetas, modifier_rank=0):
            for theta, value in zip(self._thetas, thetas, strict=True):
                theta.detach().copy_(value)
        for parameter, trained in zip(self.parameters, self._trained, strict=True):
            parameter.requires_grad_(trained)
        for layer in self._layers.values():
            layer.trained = False
        self._forget()

    def _forget(self) -> None:
        for layer in self._layers.values():
            layer.forget_codes()


def _effective(layer: QuantLayer) -> Tensor:
    """Return the effective scale, including theta."""
    return kernels.effective_scale(Quantizer(layer.scale_of_weight, layer.scheme.weights, layer.weight.dtype))


def _snapped(name: str, layer: QuantLayer, original: Tensor) -> Tensor:
    """Compute this rank's elements of a layer's weight, flat: ``original`` where it rounds to the trained code,
    otherwise the dequantized code. The layer must be gathered."""
    own = slice(*local_range(layer.weight))
    weight, spec = layer.weight.detach(), layer.scheme.weights
    before = weight.clone()
    before.view(-1)[own] = original.to(before.device)
    scale = layer.scale_of_weight._replace(s0=_effective(layer).detach(), theta=None)
    for part in linears_of(name, layer):
        here, there = part.weight(weight).contiguous(), part.weight(before)
        quantizer = Quantizer(part.of_scale(scale, spec), spec, weight.dtype)
        codes, _ = kernels.quantize(here, quantizer)
        decoded = kernels.dequantize(codes, quantizer)
        decoded = torch.where(have_codes(decoded, codes, quantizer), decoded, here)  # if the dtype lacks some steps
        there.copy_(snap_to_codes(there.contiguous(), decoded, codes, quantizer))
    return before.view(-1)[own].to(original.device)


def _with_zero(layer: QuantLayer) -> Tensor:
    """Return the effective scale, stacked with the zero points if there are any, as ``write_scales`` expects it."""
    scale = _effective(layer).detach().clone()
    return scale if layer.weight_zero is None else torch.stack([scale, layer.weight_zero.detach()])


def _gradients(
    block: nn.Module,
    name: str,
    samples: LayerSamples,
    targets: Sequence[Tensor],
    chosen: Sequence[int],
    parameters: Sequence[nn.Parameter],
) -> list[Tensor]:
    """Compute the gradients of the errors of the ``chosen`` batches, fp32 and whole, summed over all ranks; the layer
    must be gathered. A collective."""
    sums = [torch.zeros(parameter.shape, device=parameter.device) for parameter in parameters]
    with torch.enable_grad():
        for index in chosen:
            error = _relative(samples.run(block, name, index, samples.hidden[index]), targets[index])
            for total, gradient in zip(sums, torch.autograd.grad(error, parameters, allow_unused=True), strict=True):
                if gradient is not None:  # None for a per-expert module without tokens
                    total += gradient
    return [reduce_over_ranks(total) for total in sums]


def _error(block: nn.Module, name: str, samples: LayerSamples, targets: Sequence[Tensor]) -> tuple[float, int]:
    """Sum the errors of all ranks' samples, and count their tokens; the layer must be gathered. A collective."""
    sums = torch.zeros(2, dtype=torch.float64)
    for index, (hidden, target) in enumerate(zip(samples.hidden, targets, strict=True)):
        sums[0] += _relative(samples.run(block, name, index, hidden), target).double().cpu()
        sums[1] += target.shape[:-1].numel()
    error, tokens = reduce_over_ranks(sums).tolist()
    return error, int(tokens)


def _relative(found: Tensor, target: Tensor) -> Tensor:
    """Compute each token's squared error relative to ``target``, ``|y - t|^2 / |t|^2``, and sum over tokens; fp32."""
    target = target.float()
    error = (found.float() - target).square().sum(-1)
    return (error / target.square().sum(-1).clamp(min=1e-20)).sum()
