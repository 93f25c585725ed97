"""Plan the rotation of each tensor of a checkpoint.

The residual stream h [n], a column, becomes Q^T h. Then with an orthogonal Q [n, n] the model is the same function if

- tensors that write to h are rotated: embeddings E Q, and outputs Q^T W and Q^T b of o_proj and down_proj;
- tensors that read from h are rotated back: W diag(g) Q, where g are the weights of the preceding RMSNorm. A norm with
  weights 1 commutes with Q^T, as Q preserves the mean of squares; so g is folded into W, and the norm's weights are 1.

The values of a head become R^T v: rows R^T W and biases of v_proj, columns W R of o_proj. Attention adds them up with
weights that do not depend on them. (SpinQuant, arXiv 2405.16406, section 3.1: R1 and R2.)

This holds only for known tensor names and norm order, with nothing else that touches the residual stream: the families
below, on which the tests compare outputs before and after. Other families are refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformers import PretrainedConfig

from model.checkpoint.safetensors import CheckpointError, DiskTensor

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<name>.+)")
STREAM, VALUES = "stream", "values"  # the two rotations

INPUT, MIDDLE = "input_layernorm.weight", "post_attention_layernorm.weight"
_NORMS = (INPUT, MIDDLE)
_BLOCK = r"(mlp|block_sparse_moe)\."
READS = {
    r"self_attn\.[qk]_proj\.weight": INPUT,
    rf"{_BLOCK}((experts\.\d+|shared_expert)\.)?(gate_proj|up_proj|w1|w3)\.weight": MIDDLE,
    rf"{_BLOCK}(gate|shared_expert_gate)\.weight": MIDDLE,
}
WRITES = rf"{_BLOCK}((experts\.\d+|shared_expert)\.)?(down_proj|w2)\.(weight|bias)|self_attn\.o_proj\.bias"
VALUE, OUTPUT = r"self_attn\.v_proj\.(weight|bias)", r"self_attn\.o_proj\.weight"
_KEPT = r"self_attn\.([qk]_proj\.bias|[qk]_norm\.weight|rotary_emb\.inv_freq)|mlp\.(gate|up)_proj\.bias"


@dataclass(frozen=True)
class Change:
    """Change of one tensor.

    Attributes:
        norm: key of the RMSNorm whose weights multiply the columns.
        rows: rotation of the first axis, STREAM or VALUES.
        columns: rotation of the last axis, STREAM or VALUES.
        ones: the tensor is the weight of such a norm, and becomes ones.
    """

    norm: str | None = None
    rows: str | None = None
    columns: str | None = None
    ones: bool = False


def check_family(config: PretrainedConfig, where: str, *, quantized: bool) -> None:
    """Refuse a model for which a rotation is not known to preserve the function.

    Raises:
        CheckpointError: naming the directory and the expected models.
    """
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise CheckpointError(f"{where}: a rotation of {config.model_type} is not known; expected one of {families}")
    if quantized:
        raise CheckpointError(f"{where} is quantized: rotate the checkpoint that it was made from")


def plan_rotation(tensors: Mapping[str, DiskTensor], config: PretrainedConfig, where: str) -> dict[str, Change]:
    """Plan the change of each tensor of the files, which have no tied lm_head.

    Raises:
        CheckpointError: naming the tensor that is missing, has another shape, or is unknown in these families.
    """
    changes = {key: _change(key, where) for key in tensors}
    missing = [key for key in _needed(config) if key not in tensors]
    if missing:
        raise CheckpointError(f"{where} lacks {missing[0]}, and {len(missing) - 1} more tensors of its config.json")
    for key, change in changes.items():
        if change != Change():
            _check_tensor(tensors[key], change, config)
    return changes


def head_dim(config: PretrainedConfig) -> int:
    """Return the number of values of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _change(key: str, where: str) -> Change:
    """Look up the change of a tensor by its name."""
    whole = {EMBEDDING: Change(columns=STREAM), HEAD: Change(norm=NORM, columns=STREAM), NORM: Change(ones=True)}
    if key in whole:
        return whole[key]
    if (found := _LAYER.fullmatch(key)) is not None:
        prefix, name = f"model.layers.{found['layer']}.", found["name"]
        if name in _NORMS:
            return Change(ones=True)
        for pattern, norm in READS.items():
            if re.fullmatch(pattern, name):
                return Change(norm=prefix + norm, columns=STREAM)
        if re.fullmatch(WRITES, name):
            return Change(rows=STREAM)
        if value := re.fullmatch(VALUE, name):
            return Change(prefix + INPUT, VALUES, STREAM) if value[1] == "weight" else Change(rows=VALUES)
        if re.fullmatch(OUTPUT, name):
            return Change(rows=STREAM, columns=VALUES)
        if re.fullmatch(_KEPT, name):
            return Change()
    raise CheckpointError(
        f"{where}: {key} has no place in {', '.join(FAMILIES)}: what a rotation makes of it is unknown"
    )


def _needed(config: PretrainedConfig) -> Iterator[str]:
    """Yield the tensors that all families have; the reader of the rotated checkpoint checks the rest."""
    yield from (EMBEDDING, NORM, *([] if config.tie_word_embeddings else [HEAD]))
    for layer in range(config.num_hidden_layers):
        linears = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
        yield from (f"model.layers.{layer}.{name}" for name in (*_NORMS, *linears))


def _check_tensor(tensor: DiskTensor, change: Change, config: PretrainedConfig) -> None:
    """Check that a tensor is of a float type and that its rotated axes have the lengths of config.json."""
    if tensor.dtype is None or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise CheckpointError(f"{tensor.file}: {tensor.key} is {tensor.kind}, expected floats of 16 bits or more")
    hidden, size = config.hidden_size, head_dim(config)
    lengths = {(STREAM, 0): hidden, (STREAM, -1): hidden}
    lengths |= {(VALUES, 0): config.num_key_value_heads * size, (VALUES, -1): config.num_attention_heads * size}
    axes = [(change.rows, 0), (change.columns, -1)]
    expected = [(axis, lengths[kind, axis]) for kind, axis in axes if kind is not None]
    if change.ones:
        expected = [(0, hidden)]
    flat = change.ones or tensor.key.endswith("bias")
    if len(tensor.shape) != (1 if flat else 2) or any(tensor.shape[axis] != length for axis, length in expected):
        said = ", ".join(f"{length} in {'rows' if axis == 0 else 'columns'}" for axis, length in expected)
        raise CheckpointError(f"{tensor.file}: {tensor.key} has the shape {list(tensor.shape)}, expected {said}")
