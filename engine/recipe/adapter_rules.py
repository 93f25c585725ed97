"""Rules between the knobs of adapters and those of other sections, each said in one line."""

from engine.recipe.rules import Rule

RULES_OF_ADAPTERS = (
    Rule(
        "targets are those of adapters",
        "adapter.targets",
        lambda r: not r.adapter.on and r.adapter.targets,
        "nothing, or adapter.kind lora: there are no adapters",
    ),
    Rule(
        "ranks are those of adapters",
        "adapter.ranks",
        lambda r: not r.adapter.on and r.adapter.ranks,
        "nothing, or adapter.kind lora: there are no adapters",
    ),
    Rule(
        "adapters train in place of the weights",
        "learnable.weight",
        lambda r: r.adapter.on and r.learnable.weight,
        "false with adapter.kind {adapter.kind}, which trains adapters in place of the weights",
    ),
    Rule(
        "merged weights are quantised at some time",
        "quant.fake_quant_start",
        lambda r: r.adapter.on and r.never_quantises(),
        "0 or more with adapter.kind {adapter.kind}: without fake quant the export is a plain checkpoint, into which "
        "adapters are not merged yet",
        found="-1 (never)",
    ),
    Rule(
        "layers with adapters are not compiled",
        "train.compile",
        lambda r: r.adapter.on and r.train.compile,
        "false with adapter.kind {adapter.kind}, whose gradients torch.compile cannot trace",
    ),
    Rule(
        "weights that are gathered as codes are not merged",
        "quant.gather_codes",
        lambda r: r.adapter.on and r.quant.gather_codes,
        "false with adapter.kind {adapter.kind}: the codes are those of the sum of weight and adapter, which no rank "
        "has before the layer runs",
    ),
)
