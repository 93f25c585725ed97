"""A server with the part of vLLM's interface that is used, whose model is two parameters."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from engine.publish import STARTED, UPDATING
from tests.lib.launcher import free_port

PROMPT = [5, 6, 7]


class FakeVllm:
    """A server whose model is two parameters; ``broken`` names what it does wrong."""

    def __init__(self, root: Path, broken: str) -> None:
        self.root, self.broken = root, broken
        self.weights, self.version, self.paused, self.loaded = dict[str, str](), STARTED, False, 0
        self.calls: list[str] = []
        self.asked: list[dict[str, Any]] = []

    def read(self, directory: Path) -> dict[str, str]:
        if (directory / "weights.json").exists():
            return json.loads((directory / "weights.json").read_text())
        return {"a": "-1.5", "b": blake2b((directory / "model.safetensors").read_bytes()).hexdigest()}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        path, _, query = path.partition("?")
        self.weights = self.weights or self.read(self.root)
        self.calls.append(path.removeprefix("/"))
        match path:
            case "/v1/models":
                return {} if self.broken == "not vLLM" else {"data": [{"id": "export", "root": str(self.root)}]}
            case "/v1/completions":
                assert not self.paused, "a paused server does not answer"
                if self.broken == "no answer" and self.loaded:
                    return None
                value = float(self.weights["a"]) + (self.loaded if self.broken == "hidden" else 0)
                if self.broken == "busy":
                    value += len(self.calls) % 3 * 1e-3
                value = float("nan") if self.broken == "NaN" and self.loaded else value
                known = [None, *({str(token): {"logprob": value}} for token in body["prompt"][1:])]
                return {"choices": [{"prompt_logprobs": known, "logprobs": {"token_logprobs": [value]}}]}
            case "/pause":
                self.paused = True
                return None if self.broken == "never idle" and "wait" in query else {"status": "paused"}
            case "/resume":
                assert self.version != UPDATING or self.loaded, "never with half a version"
                self.paused = False
                return {"status": "resumed"}
            case _ if self.broken == "no dev mode":
                return None
            case "/weight_info":
                return {"weight_version": self.version}
            case "/update_weight_version":
                self.version = body["new_version"]
                return {}
            case "/inference/v1/generate":
                self.asked.append(body)
                return {"choices": [self.written(body["token_ids"], body["sampling_params"])]}
        assert self.paused, f"{path} while it answers"
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.loaded += 1
            new = self.read(Path(body["kwargs"]["weights_path"]))
            self.weights |= {name: new[name] for name in ("a" if self.broken == "stale" else "ab")}
            return None if self.broken in ("fails", "cut off") else {"results": [None]}
        if body["action"] == "reset":
            self.weights = dict.fromkeys(self.weights, "0")
        before = body.get("baseline", {})
        return {
            "checksums": self.weights,
            "mismatches": [key for key, value in self.weights.items() if before.get(key) != value],
        }

    def written(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Answer as a function of the weights, the prompt and all parameters; about one of three has no end."""
        digest = blake2b(json.dumps([self.weights, prompt, sampling], sort_keys=True).encode()).digest()
        ended, size = digest[0] % 3 > 0, sampling["max_tokens"]
        tokens = [token % 90 + 5 for token in digest[1:]][: 1 + digest[1] % size if ended else size]
        version = "/other/step_00000009" if self.broken == "other version" else self.version
        spans = [{"version": version, "start": 0, "end": len(tokens)}]
        match self.broken:
            case "short context":
                ended, tokens = False, tokens[:-1] or [5]
            case "aborts":
                return {"token_ids": tokens, "finish_reason": "abort", "weight_versions": spans}
            case "wide":
                tokens = [*tokens[:-1], 10**6]
        return {"token_ids": tokens, "finish_reason": "stop" if ended else "length", "weight_versions": spans}


@contextmanager
def listening(server: FakeVllm) -> Iterator[str]:
    """Address of the server while it runs; an answer of None is an error."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            found = server.answer(self.path, body)
            self.send_response(200 if found is not None else 404 if server.broken == "no dev mode" else 500)
            if cut := found is None and server.broken == "cut off":
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            error = b"9\r\nsome" if cut else b"some\nreason"
            self.wfile.write(json.dumps(found).encode() if found is not None else error)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    port = free_port()
    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        thread = Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:  # else a failed test would wait for the thread without end
            http.shutdown()
            thread.join()


def versions(folder: Path, count: int, **config: Any) -> list[Path]:
    made = []
    for step in range(count):
        made.append(folder / f"step_{step:08d}")
        made[-1].mkdir(parents=True)
        (made[-1] / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
        (made[-1] / "weights.json").write_text(json.dumps({"a": f"-{step}.5", "b": f"b{step}"}))
    return made
