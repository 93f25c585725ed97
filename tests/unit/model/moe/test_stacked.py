"""Stacked experts against per-expert Linears: the same scales, the same numbers, the same files, in every scheme."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.build import build_model
from model.checkpoint.load import load_weights
from model.moe.experts import Form
from model.save import export_model
from model.scales import (
    follow_weights,
    load_scales,
    measure_weight_scales,
    renew_weight_scales,
    weight_statistics,
    write_scales,
)
from quant import SCHEMES, Quantization, Ranges, Scheme, TensorSpec, prepare
from quant.linear import linears_of
from tests.lib.thinned import thinned
from tests.lib.tiny import tiny_checkpoint

CPU = torch.device("cpu")


def quantized(source: Path, form: Form, scheme: Scheme | None, dtype: torch.dtype = torch.bfloat16, **options):
    """The model in one form, with measured weight scales and an input scale of 0.01."""
    model = build_model(source, {"bf16": {"enabled": dtype == torch.bfloat16}}, dtype=dtype, device=CPU, experts=form)
    load_weights(model, source, progress=False)
    static = scheme is not None and scheme.learns_input
    options = {"learn_weight_scale": True, "learn_input_scale": static, **options}
    quantization = prepare(model, scheme, **options)
    renew_weight_scales(quantization)
    write_scales(
        quantization.input_groups,
        {g.owner: first_scale(g.spec) for g in quantization.input_groups},
    )
    return model, quantization


def first_scale(spec: TensorSpec) -> torch.Tensor:
    """Of inputs around 1."""
    return torch.tensor([600.0 if spec.has_global_scale else 0.01])


def by_linear(quantization: Quantization, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What belongs to the weight of each layer, by the name of the Linear in a checkpoint."""
    return {
        part.name: part.weight(values[name])
        for name, layer in quantization.layers.items()
        for part in linears_of(name, layer)
    }


def scales_by_linear(quantization: Quantization) -> dict[str, torch.Tensor]:
    """Effective scales, and zero points behind them."""
    found = {}
    for name, layer in quantization.layers.items():
        whole = [layer.weight_scale()] if layer.weight_zero is None else [layer.weight_scale(), layer.weight_zero]
        for part in linears_of(name, layer):
            found[part.name] = torch.cat([part.scale(one, layer.scheme.weights) for one in whole])
    return found


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("name", thinned(SCHEMES))
def test_scales_and_files_are_those_of_per_expert_linears(name: str, tmp_path: Path):
    """Bit for bit, whatever trains: thetas are random here."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3_moe", seed=random.randrange(2**31), wide=True)
    stacked, ours = quantized(source, "stacked", SCHEMES[name])
    separate, theirs = quantized(source, "per_expert", SCHEMES[name])
    assert_equal(scales_by_linear(ours), scales_by_linear(theirs))
    # gate and up share a theta where they share a scale: give each Linear's scale its theta by its position.
    for quantization in (ours, theirs):
        for layer_name, layer in quantization.layers.items():
            for part in linears_of(layer_name, layer):
                theta = part.scale(layer.weight_theta.data, layer.scheme.weights)
                expert = int(part.name.split("experts.")[1].split(".")[0]) if "experts." in part.name else 7
                theta.copy_(0.01 * expert * torch.arange(theta.numel()).cos().view_as(theta))
    for form, model, quantization in (("stacked", stacked, ours), ("separate", separate, theirs)):
        export_model(model, quantization, source, tmp_path / form)
    assert_equal(*(load_file(tmp_path / form / "model.safetensors") for form in ("stacked", "separate")))
    assert (tmp_path / "stacked" / "config.json").read_text() == (tmp_path / "separate" / "config.json").read_text()

    # Back from the file, where it holds this model's scales: of e4m3 below a global one rounding is all that differs.
    report = load_scales(stacked, ours, tmp_path / "separate")
    assert not report.weights_measured and not report.inputs_missing
    load_scales(separate, theirs, tmp_path / "separate")
    assert_equal(scales_by_linear(ours), scales_by_linear(theirs))


@pytest.mark.parametrize(
    "name", ["fp8_static", "fp8_block", "w4a16_g32", "w4a16_asym", "8da4w", "nvfp4", "int8_dynamic"]
)
def test_outputs_and_gradients_are_those_of_per_expert_linears(name: str, tmp_path: Path):
    """In fp32, in which products in another order differ by little: gate and up are one here."""
    source = tiny_checkpoint(tmp_path, "qwen3_moe", seed=random.randrange(2**31), wide=True)
    ids = torch.randint(0, 301, (2, 17))
    results = []
    for form in ("stacked", "per_expert"):
        model, quantization = quantized(source, form, SCHEMES[name], torch.float32)
        logits = model(ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        layers = quantization.layers
        weights = by_linear(quantization, {n: layer.weight.grad for n, layer in layers.items()})
        thetas = {
            part.name: part.scale(layer.weight_theta.grad, layer.scheme.weights)
            for n, layer in layers.items()
            for part in linears_of(n, layer)
        }
        inputs = [g.theta.grad for g in quantization.input_groups if g.theta is not None]
        results.append((logits.detach(), weights, thetas, inputs))
    (logits, *ours), (expected, *theirs) = results
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for mine, yours in zip(ours[:2], theirs[:2], strict=True):
        assert mine.keys() == yours.keys()
        pairs = [(mine[key], yours[key]) for key in mine]
        largest = max(float(b.abs().max()) for _, b in pairs)
        assert largest > 0
        assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-4 * largest
    assert len(ours[2]) == len(theirs[2]) == (8 if name == "fp8_static" else 0)
    for a, b in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(torch.cat(theirs[2]).abs().max()))


@pytest.mark.parametrize("learned", [False, True])
def test_codes_are_multiplied_as_those_of_per_expert_linears(learned: bool, tmp_path: Path):
    """The fp8 GEMM in both forms; next to what simulate computes, whose sums have another order: where an input lies on
    the border of two codes, the token has another one behind the first product, and so have those that look at it."""
    source = tiny_checkpoint(tmp_path, "qwen3_moe", seed=random.randrange(2**31), wide=True)
    ids = torch.randint(0, 301, (2, 17))
    results = []
    for form, fp8_gemm in (("stacked", True), ("per_expert", True), ("stacked", False)):
        model, quantization = quantized(
            source, form, SCHEMES["fp8_static"], torch.float32, fp8_gemm=fp8_gemm, learn_input_scale=learned
        )
        experts = [layer for name, layer in quantization.layers.items() if "experts" in name]
        assert experts and all(layer.fp8_gemm == fp8_gemm for layer in experts) and not quantization.simulated
        first: list[torch.Tensor] = []
        model.model.layers[0].register_forward_hook(lambda layer, inputs, output, seen=first: seen.append(output))
        logits = model(ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        weights = by_linear(quantization, {n: layer.weight.grad for n, layer in quantization.layers.items()})
        results.append((logits.detach(), first[0].detach(), weights))
    (ours, hidden, grads), (theirs, _, expected), (_, simulated, near) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    largest = max(float(one.abs().max()) for one in expected.values())
    assert max(float((grads[name] - one).abs().max()) for name, one in expected.items()) < 1e-4 * largest
    of_tokens = (hidden - simulated).abs().amax(-1) / simulated.abs().amax(-1)
    assert (of_tokens < 1e-5).float().mean() > 0.5 and of_tokens.max() < 0.05, of_tokens
    mine, yours = (torch.cat([found[name].flatten() for name in near]).double() for found in (grads, near))
    assert float(torch.dot(mine, yours) / mine.norm() / yours.norm()) > 0.99
    assert float(mine.norm() / yours.norm()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["fp8_static", "w3a16_g32", "w4a16_asym", "fp8_block"])
def test_measuring_is_that_of_per_expert_linears(name: str, tmp_path: Path):
    """Searched and signed scales, those that follow weights, statistics of what is clipped."""
    source = tiny_checkpoint(tmp_path, "qwen3_moe", seed=random.randrange(2**31), wide=True)
    ranges = Ranges(weights="mse", signed=name.startswith("w"))
    (_, ours), (_, theirs) = (
        quantized(source, form, SCHEMES[name], ranges=ranges) for form in ("stacked", "per_expert")
    )
    assert_equal(scales_by_linear(ours), scales_by_linear(theirs))
    mine, yours = weight_statistics(ours), weight_statistics(theirs)
    for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        prefix = "model.layers.1.mlp.experts"
        clipped = [yours[f"{prefix}.{e}.{part}"].clipped for e in range(5) for part in parts]
        assert mine[f"{prefix}.{stack}"].clipped == pytest.approx(sum(clipped) / len(clipped))
    for quantization in (ours, theirs):
        follow_weights(quantization)
    assert_equal(scales_by_linear(ours), scales_by_linear(theirs))


def test_a_plain_export_holds_the_source(tmp_path: Path):
    """Without quantization, and of experts that an exempt pattern leaves out: per-expert names, the same values."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3_moe", seed=random.randrange(2**31))
    model = build_model(source, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=CPU)
    load_weights(model, source, progress=False)
    export_model(model, None, source, tmp_path / "plain")
    before = load_file(source / "model.safetensors")
    assert_equal(load_file(tmp_path / "plain" / "model.safetensors"), before)

    exempt = ("(.*\\.)?lm_head", r".*\.experts\..*")
    quantization = prepare(
        model, SCHEMES["fp8_static"], exempt=exempt, learn_weight_scale=False, learn_input_scale=False
    )
    write_scales(quantization.weight_groups, measure_weight_scales(quantization))
    write_scales(
        quantization.input_groups,
        {g.owner: first_scale(g.spec) for g in quantization.input_groups},
    )
    export_model(model, quantization, source, tmp_path / "attention")
    after = load_file(tmp_path / "attention" / "model.safetensors")
    experts = {key: value for key, value in before.items() if ".experts." in key}
    assert len(experts) == 2 * 5 * 3
    assert_equal({key: value for key, value in after.items() if ".experts." in key}, experts)


@pytest.mark.parametrize(
    ("exempt", "message"),
    [
        (r".*\.1\.mlp\.experts\.2\.up_proj", "experts.2.up_proj is exempt"),
        (r".*\.0\.mlp\.experts\.\d\.down_proj", "experts.0.down_proj"),
    ],
)
def test_experts_are_quantized_all_or_none(exempt: str, message: str, tmp_path: Path):
    source = tiny_checkpoint(tmp_path, "qwen3_moe")
    model = build_model(source, {}, dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match=message):
        prepare(model, SCHEMES["fp8_static"], exempt=(exempt,), learn_weight_scale=True, learn_input_scale=True)
