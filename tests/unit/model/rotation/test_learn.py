"""Learned rotations: orthogonal, the same function of every family, descending by the right gradient, and worth it."""

from pathlib import Path

import pytest
import torch

from model.rotation import rotate_checkpoint
from model.rotation.learn import Matrix, _Descent, _Model, learn_rotations
from model.rotation.plan import STREAM, values_of_layer
from model.rotation.write import first_rotations, plan_checkpoint
from model.shards import CheckpointError
from quant import SCHEMES
from tests.unit.model.rotation.test_rotate import CLOSE, logits, made

CPU = torch.device("cpu")
SCHEME = {"llama blocks": "int8_dynamic", "qwen3": "w8a8_static", "qwen3_moe": "w2a16_channel"}  # groups divide no 40


def rows(steps: int) -> list[torch.Tensor]:
    return list(torch.randint(0, 60, (steps, 2, 12)))


def off_orthogonal(matrix: torch.Tensor) -> float:
    return float((matrix @ matrix.T - torch.eye(len(matrix), dtype=matrix.dtype)).abs().max())


def test_a_step_stays_orthogonal_and_descends(seed):
    """||Q - target||^2 over orthogonal Q falls: no step leaves the manifold but by rounding, and all go downhill."""
    size = int(torch.randint(3, 40, ()))
    target, start = (torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0] for _ in range(2))
    if torch.det(target) * torch.det(start) < 0:
        target[0] *= -1  # steps do not reach matrices of the other sign
    descent, steps = _Descent(start), 400
    for step in range(steps):
        descent.step(descent.matrix - target, 0.5 * (1 - step / steps))
        assert off_orthogonal(descent.matrix) < 1e-12
    assert (descent.matrix - target).norm() < 0.05 * (start - target).norm()


@pytest.mark.parametrize("variant", SCHEME)
def test_same_function(variant: str, tmp_path: Path, seed) -> None:
    """Whatever was learned, the written checkpoint is the model, and its matrices are orthogonal to fp64."""
    source = made(tmp_path / "plain", variant, torch.float32)
    learned = learn_rotations(source, SCHEMES[SCHEME[variant]], rows(3), device=CPU, progress=False)
    fixed = first_rotations(plan_checkpoint(source).config, 0)
    assert learned.rotations.keys() == fixed.keys() == {STREAM, *map(values_of_layer, range(2))}
    for name, one in learned.rotations.items():
        assert off_orthogonal(one.matrix) < 1e-12
        moved = one.matrix - fixed[name].turn(torch.eye(one.size, dtype=torch.float64), -1)
        assert moved.norm() > 0.01, name
    rotate_checkpoint(source, tmp_path / "rotated", rotations=learned.rotations, progress=False)
    expected = logits(source)
    assert (logits(tmp_path / "rotated") - expected).abs().max() < CLOSE * expected.std()


def test_the_gradient_is_that_of_the_model_turned(tmp_path: Path, seed) -> None:
    """Against finite differences in the matrices, of a loss without roundings, which straight-through gradients are of.

    The loss is a random product with the logits; matrices that are not orthogonal change them.
    """
    source = made(tmp_path / "plain", "qwen2_moe", torch.float32)
    plan = plan_checkpoint(source)
    model = _Model(source, SCHEMES["int8_dynamic"], CPU)
    model.fold(plan)
    model.quantization.set_fake_quant(weights=False, activations=False)
    matrices = {
        key: one.turn(torch.eye(one.size, dtype=torch.float64), -1)
        for key, one in first_rotations(plan.config, 0).items()
    }
    ids, factors = torch.randint(0, 60, (2, 9)), torch.randn(2, 9, 60)

    def loss(changed: dict[str, torch.Tensor]) -> torch.Tensor:
        model.turn({key: Matrix(matrix.float()) for key, matrix in changed.items()})
        return (model.model(input_ids=ids, use_cache=False).logits * factors).sum()

    loss(matrices).backward()
    gradients = model.gradients(matrices)
    for key, matrix in matrices.items():
        change = torch.randn_like(matrix) / len(matrix)
        ends = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                ends.append(float(loss(matrices | {key: matrix + step * change})))
        slope = (ends[0] - ends[1]) / 2e-2
        size = float(gradients[key].norm() * change.norm())
        assert abs(slope - float((gradients[key] * change).sum())) < 0.02 * size, key


def test_it_learns(tmp_path: Path, seed) -> None:
    """A model whose stream lies in few directions at 2 bits: the rows' loss falls by a third."""
    source = made(tmp_path / "plain", "qwen3", torch.bfloat16)
    same = list(rows(1)) * 30
    learned = learn_rotations(source, SCHEMES["w2a16_channel"], same, device=CPU, progress=False)
    assert learned.last < 0.67 * learned.first


def test_a_model_that_memory_does_not_hold(tmp_path: Path) -> None:
    """Refused by its config.json and headers, before any weight is read."""
    source = made(tmp_path / "plain", "llama", torch.float32)
    before = (source / "model.safetensors").read_bytes()
    header = int.from_bytes(before[:8], "little") + 8
    (source / "model.safetensors").write_bytes(before[:header] + bytes(len(before) - header))
    many = [torch.zeros(1, 1, dtype=torch.long).expand(2**20, 2**20)]
    with pytest.raises(CheckpointError, match=r"learning rotations takes about .* GiB .*use the Hadamard matrices"):
        learn_rotations(source, SCHEMES["int8_dynamic"], many, device=CPU, progress=False)
