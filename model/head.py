"""lm_head as the place where a model gives out something else than logits: its losses, or its hidden states.

transformers' forward ends in lm_head and returns what it gives as ``logits``. Here a :class:`StandIn` in its place
gives something else, so that the model's own forward stays what runs (with the auxiliary loss of a MoE, and whatever a
model does around its layers) and no [tokens, vocabulary] tensor has to exist:

* an :class:`LMHead` keeps the Parameters and computes a task with them for the time of a forward. So the losses of
  training are computed: under ZeRO-3 the engine's hooks gather the weight for it and reduce its gradient.
* a :class:`HiddenStates` has none. A model that only runs forward, whose lm_head somebody else gathers and calls,
  returns its hidden states.

Either works for models alone that return as logits just what lm_head gave: :func:`changes_logits` reads that from their
configuration, and :meth:`StandIn.check` sees it in their first forward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from model.ranks import raise_everywhere
from quant import QuantLinear

Task = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""hidden states [B, T, H], weight [V, H], bias [V] or None -> what the model returns as its logits"""

# By name, the value with which it changes nothing. Beside None, which never does.
CHANGES_LOGITS = {
    "final_logit_softcapping": None,  # gemma2, gemma3, nanochat, ...
    "logits_soft_cap": None,  # recurrent_gemma
    "output_logit_soft_cap": None,  # xlstm
    "logit_scale": 1.0,  # cohere
    "logits_scaling": 1.0,  # granite
    "lm_head_multiplier": 1.0,  # falcon_h1
    "output_multiplier": 1.0,
}


def hidden_states(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The task of an lm_head whose model shall return its hidden states."""
    return hidden


class StandIn(nn.Module):
    """A module in lm_head's place that gives something else than logits."""

    _checked = False
    _given: Tensor | None = None  # the last that was given, until it has been checked

    def give(self, instead: Tensor) -> Tensor:
        """Return ``instead``, which :meth:`check` expects to find in the model's output."""
        if not self._checked:
            self._given = instead.detach()
        return instead

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


class HiddenStates(StandIn):
    """Stands where lm_head was taken out: the model returns its hidden states as logits."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input``, the hidden states."""
        return self.give(input)


class LMHead(StandIn):
    """The model's output layer, which computes something else while :meth:`computing`.

    The weight of a quantised output layer is fake-quantised once, for all that is computed from it.

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
        return self.give(self._task(input, self.used_weight(), self.bias))

    @contextmanager
    def computing(self, task: Task) -> Iterator[None]:
        """Inside the block a forward of the model returns what ``task`` gives as its logits."""
        if self._task is not None:
            raise RuntimeError("lm_head computes a task already: these blocks must not nest")
        self._task = task
        try:
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
    """The head that stands in place of a QuantLinear whose input is not quantised."""

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
        """The weight, fake-quantised."""
        return QuantLinear.used_weight(self)


def changes_logits(config: PretrainedConfig) -> str | None:
    """Why losses cannot be computed from the hidden states of a model: its logits are more than lm_head's output."""
    text = config.get_text_config()
    found = [
        f"{name}: {value}"
        for name, neutral in CHANGES_LOGITS.items()
        if (value := getattr(text, name, None)) not in (None, neutral)
    ]
    if not found:
        return None
    return (
        f"{type(config).__name__} ({config.model_type}) changes its logits after lm_head ({', '.join(found)} in "
        "config.json), expected logits that are lm_head's output: losses and distillation of such models are not "
        "supported"
    )


def output_head(model: PreTrainedModel) -> tuple[str, nn.Linear | QuantLinear]:
    """Name and module of the model's output embedding.

    Raises:
        ValueError: the model changes its logits after it, there is none, or it is no plain nn.Linear, quantised or not.
    """
    if problem := changes_logits(model.config):
        raise ValueError(problem)
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

    After ``quant.prepare`` (which quantises plain Linears) and before ``deepspeed.initialize`` (which hooks modules).

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
    hidden states at a time as the caller wants logits of. Before ``deepspeed.initialize``, for a model that
    :func:`changes_logits` finds nothing wrong with.

    Returns:
        The output embedding, and what stands in its place.

    Raises:
        ValueError: there is none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embedding: expected a causal language model")
    stand_in = HiddenStates()
    model.set_submodule(next(name for name, child in model.named_modules() if child is head), stand_in)
    return head, stand_in
