"""Steps whose loss or gradients are not finite are counted and left out, and leave nothing behind."""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.loop import Loop, LoopState
from engine.losses.objective import LossChunk
from model.ranks import gather_objects, rank
from tests.distributed.engine.scripts.train import end_of, whole_parameters
from tests.lib.launcher import on_ranks
from tests.lib.plain import load_result
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER, Variant, assert_same_run, each, runs_of

NAN, INFINITE = 1, 2  # steps that are spoiled


def nan_on_rank_1(value: Tensor) -> Tensor:
    return value * torch.nan if rank() == 1 else value


def infinite_loss(loop: Loop, steps: tuple[int, ...]) -> None:
    """Rank 1's loss is infinite in some steps, its gradients are not."""
    now = 0

    @loop.every(1)
    def count(state: LoopState) -> None:
        nonlocal now
        now = state.step

    @loop.token_loss("bad", weight=1.0)
    def bad(chunk: LossChunk) -> Tensor:
        value = 0.0 * chunk.student.sum(-1)
        return value + torch.inf if rank() == 1 and now in steps else value


def spoil(loop: Loop, seen: dict[str, Any]) -> None:
    """In one step rank 1's gradients are NaN from the last norm downwards, in the next its loss is infinite."""
    states: list[tuple[dict[str, Tensor], list[Any], int]] = []
    infinite_loss(loop, (INFINITE,))

    def remember(state: LoopState) -> None:
        optimizer = state.session.engine.optimizer
        moments = getattr(optimizer, "optimizer", optimizer).state
        warm_up = state.quant.scale_steps["weight_scales"]
        states.append((whole_parameters(state.model), copy.deepcopy(list(moments.values())), warm_up))

    @loop.at(NAN)
    def arm(state: LoopState) -> None:
        remember(state)
        norm = state.model.get_submodule("model.norm")
        handle = norm.register_full_backward_hook(lambda module, inputs, _: tuple(nan_on_rank_1(g) for g in inputs))
        loop.schedule.at(NAN + 1, lambda state: handle.remove())

    loop.at(INFINITE)(remember)

    @loop.at(INFINITE + 1)
    def compare(state: LoopState) -> None:
        remember(state)
        seen["same"] = gather_objects([same(*pair) for pair in itertools.pairwise(states)])
        seen["after"] = states[-1][0]


def same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Parameters, moments, of which there are some, and the warm-up of scales are equal."""
    moments = [
        torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key]))
        for a, b in zip(before[1], after[1], strict=True)
        for key in a
    ]
    parameters = [torch.equal(before[0][name], after[0][name]) for name in before[0]]
    return all(parameters) and len(moments) > 0 and all(moments) and before[2] == after[2] == 1


def poison_observers(loop: Loop, seen: dict[str, Any]) -> None:
    """In one step, while observers watch, what the first layer gives to the second is NaN on rank 1."""

    @loop.at(1)
    def arm(state: LoopState) -> None:
        layer = state.model.get_submodule("model.layers.1")
        handle = layer.register_forward_pre_hook(lambda module, inputs: (nan_on_rank_1(inputs[0]), *inputs[1:]))
        loop.schedule.at(2, lambda state: handle.remove())


SPOILED = {
    f"{dtype}_{stage}": Variant(
        {
            "stage": stage,
            "train": {"steps": 4, "gradient_accumulation_steps": 1},
            "loss": NO_TEACHER,
            "optim": {"lr": 1e-2},
        },
        dtype=dtype,
        action=spoil,
    )
    for dtype, stages in {"bfloat16": (0, 1, 2, 3), "float32": (0, 3)}.items()
    for stage in stages
}
IN_FP32 = "fp32 gradients"  # as bfloat16_3, where a single micro-batch leaves the sum over ranks in bf16
SPOILED[IN_FP32] = replace(SPOILED["bfloat16_3"], shipped="zero3", ds={"data_types": {"grad_accum_dtype": "fp32"}})
SPOILED["offload"] = replace(SPOILED["bfloat16_2"], shipped="zero2_offload")
BLIND = Variant(
    {"stage": 3, "loss": NO_TEACHER, "quant": {"fake_quant_start": 3}}, dtype="bfloat16", action=poison_observers
)


paths = runs_of({**SPOILED, "blind": BLIND})


@each(SPOILED)
def test_a_step_that_is_not_finite_is_counted_and_moves_nothing(paths, name):
    found = load_result(paths[name])
    assert found["skipped"] == [0, 1, 2, 2]
    assert found["seen"]["same"] == [[True, True]] * 2
    assert any(not torch.equal(value, found["weights"][key]) for key, value in found["seen"]["after"].items())
    assert all(weight.isfinite().all() for weight in found["weights"].values())
    assert math.isfinite(found["losses"][-1]["loss/total"])


def test_gradients_of_one_micro_batch_are_the_same_in_bf16(paths):
    assert_same_run(load_result(paths["bfloat16_3"]), load_result(paths[IN_FP32]))


def test_a_step_that_is_left_out_leaves_nothing_in_the_observers(paths):
    found = load_result(paths["blind"])
    assert found["skipped"] == [0, 1, 1, 1, 1]
    scales = [value for name, value in found["weights"].items() if name.endswith("input_s0")]
    assert scales and all(bool(scale.isfinite().all()) for scale in scales)


def infinite_losses(loop: Loop) -> None:
    """In one step, and then in more than are allowed in a row."""
    infinite_loss(loop, (0, 2, 3, 4))


def test_too_many_steps_in_a_row_end_the_run_and_name_the_samples(tmp_path):
    model, chats = tiny_checkpoint(tmp_path / "model"), write_chats(tmp_path / "chats.jsonl")
    sections = {"train": {"steps": 6, "max_skipped_steps": 3}, "loss": NO_TEACHER}
    path = write_recipe(tmp_path, "stops", model, chats, stage=1, **sections)
    (first, second), output = on_ranks(end_of, path, infinite_losses)
    assert first == second
    assert first.text.startswith("RankError: step 4: the loss or its gradients are not finite\n")
    lines = first.text.splitlines()[1:3]
    for number, (line, loss) in enumerate(zip(lines, ("finite", "not finite"), strict=True)):
        assert line.startswith(f"  rank {number}, step 4, samples ") and line.endswith(f": loss {loss}")
    assert "3 steps in a row were left out (train.max_skipped_steps)" in first.text
    # Step 0 is followed by a good one, so it does not count.
    for step, count in ((0, 1), (2, 1), (3, 2)):
        assert f"warning: step {step}: the loss or its gradients are not finite" in output
        assert f"left out ({count} in a row; the run ends at 3)" in output
