"""bf16, PTQ and QAT side by side: the recovered share, what is comparable, the files; and the script on checkpoints."""

import math
import subprocess
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from launch.compare import check_missing, read_results
from model.save.export_model import export_model
from quant import SCHEMES
from tests.lib.checkpoints import quantized
from tests.lib.processes import run_python
from tests.lib.tiny import TEXT, tiny_checkpoint
from tools.evaluation.perplexity import EvalText
from tools.evaluation.results import (
    Comparison,
    Evaluation,
    Measurement,
    comparison_tables,
    markdown,
    read_evaluations,
    recovered,
    weights_size,
    write_evaluations,
)

SCHEME = "w4a16_g32"


def perplexity(value: float) -> Measurement:
    return Measurement(value, False, "60,000 tokens of text 0123456789ab, windows of 256, bfloat16")


def accuracy(value: float, stderr: float = 0.01) -> Measurement:
    return Measurement(value, True, "200 samples, 0-shot, requests 0123456789ab, at most 256 tokens, bfloat16", stderr)


def evaluation(model: str, value: float, hits: float, size: int = 1_000_000) -> Evaluation:
    return Evaluation(model, size, {"perplexity per token": perplexity(value), "hellaswag acc": accuracy(hits)})


@pytest.fixture
def comparison():
    """The perplexities are torchao's of the reference run."""
    return Comparison(
        evaluation("ft", 45.44, 0.50),
        {"int2": evaluation("ptq2", 52.28, 0.30, 160_000), "int4": evaluation("ptq4", 45.62, 0.496, 280_000)},
        {"int2": evaluation("qat2", 47.18, 0.45, 160_000), "int3": evaluation("qat3", 45.83, 0.49, 220_000)},
    )


@pytest.mark.parametrize(
    ("figure", "bf16", "ptq", "qat", "share"),
    [
        (perplexity, 45.44, 52.28, 47.18, 5.10 / 6.84),
        (perplexity, 10, 20, 10, 1),
        (perplexity, 10, 20, 25, -0.5),  # training did harm
        (perplexity, 10, 20, 9, 1.1),
        (accuracy, 0.5, 0.3, 0.45, 0.75),  # accuracies fall; the share is the same formula
        (accuracy, 0.5, 0.3, 0.2, -0.5),
        (perplexity, 45.44, 45.62, 45.53, None),  # 0.4% of the perplexity is noise
        (perplexity, 45.44, 45.0, 44.0, None),  # PTQ was better
        (accuracy, 0.5, 0.495, 0.5, None),  # less than a standard error
        (accuracy, 0.5, 0.52, 0.54, None),
    ],
)
def test_recovered_share(figure, bf16, ptq, qat, share):
    found = recovered(figure(bf16), figure(ptq), figure(qat))
    assert found == (share if share is None else pytest.approx(share))


def test_the_size_of_a_checkpoint_is_that_of_the_files_that_are_read(tmp_path):
    """Some models are published with a second copy of their weights, under other names."""
    for name in ("model", "consolidated"):
        save_file({"weight": torch.zeros(1000)}, tmp_path / f"{name}.safetensors")
    assert weights_size(tmp_path) == (tmp_path / "model.safetensors").stat().st_size


def test_table(comparison):
    first, second = comparison_tables(comparison).split("\n\nhellaswag acc")
    heading, _, *lines = first.splitlines()
    assert heading.startswith("perplexity per token (lower is better): 60,000 tokens")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set("".join(rows.pop(1))) == set("-:")
    assert rows == [
        ["", "bf16", "PTQ", "QAT", "recovered", "file", "of bf16"],
        ["bf16", "45.44", "", "", "", "1.00 MB", ""],
        ["int2", "45.44", "52.28", "47.18", "75%", "0.16 MB", "16%"],
        ["int4", "45.44", "45.62", "", "", "0.28 MB", "28%"],
        ["int3", "45.44", "", "45.83", "", "0.22 MB", "22%"],
    ]
    assert second.startswith(" (higher is better): 200 samples")
    assert "| 0.5000 ±0.01 | 0.3000 ±0.01 | 0.4500 ±0.01 |       75% |" in second
    assert len(set(map(len, lines))) == 1, "columns are aligned"


def test_what_was_measured_in_fp32_is_not_called_bf16(comparison):
    assert comparison.level == "bf16"
    for side in ({"": comparison.bf16}, comparison.ptq, comparison.qat):
        for model in side.values():
            for name, found in model.measurements.items():
                model.measurements[name] = replace(found, conditions=found.conditions.replace("bfloat16", "float32"))
    assert comparison.problems() == []
    assert "- fp32: `ft`" in markdown(comparison) and "bf16" not in markdown(comparison)


def test_what_was_measured_in_another_way_is_not_comparable(comparison):
    assert comparison.problems() == []
    other = replace(perplexity(52.28), conditions="40,000 tokens")
    comparison.ptq["int2"].measurements["perplexity per token"] = other
    del comparison.qat["int3"].measurements["hellaswag acc"]
    first, second = comparison.problems()
    assert first == (
        "perplexity per token of ft is of 60,000 tokens of text 0123456789ab, windows of 256, bfloat16; of ptq2 "
        "40,000 tokens"
    )
    assert second == "qat3 has no hellaswag acc, ft has"
    assert comparison.left_out() == []
    del comparison.bf16.measurements["hellaswag acc"]
    assert comparison.left_out() == ["hellaswag acc"]


def test_results_there_and_back(comparison, tmp_path):
    written = [comparison.bf16, *comparison.ptq.values()]
    write_evaluations(tmp_path / "new" / "found.json", written)
    assert read_evaluations(tmp_path / "new" / "found.json") == written
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["found.json"]


def test_a_perplexity_per_word_that_overflows_is_left_out_of_the_file(tmp_path):
    """A line without spaces counts as one word."""
    text = EvalText(token_ids=[1] * 1000, words=1, bytes=3000, prefix=0, digest="")
    figures = {name: perplexity(value) for name, value in text.perplexities(-2000.0).items()}
    assert figures["perplexity per word"].value == math.inf
    write_evaluations(tmp_path / "found.json", [Evaluation("a", 1, figures)])
    (found,) = read_evaluations(tmp_path / "found.json")
    assert found.measurements == {name: one for name, one in figures.items() if name != "perplexity per word"}


FIGURE = '{"evaluations": [{"model": "a", "weights_bytes": 1, "measurements": {"x": %s}}]}'
STRING = '{"value": "1", "higher_is_better": true, "conditions": "", "stderr": null}'


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "Expecting property name"),
        ("[]", "TypeError: list indices"),
        ('{"evaluations": [{"model": "a"}]}', r"KeyError: 'measurements' in evaluations\[0\]\)"),
        ('{"evaluations": [{"model": "a", "measurements": {}}]}', r"'weights_bytes' in evaluations\[0\]\)"),
        (FIGURE % '{"value": 1}', r"'conditions' in evaluations\[0\]\.measurements\['x'\]\)"),
        (FIGURE % STRING, r"value: '1', expected a number in evaluations\[0\]\.measurements\['x'\]\)"),
    ],
)
def test_damaged_results_are_named(tmp_path, content, message):
    (tmp_path / "found.json").write_text(content, encoding="utf-8")
    with pytest.raises(
        ValueError, match=rf"found\.json: expected JSON that launch/evaluate.py --json wrote .*{message}"
    ):
        read_evaluations(tmp_path / "found.json")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python("from launch.compare import main; main()", *arguments)


def test_script(tmp_path):
    """Two checkpoints are evaluated; a third, which is not there, has its results in a file."""
    source = tiny_checkpoint(tmp_path / "bf16", even=True)
    export = tmp_path / "ptq"
    export_model(*quantized(source, SCHEMES[SCHEME]), source, export)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    other, out = tmp_path / "other.json", tmp_path / "out"
    write_evaluations(other, [evaluation("elsewhere/qat", 3.0, 0.5)])
    options = ["--bf16", source, "--ptq", f"{SCHEME}={export}", "--qat", f"{SCHEME}=elsewhere/qat"]
    options += ["--results", other, "--out", out]

    done = run(*options, "--text", tmp_path / "text.txt", "--length", 32)
    assert done.returncode == 1
    assert "error: the results cannot be compared:\nperplexity per token of" in done.stderr, done.stderr
    assert [file.name for file in out.iterdir()] == ["compare.json"], "what was measured is kept"
    bf16, ptq = read_evaluations(out / "compare.json")
    assert (bf16.model, ptq.model) == (str(source), str(export))
    assert bf16.weights_bytes == weights_size(source) > 1.5 * ptq.weights_bytes > 0
    figure = bf16.measurements["perplexity per token"]
    assert figure.value != ptq.measurements["perplexity per token"].value

    qat = Evaluation("elsewhere/qat", 7, {"perplexity per token": replace(figure, value=1.5 * figure.value)})
    write_evaluations(other, [qat])
    done = run(*options, "--results", out / "compare.json")
    assert done.returncode == 0, done.stderr
    assert "evaluate:" not in done.stdout, "nothing is evaluated again"
    for part in (comparison_tables(Comparison(bf16, {SCHEME: ptq}, {SCHEME: qat})), str(out / "compare.md")):
        assert part in done.stdout
    assert read_evaluations(out / "compare.json") == [bf16, ptq, qat]
    assert "- QAT w4a16_g32: `elsewhere/qat`" in (out / "compare.md").read_text(encoding="utf-8")

    shorter = ["--bf16", source, "--ptq", f"{SCHEME}={export}", "--text", tmp_path / "text.txt", "--out", out]
    done = run(*shorter, "--results", out / "compare.json")
    assert done.returncode == 0 and "--text and --tasks have no effect" in done.stdout, done.stderr
    assert read_evaluations(out / "compare.json") == [bf16, ptq, qat], "results that were given stay"


def test_what_is_neither_known_nor_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="no results of a, b: give --text or --tasks to measure them, or"):
        check_missing(["a", "b"], asked=False)
    with pytest.raises(ValueError, match=r"absent: neither a checkpoint directory nor a model in a file of --results"):
        check_missing([str(tmp_path / "absent")], asked=True)
    for name, value in (("a", 1), ("b", 2)):
        write_evaluations(tmp_path / f"{name}.json", [evaluation("m", value, 1)])
    assert list(read_results([tmp_path / "a.json", tmp_path / "a.json"])) == ["m"]
    with pytest.raises(ValueError, match=r"b\.json: m has other results in an earlier file"):
        read_results([tmp_path / "a.json", tmp_path / "b.json"])
