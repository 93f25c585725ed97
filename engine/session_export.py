"""Export of the session's model as a checkpoint for servers and other libraries."""

import os
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedModel

from data.loader import MicroBatch
from engine.config.config import Recipe
from engine.config.errors import RecipeError, parse_size
from engine.config.hub import named
from engine.config.quant import SOURCE
from engine.fake_quant import FakeQuant
from engine.session.session import Session
from model.checkpoint.fingerprint import digest_of_checkpoint
from model.peft import collect_adapter
from model.quantized.quantization_config import read_quantization_config, source_layout
from model.ranks import listed, say
from model.save.export_model import check_plan, export_model
from model.save.loadable import not_loaded
from quant import Quantization
from quant.formats.layouts import Layout, check_layout


def check_export(recipe: Recipe) -> None:
    """Check before training that layout and destination of the export can be written. Raises RecipeError."""
    _check_format(recipe)
    directory, output = recipe.export_dir(), Path(recipe.output_dir)
    problem, there, held = None, Path(os.path.realpath(directory)), Path(os.path.realpath(output))
    if any(map(Path.is_symlink, (directory, there, *there.parents))):  # a finished export is renamed to this path
        problem = "it is a link, or behind one that is broken; name a directory"
    elif there == held or there in held.parents:
        problem = f"it contains output_dir ({str(output)!r}); name a directory of its own"
    elif directory.is_dir() and any(directory.iterdir()):
        problem = "it is not empty: name another directory (or output_dir, if it lies there), or remove it"
    elif directory.exists() and not directory.is_dir():
        problem = "it is a file; name a directory"
    else:
        above = next(parent for parent in there.parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            problem = f"{str(above)!r} is not a writable directory"
    if problem is not None:
        raise RecipeError(f"export.dir: {str(directory)!r}: {problem}")


def _check_format(recipe: Recipe) -> None:
    """Refuse options that contradict export.format, and a missing template or package. Raises RecipeError."""
    layout, dtype = layout_of(recipe), recipe.model.dtype
    if recipe.export.format == SOURCE:  # the checks below are those of the source's format
        assert layout is not None
        recipe = replace(recipe, export=replace(recipe.export, format=layout))
    name = recipe.export.format
    if layout is not None:
        try:
            check_layout(layout, recipe.quant.linear_schemes())
        except ValueError as error:
            raise RecipeError(f"export.format: {error}") from None
    elif recipe.quant.scheme != SOURCE:
        raise RecipeError(
            f"quant.scheme: {recipe.quant.scheme!r}, expected {SOURCE!r} with export.format peft, and a quantized "
            "checkpoint in model.path, with which the adapter is served: launch/calibrate.py makes one. Or choose "
            "export.format compressed, which writes the quantized model with the adapter in it"
        )
    stored_in_dtype = any(not (each.weights.ggml or each.weights.mx) for each in recipe.quant.linear_schemes())
    if name in ("gguf", "mlx") and dtype == "float32" and stored_in_dtype:
        others = ", or q4_0 and q8_0 for all layers" if name == "gguf" else ""
        raise RecipeError(
            f"model.dtype: float32, expected bfloat16 or float16{others}: export.format {name} cannot store fp32 "
            "scales exactly"
        )
    if name == "executorch" and dtype != "bfloat16":
        raise RecipeError(
            f"model.dtype: {dtype}, expected bfloat16: export.format executorch is for XNNPACK, which keeps scales in "
            "bf16"
        )
    if name == "executorch" and recipe.quant.signed_scales:
        raise RecipeError(
            "quant.signed_scales: true, expected false: export.format executorch is for XNNPACK, which needs positive "
            "scales"
        )
    if name == "gguf":
        template = _template(recipe)
        if template is None or not template.is_file():
            found = "null" if template is None else f"{str(template)!r} is not a file"
            raise RecipeError(
                f"export.template: {found}, expected a GGUF file of the base model (export.format gguf): make it with "
                "llama.cpp's convert_hf_to_gguf.py"
            )
        if find_spec("gguf") is None:
            raise RecipeError("export.format: gguf needs the package gguf: pip install -e '.[gguf]'")


def layout_of(recipe: Recipe) -> Layout | None:
    """Return the layout of the exported model; None if only an adapter is written. Raises RecipeError if export.format
    is source, and the source is not quantized, or has a format that exports cannot have."""
    name, source = recipe.export.format, Path(recipe.quant.start or recipe.model.path)
    if name != "source":
        return None if name == "peft" else name
    try:
        layout = source_layout(source)
    except ValueError as error:
        raise RecipeError(f"export.format: {SOURCE!r}, expected compressed or another format: {error}") from None
    if layout is None:
        method = read_quantization_config(source).get("quant_method")
        raise RecipeError(
            f"export.format: {SOURCE!r}, expected compressed or another format: {source} has quant_method {method!r}, "
            "which is not written"
        )
    return layout


def _template(recipe: Recipe) -> Path | None:
    return None if recipe.export.template is None else Path(recipe.export.template)


# Model types whose scales of keys and values vLLM drops: it serves fp8 caches with scales of 1.0 (its issue 54623; the
# loader of Qwen3-Next is the same). Prefixes, for the types of composite models and of their text parts.
CACHE_SCALES_DROPPED = ("qwen3_5", "qwen3_next")
# The Linear of multi-head latent attention that vLLM multiplies into the others (``get_and_maybe_dequant_weights``).
LATENT = ".kv_b_proj"


def check_exportable(recipe: Recipe, model: PreTrainedModel, quantization: Quantization) -> None:
    """Refuse, before training, a model whose export could not be written; a collective. Raises RankError on every
    rank. Warn if transformers could not load the export, or vLLM would compute something else. Do nothing if
    only an adapter is written."""
    layout = layout_of(recipe)
    if layout is None:
        return
    compressed = layout == "compressed" and not recipe.never_quantizes()
    if compressed and (reason := not_loaded(model, quantization)):
        say(
            f"warning: {reason}: the export will be one for vLLM and SGLang, and launch/verify.py will compare it with "
            "the weights that compressed-tensors decompresses. transformers loads export.format: dequantized"
        )
    kind = model.config.model_type
    if quantization.caches and layout != "dequantized" and kind.startswith(CACHE_SCALES_DROPPED):
        say(
            f"warning: vLLM drops the scales of keys and values of {kind} (its issue 54623) and serves them with 1.0: "
            "its results will differ from training. Choose a quant.scheme that does not quantize keys and values, or a "
            "server that reads k_scale and v_scale"
        )
    latent = [
        name for name, layer in quantization.layers.items() if name.endswith(LATENT) and layer.scheme.stored_input
    ]
    if latent and layout in ("compressed", "modelopt") and not recipe.never_quantizes():
        say(
            f"warning: vLLM reads the weights of {latent[0]} for decoding by sending 1.0 through its stored input "
            "scale, which rounds it: the weights get a factor, and results differ from training. Add '.*\\.kv_b_proj' "
            "to quant.exempt_more, or choose a scheme with dynamic or unquantized inputs"
        )
    check_plan(
        model,
        None if recipe.never_quantizes() else quantization,
        recipe.model.path,
        layout=layout,
        template=_template(recipe),
        trust_remote_code=recipe.model.trust_remote_code,
    )


def export(session: Session, directory: Path, *, compressed: bool = True) -> None:
    """Write the model (for export.format peft its adapter alone) to ``directory``, in the recipe's layout or, without
    ``compressed``, as a plain checkpoint; a collective. Raises RankError on every rank if a file cannot be written."""
    recipe, layout = session.recipe, layout_of(session.recipe)
    adapter = None
    if recipe.adapter.beside:
        adapter = collect_adapter(
            session.model,
            session.quantization,
            alpha=recipe.adapter.alpha,
            rslora=recipe.adapter.rslora,
            dropout=recipe.adapter.dropout,
            base_path=_base_path(recipe) if layout is None else str(directory.resolve()),
            base=digest_of_checkpoint(recipe.model.path),
        )
    if layout is None:
        assert adapter is not None, "checked by the recipe"
        adapter.publish(directory)
        say(f"export: {directory}, the adapter for {recipe.model.path}")
        return
    max_shard_size = parse_size(recipe.export.max_shard_size)
    assert max_shard_size is not None, "checked by the recipe"
    report = export_model(
        session.model,
        session.quantization if compressed else None,
        recipe.model.path,
        directory,
        layout=layout,
        template=_template(recipe),
        adapter=adapter,
        max_shard_size=max_shard_size,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    size = report.bytes / 1e6
    files = f"{len(report.files)} file{'s' * (len(report.files) != 1)}"
    if report.copied:
        say(f"export: {listed(report.copied)} copied from {recipe.model.path}")
    say(f"export: {report.path}, {report.tensors} tensors, {size:,.1f} MB in {files}, {report.seconds:.1f} s")


def _base_path(recipe: Recipe) -> str:
    """Return the base model to record in an adapter written alone: a directory, or a name on the Hugging Face Hub."""
    name = named(recipe.model.path)
    return str(Path(name).resolve()) if name == recipe.model.path else name.partition("@")[0]


def export_trained(
    session: Session, quant: FakeQuant, batches: Iterable[MicroBatch] = (), directory: Path | None = None
) -> None:
    """Write the trained model to ``directory``, the recipe's export directory by default; a collective.

    A run that never quantizes writes a plain checkpoint. If the last steps trained without fake quant, the scales are
    outdated and measured again first: input scales from their observers if these are on, else on ``batches``. Raises
    RankError on every rank if scales cannot be measured or a file cannot be written.
    """
    compressed = not session.recipe.never_quantizes() or quant.enabled
    if compressed and quant.any_stale:
        say("the last steps trained without fake quant: measuring the scales for the export again")
        quant.measure(batches)
    export(session, directory or session.recipe.export_dir(), compressed=compressed)
