"""A network of the test's own, with loopback alone: every port in it is free, and goes with the test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# SIOCSIFFLAGS, with IFF_UP.
_RAISE_LOOPBACK = """
import fcntl, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 1))
print("up", flush=True)
sys.stdin.read()
"""


def cannot_be_had() -> str | None:
    """Why there is none here, None if there is one."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "unshare and nsenter are not installed (Debian's util-linux)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network of its own can be made here ({tried.stderr.strip()})" if tried.returncode else None


@contextmanager
def own_network() -> Iterator[list[str]]:
    """The words before a command that run it in this network; the network is there while the block runs."""
    line = ["unshare", "--net", sys.executable, "-c", _RAISE_LOOPBACK]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
