"""How a process becomes a rank of the process group."""

import logging
import os
import warnings

import torch

from engine.recipe.checks import RecipeError
from model.ranks import RankError
from model.zero import init_process_group, own_device

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
NO_LAUNCHER = (
    "but RANK, LOCAL_RANK and WORLD_SIZE are not set: start one launcher per node (srun --ntasks-per-node=1 "
    "torchrun ..., or deepspeed --hostfile ...), which sets them"
)


def join_ranks() -> torch.device:
    """Start the process group (NCCL on CUDA, gloo on CPU) and return this rank's device.

    Without a launcher the process is rank 0 of 1.

    Raises:
        RecipeError: a launcher of several processes does not say which rank this one is.
        RankError: of :func:`model.zero.own_device` and :func:`model.zero.init_process_group`.
    """
    # DeepSpeed logs every setting of its engine at INFO; what is worth a user's eyes is said by this project.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls two torch collectives by names that torch 2.13 wants changed; a user can do nothing about it.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", message=f".*{name}", category=FutureWarning)
    _check_launcher()
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    device = own_device(int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL starts, which takes the current device
    init_process_group()
    return device


def _check_launcher() -> None:
    """Refuse a job of several processes that does not say which rank this one is: each would train alone, as rank 0.

    Raises:
        RecipeError: names the variable.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            raise RankError(f"{name} is {os.environ[name]!r} in the environment, expected a number, of a launcher's")
    if "RANK" in os.environ:
        return
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") not in ("0", "1"):
            raise RecipeError(f"{name} is {os.environ[name]}, {NO_LAUNCHER}")
