"""``quant.scheme: source``: the schemes that a recipe takes from its quantised checkpoint."""

from pathlib import Path

from engine.recipe.checks import RecipeError
from engine.recipe.quant import SOURCE, QuantRecipe, SchemeRecipe, TensorRecipe
from model.quantised.config import read_quantization_config, rules_of
from quant import TensorSpec


def resolve_source(quant: QuantRecipe, path: str) -> None:
    """Write the schemes of the checkpoint in ``path`` into ``quant.schemes``, the first under the name ``source``;
    which layer has which is found when the model is built. A recipe that was saved has them already.

    Raises:
        RecipeError: the checkpoint is not quantised, or not in a way that is read.
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
        expected = "expected a name unless quant.start or model.path is a quantised checkpoint"
        raise RecipeError(f"quant.scheme: 'source', {expected}: {error}") from error
    for index, scheme in enumerate(found):
        inputs = None if scheme.activations is None else _tensor(scheme.activations)
        name = SOURCE if index == 0 else f"{SOURCE}_{index + 1}"
        quant.schemes[name] = SchemeRecipe(_tensor(scheme.weights), inputs)


def _tensor(spec: TensorSpec) -> TensorRecipe:
    return TensorRecipe(spec.dtype, spec.bits, spec.granularity, spec.group_size, spec.symmetric, spec.dynamic)
