"""Two ranks learn what a server writes for them: killed, left without the server and resumed, to the same weights."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.config.reading import load_recipe, save_recipe
from engine.loop import Loop, LoopState
from engine.publish import STARTED
from engine.state import NoSamplesError
from model.ranks import RankError
from tests.distributed.engine.scripts.train import run
from tests.distributed.engine.test_kills import run_and_kill
from tests.lib.curves import points
from tests.lib.fake_vllm import FakeVllm, listening
from tests.lib.forked import Job
from tests.lib.launcher import on_ranks
from tests.lib.patience import PATIENCE
from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER, assert_same_weights

STEPS, ROWS = 6, 4
STARTS = ("straight", "killed", "dead", "resumed", "shared")


class Server(FakeVllm):
    """A server that fails while a file exists, and is started again when another one does."""

    def __init__(self, folder: Path, dead: Path) -> None:
        super().__init__(folder / "current", "")
        self.dead, self.restarted = dead, folder.with_name(f"{folder.name}_restarted")
        self.count = folder.with_name(f"{folder.name}_asked")

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if self.restarted.exists():
            self.restarted.unlink()
            self.weights, self.version, self.paused, self.loaded = {}, STARTED, False, 0
        self.count.write_text(str(len(self.asked)))
        return None if self.dead.exists() else super().answer(path, body)


def train(base: Path) -> dict[str, Any]:
    """A run that is not disturbed; one that fails after five steps, then loses the server, then ends; and one whose
    ranks share rows."""
    found: dict[str, Any] = {}
    for name in STARTS:
        loop = Loop(load_recipe(base / f"{name}.yaml"))
        folder, url = Path(f"{loop.recipe.output_dir}_published"), str(loop.recipe.data.server)

        def publish(state: LoopState, folder: Path = folder, url: str = url) -> None:
            assert state.publish(folder, url).served == (url,)

        loop.at(0)(publish)
        loop.every(2)(publish)

        def disturb(state: LoopState, name: str = name) -> None:
            if name == "killed" and state.step == 5:
                raise RankError("killed")
            if name == "dead" and state.step == 5:
                (base / "dead").touch()
            if name == "resumed":
                assert state.step > 5, "the step before was saved"

        loop.every(1)(disturb)
        if name == "resumed":
            (base / "dead").unlink(missing_ok=True)
        try:
            found[name] = run(loop)
        except RankError as error:
            found[name] = (type(error).__name__, str(error))
    return found


def losses_of(path: Path) -> list[dict[str, float]]:
    """Losses of each step of a run."""
    return run(Loop(load_recipe(path)))["losses"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    base = tmp_path_factory.mktemp("on_policy")
    model, teacher = (
        tiny_checkpoint(base / name, seed=seed, even=True) for seed, name in ((0, "model"), (3, "teacher"))
    )
    chats = write_chats(base / "chats.jsonl")
    with ExitStack() as stack:
        servers = {
            name: Server(base / f"{name}_published", base / "dead") for name in ("straight", "disturbed", "shared")
        }
        urls = {name: stack.enter_context(listening(server)).rstrip("/") for name, server in servers.items()}
        for name in STARTS:
            own = name if name in servers else "disturbed"
            together = 2 if name == "shared" else 1
            resume = name in ("dead", "resumed")
            written(base, name, model, chats, teacher, urls[own], own, together=together, resume=resume)
        found, output = on_ranks(train, base)
    return base, found, output, servers


def written(
    base: Path,
    name: str,
    model: Path,
    chats: Path,
    teacher: Path,
    url: str,
    own: str,
    *,
    together: int = 1,
    resume: bool = False,
    seconds: int = 2,
) -> None:
    """Write the recipe of a run that learns from a server."""
    write_recipe(
        base,
        name,
        model,
        chats,
        data={"kind": "on_policy", "server": url, "new_tokens": 8, "max_age": 1, "server_seconds": seconds},
        train={"steps": STEPS, "gradient_accumulation_steps": together, "checkpoint_every": 2, "resume": resume},
        parallel={"sequence": together},
        quant={"scheme": "w4a16_channel"},
        loss={**NO_TEACHER, "lm_weight": 0.0, "kd_weight": 1.0, "kd": "rkl", "teacher": str(teacher)},
        output_dir=str(base / own),
    )


def test_a_killed_run_goes_on_with_stored_answers_to_the_same_weights(ran):
    base, (main, _), output, servers = ran
    assert main["killed"] == ("RankError", "killed")
    straight, resumed = main["straight"], main["resumed"]
    assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :], output
    assert_same_weights(resumed, straight)
    asked = [[json.dumps(one, sort_keys=True) for one in servers[name].asked] for name in ("straight", "disturbed")]
    assert len(asked[0]) == STEPS * ROWS and len(set(asked[0])) == STEPS * ROWS
    assert sorted(asked[0]) == sorted(asked[1]), "each answer was written once"
    assert len({loss["loss/total"] for loss in straight["losses"]}) == STEPS
    assert re.findall(r"^step 4: its samples were stored before the restart", output, re.MULTILINE) == [
        "step 4: its samples were stored before the restart"
    ]
    ages = [line["on_policy/age"] for line in points(base / "straight") if "on_policy/age" in line]
    assert ages == [step % 2 for step in range(STEPS)]
    assert {name.name for name in (base / "straight" / "samples").iterdir()} <= {
        f"step_{step:08d}.json" for step in range(2, STEPS)
    }


def test_ranks_that_share_rows_learn_the_same_answers(ran):
    """Each answer is asked for once, not by both ranks of its row."""
    _, (main, other), _, servers = ran
    asked = [sorted(json.dumps(one, sort_keys=True) for one in servers[name].asked) for name in ("straight", "shared")]
    assert asked[0] == asked[1]
    assert main["shared"]["losses"] == other["shared"]["losses"]
    # Later answers are those of other weights: gradients in bf16 are summed otherwise.
    for step in (0, 1):
        assert main["shared"]["losses"][step] == pytest.approx(main["straight"]["losses"][step], rel=1e-2)


def test_without_the_server_a_run_saves_a_checkpoint_and_ends_on_every_rank(ran):
    _, (main, other), output, _ = ran
    kind, text = main["dead"]
    assert (kind, text) == other["dead"] and kind == NoSamplesError.__name__
    assert re.fullmatch(
        r"step 5 has no samples: http://\S+: /v1/models: HTTP 500 some reason; waited 2 s \(data.server_seconds\); "
        r"step 5 is saved; --train.resume true goes on from there",
        text,
    )
    assert len(re.findall(r"^step 5 waits for samples, 2 s at most .*: HTTP 500", output, re.MULTILINE)) == 1


def test_another_number_of_ranks_learns_the_same_answers(ran):
    """Without the servers, which have ended."""
    base, (main, _), *_ = ran
    shutil.copytree(base / "straight", base / "alone")
    recipe = load_recipe(base / "straight.yaml")
    recipe.train.resume, recipe.train.gradient_accumulation_steps = "step_00000004", 2
    recipe.output_dir = str(base / "alone")
    save_recipe(recipe, base / "alone.yaml")
    (alone,), output = on_ranks(losses_of, base / "alone.yaml", ranks=1)
    assert "step 4: its samples were stored before the restart" in output
    for found, expected in zip(alone, main["straight"]["losses"][4:], strict=True):
        assert found == pytest.approx(expected, rel=1e-2)  # gradients in bf16 are summed otherwise


# When a run is killed, in the order of its steps: an answer is being written, answers are stored and not learned, the
# model is being published, a checkpoint is being saved.
MOMENTS = ("ask", "store", "publish", "save")


def test_a_run_that_gets_sigkill_goes_on_to_the_same_bits(tmp_path):
    model, teacher = tiny_checkpoint(tmp_path / "model"), tiny_checkpoint(tmp_path / "teacher", seed=3)
    chats = write_chats(tmp_path / "chats.jsonl")
    with ExitStack() as stack:
        for name in ("straight", "killed"):
            server = Server(tmp_path / f"{name}_published", tmp_path / "dead")
            url = stack.enter_context(listening(server)).rstrip("/")
            written(tmp_path, name, model, chats, teacher, url, name, seconds=60)
        result = run_python(f"from {__name__} import main; main()", tmp_path, timeout=PATIENCE * len(MOMENTS))
    assert result.returncode == 0, result.stderr[-8000:]
    assert json.loads((tmp_path / "kills.json").read_text()) == [*MOMENTS]
    log = (tmp_path / "killed.log").read_text()
    assert "step 2: its samples were stored before the restart" in log, log[-8000:]
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / f"{name}_published" / "current").iterdir()}
        for name in ("straight", "killed")
    )
    assert one == other
    samples, again = (
        {path.name: path.read_text() for path in (tmp_path / name / "samples").iterdir()}
        for name in ("straight", "killed")
    )
    assert samples == again and f"step_{STEPS - 1:08d}.json" in samples
    straight, killed = (losses_in(tmp_path / name) for name in ("straight", "killed"))
    assert killed == straight and len(straight) == STEPS


def losses_in(output: Path) -> dict[int, float]:
    """The last loss that was logged of each step."""
    return {point["step"]: point["loss/total"] for point in points(output) if "loss/total" in point}


def main() -> None:
    """Run a job that is not disturbed, and one that gets SIGKILL at each of MOMENTS and is resumed."""
    base, kills = Path(sys.argv[1]), []
    start(base, "straight").finish()
    for moment in MOMENTS:
        if run_and_kill(start(base, "killed"), "both", now(base, moment)):
            kills.append(moment)
        (base / "killed_published_restarted").touch()
    start(base, "killed").finish()
    (base / "kills.json").write_text(json.dumps(kills))


def start(base: Path, name: str) -> Job:
    """Start two ranks, which publish after every second step."""

    def rank() -> None:
        recipe = load_recipe(base / f"{name}.yaml")
        recipe.train.resume = (base / name / "checkpoints" / "latest").exists()
        loop, folder, url = Loop(recipe), base / f"{name}_published", str(recipe.data.server)
        loop.at(0)(lambda state: state.publish(folder, url))
        loop.every(2)(lambda state: state.publish(folder, url))
        loop.run()

    return Job(2, rank, base / f"{name}.log")


def now(base: Path, moment: str) -> Callable[[], bool]:
    """For a moment of the run that is killed, whether it is now."""
    killed, published = base / "killed", base / "killed_published"
    asked = base / "killed_published_asked"
    return {
        "ask": lambda: asked.exists() and asked.read_text() > "5",
        "store": (killed / "samples" / "step_00000003.json").exists,
        "publish": lambda: any(published.glob("step_00000004.tmp-*/model*")),
        "save": lambda: any((killed / "checkpoints").glob("step_00000004.partial/*")),
    }[moment]
