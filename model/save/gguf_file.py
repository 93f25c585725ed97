"""Plan and write a GGUF file for llama.cpp, to which the plan's tensors stream.

llama.cpp uses its own names and stores all experts of a layer in one tensor. For Llama it interleaves the rows of the
two halves of each head of q and k, for its RoPE. Norms, biases and routers are fp32; other unquantized tensors keep the
model's dtype. Every tensor of the plan has its own offset, so no tensors are collected in memory.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from model.ranks import listed
from model.save.gguf_template import (
    ROPE_FREQS,
    architecture_of,
    check_template,
    copy_metadata,
    gguf_package,
    open_template,
)
from model.save.plan import Item
from model.save.shard_writer import ShardWriter
from quant import QuantLayer
from quant.formats.gguf import BLOCK, BYTES, block_type

GGUF_FILE = "model.gguf"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PLAIN = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class GGUFNames:
    """Map keys of a checkpoint to tensors of a GGUF file.

    Args:
        config: configuration of the model; raises ValueError as :func:`architecture_of` does.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config
        architecture, gguf = architecture_of(config), gguf_package()
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def place(self, key: str) -> tuple[str | None, int]:
        """Return llama.cpp's name of a tensor, or None if it has none, and the tensor's expert index (0 outside of
        experts)."""
        expert = _EXPERT.search(key)
        name = self._names.get_name(_EXPERT.sub(".experts.", key), try_suffixes=(".weight", ".bias"))
        return name, int(expert[1]) if expert else 0

    def heads(self, key: str) -> int:
        """Return the number of heads whose rows are interleaved in the file; 0 if rows are ordered as in
        transformers."""
        end = re.search(r"\.(q|k)_proj\.(weight|bias)$", key)
        if self._config.model_type != "llama" or end is None:
            return 0
        heads: int = self._config.num_attention_heads if end[1] == "q" else self._config.num_key_value_heads
        return heads


@dataclass
class GGUFTensor:
    """Tensor of the file.

    Attributes:
        kind: ggml's name of its type.
        shape: shape of its elements, slowest dimension first, without the dimension of experts.
        parts: keys of the plan's tensors in it, by expert index; a tensor without experts has the index 0.
    """

    kind: str
    shape: tuple[int, ...]
    parts: dict[int, str] = field(default_factory=dict)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape with the dimension of experts, if there is one."""
        return self.shape if not self.of_experts else (len(self.parts), *self.shape)

    @property
    def of_experts(self) -> bool:
        """True if the tensor is a stack of experts."""
        return any(_EXPERT.search(key) for key in self.parts.values())

    @property
    def part_bytes(self) -> int:
        """Number of bytes of one expert, or of a tensor without experts."""
        if self.kind in BYTES:
            return math.prod(self.shape) // BLOCK * BYTES[self.kind]
        return math.prod(self.shape) * (4 if self.kind == "F32" else 2)

    @property
    def part_shape(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of one part as written."""
        if self.kind in BYTES:
            return torch.uint8, (*self.shape[:-1], self.shape[-1] // BLOCK * BYTES[self.kind])
        return next(dtype for dtype, kind in _PLAIN.items() if kind == self.kind), self.shape


@dataclass
class GGUFPlan:
    """Contents of a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the model's architecture.
        tensors: tensors by name, in the order of the file.
        heads: number of heads by key of q or k, whose rows are interleaved by head.
        template: the template, a ``gguf.GGUFReader``.
    """

    architecture: str
    tensors: dict[str, GGUFTensor]
    heads: dict[str, int]
    template: Any

    def written(self, key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert a tensor of the plan to its dtype and row order in the file."""
        if key in self.heads:
            tensor = interleaved(tensor, self.heads[key])
        return tensor.to(dtype).contiguous()

    def rope_freqs(self) -> Tensor | None:
        """Return the template's RoPE frequency factors, fp32; None without them."""
        found = (tensor.data for tensor in self.template.tensors if tensor.name == ROPE_FREQS)
        return next((torch.from_numpy(data.copy()) for data in found), None)

    def types(self) -> dict[str, int]:
        """Count the tensors of each type."""
        kinds = [tensor.kind for tensor in self.tensors.values()]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Interleave both halves of each head in rows ``[heads * 2 * half, ...]``, as in q and k of llama.cpp's Llama."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def plan_gguf(model: PreTrainedModel, items: Iterable[Item], template: Path | None) -> GGUFPlan:
    """Map every tensor of a plan to a GGUF file.

    Args:
        model: determines the architecture.
        items: items of the plan.
        template: a GGUF file of the base model.

    Raises:
        ValueError: there is no template, or it is a template of another model; or there are tensors that a GGUF file
            cannot have, or that only the template has. The text names each of them.
    """
    architecture = architecture_of(model.config)
    if template is None:
        raise ValueError(
            "layout 'gguf' needs a template (export.template, --template), which gives metadata and vocabulary: a GGUF "
            "file of the base model, which llama.cpp's convert_hf_to_gguf.py makes"
        )
    reader = open_template(template)
    check_template(reader, template, model.config)
    tensors, heads = _tensors(model, items, architecture)
    plan = GGUFPlan(architecture, tensors, heads, reader)
    _check_tensors(plan, template, tied=bool(model.config.tie_word_embeddings))
    return plan


def _tensors(
    model: PreTrainedModel, items: Iterable[Item], architecture: str
) -> tuple[dict[str, GGUFTensor], dict[str, int]]:
    """Plan the tensors by name, and the number of heads of tensors whose rows are interleaved."""
    names = GGUFNames(model.config)
    found: dict[str, GGUFTensor] = {}
    heads: dict[str, int] = {}
    nowhere = []
    for item in items:
        for key, (dtype, shape) in item.shapes.items():
            name, expert = names.place(key)
            if name is None or item.copied is not None or item.fused:
                nowhere.append(key)
                continue
            if count := names.heads(key):
                heads[key] = count
            kind = _kind(item, name, key, dtype, shape)
            if kind in BYTES:
                shape = (*shape[:-1], shape[-1] // BYTES[kind] * BLOCK)
            tensor = found.setdefault(name, GGUFTensor(kind, shape))
            if (tensor.kind, tensor.shape) != (kind, shape):
                raise ValueError(
                    f"{key} is {kind} {list(shape)}, other experts of {name} are {tensor.kind} {list(tensor.shape)}: "
                    "llama.cpp has all experts of a layer in one tensor; give them one scheme"
                )
            if expert in tensor.parts:
                raise ValueError(f"{key} and {tensor.parts[expert]} both become {name}")
            tensor.parts[expert] = key
    if nowhere:
        raise ValueError(f"these have no place in a GGUF file of architecture {architecture}: {listed(nowhere, 6)}")
    return found, heads


def _kind(item: Item, name: str, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return ggml's type of a tensor of the plan."""
    if item.layout == "gguf" and key.endswith(".weight"):
        assert isinstance(item.module, QuantLayer)
        return block_type(item.module.scheme)
    # llama.cpp computes with these in fp32, and asserts their type.
    if len(shape) == 1 or name.endswith(("_norm.weight", "ffn_gate_inp.weight")):
        return "F32"
    return _PLAIN[dtype]


def _check_tensors(plan: GGUFPlan, path: Path, *, tied: bool) -> None:
    """Check that a file has all tensors of its template, of the same shapes, and no others."""
    expected = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in plan.template.tensors}
    expected.pop(ROPE_FREQS, None)
    if tied and "output.weight" not in plan.tensors:
        expected.pop("output.weight", None)  # copy of the embeddings, which llama.cpp uses if it is absent
    found = {name: tensor.whole_shape for name, tensor in plan.tensors.items()}
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"the model lacks {listed(missing, 6)}")
    if more := sorted(found.keys() - expected.keys()):
        problems.append(f"it lacks {listed(more, 6)}")
    problems += [
        f"{name} is {list(expected[name])}, the model's is {list(shape)}"
        for name, shape in found.items()
        if name in expected and shape != expected[name]
    ]
    for name, tensor in plan.tensors.items():
        if sorted(tensor.parts) != list(range(len(tensor.parts))):
            problems.append(f"{name} lacks experts")
    if problems:
        raise ValueError(f"{path} is the template of another model: {listed(problems, 4)}")


class GGUFWriter(ShardWriter):
    """Writer of one GGUF file, tensor by tensor, with the errors of :class:`ShardWriter`."""

    def __init__(self, path: Path, plan: GGUFPlan) -> None:
        self._plan = plan
        shapes = {key: tensor.part_shape for tensor in plan.tensors.values() for key in tensor.parts.values()}
        factors = plan.rope_freqs()
        if factors is not None:
            shapes[ROPE_FREQS] = torch.float32, tuple(factors.shape)
        self._dtypes = {key: dtype for key, (dtype, _) in shapes.items()}
        header, begin, size = _head(path.with_name(f"{path.name}.head"), plan)
        super().__init__(path, shapes, (header, begin))
        try:
            os.truncate(path, size)  # the zeros after the last tensor
            if factors is not None:
                super().write_stack([ROPE_FREQS], factors.unsqueeze(0))
        except BaseException:
            self.close()  # the caller has no object to close
            raise

    def write_stack(self, keys: Sequence[str], stack: Tensor) -> None:
        """Write tensors as the base class does, each converted to its dtype in the file."""
        for key, tensor in zip(keys, stack, strict=True):
            super().write_stack([key], self._plan.written(key, tensor, self._dtypes[key]).unsqueeze(0))

    def write_part(self, key: str, start: int, part: Tensor) -> None:
        """Reject parts: no tensor of a GGUF plan is written in parts."""
        raise ValueError(f"{key} comes in parts, which a GGUF file is not made of")


def _head(scratch: Path, plan: GGUFPlan) -> tuple[bytes, dict[str, int], int]:
    """Build the first bytes of the file, the offset of each part, and the file size; ``scratch`` is a temporary file
    that is written and removed."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(scratch, plan.architecture)
    copy_metadata(plan.template, writer)
    types = plan.types()
    file_types = {"Q4_0": "MOSTLY_Q4_0", "Q8_0": "MOSTLY_Q8_0", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16"}
    kind = max((kind for kind in types if kind in file_types), key=types.__getitem__, default="F32")
    writer.add_file_type(gguf.LlamaFileType[file_types.get(kind, "ALL_F32")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    tensors = dict(plan.tensors)
    if (factors := plan.rope_freqs()) is not None:
        tensors[ROPE_FREQS] = GGUFTensor("F32", tuple(factors.shape), {0: ROPE_FREQS})
    begin: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        whole = tensor.part_bytes * len(tensor.parts)
        dtype, shape = tensor.part_shape
        stack = (len(tensor.parts),) if tensor.of_experts else ()
        # Blocks are described by their bytes; for other types the dtype is ignored.
        described = np.uint8 if dtype == torch.uint8 else np.float32
        writer.add_tensor_info(name, (*stack, *shape), described, whole, gguf.GGMLQuantizationType[tensor.kind])
        begin |= {key: end + index * tensor.part_bytes for index, key in tensor.parts.items()}
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
    """Check with llama.cpp's own reader that a file has the planned tensors.

    Raises:
        ValueError: tensors are missing, not planned, or of another type or shape.
    """
    reader = open_template(path)
    found = {t.name: (t.tensor_type.name, tuple(int(size) for size in reversed(t.shape))) for t in reader.tensors}
    found.pop(ROPE_FREQS, None)
    planned = {name: (tensor.kind, tensor.whole_shape) for name, tensor in plan.tensors.items()}
    if wrong := sorted(name for name in planned.keys() | found.keys() if planned.get(name) != found.get(name)):
        raise ValueError(f"{path}: not as planned: {listed(wrong)}")
