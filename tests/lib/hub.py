"""A stand-in for the Hugging Face Hub on 127.0.0.1: the routes that snapshot_download uses, over folders of files."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.lib.root import ROOT

ROUTE = re.compile(
    r"/(?:api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<rev>[^/?]+)"
    r"|(?P<data>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<commit>[^/]+)/(?P<file>[^?]+))(?:\?.*)?"
)


@dataclass
class Hub:
    """Repositories of a stand-in, and what was asked of it."""

    cache: Path
    url: str = ""
    repos: dict[str, dict[str, Path]] = field(default_factory=dict)
    """By ``models/user/name`` or ``datasets/user/name``: the folder of each revision and commit."""
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def add(self, repo: str, folder: Path, *revisions: str) -> str:
        """Publish the files of a folder as ``main`` and other revisions; return the commit."""
        digest = hashlib.sha1(repo.encode())
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
        commit = digest.hexdigest()
        kept = self.cache.parent / "hub" / commit
        if not kept.exists():
            shutil.copytree(folder, kept)
        self.repos.setdefault(repo, {}).update(dict.fromkeys(["main", commit, *revisions], kept))
        return commit

    def fetched(self) -> set[str]:
        """Return the names of the files that were downloaded so far."""
        return {line.rpartition("/")[2] for line in self.asked if line.startswith("GET ") and "/resolve/" in line}

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process that asks this stand-in, and keeps files in ``cache``."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.cache), "TMPDIR": str(self.cache.parent)}
        return {**own, "HF_HUB_DOWNLOAD_TIMEOUT": "5", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1", **more}

    def start(self, program: str, *argv: object, **environment: str) -> subprocess.Popen[str]:
        """Start a program with a light import, ``python -c PROGRAM ARGV``."""
        return subprocess.Popen(
            [sys.executable, "-c", program, *map(str, argv)],
            cwd=self.cache.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment(**environment)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def point_at(hub: Hub) -> None:
    """Make this process, which may have imported huggingface_hub before, ask the stand-in."""
    from huggingface_hub import constants

    os.environ.update(hub.environment())
    constants.ENDPOINT, constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = hub.url, str(hub.cache / "hub"), False
    constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"


@contextmanager
def serving(directory: Path) -> Any:
    """Serve a :class:`Hub` whose cache is in ``directory``."""
    hub = Hub(directory / "cache")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(code)
            headers.setdefault("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            found = ROUTE.fullmatch(unquote(self.path))
            if found is None:
                return self.answer(404, b"{}")
            kind = found["kind"] or ("datasets" if found["data"] else "models")
            repo, revision = f"{kind}/{found['repo'] or found['name']}", found["rev"] or found["commit"]
            if repo not in hub.repos:
                return self.answer(404, b'{"error": "Repository not found"}', X_Error_Code="RepoNotFound")
            if repo in hub.gated and found["what"] != "revision":
                return self.answer(403, b'{"error": "Access is restricted"}', X_Error_Code="GatedRepo")
            if revision not in hub.repos[repo]:
                return self.answer(404, b'{"error": "Invalid rev id"}', X_Error_Code="RevisionNotFound")
            folder = hub.repos[repo][revision]
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            names = [str(path.relative_to(folder)) for path in files]
            json_type = {"Content_Type": "application/json"}
            if found["what"] == "revision":
                info = {"id": found["repo"], "sha": folder.name, "siblings": [{"rfilename": name} for name in names]}
                return self.answer(200, json.dumps(info).encode(), **json_type)
            if found["what"] == "tree":
                sizes = zip(names, files, strict=True)
                tree = [
                    {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                    for name, path in sizes
                ]
                return self.answer(200, json.dumps(tree).encode(), **json_type)
            if found["file"] not in names:
                return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=folder.name)
            path = folder / found["file"]
            return self.answer(
                200,
                path.read_bytes(),
                ETag=f'"{_etag(path)}"',
                X_Repo_Commit=folder.name,
                Content_Type="application/octet-stream",
            )

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
