"""The scripts in launch/examples, each run to its end on a small model, as their users would on one device."""

import pytest

from tests.lib.curves import curves
from tests.lib.launcher import run_ranks
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

STEPS = 8
QUARTER = STEPS // 4


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "launch" / "examples").glob("*.py")))
def test_an_example_runs_and_does_what_it_says(tmp_path, name):
    recipe = write_recipe(
        tmp_path,
        "run",
        tiny_checkpoint(tmp_path / "model"),
        write_chats(tmp_path / "chats.jsonl"),
        stage=1,
        train={"steps": STEPS, "gradient_accumulation_steps": 1},
        loss=NO_TEACHER,
        export={"enabled": True},
    )
    output = run_ranks(ROOT / "launch" / "examples" / f"{name}.py", "--config", recipe)
    assert (tmp_path / "run" / "export" / "config.json").is_file(), output[-4000:]
    found = curves(tmp_path / "run")

    def curve(tag: str) -> list[float]:
        return [value for _, value in found[tag]]

    if name == "fake_quant_later":  # scales train from when it comes on
        rates = curve("lr/weight_scales")
        assert rates[:QUARTER] == [0.0] * QUARTER and all(rate > 0 for rate in rates[QUARTER:])
    elif name == "layer_by_layer":  # all are quantized by half of the run
        assert curve("quant/layers_quantized") == [0, 1, 1, 2, 2, 2, 2, 2]
    else:
        assert name == "custom_loss", "a new example"
        total, lm, z = (curve(f"loss/{loss}") for loss in ("total", "lm", "z"))
        assert all(value > 1 for value in z)  # (log 301)^2 and more
        assert total == pytest.approx([a + 1e-4 * b for a, b in zip(lm, z, strict=True)], rel=1e-5)
