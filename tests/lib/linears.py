"""Parts of a model's layers by the names that a checkpoint has for the Linears."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from quant import Quantization
from quant.linear import LinearPart, QuantLayer, StackedLinear, linears_of


def linears(quantization: Quantization) -> Iterator[tuple[LinearPart, QuantLayer]]:
    """Every quantized Linear, and the layer that holds it."""
    for name, layer in quantization.layers.items():
        for part in linears_of(name, layer):
            yield part, layer


def split_stacks(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole parameters by name, the weight of a stack of experts as those of its Linears."""
    found = dict(tensors)
    for name, module in model.named_modules():
        if isinstance(module, StackedLinear) or getattr(module, "projections", ()):
            stack = found.pop(f"{name}.weight")
            found |= {f"{part.name}.weight": part.weight(stack).clone() for part in linears_of(name, module)}
    return found
