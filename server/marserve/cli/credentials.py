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

from marserve.api.tls import read_keystore
from marserve.cli.typed_settings import load_as_typed
from marserve.errors import BadSettings
from marserve.settings.table import Settings

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


def local_trust(settings: Settings | None = None) -> ssl.SSLContext:
    """Whom a command trusts at an https address of this machine: the very certificate that the settings (None: this
    folder's) name, whatever host it is for; where they name none for their https addresses, any certificate, as at an
    http address, because the server makes one up at its start; without settings, who the system trusts.
    """
    if settings is None:
        with contextlib.suppress(BadSettings):
            settings = load_as_typed({})
    trust = ssl.create_default_context()
    if settings is None:
        return trust
    with contextlib.suppress(OSError, BadSettings):  # what is wrong with it the server says at its start
        if settings.keystore is not None:
            named = read_keystore(settings.keystore, settings.keystore_pass, settings.keystore_type).chain_pem
        elif settings.certificate_file is not None:
            named = settings.certificate_file.read_bytes()
        else:
            if settings.inference_address.is_tls or settings.management_address.is_tls:
                trust.check_hostname = False
                trust.verify_mode = ssl.CERT_NONE
            return trust
        only = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        only.load_verify_locations(cadata=named.decode("ascii", "ignore"))
        only.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        only.check_hostname = False
        return only
    return trust


def _configured_file() -> Path:
    try:
        return load_as_typed({}).token_file
    except BadSettings:  # an address was given, so nothing else of them counts
        return Path(KEY_FILE)
