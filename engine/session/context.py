"""What a run stands on before a model exists: ranks, DeepSpeed's configuration, kernels, seeds, the tokenizer."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedTokenizerBase

from engine.cluster.join import join_ranks
from engine.cluster.nodes import check_nodes_agree, several_machines
from engine.recipe.checks import RecipeError
from engine.recipe.ds_config import resolve
from engine.recipe.recipe import Recipe
from engine.session.data import read_tokenizer
from model.ranks import gather_objects, raise_everywhere, say, world_size
from quant import prepare_kernels

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class RunContext:
    """What a run stands on before a model exists."""

    device: torch.device
    ds_config: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase


def start_ranks(recipe: Recipe) -> RunContext:
    """Start the process group, and give what does not need a model yet; a collective.

    Kernels are prepared and random generators seeded on the way.

    Raises:
        RecipeError: the DeepSpeed configuration is wrong; on every rank, before there is a process group.
        RankError: there is no tokenizer, or the machines differ (:mod:`engine.cluster.nodes`).
    """
    ds_config = resolve(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    if missing := list(_not_on_this_machine(recipe, ds_config)):
        raise RecipeError("\n".join(missing))
    device = init_ranks()
    if several_machines():
        check_nodes_agree(recipe, ds_config)
    slower = Counter(text for text in gather_objects(prepare_kernels()) if text)
    for text, ranks in slower.items():
        say(text if ranks == world_size() else f"{text} ({ranks} of {world_size()} ranks)")
    for seeder in (torch.manual_seed, random.seed, np.random.seed):
        seeder(recipe.train.seed)
    return RunContext(device, ds_config, read_tokenizer(recipe))


def init_ranks() -> torch.device:
    """Start the process group (NCCL on CUDA, gloo on CPU) and return this rank's device.

    Without a launcher the process is rank 0 of 1.

    Raises:
        RecipeError: a job of several processes does not say which rank this one is.
        RankError: another machine has found something wrong before it came here
        (engine.cluster.exits.tell_other_nodes).
    """
    device = join_ranks()
    raise_everywhere(None)
    return device


def _not_on_this_machine(recipe: Recipe, ds_config: dict[str, Any]) -> Iterator[str]:
    """Say what the recipe asks for and DeepSpeed cannot do on this machine, a line each."""
    accelerator = get_accelerator()
    if recipe.model.dtype == "float16" and not accelerator.is_fp16_supported():
        yield (
            f"model.dtype: 'float16', expected bfloat16 or float32: DeepSpeed has no fp16 on this machine's "
            f"{accelerator.device_name()}"
        )
    several_nodes = int(os.environ.get("WORLD_SIZE", "1")) > accelerator.device_count()  # as DeepSpeed counts them
    quantized = ds_config["zero_optimization"].get("zero_quantized_gradients")
    if quantized and several_nodes and accelerator.device_name() == "cpu":
        yield (
            f"{recipe.deepspeed}: zero_optimization.zero_quantized_gradients: true, expected false: across nodes it "
            "runs an operator for GPUs"
        )
