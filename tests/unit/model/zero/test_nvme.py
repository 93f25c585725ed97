"""Checks of the machine before an optimizer is kept on NVMe: libaio, locked memory, space."""

from pathlib import Path

import pytest

from model.zero import check_space, load_async_io


def test_without_libaio_or_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(ValueError, match="libaio or a compiler is missing: install the package libaio-dev"):
        load_async_io()


def test_a_drive_without_space(tmp_path: Path) -> None:
    check_space(tmp_path, 1000)
    with pytest.raises(ValueError, match=r"GB are free, but the optimizer's files take 16,000,000,000\.0 GB"):
        check_space(tmp_path, 10**18)
