"""From training on two ranks to a GGUF file: its weights are those of the last forward, and so are llama.cpp's logits
where llama.cpp is installed."""

import shutil
import struct
from pathlib import Path

import pytest
import torch

from engine.config.reading import load_recipe
from launch.verify import main as verify
from tests.distributed.launcher import run_ranks
from tests.distributed.recipes import write_chats, write_recipe
from tests.distributed.variants import NO_TEACHER, SCRIPT
from tests.gguf_templates import gguf_template
from tests.tiny import tiny_checkpoint
from tools.verify import llama_cpp
from tools.verify.gguf import compare_with_compressed

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


def test_verify_computes_logits_or_says_why_not(exports, tmp_path, capsys):
    export, against = exports["qwen3"]
    (tmp_path / "text.txt").write_text("The road ends at the top of the hill. " * 20)
    arguments = ["--export", str(export), "--against", str(against), "--text", str(tmp_path / "text.txt")]
    assert verify(arguments) == 0
    said = capsys.readouterr().out
    expected = (
        "with inputs rounded as it rounds them" if llama_cpp.installed() else "logits: skipped: the package llama"
    )
    assert expected in said and said.endswith("ok\n"), said
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(SystemExit):
        verify([*arguments[:-1], str(tmp_path / "short.txt")])
    assert "has 0 tokens with this tokenizer, at least 2 are needed" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has the tokenizer of another model: it gives token 5000, the model has 3"):
        compare_with_compressed(export, against, [torch.tensor([[1, 5000]])])


@pytest.mark.skipif(not llama_cpp.installed(), reason="pip install -e '.[llama-cpp]'")
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_computes_our_logits(exports, kind, tmp_path):
    export, against = exports[kind]
    ids = [torch.randint(7, 300, (1, 64), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    report = compare_with_compressed(export, against, ids)
    assert report.ok and len(report.logits) == 2, report.table()
    # Positions that turn otherwise leave every tensor as it is.
    changed = shutil.copytree(export, tmp_path / "changed") / "model.gguf"
    data = changed.read_bytes()
    at = data.index(b"rope.freq_base") + len("rope.freq_base") + 4
    changed.write_bytes(data[:at] + struct.pack("<f", 2.0) + data[at + 4 :])
    problems = compare_with_compressed(changed.parent, against, ids).problems
    assert len(problems) == 1 and problems[0].startswith("llama.cpp computes something else"), problems
