"""Launched on every rank: first codes by groups of samples that differ in number and shape between ranks.

    scripts/groups.py DIRECTORY

``DIRECTORY/model`` is the model, ``DIRECTORY/lengths.json`` has the lengths of each rank's samples by micro-batch. Each
rank writes ``found_<rank>.pt``: its groups, and the weights that were found.
"""

import json
import sys
from pathlib import Path

import torch

from data.loader import MicroBatch
from engine.session.context import init_ranks, samples_on_all_ranks
from model.ptq_init import blockwise as tuning
from model.ptq_init import choose_initial_codes
from model.ranks import rank
from model.scales import renew_weight_scales
from model.zero import gathered, partition_new_parameters
from quant import SCHEMES, replace_layers
from tests.distributed.model.scripts.models import ds_config, loaded

ROWS, STEPS = 4, 20


def micro_batch(lengths: list[int], generator: torch.Generator) -> MicroBatch:
    """Samples of random tokens, padded."""
    return {
        "input_ids": torch.randint(3, 300, (len(lengths), max(lengths)), generator=generator),
        "spans": torch.tensor([(row, 0, length) for row, length in enumerate(lengths)]),
    }


def main() -> None:
    """One model."""
    (directory,) = (Path(argument) for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    device = init_ranks()
    generator = torch.Generator().manual_seed(rank())
    lengths = json.loads((directory / "lengths.json").read_text())[rank()]
    given = list(samples_on_all_ranks([micro_batch(each, generator) for each in lengths], together=ROWS))
    model = loaded(directory / "model", ds_config(3))
    quantization = replace_layers(model, SCHEMES["w2a16_g32"], learn_weight_scale=True, learn_input_scale=False)
    partition_new_parameters(model, ds_config(3))
    renew_weight_scales(quantization)
    tuning.STEPS = STEPS
    choose_initial_codes(model, quantization, given, device, tuned_rows=ROWS)
    weights = {name: layer.weight for name, layer in quantization.layers.items()}
    with gathered(weights.values()):
        whole = {name: weight.detach().clone() for name, weight in weights.items()}
    torch.save({"given": given, "weights": whole}, directory / f"found_{rank()}.pt")


if __name__ == "__main__":
    main()
