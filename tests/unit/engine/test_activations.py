"""Activation checkpointing and offload: the same losses and gradients bit for bit, and only blocks' inputs are kept."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import quant.observers
from engine.step import OnHost
from model.head import install_head
from tests.lib.checkpoints import load_model
from tests.lib.scales import fill_scales
from tests.lib.tiny import tiny_checkpoint

# kind, scheme, whether input scales learn, the rest of what quant.replace_layers takes
CASES = {
    "learned": ("qwen3", "fp8_static", True, {}),
    "fixed": ("qwen3", "fp8_static", False, {}),
    "fp8_gemm": ("qwen3", "fp8_static", False, {"fp8_gemm": True}),
    "integer": ("llama", "w4a16_g32", False, {}),
    "dynamic": ("qwen3_moe", "8da4w", False, {}),
    "experts": ("qwen3_moe", "fp8_static", True, {}),
    "cache": ("qwen3_moe", "fp8_static", True, {"kv_cache": quant.PRESETS["fp8_static_kv"].kv_cache}),
}


class Run:
    """A model of two layers or more, quantized so that scales clip something, and a batch."""

    def __init__(self, case: str, directory: Path, *, layers: int = 2, recompute: bool) -> None:
        kind, scheme, learns, options = CASES[case]
        path = directory / f"{kind}{layers}"
        if not path.exists():
            tiny_checkpoint(path, kind, seed=torch.initial_seed(), layers=layers, even=True)
        self.model = load_model(path).train()
        self.quantization = quant.replace_layers(
            self.model, quant.get_scheme(scheme), learn_weight_scale=True, learn_input_scale=learns, **options
        )
        fill_scales(self.quantization, 1.0, clip=0.7, theta=0.0)
        install_head(self.model)
        self.model.config.use_cache = False
        if recompute:
            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        self.ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))

    def loss(self) -> Tensor:
        return self.model(input_ids=self.ids).logits.float().square().mean()

    def results(self, around: AbstractContextManager | None = None) -> dict[str, Tensor]:
        """The loss and all gradients; ``around`` the forward."""
        with around or nullcontext():
            loss = self.loss()
        with quant.observers.recomputing():
            loss.backward()
        return {"loss": loss.detach()} | {
            name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None
        }


class Elsewhere(OnHost):
    """To see on a CPU what would travel: it is copied here too, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.traveled: list[Tensor] = []

    def to_host(self, tensor: Tensor) -> Tensor:
        self.traveled.append(tensor.clone())
        return self.traveled[-1]


@pytest.mark.parametrize("case", CASES)
def test_recomputed_and_offloaded_blocks_change_no_bit(seed, tmp_path, case):
    expected = Run(case, tmp_path, recompute=False).results()
    assert len(expected) > 10 and all(value.isfinite().all() for value in expected.values())
    elsewhere = Elsewhere()
    for around in (None, elsewhere):
        found = Run(case, tmp_path, recompute=True).results(around)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, around)
    blocks = [tensor for tensor in elsewhere.traveled if tensor.shape == (2, 24, 64) and tensor.dtype == torch.bfloat16]
    assert len(blocks) >= 2
    assert not any(isinstance(tensor, nn.Parameter) for tensor in elsewhere.traveled)


def kept_bytes(run: Run) -> int:
    """Of what the forward keeps for backward, each storage once, Parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in run.model.parameters()}
    storages: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = (tensor, storage.nbytes())  # held, so that no address comes twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run.loss()
    return sum(size for _, size in storages.values())


@pytest.mark.parametrize("case", ["learned", "fixed", "experts", "cache"])
def test_a_recomputed_block_keeps_its_input_and_nothing_else(seed, tmp_path, case):
    """Two layers more are two inputs more, of 2 x 24 tokens, 64 features and 2 bytes."""
    two, four = (kept_bytes(Run(case, tmp_path, layers=layers, recompute=True)) for layers in (2, 4))
    assert four - two == 2 * (2 * 24 * 64 * 2)
    stored = [kept_bytes(Run(case, tmp_path, layers=layers, recompute=False)) for layers in (2, 4)]
    assert stored[1] - stored[0] > 10 * (four - two)


def test_a_parameter_stays_where_it_is_and_a_tensor_comes_back_as_it_was(seed):
    elsewhere = Elsewhere()
    parameter, tensor = nn.Parameter(torch.randn(3)), torch.randn(4)
    assert elsewhere.unpack(elsewhere.pack(parameter)) is parameter
    assert torch.equal(elsewhere.unpack(elsewhere.pack(tensor)), tensor)
    assert [kept.shape for kept in elsewhere.traveled] == [(4,)]


@pytest.mark.parametrize("case", ["learned", "cache"])
def test_observers_count_a_recomputed_forward_once(seed, tmp_path, case):
    seen = []
    for recompute in (False, True):
        run = Run(case, tmp_path, recompute=recompute)
        run.quantization.observe(True)
        run.results()
        seen.append([group.observer.state_dict() for group in run.quantization.input_groups])
    assert seen[0] and all(int(state["total"]) > 0 for state in seen[0])
    for once, recomputed in zip(*seen, strict=True):
        assert all(torch.equal(once[key], recomputed[key]) for key in once)
