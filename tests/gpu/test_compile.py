"""A decoder layer under torch.compile on a GPU; the checks, and what they allow, are those of the CPU's test."""

import pytest
import torch

from tests.unit.quant.kernels.test_compile import WAYS, check, fresh  # noqa: F401  (a fixture)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_by_inductor(way, seed):
    if WAYS[way][2] and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 tensor cores begin with compute capability 8.9")
    check(way, torch.bfloat16, "inductor", device="cuda")
