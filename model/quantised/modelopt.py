"""What ModelOpt says of a checkpoint that it wrote: ``hf_quant_config.json``, and in newer ones config.json.

Both have ``quant_algo``, the layers that are left out (``exclude_modules``, ``ignore``) as names in which ``*`` stands
for anything, and how keys and values are quantised. The codes of ``FP8`` lie as those of compressed-tensors' static fp8
do: ``weight`` in e4m3, ``weight_scale`` and ``input_scale`` fp32, all of which multiply. Those of NVFP4 do not,
and are not read.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from quant import Rule, Scheme, TensorSpec
from quant.spec import FP8_TENSOR, SCHEMES

FILE = "hf_quant_config.json"

_BLOCK = TensorSpec("fp8_e4m3", 8, "block", 128)
# Algorithms whose scales are those of a scheme here; with AWQ or SmoothQuant weights are other ones.
_ALGORITHMS = {
    "FP8": Scheme("FP8", FP8_TENSOR, FP8_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("FP8_PER_CHANNEL_PER_TOKEN", TensorSpec("fp8_e4m3", 8, "channel")),
    "FP8_PB_WO": Scheme("FP8_PB_WO", _BLOCK),
    "NVFP4": Scheme("NVFP4", SCHEMES["nvfp4_w4a4"].weights, SCHEMES["nvfp4_w4a4"].activations),
    "W4A16_NVFP4": Scheme("W4A16_NVFP4", TensorSpec("fp4_e2m1", 4, "group", 16)),
}


def modelopt_rules(config: Mapping[str, Any], *, scales_only: bool = False) -> list[Rule]:
    """What ModelOpt says of every layer, as rules: the first one that matches decides.

    ``scales_only``: whether the codes are not read, but the scales beside them.

    Raises:
        ValueError: an algorithm that is not read.
    """
    skipped = config.get("exclude_modules") or config.get("ignore") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise ValueError(f"exclude_modules is {str(skipped)[:80]}, expected a list of names")
    rules = [Rule(None, rf"(?:{fnmatch.translate(name)})(\..*)?") for name in skipped]
    if config.get("quant_algo") == "MIXED_PRECISION":
        rules += [
            Rule(_algorithm(one.get("quant_algo"), scales_only), re.escape(name))
            for name, one in (config.get("quantized_layers") or {}).items()
        ]
    else:
        rules.append(Rule(_algorithm(config.get("quant_algo"), scales_only)))
    return rules


def modelopt_kv_cache(config: Mapping[str, Any]) -> TensorSpec | None:
    """How keys and values are quantised; None if they are not.

    Raises:
        ValueError: in a way that is not read.
    """
    cache, scheme = config.get("kv_cache_quant_algo"), config.get("kv_cache_scheme")
    if cache is None and scheme:
        fp8 = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        cache = "FP8" if fp8 and not scheme.get("dynamic") else scheme
    if cache not in (None, "FP8"):
        raise ValueError(f"kv_cache_quant_algo is {cache!r}, expected 'FP8'")
    return FP8_TENSOR if cache else None


def _algorithm(name: Any, scales_only: bool) -> Scheme:
    found = _ALGORITHMS.get(str(name).upper())
    if found is None:
        raise ValueError(f"quant_algo is {name!r}, expected {', '.join(_ALGORITHMS)} or MIXED_PRECISION of these")
    if found.name != "FP8" and not scales_only:
        raise ValueError(
            f"quant_algo is {name!r}, whose codes are not read: expected 'FP8'; give the unquantised checkpoint as "
            "model.path and this one as quant.scales"
        )
    return found
