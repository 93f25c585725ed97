"""Publish the model of a running training: versions in a directory, and vLLM servers that load them.

The directory has one folder per version, written as the export is (``step_00000120``), and the link ``current`` to the
newest one. A version gets its name when all of it is on disk, and the link is replaced after that: a version that was
written only in part is never visible.

:class:`VllmServer` makes a running server load a version, or sample, through the HTTP interfaces of
VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (vLLM 0.32). While the server is paused it finishes the requests that it
has begun, and keeps new ones waiting. Then it clears its KV cache and reads the files. So each answer is computed by
one version from its first to its last token.

vLLM does not reload all formats exactly: some kernels keep values outside of their parameters. So a server that has
been started, and has loaded nothing since, is tested first: its parameters are overwritten with zeros, and the version
that it was started with is loaded again. All parameters must be as after the start, bit for bit. The log-probabilities
of a prompt may differ by at most 4 times as much as between equal requests before. The server's ``weight_version``
shows its state: ``default`` after a start, ``updating`` during an update, and then the directory of the version that is
served. A server whose update failed stays paused.
"""

import itertools
import json
import os
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.error import HTTPError

from torch import nn

from data.loader import MicroBatch
from engine.config.config import SERVED_FORMATS
from engine.fake_quant import FakeQuant
from engine.session.session import Session
from engine.session_export import export_trained, layout_of
from model.ranks import RankError, errors_on_all_ranks, gather_objects, is_main, made_by_main, naming, say
from model.save.aside import remove_left, sync
from model.save.loadable import is_expert
from quant import QuantLayer
from quant.linear import StackedLinear

CURRENT = "current"
RUN = ".run"
"""File that names the output directory of the run that publishes into a directory."""
PROBE_TOKENS = 32


def publish(
    session: Session,
    quant: FakeQuant,
    first: Callable[[int], Iterable[MicroBatch]],
    step: int,
    directory: Path,
    servers: Sequence[str],
    keep: int,
    seconds: float,
) -> tuple[Path | None, tuple[str, ...]]:
    """Write a version and let servers load it; a collective. Raises no RankError: failures become warnings. See
    :meth:`engine.state.LoopState.publish`.

    Args:
        first: ``first(n)`` yields this rank's first n micro-batches: for outdated input scales, and for the prompt
            that tests a server.

    Returns:
        The version's directory (None if it could not be written), and the addresses of the servers that serve it.
    """
    folder = Path(os.path.realpath(directory))
    try:
        with errors_on_all_ranks(OSError, ValueError):
            if keep < 2:
                raise ValueError(f"keep is {keep}, expected 2 or more: a server may be reading the version before")
            name = _prepare(folder, Path(session.recipe.output_dir), step) if is_main() else ""
        name = gather_objects(name)[0]
        export_trained(session, quant, first(max(1, session.recipe.quant.calibration_batches)), folder / name)
        with errors_on_all_ranks(OSError):
            if is_main():
                _make_current(folder, name, keep)
    except RankError as error:
        say(f"warning: step {step} was not published: {error}; training goes on, and the next publish tries again")
        return None, ()
    if not servers:
        return folder / name, ()

    def told() -> tuple[str, ...]:
        (batch,), end, reason = first(1), monotonic() + seconds, not_reloaded(session, quant)
        prompt = batch["input_ids"][0, :PROBE_TOKENS].tolist()
        return tuple(url for url in servers if _serve(url, folder / name, prompt, end, reason))

    return folder / name, made_by_main(told)


def not_reloaded(session: Session, quant: FakeQuant) -> str | None:
    """Return the reason why a running vLLM server cannot load the exports of a run; None if it can."""
    recipe = session.recipe
    if recipe.adapter.beside:
        return "adapter.merge: false, and servers load no adapter beside the weights"
    layout = layout_of(recipe)
    if layout not in SERVED_FORMATS:
        return f"export.format: {recipe.export.format}, expected one of {', '.join(SERVED_FORMATS)}"
    if layout in ("vllm_fp8", "modelopt") and recipe.quant.quantizes_cache():
        return f"export.format: {layout}, of which vLLM 0.32 does not renew the scales of keys and values"
    plain = layout == "dequantized" or (recipe.never_quantizes() and not quant.enabled)
    kinds = (nn.Linear, StackedLinear, *((QuantLayer,) if plain else ()))
    experts = [name for name, layer in session.model.named_modules() if isinstance(layer, kinds) and is_expert(name)]
    if experts:
        return f"{experts[0]} is not quantized: vLLM 0.32 keeps another copy of such experts, which it does not renew"
    return None


def _prepare(folder: Path, output: Path, step: int) -> str:
    """Create or check the directory, remove what interrupted publishes left in it, and return a free name for the
    version. Raises ValueError if the directory belongs to another run, or contains other files."""
    run, own = folder / RUN, os.path.realpath(output)
    if not run.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty: name a directory of its own, in which publishing removes files")
        folder.mkdir(parents=True, exist_ok=True)
        with naming(run):
            run.write_text(own, encoding="utf-8")
    elif (other := run.read_text(encoding="utf-8")) != own:
        raise ValueError(f"{folder} has versions of the run in {other}: name another directory, or remove it")
    for left in folder.glob("step_*.tmp-*"):
        remove_left(folder / left.name.rpartition(".tmp-")[0])
    for left in folder.glob("step_*.old"):
        shutil.rmtree(left)
    name = f"step_{step:08d}"
    others = (f"{name}-{number}" for number in itertools.count(2))  # published already, before a resume
    return next(free for free in itertools.chain([name], others) if not (folder / free).exists())


def _make_current(folder: Path, name: str, keep: int) -> None:
    """Point the link ``current`` to the complete version ``name``, and remove all versions but the last ``keep``."""
    new = folder / f".{CURRENT}"
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    new.replace(folder / CURRENT)
    sync(folder)
    for version in versions_in(folder)[:-keep]:
        shutil.rmtree(version.rename(version.with_name(f"{version.name}.old")))


def versions_in(folder: Path) -> list[Path]:
    """List the complete versions in a publish directory, the oldest first. They are sorted by the directories'
    modification times, not by their steps, which a resumed run may repeat."""
    versions = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{8}(-\d+)?", path.name)]
    return sorted(versions, key=lambda path: path.stat().st_mtime_ns)


def _serve(url: str, version: Path, prompt: list[int], end: float, reason: str | None) -> bool:
    """Let a server load a version, unless there is a ``reason`` against it, and print the result.

    Returns:
        True if the server serves the version; False after a ServerError or OSError.
    """
    begin = monotonic()
    try:
        if reason is not None:
            raise ServerError(f"{reason}; restart the server for each version")
        VllmServer(url, end).load(version, versions_in(version.parent), prompt)
    except (ServerError, OSError) as error:
        say(f"warning: {url} does not serve {version.name}: {error}; training goes on")
        return False
    say(f"publish: {url} serves {version} after {monotonic() - begin:.1f} s")
    return True


# ---- servers

STARTED = "default"
UPDATING = "updating"
CONNECT_SECONDS = 20.0
COLD_ANSWERS = 3


class ServerError(Exception):
    """Error whose text is the reason why a server does not serve a version, or writes no answers."""


@contextmanager
def _as_expected() -> Iterator[None]:
    """Context that raises ServerError if an answer lacks a field that is read."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"its answers are not those of vLLM 0.32 ({type(error).__name__}: {error})") from error


class VllmServer:
    """A vLLM server. All methods raise ServerError if it does not answer as expected.

    Args:
        url: its address, such as ``http://localhost:8000``.
        end: time (of ``time.monotonic``) after which a call waits for its answer for 1 s only.
    """

    def __init__(self, url: str, end: float) -> None:
        self._url = url.rstrip("/")
        self._end = end
        # Servers of a cluster are not behind the proxy to the internet.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @_as_expected()
    def serving(self) -> tuple[str, Path, str]:
        """Return the model's name, the directory that the server was started with, and the server's
        ``weight_version``. Raises ServerError if an earlier update failed."""
        base = self._call("/v1/models", seconds=CONNECT_SECONDS)["data"][0]
        served = self._call("/weight_info", seconds=CONNECT_SECONDS)["weight_version"]
        if served == UPDATING:
            raise ServerError("an earlier update of its weights failed, and it is paused: restart the server")
        return base["id"], Path(base["root"]), served

    @_as_expected()
    def generate(self, version: Path, prompt: list[int], *, max_tokens: int, **sampling: Any) -> tuple[list[int], bool]:
        """Let the model answer a prompt. Raises ServerError if another version wrote a part of the answer, or if the
        answer is empty or was cut before ``max_tokens``.

        Args:
            version: directory of the version that must have written all of the answer.
            prompt: token ids.
            max_tokens: largest number of tokens of the answer.
            sampling: other parameters of vLLM's SamplingParams. Missing ones do not alter the distribution: unlike in
                chats, generation_config.json of the model does not set them.

        Returns:
            The tokens of the answer, and True if the model ended it (the token that ends it is the last one), False if
            ``max_tokens`` cut it.
        """
        parameters = {**sampling, "max_tokens": max_tokens, "detokenize": False}
        answer = self._call("/inference/v1/generate", {"token_ids": prompt, "sampling_params": parameters})
        (choice,) = answer["choices"]
        tokens, end = choice["token_ids"], choice["finish_reason"]
        if (wrote := {span["version"] for span in choice["weight_versions"]}) != {str(version)}:
            raise ServerError(
                f"an answer is of version {', '.join(sorted(wrote))}, expected {version}: let nothing else change the "
                "server's weights"
            )
        if not tokens or end not in ("stop", "length"):
            raise ServerError(f"an answer of {len(tokens)} tokens ended with {end!r}, expected stop or length")
        if end == "length" and len(tokens) < max_tokens:
            raise ServerError(
                f"an answer to {len(prompt)} tokens was cut after {len(tokens)} of {max_tokens} tokens, expected a "
                "server with a larger --max-model-len"
            )
        return tokens, end == "stop"

    @_as_expected()
    def load(self, version: Path, known: Sequence[Path], prompt: list[int]) -> None:
        """Let the server load ``version``. If it has loaded nothing since its start, first test that a reload restores
        its parameters exactly. Raises ServerError if the server has another model or publish directory, or if
        the test or the update fails.

        Args:
            version: directory of a complete checkpoint.
            known: versions to which the link ``current`` may have pointed when the server was started.
            prompt: token ids for the test.
        """
        name, root, served = self.serving()
        started_with = _same_model(root, version)
        if served != STARTED and Path(served).parent != version.parent:
            raise ServerError(f"it serves {served}, expected a version in {version.parent}: restart it")
        if served == STARTED:
            self._test_reload([*known] if started_with.parent == version.parent else [started_with], name, prompt)
        self._pause()
        self._reload(version)
        self._call("/update_weight_version", {"new_version": str(version)})
        self._call("/resume", {})

    def _test_reload(self, candidates: Sequence[Path], name: str, prompt: list[int]) -> None:
        """Check that the server's reload of the version that it was started with changes nothing."""
        cold = [self._log_probs(name, prompt) for _ in range(COLD_ANSWERS)]
        self._pause()
        before = self._call("/weight_checker", {"action": "checksum"})["checksums"]
        missed: list[list[str]] = []
        for candidate in candidates:
            self._call("/weight_checker", {"action": "reset"})
            self._reload(candidate)
            missed.append(self._call("/weight_checker", {"action": "compare", "baseline": before})["mismatches"])
            if not missed[-1]:
                break
        else:
            least = min(missed, key=len)
            raise ServerError(
                f"loading {', '.join(path.name for path in candidates)} again does not restore {len(least)} of its "
                f"{len(before)} parameters ({least[0]}): vLLM cannot reload this format, or the server was started "
                "with other files. It stays paused: restart it for each new version"
            )
        # Clients that use the server meanwhile change batches, and so roundings.
        noise, exact = max(_distance(cold[0], other) for other in cold), False
        self._call("/resume", {})
        try:
            distance = _distance(cold[0], self._log_probs(name, prompt))
            exact = distance <= 4 * noise  # false for NaN
            found = f"a log-probability differs by {distance:.2g}: vLLM cannot reload this format"
        except ServerError as error:  # as with NaN, which is no JSON
            found = f"a prompt has no answer ({error}): vLLM cannot reload this format, or the server is too busy"
        finally:
            if not exact:
                self._call("/pause?mode=abort", {}, seconds=CONNECT_SECONDS)
        if not exact:
            raise ServerError(
                f"after loading {candidate.name} again {found}. It stays paused: restart it for each new version"
            )

    def _pause(self) -> None:
        """Wait until all requests are answered, with new ones waiting; clear the KV cache; set ``weight_version`` to
        ``updating``. Raises ServerError if that fails; a server that did not pause is resumed."""
        try:
            self._call("/pause?mode=wait&clear_cache=true", {})
        except ServerError as error:
            self._call("/resume", {}, seconds=CONNECT_SECONDS)
            raise ServerError(f"{error}; it goes on with the version before") from None
        self._call("/update_weight_version", {"new_version": UPDATING})

    def _reload(self, directory: Path) -> None:
        try:
            self._call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        except ServerError as error:
            raise ServerError(f"it did not load {directory}: {error}. It stays paused: restart it") from None

    def _log_probs(self, name: str, prompt: list[int]) -> list[float]:
        """Return the log-probability of each token of a prompt but the first, and of the token that follows."""
        request = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        answer = self._call("/v1/completions", {**request, "logprobs": 1})["choices"][0]
        tokens = answer["prompt_logprobs"][1:]
        known = [entry[str(token)]["logprob"] for entry, token in zip(tokens, prompt[1:], strict=True)]
        return [*known, answer["logprobs"]["token_logprobs"][0]]

    def _call(self, path: str, body: dict[str, Any] | None = None, *, seconds: float = float("inf")) -> Any:
        """POST ``body`` as JSON, or GET without one; return the answer's JSON. Raises ServerError if that fails."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, headers)
            with self._opener.open(request, timeout=max(1.0, min(seconds, self._end - monotonic()))) as response:
                return json.loads(response.read() or "null")
        except HTTPError as error:
            if error.code == 404:
                raise ServerError(f"no {path}: start vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1") from None
            said = b""
            with suppress(OSError, HTTPException):  # the connection may end before the text does
                said = error.read(300)
            text = " ".join([f"{path}: HTTP {error.code}", *said.decode(errors="replace").split()])
            raise ServerError(text) from None
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(f"{path}: {getattr(error, 'reason', None) or error}") from None


def _same_model(root: Path, version: Path) -> Path:
    """Resolve links in ``root``, the directory that a server was started with. Raises ServerError if its config.json
    cannot be read, or differs from that of ``version``."""
    configs = []
    for directory in (root, version):
        try:
            configs.append(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ServerError(
                f"it was started with {root}: {error}; start it with {version.parent / 'current'}"
            ) from None
    if configs[0] != configs[1]:
        other = sorted(key for key in configs[0].keys() | configs[1] if configs[0].get(key) != configs[1].get(key))
        raise ServerError(
            f"it was started with {root}, whose config.json differs in {', '.join(other)}: start it with "
            f"{version.parent / 'current'}"
        )
    return Path(os.path.realpath(root))


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
