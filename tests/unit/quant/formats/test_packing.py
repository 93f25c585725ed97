"""Bits that are packed come back."""

import random

import torch

from quant.formats.packing import pack_bits, unpack_bits


def test_bits_survive_packing(seed):
    """Any shape, one bit each."""
    for shape in ((0,), (1,), (8,), (3, 5), (2, 0, 4), (7, 9, 11), (random.randint(1, 99), random.randint(1, 99))):
        mask = torch.rand(shape) < 0.5
        packed = pack_bits(mask)
        assert packed.dtype == torch.uint8 and packed.shape == ((mask.numel() + 7) // 8,)
        assert torch.equal(unpack_bits(packed, mask.shape), mask)
        if mask.dim() == 2:  # not contiguous
            assert torch.equal(unpack_bits(pack_bits(mask.t()), mask.t().shape), mask.t())
