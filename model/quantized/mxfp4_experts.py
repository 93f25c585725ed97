"""Read gpt-oss experts in MXFP4, with the Linears of all experts of a layer in one tensor of codes and one of scales.

``<stack>_blocks`` uint8 [E, out, in / 32, 16], two e2m1 codes a byte, the first in the low half; ``<stack>_scales``
uint8 [E, out, in / 32], the exponent of a power of two plus 127. Rows are outputs, though transformers' decoded
matrices are transposed. So an expert's bytes are those of a Linear in compressed-tensors' MXFP4.
"""

import torch

from model.checkpoint.safetensors import Checkpoint, DiskTensor
from model.quantized.tensor import QuantizedTensor
from quant import Scheme

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of keys, after the name of the stack
_BYTES = 16  # per block


def read_blocks(
    checkpoint: Checkpoint, scheme: Scheme
) -> tuple[dict[str, QuantizedTensor], dict[str, DiskTensor], list[str]]:
    """Read experts with the results of :func:`model.quantized.compressed_tensors.read_quantized`: each Linear is named
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
    """Problem of the tensors of a stack, if any."""
    if codes.dtype != torch.uint8 or len(codes.shape) != 4 or codes.shape[-1] != _BYTES:
        return f"its blocks are {codes.kind} {list(codes.shape)}, expected U8 [experts, out, in / 32, {_BYTES}]"
    if scale is None:
        return f"{SCALES.removeprefix('_')} missing beside its blocks"
    if scale.dtype != torch.uint8 or scale.shape != codes.shape[:-1]:
        return f"its scales are {scale.kind} {list(scale.shape)}, expected U8 {list(codes.shape[:-1])}"
    return None


def _of_expert(tensor: DiskTensor, expert: int, shape: tuple[int, int]) -> DiskTensor:
    """Byte range of one expert in a tensor."""
    size = (tensor.end - tensor.begin) // tensor.shape[0]
    begin = tensor.begin + expert * size
    return tensor._replace(shape=shape, begin=begin, end=begin + size)
