"""Fixtures of the tests of the kernels."""

import pytest

from quant import kernels
from quant.kernels.build import build


@pytest.fixture(scope="module")
def compiled():
    """What would be tested without a compiler is the reference, against itself."""
    built = build()
    if built.library is None and "no C++ compiler" in built.why:
        pytest.skip(built.why)
    assert built.library is not None, built.why
    kernels.prepare_kernels()
