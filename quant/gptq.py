"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): choose codes that minimize the error of a Linear's outputs.

Let ``w`` be a row of the weight, ``q`` its quantized values and ``X [tokens, in]`` the inputs. Rounding to nearest
minimizes ``|w - q|``, but the error of the output is ``|X w - X q|^2 = (w - q) H (w - q)`` with the Gram matrix ``H =
X'X``. As inputs are correlated, other columns can compensate for the rounding error of a column: columns are rounded
one after the other, and each error is spread over the remaining columns. With ``U`` upper triangular and ``inverse(H) =
U'U``, for each column ``j`` and the columns after it (``rest``)::

    e = (w_j - Q(w_j)) / U_jj        w_rest = w_rest - e U_j,rest

Columns with the largest inputs come first, while most columns remain to compensate (``act_order`` in the authors'
code). Scales are computed before, for groups of columns in the original order (``static_groups`` in the authors' code).
A share of the mean diagonal of ``H`` is added to its diagonal, as few samples do not determine ``H``.

Rows are independent, so ranks with different rows need no communication.
"""

import torch
from torch import Tensor

from quant.reference import dequantize, effective_scale, fake_quant, quantize
from quant.scale import Quantizer, Scale
from quant.spec import TensorSpec

DAMPING = 0.01  # share of the mean diagonal, the reference's percdamp
ROUNDS = 2  # alternations of choosing codes and fitting scales; a third gains nothing
_BLOCK = 128  # columns per update of the remaining columns
_ROWS = 128  # rows whose scales are fitted at once


def takes(spec: TensorSpec) -> bool:
    """Return True if GPTQ supports this format: each row has its own scales."""
    return spec.granularity in ("channel", "group")


@torch.no_grad()
def choose(weight: Tensor, quantizer: Quantizer, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Choose codes and scales of some rows ``w`` of a Linear so that the error of its outputs is small.

    GPTQ chooses the codes. For integer formats scales are then fitted to the codes, and both steps are run
    :data:`ROUNDS` times; scales of float formats do not change. A row whose error would be larger than with rounding to
    nearest gets the nearest codes and keeps its given scales.

    Args:
        weight: ``[rows, in]`` in the model's dtype.
        quantizer: its ``scale.s0`` is the effective scale ``[rows, groups]`` of these rows, ``scale.zero`` their zero
            points in the same shape, or None.
        gram: ``H = X'X [in, in]`` of the inputs ``X [tokens, in]``, fp64.

    Returns:
        Codes ``[rows, in]`` and their scales, fp32 ``[rows, groups]``.

    Raises:
        ValueError: ``H`` is not finite.
    """
    spec, dtype = quantizer.spec, quantizer.dtype
    scale = first = quantizer.scale._replace(theta=None)
    for _ in range(ROUNDS if spec.dtype == "int" else 1):
        chosen = compensate(weight, scale, spec, gram, dtype=dtype)
        codes = quantize(chosen, scale.s0, spec, scale.zero)
        if spec.dtype == "int":
            ones = torch.ones_like(scale.s0)
            fitted = fit_scales(weight, dequantize(codes, ones, spec, torch.float32, scale.zero), scale.s0, gram)
            scale = scale._replace(s0=effective_scale(fitted, None, spec, dtype))
    nearest = quantize(weight, first.s0, spec, first.zero)
    damped = _damped(gram).float()
    errors = [
        row_errors(dequantize(found, at.s0, spec, dtype, at.zero).float() - weight.float(), damped)
        for found, at in ((codes, scale), (nearest, first))
    ]
    better = (errors[0] <= errors[1]).unsqueeze(1)
    return torch.where(better, codes, nearest), torch.where(better, scale.s0, first.s0)


@torch.no_grad()
def compensate(weight: Tensor, scale: Scale, spec: TensorSpec, gram: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Compute weights whose nearest codes are GPTQ's codes. Each element is the value that GPTQ rounds: the weight plus
    the compensation for the errors of the columns rounded before.

    ``weight``, ``gram`` and errors are as in :func:`choose`; ``scale.s0`` is the effective scale ``[rows, groups]`` of
    these rows. ``dtype`` is the model's, to which the product of code and scale is rounded. Returns fp32
    ``[rows, in]``, to be quantized with the same scales.
    """
    order = gram.diagonal().argsort(descending=True, stable=True)
    factor = _factor(gram[order][:, order]).float()
    size = weight.shape[1] // scale.s0.shape[1]
    groups = (order // size).tolist()
    left = weight.float()[:, order]
    for begin in range(0, left.shape[1], _BLOCK):
        columns = slice(begin, min(begin + _BLOCK, left.shape[1]))
        block, within = left[:, columns], factor[columns, columns]
        errors = torch.empty_like(block)
        for j in range(block.shape[1]):
            group = slice(groups[begin + j], groups[begin + j] + 1)
            zero = None if scale.zero is None else scale.zero[:, group]
            column = block[:, j : j + 1]
            rounded = fake_quant(column, scale.s0[:, group], spec, zero).to(dtype).float()
            errors[:, j : j + 1] = (column - rounded) / within[j, j]
            block[:, j + 1 :] -= errors[:, j : j + 1] * within[j, j + 1 :]
        left[:, columns.stop :] -= errors @ factor[columns, columns.stop :]
    return left[:, order.argsort()]


@torch.no_grad()
def fit_scales(weight: Tensor, values: Tensor, scale: Tensor, gram: Tensor) -> Tensor:
    """Fit scales to given codes so that the output error is smallest.

    For each row, the scales ``s_g`` minimize ``(w - sum_g s_g q_g) H (w - sum_g s_g q_g)``, where ``q_g`` has the codes
    inside group ``g`` and 0 elsewhere: a linear system with as many unknowns as groups. A row keeps its scales if its
    system has no finite solution, or a scale would change its sign.

    Args:
        weight: ``[rows, in]``.
        values: codes as numbers ``[rows, in]``, zero points subtracted.
        scale: the scales used to choose the codes, ``[rows, groups]``.
        gram: as in :func:`choose`.

    Returns:
        fp32 ``[rows, groups]``, not yet rounded to the stored format.
    """
    damped = _damped(gram)
    groups, size = scale.shape[1], weight.shape[1] // scale.shape[1]
    found = []
    for rows in zip(weight.split(_ROWS), values.split(_ROWS), scale.split(_ROWS), strict=True):
        w, q, s = (one.double() for one in rows)
        matrix, right = w.new_empty(len(w), groups, groups), w.new_empty(len(w), groups)
        for group in range(groups):
            columns = slice(group * size, (group + 1) * size)
            outputs = q[:, columns] @ damped[columns]  # [rows, in]
            matrix[:, group] = (outputs * q).unflatten(1, (groups, size)).sum(-1)
            right[:, group] = (outputs * w).sum(-1)
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        empty = diagonal == 0  # all codes of the group are 0: any scale does
        matrix = matrix + torch.diag_embed(empty.double() + 1e-9 * diagonal.mean(1, keepdim=True))
        fitted, failed = torch.linalg.solve_ex(matrix, torch.where(empty, s, right))
        good = (fitted * s > 0).all(1) & fitted.isfinite().all(1) & (failed == 0)
        found.append(torch.where(good.unsqueeze(1), fitted, s))
    return torch.cat(found).float()


def add_inputs(gram: Tensor, x: Tensor) -> None:
    """Add ``X'X`` of inputs ``x [tokens, in]`` to ``gram [in, in]`` in place; ``gram`` is fp64, ``X'X`` of one call is
    computed in fp32."""
    x = x.float()
    gram += x.T @ x


def row_errors(difference: Tensor, gram: Tensor) -> Tensor:
    """Compute ``|X d|^2 = d H d`` for each row ``d`` of ``difference [rows, in]``, with ``gram`` as ``H``: fp64
    ``[rows]``."""
    parts = (rows.to(gram.dtype) for rows in difference.split(_ROWS))
    return torch.cat([((rows @ gram) * rows).sum(1, dtype=torch.float64) for rows in parts])


def _damped(gram: Tensor) -> Tensor:
    return gram + torch.diag((DAMPING * gram.diagonal().mean()).expand(len(gram)))


def _factor(gram: Tensor) -> Tensor:
    """Compute ``U``, upper triangular, with ``U'U`` the inverse of the damped ``gram``; fp64. Raises ValueError if the
    diagonal of ``gram`` has NaN or Inf.

    ``H = R R'`` with ``R`` upper triangular is a Cholesky factorization from the last row to the first; ``U`` is the
    inverse of ``R``. Columns of inputs that were always 0 get a positive diagonal, so that they are rounded to nearest.
    """
    gram = gram.double()
    diagonal = gram.diagonal()
    mean = diagonal.mean()
    if not bool(mean.isfinite()):
        raise ValueError("the inputs of a layer have NaN or Inf in calibration: check the model and the samples")
    damped = gram + torch.diag((DAMPING * mean).expand(len(gram)) + (diagonal == 0) * mean.clamp(min=1.0))
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_triangular(upper, identity, upper=True)
