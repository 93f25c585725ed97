"""Write scales into their Parameters: read from a PTQ checkpoint, or measured from the partitioned weights.

A scale ``s = s0 * exp(theta)`` is loaded or measured into ``s0``, a frozen fp32 Parameter, while theta stays 0: step 0
computes the PTQ model. Under ZeRO-3 ``s0`` is partitioned like any Parameter and written through
``GatheredParameters``. As it is frozen, it has no fp32 master copy that would overwrite it, so it can also be written
after ``deepspeed.initialize``.

For an asymmetric weight, this package passes scales and zero points as one tensor ``[2, *scale shape]``, so that
neither changes without the other.

A checkpoint goes through ``grouping.py`` (files to tensors by key, and tensors of Linears to scale groups),
``scale_check.py`` and ``codes.py`` (shapes, values, comparison with the weights) and ``in_place.py`` (writing into
partitions, and measuring from the weights), each called once by ``loading.py``.
"""

from model.scales.grouping import cache_keys
from model.scales.in_place import (
    WeightStatistics,
    follow_weights,
    input_scales,
    measure_weight_scales,
    release_scales,
    renew_weight_scales,
    weight_statistics,
    write_scales,
)
from model.scales.loading import ScaleReport, load_scales
