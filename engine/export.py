"""The session's model as a checkpoint that others load."""

from pathlib import Path

from engine.recipe import Recipe, RecipeError, parse_size
from engine.setup import Session, say
from model.save import export_model


def check_export_dir(recipe: Recipe) -> None:
    """Refuse before any work a destination that is taken. Raises RecipeError."""
    directory = recipe.export_dir()
    if directory.is_dir() and any(directory.iterdir()):
        raise RecipeError(f"export.dir: {str(directory)!r} is not empty; name another one, or remove it")


def export(session: Session, directory: Path) -> None:
    """Write the compressed checkpoint into ``directory``; a collective. Errors as of :func:`model.save.export_model`.

    A run that never quantises (``quant.fake_quant_start: -1``) writes a plain one.
    """
    recipe = session.recipe
    report = export_model(
        session.model,
        None if recipe.quant.fake_quant_start == -1 else session.quantization,
        recipe.model.path,
        directory,
        max_shard_size=parse_size(recipe.export.max_shard_size),
    )
    size = report.bytes / 1e6
    files = f"{len(report.files)} file{'s' * (len(report.files) != 1)}"
    say(f"export: {report.path}, {report.tensors} tensors, {size:,.1f} MB in {files}, {report.seconds:.1f} s")
