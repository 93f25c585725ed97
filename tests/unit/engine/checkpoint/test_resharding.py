"""8-bit moments of old ranks are decoded, placed and rounded again, where slices begin inside a block."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint import resume
from engine.session import adamw8bit
from engine.session.adamw8bit import MOMENT_BLOCK, MOMENTS, AdamW8bit, decode_slice
from model.zero import OptimizerPiece

SIZES = {"w": 3000, "x": 700}
OLD = [
    [OptimizerPiece("w", 0, 0, 0, 1801)],
    [OptimizerPiece("w", 0, 0, 1801, 3000), OptimizerPiece("x", 0, 1199, 0, 700)],
]
NEW = [OptimizerPiece("x", 0, 0, 100, 700), OptimizerPiece("w", 0, 600, 0, 3000)]


def old_rank(pieces: list[OptimizerPiece]) -> resume._Masters:
    """The file of a rank after two steps."""
    flat = torch.nn.Parameter(torch.randn(sum(piece.stop - piece.start for piece in pieces)))
    optimizer = AdamW8bit([{"params": [flat], "moments": "8bit"}])
    for _ in range(2):
        flat.grad = torch.randn_like(flat) * torch.exp(torch.randn_like(flat))
        optimizer.step()
    source = object.__new__(resume._Masters)
    source.fp32, source.state = [flat.detach()], optimizer.state_dict()["state"]
    source.path, source.rank = Path("nowhere"), 0
    return source


def whole(sources: list[resume._Masters], name: str, key: str) -> torch.Tensor:
    """Masters or moments of a parameter in all old files."""
    found = torch.full((SIZES[name],), torch.nan)
    for source, pieces in zip(sources, OLD, strict=True):
        for piece in pieces:
            if piece.name == name:
                end = piece.offset + piece.stop - piece.start
                found[piece.start : piece.stop] = source.read(0, key, piece.offset, end)
    return found


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A new rank without moments, whose chunks are two blocks."""
    flat = torch.nn.Parameter(torch.zeros(3600))
    monkeypatch.setattr(resume, "flat_masters", lambda optimizer: [flat])
    monkeypatch.setattr(resume, "optimizer_pieces", lambda model, optimizer: NEW)
    monkeypatch.setattr(adamw8bit, "CHUNK", 2 * MOMENT_BLOCK)
    wrapper = SimpleNamespace(state=defaultdict(dict), flat=flat)
    return SimpleNamespace(model=None, engine=SimpleNamespace(optimizer=wrapper))


def test_moments_keep_their_places_and_values(session):
    sources = [old_rank(pieces) for pieces in OLD]
    resume._load_masters(session, sources, OLD)
    flat = session.engine.optimizer.flat
    state = session.engine.optimizer.state[flat]
    assert state["step"] == 2 and state["exp_avg_codes"].dtype == torch.uint8
    for key in ("fp32", *MOMENTS):
        found = flat.detach() if key == "fp32" else decode_slice(state, key, 0, 3600)
        for piece in NEW:
            expected = whole(sources, piece.name, key)[piece.start : piece.stop]
            own = found[piece.offset :][: len(expected)]
            if key == "fp32":
                assert torch.equal(own, expected)
            else:
                assert (own - expected).norm() < 0.05 * expected.norm()
                assert ((own - expected).abs() <= 0.126 * expected.abs() + 1e-6 * expected.abs().max()).all()
                assert own.abs().mean() == pytest.approx(float(expected.abs().mean()), rel=0.01)


def test_a_slice_that_no_old_rank_has_is_named(session):
    sources = [old_rank(pieces) for pieces in OLD]
    with pytest.raises(ValueError, match=r"has only 1,801 of 3,000 elements of w \(fp32\)"):
        resume._load_masters(session, sources, [OLD[0], [OLD[1][1]]])
