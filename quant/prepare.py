"""Replaces the Linears of a model by QuantLinears and decides which of them share a scale.

Serving fuses q/k/v and gate/up into one GEMM and keeps one scale for the fused weight and one for the input; a fused
MoE kernel keeps one input scale per layer for all experts. If training used separate scales, serving would requantise
to the largest one and compute something else than was trained. So the same groups share one Parameter here:

* a weight scale per tensor: over q/k/v, over gate/up (of one expert in an MoE); finer scales belong to one row, never
  shared;
* a static input scale: over q/k/v, over gate/up, and over all experts of an MoE layer, one for gate/up and one for
  down.

The Parameter is registered on every member and owned by the first one in module order, so ``model.parameters()`` lists
it once. A group that is only partly quantised is an error: what is served could not be what was trained.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from quant.inputs import SharedInput
from quant.linear import QuantLinear
from quant.observe import Observer
from quant.spec import Scheme, TensorSpec

# Layers that serving fuses, by the last component of their names; the members of a group have one parent.
FUSED: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# Anchored as whole names: `.*gate.*` would also take gate_proj. A model need not have any of these.
DEFAULT_EXEMPT: tuple[str, ...] = (
    r"(.*\.)?lm_head",
    r"(.*\.)?embed_tokens",
    r"(.*\.)?(gate|router|shared_expert_gate)",  # MoE routers, whether nn.Linear or a class of their own
    r"(.*\.)?router\..+",
)

_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.\d+\.(?P<projection>gate_proj|up_proj|down_proj)")


@dataclass(frozen=True)
class ScaleGroup:
    """One scale and the layers that share it.

    Attributes:
        owner: name of the first member in module order; the scale's Parameters carry its name in
            ``named_parameters()``.
        members: names of all layers that share the scale, in module order.
        s0: the frozen fp32 scale, shape ``(1,)``, ``(out, 1)`` or ``(out, groups)``; NaN until filled.
        theta: its learned correction in the model's dtype, 0 at the start, or None for a static scale.
        observer: of the group's input, or None in a group of weights.
    """

    owner: str
    members: list[str]
    s0: nn.Parameter
    theta: nn.Parameter | None
    observer: Observer | None = None


@dataclass(frozen=True)
class Quantization:
    """What :func:`prepare` did to a model, and the switches.

    Attributes:
        scheme: of all layers.
        layers: the QuantLinears by module name, in module order.
        exempt: names of the modules that an exempt pattern matched (routers that are no nn.Linear among them), in
            module order.
        weight_groups: every weight scale; each layer is a member of one.
        input_groups: every input scale; empty where the scheme leaves inputs alone.
        simulated: names of the layers that the fp8 GEMM was asked for and cannot take; they simulate.
    """

    scheme: Scheme
    layers: dict[str, QuantLinear]
    exempt: list[str]
    weight_groups: list[ScaleGroup] = field(default_factory=list)
    input_groups: list[ScaleGroup] = field(default_factory=list)
    simulated: list[str] = field(default_factory=list)

    def set_fake_quant(self, weights: bool, activations: bool, pattern: str | None = None) -> None:
        """Switch fake quantisation of weights and of the inputs that the scheme quantises.

        Args:
            weights: whether weights are fake-quantised from now on.
            activations: the same of inputs; without effect where the scheme leaves them alone.
            pattern: a regex that names the layers to switch in full; all of them without it.

        Raises:
            ValueError: the pattern matches no layer.
        """
        for name in self.matching(pattern):
            self.layers[name].weight_fake_quant = weights
            self.layers[name].input_fake_quant = activations and self.scheme.activations is not None
        self._recount_inputs()

    def matching(self, pattern: str | None) -> list[str]:
        """Names of the layers that the regex matches in full; all of them without one.

        Raises:
            ValueError: the pattern matches no layer.
        """
        names = [name for name in self.layers if pattern is None or re.fullmatch(pattern, name)]
        if not names:
            raise ValueError(
                f"pattern {pattern!r} matches no quantised layer; names look like {_examples(self.layers)}"
            )
        return names

    def fake_quant_state(self) -> dict[str, tuple[bool, bool]]:
        """What is fake-quantised now, (weight, input) by layer; :meth:`restore_fake_quant` takes it back."""
        return {name: (layer.weight_fake_quant, layer.input_fake_quant) for name, layer in self.layers.items()}

    def restore_fake_quant(self, state: Mapping[str, tuple[bool, bool]]) -> None:
        """Set the switches of every layer as :meth:`fake_quant_state` gave them."""
        for name, layer in self.layers.items():
            layer.weight_fake_quant, layer.input_fake_quant = state[name]
        self._recount_inputs()

    def _recount_inputs(self) -> None:
        """A quantised input is held until all have taken it that quantise theirs."""
        sharing = [layer for layer in self.layers.values() if layer.shared_input is not None]
        for layer in sharing:
            assert layer.shared_input is not None
            layer.shared_input.consumers = 0
            layer.shared_input.drop()
        for layer in sharing:
            assert layer.shared_input is not None
            layer.shared_input.consumers += layer.input_fake_quant

    @property
    def observing(self) -> bool:
        """Whether inputs are being watched."""
        return any(layer.input_observer is not None for layer in self.layers.values())

    def observe(self, on: bool) -> None:
        """Start or stop watching the inputs of every input group. Starting forgets what was seen before."""
        for group in self.input_groups:
            if on and group.observer is not None:
                group.observer.reset()
            for name in group.members:
                self.layers[name].input_observer = group.observer if on else None


def prepare(
    model: nn.Module,
    scheme: Scheme,
    *,
    exempt: Sequence[str] = DEFAULT_EXEMPT,
    learn_weight_scale: bool,
    learn_input_scale: bool,
    fp8_gemm: bool = False,
) -> Quantization:
    """Replace every nn.Linear of ``model`` that is not exempt by a QuantLinear, in place.

    Weights and biases are the same Parameters afterwards. The scales are new ones on the weights' device, not
    partitioned: under ZeRO-3 partition them next. They start as NaN, so that one that nothing fills shows in the loss.

    Args:
        model: any module tree; Linears may be partitioned or on the meta device.
        scheme: how they are quantised.
        exempt: regexes on full module names (``re.fullmatch``). One that is not in :data:`DEFAULT_EXEMPT` must match.
        learn_weight_scale: whether weight scales get a theta.
        learn_input_scale: whether input scales get one.
        fp8_gemm: multiply codes, not fake-quantised values, in the layers whose shapes allow it.

    Raises:
        ValueError: a pattern matches nothing, nothing is left to quantise, a group is incomplete, a weight is shared
            with another module, a layer does not fit the scheme, there is no input scale to learn, or no fp8 GEMM.
    """
    if learn_input_scale and scheme.static_input is None:
        raise ValueError(f"scheme {scheme.name!r} does not quantise inputs, so there is no input scale to learn")
    if fp8_gemm and not scheme.has_fp8_gemm:
        raise ValueError(f"scheme {scheme.name!r} has no fp8 codes per tensor on both sides, which the fp8 GEMM needs")
    modules = dict(model.named_modules())
    exempt_names = _match_exempt(modules, exempt)
    linears = _linears_to_quantise(modules, set(exempt_names))
    _check_not_tied(modules, linears)
    weight_groups = [
        _weight_group(members, linears, scheme.weights, learn_weight_scale)
        for members in _grouped(linears, modules, scheme.weights.granularity == "tensor", across_experts=False)
    ]
    input_groups: list[ScaleGroup] = []
    if scheme.static_input is not None:
        input_groups = [
            _input_group(members, linears, scheme.static_input, learn_input_scale)
            for members in _grouped(linears, modules, True, across_experts=True)
        ]
    layers = _replace(modules, linears, scheme, weight_groups, input_groups)
    _share_inputs(layers, input_groups)
    simulated = _use_fp8_gemm(layers) if fp8_gemm else []
    return Quantization(scheme, layers, exempt_names, weight_groups, input_groups, simulated)


def _match_exempt(modules: dict[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    """Names of the modules that a pattern matches; an error for a pattern of the user's that matches none."""
    matched: set[str] = set()
    for pattern in patterns:
        names = {name for name in modules if re.fullmatch(pattern, name)}
        if not names and pattern not in DEFAULT_EXEMPT:
            linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
            raise ValueError(
                f"exempt pattern {pattern!r} matches no module; it must match a full name such as {_examples(linears)}"
            )
        matched |= names
    return [name for name in modules if name in matched]


def _linears_to_quantise(modules: dict[str, nn.Module], exempt: set[str]) -> dict[str, nn.Linear]:
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) and name not in exempt}
    if not linears:
        raise ValueError(
            f"nothing to quantise: every nn.Linear of {type(modules['']).__name__} is exempt, or it has none"
        )
    for name, linear in linears.items():
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"{name} is a {type(linear).__name__}, a subclass of nn.Linear, whose forward QuantLinear might not "
                f"reproduce; exempt it"
            )
    return linears


def _check_not_tied(modules: dict[str, nn.Module], linears: dict[str, nn.Linear]) -> None:
    """A tied weight has one value on disk, so it cannot be quantised in one place and not in the other."""
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    for name, linear in linears.items():
        if len(users[id(linear.weight)]) > 1:
            raise ValueError(f"{' and '.join(users[id(linear.weight)])} share one weight; exempt {name}")


def _grouped(
    linears: dict[str, nn.Linear], modules: dict[str, nn.Module], shared: bool, *, across_experts: bool
) -> list[list[str]]:
    """Names of the layers that share a scale, each name in one list, lists and names in module order."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in linears:
        key = _group_key(name, modules, linears, across_experts) if shared else (name,)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _group_key(
    name: str, modules: dict[str, nn.Module], linears: dict[str, nn.Linear], across_experts: bool
) -> tuple[str, ...]:
    """What the layers of one group have in common: their parent, or MoE layer, and what serving fuses there."""
    expert = _EXPERT.fullmatch(name)
    fused: tuple[str, ...]
    if across_experts and expert is not None:
        experts = expert["experts"]
        fused = ("down_proj",) if expert["projection"] == "down_proj" else ("gate_proj", "up_proj")
        parents = [f"{experts}.{index}" for index, _ in modules[experts].named_children() if index.isdigit()]
    else:
        parent, _, leaf = name.rpartition(".")
        fused = next((names for names in FUSED if leaf in names), (leaf,))
        experts, parents = parent, [parent]
        if not any(f"{parent}.{other}".lstrip(".") in modules for other in fused if other != leaf):
            fused = (leaf,)  # attention without k and v projections, an MLP without a gate: nothing to fuse with
    members = [f"{parent}.{leaf}".lstrip(".") for parent in parents for leaf in fused]
    missing = [member for member in members if member not in linears]
    if missing:
        raise ValueError(
            f"{', '.join(members)} are served with one scale, so all or none of them can be quantised, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} exempt or no nn.Linear; exempt the others too"
        )
    return (experts, *fused)


def _weight_group(members: list[str], linears: dict[str, nn.Linear], spec: TensorSpec, learn: bool) -> ScaleGroup:
    owner = linears[members[0]]
    try:
        shape = spec.scale_shape((owner.out_features, owner.in_features))
    except ValueError as error:
        raise ValueError(f"{members[0]}: {error}") from None
    return ScaleGroup(members[0], members, *_new_scale(owner, shape, learn))


def _input_group(members: list[str], linears: dict[str, nn.Linear], spec: TensorSpec, learn: bool) -> ScaleGroup:
    widths = {name: linears[name].in_features for name in members}
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"layers that share an input scale read inputs of different widths: {widths}; exempt all of them"
        )
    return ScaleGroup(members[0], members, *_new_scale(linears[members[0]], (1,), learn), Observer(spec))


def _new_scale(owner: nn.Linear, shape: tuple[int, ...], learn: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A frozen fp32 scale of NaNs, and a theta of zeros in the dtype of the weight if it learns."""
    device, dtype = owner.weight.device, owner.weight.dtype
    s0 = nn.Parameter(torch.full(shape, torch.nan, dtype=torch.float32, device=device), requires_grad=False)
    return s0, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) if learn else None


def _replace(
    modules: dict[str, nn.Module],
    linears: dict[str, nn.Linear],
    scheme: Scheme,
    weight_groups: list[ScaleGroup],
    input_groups: list[ScaleGroup],
) -> dict[str, QuantLinear]:
    weight_group = {name: group for group in weight_groups for name in group.members}
    input_group = {name: group for group in input_groups for name in group.members}
    layers = {}
    for name, linear in linears.items():
        ours, its_input = weight_group[name], input_group.get(name)
        shapes = [(linears[member].out_features, linears[member].in_features) for member in ours.members]
        layers[name] = QuantLinear.from_linear(
            linear,
            scheme,
            weight_s0=ours.s0,
            weight_theta=ours.theta,
            input_s0=its_input.s0 if its_input is not None else None,
            input_theta=its_input.theta if its_input is not None else None,
            weight_numel=sum(scheme.weights.elements_per_scale(shape) for shape in shapes),
        )
        parent, _, leaf = name.rpartition(".")
        setattr(modules[parent], leaf, layers[name])
    return layers


def _share_inputs(layers: dict[str, QuantLinear], input_groups: list[ScaleGroup]) -> None:
    """Layers of one parent that serving fuses read one tensor; experts of a layer share a scale, not a tensor."""
    for group in input_groups:
        siblings: dict[str, list[str]] = {}
        for name in group.members:
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
        for names in siblings.values():
            if len(names) > 1:
                shared = SharedInput(len(names))
                for name in names:
                    layers[name].shared_input = shared


def _use_fp8_gemm(layers: dict[str, QuantLinear]) -> list[str]:
    """Switch the layers over that ``torch._scaled_mm`` takes (both sides multiples of 16); names of the others."""
    for layer in layers.values():
        layer.fp8_gemm = layer.in_features % 16 == 0 and layer.out_features % 16 == 0
    return [name for name, layer in layers.items() if not layer.fp8_gemm]


def _examples(names: Iterable[str]) -> str:
    """The first few names, for an error that must show what they look like."""
    return ", ".join(list(names)[:3]) or "(there is none)"
