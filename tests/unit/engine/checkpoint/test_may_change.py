"""Every option either stays at a resume or may change; what must stay is refused by name."""

import copy
from typing import Any

import pytest

from engine.checkpoint.find import MAY_CHANGE, STAYS, check_resumable
from engine.config.contradictions import options
from engine.config.errors import RecipeError
from tests.unit.engine.checkpoint.steps import recipe, write_step

ROWS = {("data", "micro_batch_size"), ("train", "gradient_accumulation_steps")}  # compared together
RESUME = ("train", "resume")  # says which checkpoint is meant


def listed(lists: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(section, name) for section, names in lists.items() for name in names]


def split(key: str) -> tuple[str, str]:
    """Section and name of an option."""
    section, _, name = key.rpartition(".")
    return section, name


def test_every_option_is_in_one_of_the_lists(tmp_path):
    known = sorted(split(key) for key, _, _ in options(recipe(tmp_path)))
    assert sorted(listed(STAYS) + listed(MAY_CHANGE)) == known


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    write_step(tmp_path, 1)
    (tmp_path / "config.json").write_text("{}")  # a digest of a model's directory is taken where there are adapters
    return tmp_path


def other(value: Any) -> Any:
    """A value that is not this one; nothing checks it any more where a resume is checked."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return {**value, "x": 1} if isinstance(value, dict) else [*value, "x"]


def test_what_must_stay_is_refused_by_name_and_all_else_may_change(checkpoints):
    before = recipe(checkpoints)
    for key, owner, item in options(before):
        (section, name), value = split(key), getattr(owner, item.name)
        if (section, name) in ROWS or (section, name) == RESUME:
            continue
        wanted = copy.deepcopy(before)
        setattr(getattr(wanted, section) if section else wanted, name, other(value))
        if (section, name) == ("adapter", "kind"):
            wanted.model.path = str(checkpoints)
        if name in STAYS.get(section, ()):
            with pytest.raises(RecipeError) as raised:
                check_resumable(wanted, checkpoints)
            assert f"cannot be continued with other {section}.{name} (was " in str(raised.value)
        else:
            assert check_resumable(wanted, checkpoints).step == 1
