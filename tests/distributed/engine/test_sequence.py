"""Ranks that share rows compute what ranks with whole rows compute: losses, gradient norms and weights of runs, and
logits and gradients of every family; or the family is refused.

Both runs of a pair have two ranks and the rows of a step in common: with whole rows each rank has half of these.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.cluster.job import join_ranks
from engine.session import probes
from engine.session.probes import Asked, sharing_problem
from model.build import build_model
from model.checkpoint.load import load_weights
from model.moe.experts import ExpertMLPs
from model.ranks import barrier, gather_objects, is_main, reduce_over_ranks, world_size
from model.sequence import SharedRows
from tests.distributed.engine.scripts.train import run_all
from tests.families.variants import VARIANTS as FAMILIES
from tests.lib.launcher import on_ranks
from tests.lib.recipes import merged, write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

RECOMPUTED = {"activation_checkpointing": True, "activation_offload": True}
# AdamW whose updates are nearly proportional to gradients: else those near 0 move a weight as far as others.
LINEAR = {"eps": 1.0, "lr": 0.1}

# name: kind of the model, stage, dtype, sections of the recipe.
VARIANTS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "plain": ("llama", 1, "float32", {"quant": {"fake_quant_start": -1}, "loss": NO_TEACHER}),
    "1": ("llama", 1, "float32", {}),
    "2_packed": ("qwen3", 2, "float32", {"data": {"packing": True}}),
    "3": ("qwen3", 3, "float32", {"data": {"micro_batch_size": 1}}),
    "3_moe": ("qwen3_moe", 3, "float32", {"data": {"packing": True}, "eval": {"every": 2}}),
    "2_cache": ("qwen3", 2, "float32", {"quant": {"scheme": "fp8_static_kv"}, "learnable": {"act_scale": True}}),
    "3_dynamic": ("qwen3", 3, "float32", {"quant": {"scheme": "fp8_dynamic"}, "train": RECOMPUTED}),
    "2_fp4": ("llama", 2, "float32", {"quant": {"scheme": "nvfp4_w4a4"}}),
    "3_lora": ("llama", 3, "float32", {"adapter": {"kind": "lora"}, "learnable": {"weight": False}}),
    "3_bf16": ("qwen3", 3, "bfloat16", {"data": {"packing": True}}),
}
# Largest differences of losses, of gradient norms and of weights after two steps. Sums in another order differ by 1e-6;
# where one of them changes a code, by more. Other data, masks or positions change losses by 1e-2.
NEAR = {"float32": (2e-4, 2e-3, 2e-5), "bfloat16": (5e-2, 0.2, 1e-2)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all runs."""
    directory = tmp_path_factory.mktemp("sequence")
    chats = write_chats(directory / "chats.jsonl")
    paths = []
    for name, (kind, stage, dtype, sections) in VARIANTS.items():
        model = tiny_checkpoint(directory / f"{name}_model", kind, even=True, dtype=getattr(torch, dtype))
        for ranks, accumulation in ((1, 1), (2, 2)):
            train = {"steps": 2, "gradient_accumulation_steps": accumulation, **sections.get("train", {})}
            shared = merged(sections, {"train": train, "parallel": {"sequence": ranks}, "optim": LINEAR})
            shared = merged({"quant": {"calibration_batches": ranks}}, shared)  # the same rows for both
            if "eval" in sections:
                shared["data"] = {**sections["data"], "held_out": 5}
            paths.append(write_recipe(directory, f"{name}_{ranks}", model, chats, stage=stage, dtype=dtype, **shared))
    on_ranks(run_all, [(None, path) for path in paths])
    return directory


@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_that_share_rows_compute_what_others_do(runs: Path, name: str) -> None:
    """Every loss, the gradient norm of every step, and the weights at the end."""
    whole, shared = (torch.load(runs / f"{name}_{ranks}" / "result.pt") for ranks in (1, 2))
    near = dict(zip(("losses", "norms", "weights"), NEAR[VARIANTS[name][2]], strict=True))
    assert len(whole["losses"]) == len(shared["losses"]) > 1
    worst = dict.fromkeys(near, 0.0)
    for mine, theirs in zip(shared["losses"], whole["losses"], strict=True):
        assert mine.keys() == theirs.keys()
        worst["losses"] = max(worst["losses"], *(abs(mine[part] - theirs[part]) for part in mine))
    worst["norms"] = max(abs(a - b) for a, b in zip(shared["norms"], whole["norms"], strict=True))
    for part, weight in whole["weights"].items():
        worst["weights"] = max(worst["weights"], (weight.float() - shared["weights"][part].float()).abs().max().item())
    print(name, worst)
    assert all(worst[part] <= near[part] for part in near), worst


ROUNDING = 1e-3  # of logits and gradients in fp32, by their sizes; what is wrong moves them by 1e-2 and more
LONGEST, PROBED = 128, 64  # positions of the longest rows, and tokens of the probe's


def verdict(name: str, directory: Path) -> str:
    """Return "works", "refused: why" or "wrong: by how much" for a family; a collective."""
    source, rows = directory / name.replace(" ", "_"), SharedRows(world_size())
    if is_main():
        FAMILIES[name].checkpoint(source, dtype=torch.float32)
    barrier()
    config = {"zero_optimization": {"stage": 0}}
    try:
        model = build_model(source, config, dtype=torch.float32, device=torch.device("cpu")).eval()
        load_weights(model, source)
        rows.attach(model)
    except (RuntimeError, ValueError) as error:
        return f"refused: {error}"
    model.config.use_cache = False
    rows.start()
    if problem := sharing_problem(asked_of(model, rows), rows, torch.arange(7, 300), LONGEST):
        return f"refused: {problem}"
    generator = torch.Generator().manual_seed(3)
    for length, borders in ((37, ()), (50, (7, 28))):
        row = {"input_ids": torch.randint(7, 300, (2, length), generator=generator)}
        if borders:
            parts = zip((0, *borders), (*borders, length), strict=True)
            row["position_ids"] = torch.cat([torch.arange(end - start) for start, end in parts]).repeat(2, 1)
        with rows.apart(model):
            whole, wanted = logits_and_gradients(model, row, slice(None))
        own, found = logits_and_gradients(model, row, rows.share(length))
        with torch.no_grad():
            differs = ((rows.whole(own) - whole).abs().max() / whole.std()).item()
        for parameter, gradient in wanted.items():
            size = max(gradient.abs().max().item(), 1e-3)
            summed = reduce_over_ranks(found[parameter])
            differs = max(differs, (summed - gradient).abs().max().item() / size)
        if not differs < ROUNDING:
            return f"wrong: {differs:.2g}{' packed' * bool(borders)}"
    return "works"


def asked_of(model: PreTrainedModel, rows: SharedRows) -> Asked:
    """The question that a run asks of its model, with logits for hidden states."""

    def forward(batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return rows.whole(model(**inputs, use_cache=False).logits)

    exact = not any(isinstance(module, ExpertMLPs) for module in model.modules())
    return Asked("model", model, forward, exact)


def logits_and_gradients(
    model: PreTrainedModel, row: dict[str, Tensor], share: slice
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of their sum with random weights, of which ``share`` is this rank's."""
    model.zero_grad()
    logits = model(**row, use_cache=False).logits
    batch, length = row["input_ids"].shape
    weights = torch.randn(batch, length, logits.shape[-1], generator=torch.Generator().manual_seed(4))
    (logits * weights[:, share]).sum().backward()
    named = model.named_parameters()
    return logits.detach(), {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def verdicts(directory: Path, names: list[str]) -> dict[str, str]:
    """Return what each family does; a collective."""
    join_ranks()
    probes.SHARED = PROBED
    found = {}
    for name in names:
        said = gather_objects(verdict(name, directory))
        found[name] = next((one for one in said if one != "works"), "works")
        if is_main():
            with open("/tmp/seqfam.txt", "a") as file:
                print(name, found[name], file=file)
    return found


@pytest.mark.full
def test_every_family_shares_rows_or_is_refused(tmp_path: Path) -> None:
    (found, _), _ = on_ranks(verdicts, tmp_path, list(FAMILIES))
    print(*(f"{name}: {said}" for name, said in found.items()), sep="\n")
    assert not {name: said for name, said in found.items() if said.startswith("wrong")}
