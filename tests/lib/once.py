"""Work that every process of tests would repeat; importing this file does it in the process that forks them all."""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.config.reading import load_recipe
from tests.lib.recipes import write_minimal

with TemporaryDirectory() as directory:
    load_recipe(write_minimal(Path(directory)))  # the parser of recipes is made once, in 0.3 s
gc.freeze()  # else the first collections, two in a run of stage 3, go through what was imported: 0.3 s each
