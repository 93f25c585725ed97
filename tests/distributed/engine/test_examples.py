"""The scripts in launch/examples, each run to its end on a small model, as their users would on one device."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.lib.launcher import run_ranks
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

EXAMPLES = sorted((ROOT / "launch" / "examples").glob("*.py"))
STEPS = 8


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, EventAccumulator]:
    """What each script wrote for TensorBoard."""
    directory = tmp_path_factory.mktemp("examples")
    model, chats = tiny_checkpoint(directory / "model"), write_chats(directory / "chats.jsonl")
    found = {}
    for script in EXAMPLES:
        recipe = write_recipe(
            directory,
            script.stem,
            model,
            chats,
            stage=1,
            dtype="bfloat16",
            train={"steps": STEPS, "gradient_accumulation_steps": 1},
            loss=NO_TEACHER,
            export={"enabled": True},
        )
        output = run_ranks(script, "--config", recipe)
        assert (directory / script.stem / "export" / "config.json").is_file(), output[-4000:]
        found[script.stem] = EventAccumulator(str(directory / script.stem / "tensorboard"))
        found[script.stem].Reload()
    return found


def curve(page: EventAccumulator, tag: str) -> list[float]:
    return [event.value for event in page.Scalars(tag)]


def test_every_example_is_here(pages):
    assert pages.keys() == {"custom_loss", "fake_quant_later", "layer_by_layer"}


def test_fake_quant_later_trains_scales_from_when_it_comes_on(pages):
    rates = curve(pages["fake_quant_later"], "lr/weight_scales")
    assert rates[: STEPS // 4] == [0.0] * (STEPS // 4) and all(rate > 0 for rate in rates[STEPS // 4 :])


def test_layer_by_layer_quantizes_all_by_half_of_the_run(pages):
    assert curve(pages["layer_by_layer"], "quant/layers_quantized") == [0, 1, 1, 2, 2, 2, 2, 2]


def test_a_custom_loss_is_shown_and_is_a_part_of_the_total(pages):
    total, lm, z = (curve(pages["custom_loss"], f"loss/{name}") for name in ("total", "lm", "z"))
    assert all(value > 1 for value in z)  # (log 301)^2 and more
    assert total == pytest.approx([a + 1e-4 * b for a, b in zip(lm, z, strict=True)], rel=1e-5)
