"""Building and loading on two ranks, stages 0 to 3: values, memory, bytes read, damaged checkpoints.

One job for stage 3, one for the others. transformers' own ``from_pretrained`` is the reference throughout.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM

from model.build import check_rotary_buffers
from model.checkpoint.load import load_weights
from model.checkpoint.safetensors import INDEX
from model.ranks import rank
from model.zero import (
    WHOLE_ELEMENTS,
    WHOLE_ELEMENTS_IN_ALL,
    full_numel,
    gathered,
    init_process_group,
    is_partitioned,
    is_whole,
    keep_frozen_fp32,
    local_data,
    local_range,
    partition_new_parameters,
)
from tests.distributed.model.scripts.loading_costs import check_bytes_read, check_peak_bytes, coded, largest_linear
from tests.distributed.model.scripts.models import built, ds_config, loaded, raises
from tests.families.variants import LLAMA3, LONGROPE, YARN
from tests.lib.checkpoints import read_tensors
from tests.lib.launcher import on_ranks
from tests.lib.tiny import tiny_checkpoint, tiny_config


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints, whole and damaged."""
    directory = tmp_path_factory.mktemp("checkpoints")
    tiny_checkpoint(directory / "qwen3", "qwen3")
    tiny_checkpoint(directory / "qwen3-tied", "qwen3", tied=True, max_shard_size="20KB")
    tiny_checkpoint(directory / "llama-fp32", "llama", dtype=torch.float32)
    tiny_checkpoint(directory / "llama-fp16", "llama", dtype=torch.float16, max_shard_size="30KB")
    odd = moe(hidden_size=45)
    assert odd.lm_head.weight.numel() % 2 and odd.model.layers[0].mlp.experts.down_proj[0].numel() % 2
    odd.save_pretrained(directory / "moe", max_shard_size="25KB")
    odd.config.save_pretrained(directory / "moe-fused")
    save_file(odd.state_dict(), directory / "moe-fused" / "model.safetensors")
    moe(layers=12, num_experts=16).save_pretrained(directory / "moe-large", max_shard_size="700KB")
    assert len(list((directory / "moe-large").glob("*.safetensors"))) > 2
    for name, damage in DAMAGES.items():
        write_damaged(directory, name, damage)
    return directory


def moe(layers: int = 2, **sizes: int) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of other sizes than tiny_model's: with odd ones two ranks' partitions end in padding."""
    config = tiny_config("qwen3_moe", layers=layers)
    for name, size in sizes.items():
        setattr(config, name, size)
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    return model.bfloat16()


K_PROJ, V_PROJ = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
Tensors = dict[str, Tensor]


class Damage(NamedTuple):
    """An edit of the tensors of a copy of ``base`` (None: a shard is cut), what every rank must say (None: nothing is
    wrong), whether headers tell it, and whether rank 1 alone sees it."""

    edit: Callable[[Tensors], object] | None
    error: str | None
    base: str = "qwen3-tied"
    in_headers: bool = True
    only_rank_1: bool = False


def all_at_once(tensors: Tensors) -> None:
    tensors[V_PROJ] = tensors[V_PROJ].t().contiguous()
    tensors[K_PROJ] = tensors[K_PROJ].to(torch.float8_e4m3fn)
    tensors["y"] = tensors.pop(NORM)


def stack(tensors: Tensors) -> None:
    down = [tensors[EXPERT.format(1, expert, "down")] for expert in range(5)]
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.stack(down)


def change_tied(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    tensors["lm_head.weight"][300, 47] += 1


DAMAGES = {
    "missing": Damage(
        lambda tensors: [tensors.pop(NORM), tensors.pop(K_PROJ)],
        rf"do not fill Qwen3ForCausalLM: missing: {NORM}, {K_PROJ}$",
    ),
    "many-unexpected": Damage(
        lambda tensors: tensors.update({f"x.{i}": torch.zeros(1) for i in range(27)}),
        r"unexpected: (x\.\d+, ){19}x\.\d+ and 7 more$",
    ),
    "quantized": Damage(
        lambda tensors: tensors.update({NORM: tensors[NORM].int()}),
        rf"no codes that its quantization_config explains: {NORM} \(I32\)$",
    ),
    "all-at-once": Damage(
        all_at_once,
        rf"{K_PROJ} \(F8_E4M3\)\nmissing: {NORM}\nunexpected: y\n"
        rf"of another shape: {V_PROJ} is \[48, 16\], the model has \[16, 48\]$",
    ),
    "truncated-on-one-rank": Damage(None, r"^rank 1: .*model-00002-of-\d+\.safetensors is truncated", only_rank_1=True),
    "twice": Damage(
        stack, r"found twice: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight \(in .* and in ", base="moe"
    ),
    "an-expert-too-many": Damage(
        lambda tensors: tensors.update({EXPERT.format(0, 5, "up"): tensors[EXPERT.format(0, 4, "up")].clone()}),
        r"unexpected: model\.layers\.0\.mlp\.experts\.5\.up_proj\.weight$",
        base="moe",
    ),
    "tied-and-different": Damage(
        change_tied, rf"{EMBEDDING} and lm_head\.weight are tied .* but differ on disk", in_headers=False
    ),
    "tied-and-equal": Damage(lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}), None),
    "tied-under-the-other-name": Damage(
        lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBEDDING)}), None
    ),
    # Old checkpoints hold the rotary frequencies of every layer, and tables of their cosines and sines.
    "leftover-buffers": Damage(
        lambda tensors: tensors.update(
            {
                f"model.layers.{i}.self_attn.rotary_emb.{table}": torch.zeros(1, 1, 4, 8)
                for i in (0, 1)
                for table in ("inv_freq", "cos_cached", "sin_cached")
            }
        ),
        None,
    ),
}


def write_damaged(directory: Path, name: str, damage: Damage) -> None:
    """Make the damaged copy."""
    path = shutil.copytree(directory / damage.base, directory / name)
    if damage.edit is None:
        shard = sorted(path.glob("model-*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        edit_tensors(path, damage.edit)


def edit_tensors(path: Path, edit: Callable[[Tensors], object]) -> None:
    """Change the tensors of a sharded checkpoint: what is gone leaves its shard, what is new goes into the first."""
    index = json.loads((path / INDEX).read_text())
    placed, tensors = index["weight_map"], read_tensors(path)
    edit(tensors)
    first = min(placed.values())
    index["weight_map"] = {key: placed.get(key, first) for key in tensors}
    (path / INDEX).write_text(json.dumps(index))
    for file in set(placed.values()):
        save_file({key: tensors[key] for key, where in index["weight_map"].items() if where == file}, path / file)


def transformers_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    model.config._experts_implementation = "eager"
    return model


def expected(state: dict[str, Tensor], name: str) -> Tensor:
    """The value of our parameter ``name`` in the state dict of transformers' model, whose experts are fused."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if found is None:
        return state[re.sub(r"(\.experts\.\w+)\.weight", r"\1", name)]
    prefix, expert, projection = found[1], int(found[2]), found[3]
    if projection == "down":
        return state[f"{prefix}.down_proj"][expert]
    gate, up = state[f"{prefix}.gate_up_proj"][expert].chunk(2)
    return gate if projection == "gate" else up


def check_values(path: Path, stage: int) -> None:
    """Every parameter, by both ways of loading and in both forms of experts, equals the file bit for bit; buffers and
    tying are transformers'."""
    config = ds_config(stage)
    reference = transformers_model(path, torch.bfloat16)
    state = reference.state_dict()
    direct, rank0, separate = (built(path, config, experts=form) for form in ("stacked", "stacked", "per_expert"))
    if stage == 3:
        for parameter in direct.parameters():
            parameter.ds_tensor.fill_(torch.nan)  # what uninitialized memory may hold
    load_weights(direct, path)
    load_weights(rank0, path, method="rank0")
    load_weights(separate, path)
    for name, parameter in direct.named_parameters():
        if stage == 3:
            start, stop = local_range(parameter)
            assert not parameter.ds_tensor[stop - start :].any(), f"{name}: the padding is not zero"
    for model in direct, rank0, separate:
        parameters = dict(model.named_parameters())
        assert all(is_partitioned(parameter) == (stage == 3) for parameter in parameters.values())
        assert sum(map(full_numel, parameters.values())) == sum(p.numel() for p in reference.parameters())
        tied = model.config.tie_word_embeddings
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        with gathered(parameters.values()):
            for name, parameter in parameters.items():
                value = expected(state, name)
                assert parameter.dtype == torch.bfloat16 and parameter.shape == value.shape, name
                assert torch.equal(parameter, value), f"stage {stage}, {path.name}: {name} is not what the file holds"
        compare_buffers(model, reference)
    for (name, one), other in zip(direct.named_parameters(), rank0.parameters(), strict=True):
        assert torch.equal(local_data(one), local_data(other)), name


def compare_buffers(model: nn.Module, reference: nn.Module) -> None:
    ours, theirs = dict(model.named_buffers()), dict(reference.named_buffers())
    assert ours.keys() == theirs.keys() and any(name.endswith("inv_freq") for name in ours)
    for name, buffer in ours.items():
        assert buffer.dtype == theirs[name].dtype and torch.equal(buffer, theirs[name]), name


ROPES = {"linear": {"factor": 3.0}, "dynamic": {"factor": 3.0}, "yarn": YARN, "llama3": LLAMA3}
ROPES |= {"longrope": {**LONGROPE, "factor": 8.0}}


def check_rope_kinds(directory: Path, stage: int) -> None:
    """inv_freq in fp32 and bit-equal to a plain transformers build, for every way of scaling it."""
    for kind, parameters in ROPES.items():
        config = tiny_config("llama", layers=1)
        config.rope_parameters = {"rope_theta": 10000.0, **parameters, "rope_type": kind}
        path = directory / f"rope-{kind}-{rank()}"
        config.save_pretrained(path)
        model = built(path, ds_config(stage))
        compare_buffers(model, AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()
    with raises(r"model\.rotary_emb\.inv_freq \(torch\.bfloat16\)"):
        check_rotary_buffers(model)


def check_forward(path: Path, stage: int, **zero: Any) -> None:
    """fp32 logits of transformers' model, each rank with its own tokens, so that ranks route differently."""
    config = ds_config(stage, torch.float32, **zero)
    model = loaded(path, config, torch.float32).eval()
    if stage == 3:
        model, *_ = deepspeed.initialize(model=model, config=config)
    ids = torch.randint(3, 300, (2, 23), generator=torch.Generator().manual_seed(rank()))
    with torch.no_grad():
        theirs = transformers_model(path, torch.float32)(ids).logits
        # fp32 products of the same numbers; gate and up are one product there and two here.
        torch.testing.assert_close(model(ids).logits, theirs, rtol=1e-4, atol=1e-4)


def check_frozen_fp32(path: Path, stage: int) -> None:
    """A frozen fp32 parameter made after the model keeps dtype and value through initialize and a step."""
    config = ds_config(stage)
    del config["zero_optimization"]["stage3_param_persistence_threshold"]
    value = torch.rand(7, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(value, value.bfloat16().float()), "the value would not show a cast"
    model = loaded(path, config)
    model.frozen = nn.Parameter(value.clone(), requires_grad=False)
    partition_new_parameters(model, config)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with keep_frozen_fp32(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trainable, lr=1e-3), config=config)
    check_rotary_buffers(engine.module)
    before = local_data(model.lm_head.weight).clone()
    ids = torch.randint(3, 300, (1, 11), generator=torch.Generator().manual_seed(rank()))
    engine.backward(engine(ids, labels=ids).loss)
    engine.step()
    assert not torch.equal(before, local_data(model.lm_head.weight)), "the step did nothing"
    with gathered([model.frozen]):
        assert model.frozen.dtype == torch.float32 and torch.equal(model.frozen, value), f"stage {stage}"
    assert {parameter.dtype for parameter in trainable} == {torch.bfloat16}
    if stage == 3:
        check_partitions_are_current(model)
        assert torch.isfinite(engine(ids, labels=ids).loss), "the engine no longer runs after gathering"


def check_partitions_are_current(model: nn.Module) -> None:
    """After a step, and with small parameters kept gathered, local_data still gives the values of the parameters."""
    mine = [(parameter, local_data(parameter).clone()) for parameter in model.parameters()]
    with gathered(model.parameters()):
        for parameter, values in mine:
            start, stop = local_range(parameter)
            assert torch.equal(parameter.detach().flatten()[start:stop], values)


def check_scales_under_hpz(path: Path) -> None:
    """Values written to whole and partitioned scales in one list are those that forwards gather from hpZ's copies."""
    config = ds_config(3, zero_hpz_partition_size=2)
    model = loaded(path, config)
    model.small = nn.Parameter(torch.ones(10), requires_grad=False)
    model.large = nn.Parameter(torch.ones(WHOLE_ELEMENTS + 2), requires_grad=False)
    partition_new_parameters(model, config)
    assert is_whole(model.small) and not is_whole(model.large)
    for value in (7.0, 8.0):
        with gathered([model.small, model.large], modifier_rank=0), torch.no_grad():
            for parameter in (model.small, model.large):
                parameter.fill_(value if rank() == 0 else -1)
        for parameter in (model.small, model.large):
            parameter.all_gather_coalesced([parameter]).wait()
            assert (parameter == value).all(), f"forwards gather {parameter[:3]}"
            parameter.partition()


def check_scales_over_the_limit() -> None:
    """Frozen parameters are whole while they are few elements in all; those that do not fit any more are shared out."""
    few = WHOLE_ELEMENTS_IN_ALL // WHOLE_ELEMENTS
    sizes = [WHOLE_ELEMENTS] * (few + 2) + [10]
    module = nn.ParameterList(nn.Parameter(torch.zeros(size), requires_grad=False) for size in sizes)
    partition_new_parameters(module, ds_config(3))
    assert [is_whole(parameter) for parameter in module] == [True] * few + [False, False, True]


def check_damaged(directory: Path, stage: int) -> None:
    """Each damaged checkpoint gives one error on every rank, and where headers tell it nothing has been written."""
    for name, damage in DAMAGES.items():
        path = directory / (name if rank() == 1 or not damage.only_rank_1 else damage.base)
        model = built(directory / damage.base, ds_config(stage))
        for method in ("direct", "rank0"):
            for parameter in model.parameters():
                local_data(parameter).fill_(7)
            if damage.error is None:
                load_weights(model, path, method=method)
                continue
            with raises(damage.error):
                load_weights(model, path, method=method)
            if damage.in_headers:
                assert all((local_data(parameter) == 7).all() for parameter in model.parameters()), name


def check_all(directory: Path, stages: tuple[int, ...]) -> None:
    """All checks; without an engine, stages 0 to 2 are the same."""
    init_process_group()
    last = stages[-1]
    for path in ("qwen3", "qwen3-tied", "llama-fp32", "llama-fp16", "moe", "moe-fused"):
        check_values(directory / path, last)
    for path in ("llama-fp32", "moe"):
        check_forward(directory / path, last)
    for stage in stages:
        check_frozen_fp32(directory / "qwen3", stage)
    check_damaged(directory, last)
    check_rope_kinds(directory, last)
    with raises(r"model\.dtype is torch\.float32, but .* trains in torch\.bfloat16"):
        built(directory / "qwen3", ds_config(last), torch.float32)
    if last == 3:
        check_forward(directory / "moe", 3, zero_hpz_partition_size=2)
        check_scales_under_hpz(directory / "qwen3")
        check_bytes_read(directory / "moe-large")
        check_peak_bytes(directory / "moe-large")
        codes = coded(directory / "moe-large")
        check_peak_bytes(codes, decoded=largest_linear(codes))
        check_scales_over_the_limit()


@pytest.mark.parametrize("stages", [(0, 1, 2), (3,)])
def test_stages(checkpoints: Path, stages: tuple[int, ...]) -> None:
    on_ranks(check_all, checkpoints, stages)
