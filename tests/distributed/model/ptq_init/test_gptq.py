"""quant.init gptq on two ranks under ZeRO-3: the codes of one process, in the export and in the first step."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.loader import MicroBatch
from engine.session.context import init_ranks, samples_on_all_ranks
from model.ptq_init import blockwise as tuning
from model.ptq_init.layerwise import choose_initial_codes
from model.ranks import rank
from model.scales.in_place import renew_weight_scales
from model.zero import gathered, partition_new_parameters
from quant import SCHEMES, replace_layers
from quant.gptq import takes
from tests.distributed.engine.test_adapters import MANY, every_scheme
from tests.distributed.model.scripts.models import ds_config, loaded
from tests.lib.checkpoints import differing, quantized
from tests.lib.launcher import on_ranks, run_ranks
from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

# launch/calibrate.py with fewer steps of tuning.
CALIBRATE = """
from launch import calibrate
from model.ptq_init import blockwise
blockwise.STEPS = 30
calibrate.main()
"""
COMMON = {"loss": NO_TEACHER, "export": {"enabled": True}}
ROWS, STEPS = 4, 20  # of a micro-batch of a rank, and of tuning
# One rank takes as many rows in a micro-batch as two take together.
ONE, TWO = {"data": {"micro_batch_size": 2}, "stage": 0}, {"data": {"micro_batch_size": 1}, "stage": 3}


def exported(directory: Path, name: str, model: Path, sections: dict, script: Path | None = None, **quant: object):
    """The tensors of an export, and what the script said; run on one rank if the sections are those of ONE."""
    recipe = write_recipe(directory, name, model, directory / "chats.jsonl", **COMMON, **sections, quant=quant)
    if sections["stage"] == 0:
        done = run_python(CALIBRATE, "--config", recipe)
        assert done.returncode == 0, done.stderr[-8000:]
        said = done.stdout
    else:
        (directory / "calibrate.py").write_text(CALIBRATE)
        said = run_ranks(script or directory / "calibrate.py", "--config", str(recipe))
    return load_file(directory / name / "export" / "model.safetensors"), said


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Exports by name. A MoE, experts stacked."""
    directory = tmp_path_factory.mktemp("gptq")
    model = tiny_checkpoint(directory / "model", "qwen3_moe", wide=True)
    write_chats(directory / "chats.jsonl")
    one, two = ({**sections, "dtype": "bfloat16"} for sections in (ONE, TWO))
    # Rates that change no weight: the export has what the first step computed with.
    still = {"optim": {"lr": 1e-20, "scale_lr": 1e-20, "weight_decay": 0.0}, "train": {"steps": 2}}
    gptq = {"scheme": "w2a16_g32", "init": "gptq", "calibration_batches": 3}
    # One micro-batch on each rank: every step sees all samples, on one rank as on two.
    tuned = {"scheme": "w2a16_g32", "init": "blockwise", "calibration_batches": 1}
    return {
        "one": exported(directory, "one", model, one, **gptq),
        "two": exported(directory, "two", model, two, **gptq),
        "trained": exported(directory, "trained", model, {**two, **still}, ROOT / "launch" / "train.py", **gptq),
        "one tuned": exported(directory, "one_tuned", model, one, **tuned),
        "two tuned": exported(directory, "two_tuned", model, two, **tuned),
        "inputs tuned": exported(directory, "inputs", model, two, **{**tuned, "scheme": "nvfp4_w4a4_kv"}),
    }


def test_two_ranks_choose_what_one_process_chooses(made):
    """Sums of the inputs are in fp64, and rows depend on no others: the codes and scales are the same."""
    (ours, said), (theirs, other) = made["two"], made["one"]
    assert not differing(ours, theirs)
    pattern = r"gptq: \d+ layers, \d+ samples, squared error of outputs (\S+), with nearest codes (\S+)"
    (chosen, nearest), (there, _) = (re.search(pattern, text).groups() for text in (said, other))
    few = (
        r"from ([\d,]+) tokens\nwarning: \1 tokens are few for quant.init gptq.*set quant.calibration_batches to \d+ \("
    )
    assert re.search(few, said)[1] == re.search(few, other)[1]
    assert float(chosen) == pytest.approx(float(there), rel=0.02) and float(chosen) < 0.6 * float(nearest)


def test_two_ranks_tune_as_one_process_does(made):
    """Gradients are summed up over ranks and each rank has masters of its part: the same but for rounding, which Adam
    makes more of than there was."""
    (ours, said), (theirs, other) = made["two tuned"], made["one tuned"]
    pattern = r"of decoder layers (\S+), before they were tuned (\S+?);?\s"
    (after, before), (there, first) = (map(float, re.search(pattern, text).groups()) for text in (said, other))
    assert before == pytest.approx(first, rel=0.02) and after == pytest.approx(there, rel=0.1) and after < 0.8 * before
    assert ours.keys() == theirs.keys()
    same = [float((ours[key] == theirs[key]).float().mean()) for key in ours if key.endswith("weight_packed")]
    assert sum(same) / len(same) > 0.8
    others = [key for key in ours if not key.endswith(("weight_packed", "weight_scale"))]
    assert [key for key in others if not torch.equal(ours[key], theirs[key])] == []


def test_the_first_step_computes_with_the_codes(made):
    assert not differing(made["two"][0], made["trained"][0])


def test_inputs_keys_and_values_are_measured_once_the_codes_are_there(made):
    tensors, said = made["inputs tuned"]
    scales = [key for key in tensors if key.endswith(("input_global_scale", "k_scale", "v_scale"))]
    assert len(scales) > 8 and all(0 < float(tensors[key]) < float("inf") for key in scales)
    assert said.index("gptq: ") < said.index("calibrating")


def micro_batch(lengths: list[int], generator: torch.Generator) -> MicroBatch:
    """Samples of random tokens, padded."""
    return {
        "input_ids": torch.randint(3, 300, (len(lengths), max(lengths)), generator=generator),
        "spans": torch.tensor([(row, 0, length) for row, length in enumerate(lengths)]),
    }


def choose_by_groups(source: Path, lengths: list[list[list[int]]]) -> dict[str, Any]:
    """On a rank: its groups of samples of these lengths, by rank and micro-batch, and the weights that are found."""
    device = init_ranks()
    generator = torch.Generator().manual_seed(rank())
    samples = [micro_batch(each, generator) for each in lengths[rank()]]
    given = list(samples_on_all_ranks(samples, together=ROWS))
    model = loaded(source, ds_config(3))
    quantization = replace_layers(model, SCHEMES["w2a16_g32"], learn_weight_scale=True, learn_input_scale=False)
    partition_new_parameters(model, ds_config(3))
    renew_weight_scales(quantization)
    tuning.STEPS = STEPS
    choose_initial_codes(model, quantization, given, device, tuned_rows=ROWS)
    weights = {name: layer.weight for name, layer in quantization.layers.items()}
    with gathered(weights.values()):
        return {"given": given, "weights": {name: weight.detach().clone() for name, weight in weights.items()}}


def test_ranks_whose_groups_differ_in_number_and_shape(tmp_path, seed, monkeypatch, capfd):
    """Three groups on one rank, five on the other, each of samples of equal length: what they say is what one process
    says of all samples one by one."""
    tiny_checkpoint(tmp_path / "model", "qwen3_moe", wide=True)
    same, *others = random.Random(seed).sample(range(20, 50), 6)
    lengths = [[[same, same, same], [same, same, others[0]]], [[others[0], others[1]], others[2:]]]
    found, said = on_ranks(choose_by_groups, tmp_path / "model", lengths)
    given = [[ids for ids, counts in one["given"] if counts] for one in found]
    assert [len(one["given"]) for one in found] == [5, 5] and [len(one) for one in given] == [3, 5]
    assert [tuple(ids.shape) for ids in given[0]] == [(4, same), (1, same), (1, others[0])]
    assert [tuple(ids.shape) for ids in given[1]] == [(1, length) for length in others]
    assert all(torch.equal(weight, found[1]["weights"][name]) for name, weight in found[0]["weights"].items())

    monkeypatch.setattr(tuning, "STEPS", STEPS)
    capfd.readouterr()
    alone, quantization = quantized(tmp_path / "model", SCHEMES["w2a16_g32"])
    singles = [(ids[None], True) for group in given[0] + given[1] for ids in group]
    choose_initial_codes(alone, quantization, singles, torch.device("cpu"), tuned_rows=2 * ROWS)
    pattern = (
        r"gptq: 12 layers, 11 samples, .*outputs (\S+), .*nearest codes (\S+?); of decoder layers (\S+),.* (\S+)\n"
    )
    ours, theirs = (list(map(float, re.search(pattern, text).groups())) for text in (said, capfd.readouterr().out))
    assert ours == pytest.approx(theirs, rel=0.25), seed  # other samples are together in a step
    assert ours[:2] == pytest.approx(theirs[:2], rel=0.05) and ours[2] < 0.9 * ours[3], seed


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("codes", "batches", "least"), [("gptq", 3, 0.99), ("blockwise", 1, 0.8)])
def test_every_scheme_is_the_same_on_two_ranks(tmp_path, kind, codes, batches, least):
    """Each has a decoder layer of its own. In bfloat16 asymmetric codes of 8 bits are refused."""
    model = tiny_checkpoint(tmp_path / "model", kind, wide=True, layers=MANY)
    write_chats(tmp_path / "chats.jsonl")
    for part, quant in enumerate(every_scheme(name for name, one in SCHEMES.items() if takes(one.weights))):
        quant |= {"init": codes, "calibration_batches": batches}
        (ours, _), (theirs, _) = (
            exported(tmp_path, f"{name}{part}", model, {**sections, "dtype": "float32"}, **quant)
            for name, sections in (("two", TWO), ("one", ONE))
        )
        assert ours.keys() == theirs.keys()
        measured = [key for key in ours if key.endswith(("input_scale", "input_global_scale", "k_scale", "v_scale"))]
        for key in measured if codes == "blockwise" else ():  # in models that are nearly the same
            assert torch.allclose(ours.pop(key).float(), theirs.pop(key).float(), rtol=0.1), key
        share = {key: float((ours[key] == theirs[key]).float().mean()) for key in ours}
        assert {key: one for key, one in share.items() if one < least} == {}
