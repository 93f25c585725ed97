"""Exports that are refused before any work, and the directory that a run takes before its first step."""

import pytest

from engine.cluster.job import RunLock
from engine.config.errors import RecipeError
from engine.session_export import check_export, check_exportable
from engine.start import _take_output
from model.ranks import RankError
from quant import PRESETS
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import build, quantize
from tests.lib.recipes import minimal


def test_a_layout_that_cannot_hold_a_scheme_is_refused(tmp_path) -> None:
    recipe = minimal(output_dir=str(tmp_path / "out"), export={"format": "vllm_fp8"})
    check_export(recipe)
    recipe.quant.lm_head = "w8a16_channel"
    with pytest.raises(RecipeError, match=r"^export.format: .* got fp8_static, w8a16_channel"):
        check_export(recipe)
    recipe.export.format = "compressed"
    check_export(recipe)


def test_an_export_is_not_renamed_to_a_link(tmp_path) -> None:
    """The directory behind it may be there and empty, be elsewhere, or nowhere."""
    (tmp_path / "there").mkdir()
    for name, target in (("to", "there"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for name in ("to", "dangling", "loop", "loop/export"):
        with pytest.raises(RecipeError, match=rf"^export\.dir: '.*{name}': it is a link, or behind one"):
            check_export(minimal(output_dir=str(tmp_path / "out"), export={"dir": str(tmp_path / name)}))
    check_export(minimal(output_dir=str(tmp_path / "out"), export={"dir": str(tmp_path / "to" / "export")}))


DROPPED = "warning: vLLM drops the scales of keys and values of {} (its issue 54623) and serves them with 1.0"


@pytest.mark.parametrize(
    ("family", "scheme", "said"),
    [
        ("qwen3_5_text", "fp8_kv", DROPPED.format("qwen3_5_text")),
        ("qwen3_5_moe", "fp8_kv", DROPPED.format("qwen3_5_moe")),
        ("qwen3_5_text", "fp8_static", ""),
        ("qwen3", "fp8_kv", ""),
        (
            "qwen3_moe",
            "nvfp4",
            "warning: transformers reads NVFP4 experts without their global scales (its issue 48371)",
        ),
        ("qwen3_moe", "nvfp4_w4a4", "warning: transformers reads NVFP4 experts without their global scales"),
        ("qwen3", "nvfp4", ""),
        ("deepseek_v3", "fp8_static", "warning: vLLM reads the weights of model.layers.0.self_attn.kv_b_proj for"),
        ("deepseek_v3", "fp8_dynamic", ""),
    ],
)
def test_readers_that_drop_scales_are_named_before_the_run(tmp_path, capsys, family, scheme, said) -> None:
    source = VARIANTS[family].checkpoint(tmp_path / "source")
    recipe = minimal(model={"path": str(source)}, quant={"scheme": scheme})
    model = build(source)
    quantization = quantize(model, PRESETS[scheme].linear, measure=False, kv_cache=PRESETS[scheme].kv_cache)
    check_exportable(recipe, model, quantization)
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(found) == bool(said) and all(line.startswith(said) for line in found)


def test_a_directory_that_cannot_be_made_is_named_by_the_recipes_key() -> None:
    with (
        RunLock() as run_lock,
        pytest.raises(RankError, match=r"^output_dir: /proc/nothing: No such file or directory$"),
    ):
        _take_output(minimal(output_dir="/proc/nothing/run"), run_lock)
