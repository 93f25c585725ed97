"""Write a model that ``quant/prepared.py`` quantized as a checkpoint, without the checkpoint that it was made from.

The configuration, generation configuration and tokenizer are written from memory into a temporary directory, which
:func:`model.save.export_model.export_model` gets as ``source_dir``.
"""

import copy
import tempfile
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from model.build import untied
from model.moe.arrange import find_experts
from model.ranks import alone, is_main, say
from model.save.export_model import ExportReport, export_model
from model.save.loadable import not_loaded
from model.zero import is_partitioned
from quant.formats.layouts import Layout
from quant.prepared import find_quantization


def save_quantized(
    model: PreTrainedModel,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    layout: Layout = "compressed",
    max_shard_size: int = 5 * 10**9,
) -> ExportReport | None:
    """Write a prepared or converted model (:mod:`quant.prepared`) as a checkpoint for the readers of ``layout``.

    Rank 0 writes, without a collective: call this function on rank 0 alone, or on all ranks.

    Args:
        model: whole on this rank, without wrappers such as DistributedDataParallel; it is only read.
        directory: directory to create.
        tokenizer: written too, with its chat template; None writes none.
        layout: format of quantized layers, see :mod:`quant.formats.layouts`; not ``gguf``, which needs a template.
        max_shard_size: bytes of tensors per file.

    Returns:
        The summary of the export; None on all ranks but rank 0.

    Raises:
        ValueError: the model is no transformers model, is partitioned, has no quantized layers or trained only some of
            them, has experts in transformers' own modules, or has separate parameters that its configuration ties.
        RankError: for the reasons of :func:`export_model`, on rank 0 only.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"the model is a {type(model).__name__}, expected one of transformers, without wrappers: pass model.module "
            "of DistributedDataParallel; for other modules write state_dict() after convert"
        )
    quantization = find_quantization(model)
    if any(is_partitioned(parameter) for parameter in model.parameters()):
        raise ValueError("the model is partitioned by ZeRO-3, expected whole weights: train it with launch/train.py")
    if experts := find_experts(model):
        raise ValueError(
            f"{experts[0][0]} is a {type(experts[0][1]).__name__} of transformers, which an export cannot write: call "
            "arrange_experts(model, 'stacked') of model.moe.arrange before prepare"
        )
    if problem := untied(model):
        raise ValueError(f"{problem}: tie them, or set tie_word_embeddings of the configuration to False")
    if not is_main():
        return None
    with tempfile.TemporaryDirectory() as source, alone():
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(source)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(source)
        if tokenizer is not None:
            tokenizer.save_pretrained(source)
        if layout == "compressed" and (reason := not_loaded(model, quantization)):
            say(f"warning: {reason}: the export will be one for vLLM and SGLang")
        return export_model(
            model, quantization, source, directory, layout=layout, max_shard_size=max_shard_size, copied=False
        )
