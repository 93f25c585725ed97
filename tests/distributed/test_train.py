"""Stages 0 to 3 on two ranks against each other and against a plain PyTorch loop in one process.

Losses and weights are compared in fp32, where an error in a collective, a denominator or a gradient shows in the first
digits and rounding only in the sixth; and in bf16, the way users train, stage against stage.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from data.chat import read_chat
from data.loader import Loader, valid_tokens
from engine.losses import loss_sums
from engine.optim import parameter_groups, peak_learning_rates, set_learnable
from engine.recipe import load_recipe
from engine.schedule import lr_factor
from model.build import build_model
from model.load import load_weights
from quant import get_scheme, prepare, scales_from_stats
from tests.distributed.launcher import run_ranks
from tests.distributed.recipes import STEPS, write_chats, write_recipe
from tests.tiny import tiny_checkpoint

RANKS = 2
SCRIPT = Path(__file__).parent / "train_script.py"


def plain_loop(path: Path):
    """The same training in one process without DeepSpeed: an fp32 model, autograd, AdamW."""
    settings = load_recipe(path)
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    samples, _ = read_chat(settings.data.train, tokenizer, max_length=settings.data.max_length)
    loaders = [
        Loader(
            samples,
            micro_batch_size=settings.data.micro_batch_size,
            gradient_accumulation_steps=settings.train.gradient_accumulation_steps,
            rank=rank,
            world=RANKS,
            seed=settings.data.seed,
            pad_token_id=tokenizer.pad_token_id,
        )
        for rank in range(RANKS)
    ]

    def build():
        model = build_model(settings.model.path, {}, dtype=torch.float32, device=torch.device("cpu"))
        load_weights(model, settings.model.path, progress=False)
        return model

    model, teacher = build(), build().requires_grad_(False)
    quantization = prepare(model, get_scheme("fp8_static"), learn_weight_scale=True, learn_input_scale=False)
    set_learnable(model, settings.learnable)
    spec = quantization.scheme.weights
    with torch.no_grad():
        for group in quantization.weight_groups:
            absmax = max(quantization.layers[name].weight.abs().max() for name in group.members)
            group.s0.copy_(scales_from_stats(absmax.reshape(1), spec))
        quantization.set_fake_quant(False, False)
        quantization.observe(True)
        for loader in loaders:
            for batch in loader.first(settings.quant.calibration_batches):
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        quantization.observe(False)
        for group in quantization.input_groups:
            group.s0.copy_(scales_from_stats(group.observer.absmax.reshape(1), spec))
        quantization.set_fake_quant(True, True)
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.optim), betas=settings.optim.betas)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    losses, norms = [], []
    for step in range(STEPS):
        batches = [batch for loader in loaders for batch in loader.step(step)]
        valid = valid_tokens(batches)
        sums = torch.zeros(2)
        for batch in batches:
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            with torch.no_grad():
                teacher_logits = teacher(**inputs).logits
            lm, kd = loss_sums(model(**inputs).logits, batch["labels"], teacher_logits, kd_kind="cakld")
            ((lm + 0.5 * kd) / valid).backward()
            sums += torch.stack([lm.detach(), kd.detach()]) / valid
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, settings.optim.grad_clip)))
        factor = lr_factor(step, total=STEPS, warmup=2, kind="cosine", min_ratio=settings.optim.min_lr_ratio)
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rates(settings.optim)[group["name"]] * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(
            {"loss/total": float(sums[0] + 0.5 * sums[1]), "loss/lm": float(sums[0]), "loss/kd/cakld": float(sums[1])}
        )
    return {"losses": losses, "norms": norms, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def load_result(path: Path):
    return torch.load(Path(load_recipe(path).output_dir) / "result.pt", weights_only=True)


def assert_same(found, expected, *, rtol: float, weight_atol: float):
    """Losses relative, weights absolute: Adam moves a weight whose gradient is rounding noise by up to a whole step."""
    for a, b in zip(found["losses"], expected["losses"], strict=True):
        assert a == pytest.approx(b, rel=rtol, abs=1e-6)
    if found["norms"][0] is not None:  # stage 0 in fp32
        assert found["norms"] == pytest.approx(expected["norms"], rel=10 * rtol)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in found["weights"].items():
        difference = (weight.float() - expected["weights"][name].float()).abs()
        # The mean shows a systematic error; the maximum bounds single weights that noise decides.
        assert difference.mean() < weight_atol / 10 and difference.max() < weight_atol, (
            name,
            difference.mean(),
            difference.max(),
        )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One launch per numeric type: dense and MoE on all four stages."""
    directory = tmp_path_factory.mktemp("train")
    data = write_chats(directory / "chats.jsonl")
    paths = {}
    for kind in ("qwen3", "qwen3_moe"):
        model = tiny_checkpoint(directory / kind, kind, tied=kind == "qwen3")
        for stage in range(4):
            for dtype in ("float32", "bfloat16"):
                name = f"{kind}_zero{stage}_{dtype}"
                paths[kind, stage, dtype] = write_recipe(directory, name, model, data, stage=stage, dtype=dtype)
    run_ranks(SCRIPT, *map(str, paths.values()), timeout=600)
    return paths


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_fp32_equals_a_plain_loop_on_every_stage(results, kind):
    plain = plain_loop(results[kind, 0, "float32"])
    for stage in range(4):
        found = load_result(results[kind, stage, "float32"])
        assert_same(found, plain, rtol=2e-5, weight_atol=2e-3)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_bf16_stages_differ_less_from_each_other_than_bf16_from_fp32(results, kind):
    """Stages add bf16 gradients up in different orders, so they differ; what bf16 itself costs is the measure."""
    exact, first = load_result(results[kind, 1, "float32"]), load_result(results[kind, 1, "bfloat16"])
    loss_error = distance(first, exact, "losses")
    weight_error = distance(first, exact, "weights")
    for stage in (0, 2, 3):
        found = load_result(results[kind, stage, "bfloat16"])
        assert distance(found, first, "losses") < loss_error, stage
        assert distance(found, first, "weights") < weight_error, stage


def distance(a, b, what: str) -> float:
    """Largest difference of the total loss over the steps, or mean difference of the trained weights."""
    if what == "losses":
        return max(abs(x["loss/total"] - y["loss/total"]) for x, y in zip(a["losses"], b["losses"], strict=True))
    differences = [
        (a["weights"][name].float() - b["weights"][name].float()).abs().flatten() for name in a["requires_grad"]
    ]
    return float(torch.cat(differences).mean())


def test_rotary_frequencies_stay_fp32_and_no_step_is_skipped(results):
    for key, path in results.items():
        found = load_result(path)
        assert found["inv_freq"] and set(found["inv_freq"].values()) == {torch.float32}, key
        assert found["skipped"][-1] == 0, key


def test_exactly_what_is_learnable_trains(results):
    """Defaults: weights and weight scales. Norms, routers and initial scales keep their values, all else moves."""
    for (kind, _, dtype), path in results.items():
        if dtype == "bfloat16":  # a step may round to nothing there
            continue
        found = load_result(path)
        start = build_model(load_recipe(path).model.path, {}, dtype=torch.float32, device=torch.device("cpu"))
        load_weights(start, load_recipe(path).model.path, progress=False)
        before = dict(start.named_parameters())
        for name, weight in found["weights"].items():
            leaf = name.rpartition(".")[2]
            frozen = "norm" in name or name.endswith("mlp.gate.weight") or leaf.endswith("_s0")
            assert (name in found["requires_grad"]) != frozen, name
            if leaf.endswith("_theta"):
                assert weight.any(), f"{kind}: {name} did not move"
            elif name in before:
                assert torch.equal(weight, before[name]) == frozen, f"{kind}: {name}"
        assert found["groups"] == ["weights", "scales"]
