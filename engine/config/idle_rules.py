"""Rules of options that would do nothing for want of what they are options of, each said in one line: a recipe says
nothing that never happens."""

from operator import attrgetter

from engine.config.rules import Rule


def _of_adapters(name: str, default: object) -> Rule:
    value_of = attrgetter(f"adapter.{name}")
    return Rule(
        f"{name} is of adapters",
        f"adapter.{name}",
        lambda r: not r.adapter.on and value_of(r) != default,
        f"{str(default).lower()}, or adapter.kind lora: there are no adapters",
    )


RULES_OF_IDLE = (
    Rule(
        "ranges of weights are of weights that are quantized",
        "quant.weight_range",
        lambda r: (
            r.quant.weight_range != "auto"
            and not r.quant.scales_follow_weights  # which is refused itself
            and r.quant.known()
            and not r.quant.linear_schemes()
        ),
        "auto: quant.scheme {quant.scheme} quantizes no weights",
    ),
    Rule(
        "percentages are of inputs that percentiles measure",
        "quant.percentile",
        lambda r: r.quant.percentile != 99.99 and r.quant.input_range != "percentile",
        "99.99 with quant.input_range {quant.input_range}, or quant.input_range percentile",
    ),
    Rule(
        "scales that are given are used before they are measured",
        "quant.initial_input_scale",
        lambda r: r.quant.initial_input_scale is not None and r.quant.fake_quant_start > 0 and r.invalidates(),
        "null with quant.fake_quant_start {quant.fake_quant_start}: what trains until then measures the scales again",
    ),
    _of_adapters("rank", 16),
    _of_adapters("alpha", 32.0),
    _of_adapters("rslora", False),
    Rule(
        "rates of adapters have adapters",
        "optim.adapter_lr",
        lambda r: r.optim.adapter_lr is not None and not r.adapter.on,
        "null, or adapter.kind lora: there are no adapters",
    ),
    Rule(
        "rates of embeddings have embeddings that train",
        "optim.embedding_lr",
        lambda r: r.optim.embedding_lr is not None and not (r.learnable.weight and r.learnable.embedding),
        "null, or learnable.weight and learnable.embedding true: embeddings do not train",
    ),
    Rule(
        "rates of norms have norms that train",
        "optim.norm_lr",
        lambda r: r.optim.norm_lr is not None and not r.learnable.norm,
        "null, or learnable.norm true: norms do not train",
    ),
    Rule(
        "rates of activation scales have scales that train",
        "optim.act_scale_lr",
        lambda r: r.optim.act_scale_lr is not None and not r.learnable.act_scale,
        "null, or learnable.act_scale true: activation scales do not train",
    ),
    Rule(
        "student and teacher are compared where there is a teacher",
        "loss.diagnostics_every",
        lambda r: r.loss.diagnostics_every > 0 and not r.distils(),
        "0, or a loss.kd_weight above 0: there is no teacher to compare with",
    ),
    Rule(
        "plain text is cut into samples",
        "data.too_long",
        lambda r: r.data.kind != "chat" and r.data.too_long != "drop",
        "drop with data.kind {data.kind}, whose samples have data.max_length tokens",
    ),
    Rule(
        "files to evaluate on are evaluated on",
        "data.eval",
        lambda r: any(r.data.eval) and not r.eval.every,
        "no files, or eval.every above 0: nothing is evaluated",
    ),
    Rule(
        "the best checkpoint has been evaluated",
        "eval.best",
        lambda r: r.eval.best != "lm" and not r.eval.every,
        "lm, or eval.every above 0: nothing is evaluated",
    ),
)
