"""Parts that scripts share: ends without a traceback before or while a script imports, options, the launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import check_model_path
from launch.scripts import NamedDirectories, find_launcher, int_from, option_parser, path_option
from model import TRANSFORMERS, check_transformers
from tests.lib.processes import run_python
from tests.lib.root import ROOT

# The scripts that look at the path before they import anything heavy.
of_each_script = pytest.mark.parametrize("script", ["train", "calibrate"])
PATH = """
import runpy, sys
try:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
except SystemExit as end:
    print("exit", end.code, "imported", sorted({"torch", "deepspeed", "transformers"} & sys.modules.keys()))
"""


def run(*words: object, cwd) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter, whose modules may be those of ``cwd``."""
    command, env = [sys.executable, *map(str, words)], {**os.environ, "PYTHONPATH": str(cwd)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@of_each_script
def test_nothing_heavy_is_imported_for_a_wrong_path(tmp_path, script):
    """Missing data are named with it."""
    (tmp_path / "there.jsonl").touch()
    data = "{train: [there.jsonl, data/a.jsonl, org/hub_name], eval: [b.jsonl]}"
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: models/Qwen3}}\ndata: {data}\n")
    ended = run("-c", PATH, ROOT / "launch" / f"{script}.py", "--config", "recipe.yaml", cwd=tmp_path)
    assert ended.stdout == "exit 2 imported []\n"
    assert ended.stderr == (
        f"error: model.path: 'models/Qwen3' (in {tmp_path}), expected a directory with config.json "
        "(a local Hugging Face checkpoint)\n"
        f"error: data.train[1]: 'data/a.jsonl' (in {tmp_path}), expected a file\n"
        f"error: data.eval[0]: 'b.jsonl' (in {tmp_path}), expected a file\n"
    )


def test_the_last_path_counts_and_what_is_not_plain_is_left_to_the_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: {path: models/none}\n")
    (tmp_path / "broken.yaml").write_text("model: [")
    (tmp_path / "there").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "there" / name).touch()
    config = ["--config", "recipe.yaml"]
    for passing in (
        [*config, "--model.path", "there"],
        [*config, "--model.path=there"],
        [*config, "--model", "{path: there}"],
        [*config, "--help"],
        ["--config", "broken.yaml"],
        ["--config", "absent.yaml"],
        [],
    ):
        check_model_path(passing)
    for failing in (["--model.path", "there", *config], config, [*config, "--model.path=elsewhere"]):
        with pytest.raises(SystemExit) as end:
            check_model_path(failing)
        assert end.value.code == 2
    (tmp_path / "there" / "config.json").unlink()
    monkeypatch.setenv("LOCAL_RANK", "0")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        check_model_path(["--model.path", "there"])
    assert capsys.readouterr().err.startswith("error: model.path: 'there'")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_model_path(["--model.path", "there"])


@of_each_script
def test_an_interrupt_while_a_script_imports_is_one_line(tmp_path, script):
    """A torch that is interrupted, in the place of the real one."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    ended = run(ROOT / "launch" / f"{script}.py", cwd=tmp_path)
    assert ended.returncode == -signal.SIGINT and ended.stderr == "\ninterrupted\n", ended.stderr


def test_a_transformers_that_is_too_old_is_one_line(tmp_path):
    """The metadata of another version lies before the installed one's."""
    metadata = tmp_path / "transformers-5.17.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    ended = run(ROOT / "launch" / "train.py", "--model.path", tmp_path, cwd=tmp_path)
    said = "error: transformers 5.17.0 is installed, expected 5.23 or newer: pip install -r requirements.txt\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_the_version_that_is_needed_is_the_one_that_is_installed_by_the_requirements():
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert f"\ntransformers=={'.'.join(map(str, TRANSFORMERS))}." in pins
    for good in ("5.23.0", "5.24.0.dev0", "6.0.0rc1"):
        check_transformers(good)
    for old in ("5.22.9", "4.99.0"):
        with pytest.raises(ImportError, match=rf"transformers {old} is installed, expected 5\.23 or newer"):
            check_transformers(old)


def test_beside_the_interpreter_then_in_path(tmp_path, monkeypatch):
    """An environment that is not active, and one whose packages lie in another place than its interpreter."""
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    with pytest.raises(FileNotFoundError, match=f"no deepspeed launcher in {environment} or in PATH"):
        find_launcher()
    for folder in (elsewhere, environment):
        folder.mkdir()
        (folder / "deepspeed").touch(mode=0o755)
        assert find_launcher() == str(folder / "deepspeed")
    monkeypatch.delenv("PATH")
    assert find_launcher() == str(environment / "deepspeed")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rows 1", "argument --rows: 1, expected 2 or more"),
        ("--rows x", "argument --rows: x, expected 2 or more"),
        ("--ptq a", "argument --ptq: 'a', expected NAME=DIR"),
        ("--ptq a=b --ptq a=c", "argument --ptq: a: given twice, b and c"),
        ("--out=true", "argument --out: 'true', expected a path (./true for one of that name)"),
        ("--out None", "argument --out: 'None', expected a path (./None for one of that name)"),
        ("--out=", "argument --out: '', expected a path, in names of at most 255 bytes without NUL"),
        (f"--out {'x' * 256}", "', expected a path, in names of at most 255 bytes without NUL"),
        ("--ro 3", "unrecognized arguments: --ro 3"),
    ],
)
def test_options_that_are_refused(words, said, capsys):
    parser = option_parser("A script.")
    parser.add_argument("--rows", type=int_from(2))
    parser.add_argument("--ptq", action=NamedDirectories, default={})
    parser.add_argument("--out", type=path_option)
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert said in capsys.readouterr().err
    found = parser.parse_args(["--rows", "2", "--ptq", "w4=a=b", "--ptq", "w2=c", "--out", "./true"])
    assert (found.rows, found.ptq, found.out) == (2, {"w4": "a=b", "w2": "c"}, Path("true"))


def test_paths_of_scripts_are_checked_as_those_of_recipes_are():
    """Else ``--out=true`` makes a folder of that name. A file that is only read is not there."""
    unchecked = {
        path.name for path in (ROOT / "launch").glob("*.py") if "type=Path" in path.read_text(encoding="utf-8")
    }
    assert unchecked == {"convert_recipe.py"}


def test_the_quickstart_removes_no_folder_of_the_user(tmp_path):
    (mine := tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for out in (tmp_path, mine):
        done = run_python("from launch.quickstart import main; main()", "--out", out)
        assert done.returncode == 1 and "exists and was not made by this script: name another" in done.stderr
    assert mine.read_text(encoding="utf-8") == "mine"
