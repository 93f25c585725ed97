"""AdamW whose moments take one byte each, in blocks of 256 elements with a common fp32 scale.

Blocks, and codes with an exponent, are those of Dettmers et al. 2021 (8-bit Optimizers, arXiv:2110.02861). A code here
is a float with 3 mantissa bits: the first moment m has a sign and 4 exponent bits, the second moment v 5 exponent bits.
Three properties prevent updates ``m / sqrt(v)`` that are much larger than Adam's:

- Both codes have the same range: v is kept down to 2^-32 of the largest v in its block, so sqrt(v) down to 2^-16, and m
  down to 2^-16 of the largest m. Below these limits the codes of m are evenly spaced, and v is kept at its limit.
- v is 0 only if its whole block is 0. If v were rounded to 0, m would be divided by eps alone.
- Rounding is stochastic, so moments are right on average. With beta2 = 0.95 a v without gradients shrinks by 5% in a
  step. Half the distance between two codes is 3% to 6%: rounded to nearest, v would soon stop shrinking.

The random numbers depend only on the step. So on stage 0 all ranks round alike, and a resumed run repeats the rounding.
``benchmarks/results/moments.md`` compares this code with others.

torch's AdamW computes the update, in fp32, for ``CHUNK`` elements at a time. torchao has an AdamW8bit too. It keeps
moments in a tensor subclass, which :func:`engine.checkpoint.checked_files.read_object` refuses, and it needs
torch.compile.
"""

from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MOMENT_BLOCK = 256
CHUNK = 1 << 22  # elements; a multiple of MOMENT_BLOCK
# Bytes per element of a chunk while moments are coded: two moments, random numbers, some of their bits, codes.
WORKING_BYTES = 17
MOMENTS = ("exp_avg", "exp_avg_sq")
FLOAT_BITS, MANTISSA_BITS = 23, 3
SHIFT = FLOAT_BITS - MANTISSA_BITS


def _levels(signed: bool) -> int:
    return 128 if signed else 256


def _lowest(signed: bool) -> int:
    """Return the upper bits of the float at level 0; the highest level is 1.0."""
    return (127 << MANTISSA_BITS) - _levels(signed) + 1


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """List the values of all codes [256], fp32. Signed: code 0 is exactly 0, and codes from 128 on are negative."""
    bits = torch.arange(_levels(signed), dtype=torch.int32, device=device) + _lowest(signed)
    values = (bits << SHIFT).view(torch.float32)
    return torch.cat([values - values[0], values[0] - values]) if signed else values


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the fp32 values of codes [blocks, MOMENT_BLOCK] with scales [blocks, 1]. ``signed``: True for the first
    moment, whose codes have a sign, False for the second."""
    values = _values(signed, codes.device).index_select(0, codes.view(-1).int())
    return values.view(codes.shape).mul_(scales)


def encode(moment: Tensor, random: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Round a moment [blocks, MOMENT_BLOCK], which is overwritten, stochastically to codes (uint8, same shape) and
    scales (fp32 [blocks, 1]).

    Args:
        moment: fp32, finite.
        random: int32 of the same shape, evenly distributed in [0, 2^SHIFT): added to the float's bits that are then cut
            off, so that a value rounds up the more often, the nearer it is to its upper neighbor.
        signed: True for the first moment, whose codes have a sign, False for the second.
    """
    values, lowest = _values(signed, moment.device), _lowest(signed)
    largest = values[_levels(signed) - 1]
    negative = moment < 0 if signed else None
    moment.abs_()
    scales = moment.amax(1, keepdim=True).div_(largest).clamp_(max=torch.finfo(torch.float32).max)
    moment.div_(scales.masked_fill(scales == 0, 1))
    if signed:
        moment.add_(1 - largest)
    levels = moment.view(torch.int32).add_(random).bitwise_right_shift_(SHIFT).sub_(lowest)
    codes = levels.clamp_(0, _levels(signed) - 1).to(torch.uint8)
    return codes.add_(negative, alpha=128) if negative is not None else codes, scales


def empty_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Allocate the moments of a parameter, filled with 0: ``exp_avg_codes``, ``exp_avg_scales``, ``exp_avg_sq_codes``
    and ``exp_avg_sq_scales``. The last block may have padding."""
    blocks = -(-parameter.numel() // MOMENT_BLOCK)
    state: dict[str, Tensor] = {}
    for key in MOMENTS:
        state[f"{key}_codes"] = torch.zeros(blocks, MOMENT_BLOCK, dtype=torch.uint8, device=parameter.device)
        state[f"{key}_scales"] = torch.zeros(blocks, 1, device=parameter.device)
    return state


def moment_bytes(numel: int) -> int:
    """Compute the bytes that both moments of a tensor with ``numel`` elements take."""
    return -(-numel // MOMENT_BLOCK) * len(MOMENTS) * (MOMENT_BLOCK + 4)


def chunks(numel: int) -> Iterator[slice]:
    """Yield the blocks of each chunk of a tensor with ``numel`` elements, as a slice of block indices. A chunk has at
    most ``CHUNK`` elements."""
    blocks = -(-numel // MOMENT_BLOCK)
    for first in range(0, blocks, CHUNK // MOMENT_BLOCK):
        yield slice(first, min(first + CHUNK // MOMENT_BLOCK, blocks))


def decode_slice(state: dict[str, Tensor], key: str, start: int, stop: int) -> Tensor:
    """Return the elements ``start`` to ``stop`` of a moment in fp32, flat. ``key``: ``exp_avg`` or ``exp_avg_sq``;
    ``stop`` may be in the padding of the last block."""
    first, last = start // MOMENT_BLOCK, -(-stop // MOMENT_BLOCK)
    codes, scales = (state[f"{key}_{part}"][first:last] for part in ("codes", "scales"))
    return decode(codes, scales, key == "exp_avg").view(-1)[start - first * MOMENT_BLOCK : stop - first * MOMENT_BLOCK]


def write_moments(
    state: dict[str, Tensor], moments: tuple[Tensor, Tensor], blocks: slice, rng: torch.Generator
) -> None:
    """Round new values of both moments to codes and scales by random numbers of ``rng``, and write them to these
    ``blocks`` of ``state``. ``moments``: the blocks' values, flat in fp32, padding included; they are overwritten."""
    random = torch.empty_like(moments[0], dtype=torch.int32).random_(generator=rng).view(-1, MOMENT_BLOCK)  # 31 bits
    second = random.bitwise_right_shift(15).bitwise_left_shift_(SHIFT - 16)
    _write(state, "exp_avg_sq", moments[1], second, blocks)
    del second
    _write(state, "exp_avg", moments[0], random.bitwise_and_(2**15 - 1).bitwise_left_shift_(SHIFT - 15), blocks)


def _write(state: dict[str, Tensor], key: str, moment: Tensor, random: Tensor, blocks: slice) -> None:
    codes, scales = encode(moment.view(-1, MOMENT_BLOCK), random, key == "exp_avg")
    state[f"{key}_codes"][blocks], state[f"{key}_scales"][blocks] = codes, scales


def rounding_at(step: Tensor, device: torch.device) -> torch.Generator:
    """Return the generator of the random numbers with which ``step`` rounds the moments (stochastic rounding); its seed
    is the number of the step."""
    return torch.Generator(device).manual_seed(int(step))


class AdamW8bit(torch.optim.AdamW):
    """AdamW with 8-bit moments in the parameter groups with ``moments: 8bit``; all other groups are updated by torch's
    AdamW.

    The state of a parameter in an 8-bit group has ``exp_avg_codes`` and ``exp_avg_sq_codes`` [blocks, MOMENT_BLOCK],
    ``exp_avg_scales`` and ``exp_avg_sq_scales`` [blocks, 1]. As it has no ``exp_avg``, functions of DeepSpeed that read
    moments raise a KeyError.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """Update the parameters."""
        coded = [(group, group["params"]) for group in self.param_groups if group["moments"] == "8bit"]
        for group, _ in coded:
            group["params"] = []
        try:
            result = super().step(closure)
        finally:
            for group, parameters in coded:
                group["params"] = parameters
        for group, parameters in coded:
            for parameter in parameters:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad.reshape(-1))
        return result

    def _update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            # As in torch's AdamW: on the device if fused, else on the host.
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
            state.update(empty_moments(parameter))
        flat = parameter.view(-1)
        rng = rounding_at(state["step"] + 1, parameter.device)
        for blocks in chunks(flat.numel()):
            start, stop = blocks.start * MOMENT_BLOCK, blocks.stop * MOMENT_BLOCK
            moments = decode_slice(state, "exp_avg", start, stop), decode_slice(state, "exp_avg_sq", start, stop)
            own = flat[start:stop]  # shorter than the moments, which have padding, in the last chunk
            adamw(
                [own],
                [gradient[start:stop]],
                [moments[0][: own.numel()]],
                [moments[1][: own.numel()]],
                [],
                [state["step"].clone()],  # incremented in place
                foreach=False,
                fused=group["fused"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            write_moments(state, moments, blocks, rng)
        state["step"] += 1

    def load_state_dict(self, state_dict):
        """Restore the result of ``state_dict``. Codes are set here and not by torch, which would convert them to the
        parameter's dtype."""
        saved, codes = state_dict["state"], {f"{key}_codes" for key in MOMENTS}
        others = {index: {k: v for k, v in held.items() if k not in codes} for index, held in saved.items()}
        super().load_state_dict({**state_dict, "state": others})
        own, theirs = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (self.param_groups, state_dict["param_groups"])
        )
        for parameter, index in zip(own, theirs, strict=True):
            for key in codes & saved.get(index, {}).keys():
                self.state[parameter][key] = saved[index][key].to(parameter.device)
