"""Mark for tests that need DeepSpeed's op for NVMe."""

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

needs_libaio = pytest.mark.skipif(
    not AsyncIOBuilder().is_compatible(), reason="libaio or a compiler is missing (package libaio-dev)"
)
