"""launch/study.py as a user starts it: parts on two ranks, the table; a second call makes nothing again."""

import os
import subprocess
import sys

import pytest

from tests.lib.launcher import free_port
from tests.lib.patience import PATIENCE
from tests.lib.processes import CPU
from tests.lib.recipes import write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import TEXT, tiny_checkpoint

PARTS = ("ft", "ptq", "ptq_gptq", "qat")
pytestmark = pytest.mark.full  # five launches


def study(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "study.py"), *words]
    environment = {**os.environ, **CPU}
    return subprocess.run(command, env=environment, text=True, check=False, capture_output=True, timeout=PATIENCE)


def test_the_parts_and_their_table(tmp_path):
    model, text = tiny_checkpoint(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(TEXT * 100)
    sections = {"data": {"kind": "text", "max_length": 32}, "train": {"steps": 3}, "export": {"enabled": True}}
    sections |= {"quant": {"scheme": "w4a16_channel"}}
    recipe = write_recipe(tmp_path, "run", model, text, stage=3, dtype="float32", **sections)
    launcher = f"deepspeed --num_gpus 2 --master_port {free_port()}"
    words = ["--launcher", launcher, "--text", str(text), "--config", str(recipe), "--ptq_codes", "gptq"]
    first = study(*words)
    assert first.returncode == 0, first.stdout[-4000:] + first.stderr[-4000:]
    commands = [line for line in first.stdout.splitlines() if line.startswith("$ ")]
    scripts = " ".join(line.partition("launch/")[2].split()[0] for line in commands)
    assert scripts == "train.py calibrate.py calibrate.py train.py compare.py"
    table = (tmp_path / "run" / "compare.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if "w4a16_channel " in line]
    perplexities = {row[1]: row[3:5] for row in rows if len(row) > 4}
    assert set(perplexities) == {"w4a16_channel rtn", "w4a16_channel gptq"} and "fp32" in table, table
    (nearest, of_nearest), (gptq, of_gptq) = (perplexities[f"w4a16_channel {codes}"] for codes in ("rtn", "gptq"))
    assert of_nearest == of_gptq and nearest != gptq, "one QAT beside two PTQs"
    made = {part: (tmp_path / "run" / part / "export" / "model.safetensors").stat() for part in PARTS}

    second = study(*words)
    assert second.returncode == 0 and second.stdout.count("$ ") == 1
    assert (tmp_path / "run" / "compare.md").read_text() == table
    for part, before in made.items():
        assert (tmp_path / "run" / part / "export" / "model.safetensors").stat() == before

    other = study(*words, "--train.steps", "4")
    assert other.returncode == 2 and "ft was made by another recipe" in other.stderr
