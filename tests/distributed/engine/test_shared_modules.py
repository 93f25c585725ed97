"""Gradients of modules that a step uses more than once: a tied embedding, a layer at two depths, recomputed layers.

DeepSpeed issue 8224: from 0.18.3 to 0.19.3 stage 2 in bf16 on several ranks left out a part of the gradient of a module
that was used twice, without an error. So the gradients of the engine, built and run as in training, are compared with
those of plain autograd.
"""

import copy
import os
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from transformers import PreTrainedModel

from engine.config.deepspeed import resolve
from engine.session.context import init_ranks
from engine.session.optimizer import initialize_student
from model.zero.optimizer_state import backward
from tests.lib.garbage import collect
from tests.lib.launcher import on_ranks
from tests.lib.recipes import minimal, write_ds_config
from tests.lib.tiny import tiny_model

RANKS, MICRO_BATCHES = 2, 2
# Of a gradient, by norm: 0.0044 was measured, from sums in bf16 over the ranks. One of two uses left out is above 0.1.
TOLERANCE = 0.01
STAGES = (1, 2, 3)


def model_used_twice(*, recompute: bool) -> PreTrainedModel:
    """Build a model whose embedding is its lm_head, and whose first layer is its last one too."""
    model = tiny_model("qwen3", tied=True, layers=3, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()  # buffers of rotary frequencies stay in fp32
    model.model.layers[2] = model.model.layers[0]
    model.config.use_cache = False
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model: Any, rank: int, micro_batch: int) -> Tensor:
    """Compute the loss of tokens that differ between ranks and micro-batches."""
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(10 * rank + micro_batch))
    return model(input_ids=ids, labels=ids).loss


def plain_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Compute the mean gradients over all ranks and micro-batches in one process, added up in fp32."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()}
    for rank in range(RANKS):
        for micro_batch in range(MICRO_BATCHES):
            loss_of(model, rank, micro_batch).backward()
            for name, parameter in parameters.items():
                sums[name] += parameter.grad.float() / (RANKS * MICRO_BATCHES)
                parameter.grad = None
    return sums


def distances(configurations: dict[str, str]) -> dict[str, dict[str, float]]:
    """Compute the distance of each gradient of an engine from the plain one, relative to it; on every rank."""
    init_ranks()
    found: dict[str, dict[str, float]] = {}
    for name, path in configurations.items():
        train = {"steps": 1, "gradient_accumulation_steps": MICRO_BATCHES}
        recipe = minimal(deepspeed=path, train=train)
        model = model_used_twice(recompute="recomputed" in name)
        expected = plain_gradients(model)
        engine = initialize_student(recipe, resolve(recipe, RANKS), model)
        for micro_batch in range(MICRO_BATCHES):
            backward(engine, loss_of(engine, int(os.environ["RANK"]), micro_batch))
            if micro_batch + 1 < MICRO_BATCHES:
                engine.step()
        found[name] = {}
        for key, parameter in engine.module.named_parameters():
            gradient = safe_get_full_grad(parameter)
            found[name][key] = float((gradient.float() - expected[key]).norm() / expected[key].norm())
        engine.destroy()
        del engine, model
        collect()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, dict[str, float]]]:
    """Distances on both ranks, of all stages; buckets hold about one layer, so that several are reduced in a step."""
    directory = tmp_path_factory.mktemp("shared")
    configurations = {}
    for stage in STAGES:
        zero = {"stage": stage, "reduce_bucket_size": 20_000, "overlap_comm": True}
        path = write_ds_config(directory, f"zero{stage}", f"zero{stage}", zero_optimization=zero)
        configurations |= {f"{stage}": path, f"{stage} recomputed": path}
    return on_ranks(distances, configurations)[0]


@pytest.mark.parametrize("recomputed", ["", " recomputed"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_use_of_a_module_is_in_its_gradient(found, stage, recomputed):
    for rank in found:
        far = {name: error for name, error in rank[f"{stage}{recomputed}"].items() if not error < TOLERANCE}
        assert not far, far
