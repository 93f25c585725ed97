"""Messages of other libraries: only their errors are shown, unless all are asked for."""

import os
import subprocess
import sys

import pytest

from tests.lib.root import ROOT

PROGRAM = """
import logging, warnings
import engine.session.context
from deepspeed.utils import logger
from transformers.utils import logging as transformers_logging
logger.info("an info")
logger.warning("a warning of the logger")
logger.error("an error of the logger")
for module in ("deepspeed.runtime.engine", "torch.autograd.graph", "transformers.modeling_utils", "users_own"):
    warnings.warn_explicit("a warning of a module", UserWarning, module, 1, module=module)
transformers_logging.get_logger("transformers.modeling_utils").warning("a warning of transformers")
print("a line of a run")
"""


@pytest.mark.parametrize("everything", [False, True])
def test_what_libraries_say_beside_their_errors_is_left_out_by_default(everything, tmp_path):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRANSFORMERS_", "TORCH_"))}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "DEEPQAT_LIBRARY_LOGS": str(int(everything))}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    said = result.stdout + result.stderr
    counts = [said.count(text) for text in ("a warning of the logger", "a warning of a module", "of transformers")]
    assert counts == ([1, 4, 1] if everything else [0, 1, 0]), said
    assert said.count("an error of the logger") == 1 and said.count("users_own:1: UserWarning") == 1
    if not everything:  # nothing beside these two and the run's own line
        assert len(said.splitlines()) == 3, said
