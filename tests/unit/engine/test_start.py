"""What a run writes before its first step: where it cannot, the message opens with the recipe's key."""

import pytest

from engine.cluster.job import RunLock
from engine.config.config import Recipe
from engine.start import _take_output
from model.ranks import RankError
from tests.unit.engine.config.ds_files import recipe


def written_to(directory: str) -> Recipe:
    made = recipe("zero3", "bfloat16")
    made.output_dir = directory
    return made


def test_a_directory_that_cannot_be_made() -> None:
    with RunLock() as run_lock, pytest.raises(RankError, match=r"^output_dir: \[Errno 2\].*'/proc/nothing'$"):
        _take_output(written_to("/proc/nothing/run"), run_lock)
