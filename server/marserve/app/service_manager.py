"""Reports the server's state to a service manager, by datagrams of sd_notify(3), for systemd's `Type=notify`.

It sends nothing unless the manager asks for it by `NOTIFY_SOCKET` in the environment.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

log = logging.getLogger("marserve.app")


class ServiceManager:
    """The service manager that started this process, if any."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")

    def is_serving(self, where: str) -> None:
        """Report that connections are accepted at this address; models may still be loading."""
        self._tell("READY=1", f"STATUS=Answers at {where}")

    def is_stopping(self, within_s: float) -> None:
        """Report that the end has begun and takes at most this long: the manager waits, whatever its own limit is."""
        self._tell("STOPPING=1", "STATUS=Answers what was accepted", f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        # An abstract socket's name begins with a zero byte, which systemd writes as @.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            log.warning("NOTIFY_SOCKET is %r, which takes no message (%s): serving goes on", self._address, error)
