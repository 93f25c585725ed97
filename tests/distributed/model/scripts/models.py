"""Models that are built and loaded on real ranks, and errors that every rank must raise."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from model.build import build_model
from model.checkpoint.load import load_weights
from model.ranks import RankError, gather_objects, world_size

CPU = torch.device("cpu")


def ds_config(stage: int, dtype: torch.dtype = torch.bfloat16, **zero: Any) -> dict[str, Any]:
    """Micro-batches of one row; unless ``zero`` says else, stage 3 partitions even the parameters of a tiny model."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def built(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **options: Any) -> PreTrainedModel:
    return build_model(path, config, dtype=dtype, device=CPU, **options)


def loaded(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **options: Any) -> PreTrainedModel:
    model = built(path, config, dtype, **options)
    load_weights(model, path)
    return model


@contextmanager
def raises(pattern: str) -> Iterator[None]:
    """Every rank must raise RankError with the same text, which matches ``pattern``."""
    text = None
    try:
        yield
    except RankError as error:
        text = str(error)
    texts = gather_objects(text)
    assert texts == [text] * world_size() and text is not None, f"ranks differ, expected {pattern}: {texts}"
    assert re.search(pattern, text, re.DOTALL), f"{pattern!r} is not in: {text}"
