"""Stacked experts against per-expert Linears: the same scales, the same numbers, the same files, in every scheme."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from model.moe.experts import Form
from model.save.export_model import export_model
from model.scales.in_place import follow_weights, weight_statistics
from model.scales.loading import load_scales
from quant import SCHEMES, Quantization, Ranges, replace_layers
from quant.observers import only_tokens
from tests.lib.checkpoints import assert_same_tensors, build, load_model, quantize
from tests.lib.linears import linears
from tests.lib.thinned import thinned
from tests.lib.tiny import tiny_checkpoint
from tests.unit.quant.attention import assert_equal

FORMS: tuple[Form, Form] = ("stacked", "per_expert")


def source_of(directory: Path, seed: int) -> Path:
    return tiny_checkpoint(directory / "source", "qwen3_moe", seed=seed, wide=True)


def quantized(source: Path, form: Form, scheme: str, dtype: torch.dtype = torch.bfloat16, **options):
    """The model in one form, with measured weight scales and an input scale of 0.01."""
    model = load_model(source, dtype, experts=form)
    return model, quantize(model, scheme, **{"learn_input_scale": SCHEMES[scheme].learns_input, **options})


def by_linear(quantization: Quantization, value_of) -> dict[str, torch.Tensor]:
    """A value of each layer's weight, ``[experts, out, in]`` of a stack, by the name of the Linear in a checkpoint."""
    return {part.name: part.weight(value_of(layer)) for part, layer in linears(quantization)}


def scales_by_linear(quantization: Quantization, value_of=None) -> dict[str, torch.Tensor]:
    """A value of the shape of each layer's scale; else effective scales, and zero points behind them."""
    found = {}
    for part, layer in linears(quantization):
        whole = [layer.weight_scale() if value_of is None else value_of(layer)]
        whole += [layer.weight_zero] if value_of is None and layer.weight_zero is not None else []
        found[part.name] = torch.cat([part.scale(one, layer.scheme.weights) for one in whole])
    return found


@pytest.mark.parametrize("name", thinned(SCHEMES))
def test_scales_and_files_are_those_of_per_expert_linears(name: str, tmp_path: Path, seed: int):
    """Bit for bit, whatever trains: thetas are random here."""
    source = source_of(tmp_path, seed)
    both = {form: quantized(source, form, name) for form in FORMS}
    assert_equal(*(scales_by_linear(quantization) for _, quantization in both.values()))
    # gate and up share a theta where they share a scale: give each Linear's scale its theta by its position.
    for form, (model, quantization) in both.items():
        for part, layer in linears(quantization):
            theta = part.scale(layer.weight_theta.data, layer.scheme.weights)
            expert = int(part.name.split("experts.")[1].split(".")[0]) if "experts." in part.name else 7
            theta.copy_(0.01 * expert * torch.arange(theta.numel()).cos().view_as(theta))
        export_model(model, quantization, source, tmp_path / form)
    assert_same_tensors(*(tmp_path / form for form in FORMS))
    assert len({(tmp_path / form / "config.json").read_text() for form in FORMS}) == 1

    # Back from the file, where it holds this model's scales: of e4m3 below a global one rounding is all that differs.
    for model, quantization in both.values():
        report = load_scales(model, quantization, tmp_path / "per_expert")
        assert not report.weights_measured and not report.inputs_missing
    assert_equal(*(scales_by_linear(quantization) for _, quantization in both.values()))


def trained(model, ids) -> torch.Tensor:
    """Logits, after a backward."""
    logits = model(ids).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach()


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(value.abs().max()) for value in theirs.values())
    assert largest > 0
    assert max(float((ours[name] - value).abs().max()) for name, value in theirs.items()) < 1e-4 * largest


@pytest.mark.parametrize(
    "name", ["fp8_static", "fp8_block", "w4a16_g32", "w4a16_asym", "8da4w", "nvfp4", "int8_dynamic"]
)
def test_outputs_and_gradients_are_those_of_per_expert_linears(name: str, tmp_path: Path, seed: int):
    """In fp32, in which products in another order differ by little: gate and up are one here."""
    source, ids = source_of(tmp_path, seed), torch.randint(0, 301, (2, 17))
    results = []
    for form in FORMS:
        model, quantization = quantized(source, form, name, torch.float32)
        logits = trained(model, ids)
        weights = by_linear(quantization, lambda layer: layer.weight.grad)
        thetas = scales_by_linear(quantization, lambda layer: layer.weight_theta.grad)
        inputs = [group.theta.grad for group in quantization.input_groups if group.theta is not None]
        results.append((logits, weights, thetas, inputs))
    (logits, weights, thetas, inputs), (expected, *theirs) = results
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert_near(weights, theirs[0])
    assert_near(thetas, theirs[1])
    assert len(inputs) == len(theirs[2]) == (8 if name == "fp8_static" else 0)
    for a, b in zip(inputs, theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(torch.cat(theirs[2]).abs().max()))


@pytest.mark.parametrize("learned", [False, True])
def test_codes_are_multiplied_as_those_of_per_expert_linears(learned: bool, tmp_path: Path, seed: int):
    """The fp8 GEMM in both forms; next to what simulate computes, whose sums have another order: where an input is on
    the border of two codes, the token has another one behind the first product, and so have those that look at it."""
    source, ids = source_of(tmp_path, seed), torch.randint(0, 301, (2, 17))
    results = []
    for form, fp8_gemm in (("stacked", True), ("per_expert", True), ("stacked", False)):
        options = {"fp8_gemm": fp8_gemm, "learn_input_scale": learned}
        model, quantization = quantized(source, form, "fp8_static", torch.float32, **options)
        experts = [layer for name, layer in quantization.layers.items() if "experts" in name]
        assert experts and all(layer.fp8_gemm == fp8_gemm for layer in experts) and not quantization.simulated
        first: list[torch.Tensor] = []
        model.model.layers[0].register_forward_hook(lambda layer, inputs, output, seen=first: seen.append(output))
        logits = trained(model, ids)
        results.append((logits, first[0].detach(), by_linear(quantization, lambda layer: layer.weight.grad)))
    (ours, hidden, grads), (theirs, _, expected), (_, simulated, near) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert_near(grads, expected)
    of_tokens = (hidden - simulated).abs().amax(-1) / simulated.abs().amax(-1)
    assert (of_tokens < 1e-5).float().mean() > 0.5 and of_tokens.max() < 0.05, of_tokens
    mine, yours = (torch.cat([found[name].flatten() for name in near]).double() for found in (grads, near))
    assert float(torch.dot(mine, yours) / mine.norm() / yours.norm()) > 0.99
    assert float(mine.norm() / yours.norm()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["fp8_static", "w3a16_g32", "w4a16_asym", "fp8_block"])
def test_measuring_is_that_of_per_expert_linears(name: str, tmp_path: Path, seed: int):
    """Searched and signed scales, those that follow weights, statistics of what is clipped."""
    source, ranges = source_of(tmp_path, seed), Ranges(weights="mse", signed=name.startswith("w"))
    ours, theirs = (quantized(source, form, name, ranges=ranges)[1] for form in FORMS)
    assert_equal(scales_by_linear(ours), scales_by_linear(theirs))
    mine, yours = weight_statistics(ours), weight_statistics(theirs)
    for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        prefix = "model.layers.1.mlp.experts"
        clipped = [yours[f"{prefix}.{e}.{part}"].clipped for e in range(5) for part in parts]
        assert mine[f"{prefix}.{stack}"].clipped == pytest.approx(sum(clipped) / len(clipped))
    for quantization in (ours, theirs):
        follow_weights(quantization)
    assert_equal(scales_by_linear(ours), scales_by_linear(theirs))


@pytest.mark.parametrize(
    ("exempt", "message"),
    [
        (r".*\.1\.mlp\.experts\.2\.up_proj", "experts.2.up_proj is exempt"),
        (r".*\.0\.mlp\.experts\.\d\.down_proj", "experts.0.down_proj"),
    ],
)
def test_experts_are_quantized_all_or_none(exempt: str, message: str, tmp_path: Path):
    model = build(tiny_checkpoint(tmp_path, "qwen3_moe"), torch.float32)
    with pytest.raises(ValueError, match=message):
        replace_layers(model, SCHEMES["fp8_static"], exempt=(exempt,), learn_weight_scale=True, learn_input_scale=True)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_padding_are_not_observed(form: Form, tmp_path: Path, seed: int):
    """An expert with only padding has seen nothing."""
    model, quantization = quantized(source_of(tmp_path, seed), form, "fp8_static", torch.float32)
    quantization.set_fake_quant(weights=False, activations=False)
    ids = torch.randint(7, 300, (3, 40), generator=torch.Generator().manual_seed(seed))
    lengths = [40, 9, 1]
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]

    def seen(forward) -> dict[str, tuple[float, int]]:
        quantization.observe(True)  # resets the observers
        with torch.no_grad():
            forward()
        observers = {group.owner: group.observer for group in quantization.input_groups if group.observer is not None}
        return {owner: (observer.absmax.item(), observer.total) for owner, observer in observers.items()}

    def padded() -> None:
        with only_tokens(mask, sum(lengths)):
            model(input_ids=ids, attention_mask=mask.long(), use_cache=False)

    def alone() -> None:
        for row, length in zip(ids, lengths, strict=True):
            model(input_ids=row[None, :length], use_cache=False)

    found, expected, everything = seen(padded), seen(alone), seen(lambda: model(input_ids=ids, use_cache=False))
    assert found.keys() == expected.keys() and any(".experts." in owner for owner in found)
    for owner, (absmax, total) in expected.items():
        assert found[owner] == (pytest.approx(absmax, rel=1e-4), total), owner
    assert any(everything[owner][0] > 1.001 * expected[owner][0] for owner in expected if ".experts." in owner)
