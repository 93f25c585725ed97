"""The weights of a compressed export as our forward multiplies them, to compare files for other engines with."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.safetensors import Reader, read_headers, read_tensor
from model.save import export_model
from tools.compressed import load_compressed


@contextmanager
@torch.no_grad()
def dequantized(
    export: Path, *, trust_remote_code: bool = False
) -> Iterator[tuple[PreTrainedModel, Iterator[tuple[str, Tensor]]]]:
    """The model of a compressed export in fp32, and its tensors by key on disk, in one process on CPU.

    No tolerance is needed to compare them: a code times a scale is one product in fp32 everywhere. They lie in a
    temporary directory inside the block: 4 bytes per parameter.

    Raises:
        RankError: ``export`` is no compressed checkpoint.
    """
    model, quantization = load_compressed(export, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory() as scratch, Reader() as files:
        plain = Path(scratch) / "plain"
        export_model(model, quantization, export, plain, layout="dequantized", trust_remote_code=trust_remote_code)
        headers = read_headers(plain).tensors
        yield model, ((key, read_tensor(files, tensor).float()) for key, tensor in headers.items())


def check_tokens(model: PreTrainedModel, batches: Sequence[Tensor], export: Path) -> None:
    """Raise ValueError if there are tokens that the model has not: some engines would read beyond its embeddings."""
    count = len(cast("Tensor", model.get_input_embeddings().weight))
    largest = max((int(ids.max()) for ids in batches), default=0)
    if largest >= count:
        raise ValueError(
            f"{export} has the tokenizer of another model: it gives token {largest}, the model has {count}"
        )
