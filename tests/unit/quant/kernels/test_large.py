"""Tensors of more elements than 32 bits count."""

import pytest
import torch

from tests.unit.quant.kernels.comparing import OPS

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.full
def test_dequantizing_more_than_2_to_31_elements():
    """Offsets are 64-bit. 2 GiB of codes, 4 GiB of values."""
    numel = 2**31 + 40
    codes = torch.zeros(numel, dtype=torch.int8)
    codes[-40:] = torch.arange(-20, 20)
    codes[2**31 - 1] = 7
    values = OPS.dequantize(codes, torch.tensor([0.5]), None, torch.float32, torch.bfloat16)
    assert torch.equal(values[-40:].float(), torch.arange(-20, 20) * 0.5)
    assert values[2**31 - 1] == 3.5
    for begin in range(0, 2**31 - 1, 2**28):
        assert not values[begin : min(begin + 2**28, 2**31 - 1)].any()


@pytest.mark.full
def test_the_largest_magnitude_of_more_than_2_to_31_elements():
    """At the very end of them; 4 GiB."""
    x = torch.zeros(2**31 + 7, dtype=torch.bfloat16)
    x[-1] = -3
    assert OPS.amax(x, 1).item() == 3
