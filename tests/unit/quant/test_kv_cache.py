"""Fake quant of keys and values against a cache that quantizes by the reference; switches, observers, refusals."""

import re

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    Gemma3nTextConfig,
    MambaConfig,
)

from engine.session.optimizer import classify
from quant import prepare
from quant.kv_cache import attach_kv_cache
from quant.observers import Observer
from quant.reference import inside_range
from quant.spec import PRESETS
from tests.unit.quant.kv_models import (
    FAMILIES,
    LAYERS,
    SIZE,
    SPEC,
    attach,
    build,
    record_inputs,
    reference_cache,
    switch,
    tokens,
)

SMALL = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0}
REFUSED = {
    "falcon": (FalconConfig, {}, "self_attention (FalconAttention)"),
    "bloom": (BloomConfig, {}, "self_attention (BloomAttention)"),
    "mamba": (MambaConfig, {}, "MambaForCausalLM"),
    "deepseek_v3": (DeepseekV3Config, {"kv_lora_rank": 16, "q_lora_rank": 16}, "latent"),
    "gemma3n": (
        Gemma3nTextConfig,
        {
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention"] * 2,
            "intermediate_size": 32,
            "vocab_size_per_layer_input": 64,
        },
        "another layer",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_reads_what_a_quantized_cache_would_hold(family, seed):
    """Bit for bit: the same kernels get the same keys and values. In one pass, and token by token from a cache."""
    for attention in ("eager",) if family == "gemma2" else ("eager", "sdpa"):
        model, ids = build(family, attention), tokens()
        caches = attach(model)
        names = [f"model.layers.{layer}.self_attn.{kind}_cache" for layer in range(LAYERS) for kind in "kv"]
        assert list(caches) == names and all(model.get_submodule(name) is caches[name] for name in names)
        with torch.no_grad():
            ours = model(ids, use_cache=False).logits
            switch(caches, False)
            plain, cached = model(ids, use_cache=False).logits, reference_cache(model, caches)
            assert torch.equal(ours, model(ids, past_key_values=cached).logits)
            assert (ours - plain).abs().max() > 1e-3, "nothing was quantized"
            steps = [model(ids[:, i : i + 1], past_key_values=cached).logits for i in range(3)]
            switch(caches, True)
            own = DynamicCache(config=model.config)
            assert torch.equal(ours, model(ids, past_key_values=own).logits)
            for i, expected in enumerate(steps):
                assert torch.equal(model(ids[:, i : i + 1], past_key_values=own).logits, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_cache_packing_and_padding_give_each_sample_its_own_logits(attention, seed):
    """GEMMs of other shapes may sum in another order, which moves a code of a few thousand here and there: compared
    with what quantization as a whole changes."""
    model = build("qwen3", attention)
    samples = [tokens(1, length) for length in (5, 11, 8)]
    caches = attach(model)
    with torch.no_grad():
        alone = [model(sample, use_cache=False).logits[0] for sample in samples]
        positions = torch.cat([torch.arange(sample.shape[1]) for sample in samples])[None]
        packed = model(torch.cat(samples, 1), position_ids=positions, use_cache=False).logits[0].split((5, 11, 8))
        rows = torch.zeros(3, 11, dtype=torch.long)
        mask = torch.zeros_like(rows)
        for row, sample in enumerate(samples):
            rows[row, : sample.shape[1]], mask[row, : sample.shape[1]] = sample, 1
        padded = model(rows, attention_mask=mask, use_cache=False).logits
        grown, steps = DynamicCache(config=model.config), []
        for part in samples[1].split((4, 1, 5, 1), 1):
            steps.append(model(part, past_key_values=grown).logits[0])
        switch(caches, False)
        for row, (ours, sample) in enumerate(zip(alone, samples, strict=True)):
            effect = (model(sample, use_cache=False).logits[0] - ours).norm()
            assert (packed[row] - ours).norm() < 0.1 * effect
            assert (padded[row, : sample.shape[1]] - ours).norm() < 0.1 * effect
            assert row != 1 or (torch.cat(steps) - ours).norm() < 0.1 * effect


def test_switched_off_the_model_is_as_it_was_and_learned_scales_get_zeros(seed):
    model, ids = build("qwen3", "sdpa"), tokens()
    plain = model(ids, use_cache=False).logits
    caches = attach(model)
    switch(caches, False)
    logits = model(ids, use_cache=False).logits
    assert torch.equal(logits, plain)
    logits.sum().backward()
    assert all(cache.input_theta.grad.tolist() == [0] for cache in caches.values())


def test_observers_see_keys_after_their_rotation_and_count_what_is_clipped(seed):
    model, ids = build("qwen3", "sdpa"), tokens()
    caches = attach(model)
    seen = record_inputs(caches)
    for cache in caches.values():
        cache.input_observer = Observer(SPEC)
    with torch.no_grad():
        held = DynamicCache(config=model.config)
        model(ids, past_key_values=held)
    clipped = 0
    for index, (name, cache) in enumerate(caches.items()):
        layer = held.layers[index // 2]
        assert torch.equal(seen[name], (layer.keys, layer.values)[index % 2])
        assert cache.input_observer.absmax == seen[name].abs().max()
        outside = ~inside_range(seen[name], cache.input_scale(), SPEC)
        assert cache.input_observer.clipped == outside.sum()
        clipped += int(outside.sum())
    assert clipped > 0


def test_prepare_switches_and_watches_keys_and_values_as_inputs(seed):
    """Alone, and beside layers: their scale groups are the last of the inputs', their switch is that of activations."""
    learn = {"learn_weight_scale": False, "learn_input_scale": True}
    for preset in (PRESETS["fp8_kv"], PRESETS["fp8_static_kv"]):
        model = build("qwen3")
        quantization = prepare(model, preset.linear, kv_cache=preset.kv_cache, **learn)
        caches = quantization.caches
        assert [group.owner for group in quantization.input_groups][-len(caches) :] == list(caches)
        assert len(caches) == 2 * LAYERS and bool(quantization.layers) == (preset.linear is not None)
        for group in quantization.input_groups[-len(caches) :]:
            assert group.members == [group.owner] and group.spec == SPEC
            assert group.s0 is caches[group.owner].input_s0 and group.theta is caches[group.owner].input_theta

        def on(caches=caches):
            return [cache.input_fake_quant for cache in caches.values()]

        quantization.set_fake_quant(True, False)
        assert on() == [False] * 4
        quantization.set_fake_quant(False, True, r".*\.1\.self_attn\.(k|v)_cache")
        state = quantization.fake_quant_state()
        assert on() == [False, False, True, True] and [state[name] for name in caches] == [(False, one) for one in on()]
        quantization.set_fake_quant(True, True)
        quantization.restore_fake_quant(state)
        assert quantization.fake_quant_state() == state
        quantization.observe(True)
        assert quantization.observing and all(cache.input_observer is not None for cache in caches.values())
        quantization.set_fake_quant(False, False)
        model(tokens(), use_cache=False)
        assert all(group.observer.absmax > 0 for group in quantization.input_groups)
        quantization.observe(False)
        assert not quantization.observing
        kinds = {owned.name: owned.kind for owned in classify(model) if "_cache." in owned.name}
        assert kinds == {f"{name}.input_s0": "frozen" for name in caches} | {
            f"{name}.input_theta": "act_scale" for name in caches
        }
    with pytest.raises(ValueError, match="nothing to quantize"):
        prepare(build("qwen3"), None, **learn)


def test_flash_attention_finds_its_kernel_by_the_name_it_was_asked_for(seed):
    """With a stand-in for the kernels, which need a GPU: it looks at what transformers' flash attention looks at."""

    def head_proxy(module, query, key, value, attention_mask, **kwargs):
        assert module.config._attn_implementation == "flash_attention_9" and module.config.head_dim == SIZE
        assert module.is_causal and not module.training and attention_mask is None
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("flash_attention_9", head_proxy)
    AttentionMaskInterface.register("flash_attention_9", AttentionMaskInterface()["flash_attention_2"])
    model, same, ids = build("qwen3", "sdpa"), build("qwen3", "sdpa"), tokens()
    same.load_state_dict(model.state_dict())
    model.config._attn_implementation = "flash_attention_9"
    caches, others = attach(model), attach(same)
    for ours, theirs in zip(caches.values(), others.values(), strict=True):
        theirs.load_state_dict(ours.state_dict())
    assert torch.equal(model(ids, use_cache=False).logits, same(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_cache_is_another_are_refused_by_name(family):
    config, extra, named = REFUSED[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(**SMALL, **extra), attn_implementation="eager")
    with pytest.raises(ValueError, match=re.escape(named)):
        attach_kv_cache(model, SPEC, learn=False)
    assert model.config._attn_implementation == "eager"


def test_scales_that_a_cast_has_rounded_are_refused():
    model = build("qwen3")
    attach(model)
    with pytest.raises(TypeError, match=r"input_s0 is torch\.bfloat16"):
        model.bfloat16()(tokens())
