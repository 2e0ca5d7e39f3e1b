"""Imports grpcio without its fork handlers. Import this before anything else that imports grpcio.

grpcio stops its threads before each fork of the process and starts them again behind it, and ends the process (SIGABRT)
when one cannot be started. The server forks, and uses no call of grpcio's in what it forks; a handler that takes all
processes which a container may have would take the server along. grpcio reads the variable when it is imported. It is
then put back as it was: workers inherit the user's own value.
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
