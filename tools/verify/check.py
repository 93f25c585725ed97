"""Compare an exported checkpoint with transformers in fp32: does transformers load it, and compute the same as
training?

Two readers of one directory get the same tokens: transformers, in which compressed-tensors decompresses weights, and
this project's forward (``tools.compressed``, "our forward"), whose fake quantization computes exactly the codes on
disk. Where their arithmetic differs by definition, the difference is not covered by a loose tolerance. Instead there
are two comparisons:

1. *same arithmetic*: our forward, with transformers' arithmetic in place of each known difference. Both readers then
   perform the same operations on the same numbers, so logits agree to the rounding of matrix products, and on one
   machine usually bit for bit. Any error of a checkpoint (a code, a scale, a key, an ignored layer) shows here.
2. *our forward*: our forward unchanged. The size of the differences is measured and bounded.

*inputs as given* is our forward without quantized inputs, keys and values, to show the cost of quantizing them.
In all three, inputs of fused experts stay unquantized, as in transformers. *full forward* is our complete forward,
which vLLM also computes. *inputs as given* and *full forward* have no bound.

The known differences, with transformers 5.23 and compressed-tensors 0.20:

- *Inputs, keys and values.* transformers divides by the scale, training multiplies by the fp32 reciprocal. Where
  ``x/s`` is within a rounding of a boundary between codes, this results in another code: in fp32 one element in some
  millions, but each such step (1/16 of the value) changes later values. Through 6 layers the logits differ by 0.2 at
  most and by 0.002 in the mean, 1% of the cost of quantizing the inputs; through 30 layers by as much as this cost.
  With scales that are powers of two, both operations are exact and agree. Dynamic scales have the same formula in
  both, except for MX, whose powers of two are chosen differently (:mod:`quant.reference`). Integer zero points
  (``symmetric: false``) are the same, but transformers adds them before it rounds: an exact tie goes to the other
  neighbor if the zero point is odd. All tokens of a 2-D input, which some models pass to their shared experts, get
  one scale.
- *Weights.* compressed-tensors decompresses fp4 and MXFP8 to bf16, in a model loaded as fp32 too. bf16 represents
  values of MXFP4 and MXFP8 exactly; values of NVFP4 are rounded, as in the bf16 forward of training.
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

The files are also checked for readers other than transformers (:func:`problems_of_files`). The rules follow from the
loading code of vLLM and SGLang. Their code creates parameters of fixed dtypes and shapes and copies the file's tensors
into them, fuses q, k and v, or gate and up, into one layer with one scale per tensor (the largest of several), and
treats MoE routers as Linears.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr
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

from model.checkpoint.names import Names, module_name_on_disk, own_tensors
from model.checkpoint.safetensors import Checkpoint, Reader, read_headers, read_tensor
from model.console import progress_bar, working
from model.families import model_class
from model.peft import say_left_out
from model.quantized.quantization_config import read_quantization_config
from model.ranks import RankError, listed
from model.save.finish import is_router
from model.save.loadable import fused_there, is_expert, not_loaded
from model.scales.grouping import cache_keys
from quant import Quantization, QuantLayer, QuantLinear, Scheme, TensorSpec
from quant.attention import QuantCache
from quant.formats.compressed_tensors import export_format, packed_shapes, unpack_weight, weight_codes
from quant.formats.config_groups import quantization_args
from quant.gemm import rotate
from quant.rotation import KEY, stored_matrix
from tools.compressed import is_ignored, load_compressed, quantized_keys
from tools.verify.comparison import LogitComparison, Report, logits_of, rounded

STORED = (torch.bfloat16, torch.float16, torch.float32)
# Mean KL divergence under the same arithmetic, nats per token. Measured: 0 for dense models, where the same kernels get
# the same numbers. In a MoE transformers multiplies gate and up at once, our forward one after the other. This changes
# logits by 1e-6, and an input that is this close to a boundary gets another fp8 code: through two layers the divergence
# is mostly 2.5e-8, and up to 3e-5 if the code is large (3 of 10,000 small exports exceeded 1e-5). A wrong scale or
# layer causes 1e-3 and more. Through 24 layers it was 2.5e-4, as inputs of later layers get other codes, too. So the
# bound of a MoE whose inputs, keys or values are quantized is the second one, or twice the effect of changing the
# inputs of our forward's layers by 1e-6, whichever is larger.
SAME_ARITHMETIC_KL = 1e-5
SAME_ARITHMETIC_KL_ROUTED = 1e-4
# Mean KL divergence of our forward. Measured: 1.4e-5 with static fp8 inputs, 0 without quantized inputs and with
# weights that bf16 represents, 2e-5 for NVFP4. If the choice of experts depends on a rounding, the token's logits come
# from other weights: 4e-3 with random routers (1.2e-2 on 66 tokens, where a single token counts much).
OUR_FORWARD_KL = 1e-3
OUR_FORWARD_KL_ROUTED = 1e-2
# Inputs near a boundary get other codes in another reader, which cause other codes in the layers that follow. In a
# model of many layers the limit is two unrelated roundings, which differ by twice the cost of one; noise of 1e-7 in the
# outputs of its norms has the same effect. Measured in SmolLM2-135M, in costs of quantizing the inputs: 0.3 to 1.4 for
# seven schemes, 1.1 for fp4; in models of two layers up to 0.7. This is the bound if it is larger than those above.
UNRELATED_ROUNDINGS = 2.5
# Reasons and meanings in the report.
SUMS = "products are added up in another order, and some logits are almost equal"
FLIPS = (
    "transformers divides by a scale and training multiplies by its reciprocal, so that a value on the border of two "
    "codes gets one code here and the other there, and so do more and more values in the layers that follow"
)
MEANINGS = {
    "inputs as given": "our forward without quantized inputs, keys and values, to show how much these change; no bound",
    "full forward": "with quantized inputs of experts, which transformers does not quantize; no bound",
}


@torch.no_grad()
def compare_with_transformers(directory: Path, batches: Sequence[Tensor], *, trust_remote_code: bool = False) -> Report:
    """Load an export with transformers and with this project, and compare both, in one process on CPU.

    Args:
        directory: directory written by ``model.save.export_model``.
        batches: input_ids [B, T], T at least 2; each is one forward.

    Raises:
        RankError: ``load_compressed`` rejects the directory (keys, shapes, ...), or transformers does not load it.
    """
    say_left_out(directory)
    model, quantization = load_compressed(directory, trust_remote_code=trust_remote_code)
    layers, is_fused = quantization.layers, fused_there(model)
    problems = problems_of_files(directory, model, quantization)
    with working("loading in transformers"), redirect_stderr(io.StringIO()):  # bars of compressed-tensors
        theirs, loading = load_theirs(directory, model, quantization, trust_remote_code=trust_remote_code)
    schemes = [layer.scheme.name for layer in layers.values()] + ["fp8 KV cache"] * bool(quantization.caches)
    report = Report("transformers", ", ".join(dict.fromkeys(schemes)), len(layers), problems=problems + loading)
    if note := not_loaded(model, quantization):
        report.note = f"{note}: compared with its plain model, filled with what compressed-tensors decompresses"

    quantization.set_fake_quant(weights=True, activations=True)
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "same arithmetic": lambda: their_arithmetic(directory, model, quantization),
        "our forward": lambda: inputs_of_experts_left(model, quantization),
    }
    fused = {is_fused(name) for name, layer in layers.items() if layer.input_fake_quant}
    if False in fused or quantization.caches:
        ways["inputs as given"] = lambda: inputs_left(quantization)
    if True in fused:
        ways["full forward"] = nullcontext
    report.logits = {name: LogitComparison() for name in ways}
    routed = any(is_expert(name) for name in layers)
    rounds = any(layer.scheme.activations for layer in layers.values()) or bool(quantization.caches)
    noise = LogitComparison()  # our forward against itself with inputs changed by 1e-6
    for ids in progress_bar(desc="verify", unit="window", over=batches):
        expected = logits_of(theirs, ids)
        for name, way in ways.items():
            with way():
                ours = logits_of(model, ids)
                report.logits[name].add(ours, expected, ids)
                if name == "same arithmetic" and routed and rounds:
                    for _ in rounded(model, quantization, 2):
                        noise.add(logits_of(model, ids), ours, ids)

    bound = OUR_FORWARD_KL_ROUTED if routed else OUR_FORWARD_KL
    if given := report.logits.get("inputs as given"):
        bound = max(bound, UNRELATED_ROUNDINGS * given.kl)
    same = max(SAME_ARITHMETIC_KL_ROUTED, 2 * noise.kl) if noise.tokens else SAME_ARITHMETIC_KL
    report.require_kl("same arithmetic", same)
    report.require_kl("our forward", bound)
    report.explain("same arithmetic", same, SUMS)
    report.explain("our forward", bound, FLIPS if rounds else SUMS)
    report.remarks += [f"{name}: {MEANINGS[name]}" for name in ways if name in MEANINGS]
    return report


def load_theirs(
    directory: Path, model: PreTrainedModel, quantization: Quantization, *, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[str]]:
    """Load the checkpoint with transformers; return the loaded model in fp32, and a sentence for each problem that
    transformers reports. ``model`` and ``quantization`` are the result of ``load_compressed(directory)``. Raises
    RankError if transformers raises an error."""
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
    """Decompress one layer's tensors (by suffix) with the package compressed-tensors; return the weight in fp32."""
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
    """Context in which inputs, keys and values of our model are not quantized."""
    before = quantization.fake_quant_state()
    quantization.restore_fake_quant({name: (weights, False) for name, (weights, _) in before.items()})
    yield
    quantization.restore_fake_quant(before)


@contextmanager
def inputs_of_experts_left(model: PreTrainedModel, quantization: Quantization) -> Iterator[None]:
    """Context in which our model does not quantize the inputs of experts that transformers keeps fused, as transformers
    does not quantize them either; inputs of other experts stay quantized."""
    is_fused = fused_there(model)
    with ExitStack() as stack:
        for name, layer in quantization.layers.items():
            if is_fused(name) and layer.input_fake_quant:
                stack.enter_context(_attributes(layer, input_fake_quant=False))
        yield


@contextmanager
def their_arithmetic(directory: Path, model: PreTrainedModel, quantization: Quantization) -> Iterator[None]:
    """Compute with transformers' arithmetic inside the block; inputs of fused experts are not quantized."""
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
    """Context in which attributes of an object have other values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    yield
    for name, value in before.items():
        setattr(owner, name, value)


def fake_quantizer(spec: TensorSpec, scale: Tensor | None) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Create a forward pre-hook that fake-quantizes a module's input with compressed-tensors. ``scale`` is the stored
    scale of the inputs; for dynamic scales it is their global scale (NVFP4), or None if they have none."""
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


def problems_of_files(directory: Path, model: PreTrainedModel, quantization: Quantization) -> list[str]:
    """Check the files of a checkpoint; return one sentence for each problem.

    The checks: codes and scales have the format's dtypes and shapes; layers that serving fuses have equal scales; this
    project's forward computes the codes and rotations in the files; keys and values have scales; MoE routers are
    ignored. ``model`` and ``quantization`` are the result of ``load_compressed(directory)``, in fp32.
    """
    checkpoint = read_headers(directory)
    model_dtype = dtype_on_disk(directory, model)
    problems: list[str] = []
    kinds = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale")
    stored: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    with Reader() as reader:
        for name, layer in quantization.layers.items():
            keys = quantized_keys(model, name, layer)
            problems += _wrong_tensors(checkpoint, layer, keys, model_dtype)
            tensors = {suffix: read_tensor(reader, checkpoint.tensors[key]) for suffix, key in keys.items()}
            for suffix in stored.keys() & tensors.keys():
                stored[suffix][name] = tensors[suffix].float()
            codes = weight_codes(layer.weight, layer.weight_scale(), layer.scheme.weights, layer.weight_zero)
            if not torch.equal(codes.view(torch.int8), unpack_weight(tensors, layer.scheme).view(torch.int8)):
                problems.append(f"{name}: our forward quantizes the weight to other codes than those on disk")
            key = f"{module_name_on_disk(model, name)}.{KEY}"
            if isinstance(layer, QuantLinear) and layer.rotation is not None and key in checkpoint.tensors:
                matrix = read_tensor(reader, checkpoint.tensors[key]).float()
                if not torch.equal(matrix, stored_matrix(layer).float()):
                    problems.append(f"{key} is not the matrix by which our forward rotates the input")
    for suffix, groups in (
        ("weight_scale", quantization.weight_groups),
        ("input_scale", quantization.input_groups),
        ("input_global_scale", quantization.input_groups),
        ("weight_global_scale", quantization.global_groups),
    ):
        for group in groups:
            scales = [stored[suffix][name] for name in group.members if name in stored[suffix]]
            if any(not torch.equal(scale, scales[0]) for scale in scales):
                problems.append(f"{', '.join(group.members)} are served with one {suffix}, but have several on disk")
    return problems + _wrong_caches(checkpoint, model, quantization) + _routers_not_ignored(directory, model)


def _wrong_tensors(
    checkpoint: Checkpoint, layer: QuantLayer, keys: dict[str, str], model_dtype: torch.dtype
) -> list[str]:
    """List the codes and scales that do not have the format's dtype or shape. An fp32 scale may be stored in a shorter
    dtype, as llm-compressor does: readers convert it to fp32, which changes no value."""
    expected = packed_shapes(layer.in_features, layer.out_features, layer.scheme, model_dtype)
    return [
        f"{key} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}"
        for (suffix, key), (dtype, shape) in zip(keys.items(), expected.values(), strict=True)
        if (found := checkpoint.tensors[key]).shape != shape
        or found.dtype not in (STORED if dtype == torch.float32 else (dtype,))
    ]


def _wrong_caches(checkpoint: Checkpoint, model: PreTrainedModel, quantization: Quantization) -> list[str]:
    """Describe missing or wrong scales of keys and values, which a server would not find or would replace by 1."""
    problems = []
    for name, cache in quantization.caches.items():
        keys = cache_keys(model, name)
        key = next((key for key in keys if key in checkpoint.tensors), keys[0])
        found = checkpoint.tensors.get(key)
        if found is None or found.dtype not in STORED or found.shape not in ((), (1,)):
            what = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            problems.append(f"{key} {what}, expected torch.float32 [1]")
        elif not cache.input_scale().item() > 0:
            problems.append(f"{key} is {cache.input_scale().item()}, expected a positive number")
    return problems


def dtype_on_disk(directory: Path, model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of most unquantized tensors in the checkpoint. Raises ValueError if there is no such tensor."""
    checkpoint = read_headers(directory)
    names = Names(model)
    found = (checkpoint.tensors.get(names.key(name)) for name, tensor in own_tensors(model).items())
    dtypes = Counter(each.dtype for each in found if each is not None and each.dtype in STORED)
    if not dtypes:
        raise ValueError(
            f"{directory} has no unquantized tensor, expected at least norms or embeddings: export the model again"
        )
    return next(dtype for dtype, _ in dtypes.most_common() if dtype is not None)


def _routers_not_ignored(directory: Path, model: PreTrainedModel) -> list[str]:
    ignore = read_quantization_config(directory).get("ignore") or []
    routers = [module_name_on_disk(model, name) for name, module in model.named_modules() if is_router(module)]
    missing = [name for name in routers if not is_ignored([name], ignore)]
    return [f"ignore does not name the routers {listed(missing)}: vLLM would quantize them"] if missing else []
