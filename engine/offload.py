"""The inputs of recomputed blocks in host memory, from forward until backward asks for them.

With activation checkpointing (non-reentrant) a block keeps its input alone, for which torch asks the saved-tensor hooks
that are active around it. :class:`OnHost` around a model's forward gives it a copy in host memory, pinned on CUDA; what
a block saves while it is recomputed in backward lies outside, and stays where it is.

Next to ``torch.autograd.graph.save_on_cpu``, which does the same, this leaves Parameters alone: those of a final norm
or of a quantized lm_head would otherwise travel to the host and back, whole. transformers' ``offload=True`` wraps each
block in ``save_on_cpu`` and asks for pinned memory on a CPU too (5.23), where there is none.
"""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class OnHost(saved_tensors_hooks):
    """A context around a forward: tensors that it saves for backward lie in host memory until then; Parameters stay.

    On a CPU they are there already, and nothing is copied.
    """

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        """The device that a saved tensor belongs to, and what is kept of it."""
        if isinstance(tensor, nn.Parameter):
            return tensor.device, tensor
        return tensor.device, self.to_host(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in host memory, or itself where it is there already."""
        if tensor.device.type == "cpu":
            return tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return kept.copy_(tensor, non_blocking=True)  # on the stream that wrote it, before backward's copy back

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        """The tensor on its device again."""
        device, tensor = packed
        return tensor.to(device, non_blocking=True)
