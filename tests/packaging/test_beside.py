"""Clients' packages in the server's environment, installed before it and after it: both go on working.

They bring versions of grpcio and protobuf of their own. Takes minutes and asks the package index: `make test-beside`,
with `PYTHON=python3.12` for another interpreter.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import pytest

from support.commands import type_in
from support.distributions import ROOT, installable
from support.installed import serving, wait_until_ready
from support.server import free_ports

pytest.importorskip("uv", reason="uv installs the environments: make test-beside")

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

PYTHON: Final = os.environ.get("MARSERVE_BESIDE_PYTHON", sys.executable)

HELLO = """\
def handle(rows, context):
    return [b"Hello, " + bytes(row.get("data") or row.get("body")) for row in rows or []]
"""

# Run with the address of the gRPC port.
PREDICTION = """\
import sys
import grpc
from marserve.api.grpc.schema import Schema

schema = Schema()
with grpc.insecure_channel(sys.argv[1]) as channel:
    def ask(service, method, kind="unary_unary"):
        described = schema.methods(service)[method]
        question, answer = (schema.message(each.full_name) for each in (described.input_type, described.output_type))
        call = getattr(channel, kind)(f"/{service}/{method}", question.SerializeToString, answer.FromString)
        return question, lambda message: call(message, timeout=30)

    question, call = ask("org.pytorch.serve.grpc.inference.InferenceAPIsService", "Predictions")
    print(call(question(model_name="hello", input={"data": b"gRPC"})).prediction.decode())
    question, call = ask("grpc.health.v1.Health", "Check")
    print("health", call(question()).status)
    for version in ("v1", "v1alpha"):
        service = f"grpc.reflection.{version}.ServerReflection"
        question, call = ask(service, "ServerReflectionInfo", "stream_stream")
        [answer] = call(iter([question(list_services="")]))
        print(version, len(answer.list_services_response.service))
"""

TRITONCLIENT = """\
import sys
import tritonclient.grpc

client = tritonclient.grpc.InferenceServerClient(sys.argv[1])
server = client.is_server_live(), client.is_server_ready()
print("live", server, "ready", client.is_model_ready("hello"))
"""

KSERVE = """\
import asyncio, sys
import kserve

async def main():
    async with kserve.InferenceGRPCClient(sys.argv[1]) as client:
        server = await client.is_server_live(), await client.is_server_ready()
        print("live", server, "ready", await client.is_model_ready("hello"))

asyncio.run(main())
"""

HEALTH = """\
import sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest
    names = ("", "org.pytorch.serve.grpc.inference.InferenceAPIsService")
    checked = [stub.Check(request(service=name), timeout=30).status for name in names]
    watched = next(stub.Watch(request(service="unheard"), timeout=30)).status
    print("live", checked, watched)
"""


class Client(NamedTuple):
    """A client's packages, a program that asks with them, and what it prints in the end."""

    packages: str
    program: str
    said: str


CLIENTS = {
    "tritonclient": Client("tritonclient[grpc]", TRITONCLIENT, "live (True, True) ready True"),
    "kserve": Client("kserve", KSERVE, "live (True, True) ready True"),
    "grpcio": Client("grpcio-health-checking grpcio-reflection grpcio-tools", HEALTH, "live [1, 1] 3"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel of this checkout; that of its client is found beside it."""
    with installable(tmp_path_factory.mktemp("wheel")) as built:
        yield built


@contextlib.contextmanager
def environment() -> Iterator[Path]:
    """An empty environment of the wanted Python; its folder of programs. It is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="marserve-beside-") as folder:
        uv("venv", "--python", PYTHON, f"{folder}/environment")
        yield Path(folder, "environment", "bin")


def uv(*words: str) -> None:
    """Run uv, which chooses in a second among versions that pip tries one after the other for many minutes."""
    ran = subprocess.run(
        [sys.executable, "-m", "uv", "--quiet", *words], capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def page_block(word: str) -> str:
    """The one indented block of the page on gRPC that has this word."""
    text = (ROOT / "docs/grpc.md").read_text("utf-8")
    (found,) = (each for each in re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE) if word in each)
    return re.sub(r"^    ", "", found, flags=re.MULTILINE).strip("\n")


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_clients_packages_and_the_server_share_an_environment(
    name: str, order: str, wheel: Path, tmp_path: Path
) -> None:
    """Predictions over REST and gRPC, health, reflection, and the client's own program."""
    client, server = CLIENTS[name], f"{wheel}[grpc]"
    for file, text in {"hello.py": HELLO, "ask.py": PREDICTION, "client.py": client.program}.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "model_store").mkdir()
    ports = free_ports(5)
    address = f"127.0.0.1:{ports[3]}"
    first, second = ([server], client.packages.split())[:: -1 if order == "before" else 1]

    with environment() as programs:
        uv("pip", "install", "--python", f"{programs}/python", *first)
        uv("pip", "install", "--python", f"{programs}/python", *second)
        uv("pip", "check", "--python", f"{programs}/python")
        packed = type_in("marserve archive hello --handler hello.py --export-path model_store", tmp_path, programs)
        assert packed.returncode == 0, packed.stderr
        start = "marserve start --foreground --models hello.mar --set ts_open_inference_protocol=true"
        with serving(programs, tmp_path, ports, start) as server_process:
            wait_until_ready(ports[0])
            rest = httpx.post(f"http://127.0.0.1:{ports[0]}/predictions/hello", content=b"REST", timeout=30)
            asked = type_in(f"python ask.py {address}", tmp_path, programs)
            said = type_in(f"python client.py {address}", tmp_path, programs)
            page = [type_page(tmp_path, programs, address)] if name == "grpcio" else []
            console = server_process.console.read_text()

    assert rest.text == "Hello, REST"
    assert asked.stdout.splitlines() == ["Hello, gRPC", "health 1", "v1 6", "v1alpha 6"], asked.stderr
    assert said.stdout.splitlines()[-1:] == [client.said], said.stderr
    assert all(each == ["Hello, page", "inference_pb2.py"] for each in page), page
    assert "stay closed" not in console


def type_page(folder: Path, programs: Path, address: str) -> list[str]:
    """What the page on gRPC has typed: the program without stubs, and the stubs that its lines make."""
    picture = folder / "examples/digits/pictures/7.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"page")
    program = page_block("ProtoReflectionDescriptorDatabase(")
    (folder / "page.py").write_text(program.replace("127.0.0.1:7070", address).replace('"digits"', '"hello"'))
    lines = page_block("grpc_tools.protoc").replace("pip install grpcio-tools\n", "")
    stubs = "PYTHONPATH=stubs python -c 'from org.pytorch.serve.grpc import inference_pb2 as m; print(m.__file__)'"
    ran = [type_in(each, folder, programs) for each in ("python page.py", f"{lines}\n{stubs}")]
    assert not [each.stderr for each in ran if each.returncode], ran
    answer, file = (each.stdout.splitlines()[-1] for each in ran)
    return [answer, Path(file).name]
