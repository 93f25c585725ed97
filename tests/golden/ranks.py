"""Train as one recipe says and hash the results; launched on every rank.

    ranks.py RECIPE

Rank 0 writes ``<output_dir>/found.json``: losses, the tensors of the export and of the training checkpoint, and the
collectives of one step.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from engine.loop import Loop, LoopState

COUNTED = 17  # steps done before the one whose collectives are counted


def digest(parts: Iterable[str | bytes]) -> str:
    """Return the start of the SHA-256 of all parts."""
    total = sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
    return total.hexdigest()[:24]


def exported(directory: Path) -> dict[str, str]:
    """Hash the tensors in all safetensors files below a directory, apart by the last part of their names."""
    kinds = defaultdict(list)
    for path in directory.rglob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                content = sha256(data[start + begin : start + end]).hexdigest()
                kinds[name.rpartition(".")[2]].append(f"{name} {entry['dtype']} {entry['shape']} {content}\n")
    return {kind: f"{len(lines)} {digest(sorted(lines))}" for kind, lines in sorted(kinds.items())}


def checkpointed(directory: Path) -> dict[str, str]:
    """Hash the tensors in a training checkpoint, apart by type, and DeepSpeed's files from our own; not their names."""
    kinds = defaultdict(list)
    for path in directory.glob("*.pt"):
        owner = "DeepSpeed" if path.name.endswith(("model_states.pt", "optim_states.pt")) else "ours"
        for tensor in tensors_of(torch.load(path, weights_only=False), set()):
            plain = tensor.detach().contiguous()
            content = sha256(plain.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() if plain.numel() else ""
            kinds[f"{owner} {plain.dtype}"].append(f"{plain.dtype} {list(plain.shape)} {content}\n")
    return {kind: f"{len(lines)} {digest(sorted(lines))}" for kind, lines in sorted(kinds.items())}


def tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield all tensors in containers and objects, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part, seen)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from tensors_of(part, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value), seen)


def clear_padding(state: LoopState) -> None:
    """Zero the padding of the fp32 masters of stage 3, in which DeepSpeed leaves what the memory held before."""
    optimizer = state.session.engine.optimizer
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return
    for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        end = 0
        for parameter in group:
            start, size = end, parameter.ds_tensor.numel()
            end = start + size
            held = max(0, min(size, parameter.ds_numel - torch.distributed.get_rank() * size))
            flat.data[start + held : end] = 0


def main() -> None:
    """Train, export, save, hash."""
    (recipe,) = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    loop, losses, calls = Loop.from_recipe(recipe), [], Counter()
    profiler = torch.autograd.profiler.profile()

    loop.at(0)(clear_padding)

    @loop.every(1)
    def keep(state: LoopState) -> None:
        assert state.last is not None
        losses.append(sorted(value.hex() for value in state.last.losses.values()))
        if state.step == COUNTED + 1:
            profiler.__exit__(None, None, None)
            calls.update(event.name for event in profiler.function_events if event.name.startswith("c10d::"))
        if state.step == COUNTED:
            profiler.__enter__()

    state = loop.run()
    if torch.distributed.get_rank() == 0:
        output = Path(loop.recipe.output_dir)
        assert state.last is not None
        found = {
            "losses": f"{len(losses)} {digest(map(str, losses))}, last {max(state.last.losses.values())!r}",
            "export": exported(output),
            "checkpoint": checkpointed(next(output.glob("checkpoints/step_*"))),
            "collectives": dict(sorted(calls.items())),
        }
        (output / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
