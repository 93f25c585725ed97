"""Codes and bits that are packed come back, and are packed as compressed-tensors packs them."""

import random

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from quant.formats import packing
from quant.reference import dequantize
from quant.spec import TensorSpec


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_words_are_those_of_compressed_tensors(bits, seed):
    """Bit for bit both ways, for widths that do not fill a word or a group of 32 codes, and for the ends of the grid:
    every bit of every word is 0, then 1."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for columns in (1, 7, 31, 32, 33, 64, 83, random.randrange(1, 400)):
        codes = torch.randint(low, high + 1, (random.randrange(1, 9), columns), dtype=torch.int8)
        words = packing.pack_int32(codes, bits)
        assert torch.equal(words, pack_to_int32(codes, bits)) and words.is_contiguous()
        assert words.shape == (len(codes), packing.packed_columns(columns, bits))
        assert torch.equal(packing.unpack_int32(words, bits, columns), codes)
        across = words.t().clone(memory_format=torch.contiguous_format).t()  # as zero points are stored
        assert torch.equal(packing.unpack_int32(across, bits, columns), codes)
        assert torch.equal(unpack_from_int32(words, bits, codes.shape), codes)
    assert not packing.pack_int32(torch.full((3, 64), low, dtype=torch.int8), bits).any()
    assert (packing.pack_int32(torch.full((3, 64), high, dtype=torch.int8), bits) == -1).all()


def test_nibbles_are_those_of_compressed_tensors(seed):
    """Both ways, every code in both halves of a byte; a negative zero keeps its sign."""
    codes = torch.cat([torch.arange(16).repeat(2, 1), torch.randint(0, 16, (2, 16))]).to(torch.uint8)
    both = torch.cat([codes, codes.roll(1, 1)])
    values = dequantize(both, torch.ones(8, 1), TensorSpec("fp4_e2m1", 4, "group", 16), torch.float32)
    assert torch.equal(packing.pack_nibbles(both), pack_fp4_to_uint8(values))
    assert torch.equal(packing.unpack_nibbles(packing.pack_nibbles(both)), both)
    assert torch.equal(unpack_fp4_from_uint8(packing.pack_nibbles(both), 8, 16, torch.float32), values)


def test_bits_survive_packing(seed):
    """Any shape, one bit each."""
    for shape in ((0,), (1,), (8,), (3, 5), (2, 0, 4), (7, 9, 11), (random.randint(1, 99), random.randint(1, 99))):
        mask = torch.rand(shape) < 0.5
        packed = packing.pack_bits(mask)
        assert packed.dtype == torch.uint8 and packed.shape == ((mask.numel() + 7) // 8,)
        assert torch.equal(packing.unpack_bits(packed, mask.shape), mask)
        if mask.dim() == 2:  # not contiguous
            assert torch.equal(packing.unpack_bits(packing.pack_bits(mask.t()), mask.t().shape), mask.t())
