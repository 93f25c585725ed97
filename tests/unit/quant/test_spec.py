"""Specs and schemes that cannot be are refused."""

import pytest

from quant.spec import SCHEMES, Scheme, TensorSpec, get_scheme
from tests.unit.quant.oracle import FP8


def test_specs_and_schemes_refuse_what_they_cannot_be():
    """Errors say what was expected."""
    with pytest.raises(ValueError, match="8 bits, got bits=4"):
        TensorSpec("fp8_e4m3", 4, "tensor")
    with pytest.raises(ValueError, match="2 to 8 bits, got bits=9"):
        TensorSpec("int", 9, "tensor")
    for granularity, group_size in (("group", None), ("tensor", 32)):
        with pytest.raises(ValueError, match="group_size"):
            TensorSpec("int", 4, granularity, group_size)
    for granularity, dtype in (("tensor", "int"), ("channel", "fp8_e4m3"), ("block", "int")):
        size = 16 if granularity == "block" else None
        with pytest.raises(ValueError, match="only int codes per channel or group"):
            TensorSpec(dtype, 8, granularity, size, symmetric=False)
    for spec in (
        {"dtype": "fp8_e4m3", "bits": 8, "granularity": "tensor"},
        {"dtype": "int", "bits": 4, "granularity": "channel", "symmetric": False},
        {"dtype": "int", "bits": 8, "granularity": "token", "dynamic": True},
    ):
        with pytest.raises(ValueError, match="only symmetric int weights have a narrow grid"):
            TensorSpec(**spec, narrow=True)
    with pytest.raises(ValueError, match="readers quantize inputs to all codes"):
        Scheme("bad", FP8, TensorSpec("int", 8, "tensor", narrow=True))
    with pytest.raises(ValueError, match="in_features 48 is not divisible by group_size 32"):
        get_scheme("w4a16_g32").weights.scale_shape((8, 48))
    with pytest.raises(ValueError, match="w4a16_g32") as error:
        get_scheme("w4a16")
    assert all(name in str(error.value) for name in SCHEMES)
    with pytest.raises(ValueError, match="a stored scale of inputs is per tensor, of 8 bits"):
        Scheme("bad", FP8, TensorSpec("int", 4, "tensor"))
