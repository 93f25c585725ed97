"""Open a GGUF file of llama.cpp, and read its metadata."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from model.checkpoint.safetensors import AGAIN, CheckpointError
from model.save.gguf_file import open_gguf

# Values that are fractions; all other numbers are integers.
_FRACTIONS = {"attention.layer_norm_rms_epsilon", "final_logit_softcapping", "rope.freq_base", "rope.freq_base_swa"}
_FRACTIONS |= {"rope.scaling.factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}
_BY_LAYER = {"attention.head_count_kv", "feed_forward_length"}


class GGUFSource:
    """Opened GGUF file with checked tensors, and its metadata.

    Args:
        path: the file.
        known: llama.cpp's names of the supported architectures.

    Raises:
        CheckpointError: the file is damaged, or of another architecture.
    """

    def __init__(self, path: Path, known: Sequence[str]) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file, expected a GGUF file")
        reader = open_gguf(path)
        self.path, self.tensors = path, {tensor.name: tensor for tensor in reader.tensors}
        self.values: dict[str, Any] = {}
        for name, entry in reader.fields.items():
            try:
                self.values[name] = entry.contents()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{path}: {name} is not UTF-8 ({error}): {AGAIN}") from error
        end = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.data_offset):
            if tensor.data_offset < end or 0 in shape_of(tensor):
                self.refuse(f"{tensor.name} is empty or overlaps another tensor: {AGAIN}")
            end = tensor.data_offset + tensor.n_bytes
        self.architecture = str(self.values.get("general.architecture"))
        if self.values.get("split.count", 1) not in (0, 1):
            self.refuse("it is one file of several: merge them with llama.cpp's llama-gguf-split --merge")
        if (kind := self.values.get("general.type", "model")) != "model":
            self.refuse(f"general.type is {kind!r}, expected 'model'")
        if self.architecture not in known:
            self.refuse(f"general.architecture is {self.architecture!r}, expected one of {', '.join(known)}")

    def refuse(self, problem: str) -> NoReturn:
        """Raise CheckpointError with the file's name."""
        raise CheckpointError(f"{self.path}: {problem}")

    def own(self, end: str, default: Any = None) -> Any:
        """Return a metadata value of the architecture."""
        return self.values.get(f"{self.architecture}.{end}", default)

    def number(self, end: str, default: float | None = None) -> Any:
        """Return a number of the architecture's metadata: a float if it is in ``_FRACTIONS``, else an integer. Of a
        list by layers it is the first one that is not 0. Raises CheckpointError unless it is positive."""
        value, fraction = self.own(end, default), end in _FRACTIONS
        if end in _BY_LAYER and isinstance(value, list):
            value = next((number for number in value if number != 0), value)
        if isinstance(value, bool) or not isinstance(value, int | float if fraction else int) or not 0 < value < 2**31:
            expected = "number" if fraction else "integer"
            self.refuse(f"{self.architecture}.{end} is {str(value)[:60]}, expected one positive {expected}")
        return float(value) if fraction else value

    def by_layer(self, end: str, layers: int) -> list[Any]:
        """Return a metadata value of each layer: a list, or one value for all of them. Raises CheckpointError for a
        list of another length."""
        value = self.own(end)
        found = value if isinstance(value, list) else [value] * layers
        if len(found) != layers:
            self.refuse(f"{self.architecture}.{end} is {str(value)[:60]}, expected a value for each of {layers} layers")
        return found

    def token(self, end: str, default: Any = None) -> Any:
        """Return a metadata value of the tokenizer."""
        return self.values.get(f"tokenizer.ggml.{end}", default)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape, slowest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))
