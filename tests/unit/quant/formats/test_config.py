"""quantization_config there and back, as compressed-tensors matches names and as vLLM does."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match, match_targets
from transformers.integrations.compressed_tensors import get_dense_scheme, get_experts_scheme

from quant.formats.config_groups import ignore_patterns, kv_cache_from_config, quantization_config, rules_from_config
from quant.spec import PRESETS, SCHEMES, Scheme, TensorSpec

LINEAR = torch.nn.Linear(1, 1)
ROUTERS = [f"model.layers.{i}.mlp.gate" for i in range(12)]


def read(config: dict, name: str) -> Scheme | None:
    """The scheme of a Linear of that name."""
    return next((rule.scheme for rule in rules_from_config(config) if rule.matches(name, 0)), None)


@pytest.mark.parametrize("preset", PRESETS)
def test_config_there_and_back(preset):
    """Through JSON, through compressed-tensors' own class, and with the further keys that other writers leave."""
    scheme, kv_cache = PRESETS[preset].linear, PRESETS[preset].kv_cache
    layers = {} if scheme is None else {"model.layers.0.mlp.up_proj": scheme}
    skipped = ["lm_head"] if scheme is not None else ["lm_head", "model.layers.0.mlp.up_proj"]
    config = json.loads(json.dumps(quantization_config(layers, ignore_patterns(skipped, layers), kv_cache)))
    theirs = QuantizationConfig(**config)
    again = json.loads(json.dumps(theirs.to_dict(), default=str))
    for each in (config, again):
        assert read(each, "model.layers.0.mlp.up_proj") is scheme
        assert read(each, "lm_head") is None
        assert kv_cache_from_config(each) == kv_cache
    formats = {group.format for group in theirs.config_groups.values()}
    assert theirs.format == (formats.pop() if formats else "dense")


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        (TensorSpec("int", 5, "channel"), "w5a16_channel"),
        (TensorSpec("int", 4, "group", 64), "w4a16_g64"),
        (TensorSpec("int", 3, "group", 32, symmetric=False), "w3a16_g32_asym"),
    ],
)
def test_numerics_without_a_preset_have_a_name_that_says_what_they_are(weights, name):
    assert read(quantization_config({"a": Scheme("mine", weights)}, []), "a") == Scheme(name, weights)


def test_fp8_config_is_the_one_that_was_verified():
    """Key for key the configuration that transformers and vLLM's loading code were seen to accept."""
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    layers = {"model.layers.0.mlp.up_proj": SCHEMES["fp8_static"]}
    group = {"weights": fp8, "input_activations": fp8, "output_activations": None}
    assert quantization_config(layers, ["lm_head", r"re:.*mlp\.gate$"], SCHEMES["fp8_static"].weights) == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "format": "float-quantized", **group}},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": fp8,
    }


def test_arguments_are_those_of_compressed_tensors_presets():
    """Weights and inputs of the schemes that compressed-tensors has under a name of its own, but for what steers
    calibration only."""
    names = "fp8_static=FP8 fp8_dynamic=FP8_DYNAMIC fp8_block=FP8_BLOCK int8_dynamic=W8A8 w4a16_g128=W4A16 "
    names += "w2a16_g128=W2A16 w4a8_int8=W4A8 w4a8_fp8=W4AFP8 nvfp4=NVFP4A16 nvfp4_w4a4=NVFP4 mxfp4=MXFP4A16 "
    for ours, theirs in (pair.split("=") for pair in (names + "mxfp4_w4a4=MXFP4 mxfp8=MXFP8").split()):
        named = QuantizationConfig(config_groups={theirs: ["Linear"]}).config_groups[theirs]
        written = QuantizationConfig(**quantization_config({"a": SCHEMES[ours]}, [])).config_groups["group_0"]
        for side in ("weights", "input_activations"):
            pair = [getattr(group, side) for group in (named, written)]
            steering = {"observer", "observer_kwargs", "zp_dtype"}
            one, other = (None if each is None else each.model_dump(exclude=steering) for each in pair)
            assert one == other, (ours, side)


def mixed_model(depth: int = 12) -> dict[str, Scheme]:
    """Fp8 in the first two layers and the last, int4 elsewhere, 2-bit experts but for two layers, lm_head in int8."""
    layers = {}
    for i in range(depth):
        outer = SCHEMES["fp8_dynamic" if i < 2 or i == depth - 1 else "w4a16_g32"]
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layers[f"model.layers.{i}.self_attn.{leaf}"] = outer
        experts = SCHEMES["w4a16_g32" if i in (3, 10) else "w2a16_g32"]
        for expert in range(3):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                layers[f"model.layers.{i}.mlp.experts.{expert}.{leaf}"] = experts
    return layers | {"lm_head": SCHEMES["w8a16_channel"]}


def test_mixed_schemes_give_groups_that_no_reader_confuses():
    """Every layer is matched by its own group's targets and by no other's, as a module of its own and as part of a
    fused one; and no target is a class, which vLLM would take for a fused layer before its names."""
    layers = mixed_model()
    skipped = [f"model.layers.{i}.mlp.{leaf}" for i in range(12) for leaf in ("shared_expert_gate", "up_proj")]
    ignore = ignore_patterns(["embed_tokens", *skipped], layers, ROUTERS)
    assert ignore == [
        r"re:.*mlp\.gate$",
        "embed_tokens",
        r"re:model\.layers\.\d+\.mlp\.shared_expert_gate$",
        r"re:model\.layers\.\d+\.mlp\.up_proj$",
    ]
    config = json.loads(json.dumps(quantization_config(layers, ignore)))
    assert config["format"] == "mixed-precision"
    groups = QuantizationConfig(**config).config_groups
    assert len(groups) == 4
    for name, scheme in layers.items():
        matching = [group for group in groups.values() if match_targets(name, LINEAR, group.targets)]
        assert len(matching) == 1, name
        assert read(config, name) is scheme
        assert not is_match(name, LINEAR, ignore)
    assert all(is_match(name, LINEAR, ignore) for name in (*ROUTERS, *skipped))
    targets = [target for group in groups.values() for target in group.targets]
    assert all((target.startswith("re:") and target.endswith("$")) or target == "lm_head" for target in targets)
    # vLLM asks for the experts of a layer by names that need not be in the file, and once for all projections.
    for i in range(12):
        found = {read(config, f"model.layers.{i}.mlp.experts.0.{leaf}_proj") for leaf in ("gate", "up", "down")}
        assert found == {layers[f"model.layers.{i}.mlp.experts.1.up_proj"]}
    # transformers takes the first group with "experts" in a pattern for the experts.
    assert any("experts" in target for target in targets)
    assert len(targets) < 16


@pytest.mark.parametrize("anywhere", [False, True])
def test_shared_experts_are_not_taken_for_the_experts(anywhere):
    """transformers decodes all experts with the first group that has "experts" in a pattern."""
    layers = {}
    for i in range(3):
        parent = f"model.layers.{i}.mlp"
        layers |= {f"{parent}.shared_experts.{leaf}_proj": SCHEMES["w4a16_g32"] for leaf in ("gate", "up")}
        layers |= {f"{parent}.experts.{expert}.up_proj": SCHEMES["w8a16_g32"] for expert in range(2)}
    config = quantization_config(layers, [], anywhere=anywhere)
    assert get_experts_scheme(QuantizationConfig(**config)).weights.num_bits == 8
    assert get_dense_scheme(QuantizationConfig(**config)).weights.num_bits == 4
    assert all(read(config, name) is scheme for name, scheme in layers.items())


def test_experts_of_one_layer_with_several_schemes_and_modules_that_are_no_linear_to_vllm_are_named():
    layers = {f"model.layers.{i}.mlp.experts.{e}.up_proj": SCHEMES["w4a16_g32"] for i in range(2) for e in range(2)}
    config = quantization_config({**layers, "lm_head": SCHEMES["w4a16_g32"]}, [], no_linears=["lm_head"])
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    assert read(config, "lm_head") is SCHEMES["w4a16_g32"]
    layers["model.layers.1.mlp.experts.1.up_proj"] = SCHEMES["w2a16_g32"]
    config = quantization_config(layers, [])
    assert all(read(config, name) is scheme for name, scheme in layers.items())


@pytest.mark.parametrize("others", ["w4a16_g32", "w2a16_g32"])
def test_embeddings_are_targeted_by_class_too(others):
    layers = {"model.layers.0.mlp.up_proj": SCHEMES[others], "model.embed_tokens": SCHEMES["w4a16_g32"]}
    config = quantization_config(layers, [], no_linears=["model.embed_tokens"], embedding=SCHEMES["w4a16_g32"])
    (targets,) = (group["targets"] for group in config["config_groups"].values() if group["weights"]["num_bits"] == 4)
    assert targets[-1] == "Embedding" and any("embed_tokens" in target for target in targets[:-1])
    assert all(read(config, name) is scheme for name, scheme in layers.items())


def test_a_moe_with_nothing_but_a_quantized_cache_has_a_group():
    """transformers looks for the experts' group without asking whether there is any."""
    experts, cache = [f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(2)], SCHEMES["fp8_static"].weights
    config = quantization_config({}, ignore_patterns([*experts, "lm_head"], []), cache)
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]
    assert all(read(config, name) is None for name in experts)
    assert kv_cache_from_config(config) == cache
    config["kv_cache_scheme"] |= {"type": "int"}
    with pytest.raises(ValueError, match=r"kv_cache_scheme is .*int"):
        kv_cache_from_config(config)


def test_what_other_writers_leave_is_read():
    """Names before patterns before classes, whatever the order of the groups; old spellings."""
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "weight"}
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    named = {"targets": ["re:.*q_proj", "model.layers.0.mlp.up_proj"], "format": "naive-quantized"}
    groups = {
        "a": {"weights": group, "targets": ["Linear"], "format": "pack-quantized"},
        "b": {"weights": block, "input_activations": inputs, **named},
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*layers.1.*"]}
    expected = {
        "model.layers.0.self_attn.q_proj": SCHEMES["fp8_block"],
        "model.layers.0.self_attn.q_proj.base": SCHEMES["fp8_block"],
        "model.layers.0.mlp.up_proj": SCHEMES["fp8_block"],
        "model.layers.0.mlp.up_proj.base": SCHEMES["w4a16_g32"],
        "model.layers.1.self_attn.q_proj": None,
    }
    assert {name: read(config, name) for name in expected} == expected


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, g: c.update(quant_method="fp8"), "quant_method is 'fp8'"),
        (lambda c, g: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "has format 'sparse-24-bitmask' and"),
        (
            lambda c, g: c.update(sparsity_config={"sparsity_structure": "2:4"}),
            "sparsity_structure '2:4', expected",
        ),
        (lambda c, g: g.update(targets=["Embedding"]), f"{GROUP}.targets has 'Embedding', expected 'Linear'"),
        (lambda c, g: c["config_groups"].update(again=g), "'Linear', which another group has too: keep one"),
        (lambda c, g: g.update(output_activations={}), f"{GROUP}.output_activations is set"),
        (lambda c, g: g.pop("weights"), f"{GROUP}.weights is missing"),
        (lambda c, g: g.update(format="pack-quantized"), f"{GROUP}.format is 'pack-quantized', expected 'float-qu"),
        (lambda c, g: g["weights"].update(symmetric=False), f"{GROUP}.weights: only int codes per channel"),
        (lambda c, g: g["weights"].update(actorder="group"), f"{GROUP}.weights.actorder is 'group', expected None"),
        (lambda c, g: g["weights"].update(num_bits=6), "type 'float' with num_bits 6, expected int, or"),
        (lambda c, g: g["weights"].update(scale_dtype="torch.uint8"), "weights.scale_dtype is 'torch.uint8'"),
        (lambda c, g: g["weights"].update(strategy="block"), "weights.block_structure is None, expected"),
        (lambda c, g: g["weights"].update(strategy="block", block_structure=[1, 128]), r"is \[1, 128\], expected tw"),
        (lambda c, g: g["weights"].update(strategy="block", block_structure=[128.5] * 2), r"is \[128.5, 128.5\], exp"),
        (lambda c, g: g["weights"].update(strategy="attn_head"), "weights.strategy is 'attn_head', expected 'tensor'"),
        (lambda c, g: g["weights"].update(strategy="tensor_group", group_size=32), "strategy is 'tensor_group', exp"),
        (lambda c, g: g["input_activations"].update(dynamic=True), "input_activations: a dynamic scale is per token"),
        (lambda c, g: g["input_activations"].update(dynamic="local"), "input_activations.dynamic is 'local'"),
    ],
)
def test_numerics_that_are_not_ours_are_refused(change, message):
    config = quantization_config({"a": SCHEMES["fp8_static"]}, [])
    change(config, config["config_groups"]["group_0"])
    with pytest.raises(ValueError, match=message):
        rules_from_config(config)
