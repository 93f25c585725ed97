"""Measure the loss from quantizing a model and its recovery by training, with one recipe: FT, PTQ, QAT and their table.

    python launch/study.py --text heldout.txt --config launch/recipes/qwen3_4b.yaml [--section.field value ...]
    python launch/study.py --launcher "deepspeed --num_gpus 8" --text heldout.txt --config ...

All other options are options of the recipe. The study has four parts in the recipe's ``output_dir``, made by commands
that are printed and can be run by hand:

1. ``ft``: ``launch/train.py`` with fake quant off; data, losses, teacher, rates and steps are the recipe's.
2. ``ptq``: ``launch/calibrate.py`` of FT's export, which quantizes it without training, from the recipe's
   ``quant.init``; ``ptq_gptq`` and so on start from other first codes (``--ptq_codes``).
3. ``qat``: ``launch/train.py`` with the recipe.
4. ``compare.md``: ``launch/compare.py``, the perplexity of the exports on a text that none was trained on. With several
   PTQs, also from files of other tools (``--ptq``), QAT is compared with each of them. What counts is the recovered
   share of the best PTQ's loss.

QAT is compared with a model that was trained with the same losses, on the same samples, for as long, and PTQ quantizes
that model. So the recovered share excludes gains from training or distillation alone. Results of an earlier call are
reused, and interrupted training resumes from its checkpoint.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

from launch import check_model_path, end_quietly
from launch.scripts import NamedDirectories, fetch_checkpoints, option_parser, path_option, program, run_command

if __name__ == "__main__":
    end_quietly()
    check_model_path()  # before the imports, which take many seconds

import argparse
import copy
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import get_args, get_type_hints

from engine.checkpoint.find import LATEST
from engine.config.config import Recipe, idle, recipe_options
from engine.config.errors import RecipeError
from engine.config.hub import HUB, named
from engine.config.quant import SOURCE, QuantRecipe
from engine.config.reading import load_recipe, save_recipe
from engine.session_export import check_export
from launch.exits import clean_exit, recipe_or_exit
from model.build import read_config
from model.quantized.quantization_config import is_quantized
from model.ranks import errors_on_all_ranks

FT, PTQ, QAT = "ft", "ptq", "qat"
TRAIN, CALIBRATE, COMPARE = "launch/train.py", "launch/calibrate.py", "launch/compare.py"
CODES = get_args(get_type_hints(QuantRecipe)["init"])
# Keys of config.json with an effect only in training, if above 0: attention_dropout, resid_pdrop, layerdrop,
# router_jitter_noise, moe_jitter_eps, ...
TRAINING = re.compile("drop|jitter|noise|altup_coef_clip")
MADE_BY = "study.yaml"  # in the folder of a part: its recipe


def main() -> None:
    """Check all parts, then run the missing parts, and compare the exports."""
    arguments, words = parse_arguments()
    recipe = recipe_or_exit(words)
    words += pins(recipe)
    out = Path(recipe.output_dir)
    with clean_exit():
        check_comparable(recipe)
        fetch_checkpoints(arguments, weights=False)
        scripts = scripts_of(recipe, arguments.ptq_codes)
        changes = {part: changes_of(part, recipe) for part in scripts}
        recipes = {}
        for part, changed in changes.items():
            # FT's export, which PTQ reads, does not exist yet.
            recipes[part] = recipe_or_exit([*words, *changed], check_files=scripts[part] != CALIBRATE)
            check_part(out / part, recipes[part])
        ptqs = compared(recipe, scripts, arguments.ptq)
    if FT not in scripts:
        print(f"{FT}: {recipe.model.path} as it is: without fake quant nothing would change it", flush=True)
    elif learns_itself(recipe):
        acts = ", ".join(training_differs(recipe))
        print(f"{FT}: trained, though its own logits teach it: in training they differ ({acts})", flush=True)
    for part, script in scripts.items():
        if (out / part / "export").is_dir():
            print(f"{part}: {out / part / 'export'} is there", flush=True)
            continue
        (out / part).mkdir(parents=True, exist_ok=True)
        save_recipe(recipes[part], out / part / MADE_BY)
        begun = (out / part / "checkpoints" / LATEST).is_file()
        resume = ["--train.resume", "true"] if begun and script == TRAIN else []
        run_part([*arguments.launcher, script, *words, *changes[part], *resume])
    sides = ["--bf16", str(reference(recipe))]
    for name, export in ptqs.items():
        sides += ["--ptq", f"{name}={named(export)}", "--qat", f"{name}={out / QAT / 'export'}"]
    asked = ["--text", str(arguments.text), "--dtype", recipe.model.dtype, "--out", str(out)]
    run_part([*arguments.launcher, COMPARE, *sides, *asked])


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of this script, and return the rest, which belong to the recipe."""
    parser = option_parser(__doc__)
    parser.add_argument("--text", type=path_option, required=True, help="a UTF-8 file that none is trained on")
    parser.add_argument(
        "--launcher",
        type=shlex.split,
        default=["deepspeed", "--quiet"],
        help="what starts a script on all ranks (deepspeed --quiet)",
    )
    parser.add_argument(
        "--ptq_codes", nargs="+", choices=CODES, default=[], help="first codes of PTQs beside the recipe's"
    )
    parser.add_argument(
        "--ptq", action=NamedDirectories, default={}, metavar="NAME=DIR", help="a PTQ of FT made elsewhere; repeatable"
    )
    arguments, words = parser.parse_known_args()
    if not arguments.text.is_file():
        parser.error(f"--text: {arguments.text}, expected a text file")
    try:
        program(arguments.launcher[0])
    except (FileNotFoundError, IndexError) as error:
        parser.error(f"--launcher: {error}")
    return arguments, words


def scripts_of(recipe: Recipe, ptq_codes: Sequence[str]) -> dict[str, str]:
    """Map each part (ft unless nothing would change it, ptq, ptq_gptq, ..., qat) to its script, in order."""
    others = [f"{PTQ}_{codes}" for codes in dict.fromkeys(ptq_codes) if codes != recipe.quant.init]
    scripts = {FT: TRAIN, **dict.fromkeys([PTQ, *others], CALIBRATE), QAT: TRAIN}
    return {part: script for part, script in scripts.items() if part != FT or not teaches_itself(recipe)}


def compared(recipe: Recipe, scripts: Mapping[str, str], elsewhere: Mapping[str, str]) -> dict[str, str]:
    """Map names for the table to the exports of all PTQs: those of ``scripts``, and those made elsewhere
    (``elsewhere``). A single PTQ has the scheme's name. Each of several has the scheme's name, followed by its own.
    Raises RecipeError if a PTQ of ``elsewhere`` is missing, or has the name of a PTQ that is made here."""
    out, scheme = Path(recipe.output_dir), recipe.quant.scheme
    made = {
        part.removeprefix(f"{PTQ}_") if part != PTQ else recipe.quant.init: str(out / part / "export")
        for part, script in scripts.items()
        if script == CALIBRATE
    }
    if both := made.keys() & elsewhere.keys():
        raise RecipeError(f"--ptq {min(both)}=...: expected another name: a PTQ that is made here has this name")
    if absent := [directory for directory in elsewhere.values() if not (Path(directory) / "config.json").is_file()]:
        raise RecipeError(f"--ptq: {absent[0]}, expected the directory of a checkpoint")
    found = {**made, **elsewhere}
    return {scheme if len(found) == 1 else f"{scheme} {name}": export for name, export in found.items()}


def check_comparable(recipe: Recipe) -> None:
    """Refuse recipes whose FT, PTQ and QAT would not differ by quantization alone, and options that the study sets
    itself. Raises RecipeError with one line per problem."""
    quant, export = recipe.quant, recipe.export
    rules = [
        ("quant.scheme", quant.scheme, quant.scheme != SOURCE, "a scheme: FT, which PTQ reads, holds no codes"),
        ("quant.fake_quant_start", quant.fake_quant_start, not recipe.never_quantizes(), "0 or more: QAT would be FT"),
        ("quant.start", quant.start, quant.start is None, "null: PTQ is FT quantized, not a file"),
        ("quant.scales", quant.scales, quant.scales is None, "null: PTQ's scales are FT's"),
        (
            "adapter.kind",
            recipe.adapter.kind,
            not recipe.adapter.on,
            "none; with adapters, make the parts by hand and compare them with launch/compare.py",
        ),
        ("train.resume", recipe.train.resume, not recipe.train.resume, "false: a part that was interrupted is resumed"),
        ("export.enabled", export.enabled, export.enabled, "true: exports are compared"),
        ("export.format", export.format, export.format == "compressed", "compressed, computed as it is served"),
        ("export.dir", export.dir, export.dir is None, "null: the export of each part is in its folder"),
    ]
    if problems := [f"{key}: {found!r}, expected {expected}" for key, found, good, expected in rules if not good]:
        raise RecipeError("\n".join(problems))


def pins(recipe: Recipe) -> list[str]:
    """Return options that pin everything from the Hugging Face Hub to one commit, so that all runs use the same
    files."""
    words = []
    for key, section, item in recipe_options(recipe):
        if HUB in item.metadata and (name := named(value := getattr(section, item.name))) != value:
            words += [f"--{key}", name if isinstance(name, str) else json.dumps(name)]
    return words


def teaches_itself(recipe: Recipe) -> bool:
    """Tell if training without fake quant has no effect, because only scales train, or because the model would only
    learn its own logits."""
    scales_alone = recipe.learnable.scales_alone() and not is_quantized(Path(recipe.model.path))
    return scales_alone or (learns_itself(recipe) and not training_differs(recipe))


def learns_itself(recipe: Recipe) -> bool:
    """Tell if the model learns only from its own unquantized logits: distillation from ``model.path`` is the only loss
    at every step, there is no weight decay, and routers do not train."""
    loss, path = recipe.loss, Path(recipe.model.path)
    itself = recipe.teacher_kind() == "model" and Path(str(loss.teacher)).resolve() == path.resolve()
    itself = itself and loss.teacher_weights == "full"
    others = recipe.learnable.router or recipe.optim.weight_decay or any(event.loss for event in recipe.schedule)
    return itself and loss.lm_weight == 0 and not others and not is_quantized(path)


def training_differs(recipe: Recipe) -> list[str]:
    """List the differences between logits in training and in eval mode (the teacher's): dropout, noise in expert
    routing, clipped coefficients (``altup_coef_clip``), and compiled layers, which round differently."""
    with errors_on_all_ranks(ValueError):
        config = read_config(Path(recipe.model.path), recipe.model.trust_remote_code).get_text_config()
    acting = [f"{key} {value}" for key, value in shares(config.to_dict()) if TRAINING.search(key)]
    return acting + ["train.compile"] * recipe.train.compile


def shares(part: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield key and value of every number above 0 in a configuration, including nested ones."""
    for key, value in part.items():
        if isinstance(value, dict):
            yield from shares(value)
        elif isinstance(value, int | float) and value > 0:
            yield key, value


def reference(recipe: Recipe) -> Path:
    """Return the path of the model that PTQ quantizes, and with which PTQ and QAT are compared."""
    return Path(recipe.model.path) if teaches_itself(recipe) else Path(recipe.output_dir) / FT / "export"


def changes_of(part: str, recipe: Recipe) -> list[str]:
    """Return the command-line options by which the recipe of ``part`` (``ft``, ``ptq_gptq``, ...) differs from
    ``recipe``."""
    out = Path(recipe.output_dir)
    words = ["--output_dir", str(out / part)]
    if part.startswith(PTQ):
        words += ["--model.path", str(reference(recipe))]
    if part.startswith(f"{PTQ}_"):
        words += ["--quant.init", part.removeprefix(f"{PTQ}_")]
    if part == FT:
        words += changes_without_fake_quant(recipe)
    return words


def changes_without_fake_quant(recipe: Recipe) -> list[str]:
    """Return command-line options that disable fake quant, reset quant.init (GPTQ would change weights), and reset
    all options that have no effect without fake quant."""
    plain = copy.deepcopy(recipe)
    events = [
        replace(event, fake_quant=None, layers=None, observe=None, freeze_scales=None) for event in plain.schedule
    ]
    plain.schedule = [event for event in events if event.lr is not None or event.loss is not None]
    plain.quant.fake_quant_start, plain.quant.init = -1, "rtn"
    words = ["--quant.fake_quant_start", "-1", "--quant.init", "rtn"]
    words += ["--learnable.weight", json.dumps(recipe.learnable.weight)]  # whose default depends on other options
    if recipe.schedule:
        shown = [{key: value for key, value in asdict(event).items() if value is not None} for event in plain.schedule]
        words += ["--schedule", json.dumps(shown)]
    while found := next(idle(plain), None):  # resetting an option may make another option idle
        key, default, _ = found
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(plain), name, default)
        words += [f"--{key}", default if isinstance(default, str) else json.dumps(default)]
    return words


def check_part(folder: Path, recipe: Recipe) -> None:
    """Raise RecipeError if another recipe or script made the part's folder, or if an export could not be written
    there."""
    made_by = folder / MADE_BY
    if made_by.is_file():
        if named(asdict(load_recipe(made_by))) != named(asdict(recipe)):
            raise RecipeError(f"{folder} was made by another recipe ({made_by}): name another output_dir, or remove it")
    elif folder.is_dir() and any(folder.iterdir()):
        raise RecipeError(f"{folder} was not made by this script: name another output_dir, or remove it")
    if not (folder / "export").is_dir():
        check_export(recipe)


def run_part(shown: Sequence[str]) -> None:
    """Print a command and run it; on failure exit with its exit code."""
    if code := run_command(shown):
        print(f"error: exit code {code} of {shlex.join(shown)}", file=sys.stderr, flush=True)
        raise SystemExit(code)


if __name__ == "__main__":
    main()
