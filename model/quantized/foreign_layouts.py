"""Weights in the layouts of GPTQ, AWQ and gpt-oss.

GPTQ and AWQ store weights as ``[in, out]``, while the model's weights are ``[out, in]``:

GPTQ (AutoGPTQ, GPTQModel) and AutoRound: ``qweight`` int32 [in * bits / 32, out], a little-endian stream of codes down
each column; ``qzeros`` int32 [groups, out * bits / 32] along each row, with the zero point minus one (``gptq_v2``: the
zero point); ``scales`` [groups, out]; ``g_idx`` int32 [in], the group of each input.

AWQ's ``gemm`` (AutoAWQ): ``qweight`` int32 [in, out / 8] and ``qzeros`` [groups, out / 8], eight 4-bit codes per word
in the order of :data:`AWQ_ORDER`.

In these layouts codes begin at 0, and the value is ``(code - zero point) * scale``. The codes and zero points of this
project are smaller by 2^(bits - 1).

gpt-oss has experts in MXFP4, with the Linears of all experts of a layer in one tensor of codes and one of scales:
``<stack>_blocks`` uint8 [E, out, in / 32, 16], two e2m1 codes a byte, the first in the low half; ``<stack>_scales``
uint8 [E, out, in / 32], the exponent of a power of two plus 127. Rows are outputs, though transformers' decoded
matrices are transposed. So an expert's bytes are the same as for a Linear in compressed-tensors' MXFP4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from model.checkpoint.safetensors import Checkpoint, CheckpointError, DiskTensor, Reader
from model.quantized.tensor import QuantizedTensor
from quant import Rule, Scheme
from quant.formats.packing import unpack_int32

Packing = Literal["gptq", "gptq_v2", "awq"]

# Which of eight neighbors is in each nibble of a word, lowest first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_TOGETHER = 32  # codes that fill whole words for any width
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_ENDS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class ColumnTensor(QuantizedTensor):
    """Weight that is transposed on disk; ``codes``, ``scale`` and ``zero`` are the tensors qweight, scales and
    qzeros."""

    packing: Packing = "gptq"

    def codes_of_rows(self, reader: Reader, rows: slice) -> Tensor:
        """Read the codes of some rows, int8."""
        bits, columns = self.scheme.weights.bits, self.shape[1]
        if self.packing != "awq":
            return unpack_int32(_columns(self.codes, rows, reader).t().contiguous(), bits, columns)
        words = slice(rows.start // 8, -(-rows.stop // 8))
        codes = _awq(_columns(self.codes, words, reader)).t()
        return codes[rows.start - 8 * words.start :][: rows.stop - rows.start].contiguous()

    def scale_of_rows(self, reader: Reader, rows: slice) -> Tensor:
        """Read the fp32 scales of some rows, ``[rows, n]``."""
        return self._checked(_columns(self.scale, rows, reader).t().float().contiguous())

    def scales(self, reader: Reader, start: int, count: int) -> Tensor:
        """Read the fp32 scales [start, start + count) of ``[out, n]``, row-major."""
        across = self.scale.shape[0]
        rows = slice(start // across, -(-(start + count) // across))
        return self.scale_of_rows(reader, rows).view(-1)[start - rows.start * across :][:count]

    def zero_of_rows(self, reader: Reader, rows: slice) -> Tensor | None:
        """Read the fp32 zero points ``[rows, n]`` of some rows; None if the scheme has none.

        Raises:
            CheckpointError: a zero point is out of range, or not in the middle for a symmetric scheme.
        """
        assert self.zero is not None
        spec = self.scheme.weights
        together = 8 if self.packing == "awq" else _TOGETHER
        first, stop = rows.start // together, -(-rows.stop // together)
        each = together * spec.bits // 32  # words
        words = _columns(self.zero, slice(first * each, min(stop * each, self.zero.shape[1])), reader)
        known = min(stop * together, self.shape[0]) - first * together
        zero = _awq(words)[:, :known] if self.packing == "awq" else unpack_int32(words, spec.bits, known)
        zero = zero.t()[rows.start - first * together :][: rows.stop - rows.start].float()
        if self.packing == "gptq":
            zero = zero + 1
        wrong = (zero != 0) if spec.symmetric else (zero > spec.qmax)
        if bool(wrong.any()):
            expected = "the middle, for it is symmetric" if spec.symmetric else f"one of {2**spec.bits} codes"
            found = zero[wrong][0].item() - spec.qmin
            raise CheckpointError(f"{self.file}: {self.zero.key} has the zero point {found:g}, expected {expected}")
        return None if spec.symmetric else zero.contiguous()


def _columns(tensor: DiskTensor, columns: slice, reader: Reader) -> Tensor:
    """Read ``tensor[:, columns]``, one row at a time."""
    assert tensor.dtype is not None
    height, width = tensor.shape
    found = torch.empty(height, columns.stop - columns.start, dtype=tensor.dtype)
    if found.shape[1] == width:
        reader.read(tensor, 0, found.view(-1))
        return found
    for row in range(height):
        reader.read(tensor, row * width + columns.start, found[row])
    return found


def _awq(words: Tensor) -> Tensor:
    """Unpack words ``[n, m]`` to codes int8 ``[n, 8 m]``."""
    codes = torch.empty(*words.shape, 8, dtype=torch.int8)
    for nibble, place in enumerate(AWQ_ORDER):
        codes[..., place] = ((words >> (4 * nibble)) & 0xF) - 8
    return codes.flatten(1)


def read_columns(
    checkpoint: Checkpoint, rules: Sequence[Rule], packing: Packing
) -> tuple[dict[str, QuantizedTensor], dict[str, DiskTensor], list[str]]:
    """Find the quantized weights of a checkpoint with a single scheme; results as in
    :func:`model.quantized.linears.read_quantized`."""
    scheme = next(rule.scheme for rule in rules if rule.scheme is not None)
    tensors = checkpoint.tensors
    coded: dict[str, QuantizedTensor] = {}
    beside: dict[str, DiskTensor] = {}
    problems: list[str] = []
    with Reader() as reader:
        for key, codes in tensors.items():
            name, _, suffix = key.rpartition(".")
            if suffix != "qweight":
                continue
            parts = {end: tensors[f"{name}.{end}"] for end in _ENDS if f"{name}.{end}" in tensors}
            beside |= {part.key: part for part in parts.values()}
            try:
                coded[f"{name}.weight"] = _coded(name, parts, scheme, packing, reader)
            except ValueError as error:
                problems.append(f"{codes.file}: {name}: {error}")
    return coded, beside, problems


def _coded(
    name: str, parts: Mapping[str, DiskTensor], scheme: Scheme, packing: Packing, reader: Reader
) -> ColumnTensor:
    """Combine the tensors of a weight, after checking that they match.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or columns of groups are not consecutive.
    """
    if missing := [end for end in _ENDS[:3] if end not in parts]:
        raise ValueError(f"{', '.join(missing)} missing beside qweight")
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
        dtypes = _SCALES if end == "scales" else (torch.int32,)
        if parts[end].shape != shape or parts[end].dtype not in dtypes:
            raise ValueError(f"{end} is {parts[end].kind} {list(parts[end].shape)}, expected {dtypes[0]} {list(shape)}")
    if "g_idx" in parts:
        index = torch.empty(parts["g_idx"].shape, dtype=parts["g_idx"].dtype or torch.int32)
        reader.read(parts["g_idx"], 0, index.view(-1))
        if not torch.equal(index.long().flatten(), torch.arange(columns) // spec.run_length((rows, columns))):
            raise ValueError("g_idx: its columns were quantized in another order (desc_act), which no scheme here has")
    return ColumnTensor(
        f"{name}.weight", (rows, columns), scheme, codes, parts["scales"], parts["qzeros"], packing=packing
    )


BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of keys, after the name of the stack
_BYTES = 16  # per block


def read_blocks(
    checkpoint: Checkpoint, scheme: Scheme
) -> tuple[dict[str, QuantizedTensor], dict[str, DiskTensor], list[str]]:
    """Find the quantized experts; results as in :func:`model.quantized.linears.read_quantized`. Each Linear is named
    ``<experts>.<index>.<stack>``."""
    tensors = checkpoint.tensors
    coded: dict[str, QuantizedTensor] = {}
    beside: dict[str, DiskTensor] = {}
    problems: list[str] = []
    for key, codes in tensors.items():
        name = key.removesuffix(BLOCKS)
        if name == key:
            continue
        scale = tensors.get(name + SCALES)
        beside |= {each.key: each for each in (codes, scale) if each is not None}
        if problem := _problem(codes, scale):
            problems.append(f"{codes.file}: {name}: {problem}")
            continue
        assert scale is not None
        parent, _, stack = name.rpartition(".")
        experts, rows, groups, _ = codes.shape
        for expert in range(experts):
            linear = f"{parent}.{expert}.{stack}.weight"
            own = _of_expert(codes, expert, (rows, groups * _BYTES)), _of_expert(scale, expert, (rows, groups))
            coded[linear] = QuantizedTensor(linear, (rows, 2 * _BYTES * groups), scheme, *own)
    return coded, beside, problems


def _problem(codes: DiskTensor, scale: DiskTensor | None) -> str | None:
    """Describe a problem of the tensors of a stack, or return None."""
    if codes.dtype != torch.uint8 or len(codes.shape) != 4 or codes.shape[-1] != _BYTES:
        return f"its blocks are {codes.kind} {list(codes.shape)}, expected U8 [experts, out, in / 32, {_BYTES}]"
    if scale is None:
        return f"{SCALES.removeprefix('_')} missing beside its blocks"
    if scale.dtype != torch.uint8 or scale.shape != codes.shape[:-1]:
        return f"its scales are {scale.kind} {list(scale.shape)}, expected U8 {list(codes.shape[:-1])}"
    return None


def _of_expert(tensor: DiskTensor, expert: int, shape: tuple[int, int]) -> DiskTensor:
    """Return the byte range of one expert in a tensor."""
    size = (tensor.end - tensor.begin) // tensor.shape[0]
    begin = tensor.begin + expert * size
    return tensor._replace(shape=shape, begin=begin, end=begin + size)
