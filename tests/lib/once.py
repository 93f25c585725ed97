"""What every process of tests would do once, done at import by the process that they are forked from (processes.py)."""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.config.reading import load_recipe
from tests.lib.recipes import write_minimal

with TemporaryDirectory() as directory:
    load_recipe(write_minimal(Path(directory)))  # the parser of recipes is made once, in 0.3 s
gc.freeze()  # else the first collections, two in a run of stage 3, go through what was imported: 0.3 s each
