"""Stand-ins for object stores, each a process on a port of this machine that the system gave, gone with its block.

`s3_server` is moto: it speaks S3 and checks no signatures, and since Google's store is read in the same way it passes
for that as well. `azure_server` is azurite, where `make azurite` has installed it. Tests that want to see the requests,
or odd answers, put `support.file_server` in their place.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hmac
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.prepared import Kind, Prepared
from support.server import free_ports

START_LIMIT_S = 60.0
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = base64.b64encode(b"a key that only the stand-in has, as long as real ones are: 64 B.").decode()

# moto asks for no signature, but tells anonymous callers, who may read what is public, from others.
_KNOWN = {
    "authorization": "AWS4-HMAC-SHA256 Credential=known/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0",
    "x-amz-acl": "public-read",
}

_MOTO = """
import contextlib, http.client, logging, os, sys
logging.disable()
from moto.server import ThreadedMotoServer
with contextlib.redirect_stdout(sys.stderr):
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    # Its first answer takes seconds on a busy machine: what S3 needs is imported for it.
    first = http.client.HTTPConnection("127.0.0.1", port)
    first.request("GET", "/", headers=%r)
    first.getresponse().read()
print(port, flush=True)
sys.stdin.read()
os._exit(0)
"""


class StoreProgram(Prepared):
    """The program that asks a store, forked from a process that has imported the library."""

    kind = Kind(
        "marserve.store.sources.object_program", ("marserve.store.sources.object_errors", "obstore.store", "resource")
    )


@dataclass(frozen=True)
class Bucket:
    """A bucket of a stand-in, filled by its owner: `url` is the server's, `name` the bucket's."""

    url: str
    name: str

    def put(self, key: str, data: bytes) -> str:
        """Put an object in the place of what was there; its ETag."""
        answer = httpx.put(f"{self.url}/{self.name}/{key}", content=data, headers=_KNOWN)
        answer.raise_for_status()
        return answer.headers["etag"]

    def delete(self, key: str) -> None:
        """Take an object away."""
        httpx.delete(f"{self.url}/{self.name}/{key}", headers=_KNOWN).raise_for_status()


@dataclass
class S3Server:
    """The stand-in for S3 at `url`."""

    url: str
    _buckets: int = 0

    def bucket(self) -> Bucket:
        """A new bucket, empty."""
        self._buckets += 1
        bucket = Bucket(self.url, f"bucket{self._buckets}")
        httpx.put(f"{self.url}/{bucket.name}", headers=_KNOWN).raise_for_status()
        return bucket

    @property
    def environment(self) -> dict[str, str]:
        """What a server finds this one by, in the variables that everybody uses for it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIASTANDIN",
            "AWS_SECRET_ACCESS_KEY": "of-the-stand-in",
            "AWS_REGION": "us-east-1",
        }


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """moto in a process of its own, while the block runs. It ends with its standard input, however the tests end."""
    program = [sys.executable, "-W", "ignore", "-c", _MOTO % _KNOWN]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            assert port, f"moto ended with {process.wait(10)}"
            yield S3Server(f"http://127.0.0.1:{int(port)}")
        finally:
            process.kill()


@dataclass(frozen=True)
class AzureServer:
    """The stand-in for Azure at `url`, which ends with the account's name as its addresses do."""

    url: str

    def container(self, name: str) -> Any:
        """A new container: the library's own store of it, to fill it with."""
        import obstore.store

        date = email.utils.formatdate(usegmt=True)
        headers = {"x-ms-date": date, "x-ms-version": "2023-11-03"}
        # The library makes no containers, so this request is signed by hand (the Shared Key scheme).
        words = [
            "PUT",
            *[""] * 11,
            f"x-ms-date:{date}\nx-ms-version:{headers['x-ms-version']}",
            f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container",
        ]
        digest = hmac.digest(base64.b64decode(AZURE_KEY), "\n".join(words).encode(), "sha256")
        headers["authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
        httpx.put(f"{self.url}/{name}?restype=container", headers=headers).raise_for_status()
        return obstore.store.AzureStore(
            container_name=name,
            account_name=AZURE_ACCOUNT,
            account_key=AZURE_KEY,
            endpoint=self.url,
            client_options={"allow_http": True},
        )


@contextlib.contextmanager
def azure_server(folder: Path) -> Iterator[AzureServer]:
    """azurite in a process of its own, while the block runs; skips the test where it is not installed."""
    program = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists() or shutil.which("node") is None:
        pytest.skip("azurite is not installed: `make azurite` does so where there is npm")
    [port] = free_ports(1)
    command = [
        str(program),
        "--blobHost=127.0.0.1",
        f"--blobPort={port}",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--silent",
        "--disableTelemetry",
    ]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"}
    with (
        (folder / "azurite.log").open("wb") as output,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            limit = time.monotonic() + START_LIMIT_S
            while True:
                assert process.poll() is None, (folder / "azurite.log").read_text()
                assert time.monotonic() < limit, "azurite does not listen"
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(url)
                    break
                time.sleep(0.05)
            yield AzureServer(f"{url}/{AZURE_ACCOUNT}")
        finally:
            process.kill()
