"""Names on disk against names in the model. transformers itself is the judge: what it saves, we must find."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from model.build import build_model
from model.checkpoint.load import load_weights
from model.checkpoint.names import Names, concatenates, module_name_on_disk, own_tensors
from model.moe.experts import Form
from model.ranks import RankError
from model.save import export_model
from quant.linear import StackedLinear, linears_of
from tests.families.variants import VARIANTS

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 45,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 13, "num_experts": 5, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
# Kinds of names: plain, with biases, several projections in one Linear, per expert, renamed per expert (w1, w2, w3),
# with shared experts, with a router bias that is a buffer, and experts that are fused on disk too.
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "phi3": {},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v3": {**EXPERTS, **GROUPS, **LATENT, "num_key_value_heads": 4, "head_dim": 8},
    "glm4_moe": {**EXPERTS, **GROUPS},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
}
FUSED_ON_DISK = {"granitemoe"}
MOE = [kind for kind, sizes in ARCHITECTURES.items() if any("experts" in key for key in sizes)]
KINDS = pytest.mark.parametrize(
    ("kind", "form"), [*((kind, "stacked") for kind in ARCHITECTURES), *((kind, "per_expert") for kind in MOE)]
)


def reference(kind: str, seed: int, dtype: torch.dtype = torch.float32, **sizes) -> PreTrainedModel:
    """A tiny model made by transformers, with random values in every parameter and persistent buffer."""
    config = AutoConfig.for_model(kind, **{**SIZES, **ARCHITECTURES.get(kind, {}), **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    model.config._experts_implementation = "eager"
    return model.eval()


def build(path: Path, dtype: torch.dtype = torch.float32, experts: Form = "stacked") -> PreTrainedModel:
    config = {"bf16": {"enabled": dtype == torch.bfloat16}}
    return build_model(path, config, dtype=dtype, device=CPU, experts=experts).eval()


def tensors_on_disk(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no dict)


def names_for_writing(model: PreTrainedModel) -> list[str]:
    """Our tensors, tied ones once, a stack of experts by the names of its Linears."""
    unique = {id(tensor): name for name, tensor in reversed(own_tensors(model).items())}
    found = []
    for name in unique.values():
        module = model.get_submodule(name.rpartition(".")[0])
        stacked = isinstance(module, StackedLinear)
        parts = linears_of(name.rpartition(".")[0], module) if stacked else ()
        found += [f"{part.name}.weight" for part in parts] or [name]
    return found


@KINDS
def test_what_transformers_saves_is_found_exactly_once_and_gives_its_logits(
    kind: str, form: Form, tmp_path: Path, seed: int
):
    theirs = reference(kind, seed)
    theirs.save_pretrained(tmp_path)
    ours = build(tmp_path, experts=form)
    names, tensors, disk = Names(ours), own_tensors(ours), tensors_on_disk(tmp_path)

    covered: dict[int, list[int]] = {id(tensor): [] for tensor in tensors.values()}
    for key, value in disk.items():
        layout = names.layout(key)
        assert layout is not None and layout.shape == tuple(value.shape), key
        assert sum(piece.numel for piece in layout.pieces) == value.numel(), f"{key} has elements that are nobody's"
        for piece in layout.pieces:
            covered[id(tensors[piece.name])] += range(piece.start, piece.start + piece.numel)
    for name, tensor in tensors.items():
        assert sorted(covered[id(tensor)]) == list(range(tensor.numel())), name

    load_weights(ours, tmp_path, progress=False)
    ids = torch.randint(3, SIZES["vocab_size"], (2, 19), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        # Gate and up are two products in one form and one in the other: fp32 rounding over two layers. Swapping gate
        # and up, or two experts, changes logits in the first digit.
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


@KINDS
def test_keys_for_writing_are_those_that_transformers_writes(kind: str, form: Form, tmp_path: Path, seed: int):
    reference(kind, seed).save_pretrained(tmp_path)
    ours = build(tmp_path, experts=form)
    names, disk, ours_to_write = Names(ours), tensors_on_disk(tmp_path), names_for_writing(ours)
    written = [names.key(name) for name in ours_to_write]
    assert len(set(written)) == len(written)
    if kind in FUSED_ON_DISK:
        # One Linear per expert cannot be written under a fused name: its own name is its key, and it is read back.
        shapes = {
            name: tuple(tensor.shape) for name, tensor in own_tensors(build(tmp_path, experts="per_expert")).items()
        }
        assert all(names.layout(key).shape == shapes[name] for name, key in zip(ours_to_write, written, strict=True))
    else:
        assert set(written) == set(disk)


@pytest.mark.parametrize("kind", ["qwen3_moe", "granitemoe"])
def test_what_is_missing_of_a_stack_is_named_by_expert(kind: str, tmp_path: Path, seed: int):
    theirs = reference(kind, seed)
    theirs.save_pretrained(tmp_path)
    names = Names(build(tmp_path))
    _, piece = next((key, p) for key in tensors_on_disk(tmp_path) for p in (names.layout(key) or ()).pieces if p.start)
    starts = [p.start for key in tensors_on_disk(tmp_path) for p in names.layout(key).pieces if p.name == piece.name]
    missing = names.missing(piece.name, set(starts) - {piece.start})
    assert len(missing) == 1 and names.layout(missing[0]).pieces == (piece._replace(offset=0),)


def test_module_names_on_disk(tmp_path: Path, seed: int):
    reference("mixtral", seed).save_pretrained(tmp_path)
    ours = build(tmp_path)
    prefix = "model.layers.1"
    assert module_name_on_disk(ours, f"{prefix}.mlp.experts.3.up_proj") == f"{prefix}.block_sparse_moe.experts.3.w3"
    assert module_name_on_disk(ours, f"{prefix}.mlp.experts.4.down_proj") == f"{prefix}.block_sparse_moe.experts.4.w2"
    assert module_name_on_disk(ours, f"{prefix}.self_attn.q_proj") == f"{prefix}.self_attn.q_proj"


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_fused_tensors_on_disk_load_as_the_per_expert_ones_do(kind: str, tmp_path: Path, seed: int):
    theirs = reference(kind, seed, torch.bfloat16)
    theirs.save_pretrained(tmp_path / "experts")
    theirs.config.save_pretrained(tmp_path / "fused")
    state = {name: value.contiguous() for name, value in theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state), "the model is no longer fused inside"
    save_file(state, tmp_path / "fused" / "model.safetensors")
    one, other = build(tmp_path / "experts", torch.bfloat16), build(tmp_path / "fused", torch.bfloat16)
    load_weights(one, tmp_path / "experts", progress=False)
    load_weights(other, tmp_path / "fused", progress=False)
    for (name, mine), (_, yours) in zip(own_tensors(one).items(), own_tensors(other).items(), strict=True):
        assert torch.equal(mine, yours), name


def test_base_model_keys_without_their_prefix_load(tmp_path: Path, seed: int):
    """Checkpoints of the headless model have no ``model.`` in front; with tied embeddings they are complete."""
    theirs = reference("qwen3", seed, torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    disk = tensors_on_disk(tmp_path)
    save_file({key.removeprefix("model."): value for key, value in disk.items()}, tmp_path / "model.safetensors")
    ours = build(tmp_path, torch.bfloat16)
    load_weights(ours, tmp_path, progress=False)
    for name, value in ours.named_parameters():
        assert torch.equal(value, disk[name]), name


def test_a_conversion_that_computes_is_refused_by_name(tmp_path: Path, seed: int):
    """hrm_text has several projections in one tensor on disk, which the model has apart."""
    VARIANTS["hrm_text"].checkpoint(tmp_path, seed=seed)
    with pytest.raises(RankError, match=r"not supported.*gate_up_proj\.weight \(transformers makes .* by Chunk\)"):
        load_weights(build(tmp_path), tmp_path, progress=False)


@pytest.mark.parametrize("kind", ["kimi_linear", "olmo_hybrid", "bailing_hybrid"])
def test_tensors_that_lie_behind_one_another_in_ours_are_read_and_written_as_they_were(
    kind: str, tmp_path: Path, seed: int
):
    """Three convolutions of the checkpoint are one in the model."""
    VARIANTS[kind].checkpoint(tmp_path / "source", seed=seed)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16).state_dict()
    ours = build(tmp_path / "source", torch.bfloat16)
    load_weights(ours, tmp_path / "source", progress=False)
    convolutions = [name for name in own_tensors(ours) if "conv1d" in name]
    assert convolutions
    for name in convolutions:
        assert torch.equal(own_tensors(ours)[name], theirs[name]), name
    export_model(ours, None, tmp_path / "source", tmp_path / "export")
    before, after = tensors_on_disk(tmp_path / "source"), tensors_on_disk(tmp_path / "export")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_which_models_have_tensors_in_parts(tmp_path: Path, seed: int):
    for kind, expected in (("olmo_hybrid", True), ("mixtral", False), ("llama", False)):
        VARIANTS[kind].config().save_pretrained(tmp_path / kind)
        assert concatenates(build(tmp_path / kind)) is expected


def test_a_part_that_is_missing_behind_others_is_an_error(tmp_path: Path, seed: int):
    VARIANTS["olmo_hybrid"].checkpoint(tmp_path, seed=seed)
    disk = tensors_on_disk(tmp_path)
    lost = next(key for key in disk if "k_conv1d" in key)
    save_file({key: value for key, value in disk.items() if key != lost}, tmp_path / "model.safetensors")
    with pytest.raises(RankError, match=r"q_conv1d\.weight \(transformers makes .* by Concatenate\)"):
        load_weights(build(tmp_path), tmp_path, progress=False)
