"""Models and exports in which something is not what it was: an error that names it, or what the files hold. No code of
theirs runs, and nothing outside of the folder is read.
"""

import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.config.errors import RecipeError, checkpoint_problems
from engine.session.student import build_student
from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.scales import take_start
from model.ranks import RankError
from model.scales import load_scales
from quant import SCHEMES, Scheme, prepare
from tests.lib.checkpoints import exported
from tests.lib.patience import ends
from tests.lib.tiny import tiny_checkpoint
from tests.unit.engine.session.adapted import DS_CONFIG
from tests.unit.engine.session.adapted import folder as adapter
from tests.unit.engine.session.adapted import recipe as adapter_recipe
from tests.unit.model.mutations import of_folder
from tests.unit.model.quantized.test_gptq_awq import gptq_checkpoint
from tests.unit.model.quantized.test_modelopt import written as modelopt
from tests.unit.model.quantized.test_mxfp4_experts import published
from tests.unit.model.quantized.test_round_trip import loaded
from tools.compressed import load_compressed

CPU = torch.device("cpu")
OPENED: list[str] = []
BASES: dict[str, Path] = {}  # the models that folders of scales, codes to start from, or adapters are of
NAMED = re.compile(r"\.json|\.safetensors|model\.\w|lm_head")


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and "/outside/" in os.path.abspath(str(arguments[0])):
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A plain model of several files, exports of codes of each kind, and beside them what nobody may open."""
    base = tmp_path_factory.mktemp("mutations")
    plain = tiny_checkpoint(base / "plain", layers=1, even=True, max_shard_size="100KB")
    found = {"plain": plain, "adapter": adapter(base / "adapter", plain)}
    (base / "adapter" / "recipe.yaml").unlink()
    BASES["adapter"] = plain
    for scheme in ("fp8_static", "w4a16_g32"):
        exported(base / scheme, "qwen3", SCHEMES[scheme], wide=True)
        found[scheme] = base / scheme / "export"
        for use in ("source", "scales", "start"):
            found[f"{use} {scheme}"] = found[scheme]
            BASES[f"{use} {scheme}"] = base / scheme / "source"
    (base / "columns").mkdir()
    found["source gptq"] = gptq_checkpoint(base / "columns")[0]
    found["source awq"] = gptq_checkpoint(base / "columns", "awq")[0]
    (base / "modelopt").mkdir()
    found["source modelopt"] = modelopt(base / "modelopt", "fp8_static", inside=False)[1]
    found["scales modelopt"] = found["source modelopt"]
    BASES["scales modelopt"] = base / "modelopt" / "source"
    (base / "blocks").mkdir()
    found["source gpt_oss"] = published(base / "blocks", seed=0)
    shutil.copytree(found["plain"], base / "outside")
    sys.addaudithook(_watch)  # for the rest of the process
    return found


def load(kind: str, folder: Path):
    use, _, scheme = kind.partition(" ")
    if use == "source":
        return load_source(folder)
    if use in ("scales", "start"):
        return load_beside(use, folder, BASES[kind], SCHEMES.get(scheme, SCHEMES["fp8_static"]))
    if use == "adapter":
        return load_adapter(folder, BASES[kind])
    if kind != "plain":
        return load_compressed(folder, dtype=torch.float32, device=CPU)[0]
    model = build_model(folder, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=CPU)
    load_weights(model, folder, progress=False)
    return model


def load_source(folder: Path):
    """As a model.path: its configuration before anything else, then weights, and scales in the schemes of the files."""
    if problems := list(checkpoint_problems("model.path", str(folder))):
        raise RankError("\n".join(problems))
    return loaded(folder)[0]


def load_beside(use: str, folder: Path, base: Path, scheme: Scheme):
    """As quant.scales or quant.start of the model in ``base``."""
    model = build_model(base, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=CPU)
    load_weights(model, base, progress=False)
    quantization = prepare(model, scheme, learn_weight_scale=True, learn_input_scale=False)
    if use == "start":
        take_start(model, quantization, folder, inside=True, inputs_calibrated_later=True)
    else:
        load_scales(model, quantization, folder, inputs_calibrated_later=True)
    scales = [value for group in quantization.weight_groups for value in (group.s0, group.zero) if value is not None]
    assert all(bool(torch.isfinite(value).all()) for value in scales)
    return model


def load_adapter(folder: Path, base: Path):
    """As adapter.start."""
    try:
        settings = adapter_recipe(folder.parent, base, {"start": str(folder), "targets": [".*_proj"]})
        model, _ = build_student(settings, DS_CONFIG, CPU)
    except RecipeError as error:
        raise RankError(str(error)) from error
    trained = [value for name, value in model.named_parameters() if "lora" in name]
    assert trained and all(bool(torch.isfinite(value).all()) for value in trained)
    return model


def mutate_and_load(rng: random.Random, folders: dict[str, Path], work: Path) -> str:
    """One mutation of one folder; what came of it."""
    kind = rng.choice(list(folders))
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folders[kind], work)
    OPENED.clear()
    said = f"{kind}: {of_folder(rng, work)}"
    try:
        with ends(said):
            model = load(kind, work)
    except RankError as error:
        named = str(work) in str(error) or NAMED.search(str(error))
        assert named and len(str(error)) < 20_000, f"{said}\n{error}"
        return "named"
    finally:
        assert "EVIL" not in os.environ, said
        assert not OPENED, (said, OPENED)
    if kind == "plain":
        held = model.state_dict()
        for file in work.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                for key in tensors.keys() & held.keys():
                    expected = tensors.get_tensor(key).to(torch.bfloat16)
                    assert torch.equal(held[key].view(torch.int16), expected.view(torch.int16)), (said, key)
    return "loaded"


def test_forty_folders(folders, tmp_path):
    rng = random.Random(22)
    assert {mutate_and_load(rng, folders, tmp_path / "work") for _ in range(40)} == {"named", "loaded"}


@pytest.mark.full
def test_five_hundred_folders(folders, tmp_path, seed):
    rng = random.Random(seed)
    for _ in range(500):
        mutate_and_load(rng, folders, tmp_path / "work")


@pytest.mark.parametrize(("suffix", "dtype"), [("weight", torch.uint8), ("weight_scale", torch.int32)])
def test_bytes_under_another_dtype_are_not_read_as_other_numbers(folders, tmp_path, suffix, dtype):
    shutil.copytree(folders["fp8_static"], work := tmp_path / "work")
    key = f"model.layers.0.self_attn.k_proj.{suffix}"
    names = {torch.uint8: (b'"F8_E4M3"', b'"U8"'), torch.int32: (b'"F32"', b'"I32"')}[dtype]
    for file in work.glob("*.safetensors"):
        data = file.read_bytes()
        at = data.find(f'"{key}":'.encode())
        if at >= 0:
            padded = names[1].ljust(len(names[0]))
            file.write_bytes(data[:at] + data[at:].replace(names[0], padded, 1))
    with pytest.raises(RankError, match=rf"{re.escape(key)} is {dtype}, expected"):
        load("fp8_static", work)
