"""From training on two ranks to a directory that mlx-lm loads: its weights are those of the last forward."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.reading import load_recipe
from launch.verify import main as verify
from model.save.mlx import MODELS, check_mlx
from quant import SCHEMES, prepare
from tests.distributed.launcher import run_ranks
from tests.distributed.recipes import write_chats, write_recipe
from tests.distributed.variants import NO_TEACHER, SCRIPT
from tests.families.variants import VARIANTS
from tests.patience import ends
from tools.verify.mlx import compare_with_compressed

# All variants of the zoo of the types that are written, with a scheme.
KINDS = {
    "llama": "w4a16_g32",
    "llama, tied": "w2a16_g32",
    "llama, rope of llama 3": "w3a16_g32",
    "llama, biases": "w4a16_g32",
    "llama, heads wider than hidden": "w8a16_g32",
    "qwen2": "w3a16_g32",
    "qwen2, tied": "w4a16_g32",
    "qwen3": "w2a16_g32",
    "qwen3, tied": "w4a16_g32",
    "qwen3, yarn": "w4a16_g32",
    "qwen3_moe": "w4a16_g32",
    "qwen3_moe, mixed layers": "w3a16_g32",
}
EIGHT = {"layers": r".*\.o_proj", "scheme": "w8a16_g32"}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Each model trained twice in the same way, and written once for MLX, once as a compressed checkpoint."""
    pytest.importorskip("mlx_lm", reason="pip install -e '.[mlx]'")
    base = tmp_path_factory.mktemp("mlx")
    data, written = write_chats(base / "chats.jsonl"), {}
    for kind, scheme in KINDS.items():
        name = kind.replace(", ", "-").replace(" ", "_")
        source = VARIANTS[kind].checkpoint(base / name)
        for layout in ("mlx", "compressed"):
            written[kind, layout] = write_recipe(
                base,
                f"{name}_{layout}",
                source,
                data,
                dtype="bfloat16",
                stage=3,
                loss=NO_TEACHER,
                train={"steps": 2, "gradient_accumulation_steps": 1},
                quant={"scheme": scheme, "rules": [EIGHT], "signed_scales": True, "calibration_batches": 0},
                export={"enabled": True, "format": layout},
            )
    run_ranks(SCRIPT, *(f"none:{path}" for path in written.values()))
    directories = {which: load_recipe(path).export_dir() for which, path in written.items()}
    return {kind: (directories[kind, "mlx"], directories[kind, "compressed"]) for kind in KINDS}


def test_every_variant_of_a_type_that_is_written_is_tried_or_refused(tmp_path):
    known = {name for name, variant in VARIANTS.items() if variant.config().model_type in MODELS}
    assert known - KINDS.keys() == {"qwen2, sliding window"}
    model = VARIANTS["qwen2, sliding window"].model()
    quantization = prepare(model, SCHEMES["w4a16_g32"], learn_weight_scale=False, learn_input_scale=False)
    with pytest.raises(ValueError, match="mlx-lm computes qwen2 without its sliding window"):
        check_mlx(model, quantization)


@pytest.mark.parametrize("kind", KINDS)
def test_mlx_reads_the_weights_of_the_last_forward_and_computes_with_them(exports, kind):
    ids = torch.randint(7, 300, (2, 128), generator=torch.Generator().manual_seed(1))
    report = compare_with_compressed(*exports[kind], [ids])
    assert report.ok and report.quantized >= 14, report.table()
    there, here = report.perplexity
    assert abs(there / here - 1) < 0.005, report.table()


def test_a_changed_scale_is_named(exports, tmp_path, capsys):
    export, against = exports["qwen3"]
    changed = shutil.copytree(export, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.scales"][3, 1] *= 1.0078125
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(7, 300, (1, 16))
    report = compare_with_compressed(changed, against, [ids])
    assert "model.layers.1.mlp.up_proj.weight is another one" in report.problems
    assert report.equal == compare_with_compressed(export, against, [ids]).equal - 1


def test_codes_of_another_type_are_named_and_pipes_are_not_waited_for(exports, tmp_path):
    export, against = exports["qwen3"]
    changed = shutil.copytree(export, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key].view(torch.int32)
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(7, 300, (1, 16))
    report = compare_with_compressed(changed, against, [ids])
    assert any(line.startswith(f"{key}: [dequantize]") for line in report.problems), report.problems
    with pytest.raises(ValueError, match="has the tokenizer of another model: it gives token 5000, the model has 3"):
        compare_with_compressed(export, against, [torch.tensor([[1, 5000]])])  # MLX reads beyond its embeddings
    os.mkfifo(changed / "generation.json")
    with ends("a pipe"), pytest.raises(ValueError, match=r"generation.json is neither a file nor a folder"):
        compare_with_compressed(changed, against, [ids])


def test_other_readers_are_not_told_of_codes(exports):
    config = json.loads((exports["qwen3_moe"][0] / "config.json").read_text())
    assert "quantization_config" not in config
    usual = {key: value for key, value in config["quantization"].items() if not isinstance(value, dict)}
    assert usual == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert {name.rpartition(".")[2] for name in config["quantization"].keys() - usual.keys()} == {"o_proj"}


def test_verify_asks_for_what_it_compares_with(exports, capsys):
    with pytest.raises(SystemExit):
        verify(["--export", str(exports["llama"][0])])
    assert "is for MLX: give --against" in capsys.readouterr().err
