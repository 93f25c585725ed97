"""Hadamard rotations: orthogonal matrices with entries of equal magnitude, as Kronecker factors.

Such a matrix spreads an outlier over all values of its row, so that one scale fits them all (QuaRot, arXiv 2404.00456,
section 3). Orders are p 2^k, where p is 1 or an order of Paley's two constructions: q + 1 for a prime q = 3 mod 4, and
2 (q + 1) for a prime q = 1 mod 4 (Paley, J. Math. Phys. 12, 1933).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WIDEST = 64  # largest power-of-two factor: H(4096) is H(64) x H(64), a 32nd of the products


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrix ``Q = diag(signs) (I x H) / sqrt(order)`` [size, size], never formed as a whole.

    Attributes:
        size: rows and columns.
        order: of the Hadamard matrix H; less than ``size`` if no H of that size is known: the rotation is then
            block-diagonal.
        signs: ``[size]`` fp64 of 1 and -1, which keep a row of equal values from becoming a single large one.
        factors: fp64 orthogonal matrices whose Kronecker product is H / sqrt(order).
    """

    size: int
    order: int
    signs: Tensor
    factors: tuple[Tensor, ...]

    def turn(self, values: Tensor, axis: int) -> Tensor:
        """Multiply runs of ``size`` values along ``axis``, each as a row, by Q.

        Args:
            values: fp64; ``size`` divides its length along ``axis``.
            axis: axis of ``values`` to rotate.
        """
        moved = values.movedim(axis, -1)
        turned = moved.reshape(-1, self.size) * self.signs
        sizes = [len(factor) for factor in self.factors]
        turned = turned.reshape(-1, *sizes)
        for index, factor in enumerate(self.factors, 1):
            turned = torch.tensordot(turned, factor, ([index], [0])).movedim(-1, index)
        return turned.reshape(moved.shape).movedim(-1, axis)


def rotation(size: int, seed: int) -> Rotation:
    """Make the rotation of ``size``, with signs drawn from ``seed``."""
    order, factors = _largest(size)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return Rotation(size, order, signs, factors)


def _largest(size: int) -> tuple[int, tuple[Tensor, ...]]:
    """Find the largest order dividing ``size`` with a known Hadamard matrix; return it and its factors."""
    for order in sorted((d for d in range(1, size + 1) if size % d == 0), reverse=True):
        twos = (order & -order).bit_length() - 1
        for rest in range(twos, -1, -1):  # as many factors of two as possible: they are the cheap ones
            if (core := paley(order >> rest)) is not None:
                parts = [core] if len(core) > 1 else []
                while rest:
                    step = min(rest, WIDEST.bit_length() - 1)
                    parts.append(_power_of_two(step))
                    rest -= step
                return order, tuple(part / math.sqrt(len(part)) for part in parts)
    raise AssertionError("1 divides every size")


def paley(order: int) -> Tensor | None:
    """Construct a Hadamard matrix ``[order, order]``, fp64 of 1 and -1, by Paley; None if neither construction fits."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 4:
        return None
    if _is_prime(order - 1):  # 3 mod 4
        matrix = _bordered(order - 1)
        matrix[1:, 0] = -1
        return matrix + torch.eye(order, dtype=torch.float64)
    if order // 2 % 4 == 2 and _is_prime(order // 2 - 1):  # 1 mod 4
        matrix, identity = _bordered(order // 2 - 1), torch.eye(order // 2, dtype=torch.float64)
        pairs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        others = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(matrix, pairs) + torch.kron(identity, others)
    return None


def _bordered(prime: int) -> Tensor:
    """Jacobsthal matrix of quadratic characters of ``i - j`` mod ``prime``, bordered by ones above and on the left."""
    squares = {value * value % prime for value in range(1, prime)}
    character = torch.tensor([0.0] + [1.0 if value in squares else -1.0 for value in range(1, prime)]).double()
    index = torch.arange(prime)
    matrix = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 0] = 0
    matrix[1:, 1:] = character[(index[:, None] - index[None]) % prime]
    return matrix


def _power_of_two(exponent: int) -> Tensor:
    """Sylvester's Hadamard matrix of order ``2^exponent``, fp64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(exponent):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
