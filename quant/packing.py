"""Codes narrower than a byte, as compressed-tensors lays them out on disk.

- Integers of 2 to 8 bits: one dense little-endian bitstream per row, of ``code + 2^(bits - 1)``, in int32 words. Code
  ``i`` occupies bits ``[i * bits, (i + 1) * bits)``, so that at 3 bits some codes straddle two words; 32 codes fill
  exactly ``bits`` words.
- Zero points of such integers: the same bitstream, down each column.
- e2m1: two codes in a byte, the first one in the low nibble.
"""

import math

import torch


def packed_columns(columns: int, bits: int) -> int:
    """How many int32 words hold ``columns`` codes of ``bits`` bits."""
    return math.ceil(columns * bits / 32)


def pack_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack signed int8 codes [out, in] of ``bits`` bits into int32 [out, ceil(in * bits / 32)]."""
    rows, columns = codes.shape
    groups = math.ceil(columns / 32)
    unsigned = codes.to(torch.int32) + (1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, groups * 32 - columns)).view(rows, groups, 32)
    words = torch.zeros(rows, groups, bits, dtype=torch.int32, device=codes.device)
    for index in range(32):
        word, offset = divmod(index * bits, 32)
        words[..., word] |= unsigned[..., index] << offset
        if offset + bits > 32:
            words[..., word + 1] |= unsigned[..., index] >> (32 - offset)
    return words.view(rows, groups * bits)[:, : packed_columns(columns, bits)].contiguous()


def unpack_int32(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The int8 codes [out, columns] of words packed by :func:`pack_int32`."""
    if 32 % bits == 0:  # no code straddles two words: few operations, which is what small tensors cost
        places = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
        every = ((packed.unsqueeze(-1) >> places) & ((1 << bits) - 1)) - (1 << (bits - 1))
        return every.to(torch.int8).flatten(1)[:, :columns].contiguous()
    rows, groups = packed.shape[0], math.ceil(columns / 32)
    words = torch.nn.functional.pad(packed, (0, groups * bits - packed.shape[1])).view(rows, groups, bits)
    codes = torch.empty(rows, groups, 32, dtype=torch.int8, device=packed.device)
    for index in range(32):
        word, offset = divmod(index * bits, 32)
        low = min(bits, 32 - offset)
        # The shift is arithmetic and drags the sign bit in; the mask takes it off again.
        value = (words[..., word] >> offset) & ((1 << low) - 1)
        if low < bits:
            value = value | ((words[..., word + 1] & ((1 << (bits - low)) - 1)) << low)
        codes[..., index] = value - (1 << (bits - 1))
    return codes.view(rows, groups * 32)[:, :columns].contiguous()


def pack_zero_points(zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack zero points [out, groups] of ``bits`` bits into int32 [ceil(out * bits / 32), groups]."""
    return pack_int32(zero.to(torch.int8).t(), bits).t().contiguous()


def unpack_zero_points(packed: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """The int8 zero points [rows, groups] of words packed by :func:`pack_zero_points`."""
    return unpack_int32(packed.t(), bits, rows).t().contiguous()


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack uint8 codes [out, in] of four bits into uint8 [out, in / 2]; ``in`` is even."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The uint8 codes [out, in] of bytes packed by :func:`pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
