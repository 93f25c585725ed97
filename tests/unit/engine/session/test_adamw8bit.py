"""8-bit moments: updates compared with those of Adam in fp64, and the optimizer's states."""

import copy
import io
from functools import partial

import pytest
import torch

from engine.checkpoint.checked_files import read_object
from engine.session import adamw8bit
from engine.session.adamw8bit import CHUNK, MOMENT_BLOCK, AdamW8bit, decode, encode, moment_bytes
from engine.session.optimizer import SkippingAdamW8bit
from tests.lib.moments import KINDS, follow

LR = 1e-3


def group(*parameters: torch.nn.Parameter, moments: str = "8bit", **options) -> dict:
    return {"params": list(parameters), "moments": moments, "lr": LR, "weight_decay": 0.0, "eps": 1e-15, **options}


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_follow_those_in_fp64(kind, beta2, seed):
    """On CUDA the update is fused."""
    check_updates(kind, beta2, seed, fused=beta2 == 0.999)


def check_updates(kind: str, beta2: float, seed: int, *, fused: bool, device: str = "cpu") -> None:
    """Updates are off by about 10%, without a bias, and none is much larger than the largest of Adam."""
    with torch.no_grad():
        found = follow(kind, beta2, seed, partial(AdamW8bit, fused=fused), device)
    assert found.error < 0.16
    assert found.gain == pytest.approx(1, abs=0.02)
    assert found.largest < 1.3
    assert found.second == pytest.approx(1, abs=0.03)  # v has followed gradients that have fallen


def test_a_code_is_exact_for_what_it_decodes_to():
    codes = torch.arange(256, dtype=torch.uint8).view(1, MOMENT_BLOCK)
    for signed in (True, False):
        values = decode(codes, torch.ones(1, 1), signed)
        for random in (0, 2**20 - 32):
            again, scales = encode(values.clone(), torch.full((1, MOMENT_BLOCK), random, dtype=torch.int32), signed)
            found = decode(again, scales, signed)
            assert torch.equal(found, values) if random == 0 else torch.allclose(found, values, rtol=0.13)
    assert decode(torch.zeros_like(codes), torch.ones(1, 1), True).eq(0).all()


def test_zeros_and_extremes_stay_finite():
    moment = torch.zeros(3, MOMENT_BLOCK)
    moment[1, 0], moment[1, 1], moment[2] = torch.inf, 1.0, 1e-44
    for signed in (True, False):
        for random in (0, 2**20 - 1):
            bits = torch.full((3, MOMENT_BLOCK), random, dtype=torch.int32)
            found = decode(*encode(moment.clone(), bits, signed), signed)
            assert found.isfinite().all() and not found[0].any()
            assert found[1, 0] > 3.4e38


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def test_other_groups_are_those_of_torch():
    own = parameters((3, 300), (7,))
    other = [torch.nn.Parameter(one.detach().clone()) for one in own]
    ours = AdamW8bit([group(own[0]), group(own[1], moments="float32")])
    theirs = torch.optim.AdamW([group(one) for one in other])
    for _ in range(3):
        for one, two in zip(own, other, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(own[1], other[1]) and not torch.equal(own[0], other[0])
    assert [held["step"].item() for held in ours.state.values()] == [3, 3]
    assert [one["params"] for one in ours.param_groups] == [[own[0]], [own[1]]]
    stored = sum(value.nbytes for key, value in ours.state[own[0]].items() if key != "step")
    assert stored == moment_bytes(own[0].numel()) == 4 * 2 * (MOMENT_BLOCK + 4)  # the fourth block has padding


def test_chunks_change_nothing(monkeypatch):
    found = []
    for size in (CHUNK, 2 * MOMENT_BLOCK):
        monkeypatch.setattr(adamw8bit, "CHUNK", size)
        torch.manual_seed(0)
        (own,) = parameters((1111,))
        optimizer = AdamW8bit([group(own)])
        for _ in range(2):
            optimizer.step()
        found.append((own.detach().clone(), optimizer.state[own]["exp_avg_codes"]))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_loaded_state_goes_on_bit_for_bit(tmp_path):
    """Codes stay uint8, where torch would convert them to the dtype of the parameter."""
    own = parameters((9, 99), (300,))
    optimizer = AdamW8bit([group(own[0]), group(own[1], moments="float32")])
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    copies = copy.deepcopy(own)
    again = AdamW8bit([group(copies[0]), group(copies[1], moments="float32")])
    again.load_state_dict(read_object(tmp_path / "state.pt", mmap=True))
    for one, two in zip(own, copies, strict=True):
        for key, value in optimizer.state[one].items():
            found = again.state[two][key]
            assert found.dtype == value.dtype and torch.equal(found, value), key
        two.grad = one.grad.clone()
    assert again.state[copies[0]]["exp_avg_sq_codes"].dtype == torch.uint8
    optimizer.step()
    again.step()
    assert all(torch.equal(one, two) for one, two in zip(own, copies, strict=True))


def test_a_step_that_is_not_finite_leaves_everything():
    (own,) = parameters((300,))
    optimizer = SkippingAdamW8bit([group(own)])
    optimizer.step()
    before = copy.deepcopy((own.detach(), list(optimizer.state[own].values())))
    own.grad[7] = torch.nan
    optimizer.step()
    assert optimizer.overflow and torch.equal(before[0], own)
    assert all(torch.equal(*pair) for pair in zip(before[1], optimizer.state[own].values(), strict=True))


def test_ranks_that_hold_the_same_round_alike():
    states = []
    for seed in (1, 2):  # of the global generators, which differ from rank to rank
        torch.manual_seed(0)
        (own,) = parameters((300,))
        torch.manual_seed(seed)
        optimizer = AdamW8bit([group(own)])
        optimizer.step()
        buffer = io.BytesIO()
        torch.save(optimizer.state[own], buffer)
        states.append(buffer.getvalue())
    assert states[0] == states[1]
