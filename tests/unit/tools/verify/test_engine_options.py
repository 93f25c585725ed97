"""Options of launch/verify.py that name an engine: errors before anything is loaded."""

import pytest

from launch.verify import main
from quant import SCHEMES
from tests.lib.checkpoints import exported


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--engine", "vllm"], "--engine vllm and --engine_python go together"),
        (["--engine_python", "python"], "--engine vllm and --engine_python go together"),
        (["--engine", "llama.cpp"], "has no model.gguf, which --engine llama.cpp runs"),
    ],
)
def test_engines_that_do_not_fit_are_refused(tmp_path, capsys, options, error):
    export = exported(tmp_path, "qwen3", SCHEMES["w8a16_channel"]).directory
    with pytest.raises(SystemExit):
        main(["--export", str(export), *options])
    assert error in capsys.readouterr().err
