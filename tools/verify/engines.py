"""Load and compare exports in the engines that read them: llama.cpp (GGUF), MLX and ExecuTorch.

GGUF files are dequantized by llama.cpp's own Python package; logits are compared if llama.cpp is installed. On a CPU
llama.cpp rounds the inputs of a layer in Q4_0 or Q8_0 to 8 bits in blocks of 32 (ggml's ``block_q8_0``), and the inputs
of a layer in BF16 or F16 to that dtype. So its logits differ from the logits of this project's forward ("ours"). They
are compared twice: with our unchanged forward, which shows the cost of that rounding, and with our forward with inputs
rounded in the same way. In the second comparison only the order of sums in matrix products may make a difference.

Exports for MLX: weights are dequantized by ``mlx.core`` in fp32. mlx-lm loads the directory and computes logits, in
fp32 and in the dtype of the checkpoint. In fp32 they must equal ours up to the order of sums (for Qwen3.5, the factors
of our norms are first rounded like mlx-lm's). In the dtype of the checkpoint MLX rounds products of scales and codes,
and activations; the report shows the cost of this rounding.

Exports for ExecuTorch: transformers loads the directory with torchao, which dequantizes its weights in fp32. Then the
model is exported with torch.export, lowered to XNNPACK and run by ExecuTorch's runtime on the CPU. Weights keep their
codes in these steps, but inputs are quantized by XNNPACK's own kernels. A value within a rounding error of a boundary
between two codes may get the other code, and after many layers most codes differ. So logits are compared within the
size of such differences, and single layers, with the same inputs, to the rounding of fp32.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.activations import GELUTanh

from model.families import is_composite
from model.save.finish import mlx_module
from model.save.gguf_file import GGUF_FILE, open_gguf
from model.save.gguf_names import GGUFNames, split
from model.save.loadable import is_expert
from model.save.plan import mlx_place
from quant import QuantEmbedding, QuantLayer, QuantLinear
from quant.formats.gguf import BLOCK, SIZES, TENSOR_SCALE
from quant.linear import StackedLinear
from tools.verify.check import (
    OUR_FORWARD_KL,
    OUR_FORWARD_KL_ROUTED,
    UNRELATED_ROUNDINGS,
    dtype_on_disk,
    inputs_left,
)
from tools.verify.comparison import Engine, LogitComparison, Report, compare, logits_of, on_input

MISSING = "the package cyllama is not installed: pip install -e '.[llama-cpp]' (docs/gguf.md)"


class GGUF(Engine):
    """Reader of GGUF files."""

    bound = OUR_FORWARD_KL
    """Limit of the logits' KL divergence."""
    unused = frozenset({"rope_freqs.weight"})

    def __init__(self, export: Path) -> None:
        """Open ``export``/model.gguf. Raises ValueError if the file is no GGUF file, or the package gguf is missing."""
        self.export = export
        self.found = {tensor.name: tensor for tensor in open_gguf(export / GGUF_FILE).tensors}
        kinds = Counter(tensor.tensor_type.name for tensor in self.found.values())
        contents = f"{GGUF_FILE}, {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
        self.report = Report("llama.cpp", contents, sum(n for kind, n in kinds.items() if kind in SIZES))

    @cached_property
    def _names(self) -> GGUFNames:
        return GGUFNames(self.model.config)

    def names(self, key: str) -> list[str]:
        places = self._names.places(key)
        if places[0].name is None and is_composite(self.model.config):
            return []  # of a tower
        found = [place.name or key for place in places]
        scales = [name.replace(".weight", f".{TENSOR_SCALE}") for name in found]
        return found + [name for name in scales if name in self.found and name not in found]

    def equals(self, key: str, names: list[str], expected: Tensor) -> bool:
        from gguf.quants import dequantize

        places = self._names.places(key)
        for place, part in zip(places, split(expected, key, len(places)), strict=True):
            tensor = self.found[place.name or key]
            values = torch.from_numpy(dequantize(place.part_of(tensor.data), tensor.tensor_type).copy()).view(-1)
            ordered = place.to_file(part.float()).reshape(-1)
            scale = self.found.get(tensor.name.replace(".weight", f".{TENSOR_SCALE}"))
            if scale is None or scale is tensor:
                same = torch.equal(values, ordered)
            else:  # the reciprocal of our scale, rounded: another code or scale differs by 6% and more
                same = torch.allclose(values * float(scale.data[place.expert or 0]), ordered, rtol=2.0**-22, atol=0)
            if not same:
                return False
        return True

    def exact_inputs(self) -> set[str]:
        """Return the names of linear layers whose weights are F32 in the file (routers, gates of shared experts):
        llama.cpp does not round their inputs."""
        found = set()
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                tensor = self.found.get(self._names.places(f"{name}.weight")[0].name or "")
                if tensor is not None and tensor.tensor_type.name == "F32":
                    found.add(name)
        return found

    def compare_logits(self, against: Path, batches: Sequence[Tensor]) -> None:
        if not installed():
            self.report.note = f"logits: skipped: {MISSING}"
            return
        routed = any(is_expert(name) for name, _ in self.model.named_modules())
        ours, rounded, cost = LogitComparison(), LogitComparison(), LogitComparison()  # cost: of rounding inputs
        self.report.logits = {"our forward": ours, "inputs rounded": rounded}
        dtype = dtype_on_disk(against, self.model)
        exact = self.exact_inputs()
        for ids, theirs in zip(batches, engine_logits(self.export / GGUF_FILE, batches), strict=True):
            given = logits_of(self.model, ids)
            with rounded_inputs(self.model, dtype, exact):
                changed = logits_of(self.model, ids)
            ours.add(given, theirs, ids)
            rounded.add(changed, theirs, ids)
            cost.add(given, changed, ids)
        # Through many layers other last bits become other codes of inputs. Two unrelated roundings differ by twice the
        # cost of one: 2.1e-3 in SmolLM2-135M, where llama.cpp with weights in F32 computes our logits.
        self.bound = max(OUR_FORWARD_KL_ROUTED if routed else OUR_FORWARD_KL, 2 * cost.kl)
        self.report.require_kl("inputs rounded", self.bound)


def installed() -> bool:
    """Return True if llama.cpp is installed, as the package cyllama."""
    try:
        import cyllama  # noqa: F401
    except ImportError:
        return False
    return True


def engine_logits(file: Path, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Compute llama.cpp's logits [1, T, V] for each row ``ids [1, T]``, on the CPU with keys and values in fp32. Raises
    ValueError if llama.cpp does not load the file."""
    from cyllama.llama import llama_cpp

    class Model(llama_cpp.LlamaModel):
        """cyllama's model with a property that its context reads and that cyllama defines only on the vocabulary."""

        @property
        def n_vocab(self) -> int:
            return self.get_vocab().n_vocab

    llama_cpp.disable_logging()
    longest = max(ids.shape[1] for ids in batches)
    options = llama_cpp.LlamaModelParams()
    options.n_gpu_layers = 0
    try:
        model = Model(str(file), options, verbose=False)
        sizes = llama_cpp.LlamaContextParams()
        sizes.n_ctx = sizes.n_batch = sizes.n_ubatch = longest
        sizes.type_k = sizes.type_v = 0  # GGML_TYPE_F32
        sizes.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED: it rounds to fp16
        context = llama_cpp.LlamaContext(model, sizes, verbose=False)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"llama.cpp does not load {file}: {error}") from error
    for ids in batches:
        context.kv_cache_clear()
        batch = llama_cpp.LlamaBatch(n_tokens=longest, embd=0, n_seq_max=1)
        for position, token in enumerate(ids[0].tolist()):
            batch.add(token, position, [0], True)
        context.decode(batch)
        rows = [context.get_logits_ith(position) for position in range(ids.shape[1])]
        yield torch.tensor(rows).unsqueeze(0)


@contextmanager
def rounded_inputs(model: PreTrainedModel, dtype: torch.dtype, exact: Collection[str] = ()) -> Iterator[None]:
    """Round inputs of linear layers and stacked experts, and results of GELU, like llama.cpp inside the block. Inputs
    of quantized layers are rounded to 8 bits, others to ``dtype``; inputs of layers that ``exact`` names stay exact."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, GELUTanh):
                stack.callback(module.register_forward_hook(_tabulated_gelu).remove)
            layer = isinstance(module, QuantLayer | nn.Linear | StackedLinear) and name not in exact
            if layer and not isinstance(module, QuantEmbedding):
                change = in_blocks if isinstance(module, QuantLayer) else lambda x: x.to(dtype).float()
                stack.callback(module.register_forward_pre_hook(partial(on_input, change)).remove)
        yield


def _tabulated_gelu(_: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
    """Compute GELU like ggml's CPU kernels. Inputs of 10 and more are returned unchanged. Others are looked up in a
    table: inputs (at least -10) and results are rounded to fp16."""
    (x,) = arguments
    found = F.gelu(x.clamp(-10, 10).half().float(), approximate="tanh").half().float()
    return torch.where(x < 10, found, x)


def in_blocks(x: Tensor) -> Tensor:
    """Quantize ``x [..., features]`` to ggml's Q8_0 and back, in fp32. The scale of a block is ``d = absmax / 127``.
    Codes are ``x * (1 / d)``, rounded; they are dequantized with d rounded to fp16."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest == 0, 0.0, 127.0 / largest)
    return ((groups * inverse).round() * (largest / 127.0).half().float()).flatten(-2)


# Largest difference by sums in another order, through all layers, relative to the standard deviation of the logits;
# another RoPE or a wrong factor causes 1e-1 and more.
_FP32_ROUNDING = 1e-2


class MLX(Engine):
    """Reader of exports for MLX."""

    def __init__(self, export: Path) -> None:
        """Load ``export`` with mlx-lm. Raises ValueError if mlx-lm is missing or does not load ``export``."""
        try:
            import mlx.core as mx
            from mlx_lm.utils import load_model
        except ImportError as error:
            raise ValueError(f"{error}: pip install -e '.[mlx]'") from error
        for path in export.iterdir():  # mlx-lm would read a pipe or a device for ever
            if not path.is_file() and not path.is_dir():
                raise ValueError(f"{path} is neither a file nor a folder")
        try:
            self.mlx, config = load_model(export)
        except Exception as error:  # of whatever kind: shapes and keys are checked in many places
            raise ValueError(f"mlx-lm does not load {export}: {type(error).__name__}: {error}") from error
        self.modes = config.get("quantization", {})
        self.export, self.found = export, {}
        for file in sorted(export.glob("model*.safetensors")):
            self.found |= mx.load(str(file))
        self.report = Report("MLX", "MLX", sum(name.endswith(".scales") for name in self.found))

    def names(self, key: str) -> list[str]:
        module, _ = mlx_place(key.removesuffix(".weight"))
        parts = [f"{module}.{suffix}" for suffix in ("weight", "scales", "biases")]
        return [part for part in parts if part in self.found] if parts[1] in self.found else [key]

    def equals(self, key: str, names: list[str], expected: Tensor) -> bool:
        import mlx.core as mx

        arrays = [self.found[name] for name in names]
        if len(arrays) == 1:
            return torch.equal(_tensor(arrays[0]), expected)
        module, expert = mlx_place(key.removesuffix(".weight"))
        weight, *others = arrays if expert is None else (array[expert] for array in arrays)
        mode = self.modes.get(mlx_module(self.model.config.model_type, module), self.modes)
        if mode["mode"] == "affine":
            others = [array.astype(mx.float32) for array in others]
        kind = {name: mode[name] for name in ("group_size", "bits", "mode")}
        return torch.equal(_tensor(mx.dequantize(weight, *others, **kind, dtype=mx.float32)), expected)

    def compare_logits(self, against: Path, batches: Sequence[Tensor]) -> None:
        import mlx.core as mx

        self._round_norms(dtype_on_disk(against, self.model))
        ours = [logits_of(self.model, ids) for ids in batches]
        for name in ("dtype of the file", "in fp32"):
            theirs = (_tensor(self.mlx(mx.array(ids.numpy()))) for ids in batches)
            try:
                self.report.logits[name] = compare(ours, theirs, batches)
            except ValueError as error:
                self.report.problems.append(f"MLX does not compute with {self.export}: {error}")
                return
            self.mlx.set_dtype(mx.float32)
        figure = self.report.logits["in fp32"].relative_max
        self.report.require(
            "in fp32", figure, _FP32_ROUNDING, "the largest difference, in standard deviations of the logits,"
        )

    def _round_norms(self, dtype: torch.dtype) -> None:
        """Round the factors ``1 + weight`` of Qwen3.5's norms in our model to the dtype of the files, as mlx-lm does on
        loading."""
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm

        for module in self.model.modules():
            if isinstance(module, Qwen3_5RMSNorm | Qwen3_5MoeRMSNorm):
                module.weight.copy_((1 + module.weight).to(dtype).float() - 1)


def _tensor(array: Any) -> Tensor:
    """Convert an array of MLX to fp32."""
    import mlx.core as mx
    import numpy as np

    return torch.from_numpy(np.array(array.astype(mx.float32)))


# Largest error of a feature, its median over tokens, in a layer that XNNPACK computes alone, relative to the standard
# deviation of the layer's outputs. Measured: 2e-7; a scale that is wrong by 1% causes 1e-3 and more. A token that gets
# another code differs by about as much, so a mean would not do.
_LAYER_ERROR = 1e-4


class ExecuTorch(Engine):
    """Reader of exports for ExecuTorch."""

    def __init__(self, export: Path) -> None:
        """Load ``export`` with transformers and torchao. Raises ValueError if that fails, or ExecuTorch is missing."""
        self.export, self.theirs = export, loaded(export)
        self.found = self.theirs.state_dict()
        self.unused = frozenset(self.theirs.all_tied_weights_keys)
        self.report = Report("XNNPACK", "torchao", sum(hasattr(weight, "qdata") for weight in self.found.values()))

    def equals(self, key: str, names: list[str], expected: Tensor) -> bool:
        found = self.found[key]
        return torch.equal(found.dequantize() if hasattr(found, "qdata") else found, expected)

    def compare_logits(self, against: Path, batches: Sequence[Tensor]) -> None:
        same = [ids for ids in batches if ids.shape == batches[0].shape]  # the lowered program takes no other
        ours, cost = LogitComparison(), LogitComparison()  # cost: of quantizing inputs
        self.report.logits["our forward"] = ours
        for ids, theirs in zip(same, computed(_Logits(self.theirs), same), strict=True):
            given = logits_of(self.model, ids)
            with inputs_left(self.quantization):
                exact = logits_of(self.model, ids)
            ours.add(given, theirs, ids)
            cost.add(given, exact, ids)
        self.report.require_kl("our forward", max(OUR_FORWARD_KL, UNRELATED_ROUNDINGS * cost.kl))
        self._compare_layers(batches[0])

    def _compare_layers(self, ids: Tensor) -> None:
        """Compute one Linear of each shape and scheme alone, with the inputs of our forward, and report wrong outputs.
        So other codes in earlier layers make no difference."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def record(name: str, _: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = arguments[0], output

        layers = {name: layer for name, layer in self.quantization.layers.items() if isinstance(layer, QuantLinear)}
        kinds = {(one.in_features, one.out_features, one.scheme): name for name, one in reversed(layers.items())}
        hooks = [layers[name].register_forward_hook(partial(record, name)) for name in kinds.values()]
        logits_of(self.model, ids)
        for hook in hooks:
            hook.remove()
        for name, (inputs, expected) in seen.items():
            (found,) = computed(self.theirs.get_submodule(name), [inputs])
            error = ((found - expected).abs().flatten(0, -2).median(0).values.max() / expected.std()).item()
            if not error <= _LAYER_ERROR:
                self.report.problems.append(
                    f"{name}, computed alone with our inputs: XNNPACK's outputs differ from ours by {error:.2g} of "
                    f"their standard deviation, at most {_LAYER_ERROR:g} expected"
                )


def loaded(export: Path) -> PreTrainedModel:
    """Load ``export`` with transformers and torchao, in fp32, in which XNNPACK computes. Raises ValueError if
    ExecuTorch is missing, or transformers does not load ``export`` with torchao."""
    try:
        import executorch  # noqa: F401
        import torchao  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error}: pip install -e '.[executorch]'") from error
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(export, local_files_only=True)
    except Exception as error:  # of whatever kind: metadata, shapes and keys are checked in many places
        raise ValueError(f"transformers does not load {export}: {type(error).__name__}: {error}") from error
    model.requires_grad_(False)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "of the model types that are written"
    embedding.padding_idx = None  # a lookup with one is another operator, and there is none for codes
    model.to(torch.float32)  # type: ignore[arg-type]
    return model.eval()


class _Logits(nn.Module):
    """Module to lower: token ids [B, T] to logits [B, T, V], without a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def computed(module: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """Lower a module to XNNPACK, and compute its output for each batch (all of one shape) in ExecuTorch's runtime."""
    import executorch.kernels.quantized  # noqa: F401  registers the lookups in tables of codes
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.runtime import Runtime

    exported = torch.export.export(module, (batches[0],), strict=False)
    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    # Lookups in tables of codes become one operator here.
    lowered = edge.to_executorch(ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True))
    buffer = lowered.buffer
    program = Runtime.get().load_program(buffer)  # a method does not keep it alive, nor it the bytes
    method = program.load_method("forward")
    return [method.execute([batch])[0].clone() for batch in batches]
