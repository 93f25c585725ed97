"""launch/smooth.py on two ranks, which share weights and text, against one process."""

import re

import pytest
import torch

from tests.lib.checkpoints import edit_json, read_tensors
from tests.lib.launcher import run_ranks, run_waiting
from tests.lib.root import ROOT
from tests.lib.tiny import TEXT, tiny_checkpoint
from tools.outliers import smooth_checkpoint

SCRIPT = ROOT / "launch" / "smooth.py"


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_two_ranks_equal_one_process(kind, tmp_path):
    source, text = tiny_checkpoint(tmp_path / "model", kind), tmp_path / "text"
    text.write_text(TEXT * 3)
    edit_json(source / "config.json", max_position_embeddings=64)  # three windows: the second rank repeats one
    options = ("--model", source, "--text", text, "--tokens", 150, "--strength", 0.75)
    output = run_ranks(SCRIPT, *options, "--out", tmp_path / "two")
    one, alone = tmp_path / "one", torch.device("cpu")
    tensors, norms = smooth_checkpoint(source, one, text, tokens=150, strength=0.75, device=alone)
    assert f"{tmp_path}/two: {tensors} tensors, inputs behind {norms} norms smoothed" in output
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in (tmp_path / "two").iterdir())
    found, expected = read_tensors(tmp_path / "two"), read_tensors(one)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    before = read_tensors(source)
    assert any(not torch.equal(before[key], found[key]) for key in found)


def test_a_job_ends_with_an_exit_code_and_the_text_once(tmp_path):
    source, text = tiny_checkpoint(tmp_path / "model"), tmp_path / "text"
    text.write_text(TEXT)
    code, output = run_waiting(SCRIPT, "--model", source, "--text", text, "--out", source)
    assert code == 1 and re.search(rf"error: rank 0: {source} is not empty", output), output
    assert output.count("is not empty") == 1 and "Traceback" not in output, output
