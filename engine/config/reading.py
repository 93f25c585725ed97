"""Read recipes from YAML files and command lines, and write them.

A run reads a YAML file (``--config R.yaml``) and then overrides from the command line (``--optim.lr 2e-5``); ``--help``
shows every option with its default and ``--print_config`` the result of both. Unknown keys, wrong types and values that
:mod:`engine.config.config` refuses raise RecipeError, with the key's path, the value and the expected value;
``launch/exits.py`` ends a script with that text.
"""

import argparse
import difflib
import errno
import functools
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from engine.config.config import Recipe
from engine.config.errors import DERIVED, RecipeError, not_there
from engine.config.hub import local_paths, named
from engine.config.quant import SOURCE, QuantRecipe, SchemeRecipe
from model.checkpoint.safetensors import CheckpointError
from model.quantized.quantization_config import check_readable, read_quantization_config, rules_of, source_layout
from model.ranks import naming
from quant import TensorSpec
from quant.formats.layouts import check_layout

# The text below each field is what --help shows; without this setting jsonargparse reads class docstrings only.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

_OTHER_BASES = re.compile(r"[-+]?(0[0-7_]+|\d[\d_]*(:[0-5]?\d)+)")  # 0100 is 64, 1:30 is 90
A_RECIPE = "--config RECIPE, for example --config launch/recipes/qwen3_0_6b.yaml"
LONGEST_INTEGER = 100  # characters; the largest float has 309 digits
MOST_RECIPE_BYTES = 2**24
LONGEST_KEY = 100  # characters of a key in a message
# Options whose values are replaced as a whole, with their empty values. jsonargparse would fill the fields that an item
# does not set from the item that had its place or name before.
REPLACED = {"schedule": "[]", "quant.rules": "[]", "quant.schemes": "{}"}
MOST_VALUES = 100_000  # a recipe has about a hundred, and may have a rule or exempt pattern for each layer


@functools.cache  # takes 0.3 s
def _parser() -> ArgumentParser:
    """Build the command line: one option per field of :class:`Recipe`, and --config for a YAML file."""
    parser = ArgumentParser(
        description="Options override values of the files before them. Paths are relative to the current directory.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="Recipe in YAML, like those in launch/recipes/.")
    parser.add_class_arguments(Recipe)
    return parser


def _check_keys(path: str) -> None:
    """Refuse unknown and duplicate keys, keys without a value and names of classes: RecipeError, one line per problem
    with file, line and key. Raises RecipeError, too, for a file that cannot be read or is no YAML mapping."""
    try:
        root = yaml.compose(_text_of(path), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{path}{line}: not YAML ({error.problem})") from error
    except OSError as error:
        raise RecipeError(f"--config: {not_there(path)}: {error.strerror}") from error
    except RecursionError as error:
        raise RecipeError(f"{path}: nested too deep for a recipe") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not a YAML text ({error})") from error
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(f"{path}: {_found(root)}, expected sections like model, data and train")
    if _size(root, {}) > MOST_VALUES:
        raise RecipeError(f"{path}: more than {MOST_VALUES:,} values, its aliases (*name) written out; expected fewer")
    problems = [f"{path}, line {line}: {problem}" for line, problem in _key_problems(root, Recipe, prefix="")]
    if problems:
        raise RecipeError("\n".join(problems))


def _text_of(path: str) -> str:
    """Read a text file. Raises OSError, also for pipes, devices and files too large for a recipe."""
    other = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    if other or (os.path.isfile(path) and os.path.getsize(path) > MOST_RECIPE_BYTES):
        raise OSError(errno.EINVAL, f"expected a YAML file of at most {MOST_RECIPE_BYTES:,} bytes")
    return Path(path).read_text(encoding="utf-8")


def _size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Count the values of a YAML node with its aliases expanded: a few lines of aliases can mean billions of values.
    ``sizes`` caches the counts of nodes. A node that contains itself counts as infinite."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]


def _key_problems(node: yaml.MappingNode, section: type, prefix: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of every problem with keys and values of a YAML mapping and of the mappings in it."""
    known: dict[str, Any] = {
        item.name: item.type | None if DERIVED in item.metadata else item.type  # type: ignore[operator]
        for item in dataclass_fields(section)
    }
    seen: set[str] = set()
    for key_node, value in node.value:
        line, key = key_node.start_mark.line + 1, str(key_node.value)
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"expected one of {', '.join(known)}"
            yield line, f"{prefix}{_shown(key)}: unknown key; {hint}"
        elif key in seen:
            yield line, f"{prefix}{key}: this key is there twice, expected it once"
        elif is_dataclass(section_type := known[key]):
            if isinstance(value, yaml.MappingNode):
                yield from _key_problems(value, cast(type, section_type), prefix=f"{prefix}{key}.")
            else:
                expected = "expected keys and values below it (leave the section out for its defaults)"
                yield line, f"{prefix}{key}: {_found(value)}, {expected}"
        else:
            yield from _value_problems(value, known[key], f"{prefix}{key}", line)
        seen.add(key)


def _shown(key: str) -> str:
    """Format a key for a message: cut if long, quoted unless it is a plain word."""
    key = key if len(key) <= LONGEST_KEY else f"{key[:LONGEST_KEY]}..."
    return key if re.fullmatch(r"[\w.-]+", key) else repr(key)


def _found(node: yaml.Node | None) -> str:
    """Describe what a recipe has where a section is expected, for a message: a text (shortened), null or a list."""
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return "null"
    return _shown(str(node.value)) if isinstance(node, yaml.ScalarNode) else "a list"


def _value_problems(node: yaml.Node, kind: Any, path: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield problems of a value that should be of type ``kind``, each with its line: null where a value is required, a
    whole number that is too large where a float is expected, text in place of a section. ``path`` is the key.

    jsonargparse accepts null for any type. It would also import a class whose name is given in place of a section; a
    recipe is plain data, so such a text is refused here.
    """
    parts = get_args(kind)
    if node.tag == "tag:yaml.org,2002:null":
        if type(None) not in parts and kind is not type(None):
            yield line, f"{path}: null, expected a value (leave the key out for its default)"
        return
    if node.tag == "tag:yaml.org,2002:int" and _OTHER_BASES.fullmatch(node.value):
        found = f"{node.value}, which YAML reads in base 8 or 60"
        yield line, f"{path}: {found}, expected a number without leading 0 or colon"
    elif float in (kind, *parts) and node.tag == "tag:yaml.org,2002:int" and len(node.value) > LONGEST_INTEGER:
        yield line, f"{path}: {node.value}, expected a number that 64 bits hold"
    elif get_origin(kind) in (list, tuple) and isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _value_problems(item, parts[0], f"{path}[{index}]", item.start_mark.line + 1)
    elif get_origin(kind) is dict and isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, item in node.value:
            key = f"{path}.{_shown(str(name.value))}"
            if str(name.value) in seen:
                yield name.start_mark.line + 1, f"{key}: this key is there twice, expected it once"
            seen.add(str(name.value))
            yield from _value_problems(item, parts[1], key, name.start_mark.line + 1)
    elif types := [part for part in (kind, *parts) if is_dataclass(part)]:
        if isinstance(node, yaml.MappingNode):
            yield from _key_problems(node, cast(type, types[0]), prefix=f"{path}.")
        else:
            yield line, f"{path}: {_found(node)}, expected keys and values below it"
    elif containers := [part for part in parts if get_origin(part) in (list, dict)]:
        yield from _value_problems(node, containers[0], path, line)  # a list or dict, or null


def _lines(error: ArgumentError, *, without_file: bool) -> str:
    """Convert jsonargparse's message to a line that starts with the key's path, or one line for each missing key.
    ``without_file``: the command line names no recipe; the line asks for one."""
    text = " ".join(str(error).split())
    if missing := re.fullmatch(r"the following arguments are required: (.*)", text):
        if without_file:
            return f"--config: missing, expected {A_RECIPE} (or options for {missing[1]})"
        return "\n".join(f"{key}: missing, expected a value" for key in missing[1].split(", "))
    text = re.sub(r"<class '(\w+)'>", r"\1", text).replace("a typing.Literal", "one of ")
    text = re.sub(
        r"Does not validate .* Errors: - (Expected (?!.* - Expected .* - ).*?)\.? - Expected a NoneType "
        r"Given value type: \w+ Given value: ",
        r"\1. Got value: ",
        text,
    )
    text = re.sub(r"(Expected a list\. Got value: )([^{\[]+)$", r"\1\2; write [\2]", text)
    if unknown := re.match(r"unrecognized arguments: --([\w.]+)", text):
        close = difflib.get_close_matches(unknown[1], list(_parser().get_defaults().keys()), n=1)
        text += f"; did you mean --{close[0]}?" if close else "; --help lists what there is"
    return re.sub(r'^Parser key "([\w.]+)":', r"\1:", text)


def _too_large(argv: Sequence[str]) -> str:
    option = re.search(rf"--([\w.]+)[= ]\S*\d{{{LONGEST_INTEGER}}}", " ".join(argv))
    return f"{option[1] if option else 'a number'}: an integer beyond every float, expected a number that 64 bits hold"


def _keys_of(path: str) -> set[str]:
    """Return the keys that a recipe sets, like ``quant.scheme``; :func:`_check_keys` has read it."""
    root = yaml.safe_load(_text_of(path))
    return {*root, *(f"{key}.{name}" for key, part in root.items() if isinstance(part, dict) for name in part)}


def _keys_in(section: str, text: str) -> set[str]:
    """Return the keys that an option sets if it gives a whole section, as in ``--quant '{rules: []}'``."""
    if not text.startswith("{"):
        return set()
    try:
        return {f"{section}.{name}" for name in yaml.safe_load(text)}
    except (yaml.YAMLError, RecursionError):
        return set()  # the parser refuses it


def _emptied(argv: Sequence[str]) -> Iterator[str]:
    """Insert an option with the empty value in front of each file or option that sets one of ``REPLACED``. Warn of
    options that a file behind them replaces."""
    options: set[str] = set()
    for index, word in enumerate(argv):
        option, _, value = word.partition("=")
        keys = {option.removeprefix("--")}
        if option == "--config":
            keys = _keys_of(path := value or argv[index + 1])
            if (lost := sorted(options & keys)) and os.environ.get("RANK", "0") == "0":
                print(
                    f"warning: --{lost[0]}: {path}, which stands behind it, sets it again", file=sys.stderr, flush=True
                )
        elif word.startswith("--"):
            keys |= _keys_in(option.removeprefix("--"), value or "".join(argv[index + 1 : index + 2]))
            options |= keys
        yield from (f"--{key}={empty}" for key, empty in REPLACED.items() if key in keys)
        yield word


def _parse(argv: Sequence[str]) -> Recipe:
    """Parse the recipe from the words of a command line. Raises RecipeError."""
    config_option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_option.add_argument("--config", action="append", default=[], nargs="?", const="")
    for path in config_option.parse_known_args(argv)[0].config:
        _check_keys(path)
    parser = _parser()
    try:
        # Recipe fills in defaults; if the parser does, it takes six times as long. --quant.exempt+ X appends to them.
        filled = any(re.match(r"--print_config|--[\w.]+\+(=|$)", word) for word in argv)
        values = vars(parser.instantiate(parser.parse_args(list(_emptied(argv)), defaults=filled)))
    except ArgumentError as error:
        without = not any(word.partition("=")[0] == "--config" for word in argv)
        raise RecipeError(_lines(error, without_file=without)) from error
    except OverflowError as error:  # in an option; files were checked above
        raise RecipeError(_too_large(argv)) from error
    except ValueError as error:
        raise RecipeError(f"quant.schemes: {error}") from error
    quant = values.setdefault("quant", QuantRecipe())
    if quant.scheme == SOURCE:
        resolve_source(quant, quant.start or values["model"].path)
    chosen = values["export"].format if "export" in values else None
    recipe = Recipe(**{item.name: values[item.name] for item in dataclass_fields(Recipe) if item.name in values})
    if chosen is None and _writes_as_read(recipe):
        recipe.export.format = "source"
    return recipe


def _writes_as_read(recipe: Recipe) -> bool:
    """Tell if export.format defaults to ``source``: quant.scheme is source, quant.start is null, fake quant is on at
    some step, and the recipe allows the format of model.path."""
    if recipe.quant.scheme != SOURCE or recipe.quant.start or recipe.never_quantizes():
        return False
    try:
        layout = source_layout(Path(local_paths(recipe.model.path)[0]))
        if layout is None:
            return False
        check_layout(layout, recipe.quant.linear_schemes())
        replace(recipe, export=replace(recipe.export, format=layout))  # raises what contradicts the format
    except ValueError:
        return False
    return True


def parse_recipe(argv: Sequence[str] | None = None, *, check_files: bool = True) -> Recipe:
    """Parse the recipe from a command line like ``--config R.yaml --optim.lr 2e-5``; argv defaults to sys.argv[1:].

    ``--local_rank=N``, which the deepspeed launcher appends, is ignored: ranks come from the environment. Scripts call
    :func:`launch.exits.recipe_or_exit`, which prints the error instead of a traceback.

    Args:
        argv: the words of the command line, without the script's name.
        check_files: check that the recipe's files exist, and fetch those on the Hugging Face Hub.

    Raises:
        RecipeError: all problems, one line each.
    """
    given = sys.argv[1:] if argv is None else argv
    recipe = _parse([argument for argument in given if not argument.startswith("--local_rank=")])
    if check_files:
        recipe.validate_files()
    return recipe


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read the recipe from a YAML file, without checking its files: call :meth:`Recipe.validate_files` for that. Raises
    RecipeError with one line per problem."""
    name = os.fspath(path)
    try:
        return _parse(["--config", name])
    except RecipeError as error:
        named = re.compile(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])")  # a short name may be part of a word
        lines = (line if named.search(line) else f"{name}: {line}" for line in str(error).splitlines())
        raise RecipeError("\n".join(lines)) from error


def save_recipe(recipe: Recipe, path: str | os.PathLike[str]) -> None:
    """Write a recipe with all fields as YAML, which :func:`load_recipe` reads back equal, except for paths that were
    fetched from the Hugging Face Hub: their names there, with the commit, are written instead."""
    values = named(asdict(recipe))
    values["optim"]["betas"] = list(recipe.optim.betas)
    aside = Path(f"{os.fspath(path)}.partial")
    aside.unlink(missing_ok=True)  # may be a link; rename, as a full disk must not destroy a recipe
    with naming(aside):
        aside.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(aside, path)


def resolve_source(quant: QuantRecipe, path: str) -> None:
    """Write the schemes of the checkpoint in ``path`` into ``quant.schemes``, as ``source``, ``source_2`` and so on.

    The schemes include the range of the codes, narrow or full. They are assigned to layers when the model is built. If
    ``quant.schemes`` has ``source`` already, as in a saved recipe, nothing is done.

    Raises RecipeError: the checkpoint is not quantized, or its quantization is not supported.
    """
    if SOURCE in quant.schemes:
        return
    try:
        path = local_paths(path)[0]
        config = read_quantization_config(Path(path))
        check_readable(Path(path))
        found = list(dict.fromkeys(rule.scheme for rule in rules_of(config) if rule.scheme is not None))
        if config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
            raise ValueError(
                "kv_cache_scheme (or kv_cache_quant_algo) is set, which 'source' does not support: set quant.scheme to "
                "fp8_static_kv or fp8_kv"
            )
        if not found:
            raise ValueError("quantization_config quantizes no layers: set quant.scheme to a preset")
    except ValueError as error:
        schemes = "quant.scheme source takes the schemes of the quantized checkpoint in quant.start or model.path"
        raise RecipeError(f"{error} ({schemes})") from error
    narrow = _narrow(Path(path))
    for index, scheme in enumerate(found):
        name = SOURCE if index == 0 else f"{SOURCE}_{index + 1}"
        quant.schemes[name] = SchemeRecipe(replace(scheme.weights, narrow=scheme.weights in narrow), scheme.activations)


def _narrow(directory: Path) -> set[TensorSpec]:
    """Find the weight specs whose codes have the narrow range; none in bad files: reading the weights raises later."""
    from model.quantized.checkpoint import read_checkpoint  # imports DeepSpeed, which other recipes do not need

    with suppress(CheckpointError, OSError):
        weights = {one.scheme.weights for one in read_checkpoint(directory, None).coded.values()}
        return {spec.wide for spec in weights if spec.narrow}
    return set()
