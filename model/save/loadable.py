"""Whether the class that a checkpoint's config.json names finds all its tensors in the checkpoint, and no others.

The class is built on the meta device, and transformers' own loader gives it the planned tensors, on the meta device
too: renaming, merging experts and concatenating all run, on shapes alone. So a family is found whose files have a
layout that the export does not write, listed or not: before a run, from the plan of its export, and after the export
from the headers of its files. Nothing is read or held but names.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from model.ranks import listed
from model.save.plan import Item
from model.shards import read_headers
from model.towers import model_class
from quant.export import Shapes
from quant.kv_cache import QuantCache

META = torch.device("meta")


def check_loadable(source: Path, shards: Iterable[Iterable[Item]], *, trust_remote_code: bool = False) -> None:
    """Check a planned export of a model of ``source``.

    Args:
        source: the directory whose config.json the export will have.
        shards: what will be written, see :func:`model.save.plan.plan_shards`.
        trust_remote_code: whether Python code in ``source`` may be run; a class of such code is left unchecked.

    Raises:
        ValueError: the class would miss tensors, meet unknown ones or ones of another shape; names them.
    """
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    kind = model_class(config)
    if kind is None:
        return
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with META, no_init_weights():
        model: PreTrainedModel = kind(config)
    model.tie_weights()
    problems = _problems(model, _unquantised(shards))
    if problems:
        raise ValueError(
            f"config.json of {source} names {kind.__name__}, whose weights transformers would not find in the export: "
            f"{'; '.join(problems)}"
        )


def check_written(directory: Path, shards: Iterable[Iterable[Item]]) -> None:
    """Check that the files of ``directory`` hold what was planned, and nothing else.

    Raises:
        ValueError: keys that are missing, not planned, or of another dtype or shape; a damaged file.
    """
    planned = {key: expected for shard in shards for item in shard for key, expected in item.shapes.items()}
    checkpoint = read_headers(directory)
    found = {key: (tensor.dtype, tensor.shape) for key, tensor in checkpoint.tensors.items()}
    wrong = sorted(key for key in planned.keys() | found.keys() if planned.get(key) != found.get(key))
    if wrong or checkpoint.problems:
        raise ValueError("; ".join([*checkpoint.problems, *([f"not as planned: {listed(wrong)}"] if wrong else [])]))


def _unquantised(shards: Iterable[Iterable[Item]]) -> Shapes:
    """The tensors that a plain export would have: weights in the place of codes and their scales."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for item in (item for shard in shards for item in shard):
        if item.layout is None or item.fused is not None:
            if not isinstance(item.module, QuantCache):
                shapes |= item.shapes
            continue
        for name, part in item.linears.items():
            shapes[f"{name}.weight"] = torch.bfloat16, (part.out_features, part.in_features)
            shapes |= {key: item.shapes[key] for key in [f"{name}.bias"] if key in item.shapes}
    return shapes


def _problems(model: PreTrainedModel, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[str]:
    state = {key: torch.empty(shape, dtype=dtype, device=META) for key, (dtype, shape) in shapes.items()}
    rules: list[Any] = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(device_map={"": META}, weight_mapping=rules)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(model, state, options)
    finally:
        if shown:
            logging.enable_progress_bar()
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    kinds = {
        "missing": info.missing_keys,
        "unknown": info.unexpected_keys,
        "of another shape": [name for name, *_ in info.mismatched_keys],
        "not converted": info.conversion_errors,
    }
    return [f"{kind}: {listed(sorted(map(str, names)), 6)}" for kind, names in kinds.items() if names]
