"""metrics.jsonl and trackers of a run: no step twice after a kill, and no tracker that ends or slows it."""

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine import metrics
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from engine.metrics import STARTS, Metrics, MetricsFile, Tracker, import_trackers
from model.ranks import RankError
from tests.lib.processes import run_python
from tests.lib.recipes import minimal, write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_has_one_line_with_all_that_it_logs(tmp_path):
    file = tmp_path / "metrics.jsonl"
    curves = Metrics([MetricsFile(file, done=0)])
    for step in (1, 2):
        curves.log({"loss/lm": step}, step)
        assert [line["step"] for line in lines(file)] == list(range(1, step + 1))  # nothing waits
        curves.histogram("quant/scales", [1.0, 2.0, float("inf")], step)
        curves.log({"eval/perplexity": float("inf"), "loss/z": float("nan")}, step)
    first = lines(file)[0]
    assert first.keys() == {"step", "time", "loss/lm", "quant/scales", "eval/perplexity", "loss/z"}
    assert (first["loss/lm"], first["eval/perplexity"], first["loss/z"]) == (1.0, "Infinity", "NaN")
    assert (first["quant/scales"]["num"], first["quant/scales"]["max"]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="'time', expected another name"):
        curves.log({"time": 1.0}, 3)


@pytest.mark.parametrize("torn", ["", '{"step": 4, "lo', "\0\0\0", '{"step": 2, "loss/lm": 1.0}'])
def test_a_resumed_run_adds_no_step_twice_after_a_kill(tmp_path, torn):
    file = tmp_path / "metrics.jsonl"
    killed = MetricsFile(file, done=0)
    for step in range(1, 4 if torn.startswith('{"step": 4') or not torn else 2):
        killed.log({"loss/lm": 1.0}, step)
    with file.open("a") as end:
        end.write(torn)  # without the end of the line
    resumed = MetricsFile(file, done=2)
    resumed.log({"eval/lm": 3.0}, 2)  # of the start of the resumed run
    resumed.log({"loss/lm": 2.0}, 3)
    *before, second, third = lines(file)
    assert [line["step"] for line in before] == [1]
    assert second["eval/lm"] == 3.0 and ("loss/lm" in second) == (torn != "\0\0\0")
    assert (third["step"], third["loss/lm"]) == (3, 2.0)
    MetricsFile(file, done=0).log({"loss/lm": 9.0}, 1)  # another run in this directory
    assert [line["loss/lm"] for line in lines(file)] == [9.0]


def test_a_file_that_goes_is_a_link_or_cannot_be_written_costs_one_warning(tmp_path, capsys):
    file, elsewhere = tmp_path / "metrics.jsonl", tmp_path / "elsewhere"
    found = MetricsFile(file, done=0)
    found.log({"loss/lm": 1.0}, 1)
    file.unlink()
    found.log({"loss/lm": 2.0}, 2)
    assert [line["step"] for line in lines(file)] == [2]
    file.unlink()
    elsewhere.write_text("mine")
    file.symlink_to(elsewhere)
    found.log({"loss/lm": 3.0}, 3)
    found.log({"loss/lm": 4.0}, 4)
    file.unlink()
    found.log({"loss/lm": 5.0}, 5)
    assert elsewhere.read_text() == "mine" and [line["step"] for line in lines(file)] == [5]
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 and f"warning: {file} cannot be written (" in said


@pytest.mark.parametrize("names", [["wand"], ["wandb", "wandb"], ["all"]])
def test_names_of_trackers_are_checked_with_the_recipe(names):
    with pytest.raises(RecipeError, match=r"^train.report_to: .*expected a list of tensorboard, wandb, mlflow,"):
        minimal(train={"steps": 10, "report_to": names})


def test_a_package_that_is_missing_or_broken_is_refused_and_only_rank_0_imports(tmp_path, monkeypatch):
    recipe = minimal(train={"steps": 10, "report_to": ["tensorboard", "trackio"]})
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trackio").mkdir()  # a folder without a package
    with pytest.raises(RankError, match=r"^train.report_to: 'trackio', but the package trackio is not installed; pip"):
        import_trackers(recipe)
    (tmp_path / "mlflow.py").write_text("raise AttributeError('of another\\nversion')")
    recipe.train.report_to = ["mlflow"]
    with pytest.raises(RankError, match=r"^train.report_to: .*mlflow fails: AttributeError: of another version; pip"):
        import_trackers(recipe)
    monkeypatch.setattr(metrics, "is_main", lambda: False)
    assert import_trackers(recipe) == {}


def stalls(release: threading.Event) -> SimpleNamespace:
    run = SimpleNamespace(log=lambda *_, **__: release.wait(), finish=lambda: None, offline=True)
    return SimpleNamespace(init=lambda **_: run, __file__=__file__)


def test_a_queue_that_is_full_turns_a_tracker_off(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "MOST_WAITING", 3)
    release = threading.Event()
    tracker = Tracker("wandb", stalls(release), minimal(), done=0)
    for step in range(50):
        tracker.log({"loss/lm": 1.0}, step)
    tracker.close(failed=False)
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 and "warning: wandb: it has not taken the last 3 points: it is off" in said
    release.set()


def test_the_end_of_a_run_waits_for_points_but_not_for_a_stall(monkeypatch, capsys):
    sent, run = [], SimpleNamespace()
    run.log = lambda values, step: (time.sleep(0.02), sent.append(step))
    run.finish = lambda **given: sent.append(given)
    tracker = Tracker("wandb", SimpleNamespace(init=lambda **_: run), minimal(), done=0)
    for step in range(20):
        tracker.log({"loss/lm": 1.0}, step)
    tracker.close(failed=True)
    assert sent == [*range(20), {"exit_code": 1}]
    monkeypatch.setattr(metrics, "CALL_SECONDS", 0.2)
    release = threading.Event()
    tracker = Tracker("wandb", stalls(release), minimal(), done=0)
    tracker.log({"loss/lm": 1.0}, 1)
    tracker.close(failed=False)
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 and "wandb: it does not answer for 0 s: it is off from here on" in said
    release.set()


def test_the_end_of_a_run_waits_only_so_long_for_a_slow_tracker(monkeypatch, capsys):
    """Each of its calls ends in time, but many wait."""
    monkeypatch.setattr(metrics, "END_SECONDS", 0.2)
    ended, run = threading.Event(), SimpleNamespace(finish=lambda: None, offline=True)
    run.log = lambda *_, **__: ended.wait(0.1)
    tracker = Tracker("wandb", SimpleNamespace(init=lambda **_: run, __file__=__file__), minimal(), done=0)
    for step in range(900):  # 90 s
        tracker.log({"loss/lm": 1.0}, step)
    tracker.close(failed=False)
    ended.set()
    said = capsys.readouterr().out
    assert re.search(r"warning: wandb: \d+ points still wait 0 s after the last step: it is off", said), said


FAKES = {
    "wandb": """
import json
class Run:
    offline, url = False, "https://wandb.example/run"
    def __init__(self, **given): self.points, self.given = [], given
    def log(self, values, step): self.points.append([step, values])
    def finish(self):
        with open("wandb.jsonl", "a") as file: file.write(json.dumps([self.given, self.points]) + "\\n")
def init(**given): return Run(**given)
""",
    "mlflow": """
params = {}
def set_experiment(name): pass
def get_tracking_uri(): return "here"
def start_run(run_name): pass
def log_params(values):
    assert len(values) <= 100
    params.update(values)
def log_metrics(values, step):
    assert params["train.steps"] in (4, 6) and params["model.dtype"] == "float32", params
    if step in (2, 5): raise SystemExit("the server\\nis gone")
""",
    "trackio": "import threading\ndef init(**_): threading.Event().wait()",
}
RUNS = """
import sys
from engine import metrics
from engine.config.reading import load_recipe
from engine.loop import Loop
from model.ranks import RankError
try:
    Loop(load_recipe(sys.argv[1])).run()
except RankError as error:
    print("refused:", error)
sys.path.insert(0, "fakes")
metrics.CALL_SECONDS = 0.2
for resume, steps in ((False, 4), ("step_00000002", 6)):
    recipe = load_recipe(sys.argv[1])
    recipe.train.resume, recipe.train.steps = resume, steps
    Loop(recipe).run()
"""


def test_a_run_reports_to_all_of_them_and_survives_those_that_fail(tmp_path):
    """One dies, one stalls; then the run is resumed from a step before its last."""
    model, chats = tiny_checkpoint(tmp_path / "model", layers=1), write_chats(tmp_path / "chats.jsonl")
    train = {"steps": 4, "checkpoint_every": 2, "report_to": ["tensorboard", "wandb", "mlflow", "trackio"]}
    path = write_recipe(
        tmp_path,
        "run",
        model,
        chats,
        stage=0,
        dtype="float32",
        train=train,
        optim={"warmup_steps": 0, "warmup_ratio": 0.6, "schedule": "constant"},
        loss={"kd_weight": 0.0, "kd": None, "teacher": None},
    )
    recipe = load_recipe(path)
    (tmp_path / "fakes").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "fakes" / f"{name}.py").write_text(text)
    ended = run_python(RUNS, path, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    refused, said = ended.stdout.split("refused: ", 1)
    assert (
        said.startswith("train.report_to: 'wandb', but the package wandb is not installed") and "weights" not in refused
    )
    for why in (r"mlflow: SystemExit: the server is gone", r"trackio: it does not answer for 0 s"):
        assert (
            len(re.findall(rf"^warning: {why}: it is off .*\(metrics.jsonl has all points\)$", said, re.MULTILINE)) == 2
        )
    assert said.count("warning: ") == 4 + said.count("warning: this run") and said.count("wandb: https://") == 2
    file = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in file] == [1, 2, 3, 4, 5, 6]
    # optim.warmup_ratio of 4 steps, and after the resume of 6: three and four of them warm up.
    shares = [line["lr/weights"] / recipe.optim.lr for line in file]
    assert shares == pytest.approx([1 / 3, 2 / 3, 3 / 4, 1, 1, 1])
    assert [line["lr/weight_scales"] / recipe.optim.scale_lr for line in file] == pytest.approx(shares)
    curves = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    curves.Reload()
    for tag in curves.Tags()["scalars"]:
        shown = {point.step: point.value for point in curves.Scalars(tag)}
        assert shown == pytest.approx({line["step"]: line[tag] for line in file if tag in line}), tag
    for tag in curves.Tags()["histograms"]:
        assert {event.step for event in curves.Histograms(tag)} == {line["step"] for line in file if tag in line}
    first, second = lines(tmp_path / "wandb.jsonl")
    assert (first[0]["config"]["model"]["path"], first[0]["name"]) == (str(model), "run")
    assert second[0]["name"] == "run from step 2"
    for (_, points), last in ((first, 4), (second, 6)):
        merged = {}
        for step, values in points:
            merged.setdefault(step, {}).update(values)
        assert max(merged) == last
    for step, values in merged.items():
        whole = next(line for line in file if line["step"] == step)
        assert {key: value for key, value in whole.items() if not isinstance(value, dict)} == {
            "step": step,
            "time": whole["time"],
            **values,
        }


def test_every_name_has_its_start_and_its_extra():
    import tomllib

    from engine.config.sections import TRACKERS
    from tests.lib.root import ROOT

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*STARTS, "tensorboard"} == {*TRACKERS} and STARTS.keys() <= extras.keys()
