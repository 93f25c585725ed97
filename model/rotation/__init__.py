"""Rotations of a checkpoint's weights that leave the model the same function, and spread outliers of its inputs.

``hadamard.py`` has the orthogonal matrices, ``plan.py`` says what happens to each tensor of a file, and ``write.py``
makes the rotated checkpoint, tensor by tensor. ``online.py`` turns weights of layers whose inputs are turned while the
model runs.
"""

from model.rotation.online import rotate_weights
from model.rotation.write import RotationReport, rotate_checkpoint

__all__ = ["RotationReport", "rotate_checkpoint", "rotate_weights"]
