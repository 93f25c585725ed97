"""Load, arrange and save models whose parameters may be ZeRO-3 partitions. The import of this package raises
ImportError if transformers is too old."""

from importlib.metadata import version

TRANSFORMERS = (5, 23)
"""Oldest tested version of transformers; 5.17 lacks names that this package imports."""


def check_transformers(found: str) -> None:
    """Raise ImportError if this version of transformers is older than :data:`TRANSFORMERS`."""
    if tuple(map(int, found.split(".")[:2])) < TRANSFORMERS:
        least = ".".join(map(str, TRANSFORMERS))
        raise ImportError(
            f"transformers {found} is installed, expected {least} or newer: pip install -r requirements.txt",
            name="transformers",
        )


check_transformers(version("transformers"))
