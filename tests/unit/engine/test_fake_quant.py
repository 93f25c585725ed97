"""Scales of inputs, of keys and of values that a file has, against the inputs of the first samples; scales that are
measured again."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.loader import model_inputs, pack_rows, pad
from data.samples import Sample
from engine.fake_quant import (
    FakeQuant,
    calibrate_inputs,
    check_input_scales,
    observed,
    observed_input_scales,
    observing_tokens,
)
from model.ranks import RankError
from model.scales.in_place import input_scales, renew_weight_scales, write_scales
from quant import Ranges, replace_layers
from quant.spec import PRESETS
from tests.lib.checkpoints import CPU, load_model
from tests.lib.recipes import minimal
from tests.lib.tiny import tiny_checkpoint

LAYER = "model.layers.1"
Q, DOWN, KEYS, VALUES = (
    f"{LAYER}.{name}" for name in ("self_attn.q_proj", "mlp.down_proj", "self_attn.k_cache", "self_attn.v_cache")
)


def batch_of(rows: int, length: int) -> dict[str, torch.Tensor]:
    spans = torch.tensor([[row, 0, length] for row in range(rows)])
    return {"input_ids": torch.randint(0, 301, (rows, length)), "spans": spans}


class Calibrated:
    """A model whose scales of inputs were measured."""

    def __init__(self, directory: Path, preset: str, **sizes: bool) -> None:
        self.model = load_model(tiny_checkpoint(directory, "qwen3", seed=random.randrange(2**31), **sizes)).eval()
        linear, cache = PRESETS[preset].linear, PRESETS[preset].kv_cache
        options = {"learn_weight_scale": False, "learn_input_scale": False}
        self.quantization = replace_layers(self.model, linear, kv_cache=cache, **options)
        renew_weight_scales(self.quantization)
        self.batches = [batch_of(3, 40), batch_of(2, 30)]
        self.calibrate()
        self.scales = input_scales(self.quantization)

    def calibrate(self) -> None:
        owners = {group.owner for group in self.quantization.input_groups}
        calibrate_inputs(self.model, self.quantization, owners, self.batches, CPU)

    def check(self, scales: dict[str, float]) -> None:
        groups, switches = self.quantization.input_groups, self.quantization.fake_quant_state()
        write_scales(groups, {name: torch.tensor([value]) for name, value in scales.items()})
        try:
            check_input_scales(self.model, self.quantization, set(scales), [batch_of(2, 50)], CPU, "the files")
        finally:
            assert self.quantization.fake_quant_state() == switches
            assert not self.quantization.observing and not self.model.training


@pytest.fixture(scope="module")
def fp8(tmp_path_factory) -> Calibrated:
    return Calibrated(tmp_path_factory.mktemp("fp8"), "fp8_static_kv", wide=True)


WAYS = {
    "reciprocals": lambda good: {name: 1 / value for name, value in good.items()},
    "absmax, not divided": lambda good: {name: 448 * value for name, value in good.items()},
    "divided twice": lambda good: {name: value / 448 for name, value in good.items()},
    "of another unit": lambda good: {name: value * 1e-3 for name, value in good.items()},
    "one of q, k and v": lambda good: good | {Q: good[Q] / 100},
    "one of down_proj": lambda good: good | {DOWN: good[DOWN] * 1000},
    "of keys": lambda good: good | {KEYS: good[KEYS] / 100},
    "of values": lambda good: good | {VALUES: good[VALUES] * 1000},
}


@pytest.mark.parametrize("way", WAYS)
def test_scales_of_something_else_are_an_error(fp8, way):
    good, scales = fp8.scales, WAYS[way](fp8.scales)
    with pytest.raises(RankError, match=r"inputs in the files do not fit.* quant\.calibration_batches") as error:
        fp8.check(scales)
    changed = [name for name in good if scales[name] != good[name]]
    assert any(f"\n{name}: the scale is {scales[name]:.3g}, absmax is" in str(error.value) for name in changed)
    assert len(str(error.value).splitlines()) <= 7


def test_scales_of_other_samples_pass_and_those_of_weights_do_not(fp8):
    """Scales that clip pass, and those of samples with an outlier."""
    for factor in (1, 0.5, 2, 30):
        fp8.check({name: value * factor for name, value in fp8.scales.items()})
    layers = fp8.quantization.layers
    weights = {name: layers[name].weight.abs().max().item() / 448 for name in fp8.scales if name in layers}
    with pytest.raises(RankError, match=rf"{Q}: the scale is .* of its elements are beyond the range"):
        fp8.check(fp8.scales | weights)


def test_headroom_of_global_scales_fits_larger_inputs(tmp_path):
    nvfp4 = Calibrated(tmp_path, "nvfp4_w4a4", even=True)
    nvfp4.quantization = replace(nvfp4.quantization, ranges=Ranges(headroom=4.0))
    nvfp4.calibrate()
    assert input_scales(nvfp4.quantization) == {name: scale / 4 for name, scale in nvfp4.scales.items()}


def test_global_scales_of_inputs_are_not_their_reciprocals(tmp_path):
    """NVFP4's, which divides in compressed-tensors and multiplies in ModelOpt."""
    nvfp4 = Calibrated(tmp_path, "nvfp4_w4a4", even=True)
    for factor in (0.5, 1, 30):
        nvfp4.check({name: value * factor for name, value in nvfp4.scales.items()})
    for wrong in (lambda value: 1 / value, lambda value: value * 1e3):
        with pytest.raises(RankError, match="the dynamic scales, which are divided by this one"):
            nvfp4.check({name: wrong(value) for name, value in nvfp4.scales.items()})


def test_observers_that_saw_nothing_are_not_blamed_on_the_layers(fp8):
    owners = {group.owner for group in fp8.quantization.input_groups}
    for group in fp8.quantization.input_groups:
        assert group.observer is not None
        group.observer.reset()
    with pytest.raises(RankError, match=r"observers have seen no inputs: let them watch \(observe: true\)") as error:
        observed_input_scales(fp8.quantization, owners)
    assert "quant.exempt" not in str(error.value)


@pytest.mark.parametrize("on", [False, True])
def test_statistics_for_curves_leave_the_observers_as_they_were(fp8, on):
    """Scales may still be measured from what observers saw before they were switched off."""
    session = {"quantization": fp8.quantization, "uncalibrated": frozenset(), "recipe": minimal(), "model": fp8.model}
    quant = FakeQuant(SimpleNamespace(engine=fp8.model, device=CPU, overrides=None, **session))
    fp8.quantization.observe(True)
    fp8.model(**model_inputs(fp8.batches[0]), use_cache=False)
    if not on:
        fp8.quantization.observe(False)
    before = fp8.quantization.seen()
    with observed(quant):
        fp8.model(**model_inputs(fp8.batches[1]), use_cache=False)
        totals = [group.observer.total for group in fp8.quantization.input_groups]
    after = fp8.quantization.seen()
    assert fp8.quantization.observing == on and all(totals)
    assert (after == before) != on, "on, they go on to watch"
    fp8.quantization.observe(False)


@pytest.mark.parametrize("packed", [False, True])
def test_training_observes_no_padding(fp8, packed):
    """Scales from the forward of a padded or packed batch are those of its samples alone."""
    lengths = [random.randint(2, 30) for _ in range(5)]
    samples = [Sample(*(np.random.randint(1, 301, size).astype(np.int32),) * 2) for size in lengths]
    batch = pack_rows(samples, [[0, 1], [2, 3], [4]], 0, 64) if packed else pad(samples, [[i] for i in range(5)], 0)
    quantization, owners = fp8.quantization, {group.owner for group in fp8.quantization.input_groups}
    session = SimpleNamespace(quantization=quantization, recipe=minimal(), device=CPU)
    calibrate_inputs(fp8.model, quantization, owners, [batch], CPU)
    expected = input_scales(quantization)
    quantization.set_fake_quant(False, False)
    quantization.observe(True)
    with torch.no_grad(), observing_tokens(session, batch):
        fp8.model(**model_inputs(batch), use_cache=False)
    found = observed_input_scales(quantization, owners)
    quantization.observe(False)
    quantization.set_fake_quant(True, True)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=2**-6)


def test_scales_of_files_are_not_lost_without_a_line(fp8, capsys):
    """Input scales that the run itself measured are measured again without a warning."""
    owners = [group.owner for group in fp8.quantization.input_groups]
    measured, recipe = frozenset(owners[:2]), minimal(quant={"scheme": "fp8_static", "scales": "ptq"})
    session = {"quantization": fp8.quantization, "uncalibrated": measured, "recipe": recipe, "model": fp8.model}
    quant = FakeQuant(SimpleNamespace(engine=fp8.model, device=CPU, overrides=None, **session))
    quant.stale = {"weight": set(), "input": set(owners[:3])}
    quant.quantization.observe(False)
    quant._restart = lambda *_: None  # no learned scales
    quant.measure(fp8.batches)
    line = f"warning: input scales that ptq gave are lost: 1 of {len(owners)} are measured again"
    assert line in capsys.readouterr().out


def test_decoupled_scales_start_again_with_the_scales_that_are_measured(tmp_path):
    """A scale that is measured with the factor in the weight would contain the factor, and decode with it."""
    model = load_model(tiny_checkpoint(tmp_path, "qwen3"))
    options = {"learn_weight_scale": True, "learn_input_scale": False}
    quantization = replace_layers(model, PRESETS["w4a16_channel"].linear, **options)
    quantization.decouple_scales()
    renew_weight_scales(quantization)
    layers = quantization.layers
    first = {name: layer.quantized_weight() for name, layer in layers.items()}
    thetas = [one for layer in layers.values() for one in (layer.weight_theta, layer.adapter.code_theta)]
    recipe = minimal(quant={"scheme": "w4a16_channel", "decoupled_scales": True}, learnable={"norm": True})
    engine = SimpleNamespace(optimizer=torch.optim.AdamW([{"params": thetas, "name": "weight_scales"}]))
    parts = {
        "quantization": quantization,
        "overrides": None,
        "uncalibrated": frozenset(),
        "recipe": recipe,
        "model": model,
    }
    quant = FakeQuant(SimpleNamespace(engine=engine, **parts))

    def evaluate() -> None:
        with quant.as_served([]):
            pass

    for on_again in (evaluate, quant.enable, quant.measure):
        with torch.no_grad():
            for theta in thetas:
                theta.add_(0.3)
        quant.disable()
        quant.stepped()
        on_again()
        for name, layer in layers.items():
            assert not layer.adapter.code_theta.any(), name
            torch.testing.assert_close(layer.quantized_weight(), first[name], rtol=2e-2, atol=1e-3)
