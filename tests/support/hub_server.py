"""A hub on this machine: as much of its HTTP API as huggingface_hub asks for when it fetches a repository."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from support.prepared import Kind, Prepared


class HubProgram(Prepared):
    """The program that asks the hub, forked from a process that has imported what the library needs.

    Not the library itself, which reads its settings when it is imported.
    """

    kind = Kind(
        "marserve.store.sources.hub_program",
        (
            *("marserve.optional", "httpx2", "httpcore2", "h11", "anyio.to_thread", "encodings.ascii", "tqdm.auto"),
            *("filelock", "fsspec", "packaging.version", "typing_extensions", "yaml"),
        ),
    )


@dataclass
class HubServer:
    """Its address, its repositories by commit, its branches, and what it was asked.

    `token`: what requests must carry, None for no matter. `stuck`: files are announced and not sent until it is set.
    """

    url: str = ""
    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    token: str | None = None
    gated: set[str] = field(default_factory=set)
    status: int | None = None
    stuck: threading.Event | None = None

    def commit(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a commit, the branch's newest; its 40 hex digits."""
        text = json.dumps([repository, len(self.commits), sorted(files)]).encode()
        name = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        self.commits[repository, name] = files
        self.branches[repository, branch] = name
        return name

    def files_at(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and files of a revision, None where there is none."""
        name = self.branches.get((repository, revision), revision)
        files = self.commits.get((repository, name))
        return None if files is None else (name, files)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A hub on a port of this machine that the system gave, while the block runs."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            hub.tokens.append(self.headers.get("authorization"))
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
                self._tell(found[1], found[2] or "revision", found[3] or "main")
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._send_file(found[1], found[2], found[3])
            else:
                self._refuse(404, "")

        do_GET = do_HEAD = _answer

        def _find(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
            if hub.status is not None:
                self._refuse(hub.status, "")
                return None
            if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
                self._refuse(401, "RepoNotFound")
                return None
            if not [name for name, _ in hub.commits if name == repository]:
                self._refuse(404, "RepoNotFound")
                return None
            if repository in hub.gated:
                self._refuse(403, "GatedRepo")
                return None
            found = hub.files_at(repository, revision)
            if found is None:
                self._refuse(404, "RevisionNotFound")
            return found

        def _tell(self, repository: str, what: str, revision: str) -> None:
            if (found := self._find(repository, revision)) is None:
                return
            commit, files = found
            if what == "revision":
                told: Any = {
                    "id": repository,
                    "modelId": repository,
                    "sha": commit,
                    "siblings": [{"rfilename": name} for name in files],
                }
            else:
                told = [
                    {"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in files.items()
                ]
            self._send(200, json.dumps(told).encode(), {"content-type": "application/json", "x-repo-commit": commit})

        def _send_file(self, repository: str, revision: str, name: str) -> None:
            if (found := self._find(repository, revision)) is None:
                return
            commit, files = found
            if name not in files:
                self._refuse(404, "EntryNotFound")
                return
            data = files[name]
            headers = {"etag": f'"{_oid(data)}"', "x-repo-commit": commit, "accept-ranges": "bytes"}
            self._send(200, data, headers, hub.stuck)

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b"{}", {"x-error-code": code, "x-error-message": code or "no"})

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], stuck: threading.Event | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body)), "connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.close_connection = True
            if self.command == "GET":
                if stuck is not None:
                    self.wfile.write(body[:1])
                    self.wfile.flush()
                    stuck.wait(60)
                    body = body[1:]
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = False

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that hang up are what some tests are about."""

    server = Quiet(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        if hub.stuck is not None:
            hub.stuck.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
