"""Detect the narrow range: integer codes without the smallest code, for 4 bits -7..7 with scales absmax / 7, as in
Kimi-K2.

A ``quantization_config`` does not distinguish narrow and full range, as readers decode both alike. The codes do
distinguish them: with full-range scales absmax / 7.5, the largest weight of a group has the code -8 or 7, depending on
its sign. A sample of the codes is read, the same on every rank: if it lacks the smallest code, but has the next
smallest and the largest code 16 times or more each, the range is narrow. Such a model is trained in narrow range, so
that no export has a code that the source checkpoint lacks.

Narrow range is not detected at 8 bits: the scale absmax / 127.5 is often rounded up in bf16, so that full-range files
have no -128 either. A recipe can set narrow range in its own scheme.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from model.checkpoint.safetensors import CheckpointError, DamagedError, Reader
from model.quantized.tensor import QuantizedTensor
from model.ranks import listed, raise_everywhere, reduce_over_ranks
from model.scales.in_place import scale_buckets
from model.zero import gathered, is_partitioned, local_data, local_range
from quant import Quantization, ScaleGroup, Scheme, TensorSpec
from quant.observers import partial_clipped

# Sample per scheme: weights, spread over the model, and rows of each.
_WEIGHTS, _ROWS = 32, 64
# Minimum count of the largest code, and of its negative: that 16 or more largest weights are all positive happens by
# chance in one of 65,536 files.
_ENOUGH = 16
_NARROW = "_narrow"  # suffix of a scheme's name


def with_grids(coded: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
    """Return ``coded`` with a narrow-range scheme in place of each scheme whose sampled codes are in narrow range.
    Raises CheckpointError if a file cannot be read."""
    narrow = {scheme: on_other_grid(scheme) or scheme for scheme in _narrow(coded.values())}
    return {key: replace(one, scheme=narrow[one.scheme]) if one.scheme in narrow else one for key, one in coded.items()}


def on_other_grid(scheme: Scheme) -> Scheme | None:
    """Return the scheme with narrow instead of full range, or the reverse; None for formats with a single range:
    floats, asymmetric integers, and ggml's (where the largest weight has the smallest code)."""
    spec = scheme.weights
    if spec.dtype != "int" or not spec.symmetric or spec.ggml:
        return None
    name = scheme.name.removesuffix(_NARROW) if spec.narrow else scheme.name + _NARROW
    return replace(scheme, name=name, weights=replace(spec, narrow=not spec.narrow))


def check_codes(codes: Tensor, spec: TensorSpec, weight: QuantizedTensor) -> None:
    """Raise CheckpointError, which names ``weight``, if ``spec`` has narrow range and one of ``codes`` is below it; do
    nothing for full range."""
    if spec.narrow and codes.numel() and float(codes.min()) < spec.qmin:
        raise CheckpointError(f"{weight.file}: {weight.codes.key} {_beyond(spec)}")


def check_not_clipped(quantization: Quantization, owners: Iterable[str]) -> None:
    """Raise RankError, which names the layers, if layers of narrow range have weights that were decoded from the
    smallest code of the full range; a collective, after weights and scales are loaded. Only groups of ``owners`` are
    checked, whose scales were read from the files."""
    chosen = {*owners}
    groups = [group for group in quantization.weight_groups if group.spec.narrow and group.owner in chosen]
    names = [name for group in groups for name in group.members]
    counts: list[Tensor] = []
    for bucket in scale_buckets(groups):
        with gathered([p for group in bucket for p in group.parameters]), torch.no_grad():
            counts += [_clipped(quantization, name, group) for group in bucket for name in group.members]
    if not counts:
        return
    whole = torch.stack(counts)
    if is_partitioned(groups[0].s0):
        whole = reduce_over_ranks(whole)
    if found := [name for name, count in zip(names, whole.tolist(), strict=True) if count]:
        spec = next(group.spec for group in groups if found[0] in group.members)
        raise_everywhere(f"{listed(found, 5)} {_beyond(spec)}")


def _clipped(quantization: Quantization, name: str, group: ScaleGroup) -> Tensor:
    """Count the weights of this rank's partition outside of the range; 0 for packed weights."""
    layer = quantization.layers[name]
    if layer.held is not None:
        return torch.zeros((), dtype=torch.int64)
    local = local_data(layer.weight).view(-1)
    scale = layer.weight_scale().to(local.device)
    return partial_clipped(local, local_range(layer.weight)[0], layer.weight_shape, scale, group.spec).cpu()


def _beyond(spec: TensorSpec) -> str:
    return (
        f"has the code {spec.wide.qmin:g}, but its scheme has the narrow range {spec.qmin:g} to {spec.qmax:g}, which a "
        "sample of the codes showed: set narrow to false in quant.schemes, or set quant.scheme to a preset"
    )


def _narrow(coded: Iterable[QuantizedTensor]) -> Iterable[Scheme]:
    """Yield the schemes whose sampled codes are in narrow range. Raises DamagedError if codes cannot be read."""
    by_scheme: dict[Scheme, list[QuantizedTensor]] = {}
    for one in coded:
        if one.scheme.weights.bits < 8 and on_other_grid(one.scheme) is not None:
            by_scheme.setdefault(one.scheme, []).append(one)
    with Reader() as reader:
        for scheme, weights in by_scheme.items():
            spec = scheme.weights
            counts = torch.zeros(3, dtype=torch.int64)
            for one in weights[:: -(-len(weights) // _WEIGHTS)]:
                try:
                    codes = one.codes_of_rows(reader, slice(0, min(_ROWS, one.shape[0])))
                except OSError as error:
                    raise DamagedError(f"{one.file}: {one.codes.key} cannot be read: {error}") from error
                counts += torch.stack([(codes == edge).sum() for edge in (spec.qmin, -spec.qmax, spec.qmax)])
            if counts[0] == 0 and int(counts[1:].min()) >= _ENOUGH:
                yield scheme
