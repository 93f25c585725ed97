"""The benchmarks run from end to end and write their tables; what they measure at these sizes means nothing."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.recovery import sweep, zero_where_v_is_outside
from benchmarks.recovery_runs import QUICK, Bench
from benchmarks.recovery_torchao import loss_of
from data.samples import IGNORE
from engine.config.loss import LossRecipe
from engine.losses.kd import KD_KINDS
from quant import QuantLinear, Scale, get_scheme
from tests.patience import PATIENCE
from tests.root import ROOT
from tests.tiny import TEXT, tiny_checkpoint

pytestmark = pytest.mark.full  # half a minute and more


def run(script: str, *arguments: str, results: Path) -> list[dict[str, str]]:
    """Run a benchmark with tiny sizes; the rows of all its tables, by column."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--quick", "--results", str(results)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    text = (results / f"{script}.md").read_text()
    assert text in done.stdout
    rows, columns = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            columns = None
        elif columns is None:
            columns = cells
        elif set(cells) != {"---"}:
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def test_quant_kernels(tmp_path: Path) -> None:
    """Compiling the reference is left out: it takes minutes."""
    rows = run("quant_kernels", "--no-compile", results=tmp_path)
    assert len({row["tensor"] for row in rows}) == 7
    assert {"forward", "dequantize", "backward", "backward, scale gradient"} <= {row["operation"] for row in rows}
    for row in rows:
        assert float(row["fused, ms"]) > 0
        assert float(row["GB/s"]) > 0
        assert float(row["eager, ms"]) > 0


def test_adapters(tmp_path: Path) -> None:
    """All weights, and three forms of adapters, of which the merged ones train what plain LoRA does."""
    rows = {row["way"]: row for row in run("adapters", results=tmp_path)}
    lora = rows["plain, LoRA beside"]
    assert rows["w4a16_g32, merged, scales fixed"]["trained"] == lora["trained"]
    assert all(float(row["passes, ms"]) > 0 for row in rows.values())


@pytest.mark.parametrize("part", ("--layer-only", "--model-only"))
def test_step(part: str, tmp_path: Path) -> None:
    """With the fp8 GEMM, and with and without activation checkpointing."""
    rows = run("step", part, "--fp8-gemm", results=tmp_path)
    names = [row["way"] for row in rows]
    assert names.count("bf16") == 2
    assert any(name.endswith("fp8_gemm") for name in names)
    assert any(name.startswith("w4a16_g32") for name in names)
    for row in rows:
        assert float(row["ms"]) > 0
        assert float(row["peak, MiB"]) > 0


def test_scale_fit(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", layers=6, wide=True)
    rows = {row["scales"]: row for row in run("scale_fit", "--model", str(model), results=tmp_path)}
    assert rows["largest magnitude"]["with codes"] == "0"
    assert rows["reciprocal"]["refused"] == rows["reciprocal"]["cases"] != "0"


def test_packing(tmp_path: Path) -> None:
    rows = run("packing", results=tmp_path)
    assert len(rows) == 5
    padding = {row["way"]: float(row["padding"].rstrip("%")) for row in rows}
    assert padding["packed"] < padding["padded to the longest"] < padding["padded to the maximum"]
    assert all(float(row["real tokens/s"].replace(",", "")) > 0 for row in rows)


def test_kd_loss(tmp_path: Path) -> None:
    """Times of all losses, and peaks that do not grow with the logits."""
    rows = run("kd_loss", results=tmp_path)
    times = [row for row in rows if "loss" in row]
    assert {f"chunked, {kind}" for kind in KD_KINDS} <= {row["loss"] for row in times}
    assert all(float(row["ms"]) >= 0 for row in times)
    peaks = [row for row in rows if "T" in row]
    assert len(peaks) == 6 and all("fp32 [T, V]" in row["direct, kl"] for row in peaks)


def test_the_other_clip_mask_zeroes_what_rounds_onto_the_grid_too() -> None:
    """int2: v of -2.4 and 1.4 become -2 and 1, those beyond -2.5 and 1.5 clip."""
    linear = nn.Linear(32, 2, bias=False)
    linear.weight.data[:] = torch.tensor([-2.6, -2.4, -2.0, -0.3, 0.0, 1.0, 1.4, 1.6]).repeat(4) * torch.tensor(
        [[1], [8]]
    )
    scale = Scale(nn.Parameter(torch.tensor([[1.0], [8.0]]), requires_grad=False))
    layer = QuantLinear(linear, get_scheme("w2a16_g32"), weight=scale, input=None, weight_numel=32)
    found = []
    for _ in range(2):
        layer.weight.grad = None
        layer(torch.ones(1, 32)).sum().backward()
        found.append(layer.weight.grad.view(2, 4, 8))
        layer.weight.register_hook(functools.partial(zero_where_v_is_outside, layer))
    assert (found[0] == torch.tensor([0, 1, 1, 1, 1, 1, 1, 0])).all()
    assert (found[1] == torch.tensor([0, 0, 1, 1, 1, 1, 0, 0])).all()


@pytest.mark.full
def test_recovery(tmp_path: Path) -> None:
    """FT, PTQ and QAT, one of each single change, and nothing trained again where its models were kept."""
    tiny_checkpoint(tmp_path / "model", even=True, layers=3)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    options = ["--model", str(tmp_path / "model"), "--train", str(text), "--text", str(text)]
    options += ["--out", str(tmp_path / "out"), "--schemes", "w2a16_g32", "--also", "fp8_static", "--rates", "1e-3"]
    rows = run("recovery", *options, "--seeds", "2", results=tmp_path)
    schemes = [row for row in rows if "scheme" in row]
    assert [row["scheme"] for row in schemes] == ["w2a16_g32", "fp8_static"]
    assert all(float(row[way]) > 1 for row in schemes for way in ("FT", "PTQ", "QAT"))
    assert [row["way"] for row in rows if "way" in row][:2] == ["FT", "QAT, w2a16_g32"]
    known = json.loads((tmp_path / "out/perplexities.json").read_text())
    changes = [row for row in rows if "change" in row]
    assert len(changes) == 1 + sum(name.startswith("w2a16_g32_0.001_0_") for name in known)
    assert changes[0]["QAT"] == schemes[0]["QAT"] == f"{known['w2a16_g32_0.001_0']['perplexity']:.2f}"

    # What the folder says is taken from there.
    known["ft_0.001_0"]["perplexity"] = 1.5
    (tmp_path / "out/perplexities.json").write_text(json.dumps(known))
    bench = Bench(tmp_path / "model", text, text, QUICK, tmp_path / "out")
    assert sweep(lambda rate, seed: bench.trained(None, rate, seed), [1e-3], 1).text() == "1.50, spread 0.00"


def test_recovery_inputs(tmp_path: Path) -> None:
    """FT, PTQ of it, and QAT that starts from it, plain and rotated; what was measured is known when time is over."""
    (tmp_path / "text.txt").write_text(TEXT * 40)
    source = tiny_checkpoint(tmp_path / "model", "qwen3", even=True)
    command = [sys.executable, str(ROOT / "benchmarks" / "recovery_inputs.py"), "--model", str(source), "--rotated"]
    command += ["--train", str(tmp_path / "text.txt"), "--text", str(tmp_path / "text.txt"), "--seeds", "2"]
    command += ["--tune_steps", "2", "--steps", "2", "--rows", "2", "--length", "16", "--tokens", "64"]
    command += ["--out", str(tmp_path / "out"), "--results", str(tmp_path), "--schemes", "nvfp4_w4a4"]
    found = []
    for more in ([], ["mxfp4_w4a4", "--minutes", "0"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        found.append((tmp_path / "recovery_inputs.md").read_text().partition("| scheme")[2].splitlines()[2:])
    assert found[0] == found[1]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[0]]
    assert [(row[0], row[-1]) for row in cells] == [("nvfp4_w4a4", "2"), ("nvfp4_w4a4, rotated", "2")]
    made = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert {"ft_none_plain_0", "ft_rotated", "qat_nvfp4_w4a4_rotated_1"} <= made


def test_recovery_start(tmp_path: Path) -> None:
    """FT, PTQ and QAT from six starts, and from another tool's file, which training starts inside of."""
    (tmp_path / "text.txt").write_text(TEXT * 40)
    source = tiny_checkpoint(tmp_path / "model", "qwen3", wide=True)
    command = [sys.executable, str(ROOT / "benchmarks" / "recovery_start.py"), "--model", str(source)]
    command += ["--losses", "ft", "--ft_steps", "2"]
    command += ["--train", str(tmp_path / "text.txt"), "--text", str(tmp_path / "text.txt"), "--steps", "2"]
    command += ["--rows", "2", "--length", "16", "--tokens", "256", "--starts", "gptq, signed"]
    command += ["--out", str(tmp_path / "out"), "--results", str(tmp_path)]
    other = ["--ptq", f"other={tmp_path / 'out' / 'ptq_w2a16_g32_gptq_ft' / 'export'}"]
    tables: list[str] = []
    known = [*command[:2], "--text", str(tmp_path / "text.txt"), "--known", str(tmp_path / "out"), "--length", "16"]
    known += ["--other", str(tmp_path / "other.txt"), "--results", str(tmp_path)]
    (tmp_path / "other.txt").write_text(TEXT[::-1] * 40)
    kept = [str(tmp_path / "recovery_start.jsonl") if word == str(tmp_path / "out") else word for word in known]
    # What was measured is known, and nothing else is begun; the last two make nothing at all.
    for words in (command, [*command, "--minutes", "0", *other], known, kept):
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        tables.append((tmp_path / "recovery_start.md").read_text().partition("\n## ")[2])
    lines = tables[0].partition("All of them:")[2].strip().splitlines()[2:]
    models = [line.split("|")[2].strip().removesuffix(" (best PTQ)") for line in lines]
    starts = ["nearest", "nearest, signed", "gptq", "gptq, signed", "blocks", "blocks, signed"]
    trained = [f"QAT from FT, {start}, 2 steps" for start in starts]
    assert models == ["FT", *(f"PTQ, {start}" for start in starts), *trained]
    assert tables[0] == tables[1]
    elsewhere = [line.split("|")[-2].strip() for line in tables[2].partition("All of them:")[2].strip().splitlines()]
    assert elsewhere[0] == "other: KL, top token"
    assert len(set(elsewhere[3:])) > 2, "figures of the other text"
    assert tables[3] == tables[2] and str(tmp_path) not in (tmp_path / "recovery_start.jsonl").read_text()
    assert [line.rsplit("|", 2)[0] for line in tables[2].partition("All of them:")[2].strip().splitlines()[2:]] == [
        line.rsplit("|", 1)[0] for line in lines
    ]


def test_low_bit_costs(tmp_path: Path) -> None:
    """A teacher is held, GPTQ's codes are there once the start is over: each option costs where it acts."""
    (tmp_path / "text.txt").write_text(TEXT * 40)
    source = tiny_checkpoint(tmp_path / "model", "qwen3", wide=True)
    words = ["--rounds", "1", "--model", str(source), "--train", str(tmp_path / "text.txt")]
    rows = run("low_bit_costs", *words, results=tmp_path)
    held = {row["what it learns from"]: float(row["bytes"]) for row in rows}
    assert next(iter(held.values())) == 1.0 < held["labels"] < held["its own logits"]
    assert held["the recipe, scales fixed"] < held["its own logits, from GPTQ's codes, signed: the recipe"]
    assert all(float(row["ms"]) > 0 and float(row["start"]) > 0 for row in rows)


def test_torchaos_loss_is_the_recipes() -> None:
    """KL to the teacher's logits alone, a mean over tokens, with its gradient; as torch has it."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model, teacher = (AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    ids = torch.randint(0, 50, (2, 9))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), IGNORE)], 1)
    batch = {"input_ids": ids, "labels": labels}
    loss = loss_of(model, teacher, batch, LossRecipe(lm_weight=0.0, kd_weight=1.0, kd="kl", teacher="there"))
    (found,) = torch.autograd.grad(loss, [model.model.norm.weight])
    with torch.no_grad():
        theirs = teacher(input_ids=ids).logits[:, :-1].log_softmax(-1)
    ours = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    wanted = F.kl_div(ours, theirs, log_target=True, reduction="sum") / ours.shape[:-1].numel()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(found, *torch.autograd.grad(wanted, [model.model.norm.weight]))


def test_rotations(tmp_path: Path) -> None:
    """Planted outliers leave the checkpoint the same function; a row for each scheme and rotation, of both."""
    (tmp_path / "text.txt").write_text(TEXT * 40)
    source = tiny_checkpoint(tmp_path / "model", "qwen3", wide=True)
    command = [sys.executable, str(ROOT / "benchmarks" / "rotations.py"), "--model", str(source), "--text"]
    command += [str(tmp_path / "text.txt"), "--schemes", "nvfp4_w4a4", "--length", "16", "--tokens", "64"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (tmp_path / "rotations.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| nvfp4")]
    assert [one[2] for one in cells] == 2 * ["plain", "weights rotated", "down_proj turned", "both"]
    assert len({one[3] for one in cells}) == 1, "the checkpoint's own perplexity"
    assert len({one[4] for one in cells}) > 4
