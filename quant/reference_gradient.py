"""The definition of a gradient in fp8, in plain PyTorch, as :mod:`quant.reference` defines the quantisers of a model.

The gradient of a layer's output is quantised as a whole, with a scale of its own in every micro-batch, on every rank::

    s = max |g| / L          L = 448 of e4m3, 57344 of e5m2
    q = cast(clamp(g * (1 / s), -L, L))      to nearest, ties to even; v = g * (1 / s) in fp32

This is what is known as current, or dynamic, tensor-wise scaling: of torchao's float8 training (``float8_utils.py``,
``tensor_to_scale``: the largest magnitude mapped to the largest of the format; its gradients are e5m2 by default, e4m3
with rowwise scales) and of Transformer Engine (``Float8CurrentScaling``: e4m3 forward, e5m2 backward by default).
DeepSeek-V3's report (section 3.3) takes e4m3 for all three GEMMs, with scales of tiles of 128, which are no part of
this.

What is not finite stays so, everywhere: one such element makes the scale NaN, and with it all codes and both products
(an infinity that were clipped would look like an ordinary gradient to whoever checks the norm). Where ``1 / s`` would
overflow the scale is 1: a gradient of zeros is exact.
"""

import torch
from torch import Tensor

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def quantize_gradient(grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of ``grad`` in its shape and the given one of :data:`FORMATS`, and their scale, fp32 ``[1]``."""
    largest = torch.full((1,), torch.finfo(dtype).max, device=grad.device)
    absmax = grad.abs().amax().float().view(1) if grad.numel() else torch.zeros_like(largest)
    scale = absmax / largest
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    values = (grad.float() * (1 / scale)).clamp(-largest, largest)
    return values.to(dtype), scale
