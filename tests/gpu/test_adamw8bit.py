"""8-bit moments on a GPU: the checks, and what they allow, are those of the CPU's test."""

import pytest

from tests.lib.moments import KINDS
from tests.unit.engine.session.test_adamw8bit import check_updates


@pytest.mark.parametrize("kind", KINDS)
def test_fused_updates_follow_those_in_fp64(kind, seed):
    check_updates(kind, 0.95, seed, fused=True, device="cuda")
