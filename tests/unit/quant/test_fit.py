"""Scales that were chosen in any legitimate way pass, on weights of every kind; those of something else do not."""

import pytest
import torch

from quant import SCHEMES
from tests.unit.quant.scale_cases import Case, legitimate, wrong

WEIGHTS = {
    "gaussian": lambda noise: noise,
    "heavy tails": lambda noise: noise * torch.randn_like(noise).abs().clamp(0.3, 4),
    "outlier columns": lambda noise: noise * torch.where(torch.rand(noise.shape[1]) < 0.02, 20.0, 1.0),
    "unequal rows": lambda noise: noise * torch.exp(0.7 * torch.randn(len(noise), 1)),
    "rows of zeros": lambda noise: noise * (torch.rand(len(noise), 1) < 0.7),
}
NAMES = ("fp8_static", "fp8_dynamic", "fp8_block", "int8_dynamic", "w4a16_g32", "w4a16_channel", "w3a16_g32")
NAMES += ("w2a16_g32", "w4a16_asym", "nvfp4", "mxfp4")


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_legitimate_scales_pass_alone_and_beside_their_codes(name, kind, seed):
    case = Case(WEIGHTS[kind](0.02 * torch.randn(256, 256)).bfloat16().float(), SCHEMES[name].weights)
    for title, scale in legitimate(case):
        scale = case.stored(scale)
        refused, error = case.refused(scale)
        # 30% off an outlier that is all of its group are 0.09 of its squares, and the others round: with enough of them
        # that is more than the tenth which clipping may cost.
        assert not refused or (title.startswith("clipped to 70%") and error > 0.1), title
        source = case.weight
        if title == "codes of GPTQ" and kind == "outlier columns":
            source = case.gptq(scale)
        elif title.startswith("codes of weights"):
            source = source + 0.3 * torch.randn_like(source) * source.std()
        assert not case.refused_codes(scale, source, scale), title


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_what_passes_of_wrong_scales_does_little_harm(name, kind, seed):
    """By the scales alone. With codes beside them, those of other weights are always refused."""
    case = Case(WEIGHTS[kind](0.02 * torch.randn(256, 256)).bfloat16().float(), SCHEMES[name].weights)
    own_error = case.refused(case.stored(case.own))[1]
    for title, scale, source, of_source in wrong(case):
        scale = case.stored(scale.clamp(min=1e-12))
        refused, error = case.refused(scale)
        if not (name == "w2a16_g32" and title.startswith("absmax")):  # that is the grid -1..1
            assert refused or error <= max(0.1, 3.3 * own_error), title
        if "random weight" in title or "times 2" in title:
            assert refused or case.refused_codes(scale, source, case.stored(of_source)), title
