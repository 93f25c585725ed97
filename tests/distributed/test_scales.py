"""Scales on two ranks under ZeRO-3: calibrated, written, read back, measured from partitions, and refused when bad."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.build import build_model
from quant import absmax_scale_of, prepare
from tests.distributed.launcher import launch, run_ranks
from tests.distributed.plain import plain_loaders, plain_model
from tests.distributed.recipes import write_chats, write_recipe
from tests.distributed.scales_script import MEASURED
from tests.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scales_script.py"
KINDS = ("qwen3", "qwen3_moe")
LAYER = "model.layers.1.self_attn"
