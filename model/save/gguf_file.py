"""Plan and write a GGUF file for llama.cpp, tensor by tensor.

llama.cpp uses its own names and stores all experts of a layer in one tensor. For Llama it interleaves the rows of the
two halves of each head of q and k, for its RoPE. Norms, biases, routers and convolutions are fp32; other unquantized
tensors keep the model's dtype. Every tensor of the plan has its own offset, so no tensors are collected in memory.

Metadata and vocabulary come from a template, a file that llama.cpp's own converter wrote for the base model. Its list
of tensors is compared with the plan, so that missing and foreign tensors are detected.
"""

import functools
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from model.checkpoint.safetensors import AGAIN
from model.ranks import listed
from model.save.gguf_names import (
    COMPOSITE,
    ROPE_FREQS,
    GGUFNames,
    GGUFPlace,
    architecture_of,
    gguf_package,
    in_file,
    other_values,
    rope_factors,
    same,
    split,
)
from model.save.plan import EXPERT, Item
from model.save.shard_writer import ShardWriter
from quant import QuantLayer
from quant.formats.gguf import SIZES, TENSOR_SCALE, block_type

GGUF_FILE = "model.gguf"
_PLAIN = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# Keys of the template's metadata that the writer sets itself, or that describe the template's weights.
_NOT_COPIED = (
    "GGUF.",
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
    "split.",
    "quantize.",
)
# Values that llama.cpp uses where a file lacks metadata about positions.
_POSITIONS = {
    "rope.freq_base": 10000.0,
    "rope.freq_base_swa": 10000.0,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}


@dataclass
class GGUFTensor:
    """Tensor of the file.

    Attributes:
        kind: ggml's name of its type.
        dtype, stored: dtype and shape of one part in the file; quantized blocks count as uint8 bytes.
        place: how its values and their order differ from the checkpoint's.
        parts: keys of the plan's tensors in it, by index of the part (``GGUFPlace.expert``); a tensor without experts
            has the single part 0.
    """

    kind: str
    dtype: torch.dtype
    stored: tuple[int, ...]
    place: GGUFPlace
    parts: dict[int, str] = field(default_factory=dict)

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape in the file, with a first dimension of experts if any; quantized tensors have bytes in the last one."""
        if not any(EXPERT.search(key) for key in self.parts.values()):
            return self.stored
        count = self.place.per_expert
        return (len(self.parts) // count, *(rows * count for rows in self.stored[:1]), *self.stored[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements, as ``whole`` but with weights in place of a block's bytes; slowest dimension first."""
        weights, size = SIZES.get(self.kind, (1, 1))
        return (*self.whole[:-1], *(columns // size * weights for columns in self.whole[-1:]))

    @property
    def part_bytes(self) -> int:
        """Number of bytes of one of the ``parts``."""
        return math.prod(self.stored) * self.dtype.itemsize


@dataclass
class GGUFPlan:
    """Contents of a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the model's architecture.
        tensors: tensors by name, in the order of the file.
        template: the template, a ``gguf.GGUFReader``.
        rope_freqs: the template's RoPE frequency factors, fp32; None if it has none.
    """

    architecture: str
    tensors: dict[str, GGUFTensor]
    template: Any
    rope_freqs: Tensor | None


def without_towers(model: PreTrainedModel, items: list[Item]) -> list[Item]:
    """Return the items that a GGUF file stores: of a composite model those of its text model, else all."""
    composite = model.config.model_type in COMPOSITE
    return [item for item in items if item.copied is None or not composite]


def plan_gguf(model: PreTrainedModel, items: Iterable[Item], template: Path | None) -> GGUFPlan:
    """Map every tensor of the plan's ``items`` to a GGUF file; ``template`` is a GGUF file of the base model. Raises
    ValueError if llama.cpp does not support the model, ``template`` is None, no GGUF file or of another model, or the
    plan has tensors that a GGUF file cannot store, or lacks tensors of the template (the message names some)."""
    architecture = architecture_of(model.config).name
    if template is None:
        raise ValueError(
            "layout 'gguf' needs a template (export.template, --template) for metadata and vocabulary: a GGUF file of "
            "the base model, made with llama.cpp's convert_hf_to_gguf.py"
        )
    reader = open_gguf(template)
    _check_template(reader, template, model.config.get_text_config())
    tensors = _tensors(model, items, architecture)
    factors = next((torch.from_numpy(one.data.copy()) for one in reader.tensors if one.name == ROPE_FREQS), None)
    if factors is not None:
        tensors[ROPE_FREQS] = GGUFTensor(
            "F32", torch.float32, tuple(factors.shape), GGUFPlace(ROPE_FREQS), {0: ROPE_FREQS}
        )
    plan = GGUFPlan(architecture, tensors, reader, factors)
    _check_tensors(plan, template, tied=bool(getattr(model.config, "tie_word_embeddings", False)))
    return plan


def _tensors(model: PreTrainedModel, items: Iterable[Item], architecture: str) -> dict[str, GGUFTensor]:
    """Plan the tensors by llama.cpp's names. Raises ValueError for tensors that the file cannot store."""
    names = GGUFNames(model.config)
    found: dict[str, GGUFTensor] = {}
    nowhere = []
    for item in items:
        for key, (dtype, whole) in item.shapes.items():
            places = names.places(key)
            shape = in_file(split(torch.empty(whole, device="meta"), key, len(places))[0].shape)
            if key.endswith(f".{TENSOR_SCALE}") and places[0].expert is not None:
                shape = ()  # one number for each expert
            for place in places:
                name = place.name
                if name is None or item.copied is not None or item.fused:
                    nowhere.append(key)
                    continue
                kind, index = _kind(item, name, key, dtype, shape), place.expert or 0
                own = GGUFTensor(kind, torch.float32 if kind == "F32" else dtype, shape, place)
                block, _ = SIZES.get(kind, (1, 1))
                if place.columns and own.shape[-1] % (block * math.prod(place.columns)):
                    raise ValueError(
                        f"{key} is {kind} {list(own.shape)} with {math.prod(place.columns)} heads, but llama.cpp has "
                        f"heads in another order, and blocks of {block} weights: exempt this layer"
                    )
                tensor = found.setdefault(name, own)
                if (tensor.kind, tensor.stored) != (kind, shape):
                    raise ValueError(
                        f"{key} is {kind} {list(own.shape)}, but other experts of {name} are {tensor.kind} "
                        f"{list(tensor.shape)}: llama.cpp has all experts of a layer in one tensor; give them one "
                        "scheme"
                    )
                if index in tensor.parts:
                    raise ValueError(
                        f"{key} and {tensor.parts[index]} have the same name {name} in llama.cpp: set export.format to "
                        "another one"
                    )
                tensor.parts[index] = key
    if nowhere:
        raise ValueError(
            f"a GGUF file of architecture {architecture} cannot store {listed(nowhere, 6)}: set export.format to "
            "dequantized"
        )
    return found


def _kind(item: Item, name: str, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return ggml's type of a tensor of the plan."""
    if item.layout == "gguf" and key.endswith(".weight"):
        assert isinstance(item.module, QuantLayer)
        return block_type(item.module.scheme)
    # llama.cpp computes with these in fp32, and asserts their type.
    ends = (".bias", "_norm.weight", "ffn_gate_inp.weight", "shortconv.conv.weight", "ssm_conv1d.weight")
    if len(shape) == 1 or name.endswith(ends):
        return "F32"
    return _PLAIN[dtype]


def _check_tensors(plan: GGUFPlan, path: Path, *, tied: bool) -> None:
    """Raise ValueError unless the plan has all tensors of the template ``path``, in the same shapes and with all
    experts, and no others except scales of NVFP4. ``tied``: ``output.weight`` may be missing."""
    expected = {one.name: in_file([int(size) for size in reversed(one.shape)]) for one in plan.template.tensors}
    if tied and "output.weight" not in plan.tensors:
        expected.pop("output.weight", None)  # copy of the embeddings, which llama.cpp uses if it is absent
    found = {name: tensor.shape for name, tensor in plan.tensors.items()}
    problems = []
    of_types = {name for name in found if name.endswith(f".{TENSOR_SCALE}")}  # of no template
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"the model lacks {listed(missing, 6)}")
    if more := sorted(found.keys() - expected.keys() - of_types):
        problems.append(f"the template lacks {listed(more, 6)}")
    problems += [
        f"{name} is {list(expected[name])}, but {list(shape)} in the model"
        for name, shape in found.items()
        if name in expected and shape != expected[name]
    ]
    for name, tensor in plan.tensors.items():
        if sorted(tensor.parts) != list(range(len(tensor.parts))):
            problems.append(f"{name} lacks experts")
    if problems:
        raise ValueError(f"{path} is the template of another model: {listed(problems, 4)}")


class GGUFWriter(ShardWriter):
    """Writer of one GGUF file, tensor by tensor; raises the errors of :class:`ShardWriter`."""

    def __init__(self, path: Path, plan: GGUFPlan) -> None:
        self._places: dict[str, list[tuple[str, GGUFTensor]]] = {}
        for name, tensor in plan.tensors.items():
            for index, key in tensor.parts.items():
                self._places.setdefault(key, []).append((_part(name, index), tensor))
        shapes = {part: (tensor.dtype, tensor.stored) for places in self._places.values() for part, tensor in places}
        header, begin, size = _head(path.with_name(f"{path.name}.head"), plan)
        super().__init__(path, shapes, (header, begin))
        try:
            os.truncate(path, size)  # the zeros after the last tensor
            if plan.rope_freqs is not None:
                self.write(ROPE_FREQS, plan.rope_freqs)
        except BaseException:
            self.close()  # the caller has no object to close
            raise

    def write(self, key: str, tensor: Tensor) -> None:
        """Write the plan's tensor ``key``, converted to the dtype, the values and the order that the file has."""
        places = self._places[key]
        for (part, planned), values in zip(places, split(tensor, key, len(places)), strict=True):
            ordered = planned.place.to_file(values).to(planned.dtype)
            super().write(part, ordered.reshape(planned.stored).contiguous())


def _part(name: str, index: int) -> str:
    """Return the key of part ``index`` of the tensor ``name``, for offsets and messages."""
    return f"{name}[{index}]"


def _head(scratch: Path, plan: GGUFPlan) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of the file (header and metadata), the offset of each part by :func:`_part`, and the file
    size. ``scratch`` is the path of a temporary file, which is removed."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(scratch, plan.architecture)
    _copy_metadata(plan.template, writer)
    file_types = {
        "Q4_0": "MOSTLY_Q4_0",
        "Q8_0": "MOSTLY_Q8_0",
        "MXFP4": "MOSTLY_MXFP4_MOE",
        "NVFP4": "MOSTLY_NVFP4",
        "BF16": "MOSTLY_BF16",
        "F16": "MOSTLY_F16",
    }
    kinds = Counter(tensor.kind for tensor in plan.tensors.values() if tensor.kind in file_types)
    usual = [file_types[kind] for kind, _ in kinds.most_common(1)] or ["ALL_F32"]
    writer.add_file_type(gguf.LlamaFileType[usual[0]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    begin: dict[str, int] = {}
    end = 0
    for name, tensor in plan.tensors.items():
        whole = tensor.part_bytes * len(tensor.parts)
        # Blocks are described by their bytes; for other types the dtype is ignored.
        described = np.uint8 if tensor.dtype == torch.uint8 else np.float32
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(name, tensor.whole, described, whole, kind)
        begin |= {_part(name, index): end + index * tensor.part_bytes for index in tensor.parts}
        end += gguf.GGUFWriter.ggml_pad(whole, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = scratch.read_bytes()
    scratch.unlink()
    header += b"\0" * (-len(header) % writer.data_alignment)
    return header, {key: len(header) + offset for key, offset in begin.items()}, len(header) + end


def check_gguf_written(path: Path, plan: GGUFPlan) -> None:
    """Check with llama.cpp's own reader that a file has the planned tensors; raise ValueError if not."""
    reader = open_gguf(path)
    found = {t.name: (t.tensor_type.name, tuple(int(size) for size in reversed(t.shape))) for t in reader.tensors}
    planned = {name: (tensor.kind, tensor.shape) for name, tensor in plan.tensors.items()}
    if wrong := sorted(name for name in planned.keys() | found.keys() if planned.get(name) != found.get(name)):
        raise ValueError(f"{path}: these tensors are not as planned: {listed(wrong)}; export again")


def open_gguf(path: Path) -> Any:
    """Open a file as a ``gguf.GGUFReader``. Raises ValueError if it is not a GGUF file, or the package is missing."""
    gguf = gguf_package()
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file, expected a GGUF file: llama.cpp's convert_hf_to_gguf.py makes one of the base model"
        )
    try:
        check_header(path)
        return gguf.GGUFReader(path)
    except Exception as error:  # any error of the reader about damaged bytes
        raise ValueError(f"{path} is not a GGUF file: {error}: {AGAIN}, or make it again") from error


def _value_of(template: Any, key: str) -> Any:
    """Return a metadata value of the template; None if the template lacks the key."""
    entry = template.fields.get(key)
    return None if entry is None else entry.contents()


def _check_template(template: Any, path: Path, config: PretrainedConfig) -> None:
    """Raise ValueError if the template's metadata has another architecture, other sizes, another positional encoding or
    another number of tokens."""
    architecture, found = architecture_of(config).name, _value_of(template, "general.architecture")
    problems = []
    if found != architecture:
        problems.append(f"general.architecture is {found!r}, expected {architecture!r}")
    else:
        problems += other_values(functools.partial(_value_of, template), config)
        problems += _other_positions(template, architecture, config)
        tokens = template.fields.get("tokenizer.ggml.tokens")
        if tokens is None:
            problems.append("the template has no vocabulary (tokenizer.ggml.tokens)")
        elif len(tokens.data) != config.vocab_size:
            problems.append(f"the template's vocabulary has {len(tokens.data)} tokens, expected {config.vocab_size}")
    if problems:
        raise ValueError(f"{path} is the template of another model: {listed(problems, 8)}")


def _other_positions(template: Any, architecture: str, config: PretrainedConfig) -> Iterator[str]:
    """Yield a problem for each difference between the template's and the model's positional encoding."""
    rope = config.rope_parameters
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3", "linear", "yarn", "proportional"):
        yield f"rope_type is {kind!r}, expected 'default', 'llama3', 'linear', 'yarn' or 'proportional'"
    if unknown := [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(name) is not None]:
        yield f"rope_parameters has {', '.join(unknown)}, which llama.cpp computes differently"
    scaled = kind in ("linear", "yarn")
    expected = {
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": kind if scaled else "none",
        "rope.scaling.factor": rope["factor"] if scaled else 1.0,
    }
    if kind == "yarn":
        expected["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for end in ("beta_fast", "beta_slow"):
            key = f"rope.scaling.yarn_{end}"
            expected[key] = rope.get(end) or _POSITIONS[key]
    if local is not None:
        expected["rope.freq_base_swa"] = local["rope_theta"]
        if local.get("rope_type", "default") != "default":
            yield f"rope_type of sliding attention is {local['rope_type']!r}, expected 'default'"
    for end, value in expected.items():
        found = _value_of(template, key := f"{architecture}.{end}")
        used = _POSITIONS.get(end) if found is None else found
        if not (used == value if isinstance(value, str) else same(used, value)):
            yield f"{key} is {found}, expected {value}" if found is not None else f"it has no {key}, expected {value}"
    factors = next((tensor.data for tensor in template.tensors if tensor.name == ROPE_FREQS), None)
    if (kind in ("llama3", "proportional")) != (factors is not None):
        has = "no " if factors is None else ""
        yield f"the template has {has}{ROPE_FREQS}, but rope_type is {kind!r} in config.json"
    elif factors is not None and (expected_factors := rope_factors(config)) is not None:
        found_factors = torch.from_numpy(factors.astype(np.float64)).flatten()
        alike = found_factors.shape == expected_factors.shape
        if not alike or not torch.allclose(found_factors, expected_factors, rtol=1e-4, atol=0):
            yield f"{ROPE_FREQS} was not computed from rope_parameters {rope}"


def _copy_metadata(template: Any, writer: Any) -> None:
    """Copy the template's metadata to a ``gguf.GGUFWriter``, except keys that begin as in :data:`_NOT_COPIED`."""
    array = gguf_package().GGUFValueType.ARRAY
    for name, entry in template.fields.items():
        if not name.startswith(_NOT_COPIED):
            kind = entry.types[0]
            writer.add_key_value(name, entry.contents(), kind, entry.types[-1] if kind == array else None)


# Bytes of a metadata value by its type; 8 is a string, 9 an array.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS


def check_header(path: Path) -> None:
    """Check that the header of a little-endian GGUF file fits into the file; else raise ValueError.

    The package gguf trusts the 64-bit counts and lengths of a header, so a file of 100 bytes could keep it busy for
    centuries. A header (ggml's docs/gguf.md) has a magic number, a version, and the counts of tensors and of metadata
    entries; then for each metadata entry a key, a type and a value, and for each tensor a name, its dimensions, a type
    and an offset.
    """
    size = path.stat().st_size
    with path.open("rb") as file:

        def skip(count: int) -> None:
            if count > size - file.tell():
                raise ValueError(f"its header announces {count:,} bytes after byte {file.tell():,} of {size:,}")
            file.seek(count, os.SEEK_CUR)

        def number(kind: str) -> int:
            width = struct.calcsize(kind)
            skip(width)
            file.seek(-width, os.SEEK_CUR)
            return int(struct.unpack(kind, file.read(width))[0])

        def skip_values(kind: int, count: int) -> None:
            if kind == _TEXT:
                for _ in range(count):
                    skip(number("<Q"))
            elif kind in _VALUE_BYTES:
                skip(_VALUE_BYTES[kind] * count)
            else:
                raise ValueError(f"a metadata value has the unknown type {kind}")

        if file.read(4) != b"GGUF" or number("<I") not in (2, 3):
            raise ValueError("it does not begin like a little-endian GGUF file of version 2 or 3")
        tensors, metadata = number("<Q"), number("<Q")
        for _ in range(metadata):
            skip_values(_TEXT, 1)
            kind = number("<I")
            inner, count = (number("<I"), number("<Q")) if kind == _ARRAY else (kind, 1)
            skip_values(inner, count)
        for _ in range(tensors):
            skip_values(_TEXT, 1)
            dimensions = number("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
            skip(8 * dimensions + 4)
            if number("<Q") > size:
                raise ValueError("a tensor begins after the end of the file")
