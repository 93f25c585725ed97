"""Rotations that are learned: those with which a model loses least when it is quantised.

They start from the Hadamard matrices of ``hadamard.py`` and stay orthogonal. What is minimised is KL(model ||
quantised) over a text, by stochastic gradients through the fake-quantised model, straight through the rounding
(SpinQuant, Liu et al. 2024, arXiv 2405.16406, section 3.2, whose loss is cross-entropy). One matrix turns the residual
stream; every layer has one for the values of its heads.

A step moves a matrix along the manifold of orthogonal ones by Cayley's transform (Li et al. 2020, arXiv 2002.01113,
algorithm 1, where a fixed-point iteration stands for the equation that is solved here)::

    M = momentum * M - dL/dQ
    A = W - W^T  with  W = M Q^T - Q (Q^T M Q^T) / 2
    Q = (I - a/2 A)^-1 (I + a/2 A) Q,  M = A Q

which is orthogonal for every ``a``, since A is skew. ``a`` is the rate over the norm of A: gradients are as small as
the loss that quantisation leaves, which differs by a hundred times between schemes.

The whole model is in this process three times in fp32: its weights turned, the same before that, and gradients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model.build import build_model
from model.load import load_weights
from model.names import Names
from model.rotation.plan import Change
from model.rotation.write import Plan, Turning, first_rotations, plan_checkpoint, turned
from model.scales import renew_weight_scales, write_scales
from model.shards import CheckpointError, Reader, read_tensor
from quant import Quantization, Scheme, prepare, weights_changed
from quant.scale import first_input_scale

MOMENTUM = 0.9
# What memory holds in fp32: copies of the weights, and for each token, of each layer and of the vocabulary, so many
# times their width.
COPIES, PER_LAYER, PER_LOGIT = 3, 40, 5


@dataclass(frozen=True)
class Matrix:
    """An orthogonal matrix ``[size, size]`` as it is.

    Attributes:
        matrix: fp64, or what it is to be multiplied with.
    """

    matrix: Tensor

    @property
    def size(self) -> int:
        """Rows and columns."""
        return len(self.matrix)

    @property
    def order(self) -> int:
        """Of what is turned together: all."""
        return self.size

    def turn(self, values: Tensor, axis: int) -> Tensor:
        """As of :class:`model.rotation.hadamard.Rotation`; differentiable."""
        moved = values.movedim(axis, -1)
        return (moved.reshape(-1, self.size) @ self.matrix).reshape(moved.shape).movedim(-1, axis)


@dataclass(frozen=True)
class Learned:
    """What was learned.

    Attributes:
        rotations: for :func:`model.rotation.rotate_checkpoint`.
        first, last: KL(model || quantised) in nats per token, of the first and the last step's rows.
    """

    rotations: Mapping[str, Turning]
    first: float
    last: float


class _Descent:
    """One matrix on its way."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.momentum = torch.zeros_like(matrix)

    def step(self, gradient: Tensor, rate: float) -> None:
        """Move against the gradient, fp64, by an angle that ``rate`` bounds."""
        matrix = self.matrix
        moved = MOMENTUM * self.momentum - gradient
        half = moved @ matrix.T
        half -= matrix @ (matrix.T @ half) / 2
        skew = half - half.T
        norm = float(skew.norm())
        if norm == 0:  # of a model of one matrix that no quantised value depends on
            return
        self.momentum = skew @ matrix
        part, one = skew * (rate / norm / 2), torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        matrix = torch.linalg.solve(one - part, (one + part) @ matrix)
        self.matrix = matrix @ (3 * one - matrix.T @ matrix) / 2  # Newton's: what rounding added is squared


@dataclass(frozen=True)
class _Turned:
    """A tensor of the checkpoint in the model: ``values`` is a view of the Parameter, ``source`` what is turned."""

    key: str
    parameter: nn.Parameter
    start: int
    source: Tensor
    change: Change

    def of(self, flat: Tensor) -> Tensor:
        """The view of a tensor of the Parameter's elements."""
        return flat.reshape(-1)[self.start : self.start + self.source.numel()].view(self.source.shape)


class _Model:
    """The model whose weights follow the rotations."""

    def __init__(self, source: Path, scheme: Scheme, device: torch.device) -> None:
        self.model = build_model(source, {}, dtype=torch.float32, device=device).eval()
        load_weights(self.model, source, progress=False)
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head.weight is embedding.weight:
            head.weight = nn.Parameter(embedding.weight.detach().clone())
            self.model.config.tie_word_embeddings = False
        self.quantization = prepare(self.model, scheme, learn_weight_scale=False, learn_input_scale=False)
        self.turned: list[_Turned] = []

    @torch.no_grad()
    def fold(self, plan: Plan) -> None:
        """Multiply the norms' weights into the Linears, and remember what rotations turn."""
        names, parameters = Names(self.model), dict(self.model.named_parameters())
        with Reader() as reader:
            for key, change in plan.changes.items():
                layout = names.layout(key)
                if change == Change() or layout is None:
                    continue
                piece = layout.pieces[0]
                parameter = parameters[piece.name]
                if change.ones:
                    parameter.fill_(1)
                    continue
                values = read_tensor(reader, plan.source_of(key)).double()
                if change.norm is not None:
                    values *= read_tensor(reader, plan.source_of(change.norm)).double()
                values = values.float().to(parameter.device)
                self.turned.append(_Turned(key, parameter, piece.start, values, change))

    @torch.no_grad()
    def turn(self, rotations: Mapping[str, Turning]) -> None:
        """Give every tensor its turned values, and every weight its scale."""
        for one in self.turned:
            one.of(one.parameter.data).copy_(turned(one.source, one.key, one.change, rotations))
        weights_changed(self.model)
        renew_weight_scales(self.quantization)

    def loss(self, ids: Tensor) -> Tensor:
        """KL(model || quantised) of rows ``[B, T]`` in nats per token; inputs' stored scales are those of the rows."""
        quantization = self.quantization
        quantization.set_fake_quant(weights=False, activations=False)
        quantization.observe(True)
        with torch.no_grad():
            expected = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
        quantization.observe(False)
        _write_input_scales(quantization)
        quantization.set_fake_quant(weights=True, activations=True)
        found = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
        return F.kl_div(found, expected, log_target=True, reduction="batchmean")

    def gradients(self, rotations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the loss, after its backward, in fp64; and forget those of the weights."""
        leaves = {key: matrix.float().requires_grad_() for key, matrix in rotations.items()}
        matrices = {key: Matrix(leaf) for key, leaf in leaves.items()}
        for one in self.turned:
            if one.parameter.grad is not None:
                turned(one.source, one.key, one.change, matrices).backward(one.of(one.parameter.grad))
        self.model.zero_grad(set_to_none=True)
        zeros = {key: torch.zeros_like(leaf) for key, leaf in leaves.items()}
        return {key: (zeros[key] if leaf.grad is None else leaf.grad).double() for key, leaf in leaves.items()}


def learn_rotations(
    source: Path,
    scheme: Scheme,
    rows: Sequence[Tensor],
    *,
    seed: int = 0,
    rate: float = 0.2,
    device: torch.device,
    progress: bool = True,
) -> Learned:
    """Learn the rotations of a checkpoint for a scheme.

    Args:
        source: a plain Hugging Face checkpoint of one of ``plan.FAMILIES``.
        scheme: how its Linears are going to be quantised; lm_head is not.
        rows: token ids ``[B, T]`` of each step.
        seed: of the matrices that it starts from.
        rate: of the first step, falling to 0 in a line; the Frobenius norm of the step on the manifold.
        device: where the model is.
        progress: show a bar.

    Raises:
        CheckpointError: as :func:`model.rotation.rotate_checkpoint`; and before any weight is read where the memory of
            the device does not hold the model and its gradients.
    """
    plan = plan_checkpoint(source)
    _check_memory(source, plan, rows[0].numel(), device)
    model = _Model(source, scheme, device)
    model.fold(plan)
    descents = {
        key: _Descent(one.turn(torch.eye(one.size, dtype=torch.float64), -1).to(device))
        for key, one in first_rotations(plan.config, seed).items()
    }
    losses: list[float] = []
    with tqdm(rows, desc="learn", disable=not progress) as bar:
        for step, ids in enumerate(bar):
            model.turn({key: Matrix(one.matrix.float()) for key, one in descents.items()})
            loss = model.loss(ids.to(device))
            loss.backward()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise CheckpointError(f"{source}: the loss of the quantised model is {losses[-1]} at step {step}")
            bar.set_postfix_str(f"KL {losses[-1]:.4f}")
            for key, gradient in model.gradients({key: one.matrix for key, one in descents.items()}).items():
                descents[key].step(gradient, rate * (1 - step / len(rows)))
    return Learned({key: Matrix(one.matrix.cpu()) for key, one in descents.items()}, losses[0], losses[-1])


def _write_input_scales(quantization: Quantization) -> None:
    """The stored scales of inputs, from what was seen of them."""
    groups = [group for group in quantization.input_groups if group.observer is not None]
    if groups:
        scales = {
            group.owner: first_input_scale(group.observer.absmax.reshape(1), group.spec)  # type: ignore[union-attr]
            for group in groups
        }
        write_scales(groups, scales)


def _check_memory(source: Path, plan: Plan, tokens: int, device: torch.device) -> None:
    """Refuse what the device does not hold: the weights, and for each token what layers and logits keep."""
    config = plan.config
    weights = sum(math.prod(plan.source_of(key).shape) for key in plan.changes)
    of_token = config.num_hidden_layers * PER_LAYER * config.hidden_size + PER_LOGIT * config.vocab_size
    needed = 4 * (COPIES * weights + tokens * of_token)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    if needed > free:
        raise CheckpointError(
            f"{source}: learning rotations takes about {needed / 2**30:.1f} GiB ({weights / 1e9:.2f} billion weights "
            f"three times in fp32), and {device} has {free / 2**30:.1f} GiB free: use the Hadamard matrices, without "
            "--learn, or a larger machine"
        )
