"""Rules of what moves weights before the first step (``quant.init``, ``quant.snap_to_codes``) beside other
options, in the form of :mod:`engine.config.rules`."""

from engine.config.quant import SOURCE
from engine.config.rules import Rule, Sections
from quant.gptq import takes


def _chosen(recipe: Sections) -> bool:
    return recipe.quant.init != "rtn"


RULES_OF_INIT = (
    Rule(
        "codes are chosen of weights that are quantized",
        "quant.init",
        lambda r: _chosen(r) and r.quant.known() and not r.quant.linear_schemes(),
        "nearest: quant.scheme {quant.scheme} quantizes no weights",
    ),
    Rule(
        "codes that are read are not chosen",
        "quant.init",
        lambda r: _chosen(r) and (r.quant.start or r.quant.scales or r.quant.scheme == SOURCE),
        "nearest: the codes and scales are those of quant.start, quant.scales or quant.scheme source",
    ),
    Rule(
        "codes that are chosen stay",
        "quant.init",
        lambda r: _chosen(r) and (r.quant.fake_quant_start != 0 or r.quant.scales_follow_weights),
        "nearest with quant.fake_quant_start or quant.scales_follow_weights, which measure the scales again",
    ),
    Rule(
        "scales that are brought do not rest",
        "schedule",
        lambda r: (
            (_chosen(r) or r.quant.start)
            and r.invalidates()
            and any(event.fake_quant in (False, "activations") for event in r.schedule)
        ),
        "no event that turns fake quant of weights off: the scales of quant.init or quant.start would be "
        "measured again afterwards",
    ),
    Rule(
        "weights below adapters do not move",
        "quant.init",
        lambda r: _chosen(r) and r.adapter.on,
        "nearest: adapters leave the weights where they are",
    ),
    Rule(
        "a student that teaches itself starts as the original",
        "loss.teacher",
        lambda r: r.teacher_kind() == "self" and (_chosen(r) or r.quant.snap_to_codes),
        "a directory: quant.init {quant.init} and quant.snap_to_codes move the weights before the first "
        "step, so that the student would be taught by what it has become",
    ),
    Rule(
        "codes are chosen by samples",
        "quant.calibration_batches",
        lambda r: _chosen(r) and r.quant.calibration_batches == 0,
        "1 or more: quant.init {quant.init} looks at so many micro-batches per rank",
    ),
    Rule(
        "codes are chosen row by row",
        "quant.init",
        lambda r: (
            _chosen(r) and r.quant.known() and not all(takes(scheme.weights) for scheme in r.quant.linear_schemes())
        ),
        "nearest: a scheme here has a scale for several rows of a weight",
    ),
)
