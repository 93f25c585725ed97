"""From training on two ranks to ExecuTorch's runtime: weights are those of the last forward, and logits near ours."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from engine.export import check_export
from launch.verify import main as verify
from model.save.executorch import MODELS, check_executorch
from quant import SCHEMES, prepare
from tests.distributed.launcher import run_ranks
from tests.distributed.recipes import write_chats, write_recipe
from tests.distributed.variants import NO_TEACHER, SCRIPT
from tests.families.variants import VARIANTS
from tests.root import ROOT
from tools.verify.executorch import compare_with_compressed

TOKENS = {"weights": {"dtype": "int", "bits": 8, "granularity": "channel"}}
INPUTS = {"dtype": "int", "bits": 8, "granularity": "token", "symmetric": False, "dynamic": True}
ROWS = {"layers": r".*\.o_proj", "scheme": "int8_per_row"}
PLAIN = {"layers": r".*\.0\..*\.down_proj", "scheme": "none"}
# What differs in the recipe, by the variant of the zoo.
KINDS = {
    "llama": {"embedding": "w8a16_channel"},
    "llama, biases": {"rules": [PLAIN]},
    "mistral": {},
    "qwen2, tied": {},
    "qwen3": {
        "embedding": "w4a16_g32",
        "schemes": {"int8_per_row": {**TOKENS, "activations": INPUTS}},
        "rules": [ROWS],
    },
    "phi3": {},
    "gemma": {},
    "gemma2": {},
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Each model trained twice in the same way, and written once for ExecuTorch, once as a compressed checkpoint."""
    pytest.importorskip("executorch", reason="pip install -e '.[executorch]'")
    base = tmp_path_factory.mktemp("executorch")
    data, written = write_chats(base / "chats.jsonl"), {}
    for kind, quant in KINDS.items():
        name = kind.replace(", ", "-").replace(" ", "_")
        source = VARIANTS[kind].checkpoint(base / name)
        for layout in ("executorch", "compressed"):
            written[kind, layout] = write_recipe(
                base,
                f"{name}_{layout}",
                source,
                data,
                dtype="bfloat16",
                stage=3,
                loss=NO_TEACHER,
                train={"steps": 2, "gradient_accumulation_steps": 1},
                quant={"scheme": "8da4w", "calibration_batches": 0, **quant},
                learnable={"weight_scale": True},
                export={"enabled": True, "format": layout, "max_shard_size": "100KB"},
            )
    run_ranks(SCRIPT, *(f"none:{path}" for path in written.values()))
    directories = {which: load_recipe(path).export_dir() for which, path in written.items()}
    return {kind: (directories[kind, "executorch"], directories[kind, "compressed"]) for kind in KINDS}


IDS = torch.randint(7, 300, (2, 128), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_xnnpack_computes_with_the_weights_of_the_last_forward(exports, kind):
    report = compare_with_compressed(*exports[kind], [IDS])
    assert report.ok and report.quantized >= 8, report.table()
    assert report.tokens == 256


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write over a file of an export."""
    path.unlink()
    save_file(tensors, path, metadata=metadata)


def test_a_changed_code_is_named_before_anything_is_lowered(exports, tmp_path):
    export, against = exports["qwen3"]
    changed = shutil.copytree(export, tmp_path / "changed")
    key = "model.layers.1.mlp.up_proj._weight_qdata"
    for file in changed.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            metadata = handle.metadata()
        tensors = load_file(file)
        if key in tensors:
            tensors[key][3, 1] ^= 1
            _write(file, tensors, metadata)
    report = compare_with_compressed(changed, against, [IDS])
    assert report.problems == ["model.layers.1.mlp.up_proj.weight is another one"] and not report.tokens


def test_every_file_names_all_tensors(exports):
    """transformers joins what the files say, and takes the list of names of one of them."""
    files = sorted(exports["llama"][0].glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        with open(file, "rb") as handle:
            header = json.loads(handle.read(struct.unpack("<Q", handle.read(8))[0]))
        names = json.loads(header["__metadata__"]["tensor_names"])
        assert len(names) == 21 and names == [name for name in header["__metadata__"] if "." in name]


def test_the_page_makes_a_program_that_generates(exports, tmp_path, monkeypatch):
    """The script of docs/executorch.md, as it stands there but for the directory."""
    from executorch.runtime import Runtime

    export = exports["qwen3"][0]
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/executorch.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "documented"}
    with torch.no_grad():
        exec(script.replace("served/executorch", str(export)), names)
    torch.set_grad_enabled(True)
    program = Runtime.get().load_program(tmp_path / "qwen3.pte")
    method = program.load_method("forward")
    ids = IDS[:1, :9]
    found = [method.execute([ids[:, at : at + 1], torch.tensor([at])])[0][0, -1].clone() for at in range(ids.shape[1])]
    with torch.no_grad():
        expected = names["model"](input_ids=ids, use_cache=False).logits[0]
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-3 * expected.std().item(), rtol=0)


def test_verify_asks_for_what_it_compares_with(exports, capsys):
    with pytest.raises(SystemExit):
        verify(["--export", str(exports["llama"][0])])
    assert "is for ExecuTorch: give --against" in capsys.readouterr().err


def test_other_models_and_heads_are_refused_by_name():
    model = VARIANTS["qwen3_moe"].model()
    quantization = prepare(model, SCHEMES["8da4w"], learn_weight_scale=False, learn_input_scale=False)
    with pytest.raises(
        ValueError, match=r"known to be lowered for llama, .*, and not for qwen3_moe: set export.format"
    ):
        check_executorch(model, quantization)
    model = VARIANTS["qwen3"].model()
    quantization = prepare(model, SCHEMES["w4a16_g32"], learn_weight_scale=False, learn_input_scale=False)
    with pytest.raises(ValueError, match=r"q_proj: layout 'executorch' has no Linear whose inputs are not quantized"):
        check_executorch(model, quantization)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "float16"}, r"model.dtype: float16, expected bfloat16: export.format executorch"),
        ({"quant": {"signed_scales": True}}, r"quant.signed_scales: true, expected false: export.format executorch"),
        ({"quant": {"scheme": "w2a16_g32"}}, r"export.format: layout 'executorch' holds .*, got w2a16_g32"),
        ({"quant": {"scheme": "fp8_kv"}}, r"quant.scheme fp8_kv, which quantizes the KV cache"),
    ],
)
def test_recipes_are_refused_before_training(tmp_path, options, error):
    options = {"dtype": "bfloat16", **options, "quant": {"scheme": "8da4w", **options.get("quant", {})}}
    data = write_chats(tmp_path / "chats.jsonl")
    export = {"enabled": True, "format": "executorch"}
    with pytest.raises(RecipeError, match=error):
        check_export(load_recipe(write_recipe(tmp_path, "run", tmp_path, data, stage=3, export=export, **options)))


def test_every_type_that_is_written_is_tried():
    assert {VARIANTS[kind].config().model_type for kind in KINDS} == set(MODELS)
