"""The inputs of layers in the forward that is compared with llama.cpp."""

import pytest
import torch

from quant import SCHEMES, Rule
from tests.lib.checkpoints import load_model, quantize
from tests.lib.tiny import tiny_checkpoint
from tools.verify.engines import in_blocks, rounded_inputs


@pytest.mark.parametrize("form", ["stacked", "per_expert"])
def test_inputs_of_experts_are_rounded_whether_they_are_quantized_or_not(tmp_path, form):
    """Layer 0 has quantized experts, layer 1 has none: ggml rounds inputs to the type that its weights are multiplied
    with."""
    model = load_model(tiny_checkpoint(tmp_path, "qwen3_moe", even=True), torch.float32, experts=form)
    quantize(model, SCHEMES["q4_0"], rules=[Rule(None, r".*layers\.1\..*experts.*")])
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("down_proj", "gate_up_proj", "gate_proj")):
            module.register_forward_hook(lambda _, given, __, name=name: seen.update({name: given[0]}))
    ids = torch.randint(0, 301, (1, 16))
    model(input_ids=ids)
    before = dict(seen)
    with torch.no_grad(), rounded_inputs(model, torch.bfloat16):
        model(input_ids=ids)
    assert len(seen) >= 4
    for name, x in seen.items():
        rounded = x.bfloat16().float() if "layers.1." in name else in_blocks(x)
        assert torch.allclose(rounded, x, rtol=1e-6, atol=0) and not torch.equal(x, before[name]), name
