"""A client of marserve: predictions, tensors, streams and management over HTTP. docs/client.md shows it.

`client`      `Client`, for programs without asyncio and for threads
`aio`         `AsyncClient`, the same for asyncio
`calls`       a call as data, and its course: tries, pauses, deadline, hooks; pure
`inference`   the calls of the inference API
`management`  the calls of the management API
`tensors`     bodies and answers of the Open Inference Protocol; numpy is optional
`streams`     answers in pieces: chunks, Server-Sent Events
`errors`      one class for each kind of failure
`retries`     whether a call is tried again, and when
`setup`       addresses, keys, connections

It imports httpx, and numpy where that is installed; nothing of the server, and never torch.
"""

from marserve_client.aio import AsyncClient
from marserve_client.calls import DEFAULT, Sending, Sent
from marserve_client.client import Client
from marserve_client.errors import (
    BadAnswer,
    BadInput,
    CallFailed,
    Conflict,
    ConnectionLost,
    DeadlinePassed,
    Forbidden,
    NoConnection,
    NotFound,
    Overloaded,
    Refused,
    RemoteException,
    ServerFailed,
    TooLarge,
    WrongKey,
)
from marserve_client.inference import Answer, Readiness
from marserve_client.management import Document
from marserve_client.retries import NO_RETRIES, Retries
from marserve_client.setup import key_file
from marserve_client.streams import AsyncStream, Event, Stream
from marserve_client.tensors import Tensors

__version__ = "0.1.0"

__all__ = [
    "DEFAULT",
    "NO_RETRIES",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BadAnswer",
    "BadInput",
    "CallFailed",
    "Client",
    "Conflict",
    "ConnectionLost",
    "DeadlinePassed",
    "Document",
    "Event",
    "Forbidden",
    "NoConnection",
    "NotFound",
    "Overloaded",
    "Readiness",
    "Refused",
    "RemoteException",
    "Retries",
    "Sending",
    "Sent",
    "ServerFailed",
    "Stream",
    "Tensors",
    "TooLarge",
    "WrongKey",
    "key_file",
]
