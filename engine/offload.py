"""Offload of activation checkpoints: inputs of recomputed blocks wait in host memory between forward and backward.

With activation checkpointing (non-reentrant) a block keeps its input alone, through the saved-tensor hooks active
around it. :class:`OnHost` around a model's forward moves that input to host memory, pinned on CUDA. Tensors that a
block saves while it is recomputed in backward are saved outside of that context and stay on the device.

``torch.autograd.graph.save_on_cpu`` would move Parameters too: those of a final norm or of a quantized lm_head would
travel to the host and back, whole. transformers' ``offload=True`` wraps each block in ``save_on_cpu`` and asks for
pinned memory on a CPU too (5.23), where there is none.
"""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class OnHost(saved_tensors_hooks):
    """Context around a forward that keeps tensors saved for backward in host memory; Parameters stay on the device.

    On a CPU nothing is copied.
    """

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        """Device of a saved tensor, and its copy in host memory."""
        if isinstance(tensor, nn.Parameter):
            return tensor.device, tensor
        return tensor.device, self.to_host(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` to host memory, unless it is there already."""
        if tensor.device.type == "cpu":
            return tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return kept.copy_(tensor, non_blocking=True)  # on the stream that wrote it, before backward's copy back

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        """Copy the tensor back to its device."""
        device, tensor = packed
        return tensor.to(device, non_blocking=True)
