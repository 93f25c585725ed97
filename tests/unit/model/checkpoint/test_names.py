"""Names on disk against names in the model, compared with transformers' own files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from model.checkpoint.load import load_weights
from model.checkpoint.names import Names, concatenates, module_name_on_disk, own_tensors
from model.ranks import RankError
from model.save.export_model import export_model
from quant.linear import StackedLinear, linears_of
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import build, edit_checkpoint, load_model, read_tensors

# Kinds of names: plain, with biases, several projections in one Linear, per expert, renamed per expert (w1, w2, w3),
# with shared experts, with a router bias that is a buffer, and experts that are fused on disk too.
DENSE = ["llama", "qwen2", "qwen3, tied", "phi3"]
MOE = ["qwen3_moe", "qwen2_moe", "mixtral", "minimax_m2", "deepseek_v3", "glm4_moe", "granitemoe"]
FUSED_ON_DISK = {"granitemoe"}
KINDS = pytest.mark.parametrize(
    ("kind", "experts"), [*((kind, "stacked") for kind in DENSE + MOE), *((kind, "per_expert") for kind in MOE)]
)
FP32 = torch.float32


def saved(kind: str, path: Path, seed: int, dtype: torch.dtype = FP32) -> PreTrainedModel:
    """A tiny model of transformers whose MLPs have odd sizes, and its checkpoint."""
    odd = {"intermediate_size": 45, "moe_intermediate_size": 13}
    model = replace(VARIANTS[kind], options={**VARIANTS[kind].options, **odd}).model(seed=seed, dtype=dtype)
    model.save_pretrained(path)
    model.config._experts_implementation = "eager"
    return model


@KINDS
def test_what_transformers_saves_is_found_exactly_once_and_gives_its_logits(kind, experts, tmp_path, seed):
    theirs = saved(kind, tmp_path, seed)
    ours = build(tmp_path, FP32, experts=experts).eval()
    names, tensors, disk = Names(ours), own_tensors(ours), read_tensors(tmp_path)

    covered: dict[int, list[int]] = {id(tensor): [] for tensor in tensors.values()}
    for key, value in disk.items():
        layout = names.layout(key)
        assert layout is not None and layout.shape == tuple(value.shape), key
        assert sum(piece.numel for piece in layout.pieces) == value.numel(), f"{key} has elements that are not read"
        for piece in layout.pieces:
            covered[id(tensors[piece.name])] += range(piece.start, piece.start + piece.numel)
    for name, tensor in tensors.items():
        assert sorted(covered[id(tensor)]) == list(range(tensor.numel())), name

    load_weights(ours, tmp_path)
    ids = torch.randint(3, 300, (2, 19))
    with torch.no_grad():
        # Gate and up are two products in one form and one in the other: fp32 rounding over two layers. Swapping gate
        # and up, or two experts, changes logits in the first digit.
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)

    own = []  # tied ones once, a stack of experts by the names of its Linears
    for name in {id(tensor): name for name, tensor in reversed(own_tensors(ours).items())}.values():
        module_name = name.rpartition(".")[0]
        module = ours.get_submodule(module_name)
        parts = linears_of(module_name, module) if isinstance(module, StackedLinear) else ()
        own += [f"{part.name}.weight" for part in parts] or [name]
    written = [names.key(name) for name in own]
    assert len(set(written)) == len(written)
    if kind in FUSED_ON_DISK:
        # One Linear per expert cannot be written under a fused name: its own name is its key, and it is read back.
        apart = own_tensors(build(tmp_path, FP32, experts="per_expert"))
        shapes = {name: tuple(tensor.shape) for name, tensor in apart.items()}
        assert all(names.layout(key).shape == shapes[name] for name, key in zip(own, written, strict=True))
    else:
        assert set(written) == set(disk)


@pytest.mark.parametrize("kind", ["qwen3_moe", "granitemoe"])
def test_what_is_missing_of_a_stack_is_named_by_expert(kind, tmp_path, seed):
    saved(kind, tmp_path, seed)
    names = Names(build(tmp_path, FP32))
    pieces = [piece for key in read_tensors(tmp_path) for piece in names.layout(key).pieces]
    piece = next(piece for piece in pieces if piece.start)
    starts = {one.start for one in pieces if one.name == piece.name}
    missing = names.missing(piece.name, starts - {piece.start})
    assert len(missing) == 1 and names.layout(missing[0]).pieces == (piece._replace(offset=0),)


def test_module_names_on_disk(tmp_path, seed):
    saved("mixtral", tmp_path, seed)
    ours = build(tmp_path, FP32)
    prefix = "model.layers.1"
    for name, on_disk in (
        ("mlp.experts.3.up_proj", "block_sparse_moe.experts.3.w3"),
        ("mlp.experts.2.down_proj", "block_sparse_moe.experts.2.w2"),
        ("self_attn.q_proj", "self_attn.q_proj"),
    ):
        assert module_name_on_disk(ours, f"{prefix}.{name}") == f"{prefix}.{on_disk}"


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_fused_tensors_on_disk_load_as_the_per_expert_ones_do(kind, tmp_path, seed):
    theirs = saved(kind, tmp_path / "experts", seed, torch.bfloat16)
    theirs.config.save_pretrained(tmp_path / "fused")
    state = {name: value.contiguous() for name, value in theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state), "the model is no longer fused inside"
    save_file(state, tmp_path / "fused" / "model.safetensors")
    one, other = (own_tensors(load_model(tmp_path / form)) for form in ("experts", "fused"))
    for (name, mine), (_, yours) in zip(one.items(), other.items(), strict=True):
        assert torch.equal(mine, yours), name


def test_base_model_keys_without_their_prefix_load(tmp_path, seed):
    """Checkpoints of the headless model have no ``model.`` in front; with tied embeddings they are complete."""
    saved("qwen3, tied", tmp_path, seed, torch.bfloat16)
    disk = read_tensors(tmp_path)
    save_file({key.removeprefix("model."): value for key, value in disk.items()}, tmp_path / "model.safetensors")
    for name, value in load_model(tmp_path).named_parameters():
        assert torch.equal(value, disk[name]), name


def test_a_conversion_that_computes_is_refused_by_name(tmp_path, seed):
    """hrm_text has several projections in one tensor on disk, which the model has apart."""
    VARIANTS["hrm_text"].checkpoint(tmp_path, seed=seed)
    with pytest.raises(RankError, match=r"not supported.*gate_up_proj\.weight \(transformers makes .* by Chunk\)"):
        load_model(tmp_path, FP32)


@pytest.mark.parametrize("kind", ["kimi_linear", "olmo_hybrid", "bailing_hybrid"])
def test_concatenated_tensors_are_read_and_written_as_they_were(kind, tmp_path, seed):
    """Three convolutions of the checkpoint are one in the model."""
    source = VARIANTS[kind].checkpoint(tmp_path / "source", seed=seed)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    ours = load_model(source)
    convolutions = {name: value for name, value in own_tensors(ours).items() if "conv1d" in name}
    assert concatenates(ours) and convolutions
    assert all(torch.equal(value, theirs[name]) for name, value in convolutions.items())
    export_model(ours, None, source, tmp_path / "export")
    before, after = read_tensors(source), read_tensors(tmp_path / "export")
    # A buffer of bailing_hybrid is fp32 in its class and bf16 in the source.
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key].to(before[key])) for key in before)


def test_models_without_concatenated_tensors_are_told(tmp_path, seed):
    for kind in ("mixtral", "llama"):
        VARIANTS[kind].config().save_pretrained(tmp_path / kind)
        assert concatenates(build(tmp_path / kind, FP32)) is False


def test_a_part_that_is_missing_behind_others_is_an_error(tmp_path, seed):
    VARIANTS["olmo_hybrid"].checkpoint(tmp_path, seed=seed)
    lost = next(key for key in read_tensors(tmp_path) if "k_conv1d" in key)
    edit_checkpoint(tmp_path, lambda tensors: tensors.pop(lost))
    with pytest.raises(RankError, match=r"q_conv1d\.weight \(transformers makes .* by Concatenate\)"):
        load_model(tmp_path, FP32)
