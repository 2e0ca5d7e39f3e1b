"""The key that a command sends: the one in `MARSERVE_TOKEN`, else, to a server on this machine, that of its key file;
and whose certificate it believes.

Knows the shape of `key_file.json`. The file is read for every request, because keys are renewed while commands wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import httpx

from marserve.cli.typed_settings import load_as_typed
from marserve.errors import BadSettings

TOKEN_VARIABLE = "MARSERVE_TOKEN"
KEY_FILE = "key_file.json"


class Credentials(httpx.Auth):
    """Adds `Authorization` to requests where there is a key for an API of this kind.

    `key_file` None is that of this folder's settings. A server elsewhere (not `is_local`) gets a key from the variable
    only: a file of this folder says nothing about it, and must not be shown to it.
    """

    def __init__(
        self, kind: Literal["inference", "management"], *, is_local: bool, key_file: Path | None = None
    ) -> None:
        self._kind = kind
        self._is_local = is_local
        self._key_file = key_file

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Called by httpx for each request."""
        key = os.environ.get(TOKEN_VARIABLE) or (self._read_key() if self._is_local else None)
        if key:
            request.headers["Authorization"] = f"Bearer {key}"
        yield request

    def _read_key(self) -> str | None:
        if self._key_file is None:
            self._key_file = _configured_file()
        try:
            return str(json.loads(self._key_file.read_text("ascii"))[self._kind]["key"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def local_trust(certificate_file: Path | None = None) -> ssl.SSLContext:
    """Whom a command trusts at an https address of this machine: the very certificate that this folder's settings
    name, whatever host it is for; without one, who the system trusts.
    """
    if certificate_file is None:
        with contextlib.suppress(BadSettings):
            certificate_file = load_as_typed({}).certificate_file
    if certificate_file is not None:
        with contextlib.suppress(OSError):  # what is wrong with it the server says at its start
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(certificate_file)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.check_hostname = False
            return context
    return ssl.create_default_context()


def _configured_file() -> Path:
    try:
        return load_as_typed({}).token_file
    except BadSettings:  # an address was given, so nothing else of them counts
        return Path(KEY_FILE)
