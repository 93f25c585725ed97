"""Everything here needs a GPU, and is skipped without one."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu():
    """The current CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda")
