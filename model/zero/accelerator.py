"""Where ranks compute: on what DeepSpeed's accelerator is, which DS_ACCELERATOR may name; not on what torch finds."""

import torch
from deepspeed.accelerator import get_accelerator

from model.ranks import RankError


def on_cuda() -> bool:
    """Whether ranks compute on CUDA devices."""
    return bool(get_accelerator().device_name() == "cuda")


def own_device(local_rank: int) -> torch.device:
    """The device of a rank. Raises RankError: DeepSpeed's accelerator is another, or this machine has too few."""
    name = get_accelerator().device_name()
    if name != "cpu" and not (on_cuda() and local_rank < torch.cuda.device_count()):
        raise RankError(_missing(name, local_rank))
    return torch.device("cuda", local_rank) if on_cuda() else torch.device("cpu")


def _missing(name: str, local_rank: int) -> str:
    if name != "cuda":
        return f"DeepSpeed's accelerator is {name!r}, expected cuda or cpu: DS_ACCELERATOR chooses one"
    return (
        f"LOCAL_RANK is {local_rank}, but torch finds {torch.cuda.device_count()} CUDA devices here: start as many "
        "ranks on a machine as it has GPUs (CUDA_VISIBLE_DEVICES hides some), or set DS_ACCELERATOR=cpu"
    )
