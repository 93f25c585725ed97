"""Count on the CPU what a training step would make the host wait for on a GPU, by the function that asks."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode

from tests.lib.root import ROOT

# What brings values to Python, or asks for a size that depends on them.
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "equal", "masked_select", "unique", "is_nonzero"}
WAITS |= {"__bool__", "__int__", "__float__", "__index__", "new_tensor"}  # the last copies to the device
FOLDERS = ("data", "engine", "model", "quant")


class HostWaits(TorchFunctionMode):
    """Counts while it is entered.

    Attributes:
        by_function: calls that bring values to the host, by ``file: function`` of the innermost one that is the
            project's, DeepSpeed's or transformers'. Its operand may be on the host already: the reader of the counts
            must know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_function: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITS:
            self.by_function[_asking()] += 1
        return func(*args, **(kwargs or {}))


def _asking() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS:
            return f"{path.relative_to(ROOT)}: {frame.name}"
        for package in ("deepspeed", "transformers"):
            if package in path.parts:
                return f"{'/'.join(path.parts[path.parts.index(package) :])}: {frame.name}"
    return "elsewhere"
