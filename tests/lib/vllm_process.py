"""Run the jobs of tools/verify/vllm_cpu.py with arithmetic in torch where vLLM's CPU backend lacks a kernel.

    VLLM_PYTHON -P tests/lib/vllm_process.py JOBS.json

Runs in vLLM's environment, as that script does. A job with ``emulate`` gets, in its own process, the functions of
:func:`emulate`. vLLM still reads the configuration, creates the parameters, loads and fuses them, and computes all but
the missing kernels: products of dequantized weights, quantized inputs, and the cache's codes.

All jobs compute without AMX: some of its kernels compute something else, and results would depend on the machine. They
multiply int4 weights by inputs in int8, leave inputs in bf16 that the file has in fp8, and ignore stored scales.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.verify import vllm_cpu

OPERATORS = torch.library.Library("_C", "FRAGMENT")  # vLLM's operators
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def prepare(job: dict[str, Any]) -> None:
    """Switch AMX off, and emulate what is missing if the job says so.

    With ``started_with`` the engine is started with that export, and then loads the job's export in place of it.
    """
    torch.cpu._is_amx_tile_supported = lambda: False
    if "started_with" in job:
        vllm_cpu.load = partial(reloaded, vllm_cpu.load)
    if job.get("emulate"):
        os.environ["VLLM_DISABLED_KERNELS"] = "CPUWNA16LinearKernel,Dynamic4bitLinearKernel"
        emulate()


def reloaded(load: Callable[[dict[str, Any], Any], Any], job: dict[str, Any], tokens: Any) -> Any:
    """Start the engine with one export and reload another, as engine/publish.py does."""
    engine = load({**job, "export": job["started_with"]}, tokens)
    engine.collective_rpc("reset_weights")
    engine.collective_rpc("reload_weights", kwargs={"weights_path": job["export"]})
    return engine


def emulate() -> None:
    """Supply what the CPU backend lacks, in this process."""
    from vllm import _custom_ops as ops

    ops.scaled_fp8_quant = scaled_fp8_quant  # a stub
    torch._scaled_mm = scaled_mm  # takes minutes per layer
    OPERATORS.define("silu_and_mul_quant(Tensor! out, Tensor input, Tensor scale) -> ()")
    OPERATORS.impl("silu_and_mul_quant", silu_and_mul_quant, "CPU")
    rounding_cache(ops)
    linear_kernels()
    experts()
    embeddings()


def scaled_fp8_quant(
    input: Tensor, scale: Tensor | None = None, use_per_token_if_dynamic: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3 as vLLM's CUDA kernel does."""
    values = input.float()
    if scale is None:
        largest = values.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else values.abs().max().view(1)
        scale = (largest / 448).clamp(min=1 / (448 * 512))
    assert scale.numel() in (1, len(values)), "per tensor or per token"
    return (values * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def silu_and_mul_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """Compute SwiGLU [..., features] of gate and up in one tensor, and quantize it to e4m3 with a stored scale."""
    gate, up = input.chunk(2, -1)
    out.copy_(scaled_fp8_quant(F.silu(gate) * up, scale)[0])


def scaled_mm(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, bias=None, out_dtype=None) -> Tensor:
    """Multiply codes in fp8, as torch._scaled_mm does."""
    per_channel = scale_b.dim() == 2 and scale_b.shape[1] == 1
    result = (a.float() @ b.float()) * scale_a * (scale_b.t() if per_channel else scale_b)
    return (result if bias is None else result + bias).to(out_dtype)


def rounding_cache(ops: Any) -> None:
    """Round keys and values to the nearest code before they are written: the CPU's kernel truncates."""
    write = ops.cpu_attn_reshape_and_cache

    def rounded(x: Tensor, scale: float) -> Tensor:
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        above = 1 + max(2**-18, torch.finfo(x.dtype).eps)  # is truncated to the same code
        return (codes.float() * scale * above).to(x.dtype)

    def reshape_and_cache(key: Tensor, value: Tensor, *others: Any, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"):
        if kv_cache_dtype.startswith("fp8"):
            key, value = rounded(key, k_scale), rounded(value, v_scale)
        write(key, value, *others, k_scale=k_scale, v_scale=v_scale, kv_cache_dtype=kv_cache_dtype)

    ops.cpu_attn_reshape_and_cache = reshape_and_cache


def unpack(packed: Tensor, columns: int, bits: int) -> Tensor:
    """Codes of rows [..., words] that are streams of bits, the lowest first."""
    stream = ((packed.unsqueeze(-1) >> torch.arange(32)) & 1).flatten(-2)[..., : columns * bits]
    return (stream.unflatten(-1, (columns, bits)) << torch.arange(bits)).sum(-1)


def integers(packed: Tensor, scales: Tensor, zeros: Tensor | None, columns: int, bits: int) -> Tensor:
    """Dequantize integers [..., out, in]; zero points are packed along the outputs."""
    offset: Any = 2 ** (bits - 1)
    if zeros is not None:
        offset = unpack(zeros.transpose(-1, -2), scales.shape[-2], bits).transpose(-1, -2)
        offset = offset.repeat_interleave(columns // offset.shape[-1], -1)
    spread = scales.repeat_interleave(columns // scales.shape[-1], -1)
    return (unpack(packed, columns, bits) - offset).to(scales.dtype) * spread


def blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize fp8 [..., out, in] with scales per block of 128 x 128, per channel or per tensor."""
    if scales.dim() < codes.dim():
        return codes.float() * scales.view(-1, *[1] * (codes.dim() - 1))
    for dim in (-1, -2):
        if 1 < scales.shape[dim] < codes.shape[dim] or (scales.shape[-1] > 1):
            scales = scales.repeat_interleave(128, dim).narrow(dim, 0, codes.shape[dim])
    return codes.float() * scales


def linear_kernels() -> None:
    """Register kernels for integers of any width, fp8 in blocks, MXFP4 and NVFP4 with unquantized inputs, and vLLM's
    emulations of NVFP4 and MXFP8."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
    from vllm.platforms import PlatformEnum

    able = {
        "get_min_capability": classmethod(lambda cls: -1),
        "is_supported": classmethod(lambda cls, compute_capability=None: (True, None)),
        "can_implement": classmethod(lambda cls, config: (True, None)),
    }

    def kernel(base: type, dequantize: Callable[[Any, nn.Module], Tensor]) -> type:
        """A kernel that dequantizes weights once and multiplies inputs as they are."""

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.dequantized = dequantize(self, layer)

        def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
            return F.linear(x, layer.dequantized.to(x.dtype), bias)

        methods = {"process_weights_after_loading": process_weights_after_loading, "apply_weights": apply_weights}
        return type("Dequantized", (base,), {**able, **methods})

    def of_integers(self: Any, layer: nn.Module) -> Tensor:
        zeros = getattr(layer, self.w_zp_name) if self.config.zero_points else None
        columns, bits = self.config.partition_weight_shape[0], self.config.weight_type.size_bits
        return integers(getattr(layer, self.w_q_name).data, getattr(layer, self.w_s_name).data, zeros, columns, bits)

    def of_mxfp4(self: Any, layer: nn.Module) -> Tensor:
        codes = layer.weight.data
        values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]
        return values * torch.exp2(layer.weight_scale.data.float() - 127).repeat_interleave(32, -1)

    def of_nvfp4(self: Any, layer: nn.Module) -> Tensor:
        codes, scales, scale = (tensor.data for tensor in (layer.weight, layer.weight_scale, layer.weight_global_scale))
        return dequantize_to_dtype(codes, scales, scale, torch.float32, swizzle=False)

    def apply_block_scaled_mm(self: Any, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        inputs = A.float().unflatten(-1, (As.shape[-1], -1)) * As.unsqueeze(-1)
        return inputs.flatten(-2) @ blocks(B, Bs).t()

    cpu = PlatformEnum.CPU
    linear.register_linear_kernel(kernel(MPLinearKernel, of_integers), cpu, "mp")
    linear.register_linear_kernel(kernel(linear.MxFp4LinearKernel, of_mxfp4), cpu, "mxfp4")
    linear.register_linear_kernel(linear.EmulationNvFp4LinearKernel, cpu, "nvfp4")
    linear.register_linear_kernel(linear.EmulationMxfp8LinearKernel, cpu, "mxfp8")
    blockwise = {**able, "apply_block_scaled_mm": apply_block_scaled_mm}
    blockwise["can_implement"] = classmethod(
        lambda cls, config: (config.weight_quant_key.scale.group_shape.col > 0, None)
    )
    linear._POSSIBLE_FP8_BLOCK_KERNELS[cpu].append(type("Blocks", (linear.Fp8BlockScaledMMLinearKernel,), blockwise))
    choose = linear.init_nvfp4_linear_kernel
    weights_alone = kernel(linear.NvFp4LinearKernel, of_nvfp4)
    for module in (compressed_tensors_w4a4_nvfp4, modelopt):
        module.init_nvfp4_linear_kernel = lambda use_a16=False: (
            weights_alone(linear.NvFp4LinearLayerConfig()) if use_a16 else choose()
        )


def experts() -> None:
    """Compute experts in torch: those in integers without quantized inputs, in int8 and in fp8."""
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as fp8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_int8 as int8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )

    class Kernels:
        is_monolithic = staticmethod(lambda: False)

    # What a GPU gets: other backends take no scales per channel.
    wna16.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.MARLIN, Kernels)
    wna16.check_moe_marlin_supports_config = lambda *_, **__: True
    int8.select_int8_moe_backend = fp8.select_fp8_moe_backend = lambda **_: (None, Kernels)
    fp8.convert_to_fp8_moe_kernel_format = lambda *, w13, w2, w13_scale, w2_scale, **_: (w13, w2, w13_scale, w2_scale)

    def of_integers(self: Any, layer: nn.Module) -> None:
        for name, columns in (("w13", layer.hidden_size), ("w2", layer.intermediate_size_per_partition)):
            packed, scales = (getattr(layer, f"{name}_weight_{kind}").data for kind in ("packed", "scale"))
            zeros = getattr(layer, f"{name}_weight_zero_point", None)
            setattr(layer, f"{name}_dequantized", integers(packed, scales, zeros, columns, self.num_bits))

    def of_codes(self: Any, layer: nn.Module) -> None:
        for name in ("w13", "w2"):
            codes, scales = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
            setattr(layer, f"{name}_dequantized", blocks(codes, scales))

    fused = fp8.CompressedTensorsW8A8Fp8MoEMethod.process_weights_after_loading

    def of_fused_codes(self: Any, layer: nn.Module) -> None:
        fused(self, layer)
        of_codes(self, layer)

    def apply(self: Any, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **_: Any) -> Tensor:
        out = torch.zeros_like(x)
        for index, (first, second) in enumerate(zip(layer.w13_dequantized, layer.w2_dequantized, strict=True)):
            tokens, place = (topk_ids == index).nonzero(as_tuple=True)
            gate, up = F.linear(rounded(self, x[tokens], layer, "w13"), first).chunk(2, -1)
            found = F.linear(rounded(self, F.silu(gate) * up, layer, "w2"), second)
            out.index_add_(0, tokens, found * topk_weights[tokens, place, None])
        return out

    def rounded(self: Any, x: Tensor, layer: Any, name: str) -> Tensor:
        """Quantize an input as the layer's scheme says, and back."""
        spec = self.input_quant
        if spec is None or not len(x):
            return x
        if spec.type == "int":
            scale = x.abs().amax(-1, keepdim=True) / 127
            return (x / scale).round() * scale
        whole = x.unflatten(-1, (-1, spec.group_size)).flatten(0, 1) if spec.strategy == "group" else x
        scale = None if spec.dynamic else getattr(layer, f"{name}_input_scale")
        codes, scale = scaled_fp8_quant(whole, scale, use_per_token_if_dynamic=True)
        return (codes.float() * scale).view_as(x)

    for method, process in (
        (wna16.CompressedTensorsWNA16MoEMethod, of_integers),
        (int8.CompressedTensorsW8A8Int8MoEMethod, of_codes),
        (fp8.CompressedTensorsW8A8Fp8MoEMethod, of_fused_codes),
    ):
        method.process_weights_after_loading = process
        method.apply = apply
        method.get_fused_moe_quant_config = lambda self, layer: None


def embeddings() -> None:
    """Look up rows of tables of integers in torch."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_embedding as tables

    def gather(ids: Tensor, packed: Tensor, scales: Tensor, columns: int, bits: int) -> Tensor:
        return integers(packed[ids], scales[ids], None, columns, bits)

    tables._dequant_gather_triton = gather


if __name__ == "__main__":
    sys.exit(vllm_cpu.main(sys.argv[1:], prepare))
