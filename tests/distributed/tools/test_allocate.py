"""launch/allocate.py on two ranks under ZeRO-3, and the PTQ checkpoint that comes of the recipe it writes."""

import re

import pytest
import torch
from safetensors.torch import load_file

from engine.config.reading import parse_recipe
from tests.lib.launcher import run_ranks, run_waiting
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint

BUDGET = 3.1


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder, the words of the command line, and what the script said."""
    directory = tmp_path_factory.mktemp("allocate")
    model = tiny_checkpoint(directory / "model", "qwen3_moe", wide=True)
    settings = {"stage": 3, "dtype": "bfloat16", "loss": {"kd_weight": 0.0, "teacher": None}}
    recipe = write_recipe(directory, "base", model, write_chats(directory / "chats.jsonl"), **settings)
    words = ["--config", str(recipe), "--quant.calibration_batches", "1", "--quant.init", "gptq"]
    words += ["--quant.rules", "[{layers: '.*o_proj', scheme: w8a16_channel}]"]
    options = ["--schemes", "w2a16_g32", "w4a16_g32", "--budget_bits", str(BUDGET), "--batches", "1"]
    output = run_ranks(ROOT / "launch" / "allocate.py", *words, *options, "--out", directory / "mixed.yaml")
    assert "gptq:" not in output, "costs would be those of weights that have been moved"
    return directory, words, output


def test_the_recipe_keeps_the_budget_in_the_files_that_come_of_it(written):
    directory, words, output = written
    words = [*words, "--config", str(directory / "mixed.yaml"), "--export.dir", str(directory / "ptq")]
    recipe = parse_recipe(words)
    own, *rules = recipe.quant.rules
    assert (own.layers, own.scheme) == (".*o_proj", "w8a16_channel")
    assert {recipe.quant.scheme, *(rule.scheme for rule in rules)} == {"w2a16_g32", "w4a16_g32"}
    assert "gptq:" in run_ranks(ROOT / "launch" / "calibrate.py", *words)
    tensors = load_file(directory / "ptq" / "model.safetensors")
    parts = {key: tensor for key, tensor in tensors.items() if ".o_proj." not in key}
    shapes = [tensor for key, tensor in parts.items() if key.endswith("weight_shape")]
    stored = [tensor for key, tensor in parts.items() if key.endswith(("weight_packed", "weight_scale"))]
    bits = 8 * sum(tensor.nbytes for tensor in stored) / sum(int(torch.prod(shape)) for shape in shapes)
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| (\S+) \|", output, re.MULTILINE)
    assert float({name: said for name, said, _ in rows}["mixed"]) == pytest.approx(bits, abs=1e-4)
    assert BUDGET - 0.6 < bits <= BUDGET
    costs = {name: float(cost) for name, _, cost in rows}  # of all layers together
    assert 0 < costs["w4a16_g32"] < costs["mixed"] < costs["w2a16_g32"]


def test_a_budget_that_nothing_fits_is_an_error_on_every_rank(written):
    directory, words, _ = written
    options = ["--schemes", "w4a16_g32", "w8a16_g32", "--budget_bits", "4", "--batches", "1"]
    code, output = run_waiting(ROOT / "launch" / "allocate.py", *words, *options, "--out", directory / "none.yaml")
    assert code == 1 and "4 bits per weight, expected 4.5000 or more" in output, output[-3000:]
    assert "measuring" not in output and not (directory / "none.yaml").exists()
