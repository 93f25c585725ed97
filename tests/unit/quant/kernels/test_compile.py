"""A decoder layer of QuantLinears under torch.compile: one graph, eager mode's numbers, nothing quantized twice."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

import quant
from engine.session.student import COMPILE_OPTIONS
from quant.kernels import prepare_kernels
from quant.kernels.build_kernels import _AS_EAGER, build
from quant.spec import get_scheme
from tests.lib.saved import kept_for_backward, storages
from tests.lib.scales import fill_scales
from tests.lib.tiny import tiny_config

TRACED = "aot_eager_decomp_partition"
WAYS = {
    # scheme, whether input scales learn, fp8_gemm
    "learned": ("fp8_static", True, False),
    "fixed": ("fp8_static", False, False),
    "fp8_gemm": ("fp8_static", False, True),
    "fp8_gemm learned": ("fp8_static", True, True),
    "dynamic, in attention w4a16": ("8da4w", False, False),
    "nvfp4": ("nvfp4", False, False),
    "nvfp4_w4a4, codes kept": ("nvfp4_w4a4", False, False),
}


@pytest.fixture(scope="module", autouse=True)
def fresh(tmp_path_factory):
    """Graphs are compiled from nothing: one in the user's cache was made by older code."""
    built = build()
    if built.library is None:
        pytest.skip(f"torch.compile needs a C++ compiler too: {built.why}")
    prepare_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch._dynamo.reset()


class Layer:
    """A Qwen3 decoder layer after prepare, with the rest of what it takes."""

    def __init__(self, way: str, dtype: torch.dtype, device: str) -> None:
        scheme, learn_input, fp8_gemm = WAYS[way]
        config = tiny_config("qwen3", layers=1, even=True)
        config._attn_implementation, config.num_key_value_heads = "sdpa", 2
        model = Qwen3ForCausalLM(config).to(device, dtype)
        learn = {"learn_weight_scale": True, "learn_input_scale": learn_input}
        other = get_scheme("w4a16_g32") if "in attention" in way else get_scheme(scheme)
        rules = [quant.Rule(other, r".*self_attn.*")]
        q = quant.replace_layers(model, get_scheme(scheme), rules=rules, **learn, fp8_gemm=fp8_gemm)
        # All of them clip some, so that masks and thetas have something to do.
        sizes = {"q_proj": 2.0, "o_proj": 0.1, "gate_proj": 2.0, "down_proj": 0.02}
        fill_scales(q, sizes, clip=0.7, theta=0.0)
        for one in q.layers.values():
            one.dynamic_codes = way.endswith("codes kept")
        self.layer = model.model.layers[0]
        self.x, self.grad = (torch.randn(2, 8, 64).to(device, dtype) for _ in range(2))
        self.angles = model.model.rotary_emb(self.x, torch.arange(8, device=device)[None])

    def forward(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Input and output of the layer, compiled or not."""
        x = self.x.clone().requires_grad_()
        return x, layer(x, position_embeddings=self.angles)

    def run(self, layer: nn.Module) -> dict[str, Tensor]:
        """Output and all gradients."""
        self.layer.zero_grad()
        x, output = self.forward(layer)
        output.backward(self.grad)
        gradients = {name: p.grad for name, p in self.layer.named_parameters() if p.grad is not None}
        return {"output": output.detach(), "x": x.grad, **gradients}

    def calls(self, layer: nn.Module) -> Counter[str]:
        """How often a forward that trains calls each operator."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.forward(layer)
        names = (event.name for event in profile.events())
        return Counter(name.removeprefix("deepqat::") for name in names if name.startswith("deepqat::"))

    def kept(self, layer: nn.Module) -> dict[int, Tensor]:
        """Tensors that a forward keeps for backward."""
        with kept_for_backward(self.layer.parameters()) as found:
            self.forward(layer)
        return found


def assert_like_eager(ours: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Relative to the norm of each tensor.

    The quantizers and GEMMs are the same calls. What the compiler fuses (norms, rotation, SiLU, sums) may differ in the
    order of fp32 sums and the last bit of exp and rsqrt, 1e-7 relative: 1e-5 of each norm after a layer, in bf16 one
    rounding of single elements, 2^-8, where it tips over. If such a difference carries an input across a boundary of
    the grid (one run in a hundred), one of its 1,000 to 2,000 elements moves by up to a tenth of itself: 0.1 /
    sqrt(1000) of the norm is 0.3%, several times that where the element is large. A wrong mask, scale or factor moves
    most gradients by 10% and more: clipped are some 5% of each operand.
    """
    assert ours.keys() == theirs.keys()
    off = {
        name: ((value.double() - theirs[name].double()).norm() / theirs[name].double().norm()).item()
        for name, value in ours.items()
    }
    assert all(value.dtype == theirs[name].dtype == dtype for name, value in ours.items())
    # A theta that all elements of a tensor share is a sum of few terms that are not 0, with both signs.
    bounds = {name: 0.1 if "theta" in name else 0.02 for name in off}
    assert all(off[name] <= bounds[name] for name in off), off
    typical = sorted(off.values())[len(off) // 2]
    assert typical <= (1e-4 if dtype == torch.float32 else 4e-3), off


def check(way: str, dtype: torch.dtype, backend: str, *, device: str = "cpu") -> None:
    """Forward and backward of one way of computing, compiled as a whole.

    Inductor rounds where eager mode rounds: fused chains of bf16 operations would stay in fp32. It takes ten seconds
    and more for the C++ of one layer; ``aot_eager_decomp_partition`` traces and partitions the same graphs, and runs
    them operator by operator.
    """
    layer = Layer(way, dtype, device)
    plain = layer.layer
    eager = layer.run(plain)
    assert all(value.any() for value in eager.values()), [name for name, value in eager.items() if not value.any()]
    torch._dynamo.reset()
    options = COMPILE_OPTIONS if backend == "inductor" else None
    graph = torch.compile(plain, fullgraph=True, backend=backend, options=options)
    assert_like_eager(layer.run(graph), eager, dtype)
    assert_like_eager(layer.run(graph), eager, dtype)  # nothing is left over from the first time

    # q, k and v, and gate and up, make one quantized input, although no layer hands it to the other there.
    both = (plain.self_attn.q_proj.scheme, plain.mlp.up_proj.scheme)
    wanted = 7 + 2 * sum(scheme.activations is not None for scheme in both)
    for run in (graph, plain):
        calls = layer.calls(run)
        codes = calls["quantize"]
        others = calls["fake_quantize"] + calls["fake_quantize_tokens"] + calls["keep_tokens"]
        assert codes + others == wanted, calls
        assert not WAYS[way][2] or codes == wanted, f"inputs and weights as codes: {calls}"
    # No fake-quantized copy of a weight is kept, and not more than in eager mode: fewer, as norms are computed again.
    shapes = {tuple(shape) for p in plain.parameters() if p.dim() == 2 for shape in (p.shape, p.shape[::-1])}
    kept, of_eager = layer.kept(graph), layer.kept(plain)
    assert of_eager and not shapes & {tuple(tensor.shape) for tensor in kept.values()}
    assert sum(storages(kept).values()) <= sum(storages(of_eager).values())


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("learned", torch.float32),
        ("fp8_gemm", torch.bfloat16),
        pytest.param("fp8_gemm learned", torch.float32, marks=pytest.mark.full),
        ("dynamic, in attention w4a16", torch.bfloat16),
        *(pytest.param(way, torch.bfloat16, marks=pytest.mark.full) for way in ("nvfp4", "nvfp4_w4a4, codes kept")),
    ],
)
def test_traced_as_one_graph(way, dtype, seed):
    check(way, dtype, TRACED)


@pytest.mark.full
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("way", WAYS)
def test_every_way_by_inductor(way, dtype, seed):
    check(way, dtype, "inductor")


def test_what_stands_in_for_the_cuda_kernels_is_compiled_to_round_as_they_do():
    """torch takes the options only while it knows them."""
    options = torch._inductor.config.get_config_copy()
    assert not any(options[name] for name in _AS_EAGER) and all(_AS_EAGER.values())


def test_a_switch_compiles_another_graph(seed):
    """Fake quantization that a schedule turns on in the middle: the compiled layer must not stay as it was."""
    model = nn.Sequential(nn.Linear(32, 32)).bfloat16()
    q = quant.replace_layers(model, get_scheme("w4a16_g32"), learn_weight_scale=True, learn_input_scale=False)
    with torch.no_grad():
        q.weight_groups[0].s0.fill_(0.03)
    x = torch.randn(5, 32).bfloat16()
    torch._dynamo.reset()
    graph = torch.compile(model, fullgraph=True, backend=TRACED)
    outputs = []
    for on in (False, True, False):
        q.set_fake_quant(on, on)
        outputs.append(graph(x))
        assert torch.equal(outputs[-1], model(x))
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])
