"""The recipe's ``quant`` section: schemes of the layers, sources of scales, start of fake quant."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from engine.config.errors import (
    FACTOR,
    Condition,
    at_least,
    derived,
    each,
    need,
    only_with,
    path_or_name,
    regex,
    values,
)
from engine.config.hub import HUB
from quant import DEFAULT_EXEMPT, PRESETS, SCHEMES, Preset, QuantEmbedding, Ranges, Rule, Scheme, TensorSpec
from quant.gemm import BLOCKS

NONE = "none"  # the scheme of a rule whose layers stay unquantized
SOURCE = "source"  # the schemes and layers of a quantized model.path
TIED = "tied"  # lm_head has the weight, codes and scales of the embeddings
QUANTIZES = Condition(
    "fake quant is on at some step (quant.fake_quant_start 0 or more, or an event)", lambda r: not r.never_quantizes()
)


def some_scheme(words: str, has: "Callable[[QuantRecipe], object]") -> Condition:
    """Create the condition that ``has`` is true for the recipe's quant section. ``words``, for the error, say what a
    scheme must have. The condition also holds if a scheme is invalid or unknown, as other checks report that."""
    return Condition(
        f"a scheme here has {words} (quant.scheme is {{quant.scheme}})",
        lambda r: not r.quant.known() or has(r.quant),
    )


def _some(words: str, has: Callable[[Scheme], object]) -> Condition:
    return some_scheme(words, lambda quant: any(map(has, quant.linear_schemes())))


QUANTIZED_WEIGHTS = _some("quantized weights", bool)
_SIGNS = some_scheme(
    "symmetric integer weights",
    lambda quant: any(quant.ranges().signs(scheme.weights) for scheme in quant.linear_schemes()),
)
_STORED_INPUTS = some_scheme("stored scales of inputs", lambda quant: quant.stores_input_scales())
QUANTIZED_CACHE = some_scheme("quantized keys and values", lambda quant: quant.quantizes_cache())
LEARNED_INPUTS = some_scheme(
    "scales of activations that can be learned",
    lambda quant: quant.learns_input_scales() or quant.quantizes_cache(),
)
_STATIC_INPUTS = _some("static scales of inputs", lambda scheme: scheme.activations and not scheme.activations.dynamic)
_GLOBAL_INPUTS = some_scheme("global scales of inputs", lambda quant: quant.has_global_input_scales())
_DYNAMIC_FLOATS = _some(
    "dynamic inputs in fp4 or fp8",
    lambda scheme: scheme.activations and scheme.activations.dynamic and scheme.activations.dtype != "int",
)
_GATHERED_CODES = some_scheme(
    "one scale per tensor or row and no zero points", lambda quant: quant.has_weights_to_gather_as_codes()
)
_FP8_GEMM = Condition(
    "an fp8 GEMM runs: quant.compute auto or fp8_gemm, model.dtype bfloat16, and a scheme with fp8 codes per tensor on "
    "both sides (quant.scheme is {quant.scheme})",
    lambda r: (
        not r.quant.known()
        or (r.quant.compute != "simulate" and r.model.dtype == "bfloat16" and r.quant.has_fp8_gemm())
    ),
)
_PERCENTILE = Condition("quant.input_range is percentile", lambda r: r.quant.input_range == "percentile")
_CHECKPOINT = path_or_name("the directory of a PTQ checkpoint, or null")
_START = Condition("quant.start is set", lambda r: r.quant.start is not None)
_ROTATES = Condition("quant.rotate names layers", lambda r: r.quant.rotate)


@dataclass
class SchemeRecipe:
    """A scheme of the recipe's own (quant.schemes): number formats of weights and inputs."""

    weights: TensorSpec
    """Quantization of the weights."""
    activations: TensorSpec | None = None
    """Quantization of the inputs. null: not quantized."""

    def scheme(self, name: str) -> Scheme:
        """Convert to a :class:`quant.Scheme` of this name. Raises ValueError for an invalid combination."""
        return Scheme(name, self.weights, self.activations)


@dataclass
class RuleRecipe:
    """A scheme for the layers whose name matches ``layers`` (null: any), and that are in the first or last decoder
    layers if ``first`` or ``last`` is given."""

    scheme: str
    """Name of a scheme, as for quant.scheme; none: the layers stay unquantized."""
    layers: str | None = field(default=None, metadata=regex())
    """Regex on the whole module name. null: any."""
    first: int | None = field(default=None, metadata=at_least(1))
    """Number of decoder layers at the beginning of the model. null: any."""
    last: int | None = field(default=None, metadata=at_least(1))
    """Number of decoder layers at the end of the model. null: any."""


@dataclass
class QuantRecipe:
    """Schemes of the layers, sources of the initial scales, and start of fake quant."""

    scheme: str = "fp8_static"
    """Number format and granularity of weights, inputs and KV cache: a name of quant.spec.PRESETS or quant.schemes.
    source: each layer has its scheme in the quantized checkpoint, which is quant.start or else model.path."""
    schemes: dict[str, SchemeRecipe] = field(default_factory=dict)
    """Your own schemes by name. Each has weights and optionally activations, both with the fields of
    quant.spec.TensorSpec: dtype, bits, granularity, group_size, symmetric, dynamic, ggml, narrow and mx."""
    rules: list[RuleRecipe] = field(default_factory=list)
    """Mixed precision: the first rule that matches a layer decides, like {first: 3, scheme: w4a16_g128}. Exempt layers
    stay unquantized; layers that no rule matches get quant.scheme."""
    lm_head: str | None = None
    """Scheme of lm_head, for weights only, such as w8a16_channel. tied: the same weight, codes and scales as the
    embeddings, in a model that ties them. null: lm_head stays unquantized."""
    embedding: str | None = None
    """Scheme of the token embeddings, for weights only. null: they stay unquantized."""
    exempt: list[str] = field(default_factory=lambda: list(DEFAULT_EXEMPT), metadata=each(regex()))
    """Regexes; a linear layer whose whole module name matches one stays unquantized. Replaces the default list."""
    exempt_more: list[str] = field(default_factory=list, metadata=each(regex()))
    """Regexes in addition to quant.exempt, whose default list stays in force."""
    scales: str | None = field(default=None, metadata=_CHECKPOINT | only_with(QUANTIZES) | {HUB: "scales"})
    """Directory of a PTQ checkpoint, or a name like model.path, to take the scales from. null: weights are measured,
    activations calibrated."""
    start: str | None = field(default=None, metadata=_CHECKPOINT | {HUB: "model"})
    """Directory, or a name like model.path, of a quantized checkpoint of the model in model.path (GPTQ, AWQ, AutoRound,
    ...): training starts from the weights of model.path and the scales of this checkpoint. null: none."""
    snap_to_codes: bool = field(default=False, metadata=only_with(_START))
    """true: each weight of model.path that rounds to another code than in quant.start is set to the value of that code,
    so step 0 computes with the weights of quant.start."""
    init: Literal["rtn", "gptq", "blockwise"] = field(default="rtn", metadata=only_with(QUANTIZED_WEIGHTS))
    """First codes. rtn: each weight is rounded to nearest. gptq: codes that preserve the outputs of each layer on
    quant.calibration_batches micro-batches per rank (GPTQ); weights that round to other codes are set to the values of
    these codes. blockwise: after gptq, the weights and scales of each decoder layer are trained for 200 steps to
    preserve its outputs. This is the best PTQ, and takes the time of some 180 training steps. gptq and blockwise
    support symmetric and asymmetric weights with scales per group or channel. Meanwhile keys and values are not
    quantized; with gptq, inputs with stored scales are not quantized either."""
    weight_range: Literal["auto", "absmax", "mse"] = field(default="auto", metadata=only_with(QUANTIZED_WEIGHTS))
    """First scale of a weight: absmax: the largest magnitude fits; mse: the squared error is smallest; auto: mse for
    integers of 3 bits and fewer without quant.scales_follow_weights, absmax for the others."""
    decoupled_scales: bool = field(default=False, metadata=only_with(QUANTIZES, QUANTIZED_WEIGHTS))
    """true: the codes of a frozen weight are chosen with another learned scale than the stored one, which alone is
    exported: code = round(c * w / s), weight = code * s. For learnable.weight false, in FP4 above all. Embeddings and
    lm_head keep one scale. See docs/schemes.md."""
    signed_scales: bool = field(default=False, metadata=only_with(_SIGNS))
    """true: a scale of symmetric integer weights is negative where that makes use of the code without a counterpart
    (-2 at 2 bits): 20% less squared error at 2 bits. transformers, llama.cpp and MLX multiply by negative scales, too;
    see docs/schemes.md."""
    input_range: Literal["absmax", "percentile", "mse"] = field(default="absmax", metadata=only_with(_STORED_INPUTS))
    """Criterion of an input's stored scale, on the inputs of the calibration. absmax: the largest magnitude fits;
    percentile: quant.percentile of the magnitudes fit; mse: the squared error is smallest."""
    percentile: float = field(
        default=99.99,
        metadata=values("above 0 and at most 100", lambda percentage: 0 < percentage <= 100) | only_with(_PERCENTILE),
    )
    """Percentage of an input's magnitudes that fit, for quant.input_range percentile."""
    input_headroom: float = field(default=1.0, metadata=at_least(1, 64) | only_with(_GLOBAL_INPUTS))
    """Factor on the largest magnitude of an NVFP4 input in the calibration: the global scale fits inputs that are this
    much larger. Larger ones saturate. A power of two changes no other code. See docs/schemes.md."""
    scales_follow_weights: bool = field(default=False, metadata=only_with(QUANTIZES, QUANTIZED_WEIGHTS))
    """true: the weights' scales are measured again after every step, from absmax. With
    learnable.weight_scale this is learnable weight clipping (LWC), without it plain absmax quantization."""
    calibration_batches: int = derived(lambda r: r.quant.default_calibration(), at_least(0))
    """Micro-batches per rank that calibrate the activation scales which no PTQ checkpoint provides. 0: none. null:
    16; 0 with quant.initial_input_scale."""
    initial_input_scale: float | None = field(default=None, metadata=FACTOR | only_with(_STORED_INPUTS))
    """Value of the activation scales that no PTQ checkpoint provides, instead of calibration."""
    compute: Literal["auto", "simulate", "fp8_gemm"] = field(
        default="auto",
        metadata=only_with(Condition(QUANTIZES.words, lambda r: r.quant.compute == "simulate" or QUANTIZES.holds(r))),
    )
    """simulate: fake-quantized operands in a GEMM of model.dtype; fp8_gemm: a GEMM of the fp8 codes (serving numerics)
    on fp8 tensor cores; auto: fp8_gemm where scheme and GPU allow it (compute capability 8.9; stacked experts 9.0)."""
    fp8_fast_accum: bool = field(default=True, metadata=only_with(QUANTIZES, _FP8_GEMM))
    """Accumulation of the fp8 GEMM. true: Hopper's tensor cores sum all products in fewer bits than fp32, as in vLLM;
    false: sums are added in fp32 every 128 products, which takes up to 9% longer on an H100, for stacked experts three
    times as long. CPUs and Blackwell add in fp32 either way. See docs/how_a_layer_computes.md."""
    keep_codes: bool = field(default=False, metadata=only_with(QUANTIZES, _DYNAMIC_FLOATS))
    """true: a layer saves fp4 or fp8 inputs with dynamic scales for backward as codes and scales, which take 0.5 to 1.1
    bytes per element instead of two or four, and decodes them in backward. Training is the same bit for bit. Inputs
    that fused attention saves anyway (inputs of o_proj) are saved unquantized."""
    fuse_norms: bool = field(default=False, metadata=only_with(QUANTIZES, _STATIC_INPUTS))
    """true: norms and SwiGLU of Llama, Mistral, Qwen2 and Qwen3 write the input codes of the next layers in one
    operator, where these layers have static scales that do not learn. Takes less time and memory, and rounds
    differently from torch's norm. See docs/how_a_layer_computes.md."""
    quantized_all_gather: bool = field(default=False, metadata=only_with(QUANTIZES, _GATHERED_CODES))
    """true: ZeRO-3 gathers the weights of quantized layers as codes, one byte each instead of two or four, where a
    layer has one scale per tensor or row and 8 bits or fewer. Training is the same bit for bit if scales do not learn.
    See ds_configs/README.md."""
    rotate: list[str] = field(default_factory=list, metadata=each(regex()) | only_with(QUANTIZES))
    """Regexes on whole names of layers whose inputs are rotated by a Hadamard matrix while the model runs, like
    '.*\\.down_proj': outliers are spread over their blocks. Weights are rotated when they are loaded, so the model
    computes the same function. See docs/rotations.md."""
    rotate_block: int = field(
        default=256,
        metadata=values(f"one of {', '.join(map(str, BLOCKS))}", BLOCKS.__contains__) | only_with(_ROTATES),
    )
    """Features that quant.rotate rotates together."""
    fake_quant_start: int = field(default=0, metadata=at_least(-1))
    """Optimizer step at which fake quant switches on (scales are then measured again). 0: from the start; -1: never,
    or when an event under schedule says so."""

    def default_calibration(self) -> int:
        """Return the default number of micro-batches per rank for calibration: 16, or 0 if the recipe gives the initial
        scale of inputs and quant.init needs no samples."""
        return 0 if self.initial_input_scale is not None and self.init == "rtn" else 16

    def problems(self) -> Iterator[str]:
        """Yield a line for each invalid scheme under quant.schemes, each scheme name that is taken, unknown or not for
        its place, each rule for every layer, and each contradiction to quant.scheme source or quant.lm_head tied."""
        if wrong := [problem for name, own in self.schemes.items() for problem in _problems_of_scheme(name, own)]:
            yield from wrong
            return  # the checks below need valid schemes
        if self.scheme == SOURCE:
            yield from self._problems_beside_source()
        if self.scheme not in (known := [*PRESETS, *self.schemes]):
            yield f"quant.scheme: {self.scheme!r}, expected one of {', '.join(known)}"
        for index, rule in enumerate(self.rules):
            yield from self._problems_of_rule(f"quant.rules[{index}]", rule)
        for place in ("lm_head", "embedding"):
            if getattr(self, place) not in (None, TIED):
                yield from self._problems_of_place(place)
        if self.lm_head == TIED and self.embedding in (None, TIED):
            yield "quant.embedding: null, expected the scheme of the weight that is tied (quant.lm_head is tied)"
        for key in ("start", "scales"):
            expected = "null with quant.lm_head tied: that checkpoint has two quantized weights"
            yield from need(
                self.lm_head != TIED or not getattr(self, key), f"quant.{key}", getattr(self, key), expected
            )

    def _problems_beside_source(self) -> Iterator[str]:
        expected = "[] with quant.scheme source, which sets the schemes of all layers"
        for key in ("rules", "lm_head", "embedding"):
            yield from need(not getattr(self, key), f"quant.{key}", getattr(self, key), expected)
        expected = "{}: with quant.scheme source the scales come from the files, and this option measures them again"
        start, follow = self.fake_quant_start, self.scales_follow_weights
        yield from need(start <= 0, "quant.fake_quant_start", start, expected.format(0))
        yield from need(not follow, "quant.scales_follow_weights", follow, expected.format("false"))

    def _problems_of_rule(self, key: str, rule: RuleRecipe) -> Iterator[str]:
        schemes = [NONE, *SCHEMES, *self.schemes]
        yield from need(rule.scheme in schemes, f"{key}.scheme", rule.scheme, f"one of {', '.join(schemes)}")
        if rule.layers is None and rule.first is None and rule.last is None:
            yield f"{key}: every layer, expected layers, first or last (quant.scheme is for every layer)"

    def _problems_of_place(self, place: str) -> Iterator[str]:
        schemes = {one: self._scheme(one) for one in (*SCHEMES, *self.schemes)}
        good = [one for one, scheme in schemes.items() if scheme.activations is None]
        if place == "embedding":
            good = [one for one in good if QuantEmbedding.takes(schemes[one])]
        name = getattr(self, place)
        yield from need(name in good, f"quant.{place}", name, f"one of {', '.join(good)}")

    def _scheme(self, name: str) -> Scheme:
        """Look up a scheme by name, among the presets and quant.schemes."""
        return SCHEMES[name] if name in SCHEMES else self.schemes[name].scheme(name)

    def own_weights(self) -> list[TensorSpec]:
        """List the weight specs of the recipe's own schemes."""
        return [own.weights for own in self.schemes.values()]

    def preset(self) -> Preset:
        """Return the preset of quant.scheme; a scheme of the recipe's own becomes a preset that does not quantize the
        KV cache."""
        return PRESETS[self.scheme] if self.scheme in PRESETS else Preset(self._scheme(self.scheme))

    def default_scheme(self) -> Scheme | None:
        """Return the scheme of Linears that no rule matches; None if the preset quantizes the KV cache alone, or with
        quant.scheme source, where each Linear has its scheme in the checkpoint."""
        return None if self.scheme == SOURCE else self.preset().linear

    def chosen_rules(self) -> list[Rule]:
        """Convert quant.rules to :class:`quant.Rule` objects."""
        return [
            Rule(None if rule.scheme == NONE else self._scheme(rule.scheme), rule.layers, rule.first, rule.last)
            for rule in self.rules
        ]

    def ranges(self) -> Ranges:
        """Return the criteria by which scales are chosen: largest magnitude, percentile or squared error."""
        weights = "absmax" if self.scales_follow_weights else self.weight_range
        return Ranges(weights, self.signed_scales, self.input_range, self.percentile, self.input_headroom)

    def scales_brought_by(self) -> str | None:
        """Return the key of the option that provides the initial weight scales, like ``quant.start``; None if they are
        measured from the weights."""
        brought = {
            "quant.init": self.init != "rtn",
            "quant.start": bool(self.start),
            "quant.scales": bool(self.scales),
            "quant.scheme source": self.scheme == SOURCE,
        }
        return next((key for key, used in brought.items() if used), None)

    def head_scheme(self) -> Scheme | None:
        """Return the scheme of lm_head; None: not quantized."""
        if self.lm_head == TIED:
            return self.embedding_scheme()
        return None if self.lm_head is None else self._scheme(self.lm_head)

    def unties(self) -> bool:
        """Tell if tied lm_head and embeddings must become two weights: at least one of them is quantized, and
        quant.lm_head does not say that they stay tied."""
        return self.lm_head != TIED and (self.lm_head is not None or self.embedding is not None)

    def embedding_scheme(self) -> Scheme | None:
        """Return the scheme of the token embeddings; None: not quantized."""
        return None if self.embedding is None else self._scheme(self.embedding)

    def linear_schemes(self) -> list[Scheme]:
        """List all schemes that layers, lm_head and embeddings may get, each once; empty if the section has
        :meth:`problems`."""
        if not self.known():
            return []
        rules = [rule.scheme for rule in self.chosen_rules()]
        found = [self.preset().linear, *rules, self.head_scheme(), self.embedding_scheme()]
        if self.scheme == SOURCE:
            found += [self._scheme(name) for name in self.schemes]
        return list(dict.fromkeys(scheme for scheme in found if scheme is not None))

    def known(self) -> bool:
        """Tell if the section has no :meth:`problems`: all schemes exist and are valid."""
        return not any(True for _ in self.problems())

    def quantizes_activations(self) -> bool:
        """Tell if the scheme of some layer quantizes inputs, or the preset quantizes the KV cache."""
        return any(scheme.activations for scheme in self.linear_schemes()) or self.stores_input_scales()

    def stores_input_scales(self) -> bool:
        """Tell if scales of inputs or of the KV cache are stored: static scales, or the global scale of dynamic scales
        (NVFP4). They are calibrated or read from files."""
        return any(scheme.stored_input for scheme in self.linear_schemes()) or self.quantizes_cache()

    def decouples(self) -> bool:
        """Tell if weights are rounded to codes by one scale and decoded by another (``quant.decoupled_scales``)."""
        return self.decoupled_scales and bool(self.linear_schemes())

    def quantizes_cache(self) -> bool:
        """Tell if the KV cache (keys and values of attention) is quantized."""
        return self.known() and self.preset().kv_cache is not None

    def learns_input_scales(self) -> bool:
        """Tell if the input scales of some layer can be learned: static scales can, the global scale of dynamic scales
        (NVFP4) cannot."""
        return any(scheme.learns_input for scheme in self.linear_schemes())

    def has_global_input_scales(self) -> bool:
        """Tell if some layer stores a global scale in addition to the dynamic scales of its input (NVFP4)."""
        return any(scheme.stored_input and not scheme.learns_input for scheme in self.linear_schemes())

    def has_fp8_gemm(self) -> bool:
        """Tell if the fp8 GEMM can multiply the codes of some layer."""
        return any(scheme.has_fp8_gemm for scheme in self.linear_schemes())

    def has_weights_to_gather_as_codes(self) -> bool:
        """Tell if quant.quantized_all_gather can gather the weight of some layer as codes: with one scale per tensor or
        row, and no zero points."""
        chosen = [self.preset().linear, *(rule.scheme for rule in self.chosen_rules())] if self.known() else []
        chosen += [self._scheme(name) for name in self.schemes] if self.scheme == SOURCE else []
        weights = [scheme.weights for scheme in chosen if scheme is not None]
        return any(spec.granularity in ("tensor", "channel") and spec.symmetric for spec in weights)


def _problems_of_scheme(name: str, own: SchemeRecipe) -> Iterator[str]:
    """Yield problem lines of a scheme under quant.schemes: its name is taken, or it is invalid."""
    if name in PRESETS or name in (NONE, TIED):
        yield f"quant.schemes.{name}: this name is taken, expected a name other than {NONE}, {TIED} and the presets'"
    try:
        own.scheme(name)
    except ValueError as error:
        yield f"quant.schemes.{name}: {error}"
