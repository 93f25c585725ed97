"""Sequence parallelism (``parallel.sequence``): N neighboring ranks each compute a part of the tokens of one row.

All layers but attention work on single tokens. Attention needs whole rows, but its heads are independent. So around the
model's own attention function, two all-to-all exchanges (DeepSpeed-Ulysses, Jacobs et al. 2023) turn

    queries, keys, values   [batch, all heads, own tokens, D]   into   [batch, heads / N, all tokens, D]
    result                  [batch, all tokens, heads / N, D]   into   [batch, own tokens, all heads, D]

and the backward of each exchange is the other. If N does not divide the length of a row, the ranks' numbers of tokens
differ by one, so that no row needs padding. Keys and values whose heads N does not divide are repeated first.

Every rank of the N is given the whole row (a few integers per token); :class:`SharedRows` cuts it in a hook before the
model's forward. Position ids, by which RoPE rotates, and masks are those of the whole row: transformers creates a mask
with the mask function of the attention implementation, and the function registered here calls the model's own for the
whole row. Boundaries of packed samples are found in the whole row, too.

Gradients need nothing more: ZeRO sums them over all ranks anyway, and the N ranks have different tokens.

Layers that mix tokens elsewhere (a recurrence, a convolution, an indexer) would compute wrong values without an error:
:mod:`engine.session.probes` compares each model with itself on whole rows at the start of a run.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.masking_utils import (
    causal_mask_function,
    find_packed_sequence_indices,
    packed_sequence_compatibility_function,
)

from model.ranks import rank, world_size
from quant.attention import AttentionFunction, Changed, attention_modules, wrap_attention

_NEEDED = "so ranks cannot share its rows: set parallel.sequence to 1"


@dataclass
class _Row:
    """Whole rows of one forward.

    Attributes:
        counts: number of tokens of each rank.
        own: slice of this rank's tokens.
        positions: [B, T].
        mask: [B, T] bool, or None; a finished mask [B, 1, T, T] is used as it is.
        packed: [B, T], index of the sample of each token; None if no row has several, or a mask was given.
        masks: address, shape and strides of the masks that attention may use.
    """

    counts: list[int]
    own: slice
    positions: Tensor
    mask: Tensor | None
    packed: Tensor | None
    masks: set[tuple[Any, ...]] = field(default_factory=set)


class SharedRows:
    """State of a process for forwards in which ranks share rows.

    Attributes:
        ranks: number of ranks that share a row.
        on: True if each rank computes only its own tokens of a row; False if every rank computes whole rows.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.on = False
        self._row: _Row | None = None
        self._group: dist.ProcessGroup | None = None
        self._plain: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    @property
    def index(self) -> int:
        """Index of this rank among the ranks that share its rows, from 0."""
        return rank() % self.ranks

    def start(self) -> None:
        """Share rows from now on; a collective. A single process, which has no other ranks to share with, can
        afterwards run models on the meta device only, as the prediction of memory does."""
        if self._group is None and world_size() > 1:
            for first in range(0, world_size(), self.ranks):  # every rank takes part in creating every group
                group = dist.new_group(list(range(first, first + self.ranks)))
                self._group = group if first <= rank() < first + self.ranks else self._group
        self.on = True

    @contextmanager
    def apart(self, model: PreTrainedModel) -> Iterator[None]:
        """Make every rank compute whole rows inside the block, with the model's own attention implementation; ranks
        share rows after it."""
        name = model.config._attn_implementation
        model.set_attn_implementation(self._plain[model])
        on, self.on = self.on, False
        try:
            yield
        finally:
            self.on = on
            model.set_attn_implementation(name)

    def share(self, length: int, index: int | None = None) -> slice:
        """Return the slice of a row's ``length`` tokens that one of the ranks sharing the row computes: rank ``index``
        (from 0) of them, by default this rank."""
        index = self.index if index is None else index
        return slice(length * index // self.ranks, length * (index + 1) // self.ranks)

    def whole(self, own: Tensor) -> Tensor:
        """Gather the outputs ``own [B, own tokens, H]`` of the last forward from all ranks that share the rows into
        ``[B, T, H]``, a collective; return ``own`` itself if that forward computed whole rows."""
        if self._row is None:
            return own
        batch, _, features = own.shape
        sizes = [batch * count * features for count in self._row.counts]
        flat = self._exchange(own.flatten().repeat(self.ranks), [own.numel()] * self.ranks, sizes)
        return torch.cat([part.view(batch, -1, features) for part in flat.split(sizes)], dim=1)

    def attach(self, model: PreTrainedModel) -> None:
        """Change ``model`` in place so that ranks share its rows once :meth:`start` is called; its forwards then need
        arguments by name and use_cache=False. Raises ValueError if the model takes no position_ids, its attention
        classes are not supported, or ``ranks`` does not divide its number of heads."""
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(f"{type(model).__name__} takes no position_ids, {_NEEDED}")
        attentions = attention_modules(model, _NEEDED)
        heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
        if isinstance(heads, int) and heads % self.ranks:
            raise ValueError(_heads(type(model).__name__, heads, self.ranks))
        self.on, self._row = False, None
        self._plain[model] = model.config._attn_implementation
        label = f"of_{self.ranks}_ranks"
        wrap_attention(
            model,
            attentions,
            label,
            partial(partial, self._attend),
            needed=_NEEDED,
            wrap_mask=partial(partial, self._mask),
        )
        model.register_forward_pre_hook(self._take_share, with_kwargs=True)

    def _take_share(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """Cut the inputs of the model's forward to this rank's tokens; keep the whole row for attention. Raises
        ValueError for positional arguments or a cache."""
        self._row = None
        if not self.on:
            return None
        if args or inputs.get("use_cache") is not False or inputs.get("past_key_values") is not None:
            raise ValueError(
                "parallel.sequence: found a forward with positional arguments or a cache, expected arguments by "
                "name and use_cache=False"
            )
        ids: Tensor = inputs["input_ids"]
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        batch, length = ids.shape
        if length < self.ranks:  # every rank computes all of it
            return None
        packed = None if positions is None or mask is not None else find_packed_sequence_indices(positions)
        if positions is None:
            positions = torch.arange(length, device=ids.device).expand(batch, -1)
        shares = [self.share(length, index) for index in range(self.ranks)]
        own = shares[self.index]
        counts = [share.stop - share.start for share in shares]
        self._row = _Row(counts, own, positions, mask if mask is None or mask.dim() == 4 else mask.bool(), packed)
        # With a mask, transformers does not look for boundaries in this rank's position ids, which need not begin at 0.
        shared = {
            "input_ids": ids[:, own],
            "position_ids": positions[:, own],
            "attention_mask": torch.ones_like(ids[:, own]),
        }
        return args, {**inputs, **shared}

    def _mask(
        self,
        original: AttentionFunction,
        *,
        q_length: int,
        kv_length: int,
        mask_function: AttentionFunction = causal_mask_function,
        attention_mask: Tensor | None = None,
        allow_is_causal_skip: bool = True,
        **options: Any,
    ) -> Any:
        """Create the mask of the whole row, as the model's attention implementation does. Raises ValueError if the
        model wants a mask of other sizes than this rank's tokens."""
        row = self._row
        if row is not None:
            if {q_length, kv_length} != {row.counts[self.index]}:
                raise ValueError(
                    f"the model asks for a mask of {q_length} queries and {kv_length} keys, expected "
                    f"{row.counts[self.index]} of each, the tokens of this rank: set parallel.sequence to 1"
                )
            q_length = kv_length = sum(row.counts)
            attention_mask = row.mask
            if attention_mask is not None and attention_mask.dim() == 4:
                row.masks.add(_identity(attention_mask))
                return attention_mask
            if row.packed is not None:
                mask_function = packed_sequence_compatibility_function(mask_function, row.positions, row.packed)
                allow_is_causal_skip = False
        found = original(
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            **options,
        )
        if row is not None and isinstance(found, Tensor):
            row.masks.add(_identity(found))
        return found

    def _attend(
        self,
        original: AttentionFunction,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Run the model's attention on whole rows and this rank's heads. Raises ValueError for unsupported inputs."""
        row = self._row
        if row is None:
            return original(module, query, key, value, attention_mask, *args, **options)
        name, (heads, tokens) = type(module).__name__, query.shape[1:3]
        if heads % self.ranks:
            raise ValueError(_heads(name, heads, self.ranks))
        if {tokens, key.shape[2], value.shape[2]} != {row.counts[self.index]}:
            raise ValueError(
                f"{name} calls attention with {tokens} queries, {key.shape[2]} keys and {value.shape[2]} values, "
                f"expected {row.counts[self.index]} of each, the tokens of this rank: set parallel.sequence to 1"
            )
        if isinstance(attention_mask, Tensor) and _identity(attention_mask) not in row.masks:
            raise ValueError(f"{name} changes the mask that transformers made for the row: set parallel.sequence to 1")
        # As few copies of keys and values as give each rank the same number of heads.
        copies = self.ranks // math.gcd(key.shape[1], self.ranks)
        key, value = (one.repeat_interleave(copies, dim=1) if copies > 1 else one for one in (key, value))
        own = slice(heads * self.index // self.ranks, heads * (self.index + 1) // self.ranks)
        changes = {
            part: tensor[own]
            for part, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            if tensor.shape[:1] == (heads,)
        }
        if hasattr(module, "num_key_value_groups"):
            changes["num_key_value_groups"] = heads // key.shape[1]
        query, key, value = (self._to_heads(one, row) for one in (query, key, value))
        options = {part: self._whole_option(name, part, one, row, heads) for part, one in options.items()}
        result, _ = original(Changed(module, **changes), query, key, value, attention_mask, *args, **options)
        return self._to_tokens(result, row), None

    def _whole_option(self, name: str, part: str, given: Any, row: _Row, heads: int) -> Any:
        """Convert an attention argument to all tokens and this rank's heads. Raises ValueError for unknown tensors."""
        if not isinstance(given, Tensor):
            return given
        if part == "position_ids" and given.shape[-1] == row.counts[self.index]:
            return row.positions.expand(*given.shape[:-1], -1)  # of text, equal in all sections of a mrope
        if given.shape == (heads,):
            return given[heads * self.index // self.ranks : heads * (self.index + 1) // self.ranks]
        raise ValueError(
            f"{name} calls attention with {part!r}, a tensor {list(given.shape)}, expected only position_ids and "
            f"tensors with a value for each of the {heads} heads: set parallel.sequence to 1"
        )

    def _to_heads(self, own: Tensor, row: _Row) -> Tensor:
        """Exchange [B, heads, own tokens, D] for [B, heads / N, all tokens, D]."""
        batch, heads, _, size = own.shape
        heads //= self.ranks
        sizes = [batch * heads * count * size for count in row.counts]
        sent = own.unflatten(1, (self.ranks, heads)).movedim(1, 0).flatten()
        flat = self._exchange(sent, [sizes[self.index]] * self.ranks, sizes)
        return torch.cat([part.view(batch, heads, -1, size) for part in flat.split(sizes)], dim=2)

    def _to_tokens(self, result: Tensor, row: _Row) -> Tensor:
        """Exchange [B, all tokens, heads / N, D] for [B, own tokens, heads, D]."""
        batch, _, heads, size = result.shape
        sizes = [batch * count * heads * size for count in row.counts]
        sent = torch.cat([part.flatten() for part in result.split(row.counts, dim=1)])
        flat = self._exchange(sent, sizes, [sizes[self.index]] * self.ranks)
        return flat.view(self.ranks, batch, -1, heads, size).movedim(0, 2).flatten(2, 3)

    def _exchange(self, sent: Tensor, sizes: Sequence[int], received: Sequence[int]) -> Tensor:
        found: Tensor = _Exchange.apply(sent, list(sizes), list(received), self._group)
        return found


class _Exchange(torch.autograd.Function):
    """Autograd function that sends consecutive pieces of a flat tensor, one to each rank of a group (all-to-all)."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sizes: list[int], received: list[int], group: Any) -> Tensor:
        ctx.arguments = received, sizes, group
        return _sent(sent, sizes, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sent(grad.contiguous(), *ctx.arguments), None, None, None


def _sent(tensor: Tensor, sizes: list[int], received: list[int], group: Any) -> Tensor:
    found = tensor.new_empty(sum(received))
    if not tensor.is_meta:
        dist.all_to_all_single(found, tensor, received, sizes, group=group)
    return found


def _identity(mask: Tensor) -> tuple[Any, ...]:
    return mask.data_ptr(), mask.shape, mask.stride()


def _heads(name: str, heads: int, ranks: int) -> str:
    return f"parallel.sequence: {ranks}, expected a divisor of the {heads} attention heads of {name}"


@cache
def shared_rows(ranks: int) -> SharedRows:
    """Return this process's :class:`SharedRows` for ``ranks``: one object for all calls, so for student and teacher."""
    return SharedRows(ranks)
