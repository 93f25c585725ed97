"""Ranks that share rows compute what ranks with whole rows compute: losses, gradient norms and weights of runs, and
logits and gradients of every family; or the family is refused.

Both runs of a pair have the same number of ranks and the same rows in a step.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash

from engine.cluster.job import join_ranks
from engine.config.reading import load_recipe
from engine.loop import Loop
from engine.session import probes
from engine.session.probes import Asked, sharing_problem
from model.build import build_model
from model.checkpoint.load import load_weights
from model.moe.experts import ExpertMLPs
from model.ranks import barrier, gather_objects, is_main, reduce_over_ranks, world_size
from model.sequence import SharedRows
from quant import PRESETS, Preset
from tests.distributed.engine.scripts.train import run_all
from tests.families.variants import VARIANTS as FAMILIES
from tests.lib.checkpoints import read_tensors
from tests.lib.launcher import on_ranks
from tests.lib.recipes import merged, write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER
from tools.write_teacher_cache import check_recipe, write_cache

RECOMPUTED = {"activation_checkpointing": True, "activation_offload": True}
# AdamW whose updates are nearly proportional to gradients: else those near 0 move a weight as far as others.
LINEAR = {"eps": 1.0, "lr": 0.1}

PLAIN = {"quant": {"fake_quant_start": -1}, "loss": NO_TEACHER}
TOP_K = {"kd": "kl_top_k", "top_k": 5, "diagnostics_every": 0}


def learning(preset: Preset, name: str) -> dict[str, Any]:
    """Return the sections of a run that learns the scales of a preset, but those of keys and values alone: if no value
    is clipped, their gradients are rounding errors, and Adam makes a step of any size out of them."""
    linear = preset.linear
    learnable = {"weight_scale": linear is not None, "act_scale": linear is not None and linear.learns_input}
    return {"quant": {"scheme": name}, "learnable": learnable, "loss": NO_TEACHER}


# name: kind of the model, stage, dtype, sections of the recipe.
Variants = dict[str, tuple[str, int, str, dict[str, Any]]]
FEW: Variants = {
    "plain": ("llama", 1, "float32", PLAIN),
    "3_moe": (
        "qwen3_moe",
        3,
        "float32",
        {"data": {"packing": True, "held_out": 5}, "eval": {"every": 2}, "loss": {"chunk_tokens": 20}},
    ),
    "2_cache": ("qwen3", 2, "float32", {"quant": {"scheme": "fp8_static_kv"}, "learnable": {"act_scale": True}}),
}
MORE: Variants = {
    "1": ("llama", 1, "float32", {"loss": {"chunk_tokens": 20}, "export": {"enabled": True}}),
    "1_moe": ("qwen3_moe", 1, "float32", {"export": {"enabled": True}}),
    "2_moe": ("qwen3_moe", 2, "float32", {"quant": {"scheme": "w4a16_g32"}}),
    "2_packed": ("qwen3", 2, "float32", {"data": {"packing": True}, "model": {"attn_implementation": "eager"}}),
    "3": ("qwen3", 3, "float32", {"data": {"micro_batch_size": 1}}),
    "3_dynamic": ("qwen3", 3, "float32", {"quant": {"scheme": "fp8_dynamic"}, "train": RECOMPUTED}),
    "2_fp4": ("llama", 2, "float32", {"quant": {"scheme": "nvfp4_w4a4"}}),
    "2_int8": ("qwen3", 2, "float32", {"quant": {"scheme": "8da4w"}}),
    "3_lora": ("llama", 3, "float32", {"adapter": {"kind": "lora"}, "learnable": {"weight": False}}),
    "3_self": ("qwen3", 3, "float32", {"learnable": {"weight": False}, "loss": {"teacher": "self"}}),
    "2_top_k": ("qwen3", 2, "float32", {"data": {"packing": True}, "loss": TOP_K}),
    "2_cached": ("qwen3", 2, "float32", {"data": {"packing": True}, "loss": {**TOP_K, "teacher_cache": "cache"}}),
    "2_gptq": ("llama", 2, "float32", {"quant": {"scheme": "w4a16_g32", "init": "gptq"}, "export": {"enabled": True}}),
    "3_bf16": ("qwen3", 3, "bfloat16", {"data": {"packing": True}}),
    "3_moe_bf16": ("qwen3_moe", 3, "bfloat16", {}),
}
# The first preset of every format of inputs, and of keys and values.
INPUTS = {
    (preset.linear and preset.linear.activations, preset.kv_cache): name
    for name, preset in reversed(PRESETS.items())
    if preset.kv_cache or preset.linear.activations
}.values()
EVERY_INPUT: Variants = {name: ("qwen3 wide", 2, "float32", learning(PRESETS[name], name)) for name in INPUTS}
FOUR: Variants = {
    "four": ("llama", 2, "float32", {"data": {"packing": True}}),
    "four_moe": ("qwen3_moe", 3, "float32", PLAIN),
}
# Largest differences of losses, of gradient norms and of weights after two steps. Sums in another order differ by 1e-6;
# where one of them changes a code, by more. Other data, masks or positions change losses by 1e-2. In bf16, weights near
# 1 are 2^-7 apart. There, rounding also sends single tokens to other experts, which changes the gradients of these
# experts' scales: with whole rows under eager attention instead of sdpa they differ by 2^-6 after two steps, too.
NEAR = {"float32": (2e-4, 2e-3, 2e-5), "bfloat16": (1e-2, 0.1, 2**-7), "bfloat16 experts": (5e-2, 0.2, 2**-5)}


def run_pairs(directory: Path, variants: Variants, ranks: int = 2, shared: int = 2) -> Path:
    """Run each variant with whole rows, and with rows that ``shared`` ranks share."""
    chats = write_chats(directory / "chats.jsonl")
    paths = []
    for name, (kind, stage, dtype, sections) in variants.items():
        size, kind = {"wide" if "wide" in kind else "even": True}, kind.removesuffix(" wide")
        model = tiny_checkpoint(directory / f"{name}_model", kind, **size, dtype=getattr(torch, dtype))
        for together in (1, shared):
            train = {"steps": 2, "gradient_accumulation_steps": together, **sections.get("train", {})}
            own = {"train": train, "parallel": {"sequence": together}, "optim": LINEAR}
            own = merged({"quant": {"calibration_batches": together}}, merged(sections, own))  # the same rows for both
            if "teacher_cache" in own.get("loss", {}):
                own = merged(own, {"loss": {"teacher_cache": str(directory / f"{name}_{together}_cache")}})
            path = write_recipe(directory, f"{name}_{together}", model, chats, stage=stage, dtype=dtype, **own)
            if "teacher_cache" in own.get("loss", {}):
                on_ranks(make_cache, path, ranks=ranks)
            paths.append(path)
    on_ranks(run_all, [(None, path) for path in paths], ranks=ranks)
    return directory


def make_cache(path: Path) -> None:
    """Write the teacher's cache that a recipe names."""
    recipe = load_recipe(path)
    write_cache(recipe, check_recipe(recipe, None))


def differences(directory: Path, name: str, together: int) -> dict[str, float]:
    """Return the largest differences of losses, gradient norms and weights between the runs of a variant."""
    whole, shared = (torch.load(directory / f"{name}_{ranks}" / "result.pt") for ranks in (1, together))
    assert len(whole["losses"]) == len(shared["losses"]) > 1
    worst = {
        "losses": max(map(apart, shared["losses"], whole["losses"])),
        "norms": max(map(apart, shared["norms"], whole["norms"])),
        "weights": apart(shared["weights"], whole["weights"]),
    }
    print(f"{name}: {worst}")
    return worst


def apart(mine: Any, theirs: Any) -> float:
    """Return the largest difference of two numbers or tensors, or of those in two dictionaries. A NaN is equal to
    another and infinitely far from a number."""
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        return max(apart(mine[part], theirs[part]) for part in mine)
    one, another = torch.as_tensor(mine).double(), torch.as_tensor(theirs).double()
    same = (one == another) | (one.isnan() & another.isnan())
    return (one - another).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf).max().item()


def check(directory: Path, variants: Variants, together: int = 2) -> None:
    """Compare both runs of each variant."""
    far = {}
    for name, (kind, _, dtype, _) in variants.items():
        worst = differences(directory, name, together)
        near = NEAR[f"{dtype} experts" if dtype == "bfloat16" and "moe" in kind else dtype]
        if any(value > limit for value, limit in zip(worst.values(), near, strict=True)):
            far[name] = worst
    assert not far


def test_ranks_that_share_rows_compute_what_others_do(tmp_path: Path) -> None:
    check(run_pairs(tmp_path, FEW), FEW)
    held_out = [json.loads((tmp_path / f"3_moe_{n}" / "metrics.jsonl").read_text().splitlines()[-1]) for n in (1, 2)]
    assert held_out[0]["eval/lm"] == pytest.approx(held_out[1]["eval/lm"], abs=2e-4)


@pytest.mark.full
def test_every_way_to_train_is_the_same_on_shared_rows(tmp_path: Path) -> None:
    """And exports have the same tensors: codes but for a few that are next to a rounding boundary."""
    check(run_pairs(tmp_path, MORE), MORE)
    for name, variant in MORE.items():
        if "export" in variant[-1]:
            whole, shared = (read_tensors(tmp_path / f"{name}_{together}" / "export") for together in (1, 2))
            assert whole.keys() == shared.keys()
            for key, tensor in whole.items():
                other = shared[key]
                assert tensor.dtype == other.dtype and tensor.shape == other.shape
                if tensor.dtype == torch.float32:
                    assert apart(tensor, other) < NEAR["float32"][-1], (name, key)
                else:
                    assert (tensor.view(torch.uint8) == other.view(torch.uint8)).float().mean() > 0.99, (name, key)


@pytest.mark.full
def test_every_format_of_inputs_is_the_same_on_shared_rows(tmp_path: Path) -> None:
    """Static, of each token or of groups; in any preset."""
    check(run_pairs(tmp_path, EVERY_INPUT), EVERY_INPUT)


@pytest.mark.full
@pytest.mark.parametrize("together", [2, 4])
def test_four_ranks(tmp_path: Path, together: int) -> None:
    """Four that share a row each have one attention head, and a copy of the only head of keys and values."""
    check(run_pairs(tmp_path, FOUR, 4, together), FOUR, together)


@pytest.mark.full
def test_a_run_goes_on_with_whole_rows(tmp_path: Path) -> None:
    """A checkpoint of shared rows, continued with whole ones, and the other way round, with the rows per step kept."""
    chats = write_chats(tmp_path / "chats.jsonl")
    model = tiny_checkpoint(tmp_path / "model", "llama", even=True, dtype=torch.float32)

    def recipe(name: str, together: int, resume: bool | str = False) -> Path:
        train = {"steps": 4, "checkpoint_every": 2, "gradient_accumulation_steps": together, "resume": resume}
        own = {**PLAIN, "train": train, "parallel": {"sequence": together}}
        return write_recipe(tmp_path, name, model, chats, stage=2, dtype="float32", **own)

    on_ranks(run_all, [(None, recipe(f"from_{together}", together)) for together in (1, 2)])
    straight = {n: torch.load(tmp_path / f"from_{n}" / "result.pt")["losses"] for n in (1, 2)}
    on_ranks(run_all, [(None, recipe(f"from_{n}", 3 - n, "step_00000002")) for n in (1, 2)])
    for together, losses in straight.items():
        resumed = torch.load(tmp_path / f"from_{together}" / "result.pt")["losses"]
        for mine, theirs in zip(resumed, losses[2:], strict=True):
            assert mine == pytest.approx(theirs, abs=2e-5)


STEPS = 4
# Weights alone have codes; inputs too, of which one may change by the rounding of what came before in the same step.
SCHEMES = {"w4a16_g32": (5e-6, 5e-6, 5e-6), "fp8_dynamic": NEAR["float32"]}


def take_checkpoints(loop: Loop, seen: dict[str, Any]) -> None:
    """Give a run the checkpoints of the one with whole rows."""
    output = Path(loop.recipe.output_dir)
    if is_main():
        shutil.copytree(output.with_name(output.name.partition(" ")[0]) / "checkpoints", output / "checkpoints")
    barrier()


@pytest.mark.full
def test_each_step_from_the_same_weights_is_the_same(tmp_path: Path) -> None:
    """Runs of quantized models part after some steps, as the last bit of a weight decides between two codes, and if it
    is clipped. So each step here begins with the weights and moments of the run with whole rows."""
    chats = write_chats(tmp_path / "chats.jsonl")
    model = tiny_checkpoint(tmp_path / "model", "llama", even=True, dtype=torch.float32)
    jobs = []
    for scheme in SCHEMES:
        for name, start in (
            (scheme, None),
            (f"{scheme} alone", None),
            *((f"{scheme} {k}", k) for k in range(1, STEPS)),
        ):
            together = 1 if name == scheme else 2
            train = {
                "steps": STEPS,
                "gradient_accumulation_steps": together,
                "checkpoint_every": 1,
                "keep_checkpoints": STEPS,
            }
            train["resume"] = False if start is None else f"step_{start:08d}"
            own = {"train": train, "parallel": {"sequence": together}, "optim": LINEAR, "loss": NO_TEACHER}
            own["quant"] = {"scheme": scheme, "calibration_batches": together}
            path = write_recipe(tmp_path, name, model, chats, stage=2, dtype="float32", **own)
            jobs.append((None if start is None else take_checkpoints, path))
    on_ranks(run_all, jobs)
    far = {}
    for scheme, near in SCHEMES.items():
        whole, alone = (torch.load(tmp_path / name / "result.pt") for name in (scheme, f"{scheme} alone"))
        for step in range(STEPS):
            index, mine = step, alone
            if step:
                print(f"{scheme}, step {step + 1}, alone: {step_apart(mine, index, whole, step)}")
                index, mine = 0, torch.load(tmp_path / f"{scheme} {step}" / "result.pt")
            found = step_apart(mine, index, whole, step)
            print(f"{scheme}, step {step + 1}: {found}")
            if any(value > limit for value, limit in zip(found, near, strict=True)):
                far[scheme, step] = found
    assert not far


def step_apart(mine: dict[str, Any], index: int, theirs: dict[str, Any], step: int) -> tuple[float, ...]:
    """Return the differences of losses, gradient norm and weights after a step of each run."""
    return tuple(apart(mine[part][index], theirs[part][step]) for part in ("losses", "norms", "after"))


# Families that must be refused, and what the error names.
REFUSED = {
    "phi3, longrope": "first in model.rotary_emb (Phi3RotaryEmbedding)",
    "lfm2": "first in model.layers.0.conv (Lfm2ShortConv)",
    "qwen3_5_text": "first in model.layers.0.linear_attn (Qwen3_5GatedDeltaNet)",
    "jamba": "first in model.layers.0.mamba (JambaMambaMixer)",
    "granitemoehybrid": "first in model.layers.0.mamba (GraniteMoeHybridMambaLayer)",
    "glm_moe_dsa": "its forward fails if ranks share rows",
    "falcon": "found attention that does not go through transformers' AttentionInterface",
}
ROUNDING = 1e-3  # of logits and gradients in fp32, by their sizes; what is wrong moves them by 1e-2 and more
WHERE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
LONGEST, PROBED = 128, 64  # positions of the longest rows, and tokens of the probe's


def verdict(name: str, directory: Path, attention: str = "auto", samples: int = 2) -> str:
    """Return "works", "works without packing", "refused: why" or "wrong: by how much" for a family; a collective."""
    source, rows = directory / name.replace(" ", "_"), SharedRows(world_size())
    if is_main():
        FAMILIES[name].checkpoint(source, dtype=torch.float32)
    barrier()
    config = {"zero_optimization": {"stage": 0}}
    try:
        model = build_model(source, config, **WHERE, attn_implementation=attention).eval()
        load_weights(model, source)
        rows.attach(model)
    except (RuntimeError, ValueError) as error:
        return f"refused: {error}"
    model.config.use_cache = False
    rows.start()
    asked, vocabulary = asked_of(model, rows), torch.arange(7, 300)
    if problem := sharing_problem(asked, rows, vocabulary, longest=LONGEST, packing=False):
        return f"refused: {problem}"
    packs = sharing_problem(asked, rows, vocabulary, longest=LONGEST, packing=True) is None
    generator = torch.Generator().manual_seed(3)
    for length, borders in ((37, ()), (50, (7, 28)))[: 1 + packs]:
        row = {"input_ids": torch.randint(7, 300, (samples, length), generator=generator)}
        if borders:
            parts = zip((0, *borders), (*borders, length), strict=True)
            row["position_ids"] = torch.cat([torch.arange(end - start) for start, end in parts]).repeat(samples, 1)
        with rows.apart(model):
            whole, wanted = logits_and_gradients(model, row, slice(None))
        own, found = logits_and_gradients(model, row, rows.share(length))
        with torch.no_grad():
            differs = ((rows.whole(own) - whole).abs().max() / whole.std()).item()
        largest = max(gradient.abs().max().item() for gradient in wanted.values())
        for parameter, gradient in wanted.items():
            # A bias of keys has no gradient but for rounding, as softmax ignores it.
            size = max(gradient.abs().max().item(), 1e-2 * largest)
            summed = reduce_over_ranks(found[parameter])
            differs = max(differs, (summed - gradient).abs().max().item() / size)
        if not differs < ROUNDING:
            return f"wrong: {differs:.2g}{' packed' * bool(borders)}"
    return "works" if packs else "works without packing"


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
    probes.SHARED_TOKENS = PROBED
    found = {}
    for name in names:
        try:
            own = verdict(name, directory)
        except Exception as error:
            own = f"wrong: {type(error).__name__}: {error}"
        said = gather_objects(own)
        found[name] = next((one for one in said if not one.startswith("works")), own)
        if is_main():
            print(f"{name}: {found[name]}", flush=True)
    return found


def what_the_probe_says(source: Path) -> str | None:
    """Return what it says of a model whose second MLP mixes neighboring tokens, as no family does; a collective."""
    join_ranks()
    model, rows = build_model(source, {"zero_optimization": {"stage": 0}}, **WHERE).eval(), SharedRows(world_size())
    load_weights(model, source)
    rows.attach(model)
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out + out.roll(1, dims=1))
    model.config.use_cache = False
    rows.start()
    return sharing_problem(asked_of(model, rows), rows, torch.arange(7, 300), longest=LONGEST, packing=False)


def test_a_layer_that_mixes_tokens_is_found_in_any_model(tmp_path: Path) -> None:
    found, _ = on_ranks(what_the_probe_says, tiny_checkpoint(tmp_path, "llama", even=True, dtype=torch.float32))
    assert all(said is not None and "first in model.layers.1.mlp (LlamaMLP)" in said for said in found), found


@pytest.mark.full
def test_every_family_shares_rows_or_is_refused(tmp_path: Path) -> None:
    (found, _), _ = on_ranks(verdicts, tmp_path, list(FAMILIES))
    print(*(f"{name}: {said}" for name, said in found.items()), sep="\n")  # with -s
    assert not {name: said for name, said in found.items() if said.startswith("wrong")}
    page = " ".join((ROOT / "docs" / "long_sequences.md").read_text().split())
    counted = re.search(r"Of (\d+) tiny models .*?, (\d+) share rows, (\d+) more do so without packing", page)
    assert counted is not None
    says = [len(found), *(sum(said == kind for said in found.values()) for kind in ("works", "works without packing"))]
    assert [int(number) for number in counted.groups()] == says
    assert {found[name] for name in ("llama", "qwen3, yarn", "mixtral", "deepseek_v3", "gemma3_text")} == {"works"}
    assert found["gpt_oss"].startswith("works")
    for name, why in REFUSED.items():
        assert found[name].startswith("refused") and why in found[name], found[name]


FLASH = dict.fromkeys(("llama", "mistral, sliding window", "qwen3_moe", "deepseek_v3"), "works")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Compute what the kernel of flash attention does, of [B, T, heads, D]."""
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (distance >= 0) & (distance <= (window_size[0] if window_size[0] >= 0 else len(distance)))
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    options: dict[str, Any] = {"attn_mask": seen, "scale": softmax_scale, "enable_gqa": True}
    assert causal and not dropout_p
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Compute each sample of [T, heads, D] alone, with samples' ends in ``cu_seqlens``."""
    sizes = cu_seqlens_q.diff().tolist()
    parts = zip(*(one[None].split(sizes, 1) for one in (q, k, v)), strict=True)
    return torch.cat([flash_attn_func(*part, dropout_p, softmax_scale, causal, window_size)[0] for part in parts])


def flash_verdicts(directory: Path) -> dict[str, str]:
    """Return what families do under transformers' flash attention, with stand-ins for its kernels; a collective."""
    join_ranks()
    probes.SHARED_TOKENS = PROBED
    kernels = (flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
    flash._lazy_imports = lambda *_, **__: kernels
    PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
    return {name: verdict(name, directory, "flash_attention_2", samples=1) for name in FLASH}


@pytest.mark.full
def test_flash_attention_on_shared_rows(tmp_path: Path) -> None:
    """It finds the samples of packed rows in position ids, and has no mask."""
    (found, _), _ = on_ranks(flash_verdicts, tmp_path)
    assert found == FLASH
