"""Names on the Hugging Face Hub in place of local paths: ``Qwen/Qwen3-4B``, ``Qwen/Qwen3-4B@main``, ``hf://...``.

:func:`local_paths` downloads a checkpoint, or the files of a data set, into the Hub's cache, and returns local paths,
which take the name's place; :func:`named` gives the name with its commit, for all that a run records or compares. A
path that exists is never a name, nor is one that looks local. Only files that DeepQAT reads are fetched, never pickles.

One process of a machine asks the Hub, the others wait for a lock and take its answer, also if it is an error. So this
needs no process group, works before any other check, and never waits for a process that has ended. Machines that see
different commits are refused like those with different models (:mod:`engine.cluster.nodes`).
"""

import fcntl
import fnmatch
import glob
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engine.config.errors import without_weights

Kind = Literal["model", "scales", "adapter", "chat", "text", "mixed", "on_policy"]
"""Contents of a repository: a model, the scales of a model, an adapter of peft, or a data set of one data.kind."""

HUB = "hub"  # key of a field's metadata; its value is the Kind of the named repositories, or "data": data.kind
_NAME = re.compile(
    r"(?P<prefix>hf://(?:datasets/)?)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|\w[\w.-]*))?(?:/(?P<file>.+))?"
)
_RESERVED = ("models", "datasets", "spaces", "docs", "api")  # pages of the Hub, not names of owners
_FILE = re.compile(r"\.(jsonl?|txt|md|yaml|csv|parquet|arrow|gz|bz2|xz|zst|zip|tar|safetensors|bin|pt|pth|gguf)$")
_IN_CACHE = re.compile(r"(?:models|datasets)--[^/]+/snapshots/([^/]+)(?:/(.+))?$")
FIRST_FILES = ["config.json", "adapter_config.json", INDEX := "model.safetensors.index.json"]
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")  # configuration and tokenizer
_CHATS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
_TEXTS = (".txt", ".txt.gz", ".txt.zst")
# Endings of data files by data.kind; files with the first ending that occurs are taken.
_DATA = {"chat": _CHATS, "on_policy": _CHATS, "text": _TEXTS, "mixed": (*_CHATS, *_TEXTS)}
_NO_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_TRAINING = re.compile(r"(?:^|[^a-z])train(?:ing)?(?:[^a-z]|$)")
_OTHER_SPLITS = re.compile(r"(?:^|[^a-z])(?:test|testing|valid|validation|dev|eval|evaluation)(?:[^a-z]|$)")
APART_SECONDS = 0.2  # at most, between the starts of a job's first and last process on a machine


class HubError(ValueError):
    """Error of a name on the Hub that cannot be fetched; its text is a clause with the reason and the remedy."""


class HubName(NamedTuple):
    """Parsed name.

    Attributes:
        prefix: ``hf://``, ``hf://datasets/`` or nothing.
        repo: ``owner/name``.
        revision: branch, tag or commit; ``main`` by default.
        file: file or pattern in a data set, or nothing.
    """

    prefix: str
    repo: str
    revision: str
    file: str


def parse_name(path: str) -> HubName | None:
    """Parse a name; return None for a local path: a text that exists as a file or folder, or is not like
    ``owner/name``. A text without ``hf://`` is also a local path if its first folder exists or is a page of the Hub
    (``datasets``), if a file follows ``owner/name``, or if it ends like a file (``.jsonl``)."""
    match = _NAME.fullmatch(path)
    if match is None or os.path.lexists(path):
        return None
    folder = match["repo"].split("/")[0]
    local = match["file"] or folder in _RESERVED or _FILE.search(match["repo"]) or os.path.isdir(folder)
    if local and not match["prefix"]:
        return None
    return HubName(match["prefix"] or "", match["repo"], match["revision"] or "main", match["file"] or "")


_answers: dict[tuple[Any, ...], list[str]] = {}
_names: dict[str, str] = {}  # names with their commits, by local path


def named(value: Any) -> Any:
    """Copy ``value``, which may be a list or dictionary, and replace each path in it that :func:`local_paths` returned
    by its name on the Hub with the commit. Tuples become lists."""
    if isinstance(value, dict):
        return {key: named(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [named(one) for one in value]
    return _names.get(os.fspath(value), value) if isinstance(value, str | os.PathLike) else value


def local_paths(path: str, kind: Kind = "model", *, weights: bool = True, code: bool = False) -> list[str]:
    """Download what the Hub's cache lacks; return the local directory of a checkpoint, or the local files of a data
    set. Return ``[path]`` if ``path`` is no name on the Hub.

    Args:
        path: a name, or a local path.
        kind: contents of the repository.
        weights: fetch weights too, not only configuration and tokenizer.
        code: fetch Python files, too.

    Raises:
        HubError: there is no such name, no access or no network, or the repository has no such files.
    """
    if (name := parse_name(path)) is None:
        return [path]
    question = (kind, *name, weights, code)
    if question not in _answers:
        found = _once_per_machine(question, lambda: _fetch(name, kind, weights=weights, code=code))
        commits, files = zip(*(_IN_CACHE.findall(one)[0] for one in found), strict=True)
        at = f"{name.repo}@{commits[0]}"
        names = [f"hf://datasets/{at}/{file}" if file else at for file in files]
        _names.update(zip(found, names, strict=True))
        _answers[question] = found
        if os.environ.get("RANK", "0") == "0":
            more = f" and {len(files) - 3} more" if len(files) > 3 else ""
            shown = f": {', '.join(files[:3])}{more}" if files[0] else ""
            print(f"{path}: commit {commits[0]} on the Hugging Face Hub{shown}", file=sys.stderr, flush=True)
    return _answers[question]


def _once_per_machine(question: Sequence[Any], ask: Callable[[], list[str]]) -> list[str]:
    """Return the answer of the first process of this machine that asks; the others wait for it. Raises HubError if that
    process got one, or if the folder of the answers belongs to another user."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return ask()
    folder = Path(tempfile.gettempdir()) / f"deepqat-hub-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise HubError(f"{folder} belongs to another user, expected a folder of this user: set TMPDIR")
    cache = [os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")]
    digest = hashlib.sha256(json.dumps([*question, *cache]).encode()).hexdigest()[:32]
    with (folder / digest).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        answer = _fresh(file.read())
        if answer is None:
            try:
                answer = {"found": ask()}
            except HubError as error:
                answer = {"error": str(error)}
            file.truncate(0)
            json.dump(answer | {"time": time.time()}, file)
            file.flush()
    if "error" in answer:
        raise HubError(answer["error"])
    return answer["found"]


def _fresh(text: str) -> dict[str, Any] | None:
    """Parse an answer; None if it is older than this process, or half written."""
    try:
        answer = json.loads(text)
        return answer if answer["time"] > time.time() - _age() - APART_SECONDS else None
    except (ValueError, TypeError, KeyError):
        return None


def _age() -> float:
    """Return the seconds since this process was started, to 10 ms; psutil's time of start is off by up to a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc(5): starttime
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _fetch(name: HubName, kind: Kind, *, weights: bool, code: bool) -> list[str]:
    """Download the files, and return the local directory or files. Raises HubError."""
    from httpx2 import HTTPError
    from huggingface_hub import errors, get_cached_repo_tree, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    data = kind in _DATA
    if name.prefix.endswith("datasets/") != data and name.prefix:
        raise HubError(f"expected {'hf://datasets/' if data else 'hf://'} before the name")
    if name.file and not data:
        raise HubError("expected the name of a whole repository")
    repo: dict[str, Any] = {"repo_id": name.repo, "repo_type": "dataset" if data else "model"}
    cached = "does not have it"
    page = f"https://huggingface.co/{'datasets/' * data}{name.repo}"
    try:
        # The first call finds the commit, and keeps the list of files in the cache.
        first = ["README.md"] if data else FIRST_FILES
        directory = Path(snapshot_download(**repo, revision=name.revision, allow_patterns=first))
        cached = "has only some of its files"
        try:
            files = [file.path for file in get_cached_repo_tree(**repo, revision=directory.name)]
        except errors.CachedRepoTreeNotFoundError:  # an older version of the package has filled the cache
            files = [str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()]
        chosen = _data_files(name, kind, files) if data else _files(directory, files, kind, weights=weights, code=code)
        if count := sum(not (directory / file).is_file() for file in chosen):
            print(f"{name.repo}: downloading {count} files from the Hugging Face Hub", file=sys.stderr, flush=True)
        snapshot_download(**repo, revision=directory.name, allow_patterns=[glob.escape(file) for file in chosen])
        if missing := [file for file in chosen if not (directory / file).is_file()]:
            raise HubError(f"commit {directory.name} lacks {missing[0]} in the cache or on the Hub")
        return [str(directory / file) for file in chosen] if data else [str(directory)]
    except errors.GatedRepoError as error:
        raise HubError(f"its owner grants access: ask on {page}, then `hf auth login` or set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError("it is not there, or private: `hf auth login` or HF_TOKEN gives access") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"it has no revision {name.revision!r}, expected a branch, a tag or a commit") from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(f"the cache {cached}, and the Hub {_unreachable(error)}") from error
    except (HTTPError, OSError, errors.HFValidationError) as error:
        raise HubError(_line(error)) from error


def _unreachable(error: BaseException) -> str:
    """Say why the Hub was not asked, or did not answer."""
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        return "is not asked (HF_HUB_OFFLINE is set)"
    return f"cannot be reached ({_line(error.__cause__ or error)})"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _files(directory: Path, files: Sequence[str], kind: Kind, *, weights: bool, code: bool) -> list[str]:
    """Choose the files of a checkpoint, weights by its index; for ``scales`` also safetensors files outside the index,
    in which llm-compressor writes scales of keys and values. Raises HubError: no safetensors, or a damaged index."""
    chosen = [file for file in files if "/" not in file and any(fnmatch.fnmatch(file, one) for one in SMALL_FILES)]
    chosen += fnmatch.filter(files, "additional_chat_templates/*.jinja")
    chosen += fnmatch.filter(files, "*.py") if code else []
    if not weights:
        return chosen
    if kind == "adapter":
        named_weights = ["adapter_model.safetensors"]
    elif INDEX in files:
        try:
            index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
            named_weights = sorted({*index["weight_map"].values()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HubError(f"{INDEX} is damaged ({_line(error)}): remove {directory} to fetch it again") from error
    else:
        named_weights = ["model.safetensors"]
    if kind == "scales":
        named_weights += sorted({file for file in fnmatch.filter(files, "*.safetensors") if "/" not in file})
    if missing := [file for file in named_weights if file not in files]:
        raise HubError(f"it has no {missing[0]}, expected safetensors{without_weights(list(files))}")
    return [*chosen, *dict.fromkeys(named_weights)]


def _data_files(name: HubName, kind: Kind, files: Sequence[str]) -> list[str]:
    """Choose the files of a data set: those that match the name's pattern, else the training split, or files of no
    other split. Raises HubError if there are none."""
    if name.file:
        chosen = sorted(fnmatch.filter(files, name.file))
    else:
        chosen = []
        for ending in _DATA[kind]:
            found = sorted(file for file in files if file.endswith(ending) and Path(file).name not in _NO_DATA)
            chosen = chosen or found
        training = [file for file in chosen if _TRAINING.search(file.lower())]
        chosen = training or [file for file in chosen if not _OTHER_SPLITS.search(file.lower())]
    if not chosen:
        wanted = name.file or f"file of training samples that ends in {' or '.join(_DATA[kind])}"
        raise HubError(
            f"it has no {wanted}; name one as hf://datasets/{name.repo}/FILE, there are {', '.join(sorted(files)[:8])}"
        )
    return chosen
