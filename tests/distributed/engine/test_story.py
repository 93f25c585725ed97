"""How much there is to read from launch/train.py to the first optimizer step, and that the docs list it."""

import json
import re
from pathlib import Path

import pytest

from tests.lib.launcher import run_ranks
from tests.lib.recipes import write_ds_config
from tests.lib.root import ROOT
from tests.lib.tiny import TEXT, tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "story.py"
PAGE = ROOT / "docs" / "reading_the_code.md"
# A file of which fewer lines run need not be opened: the name that was imported says what they do.
LEAST_LINES = 12
# What there is today. The goal is 35 files: these numbers may go down, not up.
MOST_FILES, MOST_LINES = 47, 5250


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> dict[str, int]:
    """Lines of functions that ran, by file: two ranks, ZeRO-3, fp8_static, plain text, no teacher."""
    directory = tmp_path_factory.mktemp("story")
    (directory / "text.txt").write_text(TEXT * 100)
    recipe = {
        "model": {"path": str(tiny_checkpoint(directory / "model"))},
        "data": {"kind": "text", "train": [str(directory / "text.txt")], "max_length": 64},
        "train": {"steps": 1},
        "quant": {"scheme": "fp8_static", "calibration_batches": 1},
        "export": {"enabled": False},
        "deepspeed": write_ds_config(directory, "zero3", "zero3"),
        "output_dir": str(directory / "run"),
    }
    file = directory / "recipe.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    run_ranks(SCRIPT, "--config", str(file))
    found = json.loads(file.with_suffix(".json").read_text())
    return {name: lines for name, lines in sorted(found.items()) if lines >= LEAST_LINES}


def test_the_way_to_the_first_step_does_not_get_longer(story):
    files, lines = len(story), sum(story.values())
    assert files <= MOST_FILES and lines <= MOST_LINES, f"{files} files, {lines} lines: {story}"


def test_the_docs_list_what_there_is_to_read(story):
    listed = re.findall(r"^\| `(\w[\w/]*\.py)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(story)
