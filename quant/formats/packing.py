"""Packing of codes narrower than a byte, as compressed-tensors stores them, and of bit masks (in memory only).

- Integers of 2 to 8 bits: the numbers ``code + 2^(bits - 1)`` of each row form one dense little-endian bitstream in
  int32 words. Code ``i`` occupies bits ``[i * bits, (i + 1) * bits)``, so that at 3 bits some codes straddle two words;
  32 codes fill exactly ``bits`` words.
- Zero points of such integers: the same bitstream, down each column.
- e2m1: two codes in a byte, the first in the low nibble.
"""

import math

import torch


def packed_columns(columns: int, bits: int) -> int:
    """Return the number of int32 words for ``columns`` codes of ``bits`` bits."""
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
    """Unpack int8 codes [out, columns] from int32 words [out, n]; the inverse of :func:`pack_int32`."""
    rows, across = packed.shape
    # Flat first: a single column is contiguous at any stride, but then cannot be viewed as bytes.
    return unpack_rows(packed.reshape(-1).view(torch.uint8).view(rows, 4 * across), bits, columns)


def unpack_rows(rows: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack int8 codes [out, columns] from the bytes of :func:`pack_int32`'s words, uint8 [out, n]."""
    codes = unpack_bytes(rows, bits) if 8 % bits == 0 else _unpack_straddling(rows, bits, columns)
    codes = codes.bitwise_xor_(128).view(torch.int8) if bits == 8 else codes.view(torch.int8).sub_(1 << (bits - 1))
    return codes[:, :columns].contiguous()


def unpack_bytes(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack bytes [out, n], each with 1, 2 or 4 codes (the first in the lowest bits), to unsigned uint8 codes [out, n
    * 8 / bits] in new memory.

    Each byte becomes a word with one byte per code. Operations on whole contiguous tensors are ten times as fast on a
    CPU as one code at a time.
    """
    if bits == 8:
        return rows.clone()
    each = 8 // bits
    words = rows.to(torch.int16 if bits == 4 else torch.int32)
    while each > 1:  # move the upper half of the codes in each segment of a word to its upper half
        each //= 2
        words.bitwise_or_(words << (8 - bits) * each)
    return words.bitwise_and_(_repeated((1 << bits) - 1, 8, words.dtype)).view(torch.uint8)


def _unpack_straddling(rows: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack bytes [out, n] to unsigned uint8 codes [out, at least ``columns``] of a width (3, 5, 6, 7 bits) at which
    codes cross byte boundaries."""
    groups = math.ceil(columns / 8)  # groups of 8 codes fill whole bytes
    rows = torch.nn.functional.pad(rows, (0, groups * bits - rows.shape[1]))
    words = torch.nn.functional.pad(rows.view(-1, groups, bits), (0, 8 - bits)).view(torch.int64)
    for each in (4, 2, 1):  # contiguous codes, initially at the lower end of every 2 * each bytes
        low = (1 << each * bits) - 1
        apart, stay = 8 * each - each * bits, _repeated(low, 16 * each, torch.int64)
        move = _repeated(low << each * bits, 16 * each, torch.int64)
        words = (words & stay) | ((words & move) << apart)
    return words.view(torch.uint8).flatten(1)


def _repeated(pattern: int, distance: int, dtype: torch.dtype) -> int:
    """Compute the integer of ``dtype`` that repeats ``pattern`` every ``distance`` bits."""
    width = 8 * dtype.itemsize
    number = sum(pattern << place for place in range(0, width, distance))
    return number - (1 << width) if number >> (width - 1) else number


def pack_zero_points(zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack zero points [out, groups] of ``bits`` bits into int32 [ceil(out * bits / 32), groups]."""
    return pack_int32(zero.to(torch.int8).t(), bits).t().contiguous()


def unpack_zero_points(packed: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """Unpack int8 zero points [rows, groups] from int32 words; the inverse of :func:`pack_zero_points`."""
    return unpack_int32(packed.t(), bits, rows).t().contiguous()


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack uint8 codes [out, in] of four bits into uint8 [out, in / 2], the even columns in the low nibbles; ``in``
    is even."""
    pairs = codes.contiguous().view(torch.int16)  # the first code of a pair in the low byte
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 codes [out, in] from uint8 [out, in / 2]; the inverse of :func:`pack_nibbles`."""
    return unpack_bytes(packed, 4)


# A product with eight bytes of 0 or 1 collects them in the top byte, the first byte in its lowest bit.
_GATHER_BITS = 0x0102040810204080


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack a bool tensor of any shape into flat uint8 ``[ceil(numel / 8)]``."""
    flat = torch.nn.functional.pad(mask.reshape(-1), (0, -mask.numel() % 8)).contiguous()
    return flat.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Unpack a bool tensor of ``shape`` from flat uint8; the inverse of :func:`pack_bits`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(1)
    return bits.view(-1)[: shape.numel()].view(torch.bool).view(shape)
