"""Imports grpcio without its fork handlers. Import this before anything else that imports grpcio.

grpcio stops its threads before each fork of the process and starts them again after it. If one cannot be started, it
ends the process (SIGABRT). So a handler that uses up all processes of its container would end the server, which forks.
What the server forks calls nothing of grpcio's, so the handlers are not needed. grpcio reads the variable when it is
imported; then the user's own value is restored, as workers inherit it.
"""

from __future__ import annotations

import os

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

_own = os.environ.get(VARIABLE)
os.environ[VARIABLE] = "0"
try:
    import grpc as grpc
finally:
    if _own is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = _own
