"""quant.scheme source: layers that the recipe exempts, and an lm_head that training cannot compute."""

import json
from pathlib import Path

import pytest
import torch

from engine.config.config import Recipe
from engine.config.reading import load_recipe
from model.ranks import RankError
from quant import SCHEMES
from tests.lib.checkpoints import export_model, load_model, quantize, read_tensors
from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_sections
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed
from tools.memory.model import meta_student

O_PROJ = r".*\.o_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Linears and lm_head in fp8, with dynamic scales of inputs."""
    directory = tmp_path_factory.mktemp("source")
    plain = tiny_checkpoint(directory / "plain", "llama", wide=True)
    model = load_model(plain)
    quantization = quantize(model, "fp8_dynamic", named={"lm_head": SCHEMES["fp8_dynamic"]})
    export_model(model, quantization, plain, directory / "export")
    return directory / "export"


def recipe_of(directory: Path, source: Path, *exempt: str) -> Recipe:
    path = write_sections(
        directory,
        model={"path": str(source)},
        quant={"scheme": "source", "exempt_more": list(exempt)},
        data={"train": [str(write_chats(directory / "chats.jsonl"))], "max_length": 64},
        train={"steps": 1},
        output_dir=str(directory / "out"),
        deepspeed="zero0",
    )
    return load_recipe(path)


def test_exempt_layers_are_decoded(source, tmp_path):
    student = meta_student(recipe_of(tmp_path, source, O_PROJ, "lm_head"))
    layers = student.quantization.layers
    assert layers and not any(name.endswith(("o_proj", "lm_head")) for name in layers)
    done = run_python("from launch.calibrate import main; main()", "--config", tmp_path / "recipe.yaml")
    assert done.returncode == 0, done.stderr
    written, (read, _) = read_tensors(tmp_path / "out" / "export"), load_compressed(source, dtype=torch.bfloat16)
    values = {
        name: layer.quantized_weight() for name, layer in read.named_modules() if hasattr(layer, "quantized_weight")
    }
    exempt = [key for key in written if key.endswith(("o_proj.weight", "lm_head.weight"))]
    assert len(exempt) == 3
    ignored = json.loads((tmp_path / "out/export/config.json").read_text())["quantization_config"]["ignore"]
    assert any("o_proj" in one for one in ignored) and "lm_head" in ignored
    for key in exempt:
        assert torch.equal(written[key], values[key.removesuffix(".weight")]), key


def test_a_head_with_quantized_inputs_is_refused(source, tmp_path):
    said = r"lm_head: .*export quantizes its inputs \(fp8_dynamic\), but losses .* quant.exempt_more: \['lm_head'\]"
    with pytest.raises((RankError, ValueError), match=said):
        meta_student(recipe_of(tmp_path, source))
