"""LoRA adapters: read and write them in peft's format, initialize new ones from the quantization error, merge them into
weights.

peft writes, and vLLM and SGLang serve, a folder with adapter_config.json and one safetensors file with
``base_model.model.<module>.lora_A.weight [rank, in]`` and ``lora_B.weight [out, rank]`` of each Linear. As in peft
0.21.2 (``tuners/lora``), ``lora_B @ (lora_A @ x)`` is added to a Linear's output, times ``lora_alpha / r``, or
``lora_alpha / sqrt(r)`` with ``use_rslora``; ``rank_pattern`` and ``alpha_pattern`` override r and alpha for modules.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.console import progress_bar
from model.families import text_part
from model.quantized.quantization_config import read_json_object
from model.ranks import errors_on_all_ranks, is_main, listed, say
from model.save.aside import Aside, write_json
from model.save.shard_writer import ShardWriter, safetensors_head
from model.zero import full_shape, gathered, local_data, local_range, whole_values
from quant import Quantization, QuantLayer, QuantLinear
from quant.adapters import AdapterBeside, DecoupledScale, merge, part_for_codes
from quant.rules import pattern_problem

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FOLDER = "adapter"  # inside the export of the adapter's base model
PREFIX = "base_model.model."
# Keys of the configuration that do not affect the computation, or are checked individually.
KNOWN = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "bias", "init_lora_weights"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
_LARGEST = float(torch.finfo(torch.float32).max)
# Initializations that do not change the base model's weights.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class PeftSource:
    """Adapter on disk; ``shapes``, ``scalings`` and ``keys`` are by module name in the model.

    Attributes:
        directory: folder of the adapter.
        shapes: shapes of A and B.
        scalings: factor of the product of B and A.
        keys: keys of A and B in the file.
        base: digest of the checkpoint that the adapter was trained on; None if peft wrote the adapter.
    """

    directory: Path
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    scalings: Mapping[str, float]
    keys: Mapping[str, tuple[str, str]]
    base: str | None

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Read A ``[rank, in]`` and B ``[out, rank]`` of the module ``name``, in the file's dtype. Raises ValueError
        unless all values are finite floats."""
        with safe_open(self.directory / WEIGHTS, "pt") as file:
            found = {key: file.get_tensor(key) for key in self.keys[name]}
        for key, tensor in found.items():
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
                raise ValueError(
                    f"adapter.start: {self.directory / WEIGHTS}: {key} ({tensor.dtype}) has NaN, Inf or values that "
                    "are no floats, expected finite floats only"
                )
        a, b = found.values()
        return a, b


def read_adapter(directory: Path, model: PreTrainedModel, linears: Iterable[str]) -> PeftSource:
    """Read the configuration, keys and shapes of an adapter in the folder ``directory``, not its values. Raises
    ValueError, naming file and key, if there is no readable adapter, if its kind is unsupported, if A, B or ``r`` do
    not match, or if it has modules that are not in ``linears`` (names in ``model``; an adapter may have only some)."""
    if not (config_file := directory / CONFIG).is_file():
        raise ValueError(f"{config_file} does not exist, expected the folder of an adapter")
    config = read_json_object(config_file)
    if problem := next(_problems(config), None):
        raise ValueError(f"{config_file}: {problem}")
    names = {module_name_on_disk(model, name): name for name in linears}
    names |= {name: name for name in names.values()}
    file = directory / WEIGHTS
    if not file.is_file():
        pickles = ", ".join(sorted(one.name for one in directory.glob("*.bin")))
        only = f", only {pickles}: pickled weights can run code and are not read" if pickles else ""
        raise ValueError(f"{file} does not exist{only}")
    try:
        with safe_open(file, "pt") as opened:
            shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
            base = (opened.metadata() or {}).get("base")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
    keys: dict[str, dict[str, str]] = {}
    for key in sorted(shapes):
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight", key)
        if found is None or len(shapes[key]) != 2:
            raise ValueError(f"{file} has {key} {list(shapes[key])}, expected only lora_A and lora_B of Linears")
        name = names.get(found[1])
        if name is None:
            raise ValueError(f"{file}: {key}: {found[1]} is no linear layer of the model that can have an adapter")
        other = keys.setdefault(name, {}).setdefault(found[2], key)
        if other != key:
            raise ValueError(f"{file}: {key} and {other} belong to the same layer, expected one of them")
    for name, pair in keys.items():
        if pair.keys() != {"A", "B"} or shapes[pair["A"]][0] != shapes[pair["B"]][1]:
            raise ValueError(f"{file}: {name}: expected lora_A [rank, in] and lora_B [out, rank] of the same rank")
    return PeftSource(
        directory,
        {name: (shapes[pair["A"]], shapes[pair["B"]]) for name, pair in keys.items()},
        {name: _scaling(config, name, shapes[pair["A"]][0], directory / CONFIG) for name, pair in keys.items()},
        {name: (pair["A"], pair["B"]) for name, pair in keys.items()},
        base,
    )


def _problems(config: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons why an adapter of this configuration is not supported: it computes something else than
    ``scaling * B A``, or a value is invalid."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type is {_short(config.get('peft_type'))}, expected 'LORA'"
    for key, value in config.items():
        if key not in KNOWN and value not in (None, False, "", [], {}):
            yield f"{key} is {_short(value)}, which is not read here; expected plain LoRA"
    if config.get("bias", "none") != "none":
        yield f"bias is {_short(config['bias'])}, expected 'none'"
    if config.get("init_lora_weights", True) not in PLAIN_STARTS:
        kind = _short(config["init_lora_weights"])
        yield f"init_lora_weights is {kind}, which changes the weights of the base as well"
    for key in ("r", "lora_alpha"):
        if not _is_positive(config.get(key)):
            yield f"{key} is {_short(config.get(key))}, expected a number above 0"
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(map(_is_positive, patterns.values())):
            yield f"{key} is {_short(patterns)}, expected numbers above 0 by pattern"
            return
        for pattern in patterns:
            if problem := pattern_problem(pattern):
                yield f"{key}: {problem}"


def _short(value: Any) -> str:
    """Format a value from a file for an error text, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_positive(value: Any) -> bool:
    """Return True for a float or integer above 0 within fp32's range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST


def _scaling(config: dict[str, Any], name: str, rank: int, file: Path) -> float:
    """Compute the factor by which peft multiplies the adapter of a module. Raises ValueError if r is not ``rank``."""

    def own(key: str, default: float) -> float:
        patterns: dict[str, float] = config.get(key) or {}
        return next((value for one, value in patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{one})", name)), default)

    said = own("rank_pattern", config["r"])
    if said != rank:
        raise ValueError(
            f"{file}: {name}: r is {said}, but its lora_A has {rank} rows, expected equal numbers: one of the two "
            "files is wrong"
        )
    return own("alpha_pattern", config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)


def say_left_out(directory: str | Path) -> None:
    """Log a notice if the folder of an exported model has a separate adapter (not merged into the weights), which an
    evaluation of this folder leaves out."""
    if (folder := Path(directory) / FOLDER / CONFIG).is_file():
        say(f"{directory}: the quantized model without the adapter in {folder.parent}, which is not merged into it")


@dataclass(frozen=True)
class PeftFolder:
    """Contents of an adapter's folder in peft's format.

    Attributes:
        tensors: tensors by key in the file; empty on all ranks except rank 0.
        config: contents of adapter_config.json.
        base: digest of the checkpoint that the adapter was trained on; a run that starts from the adapter must have a
            base with this digest.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    base: str

    def write(self, directory: Path) -> None:
        """Write the files into ``directory``, from one process. The same adapter always gives the same bytes."""
        directory.mkdir(exist_ok=True)
        write_json(self.config, directory / CONFIG)
        shapes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in self.tensors.items()}
        head = safetensors_head(shapes, {"base": self.base})
        with closing(ShardWriter(directory / WEIGHTS, shapes, head)) as writer:
            for key, tensor in self.tensors.items():
                writer.write(key, tensor)
            writer.finish()

    def publish(self, out: Path) -> None:
        """Write the folder under a temporary name, and rename it to ``out`` when everything is on disk; a collective.
        Raises RankError if it cannot be written, or if the adapter has NaN or Inf; then ``out`` is not created."""
        with errors_on_all_ranks(ValueError, OSError):
            if is_main():
                broken = [key for key, tensor in self.tensors.items() if not bool(tensor.isfinite().all())]
                if broken:
                    raise ValueError(
                        f"{out} was not written: the model diverged, export an earlier checkpoint: NaN or Inf in "
                        f"{listed(broken, 5)}"
                    )
                with closing(Aside(out, sum(tensor.nbytes for tensor in self.tensors.values()))) as aside:
                    self.write(aside.path)
                    aside.publish()


def collect_adapter(
    model: PreTrainedModel,
    quantization: Quantization,
    *,
    alpha: float,
    rslora: bool,
    dropout: float,
    base_path: str,
    base: str,
) -> PeftFolder:
    """Gather unmerged adapters to rank 0, in the model's dtype; a collective.

    Args:
        model, quantization: the model and its quantized layers; all adapters have the same LoRA rank.
        alpha, rslora, dropout: the recipe's values under ``adapter``.
        base_path: checkpoint to record as the adapter's base model.
        base: digest of that checkpoint (:class:`PeftFolder`).
    """
    tensors: dict[str, Tensor] = {}
    adapters = {
        name: layer.adapter for name, layer in quantization.layers.items() if isinstance(layer.adapter, AdapterBeside)
    }
    for name, adapter in adapters.items():
        pair = {"lora_A": adapter.lora_a, "lora_B": adapter.lora_b}
        for (part, parameter), values in zip(pair.items(), whole_values(tuple(pair.values())), strict=True):
            if is_main():
                tensors[f"{PREFIX}{name}.{part}.weight"] = (
                    values.to("cpu", parameter.dtype).view(full_shape(parameter)).contiguous()
                )
    (rank,) = {full_shape(adapter.lora_a)[0] for adapter in adapters.values()}
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | QuantLinear)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": rslora,
        "lora_dropout": dropout,
        "bias": "none",
        "target_modules": _targets(set(adapters), linears, whole=not text_part(model)),
        "inference_mode": True,
    }
    return PeftFolder(tensors, config, base)


def _targets(chosen: set[str], linears: list[str], *, whole: bool) -> list[str]:
    """List peft's ``target_modules``: name suffixes if these match just the chosen modules, else full names.

    ``whole`` is True if ``linears`` names every Linear of the model in peft or vLLM; else a suffix might match others.
    """
    ends = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name in linears if name.rpartition(".")[2] in ends}
    return sorted(ends) if whole and meant == chosen else sorted(chosen)


LOST = 0.1  # error relative to a factor's norm: larger than that of rounding, smaller than that of over- and underflow


def local_weight(layer: QuantLayer) -> tuple[int, Tensor]:
    """Return the index of this rank's first element in a layer's weight, and this rank's elements, flat, as the forward
    quantizes them. With a merged adapter this is a collective, and the elements are a copy that contains it; otherwise
    they are a view of the weight. The weight must not be packed."""
    assert layer.held is None, "a rule of the recipe"
    start, stop = local_range(layer.weight)
    merges = layer.adapter is not None and layer.adapter.merges
    return start, _merged(layer, start, stop) if merges else local_data(layer.weight)


@torch.no_grad()
def _merged(layer: QuantLayer, start: int, stop: int) -> Tensor:
    """Return a copy of elements ``[start, stop)`` of the weight with the adapter merged, with the same bits as in
    a merge of the whole weight; a collective."""
    adapter, own = layer.adapter, local_data(layer.weight)
    assert adapter is not None
    if isinstance(adapter, DecoupledScale):
        (theta,) = whole_values((adapter.code_theta,))
        theta = theta.view(full_shape(adapter.code_theta)).to(adapter.code_theta.dtype)
        return part_for_codes(own, start, layer.weight_shape, theta, adapter.spec)
    pair = (adapter.lora_a, adapter.lora_b)
    values = whole_values(pair)  # on every rank, even without any part of the weight
    lora_a, lora_b = (
        value.view(full_shape(one)).to(own.device, one.dtype) for value, one in zip(values, pair, strict=True)
    )
    columns, out = layer.in_features, layer.out_features
    first, end = start // columns, -(-stop // columns)  # rows, of all experts concatenated
    rows = own.new_zeros(max(0, end - first) * columns)
    rows[start - first * columns : stop - first * columns] = own
    by_expert = zip(lora_a.view(-1, *lora_a.shape[-2:]), lora_b.view(-1, *lora_b.shape[-2:]), strict=True)
    parts = [rows[:0]]
    for expert, (a, b) in enumerate(by_expert):
        begin, stop_row = max(first, expert * out), min(end, (expert + 1) * out)
        if begin < stop_row:
            part = rows[(begin - first) * columns : (stop_row - first) * columns].view(-1, columns)
            parts.append(merge(part, a, b[begin - expert * out : stop_row - expert * out], adapter.scaling).view(-1))
    return torch.cat(parts)[start - first * columns : stop - first * columns]


@torch.no_grad()
def start_from_error(quantization: Quantization) -> None:
    """Initialize every separate adapter (``adapter.merge: false``) from the error of quantization: the product
    ``scaling * lora_b @ lora_a`` becomes the best approximation of its rank to ``W - Q(W)`` (the first step of LoftQ,
    Li et al. 2023, arXiv:2310.08659; LoRC, Yao et al. 2023, arXiv:2303.08302). The weights' scales must be set. A
    collective: layers are gathered one at a time, and rank 0 computes. Raises RankError if the adapter's dtype cannot
    represent the factors, because ``adapter.alpha`` is too small or large."""
    beside = {name: one for name, one in quantization.layers.items() if one.adapter and not one.adapter.merges}
    for name, layer in progress_bar(desc="first adapters", unit="layer", over=beside.items()):
        assert layer.adapter is not None
        pair = (layer.adapter.lora_a, layer.adapter.lora_b)
        others = [own for own in layer.parameters(recurse=False) if all(own is not one for one in pair)]
        with gathered(others), gathered(pair, modifier_rank=0), errors_on_all_ranks(ValueError):
            if is_main():
                error = (layer.weight - layer.quantized_weight()).float() / layer.adapter.scaling
                if not (error.isfinite().all() and _filled(pair, _factors(error, pair[0].shape[0]))):
                    raise ValueError(
                        f"adapter.init: error, but {pair[0].dtype} cannot represent an adapter of {name} whose product "
                        f"times {layer.adapter.scaling:g} is the error of quantization: set adapter.alpha nearer to "
                        "adapter.rank"
                    )


def _filled(pair: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> bool:
    """Copy values into an adapter, and return True if its dtype can represent them up to rounding."""
    for own, value in zip(pair, values, strict=True):
        own.copy_(value)
    norms = [((own.float() - value).norm(), value.norm()) for own, value in zip(pair, values, strict=True)]
    return all(bool(away <= LOST * size) for away, size in norms)


def _factors(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute factors ``a [rank, in]`` and ``b [out, rank]`` of equal norms, with ``b @ a`` close to ``matrix [out,
    in]``."""
    # Same seed in every run; extra directions and iterations, because errors do not have a few dominant directions.
    with torch.random.fork_rng([matrix.device] if matrix.is_cuda else []):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(matrix, q=min(rank + 16, *matrix.shape), niter=8)
    root = s[:rank].sqrt()
    return (v[:, :rank] * root).t(), u[:, :rank] * root
