"""The key that a command sends, and the certificate that it trusts.

The key is that of `MARSERVE_TOKEN`, else, for a server on this machine, that of its key file. The file
`key_file.json` is read for every request, because keys are renewed while commands wait.
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
    """Adds `Authorization` to requests, if there is a key for an API of this kind.

    `key_file` is by default that of this folder's settings. A server on another machine (not `is_local`) only gets the
    key of the variable: a key of this folder's file is not for it.
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
    """What a command trusts at an https address of this machine.

    That is exactly the certificate that the settings (None: this folder's) name, whatever its host. If they have https
    addresses and name no certificate, it is any: the server makes one at its start. Else it is what the system trusts.
    """
    if settings is None:
        with contextlib.suppress(BadSettings):
            settings = load_as_typed({})
    trust = ssl.create_default_context()
    if settings is None:
        return trust
    with contextlib.suppress(OSError, BadSettings):  # the server reports a bad certificate at its start
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
    except BadSettings:  # an address was given, so a command works without them
        return Path(KEY_FILE)
