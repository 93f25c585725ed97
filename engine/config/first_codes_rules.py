"""Rules of what moves weights before the first step (``quant.first_codes``, ``quant.start_inside``) beside other
knobs, in the form of :mod:`engine.config.rules`."""

from engine.config.quant import SOURCE
from engine.config.rules import Rule, Sections
from quant.gptq import takes


def _chosen(recipe: Sections) -> bool:
    return recipe.quant.first_codes != "nearest"


RULES_OF_FIRST_CODES = (
    Rule(
        "codes are chosen of weights that are quantized",
        "quant.first_codes",
        lambda r: _chosen(r) and r.quant.known() and not r.quant.linear_schemes(),
        "nearest: quant.scheme {quant.scheme} quantizes no weights",
    ),
    Rule(
        "codes that are read are not chosen",
        "quant.first_codes",
        lambda r: _chosen(r) and (r.quant.start or r.quant.scales or r.quant.scheme == SOURCE),
        "nearest: the codes and scales are those of quant.start, quant.scales or quant.scheme source",
    ),
    Rule(
        "codes that are chosen stay",
        "quant.first_codes",
        lambda r: _chosen(r) and (r.quant.fake_quant_start != 0 or r.quant.scales_follow_weights),
        "nearest with quant.fake_quant_start or quant.scales_follow_weights, which measure the scales again",
    ),
    Rule(
        "scales that are brought do not rest",
        "schedule",
        lambda r: (
            (_chosen(r) or r.quant.start)
            and r.outgrows()
            and any(event.fake_quant in (False, "activations") for event in r.schedule)
        ),
        "no event that turns fake quant of weights off: the scales of quant.first_codes or quant.start would be "
        "measured again afterwards",
    ),
    Rule(
        "weights below adapters do not move",
        "quant.first_codes",
        lambda r: _chosen(r) and r.adapter.on,
        "nearest: adapters leave the weights where they are",
    ),
    Rule(
        "a student that teaches itself starts as the original",
        "loss.teacher",
        lambda r: r.teacher_kind() == "self" and (_chosen(r) or r.quant.start_inside),
        "a directory: quant.first_codes {quant.first_codes} and quant.start_inside move the weights before the first "
        "step, so that the student would be taught by what it has become",
    ),
    Rule(
        "codes are chosen by samples",
        "quant.calibration_batches",
        lambda r: _chosen(r) and r.quant.calibration_batches == 0,
        "1 or more: quant.first_codes {quant.first_codes} looks at so many micro-batches per rank",
    ),
    Rule(
        "codes are chosen row by row",
        "quant.first_codes",
        lambda r: (
            _chosen(r) and r.quant.known() and not all(takes(scheme.weights) for scheme in r.quant.linear_schemes())
        ),
        "nearest: a scheme here has a scale for several rows of a weight",
    ),
)
