"""launch/evaluate.py on two ranks, with and without sharding, against a direct computation in one process."""

import os
import re
from pathlib import Path

import pytest
import torch

from model.checkpoint.fingerprint import digest_of_checkpoint
from tests.lib.launcher import run_ranks, run_waiting
from tests.lib.root import ROOT
from tests.lib.tiny import TEXT, tiny_checkpoint, tiny_model, tiny_tokenizer
from tools.evaluation.perplexity import load_for_evaluation, read_eval_text
from tools.evaluation.results import read_evaluations

SCRIPT = ROOT / "launch" / "evaluate.py"
COMPARE = ROOT / "launch" / "compare.py"
LENGTH = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluate")
    # 3 batches of windows for 2 ranks: the second rank repeats one that must not count.
    (directory / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    models = [tiny_checkpoint(directory / kind, kind, dtype=torch.float32) for kind in ("qwen3", "qwen3_moe")]
    return directory / "text.txt", models


def predictions(kind: str, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (fp64) for each token of the text, and the tokens, with transformers' own model."""
    text = read_eval_text(path, tiny_tokenizer())
    model = tiny_model(kind, dtype=torch.float32).eval()
    model.config._experts_implementation = "eager"  # grouped_mm wants sizes that tiny experts do not have
    stream, found = [text.prefix, *text.token_ids], []
    for start in range(0, len(text.token_ids), LENGTH):
        stop = min(start + LENGTH, len(text.token_ids))
        with torch.no_grad():
            logits = model(torch.tensor([stream[stop - LENGTH : stop]])).logits.double()
        found.append(logits[0, start - stop :].log_softmax(-1))
    return torch.cat(found), torch.tensor(text.token_ids)


def expected(kind: str, path: Path) -> float:
    """Perplexity per token."""
    found, tokens = predictions(kind, path)
    return found.gather(-1, tokens[:, None]).mean().neg().exp().item()


def divergence(path: Path, reference: str, other: str) -> tuple[float, float]:
    """KL(reference || other) per token, and the share of equal top tokens."""
    (p, _), (q, _) = predictions(reference, path), predictions(other, path)
    return (p.exp() * (p - q)).sum(-1).mean().item(), p.argmax(-1).eq(q.argmax(-1)).double().mean().item()


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_equal_one_process(files, sharded, tmp_path):
    path, models = files
    arguments = [part for model in models for part in ("--model", str(model))]
    output = run_ranks(
        SCRIPT, *arguments, "--text", path, "--reference", models[0], "--length", LENGTH, "--batch_size", 2,
        "--dtype", "float32", "--json", tmp_path / "found.json", *(["--sharded"] if sharded else []),
    )  # fmt: skip
    tokens = len(tiny_tokenizer()(TEXT * 3)["input_ids"])
    evaluations = read_evaluations(tmp_path / "found.json")
    for kind, model, found in zip(("qwen3", "qwen3_moe"), models, evaluations, strict=True):
        assert found.model == str(model) and found.weights_bytes == (model / "model.safetensors").stat().st_size
        measured = found.measurements["perplexity per token"]
        # fp32 sums in another order differ in the sixth digit.
        assert measured.value == pytest.approx(expected(kind, path), rel=1e-5)
        assert re.fullmatch(rf"{tokens} tokens of text [0-9a-f]+, windows of 16, float32", measured.conditions)
        assert re.search(
            rf"^{re.escape(str(model))} +{measured.value:.4f} .*{measured.conditions}", output, re.MULTILINE
        )
    itself, other = (found.measurements for found in evaluations)
    assert (itself["KL divergence per token"].value, itself["top-token agreement"].value) == (0, 1)
    # The reference is named by its content: results of several machines are comparable.
    assert f"against checkpoint {digest_of_checkpoint(models[0])[:12]}, " in other["KL divergence per token"].conditions
    kl, agreement = divergence(path, "qwen3", "qwen3_moe")
    assert other["KL divergence per token"].value == pytest.approx(kl, rel=1e-4) and kl > 0.1
    assert other["top-token agreement"].value == pytest.approx(agreement, abs=1e-9) and agreement < 1


def test_errors_are_one_line_and_exit_code_1_before_models_are_read(files, tmp_path):
    path, (dense, moe) = files
    (no := tmp_path / "file").write_text("")
    both = ("--bf16", dense, "--ptq", f"a={moe}")
    for script, arguments, said in (
        (SCRIPT, ("--model", dense, "--model", tmp_path), f"{tmp_path}"),
        (SCRIPT, ("--model", dense, "--json", no / "a.json"), f"rank 0: --json '{no}/a.json': cannot be written ("),
        (COMPARE, (*both, "--out", no), f"rank 0: --out '{no}/compare.json': cannot be written ("),
    ):
        code, output = run_waiting(script, *arguments, "--text", path)
        assert code == 1 and re.search(rf"error: .*{re.escape(said)}", output), output
        assert not any(text in output for text in ("Traceback", "ppl/token", "evaluate: ")), output
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "compressed-tensors"}}')
    _, output = run_waiting(COMPARE, "--bf16", tmp_path, "--qat", f"a={no}", "--text", path)
    assert f"warning: --bf16: {tmp_path} is quantized" in output and f"{no}: neither a checkpoint" in output


def test_tasks_of_lm_evaluation_harness_equal_one_process(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is optional: pip install lm-eval==0.4.13")
    from tests.unit.tools.evaluation.test_tasks import write_tasks
    from tools.evaluation.tasks import load_tasks

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
