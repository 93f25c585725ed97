"""Run samples through the decoder layers of a model, one gathered layer at a time.

Samples of equal length run in one batch, since each run of a layer quantizes its weights. All samples run through the
whole model once, to record the arguments of each decoder layer (masks, positions). From then on a single layer can run
on the hidden states of all samples.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from model.ranks import raise_everywhere, reduce_over_ranks
from model.scales.in_place import input_scales, write_scales
from model.zero import gathered
from quant import Quantization
from quant.scale import first_input_scale

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a decoder layer, without hidden states


class Stop(Exception):
    """Exception that ends a forward early."""


@dataclass
class LayerSamples:
    """Recorded inputs of the decoder layers, for batches of n samples with T tokens.

    Attributes:
        layers: names of the decoder layers in the order in which they run.
        sizes: n of each batch.
        hidden: input ``[n, T, H]`` of the next decoder layer, for each batch.
        inputs: for each batch, the other arguments of each decoder layer by its name.
    """

    layers: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    inputs: list[dict[str, Inputs]] = field(default_factory=list)

    def run(self, block: nn.Module, name: str, index: int, hidden: Tensor) -> Tensor:
        """Run a gathered decoder layer on ``hidden [n, T, H]`` with the other arguments of batch ``index``, and return
        its output ``[n, T, H]``."""
        args, kwargs = self.inputs[index][name]
        return _first(block(hidden, *args, **kwargs))

    def advance(self, block: nn.Module, name: str, hidden: list[Tensor]) -> None:
        """Replace each batch in ``hidden``, in place, by the output of the decoder layer for it; a collective."""
        with gathered(block.parameters()):
            for index, before in enumerate(hidden):
                hidden[index] = self.run(block, name, index, before)

    def leave(self, block: nn.Module, name: str) -> None:
        """Replace ``self.hidden`` by the output of this decoder layer, the input of the next one, and free this layer's
        other arguments; a collective."""
        self.advance(block, name, self.hidden)
        for inputs in self.inputs:
            del inputs[name]


def decoder_layers(model: nn.Module, quantization: Quantization) -> dict[str, nn.Module]:
    """Find the decoder layers that contain quantized layers, by name: the outermost modules of transformers' class
    GradientCheckpointingLayer."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            found[name] = module
    return {
        name: one for name, one in found.items() if any(each.startswith(f"{name}.") for each in quantization.layers)
    }


def record(
    model: nn.Module, blocks: dict[str, nn.Module], samples: Sequence[tuple[Tensor, bool]], device: torch.device
) -> LayerSamples:
    """Run samples through a model, with one of its decoder layers ``blocks`` gathered at a time, and record the layers'
    inputs; a collective. Each batch in ``samples`` is ``input_ids [n, T]``, and False if it is only run, not recorded.
    Raises RankError on every rank if a decoder layer runs twice, or its input is not the output of the one before."""
    found, problems = LayerSamples(), dict[str, None]()
    names = {module: name for name, module in blocks.items()}
    inside = {id(parameter) for module in blocks.values() for parameter in module.parameters()}
    seen: list[str] = []
    hidden: list[Tensor] = []
    calls: dict[str, Inputs] = {}
    gathers: list[ExitStack] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, given = names[module], args[0] if args else kwargs.get("hidden_states")
        gathers.append(ExitStack())
        gathers[-1].enter_context(gathered(module.parameters()))
        if name in seen:
            problems[f"{name} runs more than once"] = None
        elif hidden and given is not hidden[-1]:
            problems[f"the input of {name} is not the output of {seen[-1]}"] = None
        if not seen:
            hidden.append(given)  # type: ignore[arg-type]
        seen.append(name)
        calls[name] = args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        gathers.pop().close()
        hidden.append(_first(output))
        if found.layers and names[module] == found.layers[-1]:
            raise Stop

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in blocks.values()]
    hooks += [module.register_forward_hook(after) for module in blocks.values()]
    try:
        with gathered(parameter for parameter in model.parameters() if id(parameter) not in inside):
            for ids, counts in samples:
                seen.clear()
                hidden.clear()
                calls.clear()
                with suppress(Stop):
                    model(input_ids=ids.to(device), use_cache=False)
                found.layers = found.layers or list(seen)
                if counts:
                    found.sizes.append(len(ids))
                    found.hidden.append(hidden[0])
                    found.inputs.append(dict(calls))
    finally:
        for hook in hooks:
            hook.remove()
    lines = [f"quant.init: expected rtn for this model: {text}" for text in problems]
    raise_everywhere("\n".join(lines[:5]) or None)
    return found


def _first(output: Any) -> Tensor:
    """Return the hidden states in the output of a decoder layer."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def measure_inputs(quantization: Quantization, block: nn.Module, name: str, samples: LayerSamples) -> None:
    """Measure the input scales of a decoder layer's Linears from the inputs' largest magnitudes over all samples, and
    write them; a collective. Only stored scales (NVFP4: the global scale) that are still NaN, set by no file and no
    ``quant.initial_input_scale``, are measured; calibration measures them again before training. No observer may be
    active. Raises RankError on every rank if inputs have NaN or Inf."""
    there = input_scales(quantization)
    groups = [
        group
        for group in quantization.input_groups
        if math.isnan(there[group.owner])
        and any(one.startswith(f"{name}.") and one in quantization.layers for one in group.members)
    ]
    if not groups:
        return
    quantization.observe(True)
    with gathered(block.parameters()):
        for index, hidden in enumerate(samples.hidden):
            samples.run(block, name, index, hidden)
    seen = torch.stack([group.observer.absmax.cpu() for group in groups if group.observer is not None])
    quantization.observe(False)
    largest = reduce_over_ranks(seen.nan_to_num(nan=torch.inf), dist.ReduceOp.MAX)
    bad = [group.owner for group, most in zip(groups, largest.tolist(), strict=True) if most == torch.inf]
    raise_everywhere(
        f"quant.init: inputs of these layers have NaN or Inf: {', '.join(bad)}; check the model and the samples"
        if bad
        else None
    )
    largest = largest.clamp(min=1e-6)  # for an expert that no token reached
    scales = {
        group.owner: first_input_scale(most, group.spec) for group, most in zip(groups, largest.split(1), strict=True)
    }
    write_scales(quantization.input_groups, scales)
