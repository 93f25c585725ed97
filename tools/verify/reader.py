"""Provide transformers' side of the comparison: the model that it loads from an exported checkpoint, and its
arithmetic.

transformers differs from this project by definition in these points (with transformers 5.23 and compressed-tensors
0.20):

- *Inputs, keys and values.* transformers divides by the scale, training multiplies by the fp32 reciprocal. Dynamic
  scales have the same formula in both, except for MX, whose powers of two are chosen differently
  (:mod:`quant.reference`). Integer zero points (``symmetric: false``) are the same, but transformers adds them before
  it rounds: an exact tie goes to the other neighbor if the zero point is odd. All tokens of a 2-D input, which some
  models pass to their shared experts, get one scale.
- *Weights.* compressed-tensors decompresses fp4 and MXFP8 to bf16, in a model loaded as fp32 too. bf16 represents
  values of MXFP4 and MXFP8 exactly; values of NVFP4 are rounded.
- *Experts.* transformers keeps the experts of a MoE fused and dequantizes them when it loads: their inputs are not
  quantized, and integer weights are rounded to the dtype of their scale, bf16. It replaces Llama 4's experts by
  Linears, which have neither difference.
- *Zero points.* Zero points of weights are only loaded with ``dequantize=True``. Otherwise transformers builds the
  model on the meta device, where compressed-tensors does not pack zero points, and the shapes differ from the file's.
  With this option weights are rounded to the dtype of their scale, bf16, and all layers are decoded with one scheme.
- *Rotated inputs.* transformers ignores ``transform_config``; here compressed-tensors, which defines this key, applies
  it to the loaded model.
- *Not loaded* are quantized embeddings, some experts, and tensors that transformers concatenates (Kimi Linear's
  convolutions) if other layers are packed. Experts in ``int-quantized``, with zero points, in several fp8 blocks, or in
  MXFP8 (whose scales transformers reads as plain numbers) are an error. Experts in NVFP4 are read without their global
  scale, which silently results in noise. Experts with several schemes are all decoded with the first scheme.
  Unquantized experts cannot be loaded, or are initialized at random, if other layers are packed. In these cases the
  export is compared with transformers' plain model, filled with the tensors that compressed-tensors decompresses from
  the files, and with inputs quantized by compressed-tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from compressed_tensors.transform import TransformConfig, apply_transform_config
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import Reader, read_headers, read_tensor
from model.families import model_class
from model.quantized.quantization_config import read_quantization_config
from model.ranks import RankError, listed
from model.save import fused_there, is_expert, not_loaded
from model.scales import cache_keys
from quant import Quantization, QuantLayer, QuantLinear, Scheme, TensorSpec
from quant.formats.compressed_tensors import export_format
from quant.formats.config_groups import quantization_args
from quant.hadamard import rotate
from quant.kv_cache import QuantCache
from quant.rotation import KEY
from tools.compressed import quantized_keys
from tools.verify.export_files import dtype_on_disk


def load_theirs(
    directory: Path, model: PreTrainedModel, quantization: Quantization, *, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[str]]:
    """Load the checkpoint with transformers; return its model in fp32, and a sentence for each problem that it reports.

    ``model`` and ``quantization`` are the result of ``load_compressed(directory)``.

    Raises:
        RankError: transformers raises an error.
    """
    # The eager experts multiply expert by expert, as this project does; the default sums in another order.
    moe = any(is_expert(name) for name, _ in model.named_parameters())
    options: dict[str, Any] = {"experts_implementation": "eager"} if moe else {}
    options |= {"dtype": torch.float32, "output_loading_info": True}
    trust = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(directory, local_files_only=True, **trust)
    known: Any = model_class(config)
    if not_loaded(model, quantization) is None:
        if shifted := any(layer.weight_zero is not None for layer in quantization.layers.values()):
            options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        try:
            kind: Any = known or AutoModelForCausalLM
            theirs, info = kind.from_pretrained(directory, local_files_only=True, **options, **trust)
        except Exception as error:  # transformers' classes may raise any error while loading
            raise RankError(
                f"transformers fails to load {directory} as {model.config.model_type}: {type(error).__name__}: {error}"
            ) from error
        if not shifted:
            theirs.hf_quantizer.compressor.decompress_model(theirs)
    else:
        del config.quantization_config
        with torch.device("meta"):
            kind = known or type(AutoModelForCausalLM.from_config(config, **trust))
        state = _decompressed(directory, model, quantization)
        theirs, info = kind.from_pretrained(None, config=config, state_dict=state, **options)
        _quantize_inputs(theirs, quantization)
    if transforms := read_quantization_config(directory).get("transform_config"):
        apply_transform_config(theirs, TransformConfig.model_validate(transforms))
    problems = []
    for what, keys in info.items():
        if what == "unexpected_keys":
            # transformers has no use for the input scales of experts, because it dequantizes them, nor for the
            # matrices of rotations, which compressed-tensors makes itself.
            unused = (".input_scale", ".input_global_scale")
            keys = [
                key for key in keys if not (is_expert(key) and key.endswith(unused)) and not key.endswith(f".{KEY}")
            ]
        if keys:
            problems.append(f"transformers reports {what}: {listed(sorted(map(str, keys)))}")
    for parameter in theirs.parameters():
        # transformers leaves dequantized weights in the dtype of the scale, although fp32 was requested.
        if parameter.is_floating_point() and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return theirs.eval(), problems


def _decompressed(directory: Path, model: PreTrainedModel, quantization: Quantization) -> dict[str, Tensor]:
    """Read every weight of the checkpoint, by key; codes and scales are decompressed by compressed-tensors."""
    checkpoint = read_headers(directory)
    state: dict[str, Tensor] = {}
    packed = {key for name in quantization.caches for key in cache_keys(model, name)}
    with Reader() as reader:
        for name, layer in quantization.layers.items():
            keys = quantized_keys(model, name, layer)
            packed |= set(keys.values())
            tensors = {suffix: read_tensor(reader, checkpoint.tensors[key]) for suffix, key in keys.items()}
            state[f"{module_name_on_disk(model, name)}.weight"] = decompress(tensors, layer.scheme)
        for key in (key for key in checkpoint.tensors.keys() - packed if not key.endswith(f".{KEY}")):
            state[key] = read_tensor(reader, checkpoint.tensors[key]).float()
    return state


def decompress(tensors: dict[str, Tensor], scheme: Scheme) -> Tensor:
    """Decompress one layer's tensors (by suffix) with compressed-tensors itself; returns the weight in fp32."""
    its = QuantizationScheme(targets=["Linear"], weights=_args(scheme.weights), format=export_format(scheme))
    if tensors["weight_scale"].dtype == torch.bfloat16:
        tensors = {**tensors, "weight_scale": tensors["weight_scale"].float()}  # as a reader in fp32 holds it
    weight = BaseCompressor.get_value_from_registry(export_format(scheme)).decompress(tensors, its)["weight"]
    return weight.float()


def _quantize_inputs(theirs: PreTrainedModel, quantization: Quantization) -> None:
    """Quantize inputs, keys and values of the plain model as in a model that transformers loads itself."""
    if quantization.caches:
        args = _args(next(iter(quantization.caches.values())).spec)
        status = QuantizationStatus.COMPRESSED
        config = QuantizationConfig(config_groups={}, kv_cache_scheme=args, quantization_status=status)
        apply_quantization_config(theirs, config)
        for name, cache in quantization.caches.items():
            attention, _, kind = name.rpartition(".")
            getattr(theirs.get_submodule(attention), f"{kind[0]}_scale").data.copy_(cache.input_scale())
    for name, module in theirs.named_modules():
        layer = quantization.layers.get(name)
        if isinstance(module, nn.Linear) and layer is not None and layer.scheme.activations is not None:
            module.register_forward_pre_hook(fake_quantizer(layer.scheme.activations, layer.input_scale()))


@contextmanager
def inputs_left(quantization: Quantization) -> Iterator[None]:
    """Leave inputs, keys and values unquantized inside the block."""
    quantization.set_fake_quant(weights=True, activations=False)
    yield
    quantization.set_fake_quant(weights=True, activations=True)


@contextmanager
def inputs_of_experts_left(model: PreTrainedModel, quantization: Quantization) -> Iterator[None]:
    """Leave the inputs of experts unquantized inside the block, if transformers does not quantize them."""
    is_fused = fused_there(model)
    with ExitStack() as stack:
        for name, layer in quantization.layers.items():
            if is_fused(name) and layer.input_fake_quant:
                stack.enter_context(_attributes(layer, input_fake_quant=False))
        yield


@contextmanager
def their_arithmetic(directory: Path, model: PreTrainedModel, quantization: Quantization) -> Iterator[None]:
    """Replace this project's arithmetic by transformers' arithmetic inside the block."""
    decoded, is_fused = not_loaded(model, quantization) is None, fused_there(model)
    model_dtype = dtype_on_disk(directory, model)
    with ExitStack() as stack:
        stack.enter_context(inputs_of_experts_left(model, quantization))
        for name, layer in quantization.layers.items():
            if layer.input_fake_quant:
                assert layer.scheme.activations is not None
                _enter_their_input(stack, layer, layer.scheme.activations)
            spec, dtype = layer.scheme.weights, None
            if spec.scale_format == "e4m3":
                dtype = torch.bfloat16
            elif decoded and spec.dtype == "int" and not spec.ggml and (is_fused(name) or spec.has_zero_points):
                dtype = model_dtype
            if dtype is not None:  # weights are the dequantized codes already
                stack.enter_context(_attributes(layer, weight_fake_quant=False))
                stack.enter_context(_attributes(layer.weight, data=layer.weight.data.to(dtype).float()))
        for cache in quantization.caches.values():
            _enter_their_input(stack, cache, cache.spec)
        yield


def _enter_their_input(stack: ExitStack, module: QuantLayer | QuantCache, spec: TensorSpec) -> None:
    if isinstance(module, QuantLinear) and (block := module.rotation) is not None:  # rotated before it is quantized
        hook = module.register_forward_pre_hook(lambda _, arguments: (rotate(arguments[0], block), *arguments[1:]))
        stack.callback(hook.remove)
        stack.enter_context(_attributes(module, rotation=None))
    stack.callback(module.register_forward_pre_hook(fake_quantizer(spec, module.input_scale())).remove)
    stack.enter_context(_attributes(module, input_fake_quant=False))


@contextmanager
def _attributes(owner: object, **values: Any) -> Iterator[None]:
    """Change attributes of an object inside the block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    yield
    for name, value in before.items():
        setattr(owner, name, value)


def fake_quantizer(spec: TensorSpec, scale: Tensor | None) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Create a forward pre-hook that fake-quantizes a module's input with compressed-tensors. ``scale`` is the stored
    scale, the global scale of dynamic scales (NVFP4), or None for dynamic scales without one."""
    args, above = _args(spec), scale if spec.dynamic else None

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, its_scale, zero_point = arguments[0], scale, None
        if spec.dynamic and x.numel() > 0:
            its_scale, zero_point = compute_dynamic_scales_and_zp(x, args, module, above)
        assert its_scale is not None or x.numel() == 0
        return (fake_quantize(x, its_scale, zero_point, args, above) if x.numel() > 0 else x, *arguments[1:])

    return hook


def _args(spec: TensorSpec) -> QuantizationArgs:
    return QuantizationArgs(**quantization_args(spec))
