"""Compares an export for MLX with a compressed export of the same checkpoint, in MLX itself.

Its weights are dequantized by ``mlx.core`` with their scales in fp32, and must be equal bit for bit to what our forward
multiplies. mlx-lm loads the directory and computes logits, in fp32 and as a user does. In fp32 they must be ours. In
the dtype of the checkpoint MLX rounds products of scales and codes, and activations; the report says what that costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from model.ranks import listed
from model.save import mlx_place
from tools.verify.dequantized import check_tokens, dequantized

# Sums in another order, through all layers, relative to the standard deviation; another rope or a wrong factor gives
# 1e-1 and more.
ROUNDING = 1e-2


@dataclass
class MLXReport:
    """What was found.

    Attributes:
        quantized: how many Linears have codes.
        equal: how many tensors of the checkpoint are equal, each expert by itself.
        difference: the largest of two logits, in fp32, in standard deviations.
        same_top: share of tokens after which the likeliest one is the same, in the checkpoint's dtype.
        perplexity: of the text in MLX in that dtype, and in our forward.
        problems: one line each.
    """

    quantized: int = 0
    equal: int = 0
    difference: float = 0.0
    same_top: float = 0.0
    perplexity: tuple[float, float] = (0.0, 0.0)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether weights and logits are equal."""
        return not self.problems

    def table(self) -> str:
        """The report as text for people."""
        lines = [
            f"{self.quantized} quantized layers, {self.equal} tensors of the checkpoint equal bit for bit",
            f"logits in fp32 differ by at most {self.difference:.1e} of their standard deviation",
            f"in the checkpoint's dtype: same likeliest token {self.same_top:.1%}, perplexity {self.perplexity[0]:.4f} "
            f"in MLX, {self.perplexity[1]:.4f} here",
            *(f"PROBLEM: {problem}" for problem in self.problems),
        ]
        return "\n".join([*lines, "ok" if self.ok else "NOT ok"])


@torch.no_grad()
def compare_with_compressed(
    export: Path, against: Path, batches: Sequence[Tensor], *, trust_remote_code: bool = False
) -> MLXReport:
    """Compare every tensor, and the logits of ``batches`` of token ids [B, T].

    Raises:
        RankError: ``against`` is no compressed checkpoint.
        ValueError: mlx-lm is missing, or does not load ``export``.
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
        mlx, _ = load_model(export)
    except Exception as error:  # of whatever kind: shapes and keys are checked in many places
        raise ValueError(f"mlx-lm does not load {export}: {type(error).__name__}: {error}") from error
    found: dict[str, Any] = {}
    for file in sorted(export.glob("model*.safetensors")):
        found |= mx.load(str(file))
    report = MLXReport()
    with dequantized(against, trust_remote_code=trust_remote_code) as (model, tensors):
        check_tokens(model, batches, export)
        left = set(found)
        for key, expected in tensors:
            left -= _compare(report, key, expected, found)
        if left:
            report.problems.append(f"{against} lacks {listed(sorted(left), 6)}")
        try:
            _compare_logits(report, mlx, model, batches)
        except ValueError as error:  # of MLX: codes of another type, which it finds in its products
            report.problems.append(f"MLX does not compute with {export}: {error}")
    return report


def _compare(report: MLXReport, key: str, expected: Tensor, found: dict[str, Any]) -> set[str]:
    """Compare one tensor of the checkpoint with ``found``; which of these it lies in."""
    module, expert = mlx_place(key.removesuffix(".weight"))
    parts = [f"{module}.{suffix}" for suffix in ("weight", "scales", "biases")]
    if parts[1] in found:
        report.quantized += 1
        try:
            arrays = [found[part] if expert is None else found[part][expert] for part in parts]
            values = _dequantized(*arrays, columns=expected.shape[-1])
        except (
            LookupError,
            ValueError,
            ArithmeticError,
        ) as error:  # of another type or size, or one of them is missing
            report.problems.append(f"{key}: {error}")
            return set(parts)
    elif key in found:
        parts, values = [key], _tensor(found[key])
    else:
        report.problems.append(f"{key} is not there")
        return set()
    if torch.equal(values, expected):
        report.equal += 1
    else:
        report.problems.append(f"{key} is another one")
    return set(parts)


def _compare_logits(report: MLXReport, mlx: Any, model: PreTrainedModel, batches: Sequence[Tensor]) -> None:
    import mlx.core as mx

    ours = [model(input_ids=ids, use_cache=False).logits.float() for ids in batches]
    theirs = [_tensor(mlx(mx.array(ids.numpy()))) for ids in batches]
    mlx.set_dtype(mx.float32)
    exact = [_tensor(mlx(mx.array(ids.numpy()))) for ids in batches]
    pairs = list(zip(ours, exact, strict=True))
    report.difference = max(((one - other).abs().max() / one.std()).item() for one, other in pairs)
    if not report.difference < ROUNDING:
        report.problems.append(f"logits in fp32 differ by {report.difference:.2g} of their standard deviation")
    same = [(one.argmax(-1) == other.argmax(-1)).flatten() for one, other in zip(ours, theirs, strict=True)]
    report.same_top = torch.cat(same).float().mean().item()
    report.perplexity = _perplexity(theirs, batches), _perplexity(ours, batches)


def _perplexity(logits: Sequence[Tensor], batches: Sequence[Tensor]) -> float:
    losses = [
        cross_entropy(one[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        for one, ids in zip(logits, batches, strict=True)
    ]
    return torch.cat(losses).mean().exp().item()


def _dequantized(weight: Any, scales: Any, biases: Any, *, columns: int) -> Tensor:
    """What the codes of one Linear with so many inputs mean."""
    import mlx.core as mx

    size, bits = columns // scales.shape[-1], weight.shape[-1] * 32 // columns
    wide = (array.astype(mx.float32) for array in (scales, biases))
    return _tensor(mx.dequantize(weight, *wide, group_size=size, bits=bits))


def _tensor(array: Any) -> Tensor:
    """An array of MLX as fp32."""
    import mlx.core as mx
    import numpy as np

    return torch.from_numpy(np.array(array.astype(mx.float32)))
