"""The first table of docs/serving.md agrees with the presets, the page of the schemes, the layouts and what ran.

`DEEPQAT_WRITE=1 python -m pytest tests/unit/test_serving.py` writes it.
"""

from quant import PRESETS
from quant.formats.layouts import check_layout
from tests.lib.root import ROOT
from tests.lib.serving import ENGINE_LAYOUTS, WRITE, cells, is_figure, table, write_table

HEAD = ["preset", "vLLM, CPU", "vLLM, CUDA", "SGLang", "transformers", *ENGINE_LAYOUTS]


def in_vllm(found: list[str]) -> str:
    """State of a preset on the CPU, from what `make test-vllm` found: dense and MoE, as it is and emulated."""
    dense, moe = (
        "yes" if is_figure(as_it_is) else "emulated" if is_figure(emulated) else "no"
        for as_it_is, emulated in (found[:2], found[2:])
    )
    return dense if dense == moe else f"{dense}; MoE: {moe}"


def written(layout: str, name: str) -> str:
    """Tell if an engine's layout holds the preset."""
    preset = PRESETS[name]
    if preset.linear is None or preset.kv_cache is not None:
        return "no"
    try:
        check_layout(layout, [preset.linear])
    except ValueError:
        return "no"
    inputs = preset.linear.activations
    return "embeddings" if layout == "executorch" and inputs is None else "yes"  # XNNPACK quantizes all inputs


def test_the_table_of_engines_is_what_ran_and_what_was_read():
    ran = table("vllm")
    missing = {f"`{name}`" for name in PRESETS} - ran.keys()
    assert not missing, f"DEEPQAT_WRITE=1 make test-vllm, which takes minutes, tries {sorted(missing)}"
    text = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
    presets = text[text.index("| preset |") :].split("\n\n")[0]
    read = dict(cells(line) for line in presets.splitlines()[2:])
    expected = {}
    for name in PRESETS:
        row = f"`{name}`"
        transformers, vllm, sglang = read[row][3:]
        own = (written(layout, name) for layout in ENGINE_LAYOUTS.values())
        expected[row] = [in_vllm(ran[row]), vllm, sglang, transformers, *own]
    if WRITE:
        write_table("engines", HEAD, ([row, *found] for row, found in expected.items()))
    assert table("engines") == expected, "DEEPQAT_WRITE=1 python -m pytest tests/unit/test_serving.py"
