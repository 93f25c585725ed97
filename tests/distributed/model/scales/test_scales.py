"""Scales on two ranks under ZeRO-3: calibrated, written, read back, measured from partitions, and refused when bad."""

import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.config.reading import load_recipe
from engine.session.context import init_ranks, start_ranks
from engine.session.session import build_session
from launch.calibrate import calibrate
from model.ranks import RankError
from model.scales.in_place import measure_weight_scales
from model.scales.loading import load_scales
from model.zero import gathered, partition_new_parameters
from quant import DEFAULT_EXEMPT, SCHEMES, Quantization, Scheme, TensorSpec, replace_layers
from quant.reference import absmax_scale, asymmetric_grid, fake_quant
from quant.spec import PRESETS
from tests.distributed.model.scripts.models import ds_config, loaded
from tests.lib.garbage import collect
from tests.lib.launcher import on_ranks
from tests.lib.plain import plain_model, plain_weights
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

UNUSED = "model.layers.9.self_attn.k_proj.weight_scale"
ATTENTION = "model.layers.1.self_attn"
Q, K, V, OUT = (f"{ATTENTION}.{name}_proj" for name in "qkvo")
SHAPES: list[tuple[int, ...]] = [(), (1,)]
# How files spell the scales of keys and values, by layer; the first is what we write.
SPELLINGS = ("{kind}_scale", "{kind}_cache.scale")

# Shapes that no preset has, whose scales two ranks do not share evenly.
MEASURED = {
    "channel": Scheme("w4a16_channel", TensorSpec("int", 4, "channel")),
    "group": Scheme("w5a16_g3", TensorSpec("int", 5, "group", 3)),
    "searched": Scheme("w2a16_g3", TensorSpec("int", 2, "group", 3)),
    "shifted": Scheme("w4a16_g3_asym", TensorSpec("int", 4, "group", 3, symmetric=False)),
    "tensor": SCHEMES["fp8_static"],
}

# Tensors beside or in place of good ones, and words of the error.
WRONG = {
    "zero point": ({f"{K}.weight_zero_point": torch.ones(1)}, (f"{K}.weight_zero_point", "symmetric")),
    "cache zero point": ({f"{ATTENTION}.v_zero_point": torch.ones(1)}, (f"{ATTENTION}.v_zero_point", "symmetric")),
    "cache per head": ({f"{ATTENTION}.k_scale": torch.ones(2, 1, 1)}, (f"{ATTENTION}.k_scale", "(2, 1, 1)")),
    "nan": ({f"{K}.weight_scale": torch.tensor([torch.nan])}, (f"{K}.weight_scale", "nan")),
    "infinite": ({f"{K}.input_scale": torch.tensor([torch.inf])}, (f"{K}.input_scale", "inf")),
    "zero": ({f"{K}.input_scale": torch.tensor(0.0)}, (f"{K}.input_scale", "positive")),
    "negative": ({f"{K}.weight_scale": torch.tensor(-1.0)}, (f"{K}.weight_scale", "positive", "-1")),
    "shape": ({f"{K}.weight_scale": torch.ones(16, 1)}, (f"{K}.weight_scale", "(16, 1)")),
}
# Other cases that must be refused.
WRONG_WORDS = {name: words for name, (_, words) in WRONG.items()} | {
    "names": ("transformer.model.layers.0", "model.layers.0", "names"),
    "damaged": ("model-1.safetensors", "not a whole"),
    "none": ("none", "weight_scale"),
    "other range": (f"{K}.weight_scale: scales are", "the squared error would be", "Probably they are"),
    "other codes": (f"{V}.weight_scale: the codes beside it are of other weights",),
    "other shape": (f"{OUT}.weight is F8_E4M3", "expected torch.float8_e4m3fn", "mixes two schemes"),
    "missing inputs": (OUT, "quant.initial_input_scale", "quant.calibration_batches"),
    "missing caches": (f"{ATTENTION}.v_cache",),
}


def structure(model: Path) -> Quantization:
    """The layers and groups of a checkpoint, in one process."""
    preset, learned = PRESETS["fp8_static_kv"], {"learn_weight_scale": True, "learn_input_scale": False}
    return replace_layers(plain_weights(str(model), "per_expert"), preset.linear, kv_cache=preset.kv_cache, **learned)


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


def write_cases(
    directory: Path, quantization: Quantization, scales: dict[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Write PTQ checkpoints of two files, good and bad; the arguments that each is read with."""
    cases: dict[str, dict[str, Any]] = {}

    def write(name: str, tensors: dict[str, torch.Tensor], **arguments: object) -> None:
        (case := directory / name).mkdir(parents=True)
        cases[name] = arguments
        for part in range(2):
            keys = list(tensors)[part::2]
            save_file({key: tensors[key].clone() for key in keys}, case / f"model-{part}.safetensors")

    def without(*suffixes: str) -> dict[str, torch.Tensor]:
        return {key: value for key, value in scales.items() if not key.endswith(suffixes)}

    zero_points = {f"{place}_zero_point": torch.zeros(1) for place in (f"{Q}.weight", f"{Q}.input", f"{ATTENTION}.k")}
    weights = {f"{name}.weight": layer.weight.detach().clone() for name, layer in quantization.layers.items()}
    codes = {
        key: (weight.float() / scales[f"{key}_scale"]).clamp(-448, 448).to(torch.float8_e4m3fn)
        for key, weight in weights.items()
    }
    write("good", {**scales, **zero_points, **codes})
    write("plain", {**scales, **weights})
    write("unused", {**scales, UNUSED: torch.ones(1)})
    write(
        "other range", {**scales, **{f"{one}.weight_scale": scales[f"{one}.weight_scale"] / 128 for one in (Q, K, V)}}
    )
    flipped = codes[f"{V}.weight"].view(torch.uint8).flip(0).view(torch.float8_e4m3fn)
    write("other codes", {**scales, **codes, f"{V}.weight": flipped})
    write("other shape", {**scales, **codes, f"{OUT}.weight": codes[f"{OUT}.weight"][1:]})
    write("missing weights", without(f"{K}.weight_scale", f"{OUT}.weight_scale"))
    write("missing inputs", without(f"{OUT}.input_scale"))
    write("missing caches", without(f"{ATTENTION}.v_cache.scale"))
    write("initial inputs", without(f"{OUT}.input_scale"), initial_input_scale=0.25)
    write("later inputs", without(f"{OUT}.input_scale"), inputs_calibrated_later=True)
    write("one input of three", without(f"{Q}.input_scale", f"{V}.input_scale"))
    for name, (wrong, _) in WRONG.items():
        write(name, {**scales, **wrong})
    write("damaged", scales)
    file = directory / "damaged" / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    write("none", {"model.norm.weight": torch.ones(48)})
    write("names", {f"transformer.{key}": value for key, value in scales.items()})
    return cases


def whole_scales(quantization: Quantization) -> dict[str, Tensor]:
    """Every s0 by its owner and kind."""
    kinds = {"weight": quantization.weight_groups, "input": quantization.input_groups}
    with gathered([group.s0 for groups in kinds.values() for group in groups]):
        return {f"{g.owner}.{kind}": g.s0.detach().clone() for kind, groups in kinds.items() for g in groups}


def read_cases(
    directory: Path, cases: dict[str, dict[str, Any]], model: nn.Module, quantization: Quantization
) -> dict[str, dict[str, Any]]:
    """Read every case in turn into the same model: each writes all scales, or must leave them as they were."""
    results = {}
    for name, arguments in cases.items():
        before = whole_scales(quantization)
        found: dict[str, Any] = {}
        try:
            report = load_scales(model, quantization, directory / name, **arguments)
            found |= {"report": asdict(report), "summary": report.summary()}
        except RankError as error:
            found["error"] = str(error)
        found["scales"] = whole_scales(quantization)
        found["unchanged"] = all(torch.equal(value, before[key]) for key, value in found["scales"].items())
        results[name] = found
    return results


def measure(scheme: Scheme, source: Path) -> dict[str, tuple[Any, list[Tensor]]]:
    """Scales measured from the partitions, beside the whole weights of each group."""
    model = loaded(source, ds_config(3))
    # The intermediate sizes are primes, which no group size divides; experts are quantized whole or not at all.
    odd = r".*\.(down_proj|experts\.\d+\.\w+)"
    exempt = [*DEFAULT_EXEMPT, odd] if scheme.weights.granularity == "group" else DEFAULT_EXEMPT
    quantization = replace_layers(model, scheme, exempt=exempt, learn_weight_scale=True, learn_input_scale=False)
    partition_new_parameters(model, ds_config(3))
    scales = measure_weight_scales(quantization)
    result = {}
    for group in quantization.weight_groups:
        weights = [quantization.layers[member].weight for member in group.members]
        with gathered(weights):
            result[group.owner] = (scales[group.owner], [weight.detach().clone() for weight in weights])
    return result


def run(directory: Path, cases: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """On a rank: calibrate each kind of model, read what that wrote and all cases, measure weights in partitions."""
    init_ranks()
    found = {}
    for kind, own in cases.items():
        recipe = load_recipe(directory / f"calibrate_{kind}.yaml")
        calibrate(recipe)
        collect()
        # Read back through the recipe: nothing may be left to measure or to calibrate.
        recipe = replace(recipe, quant=replace(recipe.quant, scales=str(recipe.export_dir())))
        session = build_session(recipe, start_ranks(recipe), None, None, optimizer=False)
        assert not session.uncalibrated
        found[kind] = {
            "back": whole_scales(session.quantization),
            "cases": read_cases(directory / "cases" / kind, own, session.model, session.quantization),
            "measured": {name: measure(scheme, Path(recipe.model.path)) for name, scheme in MEASURED.items()},
        }
        del session
        collect()
    return found


class Ran(NamedTuple):
    """The directory of a job, and what each rank found, by kind of model."""

    directory: Path
    ranks: list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Ran:
    """One job: dense and MoE calibrated, every case read, weights measured."""
    cases = {}
    directory = tmp_path_factory.mktemp("scales")
    data = write_chats(directory / "chats.jsonl")
    for kind in ("qwen3", "qwen3_moe"):
        model = tiny_checkpoint(directory / kind, kind, seed=random.randrange(2**31))
        # One by one each scale of an expert is a key of its own.
        sections = {"model": {"path": str(model), "experts": "per_expert"}, "quant": {"scheme": "fp8_static_kv"}}
        sections["loss"] = {"kd_weight": 0.0, "teacher": None}
        write_recipe(directory, f"calibrate_{kind}", model, data, stage=3, dtype="float32", **sections)
        quantization = structure(model)
        scales = random_scales(quantization)
        save_file(scales, directory / f"scales_{kind}.safetensors")
        cases[kind] = write_cases(directory / "cases" / kind, quantization, scales)
    return Ran(directory, on_ranks(run, directory, cases)[0])


@pytest.fixture(params=("qwen3", "qwen3_moe"))
def kind(request) -> str:
    return request.param


def case(ran: Ran, kind: str, name: str) -> dict[str, Any]:
    """Return the result of a case, which must be the same on both ranks."""
    found = [rank[kind]["cases"][name] for rank in ran.ranks]
    assert found[0].keys() == found[1].keys() and found[0].get("error") == found[1].get("error")
    assert same(found[0]["scales"], found[1]["scales"])
    return found[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[key]) for key, value in one.items())


def test_calibration_finds_the_scales_of_one_process_and_reading_back_changes_no_bit(ran, kind):
    recipe = load_recipe(ran.directory / f"calibrate_{kind}.yaml")
    _, expected = plain_model(recipe)
    disk = load_file(recipe.export_dir() / "model.safetensors")
    back = [rank[kind]["back"] for rank in ran.ranks]
    for groups, what in ((expected.weight_groups, "weight"), (expected.input_groups, "input")):
        for group in groups:
            written = [disk[key_of(member, what, SPELLINGS[0])] for member in group.members]
            assert all(value.shape == (1,) and value.dtype == torch.float32 for value in written)
            assert all(torch.equal(value, written[0]) for value in written)
            assert all(torch.equal(scales[f"{group.owner}.{what}"], written[0]) for scales in back)
            # Weights are the same numbers; inputs come from GEMMs, whose order of sums may differ.
            rtol = 0 if what == "weight" else 1e-5
            torch.testing.assert_close(written[0], group.s0.detach(), rtol=rtol, atol=0)


def test_groups_take_the_largest_scale_of_their_members_whatever_its_shape(ran, kind):
    found, scales = case(ran, kind, "good"), load_file(ran.directory / f"scales_{kind}.safetensors")
    quantization = structure(ran.directory / kind)
    for groups, what in ((quantization.weight_groups, "weight"), (quantization.input_groups, "input")):
        for group in groups:
            expected = max(float(scales[key_of(member, what)]) for member in group.members)
            assert found["scales"][f"{group.owner}.{what}"].tolist() == [expected]
    assert found["report"]["weights_measured"] == found["report"]["inputs_missing"] == []
    assert len(found["report"]["weights_loaded"]) == len(quantization.weight_groups)
    more = case(ran, kind, "unused")
    assert UNUSED in more["summary"] and same(more["scales"], found["scales"])
    assert same(found["scales"], case(ran, kind, "plain")["scales"])


def test_a_missing_weight_scale_is_measured_for_its_whole_group_and_listed(ran, kind):
    found, good = case(ran, kind, "missing weights"), case(ran, kind, "good")["scales"]
    assert found["report"]["weights_measured"] == [Q, OUT]
    assert Q in found["summary"] and OUT in found["summary"]
    weights, scales = load_file(ran.directory / kind / "model.safetensors"), dict(found["scales"])
    for owner, members in ((Q, (Q, K, V)), (OUT, (OUT,))):
        absmax = max(float(weights[f"{member}.weight"].abs().max()) for member in members)
        expected = absmax_scale(torch.tensor([absmax]), SCHEMES["fp8_static"].weights)
        assert torch.equal(scales.pop(f"{owner}.weight"), expected)
    assert same(scales, good)


def test_a_missing_input_scale_may_have_another_source(ran, kind):
    initial, later = (case(ran, kind, name) for name in ("initial inputs", "later inputs"))
    assert initial["scales"][f"{OUT}.input"].tolist() == [0.25] and initial["report"]["inputs_initial"] == [OUT]
    assert later["report"]["inputs_missing"] == [OUT] and OUT not in later["report"]["inputs_loaded"]
    shared = case(ran, kind, "one input of three")["scales"][f"{Q}.input"]
    assert shared.tolist() == [float(load_file(ran.directory / f"scales_{kind}.safetensors")[f"{K}.input_scale"])]


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_bad_scales_are_refused_on_every_rank_and_nothing_is_written(ran, kind, name):
    """With one text, even of weights that no rank holds whole."""
    found = case(ran, kind, name)
    assert all(part in found["error"] for part in WRONG_WORDS[name]), found["error"]
    assert found["unchanged"]
    assert not name.startswith("other") or not re.search(r"^rank \d", found["error"])  # both ranks found it
    if name.startswith("missing"):
        assert Q not in found["error"] and f"{ATTENTION}.k_cache" not in found["error"]


@pytest.mark.parametrize("name", MEASURED)
def test_scales_measured_from_partitions_are_those_of_the_whole_weights(ran, kind, name):
    spec = MEASURED[name].weights
    found = [rank[kind]["measured"][name] for rank in ran.ranks]
    assert len(found[0]) > 5
    for owner, (scale, weights) in found[0].items():
        assert torch.equal(scale, found[1][owner][0])
        if spec.granularity == "tensor":
            each = [weight.float().abs().flatten(-2).amax(-1) for weight in weights]  # of a stack one per expert
            assert torch.equal(scale, absmax_scale(torch.stack(each).amax(0).view(scale.shape), spec)), owner
            continue
        weight = weights[0].float()
        groups = weight.unflatten(-1, (-1, spec.group_size or weight.shape[-1]))
        first = absmax_scale(groups.abs().amax(-1), spec)
        if name == "shifted":
            lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            assert torch.equal(scale, torch.stack(asymmetric_grid(lowest, highest, spec))), owner
        elif name == "searched":  # which candidate wins may turn on the order of a sum; the error that it has may not
            best = torch.stack([error(share / 20 * first, weight, spec) for share in range(6, 27)]).amin(0)
            torch.testing.assert_close(error(scale, weight, spec), best, rtol=1e-4, atol=1e-9)
        else:
            assert torch.equal(scale, first), owner


def error(scales: torch.Tensor, weight: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The squared error of each group with these scales."""
    rows = weight.flatten(0, -2)
    difference = (fake_quant(rows, scales.flatten(0, -2), spec) - rows).view_as(weight)
    return difference.square().unflatten(-1, (-1, spec.group_size)).sum(-1)
