"""Fingerprint of a checkpoint's files, to detect changes without reading all of their bytes."""

import hashlib
from pathlib import Path

DIGEST_BYTES = 2**20  # read at three offsets of each weight file


def digest_of_checkpoint(path: str | Path) -> str:
    """Hash config.json, and name, size, beginning, middle and end of every weight file."""
    digest = hashlib.blake2b((Path(path) / "config.json").read_bytes(), digest_size=16)
    for file in sorted(Path(path).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for start in (0, size // 2, max(0, size - DIGEST_BYTES)):
                stream.seek(start)
                digest.update(stream.read(DIGEST_BYTES))
    return digest.hexdigest()
