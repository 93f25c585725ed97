"""Nothing inside a micro-batch waits for the device, and a layer can be captured in a CUDA graph.

A GPU says itself what waits (its sync debug mode); on the CPU the operators that would are counted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from data.loader import on_device, pad
from data.samples import Sample
from engine.losses.chunked import chunked_losses
from engine.losses.objective import Objective
from engine.step import nan_unless_finite
from model.head import install_head
from quant import SCHEMES, Quantization, replace_layers
from tests.lib.counting import Counting
from tests.lib.tiny import tiny_config

# transformers makes no mask for an implementation that it has none for, and so asks the device nothing.
AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """An error where the host waits for the device inside the block."""
    if device.type == "cpu":
        with Counting() as counting:
            yield
        assert not counting.waits
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prepared(model: nn.Module, scheme: str) -> Quantization:
    """Quantize a model, with scales of its own size."""
    quantization = replace_layers(model, SCHEMES[scheme], learn_weight_scale=True, learn_input_scale=False)
    with torch.no_grad():
        for group in (*quantization.weight_groups, *quantization.input_groups):
            group.s0.fill_(0.01)
    return quantization


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("scheme", ["fp8_static", "w4a16_g32", "8da4w"])
def test_no_host_waits_inside_a_micro_batch(scheme, kind, device, seed):
    config = tiny_config(kind, even=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa_without_mask")
    prepared(model.to(device), scheme)
    head = install_head(model)
    samples = [Sample(ids.numpy(), ids.roll(-1).numpy()) for ids in torch.randint(3, 300, (3, 40))]
    batch = pad(samples, [[0], [1], [2]], 0)

    def losses(given: dict[str, Tensor]) -> Callable[..., Tensor]:
        objective = Objective(chunk_tokens=64)
        return lambda *at_head: (
            chunked_losses(*at_head, given["labels"], objective=objective, positions=given["positions"]).total
        )

    def micro_batch(given: dict[str, Tensor]) -> Tensor:
        with head.computing(losses(given)):
            total: Tensor = model(given["input_ids"], use_cache=False).logits
        nan_unless_finite(total).backward()
        return total

    first = micro_batch(on_device(batch, device))  # what is checked in a first forward alone, and caches of torch
    model.zero_grad()
    given = on_device(batch, torch.device("cpu")) if device.type == "cpu" else on_device(batch, device)
    with no_waits(device):
        again = micro_batch(given)
    assert torch.equal(first, again) and again.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("scheme", ["fp8_static", "w4a16_g32", "8da4w"])
def test_a_layer_in_a_cuda_graph(scheme, device, seed):
    """A captured forward and backward compute again on what inputs hold then; on the CPU they are called again."""
    model = nn.ModuleDict({"up_proj": nn.Linear(64, 96, bias=False, device=device, dtype=torch.bfloat16)})
    prepared(model, scheme)
    layer = model["up_proj"]
    x, grad = (torch.randn(32, side, device=device).bfloat16() for side in (64, 96))
    leaves = [x.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]

    def both() -> list[Tensor]:
        output = layer(x)
        return [output, *torch.autograd.grad(output, leaves, grad)]

    replay = captured(both, device)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            layer.weight.copy_(0.02 * torch.randn_like(layer.weight))
        for ours, expected in zip(replay(), both(), strict=True):
            assert torch.equal(ours, expected)


def captured(function: Callable[[], list[Tensor]], device: torch.device) -> Callable[[], list[Tensor]]:
    """A replay of the function's graph; on the CPU the function."""
    if device.type == "cpu":
        return function
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with no_waits(device), torch.cuda.graph(graph):
        results = function()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay
