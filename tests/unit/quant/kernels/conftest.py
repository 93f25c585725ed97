"""Fixtures of the tests of the kernels."""

import pytest

from quant import kernels
from quant.kernels.build_kernels import build


@pytest.fixture(scope="module")
def compiled():
    """The compiled kernels; without a compiler the tests would compare the reference with itself."""
    built = build()
    if built.library is None and "no C++ compiler" in built.why:
        pytest.skip(built.why)
    assert built.library is not None, built.why
    kernels.prepare_kernels()
