"""Exported checkpoints in transformers against our own forward, and what the comparison catches."""

import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from launch.verify import main
from model.ranks import RankError
from model.save.export_model import export_model
from quant import DEFAULT_EXEMPT, SCHEMES, Scheme, TensorSpec
from tests.lib.checkpoints import edit_json, edit_tensors, exported, quantized
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed
from tools.verify.check import FLIPS, OUR_FORWARD_KL, compare_with_transformers, problems_of_files
from tools.verify.comparison import LogitComparison, Report, logits_of, rounded, windows

FP8 = SCHEMES["fp8_static"]
# The tiny models are 48 wide inside and odd elsewhere.
INT3 = Scheme("w3a16_channel", TensorSpec("int", 3, "channel"))


def only_rounding(comparison: LogitComparison, kind: str, scheme: Scheme) -> None:
    """Logits differ by rounding of matrix products and no more.

    Dense models run the same kernels on the same shapes (measured: no difference). Gate and up of an expert are one
    product in transformers and two here: 1.3e-6 of a standard deviation. One input in some millions is so close to a
    boundary that its fp8 code flips then, which moves that token's logits by some 1e-3: one run in 200, so there the
    KL is bounded. One flip makes 1e-6 of it in most places and 3e-5 at most of 939; a wrong scale 1e-3 and more.
    """
    if kind == "qwen3_moe" and scheme.activations is not None:
        assert comparison.kl < 1e-4
        assert comparison.mean_abs < 1e-3
    else:
        assert comparison.relative_max < 1e-5


NO_EXPERTS = (*DEFAULT_EXEMPT, r".*\.experts\..*")
# Where the arithmetic differs by a rounding, a random router sends a token in a thousand to another expert, which moves
# that token's KL by 0.1: a bound on a few hundred tokens holds only where nothing is left to route.
ROUTED = {"every_expert": True}
# Dividing by 2^k and multiplying with 2^-k are both exact, and a code times 2^k is a bf16 number: only rounding of
# matrix products is left.
POWERS = {"powers_of_two": True}
CASES = {
    "dense fp8": ("qwen3", FP8, {"tied": True}),
    "dense fp8, powers of two": ("qwen3", FP8, POWERS),
    "llama int3": ("llama", INT3, {}),
    "moe fp8": ("qwen3_moe", FP8, ROUTED),
    "moe fp8, attention only": ("qwen3_moe", FP8, {"tied": True, "exempt": NO_EXPERTS, **ROUTED}),
    "moe fp8, powers of two": ("qwen3_moe", FP8, {**ROUTED, **POWERS}),
    "moe int3, powers of two": ("qwen3_moe", INT3, {**ROUTED, **POWERS}),
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_logits_of_our_forward(case, tmp_path, seed):
    """Under the same arithmetic, rounding of the matrix products is all that is left (measured: nothing).

    Our forward as it is: equal for integer weights of a dense model, and for powers of two as scales; with fp8 inputs,
    or experts that transformers holds in bf16, the differences named in tools/verify/check.py, KL 1e-7 to 1e-4 on these
    models.
    """
    kind, scheme, options = CASES[case]
    directory, batches, *_ = exported(tmp_path, kind, scheme, **options)
    report = compare_with_transformers(directory, batches)
    assert report.ok, report.table()
    only_rounding(report.logits["same arithmetic"], kind, scheme)
    ours = report.logits["our forward"]
    assert ours.kl < OUR_FORWARD_KL
    # Label by label the log-probabilities differ by sqrt(2 KL) in the mean square, to second order: six deviations.
    bound = 6 * math.sqrt(2 * max(ours.kl, 0) / ours.predicted) + 1e-5
    assert abs(math.log(ours.perplexity("ours") / ours.perplexity("theirs"))) < bound
    if "powers_of_two" in options or case == "llama int3":
        only_rounding(ours, kind, scheme)
    assert ("full forward" in report.logits) == (case in ("moe fp8", "moe fp8, powers of two"))
    assert report.layers == len(load_compressed(directory)[1].layers)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_other_codes_in_many_layers_are_no_error(tmp_path, kind):
    """A flip of one input flips inputs of later layers, up to the difference of two unrelated roundings: in this llama
    1.02, in SmolLM2-135M up to 1.4 times the cost of quantizing inputs. Experts start it under the same arithmetic."""
    torch.manual_seed(0)
    source = tiny_checkpoint(tmp_path / "source", kind, layers=24)
    batches = [torch.randint(7, 300, (2, 64)) for _ in range(2)]
    model, quantization = quantized(source, SCHEMES["int8_dynamic"])
    export_model(model, quantization, source, tmp_path / "export")
    report = compare_with_transformers(tmp_path / "export", batches)
    same, ours, given = (report.logits[name].kl for name in ("same arithmetic", "our forward", "inputs as given"))
    assert report.ok and ours > 0.5 * given > OUR_FORWARD_KL * 0.5, report.table()
    assert same == 0 if kind == "llama" else same > 1e-5


def test_a_rounding_changes_no_token(tmp_path):
    """Inputs of quantized embeddings are token ids, of which nearly half would become another one."""
    source, ids = tiny_checkpoint(tmp_path / "source", even=True), torch.randint(7, 300, (2, 64))
    embedding = {"model.embed_tokens": SCHEMES["w8a16_channel"]}
    model, quantization = quantized(source, SCHEMES["int8_dynamic"], named=embedding)
    given: list[torch.Tensor] = []
    model.float().get_input_embeddings().register_forward_hook(lambda _, arguments, __: given.append(arguments[0]))
    with torch.no_grad():
        before = logits_of(model, ids)
        changed = [logits_of(model, ids) for _ in rounded(model, quantization, 2)]
        assert torch.equal(logits_of(model, ids), before)
    assert len(given) == 4 and all(torch.equal(found, ids) for found in given)
    assert all(0 < (logits - before).abs().max() < before.std() for logits in changed)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One export of a MoE in shards, for the tests that damage a copy of it."""
    return exported(tmp_path_factory.mktemp("good"), "qwen3_moe", FP8)


@pytest.fixture
def damaged(good, tmp_path):
    """A copy to damage."""
    return shutil.copytree(good.directory, tmp_path / "damaged")


ATTENTION = "model.layers.1.self_attn"
UP = "model.layers.0.mlp.experts.3.up_proj"


def test_a_damaged_export_is_named(damaged, good):
    """Damage that every reader loads without complaint."""
    key = f"{ATTENTION}.q_proj.weight_scale"
    edit_tensors(damaged, key, lambda tensors: tensors.update({key: tensors[key] * 1.01}))
    edit_json(damaged / "config.json", lambda c: c["quantization_config"]["ignore"].remove(r"re:.*mlp\.gate$"))
    report = compare_with_transformers(damaged, good.batches)
    assert any("self_attn.k_proj" in p and "served with one weight_scale" in p for p in report.problems), report.table()
    routers = "model.layers.0.mlp.gate, model.layers.1.mlp.gate"
    assert f"ignore does not name the routers {routers}: vLLM would quantize them" in report.problems


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_scale_of_another_shape_is_named(damaged, shape):
    """By the checks of the files alone: transformers itself raises on it."""
    key = f"{ATTENTION}.o_proj.input_scale"
    edit_tensors(damaged, key, lambda tensors: tensors.update({key: tensors[key].reshape(shape).clone()}))
    problems = problems_of_files(damaged, *load_compressed(damaged))
    assert problems == [f"{key} is torch.float32 {list(shape)}, expected torch.float32 [1]"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--engine", "vllm"], "--engine vllm and --engine_python go together"),
        (["--engine_python", "python"], "--engine vllm and --engine_python go together"),
        (["--engine", "llama.cpp"], "has no model.gguf, which --engine llama.cpp runs"),
    ],
)
def test_engines_that_do_not_fit_are_refused(good, capsys, options, error):
    with pytest.raises(SystemExit):
        main(["--export", str(good.directory), *options])
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("method", ["modelopt", "fp8", "mxfp4"])
def test_vllm_compares_other_formats_with_a_compressed_export(damaged, good, capsys, method):
    arguments = ["--engine", "vllm", "--engine_python", "/bin/false"]
    against = ["--against", str(good.directory)]
    with pytest.raises(SystemExit):
        main(["--export", str(good.directory), *arguments, *against])
    assert "--against has no effect: " in capsys.readouterr().err
    edit_json(damaged / "config.json", lambda config: config["quantization_config"].update(quant_method=method))
    with pytest.raises(SystemExit):
        main(["--export", str(damaged), *arguments])
    assert f"--export {damaged} is for vLLM: give --against, a compressed export" in capsys.readouterr().err
    assert main(["--export", str(damaged), *arguments, *against]) == 1  # vLLM is started
    assert capsys.readouterr().out == "NOT ok: vLLM ended without a result under /bin/false: no output\n"


def shorten(tensors, key):
    tensors[key] = tensors[key][:-1].clone()


@pytest.mark.parametrize(
    ("key", "edit", "message"),
    [
        (f"{UP}.weight_scale", lambda t, k: t.pop(k), f"missing: {UP}.weight_scale"),
        (
            f"{UP}.weight",
            lambda t, k: t.update({"lm_head.weight_scale": torch.ones(1)}),
            "unexpected: lm_head.weight_s",
        ),
        ("model.norm.weight", shorten, r"model.norm.weight has shape \(47,\), expected \(48,\)"),
        (f"{UP}.weight", shorten, r"up_proj: the weight has shape \(28, 48\) on disk"),
    ],
)
def test_wrong_keys_and_shapes_are_an_error(damaged, key, edit, message):
    edit_tensors(damaged, key, lambda tensors: edit(tensors, key))
    places = {name: path.name for path in damaged.glob("*.safetensors") for name in load_file(path)}
    edit_json(damaged / "model.safetensors.index.json", weight_map=places)
    with pytest.raises(RankError, match=message):
        load_compressed(damaged)


def test_a_plain_checkpoint_is_refused(tmp_path):
    with pytest.raises(RankError, match="has no quantization_config"):
        load_compressed(tiny_checkpoint(tmp_path / "plain"))


def test_the_script(good, damaged, capsys):
    """Exit code 0 and a table for a good export, 1 and the reason for a damaged one."""
    options = ["--tokens", "50", "--window", "20"]
    assert main(["--export", str(good.directory), *options]) == 0
    table = capsys.readouterr().out
    rows = r"50 tokens.*\n.*\nsame arithmetic .*\nour forward .*\ninputs as given .*\nfull forward .*\n"
    rows += r"(our forward: the most likely token differs .*\n)?inputs as given: .*\nfull forward: .*\nok\n"
    assert re.search(rows, table), table
    edit_json(damaged / "config.json", lambda config: config["quantization_config"]["ignore"].remove("lm_head"))
    assert main(["--export", str(damaged), *options]) == 1
    assert "missing: lm_head.input_scale, lm_head.weight_scale" in capsys.readouterr().out


@pytest.mark.parametrize(("bound", "verdict"), [(1e-3, "no error"), (1e-6, "too much")])
def test_other_predictions_are_explained_and_judged(bound, verdict):
    """At 93% agreement a reader must see whether this is an error."""
    report, found = Report("transformers", "fp8_static"), LogitComparison()
    theirs = torch.zeros(1, 100, 4)
    theirs[..., 0] = 1e-3
    ours = theirs.clone()
    ours[:, :7, 1] = 0.02
    found.add(ours, theirs, torch.zeros(1, 100, dtype=torch.long))
    report.logits["our forward"] = found
    report.explain("our forward", bound, FLIPS)
    assert report.remarks == [
        f"our forward: the most likely token differs at 7.000% of the positions, since {FLIPS}. This is {verdict}: the "
        f"KL divergence is {found.kl:.3g}, and at most {bound:.2g} is allowed"
    ]
    assert report.remarks[0] in report.table()
    report.logits["our forward"] = same = LogitComparison()
    same.add(theirs, theirs, torch.zeros(1, 100, dtype=torch.long))
    report.explain("our forward", bound, FLIPS)
    assert len(report.remarks) == 1


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
