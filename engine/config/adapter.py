"""The recipe's ``adapter`` section: low-rank adapters that train in place of the weights."""

from dataclasses import dataclass, field
from typing import Literal

from engine.config.errors import FACTOR, at_least, each, regex, values
from quant.rules import pattern_problem

_RANKS = values(
    "regular expressions that end soon, each with a rank of at least 1",
    lambda ranks: all(rank >= 1 and not pattern_problem(pattern) for pattern, rank in ranks.items()),
)

_SHARE = values("a number of at least 0 and below 1", lambda share: 0 <= share < 1)


@dataclass
class AdapterRecipe:
    """Adapters, which train in place of the weights."""

    kind: Literal["none", "lora"] = "none"
    """lora: two thin matrices A and B per layer train, and the weights W are frozen. none: there are no adapters."""
    merge: bool = True
    """true: a layer's weight is W + alpha / rank * B A in every forward, that is what is quantized, and the export
    holds the codes of the sum. false: the adapter stays beside the quantized weight, Q(W) x + alpha / rank * B (A x),
    for serving many of them on one model; the export is that model and a folder adapter in it, for peft and vLLM."""
    base: Literal["weights", "quantized"] = "weights"
    """How the frozen weights that are quantized lie in memory, beside which adapters stay. weights: in model.dtype.
    codes: as codes (QLoRA), half a byte per weight at 4 bits, which layers decode as they run: the same bits, and no
    weight in model.dtype on any rank. They are those of a quantized model.path; of an ordinary one they are made as it
    is read, where a scheme has scales of rows, groups or blocks."""
    start: str | None = None
    """Folder of an adapter as peft writes it, whose values A and B have at the start. null: B is 0."""
    init: Literal["zeros", "error"] = "zeros"
    """zeros: B is 0, so that step 0 computes the quantized model. error: of an adapter that stays beside its weight,
    B A is what quantization takes from the weight, as far as the rank goes (the first step of LoftQ)."""
    rank: int = field(default=16, metadata=at_least(1))
    """Rows of A and columns of B."""
    alpha: float = field(default=32.0, metadata=FACTOR)
    """Strength: B A is multiplied by alpha / rank."""
    rslora: bool = False
    """true: B A is multiplied by alpha / sqrt(rank) (rsLoRA), so that large ranks learn as fast as small ones."""
    dropout: float = field(default=0.0, metadata=_SHARE)
    """Of an adapter that stays beside its weight: the share of the elements of A's input that are 0 in a step of
    training, drawn anew for each layer; the others are divided by 1 - dropout. The weight reads the whole input."""
    targets: list[str] = field(default_factory=list, metadata=each(regex()))
    """Regexes; a quantized linear layer whose whole module name matches one gets an adapter. []: all but lm_head."""
    ranks: dict[str, int] = field(default_factory=dict, metadata=_RANKS)
    """Ranks of their own, by regex on the whole module name: {'.*\\.down_proj': 32}. The first that matches decides."""

    @property
    def on(self) -> bool:
        """Whether there are adapters."""
        return self.kind != "none"

    @property
    def beside(self) -> bool:
        """Whether they stay beside quantized weights."""
        return self.on and not self.merge

    def scaling(self, rank: int) -> float:
        """What B A is multiplied by: alpha / rank (Hu et al. 2021), or alpha / sqrt(rank) (Kalajdzievski 2023)."""
        return self.alpha / (rank**0.5 if self.rslora else rank)
