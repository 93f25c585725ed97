"""A run from Python is checked as one from the command line, before any work."""

from pathlib import Path

from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_sections
from tests.lib.tiny import tiny_checkpoint

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
    """A directory whose checkpoints DeepSpeed cannot load, and a file of data that is named twice."""
    chats = write_chats(tmp_path / "chats.jsonl")
    (tmp_path / "again.jsonl").symlink_to(chats)
    shared = {"model": {"path": str(tiny_checkpoint(tmp_path / "model", "qwen3"))}, "deepspeed": "zero0"}
    twice = {"train": [str(chats), str(tmp_path / "again.jsonl")]}
    paths = [
        write_sections(tmp_path, "name", **shared, data={"train": [str(chats)]}, output_dir=str(tmp_path / "x[1]")),
        write_sections(tmp_path, "twice", **shared, data=twice, output_dir=str(tmp_path / "out")),
    ]
    done = run_python(RUN, *paths)
    assert done.returncode == 0, done.stderr
    name, data = (line for line in done.stdout.splitlines() if line.startswith("refused:"))
    assert "output_dir" in name and "expected no *, ? or [" in name and "data.train[1]" in data
    assert not (tmp_path / "x[1]").exists() and not (tmp_path / "out").exists()
