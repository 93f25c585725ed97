"""Specs and schemes that cannot be are refused, and what makes an MX spec."""

import pytest

from quant.spec import SCHEMES, Scheme, TensorSpec, get_scheme
from tests.unit.quant.oracle import FP8

GROUP_SIZE, ASYMMETRIC = "group_size", "only int codes per channel or group"
NARROW, MX = "only symmetric int weights have a narrow grid", r"powers of two \(mx\) are of floats in groups of 32"


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (("fp8_e4m3", 4, "tensor"), {}, "fp8_e4m3 has 8 bits"),
        (("int", 9, "tensor"), {}, "2 to 8 bits, got .*bits=9"),
        (("int", 4, "group"), {}, GROUP_SIZE),
        (("int", 4, "tensor", 32), {}, GROUP_SIZE),
        (("int", 8, "tensor"), {"symmetric": False}, ASYMMETRIC),
        (("fp8_e4m3", 8, "channel"), {"symmetric": False}, ASYMMETRIC),
        (("int", 8, "block", 16), {"symmetric": False}, ASYMMETRIC),
        (("fp8_e4m3", 8, "tensor"), {"narrow": True}, NARROW),
        (("int", 4, "channel"), {"symmetric": False, "narrow": True}, NARROW),
        (("int", 8, "token"), {"dynamic": True, "narrow": True}, NARROW),
        (("fp4_e2m1", 4, "group", 16), {"mx": True}, MX),
        (("int", 8, "group", 32), {"mx": True}, MX),
        (("fp8_e4m3", 8, "group", 128), {"mx": True}, MX),
        (("fp8_e4m3", 8, "tensor"), {"mx": True}, MX),
    ],
)
def test_specs_that_cannot_be_are_refused(spec, options, said):
    with pytest.raises(ValueError, match=said):
        TensorSpec(*spec, **options)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (TensorSpec("int", 8, "tensor", narrow=True), "inputs cannot have narrow range"),
        (TensorSpec("int", 4, "tensor"), "inputs with a stored scale must have 8 bits"),
    ],
)
def test_schemes_that_cannot_be_are_refused(inputs, said):
    with pytest.raises(ValueError, match=said):
        Scheme("bad", FP8, inputs)


def test_names_and_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="in_features 48 is not divisible by group_size 32"):
        get_scheme("w4a16_g32").weights.scale_shape((8, 48))
    with pytest.raises(ValueError, match="w4a16_g32") as error:
        get_scheme("w4a16")
    assert all(name in str(error.value) for name in SCHEMES)
    with pytest.raises(ValueError, match=r"^'fp8_static_kv' quantizes keys and values, expected .* fp8_static,"):
        get_scheme("fp8_static_kv")


def test_fp4_in_groups_of_32_is_mx_and_fp8_where_it_says_so():
    assert TensorSpec("fp4_e2m1", 4, "group", 32) == TensorSpec("fp4_e2m1", 4, "group", 32, mx=True)
    assert TensorSpec("fp4_e2m1", 4, "group", 32, dynamic=True).scale_format == "e8m0"
    assert TensorSpec("fp8_e4m3", 8, "group", 32).scale_format == "float32"
    assert TensorSpec("fp8_e4m3", 8, "group", 32, mx=True).scale_format == "e8m0"
