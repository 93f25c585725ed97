"""Template of a GGUF file: a file that llama.cpp's own converter wrote for the base model.

The template provides metadata and vocabulary. It also lists the required tensors, so that a missing tensor, or a tensor
of another model, is detected whatever its name.

Before the package gguf reads a header, the header is checked to fit into the file: the package trusts its 64-bit counts
and lengths, so a file of 100 bytes could keep it busy for centuries. A header (ggml's docs/gguf.md) has a magic number,
a version, and the counts of tensors and of metadata entries; then for each metadata entry a key, a type and a value,
and for each tensor a name, its dimensions, a type and an offset.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PretrainedConfig

from model.ranks import listed

# Architectures, by the model_type of config.json, whose tensors llama.cpp takes unchanged except for the order of rows
# of q and k. For other architectures it changes values (Gemma's norms), or splits and merges tensors.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}

# Values that template and config.json both have: the end of llama.cpp's key, and the attribute of transformers' config.
_SAME = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "vocab_size": "vocab_size",
}
# Entries that are written new, or that describe the template's own weights.
_NOT_COPIED = (
    "GGUF.",
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
    "split.",
    "quantize.",
)
ROPE_FREQS = "rope_freqs.weight"  # computed by the converter from config.json (Llama 3); copied


def gguf_package() -> Any:
    """Import the package ``gguf``. Raises ValueError, with the command that installs it, if it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"layout 'gguf' needs the package gguf ({error}): pip install -e '.[gguf]'") from None
    return gguf


def open_template(path: Path) -> Any:
    """Open the template as a ``gguf.GGUFReader``.

    Raises:
        ValueError: there is no such file, or it is not a GGUF file.
    """
    gguf = gguf_package()
    if not path.is_file():
        raise ValueError(
            f"the GGUF template {path} is not a file: make one of the base model by llama.cpp's convert_hf_to_gguf.py"
        )
    try:
        check_header(path)
        return gguf.GGUFReader(path)
    except Exception as error:  # any error of the reader about damaged bytes
        raise ValueError(f"{path} is no GGUF file: {error}") from error


def value_of(template: Any, key: str) -> Any:
    """Return a metadata value of the template; None if the template lacks the key."""
    field = template.fields.get(key)
    return None if field is None else field.contents()


def architecture_of(config: PretrainedConfig) -> str:
    """Return llama.cpp's name of the architecture.

    Raises:
        ValueError: the architecture is not supported, or has features that llama.cpp computes differently.
    """
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"layout 'gguf' holds models of type {', '.join(ARCHITECTURES)}, got {config.model_type}; "
            "export.format dequantized gives a checkpoint that llama.cpp's converter takes"
        )
    problems = []
    if getattr(config, "hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {config.hidden_act!r}, expected 'silu'")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        problems.append("it has sliding attention")
    if config.model_type == "qwen3_moe":
        if not config.norm_topk_prob:
            problems.append("norm_topk_prob is false, and llama.cpp makes the experts' weights sum to 1")
        if config.mlp_only_layers or config.decoder_sparse_step != 1:
            problems.append("some layers have no experts")
    if problems:
        raise ValueError(f"llama.cpp does not compute what this {config.model_type} does: {'; '.join(problems)}")
    return ARCHITECTURES[config.model_type]


def check_template(template: Any, path: Path, config: PretrainedConfig) -> None:
    """Check the template's metadata against the model.

    Raises:
        ValueError: the template has another architecture, other sizes or another vocabulary; the text names each
            difference.
    """
    architecture, found = architecture_of(config), value_of(template, "general.architecture")
    problems = []
    if found != architecture:
        problems.append(f"general.architecture is {found!r}, expected {architecture!r}")
    else:
        problems += _other_values(template, architecture, config)
        problems += _other_positions(template, architecture, config)
        tokens = template.fields.get("tokenizer.ggml.tokens")
        if tokens is None:
            problems.append("it has no vocabulary (tokenizer.ggml.tokens)")
        elif len(tokens.data) != config.vocab_size:
            problems.append(f"its vocabulary has {len(tokens.data)} tokens, expected {config.vocab_size}")
    if problems:
        raise ValueError(f"{path} is the template of another model: {listed(problems, 8)}")


def _other_values(template: Any, architecture: str, config: PretrainedConfig) -> Iterator[str]:
    for end, attribute in _SAME.items():
        found = value_of(template, key := f"{architecture}.{end}")
        expected = getattr(config, attribute, None)
        if found is None or expected is None:
            continue
        if not _same(found, expected):
            yield f"{key} is {found}, expected {expected} ({attribute})"


def _same(found: Any, expected: float) -> bool:
    """Return True if a value equals this number up to fp32 rounding; False for NaN, lists and strings."""
    return isinstance(found, int | float) and abs(found - expected) <= 1e-6 * abs(expected)


def _other_positions(template: Any, architecture: str, config: PretrainedConfig) -> Iterator[str]:
    """Yield differences in positional encoding."""
    rope = config.rope_parameters
    base, theta = value_of(template, f"{architecture}.rope.freq_base"), rope["rope_theta"]
    if base is not None and not _same(base, theta):
        yield f"{architecture}.rope.freq_base is {base}, expected {theta}"
    if base is None and theta != 10000.0:
        yield f"it has no {architecture}.rope.freq_base, expected {theta}"
    kind, scaling = rope.get("rope_type", "default"), value_of(template, f"{architecture}.rope.scaling.type")
    has_factors = any(tensor.name == ROPE_FREQS for tensor in template.tensors)
    if kind not in ("default", "llama3"):
        yield f"positions of type {kind!r} are not known to be the same in llama.cpp"
    if scaling not in (None, "none"):
        yield f"{architecture}.rope.scaling.type is {scaling!r}, config.json says rope_type {kind!r}"
    if (kind == "llama3") != has_factors:
        yield f"it has {'' if has_factors else 'no '}{ROPE_FREQS}, and config.json says rope_type {kind!r}"


def copy_metadata(template: Any, writer: Any) -> None:
    """Copy the template's metadata to a ``gguf.GGUFWriter``, except entries about its own weights."""
    array = gguf_package().GGUFValueType.ARRAY
    for name, field in template.fields.items():
        if not name.startswith(_NOT_COPIED):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == array else None)


# Bytes of a value by its type; 8 is a string, 9 an array.
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS


def check_header(path: Path) -> None:
    """Walk over the header of a little-endian GGUF file.

    Raises:
        ValueError: it is not a GGUF file, or shorter than its header announces.
    """
    with path.open("rb") as file:
        walk = _Walk(file)
        if file.read(4) != b"GGUF" or walk.number("<I") not in (2, 3):
            raise ValueError("it does not begin as one of version 2 or 3 does")
        tensors, metadata = walk.number("<Q"), walk.number("<Q")
        for _ in range(metadata):
            walk.text()
            walk.value(walk.number("<I"))
        for _ in range(tensors):
            walk.text()
            dimensions = walk.number("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
            walk.skip(8 * dimensions + 4)
            if walk.number("<Q") > walk.size:
                raise ValueError("a tensor begins behind the end of the file")


class _Walk:
    """Cursor in a file that never passes its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size

    def number(self, kind: str) -> int:
        """Read the next number, in a format of :mod:`struct`."""
        self._expect(struct.calcsize(kind))
        return int(struct.unpack(kind, self.file.read(struct.calcsize(kind)))[0])

    def skip(self, count: int) -> None:
        """Skip ``count`` bytes."""
        self._expect(count)
        self.file.seek(count, os.SEEK_CUR)

    def text(self) -> None:
        """Skip a string: its length, and the bytes."""
        self.skip(self.number("<Q"))

    def value(self, kind: int) -> None:
        """Skip a value of metadata."""
        if kind == _TEXT:
            self.text()
        elif kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner == _TEXT:
                self._expect(8 * count)
                for _ in range(count):
                    self.text()
            else:
                self.skip(self._bytes(inner) * count)
        else:
            self.skip(self._bytes(kind))

    def _bytes(self, kind: int) -> int:
        if kind not in _BYTES:
            raise ValueError(f"a value of metadata has type {kind}, which is not known here")
        return _BYTES[kind]

    def _expect(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise ValueError(f"its header announces {count:,} bytes behind byte {self.file.tell():,} of {self.size:,}")
