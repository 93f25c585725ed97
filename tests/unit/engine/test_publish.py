"""Versions in a directory, and all that a vLLM server may answer."""

import os
import re
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.fake_quant import FakeQuant
from engine.publish import ServerError, VllmServer, _make_current, _prepare, not_reloaded
from model.save.aside import WRITING
from quant import SCHEMES
from tests.lib.checkpoints import load_model, quantized
from tests.lib.fake_vllm import PROMPT, FakeVllm, listening, versions
from tests.lib.patience import PATIENCE
from tests.lib.recipes import minimal
from tests.lib.tiny import tiny_checkpoint


def load(url: str, version: Path, known: list[Path]) -> None:
    VllmServer(url, monotonic() + PATIENCE).load(version, known, PROMPT)


@pytest.mark.parametrize("broken", ["", "busy"])
def test_a_server_is_tested_once_and_loads_each_version_while_it_is_paused(tmp_path, broken):
    first, second, third = versions(tmp_path, 3)
    (tmp_path / "current").symlink_to(first.name)
    server = FakeVllm(tmp_path / "current", broken)
    with listening(server) as url:
        load(url, second, [second, first])
        assert (server.weights, server.version, server.paused) == (server.read(second), str(second), False)
        tested, loaded = server.calls.count("v1/completions"), server.loaded
        assert tested == 4 and loaded == 3
        load(url, third, [second, third])
        assert (server.weights, server.version, server.paused) == (server.read(third), str(third), False)
        assert (server.calls.count("v1/completions"), server.loaded) == (tested, loaded + 1)


BROKEN = {
    "not vLLM": (r"its answers are not those of vLLM 0\.32 \(KeyError: 'data'\)", False),
    "no dev mode": (r"no /weight_info: start vLLM 0\.32 or later with VLLM_SERVER_DEV_MODE=1", False),
    "never idle": (r"/pause\S*: HTTP 500 some reason; it goes on with the version before", False),
    "fails": (r"did not load .*step_00000000: /collective_rpc: HTTP 500 some reason\. It stays paused", True),
    "cut off": (r"did not load .*step_00000000: /collective_rpc: HTTP 500\. It stays paused", True),
    "stale": (r"does not restore 1 of its 2 parameters \(b\): .* It stays paused: restart it", True),
    "hidden": (r"after loading step_00000000 again a log-probability differs by 1: .* It stays paused", True),
    "no answer": (r"again a prompt has no answer \(/v1/completions: HTTP 500 some reason\): .* It stays paused", True),
    "NaN": (r"after loading step_00000000 again a log-probability differs by nan: .* It stays paused", True),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_server_that_does_something_else_says_so_in_one_line_and_serves_nothing_wrong(tmp_path, broken):
    first, second = versions(tmp_path, 2)
    server, (said, paused) = FakeVllm(first, broken), BROKEN[broken]
    with listening(server) as url:
        with pytest.raises(ServerError, match=said) as error:
            load(url, second, [first, second])
        assert "\n" not in str(error.value)
        assert server.paused == paused
        assert paused or server.weights == server.read(first)
        if paused:
            with pytest.raises(ServerError, match="an earlier update of its weights failed"):
                load(url, second, [first, second])


def test_a_server_of_another_model_or_another_run_is_left_alone(tmp_path):
    first, second = versions(tmp_path / "own", 2)
    (other,) = versions(tmp_path / "other", 1, hidden_size=8)
    server = FakeVllm(other, "")
    with listening(server) as url:
        with pytest.raises(
            ServerError, match=rf"{other}, whose config.json differs in hidden_size: start it with .*nt$"
        ):
            load(url, second, [first, second])
        server.root = Path("Qwen/Qwen3-4B")
        with pytest.raises(ServerError, match=r"it was started with Qwen/Qwen3-4B: .*; start it with .*/own/current"):
            load(url, second, [first, second])
        server.root, server.version = first, str(other)
        with pytest.raises(ServerError, match=f"it serves {other}, expected a version in {first.parent}"):
            load(url, second, [first, second])
    assert not {"pause", "collective_rpc", "update_weight_version"} & set(server.calls)
    with pytest.raises(ServerError, match="Connection refused"):
        load(url, second, [first, second])
    with pytest.raises(ServerError, match="/v1/models: unknown url type: localhost"):
        load("localhost:1", second, [first, second])


PLAIN = r"^model\.layers\.0\.mlp\.experts\.gate_up_proj is not quantized: vLLM 0\.32 keeps another copy"
CACHE = r"^export\.format: (modelopt|vllm_fp8), of which vLLM 0\.32 does not renew the scales of keys and values$"


@pytest.mark.parametrize(
    ("kind", "linear", "sections", "expected"),
    [
        ("qwen3_moe", "w4a16_channel", {}, None),
        ("qwen3", None, {"quant": {"scheme": "fp8_kv"}}, None),
        ("qwen3", "w4a16_channel", {"export": {"format": "dequantized"}}, None),
        ("qwen3", "fp8_static", {"export": {"format": "modelopt"}}, None),
        ("qwen3", "fp8_static", {"export": {"format": "modelopt"}, "quant": {"scheme": "fp8_static_kv"}}, CACHE),
        ("qwen3", "fp8_static", {"export": {"format": "vllm_fp8"}, "quant": {"scheme": "fp8_static_kv"}}, CACHE),
        ("qwen3", "fp8_static", {"quant": {"scheme": "fp8_static_kv"}}, None),
        ("qwen3", "w4a16_channel", {"export": {"format": "mlx"}}, "^export.format: mlx, expected one of compressed, "),
        ("qwen3", None, {"adapter": {"kind": "lora", "merge": False}}, "^adapter.merge: false, and servers load no"),
        ("qwen3_moe", None, {"quant": {"scheme": "fp8_kv"}}, PLAIN),
        ("qwen3_moe", "w4a16_channel", {"export": {"format": "dequantized"}}, PLAIN),
        ("qwen3_moe", "w4a16_channel", {"quant": {"fake_quant_start": -1}}, PLAIN),
    ],
)
def test_exports_that_no_server_reloads_are_named(tmp_path, kind, linear, sections, expected):
    source = tiny_checkpoint(tmp_path, kind)
    model = load_model(source, experts="stacked") if linear is None else quantized(source, SCHEMES[linear])[0]
    session: Any = SimpleNamespace(recipe=minimal(**sections), model=model)
    reason = not_reloaded(session, cast("FakeQuant", SimpleNamespace(enabled=False)))
    assert reason is None if expected is None else re.search(expected, reason or ""), reason


def test_what_a_cut_publish_leaves_is_never_current_and_goes(tmp_path):
    folder, output = tmp_path / "published", tmp_path / "run"
    for step, name in enumerate(["step_00000000", "step_00000001", "step_00000002"]):
        assert _prepare(folder, output, step) == name
        (folder / name).mkdir()
        os.utime(folder / name, (step, step))
        _make_current(folder, name, 2)
        assert os.readlink(folder / "current") == name
    half, removed = folder / "step_00000003.tmp-01234567", folder / "step_00000001.old"
    for left in (half, removed):
        left.mkdir()
        (left / "model.safetensors").write_text("half")
    (half / WRITING).write_text(os.uname().nodename)
    (folder / ".current").symlink_to("step_00000003")  # killed before it took the place of the other
    assert os.readlink(folder / "current") == "step_00000002"
    # A resumed run publishes step 1 again, and then step 2.
    assert _prepare(folder, output, 1) == "step_00000001-2"
    assert not half.exists() and not removed.exists()
    (folder / "step_00000001-2").mkdir()
    _make_current(folder, "step_00000001-2", 2)
    assert sorted(os.listdir(folder)) == [".run", "current", "step_00000001-2", "step_00000002"]
    assert os.readlink(folder / "current") == "step_00000001-2"
    assert _prepare(folder, output, 2) == "step_00000002-2"


def test_other_files_and_other_runs_are_not_touched(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{checkpoint.parent} is not empty: name a directory of its own"):
        _prepare(checkpoint.parent, tmp_path / "run", 2)
    _prepare(tmp_path / "published", tmp_path / "run", 2)
    with pytest.raises(ValueError, match=f"published has versions of the run in {tmp_path / 'run'}: name another"):
        _prepare(tmp_path / "published", tmp_path / "other", 2)
