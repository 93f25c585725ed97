"""One weight for all experts of a MoE layer, and the Linears that a checkpoint has in its place.

A stack ``[E, out, in]`` is one Parameter: one gather under ZeRO-3, one launch of the quantiser, one grouped GEMM.
Rules, files and serving know the Linears of single experts, by names such as ``experts.7.gate_proj``;
:func:`linears_of` says which part of the stack each of them is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from quant import gemm
from quant.scale import Scale
from quant.spec import FP8_TENSOR, TensorSpec


class StackedLinear(nn.Module):
    """The Linears of E experts that read inputs of one kind, without biases.

    Attributes:
        weight: ``[E, out, in]``; a ZeRO-3 partition (shape ``[0]``) outside forward.
        in_features, out_features: of one expert.
        num_experts: E.
        projections: names of the Linears of one expert whose rows lie behind one another, of equal size.
    """

    bias = None

    def __init__(self, weight: nn.Parameter, shape: tuple[int, int, int], projections: tuple[str, ...]) -> None:
        super().__init__()
        self.weight = weight
        self.num_experts, self.out_features, self.in_features = shape
        self.projections = projections

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """``x`` is ``[rows, in]``, sorted by expert; ``offsets`` as in :mod:`quant.gemm`. Returns ``[rows, out]``."""
        return gemm.linear(x, self.weight, None, offsets)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"


@dataclass(frozen=True)
class LinearPart:
    """One Linear of a checkpoint inside a layer of the model.

    Attributes:
        name: of the Linear, as a module of its own would have it.
        out_features, in_features: its sizes.
        expert: its index in a stack; None where the layer is the Linear.
        first_row: where its rows begin among those of the expert.
    """

    name: str
    out_features: int
    in_features: int
    expert: int | None = None
    first_row: int = 0

    def weight(self, whole: Tensor) -> Tensor:
        """``[out, in]``, a view of the layer's weight."""
        return whole if self.expert is None else whole[self.expert].narrow(0, self.first_row, self.out_features)

    def scale(self, whole: Tensor, spec: TensorSpec) -> Tensor:
        """The part of the layer's scale that is this Linear's: a view, in the shape that the scale of a Linear has."""
        if self.expert is None:
            return whole
        if whole.dim() == 1:
            return whole[self.expert].view(1)
        size = spec.group_size if spec.granularity == "block" and spec.group_size else 1
        return whole[self.expert].narrow(0, self.first_row // size, self.out_features // size)

    def of_scale(self, whole: Scale, spec: TensorSpec) -> Scale:
        """This Linear's part of everything that belongs to the layer's scale, see :meth:`scale`."""
        s0, theta, above, zero = whole
        return Scale(
            self.scale(s0, spec),
            None if theta is None else self.scale(theta, spec),
            None if above is None else self.scale(above, FP8_TENSOR),
            None if zero is None else self.scale(zero, spec),
        )


def linears_of(name: str, layer: nn.Module) -> Iterator[LinearPart]:
    """The Linears that a checkpoint has in place of ``layer``, a module called ``name``: the layer itself, or, of a
    stack, the Linears of each expert in turn."""
    projections: tuple[str, ...] = getattr(layer, "projections", ())
    out_features, in_features = int(layer.out_features), int(layer.in_features)  # type: ignore[arg-type]
    if not projections:
        yield LinearPart(name, out_features, in_features)
        return
    parent, rows = name.rpartition(".")[0], out_features // len(projections)
    for expert in range(int(layer.num_experts)):  # type: ignore[arg-type]
        for index, projection in enumerate(projections):
            yield LinearPart(f"{parent}.{expert}.{projection}".lstrip("."), rows, in_features, expert, index * rows)
