"""Clients of httpx that trust the usual authorities share what they read of them.

httpx reads 150 certificates for each client that is made, also for plain HTTP: some 30 ms of a processor, in tests that
make clients by the thousand.
"""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

from httpx._transports import default


def keep_default_trust() -> None:
    """Have the default context made once for each value of the variables that name authorities."""
    make = default.create_ssl_context

    @functools.cache
    def kept(file: str | None, folder: str | None, trust_env: bool) -> ssl.SSLContext:
        return make(verify=True, trust_env=trust_env)

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return make(verify=verify, cert=cert, trust_env=trust_env)
        return kept(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"), trust_env)

    default.create_ssl_context = create
