"""launch/show_data.py: rows of every file with what is learned of them, and nothing but JSON with --json."""

import json
import os
import pty
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launch.show_data import main
from tests.lib.processes import run_python
from tests.lib.recipes import write_sections
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_config, tiny_tokenizer
from tests.unit.data.chats import END, turns, write

CHATS = [
    turns(("user", "2+2?"), ("assistant", "4"), ("user", "<|im_end|>?"), ("assistant", "😀 a token.")),
    {"conversations": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]},
    turns(("user", "long " * 60), ("assistant", "no")),
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a recipe of a model without weights; the current directory has its files."""
    monkeypatch.chdir(tmp_path)
    tiny_config("qwen3").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    write(tmp_path / "a.jsonl", *CHATS)
    write(tmp_path / "b.jsonl", *({"input": f"{n}?", "output": str(n)} for n in range(20)))
    write(tmp_path / "c.jsonl", {"input": "c?", "output": "c"})
    (tmp_path / "text.txt").write_text("the 日本語 quick 😀 brown fox\n" * 9, encoding="utf-8")
    data = {"train": ["a.jsonl", "b.jsonl"], "loss_on": "all", "max_length": 100}
    write_sections(tmp_path, data=data, loss={"kd_weight": 0.5, "teacher": "a model that is not here"})
    return ["--config", "recipe.yaml"]


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """The rows that ``--json`` prints; stdout has nothing else."""
    main([*words, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_as_json(recipe, capsys):
    """All rows, in their order; a special token that a user spelled, and an emoji, are as the author wrote them."""
    found = rows(capsys, *recipe)
    assert [(row["file"], row["line"]) for row in found] == [
        ("a.jsonl", 1),
        ("a.jsonl", 2),
        *(("b.jsonl", n + 1) for n in range(20)),
    ]
    assert found[0]["targets"] == ["4" + END, "😀 a token." + END] and found[1]["targets"] == ["5" + END]
    assert [row["targets"] for row in found[2:]] == [[f"{n}{END}"] for n in range(20)]
    assert found[0]["text"].count(f"<|im_end|>?{END}") == 1 and {row["split"] for row in found} == {"train"}
    for row in found:
        start = 0
        for target in row["targets"]:
            start = row["text"].index("<|im_start|>assistant\n", start) + len("<|im_start|>assistant\n")
            assert row["text"].startswith(target, start)
        assert row["text"].endswith(row["targets"][-1])
    assert len(rows(capsys, *recipe, "--rows", "1")) == 2


def test_overrides_of_the_recipe(recipe, capsys):
    cut = rows(capsys, *recipe, "--data.loss_on", "last", "--data.too_long", "truncate", "--line", "./a.jsonl:3")
    assert len(cut) == 1 and cut[0]["targets"] == ["no" + END] and cut[0]["text"].startswith("long long")
    (last,) = rows(capsys, *recipe, "--data.loss_on", "last", "--line", "a.jsonl:1")
    assert last["targets"] == ["😀 a token." + END]


def test_held_out_and_evaluation_files_are_not_learned(recipe, capsys):
    words = [*recipe, "--data.eval", "[c.jsonl]", "--eval.every", "1", "--data.held_out", "6"]
    found = rows(capsys, *words)
    assert [row["split"] for row in found] == ["train"] * 16 + ["held_out"] * 6 + ["eval"]
    assert len({(row["file"], row["line"]) for row in found}) == 23
    main([*words, "--rows", "0"])
    out = capsys.readouterr().out
    assert "never trained on: " in out and out.count("c.jsonl: 1 sample of data.eval to evaluate on") == 1


def test_nothing_is_learned_of_skipped_lines(recipe, capsys):
    found = rows(capsys, *recipe, "--data.skip", "[b.jsonl:4]")
    assert [(row["line"], row["targets"]) for row in found if row["split"] == "skip"] == [(4, [])]
    assert sum(row["split"] == "train" for row in found) == 21
    main([*recipe, "--data.skip", "[b.jsonl:4]"])
    assert (
        "b.jsonl: 1 sample named in data.skip, of which nothing is learned: 16 tokens, 0 of" in capsys.readouterr().out
    )


def test_plain_text(recipe, capsys):
    words = [*recipe, "--data.kind", "text", "--data.loss_on", "last", "--data.train", "[text.txt]"]
    found = rows(capsys, *words, "--data.max_length", "1000")
    text = Path("text.txt").read_text(encoding="utf-8")
    assert found == [{"file": "text.txt", "line": None, "split": "train", "text": text, "targets": [text[3:]]}]
    main([*words, "--data.max_length", "6", "--rows", "1", "--json"])
    said = capsys.readouterr()
    assert "1 sample has a character that is cut in two: its bytes are written as \\x.." in said.err
    main([*words, "--data.max_length", "6", "--rows", "1"])
    assert "bytes of a character that is cut in two\nthe[[ 日\\xe6\\x9c]]" in capsys.readouterr().out


def test_counts_and_marked_rows(recipe, capsys):
    main(recipe)
    out = capsys.readouterr().out
    assert "data: a.jsonl: 2 samples of 3 lines" in out and "dropped 1 too long" in out
    assert out.count("\n--- ") == 2 + 3 and "b.jsonl:3:" in out and "b.jsonl:4:" not in out
    assert f"<|im_start|>assistant\n[[4{END}]]\n<|im_start|>user" in out and "\x1b" not in out


def test_the_output_in_the_docs(recipe, capsys):
    """The example chats of docs/data.md, as the page prints them."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    Path("chats.jsonl").write_text(page.partition("```json\n")[2].partition("```")[0])
    Path("recipe.yaml").write_text(
        "{model: {path: model}, data: {train: [chats.jsonl]}, train: {steps: 1}, output_dir: out}"
    )
    main([*recipe, "--rows", "1"])
    assert f"```text\n{capsys.readouterr().out}```" in page


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--data.train [none.jsonl]", 2, "data.train[0]: 'none.jsonl' (in"),
        ("--model.path absent", 2, "model.path: 'absent' (in"),
        ("--line b.jsonl:99", 2, "--line: b.jsonl:99, expected"),
        ("--rows -1", 2, "--rows: -1, expected 0 or more"),
        ("--row 1", 2, "unrecognized arguments"),
        ("--data.train [bad.jsonl]", 1, "bad.jsonl:1: found invalid JSON"),
        ("--data.max_length 4", 1, "no sample is left of"),
        ("--model.path bare", 1, "bare: expected a tokenizer (tokenizer.json, tokenizer_config.json) that"),
    ],
)
def test_errors_are_one_line(words, code, said, recipe, capsys):
    Path("bad.jsonl").write_text('{"a": }\n')
    tiny_config("qwen3").save_pretrained("bare")
    with pytest.raises(SystemExit) as ended:
        main([*recipe, *words.split(), "--json"])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (code, ""), printed.err
    assert said in printed.err and "Traceback" not in printed.err


def test_colors_only_on_a_terminal(recipe, monkeypatch):
    for no_color, colored in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        ours, its = pty.openpty()
        with os.fdopen(its, "w") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            main([*recipe, "--line", "b.jsonl:7"])
        out = ""
        with os.fdopen(ours, "rb", buffering=0) as file, suppress(OSError):  # the error of a closed end
            while part := file.read(100_000):
                out += part.decode()
        assert (f"\x1b[30;42m6{END}\x1b[0m" in out, f"[[6{END}]]" in out) == (colored, not colored), out


def test_a_reader_that_has_seen_enough(recipe, tmp_path):
    """As a program of its own: nothing but JSON on stdout, and no traceback if stdout is closed."""
    program = "import runpy, sys; sys.argv = sys.argv; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    done = run_python(program, ROOT / "launch" / "show_data.py", *recipe, "--json", cwd=tmp_path)
    assert done.returncode == 0 and len([json.loads(line) for line in done.stdout.splitlines()]) == 22
    closing = "import os; left, right = os.pipe(); os.close(left); os.dup2(right, 1); " + program
    done = run_python(closing, ROOT / "launch" / "show_data.py", *recipe, "--json", cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
