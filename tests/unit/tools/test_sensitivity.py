"""What a part costs: its bytes against those of a file, and the divergence of logits against fp64."""

import random

import pytest
import torch

from model.save import export_model
from quant import SCHEMES
from tests.lib.checkpoints import CPU, quantized, read_tensors
from tests.lib.tiny import tiny_checkpoint
from tools.mixed_precision import divergences, parts_of


@pytest.mark.parametrize(
    ("scheme", "experts"),
    [
        ("w4a16_g32", "stacked"),
        ("w3a16_g32", "per_expert"),
        ("w8a16_asym", "stacked"),
        ("fp8_dynamic", "per_expert"),
        ("nvfp4", "stacked"),
    ],
)
def test_parts_are_all_layers_once_and_have_the_bytes_of_the_export(scheme, experts, tmp_path, seed):
    source = tiny_checkpoint(tmp_path / "source", "qwen3_moe", seed=seed, wide=True)
    model, quantization = quantized(source, SCHEMES[scheme], experts=experts)
    parts = parts_of(model, quantization, scheme, torch.bfloat16)
    assert sorted(name for part in parts for name in part.layers) == sorted(quantization.layers)
    # q, k and v; o; all experts: of each of two layers.
    assert [len(part.linears) for part in parts[:3]] == [3, 1, len(parts[2].linears)] and len(parts) == 6
    assert all(".experts." in name for name in parts[2].linears)

    export_model(model, quantization, source, tmp_path / "export")
    tensors = read_tensors(tmp_path / "export")
    for part in parts:
        found = {key: one for key, one in tensors.items() if key.rpartition(".")[0] in part.linears}
        bits = 8 * sum(one.nbytes for key, one in found.items() if not key.endswith("weight_shape"))
        assert part.options[scheme].bits == bits and bits > 0
    original = read_tensors(source)
    assert sum(part.weights for part in parts) == sum(
        original[f"{name}.weight"].numel() for part in parts for name in part.linears
    )


def test_divergences_are_those_of_the_logits(monkeypatch, tmp_path, seed):
    """Of sets of layers alone and together, over samples of several lengths, in fp64; nothing is changed by it."""
    monkeypatch.setattr("tools.mixed_precision._TOKENS", 7)
    model, quantization = quantized(tiny_checkpoint(tmp_path, "qwen3", seed=seed, wide=True), SCHEMES["w2a16_g32"])
    model.float()
    layers = list(quantization.layers)
    sets = [layers[:1], random.sample(layers, 3), layers]
    batches = [
        {
            "input_ids": torch.randint(0, 301, (rows, length)),
            "spans": torch.tensor([[row, 0, length] for row in range(rows)]),
        }
        for rows, length in ((2, 33), (1, 8))
    ]
    model.train()
    quantization.set_fake_quant(True, True)
    before = quantization.fake_quant_state()
    found = divergences(model, quantization, sets, batches, CPU)
    assert quantization.fake_quant_state() == before and model.training
    model.eval()
    tokens = 2 * 33 + 8
    for names, value in zip(sets, found, strict=True):
        expected = 0.0
        for batch in batches:
            logits = []
            for on in ([], names):
                quantization.set_fake_quant(False, False)
                for name in on:
                    quantization.set_fake_quant(True, True, name.replace(".", r"\."))
                with torch.no_grad():
                    logits.append(model(input_ids=batch["input_ids"]).logits.double().log_softmax(-1))
            expected += float((logits[0].exp() * (logits[0] - logits[1])).sum())
        assert expected > 0
        assert value == pytest.approx(expected / tokens, rel=1e-3)
