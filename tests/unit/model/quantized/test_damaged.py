"""Files of every native layout that contradict themselves: each is refused by a line that names what is wrong."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.ranks import RankError
from tests.lib.checkpoints import edit_checkpoint, edit_json, load_quantized, read_tensors
from tests.lib.native import layouts

LAYOUTS = {name: layout for name, layout in layouts().items() if layout.scheme is None}
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
# What config.json may say instead; "" stands for any other value.
OTHER: dict[str, dict[str, Any]] = {
    "num_bits": {"2": 4, "3": 4, "4": 8, "8": 4},
    "bits": {"4": 8},
    "group_size": {"": 48},
    "quant_algo": {"FP8": "NVFP4", "": "FP8"},
    "weight_block_size": {"": [64, 64]},
}
Damage = tuple[str, str, Callable[[Path], object]]  # what, a word of the message, and what does it to a folder


def suffix(key: str) -> str:
    """Return the part of a key that names the kind of tensor, such as weight_scale."""
    found = re.search(r"_(blocks|scales)$", key)
    return found[0] if found else key.rpartition(".")[2]


def changed(key: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        if key in tensors and (tensor := change(tensors.pop(key))) is not None:
            tensors[key] = tensor

    return lambda path: edit_checkpoint(path, edit)


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        whole = tensor.float().flatten()
        whole[0] = value
        return whole.view(tensor.shape).to(tensor.dtype)

    return change


def of_other_size(side: int) -> Callable[[Tensor], Tensor]:
    """Half of a tensor along a side, or if it has one row the row twice."""
    return lambda one: one.narrow(side, 0, one.shape[side] // 2) if one.shape[side] > 1 else torch.cat([one] * 2, side)


def of_tensors(path: Path) -> Iterator[Damage]:
    """Yield damages of the first tensor of each kind: missing, of another size, or a scale of NaN or 0."""
    first: dict[tuple[str, torch.dtype], tuple[str, Tensor]] = {}
    for key, tensor in read_tensors(path).items():
        if not (tensor.dtype in PLAIN and suffix(key) in ("weight", "bias")):
            first.setdefault((suffix(key), tensor.dtype), (key, tensor))
    for (end, dtype), (key, tensor) in first.items():
        layer = key.removesuffix(end).rstrip(".")
        if "scale" in end:
            # e8m0 has 255 for NaN. A scale in e4m3 may be 0, far below those of the other groups.
            values = [255.0] if dtype == torch.uint8 else [float("nan")] + [0.0] * (dtype in PLAIN)
            yield from ((f"{end} of {value}", layer, changed(key, with_first(value))) for value in values)
        if not end.startswith("input") and end != "g_idx":
            yield f"no {end}", layer, changed(key, lambda tensor: None)
        if tensor.dim() > 1:
            for side in range(tensor.dim()):
                yield f"{end} of another size in {side}", layer, changed(key, of_other_size(side))


def of_configuration(path: Path) -> Iterator[Damage]:
    """Yield a damage for each value of the configuration that says how weights are stored: another value."""
    for file in path.glob("*config.json"):
        known = set()
        for trail, value in places(json.loads(file.read_text()), ()):
            if (trail[-1], str(value)) not in known and "input_activations" not in trail and value is not None:
                known.add((trail[-1], str(value)))
                others = OTHER[trail[-1]]
                other = others.get(str(value), others.get(""))
                yield f"{trail} {other}", "quant|group_size|scale|qzeros|weight", said(file.name, trail, other)


def said(file: str, trail: tuple[str, ...], value: Any) -> Callable[[Path], object]:
    def edit(whole: Any) -> None:
        for key in trail[:-1]:
            whole = whole[key]
        whole[trail[-1]] = value

    return lambda path: edit_json(path / file, edit)


def places(value: Any, trail: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key in OTHER:
            yield (*trail, key), inner
        else:
            yield from places(inner, (*trail, key))


@pytest.mark.parametrize("most", [6, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_contradicts_itself_is_named(tmp_path, name, most):
    """In one line, if one layer is wrong and its codes are there."""
    path = LAYOUTS[name].write(tmp_path)
    load_quantized(path, torch.float32)
    found = [*of_tensors(path), *of_configuration(path)]
    for what, named, damage in random.sample(found, most) if most else found:
        bad = Path(shutil.copytree(path, tmp_path / "bad"))
        damage(bad)
        with pytest.raises((RankError, ValueError)) as raised:
            load_quantized(bad, torch.float32)
        lines = str(raised.value).splitlines()
        assert re.search(named, lines[-1]), (what, lines)
        assert len(lines) == 1 or what.startswith(("no weight", "no qweight", "no _blocks", "(")), (what, lines)
        shutil.rmtree(bad)
