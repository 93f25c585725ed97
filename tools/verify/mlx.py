"""Exports for MLX, in MLX itself.

Weights are dequantized by ``mlx.core`` with their scales in fp32. mlx-lm loads the directory and computes logits, in
fp32 and as a user does. In fp32 they must be ours. In the dtype of the checkpoint MLX rounds products of scales and
codes, and activations; the report shows what that costs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.save import mlx_place
from tools.verify.comparison import Engine, Report, compare, logits_of

# Sums in another order, through all layers, relative to the standard deviation; another rope or a wrong factor gives
# 1e-1 and more.
_FP32_ROUNDING = 1e-2


class MLX(Engine):
    """Reader of exports for MLX."""

    def __init__(self, export: Path) -> None:
        """Load ``export`` with mlx-lm.

        Raises:
            ValueError: mlx-lm is missing, or does not load it.
        """
        try:
            import mlx.core as mx
            from mlx_lm.utils import load_model
        except ImportError as error:
            raise ValueError(f"{error}: pip install -e '.[mlx]'") from error
        for path in export.iterdir():  # mlx-lm would read a pipe or a device for ever
            if not path.is_file() and not path.is_dir():
                raise ValueError(f"{path} is neither a file nor a folder")
        try:
            self.mlx, _ = load_model(export)
        except Exception as error:  # of whatever kind: shapes and keys are checked in many places
            raise ValueError(f"mlx-lm does not load {export}: {type(error).__name__}: {error}") from error
        self.export, self.found = export, {}
        for file in sorted(export.glob("model*.safetensors")):
            self.found |= mx.load(str(file))
        self.report = Report("MLX", "MLX", sum(name.endswith(".scales") for name in self.found))

    def names(self, key: str) -> list[str]:
        module, _ = mlx_place(key.removesuffix(".weight"))
        parts = [f"{module}.{suffix}" for suffix in ("weight", "scales", "biases")]
        return parts if parts[1] in self.found else [key]

    def equals(self, key: str, names: list[str], expected: Tensor) -> bool:
        import mlx.core as mx

        arrays = [self.found[name] for name in names]
        if len(arrays) == 1:
            return torch.equal(_tensor(arrays[0]), expected)
        _, expert = mlx_place(key.removesuffix(".weight"))
        weight, scales, biases = arrays if expert is None else (array[expert] for array in arrays)
        columns = expected.shape[-1]
        size, bits = columns // scales.shape[-1], weight.shape[-1] * 32 // columns
        wide = (array.astype(mx.float32) for array in (scales, biases))
        return torch.equal(_tensor(mx.dequantize(weight, *wide, group_size=size, bits=bits)), expected)

    def compare_logits(self, against: Path, batches: Sequence[Tensor]) -> None:
        import mlx.core as mx

        ours = [logits_of(self.model, ids) for ids in batches]
        for name in ("dtype of the file", "in fp32"):
            theirs = (_tensor(self.mlx(mx.array(ids.numpy()))) for ids in batches)
            try:
                self.report.logits[name] = compare(ours, theirs, batches)
            except ValueError as error:
                self.report.problems.append(f"MLX does not compute with {self.export}: {error}")
                return
            self.mlx.set_dtype(mx.float32)
        figure = self.report.logits["in fp32"].relative_max
        self.report.require(
            "in fp32", figure, _FP32_ROUNDING, "the largest difference, in standard deviations of the logits,"
        )


def _tensor(array: Any) -> Tensor:
    """Convert an array of MLX to fp32."""
    import mlx.core as mx
    import numpy as np

    return torch.from_numpy(np.array(array.astype(mx.float32)))
