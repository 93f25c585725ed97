"""Scales on two ranks under ZeRO-3: calibrated, written, read back, measured from partitions, and refused when bad."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.reading import load_recipe
from quant import SCHEMES, Quantization, prepare
from quant.reference import absmax_scale, asymmetric_grid, fake_quant
from quant.spec import PRESETS
from tests.distributed.model.scales.scripts.scales import MEASURED
from tests.lib.launcher import run_ranks
from tests.lib.plain import plain_model, plain_weights
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "scales.py"
RANKS = 2
UNUSED = "model.layers.9.self_attn.k_proj.weight_scale"
KINDS = ("qwen3", "qwen3_moe")
ATTENTION = "model.layers.1.self_attn"
Q, K, V, OUT = (f"{ATTENTION}.{name}_proj" for name in "qkvo")
# How files spell the scales of keys and values, by layer; the first is what we write.
SHAPES: list[tuple[int, ...]] = [(), (1,)]
SPELLINGS = ("{kind}_scale", "{kind}_cache.scale")


def structure(model: Path) -> Quantization:
    """The layers and groups of a checkpoint, in one process."""
    preset = PRESETS["fp8_static_kv"]
    return prepare(
        plain_weights(str(model), "per_expert"),
        preset.linear,
        kv_cache=preset.kv_cache,
        learn_weight_scale=True,
        learn_input_scale=False,
    )


def key_of(member: str, what: str, spelling: str | None = None) -> str:
    """The key of a member's weight or input scale; of keys and values, spelled as we do or as in that layer's file."""
    path, _, leaf = member.rpartition(".")
    if not leaf.endswith("_cache"):
        return f"{member}.{what}_scale"
    return f"{path}.{(spelling or SPELLINGS[int(path.split('.')[2])]).format(kind=leaf[0])}"


def random_scales(quantization: Quantization) -> dict[str, torch.Tensor]:
    """A scale for every layer's weight (one that fits it) and input, none like another, of shape ``()`` or ``[1]``."""
    scales = {}
    for name, layer in quantization.layers.items():
        own = layer.weight.detach().float().abs().max() / 448
        scales[f"{name}.weight_scale"] = own * (0.9 + torch.rand(random.choice(SHAPES)))
        scales[f"{name}.input_scale"] = torch.rand(random.choice(SHAPES)) + 0.01
    return scales | {key_of(name, "input"): torch.rand(random.choice(SHAPES)) + 0.01 for name in quantization.caches}


def write_case(directory: Path, name: str, scales: dict[str, torch.Tensor], **arguments: object) -> None:
    """A PTQ checkpoint of two files, and how it is read."""
    case = directory / name
    case.mkdir(parents=True)
    (case / "arguments.json").write_text(json.dumps(arguments))
    keys = list(scales)
    for part in range(2):
        save_file({key: scales[key].clone() for key in keys[part::2]}, case / f"model-{part}.safetensors")


def write_cases(directory: Path, quantization: Quantization, scales: dict[str, torch.Tensor]) -> None:
    """Good ones and one of every kind of bad ones."""

    def without(*suffixes: str) -> dict[str, torch.Tensor]:
        return {key: value for key, value in scales.items() if not key.endswith(suffixes)}

    zero_points = {f"{place}_zero_point": torch.zeros(1) for place in (f"{Q}.weight", f"{Q}.input", f"{ATTENTION}.k")}
    weights = {f"{name}.weight": layer.weight.detach().clone() for name, layer in quantization.layers.items()}
    codes = {
        key: (weight.float() / scales[f"{key}_scale"]).clamp(-448, 448).to(torch.float8_e4m3fn)
        for key, weight in weights.items()
    }
    write_case(directory, "good", {**scales, **zero_points, **codes})
    write_case(directory, "good_plain", {**scales, **weights})
    far = {f"{place}.weight_scale": scales[f"{place}.weight_scale"] / 128 for place in (Q, K, V)}
    write_case(directory, "misfit_range", {**scales, **far})
    other = {f"{V}.weight": codes[f"{V}.weight"].view(torch.uint8).flip(0).view(torch.float8_e4m3fn)}
    write_case(directory, "misfit_codes", {**scales, **codes, **other})
    cut = {f"{OUT}.weight": codes[f"{OUT}.weight"][1:]}
    write_case(directory, "misfit_shape", {**scales, **codes, **cut})
    write_case(directory, "missing_weights", without(f"{K}.weight_scale", f"{OUT}.weight_scale"))
    write_case(directory, "missing_inputs", without(f"{OUT}.input_scale"))
    write_case(directory, "missing_caches", without(f"{ATTENTION}.v_cache.scale"))
    write_case(directory, "missing_inputs_initial", without(f"{OUT}.input_scale"), initial_input_scale=0.25)
    write_case(directory, "missing_inputs_calibrated", without(f"{OUT}.input_scale"), inputs_calibrated_later=True)
    write_case(directory, "one_member_has_the_input_scale", without(f"{Q}.input_scale", f"{V}.input_scale"))
    bad = {
        "zero_point": {f"{K}.weight_zero_point": torch.ones(1)},
        "cache_zero_point": {f"{ATTENTION}.v_zero_point": torch.ones(1)},
        "cache_per_head": {f"{ATTENTION}.k_scale": torch.ones(2, 1, 1)},
        "nan": {f"{K}.weight_scale": torch.tensor([torch.nan])},
        "infinite": {f"{K}.input_scale": torch.tensor([torch.inf])},
        "zero": {f"{K}.input_scale": torch.tensor(0.0)},
        "negative": {f"{K}.weight_scale": torch.tensor(-1.0)},
        "shape": {f"{K}.weight_scale": torch.ones(16, 1)},
    }
    for name, wrong in bad.items():
        write_case(directory, f"bad_{name}", {**scales, **wrong})
    write_case(directory, "bad_damaged", scales)
    file = directory / "bad_damaged" / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    write_case(directory, "bad_none", {"model.norm.weight": torch.ones(48)})
    write_case(directory, "bad_names", {f"transformer.{key}": value for key, value in scales.items()})
    write_case(directory, "unused", {**scales, UNUSED: torch.ones(1)})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """One launch: dense and MoE calibrated, every case read, weights measured."""
    seed = random.randrange(2**31)
    directory = tmp_path_factory.mktemp("scales")
    data = write_chats(directory / "chats.jsonl")
    for kind in KINDS:
        model = tiny_checkpoint(directory / kind, kind, seed=seed)
        write_recipe(
            directory,
            f"calibrate_{kind}",
            model,
            data,
            stage=3,
            dtype="float32",
            model={"path": str(model), "experts": "per_expert"},  # where every scale is a key of its own
            quant={"scheme": "fp8_static_kv"},
            loss={"kd_weight": 0.0, "teacher": None},
        )
        quantization = structure(model)
        scales = random_scales(quantization)
        save_file(scales, directory / f"scales_{kind}.safetensors")
        write_cases(directory / "cases" / kind, quantization, scales)
        (directory / "measured" / kind).mkdir(parents=True)
    run_ranks(SCRIPT, str(directory))
    return directory


def case(base: Path, kind: str, name: str) -> dict:
    """What both ranks got of a case, which must be the same."""
    found = [torch.load(base / "cases" / kind / f"{name}_{rank}.pt", weights_only=True) for rank in range(RANKS)]
    assert found[0].keys() == found[1].keys() and found[0].get("error") == found[1].get("error")
    assert all(torch.equal(value, found[1]["scales"][key]) for key, value in found[0]["scales"].items())
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_finds_the_scales_of_one_process_and_reading_back_changes_no_bit(base, kind):
    recipe = load_recipe(base / f"calibrate_{kind}.yaml")
    _, expected = plain_model(recipe)
    disk = load_file(recipe.export_dir() / "model.safetensors")
    back = [torch.load(base / f"read_back_{kind}_{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for groups, what in ((expected.weight_groups, "weight"), (expected.input_groups, "input")):
        for group in groups:
            written = [disk[key_of(member, what, SPELLINGS[0])] for member in group.members]
            assert all(value.shape == (1,) and value.dtype == torch.float32 for value in written)
            assert all(torch.equal(value, written[0]) for value in written)
            assert all(torch.equal(scales[f"{group.owner}.{what}"], written[0]) for scales in back)
            # Weights are the same numbers; inputs come from GEMMs, whose order of sums may differ.
            rtol = 0 if what == "weight" else 1e-5
            torch.testing.assert_close(written[0], group.s0.detach(), rtol=rtol, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_take_the_largest_scale_of_their_members_whatever_its_shape(base, kind):
    found, scales = case(base, kind, "good"), load_file(base / f"scales_{kind}.safetensors")
    quantization = structure(base / kind)
    for groups, what in ((quantization.weight_groups, "weight"), (quantization.input_groups, "input")):
        for group in groups:
            expected = max(float(scales[key_of(member, what)]) for member in group.members)
            assert found["scales"][f"{group.owner}.{what}"].tolist() == [expected]
    assert found["report"]["weights_measured"] == found["report"]["inputs_missing"] == []
    assert len(found["report"]["weights_loaded"]) == len(quantization.weight_groups)
    more = case(base, kind, "unused")
    assert UNUSED in more["summary"] and all(
        torch.equal(more["scales"][key], found["scales"][key]) for key in more["scales"]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_weight_scale_is_measured_for_its_whole_group_and_listed(base, kind):
    found, good = case(base, kind, "missing_weights"), case(base, kind, "good")["scales"]
    assert found["report"]["weights_measured"] == [Q, OUT]
    assert Q in found["summary"] and OUT in found["summary"]
    weights = load_file(base / kind / "model.safetensors")
    for owner, members in ((Q, (Q, K, V)), (OUT, (OUT,))):
        absmax = max(float(weights[f"{member}.weight"].abs().max()) for member in members)
        expected = absmax_scale(torch.tensor([absmax]), SCHEMES["fp8_static"].weights)
        assert torch.equal(found["scales"].pop(f"{owner}.weight"), expected)
    assert all(torch.equal(value, good[key]) for key, value in found["scales"].items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_input_scale_is_an_error_unless_there_is_another_source(base, kind):
    error = case(base, kind, "missing_inputs")["error"]
    assert OUT in error and "quant.initial_input_scale" in error and "quant.calibration_batches" in error
    assert Q not in error
    error = case(base, kind, "missing_caches")["error"]
    assert f"{ATTENTION}.v_cache" in error and f"{ATTENTION}.k_cache" not in error
    initial = case(base, kind, "missing_inputs_initial")
    assert initial["scales"][f"{OUT}.input"].tolist() == [0.25] and initial["report"]["inputs_initial"] == [OUT]
    later = case(base, kind, "missing_inputs_calibrated")
    assert later["report"]["inputs_missing"] == [OUT] and OUT not in later["report"]["inputs_loaded"]
    scales = load_file(base / f"scales_{kind}.safetensors")
    shared = case(base, kind, "one_member_has_the_input_scale")["scales"][f"{Q}.input"]
    assert shared.tolist() == [float(scales[f"{K}.input_scale"])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("zero_point", (f"{K}.weight_zero_point", "symmetric")),
        ("cache_zero_point", (f"{ATTENTION}.v_zero_point", "symmetric")),
        ("cache_per_head", (f"{ATTENTION}.k_scale", "(2, 1, 1)")),
        ("nan", (f"{K}.weight_scale", "nan")),
        ("infinite", (f"{K}.input_scale", "inf")),
        ("zero", (f"{K}.input_scale", "positive")),
        ("negative", (f"{K}.weight_scale", "positive", "-1")),
        ("shape", (f"{K}.weight_scale", "(16, 1)")),
        ("names", ("transformer.model.layers.0", "model.layers.0", "bad_names")),
        ("damaged", ("model-1.safetensors", "not a whole")),
        ("none", ("bad_none", "weight_scale")),
    ],
)
def test_bad_scales_are_refused_on_every_rank_and_nothing_is_written(base, kind, name, named):
    found = case(base, kind, f"bad_{name}")
    assert all(part in found["error"] for part in named), found["error"]
    assert found["unchanged"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("range", (f"{K}.weight_scale: scales are", "the squared error would be", "Probably they are")),
        ("codes", (f"{V}.weight_scale: the codes beside it are of other weights",)),
        ("shape", (f"{OUT}.weight is F8_E4M3", "of another scheme")),
    ],
)
def test_scales_of_other_weights_are_refused_on_every_rank_and_nothing_is_written(base, kind, name, named):
    """No rank holds a whole weight here; the text is one, on both."""
    found = case(base, kind, f"misfit_{name}")
    assert all(part in found["error"] for part in named), found["error"]
    assert not re.search(r"^rank \d", found["error"])  # both found the same
    assert found["unchanged"]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_weights_beside_scales_are_compared_too(base, kind):
    found, good = case(base, kind, "good_plain")["scales"], case(base, kind, "good")["scales"]
    assert all(torch.equal(value, found[key]) for key, value in good.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MEASURED)
def test_scales_measured_from_partitions_are_those_of_the_whole_weights(base, kind, name):
    spec = MEASURED[name].weights
    found = [
        torch.load(base / "measured" / kind / f"measured_{name}_{rank}.pt", weights_only=True) for rank in range(2)
    ]
    assert len(found[0]) > 5
    for owner, (scale, weights) in found[0].items():
        assert torch.equal(scale, found[1][owner][0])
        whole = [weight.float() for weight in weights]
        if spec.granularity == "tensor":
            each = [weight.abs().flatten(-2).amax(-1) for weight in whole]  # of a stack one per expert
            absmax = torch.stack(each).amax(0).view(scale.shape)
        else:
            (weight,) = whole
            absmax = weight.unflatten(-1, (-1, spec.group_size or weight.shape[-1])).abs().amax(-1)
        if name == "shifted":
            groups = weight.unflatten(-1, (-1, spec.group_size))
            lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            assert torch.equal(scale, torch.stack(asymmetric_grid(lowest, highest, spec))), owner
            continue
        if name != "searched":
            assert torch.equal(scale, absmax_scale(absmax, spec)), owner
            continue
        # Which candidate wins may turn on the order of a sum; the error that it has may not.
        (weight,) = whole

        def error(scales: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            rows = weight.flatten(0, -2)
            difference = (fake_quant(rows, scales.flatten(0, -2), spec) - rows).view_as(weight)
            return difference.square().unflatten(-1, (-1, spec.group_size)).sum(-1)

        best = torch.stack([error(share / 20 * absmax_scale(absmax, spec)) for share in range(6, 27)]).amin(0)
        torch.testing.assert_close(error(scale), best, rtol=1e-4, atol=1e-9)
