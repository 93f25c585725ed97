"""The session's model as a compressed checkpoint."""

from pathlib import Path

from engine.recipe import parse_size
from engine.setup import Session, say
from model.save import export_model


def export(session: Session, directory: Path) -> None:
    """Write the compressed checkpoint into ``directory``; a collective. Errors as of :func:`model.save.export_model`."""
    recipe = session.recipe
    export_model(
        session.model,
        session.quantization,
        recipe.model.path,
        directory,
        max_shard_size=parse_size(recipe.export.max_shard_size),
    )
    say(f"exported: {directory}")
