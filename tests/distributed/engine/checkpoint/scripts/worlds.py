"""One process that starts jobs of 1, 2 and 3 ranks, each going on from what another number of ranks left.

    scripts/worlds.py DIRECTORY VARIANT...

For each variant: 2 ranks from the first step to the last; from their checkpoint 3 ranks, and 1 rank; from the one
rank's checkpoint 2 ranks again. Rank 0 of each job writes ``DIRECTORY/<variant>_<job>.pt``: the whole fp32 masters, the
moments and step counts as they are before step ``AT`` and the next, and the losses of the steps. The last job exports
on one rank what two and three ranks have trained.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  imported by the engine at first, which takes 2 s
import torch
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from launch.export import export_checkpoint
from model.ranks import gather_objects, is_main
from model.zero import flat_masters, gathered, optimizer_pieces
from tests.lib.forked import Job
from tests.lib.garbage import collect
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

# name: stage, dtype, model, step at which fake quant starts. Stage 1 has two optimizers in DeepSpeed, by dtype. Where
# fake quant starts before the checkpoint, theta's step count is another than the weights'; where it starts after it,
# the checkpoint holds what the observers saw.
VARIANTS = {
    "1": (1, "bfloat16", "qwen3", 1),
    "1_fp32": (1, "float32", "qwen3", 3),
    "2": (2, "bfloat16", "llama", 3),
    "3": (3, "bfloat16", "qwen3_moe", 1),
    "0": (0, "bfloat16", "qwen3", 3),
    "2_lora": (2, "bfloat16", "qwen3", 1),
    "3_lora": (3, "bfloat16", "qwen3_moe", 3),
}
STEPS, AT = 4, 2
# job: ranks, whose checkpoint, of which step. A step has 12 rows everywhere.
JOBS = {"two": (2, None, 0), "three": (3, "two", AT), "one": (1, "two", AT), "two_again": (2, "one", AT + 1)}
ROWS = 12
MICRO = 2


def main() -> None:
    """See above."""
    directory, variants = Path(sys.argv[1]), sys.argv[2:]
    Job(1, lambda: write_recipes(directory, variants), directory / "setup.log").finish()
    for job, (ranks, source, step) in JOBS.items():
        for variant in variants if source else ():
            name = f"step_{step:08d}"
            shutil.copytree(
                directory / f"{variant}_{source}" / "checkpoints" / name,
                directory / f"{variant}_{job}" / "checkpoints" / name,
            )
        Job(ranks, of_all(directory, variants, job), directory / f"{job}.log").finish()
    Job(1, lambda: export(directory, variants[-1]), directory / "export.log").finish()


def write_recipes(directory: Path, variants: list[str]) -> None:
    """One per variant and job."""
    chats = write_chats(directory / "chats.jsonl")
    for variant in variants:
        stage, dtype, kind, start = VARIANTS[variant]
        model = tiny_checkpoint(directory / f"{variant}_model", kind)
        for job, (ranks, source, step) in JOBS.items():
            write_recipe(
                directory,
                f"{variant}_{job}",
                model,
                chats,
                stage=stage,
                dtype=dtype,
                data={"micro_batch_size": MICRO},
                train={
                    "steps": STEPS,
                    "gradient_accumulation_steps": ROWS // MICRO // ranks,
                    "checkpoint_every": 1,
                    "keep_checkpoints": STEPS,
                    "resume": f"step_{step:08d}" if source else False,
                },
                quant={"fake_quant_start": start, "calibration_batches": 0},
                # On stage 1 no more than 8 thetas train: of 3 ranks the last holds none of them.
                learnable={"act_scale": variant != "1", "norm": True, "weight": "lora" not in variant},
                adapter={"kind": "lora", "rank": 3} if "lora" in variant else {},
                optim={"lr": 1e-2, "schedule": "constant", "warmup_steps": 0},
                loss={"kd_weight": 0.0, "teacher": None},
            )


def of_all(directory: Path, variants: list[str], job: str) -> Callable[[], None]:
    """What a rank of the job does."""

    def rank() -> None:
        for variant in variants:
            loop = Loop(load_recipe(directory / f"{variant}_{job}.yaml"))
            result: dict[str, Any] = {"losses": {}}

            def look(state: LoopState, result: dict[str, Any] = result) -> None:
                result[state.step] = optimizer_state(state)

            def keep(state: LoopState, result: dict[str, Any] = result) -> None:
                result["losses"][state.step] = state.last.losses["loss/total"]

            for step in (AT, AT + 1):
                loop.schedule.at(step, look)
            loop.schedule.every(1, keep)

            state = loop.run()
            if is_main():
                torch.save(result, directory / f"{variant}_{job}.pt")
            state.session.engine.destroy()
            del state
            collect()

    return rank


def optimizer_state(state: LoopState) -> dict[str, Any]:
    """Masters, moments and step counts by parameter, whole; and the model's parameters, which are the masters rounded.

    The parameters come from the model: they show that the pieces of the masters lie where they are said to lie.
    """
    optimizer, model = state.session.engine.optimizer, state.model
    found: dict[str, Any] = {}
    shapes = {}
    for name, parameter in model.named_parameters():
        with gathered([parameter]):
            found[name] = parameter.detach().cpu().clone()
            shapes[name] = parameter.shape
    if state.session.ds_config["zero_optimization"]["stage"] == 0:
        return found
    flats, own = flat_masters(optimizer), []
    for piece in optimizer_pieces(model, optimizer):
        flat = flats[piece.group]
        values = {"fp32": flat, **optimizer.state.get(flat, {})}
        for key, value in values.items():
            whole = value.detach().expand(flat.shape)  # the step count is one number
            own.append(
                (f"{piece.name}/{key}", piece.name, piece.start, whole[piece.offset :][: piece.stop - piece.start])
            )
    for pieces in gather_objects([(*entry[:3], entry[3].tolist()) for entry in own]):
        for key, name, start, values in pieces:
            flat = found.setdefault(key, torch.full(shapes[name], torch.nan)).view(-1)
            flat[start : start + len(values)] = torch.tensor(values)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(found[f"{name}/fp32"].to(found[name].dtype), found[name]), name
    return found


def export(directory: Path, variant: str) -> None:
    """What one rank exports of checkpoints that two and three ranks wrote."""
    for job, step in (("two", AT + 1), ("three", AT + 1)):
        path = directory / f"{variant}_{job}" / "checkpoints" / f"step_{step:08d}"
        recipe = load_recipe(path / "recipe.yaml")
        recipe.export.dir = str(directory / f"exported_{job}")
        export_checkpoint(recipe, path)
        collect()


if __name__ == "__main__":
    main()
