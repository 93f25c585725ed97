"""``quant.scheme: source``: the schemes that a recipe takes from its quantized checkpoint."""

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from engine.config.errors import RecipeError
from engine.config.quant import SOURCE, QuantRecipe, SchemeRecipe, TensorRecipe
from model.checkpoint.safetensors import CheckpointError
from model.quantized.config import read_quantization_config, rules_of
from quant import TensorSpec


def resolve_source(quant: QuantRecipe, path: str) -> None:
    """Write the schemes of the checkpoint in ``path`` into ``quant.schemes``, the first under the name ``source``, with
    the grid that its codes are on; which layer has which is found when the model is built. A recipe that was saved has
    them already.

    Raises:
        RecipeError: the checkpoint is not quantized, or not in a way that is read.
    """
    if SOURCE in quant.schemes:
        return
    try:
        config = read_quantization_config(Path(path))
        found = list(dict.fromkeys(rule.scheme for rule in rules_of(config) if rule.scheme is not None))
        if config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
            raise ValueError(
                "kv_cache_scheme (or kv_cache_quant_algo) is set, which 'source' does not take: name fp8_static_kv or "
                "fp8_kv"
            )
        if not found:
            raise ValueError("quantization_config has no group of layers")
    except ValueError as error:
        expected = "expected a name unless quant.start or model.path is a quantized checkpoint"
        raise RecipeError(f"quant.scheme: 'source', {expected}: {error}") from error
    narrow = _narrow(Path(path))
    for index, scheme in enumerate(found):
        inputs = None if scheme.activations is None else _tensor(scheme.activations)
        name = SOURCE if index == 0 else f"{SOURCE}_{index + 1}"
        quant.schemes[name] = SchemeRecipe(replace(_tensor(scheme.weights), narrow=scheme.weights in narrow), inputs)


def _narrow(directory: Path) -> set[TensorSpec]:
    """The weights whose codes are on the narrow grid. Of files that cannot be read nothing is said here: whoever reads
    the weights says it."""
    from model.quantized.checkpoint import read_checkpoint  # brings DeepSpeed, which other recipes do not need

    with suppress(CheckpointError, OSError):
        weights = {one.scheme.weights for one in read_checkpoint(directory, None).coded.values()}
        return {spec.wide for spec in weights if spec.narrow}
    return set()


def _tensor(spec: TensorSpec) -> TensorRecipe:
    return TensorRecipe(**asdict(spec))
