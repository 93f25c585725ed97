"""Losses and teachers in real runs on two ranks: other paddings, the student as its own teacher, caches, a user's loss.

That LM and distillation train right on every stage is compared with a plain loop in test_train.py and test_variants.py.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from data.loader import valid_tokens
from data.samples import IGNORE
from data.teacher_cache import TeacherCache
from engine.config.reading import load_recipe
from model.build import build_model
from model.checkpoint.load import load_weights
from model.save import export_model
from model.scales import renew_weight_scales
from quant import SCHEMES, prepare
from tests.lib.definitions import kd_loss, lm_loss
from tests.lib.launcher import run_ranks
from tests.lib.plain import inputs_of, load_result, plain_loaders, plain_weights
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint, tiny_config, tiny_tokenizer

SCRIPT = Path(__file__).parent / "scripts" / "losses.py"
STILL = {"optim": {"lr": 0.0, "scale_lr": 0.0}, "quant": {"fake_quant_start": -1, "calibration_batches": 0}}
FROZEN = {"learnable": {"weight": False, "act_scale": True}}
TOP_K = {"kd": "kl_top_k", "top_k": 7}
TEACHER_VOCABULARY = 320


def other_padding(directory: Path) -> Path:
    """A wider teacher with the same tokens and more logits than the student's 301."""
    torch.manual_seed(3)
    config = tiny_config("llama")
    config.vocab_size, config.hidden_size, config.head_dim = TEACHER_VOCABULARY, 64, 16
    LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "num_attention_heads": 4})).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def quantized(directory: Path) -> tuple[Path, Path]:
    """A checkpoint in int4, and the plain one of the weights that its codes stand for, in fp32."""
    source, coded, decoded = (directory / name for name in ("even", "coded", "decoded"))
    tiny_checkpoint(source, "llama", even=True)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    model = build_model(source, {}, **options)
    load_weights(model, source, progress=False)
    quantization = prepare(model, SCHEMES["w4a16_g32"], learn_weight_scale=False, learn_input_scale=False)
    renew_weight_scales(quantization)
    export_model(model, quantization, source, coded)
    model = build_model(coded, {}, **options)
    load_weights(model, coded, progress=False)
    shutil.copytree(source, decoded)
    weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(weights, decoded / "model.safetensors", metadata={"format": "pt"})
    return coded, decoded


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """One launch for all jobs."""
    base = tmp_path_factory.mktemp("losses")
    models = {
        kind: tiny_checkpoint(base / kind, kind, tied=kind == "qwen3") for kind in ("qwen3", "qwen3_moe", "llama")
    }
    wide = other_padding(base / "wide")
    data = write_chats(base / "chats.jsonl")
    jobs = []

    def add(kind, name, checkpoint, /, *, stage, dtype="float32", **sections):
        sections["train"] = {"steps": 2, "quant_stats_every": 1, **sections.get("train", {})}
        write_recipe(base, name, models[checkpoint], data, stage=stage, dtype=dtype, **sections)
        jobs.append([kind, name])

    for stage in (0, 3):
        loss = {"teacher": str(wide), "diagnostics_every": 2, "chunk_tokens": 5}
        kind = "qwen3_moe" if stage else "qwen3"
        add("train", f"own_{stage}", kind, stage=stage, loss=loss, **STILL)
        loss = {"teacher": str(wide), **TOP_K, "tail": True}
        add("train", f"live_{stage}", "qwen3", stage=stage, loss=loss)
        loss["teacher_cache"] = str(base / f"cache_of_{stage}")
        add("cache", f"write_{stage}", "qwen3", stage=stage, loss=loss)
        add("train", f"cached_{stage}", "qwen3", stage=stage, loss={**loss, "top_k": 5} if stage == 0 else loss)
        if stage:
            add("train", "empty", "qwen3", stage=stage, loss=loss)
    for stage in (1, 3):
        add("train", f"self_{stage}", "llama", stage=stage, loss={"teacher": "self", "lm_weight": 0.3}, **FROZEN)
    add("train", "original", "llama", stage=1, loss={"lm_weight": 0.3}, **FROZEN)
    plain = base / "plain3.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    plain.write_text(json.dumps({"zero_optimization": zero}))
    sections = {"train": {"steps": 4, "quant_stats_every": 0}, "deepspeed": str(plain)}
    add("train", "gathers_live", "llama", stage=3, loss={"teacher": str(wide)}, **sections)
    add("train", "gathers_none", "llama", stage=3, loss={"kd_weight": 0.0}, **sections)
    models["coded"], decoded = quantized(base)
    for name, teacher in (("coded", models["coded"]), ("decoded", decoded)):
        add("train", f"{name}_teacher", "qwen3", stage=3, loss={"teacher": str(teacher)})
        own = "self" if name == "coded" else str(teacher)
        add("train", f"{name}_self", "coded", stage=3, loss={"teacher": own}, **FROZEN)
    add_refused(base, add, wide)
    (base / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(SCRIPT, str(base))
    return base


REFUSED = {
    "refused_tokens": "has another tokenizer: token 290 is",
    "refused_few": "the tokenizer has 300 tokens, the student 301 logits and the teacher 290",
    "refused_samples": "is of other samples than the recipe's data",
    "refused_topk": "loss.top_k: 9, expected at most 7",
    "refused_ondisk1": "rank 1: ",
    "refused_damaged": "the cache is damaged, write it again",
}


def add_refused(base, add, wide):
    """Runs that have to end on every rank with a text that says why."""
    strange = tiny_checkpoint(base / "strange", "llama")
    tokenizer = json.loads((strange / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    by_id = {id: token for token, id in vocabulary.items()}
    vocabulary[by_id[290]], vocabulary[by_id[295]] = 295, 290
    (strange / "tokenizer.json").write_text(json.dumps(tokenizer))
    few = tiny_checkpoint(base / "few", "llama")
    config = LlamaConfig(**{**tiny_config("llama").to_dict(), "vocab_size": 290})
    LlamaForCausalLM(config).save_pretrained(few)
    cache = {"teacher": str(wide), **TOP_K, "teacher_cache": str(base / "cache_of_3")}
    add("refused", "refused_tokens", "qwen3", stage=0, loss={"teacher": str(strange)})
    add("refused", "refused_few", "qwen3", stage=0, loss={"teacher": str(few)})
    add("refused", "refused_samples", "qwen3", stage=3, loss=cache, data={"max_length": 90, "too_long": "truncate"})
    add("refused", "refused_topk", "qwen3", stage=3, loss={**cache, "top_k": 9})
    add("refused", "refused_ondisk1", "qwen3", stage=3, loss=cache)
    # Links to a cache that an earlier job writes, but for one file that is too short.
    damaged = base / "damaged"
    damaged.mkdir()
    (damaged / "manifest.json").symlink_to(base / "cache_of_3" / "manifest.json")
    for name in ("offsets", "indices", "log_probs", "log_tail", "label_log_probs"):
        (damaged / name).symlink_to(base / "cache_of_3" / name)
    (damaged / "logsumexp").write_bytes(b"1234")
    add("refused", "refused_damaged", "qwen3", stage=0, loss={**cache, "teacher_cache": str(damaged)})


def result(base: Path, name: str):
    return load_result(base / f"{name}.yaml")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused_on_every_rank(base, name):
    errors = result(base, name)["errors"]
    assert len(set(errors)) == 1 and REFUSED[name] in errors[0], errors


@pytest.mark.parametrize("stage", [0, 3])
def test_padding_diagnostics_and_a_users_loss_equal_the_definitions(base, stage):
    """Means over all tokens of the step, from logits in fp64; nothing moves, so that every step can be compared."""
    path = base / f"own_{stage}.yaml"
    settings, found = load_recipe(path), load_result(path)
    model, teacher = plain_weights(settings.model.path), plain_weights(settings.loss.teacher)
    for step in range(2):
        sums, valid = dict.fromkeys(["lm", "cakld", "entropy", "kl", "rkl", "top1"], 0.0), 0
        for batch in (batch for loader in plain_loaders(settings) for batch in loader.step(step)):
            mask = batch["labels"] != IGNORE
            labels = batch["labels"][mask]
            with torch.no_grad():
                ours = model(**inputs_of(batch)).logits[mask].double()
                # The tokenizer has 300 tokens, the student 301 logits and the teacher 320.
                theirs = teacher(**inputs_of(batch)).logits[mask].double()[:, :300]
            sums["lm"] += float(lm_loss(ours, labels).sum())
            sums["entropy"] += float(-(ours.softmax(-1) * ours.log_softmax(-1)).sum())
            for kd in ("cakld", "kl", "rkl"):
                sums[kd] += float(kd_loss(kd, ours[:, :300], theirs, labels).sum())
            sums["top1"] += float((ours[:, :300].argmax(-1) == theirs.argmax(-1)).sum())
            valid += valid_tokens([batch])
        means = {name: value / valid for name, value in sums.items()}
        losses = found["losses"][step]
        # An fp32 forward; random models of this size differ by 1e-6.
        assert losses["loss/lm"] == pytest.approx(means["lm"], rel=1e-4)
        assert losses["loss/kd/cakld"] == pytest.approx(means["cakld"], rel=1e-4)
        assert losses["loss/entropy"] == pytest.approx(means["entropy"], rel=1e-4)
        total = means["lm"] + 0.5 * means["cakld"] + 0.25 * means["entropy"]
        assert losses["loss/total"] == pytest.approx(total, rel=1e-4)
        measured = {name for name in losses if name.startswith("kd/")}
        if step == 0:  # measured every second step
            assert not measured
            continue
        assert losses["kd/forward_kl"] == pytest.approx(means["kl"], rel=1e-4)
        assert losses["kd/backward_kl"] == pytest.approx(means["rkl"], rel=1e-4)
        assert losses["kd/top1_agreement"] == pytest.approx(means["top1"], abs=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_student_as_its_own_teacher_is_the_original(base, stage):
    """Losses, grad norms and clipped fractions of a run whose teacher is the checkpoint that the student came from."""
    own, original = result(base, f"self_{stage}"), result(base, "original")
    for a, b in zip(own["losses"], original["losses"], strict=True):
        assert a["loss/kd/cakld"] > 1e-4, "the student is quantized, the teacher is not"
        # The same arithmetic, of weights that may lie at other addresses: no BLAS promises the last bit then.
        assert a == pytest.approx(b, rel=1e-3)
    assert own["norms"] == pytest.approx(original["norms"], rel=1e-2)
    # An observer that saw the teacher's pass too would count unquantized inputs of all layers but the first.
    for a, b in zip(own["seen"]["clipped"], original["seen"]["clipped"], strict=True):
        assert a and a == pytest.approx(b, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("kind", ["teacher", "self"])
def test_a_quantized_teacher_is_the_model_of_its_weights(base, kind):
    """Of codes, with inputs that are not quantized: as the teacher of another student, and of itself."""
    coded, decoded = (result(base, f"{name}_{kind}") for name in ("coded", "decoded"))
    assert all(losses["loss/kd/cakld"] > 1e-4 for losses in coded["losses"])
    for a, b in zip(coded["losses"], decoded["losses"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)  # weights may lie at other addresses
    original = load_file(base / "even" / "model.safetensors")
    weights = load_file(base / "decoded" / "model.safetensors")
    assert any(not torch.allclose(original[key].float(), weights[key], rtol=1e-2) for key in original)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_on_a_cache_equals_training_with_its_teacher(base, stage):
    cached, live = result(base, f"cached_{stage}"), result(base, f"live_{stage}")
    if stage == 0:  # fewer tokens than the cache keeps: another loss, of the same kind
        assert 0 < cached["losses"][0]["loss/kd/kl_top_k"] < live["losses"][0]["loss/kd/kl_top_k"]
        assert cached["losses"][0]["loss/lm"] == pytest.approx(live["losses"][0]["loss/lm"], rel=1e-6)
        return
    for a, b in zip(cached["losses"], live["losses"], strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    assert cached["norms"] == pytest.approx(live["norms"], rel=1e-2)


def test_a_rank_without_targets_reads_nothing_from_the_cache(base):
    for losses in result(base, "empty")["losses"]:
        assert 0 < losses["loss/kd/kl_top_k"] < 100 and np.isfinite(losses["loss/total"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_cache_holds_what_the_teacher_says(base, stage):
    settings = load_recipe(base / f"write_{stage}.yaml")
    cache = TeacherCache(base / f"cache_of_{stage}")
    cache.verify(0, 1)
    assert not (base / f"cache_of_{stage}.partial").exists()
    teacher, samples = plain_weights(settings.loss.teacher), plain_loaders(settings)[0].samples
    assert (cache.manifest.top_k, cache.manifest.vocabulary) == (7, 300)
    assert cache.manifest.samples == len(samples)
    for index, sample in enumerate(samples):
        valid = torch.from_numpy(sample.labels != IGNORE)
        with torch.no_grad():
            logits = teacher(torch.from_numpy(sample.input_ids).long()[None]).logits[0][valid][:, :300]
        log_probs = logits.double().log_softmax(-1)
        rows = cache.rows([index])
        assert len(rows) == int(valid.sum())
        found, indices, tail = cache.top_k(rows)
        # The K-th and the next may be as good as equal; their log-probabilities are compared, and where they stand.
        torch.testing.assert_close(found.double(), log_probs.topk(7).values, rtol=0, atol=1e-4)
        torch.testing.assert_close(found.double(), log_probs.gather(-1, indices), rtol=0, atol=1e-4)
        rest = log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(tail.double(), rest, rtol=0, atol=1e-4)
        labels = torch.from_numpy(sample.labels)[valid].long()
        expected = {"logsumexp": logits.double().logsumexp(-1), "label_log_probs": -lm_loss(logits.double(), labels)}
        for name, values in expected.items():
            torch.testing.assert_close(
                torch.from_numpy(cache.array(name)[rows].copy()).double(), values, rtol=0, atol=1e-4
            )


def test_lm_head_is_gathered_once_for_forward_and_backward_and_the_teachers_once(base):
    """In the third step, of two micro-batches; embedding and lm_head of a model have the same size. DeepSpeed keeps
    what backward needs soon, which in a tiny model is all of it."""
    live, none = (result(base, f"gathers_{name}")["seen"]["gathers"] for name in ("live", "none"))
    student, teacher = 301 * 48, TEACHER_VOCABULARY * 64
    assert none.count(student) == 2 * (1 + 1) and teacher not in none
    assert live.count(student) == none.count(student)
    assert live.count(teacher) == 2 * (1 + 1)
