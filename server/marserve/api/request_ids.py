"""Request ids: the client's own where the server takes it, else one that looks like a UUID.

Clients choose ids freely, so two requests may have the same. What must tell requests apart uses `next_key`, or ids that
`next` made. An id with the prefix of this server's own is never taken from a client.
"""

from __future__ import annotations

import re
from typing import Final
from uuid import uuid4

from marserve.errors import BadInput

CLIENT_ID: Final = "x-request-id"
MAX_CLIENT_ID: Final = 128
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}").fullmatch


def read_client_id(value: bytes) -> str:
    """The value of a client's `X-Request-Id`; empty unless it is 1 to 128 of `A-Z a-z 0-9 . _ : -`."""
    return value.decode("ascii") if _CLIENT_ID(value) else ""


def check_id(request_id: str) -> None:
    """Raise BadInput for what is too long to be the id of a request."""
    if len(request_id) > MAX_CLIENT_ID:
        raise BadInput(f"The id has {len(request_id)} characters; a request's id has at most {MAX_CLIENT_ID}.")


class RequestIds:
    """Makes the ids of a server's requests: random, with a counter as the last group.

    `takes_clients`: a request gets the id that its client gave. Otherwise the client's is only noted beside it.
    """

    __slots__ = ("_last", "_last_key", "_prefix", "takes_clients")

    def __init__(self, *, takes_clients: bool = False) -> None:
        self.takes_clients = takes_clients
        self._prefix = str(uuid4())[:24]
        self._last = 0
        self._last_key = 0

    def next(self) -> str:
        """An id that no other request has."""
        self._last += 1
        return f"{self._prefix}{self._last & 0xFFFF_FFFF_FFFF:012x}"

    def of(self, client_id: str) -> str:
        """The id of a request whose client gave `client_id`."""
        if self.takes_clients and client_id and not client_id.startswith(self._prefix):
            return client_id
        return self.next()

    def next_key(self) -> int:
        """What tells a request apart whose id is not this server's own; never 0."""
        self._last_key += 1
        return self._last_key
