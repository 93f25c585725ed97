"""Rules of fp8 codes that are multiplied: how their products add up, each said in one line."""

from engine.config.rules import Rule

RULES_OF_GRADIENTS = (
    Rule(
        "fast sums are of layers that multiply codes",
        "quant.fp8_fast_accum",
        lambda r: not r.quant.fp8_fast_accum and r.quant.compute == "simulate",
        "true: quant.compute {quant.compute} has no fp8 GEMM",
    ),
    Rule(
        "fast sums are of schemes with an fp8 GEMM",
        "quant.fp8_fast_accum",
        lambda r: not r.quant.fp8_fast_accum and r.quant.known() and not r.quant.has_fp8_gemm(),
        "true: quant.scheme {quant.scheme} has no fp8 codes per tensor on both sides",
    ),
    Rule(
        "fast sums are of bfloat16",
        "quant.fp8_fast_accum",
        lambda r: not r.quant.fp8_fast_accum and r.model.dtype != "bfloat16",
        "true: the fp8 GEMM gives bfloat16, model.dtype is {model.dtype}",
    ),
)
