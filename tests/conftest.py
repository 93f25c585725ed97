"""What every process of tests does before anything is imported."""

import os

# DeepSpeed takes a GPU where there is one, at its import; what tests/gpu/ does on one says so itself.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
