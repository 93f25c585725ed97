"""Read the headers of a plain or quantized checkpoint, and its schemes. The result lists weights in place of codes and
scales; a weight is decoded when it is read.

``quantization_config.py`` decides which checkpoints can be read. This file finds the codes and scales of each Linear,
and adds decoded weights to the tensors of a checkpoint for the readers of plain weights. ``tensor.py`` decodes ranges
of a Linear's weight, and ``scales.py`` loads the scales.

compressed-tensors: names and shapes of :mod:`quant.formats.compressed_tensors`. The method ``fp8`` of vLLM,
transformers and DeepSeek has the same names, except that the scale of blocks is called ``weight_scale_inv``.

GPTQ and AWQ store weights as ``[in, out]``, while the model's weights are ``[out, in]``:

GPTQ (AutoGPTQ, GPTQModel) and AutoRound: ``qweight`` int32 [in * bits / 32, out], a little-endian stream of codes down
each column; ``qzeros`` int32 [groups, out * bits / 32] along each row, with the zero point minus one (``gptq_v2``: the
zero point); ``scales`` [groups, out]; ``g_idx`` int32 [in], the group of each input.

AWQ's ``gemm`` (AutoAWQ): ``qweight`` int32 [in, out / 8] and ``qzeros`` [groups, out / 8], eight 4-bit codes per word
in the order of :data:`AWQ_ORDER`.

In these layouts codes begin at 0, and the value is ``(code - zero point) * scale``. Codes and zero points in this
project are smaller by 2^(bits - 1), as codes are signed.

ModelOpt: as compressed-tensors, but with other names for the tensors of NVFP4 and MXFP4
(:mod:`quant.formats.modelopt`).

gpt-oss has experts in MXFP4, with the Linears of all experts of a layer in one tensor of codes and one of scales:
``<stack>_blocks`` uint8 [E, out, in / 32, 16], two e2m1 codes a byte, the first in the low half; ``<stack>_scales``
uint8 [E, out, in / 32], the exponent of a power of two plus 127. Rows are outputs, though transformers' decoded
matrices are transposed. So an expert's bytes are the same as for a Linear in compressed-tensors' MXFP4.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import (
    AGAIN,
    FLOATS,
    Checkpoint,
    CheckpointError,
    DiskTensor,
    Reader,
    read_headers,
    read_tensor,
)
from model.quantized.narrow_range import on_other_grid, with_grids
from model.quantized.quantization_config import (
    described_in,
    is_quantized,
    kv_cache_of,
    packing_of,
    read_quantization_config,
    rules_of,
)
from model.quantized.tensor import ColumnTensor, Packing, QuantizedTensor
from model.ranks import listed, say
from model.scales.grouping import CACHE_ENDS
from quant import DEFAULT_EXEMPT, SCHEMES, QuantLayer, Rule, Scheme, TensorSpec
from quant.formats.compressed_tensors import packed_shapes
from quant.formats.modelopt import DYNAMIC, names_of
from quant.linear import LinearPart, StackedLinear, check_sizes, linears_of
from quant.spec import FP8_TENSOR


@dataclass
class SourceCheckpoint:
    """Headers of all files of a checkpoint, with a :class:`QuantizedTensor` for each quantized weight.

    Attributes:
        tensors: tensors by key; a quantized weight has the key that the plain weight would have.
        problems: problems of the files, one sentence each.
        lost: keys whose file, according to the index, cannot be read or does not contain them.
        beside: codes, scales and zero points of the quantized weights, and scales of inputs and of keys and values, by
            key.
        kv_cache: number format of keys and values; None if they are not quantized, or their format cannot be read.
        implied_cache: number format of scales of keys and values beside a configuration that names none: fp8 for
            ``quant_method: fp8``.
    """

    tensors: dict[str, DiskTensor | QuantizedTensor]
    problems: list[str]
    lost: set[str]
    beside: dict[str, DiskTensor] = field(default_factory=dict)
    kv_cache: TensorSpec | None = None
    implied_cache: TensorSpec | None = None

    def is_damaged(self, key: str) -> bool:
        """Return True if the files have codes of the weight ``key``; ``problems`` then says why ``tensors`` has no such
        weight. Call this only for keys that ``tensors`` lacks."""
        name = key.removesuffix(".weight")
        if any(one in self.beside for one in (key, f"{name}.weight_packed", f"{name}.qweight")):
            return True
        expert, _, leaf = name.rpartition(".")
        stack = expert.rpartition(".")[0]  # gpt-oss has a tensor for all experts
        return f"{stack}.{leaf}_blocks" in self.beside and f"{stack}.0.{leaf}.weight" not in self.tensors

    @property
    def coded(self) -> dict[str, QuantizedTensor]:
        """Quantized weights by the names of their Linears on disk."""
        return {tensor.name: tensor for tensor in self.tensors.values() if isinstance(tensor, QuantizedTensor)}


def read_checkpoint(directory: Path, model: PreTrainedModel | None) -> SourceCheckpoint:
    """Read the headers of a checkpoint, and combine the codes and scales of each quantized weight. ``model`` adds its
    own names to those that the rules of quantization_config may match; with None they match only names on disk.
    Problems of single files and weights are in the result. Raises CheckpointError if ``directory`` has no safetensors
    checkpoint, or if its quantization is not supported."""
    found = read_headers(directory)
    if is_quantized(directory):
        return _with_weights(found, directory, model)
    return SourceCheckpoint({**found.tensors}, found.problems, found.lost)


def _with_weights(checkpoint: Checkpoint, directory: Path, model: PreTrainedModel | None) -> SourceCheckpoint:
    """Replace the codes in a quantized checkpoint by :class:`QuantizedTensor`, with narrow range if the codes have it.
    Without a model, layers have their names on disk. Raises CheckpointError if the quantization is not supported."""
    config = read_quantization_config(directory)

    @cache
    def our_names() -> dict[str, str]:
        if model is None:
            return {}
        return {module_name_on_disk(model, part.name): part.name for part in parts_of(model)}

    try:
        rules, packing = rules_of(config), packing_of(config)
        if config["quant_method"] == "mxfp4":
            found = read_blocks(checkpoint, SCHEMES["mxfp4"])
        elif packing is not None:
            found = read_columns(checkpoint, rules, packing)
        else:
            modelopt = config["quant_method"] == "modelopt"
            found = read_quantized(
                checkpoint, rules, lambda name: {name, our_names().get(name, name)}, modelopt=modelopt
            )
        coded = with_grids(found.coded)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{described_in(directory)}: {error}") from error
    plain = {key: tensor for key, tensor in checkpoint.tensors.items() if key not in found.beside}
    if packing is not None and model is not None:
        for key in _zero_biases(plain, coded, our_names(), model):
            del plain[key]
    problems = checkpoint.problems + found.problems
    source = SourceCheckpoint({**plain, **coded}, problems, checkpoint.lost, found.beside)
    with suppress(ValueError):
        source.kv_cache = kv_cache_of(config)
    source.implied_cache = FP8_TENSOR if config["quant_method"] == "fp8" else None
    return source


def _zero_biases(
    plain: Mapping[str, DiskTensor], coded: Iterable[str], our_names: Mapping[str, str], model: PreTrainedModel
) -> list[str]:
    """List the biases of zeros of quantized Linears that have no bias in ``model``: AutoGPTQ writes them."""
    own = {name for name, _ in model.named_parameters()}
    found = []
    with Reader() as reader:
        for weight in coded:
            name = weight.removesuffix(".weight")
            bias = plain.get(key := f"{name}.bias")
            if bias is not None and f"{our_names.get(name, name)}.bias" not in own:
                found += [] if bool(read_tensor(reader, bias).any()) else [key]
    return found


def source_schemes(
    model: PreTrainedModel, directory: Path, said: Collection[TensorSpec] | None = None
) -> dict[str, Scheme]:
    """Map the name of each Linear (in stacks, of each expert) and embedding of ``model`` that is quantized in
    ``directory`` to its scheme. If the directory has no weights, its quantization_config alone decides.

    A weight whose sizes its scheme does not support (:func:`quant.linear.check_sizes`) is left out and logged.

    Args:
        model, directory: the model, and its quantized checkpoint.
        said: weight specs of the recipe's schemes. A scheme in ``directory`` that differs from one of these specs only
            in narrow or full range gets the spec's range. With None, or without such a spec, the codes decide
            (:mod:`model.quantized.narrow_range`).

    Raises:
        ValueError: the checkpoint is damaged, has no codes for ``model``, or has full-range codes for a spec of narrow
            range.
    """
    rules = [*(Rule(None, pattern) for pattern in DEFAULT_EXEMPT), *rules_of(read_quantization_config(directory))]
    read = read_checkpoint(directory, model) if any(directory.glob("*.safetensors")) else None
    if read is not None and read.problems:
        lines = [f"file: {one}" for one in read.problems[:20]]
        between = " " if len(lines) == 1 else "\n"
        raise CheckpointError(between.join([f"{directory} is damaged: {AGAIN}:", *lines]))
    coded = {} if read is None else read.coded
    schemes: dict[str, Scheme] = {}
    left_out: list[str] = []
    for part in parts_of(model):
        disk = module_name_on_disk(model, part.name)
        if read is not None:
            scheme = coded[disk].scheme if disk in coded else None
        else:
            matching = (rule.scheme for rule in rules if rule.matches(part.name, 0) or rule.matches(disk, 0))
            scheme = next(matching, None)
        if scheme is None:
            continue
        if said is not None:
            scheme = _on_grid(scheme, said, None if read is None else part.name)
        try:
            check_sizes(part, scheme)
            schemes[part.name] = scheme
        except ValueError:
            left_out.append(part.name)
    if left_out:
        say(f"not quantized, as groups do not divide their sizes: {listed(left_out, 5)}")
    if not schemes and coded:
        raise ValueError(
            f"{directory} has codes of {listed(list(coded), 2)}, but the {type(model).__name__} of its config.json has "
            "no such layers: config.json or the weights are damaged (copy or download them again), or belong to "
            "another model"
        )
    if not schemes and read is not None and (missing := _missing_linears(model, read)):
        raise ValueError(
            f"{directory} has neither weights of {listed(missing, 2)} nor codes as the quantization_config of its "
            "config.json describes them: config.json or the weights are damaged (copy or download them again)"
        )
    if not schemes:
        raise ValueError(f"{directory} has no quantized layer of {type(model).__name__}: name a quant.scheme")
    return schemes


def _missing_linears(model: PreTrainedModel, read: SourceCheckpoint) -> list[str]:
    """List the Linears of ``model``, by their names on disk, whose weights the files lack; without those that are
    exempt by default (lm_head may be tied)."""
    exempt = [Rule(None, pattern) for pattern in DEFAULT_EXEMPT]
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    disk = [module_name_on_disk(model, name) for name in names if not any(rule.matches(name, 0) for rule in exempt)]
    return [name for name in disk if f"{name}.weight" not in read.tensors]


def _on_grid(scheme: Scheme, said: Collection[TensorSpec], name: str | None) -> Scheme:
    """Return the scheme with the range of codes, full or narrow, that the recipe's schemes (``said``) have.

    ``name`` is the layer whose codes were read, or None. Raises ValueError if the recipe has the narrow range and the
    codes have the full range.
    """
    other = on_other_grid(scheme)
    if other is None or scheme.weights in said or other.weights not in said:
        return scheme
    if name is not None and other.weights.narrow:
        raise ValueError(
            f"quant.schemes has narrow: true for {name}, but its checkpoint has codes down to {scheme.weights.qmin:g}, "
            "so the recipe was written for another checkpoint: remove quant.schemes from the recipe, or set narrow: "
            "false"
        )
    return other


def parts_of(model: nn.Module) -> Iterator[LinearPart]:
    """Yield every Linear (in stacks, of each expert) and embedding of the model: the layers that may be quantized in a
    checkpoint."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield LinearPart(name, module.num_embeddings, module.embedding_dim)
        elif isinstance(module, (nn.Linear, StackedLinear, QuantLayer)):
            yield from linears_of(name, module)


# ---- codes and scales of each Linear

Spellings = Callable[[str], Iterable[str]]  # all names that rules may use for a Linear, by its name on disk

# Dtypes of codes in ``weight``; a tensor of another dtype is a plain weight.
_CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
# Suffixes of the tensors that a Linear has in addition to codes, after its name.
_INVERSE = "weight_scale_inv"
_OF_WEIGHT = (
    *(_INVERSE, "weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point"),
    *("weight_shape", "weight_g_idx"),
)
_ABOVE = "weight_global_scale"
_OF_INPUT = ("input_scale", "input_global_scale", "input_zero_point")
_OF_COLUMNS = ("qweight", "qzeros", "scales", "g_idx")
# Suffixes of gpt-oss' keys, after the name of the stack, and bytes per block.
_BLOCKS, _SCALES, _BLOCK_BYTES = "_blocks", "_scales", 16


class Found(NamedTuple):
    """Quantized weights of a checkpoint.

    Attributes:
        coded: weights by the key that the plain weight would have.
        beside: tensors that belong to these weights or to the keys and values of attention, by their own keys.
        problems: weights that cannot be read, with the reason, one line each.
    """

    coded: dict[str, QuantizedTensor]
    beside: dict[str, DiskTensor]
    problems: list[str]

    @contextmanager
    def problem_of(self, name: str, codes: DiskTensor) -> Iterator[None]:
        """Add a ValueError that the with block raises to ``problems``, with the file of ``codes`` and the weight's
        ``name``, instead of raising it."""
        try:
            yield
        except ValueError as error:
            self.problems.append(f"{codes.file}: {name}: {error}")


def read_quantized(
    checkpoint: Checkpoint, rules: Sequence[Rule], spellings: Spellings, *, modelopt: bool = False
) -> Found:
    """Find the quantized weights of a checkpoint of compressed-tensors, ``fp8`` or ModelOpt (``modelopt``). ``rules``
    come from its configuration; ``spellings`` returns all names that they may use for a Linear, by its name on disk.
    Weights that cannot be read become ``problems``."""
    tensors = checkpoint.tensors
    found = Found({}, {key: tensor for key, tensor in tensors.items() if key.endswith(CACHE_ENDS)}, [])
    with Reader() as reader:
        for key, codes in tensors.items():
            name, _, suffix = key.rpartition(".")
            if suffix != "weight_packed" and not (suffix == "weight" and codes.dtype in _CODES):
                continue
            parts = {end: tensors[f"{name}.{end}"] for end in _OF_WEIGHT if f"{name}.{end}" in tensors}
            of_input = [f"{name}.{end}" for end in _OF_INPUT if f"{name}.{end}" in tensors]
            if _INVERSE in parts and "weight_scale" not in parts:
                parts["weight_scale"] = parts.pop(_INVERSE)
            found.beside.update({each.key: each for each in (codes, *parts.values())})
            found.beside.update({each: tensors[each] for each in of_input})
            with found.problem_of(name, codes):
                scheme = _scheme(name, rules, spellings)
                if modelopt and f"{name}.input_scale" not in of_input:
                    scheme = DYNAMIC.get(scheme.name, scheme)
                found.coded[f"{name}.weight"] = coded_linear(name, codes, parts, scheme, reader, modelopt=modelopt)
    return found


def _scheme(name: str, rules: Iterable[Rule], spellings: Spellings) -> Scheme:
    """Return the scheme of the quantized Linear ``name`` (on disk): the only one in ``rules``, or that of the first
    matching rule. Raises ValueError if no rule with a scheme matches."""
    schemes = dict.fromkeys(rule.scheme for rule in rules if rule.scheme is not None)
    if len(schemes) == 1:
        return next(iter(schemes))
    names = set(spellings(name))
    rule = next((rule for rule in rules if any(rule.matches(one, 0) for one in names)), None)
    if rule is None or rule.scheme is None:
        said = "no group matches it" if rule is None else "it is ignored"
        raise ValueError(f"the files have codes of this layer, but according to quantization_config {said}")
    return rule.scheme


def coded_linear(
    name: str,
    codes: DiskTensor,
    parts: Mapping[str, DiskTensor],
    scheme: Scheme,
    reader: Reader,
    *,
    modelopt: bool = False,
) -> QuantizedTensor:
    """Combine the tensors of the Linear ``name``: its ``codes``, and ``parts`` (scales, zero points, ...) by suffix,
    under ModelOpt's names if ``modelopt``. Raises ValueError if one is missing, has another dtype or shape than
    ``scheme`` needs, if a symmetric scheme has nonzero zero points, or if columns of groups are not consecutive."""
    spec, names = scheme.weights, names_of(scheme) if modelopt else {}
    shape = _shape(codes, parts, spec, reader)
    expected = packed_shapes(shape[1], shape[0], scheme, torch.bfloat16)
    found = {codes.key.rpartition(".")[2]: codes, **parts}
    for suffix, (dtype, sides) in ((names.get(suffix, suffix), each) for suffix, each in expected.items()):
        if suffix in _OF_INPUT and suffix not in found:
            continue  # is calibrated
        if suffix not in found:
            raise ValueError(f"{suffix} is missing, expected {dtype} {list(sides)} for {scheme.name}")
        dtypes = FLOATS if "scale" in suffix and dtype in FLOATS else (dtype,)
        same = _sides(found[suffix].shape) == _sides(sides) if "scale" in suffix else found[suffix].shape == sides
        if found[suffix].dtype not in dtypes or not same:
            raise ValueError(
                f"{suffix} is {found[suffix].kind} {list(found[suffix].shape)}, expected {dtype} {list(sides)} for "
                f"{scheme.name}"
            )
    _check_order("weight_g_idx", parts, shape, spec, reader)
    zero = parts.get("weight_zero_point")
    if zero is not None and not spec.has_zero_points:
        if bool(read_tensor(reader, zero).any()):
            raise ValueError(f"weight_zero_point is not 0, but {scheme.name} is symmetric")
        zero = None
    above = parts[names.get(_ABOVE, _ABOVE)] if _ABOVE in expected else None
    scale = parts["weight_scale"]
    return QuantizedTensor(f"{name}.weight", shape, scheme, codes, scale, zero, above, reciprocal=bool(names))


def _shape(codes: DiskTensor, parts: Mapping[str, DiskTensor], spec: TensorSpec, reader: Reader) -> tuple[int, int]:
    """Return a weight's shape ``(out, in)`` from its codes, maybe packed. Raises ValueError if they are invalid."""
    if len(codes.shape) != 2:
        raise ValueError(f"{codes.key} has shape {list(codes.shape)}, expected two dimensions")
    rows, columns = codes.shape
    if spec.dtype == "fp4_e2m1":
        return rows, 2 * columns
    if not codes.key.endswith("_packed"):
        return rows, columns
    if "weight_shape" not in parts or parts["weight_shape"].shape != (2,):
        raise ValueError("weight_shape is missing, or does not have two numbers")
    rows, columns = read_tensor(reader, parts["weight_shape"]).tolist()
    if rows < 1 or columns < 1:
        raise ValueError(f"weight_shape is {[rows, columns]}, expected positive numbers")
    return rows, columns


def _check_order(
    key: str, parts: Mapping[str, DiskTensor], shape: tuple[int, int], spec: TensorSpec, reader: Reader
) -> None:
    """Raise ValueError if columns of a group are not consecutive; ``key`` names the tensor with the group of each
    column."""
    if key in parts:
        index = read_tensor(reader, parts[key]).long().flatten()
        if not torch.equal(index, torch.arange(shape[1]) // spec.run_length(shape)):
            raise ValueError(
                f"{key}: the columns were quantized in another order (desc_act or actorder), which is not supported: "
                "quantize without it"
            )


def _sides(shape: tuple[int, ...]) -> list[int]:
    return [side for side in shape if side != 1]


def read_columns(checkpoint: Checkpoint, rules: Sequence[Rule], packing: Packing) -> Found:
    """Find the quantized weights of a checkpoint of GPTQ, AWQ or AutoRound. All have the same scheme, the only one in
    ``rules``. Weights that cannot be read become ``problems``."""
    scheme = next(rule.scheme for rule in rules if rule.scheme is not None)
    tensors, found = checkpoint.tensors, Found({}, {}, [])
    with Reader() as reader:
        for key, codes in tensors.items():
            name, _, suffix = key.rpartition(".")
            if suffix == "qweight":
                parts = {end: tensors[f"{name}.{end}"] for end in _OF_COLUMNS if f"{name}.{end}" in tensors}
                found.beside.update({part.key: part for part in parts.values()})
                with found.problem_of(name, codes):
                    found.coded[f"{name}.weight"] = _columns(name, parts, scheme, packing, reader)
    return found


def _columns(
    name: str, parts: Mapping[str, DiskTensor], scheme: Scheme, packing: Packing, reader: Reader
) -> ColumnTensor:
    """Combine the tensors of a weight. Raises ValueError if one is missing, or has another dtype or shape, or if the
    columns of groups are not consecutive."""
    if missing := [end for end in _OF_COLUMNS[:3] if end not in parts]:
        raise ValueError(f"qweight has no {', '.join(missing)} beside it")
    spec, codes = scheme.weights, parts["qweight"]
    if len(codes.shape) != 2:
        raise ValueError(f"qweight has shape {list(codes.shape)}, expected two dimensions")
    rows, columns = codes.shape[1], codes.shape[0] * 32 // spec.bits
    words = (codes.shape[0], rows)
    if packing == "awq":
        rows, columns = codes.shape[1] * 8, codes.shape[0]
        words = (columns, rows // 8)
    groups = spec.scale_shape((rows, columns))[1]
    expected = {"qweight": words, "qzeros": (groups, rows * spec.bits // 32), "scales": (groups, rows)}
    for end, shape in expected.items():
        dtypes = FLOATS if end == "scales" else (torch.int32,)
        if parts[end].shape != shape or parts[end].dtype not in dtypes:
            raise ValueError(
                f"{end} is {parts[end].kind} {list(parts[end].shape)}, expected {dtypes[-1]} {list(shape)}"
            )
    _check_order("g_idx", parts, (rows, columns), spec, reader)
    return ColumnTensor(
        f"{name}.weight", (rows, columns), scheme, codes, parts["scales"], parts["qzeros"], packing=packing
    )


def read_blocks(checkpoint: Checkpoint, scheme: Scheme) -> Found:
    """Find the quantized experts of a gpt-oss checkpoint, all with ``scheme``. The Linear of one expert is named
    ``<experts>.<index>.<stack>``. Stacks that cannot be read become ``problems``."""
    tensors, found = checkpoint.tensors, Found({}, {}, [])
    for key, codes in tensors.items():
        name = key.removesuffix(_BLOCKS)
        if name != key:
            scale = tensors.get(name + _SCALES)
            found.beside.update({each.key: each for each in (codes, scale) if each is not None})
            with found.problem_of(name, codes):
                found.coded.update({one.key: one for one in _experts(name, codes, scale, scheme)})
    return found


def _experts(name: str, codes: DiskTensor, scale: DiskTensor | None, scheme: Scheme) -> Iterator[QuantizedTensor]:
    """Yield the Linear of each expert of a stack. Raises ValueError if a tensor is missing, or has another dtype or
    shape."""
    if codes.dtype != torch.uint8 or len(codes.shape) != 4 or codes.shape[-1] != _BLOCK_BYTES:
        raise ValueError(
            f"{_BLOCKS} is {codes.kind} {list(codes.shape)}, expected U8 [experts, out, in / 32, {_BLOCK_BYTES}]"
        )
    if scale is None:
        raise ValueError(f"{_SCALES} is missing beside {_BLOCKS}")
    if scale.dtype != torch.uint8 or scale.shape != codes.shape[:-1]:
        raise ValueError(f"{_SCALES} is {scale.kind} {list(scale.shape)}, expected U8 {list(codes.shape[:-1])}")
    parent, _, stack = name.rpartition(".")
    experts, rows, groups, _ = codes.shape
    for expert in range(experts):
        own = _of_expert(codes, expert, (rows, groups * _BLOCK_BYTES)), _of_expert(scale, expert, (rows, groups))
        yield QuantizedTensor(f"{parent}.{expert}.{stack}.weight", (rows, 2 * _BLOCK_BYTES * groups), scheme, *own)


def _of_expert(tensor: DiskTensor, expert: int, shape: tuple[int, int]) -> DiskTensor:
    """Return one expert's byte range of a tensor ``[E, ...]``, as a tensor of ``shape``."""
    size = (tensor.end - tensor.begin) // tensor.shape[0]
    begin = tensor.begin + expert * size
    return tensor._replace(shape=shape, begin=begin, end=begin + size)
