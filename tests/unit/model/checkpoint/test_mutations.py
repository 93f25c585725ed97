"""Models and exports with random damage: either an error that names it, or the values in the files. No code of the
files runs, and nothing outside of the folder is read."""

import io
import os
import random
import re
import shutil
import struct
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from engine.session.context import RunContext, build_loader, read_tokenizer
from engine.session.session import check_models
from engine.session.student import build_student
from engine.session_export import check_export, check_exportable
from launch.exits import clean_exit, recipe_or_exit
from model.quantized.scales import take_start
from model.ranks import RankError
from model.scales.loading import load_scales
from quant import SCHEMES
from tests.lib.checkpoints import (
    CPU,
    edit_json,
    edit_tensors,
    exported,
    load_model,
    quantize,
    read_tensors,
    same_bits,
)
from tests.lib.mutations import of_folder
from tests.lib.patience import ends
from tests.lib.published import gpt_oss, gptq_checkpoint, modelopt
from tests.lib.recipes import write_chats, write_minimal
from tests.lib.tiny import tiny_checkpoint
from tests.unit.engine.session.adapted import DS_CONFIG
from tests.unit.engine.session.adapted import folder as adapter
from tests.unit.engine.session.adapted import recipe as adapter_recipe
from tools.compressed import load_compressed

OPENED: list[str] = []
BASES: dict[str, Path] = {}  # the models that folders of scales, codes to start from, or adapters are of
SCALE = "model.layers.0.mlp.up_proj.weight_scale"
NAMED = re.compile(r"\.json|\.safetensors|model\.\w|lm_head")


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and "/outside/" in os.path.abspath(str(arguments[0])):
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A plain model of several files, exports of codes of each kind, and beside them what must not be opened."""
    base = tmp_path_factory.mktemp("mutations")
    plain = tiny_checkpoint(base / "plain", layers=1, even=True, max_shard_size="100KB")
    found = {
        "plain": plain,
        "train fp8_static": plain,
        "train w4a16_g32": plain,
        "adapter": adapter(base / "adapter", plain),
    }
    (base / "adapter" / "recipe.yaml").unlink()
    BASES["adapter"] = plain
    for scheme in ("fp8_static", "w4a16_g32"):
        exported(base / scheme, "qwen3", SCHEMES[scheme], wide=True)
        for use in ("export", "train source", "scales", "start"):
            found[f"{use} {scheme}"] = base / scheme / "export"
            BASES[f"{use} {scheme}"] = base / scheme / "source"
    for kind in ("gptq", "awq"):
        found[f"train source {kind}"] = gptq_checkpoint(base / f"of {kind}", kind)[0]
    found["train source modelopt"] = found["scales modelopt"] = modelopt(base / "modelopt", "fp8_static", inside=False)[
        1
    ]
    BASES["scales modelopt"] = base / "modelopt" / "source"
    found["train source gpt_oss"] = gpt_oss(base / "blocks", seed=0)
    shutil.copytree(plain, base / "outside")
    sys.addaudithook(_watch)  # for the rest of the process
    return found


def load(kind: str, folder: Path) -> torch.nn.Module:
    """Load a folder as a model.path, quantized or not, or as the other parts of a recipe that name one."""
    use, _, scheme = kind.partition(" ")
    if use == "export":
        return load_compressed(folder, dtype=torch.float32, device=CPU)[0]
    if use == "train":
        return start(folder, scheme.partition(" ")[0])
    if use == "plain":
        return load_model(folder)
    if use == "adapter":
        settings = adapter_recipe(folder.parent, BASES[kind], {"start": str(folder), "targets": [".*_proj"]})
        model, _ = build_student(settings, DS_CONFIG, CPU)
        values = [value for name, value in model.named_parameters() if "lora" in name]
    else:
        model = load_model(BASES[kind])
        quantization = quantize(model, scheme if scheme in SCHEMES else "fp8_static", measure=False)
        if use == "start":
            take_start(model, quantization, folder, inside=True, inputs_calibrated_later=True)
        else:
            load_scales(model, quantization, folder, inputs_calibrated_later=True)
        groups = quantization.weight_groups
        values = [value for group in groups for value in (group.s0, group.zero) if value is not None]
    assert values and all(bool(torch.isfinite(value).all()) for value in values)
    return model


def start(folder: Path, scheme: str) -> torch.nn.Module:
    """Run the start of launch/train.py on a model directory, up to the first forward."""
    chats = folder.parent / "chats.jsonl"
    if not chats.exists():
        write_chats(chats)
    argv = ["--config", str(write_minimal(folder.parent)), "--model.path", str(folder), "--quant.scheme", scheme]
    recipe = recipe_or_exit([*argv, "--data.train", f"['{chats}']", "--output_dir", str(folder.parent / "run")])
    check_export(recipe)
    context = RunContext(CPU, DS_CONFIG, read_tokenizer(recipe))
    models = check_models(recipe, context)
    check_exportable(recipe, models.model, models.quantization)
    build_loader(recipe, context.tokenizer, models.tokens)
    return build_student(recipe, DS_CONFIG, CPU)[0]


def mutate_and_load(rng: random.Random, folders: dict[str, Path], work: Path) -> str:
    """Mutate one folder, load it, and return the outcome."""
    kind = rng.choice(list(folders))
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folders[kind], work)
    OPENED.clear()
    said, printed = f"{kind}: {of_folder(rng, work)}", io.StringIO()
    try:
        with ends(said), redirect_stderr(printed), clean_exit():
            model = load(kind, work)
    except SystemExit:
        text = printed.getvalue()
        assert text.startswith("error: ") and "Traceback" not in text and len(text) < 20_000, f"{said}\n{text}"
        named = str(work) in text or NAMED.search(text)
        assert named and "name a quant.scheme" not in text, f"{said}\n{text}"
        return "named"
    except BaseException as error:
        error.add_note(said)
        raise
    finally:
        assert "EVIL" not in os.environ, said
        assert not OPENED, (said, OPENED)
    if kind == "plain":
        loaded, files = model.state_dict(), read_tensors(work)
        for key in files.keys() & loaded.keys():
            assert same_bits(loaded[key], files[key].to(torch.bfloat16)), (said, key)
    return "loaded"


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NESTED = b'"w": ' + b"[" * 200_000 + b"]" * 200_000


def edit_header(file: Path, entry: bytes) -> None:
    """Put an entry in front of the others in the header of a safetensors file."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    file.write_bytes(struct.pack("<Q", length + len(entry)) + b"{" + entry + data[9:])


def test_a_hundred_folders(folders, tmp_path):
    rng = random.Random(22)
    assert {mutate_and_load(rng, folders, tmp_path / "work") for _ in range(100)} == {"named", "loaded"}


@pytest.mark.full
def test_a_thousand_folders(folders, tmp_path, seed):
    rng = random.Random(seed)
    for _ in range(1000):
        mutate_and_load(rng, folders, tmp_path / "work")


@pytest.mark.parametrize("scheme", ["source", "w4a16_g32"])
def test_damage_is_named_whether_the_scheme_is_or_not(folders, tmp_path, scheme):
    """In a file cut short, in a layer without its scales, where config.json describes a smaller model or another
    quantizer, and in headers and indices that are nested deep or have names that are no text."""
    work = tmp_path / "work"

    def index(text: bytes) -> Callable[[Path], object]:
        def replace(file: Path) -> None:
            for one in work.glob("model.safetensors*"):
                one.unlink()
            (work / "model.safetensors.index.json").write_bytes(b'{"weight_map": ' + text)

        return replace

    for damage, named in (
        (lambda file: os.truncate(file, file.stat().st_size - 8), "is truncated"),
        (lambda file: edit_tensors(work, SCALE, lambda tensors: tensors.pop(SCALE)), "weight_scale is missing"),
        (lambda file: edit_json(work / "config.json", num_hidden_layers=0), "config.json"),
        (lambda file: edit_json(work / "config.json", quantization_config=AWQ), "model.layers.0.self_attn.q_proj"),
        (lambda file: edit_header(file, NESTED + b", "), "brackets are nested too deeply"),
        (lambda file: edit_header(file, rb'"w\ud800": {}, '), r"half of a surrogate pair: 'w\ud800'"),
        (index(b"{" + NESTED + b"}}"), "brackets are nested too deeply"),
        (index(rb'{"w\ud800": "a.safetensors"}}'), r"half of a surrogate pair: 'w\ud800'"),
        (index(rb'{"w": "a\ud800.safetensors"}}'), r"half of a surrogate pair: 'a\ud800.safetensors'"),
    ):
        shutil.copytree(folders["train source w4a16_g32"], work)
        damage(max(work.glob("*.safetensors")))
        with pytest.raises(RankError) as raised:
            start(work, scheme)
        text = str(raised.value)
        assert str(work) in text and named in text
        assert not re.search(r"name a quant\.scheme|tokenizer", text)
        shutil.rmtree(work)


@pytest.mark.parametrize(
    ("suffix", "was", "becomes"),
    [
        ("weight", '"F8_E4M3"', '"U8"     '),
        ("weight_scale", '"F32"', '"I32"'),
        ("input_scale", '"F32"', '"I32"'),
    ],
)
def test_bytes_under_another_dtype_are_not_read_as_other_numbers(folders, tmp_path, suffix, was, becomes):
    shutil.copytree(folders["export fp8_static"], work := tmp_path / "work")
    for file in work.glob("*.safetensors"):
        data = file.read_bytes()
        at = data.find(f'"model.layers.0.self_attn.k_proj.{suffix}":'.encode())
        if at >= 0:
            file.write_bytes(data[:at] + data[at:].replace(was.encode(), becomes.encode(), 1))
    kind = becomes.split('"')[1]
    with pytest.raises(RankError, match=rf"self_attn\.k_proj: {suffix} is {kind} .*, expected torch\.float"):
        load("export fp8_static", work)
