"""Keep the tokens of data files on disk, so that a machine tokenizes each file once.

A directory of the cache has a folder for each tokenized file. Its name is a digest of all that decides the tokens: the
file's content, the tokenizer with its chat template, the options of the reader, and the sources and versions of the
code. It contains flat arrays, which are memory-mapped, and a manifest with their sizes and checksums, and with what the
reader says about the file. A folder is written under another name, flushed and renamed: under its own name it is whole.
Its modification time is that of its last use.

- **Locks.** A process that finds no folder locks the folder's name; others that need it wait and then read it. The
  kernel releases the lock of a killed process; the next process starts over.
- **Changes.** Arrays are digested as they are written. A process digests them again if a file has changed since: inode,
  size or times. A damaged folder is written again. Digests of data files are remembered in the same way, under
  ``known/``, and so are the results of other slow functions of samples.
"""

import fcntl
import hashlib
import io
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.files import DataError

_MANIFEST = "manifest.json"
_PACKAGES = ("transformers", "tokenizers", "jinja2", "numpy")
_SETTLED = 2_100_000_000  # nanoseconds after which a change of a file is sure to give it another time
_STARTED = time.time()
_CLOCK = re.compile(r"strftime_now\s*\(\s*(['\"])(.*?)\1\s*\)")
_ASKS_FOR_CLOCK = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")


class _DamagedError(DataError):
    """Error of a cache folder whose files are missing, or differ from what was written."""


@dataclass(frozen=True)
class Shard:
    """Arrays of a tokenized file by name, and facts (plain JSON) that its reader returned. If the facts have
    "problems" (bad lines), arrays may be missing or incomplete."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    digests: dict[str, str]
    """Digests of the arrays."""


class ArrayWriter:
    """Writer that appends to arrays: one file per array in ``directory``, or memory if ``directory`` is None. Types by
    name are given in ``dtypes``."""

    def __init__(self, dtypes: Mapping[str, str], directory: Path | None = None) -> None:
        self._dtypes, self._digests = dtypes, {name: _blake2b() for name in dtypes}
        self._files = {name: (directory / name).open("wb") if directory else io.BytesIO() for name in dtypes}

    def add(self, **arrays: np.ndarray) -> None:
        """Append to the arrays of these names."""
        for name, values in arrays.items():
            data = np.ascontiguousarray(values, self._dtypes[name]).data
            self._digests[name].update(data)
            self._files[name].write(data)

    def digests(self) -> dict[str, str]:
        """Return a digest of each array."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def in_memory(self) -> dict[str, np.ndarray]:
        """Return the arrays of a writer without a directory, by name."""
        buffers = {name: file.getbuffer() for name, file in self._files.items() if isinstance(file, io.BytesIO)}
        return {name: np.frombuffer(buffer, self._dtypes[name]) for name, buffer in buffers.items()}

    def flush(self) -> str:
        """Flush the files of the directory to disk; return a text with their inodes, sizes and times."""
        for file in self._files.values():
            file.flush()
        for file in self._files.values():
            os.fsync(file.fileno())
        return _identity((name, os.fstat(file.fileno())) for name, file in self._files.items())

    def close(self) -> None:
        """Close the files. An error in writing the rest, as on a full disk, is ignored."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()


Tokenize = Callable[[ArrayWriter], dict[str, Any]]
"""Writes the arrays of a file and returns the facts about it. With "problems" among them nothing is kept."""


class TokenCache:
    """Directory with the tokens of files.

    Args:
        directory: created if it does not exist; None keeps nothing.
        say: prints a line; its second argument is True for a line that any rank prints, False for one of rank 0 only.
    """

    def __init__(
        self, directory: str | Path | None = None, say: Callable[[str, bool], None] = lambda text, _: print(text)
    ) -> None:
        self.directory = None if directory is None else Path(directory)
        self._say = say

    def about(self, tokenizer: PreTrainedTokenizerBase, options: Any, *, chat: bool) -> str:
        """Digest everything except the file itself that decides the file's tokens; without a directory return an empty
        text. ``options`` (plain JSON) are the reader's; ``chat`` is True if it renders the chat template. Raises
        DataError if the template computes the format in which it writes the time, so that tokens cannot be kept."""
        if self.directory is None:
            return ""
        sources = _digest_of_files(sorted(Path(__file__).parent.glob("*.py")))
        packages = [*_PACKAGES, "pyarrow"] if find_spec("pyarrow") else _PACKAGES
        versions = [platform.python_version(), *map(version, packages)]
        return digest([*_state(tokenizer), *(_template(tokenizer) if chat else ()), sources, versions, options])

    def shard(self, path: Path, about: str, dtypes: Mapping[str, str], build: Tokenize) -> Shard:
        """Return the tokens of a file, or of a folder that is one data set, from the cache if they are there, else as
        ``build`` writes them in arrays of ``dtypes``. ``about`` is the result of :meth:`about`. Raises DataError if the
        directory cannot be locked, if the file changes while it is read, and errors of ``build``."""
        if self.directory is None:
            facts = build(writer := ArrayWriter(dtypes))
            return Shard(writer.in_memory(), facts, writer.digests())
        files = _files(path)
        before = _identity_of(files)
        content = self._of_files(f"content of {path.resolve()}", files, lambda: _digest_of_files(files))
        key = digest([content, about, dict(dtypes)])

        def tokenize(writer: ArrayWriter) -> dict[str, Any]:
            facts = build(writer)
            if _identity_of(_files(path)) != before:
                raise DataError(f"{path}: changed while it was tokenized, expected a file that stays as it is")
            return facts

        with suppress(_DamagedError):
            if found := self._open(key):
                return found
        with self._locked(key, path):
            text = f"{path} is tokenized into {self.directory / key}"
            try:
                if found := self._open(key):
                    return found
            except _DamagedError as damage:
                text = f"{damage}, so it is damaged: {path} is tokenized again"
            # What another rank met since this one started: else each would read the file, one after the other.
            name = f"problems of {key} in {path}"
            known: dict[str, Any] | None = self._known(name)
            if not known or known["at"] < _STARTED:
                self._say(f"data.cache: {text}", True)
                if known := self._build(key, dtypes, tokenize):
                    self._remember(name, known | {"at": time.time()})
            if known and "error" in known:
                raise DataError(known["error"])
            if known:
                return Shard({}, known, {})
            found = self._open(key)
            assert found is not None
            return found

    # ---- what is known of files and samples

    def once(self, name: str, compute: Callable[[], Any], given: str = "", *, keep: bool = True) -> Any:
        """Return the value of a slow function (plain JSON, not None), from the cache if it was kept under ``name`` with
        the same ``given``, a text for the state of its inputs. Otherwise call ``compute``, and keep the value unless
        ``keep`` is False."""
        if (value := self._known(name, given)) is None:
            value = compute()
            if keep:
                self._remember(name, value, given)
        return value

    def _known(self, name: str, given: str = "") -> Any:
        if self.directory is not None:
            with suppress(OSError, _DamagedError):
                known = _read(self.directory / "known" / digest(name))
                return known["value"] if known["given"] == given else None
        return None

    def _remember(self, name: str, value: Any, given: str = "") -> None:
        if self.directory is None:
            return
        path = self.directory / "known" / digest(name)
        partial = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}")
        with suppress(OSError):  # of a full disk, say: the next process computes it, too
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(_sealed({"given": given, "value": value}), encoding="utf-8")
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)

    def _of_files(self, name: str, files: Sequence[Path], compute: Callable[[], Any]) -> Any:
        """Return the value of a slow function of files, which is remembered until one of them changes."""
        identity = _identity_of(files)  # before the files are read
        settled = max(file.stat().st_ctime_ns for file in files) < time.time_ns() - _SETTLED
        return self.once(name, compute, identity, keep=settled)

    def _open(self, key: str) -> Shard | None:
        """Map the arrays of the folder ``key``; None if it does not exist. Raises _DamagedError if its files are
        missing or differ from what was written."""
        assert self.directory is not None
        folder = self.directory / key
        if not folder.exists():
            return None
        try:
            manifest = _read(folder / _MANIFEST)
            dtypes, digests = manifest["dtypes"], manifest["digests"]
            files = [folder / name for name in digests]
            found = self._of_files(_name_of(folder), files, lambda: {file.name: _digest_of(file) for file in files})
            if other := [name for name in digests if found[name] != digests[name]]:
                raise _DamagedError(f"{folder / other[0]} was changed after it was written")
            arrays = {file.name: _mapped(file, dtypes[file.name]) for file in files}
        except FileNotFoundError as error:
            raise _DamagedError(f"{error.filename} is missing") from error
        with suppress(OSError):  # the directory may be read-only
            os.utime(folder)
        return Shard(arrays, manifest["facts"], digests)

    def _build(self, key: str, dtypes: Mapping[str, str], build: Tokenize) -> dict[str, Any] | None:
        """Write a folder and return None. If the file has bad lines, write no folder and return the facts with them; if
        ``build`` raises DataError, return its text under "error"."""
        assert self.directory is not None
        # With the machine's name: locks may not reach other machines, and then each machine writes a folder.
        folder, partial = self.directory / key, self.directory / f"{key}.{socket.gethostname()}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process: this one has the lock
        self._sweep()
        partial.mkdir()
        writer = ArrayWriter(dtypes, partial)
        try:
            facts = build(writer)
            if facts.get("problems"):
                return facts
            identity, digests = writer.flush(), writer.digests()
            with (partial / _MANIFEST).open("w", encoding="utf-8") as file:
                file.write(_sealed({"dtypes": dict(dtypes), "digests": digests, "facts": facts}))
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(partial, folder)
            _sync(self.directory)
            self._remember(_name_of(folder), digests, identity)
            return None
        except DataError as error:
            return {"error": str(error)}
        except OSError as error:
            error.filename = error.filename or str(partial)
            raise
        finally:
            writer.close()
            shutil.rmtree(partial, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove folders that killed processes of this machine have not completed."""
        assert self.directory is not None
        for partial in self.directory.glob(f"*.{socket.gethostname()}.partial"):
            lock = self.directory / f"{partial.name.partition('.')[0]}.lock"
            with lock.open("a") as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _locked(self, key: str, path: Path) -> Iterator[None]:
        assert self.directory is not None
        with ExitStack() as stack:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self.directory / f"{key}.lock").open("a"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._say(f"data.cache: another process tokenizes {path}: waiting for it", False)
                    fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                raise DataError(
                    f"data.cache: {self.directory} has no tokens of {path} yet, and cannot be written and locked "
                    f"({error.strerror}), expected a directory on a disk with locks, such as a local one"
                ) from error
            yield


def _files(path: Path) -> list[Path]:
    """List ``path`` itself if it is a file, otherwise all files below this folder."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in _files(path))


def _identity(files: Iterable[tuple[str, os.stat_result]]) -> str:
    """Identify the state of files without reading them."""
    return repr([(name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in files])


def _identity_of(files: Iterable[Path]) -> str:
    return _identity((file.name, file.stat()) for file in files)


def _blake2b(data: bytes = b"") -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=16)


def digest(value: Any) -> str:
    """Return a digest of plain JSON, 32 hex digits."""
    return _blake2b(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest_of(path: Path) -> str:
    """Digest the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake2b).hexdigest()


def _digest_of_files(files: Sequence[Path]) -> str:
    """Digest names and contents; a single file's name does not count."""
    return digest([[file.name * (len(files) > 1), _digest_of(file)] for file in files])


def _state(tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Yield those parts of a tokenizer that decide the tokens of a text."""
    backend, folder = getattr(tokenizer, "backend_tokenizer", None), Path(tokenizer.name_or_path)
    yield backend.to_str() if backend is not None else None
    yield [str(tokenizer.special_tokens_map), str(sorted(tokenizer.added_tokens_decoder.items()))]
    modules = {kind.__module__ for kind in type(tokenizer).__mro__}
    if own := sorted(name for name in modules if name.split(".")[0] not in ("transformers", "builtins", "typing")):
        code = [Path(str(sys.modules[name].__file__)) for name in own]  # of the checkpoint
        yield _digest_of_files([*code, *sorted(folder.glob("*.py")), *sorted(folder.glob("*.json"))])


def _template(tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Yield all that decides the text of a chat: templates, the times that they write, and files with stop tokens.
    Raises DataError if a template writes the time in a format that it computes."""
    given, folder = tokenizer.chat_template, Path(tokenizer.name_or_path)
    texts = [str(text) for text in (given.values() if isinstance(given, dict) else [given])]
    if any("strftime_now" in _ASKS_FOR_CLOCK.sub("", _CLOCK.sub("", text)) for text in texts):
        raise DataError(
            f"data.cache: the chat template of {tokenizer.name_or_path!r} writes the time in a format that it "
            "computes, so that its tokens cannot be kept: remove data.cache"
        )
    yield [given, [_now(form) for text in texts for _, form in _CLOCK.findall(text)]]
    yield [_digest_of_files([*folder.glob(name)]) for name in ("generation_config.json", "config.json")]


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _name_of(folder: Path) -> str:
    return f"digests of {folder.resolve()}"


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # an empty file has no map


def _sealed(value: Any) -> str:
    """Return a line with the checksum of a value, and the value as JSON."""
    text = json.dumps(value)
    return f"{zlib.crc32(text.encode())}\n{text}"


def _read(path: Path) -> Any:
    """Read a value written by `_sealed`. Raises _DamagedError if the checksum differs, OSError without the file."""
    seal, _, text = path.read_bytes().partition(b"\n")
    if seal != str(zlib.crc32(text)).encode():
        raise _DamagedError(f"{path} was changed after it was written")
    return json.loads(text)


def _sync(directory: Path) -> None:
    """Flush the names in a directory to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
