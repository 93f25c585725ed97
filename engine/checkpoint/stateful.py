"""State of a rank that DeepSpeed does not save, in the file ``rank_<r>.pt`` of a checkpoint.

All state that a resumed run needs belongs to stateful objects with ``state_dict`` and ``load_state_dict``, saved by
name. A rank's file contains::

    stateful  name of a stateful object -> its state: plain values and tensors on the CPU
    random    random states of the process
    pieces    slices of every parameter in this rank's DeepSpeed file, see engine.checkpoint.resume
"""

import random
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, Protocol

import numpy as np
import torch

from engine.session.session import Session
from model.zero import on_cuda, optimizer_pieces


class Stateful(Protocol):
    """Object with state that a resumed run needs."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors on the CPU."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""


StatefulStates = Mapping[str, Stateful]


def rank_state(session: Session, stateful: StatefulStates) -> dict[str, Any]:
    """Collect the content of this rank's file."""
    return {
        "stateful": {name: owner.state_dict() for name, owner in stateful.items()},
        "random": random_states(),
        "pieces": [astuple(piece) for piece in optimizer_pieces(session.model, session.engine.optimizer)],
    }


def check_stateful(stateful: StatefulStates, state: Mapping[str, Any]) -> None:
    """Refuse a rank's file that lacks the state of a stateful object. Raises ValueError."""
    if missing := sorted(stateful.keys() - state["stateful"].keys()):
        raise ValueError(f"the checkpoint keeps no state of {', '.join(missing)}: another version has written it")


def load_stateful(stateful: StatefulStates, state: Mapping[str, Any]) -> None:
    """Restore the state of every stateful object. States of other objects are ignored: an export has no schedule."""
    for name, owner in stateful.items():
        owner.load_state_dict(state["stateful"][name])


def random_states() -> dict[str, Any]:
    """Collect the random states of this process: torch on the CPU and on the current CUDA device, Python, numpy."""
    name, keys, *position = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_cuda() else None,
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *position),
    }


def restore_random_states(state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`random_states`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and on_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    name, keys, *position = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
