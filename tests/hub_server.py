"""A stand-in for a hub on 127.0.0.1: the few endpoints that huggingface_hub asks for.

`cut` drops the connection in the middle of a file once, so that the next request must ask for the
rest.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMITS = {"main": "a" * 40, "old": "b" * 40}


class Hub:
    """Repositories: name -> revision -> file -> bytes."""

    def __init__(self, repositories: dict[str, dict[str, dict[str, bytes]]]):
        self.repositories = repositories
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.cut: dict[str, int] = {}  # file -> bytes after which its next download breaks off
        self.lie: set[str] = set()  # files whose announced SHA-256 is wrong
        self.gated: set[str] = set()
        self.endpoint = ""

    def downloads(self) -> list[tuple[str, str | None]]:
        """The files whose bytes were asked for, with the range."""
        return [
            (path.split("/resolve/")[1].split("/", 1)[1], part)
            for method, path, part in self.requests
            if method == "GET" and "/resolve/" in path
        ]


def _commit_of(files: dict[str, dict[str, bytes]], revision: str) -> str | None:
    for name in files:
        if revision in (name, COMMITS[name]):
            return name
    return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("api/models/"):
            org, name, *rest = path.removeprefix("api/models/").split("/")
            revision = rest[1] if rest[:1] == ["revision"] else "main"
            return self._info(f"{org}/{name}", revision, rest)
        org, name, verb, revision, *rest = [*path.split("/"), "", "", "", ""]
        if verb == "resolve":
            return self._file(f"{org}/{name}", revision, "/".join(rest).strip("/"), body)
        return self._error(404, "EntryNotFound")

    def _revision(self, repository: str, revision: str) -> str | None:
        if repository in self.hub.gated:
            self._error(403, "GatedRepo")
        elif repository not in self.hub.repositories:
            self._error(404, "RepoNotFound")
        elif (found := _commit_of(self.hub.repositories[repository], revision)) is None:
            self._error(404, "RevisionNotFound")
        else:
            return found
        return None

    def _info(self, repository: str, revision: str, rest: list[str]) -> None:
        if (name := self._revision(repository, revision)) is None:
            return
        files = self.hub.repositories[repository][name]
        if rest[:1] == ["tree"]:
            return self._json(
                [{"type": "file", "path": f, "size": len(b)} for f, b in files.items()]
            )
        siblings = [{"rfilename": f, "size": len(b)} | self._lfs(f, b) for f, b in files.items()]
        self._json({"id": repository, "sha": COMMITS[name], "siblings": siblings})

    def _lfs(self, name: str, data: bytes) -> dict[str, Any]:
        if not name.endswith(".safetensors"):
            return {}
        digest = hashlib.sha256(data + (b"!" if name in self.hub.lie else b"")).hexdigest()
        return {"lfs": {"sha256": digest, "size": len(data), "pointerSize": 100}}

    def _file(self, repository: str, revision: str, name: str, body: bool) -> None:
        if (found := self._revision(repository, revision)) is None:
            return
        data = self.hub.repositories[repository][found].get(name)
        if data is None:
            return self._error(404, "EntryNotFound", COMMITS[found])
        start = 0
        if part := self.headers.get("Range"):
            start = int(part.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if part else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMITS[found])
        self.send_header("Accept-Ranges", "bytes")
        if part:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not body:
            return
        stop = self.hub.cut.pop(name, None)
        self.wfile.write(data[start:stop])
        if stop is not None:
            self.close_connection = True

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _error(self, status: int, code: str, commit: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextlib.contextmanager
def serve(repositories: dict[str, dict[str, dict[str, bytes]]]) -> Iterator[Hub]:
    """Run a hub for the time of a block."""
    hub = Hub(repositories)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
