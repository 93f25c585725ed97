"""Launched on every rank: takes variants of the zoo through everything that a user would do with such a model.

    scripts/family.py DIRECTORY VARIANT...

Rank 0 writes ``DIRECTORY/<variant>.json``, again after every stage, so that a run that ends in the middle shows where:
``{"stages": {stage: outcome}, "finished": bool}``. An outcome is "ok", "refused: <the project's own error>" or
"wrong: <what>"; what no error of the project's names is wrong too.
"""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor

from engine.cluster.job import join_ranks
from engine.config.reading import RecipeError
from engine.loop import Loop
from model.build import AUTO, attention_for, build_model
from model.checkpoint.load import load_weights
from model.ranks import RankError, gather_objects, is_main, raise_everywhere, rank
from model.save.export_model import export_model
from model.save.loadable import not_loaded
from tests.families.make import Variant
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import read_tensors
from tests.lib.garbage import collect
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tools.verify.check import compare_with_transformers

REFUSALS = (RankError, RecipeError)
STEPS = 12
ZERO_3: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
ZERO_3 |= {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
ZERO_0: dict[str, Any] = {"zero_optimization": {"stage": 0}}
NO_TEACHER = {"kd_weight": 0.0, "teacher": None}
# fp32 sums in another order, through two to six layers; a wrong factor, mask or position gives 1e-2 and more.
ROUNDING = 2e-4
# The same weights in bf16, whose products are summed in another order.
ROUNDING_BF16 = 0.05
UNREAD = re.compile(r"\.experts\.\d+\.\w+\.input_scale$")
# What errors say can be done about them.
ADVICE = re.compile(r"set quant\.exempt_more: (\[.*\])")
DEQUANTIZED = "set export.format to dequantized"
LENGTHS = (7, 7, 11)  # of samples that share packed rows, the first two in turn


class Wrong(AssertionError):
    """A result differs from transformers', and no error said so."""


def apart(one: Tensor, two: Tensor) -> float:
    """Return the largest difference, in standard deviations of the second."""
    return ((one - two).abs().max() / two.std()).item()


def same_keys(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Raise unless both checkpoints hold the same keys and shapes."""
    missing, unexpected = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    if missing or unexpected:
        raise Wrong(f"{len(missing)} keys missing {missing[:2]}, {len(unexpected)} unexpected {unexpected[:2]}")
    shapes = [key for key in theirs if ours[key].shape != theirs[key].shape]
    if shapes:
        raise Wrong(f"other shapes: {shapes[:3]}")


def same_values(ours: Tensor, theirs: Tensor) -> bool:
    """Compare bit for bit; a buffer that classes keep in fp32 may have become wider than this source has it."""
    if ours.dtype == torch.float32 and theirs.dtype == torch.bfloat16:
        theirs = theirs.float()
    one, two = (tensor.reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
    return ours.dtype == theirs.dtype and torch.equal(one, two)


def plain(source: Path, out: Path) -> None:
    """Load under ZeRO-3, export without quantizing: the same keys and the same bytes."""
    model = build_model(source, ZERO_3, dtype=torch.bfloat16, device=torch.device("cpu"))
    load_weights(model, source)
    export_model(model, None, source, out)
    ours, theirs = read_tensors(out), read_tensors(source)
    same_keys(ours, theirs)
    other = [key for key in theirs if not same_values(ours[key], theirs[key])]
    if other:
        raise Wrong(f"{len(other)} tensors changed: {other[:3]}")


def exact(variant: Variant, source: Path, out: Path) -> None:
    """Logits and gradients in fp32 against transformers' own model, read from the same file.

    The attention is a run's default: of some classes eager and sdpa disagree (Falcon with alibi,
    whose eager form adds it twice in transformers 5.23).
    """
    theirs = variant.model(dtype=torch.float32, attention=attention_for(variant.config(), AUTO))
    model = build_model(source, ZERO_0, dtype=torch.float32, device=torch.device("cpu")).eval()
    load_weights(model, source)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(7, 300, (2, 24), generator=generator)
    logits = []
    for one in (theirs, model):
        one.config.use_cache = False
        result = one(input_ids=ids, use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(result[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        logits.append(result.detach())
    if not (error := apart(logits[1], logits[0])) < ROUNDING:
        raise Wrong(f"logits differ by {error:.2g} of their standard deviation")
    for one in (theirs, model):
        for parameter in one.parameters():
            # Without a gradient: experts that no token chose, and towers, of which an export copies the source's.
            missing = torch.full_like(parameter, torch.nan if one is theirs else 0.0)
            parameter.data = missing if parameter.grad is None else parameter.grad
    export_model(model, None, source, out)
    if is_main():
        theirs.save_pretrained(out.with_name(f"{out.name}-theirs"))
    raise_everywhere(None)
    ours, expected = read_tensors(out), read_tensors(out.with_name(f"{out.name}-theirs"))
    for key in expected.keys() & ours.keys():
        given = ~expected[key].isnan()
        if not expected[key].is_floating_point() or not given.any():
            continue
        size = expected[key][given].abs().max().item()
        difference = (ours[key] - expected[key])[given].abs().max().item()
        if not difference <= ROUNDING * max(size, 1e-3):
            raise Wrong(f"gradient of {key} differs by {difference:.2g}, its largest is {size:.2g}")


@torch.no_grad()
def leaks(variant: Variant) -> float:
    """Return how much a sample's logits change with the samples before it in a packed row, in standard deviations."""
    model = variant.model()
    generator = torch.Generator().manual_seed(2)
    first, other, second = (torch.randint(7, 300, (1, length), generator=generator) for length in LENGTHS)

    def logits(*samples: Tensor) -> list[Tensor]:
        """Compute the logits of each sample of a row."""
        positions = torch.cat([torch.arange(sample.shape[1]) for sample in samples])[None]
        row = torch.cat(samples, 1)
        try:
            found = model(input_ids=row, position_ids=positions, use_cache=False).logits[0].float()
        except TypeError:  # a class that knows no position_ids
            found = model(input_ids=row, use_cache=False).logits[0].float()
        return list(found.split([sample.shape[1] for sample in samples]))

    (alone,), (_, behind), (_, behind_other) = logits(second), logits(first, second), logits(other, second)
    # Sparse attention chooses among equal scores by how long the row is, also where nothing is before.
    length = apart(logits(second, first)[0], alone)
    return max(apart(behind, behind_other), apart(behind, alone) - 4 * length)


def recipe_of(directory: Path, name: str, source: Path, chats: Path, **sections: Any) -> Path:
    """A recipe of 12 steps in bf16 under ZeRO-3 with an export; it is there for all ranks when this returns."""
    defaults: dict[str, Any] = {
        "loss": NO_TEACHER,
        "train": {"steps": STEPS, "gradient_accumulation_steps": 1, "quant_stats_every": 0},
        "export": {"enabled": True},
    }
    if is_main():
        write_recipe(directory, name, source, chats, **{**defaults, **sections})
    raise_everywhere(None)
    return directory / f"{name}.yaml"


def train(recipe: Path) -> str | None:
    """Run it; its export must load as the class that its config.json names, and compute what training saw.

    Returns:
        The reason why transformers cannot load it, where the run says so before it trains; others may.
    """
    loop = Loop.from_recipe(recipe)
    state = loop.run()
    export = Path(loop.recipe.output_dir) / "export"
    batches = [torch.randint(7, 300, (2, 24), generator=torch.Generator().manual_seed(3))]
    if loop.recipe.export.format == "dequantized":
        state.quant.enable(activations=False)
        with torch.no_grad():
            seen = state.session.model.eval()(input_ids=batches[0], use_cache=False).logits.float()
            found = load(export).bfloat16()(input_ids=batches[0], use_cache=False).logits.float()
        state.session.engine.destroy()
        if not (error := apart(found, seen)) < ROUNDING_BF16:
            raise Wrong(f"logits of the weights differ by {error:.2g} of their standard deviation")
        return None
    reason = not_loaded(state.session.model, state.session.quantization)
    state.session.engine.destroy()
    if reason is None:
        load(export)
    report = compare_with_transformers(export, batches)
    if not report.ok:
        raise Wrong(f"verify: {report.problems[0]}")
    return reason


def load(export: Path) -> torch.nn.Module:
    """Load an export with transformers, in fp32; every key of the class that config.json names must be there, none
    else."""
    config = json.loads((export / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    loaded, info = cls.from_pretrained(export, output_loading_info=True, dtype=torch.float32)
    # It decompresses experts as it loads them and computes with bf16 inputs: vLLM alone reads these scales.
    left = {kind: [key for key in keys if not UNREAD.search(str(key))] for kind, keys in info.items()}
    problems = {kind: sorted(keys)[:3] for kind, keys in left.items() if keys}
    if problems:
        raise Wrong(f"{cls.__name__} finds {problems}")
    return loaded.eval()


class Progress:
    """The outcomes of one variant's stages, written by rank 0 as they come; those of an earlier launch stay."""

    def __init__(self, file: Path) -> None:
        self._file = file
        earlier = json.loads(file.read_text())["stages"] if is_main() and file.exists() else {}
        self.stages: dict[str, str] = gather_objects(earlier)[0]  # rank 0 writes on, while others would still read

    def run(self, stage: str, work: Callable[[], Any], *, trains: bool = False) -> bool:
        """Run a stage on all ranks, and write down how it ended; whether it was ok.

        Args:
            stage: its name; one that has an outcome does not run again.
            work: what it does.
            trains: it leaves an engine behind: if it fails in the middle, these processes end, for what was under way
                on the ranks would meet the collectives of the next.
        """
        if stage in self.stages:
            return self.stages[stage] == "ok"
        self.note(stage, "wrong: the process ended")
        try:
            remark = work()
            outcome = "ok"
            if isinstance(remark, str):
                self.note(f"{stage}, reader", remark)
        except REFUSALS as error:
            outcome = f"refused: {error}"
        except Wrong as error:
            outcome = f"wrong: {error}"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome = f"wrong: {type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {error}"
        print(f"rank {rank()}: {stage}: {outcome}", flush=True)
        self.note(stage, outcome)
        if trains and outcome != "ok":
            time.sleep(2)  # for the other rank to say so too
            os._exit(0)
        collect()
        return outcome == "ok"

    def note(self, stage: str, outcome: str) -> None:
        """Write down an outcome."""
        self.stages[stage] = outcome
        self._write(finished=False)

    def finish(self) -> None:
        """Say that no stage is left."""
        self._write(finished=True)

    def _write(self, *, finished: bool) -> None:
        if is_main():
            found = {"stages": self.stages, "commit": commit(), "finished": finished}
            self._file.write_text(json.dumps(found, indent=1))


@functools.cache
def commit() -> str:
    """Return the commit that is tried, with a + if tracked files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))


def take_through(variant: Variant, directory: Path) -> None:
    """All stages of one variant."""
    home = directory / variant.name.replace(", ", "-").replace(" ", "_")
    source, fp32 = home / "source", home / "source-fp32"
    chats = home / "chats.jsonl"
    if is_main():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        variant.checkpoint(source)
        variant.checkpoint(fp32, dtype=torch.float32)
        write_chats(chats)
    progress = Progress(directory / f"{variant.name}.json")
    progress.run("plain", lambda: plain(source, home / "plain"))
    progress.run("exact", lambda: exact(variant, fp32, home / "gradients"))
    try:
        leak = leaks(variant)
    except Exception as error:  # transformers' own: no packing then, and what follows goes on
        leak = math.inf
        progress.note("leak", f"{type(error).__name__}: {error}")
    else:
        progress.note("leak", f"{leak:.2g}")
    packed = {"data": {"packing": True, "micro_batch_size": 1}}
    if leak > ROUNDING:
        tried = recipe_of(home, "packed", source, chats, **packed)
        if progress.run("packed", lambda: train(tried), trains=True):
            progress.note("packed", "wrong: packed samples see each other, and training goes on")
    for scheme in ("fp8_static", "w4a16_g32"):
        quant: dict[str, Any] = {"scheme": scheme, "calibration_batches": 2}
        sections = packed if scheme == "fp8_static" and leak <= ROUNDING else {}
        recipe = recipe_of(home, scheme, source, chats, quant=quant, **sections)
        progress.run(scheme, lambda recipe=recipe: train(recipe), trains=True)
        if advised := ADVICE.search(progress.stages[scheme]):
            quant["exempt_more"] = yaml.safe_load(advised[1])
            recipe = recipe_of(home, f"{scheme}-exempt", source, chats, quant=quant, **sections)
            progress.run(f"{scheme}, exempt", lambda recipe=recipe: train(recipe), trains=True)
        elif DEQUANTIZED in progress.stages[scheme]:
            weights = {"enabled": True, "format": "dequantized"}
            recipe = recipe_of(home, f"{scheme}-weights", source, chats, quant=quant, export=weights, **sections)
            progress.run(f"{scheme}, dequantized", lambda recipe=recipe: train(recipe), trains=True)
    progress.finish()


def main() -> None:
    """Variants in the order given, one process group for all of them."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    directory = Path(arguments[0])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    join_ranks()
    for name in arguments[1:]:
        take_through(VARIANTS[name], directory)
    last = directory / f"{arguments[-1]}.json"
    while not is_main() and not json.loads(last.read_text())["finished"]:
        time.sleep(0.1)  # gloo may lose what was sent by a rank that ended


if __name__ == "__main__":
    main()
