"""Launched on every rank: quantized checkpoints into partitions under ZeRO-3, and out again without a step.

Arguments: a directory with ``files``, the checkpoints, by name; their exports go to ``again``. The form of experts, the
layout of the export and the model's dtype are in cases.json, by name.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import logging

from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_scales
from model.ranks import shut_down
from model.save.export_model import export_model
from model.zero import full_numel, init_process_group, is_partitioned, local_range, partition_new_parameters
from quant import replace_layers
from tests.distributed.model.scripts.models import ds_config, loaded

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    (directory,) = (Path(argument) for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    init_process_group()
    deepspeed.utils.logger.setLevel("WARNING")
    for name, (form, layout, dtype) in json.loads((directory / "cases.json").read_text()).items():
        path, again = directory / "files" / name, directory / "again" / name
        config = ds_config(3, DTYPES[dtype])
        model = loaded(path, config, DTYPES[dtype], experts=form)
        schemes = source_schemes(model, path)
        quantization = replace_layers(model, None, named=schemes, learn_weight_scale=True, learn_input_scale=False)
        partition_new_parameters(model, config)
        report = take_scales(model, quantization, path)
        assert report.weights_loaded and not report.weights_measured and not report.merged, name
        assert not report.inputs_missing, name
        for layer in quantization.layers.values():
            start, stop = local_range(layer.weight)
            assert is_partitioned(layer.weight) and stop - start < full_numel(layer.weight), name
        export_model(model, quantization, path, again, layout=layout)
    shut_down()


if __name__ == "__main__":
    main()
