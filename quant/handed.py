"""An output that exists in quantised form alone, and the layers that it is handed to.

A norm whose readers all quantise what it gives them with one fixed scale need not write it: it gives them codes. What
it returns stands where its output would stand in the model, with shape, dtype, device and gradient, and without values
(:class:`HandedOver`). The readers take the codes out of it (:class:`HandedInput`). Whoever else looks at its values, a
router, a hook, a model whose forward is another one than was thought, ends with an error that says so.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quant.inputs import QuantizedInput, Restored, SharedInput, Wanted

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class HandedOver(Tensor):
    """A tensor of which readers get the quantised form, and nobody the values.

    It may be detached, which ZeRO-3's hooks do, and asked for its shape; every other operator is an error.

    Attributes:
        quantized: what the readers use. Its mask stays with whoever made it, who masks the gradient of them all.
        restored: where they find it in backward.
        source: whose output it is, for an error.
    """

    quantized: QuantizedInput
    restored: Restored
    source: str

    @staticmethod
    def __new__(cls, like: Tensor, quantized: QuantizedInput, restored: Restored, source: str) -> "HandedOver":
        """In the shape and dtype of ``like``, contiguous."""
        made: HandedOver = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.quantized, made.restored, made.source = quantized, restored, source
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HandedOver(shape={tuple(self.shape)}, dtype={self.dtype}, by {self.source})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:
            one = args[0]
            return HandedOver(one, one.quantized, one.restored, one.source)
        if func is torch.ops.aten.new_empty.default:
            return torch.empty(args[1], dtype=args[0].dtype, device=args[0].device)
        given = next(one for one in (*args, *(kwargs or {}).values()) if isinstance(one, HandedOver))
        raise RuntimeError(
            f"{given.source} hands the layers behind it their quantised input and has no values, which {func} reads; "
            "set quant.fuse_norms: false"
        )


class HandedInput(SharedInput):
    """What layers share that may be handed an input: its quantised form, or what :class:`SharedInput` makes of one that
    has values."""

    def get(
        self, x: Tensor, wanted: Wanted, make: Callable[[], QuantizedInput]
    ) -> tuple[QuantizedInput, Restored | None]:
        """As of the base class. The mask is None where the input was handed over.

        Raises:
            RuntimeError: what was handed over lacks what is wanted: a switch moved between norm and layer.
        """
        if not isinstance(x, HandedOver):
            return super().get(x, wanted, make)
        if x.quantized.values is None and not wanted.codes_for_gemm:
            raise RuntimeError(
                f"{x.source} gave codes alone and a layer behind it simulates: fake quant was switched between them; "
                "switch it between steps"
            )
        return x.quantized, x.restored if self.consumers > 1 else None
