"""The parameters of a model as ZeRO sees them: each one once, which of them train, and which module reads which."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from engine.config.sections import OptimRecipe
from engine.session.optimizer import classify, parameter_groups
from model.zero import leaves_of_stage_3, to_be_whole

SCALES = ("weight_scale", "act_scale", "frozen")
# What is made after the weights, and is not kept whole between steps (model.scales.release_scales).
ADDED = (*SCALES, "adapter")


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A Parameter as stage 3 sees it.

    Attributes:
        name: its name in the model.
        order: its number. DeepSpeed numbers parameters in the order in which they are made.
        numel: how many elements it has, partitions of all ranks together.
        size: bytes per element.
        trains: whether it has a gradient.
        dtype: the name of its dtype. One collective gathers parameters of one dtype.
        released: whether it is a scale or of an adapter, which are not kept whole between steps (model.zero.release).
        whole: whether every rank holds all of it: a scale that is frozen and small is not partitioned.
    """

    name: str
    order: int
    numel: int
    size: int
    trains: bool
    dtype: str
    released: bool = False
    whole: bool = False

    def padded(self, ranks: int) -> int:
        """Bytes of all partitions together. They are equally long, so the last one may be padded."""
        return math.ceil(self.numel / ranks) * ranks * self.size

    def share(self, ranks: int) -> int:
        """Bytes of one rank's partition."""
        return self.numel * self.size if self.whole else self.padded(ranks) // ranks

    def second_share(self, zero: DeepSpeedZeroConfig, ranks: int) -> int:
        """Bytes of the second partition that hpZ keeps within a node, of frozen parameters too; 0 without hpZ."""
        size = zero.zero_hpz_partition_size
        return self.padded(ranks) // size if size > 1 and not self.whole else 0

    def persists(self, zero: DeepSpeedZeroConfig) -> bool:
        """Whether it is small enough to stay gathered between steps."""
        return self.numel <= zero.param_persistence_threshold and not self.released


@dataclass
class ModuleParameters:
    """The parameters of one module, in DeepSpeed's order.

    Attributes:
        gathered: those that a call of the module gathers: ``below`` for a leaf, ``direct`` for every other module.
        direct: its own, without those of its submodules.
        below: its own and those of its submodules.
        leaf: whether DeepSpeed treats the module with all that is below it as one.
    """

    gathered: list[ShardedParameter]
    direct: list[ShardedParameter]
    below: list[ShardedParameter]
    leaf: bool


@dataclass(frozen=True)
class Inventory:
    """Every Parameter of a model once, and the parameter groups of its optimizer.

    Attributes:
        parameters: all of them, in the order in which they are made: weights, then scales and adapters.
        groups: by the name of the optimizer's group, the parameters in it, which train.
        scales: bytes of all scales. They are among ``parameters`` too.
        quantized: how many weight elements have codes.
        beside: bytes that a rank holds beside the parameters under stage 3, by item.
        gatherer: what replays their gathering under stage 3; None for :class:`engine.memory.zero_gather.Gatherer`.
    """

    parameters: list[ShardedParameter]
    groups: dict[str, list[ShardedParameter]]
    scales: int = 0
    quantized: int = 0
    beside: Mapping[str, int] = field(default_factory=dict)
    gatherer: Callable[..., Any] | None = None

    @property
    def trained(self) -> list[ShardedParameter]:
        """All parameters that train, in the order of the groups."""
        return [parameter for group in self.groups.values() for parameter in group]


def take_inventory(model: nn.Module, optim: OptimRecipe | None) -> Inventory:
    """List the Parameters of a model on the meta device.

    Args:
        model: the model, with what trains as in the run.
        optim: the recipe's section; None for a model that is frozen, which has no parameter groups.
    """
    made = sorted(classify(model), key=lambda owned: owned.kind in ADDED)
    whole = {id(parameter) for parameter in to_be_whole(one.parameter for one in made if one.kind in SCALES)}
    known = {
        id(owned.parameter): ShardedParameter(
            owned.name,
            order,
            owned.parameter.numel(),
            owned.parameter.element_size(),
            owned.parameter.requires_grad,
            str(owned.parameter.dtype),
            released=owned.kind in ADDED,
            whole=id(owned.parameter) in whole,
        )
        for order, owned in enumerate(made)
    }
    groups = parameter_groups(model, optim) if optim is not None else []
    scales = [known[id(owned.parameter)] for owned in made if owned.kind in SCALES]
    return Inventory(
        list(known.values()),
        {group["name"]: [known[id(parameter)] for parameter in group["params"]] for group in groups},
        sum(parameter.numel * parameter.size for parameter in scales),
    )


def module_parameters(model: nn.Module, inventory: Inventory, ds_config: dict[str, Any]) -> dict[str, ModuleParameters]:
    """The parameters of every module that ZeRO-3 hooks, by module name: of all modules but those inside a leaf."""
    known = {parameter.name: parameter for parameter in inventory.parameters}
    by_id = {id(own): known[name] for name, own in model.named_parameters() if name in known}
    leaves = leaves_of_stage_3(model, ds_config)
    found: dict[str, ModuleParameters] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        direct = _ordered(by_id[id(own)] for own in module.parameters(recurse=False))
        below = _ordered(by_id[id(own)] for own in module.parameters())
        leaf = id(module) in leaves
        if leaf:
            inside |= {id(part) for part in module.modules() if part is not module}
        found[name] = ModuleParameters(below if leaf else direct, direct, below, leaf)
    return found


def _ordered(parameters: Iterable[ShardedParameter]) -> list[ShardedParameter]:
    return sorted(dict.fromkeys(parameters), key=lambda parameter: parameter.order)


def flat_elements(group: Sequence[ShardedParameter], ranks: int) -> int:
    """Elements of a group's flat buffer on stages 1 and 2, which is padded to a multiple of two per rank."""
    return math.ceil(elements(group) / (2 * ranks)) * 2 * ranks


def elements(parameters: Iterable[ShardedParameter]) -> int:
    """How many elements the parameters have together."""
    return sum(parameter.numel for parameter in parameters)
