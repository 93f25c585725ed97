"""Launched on every rank: loops that differ in how they compute, not in what.

    scripts/compute.py RECIPE...

A recipe whose name begins with ``unkept`` quantizes its weights in every forward. Rank 0 writes
``<output_dir>/result.pt``: what ``scripts/train.py`` keeps, and under ``seen`` how the layers computed.
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from model.ranks import is_main
from quant import QuantLinear
from quant.inputs import kept_by_attention
from tests.distributed.engine.scripts.train import run
from tests.lib.garbage import collect


class CountWeightPasses(TorchDispatchMode):
    """How often tensors of the weights' shapes are quantized, by operator, and what is gathered: bytes by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()
        self.calls: Counter[str] = Counter()
        self.gathered: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if name in ("deepqat.quantize", "deepqat.fake_quantized") and args[0].shape in self.shapes:
            self.calls[name] += 1
        if name == "c10d._allgather_base_":
            self.gathered["calls"] += 1
            self.gathered[str(args[0].dtype)] += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def note_shown(shown: dict[str, bool], name: str, layer: QuantLinear, inputs: tuple[Tensor, ...]) -> None:
    """Whether a layer's input lies in memory that attention saved; asked of the node, and of the layer's own rule."""
    node, saved = inputs[0].grad_fn, None
    for _ in range(6):  # a Function, some views, attention
        if saved is None and node is not None and node.next_functions:
            saved = getattr(node, "_raw_saved_output", None)
            node = node.next_functions[0][0]
    found = None if saved is None else saved.data
    if saved is not None and not isinstance(found, Tensor):
        return  # a place that activation checkpointing fills in backward
    at = inputs[0].untyped_storage().data_ptr()
    shown[name] = found is not None and found.untyped_storage().data_ptr() == at
    assert shown[name] == (torch.is_grad_enabled() and kept_by_attention(inputs[0], layer.aliases)), name


def main() -> None:
    """Recipes in the order given, one process group for all of them."""
    for path in (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")):
        recipe = load_recipe(path)
        loop, counter = Loop(recipe), CountWeightPasses()
        seen: dict[str, Any] = {"calls": [], "left": [], "gathered": [], "evaluations": []}
        unkept = Path(path).name.startswith("unkept")

        @loop.at(0)
        def begin(
            state: LoopState,
            seen: dict[str, Any] = seen,
            counter: CountWeightPasses = counter,
            unkept: bool = unkept,
        ) -> None:
            layers = state.session.quantization.layers
            counter.shapes = {torch.Size((layer.out_features, layer.in_features)) for layer in layers.values()}
            seen["fp8_gemm"] = [name for name, layer in layers.items() if layer.fp8_gemm]
            seen["keeps"] = all(layer.keeps_weight_codes for layer in layers.values())
            seen["shown"] = {}
            for name, layer in layers.items():
                if getattr(layer, "dynamic_codes", False):  # behind ZeRO-3's hooks, so that it sees what the layer sees
                    layer.register_forward_pre_hook(partial(note_shown, seen["shown"], name))
            if unkept:
                for layer in layers.values():
                    layer.keeps_weight_codes = False

        @loop.every(1)
        def after(state: LoopState, seen: dict[str, Any] = seen, counter: CountWeightPasses = counter) -> None:
            seen["calls"].append(dict(counter.calls))
            counter.calls.clear()
            seen["gathered"].append(dict(counter.gathered))
            counter.gathered.clear()
            seen["evaluations"].append(dict(state.evaluation))
            seen["left"].append(
                sum(layer._weight_codes is not None for layer in state.session.quantization.layers.values())
            )

        if recipe.train.compile:
            result = run(loop)
        else:
            with counter:
                result = run(loop)
        if is_main():
            torch.save({**result, "seen": seen}, Path(recipe.output_dir) / "result.pt")
        collect()


if __name__ == "__main__":
    main()
