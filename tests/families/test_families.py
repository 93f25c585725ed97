"""No family is silently wrong: each of the zoo does all that a user does with it, or is refused by name."""

from pathlib import Path

import pytest

from benchmarks.families import PAGE, measure, verdict
from tests.families.variants import VARIANTS

LEAST_WORKING = 100
WORKS = ("works", "works without packing", "works with layers exempt", "works dequantized")


@pytest.mark.full
def test_every_family_works_as_the_page_says_or_is_refused(tmp_path: Path):
    found = {name: verdict(outcome.stages) for name, outcome in measure(list(VARIANTS), tmp_path).items()}
    assert not {name: why for name, (kind, why) in found.items() if kind == "wrong"}
    multiline = {name: why for name, (kind, why) in found.items() if kind == "refused" and "\n" in why.strip()}
    assert not multiline, "a refusal is one line"
    assert sum(kind in WORKS for kind, _ in found.values()) >= LEAST_WORKING
    page = PAGE.read_text(encoding="utf-8")
    assert not [name for name, (kind, _) in found.items() if f"| {name} | {kind} |" not in page]
