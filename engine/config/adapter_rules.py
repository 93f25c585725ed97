"""Rules between the options of adapters and those of other sections, each said in one line."""

from engine.config.rules import Rule

# What may train beside adapters that are merged.
SHARED = ("weight_scale", "act_scale", "norm", "router")
# Formats of which an adapter can lie beside the model, or alone (peft).
BESIDE = ("compressed", "vllm_fp8", "dequantized", "peft")

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
        "merge is of adapters",
        "adapter.merge",
        lambda r: not (r.adapter.on or r.adapter.merge),
        "true, or adapter.kind lora: there are no adapters",
    ),
    Rule(
        "an adapter to start from is one of adapters",
        "adapter.start",
        lambda r: not r.adapter.on and r.adapter.start is not None,
        "null, or adapter.kind lora: there are no adapters",
    ),
    Rule(
        "the error of quantization is what an adapter beside it can hold",
        "adapter.init",
        lambda r: r.adapter.init == "error" and (not r.adapter.beside or r.adapter.start is not None),
        "zeros, or adapter.kind lora with adapter.merge false and no adapter.start",
    ),
    Rule(
        "the model that many adapters share stays as it is",
        "learnable",
        lambda r: r.adapter.beside and any(getattr(r.learnable, name) for name in SHARED),
        f"{', '.join(SHARED)} to be false with adapter.merge false: the model is served with other adapters too",
        found="more than adapters learns",
    ),
    Rule(
        "what is dropped is the input of an adapter beside its weight",
        "adapter.dropout",
        lambda r: r.adapter.dropout and not r.adapter.beside,
        "0, or adapter.kind lora with adapter.merge false: an adapter that is merged has no input of its own",
    ),
    Rule(
        "codes are the base of an adapter beside them",
        "adapter.base",
        lambda r: r.adapter.base == "quantized" and not r.adapter.beside,
        "weights, or adapter.kind lora with adapter.merge false: a sum with an adapter has other codes",
    ),
    Rule(
        "codes come from the checkpoint that is read",
        "adapter.base",
        lambda r: r.adapter.base == "quantized" and (r.quant.start or r.quant.scales),
        "weights with quant.start or quant.scales; or codes with model.path alone, whose scales are read or measured",
    ),
    Rule(
        "codes are of the scales that they have",
        "adapter.base",
        lambda r: r.adapter.base == "quantized" and (r.quant.fake_quant_start != 0 or r.quant.scales_follow_weights),
        "weights; or codes with quant.fake_quant_start 0 and quant.scales_follow_weights false: weights that scales "
        "could be measured from are not there",
    ),
    Rule(
        "codes have no error that an adapter could hold",
        "adapter.init",
        lambda r: r.adapter.base == "quantized" and r.adapter.init == "error",
        "zeros with adapter.base codes: the weights are what the codes stand for",
    ),
    Rule(
        "readers multiply every adapter of a folder by lora_alpha / r",
        "adapter.ranks",
        lambda r: r.adapter.beside and r.adapter.ranks,
        "nothing with adapter.merge false: vLLM multiplies every layer's adapter by lora_alpha / r, with one r",
    ),
    Rule(
        "adapters stay beside layers of layouts whose readers take them",
        "export.format",
        lambda r: r.adapter.beside and r.export.format not in BESIDE,
        f"one of {', '.join(BESIDE)} with adapter.merge false",
    ),
    Rule(
        "an adapter alone is beside its base",
        "export.format",
        lambda r: r.export.format == "peft" and not r.adapter.beside,
        "another format, or adapter.kind lora with adapter.merge false: there is no adapter to write",
    ),
    Rule(
        "merged weights are quantized at some time",
        "quant.fake_quant_start",
        lambda r: r.adapter.on and r.never_quantizes(),
        "0 or more with adapter.kind {adapter.kind}: without fake quant the export is a plain checkpoint, into which "
        "adapters are not merged, and beside which none is written",
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
        "quant.quantized_all_gather",
        lambda r: r.adapter.on and r.quant.quantized_all_gather,
        "false with adapter.kind {adapter.kind}: the codes are those of the sum of weight and adapter, which no rank "
        "has before the layer runs",
    ),
)
