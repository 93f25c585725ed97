"""From training on two ranks to a GGUF file: its weights are those of the last forward."""

from pathlib import Path

import pytest

from engine.recipe.reading import load_recipe
from engine.verify.gguf import compare_with_compressed
from tests.distributed.launcher import run_ranks
from tests.distributed.recipes import write_chats, write_recipe
from tests.distributed.variants import NO_TEACHER, SCRIPT
from tests.gguf_templates import gguf_template
from tests.tiny import tiny_checkpoint

KINDS = {
    "llama": {"scheme": "w4a16_g32", "signed_scales": True},
    "qwen3": {"scheme": "q4_0", "rules": [{"layers": r".*\.o_proj", "scheme": "q8_0"}]},
    "qwen3_moe": {"scheme": "q4_0"},
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Each model trained twice in the same way, and written once as a GGUF file, once as a compressed checkpoint."""
    pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
    base = tmp_path_factory.mktemp("gguf")
    data, written = write_chats(base / "chats.jsonl"), {}
    for kind, quant in KINDS.items():
        source = tiny_checkpoint(base / kind, kind, even=True)
        template = gguf_template(source, base / f"{kind}.gguf")
        for name, export in {
            "gguf": {"format": "gguf", "template": str(template)},
            "compressed": {"format": "compressed"},
        }.items():
            written[kind, name] = write_recipe(
                base,
                f"{kind}_{name}",
                source,
                data,
                dtype="bfloat16",
                stage=3,
                loss=NO_TEACHER,
                train={"steps": 2, "gradient_accumulation_steps": 1},
                quant={**quant, "calibration_batches": 0},
                export={"enabled": True, **export},
            )
    run_ranks(SCRIPT, *(f"none:{path}" for path in written.values()))
    directories = {which: load_recipe(path).export_dir() for which, path in written.items()}
    return {kind: (directories[kind, "gguf"], directories[kind, "compressed"]) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_the_file_are_those_of_the_last_forward(exports, kind):
    report = compare_with_compressed(*exports[kind])
    assert report.ok and report.types["Q4_0"] >= 12, report.table()
