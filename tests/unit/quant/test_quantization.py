"""The switches and the observers of a prepared model, and pauses of both."""

from contextlib import nullcontext

import pytest
import torch

from quant import prepare
from tests.unit.quant.trees import ATTENTION, HIDDEN, INT4, fp8, moe_model


def test_switches():
    """By pattern or all; what a scheme does not quantize stays off."""
    quantization = fp8(moe_model())
    states = quantization.fake_quant_state()
    assert set(states.values()) == {(True, True)}
    quantization.set_fake_quant(weights=True, activations=False)
    quantization.set_fake_quant(weights=False, activations=True, pattern=r".*\.0\..*o_proj")
    changed = quantization.fake_quant_state()
    assert changed.pop("model.layers.0.self_attn.o_proj") == (False, True)
    assert set(changed.values()) == {(True, False)}
    with pytest.raises(ValueError, match=r"'o_proj' matches no quantized layer.*self_attn\.q_proj"):
        quantization.set_fake_quant(True, True, pattern="o_proj")
    quantization.restore_fake_quant(states)
    assert quantization.fake_quant_state() == states
    weight_only = prepare(moe_model(), INT4, learn_weight_scale=True, learn_input_scale=False)
    weight_only.set_fake_quant(weights=True, activations=True)
    assert set(weight_only.fake_quant_state().values()) == {(True, False)}


def test_observers(seed):
    """Shared by the members of a group, and watching only while switched on; starting again forgets."""
    quantization = fp8(model := moe_model())
    quantization.set_fake_quant(weights=False, activations=False)
    quantization.observe(True)
    x, layer = torch.randn(5, HIDDEN), model.model.layers.get_submodule("0")
    for name in ATTENTION:
        layer.self_attn.get_submodule(name)(x)
    layer.mlp.experts.get_submodule("0").gate_proj(x)
    layer.mlp.experts.get_submodule("2").up_proj(3 * x)
    seen = {group.owner: group.observer.absmax.item() for group in quantization.input_groups}
    assert seen.pop("model.layers.0.self_attn.q_proj") == x.abs().max().item()
    assert seen.pop("model.layers.0.mlp.experts.0.gate_proj") == (3 * x).abs().max().item()
    assert set(seen.values()) == {0.0}
    quantization.observe(False)
    layer.self_attn.q_proj(9 * x)
    assert quantization.input_groups[0].observer.absmax.item() == x.abs().max().item()
    quantization.observe(True)
    assert quantization.input_groups[0].observer.absmax.item() == 0


@pytest.mark.parametrize(("observing", "raises"), [(False, False), (True, True)])
def test_after_a_pause_switches_and_observers_are_what_they_were(seed, observing, raises):
    quantization = fp8(moe_model())
    quantization.set_fake_quant(weights=True, activations=False, pattern=r".*o_proj")
    quantization.observe(True)
    layer, observer = next(iter(quantization.layers.values())), quantization.input_groups[0].observer
    layer(torch.randn(5, HIDDEN))
    if not observing:
        quantization.observe(False)
    before = quantization.state_dict()
    with pytest.raises(KeyError) if raises else nullcontext(), quantization.paused():
        assert set(quantization.fake_quant_state().values()) == {(False, False)} and not quantization.observing
        quantization.observe(True)
        quantization.set_fake_quant(weights=True, activations=True)
        layer(torch.full((5, HIDDEN), 100.0))
        with quantization.paused():
            layer(torch.full((5, HIDDEN), 1000.0))
        assert quantization.observing and set(quantization.fake_quant_state().values()) == {(True, True)}
        assert observer.absmax == 100
        if raises:
            raise KeyError
    after = quantization.state_dict()
    assert after["fake_quant"] == before["fake_quant"] and after["observing"] == before["observing"] == observing
    for owner, seen in before["observers"].items():
        assert all(torch.equal(value, after["observers"][owner][name]) for name, value in seen.items())
    assert 0 < observer.absmax < 100

    resumed = fp8(moe_model())
    resumed.load_state_dict(before)
    assert resumed.fake_quant_state() == before["fake_quant"] and resumed.observing == observing
    assert torch.equal(resumed.input_groups[0].observer.absmax, observer.absmax)
