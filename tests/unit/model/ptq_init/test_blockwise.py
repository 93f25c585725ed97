"""Decoder layers tuned after GPTQ, in one process: what comes nearer, what stays, and what is put back."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model.ptq_init import blockwise as tuning
from model.ptq_init.layer_samples import decoder_layers, record
from model.ptq_init.layerwise import choose_initial_codes
from quant.scale import first_input_scale
from tests.lib.checkpoints import CPU
from tests.unit.model.ptq_init.test_gptq import inputs_of, quantized, samples


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "STEPS", 4)


@torch.no_grad()
def logits(model: nn.Module, given: list[tuple[Tensor, bool]]) -> Tensor:
    return torch.cat([model(input_ids=ids, use_cache=False).logits.float().flatten(0, 1) for ids, _ in given])


def tuned(directory: Path, kind: str, scheme: str, *, learn: bool = True):
    """A model with the codes of GPTQ, the same one tuned, and the samples."""
    found = []
    for tuned_rows in (None, 2):
        model, quantization = quantized(directory, kind, scheme)
        for layer in quantization.layers.values():
            layer.weight_theta.requires_grad_(learn)
        given = found[0][2] if found else samples(model, 4)
        choose_initial_codes(model, quantization, given, CPU, tuned_rows=tuned_rows)
        found.append((model, quantization, given))
    return *found[0][:2], *found[1]


DENSE, EXPERTS = ("w2a16_g32", "w4a16_asym", "int8_dynamic"), ("w2a16_channel", "nvfp4")


@pytest.mark.parametrize(
    ("kind", "scheme"), [*(("qwen3", scheme) for scheme in DENSE), *(("qwen3_moe", scheme) for scheme in EXPERTS)]
)
def test_outputs_come_nearer_and_nothing_else_moves(tmp_path, monkeypatch, capfd, kind, scheme):
    """The trained values are multiplied afterwards, bit for bit, and as many weights as possible stay original."""
    settle, found = tuning._Tuned.settle, {}

    def settled(self, quantization, originals):
        self.show_scales()
        found.update({name: layer.quantized_weight() for name, layer in self._layers.items()})
        settle(self, quantization, originals)

    monkeypatch.setattr(tuning._Tuned, "settle", settled)
    monkeypatch.setattr(tuning, "STEPS", 16)
    model, quantization, other, of_other, given = tuned(tmp_path, kind, scheme)
    source, of_source = quantized(tmp_path, kind, scheme)
    with of_source.paused():
        original = logits(source, given)
    before, after = ((logits(one, given) - original).square().mean() for one in (model, other))
    assert after < (0.9 if scheme.startswith("w2") else 1.02) * before
    said = capfd.readouterr().out
    assert "of decoder layers" in said.splitlines()[-1] and "before they were tuned" in said.splitlines()[-1]

    mine = {id(parameter) for layer in of_other.layers.values() for parameter in layer.parameters(recurse=False)}
    theirs = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        assert parameter.grad is None and parameter.requires_grad == theirs[name].requires_grad, name
        if id(parameter) not in mine:
            assert torch.equal(parameter, theirs[name]), name
    assert other.training and found.keys() == of_other.layers.keys()
    for name, layer in of_other.layers.items():
        assert not layer.trained and layer.weight_fake_quant
        assert not torch.equal(layer.weight, quantization.layers[name].weight), name
        assert torch.equal(layer.weight_s0, quantization.layers[name].weight_s0) == bool(layer.weight_theta.any())
        if layer.scheme.weights.dtype == "int":
            assert not layer.weight_theta.any()
            # The scale that is stored is one that the dtype of the model holds: it is multiplied as it is.
            assert torch.equal(tuning._effective(layer).float(), layer.weight_s0.float()), name
        multiplied, stays = layer.quantized_weight(), layer.weight == of_source.layers[name].weight
        assert torch.equal(multiplied, found[name]), name
        assert torch.equal(layer.weight[~stays], multiplied[~stays]), name
        assert 0.05 < stays.float().mean() < 1 or scheme == "int8_dynamic", name


@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "w8a8_static"])
def test_stored_scales_of_inputs_are_those_of_the_samples_meanwhile(tmp_path, scheme):
    """The inputs of the first layer's attention do not depend on what is quantized. A scale that was given stays."""
    model, quantization = quantized(tmp_path, "qwen3", scheme)
    given, (first, *others) = samples(model, 4), quantization.input_groups
    assert "model.layers.0.self_attn.q_proj" in first.members
    inputs = inputs_of(model, quantization.layers[first.owner], given)
    largest = torch.stack([args[0].abs().max().float() for args in inputs])
    if scheme == "w8a8_static":
        with torch.no_grad():
            others[-1].s0.fill_(0.125)
    choose_initial_codes(model, quantization, given, CPU, tuned_rows=2)
    assert torch.equal(first.s0, first_input_scale(largest.max().view(1), first.spec))
    assert [bool(group.s0 == 0.125) for group in others] == [False] * (len(others) - 1) + [scheme == "w8a8_static"]
    assert all(layer.input_s0.isfinite().all() for layer in quantization.layers.values())
    assert all(layer.input_fake_quant and layer.input_observer is None for layer in quantization.layers.values())


def test_what_is_not_better_is_put_back(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tuning, "WEIGHT_RATE", 1e4)
    model, _, other, _, _ = tuned(tmp_path, "qwen3", "w3a16_g32")
    theirs = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    assert f", {len(model.model.layers)} of them left as they were" in capfd.readouterr().out


def test_scales_that_do_not_learn_stay(tmp_path):
    _, quantization, _, of_other, _ = tuned(tmp_path, "qwen3", "w2a16_g32", learn=False)
    first, other = (one.layers["model.layers.0.self_attn.q_proj"] for one in (quantization, of_other))
    assert torch.equal(first.weight_s0, other.weight_s0) and not torch.equal(first.weight, other.weight)
    assert not other.weight_theta.requires_grad and other.weight.requires_grad


def test_a_sample_that_does_not_count_changes_nothing(tmp_path):
    model, quantization = quantized(tmp_path, "qwen3", "w2a16_g32")
    given = samples(model, 3)
    choose_initial_codes(model, quantization, given, CPU, tuned_rows=2)
    other, of_other = quantized(tmp_path, "qwen3", "w2a16_g32")
    choose_initial_codes(other, of_other, [*given, (given[0][0][:, :2], False)], CPU, tuned_rows=2)
    theirs = dict(other.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in model.named_parameters())


def test_experts_that_no_token_reaches_stay(tmp_path):
    """They are modules of their own here. Two of five are taken, and the logit of one is between the others' always."""
    model, quantization = quantized(tmp_path, "qwen3_moe", "w2a16_g32", experts="per_expert")
    router = model.model.layers[0].mlp.gate.weight
    with torch.no_grad():
        router.copy_(torch.outer(torch.arange(-2.0, 3.0), router[0].float()))
    before = {name: layer.weight.clone() for name, layer in quantization.layers.items() if ".layers.0.mlp." in name}
    reached = set()
    for name in before:
        quantization.layers[name].register_forward_pre_hook(
            lambda module, args, name=name: reached.add(name) if args[0].numel() else None
        )
    choose_initial_codes(model, quantization, [(torch.randint(100, (1, 2)), True)], CPU, tuned_rows=1)
    assert 0 < len(reached) < len(before) and not any(".experts.2." in name for name in reached)
    for name, weight in before.items():
        assert name in reached or torch.equal(quantization.layers[name].weight, weight), name


def test_a_step_takes_groups_until_it_has_its_samples_and_all_of_them_as_often():
    drawn = [random.randint(1, 6) for _ in range(random.randint(2, 9))]
    for sizes, rows in ((drawn, random.randint(1, sum(drawn))), ([1] * 7, 3)):
        order, seen = tuning._Order(sizes), []
        while len(seen) < 6 * len(sizes):
            taken = order.take(rows)
            counts = [sizes[index] for index in taken]
            assert sum(counts) >= rows > sum(counts[:-1])
            seen += taken
        times = [seen.count(index) for index in range(len(sizes))]
        assert max(times) - min(times) <= 1
    assert sorted(tuning._Order(drawn).take(sum(drawn) + 1)) == list(range(len(drawn)))
    assert tuning._Order([]).take(3) == []


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_gradients_of_a_group_are_the_sums_of_its_samples(tmp_path, kind):
    model, quantization = quantized(tmp_path, kind, "w4a16_g32")
    model = model.float().eval()
    blocks = decoder_layers(model, quantization)
    name, block = next(iter(blocks.items()))
    with torch.no_grad():
        parameters = tuning._Tuned(
            {one: layer for one, layer in quantization.layers.items() if one.startswith(name)}
        ).parameters
    groups = [torch.randint(300, (n, length)) for n, length in ((4, 24), (3, 31), (1, 20))]
    found = []
    for given in (groups, [one[None] for ids in groups for one in ids]):
        with torch.no_grad(), quantization.paused():
            samples = record(model, blocks, [(ids, True) for ids in given], CPU)
            targets = list(samples.hidden)
            samples.advance(block, name, targets)
        everything = range(len(given))
        found.append(tuning._gradients(block, name, samples, targets, everything, parameters))
        error, tokens = tuning._error(block, name, samples, targets)
        assert tokens == sum(ids.numel() for ids in groups) and sum(samples.sizes) == 8
        found[-1].append(torch.tensor(error))
    for ours, theirs in zip(*found, strict=True):
        assert ours.any() and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


def test_samples_of_equal_length_take_one_forward_of_a_layer_per_step(tmp_path):
    """Each forward quantizes the layer's weights."""
    model, quantization = quantized(tmp_path, "qwen3", "w2a16_g32")
    forwards = []
    model.model.layers[1].register_forward_pre_hook(
        lambda module, args: forwards.append(len(args[0])) if torch.is_grad_enabled() else None
    )
    given = [(torch.randint(300, (4, 24)), True) for _ in range(3)]
    choose_initial_codes(model, quantization, given, CPU, tuned_rows=4)
    assert forwards == [4] * tuning.STEPS


def test_the_error_of_a_token_is_beside_its_size():
    found, target = torch.randn(2, 5, 16).double(), torch.randn(2, 5, 16).double()
    target[0, 0] *= 1000
    expected = sum(
        float((y - t) @ (y - t) / (t @ t)) for y, t in zip(found.view(10, 16), target.view(10, 16), strict=True)
    )
    assert float(tuning._relative(found.float(), target.float())) == pytest.approx(expected, rel=1e-5)
