"""No option is silent: beside what makes it idle it is refused, or a real run shows it, or a table says why neither.

Every option of the recipe is given another value beside each situation. What is accepted and in no table here is run,
and must make something else than the situation alone: losses, weights, files, TensorBoard. ``make test`` draws some of
the pairs, ``make test-full`` runs all of them. An option that is added fails until it has a value here, or a line that
says where it is tested.
"""

import hashlib
import json
import math
import random
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import Field
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.config.config import Recipe, recipe_options
from engine.config.errors import FP32_MAX, RecipeError
from engine.config.reading import load_recipe, save_recipe
from engine.config.sections import DataRecipe, EventRecipe, ModelRecipe, TrainRecipe
from engine.loop import Loop, LoopState
from model.ranks import RankError
from tests.distributed.engine.scripts.train import whole_parameters
from tests.lib.garbage import collect
from tests.lib.launcher import free_port
from tests.lib.patience import PATIENCE
from tests.lib.processes import run_python
from tests.lib.recipes import minimal, write_chats
from tests.lib.root import ROOT
from tests.lib.tiny import TEXT, tiny_checkpoint

LORA = {"adapter.kind": "lora", "learnable.weight": False, "learnable.weight_scale": False}
KD = {"loss.lm_weight": 0.0, "loss.kd_weight": 1.0, "loss.teacher": "other"}
# Situations in which options may be idle, as settings by key.
SITUATIONS: dict[str, dict[str, Any]] = {
    "never quantizes": {"quant.fake_quant_start": -1},
    "weights alone": {"quant.scheme": "w4a16_g32", "quant.rotate": [r".*\.o_proj"], "quant.rotate_block": 64},
    "KV cache alone": {"quant.scheme": "fp8_kv", "learnable.weight_scale": False},
    "merged adapters": LORA,
    "teacher at rest": {"loss.teacher": "other"},
    "norms alone": {
        **dict.fromkeys(("learnable.weight", "learnable.weight_scale"), False),
        **{"learnable.norm": True, "optim.lr": 0.03},
    },
    "text": {"data.kind": "text", "data.train": ["text.txt"], "data.held_out": 4},
    "no export": {"export.enabled": False, "optim.schedule": "wsd", "optim.decay_steps": 2},
}
# What lets an option act that is idle in all of these.
COMPANY: dict[str, dict[str, Any]] = {
    "model.experts": {"model.path": "qwen3_moe"},
    "data.weights": {},
    "data.eval": {"eval.every": 1, "data.held_out": 4},
    "quant.input_range": {},
    "quant.percentile": {"quant.input_range": "percentile"},
    "quant.initial_input_scale": {
        "quant.calibration_batches": 0,
        "quant.fake_quant_start": 1,
        "learnable.weight": False,
    },
    "quant.input_headroom": {"quant.scheme": "nvfp4_w4a4"},
    "quant.scales_follow_weights": {"quant.weight_range": "absmax", "optim.lr": 0.03},
    "quant.keep_codes": {"quant.scheme": "fp8_dynamic"},
    "learnable.act_scale": {},
    "learnable.kv_scale": {"quant.scheme": "fp8_static_kv"},
    "adapter.dropout": {**LORA, "adapter.merge": False},
    "adapter.init": {**LORA, "adapter.merge": False, "quant.scheme": "w4a16_g32"},
    "adapter.base": {**LORA, "adapter.merge": False, "quant.scheme": "w4a16_g32"},
    "optim.act_scale_lr": {"learnable.act_scale": True},
    "loss.kd": KD,
    "loss.top_k": {**KD, "loss.kd": "kl_top_k", "loss.top_k": 5},
    "loss.teacher": KD,
    "loss.teacher_weights": KD,
    "loss.diagnostics_every": KD,
    "loss.temperature": {**KD, "loss.kd": "kd"},
    "loss.tail": {**KD, "loss.kd": "kl_top_k", "loss.top_k": 5},
    "train.activation_offload": {"train.activation_checkpointing": True},
    "eval.best": {**KD, "eval.every": 1, "data.held_out": 4, "train.checkpoint_every": 1},
}
# Another value of options whose type does not say one (the other truth, another choice, one more).
VALUES: dict[str, Any] = {
    f"{section}.{name}": value
    for section, values in yaml.safe_load(
        r"""
        model: {path: other, attn_implementation: eager}
        data:
          {train: [more.jsonl], weights: [3.0, 1.0], held_out: 3, eval: [held.jsonl], max_length: 100,
           skip: ['more.jsonl:1']}
        train: {steps: 3, epochs: 1.0, quant_stats_every: 1, resume: best}
        quant:
          {scheme: w8a8_static, rules: [], lm_head: w8a16_channel, embedding: w8a16_channel, weight_range: mse,
           exempt: ['.*\.down_proj'], exempt_more: ['.*\.down_proj'], percentile: 90.0, calibration_batches: 17,
           initial_input_scale: 0.05, input_headroom: 1.5, compute: fp8_gemm, rotate: ['.*\.[qkvo]_proj'],
           fake_quant_start: 1}
        learnable: {weight: false, weight_scale: false, kv_scale: true, freeze: ['.*down_proj.weight']}
        adapter: {targets: ['.*\.q_proj'], ranks: {'.*\.q_proj': 2}, dropout: 0.5}
        optim:
          {lr: 0.003, embedding_lr: 0.01, norm_lr: 0.01, scale_lr: 0.03, act_scale_lr: 0.03, adapter_lr: 0.02,
           min_lr_ratio: 0.7, warmup_ratio: 1.0, warmup_steps: 2, decay_steps: 1,
           weight_decay: 0.3, eps: 0.01, grad_clip: 0.001}
        loss:
          {lm_weight: 0.5, temperature: 2.0, top_k: 3, teacher: qwen3, chunk_tokens: 3, diagnostics_every: 1}
        export: {dir: served, max_shard_size: 100KB}
        """
    ).items()
    for name, value in values.items()
}
VALUES |= {"output_dir": "elsewhere", "deepspeed": "zero1", "optim.betas": (0.5, 0.6)}
VALUES |= {"schedule": [EventRecipe(at=0, lr={"weights": 2e-3})]}
# Same results by another way: such an option is seen by what is called.
WAYS = {
    *("model.load", "train.activation_checkpointing", "train.activation_offload", "loss.chunk_tokens"),
    *("quant.compute", "quant.keep_codes", "quant.fuse_norms", "quant.quantized_all_gather"),
}
# Options that no run like these can show, and where they act.
ELSEWHERE = {
    "model.trust_remote_code": "checkpoints that bring code: tests/unit/model/test_build.py",
    "data.cache": "the same samples: tests/unit/engine/session/test_cached_data.py",
    "data.fields": "files with keys of their own: tests/unit/data/test_jsonl.py",
    "data.show": "what is printed: tests/unit/engine/session/test_context.py",
    **dict.fromkeys(
        ("data.server", "data.new_tokens", "data.temperature", "data.max_age", "data.server_seconds"),
        "answers of a server: tests/unit/engine/test_on_policy.py",
    ),
    "output_dir": "the directory of everything here",
    "parallel.sequence": "several ranks: tests/distributed/engine/test_sequence.py",
    "train.compile": "takes a minute: tests/gpu/test_compile.py, tests/distributed/engine/test_compute.py",
    "train.resume": "a run before this one: tests/distributed/engine/test_checkpoint.py",
    "train.keep_checkpoints": "checkpoints, of which a signal and a failed export leave some, too",
    "train.max_skipped_steps": "steps that are not finite: tests/distributed/engine/test_skipped_steps.py",
    "train.report_to": "destinations of curves: tests/unit/engine/test_trackers.py",
    "train.seed": "what is drawn: adapters, dropout",
    "quant.schemes": "names of its own: tests/distributed/engine/test_train.py",
    "quant.rules": "some layers: tests/distributed/engine/test_train.py",
    "quant.scales": "a PTQ checkpoint: tests/distributed/model/scales",
    "quant.start": "a quantized checkpoint: tests/distributed/model/quantized",
    "quant.snap_to_codes": "the same",
    "quant.rotate_block": "inputs of 256 features and more: tests/unit/tools/verify/test_rotated.py",
    "quant.fp8_fast_accum": "GPUs alone add up in two ways: tests/gpu/test_linear.py",
    "adapter.start": "a folder of an adapter: tests/distributed/engine/test_adapters.py",
    "loss.teacher_cache": "a cache: tests/distributed/engine/test_losses.py",
    "export.template": "a GGUF file: tests/distributed/tools/verify/test_engines.py",
}
# Accepted and not seen, by situation: what the recipe says is true there, or harmless, and why.
ALWAYS = {
    **dict.fromkeys(
        ("loss.kd", "loss.top_k", "loss.teacher"), "how to learn from a teacher, which loss.kd_weight 0 switches off"
    ),
    "model.experts": "a form of experts, and the model alone says whether it has any",
}
SMALL = {
    **ALWAYS,
    "quant.scales_follow_weights": "two steps at a small rate leave the largest weights; shown beside a large one",
}
DESCRIBED = "what would be quantized, and how: the run beside this one differs in quant.fake_quant_start alone"
FIXED = dict.fromkeys(("learnable.embedding", "learnable.freeze"), "nothing of it trains, as the recipe says")
STAYS = dict.fromkeys(("quant.exempt", "quant.exempt_more"), "linear layers that stay as they are, as all do")
RATE = {"optim.scale_lr": "of whatever trains, under every learnable"}
LATER = "launch/export.py writes by it from a training checkpoint"
ANYWAY: dict[str, dict[str, str]] = {
    "never quantizes": {
        **ALWAYS,
        **dict.fromkeys(
            ("quant.input_range", "quant.calibration_batches", "optim.scale_lr", "train.quant_stats_every"), DESCRIBED
        ),
    },
    "weights alone": {**ALWAYS, "quant.calibration_batches": "one recipe goes with every scheme"},
    "KV cache alone": {**ALWAYS, **STAYS, **RATE},
    "merged adapters": {**SMALL, **FIXED, **RATE},
    "teacher at rest": SMALL,
    "norms alone": {**SMALL, **FIXED, **RATE, "optim.weight_decay": RATE["optim.scale_lr"]},
    "text": SMALL,
    "no export": {**SMALL, **dict.fromkeys(("export.dir", "export.format", "export.max_shard_size"), LATER)},
}


def write_files(directory: Path) -> None:
    """Models and data that the recipes name."""
    for name, kind, seed in (("qwen3", "qwen3", 0), ("other", "qwen3", 5), ("qwen3_moe", "qwen3_moe", 0)):
        tiny_checkpoint(directory / name, kind, even=True, seed=seed)
    write_chats(directory / "chats.jsonl")
    for name, numbers in (("more", range(20)), ("held", range(20, 25))):
        lines = [json.dumps({"messages": turns(number)}) for number in numbers]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "text.txt").write_text((TEXT + "He wrote <|im_end|>.\n") * 50)
    for stage in (1, 3):
        zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
        (directory / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": zero}))


def recipe_of(directory: Path, settings: dict[str, Any]) -> Recipe:
    """A small recipe with settings by key, its paths in ``directory``. Raises RecipeError."""
    data = DataRecipe(["chats.jsonl", "more.jsonl"], max_length=160, micro_batch_size=4)
    made = Recipe(ModelRecipe("qwen3"), data, TrainRecipe(steps=2), "run", deepspeed="zero3")
    made.quant.calibration_batches, made.optim.lr = 2, 1e-3
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(made) if section else made, name, value)
    made.validate()
    made.model.path, made.output_dir = str(directory / made.model.path), str(directory / made.output_dir)
    made.data.train = [str(directory / file) for file in made.data.train]
    made.data.eval = [str(directory / file) for file in made.data.eval]
    made.export.dir = made.export.dir and str(directory / made.export.dir)
    made.deepspeed = str(directory / f"{made.deepspeed}.json")
    if made.loss.teacher not in (None, "self"):
        made.loss.teacher = str(directory / str(made.loss.teacher))
    return made


class Pair(NamedTuple):
    """An option with another value in a situation, the recipe that says so, and that of the situation alone."""

    situation: str
    option: str
    recipe: Recipe
    alone: Recipe


def turns(number: int) -> list[dict[str, str]]:
    """A conversation of two questions, longer the larger the number, in which a special token is spelled out."""
    return [
        {
            "role": "user",
            "content": f"What is {number} times 2? " + "Think. " * (30 if number % 10 == 9 else number % 7),
        },
        {"role": "assistant", "content": f"{2 * number}<|im_end|> or so."},
        {"role": "user", "content": "And times 3?"},
        {"role": "assistant", "content": f"{3 * number}!"},
    ]


def options() -> Iterator[tuple[str, Field[Any]]]:
    """Every option of the recipe, by its key."""
    return ((key, item) for key, _, item in recipe_options(minimal()))


def another(key: str, item: Field[Any]) -> Any:
    """Another value of an option than its default."""
    if key in VALUES:
        return VALUES[key]
    literal = next((kind for kind in (item.type, *get_args(item.type)) if get_origin(kind) is Literal), None)
    if literal is not None:
        return next(value for value in get_args(literal) if value != item.default)
    assert isinstance(item.default, int | float), (
        f"{key} is new: give it a value in VALUES, and run these tests with -m full; or say in ELSEWHERE where it is "
        "tested"
    )
    return not item.default if item.type is bool else item.default + 1


def pairs(directory: Path) -> Iterator[Pair]:
    """Every pair that is accepted."""
    known = dict(options())
    chosen = [(name, settings, list(known)) for name, settings in SITUATIONS.items()]
    chosen += [(f"with {key}", settings, [key]) for key, settings in COMPANY.items()]
    for situation, settings, keys in chosen:
        for key in keys:
            if key in ELSEWHERE or settings.get(key) == (value := another(key, known[key])):
                continue
            with suppress(RecipeError):
                both = {**settings, key: value}
                yield Pair(situation, key, recipe_of(directory, both), recipe_of(directory, settings))


def run(directory: Path, runs: dict[str, Recipe], counted: Collection[str]) -> dict[str, dict[str, Any]]:
    """Run recipes in one process; what is seen of each, with calls of those whose name begins with a word that is
    ``counted``."""
    write_files(directory)
    words = {}
    for index, (name, recipe) in enumerate(runs.items()):
        recipe.output_dir = str(directory / f"run_{index}")
        save_recipe(recipe, directory / f"{index}.yaml")
        words[name] = f"{'+' * (name.split()[0] in counted)}{directory / f'{index}.yaml'}"
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = f"from {__name__} import main; main()"
    ended = run_python(program, *words.values(), cwd=ROOT, timeout=PATIENCE * len(runs), **rank)
    assert ended.returncode == 0, ended.stderr[-8000:]
    return {name: json.loads((directory / f"{index}.json").read_text()) for index, name in enumerate(runs)}


def unseen(directory: Path, chosen: list[Pair]) -> list[str]:
    """Return options whose runs end in no line that names them, and make what the situation alone makes."""
    runs = {f"alone {pair.situation}": pair.alone for pair in chosen}
    runs |= {f"{pair.option} {pair.situation}": pair.recipe for pair in chosen}
    found = run(directory, runs, {*WAYS, "alone"})
    idle = []
    for pair in chosen:
        base, other = found[f"alone {pair.situation}"], found[f"{pair.option} {pair.situation}"]
        assert "results" in base, f"{pair.situation}: {base['refused']}"
        files = pair.recipe.data.train if pair.option == "data.train" else []  # which errors name, not the option
        refused = any(name in other.get("refused", "") for name in (pair.option.rpartition(".")[2], *files))
        ways = pair.option in WAYS and base["calls"] != other.get("calls")
        if not (refused or ways or base["results"] != other.get("results", base["results"])):
            idle.append(pair.option + (f": {other['refused']}" if "refused" in other else ""))
    return idle


# ---------------------------------------------------------------------------------------------------------------------
# In the process that runs the recipes
# ---------------------------------------------------------------------------------------------------------------------

MEASURED = re.compile("time|second|memory|per_s|perf")  # of TensorBoard: what no two runs have the same of


def main() -> None:
    """Run recipes on one rank, and write what can be seen of each into a file beside it that ends in ``.json``.

    ``results`` is what the run made; ``calls`` how often each function of the project was called, of recipes with a +
    before their path, which takes twice as long; ``refused`` the line with which it ended instead.
    """
    for argument in sys.argv[1:]:
        path = Path(argument.removeprefix("+"))
        calls: dict[str, int] = {}

        def count(frame: FrameType, event: str, _: Any, calls: dict[str, int] = calls) -> None:
            code = frame.f_code
            if (
                event == "call"
                and code.co_filename.startswith(f"{ROOT}/")
                and "/engine/config/" not in code.co_filename
            ):
                name = f"{code.co_filename}:{code.co_qualname}"
                calls[name] = calls.get(name, 0) + 1

        sys.setprofile(count if argument.startswith("+") else None)
        try:
            seen: dict[str, Any] = {"results": results(path), "calls": calls}
        except (RankError, RecipeError) as error:
            seen = {"refused": str(error)}
        finally:
            sys.setprofile(None)
        path.with_suffix(".json").write_text(json.dumps(seen))
        collect()


def results(path: Path) -> list[str]:
    """Run a recipe; texts that are equal where everything that it made is."""
    loop, steps = Loop(load_recipe(path)), []

    @loop.every(1)
    def keep(state: LoopState) -> None:
        assert state.last is not None
        rates = {group["name"]: group["lr"] for group in state.session.engine.optimizer.param_groups}
        steps.append((state.last.losses, state.last.grad_norm, state.last.scale_grad_norm, rates))

    state = loop.run()
    weights = [(name, tensor.float().tolist()) for name, tensor in whole_parameters(state.model).items()]
    state.session.engine.destroy()
    output = Path(loop.recipe.output_dir)
    files = {
        str(file.relative_to(output)): digest(file.read_bytes())
        if file.suffix in (".safetensors", ".json") and file.name != "memory.json"
        else ""
        for file in sorted(output.rglob("*"))
        if file.is_file() and file.parent.name != "tensorboard"
    }
    return [str(steps), digest(str(weights).encode()), str(files), str(logged(output / "tensorboard"))]


def digest(data: bytes) -> str:
    """Some bytes that tell data apart."""
    return hashlib.sha256(data).hexdigest()[:16]


def logged(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Read steps and values from TensorBoard by tag; of measured times and sizes the steps alone."""
    events = EventAccumulator(str(directory))
    events.Reload()
    scalars = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    images = {tag: [(image.step, 0.0) for image in events.Images(tag)] for tag in events.Tags()["images"]}
    return {
        tag: [(step, 0.0 if MEASURED.search(tag) else value) for step, value in points]
        for tag, points in sorted({**scalars, **images}.items())
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------------------------------------------------


def test_every_option_has_another_value_and_a_place(tmp_path):
    """And nothing is in a table that is refused by now, or is no option."""
    known = dict(options())
    accepted = {(pair.situation, pair.option) for pair in pairs(tmp_path)}
    assert {*VALUES, *ELSEWHERE, *COMPANY, *WAYS} <= set(known)
    stale = [(name, key) for name, table in ANYWAY.items() for key in table if (name, key) not in accepted]
    assert not stale, "refused by now, or no option"
    shown = {key for name, key in accepted if key not in ANYWAY.get(name, {})}
    assert set(known) - shown == set(ELSEWHERE), "these are shown by no run, or by one all the same"
    places = re.findall(r"tests/[\w/.]+", " ".join(ELSEWHERE.values()))
    assert not [place for place in places if not (ROOT / place).exists()]


def test_epochs_are_their_steps_and_skipped_lines_keep_the_order_of_the_others(tmp_path):
    """Also with micro-batches in which nothing is left to learn."""
    small = {"data.micro_batch_size": 1, "train.gradient_accumulation_steps": 4, "optim.warmup_ratio": 0.5}
    lines = {"data.skip": [f"{tmp_path / 'more.jsonl'}:{line}" for line in range(1, 9)]}
    recipes = {
        "steps": {**small, "train.steps": 8},
        "epochs": {**small, "train.steps": 0, "train.epochs": 0.47},
        "skip": {**small, **lines, "train.steps": 8},
    }
    found = run(tmp_path, {name: recipe_of(tmp_path, settings) for name, settings in recipes.items()}, ())
    assert [one["refused"] for one in found.values() if "refused" in one] == []
    assert found["epochs"]["results"] == found["steps"]["results"] != found["skip"]["results"]


def test_some_pairs_are_seen(tmp_path, count=6):
    """All in one situation, so that few runs show many options."""
    situation = random.choice(list(SITUATIONS))
    chosen = [pair for pair in pairs(tmp_path) if pair.situation == situation]
    chosen = [pair for pair in chosen if pair.option not in ANYWAY[situation]]
    assert unseen(tmp_path, random.sample(chosen, count)) == [], situation


@pytest.mark.full
@pytest.mark.parametrize("situation", [*SITUATIONS, "with"])
def test_all_pairs_are_seen(tmp_path, situation):
    """And those that the table has are not, or their line can go."""
    chosen = [pair for pair in pairs(tmp_path) if pair.situation.startswith(situation)]
    assert sorted(unseen(tmp_path, chosen)) == sorted(ANYWAY.get(situation, {}))


@pytest.mark.full
def test_many_options_at_once_are_trained_with_or_named(tmp_path, seed, count=100):
    """Any other error ends the process of the runs."""
    rng, known = random.Random(seed), dict(options())
    runs = {}
    for index in range(count):
        settings = dict(rng.choice([*SITUATIONS.values(), *COMPANY.values()]))
        for key in rng.sample(sorted(known.keys() - ELSEWHERE.keys()), 12):
            more = {**settings, key: another(key, known[key])}
            with suppress(RecipeError):
                recipe_of(tmp_path, more)
                settings = more
        runs[f"{index} {settings}"] = recipe_of(tmp_path, settings)
    names = {key.rpartition(".")[2] for key in known}
    for name, seen in run(tmp_path, runs, ()).items():
        assert "results" in seen or any(option in seen["refused"] for option in names), (name, seen)


HUGE = (1e4, 1e10, 1e15, 1e30, 1e38, 2e38, FP32_MAX, 3.5e38, 1e300, 2.0**63)
TINY = (-0.0, 5e-324, 1e-45, 2**-149, 2**-126, 1e-30, 1e-15)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, *HUGE, *TINY, 1 - 2**-53, 1.0)
SHAPES: dict[str, Callable[[float], Any]] = {
    "data.weights": lambda one: [one, 1.0],
    "optim.betas": lambda one: (one, min(one, 0.95)),
    "schedule": lambda one: [EventRecipe(at=0, lr={"weights": one}, loss={"lm": one})],
}


def test_floats_that_cannot_be_trained_with_are_refused(tmp_path):
    """At the ends of what a computer holds; tests/unit/engine/config tries other numbers, and the lines of errors."""
    company = {
        **COMPANY,
        "optim.norm_lr": {"learnable.norm": True},
        "optim.adapter_lr": LORA,
        "adapter.alpha": {**LORA, "adapter.merge": False, "adapter.init": "error", "quant.scheme": "w4a16_g32"},
        "loss.kd_weight": {"loss.teacher": "other"},
    }
    tried = set()
    for key, item in options():
        for one in FLOATS if key in SHAPES or float in (item.type, *get_args(item.type)) else ():
            try:
                recipe = recipe_of(tmp_path, {**company.get(key, {}), key: SHAPES.get(key, float)(one)})
            except RecipeError:
                continue
            tried.add(key)
            assert math.isfinite(one), key
            if key.endswith("lr"):
                assert 0 <= one / (1 - recipe.optim.betas[0]) < FP32_MAX, "AdamW divides by it, as fp32"
    assert {*SHAPES, "optim.lr", "optim.eps", "adapter.alpha", "loss.temperature", "quant.percentile"} <= tried
