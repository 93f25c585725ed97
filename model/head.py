"""lm_head as the place where a model gives out something else than logits: its losses, or its hidden states.

transformers' forward ends in lm_head and returns what it gives as ``logits``. Here a :class:`HeadProxy` in its place
gives something else, so that the model's own forward stays what runs (with the auxiliary loss of a MoE, and whatever a
model does around its layers) and no [tokens, vocabulary] tensor has to exist:

* an :class:`LMHead` keeps the Parameters and computes a task with them for the time of a forward. So the losses of
  training are computed: under ZeRO-3 the engine's hooks gather the weight for it and reduce its gradient.
* a :class:`HiddenStates` has none. A model that only runs forward, whose lm_head somebody else gathers and calls,
  returns its hidden states.

Some models go on from what lm_head gave: they multiply the logits, or cap them softly. Their configuration proposes a
:class:`LogitFunction`, and :func:`settle_function` finds out in a forward of two tokens whether the model computes just
that. Then losses apply the function to the logits that they compute, and what the model makes of the losses themselves
is left unused. Of all other models :meth:`HeadProxy.check` sees in their first forward that they change nothing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from model.ranks import raise_everywhere
from quant import QuantLinear

Task = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""hidden states [B, T, H], weight [V, H], bias [V] or None -> what the model returns as its logits"""

# Names in a configuration of what happens to logits after lm_head. None never does anything.
CAPS = (
    "final_logit_softcapping",  # gemma2, gemma3, gemma4, nanochat, ...
    "logits_soft_cap",  # recurrent_gemma
    "output_logit_soft_cap",  # xlstm
)
FACTORS = (
    "logit_scale",  # cohere
    "lm_head_multiplier",  # falcon_h1
    "output_multiplier",
)
DIVISORS = ("logits_scaling",)  # granite
# What goes through a model in the place of logits, to see what it makes of them: both signs, small and far beyond caps,
# all of them numbers of bf16, and one that any factor moves which moves a number of bf16 at all.
PROBE = (-300.0, -40.0, -7.0, -1.0, -0.125, 0.0, 0.0625, 0.5, 1.9921875, 3.0, 20.0, 90.0, 500.0)


class LogitFunction(NamedTuple):
    """What a model computes from the output z of its lm_head: ``factor z``, or ``cap tanh(factor z / cap)``."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """``output`` of lm_head, of any shape, to logits of the same shape and dtype; itself where they are equal."""
        if self == UNCHANGED:
            return output
        logits = output * self.factor
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def chain_(self, gradient: Tensor, logits: Tensor) -> None:
        """Turn the gradient of a loss with respect to ``logits`` into that with respect to lm_head's output, in place.

        The derivative is ``factor``, with a cap times ``1 - tanh^2 = 1 - (logits / cap)^2``.
        """
        if self == UNCHANGED:
            return
        gradient.mul_(self.factor)
        if self.cap is not None:
            gradient.mul_((logits / self.cap).square_().neg_().add_(1.0))


UNCHANGED = LogitFunction()


def proposed_function(config: PretrainedConfig) -> LogitFunction:
    """The function of logits that a configuration proposes; which one the model computes, only a forward shows."""
    text = config.get_text_config()

    def value(name: str) -> float:
        found = getattr(text, name, None)
        return 1.0 if found is None else float(found)

    factor = math.prod(value(name) for name in FACTORS) / math.prod(value(name) for name in DIVISORS)
    cap = next((float(found) for name in CAPS if (found := getattr(text, name, None)) is not None), None)
    return LogitFunction(factor, cap)


def hidden_states(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The task of an lm_head whose model shall return its hidden states."""
    return hidden


class HeadProxy(nn.Module):
    """A module in lm_head's place that gives something else than logits.

    Attributes:
        function: what the model makes of the output of its lm_head, see :func:`settle_function`.
    """

    function = UNCHANGED
    _checked = False
    _probing = False
    _given: Tensor | None = None  # the last that was given, until it has been checked
    _caught: Tensor | None = None  # the last that was given, with the hooks of the module's call on it

    def emit(self, instead: Tensor) -> Tensor:
        """Return ``instead``, which :meth:`taken` finds again behind the model's forward."""
        if self._probing:
            return instead.new_tensor(PROBE).expand(*instead.shape[:-1], -1)
        if not self._checked:
            self._given = instead.detach()
        return instead

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Around a forward of the model, so that :meth:`taken` has what was given, whatever the model makes of it."""
        if self.function == UNCHANGED:
            yield
            return

        def catch(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._caught = output

        # The last hook: under stage 3 the engine's own, which wrap the output, must have run.
        hook = self.register_forward_hook(catch)
        try:
            yield
        finally:
            hook.remove()

    def collect(self, logits: Tensor, model: str) -> Tensor:
        """What this module gave in the forward that returned ``logits``; a collective in the first call alone.

        Raises:
            RankError: see :meth:`check`.
        """
        if self.function == UNCHANGED:
            self.check(logits, model)
            # The model's output, not what was given: under stage 3 the engine's hooks hang on it.
            return logits
        caught, self._caught = self._caught, None
        assert caught is not None, f"the forward of {model} does not end in its lm_head, or was not within catching()"
        return caught

    def check(self, logits: Tensor, model: str) -> None:
        """Check that a model returned as its logits what this module gave it; a collective in the first call alone.

        What is not finite proves nothing, and passes.

        Args:
            logits: of the model's output.
            model: name of its class, for the error.

        Raises:
            RankError: on every rank: it goes on from its logits (a softcap, a factor) in a way that its configuration
                does not show.
        """
        if self._checked:
            return
        given, self._given = self._given, None
        logits = logits.detach()
        if given is None:  # the forward did not come past here
            same = not logits.isfinite().all()
        else:
            same = given.shape == logits.shape and torch.equal(given, logits.to(given.dtype))
            same = same or not given.isfinite().all()
        raise_everywhere(
            None
            if same
            else f"{model} changes its logits after lm_head in a way that its configuration does not show: expected "
            "logits that are lm_head's output"
        )
        self._checked = True


class HiddenStates(HeadProxy):
    """Stands where lm_head was taken out: the model returns its hidden states as logits."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input``, the hidden states."""
        return self.emit(input)


class LMHead(HeadProxy):
    """The model's output layer, which computes something else while :meth:`computing`.

    The weight of a quantized output layer is fake-quantized once, for all that is computed from it.

    Attributes:
        in_features, out_features: of the layer.
        weight, bias: its Parameters, under their own names, so that checkpoints have no others.
    """

    in_features: int
    out_features: int
    weight: Any  # the bases of the two kinds of heads differ in how they declare it
    bias: Any
    _task: Task | None = None

    def used_weight(self) -> Tensor:
        """The weight ``[V, H]`` that hidden states are multiplied with."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., H] to logits [..., V], or to what the task makes of it."""
        if self._task is None:
            return super().forward(input)
        return self.emit(self._task(input, self.used_weight(), self.bias))

    @contextmanager
    def computing(self, task: Task) -> Iterator[None]:
        """Inside the block a forward of the model returns what ``task`` gives as its logits."""
        if self._task is not None:
            raise RuntimeError("lm_head computes a task already: these blocks must not nest")
        self._task = task
        try:
            with self.catching():
                yield
        finally:
            self._task = None


class PlainHead(LMHead, nn.Linear):
    """The head that stands in place of an nn.Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        """Takes over the Parameter objects of ``linear``, so that tied ones stay tied and partitioned ones so."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def used_weight(self) -> Tensor:
        """The Parameter itself."""
        return self.weight


class QuantHead(LMHead, QuantLinear):  # type: ignore[misc]  # it is no stack: its forward takes no offsets
    """The head that stands in place of a QuantLinear whose input is not quantized."""

    def __init__(self, linear: QuantLinear) -> None:
        """Takes over the Parameter objects and the switch of ``linear``, in whose place it stands from now on."""
        QuantLinear.__init__(
            self,
            linear,
            linear.scheme,
            weight=linear.scale_of_weight,
            input=None,
            weight_numel=linear.weight_numel,
        )
        self.weight_fake_quant = linear.weight_fake_quant

    def used_weight(self) -> Tensor:
        """The weight, fake-quantized."""
        return QuantLinear.used_weight(self)


def settle_function(head_proxy: HeadProxy, forward: Callable[[Tensor], Tensor], config: PretrainedConfig) -> None:
    """Find out what a model makes of its lm_head's output, and set ``head_proxy.function``; a collective if it does so.

    Models whose configuration proposes nothing run no forward here.

    Args:
        head_proxy: what stands in lm_head's place.
        forward: runs the model on token ids [1, 2] and returns its logits.
        config: the model's.

    Raises:
        RankError: on every rank: the model computes neither what its configuration proposes nor the identity.
    """
    proposed = proposed_function(config)
    if proposed != UNCHANGED:
        head_proxy.function = _checked_function(proposed, head_proxy, forward, config)


@torch.no_grad()
def _checked_function(
    proposed: LogitFunction, head_proxy: HeadProxy, forward: Callable[[Tensor], Tensor], config: PretrainedConfig
) -> LogitFunction:
    """``proposed`` or the identity, whichever a forward shows; arguments and error of :func:`settle_function`."""
    head_proxy._probing = True
    try:
        found = forward(torch.ones(1, 2, dtype=torch.int64)).float()
    finally:
        head_proxy._probing = False
    probe = found.new_tensor(PROBE).expand(*found.shape[:-1], -1)
    # Nothing is rounded where nothing is done, so that a class which ignores a factor near 1 is told from one that
    # applies it. Others compute in their own dtype: bf16 rounds each of three operations by 2^-9 at most.
    comparable = found.shape == probe.shape
    unchanged = comparable and torch.equal(found, probe)
    raise_everywhere(
        None
        if unchanged or (comparable and torch.allclose(found, proposed(probe), rtol=2**-6, atol=1e-6))
        else f"{type(config).__name__} ({config.model_type}) changes its logits after lm_head in another way than its "
        f"configuration says ({proposed}): its losses cannot be computed from the hidden states"
    )
    return UNCHANGED if unchanged else proposed


def output_head(model: PreTrainedModel) -> tuple[str, nn.Linear | QuantLinear]:
    """Name and module of the model's output embedding.

    Raises:
        ValueError: there is none, or it is no plain nn.Linear, quantized or not.
    """
    module = model.get_output_embeddings()
    if type(module) not in (nn.Linear, PlainHead, QuantLinear, QuantHead):
        raise ValueError(
            f"the output embedding of {type(model).__name__} is a {type(module).__name__}, expected an nn.Linear: its "
            "losses are computed from the hidden states"
        )
    assert isinstance(module, (nn.Linear, QuantLinear))
    return next(name for name, child in model.named_modules() if child is module), module


def install_head(model: PreTrainedModel) -> LMHead:
    """Replace the model's output embedding by an :class:`LMHead`, in place, with the same Parameters.

    After ``quant.prepare`` (which quantizes plain Linears) and before ``deepspeed.initialize`` (which hooks modules).

    Raises:
        ValueError: see :func:`output_head`.
    """
    name, linear = output_head(model)
    if isinstance(linear, LMHead):
        return linear
    head = QuantHead(linear) if isinstance(linear, QuantLinear) else PlainHead(linear)
    model.set_submodule(name, head)
    return head


def take_out_head(model: PreTrainedModel) -> tuple[nn.Module, HiddenStates]:
    """Take the output embedding, of whatever class, out of a model that only runs forward.

    Under ZeRO-3 nothing gathers its Parameters from then on but who calls it (``model.zero.gathered``), on as many
    hidden states at a time as the caller wants logits of. Before ``deepspeed.initialize``.

    Returns:
        The output embedding, and what stands in its place.

    Raises:
        ValueError: there is none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embedding: expected a causal language model")
    head_proxy = HiddenStates()
    model.set_submodule(next(name for name, child in model.named_modules() if child is head), head_proxy)
    return head, head_proxy
