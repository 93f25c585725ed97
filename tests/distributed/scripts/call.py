"""Launched on every rank by tests.lib.launcher.on_ranks: call a function and save what it returns."""

import os
import pickle
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    file = Path(sys.argv[-1])
    function, arguments = pickle.loads(file.read_bytes())
    torch.save(function(*arguments), file.with_suffix(f".{os.environ['RANK']}"))
