"""Rules of a run that never switches fake quant on, as a reference beside a quantized run: what says how quantized
layers compute, travel or learn never acts there, and is refused.

What says which layers would be quantized, and how finely (``quant.scheme``, its rules, ranges and calibration), may
stay, so that such a run differs from the one beside it in ``quant.fake_quant_start`` alone.
"""

from operator import attrgetter

from engine.config.rules import Rule

# The values that a run without fake quant has of these options.
UNQUANTIZED: dict[str, object] = {
    "quant.scales": None,
    "quant.scales_follow_weights": False,
    "quant.compute": "auto",
    "quant.fp8_fast_accum": True,
    "quant.keep_codes": False,
    "quant.fuse_norms": False,
    "quant.quantized_all_gather": False,
    "learnable.act_scale": False,
}
_ALSO = {"quant.compute": ("simulate",)}  # as all of it computes, without codes


def _rule(key: str, value: object) -> Rule:
    value_of, good = attrgetter(key), (value, *_ALSO.get(key, ()))
    shown = "null" if value is None else str(value).lower()
    return Rule(
        f"{key} is of layers that quantize at some time",
        key,
        lambda r: r.never_quantizes() and value_of(r) not in good,
        f"{shown}: with quant.fake_quant_start -1, and no event that switches fake quant on, it never acts",
    )


RULES_OF_UNQUANTIZED = (
    *(_rule(key, value) for key, value in UNQUANTIZED.items()),
    Rule(
        "a plain checkpoint has the plain format",
        "export.format",
        lambda r: r.never_quantizes() and r.export.format not in ("compressed", "dequantized", "peft", "gguf"),
        "compressed or dequantized: with quant.fake_quant_start -1, and no event that switches fake quant on, the "
        "export is a plain checkpoint",
    ),
)
