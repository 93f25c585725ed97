"""Publish the model of a running training: versions in a directory, and vLLM servers that load them.

The directory has one folder per version, written as the export is (``step_00000120``), and the link ``current`` to the
newest one. A version gets its name when all of it is on disk, and the link is replaced after that: a publish that is
cut short is never seen.
"""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic

from torch import nn

from data.loader import MicroBatch
from engine.config.config import SERVED_FORMATS
from engine.fake_quant import FakeQuant
from engine.session.session import Session
from engine.session_export import export_trained, layout_of
from engine.vllm_server import ServerError, VllmServer
from model.ranks import RankError, errors_on_all_ranks, gather_objects, is_main, naming, say
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
    """Write a version and let servers load it; a collective. See :meth:`engine.state.LoopState.publish`.

    Args:
        first: yields this rank's first micro-batches, for outdated input scales and the test of a server.

    Returns:
        The version's directory, or None if it could not be written, and the servers that serve it.
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
    served: tuple[str, ...] = ()
    if servers and is_main():
        (batch,), end, reason = first(1), monotonic() + seconds, not_reloaded(session, quant)
        prompt = batch["input_ids"][0, :PROBE_TOKENS].tolist()
        served = tuple(url for url in servers if _serve(url, folder / name, prompt, end, reason))
    return folder / name, gather_objects(served)[0]


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
    """Check the directory, remove what cut publishes left in it, and return a free name for the version.

    Raises ValueError if it belongs to another run, or holds other files."""
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
    """Let the link point to a complete version, and remove all versions but the last ``keep``."""
    new = folder / f".{CURRENT}"
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    new.replace(folder / CURRENT)
    sync(folder)
    for version in versions_in(folder)[:-keep]:
        shutil.rmtree(version.rename(version.with_name(f"{version.name}.old")))


def versions_in(folder: Path) -> list[Path]:
    """List the complete versions in the order of their writing, as a resumed run may repeat steps."""
    versions = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{8}(-\d+)?", path.name)]
    return sorted(versions, key=lambda path: path.stat().st_mtime_ns)


def _serve(url: str, version: Path, prompt: list[int], end: float, reason: str | None) -> bool:
    """Let a server load a version, unless there is a reason against it; print how that went.

    Returns:
        True if the server serves the version.
    """
    begin = monotonic()
    try:
        if reason is not None:
            raise ServerError(f"{reason}; start it with each version")
        VllmServer(url, end).load(version, versions_in(version.parent), prompt)
    except (ServerError, OSError) as error:
        say(f"warning: {url} does not serve {version.name}: {error}; training goes on")
        return False
    say(f"publish: {url} serves {version} after {monotonic() - begin:.1f} s")
    return True
