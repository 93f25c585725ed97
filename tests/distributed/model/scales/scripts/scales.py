"""Run on every rank: calibrate, read good and bad PTQ checkpoints, and measure weights from their partitions.

    scripts/scales.py DIRECTORY

``DIRECTORY/calibrate_<kind>.yaml`` are recipes to calibrate; ``cases/<kind>/<name>/`` are PTQ checkpoints to read into
one ZeRO-3 model of that kind, with ``arguments.json``. Each rank writes ``<name>_<rank>.pt`` beside a case: the scales
and the report, or the error. ``measured/<kind>/measured_<scheme>_<rank>.pt`` has measured scales and whole weights.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config.reading import load_recipe
from engine.session.context import init_ranks, start_ranks
from engine.session.session import build_session
from launch.calibrate import calibrate
from model.ranks import RankError, rank
from model.scales import load_scales, measure_weight_scales
from model.zero import gathered, partition_new_parameters
from quant import DEFAULT_EXEMPT, SCHEMES, Quantization, Scheme, TensorSpec, replace_layers
from tests.distributed.model.scripts.models import ds_config, loaded
from tests.lib.garbage import collect

# Shapes that no preset has, whose scales two ranks do not share evenly.
MEASURED = {
    "channel": Scheme("w4a16_channel", TensorSpec("int", 4, "channel")),
    "group": Scheme("w5a16_g3", TensorSpec("int", 5, "group", 3)),
    "searched": Scheme("w2a16_g3", TensorSpec("int", 2, "group", 3)),
    "shifted": Scheme("w4a16_g3_asym", TensorSpec("int", 4, "group", 3, symmetric=False)),
    "tensor": SCHEMES["fp8_static"],
}


def whole_scales(quantization: Quantization) -> dict[str, torch.Tensor]:
    """Every s0 by its owner and kind."""
    kinds = {"weight": quantization.weight_groups, "input": quantization.input_groups}
    with gathered([group.s0 for groups in kinds.values() for group in groups]):
        return {f"{g.owner}.{kind}": g.s0.detach().clone() for kind, groups in kinds.items() for g in groups}


def read_cases(directory: Path, model: nn.Module, quantization: Quantization) -> None:
    """Every case in turn, into the same model: each writes all scales, or must leave them as they were."""
    for case in sorted(path for path in directory.iterdir() if path.is_dir()):
        before = whole_scales(quantization)
        found: dict[str, Any] = {}
        arguments = json.loads((case / "arguments.json").read_text())
        try:
            report = load_scales(model, quantization, case, **arguments)
            found["report"] = asdict(report)
            found["summary"] = report.summary()
        except RankError as error:
            found["error"] = str(error)
        found["scales"] = whole_scales(quantization)
        found["unchanged"] = all(torch.equal(value, before[name]) for name, value in found["scales"].items())
        torch.save(found, directory / f"{case.name}_{rank()}.pt")


def measure(directory: Path, name: str, scheme: Scheme, source: Path) -> None:
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
    torch.save(result, directory / f"measured_{name}_{rank()}.pt")


def main() -> None:
    """Calibrations, cases, measurements; one process group for all."""
    (directory,) = (Path(argument) for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    init_ranks()
    for path in sorted(directory.glob("calibrate_*.yaml")):
        recipe = load_recipe(path)
        calibrate(recipe)
        collect()
        kind = path.stem.partition("_")[2]
        # What the calibration wrote, read back through the recipe: nothing may be left to measure or to calibrate.
        recipe = replace(recipe, quant=replace(recipe.quant, scales=str(recipe.export_dir())))
        session = build_session(recipe, start_ranks(recipe), None, None, optimizer=False)
        assert not session.uncalibrated
        torch.save(whole_scales(session.quantization), directory / f"read_back_{kind}_{rank()}.pt")
        read_cases(directory / "cases" / kind, session.model, session.quantization)
        for name, scheme in MEASURED.items():
            measure(directory / "measured" / kind, name, scheme, Path(recipe.model.path))
        collect()


if __name__ == "__main__":
    main()
