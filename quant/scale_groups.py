"""The scales of a model, each with the layers that share it.

Serving keeps one scale for the layers that it fuses (:mod:`quant.rules`) and one for their input; a fused MoE kernel
keeps one input scale per layer for all experts. If training used separate scales, serving would requantise to the
largest one and compute something else than was trained. So the same groups share one Parameter here:

* a weight scale per tensor: over q/k/v, over gate/up (of one expert in an MoE); finer scales belong to one row, never
  shared;
* a static input scale, or the global one above dynamic scales (NVFP4): over q/k/v, over gate/up, and over all experts
  of an MoE layer, one for gate/up and one for down.

Where the experts of a layer are one stack, its scales are one Parameter too, with an entry for each expert.

The Parameter is registered on every member and owned by the first one in module order, so ``model.parameters()`` lists
it once. A group that is only partly quantised is an error: what is served could not be what was trained.

Keys and values have a scale each per layer, which nothing shares; their groups are among those of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from quant.calibrate import Observer, Ranges
from quant.experts import StackedLinear
from quant.kv_cache import QuantCache
from quant.scale import Scale
from quant.spec import FP8_TENSOR, Scheme, TensorSpec

Linears = dict[str, nn.Linear | StackedLinear]


@dataclass(frozen=True)
class ScaleGroup:
    """One scale and the layers that share it.

    Attributes:
        owner: name of the first member in module order; the scale's Parameters carry its name in
            ``named_parameters()``.
        members: names of all layers (or the quantiser of keys, or of values) that share the scale, in module order.
        spec: how what it scales is quantised.
        scale: the scale, of Parameters: s0 in the shape that ``spec`` says, ``(1,)`` of an input, and NaN until filled,
            as are zero points; theta in the model's dtype, 0 at the start. The global scale above e4m3 scales is the s0
            of a group of its own; of inputs, whose e4m3 scales are dynamic, it is the s0 of the only one.
        observer: of the group's input, or None in a group of weights.
    """

    owner: str
    members: list[str]
    spec: TensorSpec
    scale: Scale
    observer: Observer | None = None

    @property
    def s0(self) -> nn.Parameter:
        """The frozen part of the scale."""
        return self.scale.s0  # type: ignore[return-value]

    @property
    def theta(self) -> nn.Parameter | None:
        """The learned part of the scale, None for a static one."""
        return self.scale.theta  # type: ignore[return-value]

    @property
    def zero(self) -> nn.Parameter | None:
        """The zero points beside the scale, None where ``spec`` has none."""
        return self.scale.zero  # type: ignore[return-value]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What has to be gathered to read the scale."""
        return [parameter for parameter in (self.s0, self.theta, self.zero) if parameter is not None]


def weight_shape(linear: nn.Linear | StackedLinear) -> tuple[int, ...]:
    """``(out, in)``, or ``(E, out, in)`` of a stack, also where the weight is a partition."""
    stack = (linear.num_experts,) if isinstance(linear, StackedLinear) else ()
    return (*stack, linear.out_features, linear.in_features)


def weight_groups(
    sets: list[list[str]], linears: Linears, schemes: Mapping[str, Scheme], learn: bool
) -> tuple[list[ScaleGroup], list[ScaleGroup]]:
    """The scale groups of weights, and those of their global scales.

    Args:
        sets: names of the layers that serving fuses, see :func:`quant.rules.fused_sets`.
        linears: the layers by name.
        schemes: their schemes by name.
        learn: whether the scales get a theta. Global scales and zero points never do.

    Raises:
        ValueError: a weight does not divide into the groups of its scheme.
    """
    groups, global_groups = [], []
    for members in sets:
        spec = schemes[members[0]].weights
        for some in [members] if spec.granularity == "tensor" else [[name] for name in members]:
            owner = linears[some[0]]
            try:
                shape = spec.scale_shape(weight_shape(owner))
            except ValueError as error:
                raise ValueError(f"{some[0]}: {error}") from None
            scale = _new_scale(owner, shape, learn, zero_points=spec.has_zero_points)
            groups.append(ScaleGroup(some[0], some, spec, scale))
        if spec.scale_format == "e4m3":
            owner = linears[members[0]]
            scale = _new_scale(owner, FP8_TENSOR.scale_shape(weight_shape(owner)), False)
            global_groups.append(ScaleGroup(members[0], members, spec, scale))
    return groups, global_groups


def embedding_group(name: str, embedding: nn.Embedding, spec: TensorSpec, learn: bool) -> ScaleGroup:
    """The scale group of an embedding's table, which shares its scale with nothing.

    Raises:
        ValueError: the table does not divide into the groups of ``spec``.
    """
    shape = spec.scale_shape((embedding.num_embeddings, embedding.embedding_dim))
    return ScaleGroup(name, [name], spec, _new_scale(embedding, shape, learn))


def input_groups(
    sets: list[list[str]], linears: Linears, schemes: Mapping[str, Scheme], learn: bool, ranges: Ranges
) -> list[ScaleGroup]:
    """The scale groups of inputs: one for each of the sets (see :func:`quant.rules.fused_sets`) whose scheme stores a
    scale of its input.

    Raises:
        ValueError: layers of a set read inputs of different widths.
    """
    groups = []
    for members in sets:
        spec = schemes[members[0]].stored_input
        if spec is not None:
            _check_same_width(members, linears)
            scale = _new_scale(linears[members[0]], (1,), learn and not spec.dynamic)
            groups.append(ScaleGroup(members[0], members, spec, scale, _observer(spec, ranges)))
    return groups


def _check_same_width(members: list[str], linears: Linears) -> None:
    widths = {name: linears[name].in_features for name in members}
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"layers that share an input scale read inputs of different widths: {widths}; exempt all of them"
        )


def cache_group(name: str, cache: QuantCache, ranges: Ranges) -> ScaleGroup:
    """The scale group of the keys, or of the values, of one layer."""
    scale = Scale(cache.input_s0, cache.input_theta)
    return ScaleGroup(name, [name], cache.spec, scale, _observer(cache.spec, ranges))


def _observer(spec: TensorSpec, ranges: Ranges) -> Observer:
    return Observer(spec, histogram=ranges.inputs != "absmax")


def _new_scale(
    owner: nn.Linear | StackedLinear | nn.Embedding,
    shape: tuple[int, ...],
    learn: bool,
    *,
    zero_points: bool = False,
) -> Scale:
    """A frozen fp32 scale of NaNs, with a theta of zeros in the dtype of the weight if it learns, and zero points of
    NaNs where there are some."""
    device, dtype = owner.weight.device, owner.weight.dtype

    def frozen() -> nn.Parameter:
        return nn.Parameter(torch.full(shape, torch.nan, dtype=torch.float32, device=device), requires_grad=False)

    theta = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) if learn else None
    return Scale(frozen(), theta, zero=frozen() if zero_points else None)
