"""Fixtures of the tests of sessions."""

from pathlib import Path

import pytest

from tests.lib.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: tiny_checkpoint(base / kind, kind, even=True) for kind in ("qwen3", "qwen3_moe")}
