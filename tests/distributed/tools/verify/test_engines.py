"""From training on two ranks to the engines with formats of their own: weights are those of the last forward, bit for
bit, and logits near ours. What is not installed is skipped."""

import functools
import json
import os
import re
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from engine.session_export import check_export
from launch.verify import main as verify
from model.save.export_model import export_model
from model.save.loadable import EXECUTORCH_MODELS, MLX_MODELS, check_support
from quant import SCHEMES, replace_layers
from quant.rules import Rule
from tests.distributed.engine.scripts.train import run_all
from tests.families.make import Variant
from tests.families.variants import LLAMA3, VARIANTS, YARN
from tests.lib.checkpoints import quantized
from tests.lib.gguf_files import gguf_template
from tests.lib.launcher import on_ranks
from tests.lib.patience import ends
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER
from tools.compressed import load_compressed
from tools.verify.comparison import Engine, Report, compare_with_compressed
from tools.verify.engines import GGUF, MLX, ExecuTorch

EIGHT = {"layers": r".*\.o_proj", "scheme": "w8a16_g32"}
TOKENS = {"weights": {"dtype": "int", "bits": 8, "granularity": "channel"}}
INPUTS = {"dtype": "int", "bits": 8, "granularity": "token", "symmetric": False, "dynamic": True}
ROWS = {"layers": r".*\.o_proj", "scheme": "int8_per_row"}
MXFP8 = {"dtype": "fp8_e4m3", "granularity": "group", "group_size": 32, "mx": True}
PLAIN = {"layers": r".*\.0\..*\.down_proj", "scheme": "none"}


def mlx_quant(scheme: str) -> dict[str, Any]:
    return {"scheme": scheme, "rules": [EIGHT], "signed_scales": True}


class Format(NamedTuple):
    """Package that reads it, their reader, ``quant`` by the model, and further sections of the recipe."""

    package: str
    reader: type[Engine]
    kinds: dict[str, dict[str, Any]]
    options: dict[str, Any]
    export: dict[str, Any]


FORMATS = {
    "gguf": Format(
        "cyllama",
        GGUF,
        {
            "llama": {"scheme": "w4a16_g32", "signed_scales": True},
            "qwen3": {"scheme": "q4_0", "rules": [{"layers": r".*\.o_proj", "scheme": "q8_0"}]},
            "qwen3_moe": {"scheme": "q4_0"},
            "qwen2, tied": {"scheme": "q4_0", "embedding": "q8_0", "lm_head": "tied"},
            "mixtral": {"scheme": "mxfp4"},
            "mistral": {"scheme": "nvfp4", "rules": [{"layers": r".*\.down_proj", "scheme": "q8_0"}]},
            "gemma3_text": {"scheme": "q4_0"},
            "gemma4_text, softcap": {"scheme": "q4_0"},
            "lfm2": {"scheme": "q4_0", "rules": [{"layers": r".*\.out_proj", "scheme": "q8_0"}]},
        },
        {},
        {},
    ),
    # Of these two all variants of the zoo of the types that are written.
    "mlx": Format(
        "mlx_lm",
        MLX,
        {
            "llama": mlx_quant("w4a16_g32"),
            "llama, tied": mlx_quant("w2a16_g32"),
            "llama, rope of llama 3": mlx_quant("w3a16_g32"),
            "llama, biases": mlx_quant("w4a16_g32"),
            "llama, heads wider than hidden": mlx_quant("w8a16_g32"),
            "qwen2": {**mlx_quant("mxfp4"), "embedding": "w8a16_g32"},
            "qwen2, tied": mlx_quant("w4a16_g32"),
            "qwen3": mlx_quant("w2a16_g32"),
            "qwen3, tied": mlx_quant("w4a16_g32") | {"embedding": "w8a16_g32", "lm_head": "tied"},
            "qwen3, yarn": mlx_quant("w4a16_g32"),
            "qwen3_moe": mlx_quant("w4a16_g32"),
            "qwen3_moe, mixed layers": {**mlx_quant("mxfp8_weights"), "schemes": {"mxfp8_weights": {"weights": MXFP8}}},
        },
        {},
        {},
    ),
    "executorch": Format(
        "executorch",
        ExecuTorch,
        {
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
        },
        {"learnable": {"weight_scale": True}},
        {"max_shard_size": "100KB"},
    ),
}
# Variants for MLX of which no model is trained here: the other types that are written.
ONLY_QUANTIZED = (
    *("mistral", "gemma4_text", "gemma4_text, keys are values", "gemma4_text, softcap", "gemma4", "lfm2"),
    *("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"),
)
SHARED_KEYS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
SHARED_KEYS |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
IDS = list(torch.randint(7, 300, (2, 128), generator=torch.Generator().manual_seed(1)).split(1))


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Function that trains each model of a format twice in the same way, and writes it once in the format, once as a
    compressed checkpoint."""

    @functools.cache
    def trained(layout: str) -> dict[str, tuple[Path, Path]]:
        form = FORMATS[layout]
        pytest.importorskip(form.package, reason=f"make test-{layout}")
        base = tmp_path_factory.mktemp(layout)
        data, written = write_chats(base / "chats.jsonl"), {}
        for kind, quant in form.kinds.items():
            name = kind.replace(", ", "-").replace(" ", "_")
            own = form.export
            if layout == "gguf":
                tiny = kind in ("llama", "qwen3", "qwen3_moe")
                source = (
                    tiny_checkpoint(base / name, kind, even=True) if tiny else VARIANTS[kind].checkpoint(base / name)
                )
                own = {"template": str(gguf_template(source, base / f"{name}.gguf"))}
            else:
                source = VARIANTS[kind].checkpoint(base / name)
            for which, export in ((layout, own), ("compressed", form.export)):
                written[kind, which] = write_recipe(
                    base,
                    f"{name}_{which}",
                    source,
                    data,
                    dtype="bfloat16",
                    stage=3,
                    loss=NO_TEACHER,
                    train={"steps": 2, "gradient_accumulation_steps": 1},
                    quant={"scheme": "8da4w", "calibration_batches": 0, **quant},
                    export={"enabled": True, "format": which, **export},
                    **form.options,
                )
        on_ranks(run_all, [(None, path) for path in written.values()])
        directories = {which: load_recipe(path).export_dir() for which, path in written.items()}
        return {kind: (directories[kind, layout], directories[kind, "compressed"]) for kind in form.kinds}

    return trained


def variant(kind: str, options: dict[str, Any]) -> Variant:
    """A variant of the zoo with other options."""
    return replace(VARIANTS[kind], options={**VARIANTS[kind].options, **options})


def compared(layout: str, export: Path, against: Path, batches=()) -> Report:
    return compare_with_compressed(FORMATS[layout].reader(export), against, batches)


@pytest.mark.parametrize(("layout", "kind"), [(name, kind) for name, form in FORMATS.items() for kind in form.kinds])
def test_an_engine_computes_with_the_weights_of_the_last_forward(exports, layout, kind):
    report = compared(layout, *exports(layout)[kind], IDS)
    assert report.ok and report.layers >= {"gguf": 12, "mlx": 14, "executorch": 8}[layout], report.table()
    assert report.logits and report.note is None, report.table()
    assert all(found.tokens == 256 for found in report.logits.values())
    if layout == "mlx":
        found = report.logits["dtype of the file"]
        assert abs(found.perplexity("theirs") / found.perplexity("ours") - 1) < 0.005, report.table()


@pytest.mark.parametrize(
    ("layout", "key", "change"),
    [
        ("mlx", "model.layers.1.mlp.up_proj.scales", lambda scale: scale * 1.0078125),
        ("executorch", "model.layers.1.mlp.up_proj._weight_qdata", lambda code: code ^ 1),
    ],
)
def test_a_changed_tensor_is_named_before_anything_is_computed(exports, tmp_path, layout, key, change):
    """A changed GGUF file is tested in tests/unit/model/save/test_gguf.py."""
    export, against = exports(layout)["qwen3"]

    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3, 1] = change(tensor[3, 1])
        return tensor

    changed = edited(export, tmp_path / "changed", key, edit)
    report = compared(layout, changed, against, IDS)
    weight = "model.layers.1.mlp.up_proj.weight"
    assert report.problems == [f"{weight} does not equal {weight} of {against}"] and not report.logits
    assert report.note == "logits: skipped: the tensors are not equal"
    good = compared(layout, export, against)
    assert report.equal == good.equal - 1 and good.note == "logits: skipped: no text was given"


def edited(export: Path, directory: Path, key: str, edit) -> Path:
    """A copy of an export in which a tensor is replaced by what ``edit`` returns."""
    shutil.copytree(export, directory)
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            metadata = handle.metadata()
        tensors = load_file(file)
        if key in tensors:
            tensors[key] = edit(tensors[key])
            file.unlink()
            save_file(tensors, file, metadata=metadata)
    return directory


@pytest.mark.parametrize(("layout", "engine"), [("mlx", "MLX"), ("executorch", "ExecuTorch"), ("gguf", "llama.cpp")])
def test_verify_asks_for_what_it_compares_with(exports, capsys, layout, engine):
    with pytest.raises(SystemExit):
        verify(["--export", str(exports(layout)["llama"][0])])
    assert f"is for {engine}: give --against" in capsys.readouterr().err


@pytest.mark.parametrize("layout", FORMATS)
def test_tokens_of_another_model_are_refused(exports, layout):
    """Some engines read beyond their embeddings."""
    with pytest.raises(ValueError, match=r"has the tokenizer of another model: it gives token 5000, .*: copy the "):
        compared(layout, *exports(layout)["qwen3"], [torch.tensor([[1, 5000]])])


# GGUF


def test_verify_computes_logits_or_says_why_not(exports, tmp_path, capsys, monkeypatch):
    export, against = exports("gguf")["qwen3"]
    (tmp_path / "text.txt").write_text("The road ends at the top of the hill. " * 20)
    arguments = ["--export", str(export), "--against", str(against), "--text", str(tmp_path / "text.txt")]
    assert verify(arguments) == 0
    said = capsys.readouterr().out
    assert "\ninputs rounded " in said and said.endswith("ok\n"), said
    assert verify([*arguments, "--engine", "llama.cpp"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"llama.cpp on the CPU: \d+ tokens, KL \S+ \(at most 0.001 expected\), .*: ok", line), line
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cyllama", None)  # an import error, as in an environment that lacks it
        assert verify(arguments) == 0
    said = capsys.readouterr().out
    assert "logits: skipped: the package cyllama is not installed" in said and said.endswith("ok\n"), said
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(SystemExit):
        verify([*arguments[:-1], str(tmp_path / "short.txt")])
    assert "has 0 tokens with this tokenizer, at least 2 are needed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [kind for kind in FORMATS["gguf"].kinds if not re.match("gemma|lfm2", kind)])
def test_llama_cpp_that_computes_something_else_is_a_problem(exports, kind, tmp_path):
    """Positions that turn otherwise leave every tensor as it is. Most layers of Gemma have a base of their own, and of
    LFM2 none."""
    export, against = exports("gguf")[kind]
    changed = shutil.copytree(export, tmp_path / "changed") / "model.gguf"
    data = changed.read_bytes()
    at = data.index(b"rope.freq_base") + len("rope.freq_base") + 4
    changed.write_bytes(data[:at] + struct.pack("<f", 2.0) + data[at + 4 :])
    problems = compared("gguf", changed.parent, against, IDS).problems
    assert len(problems) == 1 and problems[0].startswith("inputs rounded: KL divergence"), problems


# MLX


def test_codes_of_another_type_are_named_and_pipes_are_not_waited_for(exports, tmp_path):
    export, against = exports("mlx")["qwen3"]
    key = "model.layers.1.mlp.up_proj.weight"
    changed = edited(export, tmp_path / "changed", key, lambda codes: codes.view(torch.int32))
    (problem,) = compared("mlx", changed, against, IDS).problems
    assert problem.startswith(f"{key} does not equal {key} of {against}: [dequantize]")
    os.mkfifo(changed / "generation.json")
    with ends("a pipe"), pytest.raises(ValueError, match=r"generation.json is neither a file nor a folder"):
        compared("mlx", changed, against, IDS)


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in ONLY_QUANTIZED), ("gemma4_text", SHARED_KEYS), ("llama", {"rope_parameters": YARN})],
)
def test_mlx_computes_other_types(kind, options, tmp_path):
    pytest.importorskip("mlx_lm", reason="make test-mlx")
    source = variant(kind, options).checkpoint(tmp_path / "source")
    rules = [Rule(SCHEMES["mxfp4"], r".*\.(o|out)_proj")]
    model, quantization = quantized(source, SCHEMES["w4a16_g32"], rules=rules)
    for layout in ("mlx", "compressed"):
        export_model(model, quantization, source, tmp_path / layout, layout=layout)
    report = compared("mlx", tmp_path / "mlx", tmp_path / "compressed", IDS)
    assert report.ok and report.logits and report.layers >= 12, report.table()


def test_other_readers_are_not_told_of_codes(exports):
    config = json.loads((exports("mlx")["qwen3_moe"][0] / "config.json").read_text())
    assert "quantization_config" not in config
    usual = {key: value for key, value in config["quantization"].items() if not isinstance(value, dict)}
    assert usual == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert {name.rpartition(".")[2] for name in config["quantization"].keys() - usual.keys()} == {"o_proj"}


# ExecuTorch


def test_every_file_names_all_tensors(exports):
    """transformers joins what the files say, and takes the list of names of one of them."""
    files = sorted(exports("executorch")["llama"][0].glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        with open(file, "rb") as handle:
            header = json.loads(handle.read(struct.unpack("<Q", handle.read(8))[0]))
        names = json.loads(header["__metadata__"]["tensor_names"])
        assert len(names) == 21 and names == [name for name in header["__metadata__"] if "." in name]


def test_a_layer_that_another_scale_multiplies_there_is_named(exports):
    """Logits of a deep model cannot show this: other codes of inputs change them more."""
    export, against = exports("executorch")["qwen3"]
    reader = ExecuTorch(export)
    reader.model, reader.quantization = load_compressed(against)
    with torch.no_grad():
        reader.theirs.model.layers[0].mlp.down_proj.weight.scale.mul_(1 + 2**-7)
        reader.compare_logits(against, IDS)
    (problem,) = reader.report.problems  # 0.0078 of the outputs; half of a feature's are above 0.67 of its deviation
    assert re.match(r"model.layers.0.mlp.down_proj, computed alone .* by 0.00[5-8]\d* of their standard dev", problem)


def test_the_page_makes_a_program_that_generates(exports, tmp_path, monkeypatch):
    """The script of docs/executorch.md, as it stands there but for the directory."""
    export = exports("executorch")["qwen3"][0]
    from executorch.runtime import Runtime

    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/executorch.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "documented"}
    with torch.no_grad():
        exec(script.replace("served/executorch", str(export)), names)
    torch.set_grad_enabled(True)
    program = Runtime.get().load_program(tmp_path / "qwen3.pte")
    method = program.load_method("forward")
    ids = IDS[0][:, :9]
    found = [method.execute([ids[:, at : at + 1], torch.tensor([at])])[0][0, -1].clone() for at in range(ids.shape[1])]
    with torch.no_grad():
        expected = names["model"](input_ids=ids, use_cache=False).logits[0]
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-3 * expected.std().item(), rtol=0)


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


@pytest.mark.parametrize(
    ("layout", "kind", "scheme", "message"),
    [
        ("mlx", "qwen2, sliding window", "w4a16_g32", "mlx-lm computes qwen2 without its sliding window"),
        ("mlx", "mistral, sliding window", "w4a16_g32", "mlx-lm computes mistral without its sliding window"),
        ("mlx", "gemma4_text, experts", "w4a16_g32", "tested with gemma4_text with experts: set export.format"),
        ("mlx", "gpt_oss", "mxfp4", r"tested with models of type llama, .*, not with gpt_oss: set export.format"),
        ("executorch", "qwen3_moe", "8da4w", r"tested with models of type llama, .*, not with qwen3_moe: set export"),
        ("executorch", "qwen3", "w4a16_g32", r"q_proj: layout 'executorch' has no Linear whose inputs are not quan"),
    ],
)
def test_models_that_an_engine_does_not_compute_are_refused(layout, kind, scheme, message):
    model = VARIANTS[kind].model()
    quantization = replace_layers(model, SCHEMES[scheme], learn_weight_scale=False, learn_input_scale=False)
    with pytest.raises(ValueError, match=message):
        check_support(model, quantization, layout)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "qwen3, yarn",
            {"rope_parameters": {**YARN, "truncate": False}},
            "computes yarn as with truncate true, got fal",
        ),
        (
            "qwen3, yarn",
            {"rope_parameters": {**YARN, "attention_factor": 2.0}},
            "rope_parameters has attention_factor, which mlx-lm does not compute",
        ),
        ("llama", {"hidden_act": "gelu"}, "mlx-lm computes llama with silu, whatever config.json says, got 'gelu'"),
        ("gemma4_text", {"hidden_activation": "silu"}, "computes gemma4_text with gelu_pytorch_tanh, whatever"),
        (
            "lfm2",
            {"rope_parameters": LLAMA3},
            "tested for lfm2 with rope_type default, got 'llama3': set export.format",
        ),
        (
            "qwen3_5_text",
            {"layer_types": ["full_attention", "linear_attention"]},
            "full attention in each n-th layer, not",
        ),
    ],
)
def test_configurations_that_mlx_does_not_compute_are_refused(kind, options, message):
    model = variant(kind, options).model()
    quantization = replace_layers(model, SCHEMES["w4a16_g32"], learn_weight_scale=False, learn_input_scale=False)
    with pytest.raises(ValueError, match=message):
        check_support(model, quantization, "mlx")


def test_every_variant_of_a_type_that_is_written_is_tried_or_refused():
    known = {name for name, variant in VARIANTS.items() if variant.config().model_type in MLX_MODELS}
    refused = {"qwen2, sliding window", "mistral, sliding window", "gemma4_text, experts"}
    assert known == refused | FORMATS["mlx"].kinds.keys() | set(ONLY_QUANTIZED)
    kinds = FORMATS["executorch"].kinds
    assert {VARIANTS[kind].config().model_type for kind in kinds} == set(EXECUTORCH_MODELS)
