"""Building and loading on two ranks, stages 0 to 3: values, memory, bytes read, damaged checkpoints.

One launch for stage 3, one for the others; what is checked stands in scripts/build_load.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from tests.lib.launcher import run_ranks
from tests.lib.seeds import seed_of
from tests.lib.tiny import tiny_checkpoint, tiny_config

SCRIPT = Path(__file__).parent / "scripts" / "build_load.py"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def seed() -> int:
    """One for values and tokens of all tests."""
    return seed_of(__name__)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """Small checkpoints, whole and damaged."""
    directory = tmp_path_factory.mktemp("checkpoints")
    tiny_checkpoint(directory / "qwen3", "qwen3", seed=seed)
    tiny_checkpoint(directory / "qwen3-tied", "qwen3", seed=seed, tied=True, max_shard_size="20KB")
    tiny_checkpoint(directory / "llama-fp32", "llama", seed=seed, dtype=torch.float32)
    tiny_checkpoint(directory / "llama-fp16", "llama", seed=seed, dtype=torch.float16, max_shard_size="30KB")
    odd = moe(seed, hidden_size=45)
    assert odd.lm_head.weight.numel() % 2 and odd.model.layers[0].mlp.experts.down_proj[0].numel() % 2
    odd.save_pretrained(directory / "moe", max_shard_size="25KB")
    odd.config.save_pretrained(directory / "moe-fused")
    save_file(odd.state_dict(), directory / "moe-fused" / "model.safetensors")
    moe(seed, layers=12, num_experts=16).save_pretrained(directory / "moe-large", max_shard_size="700KB")
    assert len(list((directory / "moe-large").glob("*.safetensors"))) > 2
    manifest = [damage(directory) for damage in DAMAGES]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def moe(seed: int, layers: int = 2, **sizes: int) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of other sizes than tiny_model's: with odd ones two ranks' partitions end in padding."""
    config = tiny_config("qwen3_moe", layers=layers)
    for name, size in sizes.items():
        setattr(config, name, size)
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    return model.bfloat16()


def test_stages_0_to_2(checkpoints: Path, seed: int):
    output = run_ranks(SCRIPT, str(checkpoints), str(seed), "0", "1", "2")
    assert output.count("all checks passed") == 2


def test_stage_3(checkpoints: Path, seed: int):
    output = run_ranks(SCRIPT, str(checkpoints), str(seed), "3")
    assert output.count("all checks passed") == 2


# ----------------------------------------------------------------------------------------------------------------------
# Damaged checkpoints
# ----------------------------------------------------------------------------------------------------------------------

Edit = Callable[[Path], None]
DAMAGES: list[Callable[[Path], dict]] = []


def damaged(
    name: str, error: str | None, *, base: str = "qwen3-tied", in_headers: bool = True, only_rank_1: bool = False
):
    """Register an edit of a copy of ``base``: what every rank must say (None: nothing is wrong), and from what on."""

    def register(edit: Edit) -> Edit:
        def make(directory: Path) -> dict:
            shutil.copytree(directory / base, directory / name)
            edit(directory / name)
            return {"path": name, "base": base, "error": error, "in_headers": in_headers, "only_rank_1": only_rank_1}

        DAMAGES.append(make)
        return edit

    return register


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a sharded checkpoint: what is gone leaves its shard, what is new goes into the first."""
    index = json.loads((path / INDEX).read_text())
    placed = index["weight_map"]
    tensors = {key: tensor for file in set(placed.values()) for key, tensor in load_file(path / file).items()}
    edit(tensors)
    first = min(placed.values())
    index["weight_map"] = {key: placed.get(key, first) for key in tensors}
    (path / INDEX).write_text(json.dumps(index))
    for file in set(placed.values()):
        save_file({key: tensors[key] for key, where in index["weight_map"].items() if where == file}, path / file)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@damaged("missing", rf"do not fill Qwen3ForCausalLM: missing: {NORM}, {K_PROJ}$")
def _(path: Path) -> None:
    edit_tensors(path, lambda tensors: [tensors.pop(NORM), tensors.pop(K_PROJ)])


@damaged("unexpected", r"unexpected: model\.layers\.0\.mlp\.gate_proj\.bias$")
def _(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.bias": torch.zeros(83)}))


@damaged("many-unexpected", r"unexpected: (x\.\d+, ){19}x\.\d+ and 7 more$")
def _(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({f"x.{i}": torch.zeros(1) for i in range(27)}))


@damaged("misshapen", rf"of another shape: {K_PROJ} is \[48, 16\], the model has \[16, 48\]$")
def _(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].t().contiguous()}))


@damaged("quantized", rf"no codes that its quantization_config explains: {NORM} \(I32\), {K_PROJ} \(F8_E4M3\)$")
def _(path: Path) -> None:
    edit_tensors(
        path,
        lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to(torch.float8_e4m3fn), NORM: tensors[NORM].int()}),
    )


@damaged("all-at-once", rf"F8_E4M3\)\nmissing: {NORM}\nunexpected: y\nof another shape: {EMBEDDING} is \[300, 48\]")
def _(path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING][:-1].clone()
        tensors[K_PROJ] = tensors[K_PROJ].to(torch.float8_e4m3fn)
        tensors["y"] = tensors.pop(NORM)

    edit_tensors(path, edit)


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def truncate(path: Path) -> None:
    shard = shards(path)[1]
    shard.write_bytes(shard.read_bytes()[:-1])


@damaged("truncated", r"fill Qwen3ForCausalLM: file: .*model-00002-of-\d+\.safetensors is truncated: [^\n]*$")
def _(path: Path) -> None:
    truncate(path)


@damaged("truncated-on-one-rank", r"^rank 1: .*model-00002-of-\d+\.safetensors is truncated", only_rank_1=True)
def _(path: Path) -> None:
    truncate(path)


@damaged("shard-gone", r"fill Qwen3ForCausalLM: file: [^\n]*model-00002-of-\d+\.safetensors does not exist$")
def _(path: Path) -> None:
    shards(path)[1].unlink()


@damaged("not-in-its-shard", rf"{INDEX} places {NORM} in model-\d+-of-\d+\.safetensors, which does not hold it$")
def _(path: Path) -> None:
    index = (path / INDEX).read_text()
    edit_tensors(path, lambda tensors: tensors.pop(NORM))
    (path / INDEX).write_text(index)


@damaged("pickled", r"only pytorch_model\.bin: pickled weights can run code")
def _(path: Path) -> None:
    for file in [*shards(path), path / INDEX]:
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")


@damaged("twice", r"there twice: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight \(in .* and in ", base="moe")
def _(path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        down = [tensors[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(5)]
        tensors["model.layers.1.mlp.experts.down_proj"] = torch.stack(down)

    edit_tensors(path, edit)


@damaged("an-expert-missing", r"missing: model\.layers\.0\.mlp\.experts\.4\.up_proj\.weight$", base="moe")
def _(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.pop("model.layers.0.mlp.experts.4.up_proj.weight"))


@damaged("an-expert-too-many", r"unexpected: model\.layers\.0\.mlp\.experts\.5\.up_proj\.weight$", base="moe")
def _(path: Path) -> None:
    up = "model.layers.0.mlp.experts.{}.up_proj.weight"
    edit_tensors(path, lambda tensors: tensors.update({up.format(5): tensors[up.format(4)].clone()}))


@damaged("tied-and-different", rf"{EMBEDDING} and lm_head\.weight are tied .* but differ on disk", in_headers=False)
def _(path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
        tensors["lm_head.weight"][300, 47] += 1

    edit_tensors(path, edit)


@damaged("tied-and-equal", None)
def _(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))


@damaged("tied-under-the-other-name", None)
def _(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBEDDING)}))


@damaged("leftover-buffers", None)
def _(path: Path) -> None:
    """Old checkpoints hold the rotary frequencies of every layer."""
    leftover = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(2)}
    edit_tensors(path, lambda tensors: tensors.update(leftover))
