"""What is quantised, and how finely: the vocabulary that the rest of the package shares.

A :class:`TensorSpec` says how one tensor's values become codes (number format, and how many elements share a scale); a
:class:`Scheme` pairs one for the weights with one for the activations of a Linear, under the name that recipes use.
Everything numerical (grid limits, shapes of scales, how many elements share one) is derived here once, so that forward,
backward, calibration and export cannot disagree about it.

Vocabulary: a *code* is the stored value (an e4m3 byte or a small integer), a *scale* multiplies a code to give the
value, the *grid* is the set of codes, and ``v = x / scale`` is a value measured in codes.
"""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["fp8_e4m3", "int"]
Granularity = Literal["tensor", "channel", "group"]

FP8_MAX = 448.0
# Largest |v| that rounding alone still takes to the grid: halfway between 448 and 480, the value that e4m3 gives up for
# NaN. The tie goes to the even code, which is 448.
FP8_ROUNDS_TO_MAX = 464.0
# Smaller magnitudes (subnormal numbers) are evenly spaced.
FP8_SMALLEST_NORMAL = 2.0**-6


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is quantised.

    Attributes:
        dtype: ``fp8_e4m3`` (torch.float8_e4m3fn) or ``int`` (symmetric two's complement).
        bits: width of a code; 8 for fp8, 2 to 8 for int.
        granularity: one scale per ``tensor``, per ``channel`` (row of a weight) or per ``group`` of ``group_size``
            consecutive elements of a row.
        group_size: elements per group, for ``group`` only.
    """

    dtype: Dtype
    bits: int
    granularity: Granularity
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.dtype == "fp8_e4m3" and self.bits != 8:
            raise ValueError(f"fp8_e4m3 has 8 bits, got bits={self.bits}")
        if self.dtype == "int" and not 2 <= self.bits <= 8:
            raise ValueError(f"int codes have 2 to 8 bits, got bits={self.bits}")
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError(
                f"group_size goes with granularity 'group' and only with it, "
                f"got granularity={self.granularity!r} and group_size={self.group_size}"
            )
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")

    @property
    def qmin(self) -> float:
        """Smallest value of the grid, in codes."""
        return -FP8_MAX if self.dtype == "fp8_e4m3" else -float(2 ** (self.bits - 1))

    @property
    def qmax(self) -> float:
        """Largest value of the grid, in codes."""
        return FP8_MAX if self.dtype == "fp8_e4m3" else float(2 ** (self.bits - 1) - 1)

    def scale_shape(self, weight_shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the scale of a weight ``[out, in]``: ``(1,)``, ``(out, 1)`` or ``(out, in / group_size)``.

        Never 0-dim: a 0-dim parameter crashes ZeRO-1, 2 and 3.

        Raises:
            ValueError: the group size does not divide ``in``.
        """
        out_features, in_features = weight_shape
        if self.granularity == "tensor":
            return (1,)
        if self.granularity == "channel":
            return (out_features, 1)
        assert self.group_size is not None
        if in_features % self.group_size:
            raise ValueError(
                f"in_features {in_features} is not divisible by group_size {self.group_size}; "
                f"choose a scheme whose group size divides it, or exempt this layer"
            )
        return (out_features, in_features // self.group_size)

    def elements_per_scale(self, weight_shape: tuple[int, int]) -> int:
        """How many consecutive elements of the row-major weight ``[out, in]`` share one scale."""
        out_features, in_features = weight_shape
        if self.granularity == "tensor":
            return out_features * in_features
        if self.granularity == "channel":
            return in_features
        assert self.group_size is not None
        return self.group_size


@dataclass(frozen=True)
class Scheme:
    """How a Linear is quantised.

    Attributes:
        name: the name in recipes and messages.
        weights: of ``weight``.
        activations: of the input, with a static scale; None where inputs stay as they are.
    """

    name: str
    weights: TensorSpec
    activations: TensorSpec | None = None

    def __post_init__(self) -> None:
        if self.activations is not None and self.activations != _FP8_TENSOR:
            raise ValueError(f"scheme {self.name!r}: activations can be {_FP8_TENSOR} or None, got {self.activations}")

    @property
    def has_fp8_gemm(self) -> bool:
        """Whether ``torch._scaled_mm`` can multiply the codes: e4m3 with one scale on both sides."""
        return self.weights == self.activations == _FP8_TENSOR


_FP8_TENSOR = TensorSpec("fp8_e4m3", 8, "tensor")


def _weight_only(bits: int, group_size: int) -> Scheme:
    return Scheme(f"w{bits}a16_g{group_size}", TensorSpec("int", bits, "group", group_size))


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8_static", _FP8_TENSOR, _FP8_TENSOR),
        _weight_only(4, 32),
        _weight_only(4, 128),
        _weight_only(3, 32),
        _weight_only(2, 32),
    )
}


def get_scheme(name: str) -> Scheme:
    """The preset of that name.

    Raises:
        ValueError: no such preset; the text lists those that exist.
    """
    if name not in SCHEMES:
        raise ValueError(f"unknown quantisation scheme {name!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[name]
