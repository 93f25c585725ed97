"""Tasks of lm-evaluation-harness on tiny models: results against a computation by hand, and what is refused."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is optional: pip install lm-eval==0.4.13")

from lm_eval.api.instance import Instance  # noqa: E402

from model.ranks import RankError  # noqa: E402
from tests.lib.root import ROOT  # noqa: E402
from tests.lib.tiny import tiny_checkpoint, tiny_model, tiny_tokenizer  # noqa: E402
from tests.unit.tools.evaluation.test_perplexity import one_at_a_time  # noqa: E402
from tools.evaluation.perplexity import read_eval_text  # noqa: E402
from tools.evaluation.score import scoring_model  # noqa: E402
from tools.evaluation.tasks import ServedModel, load_tasks  # noqa: E402

QUESTIONS = [
    {"question": "What is 12 plus 30?", "choices": ["42", "a lazy dog", "the assistant said"], "answer": 0},
    {"question": "The quick brown", "choices": ["dog", "fox jumps over", "lazy"], "answer": 1},
    {"question": "The lazy", "choices": ["dog", "fox jumps over the quick dog", "12"], "answer": 0},
    {"question": "What is 30 plus 12?", "choices": ["What?", "30", "12 plus 30 is 42"], "answer": 2},
    # Letters that the tokenizer has not seen are a token each: longer than a window.
    {"question": "Vexed zebus gaze at Zagreb's big yews; why?", "choices": ["over", "said 30", "plus"], "answer": 0},
]
DOCUMENTS = [
    {"page": "The quick brown fox jumps — twice."},
    {"page": "12 plus 30 is 42, said the assistant. " * 8 + "Is it?"},
]
LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def write_tasks(directory: Path) -> Path:
    """Two tasks and a group with a mean, their data beside them."""

    def task(name: str, kind: str, rows: list[dict], metrics: tuple[str, ...], **more: object) -> dict:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        return {
            "task": f"tiny_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}, "cache_dir": str(directory / "cache")},
            "test_split": "test",
            "output_type": kind,
            "metric_list": [{"metric": metric} for metric in metrics],
            "metadata": {"version": 1.0},
            **more,
        }

    texts = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    choice = task("choice", "multiple_choice", QUESTIONS, ("acc", "acc_norm"), fewshot_split="test", **texts)
    perplexities = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    page = {"doc_to_text": "", "doc_to_target": "{{page}}"}
    text = task("text", "loglikelihood_rolling", DOCUMENTS, perplexities, **page)
    mean = {"metric": "acc", "aggregation": "mean", "weight_by_size": True}
    group = {"group": "tiny_group", "task": ["tiny_choice"], "aggregate_metric_list": [mean]}
    for content in (choice, text, group):
        path = directory / f"{content.get('group') or content['task']}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return directory


def scored(seed: int):
    """The tiny model, ready to score."""
    return scoring_model(tiny_model("qwen3", dtype=torch.float32, seed=seed), torch.device("cpu"))


def measured(folder: Path, *names: str, seed: int = 0, length: int | None = LENGTH, **options):
    """The metrics of tasks."""
    tasks = load_tasks(names, folder, **options)
    return tasks.measure(scored(seed), tiny_tokenizer(), length=length, batch_size=4, dtype="float32")


def by_hand(seed: int, context: str, continuation: str) -> float:
    """Log-likelihood of the continuation's tokens; what does not fit is cut from the beginning."""
    tokenizer, model = tiny_tokenizer(), tiny_model("qwen3", dtype=torch.float32, seed=seed).eval()
    ids = tokenizer.encode(context + continuation)
    targets = ids[len(tokenizer.encode(context)) :]
    shown = ids[-LENGTH - 1 :]
    with torch.no_grad():
        log_probs = model(torch.tensor([shown[:-1]])).logits[0].double().log_softmax(-1)
    return sum(log_probs[-len(targets) + at, token].item() for at, token in enumerate(targets))


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_accuracy_is_that_of_the_highest_log_likelihood(folder, seed, offset):
    seed += offset
    hits, norm_hits = 0, 0
    for row in QUESTIONS:
        found = [by_hand(seed, row["question"], " " + choice) for choice in row["choices"]]
        per_character = [value / len(choice) for value, choice in zip(found, row["choices"], strict=True)]
        hits += found.index(max(found)) == row["answer"]
        norm_hits += per_character.index(max(per_character)) == row["answer"]
    metrics = measured(folder, "tiny_choice", seed=seed)
    assert list(metrics) == ["tiny_choice acc", "tiny_choice acc_norm"]
    acc, acc_norm = metrics.values()
    assert (acc.value, acc_norm.value) == (pytest.approx(hits / 5), pytest.approx(norm_hits / 5))
    assert acc.higher_is_better
    # Standard error of a mean of n zeros and ones, with Bessel's correction.
    assert acc.stderr == pytest.approx(math.sqrt(acc.value * (1 - acc.value) / 4))
    assert re.fullmatch(r"5 samples, 0-shot, requests [0-9a-f]{12}, at most 32 tokens, float32", acc.conditions)


def test_log_likelihoods_of_continuations(seed):
    assert len(tiny_tokenizer().encode(QUESTIONS[-1]["question"])) > LENGTH, "one that has to be cut"
    pairs = [(row["question"], " " + choice) for row in QUESTIONS for choice in row["choices"]]
    served = ServedModel(scored(seed), tiny_tokenizer(), length=LENGTH, batch_size=4)
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    found = [value for value, _ in served.loglikelihood(requests)]
    assert found == pytest.approx([by_hand(seed, *pair) for pair in pairs], rel=1e-5)


def test_perplexity_of_documents(folder, seed):
    model, texts = tiny_model("qwen3", dtype=torch.float32, seed=seed).eval(), []
    for row in DOCUMENTS:
        (folder / "page.txt").write_text(row["page"], encoding="utf-8")
        texts.append(read_eval_text(folder / "page.txt", tiny_tokenizer()))
    total = sum(one_at_a_time(model, text, LENGTH) for text in texts)
    one, several = (len(text.token_ids) for text in texts)
    assert one < LENGTH < several and several % LENGTH, "one window, and several with a shorter last one"
    words, size = sum(text.words for text in texts), sum(text.bytes for text in texts)
    metrics = measured(folder, "tiny_text", seed=seed)
    assert metrics["tiny_text word_perplexity"].value == pytest.approx(math.exp(-total / words), rel=1e-4)
    assert metrics["tiny_text byte_perplexity"].value == pytest.approx(math.exp(-total / size), rel=1e-5)
    assert metrics["tiny_text bits_per_byte"].value == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert not any(found.higher_is_better for found in metrics.values())


def test_models_get_the_same_requests_examples_included(folder):
    tasks = load_tasks(["tiny_choice"], folder, limit=3, num_fewshot=2)
    first, second = (
        tasks.measure(scored(seed), tiny_tokenizer(), length=None, batch_size=4, dtype="float32")["tiny_choice acc"]
        for seed in (0, 1)
    )
    assert first.conditions == second.conditions
    assert first.conditions.startswith("3 samples, 2-shot, ") and "at most 512 tokens" in first.conditions
    other = measured(folder, "tiny_choice", limit=3, num_fewshot=1)["tiny_choice acc"].conditions
    assert other.split("requests")[1] != first.conditions.split("requests")[1]


def test_a_group_with_a_mean_stands_for_its_tasks(folder):
    metrics = measured(folder, "tiny_group", "tiny_text")
    assert {name.split()[0] for name in metrics} == {"tiny_group", "tiny_text"}
    both = measured(folder, "tiny_group", "tiny_choice")
    assert {name.split()[0] for name in both} == {"tiny_group", "tiny_choice"}, "asked for by name"
    assert metrics["tiny_group acc"].value == measured(folder, "tiny_choice")["tiny_choice acc"].value


def test_agrees_with_the_harness_own_model(folder, seed):
    """In fp32, in which its class, which needs accelerate, does not compute log-softmaxes unasked."""
    pytest.importorskip("accelerate", reason="lm-evaluation-harness' own Hugging Face model needs accelerate")
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    model = tiny_model("qwen3", dtype=torch.float32, seed=seed).eval()
    theirs = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), max_length=LENGTH, batch_size=4, device="cpu")
    tasks = load_tasks(["tiny_choice", "tiny_text"], folder)
    expected = evaluate(theirs, tasks.loaded, bootstrap_iters=0, log_samples=False)["results"]
    for name, found in measured(folder, "tiny_choice", "tiny_text", seed=seed).items():
        task, metric = name.split()
        assert found.value == pytest.approx(expected[task][f"{metric},none"], rel=1e-5)


def altered(folder: Path, into: Path, **changes) -> Path:
    """A folder with a changed ``tiny_choice``."""
    into.mkdir()
    shutil.copy(folder / "choice.jsonl", into)
    content = yaml.safe_load((folder / "tiny_choice.yaml").read_text(encoding="utf-8"))
    (into / "tiny_choice.yaml").write_text(yaml.safe_dump(content | changes), encoding="utf-8")
    return into


@pytest.mark.parametrize(
    "changes, options, message",
    [
        (
            {"dataset_kwargs": {"data_files": {"test": "absent.jsonl"}}},
            {},
            r"task tiny_choice \(.*tiny_choice\.yaml\) cannot be loaded: .*absent\.jsonl[\s\S]*are looked for from",
        ),
        ({"doc_to_text": "{{nothing.at.all}}"}, {}, r"task tiny_choice.*: UndefinedError: 'nothing' is undefined"),
        (
            {"output_type": "generate_until", "generation_kwargs": {"until": ["."]}, "metric_list": []},
            {},
            "output_type generate_until, expected one of loglikelihood, multiple_choice, loglikelihood_rolling",
        ),
        ({"num_fewshot": 0}, {"num_fewshot": 2}, r"--num_fewshot 2: task tiny_choice is made for 0 examples"),
    ],
)
def test_tasks_that_cannot_be_run_are_named_before_a_model_is_loaded(folder, tmp_path, changes, options, message):
    with pytest.raises(RankError, match=message):
        load_tasks(["tiny_choice"], altered(folder, tmp_path / "tasks", **changes), **options)


def test_unknown_tasks_and_broken_files_are_named(tmp_path):
    (tmp_path / "broken.yaml").write_text("task: [", encoding="utf-8")
    (tmp_path / "fine.yaml").write_text("task: fine\ndataset_path: json\n", encoding="utf-8")
    with pytest.raises(RankError, match=r"--tasks absent: expected one in .*: fine\n.*broken\.yaml cannot be read"):
        load_tasks(["absent"], tmp_path)
    with pytest.raises(RankError, match="is not a directory"):
        load_tasks(["absent"], tmp_path / "nowhere")


@pytest.mark.full
def test_without_access_to_the_hub_it_says_what_to_do(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    command = [sys.executable, "launch/evaluate.py", "--model", str(model), "--tasks", "arc_easy"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: task arc_easy (" in done.stderr and "--task_dir" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_continuation_longer_than_the_window_is_refused(folder):
    with pytest.raises(RankError, match=r"a continuation has \d+ tokens, expected 1 to 3: "):
        measured(folder, "tiny_choice", length=3)
