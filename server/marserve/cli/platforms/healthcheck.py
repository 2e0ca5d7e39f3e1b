"""The program of an image's `HEALTHCHECK`: asks the container's own server whether it is ready (`/readyz`).

It finds the address as the server does: from the arguments of the container's first process, the environment and the
files. It ends with status 0 if the server is ready, else with 1, and prints why. It runs every few seconds, so it loads
no HTTP library.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import json
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from marserve.cli.platforms.container import command_of, platform_command, with_defaults
from marserve.errors import BadSettings
from marserve.settings import Address, Entry, load_settings

TIMEOUT_S = 4.0
FIRST_PROCESS = Path("/proc/1/cmdline")
PROGRAM = "marserve.cli.container"


def main() -> NoReturn:
    """Ask the server, print the answer, exit."""
    try:
        is_ready, sentence = ask(inference_address(container_arguments(FIRST_PROCESS), os.environ, Path.cwd()))
    except BadSettings as error:
        is_ready, sentence = False, error.message
    print(sentence)
    sys.exit(0 if is_ready else 1)


def container_arguments(command_line: Path) -> list[str]:
    """The command that the container runs; empty if its first process is another program."""
    try:
        words = command_line.read_bytes().decode("utf-8", "surrogateescape").rstrip("\0").split("\0")
    except OSError:
        return []
    return words[words.index(PROGRAM) + 1 :] if PROGRAM in words else []


def inference_address(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> Address:
    """The inference address of the server that these arguments start. Raises BadSettings.

    A shell's command line is not parsed: its server is expected where the settings of `folder` say.
    """
    command = platform_command(arguments, environment) or command_of(arguments, folder)
    program = Path(command[0]).name
    entry: Entry = "marserve" if program == "marserve" else "torchserve"
    flags = _flags(command[1:] if program in ("marserve", "torchserve") else [])
    return load_settings(entry, flags, with_defaults(arguments, environment), folder).inference_address


def _flags(words: Sequence[str]) -> dict[str, object]:
    """The flags that decide the address, and the model store's, which the settings need."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    reader.add_argument("--ts-config", "--config")
    reader.add_argument("--model-store")
    reader.add_argument("--inference-address")
    reader.add_argument("--set", action="append", default=[], dest="pairs")
    read, _ = reader.parse_known_args(words)
    flags = {key: value for key, value in vars(read).items() if key != "pairs" and value is not None}
    pairs = dict(word.split("=", 1) for word in read.pairs if "=" in word)
    return flags | {key: pairs[key] for key in ("inference_address",) if key in pairs}


def ask(address: Address) -> tuple[bool, str]:
    """Whether the server at this address is ready, and a sentence on it."""
    connection = _connection(address)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        return False, f"No server answers at {address} ({error or type(error).__name__})."
    finally:
        connection.close()
    if answer.status == 200:
        return True, "The server is ready."
    try:
        reasons = json.loads(body)["reasons"]
    except (ValueError, KeyError, TypeError):
        reasons = []
    return (
        False,
        f"The server at {address} is not ready ({answer.status}): {'; '.join(map(str, reasons)) or 'no reason'}",
    )


def _connection(address: Address) -> http.client.HTTPConnection:
    if address.scheme == "unix":
        return _SocketFile(address.path)
    host = _reachable(address.host)
    if not address.is_tls:
        return http.client.HTTPConnection(host, address.port, timeout=TIMEOUT_S)
    # The container asks itself and sends no secrets, so the certificate does not matter.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, address.port, timeout=TIMEOUT_S, context=context)


def _reachable(host: str) -> str:
    """The host at which to call a server that listens on `host`: loopback if it listens on all addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


class _SocketFile(http.client.HTTPConnection):
    """A connection to a socket file."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the file."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


if __name__ == "__main__":
    main()
