"""Gradients of an adapter that is merged into a weight, from products as thin as its rank.

With ``G = grad.t() @ x``, the gradient of a weight ``[out, in]`` as it is multiplied, and M, 1 where the sum of
weight and adapter is inside its range and 0 where it is clipped, an adapter's gradients are ::

    of B:  scaling * (M o G) A.t() = scaling * (grad.t() (x A.t()) - (C o G) A.t())      C = 1 - M
    of A:  scaling * B.t() (M o G) = scaling * ((grad B).t() x     - B.t() (C o G))

The first terms are what an adapter beside the weight takes; nothing of them is as large as the weight. The last ones
need those elements of G that are clipped, and no others: some 1.6% of them with absmax scales of symmetric integers in
groups of 32, where a group's largest element is half a step outside if it is positive, and none of fp8 with absmax
scales. :func:`quant.kernels.clipped_products` computes them on the CPU. If they are many, G as a whole is faster, and
what is subtracted from the first terms would take digits from them; so the caller makes G then.

On a GPU that is so only where nothing is quantised. There an element of G by itself costs some fifty times what it
costs in a whole product, on tensor cores, and the host would have to wait to know how many there are. Nor is it so
where scales learn: the gradient of a scale is a sum over all elements of G in its group.
"""

import torch
from torch import Tensor

from quant import gemm, kernels

# An element of G by itself takes some 10 times what it takes in a whole product (fp32 and bf16 on AVX-512).
MOST_CLIPPED = 1 / 24


def thin_gradients(
    grad: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``lora_a`` and ``lora_b``, in their shapes and dtypes.

    Args:
        grad, x: ``[rows, out]`` and ``[rows, in]``, the gradient of the layer's output and its input as it was
            multiplied.
        lora_a, lora_b, scaling: as of :func:`quant.adapter.merge`.
        mask: what of the sum is inside the range, see :func:`quant.kernels.quantize`; None where all of it is.
        offsets: of a stack, where the rows of each expert end.
    """
    # A GEMM takes the second operand as it lies in a Linear: [out, in].
    up = gemm.linear(x, lora_a, None, offsets)  # [rows, rank]
    down = gemm.input_gradient(grad, lora_b, offsets)  # [rows, rank]
    of_a, of_b = gemm.weight_gradient(down, x, offsets), gemm.weight_gradient(grad, up, offsets)
    if mask is None:
        return of_a.mul_(scaling), of_b.mul_(scaling)
    clipped = kernels.clipped_products(grad, x, mask, lora_a, lora_b, offsets)
    found = [
        torch.sub(whole.float(), part).mul_(scaling).to(whole.dtype)
        for whole, part in zip((of_a, of_b), clipped, strict=True)
    ]
    return found[0], found[1]
