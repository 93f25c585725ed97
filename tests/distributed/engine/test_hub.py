"""A run on two ranks whose models and data are names on the Hugging Face Hub, against a stand-in."""

import os

import yaml

from engine.config.reading import parse_recipe
from engine.loop import Loop
from model.ranks import RankError
from tests.lib.hub import Hub, point_at, serving
from tests.lib.launcher import on_ranks
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint


def train(hub: Hub, path: str, commits: list[str]) -> tuple[str, str]:
    """Run a recipe with another commit on each rank, which is refused; then as it is."""
    point_at(hub)
    differing, refused = commits[int(os.environ["RANK"])], ""
    try:
        Loop(parse_recipe(["--config", path, "--model.path", f"user/tiny@{differing}"])).run()
    except RankError as error:
        refused = str(error)
    recipe = parse_recipe(["--config", path])
    Loop(recipe).run()
    return refused, recipe.model.path


def resume(hub: Hub, path: str) -> None:
    point_at(hub)
    Loop(parse_recipe(["--config", path, "--train.resume", "true", "--train.steps", "3"])).run()


def test_names_are_fetched_once_recorded_with_their_commits_and_compared(tmp_path):
    (tmp_path / "chats").mkdir()
    chats = write_chats(tmp_path / "chats" / "train.jsonl")
    with serving(tmp_path) as hub:
        first = hub.add("models/user/tiny", tiny_checkpoint(tmp_path / "first"))
        second = hub.add("models/user/tiny", tiny_checkpoint(tmp_path / "second", seed=1))
        hub.repos["models/user/tiny"]["main"] = hub.repos["models/user/tiny"][first]
        data = hub.add("datasets/user/chats", tmp_path / "chats")
        sections = {
            "model": {"path": "user/tiny", "dtype": "bfloat16"},
            "data": {"train": ["user/chats"]},
            "train": {"steps": 2, "gradient_accumulation_steps": 2, "checkpoint_every": 2},
            "loss": {"kd_weight": 0.5, "kd": "cakld", "teacher": "user/tiny"},
        }
        path = str(write_recipe(tmp_path, "run", tmp_path, chats, **sections))
        ((refused, local), (other, _)), said = on_ranks(train, hub, path, [first, second])
        assert refused == other and refused.startswith("the ranks differ: model.path: ")
        assert first in refused and second in refused
        assert local.endswith(f"models--user--tiny/snapshots/{first}")
        assert said.count(f"user/tiny: commit {first} on the Hugging Face Hub\n") == 1
        assert said.count(f"user/chats: commit {data} on the Hugging Face Hub: train.jsonl\n") == 1
        for repo in ("models/user/tiny", "datasets/user/chats"):
            assert len([line for line in hub.asked if f"/api/{repo}/revision/main" in line]) == 1
        for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000002"):
            recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
            assert recipe["model"]["path"] == recipe["loss"]["teacher"] == f"user/tiny@{first}"
            assert recipe["data"]["train"] == [f"hf://datasets/user/chats@{data}/train.jsonl"]
        hub.repos["models/user/tiny"]["main"] = hub.repos["models/user/tiny"][second]
        _, said = on_ranks(resume, hub, path)
        for key in ("model.path", "loss.teacher"):
            assert said.count(f"warning: {key}: user/tiny@{second}, was user/tiny@{first} when ") == 1
