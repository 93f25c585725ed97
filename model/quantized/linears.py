"""Find the codes and scales of each Linear in a checkpoint, and its scheme.

Tensors have the names of compressed-tensors, or of the method ``fp8`` of vLLM, transformers and DeepSeek. Its names are
the same, except that the scale of blocks is called ``weight_scale_inv``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from model.checkpoint.safetensors import Checkpoint, CheckpointError, DiskTensor, Reader
from model.quantized.tensor import QuantizedTensor
from model.scales.grouping import CACHE_SCALES
from quant import Rule, Scheme
from quant.formats.compressed_tensors import Shapes, packed_shapes
from quant.spec import TensorSpec

Spellings = Callable[[str], Iterable[str]]  # all names that rules may use for a Linear, by its name on disk

# Dtypes of codes in ``weight``; a tensor of another dtype is a plain weight.
_CODES = (torch.float8_e4m3fn, torch.int8)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Suffixes of the tensors that a Linear has in addition to codes, after its name.
_INVERSE = "weight_scale_inv"
_OF_WEIGHT = (_INVERSE, "weight_scale", "weight_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_OF_INPUT = ("input_scale", "input_global_scale", "input_zero_point")
_OF_CACHE = tuple(end for ends in CACHE_SCALES.values() for end in ends)


def read_quantized(
    checkpoint: Checkpoint, rules: Sequence[Rule], spellings: Spellings
) -> tuple[dict[str, QuantizedTensor], dict[str, DiskTensor], list[str]]:
    """Find the quantized weights of a checkpoint with the rules of its configuration.

    Returns:
        Quantized weights by the key that the plain weight would have; tensors that belong to these weights or to the
        keys and values of attention, by their own keys; and problems, a line each.
    """
    tensors = checkpoint.tensors
    coded: dict[str, QuantizedTensor] = {}
    beside = {key: tensor for key, tensor in tensors.items() if key.endswith(_OF_CACHE)}
    problems: list[str] = []
    with Reader() as reader:
        for key, codes in tensors.items():
            name, _, suffix = key.rpartition(".")
            if suffix != "weight_packed" and not (suffix == "weight" and codes.dtype in _CODES):
                continue
            parts = {end: tensors[f"{name}.{end}"] for end in _OF_WEIGHT if f"{name}.{end}" in tensors}
            of_input = [f"{name}.{end}" for end in _OF_INPUT if f"{name}.{end}" in tensors]
            if _INVERSE in parts and "weight_scale" not in parts:
                parts["weight_scale"] = parts.pop(_INVERSE)
            beside |= {key: codes, **{part.key: part for part in parts.values()}}
            beside |= {each: tensors[each] for each in of_input}
            try:
                scheme = _scheme(name, rules, spellings)
                coded[f"{name}.weight"] = _coded(name, codes, parts, scheme, reader)
            except ValueError as error:
                problems.append(f"{codes.file}: {name}: {error}")
    return coded, beside, problems


def _scheme(name: str, rules: Iterable[Rule], spellings: Spellings) -> Scheme:
    """Find the scheme of the quantized Linear that is called ``name`` on disk."""
    schemes = dict.fromkeys(rule.scheme for rule in rules if rule.scheme is not None)
    if len(schemes) == 1:
        return next(iter(schemes))
    names = set(spellings(name))
    rule = next((rule for rule in rules if any(rule.matches(one, 0) for one in names)), None)
    if rule is None or rule.scheme is None:
        said = "none of its groups is for it" if rule is None else "it is among those that are ignored"
        raise ValueError(f"the files have codes of it, but quantization_config says that {said}")
    return rule.scheme


def _coded(
    name: str, codes: DiskTensor, parts: Mapping[str, DiskTensor], scheme: Scheme, reader: Reader
) -> QuantizedTensor:
    """Combine the tensors of a weight, after checking that they match.

    Raises:
        ValueError: a tensor is missing, or does not have the dtype or shape of the scheme.
    """
    spec = scheme.weights
    shape = _shape(codes, parts, spec, reader)
    expected = _expected(shape, scheme)
    found = {codes.key.rpartition(".")[2]: codes, **parts}
    for suffix, (dtype, sides) in expected.items():
        if suffix in _OF_INPUT:
            continue  # missing tensors are calibrated
        if suffix not in found:
            raise ValueError(f"{suffix} is missing, which {scheme.name} has: expected {dtype} {list(sides)}")
        dtypes = _FLOATS if suffix == "weight_scale" and dtype in _FLOATS else (dtype,)
        same = _sides(found[suffix].shape) == _sides(sides) if "scale" in suffix else found[suffix].shape == sides
        if found[suffix].dtype not in dtypes or not same:
            raise ValueError(
                f"{suffix} is {found[suffix].kind} {list(found[suffix].shape)}, but {scheme.name} has {dtype} "
                f"{list(sides)}"
            )
    _check_order(parts, shape, spec, reader)
    zero = parts.get("weight_zero_point")
    if zero is not None and not spec.has_zero_points:
        if bool(_whole(reader, zero).any()):
            raise ValueError(f"weight_zero_point is not 0, but {scheme.name} is symmetric")
        zero = None
    above = parts["weight_global_scale"] if "weight_global_scale" in expected else None
    return QuantizedTensor(f"{name}.weight", shape, scheme, codes, parts["weight_scale"], zero, above)


def _expected(shape: tuple[int, int], scheme: Scheme) -> Shapes:
    """Return the expected dtypes and shapes of a weight's tensors. The last block of its rows may be incomplete."""
    rows, size = shape[0], scheme.weights.group_size
    if scheme.weights.granularity == "block" and size is not None:
        rows += -rows % size
    expected = packed_shapes(shape[1], rows, scheme, torch.bfloat16)
    if rows != shape[0]:
        expected["weight"] = (expected["weight"][0], shape)
    return expected


def _shape(codes: DiskTensor, parts: Mapping[str, DiskTensor], spec: TensorSpec, reader: Reader) -> tuple[int, int]:
    """Return the shape of the weight with these codes."""
    if len(codes.shape) != 2:
        raise ValueError(f"{codes.key} has shape {list(codes.shape)}, expected two dimensions")
    rows, columns = codes.shape
    if not codes.key.endswith("_packed"):
        return rows, columns
    if spec.dtype != "int":
        return rows, 2 * columns
    if "weight_shape" not in parts or parts["weight_shape"].shape != (2,):
        raise ValueError("weight_shape is missing, or not of two numbers")
    rows, columns = _whole(reader, parts["weight_shape"]).tolist()
    if rows < 1 or columns < 1:
        raise ValueError(f"weight_shape is {[rows, columns]}, expected positive numbers")
    return rows, columns


def _check_order(parts: Mapping[str, DiskTensor], shape: tuple[int, int], spec: TensorSpec, reader: Reader) -> None:
    """Reject groups whose columns are not consecutive."""
    if "weight_g_idx" not in parts:
        return
    index = _whole(reader, parts["weight_g_idx"]).long().flatten()
    if not torch.equal(index, torch.arange(shape[1]) // spec.run_length(shape)):
        raise ValueError(
            "weight_g_idx: its columns were quantized in another order (actorder: group), which no scheme here has"
        )


def _sides(shape: tuple[int, ...]) -> list[int]:
    return [side for side in shape if side != 1]


def _whole(reader: Reader, tensor: DiskTensor) -> torch.Tensor:
    if tensor.dtype is None:
        raise CheckpointError(f"{tensor.key} is {tensor.kind}, a dtype that is not read")
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    reader.read(tensor, 0, whole.view(-1))
    return whole
