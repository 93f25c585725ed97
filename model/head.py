"""Replace lm_head so that forward returns the losses or hidden states.

transformers' forward ends in lm_head and returns its output as ``logits``. A :class:`HeadProxy` in place of lm_head
returns another tensor, so the model's own forward still runs (with a MoE's auxiliary loss, and everything around its
layers), but no [tokens, vocabulary] tensor needs to exist. An :class:`LMHead` keeps the Parameters and computes the
losses during a forward: under ZeRO-3 the engine's hooks gather its weight and reduce the gradient. With
:class:`HiddenStates`, which has no Parameters, a forward-only model returns its hidden states; the caller gathers
lm_head and calls it separately.

Some models multiply or softcap the logits. A :class:`LogitFunction` is derived from their configuration, and
:func:`settle_function` tests in a forward of two tokens if the model computes exactly this function. If so, losses
apply the function to the logits that they compute, and the model's own processing is ignored. For all other models,
:meth:`HeadProxy.check` verifies in the first forward that they do not change the head's output.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from model.ranks import raise_everywhere
from model.zero import full_shape
from quant import QuantLinear
from quant.packed_weight import as_weight

Task = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function from hidden states [B, T, H], weight [V, H] and bias [V] or None to what the model returns as its logits."""

# Names in configurations for operations on logits after lm_head. None disables each.
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
# Values sent through a model as logits, to test its processing: both signs, small and far beyond caps, all exact in
# bf16, and one that changes under any factor that changes a bf16 number at all.
PROBE = (-300.0, -40.0, -7.0, -1.0, -0.125, 0.0, 0.0625, 0.5, 1.9921875, 3.0, 20.0, 90.0, 500.0)


class LogitFunction(NamedTuple):
    """Function of lm_head's output z that a model computes: ``factor z``, or ``cap tanh(factor z / cap)``."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """Compute the model's logits from lm_head's output, in its shape and dtype; without factor and cap they are
        ``output`` itself."""
        if self == UNCHANGED:
            return output
        logits = output * self.factor
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def chain_(self, gradient: Tensor, logits: Tensor) -> None:
        """Convert the gradient of a loss with respect to ``logits`` into the gradient with respect to lm_head's output,
        in place: times ``factor``, and with a cap times ``1 - tanh^2 = 1 - (logits / cap)^2``."""
        if self == UNCHANGED:
            return
        gradient.mul_(self.factor)
        if self.cap is not None:
            gradient.mul_((logits / self.cap).square_().neg_().add_(1.0))


UNCHANGED = LogitFunction()


def proposed_function(config: PretrainedConfig) -> LogitFunction:
    """Return the function of lm_head's output that the keys of a configuration suggest; only a forward shows if the
    model computes it (:func:`settle_function`)."""
    text = config.get_text_config()

    def value(name: str) -> float:
        found = getattr(text, name, None)
        return 1.0 if found is None else float(found)

    factor = math.prod(value(name) for name in FACTORS) / math.prod(value(name) for name in DIVISORS)
    cap = next((float(found) for name in CAPS if (found := getattr(text, name, None)) is not None), None)
    return LogitFunction(factor, cap)


def hidden_states(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``hidden`` unchanged: the task (see :class:`LMHead`) that makes a model return its hidden states."""
    return hidden


class HeadProxy(nn.Module):
    """Module in lm_head's place that returns another tensor, such as the hidden states, where the model expects logits.

    ``function`` describes the factor and the softcap that the model applies to lm_head's output.
    """

    function = UNCHANGED
    _checked = False
    _probing = False
    _given: Tensor | None = None  # last emitted tensor, until it has been checked
    _caught: Tensor | None = None  # last emitted tensor, after the hooks of the module's call

    def emit(self, instead: Tensor) -> Tensor:
        """Return ``instead`` in place of logits, and keep it for :meth:`check`; in the forward of
        :func:`settle_function` return ``PROBE`` for every token instead."""
        if self._probing:
            return instead.new_tensor(PROBE).expand(*instead.shape[:-1], -1)
        if not self._checked and self.function == UNCHANGED:
            self._given = instead.detach()
        return instead

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Wrap a forward of the model, so that :meth:`collect` can return the emitted tensor even if the model applies
        ``function`` to it; no effect without a function."""
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
        """Return the tensor that :meth:`emit` put in place of logits in the model's last forward.

        That forward must have run inside :meth:`catching`, and returned ``logits``; ``model`` names the model in
        errors. If the model has no ``function``, this runs :meth:`check`: the first call is a collective, and may raise
        RankError.
        """
        if self.function == UNCHANGED:
            self.check(logits, model)
            # The model's output, not the emitted tensor: under stage 3 the engine's hooks are attached to it.
            return logits
        caught, self._caught = self._caught, None
        assert caught is not None, f"the forward of {model} does not end in its lm_head, or was not within catching()"
        return caught

    def check(self, logits: Tensor, model: str) -> None:
        """Check in the first call, a collective, that the model returned the emitted tensor unchanged as ``logits``;
        later calls do nothing. Tensors with NaN or Inf pass, as they cannot be compared. Raises RankError on every
        rank, with the name ``model``, if the model processes its logits (softcap, factor) but its configuration does
        not show how."""
        if self._checked:
            return
        given, self._given = self._given, None
        logits = logits.detach()
        if given is None:  # the forward did not call this module
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
    """Replacement of a removed lm_head: the model returns its hidden states as logits."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input``, the hidden states."""
        return self.emit(input)


class LMHead(HeadProxy):
    """Output layer of the model. Inside :meth:`computing` it computes a task instead of logits: a function of hidden
    states, weight and bias, such as losses. A quantized weight is fake-quantized once for the task. The Parameters have
    the usual names, so that checkpoints do not change."""

    in_features: int
    out_features: int
    weight: Any  # the base classes of the two heads declare it differently
    bias: Any
    used_weight: Any  # method of the two heads: returns the weight [V, H] that multiplies hidden states
    _task: Task | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Compute logits [..., V] from hidden states ``input`` [..., H]; inside :meth:`computing`, the result of the
        task."""
        if self._task is None:
            return super().forward(input)
        return self.emit(self._task(input, self.used_weight(), self.bias))

    @contextmanager
    def computing(self, task: Task) -> Iterator[None]:
        """Make forwards of the model inside the block return the result of ``task`` as logits. Raises RuntimeError for
        nested blocks."""
        if self._task is not None:
            raise RuntimeError("LMHead.computing: found a block inside another one, expected one at a time")
        self._task = task
        try:
            with self.catching():
                yield
        finally:
            self._task = None


class PlainHead(LMHead, nn.Linear):
    """Output layer that replaces an nn.Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        """Take over the Parameter objects of ``linear``, so that they stay tied and partitioned."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def used_weight(self) -> Tensor:
        """Return the Parameter itself."""
        return self.weight


class QuantHead(LMHead, QuantLinear):  # type: ignore[misc]  # it is no stack: its forward takes no offsets
    """Output layer that replaces a QuantLinear whose input is not quantized."""

    def __init__(self, linear: QuantLinear) -> None:
        """Take over the Parameter objects of ``linear``, and its ``weight_fake_quant``."""
        QuantLinear.__init__(
            self,
            linear,
            linear.scheme,
            weight=linear.scale_of_weight,
            input=None,
            weight_numel=linear.weight_numel,
        )
        self.weight_fake_quant = linear.weight_fake_quant


@torch.no_grad()
def settle_function(head_proxy: HeadProxy, forward: Callable[[Tensor], Tensor], config: PretrainedConfig) -> None:
    """Find the function that a model applies to lm_head's output, and set ``head_proxy.function``; a collective. If the
    configuration suggests no function, nothing is set and no forward runs.

    Args:
        head_proxy: module in lm_head's place.
        forward: runs the model on token ids of shape [1, 2] and returns its logits.
        config: configuration of the model.

    Raises:
        RankError: on every rank: the model computes neither the function that its configuration suggests nor the
            identity, so losses cannot be computed from its hidden states.
    """
    proposed = proposed_function(config)
    if proposed == UNCHANGED:
        return
    head_proxy._probing = True
    try:
        found = forward(torch.ones(1, 2, dtype=torch.int64)).float()
    finally:
        head_proxy._probing = False
    probe = found.new_tensor(PROBE).expand(*found.shape[:-1], -1)
    # The identity does not round, so a class that ignores a factor near 1 is distinguished from a class that applies
    # it. Classes with a function compute in their own dtype: bf16 rounds each of three operations by 2^-9 at most.
    comparable = found.shape == probe.shape
    unchanged = comparable and torch.equal(found, probe)
    raise_everywhere(
        None
        if unchanged or (comparable and torch.allclose(found, proposed(probe), rtol=2**-6, atol=1e-6))
        else f"{type(config).__name__} ({config.model_type}) changes its logits after lm_head in another way than its "
        f"configuration says ({proposed}): its losses cannot be computed from the hidden states"
    )
    head_proxy.function = UNCHANGED if unchanged else proposed


def output_head(model: PreTrainedModel) -> tuple[str, nn.Linear | QuantLinear]:
    """Find name and module of the model's output embedding (lm_head). Raises ValueError if the model has none, or one
    that is neither an nn.Linear nor a QuantLinear."""
    module = model.get_output_embeddings()
    if type(module) not in (nn.Linear, PlainHead, QuantLinear, QuantHead):
        raise ValueError(
            f"the output embedding of {type(model).__name__} is a {type(module).__name__}, expected an nn.Linear: its "
            "losses are computed from the hidden states"
        )
    assert isinstance(module, (nn.Linear, QuantLinear))
    return next(name for name, child in model.named_modules() if child is module), module


def embedding_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of the model's input embeddings, also if they are partitioned."""
    return full_shape(as_weight(model.get_input_embeddings().get_parameter("weight")))[0]


def install_head(model: PreTrainedModel) -> LMHead:
    """Replace the model's output embedding by an :class:`LMHead`, in place, with the same Parameters, and return it; an
    LMHead that is there already stays. Call this after ``quant.replace_layers`` (which quantizes plain Linears) and
    before ``deepspeed.initialize`` (which hooks modules). Raises ValueError as :func:`output_head`."""
    name, linear = output_head(model)
    if isinstance(linear, LMHead):
        return linear
    head = QuantHead(linear) if isinstance(linear, QuantLinear) else PlainHead(linear)
    model.set_submodule(name, head)
    return head


def take_out_head(model: PreTrainedModel) -> tuple[nn.Module, HiddenStates]:
    """Remove the output embedding, of any class, from a forward-only model, before ``deepspeed.initialize``, and return
    it with its replacement. From then on the caller computes logits from the hidden states, for as many tokens at a
    time as needed; under ZeRO-3 it must gather the embedding's Parameters (``model.zero.gathered``). Raises ValueError
    if the model has no output embedding."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embedding: expected a causal language model")
    head_proxy = HiddenStates()
    model.set_submodule(next(name for name, child in model.named_modules() if child is head), head_proxy)
    return head, head_proxy
