"""Progress of jobs in a log file and on a terminal, and numbers of any size."""

import math
import os
import pty
import sys
import termios
import time

import pytest

from model import console
from model.console import figure, perplexity, progress_bar, working
from model.ranks import say


def read(end: int) -> str:
    """Return the text that a terminal received."""
    found = b""
    while True:
        try:
            found += (piece := os.read(end, 1 << 16))
        except OSError:  # the other end is closed
            return found.decode()
        if not piece:
            return found.decode()


@pytest.fixture
def often(monkeypatch) -> None:
    """A line at every update, in a log file."""
    monkeypatch.setattr(console, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(console, "SECONDS", 0.0)
    monkeypatch.setattr(console, "BEAT_SECONDS", 0.001)


def test_a_log_file_gets_whole_lines(often, capsys):
    with progress_bar(300, "train", leave=True) as bar:
        bar.set_postfix({"loss": "2.5"}, refresh=False)
        bar.update(20)
        with progress_bar(desc="evaluation", unit="batch", over=range(2)) as inner:
            list(inner)
    lines = capsys.readouterr().err.splitlines()
    assert all(line and line.isprintable() for line in lines)  # no carriage return, no cursor movement
    assert any(line.startswith("train: 20 of 300 steps, ") and line.endswith(", loss=2.5") for line in lines)
    assert any(line.startswith("evaluation: 2 of 2 batches, ") for line in lines)


def test_a_job_that_ends_within_the_interval_writes_nothing(capsys):
    with progress_bar(3, "train", leave=True) as bar:
        for _ in range(3):
            bar.update(1)
    for _ in progress_bar(desc="evaluation", over=range(3)):
        pass
    with working("DeepSpeed engine"):
        pass
    assert capsys.readouterr().err == ""


def test_a_job_of_many_updates_writes_a_line_per_interval_and_not_per_update(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("time.time", lambda: now[0])  # tqdm's clock
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress_bar(600, "train", leave=True) as bar:
        for _ in range(600):  # 100 minutes
            now[0] += 10.0
            bar.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 201 and lines[0].startswith("train: 3 of 600 steps, 00:30 passed, 1:39:30 left, ")
    assert lines[-1].startswith("train: 600 of 600 steps, 1:40:00 passed, 00:00 left, ")


def test_bytes_more_than_announced_are_no_error(often, capsys):
    with progress_bar(1000, "weights", "B") as bar:
        bar.update(2000)
    assert "weights: 2.00k of ?B, " in capsys.readouterr().err


def wait(capsys, expected: str) -> None:
    deadline = time.monotonic() + 60
    while expected not in capsys.readouterr().err:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_job_without_parts_says_that_it_goes_on(often, capsys):
    with working("checkpoint of step 5"):
        wait(capsys, "checkpoint of step 5: 00:00 passed\n")


@pytest.mark.parametrize("over", [True, False])
def test_a_job_is_shown_before_its_first_part_has_ended(over, often, capsys):
    """And then with the parts that have ended."""
    bar = progress_bar(3, "calibration", "batch", over=range(3) if over else None)
    items = iter(bar)

    wait(capsys, "calibration: 0 of 3 batches, ")
    for _ in range(3):
        next(items) if over else bar.update()
    wait(capsys, f"calibration: {2 if over else 3} of 3 batches, ")
    bar.close()
    capsys.readouterr()
    time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_a_log_file_gets_the_first_line_early(monkeypatch, capsys):
    """After ten seconds, the next one half a minute later."""
    now = [100.0]
    monkeypatch.setattr(console, "BEAT_SECONDS", 1000.0)
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress_bar(8, "calibration", "batch") as bar:
        for _ in range(70):
            now[0] += 1.0
            bar.beat()
    lines = [line.split(" passed")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"calibration: 0 of 8 batches, {passed}" for passed in ("00:10", "00:40", "01:10")]


@pytest.mark.parametrize("columns", [0, 100])  # 0: a recorded session
def test_a_terminal_shows_a_bar_and_the_line_above_it(monkeypatch, capsys, columns):
    other, end = pty.openpty()
    os.set_inheritable(end, False)
    termios.tcsetwinsize(end, (24 * bool(columns), columns))
    with os.fdopen(end, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress_bar(3, "train", leave=True) as bar:
            bar.update(3)
            say("step 3: saved")
    assert "\rtrain: 100%|" in read(other) and capsys.readouterr().out == "step 3: saved\n"
    os.close(other)


def test_other_ranks_are_silent(often, monkeypatch, capsys):
    monkeypatch.setattr(console, "is_main", lambda: False)
    with working("DeepSpeed engine"):
        for _ in progress_bar(desc="evaluation", over=range(3)):
            time.sleep(0.002)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.1235"), (9999.0, "9999.0000"), (1e4, "1.0e4"), (-23456.0, "-2.3e4"), (1e304, "1.0e304")],
)
def test_large_numbers_are_short(value, shown):
    assert figure(value) == shown


def test_perplexities_of_any_loss_are_numbers():
    assert perplexity(0.0) == 1.0 and figure(perplexity(1e6)) == "inf" and figure(perplexity(math.nan)) == "nan"
