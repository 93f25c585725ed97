"""Whether the code of a class asks packed layers for the weight that they do not have.

compressed-tensors keeps the codes of integer and fp4 layers as ``weight_packed``. Some classes read ``weight`` of a
layer nevertheless: while transformers loads them, to give it a first value (Falcon, NanoChat's ``o_proj``), or in their
forward (RWKV). Both are run here on the meta device, so that a class is found which nobody listed.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

META = torch.device("meta")
TOKENS = 8


def weights_read(model: PreTrainedModel, packed: Collection[str]) -> list[str]:
    """Names of layers whose weight the class of ``model`` reads though it is packed.

    A forward ends at the first weight that is not there, and does not say whose it is: then these are all layers.

    Args:
        model: any model of the class, partitioned or not; nothing of it is read but its config.
        packed: names of the Linears that an export packs. Those that transformers does not have as Linears, such as
            experts, are left out.
    """
    if not packed:
        return []
    with META, no_init_weights():
        empty: PreTrainedModel = type(model)(model.config)
    linears = {name: module for name, module in empty.named_modules() if isinstance(module, nn.Linear)}
    here = sorted(linears.keys() & set(packed))
    if read := [name for name in here if _initialised(empty, name)]:
        return read
    for name in here:
        _pack(linears[name])
    return here if _forward_lacks_a_weight(empty) else []


def _initialised(model: PreTrainedModel, name: str) -> bool:
    """Whether initialising a layer, or a module that holds it, fails for its missing weight and for nothing else."""
    parts = name.split(".")
    above = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]
    holders = [module for module in above if not isinstance(module, PreTrainedModel)]
    if _lacks(model, holders):
        return False
    weight = holders[-1]._parameters.pop("weight")
    found = _lacks(model, holders)
    holders[-1]._parameters["weight"] = weight
    return found


def _lacks(model: PreTrainedModel, modules: Iterable[nn.Module]) -> bool:
    """Whether the class's initialisation of these modules asks for an attribute that one of them does not have."""
    try:
        with META:
            for module in modules:
                model._init_weights(module)
    except AttributeError:
        return True
    return False


def _pack(linear: nn.Linear) -> None:
    """As compressed-tensors leaves a layer: without a weight, and with a forward of its own."""

    def forward(hidden: Tensor) -> Tensor:
        return hidden.new_empty(*hidden.shape[:-1], linear.out_features)

    del linear._parameters["weight"]
    linear.forward = forward  # type: ignore[method-assign, assignment]


@torch.no_grad()
def _forward_lacks_a_weight(model: PreTrainedModel) -> bool:
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=META)
    try:
        model.eval()(input_ids=ids, use_cache=False)
    except AttributeError as error:
        return "no attribute 'weight'" in str(error)
    except Exception:  # what cannot run without values says nothing about weights
        return False
    return False
