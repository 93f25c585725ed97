"""The module that stands where a quantised nn.Embedding stood."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import kernels
from quant.linear import QuantLayer
from quant.scale import Quantizer, Scale, lsq_factor
from quant.spec import Scheme


class QuantEmbedding(QuantLayer):
    """``F.embedding`` of a table whose rows are fake-quantised where that is switched on.

    Only the rows that are looked up are quantised. For its scale, for calibration and export, the table ``[rows,
    features]`` is the weight of a Linear of ``features`` inputs and ``rows`` outputs.

    The scheme is weight-only, of symmetric integers per channel (row) or group: vLLM, the one reader of quantised
    embeddings, passes over their zero points without a word.
    """

    def __init__(self, embedding: nn.Embedding, scheme: Scheme, *, weight: Scale) -> None:
        """Takes over the Parameter object of ``embedding``; ``weight`` is the scale of its table.

        Raises:
            ValueError: the scheme is another one, or the embedding does more than look up.
        """
        if not self.takes(scheme):
            raise ValueError(
                f"scheme {scheme.name!r}: embeddings can have symmetric integer weights per channel or group, without "
                "inputs"
            )
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.scale_grad_by_freq:
            raise ValueError(f"{embedding} does more than look up rows; leave it unquantised")
        size = {"in_features": embedding.embedding_dim, "out_features": embedding.num_embeddings}
        super().__init__(embedding, scheme, **size, weight=weight, input=None)
        self.padding_idx = embedding.padding_idx
        self.train(embedding.training)

    @staticmethod
    def takes(scheme: Scheme) -> bool:
        """Whether an embedding can have this scheme."""
        spec = scheme.weights
        integers = spec.dtype == "int" and spec.symmetric and spec.granularity in ("channel", "group")
        return scheme.activations is None and integers

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` int64 of any shape. Returns ``[..., features]`` in the model's dtype."""
        if torch.is_grad_enabled():
            self.trained = True
        rows = F.embedding(ids, self.weight, self.padding_idx)
        theta: Tensor | None = self.weight_theta
        if not self.weight_fake_quant or ids.numel() == 0:
            # ZeRO-3 would apply the last gradient of a Parameter again that gets none.
            return rows if theta is None or not torch.is_grad_enabled() else rows + 0 * theta.sum()
        self._check_scale_dtypes()
        spec = self.scheme.weights
        if theta is not None:
            numel = spec.elements_per_scale((self.out_features, self.in_features))
            theta = F.embedding(ids, scaled_gradient(theta, lsq_factor(numel, spec))).flatten(0, -2)
        s0 = F.embedding(ids, self.weight_s0).flatten(0, -2)
        of_rows = Quantizer(Scale(s0, theta), spec, self.weight.dtype)
        return kernels.fake_quantize(rows.flatten(0, -2), of_rows).view(rows.shape)

    def extra_repr(self) -> str:
        return (
            f"{self.out_features}, {self.in_features}, scheme={self.scheme.name}, fake_quant={self.weight_fake_quant}"
        )


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """``x``, whose gradient is multiplied by ``factor``."""
    return _ScaledGradient.apply(x, factor)
