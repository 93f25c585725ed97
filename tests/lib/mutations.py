"""Folders of models, exports and training checkpoints in which something is not what it was."""

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OUTSIDE = "../outside"  # a folder with files of the same names, which must not be opened
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 2**31, 10**30, 1e308, float("nan"))
VALUES += ("", "x", "../x", "\0", [], {}, [[]])
MARK = "what is odd comes here"
DEEP = 200_000
ODD = {
    "deep list": "[" * DEEP + "]" * DEEP,
    "deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "half of a surrogate pair": '"x\\ud800"',
    "many digits": "9" * 5000,
    "beyond doubles": "1e999",
    "minus infinity": "-Infinity",
    "no end": "[1, 2",
}
WIDTHS = (3, 4, 5, 8, 16, 32, 64, 128, 2**20, -128, 4.0, "4")
METHODS = ("gptq", "awq", "auto-round", "fp8", "mxfp4", "compressed-tensors", "gptq_v2", "gemm", "re:(a+)+$", ["re:("])


def of_folder(rng: random.Random, folder: Path) -> str:
    """Change something in a folder; returns what, for the message of a failing test."""
    name, action = rng.choice(list(ACTIONS.items()))
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    wanted = {"json": ".json", "weights": ".safetensors"}.get(name.split(":")[0])
    fitting = [path for path in files if wanted in (None, path.suffix)]
    if not fitting:
        return "nothing"
    path = rng.choice(fitting)
    return f"{name} of {path.name}: {action(rng, path)}"


def flip(rng: random.Random, path: Path) -> str:
    """Flip one to three bits, more often near the beginning, where a file says what it holds."""
    data = bytearray(path.read_bytes())
    places = [int(len(data) * rng.random() ** 3) for _ in range(rng.choice([1, 3]))] if data else []
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return str(places)


def cut(rng: random.Random, path: Path) -> str:
    """The end is missing, or a block of zeros is in the middle, or there is more than there was."""
    data = path.read_bytes()
    place, kind = rng.randrange(len(data) + 1), rng.randrange(3)
    path.write_bytes((data[:place], data[:place] + bytes(len(data) - place), data + data[:place])[kind])
    return f"{kind} at {place}"


def remove(rng: random.Random, path: Path) -> str:
    """The file is gone, or a folder, or something that never ends when it is read."""
    path.unlink()
    kind = rng.choice(["nothing", "folder", "pipe", "device"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    return kind


def value(rng: random.Random, path: Path) -> str:
    """One value of a JSON file is another one, or its key is, or is gone."""
    whole = json.loads(path.read_text())
    place, key = rng.choice(list(_places(whole)))
    kind = rng.randrange(4)
    if kind == 0 and isinstance(place, dict):
        place[str(key)[::-1]] = place.pop(key)
    elif kind == 1:
        del place[key]
    else:
        place[key] = rng.choice(VALUES) if kind == 2 else _near(rng, place[key])
    path.write_text(json.dumps(whole))
    return f"{key!r} -> {place.get(key) if isinstance(place, dict) else place!r}"[:200]


def odd(rng: random.Random, path: Path) -> str:
    """In one place of a JSON file is what json.dumps does not write."""
    text, said = _with_odd(rng, json.loads(path.read_text()))
    path.write_text(text)
    return said


def odd_header(rng: random.Random, path: Path) -> str:
    """The same in the header of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    text, said = _with_odd(rng, json.loads(data[8 : 8 + length]))
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + length :])
    return said


def _with_odd(rng: random.Random, whole: Any) -> tuple[str, str]:
    """JSON text with a value, a key or a second value of a key that JSON readers stumble over; and what it is."""
    place, key = rng.choice(list(_places(whole)))
    kind, raw = rng.choice(list(ODD.items()))
    if isinstance(place, dict) and rng.random() < 0.3:
        if rng.random() < 0.5:
            kind, raw = "another name", f'"\\ud800{str(key)[1:]}"'
            place[MARK] = place.pop(key)
        else:
            kind, raw = "twice", json.dumps(key)
            place[MARK] = _near(rng, place[key])
    else:
        place[key] = MARK
    return json.dumps(whole).replace(json.dumps(MARK), raw), f"{key!r}: {kind}"


def quantization(rng: random.Random, path: Path) -> str:
    """One value of the quantization_config is another one: widths, groups, methods, patterns."""
    whole = _beside(path, "config.json")
    if "quantization_config" not in whole:
        return "no quantization"
    place, key = rng.choice([*_places({"quantization_config": whole["quantization_config"]})][1:])
    place[key] = rng.choice([*VALUES, *WIDTHS, *METHODS, _near(rng, place[key])])
    (path.parent / "config.json").write_text(json.dumps(whole))
    return f"{key!r} -> {place[key]!r}"[:200]


def index(rng: random.Random, path: Path) -> str:
    """One entry of the weights' index is elsewhere."""
    name = "model.safetensors.index.json"
    if not (whole := _beside(path, name)):
        return "no index"
    key = rng.choice(list(whole["weight_map"]))
    file = whole["weight_map"][key]
    absolute = str((path.parent / OUTSIDE / file).absolute())
    whole["weight_map"][key] = rng.choice([f"{OUTSIDE}/{file}", absolute, "..", ".", "config.json", "", 3, f"./{file}"])
    (path.parent / name).write_text(json.dumps(whole))
    return f"{key} -> {whole['weight_map'][key]!r}"


def code(rng: random.Random, path: Path) -> str:
    """config.json asks for Python code, which is beside it."""
    if not (whole := _beside(path, "config.json")):
        return "no configuration"
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoModel")
    whole["auto_map"] = dict.fromkeys(names, rng.choice(["evil.Evil", f"{OUTSIDE}--evil.Evil"]))
    if rng.random() < 0.5:
        whole["model_type"] = "evil"
    (path.parent / "config.json").write_text(json.dumps(whole))
    (path.parent / "evil.py").write_text("import os\nos.environ['EVIL'] = 'ran'\nclass Evil: pass\n")
    return str(whole["auto_map"])[:60]


def header(rng: random.Random, path: Path) -> str:
    """One thing in the header of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    whole, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    key, other = (rng.choice([name for name in whole if name != "__metadata__"]) for _ in range(2))
    entry, shape = whole[key], whole[key]["shape"]
    offsets = [[0, 2**62], [-8, 8], [0.0, 8.0], [8, 0], [], None, whole[other]["data_offsets"]]
    kind = rng.randrange(8)
    if kind == 0:
        entry["dtype"] = rng.choice(["F32", "F16", "F8_E4M3", "I8", "U8", "I32", "BOOL", "C64", 3])
    elif kind == 1:
        entry["shape"] = rng.choice([shape[::-1], [*shape, 1], [], [-1], [10**30], [0.5], "x", None])
    elif kind == 2:
        entry["data_offsets"] = rng.choice(offsets)
    elif kind == 3:
        whole[key[:-1] + "x"] = whole.pop(key)
    elif kind == 4:
        whole[key], whole[other] = whole[other], whole[key]
    elif kind == 5:
        whole["__metadata__"] = rng.choice([3, {"format": "tf"}, {"format": 3}, [], {"x": "y" * 10**5}])
    elif kind == 6:
        del whole[key]
    text = json.dumps(whole).encode()
    length = rng.choice([2**63, 2**64 - 1, 0, len(text) - 1, len(text) + 1, 10**8 + 1]) if kind == 7 else len(text)
    path.write_bytes(struct.pack("<Q", length) + text + rest)
    return f"{kind} at {key}"


def _beside(path: Path, name: str) -> dict[str, Any]:
    """A JSON object in the same folder; empty if there is none."""
    target = path.parent / name
    whole = json.loads(target.read_text()) if target.is_file() else {}
    return whole if isinstance(whole, dict) else {}


def _places(whole: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    if isinstance(whole, dict | list):
        for key in whole if isinstance(whole, dict) else range(len(whole)):
            yield whole, key
            yield from _places(whole[key])


def _near(rng: random.Random, old: Any) -> Any:
    """A value like the old one."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return rng.choice([old + 1, old * 2, -old, old / 2, float(old), str(old)])
    return old[:-1] if isinstance(old, str) else [old]


ACTIONS: dict[str, Callable[[random.Random, Path], str]] = {
    "flip": flip,
    "cut": cut,
    "remove": remove,
    "json:value": value,
    "json:more values": value,
    "json:odd": odd,
    "json:index": index,
    "json:code": code,
    "json:quantization": quantization,
    "weights:header": header,
    "weights:more headers": header,
    "weights:odd header": odd_header,
}
