"""One process that runs recipes which nobody would write: what ``launch/train.py`` does, forked (see forked.py).

    scripts/anything.py DIRECTORY COUNT SEED

Recipes are drawn from the options themselves: many values at once, of which those stay with which the recipe is
accepted and is another one than before. Two ranks train each for up to three steps. Writes ``DIRECTORY/<index>.yaml``,
what the ranks print to ``<index>.log``, and to ``DIRECTORY/codes.json`` their exit codes: null for a run that did not
end.
"""

import copy
import json
import os
import random
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from engine.config.config import Recipe
from engine.config.deepspeed import resolve
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from launch.train import main as train
from quant import PRESETS
from tests.lib.forked import Job
from tests.lib.fp16_cpu import allow_fp16_on_cpu
from tests.lib.patience import PATIENCE
from tests.lib.recipes import write_chats, write_ds_config, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.unit.engine.config.anything import changed, options

RANKS, STEPS = 2, 3
DRAWS = 40  # values that are tried, of which a third is taken
MODELS = ("qwen3", "qwen3", "llama", "qwen3_moe")
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "zero3_hpz", "zero2_offload", "zero3_offload")
# What is drawn anew for every recipe, what names a file, and what takes minutes of compiling.
LEFT_ALONE = {
    *(("output_dir",), ("deepspeed",), ("model", "path"), ("data", "train"), ("export", "dir"), ("export", "template")),
    *(("train", "resume"), ("loss", "teacher_cache"), ("quant", "scales"), ("adapter", "start"), ("train", "compile")),
}
NUMBERS: tuple[int, ...] = (-1, 0, 1, 2, 3, 5)
SHARES = (0, 1e-30, 1e-6, 1e-3, 1e-3, 0.25, 0.5, 1, 3.0, 1e4, 1e30)
PATTERNS = (".*", r"model\.layers\.0\..*", r".*\.[qkv]_proj", r".*_proj", ".*head", ".*weight", "nothing")
# Texts and numbers of which others make no sense.
VALUES: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("model", "attn_implementation"): ("sdpa", "eager", "auto"),
    ("data", "weights"): ([0.5], [2.0], None),
    ("data", "held_out"): (0, 1, 4, 0.1, 0.5),
    ("data", "fields"): ({"input": "input", "output": "output"}, None),
    ("data", "max_length"): (3, 64, 128, 200, 256, 300),
    ("data", "loss_on"): ("last", "all"),
    ("data", "packing"): (True, False),
    ("data", "micro_batch_size"): (1, 2, 3),
    ("train", "steps"): (1, 2, 3),
    ("train", "gradient_accumulation_steps"): (1, 2, 3),
    ("loss", "chunk_tokens"): (1, 7, 64, 512),
    ("loss", "top_k"): (None, 1, 5, 300, 302),
    ("optim", "betas"): ([0, 0], [0.9, 0.999], [0.5, 0.99]),
    ("export", "format"): (*["compressed"] * 4, "dequantized", "vllm_fp8", "mlx", "gpt_oss"),
    ("learnable", "freeze"): ([], [r".*embed_tokens.*"], [r".*layers\.0.*"], [r".*norm.*", ".*bias"], [".*"]),
    ("export", "max_shard_size"): ("5GB", "10KB", "1MB"),
    ("quant", "calibration_batches"): (0, 1, 2, 30),
    ("quant", "scheme"): tuple(PRESETS),
    ("quant", "lm_head"): tuple(PRESETS),
    ("quant", "embedding"): tuple(PRESETS),
    ("quant", "exempt"): ([], ["lm_head"], [".*head", r".*\.down_proj"], [r".*\.[qkv]_proj"]),
    ("quant", "exempt_more"): ([], [r".*\.down_proj"], [r".*\.[qkv]_proj", r".*\.o_proj"], [".*"]),
}


def main() -> None:
    """See above."""
    directory, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    Job(1, lambda: write_models(directory), directory / "setup.log").finish()
    place = directory / "current"  # for what would be written into the current directory
    place.mkdir()
    os.chdir(place)
    codes: dict[str, list[int] | None] = {}
    for index in range(count):
        path = draw(directory, str(index), random.Random(f"{seed} {index}"))
        job = Job(RANKS, lambda path=path: run(path), path.with_suffix(".log"))
        codes[path.stem] = job.wait(PATIENCE)
        if codes[path.stem] is None:
            job.kill()
        (directory / "codes.json").write_text(json.dumps(codes))


def run(path: Path) -> None:
    """A rank."""
    allow_fp16_on_cpu()
    sys.argv = ["train.py", "--config", str(path)]
    train()


def write_models(directory: Path) -> None:
    """Dense models and one of experts, of sizes that every scheme takes."""
    write_chats(directory / "chats.jsonl")
    other = write_chats(directory / "other.jsonl")
    other.write_text(other.read_text().replace("What is", "How much is"))
    for kind in sorted(set(MODELS)):
        tiny_checkpoint(directory / kind, kind, wide=True, layers=1)


def draw(directory: Path, name: str, rng: random.Random) -> Path:
    """``<directory>/<name>.yaml`` with many values of which nobody has thought."""
    model = directory / rng.choice(MODELS)
    path = write_recipe(
        directory,
        name,
        model,
        directory / "chats.jsonl",
        stage=0,
        dtype=rng.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        deepspeed=write_ds_config(directory, f"{name}_ds", rng.choice(STRATEGIES), fp16={"initial_scale_power": 8}),
        train={"steps": rng.randint(1, STEPS), "gradient_accumulation_steps": rng.randint(1, 2)},
        data={"held_out": 4},
        optim={"warmup_steps": 0},
        eval={"every": rng.randint(0, 1)},
        loss=rng.choice([{}, {"kd_weight": 0.0, "teacher": None}]),
        export={"enabled": True},
    )
    values = {
        **VALUES,
        ("loss", "teacher"): ("self", str(model), None),
        ("data", "eval"): ([], [str(directory / "other.jsonl")]),
    }
    kinds = options()
    paths = [keys for keys in sorted(kinds) if keys not in LEFT_ALONE and not is_dataclass(kinds[keys])]
    contents, before = yaml.safe_load(path.read_text()), load_recipe(path)
    for _ in range(DRAWS):
        # One that is refused alone may be accepted with another one.
        some = rng.sample(paths, rng.choice([1, 1, 2, 3]))
        changes = [(keys, rng.choice(values[keys]) if keys in values else of(kinds[keys], rng)) for keys in some]
        tried = changed(contents, changes)
        now = accepted(path, tried, before)
        if now is not None:
            contents, before = tried, now
    path.write_text(yaml.safe_dump(contents, allow_unicode=True), encoding="utf-8")
    return path


def accepted(path: Path, contents: dict[str, Any], before: Recipe) -> Recipe | None:
    """The recipe of these contents; None if it is refused before ranks meet, or nothing is new in it."""
    path.write_text(yaml.safe_dump(contents, allow_unicode=True), encoding="utf-8")
    try:
        recipe = load_recipe(path)
        recipe.validate_files()
        resolve(recipe, RANKS, local_size=RANKS)
    except RecipeError:
        return None
    return recipe if recipe != before else None


def of(kind: Any, rng: random.Random) -> Any:
    """A value of an option's type, of a size that a run of three steps reaches."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return section(kind, rng)
    if origin is Literal:
        return rng.choice(parts)
    if origin in (list, tuple):
        return [of(parts[0], rng) for _ in range(rng.randint(0, 2))]
    if origin is dict:
        names = ("lm", "kd", "weights", "weight_scales", "act_scales", "embeddings", "norms", "adapters", "mine", ".*")
        return {rng.choice(names): of(parts[1], rng) for _ in range(rng.randint(1, 2))}
    if parts:
        return of(rng.choice(parts), rng)
    known = {bool: (True, False), int: (*NUMBERS, 8, 16, 32), float: SHARES, type(None): (None,)}
    return rng.choice(known.get(kind, (*PATTERNS, *PRESETS, "none", *["loss/lm < 100", "loss/kd > 0"] * 3)))


def section(kind: type, rng: random.Random) -> dict[str, Any]:
    """A mapping with what has no default, and some of the others."""
    hints = get_type_hints(kind)
    needed = [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]
    others = sorted(hints.keys() - set(needed))
    chosen = [*needed, *rng.sample(others, min(len(others), rng.randint(1, 3)))]
    return copy.deepcopy({name: of(hints[name], rng) for name in chosen})


if __name__ == "__main__":
    main()
