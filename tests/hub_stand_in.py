"""A small stand-in for the hub's HTTP interface: what huggingface_hub asks for, and no more.

Folders are served as repositories, each with one commit. Every answer is recorded, with its number of bytes, so that
a test can tell a header from a whole file.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """repositories: {"org/name": {revision: folder}}; gated: ids whose files need a login."""

    repositories: dict[str, dict[str, Path]]
    gated: frozenset[str] = frozenset()
    endpoint: str = ""
    answers: list[tuple[str, str, int]] = field(default_factory=list)

    def sent(self, file: str) -> int:
        """Bytes of a file's content that were sent."""
        return sum(size for method, path, size in self.answers if method == "GET" and path.endswith(f"/{file}"))

    def commit(self, repository: str, revision: str) -> str | None:
        """The commit of a branch, or the revision itself if it is a commit."""
        revisions = self.repositories[repository]
        if revision in revisions:
            return commit_of(repository, revision)
        return revision if revision in {commit_of(repository, name) for name in revisions} else None

    def folder(self, repository: str, commit: str) -> Path:
        revisions = self.repositories[repository]
        return next(folder for name, folder in revisions.items() if commit_of(repository, name) == commit)


def commit_of(repository: str, revision: str) -> str:
    return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(
            r"/api/(models|datasets)/(?P<id>[^/]+/[^/]+)(/(revision|tree|paths-info)/(?P<rev>[^/]+)(/(?P<under>.+))?)?",
            path,
        )
        file = re.fullmatch(r"/(datasets/)?(?P<id>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)", path)
        match = api or file
        if match is None or match["id"] not in self.hub.repositories:
            return self._error(401, "RepoNotFound", "Invalid username or password.")
        if file and match["id"] in self.hub.gated:
            return self._error(401, "GatedRepo", "Access to this model is restricted.")
        commit = self.hub.commit(match["id"], match["rev"] or "main")
        if commit is None:
            return self._error(404, "RevisionNotFound", "Invalid rev id")
        folder = self.hub.folder(match["id"], commit)
        if file:
            return self._file(folder / file["file"], commit)
        if "/tree/" in path or "/paths-info/" in path:
            return self._listing(folder, match["under"])
        siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in _files(folder)]
        return self._json({"id": match["id"], "sha": commit, "siblings": siblings, "private": False, "tags": []})

    def _listing(self, folder: Path, under: str | None) -> None:
        """The files below a subfolder (GET tree), or those named in the request (POST paths-info)."""
        if under and not (folder / under).is_dir():
            return self._error(404, "EntryNotFound", "Entry not found")
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        names = set(json.loads(asked)["paths"]) if self.command == "POST" else None
        return self._json(
            [
                {"type": "file", "oid": _etag(file), "size": file.stat().st_size, "path": name}
                for name, file in _files(folder)
                if (names is None or name in names) and name.startswith(f"{under}/" if under else "")
            ]
        )

    def _file(self, file: Path, commit: str) -> None:
        if not file.is_file():
            return self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        data = file.read_bytes()
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._send(200, data, headers)
        begin, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        return self._send(206, data[begin : end + 1], headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message} | (headers or {}))

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        sent = b"" if self.command == "HEAD" else body
        self.hub.answers.append((self.command, urlsplit(self.path).path, len(sent)))
        self.wfile.write(sent)


def _files(folder: Path) -> list[tuple[str, Path]]:
    return [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
