"""Actions of several test files: what loops have beside their recipes (``run_all`` in train.py)."""

from typing import Any

import torch

from engine.loop import Loop, LoopState
from model.zero import gathered
from quant.linear import linears_of


def used_weights(loop: Loop, seen: dict[str, Any]) -> None:
    """Keep the weight that each quantized Linear uses after the last step, its output for the unit matrix; and
    the scales of weights, inputs, keys and values."""

    @loop.every(1)
    def keep(state: LoopState) -> None:
        seen["used"], seen["scales"], seen["inputs"] = {}, {}, {}
        for name, layer in state.session.quantization.layers.items():
            with gathered(layer.parameters(recurse=False)), torch.no_grad():
                quantizes, layer.input_fake_quant = layer.input_fake_quant, False
                experts, units = layer.num_experts, torch.eye(layer.in_features, dtype=layer.weight.dtype)
                ends = [torch.arange(1, experts + 1, dtype=torch.int32) * layer.in_features] if experts else []
                # Not the module's call, which would gather for a step of ZeRO-3's.
                columns = layer.forward(units.repeat(experts or 1, 1), *ends)
                layer.input_fake_quant = quantizes
                whole = columns.view(*layer.weight_shape[:-2], layer.in_features, -1).transpose(-2, -1)
                for part in linears_of(name, layer):
                    seen["used"][part.name] = part.weight(whole).clone()
                    seen["scales"][part.name] = part.scale(layer.weight_scale(), layer.scheme.weights).clone()
                    if layer.input_s0 is not None:
                        seen["inputs"][part.name] = layer.input_scale().clone()
        for name, cache in state.session.quantization.caches.items():
            with gathered(cache.parameters(recurse=False)), torch.no_grad():
                seen["inputs"][name] = cache.input_scale().clone()


def held(loop: Loop, seen: dict[str, Any]) -> None:
    """Keep the weight that each Linear uses, the bytes of each Parameter on this rank, and the bits of codes."""
    used_weights(loop, seen)

    @loop.every(1)
    def sizes(state: LoopState) -> None:
        named = dict(state.model.named_parameters())
        seen["bytes"] = {name: getattr(own, "ds_tensor", own).nbytes for name, own in named.items()}
        layers = state.session.quantization.layers.items()
        seen["bits"] = {f"{name}.weight": one.scheme.weights.bits for name, one in layers if one.held is not None}


def changes_frozen(loop: Loop, seen: dict[str, Any]) -> None:
    """A frozen parameter is changed once, in the first step."""

    @loop.at(1)
    def change(state: LoopState) -> None:
        norm = state.model.get_parameter("model.layers.1.input_layernorm.weight")
        with gathered([norm], modifier_rank=0), torch.no_grad():
            norm.mul_(1.5)
