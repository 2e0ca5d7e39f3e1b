"""A real server and files that clients share with it: tensors both ways, and what cannot be used."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shlex
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from marserve.api.grpc.schema import Schema
from support.pages import block
from support.processes import until_blocking
from support.server import Server, make_archive

PAIR = {"name": "pair", "datatype": "FP32", "shape": [2, 2]}
ECHO = """
def handle(data, context):
    return [row["body"] for row in data] if data else None
"""
HELD = """
import pathlib, time
from marserve_handlers import Tensor, model

@model(inputs={"x": Tensor("float32", ["batch", 1])}, outputs={"y": Tensor("float32", ["batch", 1])})
class Held:
    def predict(self, x, context):
        \"\"\"Waits for a file beside the shared ones, once it has made another.\"\"\"
        names = dict(context.batch_items[0].headers)
        folder = pathlib.Path(names[b"x-folder"].decode())
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        return {"y": x + 1}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the whole file, with a folder for shared files."""
    folder = tmp_path_factory.mktemp("shared-memory")
    store = folder / "store"
    store.mkdir()
    make_archive(store / "sums.mar", block("docs/declared-handlers.md", "sums"))
    make_archive(store / "held.mar", HELD)
    make_archive(store / "echo.mar", ECHO)
    (folder / "shared").mkdir()
    settings = {"load_models": "none", "system_shared_memory_folder": str(folder / "shared")}
    with Server(folder, entry="marserve", store=store, settings=settings) as server:
        for name in ("sums", "held", "echo"):
            server.register(f"{name}.mar").raise_for_status()
        yield server


@pytest.fixture
def shared(server: Server) -> Iterator[Path]:
    """The folder of the shared files, empty; no region is registered afterwards."""
    folder = server.folder / "shared"
    yield folder
    server.client.post(f"{server.management}/v2/systemsharedmemory/unregister").raise_for_status()
    for file in folder.iterdir():
        file.unlink()


def in_memory(name: str, byte_size: int, **members: Any) -> dict[str, Any]:
    """A tensor in a region that has its name."""
    return {"name": name, **members, "parameters": {"shared_memory_region": name, "shared_memory_byte_size": byte_size}}


def register(server: Server, name: str, byte_size: int) -> None:
    """Register a region over the file of the same name."""
    at = f"{server.management}/v2/systemsharedmemory/region/{name}/register"
    server.client.post(at, json={"key": f"/{name}", "byte_size": byte_size}).raise_for_status()


def descriptors(server: Server) -> list[int]:
    """How many descriptors the server and two workers have open."""
    assert server.process is not None
    pids = [server.process.pid, *server.worker_pids("sums"), *server.worker_pids("held")]
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]


def test_the_pages_commands_share_memory(server: Server, shared: Path) -> None:
    """The answer says what was written; the file has the sums where the last pair was."""
    page = block("docs/open-inference.md", "memory").replace("/dev/shm", str(shared))
    page = page.replace("http://127.0.0.1:8081", server.management).replace("http://127.0.0.1:8080", server.inference)
    write, register, infer, unregister = page.splitlines()
    subprocess.run(write, shell=True, check=True)  # the page's own command
    answers = [
        server.client.post(words[-1], content=words[words.index("-d") + 1] if "-d" in words else b"")
        for words in map(shlex.split, (register, infer, unregister))
    ]

    assert [answer.status_code for answer in answers] == [200, 200, 200], [answer.text for answer in answers]
    assert answers[1].json() == json.loads(block("docs/open-inference.md", "memory-answer"))
    assert struct.unpack("<4f", (shared / "pairs").read_bytes()) == (1, 2, 3, 7)


def test_shared_memory_that_cannot_be_used_is_the_clients_fault(server: Server, shared: Path) -> None:
    """Shrunk, exchanged, too small, unknown, of a model without tensors: no worker ends, nothing stays open."""
    for name, size in (("pair", 1 << 20), ("sum", 1 << 10)):
        (shared / name).write_bytes(bytes(size))
        register(server, name, size)
    pair = in_memory("pair", 1 << 20, datatype="FP32", shape=[1 << 17, 2])
    small = in_memory("pair", 16, datatype="FP32", shape=[2, 2])
    pids = server.worker_pids("sums")

    def infer(tensor: dict[str, Any], output: dict[str, Any] | None = None, model: str = "sums") -> tuple[int, str]:
        document = {"inputs": [tensor], "outputs": [] if output is None else [output]}
        answer = server.client.post(f"{server.inference}/v2/models/{model}/infer", json=document)
        return answer.status_code, answer.json().get("error", "")

    assert infer(small, in_memory("sum", 8)) == (200, "")
    before = descriptors(server)
    refusals = [
        (infer(small, in_memory("sum", 4)), "sum: FP32 [2]: has 8 bytes, and a shared_memory_byte_size of 4"),
        (infer({**pair, "shape": [2, 2]}), "pair: FP32 [2, 2]: has a shared_memory_byte_size of 1048576, and its"),
        (infer(in_memory("pair", (1 << 20) + 1, datatype="FP32", shape=[1])), "Input 'pair': shared_memory_offset 0"),
        (infer({**small, "parameters": {"shared_memory_region": "no", "shared_memory_byte_size": 1}}), "Input 'pair'"),
        (infer(small, model="echo"), "The model 'echo' takes no tensors in shared memory"),
    ]
    os.truncate(shared / "pair", 8)
    os.truncate(shared / "sum", 0)
    refusals.append((infer(small), "pair: its region's file ends at 8; it was shrunk after it was registered"))
    os.truncate(shared / "pair", 16)
    refusals.append((infer(small, in_memory("sum", 8)), "sum: its region's file ends before 8; it was shrunk"))
    (shared / "sum").unlink()
    (shared / "sum").symlink_to(shared / "pair")
    refusals.append((infer(small, in_memory("sum", 8)), "sum: its region's file cannot be opened"))

    for (status, told), words in refusals:
        assert (status, told[: len(words)]) == (400, words)
    assert (server.worker_pids("sums"), descriptors(server)) == (pids, before)
    assert infer(small) == (200, "")


def test_a_region_that_is_unregistered_while_it_is_used_is_used_to_the_end(server: Server, shared: Path) -> None:
    """By the request that was accepted with it; the next one does not know it."""
    (shared / "x").write_bytes(struct.pack("<f", 1))
    (shared / "y").write_bytes(bytes(4))
    for name in "xy":
        register(server, name, 4)
    document = {"inputs": [in_memory("x", 4, datatype="FP32", shape=[1, 1])], "outputs": [in_memory("y", 4)]}
    at, headers = f"{server.inference}/v2/models/held/infer", {"x-folder": str(shared)}

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.post, at, json=document, headers=headers, timeout=30)
        until_blocking((shared / "begun").exists, "the handler has begun")
        server.client.post(f"{server.management}/v2/systemsharedmemory/unregister").raise_for_status()
        next_one = server.client.post(at, json=document, headers=headers)
        (shared / "go").touch()
        answer = asked.result()

    assert (answer.status_code, next_one.status_code) == (200, 400)
    assert "No region of system shared memory has the name 'x'" in next_one.json()["error"]
    assert struct.unpack("<f", (shared / "y").read_bytes()) == (2,)


def test_over_grpc_tensors_lie_in_shared_memory_too(server: Server, shared: Path) -> None:
    """Inputs and outputs, beside others that came raw."""
    (shared / "pair").write_bytes(struct.pack("<4f", 1, 2, 3, 4))
    register(server, "pair", 16)
    schema = Schema()
    parameter = schema.message("inference.InferParameter")

    def place(byte_size: int) -> dict[str, Any]:
        return {
            "shared_memory_region": parameter(string_param="pair"),
            "shared_memory_byte_size": parameter(int64_param=byte_size),
        }

    def ask(word: str, /, **fields: Any) -> Any:
        method = schema.methods("inference.GRPCInferenceService")[word]
        call = channel.unary_unary(
            f"/inference.GRPCInferenceService/{word}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=schema.message(method.output_type.full_name).FromString,
        )
        return call(schema.message(method.input_type.full_name)(**fields), timeout=30)

    with grpc.insecure_channel(server.grpc_inference) as channel:
        inputs = [{**PAIR, "parameters": place(16)}]
        back = ask("ModelInfer", model_name="sums", inputs=inputs)
        refused = []
        for model, size in (("sums", 17), ("echo", 16)):
            with pytest.raises(grpc.RpcError) as caught:
                ask("ModelInfer", model_name=model, inputs=[{**PAIR, "parameters": place(size)}])
            refused.append((caught.value.code(), caught.value.details()))
        there = ask("ModelInfer", model_name="sums", inputs=inputs, outputs=[{"name": "sum", "parameters": place(8)}])
        told = ask("SystemSharedMemoryStatus", name="pair").regions["pair"]
        document = ask("ServerMetadata")

    assert list(back.raw_output_contents) == [struct.pack("<2f", 3, 7)]
    assert list(there.raw_output_contents) == [b""]
    assert struct.unpack("<4f", (shared / "pair").read_bytes()) == (3, 7, 3, 4)
    assert (told.key, told.byte_size) == ("/pair", 16)
    assert "system_shared_memory" in document.extensions
    assert [code for code, _ in refused] == [grpc.StatusCode.INVALID_ARGUMENT] * 2
    assert "end at 17, and the region 'pair' has 16 bytes" in refused[0][1]
    assert "takes no tensors in shared memory" in refused[1][1]
