"""A dispatch mode that counts what a forward and a backward would cost a GPU; the meta device is enough for it."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GEMMS = {"mm", "addmm", "bmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique2"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "alias"}
FREE |= {"set_"}


class Counting(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        launches: operators that compute, by name; views and allocations are free.
        products: multiplications and additions of GEMMs, by "bf16", "fp8" (sums in fp32) and "fp8, fast sums".
        waits: operators whose result the host needs, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.products, self.waits = Counter[str](), Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if name in WAITS:
            self.waits[name] += 1
        if name not in FREE and not func.is_view:
            self.launches[name] += 1
        if name in GEMMS:
            operands = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
            left, fast = operands[name == "addmm"], given.get("use_fast_accum")
            # The weight gradient of a stack sums over the rows of each expert, which together are all rows.
            times = result.shape[0] if left.dim() == 2 and result.dim() == 3 else 1
            kind = ("fp8, fast sums" if fast else "fp8") if left.itemsize == 1 else "bf16"
            self.products[kind] += 2 * left.shape[-1] * result.numel() // times
        return result
