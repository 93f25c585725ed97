"""Llama 4's MoE block with only those tokens in an expert that chose it.

transformers hands all tokens to every expert, times a score that is zero where the token did not choose it: E times the
arithmetic, and E copies of the hidden states. What an expert makes of zeros is zero, and its gradient too, so that the
result is the same.
"""

from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe


class Routed(nn.Module):
    """Same parts, same names, same results as transformers' block, whose experts are ours by now."""

    def __init__(self, block: Llama4TextMoe):
        super().__init__()
        self.top_k, self.hidden_dim = block.top_k, block.hidden_dim
        self.experts, self.router, self.shared_expert = block.experts, block.router, block.shared_expert

    @classmethod
    def of(cls, name: str, block: nn.Module) -> "Routed":
        """Raises ValueError if ``block``, called ``name``, is of another class, whose forward might be another."""
        if type(block) is not Llama4TextMoe:
            raise ValueError(
                f"{name} ({type(block).__name__}) hands all tokens to every expert, expected Llama 4's Llama4TextMoe: "
                "a mixture of experts in a layout that is not supported"
            )
        return cls(block)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., H]`` to ``[T, H]``, and the router's logits ``[T, E]``."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(hidden_states)
        chosen = logits.topk(self.top_k, dim=1).indices
        routed = self.experts(hidden_states, chosen, scores.gather(1, chosen))
        return self.shared_expert(hidden_states) + routed, logits
