"""Start vLLM's server, and ask it."""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lib.patience import PATIENCE, until
from tools.verify.vllm_cpu import VLLM_SETTINGS


@contextmanager
def server(python: str, directory: Path, address: str, log: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """vLLM's OpenAI server of an export, on this machine alone, with the interface that reloads weights."""
    host, port = address.split(":")
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--served-model-name", "export", "--host", host, "--port", port, "--dtype", "bfloat16"]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "2", *more]
    environment = {**os.environ, **VLLM_SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            until(lambda: process.poll() is not None or healthy(f"http://{address}/health"), log.read_text)
            assert process.poll() is None, log.read_text()[-3000:]
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as response:
        return response.read().decode()


def posted(url: str, body: dict[str, Any], seconds: float = PATIENCE) -> dict[str, Any]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=seconds) as response:
        return json.load(response)
