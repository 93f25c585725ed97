"""TensorBoard files, which cannot end a run, the picture of the errors, and the summary."""

import resource
import shutil

import numpy as np
import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.metrics import Metrics, Summary, TensorBoard
from engine.report import decibels, error_picture, read_measured
from tests.lib.processes import run_python
from tests.lib.recipes import minimal


def write_all(found: Metrics, step: int) -> None:
    """Write everything that a run writes in a step."""
    found.log({"loss/total": 1.0}, step)
    found.histogram("quant/scales", [1.0, 2.0], step)
    found.picture("quant/picture", Figure, step)
    found.results(minimal(), {"loss/total": 1.0}, step)


@pytest.mark.parametrize("full", [False, True])
def test_a_directory_that_goes_or_never_was_costs_one_warning_and_a_few_points(tmp_path, capsys, full):
    recipe, directory = tmp_path / "recipe.yaml", tmp_path / "tensorboard"
    recipe.write_text("a: 1")
    if full:
        directory.touch()
    found = Metrics([TensorBoard(directory, recipe)])
    write_all(found, 1)
    if not full:
        shutil.rmtree(directory)
        directory.touch()  # nor can it be made again
    for step in (2, 3, 4, 5):
        write_all(found, step)
    directory.unlink()
    write_all(found, 6)
    said, errors = capsys.readouterr()
    assert errors == ""
    assert said.count("warning: ") == 1 and f"warning: {directory} cannot be written (" in said
    assert said.count("points are missing in TensorBoard") == 1
    curves = EventAccumulator(str(directory))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss/total")] == [6]


def test_a_full_disk_costs_one_line_and_no_traceback(tmp_path, capfd):
    """The kernel refuses to let a file grow; then there is room again."""
    recipe, directory = tmp_path / "recipe.yaml", tmp_path / "tensorboard"
    recipe.write_text("a: 1")
    found = Metrics([TensorBoard(directory, recipe)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
        for step in range(1, 30):
            found.log({"loss/total": 1.0 / step}, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said, errors = capfd.readouterr()
    expected = f"warning: {directory} cannot be written (File too large): points are missing in TensorBoard\n"
    assert (said, errors) == (expected, "")
    write_all(found, 30)
    curves = EventAccumulator(str(directory))
    curves.Reload()
    steps = [point.step for point in curves.Scalars("loss/total")]
    assert steps[-1] == 30 and steps[:-1] == list(range(1, len(steps))) and len(steps) < 30
    assert [tag.split("/")[0] for tag in curves.Tags()["tensors"]] == ["recipe"]
    assert curves.Tags()["histograms"] == ["quant/scales"] and curves.Scalars("final/loss/total")[0].value == 1.0
    image = curves.Images("quant/picture")[0]
    assert image.encoded_image_string.startswith(b"\x89PNG") and (image.width, image.height) == (640, 480)


def test_points_of_an_earlier_continuation_are_hidden(tmp_path):
    recipe, directory = tmp_path / "recipe.yaml", tmp_path / "tensorboard"
    recipe.write_text("a: 1")
    first = Metrics([TensorBoard(directory, recipe)])
    for step in range(1, 5):
        first.log({"loss/total": 1.0}, step)
    Metrics([TensorBoard(directory, recipe, done=2)]).log({"loss/total": 2.0}, 3)
    curves = EventAccumulator(str(directory))
    curves.Reload()
    assert [(point.step, point.value) for point in curves.Scalars("loss/total")] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_the_picture_has_a_square_for_each_place_and_layer_and_the_mean_of_experts():
    errors = {
        "model.layers.0.self_attn.q_proj": -30.0,
        "model.layers.2.self_attn.q_proj": -20.0,
        "model.layers.2.mlp.experts.0.up_proj": -10.0,
        "model.layers.2.mlp.experts.1.up_proj": -12.0,
        "lm_head": -1.0,
    }
    axes = error_picture(errors, 7).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["self_attn.q_proj", "mlp.experts.*.up_proj"]
    expected = np.array([[-30.0, np.nan, -20.0], [np.nan, np.nan, -11.0]])
    np.testing.assert_array_equal(np.ma.filled(axes.images[0].get_array(), np.nan), expected)
    assert "step 7" in axes.get_title()
    assert decibels(0.01) == pytest.approx(-20) and decibels(0.0) == -100


def test_the_summary_adds_up_and_says_where_losses_began_and_ended():
    summary = Summary()
    summary.step({"loss/total": 3.0, "loss/lm": 3.0}, tokens=100, valid_tokens=40)
    summary.step({"loss/total": 2.0, "loss/lm": 1.5, "loss/kd/kl": 0.5}, tokens=50, valid_tokens=20)
    summary.step({}, tokens=50, valid_tokens=20)  # skipped
    summary.peak_bytes = 1_250_000_000
    before, after = {"eval/lm": 4.0, "eval/perplexity": 1e65}, {"eval/lm": 2.5, "eval/perplexity": float("inf")}
    first, *rest = summary.text(devices=2, evaluations=(before, after)).splitlines()
    assert first.startswith("3 steps, 200 tokens (80 with a target) in 00:00:00, ")
    assert first.endswith(" tokens/s per device, 1 steps left out")
    assert [" ".join(line.split()) for line in rest] == [
        "peak memory of rank 0 while training: 1.25 GB",
        "losses, first value -> mean of the last 2 values:",
        "loss/total 3.0000 -> 2.5000",
        "loss/lm 3.0000 -> 2.2500",
        "loss/kd/kl 0.5000 -> 0.5000",
        "held-out samples, first evaluation -> last:",
        "eval/lm 4.0000 -> 2.5000",
        "eval/perplexity 1.0e65 -> inf",
    ]


# Two steps of a model, then more memory than before, as an export may take.
ENDS = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from engine.metrics import Metrics
from engine.report import RunReport
from engine.state import HeldOutResults, StepResult
from tests.lib.recipes import minimal

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
engine = SimpleNamespace(optimizer=optimizer, skipped_steps=0)
state = SimpleNamespace(
    recipe=minimal(output_dir=sys.argv[1], train={"log_every": 9}), model=model, step=0, metrics=Metrics([]),
    session=SimpleNamespace(engine=engine, device=torch.device("cpu")), evaluations=HeldOutResults(),
    evaluation={"eval/lm": 2.0},  # before a resume
    last=StepResult({"loss/total": 1.0}, 1, 1, 5.0, None, False, False, None, None),
    log=lambda values: print("logged", state.step, values),
)
report = RunReport(state)
for state.step in (1, 2):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    report.step(state, 1.0)
    state.last = StepResult({"loss/total": 1.0, "kd/forward_kl": 2.0}, 1, 1, 5.0, 3.0, False, False, None, None)
report.trained(state)
before, kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000:
    kept.append(torch.ones(10_000_000))
report.end(state, Path(sys.argv[1], "checkpoints"))
"""


def test_the_last_lines_and_memory_json_have_the_same_peak(tmp_path):
    """That of training, also where more memory is used later. Beside it: between two points of the curves, only what
    few steps measure is logged."""
    ended = run_python(ENDS, tmp_path)
    assert ended.returncode == 0, ended.stderr
    rare = {"kd/forward_kl": 2.0, "train/grad_norm": 5.0, "train/grad_norm_scales": 3.0, "train/grad_norm_weights": 4.0}
    assert [line for line in ended.stdout.splitlines() if line.startswith("logged")] == [f"logged 2 {rare}"]
    peak = read_measured(tmp_path / "memory.json").peak
    assert f"\npeak memory of rank 0 while training: {peak / 1e9:.2f} GB\n" in ended.stdout
    assert "held-out" not in ended.stdout


def test_the_last_loss_is_a_mean_over_the_last_steps():
    summary = Summary()
    for step in range(25):
        summary.step({"loss/total": float(step)}, tokens=1, valid_tokens=1)
    assert summary.last == {"loss/total": pytest.approx(np.mean(range(15, 25)))}
    assert "mean of the last 10 values" in summary.text(devices=1, evaluations=({}, {}))
    summary.started -= 30 * 3600 + 62
    assert " in 30:01:02, " in summary.text(devices=1, evaluations=({}, {}))
