"""Ways of handing over scales of something else: each is an error that names the layer, or changes no number.

A model with rows of unequal size is exported as a scheme says, its files are changed, and its scales are read back into
the same weights. ``alone`` keeps scales and nothing else, as another program may write them.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.ranks import RankError
from model.scales import load_scales
from quant import SCHEMES, Rule, Scheme
from quant.spec import PRESETS
from tests.lib.patience import ends
from tests.lib.thinned import thinned
from tests.lib.tiny import tiny_checkpoint
from tests.unit.model.scales.files import (
    ASYM,
    LAYER,
    Files,
    alone,
    both,
    checkpoint,
    codes,
    each,
    exported,
    modelopt,
    no_config,
    put,
    quantized,
    read,
    scales_of,
    second_scale,
    set_config,
    set_weights,
    shifted,
    swap,
    swapped_bytes,
    transposed,
    without,
)

Q, K, V, GATE, UP = (
    f"{LAYER}.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
)
SCALE = f"{Q}.weight_scale"
FIT = r"weight_scale: (scales are .* those of the weights themselves|the codes)"
CODES = r"weight_scale: the codes"
SCHEME = r"config.json says .*, but scheme .* has .*_proj"

# name: scheme of the files, scheme of the model (the same if None), the change, the error.
WAYS: dict[str, tuple[Scheme | str, Scheme | str | None, Callable[[Files], None], str]] = {
    # The four silent cases (smoothed weights have a test of their own).
    "scales of 4 bits for 2": ("w4a16_g32", "w2a16_g32", lambda files: None, SCHEME),
    "the same, no config": ("w4a16_g32", "w2a16_g32", no_config, "but codes of 2 bits of int are torch.int32"),
    "the same, alone": ("w4a16_g32", "w2a16_g32", alone, FIT),
    "int8 for int4 per channel": ("int8_dynamic", "w4a16_channel", lambda files: None, SCHEME),
    "int8 for int4, alone": ("int8_dynamic", "w4a16_channel", alone, FIT + r".*Probably they are of int8"),
    "g_idx": ("w4a16_g32", None, put(f"{Q}.weight_g_idx", torch.arange(128).flip(0) // 32), "g_idx.*another order"),
    "actorder group": ("w4a16_g32", None, set_weights(actorder="group"), "actorder is 'group'"),
    # Other numbers of bits, formats and groupings.
    "int4 for int8, alone": ("w4a16_channel", "w8a16_channel", alone, FIT + ".*Probably they are of int4"),
    "int3 for int4, alone": ("w3a16_g32", "w4a16_g32", alone, FIT),
    "int4 for int3, alone": ("w4a16_channel", "w3a16_channel", both(alone, each(lambda s: s / 4)), FIT),
    "int8 for fp8, alone": ("w8a16_channel", "fp8_dynamic", both(alone, each(lambda s: s * 127.5 / 57344)), FIT),
    "e4m3 for int8, alone": ("fp8_dynamic", "w8a16_channel", alone, FIT + ".*Probably they are of e4m3"),
    "mxfp4 for int4": ("mxfp4", "w4a16_g32", lambda files: None, SCHEME),
    "symmetric for asymmetric": ("w4a16_g32", ASYM, lambda files: None, SCHEME),
    "group size in the config": ("w4a16_g32", None, set_weights(group_size=64), SCHEME),
    "int8 inputs for fp8": (
        "fp8_static",
        None,
        lambda files: files.config["quantization_config"]["config_groups"]["group_0"].update(
            input_activations={"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}
        ),
        "says int8 per tensor of inputs, but scheme 'fp8_static' has e4m3 per tensor",
    ),
    "codes in e5m2": (
        "fp8_dynamic",
        None,
        lambda files: files.tensors.update({f"{Q}.weight": files.tensors[f"{Q}.weight"].float().to(torch.float8_e5m2)}),
        "q_proj.weight is F8_E5M2",
    ),
    "range of e5m2": ("fp8_dynamic", None, both(alone, each(lambda s: s * 448 / 57344)), FIT + ".*e5m2"),
    # Other numbers for the right weights.
    "times 2": ("w4a16_g32", None, each(lambda s: s * 2), CODES + ".* 2 times"),
    "times 2, alone": ("w8a16_channel", None, both(alone, each(lambda s: s * 2)), FIT + ".*doubled"),
    "times 2, fp8": ("fp8_static", None, each(lambda s: s * 2), CODES + ".* 2 times"),
    "divided by 2": ("w4a16_g32", None, each(lambda s: s / 2), FIT),
    "divided by 2, alone": ("w4a16_g32", None, both(alone, each(lambda s: s / 2)), FIT),
    "reciprocals": ("w4a16_g32", None, both(alone, each(lambda s: 1 / s)), FIT + ".*reciprocals"),
    "reciprocals, fp8": ("fp8_block", None, each(lambda s: 1 / s), FIT),
    "inverse in name and number": (
        "fp8_block",
        None,
        lambda files: [files.tensors.update({f"{key}_inv": 1 / files.tensors.pop(key)}) for key in scales_of(files)],
        FIT,
    ),
    "absmax": ("w4a16_g32", None, both(alone, each(lambda s: s * 7.5)), FIT + ".*not divided"),
    "absmax, fp8": ("fp8_dynamic", None, both(alone, each(lambda s: s * 448)), FIT + ".*not divided"),
    "one scale": ("w4a16_g32", None, lambda f: f.tensors[SCALE].view(-1)[7:8].mul_(4096), FIT + "|1 of 512 scales"),
    "one scale, alone": (
        "w4a16_channel",
        None,
        both(alone, lambda f: f.tensors[SCALE].view(-1)[7:8].mul_(4096)),
        "1 of 128 scales would lose",
    ),
    "signs": ("fp8_dynamic", None, each(lambda s: -s), "must be finite and positive"),
    "signs of integers": ("w4a16_g32", None, each(lambda s: -s), CODES),
    "logarithms": ("w4a16_g32", None, each(lambda s: s.log2()), FIT),
    "logarithms, alone": ("w4a16_g32", None, both(alone, each(lambda s: s.log2())), FIT),
    "logarithms, fp8": ("fp8_block", None, each(lambda s: s.log2()), "must be finite and positive"),
    "exponentials": ("w4a16_g32", None, both(alone, each(lambda s: s.exp())), FIT + "|would lose their weights"),
    "one layer's are 0": ("w4a16_g32", None, lambda f: f.tensors[SCALE].zero_(), "must be finite and not 0"),
    "one layer's are one number": ("w4a16_g32", None, lambda f: f.tensors[SCALE].fill_(0.01), FIT),
    # Clamped: torch 2.13 saturates where it rounds to e4m3, 2.11 makes NaN.
    "one layer's, times 16": (
        "nvfp4",
        None,
        lambda f: f.tensors[SCALE].copy_((f.tensors[SCALE].float() * 16).clamp(max=448)),
        FIT,
    ),
    "divided by 16, alone": ("w8a16_channel", None, both(alone, each(lambda s: s / 16)), FIT),
    "sorted": ("w4a16_channel", None, each(lambda s: s.sort(0).values), FIT),
    "sorted, alone": ("w4a16_channel", None, both(alone, each(lambda s: s.sort(0).values)), FIT),
    # Codes in another order.
    "nibbles swapped": ("nvfp4", None, codes(lambda c: (c << 4) | (c >> 4)), CODES),
    "nibbles swapped, mxfp4": ("mxfp4", None, codes(lambda c: (c << 4) | (c >> 4)), CODES),
    "bytes swapped": (
        "w4a16_g32",
        None,
        codes(swapped_bytes),
        CODES,
    ),
    "codes count from the middle": ("w4a16_g32", None, codes(lambda c: c ^ -0x77777778), CODES),
    "codes in rows of another": ("w4a16_g32", None, codes(lambda c: c.roll(1, 0)), CODES),
    # The right numbers in another place.
    "another layer's": ("w4a16_g32", None, swap(Q, f"{LAYER.replace('0', '1')}.self_attn.q_proj"), CODES),
    "another layer's scales": ("w4a16_g32", None, swap(Q, Q.replace("0", "1"), "_scale"), FIT),
    "another layer's, alone": ("w4a16_g32", None, both(alone, swap(Q, Q.replace("0", "1"))), FIT + ".*another"),
    "another layer's, fp8": ("fp8_dynamic", None, swap(Q, Q.replace("0", "1")), CODES),
    "gate and up swapped": ("w4a16_g32", None, swap(GATE, UP), CODES),
    "gate and up swapped, fp8": ("fp8_static", None, swap(GATE, UP), CODES),
    "k and v swapped": ("w4a16_g32", None, swap(K, V), CODES),
    "scales of k and v swapped": ("w4a16_g32", None, swap(K, V, "_scale"), FIT),
    "scales of k and v swapped, alone": ("w4a16_g32", None, both(alone, swap(K, V)), FIT),
    "scales of k and v swapped, per channel": ("w8a16_channel", None, both(alone, swap(K, V)), FIT),
    "scales of the next row": ("w4a16_channel", None, each(lambda s: s.roll(1, 0)), FIT),
    "scales of the next row, alone": ("w4a16_channel", None, both(alone, each(lambda s: s.roll(1, 0))), FIT),
    "scales of the next group": ("w4a16_g32", None, each(lambda s: s.roll(1, 1)), FIT),
    "groups of 64": ("w4a16_g32", None, both(no_config, each(lambda s: s[:, ::2].contiguous())), "has shape"),
    "groups transposed": ("w4a16_g32", None, transposed, FIT),
    "groups transposed, alone": ("w4a16_g32", None, both(alone, transposed), FIT),
    "groups in reverse": ("w4a16_g32", None, both(alone, each(lambda s: s.flip(1))), FIT),
    "rows in reverse": ("w4a16_g32", None, each(lambda s: s.flip(0)), FIT),
    "blocks transposed": ("nvfp4", None, transposed, FIT),
    # Zero points.
    "zero points off by 8": (ASYM, None, shifted(8), FIT),
    "zero points off by 8, alone": (ASYM, None, both(shifted(8), alone), FIT),
    "zero points off by 1": (ASYM, None, shifted(1), CODES),
    "zero points off by 2": (ASYM, None, shifted(2), CODES),
    # Second scales and exponents.
    "no global scale": ("nvfp4", None, without(".weight_global_scale"), "no weight_global_scale beside"),
    "global scale inverted": ("nvfp4", None, second_scale, FIT),
    "global scale twice": ("nvfp4", None, lambda f: [f.tensors[k].mul_(8) for k in scales_of(f, "l_scale")], FIT),
    "exponents without a bias": ("mxfp4", None, each(lambda s: (s - 127) % 256), FIT + "|must be finite"),
    "exponents off by one": ("mxfp4", None, each(lambda s: s + 1), CODES + ".* 2 times"),
    "exponents off by one, alone": ("mxfp4", None, both(alone, each(lambda s: s + 1)), FIT),
    # What lies beside.
    "smoothing scales": ("w4a16_g32", None, put(f"{Q}.pre_quant_scale", torch.ones(128)), "weights were smoothed"),
    "something unknown": ("w4a16_g32", None, put(f"{Q}.weight_offset", torch.ones(1)), "not known here"),
    "awq": ("w4a16_g32", None, set_config(quant_method="awq"), "quant_method is 'awq', whose scales are not read"),
    "groups of text": ("w4a16_g32", None, set_config(config_groups="x"), r"config.json: .*config_groups: x, expected"),
    "a group of a number": ("w4a16_g32", None, set_config(config_groups={"a": 1.5}), r"config.json: .*config_groups"),
    "ignore of lists": ("w4a16_g32", None, set_config(ignore=[["x"]]), r"config.json: .*ignore: \[\['x'\]\], expected"),
    "ignore without end": ("w4a16_g32", None, set_config(ignore=["re:(a+)+$"]), r"config.json: .*that ends soon"),
    "a list": (
        "w4a16_g32",
        None,
        lambda f: f.config.update(quantization_config=[1]),
        "that is a list, expected an obj",
    ),
    "a text of weights": (
        "w4a16_g32",
        None,
        set_config(config_groups={"a": {"targets": ["Linear"], "weights": "x"}}),
        "config.json: ",
    ),
    "rotated": ("w4a16_g32", None, set_config(transform_config={"R1": {}}), "transform_config is set"),
    "ModelOpt's awq": ("nvfp4", None, modelopt(quant_algo="NVFP4_AWQ"), "quant_algo is 'NVFP4_AWQ'"),
    "ModelOpt's fp8 for nvfp4": ("nvfp4", None, modelopt(quant_algo="FP8"), "says e4m3 per tensor, but scheme 'nvfp4'"),
    "ignored in the config": ("w4a16_g32", None, set_config(ignore=["lm_head", Q]), "says that they are not quantized"),
    "two spellings": ("fp8_block", None, put(f"{Q}.weight_scale_inv", torch.ones(1, 1)), "is there twice"),
    "DeepSeek's blocks": (
        "fp8_block",
        None,
        lambda files: files.config.update(
            quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64], "fmt": "e4m3"}
        ),
        "weight_block_size is",
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def source(kind: str, seed: int = 5) -> Path:
        name = f"{kind}_{seed}"
        if name not in made:
            made[name] = checkpoint(tmp_path_factory.mktemp(name), kind, seed)
        return made[name]

    return source


def named(scheme: Scheme | str) -> Scheme:
    return SCHEMES[scheme] if isinstance(scheme, str) else scheme


@pytest.mark.parametrize("way", WAYS)
def test_scales_of_something_else_are_an_error(way, sources, tmp_path):
    of_files, of_model, change, message = WAYS[way]
    files = exported(sources("qwen3"), named(of_files))
    change(files)
    with pytest.raises(RankError, match=message) as caught:
        read(files, tmp_path / "changed", sources("qwen3"), named(of_model or of_files))
    assert len(str(caught.value).splitlines()) <= 7


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w4a16_asym", "int8_dynamic", "fp8_static", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("what", ["another checkpoint", "smoothed weights"])
def test_scales_of_other_weights_are_an_error(scheme, what, sources, tmp_path):
    """Files that are right in themselves: of a model of the same sizes, and as AWQ leaves them."""
    source = sources("qwen3")
    other = sources("qwen3", 6)
    if what == "smoothed weights":
        tensors = load_file(source / "model.safetensors")
        for key, tensor in tensors.items():
            if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
                factor = torch.exp(0.4 * torch.randn(tensor.shape[1], generator=torch.Generator().manual_seed(1)))
                tensors[key] = (tensor * factor).to(tensor.dtype)
        other = tiny_checkpoint(tmp_path / "smoothed", wide=True)
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    files = exported(other, SCHEMES[scheme])
    expected = "smoothed" if what == "smoothed weights" else "of other weights than those of model.path"
    with pytest.raises(RankError, match=expected) as caught:
        read(files, tmp_path / "changed", source, SCHEMES[scheme])
    assert SCALE in str(caught.value)


@pytest.mark.parametrize("form", ["per_expert", "stacked"])
@pytest.mark.parametrize("scheme", ["w4a16_g32", "fp8_static", "fp8_block"])
def test_permuted_experts_are_named(form, scheme, sources, tmp_path):
    """Of a stack too, in which a sum over all experts would show next to nothing."""
    source = sources("qwen3_moe")
    files = exported(source, SCHEMES[scheme])
    experts = f"{LAYER}.mlp.experts"
    swap(f"{experts}.1.down_proj", f"{experts}.3.down_proj")(files)
    with pytest.raises(RankError, match=CODES) as caught:
        read(files, tmp_path / "changed", source, SCHEMES[scheme], form=form)
    assert sorted(line.split(":")[0] for line in str(caught.value).splitlines()[1:]) == [
        f"{experts}.{index}.down_proj.weight_scale" for index in (1, 3)
    ]


def test_a_mixed_recipe_is_compared_layer_by_layer(sources, tmp_path):
    """The files of a recipe with rules go with these rules, and not with one scheme for all."""
    rules = {"rules": (Rule(SCHEMES["w8a16_g32"], r".*\.down_proj"), Rule(None, r".*\.o_proj"))}
    files = exported(sources("qwen3"), SCHEMES["w4a16_g32"], **rules)
    read(files, tmp_path / "changed", sources("qwen3"), SCHEMES["w4a16_g32"], **rules)
    with pytest.raises(RankError, match=r"says int8 in groups of 32, but scheme 'w4a16_g32' has int4.*down_proj"):
        read(files, tmp_path / "changed", sources("qwen3"), SCHEMES["w4a16_g32"])


EXPERTS = ("fp8_static_kv", "fp8_block", "int8_dynamic", "w4a16_g32", "w4a16_asym", "w2a16_g32", "nvfp4", "mxfp4")


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [*thinned(("qwen3", name) for name in [*SCHEMES, "fp8_static_kv"]), *(("qwen3_moe", name) for name in EXPERTS)],
)
def test_own_exports_are_read_back(kind, scheme, sources, tmp_path):
    """With codes and without, in this project's layouts."""
    preset = PRESETS[scheme]
    options = {"kv_cache": preset.kv_cache, "form": "stacked" if kind == "qwen3_moe" else "per_expert"}
    files = exported(sources(kind), preset.linear, **options)
    read(files, tmp_path / "changed", sources(kind), preset.linear, **options)
    alone(files)
    read(files, tmp_path / "changed", sources(kind), preset.linear, **options)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_pipe_among_the_files_is_named(make, sources, tmp_path):
    make(tmp_path / "x.safetensors")
    model, quantization = quantized(sources("qwen3"), SCHEMES["fp8_static"])
    with ends(make), pytest.raises(RankError, match=r"x.safetensors: expected a safetensors file, found something"):
        load_scales(model, quantization, tmp_path)
