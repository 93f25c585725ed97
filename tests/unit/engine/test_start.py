"""A run from Python is checked as one from the command line, before any work."""

from pathlib import Path

from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_sections
from tests.lib.tiny import tiny_checkpoint
from tests.unit.engine.checkpoint.steps import write_step

RUN = """
import sys
from engine.loop import Loop
from model.ranks import RankError

for path in sys.argv[1:]:
    try:
        Loop.from_recipe(path).run()
    except RankError as error:
        print("refused:", error)
"""


def test_files_and_directories_are_checked(tmp_path: Path) -> None:
    """A directory whose checkpoints DeepSpeed cannot load, a file of data that is named twice, and another stage."""
    chats = write_chats(tmp_path / "chats.jsonl")
    (tmp_path / "again.jsonl").symlink_to(chats)
    shared = {"model": {"path": str(tiny_checkpoint(tmp_path / "model", "qwen3"))}, "deepspeed": "zero0"}
    twice = {"train": [str(chats), str(tmp_path / "again.jsonl")]}
    step = write_step(tmp_path / "stage" / "checkpoints", 1)  # under stage 3
    resumed = {"data": {"train": [str(chats)]}, "output_dir": str(tmp_path / "stage")}
    (step / "recipe.yaml").write_text(write_sections(tmp_path, "before", **shared, **resumed).read_text())
    paths = [
        write_sections(tmp_path, "name", **shared, data={"train": [str(chats)]}, output_dir=str(tmp_path / "x[1]")),
        write_sections(tmp_path, "twice", **shared, data=twice, output_dir=str(tmp_path / "out")),
        write_sections(tmp_path, "stage", **shared, **resumed, train={"steps": 2, "resume": True}),
    ]
    done = run_python(RUN, *paths)
    assert done.returncode == 0, done.stderr
    name, data, stage = done.stdout.splitlines()  # no line about data or weights
    assert "output_dir" in name and "expected no *, ? or [" in name and "data.train[1]" in data
    assert "was written under ZeRO stage 3, but this run has stage 0" in stage
    assert not (tmp_path / "x[1]").exists() and not (tmp_path / "out").exists()
