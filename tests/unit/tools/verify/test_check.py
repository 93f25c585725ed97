"""Exported checkpoints in transformers against our own forward, and what the comparison catches."""

import json
import math
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.verify import main
from model.ranks import RankError
from model.save import export_model
from quant import DEFAULT_EXEMPT, SCHEMES, Scheme, TensorSpec
from tests.lib.checkpoints import exported, quantized
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed
from tools.verify.check import OUR_FORWARD_KL, compare_with_transformers
from tools.verify.comparison import LogitComparison, windows
from tools.verify.export_files import problems_of_files

FP8 = SCHEMES["fp8_static"]
# The tiny models are 48 wide inside and odd elsewhere: groups of 16 fit all but the down projections.
INT4 = Scheme("w4a16_g16", TensorSpec("int", 4, "group", 16))
INT3 = Scheme("w3a16_channel", TensorSpec("int", 3, "channel"))
NO_DOWN = (*DEFAULT_EXEMPT, r".*\.down_proj")


def only_rounding(comparison: LogitComparison, kind: str, scheme: Scheme) -> None:
    """Logits differ by rounding of matrix products and no more.

    Dense models run the same kernels on the same shapes (measured: no difference). Gate and up of an expert are one
    product in transformers and two here: 1.3e-6 of a standard deviation. One input in some millions lies so close to a
    boundary that its fp8 code flips then, which moves that token's logits by some 1e-3: one run in 200, so there the
    KL is bounded. One flip makes 1e-6 of it in most places and 3e-5 at most of 939; a wrong scale 1e-3 and more.
    """
    if kind == "qwen3_moe" and scheme.activations is not None:
        assert comparison.kl < 1e-4
        assert comparison.mean_abs < 1e-3
    else:
        assert comparison.relative_max < 1e-5


CASES = {
    "dense fp8": ("qwen3", FP8, DEFAULT_EXEMPT, {"tied": True}),
    "llama int3": ("llama", INT3, DEFAULT_EXEMPT, {}),
    "dense int4, down exempt": ("qwen3", INT4, NO_DOWN, {}),
    "moe fp8": ("qwen3_moe", FP8, DEFAULT_EXEMPT, {"every_expert": True}),
    # Where the arithmetic differs by a rounding, a random router sends a token in a thousand to another expert, which
    # moves that token's KL by 0.1: a bound on a few hundred tokens holds only where nothing is left to route.
    "moe int3, every expert": ("qwen3_moe", INT3, DEFAULT_EXEMPT, {"every_expert": True}),
    "moe fp8, attention only": (
        "qwen3_moe",
        FP8,
        (*DEFAULT_EXEMPT, r".*\.experts\..*"),
        {"tied": True, "every_expert": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_logits_of_our_forward(case, tmp_path, seed):
    """Measured scales. Under the same arithmetic, rounding of the matrix products is all that is left (measured:
    nothing).

    Our forward as it is: equal for integer weights of a dense model; with fp8 inputs, or experts that transformers
    holds in bf16, the differences named in tools/verify/check.py, KL 1e-7 to 1e-4 on these models.
    """
    kind, scheme, exempt, options = CASES[case]
    directory, batches, *_ = exported(tmp_path, kind, scheme, exempt=exempt, **options)
    report = compare_with_transformers(directory, batches)
    assert report.ok, report.table()
    only_rounding(report.logits["same arithmetic"], kind, scheme)
    assert report.logits["our forward"].kl < OUR_FORWARD_KL
    # Label by label the log-probabilities differ by sqrt(2 KL) in the mean square, to second order: six deviations.
    ours = report.logits["our forward"]
    bound = 6 * math.sqrt(2 * max(ours.kl, 0) / ours.predicted) + 1e-5
    assert abs(math.log(ours.perplexity("ours") / ours.perplexity("theirs"))) < bound
    if kind != "qwen3_moe" and scheme.activations is None:
        only_rounding(report.logits["our forward"], kind, scheme)
    assert ("full forward" in report.logits) == (case == "moe fp8")
    assert report.layers == len(load_compressed(directory)[1].layers)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("scheme", [FP8, INT3], ids=lambda scheme: scheme.name)
def test_with_powers_of_two_as_scales_our_forward_is_theirs(kind, scheme, tmp_path, seed):
    """Dividing by 2^k and multiplying with 2^-k are both exact, and a code times 2^k is a bf16 number: only rounding
    of matrix products is left. That, too, could send a token to another expert where there is a choice."""
    directory, batches, *_ = exported(tmp_path, kind, scheme, powers_of_two=True, every_expert=kind == "qwen3_moe")
    report = compare_with_transformers(directory, batches)
    assert report.ok, report.table()
    only_rounding(report.logits["our forward"], kind, scheme)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("scheme", [FP8, INT3], ids=lambda scheme: scheme.name)
def test_reading_an_export_gives_the_model_that_was_exported(kind, scheme, tmp_path, seed):
    """In bf16, bit for bit the logits before the export: dequantized weights are rounded as the forward rounds."""
    source = tiny_checkpoint(tmp_path / "source", kind, seed=random.randrange(2**31))
    batches = [torch.randint(0, 301, (2, 64))]
    model, quantization = quantized(source, scheme, batches, experts="per_expert")  # as the reader has them
    export_model(model, quantization, source, tmp_path / "export")
    again, read = load_compressed(tmp_path / "export", dtype=torch.bfloat16)
    assert read.layers.keys() == quantization.layers.keys()
    with torch.no_grad():
        assert torch.equal(again(input_ids=batches[0]).logits, model(input_ids=batches[0]).logits)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One export of a MoE in shards, and tokens, for the tests that damage a copy of it."""
    directory = tmp_path_factory.mktemp("good")
    random.seed(0)
    torch.manual_seed(0)
    return exported(directory, "qwen3_moe", FP8)


@pytest.fixture
def damaged(good, tmp_path):
    """A copy to damage, and a function that edits the tensors of the shard that holds a key."""
    directory = shutil.copytree(good[0], tmp_path / "damaged")

    def change(key, edit):
        for path in directory.glob("*.safetensors"):
            tensors = load_file(path)
            if key in tensors:
                edit(tensors)
                save_file(tensors, path, metadata={"format": "pt"})
                return
        raise AssertionError(f"no {key}")

    return directory, change


def edit_config(directory: Path, edit) -> None:
    config = json.loads((directory / "config.json").read_text())
    edit(config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))


ATTENTION = "model.layers.1.self_attn"
EXPERT = "model.layers.0.mlp.experts.3"


def test_a_damaged_export_is_named(damaged, good):
    """Damage that every reader loads without complaint: each kind by itself, on a copy of a good export."""
    directory, change = damaged
    key = f"{ATTENTION}.q_proj.weight_scale"
    kept = {}

    def scale(tensors):
        kept[key] = tensors[key]
        tensors[key] = tensors[key] * 1.01

    change(key, scale)
    report = compare_with_transformers(directory, good[1])
    assert any("self_attn.k_proj" in p and "served with one weight_scale" in p for p in report.problems), report.table()
    change(key, lambda tensors: tensors.update(kept))
    assert compare_with_transformers(directory, good[1]).ok

    edit_config(directory, lambda config: config["ignore"].remove(r"re:.*mlp\.gate$"))
    problems = compare_with_transformers(directory, good[1]).problems
    assert problems == [
        "ignore does not name the routers model.layers.0.mlp.gate, model.layers.1.mlp.gate: vLLM would quantize them"
    ]


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_scale_of_another_shape_is_named(damaged, good, shape):
    directory, change = damaged
    key = f"{ATTENTION}.o_proj.input_scale"
    change(key, lambda tensors: tensors.update({key: tensors[key].reshape(shape).clone()}))
    problems = check_only(directory)
    assert problems == [f"{key} is torch.float32 {list(shape)}, expected torch.float32 [1]"]


def check_only(directory: Path) -> list[str]:
    """The checks of the files alone: transformers itself raises on these."""
    return problems_of_files(directory, *load_compressed(directory))


@pytest.mark.parametrize(
    ("key", "edit", "message"),
    [
        (f"{EXPERT}.up_proj.weight_scale", lambda t, k: t.pop(k), f"missing: {EXPERT}.up_proj.weight_scale"),
        (
            f"{EXPERT}.up_proj.weight",
            lambda t, k: t.update({"lm_head.weight_scale": torch.ones(1)}),
            "unexpected: lm_head.weight_scale",
        ),
        (
            "model.norm.weight",
            lambda t, k: t.update({k: t[k][:-1].clone()}),
            r"model.norm.weight has shape \(47,\), expected \(48,\)",
        ),
        (
            f"{EXPERT}.up_proj.weight",
            lambda t, k: t.update({k: t[k][:-1].clone()}),
            r"has a weight of shape \(28, 48\) on disk",
        ),
    ],
)
def test_wrong_keys_and_shapes_are_an_error(damaged, key, edit, message):
    directory, change = damaged
    change(key, lambda tensors: edit(tensors, key))
    for index in directory.glob("*.index.json"):
        mapping = json.loads(index.read_text())
        files = {path.name: load_file(path).keys() for path in directory.glob("*.safetensors")}
        mapping["weight_map"] = {name: file for file, names in files.items() for name in names}
        index.write_text(json.dumps(mapping))
    with pytest.raises(RankError, match=message):
        load_compressed(directory)


def test_lm_head_missing_from_ignore_is_an_error(damaged):
    directory, _ = damaged
    edit_config(directory, lambda config: config["ignore"].remove("lm_head"))
    with pytest.raises(RankError, match=r"missing: lm_head.input_scale, lm_head.weight_scale"):
        load_compressed(directory)


def test_a_plain_checkpoint_is_refused(tmp_path):
    with pytest.raises(RankError, match="has no quantization_config"):
        load_compressed(tiny_checkpoint(tmp_path / "plain"))


def test_the_script(good, damaged, capsys):
    """Exit code 0 and a table for a good export, 1 and the reason for a damaged one."""
    options = ["--tokens", "50", "--window", "20"]
    assert main(["--export", str(good[0]), *options]) == 0
    table = capsys.readouterr().out
    assert re.search(
        r"50 tokens.*\n.*\nsame arithmetic .*\nour forward .*\ninputs as given .*\nfull forward .*\nok\n", table
    ), table
    edit_config(damaged[0], lambda config: config["ignore"].remove("lm_head"))
    assert main(["--export", str(damaged[0]), *options]) == 1
    assert "missing: lm_head.input_scale" in capsys.readouterr().out


def test_windows_leave_no_token_out_but_a_single_last_one():
    assert [w.tolist() for w in windows(list(range(7)), 3)] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert [w.tolist() for w in windows(list(range(8)), 3)] == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7]]]


@pytest.mark.parametrize("text", ("[]", "{", "3", '{"quantization_config": []}', '{"quantization_config": [1]}'))
def test_a_configuration_that_is_none_is_named(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    assert main(["--export", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("NOT ok: ") and str(tmp_path) in said and len(said.splitlines()) == 1
    assert "config.json" in said or text == '{"quantization_config": []}'
