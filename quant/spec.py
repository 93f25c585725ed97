"""Number formats and schemes.

A :class:`TensorSpec` is the number format of one tensor, including how many elements share a scale. A :class:`Scheme`
pairs the formats of the weights and of the inputs of a Linear. A :class:`Preset`, named in a recipe, is a scheme for
the Linears and a format for the KV cache. Everything numerical (grid limits, shapes of scales, elements per scale) is
derived here once, so that forward, backward, calibration and export agree.

Terms: a *code* is the stored value (an e4m3 byte, a small integer, an e2m1 nibble), a *scale* times a code is the
value, the *grid* is the set of codes, and ``v = x / scale`` is a value measured in codes.

The quantizers compute a scale for each of many equal *runs* of consecutive elements. A block of ``size x size``
elements has at least one run in each of its ``size`` rows. So its scale is repeated for every run (:func:`per_run`),
and what is computed per run is combined per block (:func:`per_block`). The last blocks of a weight's rows and columns
may be smaller. If ``size`` does not divide the length of a row, a run has the greatest common divisor of both as its
length: 64 for rows of 576 in blocks of 128.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from torch import Tensor
from torch.nn.functional import pad

Dtype = Literal["fp8_e4m3", "fp4_e2m1", "int"]
Granularity = Literal["tensor", "channel", "group", "block", "token"]
ScaleFormat = Literal["float32", "model", "float16", "e4m3", "e8m0"]

FP8_MAX = 448.0
# Largest |v| that rounds to the grid: halfway between 448 and 480, the value whose code e4m3 uses for NaN. The tie goes
# to the even code, 448.
FP8_ROUNDS_TO_MAX = 464.0
# Smaller magnitudes (subnormal numbers) are evenly spaced.
FP8_SMALLEST_NORMAL = 2.0**-6
# e2m1 has 0, 0.5, 1, 1.5, 2, 3, 4 and 6: from 7 on, v would round to 8.
FP4_MAX = 6.0
FP4_ROUNDS_TO_MAX = 7.0
FP4_SMALLEST_NORMAL = 1.0

NVFP4_GROUP, MX_GROUP = 16, 32


@dataclass(frozen=True)
class TensorSpec:
    """Number format of one tensor. Raises ValueError if the attributes contradict each other.

    Attributes:
        dtype: ``fp8_e4m3`` (torch.float8_e4m3fn), ``fp4_e2m1`` (OCP Microscaling Formats v1.0, section 5.3.3) or
            ``int`` (two's complement).
        bits: width of a code; 8 for fp8, 4 for fp4, 2 to 8 for int.
        granularity: one scale per ``tensor``, per ``channel`` (row of a weight), per ``group`` of ``group_size``
            consecutive elements of a row, per ``block`` of ``group_size`` x ``group_size`` elements of a weight (the
            last blocks of its rows and columns may be smaller), or per ``token`` of an input.
        group_size: elements per group, or along each side of a block; None for other granularities.
        symmetric: the grid is centered on 0. Otherwise an integer zero point per scale shifts it; for int weights per
            group or channel, and dynamic int inputs per token.
        dynamic: scales are computed from each token (or group of it) at run time, not stored.
        ggml: scales as in ggml's blocks (llama.cpp): fp16, and negative where a negative scale makes use of the
            smallest code, which has no positive counterpart. For symmetric int weights in groups.
        narrow: narrow range of symmetric int weights: codes without the smallest one, which has no positive
            counterpart. At 4 bits the codes are -7..7 and the initial scale is ``absmax / 7``. Checkpoints do not
            record this option, as codes are decoded the same way.
        mx: scales are powers of two, stored as an exponent byte (E8M0): OCP Microscaling (MX) floats in groups of 32.
            Set automatically for ``fp4_e2m1`` in groups of 32.
    """

    dtype: Dtype
    bits: int = 8
    granularity: Granularity = "tensor"
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool = False
    ggml: bool = False
    narrow: bool = False
    mx: bool = False

    def __post_init__(self) -> None:
        if self.dtype == "fp4_e2m1" and (self.granularity, self.group_size) == ("group", MX_GROUP):
            object.__setattr__(self, "mx", True)
        fp8, fp4, integer = (self.dtype == one for one in ("fp8_e4m3", "fp4_e2m1", "int"))
        group = self.granularity == "group"
        in_mx_groups = group and self.group_size == MX_GROUP
        weight_grain = ("token",) if self.dynamic else ("channel", "group")
        for wrong, text in (
            (fp8 and self.bits != 8, "fp8_e4m3 has 8 bits"),
            (fp4 and self.bits != 4, "fp4_e2m1 has 4 bits"),
            (integer and not 2 <= self.bits <= 8, "int codes have 2 to 8 bits"),
            (
                (group or self.granularity == "block") != (self.group_size is not None),
                "group_size goes with granularity 'group' or 'block' and only with them",
            ),
            (self.group_size is not None and self.group_size < 1, "group_size must be at least 1"),
            (
                fp4 and not (in_mx_groups or (group and self.group_size == NVFP4_GROUP)),
                "fp4_e2m1 has groups of 16 (NVFP4) or 32 (MXFP4)",
            ),
            (
                self.mx and (integer or not in_mx_groups),
                f"scales that are powers of two (mx) are of floats in groups of {MX_GROUP}",
            ),
            (
                self.dynamic and self.granularity not in ("token", "group"),
                "a dynamic scale is per token or per group of a token",
            ),
            (
                self.granularity == "token" and not self.dynamic,
                "a scale per token is dynamic: the tokens to come are not known",
            ),
            (
                self.narrow and (not integer or not self.symmetric or self.dynamic or self.ggml),
                "only symmetric int weights have a narrow grid, except ggml formats",
            ),
            (
                not self.symmetric and (not integer or self.granularity not in weight_grain),
                "only int codes per channel or group, or dynamic ones per token, may be asymmetric",
            ),
            (
                self.ggml and not (integer and group and self.symmetric and not self.dynamic),
                "ggml's scales are for symmetric int weights in groups",
            ),
        ):
            if wrong:
                values = {one.name: getattr(self, one.name) for one in fields(self)}
                given = [f"{one.name}={values[one.name]}" for one in fields(self) if values[one.name] != one.default]
                raise ValueError(f"{text}, got {', '.join(given)}")

    @property
    def qmin(self) -> float:
        """Smallest value of the grid, in codes."""
        return -float(2 ** (self.bits - 1)) if self.dtype == "int" and not self.narrow else -self.qmax

    @property
    def qmax(self) -> float:
        """Largest value of the grid, in codes."""
        if self.dtype == "int":
            return float(2 ** (self.bits - 1) - 1)
        return FP8_MAX if self.dtype == "fp8_e4m3" else FP4_MAX

    @property
    def wide(self) -> "TensorSpec":
        """The same spec with ``narrow`` off: checkpoints do not store ``narrow``."""
        return replace(self, narrow=False)

    def takes(self, other: "TensorSpec") -> bool:
        """Return True if codes and scales of ``other`` are also valid for this spec."""
        return self.wide == other.wide and (other.narrow or not self.narrow)

    @property
    def has_zero_points(self) -> bool:
        """Return True if a zero point, with a code's width and range, is stored for each scale."""
        return not (self.symmetric or self.dynamic)

    @property
    def has_global_scale(self) -> bool:
        """Return True if the scales are stored relative to a second scale per tensor, the global scale (NVFP4). The
        global scale is stored even if the others are dynamic."""
        return self.scale_format == "e4m3"

    @property
    def scale_format(self) -> ScaleFormat:
        """Number format of a stored scale, to which the forward rounds it.

        ``float32`` (fp8); ``model``, the dtype of the model's weights (int); ``float16`` (ggml's Q4_0 and Q8_0);
        ``e4m3``, relative to a second scale per tensor, the global scale (NVFP4); ``e8m0``, a power of two (MX).
        """
        if self.mx:
            return "e8m0"
        if self.dtype == "fp4_e2m1":
            return "e4m3"
        if self.dtype == "int":
            return "float16" if self.ggml else "model"
        return "float32"

    def scale_shape(self, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Compute the shape of the scale of a weight ``[out, in]``: ``(1,)``, ``(out, 1)``, ``(out, in / group_size)``
        or per block ``(ceil(out / group_size), ceil(in / group_size))``; for a stack ``[E, out, in]``: ``(E,)``, or one
        of the other shapes with E in front.

        Never 0-dim: a 0-dim parameter crashes ZeRO-1, 2 and 3. Raises ValueError if the size of groups does not divide
        ``in``.
        """
        *stack, out_features, in_features = weight_shape
        if self.granularity == "tensor":
            return tuple(stack) or (1,)
        if self.granularity == "channel":
            return (*stack, out_features, 1)
        size = self.group_size
        assert size is not None, f"{self} is of inputs"
        if self.granularity == "block":
            return (*stack, -(-out_features // size), -(-in_features // size))
        if in_features % size:
            raise ValueError(
                f"in_features {in_features} is not divisible by group_size {size}; "
                f"choose a scheme whose group size divides it, or exempt this layer"
            )
        return (*stack, out_features, in_features // size)

    @property
    def rows_per_scale(self) -> int:
        """Rows of a block for scales per block; 1 for all other granularities, also for a scale per tensor."""
        return self.group_size if self.granularity == "block" and self.group_size is not None else 1

    @property
    def of_runs(self) -> "TensorSpec":
        """The spec with groups in place of blocks, for values whose scales are repeated for every run
        (:func:`per_run`); the spec itself if it has no blocks."""
        return replace(self, granularity="group") if self.granularity == "block" else self

    def run_length(self, weight_shape: tuple[int, ...]) -> int:
        """Return the length of a run: the row-major weight ``[..., out, in]`` consists of equal runs of consecutive
        elements that share one scale. A block with the width 128 has a run in each of its rows; if 128 does not divide
        ``in``, several shorter ones."""
        *_, out_features, in_features = weight_shape
        if self.granularity == "tensor":
            return out_features * in_features
        if self.granularity == "channel":
            return in_features
        assert self.group_size is not None, f"{self} is of inputs"
        return math.gcd(self.group_size, in_features)

    def elements_per_scale(self, weight_shape: tuple[int, ...]) -> int:
        """Count the elements of the weight ``[..., out, in]`` that share one scale, consecutive or not. For scales per
        block, return the size of a full block."""
        if self.granularity == "block" and self.group_size is not None:
            return self.group_size**2
        return self.run_length(weight_shape)


FP8_TENSOR = TensorSpec("fp8_e4m3", 8, "tensor")
_FP8_TOKEN = TensorSpec("fp8_e4m3", 8, "token", dynamic=True)
_INT8_TOKEN = TensorSpec("int", 8, "token", dynamic=True)
_NVFP4, _NVFP4_TOKEN = (TensorSpec("fp4_e2m1", 4, "group", NVFP4_GROUP, dynamic=dynamic) for dynamic in (False, True))
_MXFP4, _MXFP4_TOKEN = (TensorSpec("fp4_e2m1", 4, "group", MX_GROUP, dynamic=dynamic) for dynamic in (False, True))
_MXFP8, _MXFP8_TOKEN = (
    TensorSpec("fp8_e4m3", 8, "group", MX_GROUP, dynamic=dynamic, mx=True) for dynamic in (False, True)
)


@dataclass(frozen=True)
class Scheme:
    """Number formats of a Linear. Raises ValueError for a combination that is not supported.

    Attributes:
        name: name in recipes and messages.
        weights: format of ``weight``.
        activations: format of the input; None leaves inputs unquantized.
    """

    name: str
    weights: TensorSpec
    activations: TensorSpec | None = None

    def __post_init__(self) -> None:
        if self.weights.dynamic:
            raise ValueError(f"scheme {self.name!r}: weights cannot have dynamic scales, got {self.weights}")
        static = self.activations
        if static is not None and not static.dynamic and (static.granularity != "tensor" or static.bits != 8):
            raise ValueError(
                f"scheme {self.name!r}: inputs with a stored scale must have 8 bits and one scale per tensor, got "
                f"{static}"
            )
        if static is not None and static.narrow:
            raise ValueError(
                f"scheme {self.name!r}: inputs cannot have narrow range, as readers use the full range, got {static}"
            )

    @property
    def stored_input(self) -> TensorSpec | None:
        """Format of the input if a scale of the input is stored and calibrated (its only scale, or a global scale);
        else None."""
        return None if (spec := self.activations) is None or (spec.dynamic and not spec.has_global_scale) else spec

    @property
    def learns_input(self) -> bool:
        """Return True if the stored scale of the input can be learned; the global scale of dynamic scales cannot."""
        return self.activations is not None and not self.activations.dynamic

    @property
    def has_fp8_gemm(self) -> bool:
        """Return True if ``torch._scaled_mm`` can multiply the codes: weights and inputs are e4m3, each with one stored
        scale per tensor."""
        return self.weights == self.activations == FP8_TENSOR


def _int(bits: int, group_size: int | None = None, *, symmetric: bool = True) -> TensorSpec:
    return TensorSpec("int", bits, "group" if group_size else "channel", group_size, symmetric)


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8_static", FP8_TENSOR, FP8_TENSOR),
        Scheme("fp8_dynamic", TensorSpec("fp8_e4m3", 8, "channel"), _FP8_TOKEN),
        Scheme(
            "fp8_block",
            TensorSpec("fp8_e4m3", 8, "block", 128),
            TensorSpec("fp8_e4m3", 8, "group", 128, dynamic=True),
        ),
        Scheme("int8_dynamic", _int(8), _INT8_TOKEN),
        Scheme("w8a8_static", _int(8), TensorSpec("int", 8, "tensor")),
        *(
            Scheme(f"w{bits}a16_{f'g{size}' if size else 'channel'}", _int(bits, size))
            for bits in (8, 4, 3, 2)
            for size in (128, 32, None)
        ),
        *(Scheme(f"q{bits}_0", TensorSpec("int", bits, "group", 32, ggml=True)) for bits in (4, 8)),
        Scheme("w4a16_asym", _int(4, 128, symmetric=False)),  # as in AWQ (Lin et al. 2024)
        Scheme("w8a16_asym", _int(8, symmetric=False)),
        # As in torchao's Int8DynamicActivationIntxWeightConfig: asymmetric inputs, groups of 32.
        Scheme("8da4w", _int(4, 32), TensorSpec("int", 8, "token", symmetric=False, dynamic=True)),
        Scheme("w4a8_int8", _int(4, 128), _INT8_TOKEN),
        Scheme("w4a8_fp8", _int(4, 128), _FP8_TOKEN),
        Scheme("nvfp4", _NVFP4),
        Scheme("nvfp4_w4a4", _NVFP4, _NVFP4_TOKEN),
        Scheme("mxfp4", _MXFP4),
        Scheme("mxfp4_w4a4", _MXFP4, _MXFP4_TOKEN),
        Scheme("mxfp4_mxfp8", _MXFP4, _MXFP8_TOKEN),
        Scheme("mxfp8", _MXFP8, _MXFP8_TOKEN),
    )
}


@dataclass(frozen=True)
class Preset:
    """Scheme and KV cache format behind one name in a recipe.

    Attributes:
        linear: scheme of the Linears; None leaves them unquantized.
        kv_cache: format of the keys and values, ``FP8_TENSOR``; None leaves them unquantized.
    """

    linear: Scheme | None
    kv_cache: TensorSpec | None = None


PRESETS: dict[str, Preset] = {name: Preset(scheme) for name, scheme in SCHEMES.items()} | {
    "fp8_kv": Preset(None, FP8_TENSOR),
    "fp8_static_kv": Preset(SCHEMES["fp8_static"], FP8_TENSOR),
    "nvfp4_w4a4_kv": Preset(SCHEMES["nvfp4_w4a4"], FP8_TENSOR),
}


def get_scheme(name: str) -> Scheme:
    """Return the scheme called ``name``. Raises ValueError if there is none, also for a preset with a KV cache format
    (``fp8_static_kv``); the message lists the known names."""
    if name in SCHEMES:
        return SCHEMES[name]
    known = f"known: {', '.join(SCHEMES)}"
    if name in PRESETS:
        raise ValueError(f"{name!r} quantizes keys and values, expected a scheme of linear layers; {known}")
    raise ValueError(f"unknown quantization scheme of linear layers {name!r}; {known}")


def per_run(scale: Tensor, shape: tuple[int, ...], spec: TensorSpec) -> Tensor:
    """Repeat the scales of the blocks of a weight of ``shape [..., out, in]`` for every run: ``[..., ceil(out / size),
    ceil(in / size)]`` to ``[..., out, in / run]``, contiguous. Scales that are not per block are returned unchanged."""
    if spec.granularity != "block":
        return scale
    scale = scale.repeat_interleave(spec.rows_per_scale, -2).narrow(-2, 0, shape[-2])
    return per_run_of_rows(scale, shape[-1], spec)


def per_run_of_rows(scale: Tensor, in_features: int, spec: TensorSpec) -> Tensor:
    """Repeat the block scales of each row, ``[..., ceil(in / size)]``, for every run of the row: ``[..., in / run]``,
    contiguous."""
    size, run = spec.rows_per_scale, spec.run_length((1, in_features))
    if run < size:
        scale = scale.repeat_interleave(size // run, -1).narrow(-1, 0, in_features // run)
    return scale.contiguous()


def per_block(values: Tensor, shape: tuple[int, ...], spec: TensorSpec) -> Tensor:
    """Arrange values of the runs of a weight ``[..., out, in]`` by block: ``[..., out, in / run]`` to ``[..., ceil(out
    / size), runs of a block, ceil(in / size)]``, with zeros for the runs that smaller blocks lack."""
    *_, rows, columns = shape
    size, run = spec.rows_per_scale, spec.run_length(shape)
    down, across, beside = -(-rows // size), -(-columns // size), size // run
    if down * size > rows or across * size > columns:
        values = pad(values, (0, across * beside - columns // run, 0, down * size - rows))
    values = values.unflatten(-2, (down, size))
    return values if beside == 1 else values.unflatten(-1, (across, beside)).transpose(-1, -2).flatten(-3, -2)
