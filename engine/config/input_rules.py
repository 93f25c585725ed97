"""Rules of inputs that are turned, kept or multiplied as codes, or written as codes by norms, and of weights that are
gathered as codes, each in one line."""

from engine.config.quant import SOURCE
from engine.config.rules import Rule

RULES_OF_INPUTS = (
    Rule(
        "blocks are of inputs that are turned",
        "quant.rotate_block",
        lambda r: not r.quant.rotate and r.quant.rotate_block != 256,
        "256, or layers in quant.rotate: nothing is turned",
    ),
    Rule(
        "scales from files are of weights that are not turned",
        "quant.rotate",
        lambda r: r.quant.rotate and (r.quant.scheme == SOURCE or r.quant.scales or r.quant.start),
        "nothing with quant.scheme source, quant.scales or quant.start, whose scales are of weights as they lie there",
    ),
    Rule(
        "adapters are not of turned weights",
        "quant.rotate",
        lambda r: r.quant.rotate and r.adapter.on,
        "nothing with adapter.kind {adapter.kind}: an adapter of a turned weight has no reader",
    ),
    Rule(
        "turned inputs are read from one format",
        "export.format",
        lambda r: r.quant.rotate and r.export.format != "compressed",
        "compressed with quant.rotate: no reader of the others turns inputs",
    ),
    Rule(
        "a plain checkpoint has no turned inputs",
        "quant.fake_quant_start",
        lambda r: r.quant.rotate and r.never_quantizes(),
        "0 or more with quant.rotate: the export would be a plain checkpoint, whose readers turn no inputs",
    ),
    Rule(
        "codes are kept of dynamic floats",
        "quant.keep_codes",
        lambda r: r.quant.keep_codes and r.quant.known() and not r.quant.has_dynamic_floats(),
        "false: no scheme here has dynamic inputs in fp4 or fp8",
    ),
    Rule(
        "weights that travel as codes have one scale per tensor or row",
        "quant.quantized_all_gather",
        lambda r: r.quant.quantized_all_gather and r.quant.known() and not r.quant.has_weights_to_gather_as_codes(),
        "false: quant.scheme {quant.scheme} has scales per group or block, or zero points, which no rank has whole",
    ),
    Rule(
        "norms write codes of static scales",
        "quant.fuse_norms",
        lambda r: r.quant.fuse_norms and r.quant.known() and not r.quant.has_static_inputs(),
        "false: no scheme here has static scales of inputs",
    ),
    Rule(
        "norms write codes of scales that do not learn",
        "quant.fuse_norms",
        lambda r: r.quant.fuse_norms and r.learnable.act_scale,
        "false with learnable.act_scale: the gradient of a scale asks for what was quantized",
    ),
    Rule(
        "adapters read values",
        "quant.fuse_norms",
        lambda r: r.quant.fuse_norms and r.adapter.on,
        "false with adapter.kind {adapter.kind}: adapters were not tried beside inputs that are codes alone",
    ),
    Rule(
        "what is compiled is fused by the compiler",
        "quant.fuse_norms",
        lambda r: r.quant.fuse_norms and r.train.compile,
        "false with train.compile, which fuses norms itself",
    ),
)
