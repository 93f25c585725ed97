"""Building and loading on two ranks, stages 0 to 3: values, memory, bytes read, damaged checkpoints.

One launch for stage 3, one for the others; what is checked stands in scripts/build_load.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from tests.lib.checkpoints import read_tensors
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
    manifest = [damaged(directory, name, damage) for name, damage in DAMAGES.items()]
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


@pytest.mark.parametrize("stages", [("0", "1", "2"), ("3",)])
def test_stages(checkpoints: Path, seed: int, stages: tuple[str, ...]):
    output = run_ranks(SCRIPT, str(checkpoints), str(seed), *stages)
    assert output.count("all checks passed") == 2


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


def damaged(directory: Path, name: str, damage: Damage) -> dict:
    """Make the damaged copy; what the script must know of it."""
    path = shutil.copytree(directory / damage.base, directory / name)
    if damage.edit is None:
        shard = sorted(path.glob("model-*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        edit_tensors(path, damage.edit)
    return {"path": name, **{key: value for key, value in damage._asdict().items() if key != "edit"}}


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
