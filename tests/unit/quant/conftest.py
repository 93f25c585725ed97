"""Fixtures of the tests of quant/."""

import pytest

from quant.kernels import prepare_kernels


@pytest.fixture(scope="module")
def prepared():
    """The kernels, compiled or not: the remark on what cannot be compiled belongs to no test."""
    prepare_kernels()
