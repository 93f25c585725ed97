"""The end of a run whose export fails."""

from types import SimpleNamespace

import pytest

from engine import loop
from model.ranks import RankError
from tests.lib.recipes import minimal


def test_where_the_checkpoint_fails_after_the_export_both_reasons_are_said(monkeypatch):
    def fails(*_: object) -> None:
        raise RankError(reasons.pop(0))

    state = SimpleNamespace(recipe=minimal(), loader=SimpleNamespace(first=lambda count: []), session=None, quant=None)
    for name in ("export_trained", "save"):
        monkeypatch.setattr(loop, name, fails)
    reasons = ["/served was not written: no space", "/run was not written: no space either"]
    with pytest.raises(
        RankError, match=r"\A/served was not written: no space\n/run was not written: no space either\Z"
    ):
        loop._export(state)
