"""Tests that need a GPU, and are skipped without one. A test that asks for ``device`` runs on the CPU too, in small."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu(request):
    """The current CUDA device; a test that asks for ``device``, or ``run`` on one, sees to it itself."""
    if {"device", "run"} & set(request.fixturenames):
        return
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> torch.device:
    """Each of the two, the GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device(request.param)


@pytest.fixture
def fp8(device) -> None:
    """Skips on a GPU without fp8 tensor cores; a CPU multiplies codes with or without."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 tensor cores begin with compute capability 8.9")
