"""Comparison of ranks: the options that name files, and the environment variables that count."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_args

import pytest

from engine.cluster import nodes
from engine.config.config import Recipe
from tests.lib.recipes import minimal

# Options of text that name no file that a rank reads; samples and the DeepSpeed configuration are compared as read.
NO_FILES = {
    "adapter.ranks",
    "adapter.targets",
    "data.cache",
    "data.eval",
    "data.skip",
    "data.server",
    "data.train",
    "deepspeed",
    "export.dir",
    "export.max_shard_size",
    "learnable.freeze",
    "model.attn_implementation",
    "output_dir",
    "quant.embedding",
    "quant.exempt",
    "quant.exempt_more",
    "quant.lm_head",
    "quant.rotate",
    "quant.scheme",
    "quant.schemes",
    "train.report_to",
    "train.resume",
}


def texts(section: type, prefix: str = "") -> Iterator[str]:
    """Yield the keys of all options that take a text or a list of texts."""
    for item in fields(section):
        kind = item.type
        if is_dataclass(kind):
            yield from texts(kind, f"{prefix}{item.name}.")
        elif str in (kind, *get_args(kind)):
            yield f"{prefix}{item.name}"


def test_every_file_that_an_option_names_is_compared():
    assert {*texts(Recipe)} - NO_FILES == nodes.files_of(minimal()).keys()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("DEEPQAT_X", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("NCCL_ALGO", True),
        ("TORCH_COMPILE_DISABLE", True),
        ("NCCL_SOCKET_IFNAME", False),
        ("TRITON_CACHE_DIR", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("RANK", False),
    ],
)
def test_an_environment_variable_counts_if_it_changes_numbers(monkeypatch, name, counts):
    monkeypatch.setenv(name, "1")
    assert (f"environment variable {name}" in dict(nodes._facts({}))) == counts
