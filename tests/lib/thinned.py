"""Select the cases of a test for `make test`; the others come with the large counts."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], *, keep: int = 2) -> list[Any]:
    """Each ``keep``-th case from the first on as it is, the others marked ``full``; a tuple is several values."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*value, marks=[pytest.mark.full] if index % keep else []) for index, value in enumerate(values)
    ]
