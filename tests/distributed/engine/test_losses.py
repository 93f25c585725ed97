"""Losses, teachers, caches and every form of data in real runs on two ranks, against formulas and a plain loop."""

import copy
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from data.loader import MicroBatch, valid_tokens
from data.samples import IGNORE
from data.teacher_cache import CACHE_DTYPES, TeacherCache
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.losses.objective import KD_KINDS, LossChunk
from engine.session.probes import needs_mask
from model.ranks import rank
from model.save.export_model import export_model
from quant import SCHEMES
from quant.reference import absmax_scale, fake_quant
from tests.distributed.engine.scripts.train import end_of
from tests.lib.checkpoints import load_model, quantized
from tests.lib.definitions import kd_loss, lm_loss
from tests.lib.host_waits import HostWaits
from tests.lib.launcher import on_ranks
from tests.lib.plain import (
    assert_equals_plain_loop,
    inputs_of,
    load_result,
    plain_loaders,
    plain_weights,
)
from tests.lib.root import ROOT
from tests.lib.tiny import TEXT, tiny_checkpoint, tiny_config, tiny_tokenizer
from tests.lib.variants import NO_TEACHER, Variant, each, runs_of
from tools.write_teacher_cache import check_recipe, write_cache

TEACHER_VOCABULARY = 320

# ---------------------------------------------------------------------------------------------------------------------
# What loops get beside their recipes
# ---------------------------------------------------------------------------------------------------------------------


def losses_in_turn(loop: Loop, seen: dict[str, Any]) -> None:
    """Another distillation loss in each step; and a user's, the student's entropy."""
    for step, kind in enumerate(KD_KINDS):

        @loop.at(step)
        def choose(state: LoopState, kind: str = kind) -> None:
            state.recipe.loss.kd = kind  # type: ignore[assignment]
            state.recipe.loss.temperature = 2.0 if kind == "kd" else 1.0

    @loop.token_loss("entropy", weight=0.25)
    def entropy(chunk: LossChunk) -> torch.Tensor:
        log_q = chunk.student.log_softmax(-1)
        return -(log_q.exp() * log_q).sum(-1)


def cache_first(loop: Loop, seen: dict[str, Any]) -> None:
    """Writes the teacher cache of the recipe."""
    recipe = copy.deepcopy(loop.recipe)
    recipe.parallel.sequence = 3  # of training ranks, of which there are more
    write_cache(recipe, check_recipe(recipe, None))


class Gathers(TorchDispatchMode):
    """Sizes of what all-gathers put together, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            output = args[0]
            while isinstance(output, list | tuple):
                output = output[0]
            self.sizes.append(output.numel())
        return func(*args, **(kwargs or {}))


def gathers(loop: Loop, seen: dict[str, Any]) -> None:
    """Keep the sizes of all that the third step gathers."""
    mode = Gathers()
    loop.at(2)(lambda state: mode.__enter__())

    @loop.every(3)
    def end(state: LoopState) -> None:
        mode.__exit__(None, None, None)
        seen["gathers"] = mode.sizes
        state.stop()


def rank_1_without_targets(loop: Loop, seen: dict[str, Any]) -> None:
    """Rank 1 has no token with a target."""

    @loop.at(0)
    def mask(state: LoopState) -> None:
        step = state.loader.step

        def masked(k: int) -> list[MicroBatch]:
            batches = step(k)
            for batch in batches:
                batch["labels"].fill_(IGNORE)
            return batches

        if rank() == 1:
            state.loader.step = masked


def without_mask(loop: Loop, seen: dict[str, Any]) -> None:
    """Padded rows have no attention mask if the model needs none, as on a GPU; and what the forward gets."""

    @loop.at(0)
    def ask(state: LoopState) -> None:
        state.session = replace(state.session, mask=needs_mask(state.session, state.loader.samples))
        seen["needs_mask"], seen["given"] = state.session.mask, set()
        state.model.register_forward_pre_hook(lambda *call: seen["given"].update(call[2]), with_kwargs=True)


def host_waits(loop: Loop, seen: dict[str, Any]) -> None:
    """Count the waits of the second step, and of the third, which measures the quantization."""
    without_mask(loop, seen)
    for step, name in ((1, "plain"), (2, "measured")):
        waits = HostWaits()
        loop.at(step)(lambda state, waits=waits: waits.__enter__())

        @loop.every(step + 1)
        def end(state: LoopState, waits: HostWaits = waits, name: str = name) -> None:
            if name not in seen:
                waits.__exit__(None, None, None)
                seen[name] = dict(waits.by_function)


# ---------------------------------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------------------------------

TWO = {"steps": 2}
STILL = {"optim": {"lr": 0.0, "scale_lr": 0.0}, "quant": {"fake_quant_start": -1, "calibration_batches": 0}}
SCALES = {"stage": 3, "train": TWO, "learnable": {"weight": False, "act_scale": True}}
CALIBRATED = {"stage": 3, "loss": NO_TEACHER, "train": {"steps": 2}}
PACKED = {"packing": True, "micro_batch_size": 1}


def without_targets(stage: int) -> Variant:
    sections = {"stage": stage, "loss": NO_TEACHER, "train": {"steps": 2}}
    return Variant(sections, "qwen3_moe", action=rank_1_without_targets)


def other_padding(directory: Path) -> Path:
    """A wider teacher with the same tokens and more logits than the student's 301."""
    torch.manual_seed(3)
    config = tiny_config("llama")
    config.vocab_size, config.hidden_size, config.head_dim = TEACHER_VOCABULARY, 64, 16
    LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "num_attention_heads": 4})).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def coded_and_decoded(directory: Path) -> tuple[Path, Path]:
    """A checkpoint in int4, and the plain one of the weights that its codes stand for, in fp32."""
    source, coded, decoded = (directory / name for name in ("even", "coded", "decoded"))
    tiny_checkpoint(source, "llama", even=True)
    export_model(*quantized(source, SCHEMES["w4a16_g32"]), source, coded)
    shutil.copytree(source, decoded)
    weights = {key: value.contiguous() for key, value in load_model(coded, torch.float32).state_dict().items()}
    save_file(weights, decoded / "model.safetensors", metadata={"format": "pt"})
    return coded, decoded


def plain_and_rounded(directory: Path) -> tuple[Path, Path]:
    """A checkpoint with experts, and the one of its linear weights in 8 bits with a scale per output."""
    plain, rounded = directory / "plain", directory / "rounded"
    shutil.copytree(tiny_checkpoint(plain, "qwen3_moe"), rounded)
    weights = load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            largest, spec = weight.float().abs().amax(1, keepdim=True), SCHEMES["w8a16_channel"].weights
            weights[name] = fake_quant(weight.float(), absmax_scale(largest, spec), spec)
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    return plain, rounded


def top_k(base: Path, **options: Any) -> dict[str, Any]:
    """Section ``loss`` of runs on the tokens that the wider teacher finds most likely."""
    return {"teacher": f"{base}/wide", "kd": "kl_top_k", "top_k": 7, "tail": True, **options}


def runs(base: Path) -> dict[str, Variant]:
    """All runs; those on the cache behind the one that writes it."""
    text = base / "text.txt"
    text.write_text(TEXT * 20)
    wide, (coded, decoded) = other_padding(base / "wide"), coded_and_decoded(base)
    plain, rounded = plain_and_rounded(base)
    in_8_bits = {"teacher": str(plain), "teacher_weights": "int8"}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    (base / "unfetched.json").write_text(json.dumps({"zero_optimization": zero}))
    gathering = {"stage": 3, "deepspeed": f"{base}/unfetched.json", "train": {"steps": 4, "quant_stats_every": 0}}
    cached = {"stage": 3, "train": TWO, "loss": top_k(base, teacher_cache=f"{base}/cache")}
    few = {**cached, "loss": {**cached["loss"], "top_k": 5}}
    # A teacher far from the student, so that the directions of the divergences and the confidence matter.
    distilled = {"teacher": str(wide), "top_k": 5, "diagnostics_every": 2, "chunk_tokens": 5}
    kinds = {"stage": 3, "train": {"steps": len(KD_KINDS)}, "loss": distilled, **STILL}
    waiting = {"stage": 3, "train": {"steps": 3, "quant_stats_every": 3}, "loss": NO_TEACHER}
    of_text = {"train": [str(text)], "kind": "text", "max_length": 24}
    recomputed = {"steps": 2, "activation_checkpointing": True}
    return {
        "kinds": Variant(kinds, "qwen3_moe", action=losses_in_turn),
        "cached": Variant(cached, "qwen3 tied", action=cache_first),
        "cached_few": Variant(few, "qwen3 tied"),
        "cached_empty": Variant(cached, "qwen3 tied", action=rank_1_without_targets),
        "live": Variant({**cached, "loss": top_k(base)}, "qwen3 tied"),
        "coded_teacher": Variant({"stage": 3, "train": TWO, "loss": {"teacher": str(coded)}}, "qwen3 tied"),
        "decoded_teacher": Variant({"stage": 3, "train": TWO, "loss": {"teacher": str(decoded)}}, "qwen3 tied"),
        "coded_int8": Variant({"stage": 3, "train": TWO, "loss": in_8_bits}, "qwen3 tied"),
        "decoded_int8": Variant({"stage": 3, "train": TWO, "loss": {"teacher": str(rounded)}}, "qwen3 tied"),
        "full_int8": Variant({"stage": 3, "train": TWO, "loss": {"teacher": str(plain)}}, "qwen3 tied"),
        "coded_self": Variant({**SCALES, "model": {"path": str(coded)}, "loss": {"teacher": "self"}}),
        "decoded_self": Variant({**SCALES, "model": {"path": str(coded)}, "loss": {"teacher": str(decoded)}}),
        "gathers_live": Variant({**gathering, "loss": {"teacher": str(wide)}}, "llama", action=gathers),
        "gathers_none": Variant({**gathering, "loss": {"kd_weight": 0.0}}, "llama", action=gathers),
        "text": Variant({"stage": 2, "train": {"steps": 2}, "loss": NO_TEACHER, "data": of_text}),
        "packed": Variant({"stage": 3, "train": recomputed, "data": {"packing": True}}),
        "unmasked": Variant({"stage": 3, "train": {"steps": 2}}, "qwen3_moe", action=without_mask),
        "waits": Variant(waiting, "qwen3_moe", action=host_waits),
        # Logits go on after lm_head: through a soft cap, and times a factor. The teacher's do too.
        "capped": Variant({"stage": 3}, "gemma2"),
        "scaled": Variant({"stage": 1, "loss": {"kd": "rkl"}}, "cohere2"),
        # All samples calibrate: of the packed rows a rank has several samples, others than the other rank has.
        "calibrated_padded": Variant({**CALIBRATED, "quant": {"calibration_batches": 12}}, dtype="bfloat16"),
        "calibrated_packed": Variant(
            {**CALIBRATED, "data": PACKED, "quant": {"calibration_batches": 16}}, dtype="bfloat16"
        ),
        "empty_3": without_targets(3),
    }


paths = runs_of(runs, {f"empty_{stage}": without_targets(stage) for stage in (1, 2)})


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------


def test_every_loss_and_the_diagnostics_equal_their_definitions(paths):
    """Means over all tokens of the step, from logits in fp64; nothing moves, so that every step can be compared."""
    settings, found = load_recipe(paths["kinds"]), load_result(paths["kinds"])
    model, teacher = plain_weights(settings.model.path), plain_weights(settings.loss.teacher)
    loaders = plain_loaders(settings)
    for step, kind in enumerate(KD_KINDS):
        sums, valid = dict.fromkeys(["lm", kind, "entropy", "kl", "rkl", "top1"], 0.0), 0
        for batch in (batch for loader in loaders for batch in loader.step(step)):
            mask = batch["labels"] != IGNORE
            labels = batch["labels"][mask]
            with torch.no_grad():
                ours = model(**inputs_of(batch)).logits[mask].double()
                # The tokenizer has 300 tokens, the student 301 logits and the teacher 320.
                theirs = teacher(**inputs_of(batch)).logits[mask].double()[:, :300]
            sums["lm"] += float(lm_loss(ours, labels).sum())
            sums["entropy"] += float(-(ours.softmax(-1) * ours.log_softmax(-1)).sum())
            for kd in {kind, "kl", "rkl"}:
                options = {"temperature": 2.0 if kd == "kd" else 1.0, "top_k": 5}
                sums[kd] += float(kd_loss(kd, ours[:, :300], theirs, labels, **options).sum())
            sums["top1"] += float((ours[:, :300].argmax(-1) == theirs.argmax(-1)).sum())
            valid += valid_tokens([batch])
        means = {name: value / valid for name, value in sums.items()}
        expected = {"loss/lm": means["lm"], f"loss/kd/{kind}": means[kind], "loss/entropy": means["entropy"]}
        expected["loss/total"] = means["lm"] + 0.5 * means[kind] + 0.25 * means["entropy"]
        if step % 2:  # in every second step
            expected |= {"kd/forward_kl": means["kl"], "kd/backward_kl": means["rkl"]}
            assert found["losses"][step].pop("kd/top1_agreement") == pytest.approx(means["top1"], abs=1e-6)
        # An fp32 forward; random models of this size differ by 1e-6.
        assert found["losses"][step] == pytest.approx(expected, rel=1e-4), kind


@each(["capped", "scaled"])
def test_models_that_change_their_logits_equal_a_plain_loop(paths, name):
    assert_equals_plain_loop(paths[name])


def test_lm_head_is_gathered_once_for_forward_and_backward_and_the_teachers_once(paths):
    """In the third step, of two micro-batches; embedding and lm_head of a model have the same size. DeepSpeed keeps
    what backward needs soon, which in a tiny model is all of it."""
    live, none = (load_result(paths[f"gathers_{name}"])["seen"]["gathers"] for name in ("live", "none"))
    student, teacher = 301 * 48, TEACHER_VOCABULARY * 64
    assert none.count(student) == 2 * (1 + 1) and teacher not in none
    assert live.count(student) == none.count(student)
    assert live.count(teacher) == 2 * (1 + 1)


# What asks for a value in a step: of tensors that lie on the host on a GPU too (batches before they are copied, the
# step counts of torch's Adam),
ON_THE_HOST = {
    "data/loader.py: on_device",
    "data/loader.py: <genexpr>",
    "data/loader.py: pad",
    "data/loader.py: real_tokens",
    "deepspeed/runtime/zero/stage3.py: step_with_gradscaler",
}
# on a CPU alone, where experts are multiplied in a loop,
ON_A_CPU = {"quant/gemm.py: _split"}
# and what remains: the counts before the first forward; DeepSpeed's look whether the norm is finite, before the update;
# the losses and the norm after it.
WAITS = {
    "engine/checks.py: sum_where_ranks_agree": 1,
    "deepspeed/runtime/utils.py: is_invalid_grad_norm": 1,
    "engine/step.py: _reduce": 1,
}


def test_a_step_waits_for_its_counts_and_for_its_losses_alone(paths):
    """Nothing between: no forward, loss, backward or update."""
    seen = load_result(paths["waits"])["seen"]
    found = {name: count for name, count in seen["plain"].items() if name not in ON_THE_HOST | ON_A_CPU}
    assert found == WAITS
    # A step that measures the quantization reads more, but of the scales' gradients one norm.
    assert seen["measured"]["model/zero/optimizer_state.py: gradient_norm"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Teachers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["teacher", "self"])
def test_a_quantized_teacher_is_the_model_of_its_weights(paths, kind):
    """Codes, with inputs that are not quantized: as the teacher of another student, and of itself, which is then
    without fake quant."""
    coded, decoded = (load_result(paths[f"{name}_{kind}"]) for name in ("coded", "decoded"))
    assert all(losses["loss/kd/cakld"] > 1e-4 for losses in coded["losses"])
    for a, b in zip(coded["losses"], decoded["losses"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)  # weights may lie at other addresses
    base = paths["live"].parent
    original, weights = (load_file(base / name / "model.safetensors") for name in ("even", "decoded"))
    assert any(not torch.allclose(original[key].float(), weights[key], rtol=1e-2) for key in original)


def test_a_teacher_in_int8_is_the_model_of_its_rounded_weights(paths):
    """Experts among them; router, embedding and lm_head stay. The run says so, with the number of weights."""
    coded, decoded, full = (load_result(paths[f"{name}_int8"])["losses"] for name in ("coded", "decoded", "full"))
    for one, same, other in zip(coded, decoded, full, strict=True):
        off, changed = (abs(one["loss/kd/cakld"] / its["loss/kd/cakld"] - 1) for its in (same, other))
        assert off < 1e-4 < 3e-4 < changed
    tensors = load_file(paths["live"].parent / "plain" / "model.safetensors")
    weights = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith("_proj.weight"))
    assert f"teacher in int8: {weights:,} weights of " in paths.said()


def test_training_on_a_cache_equals_training_with_its_teacher(paths):
    cached, live = load_result(paths["cached"]), load_result(paths["live"])
    for a, b in zip(cached["losses"], live["losses"], strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    assert cached["norms"] == pytest.approx(live["norms"], rel=1e-2)
    # Fewer tokens than the cache keeps: another loss, of the same kind.
    few = load_result(paths["cached_few"])["losses"][0]
    assert 0 < few["loss/kd/kl_top_k"] < live["losses"][0]["loss/kd/kl_top_k"]
    assert few["loss/lm"] == pytest.approx(live["losses"][0]["loss/lm"], rel=1e-6)
    for losses in load_result(paths["cached_empty"])["losses"]:  # a rank without targets reads nothing
        assert 0 < losses["loss/kd/kl_top_k"] < 100 and np.isfinite(losses["loss/total"])


def test_a_cache_holds_what_the_teacher_says(paths):
    settings = load_recipe(paths["cached"])
    directory = Path(settings.loss.teacher_cache)
    cache = TeacherCache(directory)
    cache.verify(0, 1)
    assert not directory.with_name("cache.partial").exists()
    teacher, samples = plain_weights(settings.loss.teacher), plain_loaders(settings)[0].samples
    assert (cache.manifest.top_k, cache.manifest.vocabulary) == (7, 300)
    assert cache.manifest.samples == len(samples)
    for index, sample in enumerate(samples):
        valid = torch.from_numpy(sample.labels != IGNORE)
        with torch.no_grad():
            logits = teacher(torch.from_numpy(sample.input_ids).long()[None]).logits[0][valid][:, :300].double()
        log_probs, labels = logits.log_softmax(-1), torch.from_numpy(sample.labels)[valid].long()
        rows = cache.rows([index])
        assert len(rows) == int(valid.sum())
        found, indices, tail = cache.top_k(rows)
        stored = {
            name: torch.from_numpy(np.fromfile(directory / name, CACHE_DTYPES[name])[rows])
            for name in ("logsumexp", "label_log_probs")
        }
        # The K-th and the next may be as good as equal; their log-probabilities are compared, and where they stand.
        for value, expected in (
            (found, log_probs.topk(7).values),
            (found, log_probs.gather(-1, indices)),
            (tail, log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1)),
            (stored["logsumexp"], logits.logsumexp(-1)),
            (stored["label_log_probs"], -lm_loss(logits, labels)),
        ):
            torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-4)


def hide_on_rank_1(loop: Loop) -> None:
    """The cache has a relative path, which leads nowhere from the current directory of rank 1."""
    loop.recipe.loss.teacher_cache = os.path.relpath(str(loop.recipe.loss.teacher_cache))
    if os.environ["RANK"] == "1":  # the ranks have not met yet
        os.chdir(ROOT / "tests")


def test_a_cache_that_one_rank_lacks_is_an_error_on_both(paths):
    for end in on_ranks(end_of, paths["cached_few"], hide_on_rank_1)[0]:
        assert end.text.startswith("RanksDifferError: the ranks differ: loss.teacher_cache"), end
        assert re.search(r"not there on \S+ \(rank 1\)", end.text), end


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def test_text_has_a_target_at_every_token(paths):
    batches = [batch for loader in plain_loaders(load_recipe(paths["text"])) for batch in loader.step(0)]
    assert valid_tokens(batches) == sum(batch["input_ids"].numel() for batch in batches)
    assert_equals_plain_loop(paths["text"])


def test_packed_rows_equal_a_plain_loop_with_the_mask_written_out(paths):
    batches = plain_loaders(load_recipe(paths["packed"]))[0].step(0)
    assert max(len(batch["sample_ids"]) for batch in batches) > 2, "two rows of one sample each"
    assert_equals_plain_loop(paths["packed"])


def test_padded_rows_without_a_mask_equal_a_plain_loop_with_one(paths):
    """The model was asked, as was its teacher, on both ranks."""
    seen = load_result(paths["unmasked"])["seen"]
    assert not seen["needs_mask"] and seen["given"] == {"input_ids", "use_cache"}
    batches = [batch for loader in plain_loaders(load_recipe(paths["unmasked"])) for batch in loader.step(0)]
    assert any((batch["attention_mask"] == 0).any() for batch in batches), "nothing is padded"
    assert_equals_plain_loop(paths["unmasked"])


def test_samples_of_packed_rows_calibrate_as_they_do_by_themselves(paths):
    """On stage 3, where a forward is a collective, ranks have unequal numbers of samples to look at."""
    padded, packed = (load_result(paths[f"calibrated_{rows}"])["weights"] for rows in ("padded", "packed"))
    scales = [name for name in padded if name.endswith("input_s0")]
    assert scales and all(torch.equal(packed[name], padded[name]) for name in scales)


@each(["empty_3"], ["empty_1", "empty_2"])
def test_a_rank_without_targets_takes_part_with_zero(paths, name):
    """The mean is over rank 0's tokens; the ranks stay together, with experts too."""
    assert_equals_plain_loop(paths[name], without_targets=(1,))
