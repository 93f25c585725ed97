"""Tasks of lm-evaluation-harness on two ranks, weights sharded, against one process."""

import os

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is optional: pip install lm-eval==0.4.13")

from tests.lib.launcher import run_ranks
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint, tiny_tokenizer
from tests.unit.tools.evaluation.test_tasks import write_tasks
from tools.evaluation.perplexity import load_for_evaluation
from tools.evaluation.results import read_evaluations
from tools.evaluation.tasks import load_tasks

SCRIPT = ROOT / "launch" / "evaluate.py"


def test_two_ranks_equal_one_process(tmp_path, monkeypatch):
    folder = write_tasks(tmp_path)
    model = tiny_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.float32)
    monkeypatch.setitem(os.environ, "HF_HOME", str(tmp_path))
    # 4 batches of choices and 3 of text for 2 ranks: one of them runs out.
    run_ranks(
        SCRIPT, "--model", model, "--tasks", "tiny_choice,tiny_text", "--task_dir", folder, "--num_fewshot", 1,
        "--length", 32, "--batch_size", 4, "--dtype", "float32", "--sharded", "--json", tmp_path / "found.json",
    )  # fmt: skip
    expected = load_tasks(["tiny_choice", "tiny_text"], folder, num_fewshot=1).measure(
        load_for_evaluation(model, torch.float32, torch.device("cpu")),
        tiny_tokenizer(), length=32, batch_size=7, dtype="float32",
    )  # fmt: skip
    (found,) = read_evaluations(tmp_path / "found.json")
    assert found.measurements.keys() == expected.keys()
    for name, measured in found.measurements.items():
        assert measured.conditions == expected[name].conditions
        assert measured.value == pytest.approx(expected[name].value, rel=1e-5)
