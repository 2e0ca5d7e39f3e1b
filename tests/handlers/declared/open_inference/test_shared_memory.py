"""Tests for tensors in shared memory, as a worker reads and writes them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marserve_handlers import BadInput
from marserve_handlers.declared.open_inference.answer import write_answer
from marserve_handlers.declared.open_inference.request import InferRequest, read_request
from marserve_handlers.declared.open_inference.shared_memory import (
    NONE,
    SharedTensors,
    Span,
    read_span,
    shared_tensors,
    write_span,
)

REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of 32 bytes: 0 to 31."""
    (tmp_path / "a").write_bytes(bytes(range(32)))
    return tmp_path / "a"


def span_of(file: Path, offset: int, size: int) -> Span:
    """Bytes of a file."""
    found = file.stat()
    return Span(str(file), found.st_dev, found.st_ino, offset, size)


def read(file: Path, size: int = 8, **members: Any) -> InferRequest:
    """A request whose input `x`, two float32, lies in the file from 4 on."""
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": REGION, **members}
    return read_request(
        json.dumps({"inputs": [tensor]}).encode(), None, SharedTensors({"x": span_of(file, 4, size)}, {})
    )


def write(span: Span, values: Any) -> tuple[bytes, int | None]:
    """The answer whose output `y` goes to the span."""
    document = {
        "inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}],
        "outputs": [{"name": "y", "parameters": REGION}],
    }
    request = read_request(json.dumps(document).encode(), None, SharedTensors({}, {"y": span}))
    return write_answer(request, request.asked(["y"]), {"y": ("FP32", np.asarray(values, np.float32))}, "m", None)


# ------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("size", "members", "words"),
    [
        (12, {}, "x: FP32 .* shared_memory_byte_size of 12, and its shape takes 8"),
        (8, {"shape": [1 << 40, 1 << 20]}, "and its shape takes 4611686018427387904"),
        (8, {"datatype": "BF16"}, "and its shape takes 4"),
        (8, {"data": [1, 2]}, "x: has shared_memory_region and data"),
        (8, {"parameters": {**REGION, "binary_data_size": 8}}, "x: has shared_memory_region and binary_data_size"),
        (8, {"datatype": "BYTES"}, "x: BYTES .*: its bytes end in the middle of element 0"),
        (8, {"datatype": "BOOL", "shape": [8]}, "a BOOL is the byte 0 or 1"),
    ],
)
def test_an_input_that_does_not_fit_its_memory_is_named(
    file: Path, size: int, members: dict[str, Any], words: str
) -> None:
    """Shape and type are held against the size before anything is read."""
    with pytest.raises(BadInput, match=words):
        read(file, size, **members)


def test_memory_that_the_server_did_not_place_is_refused() -> None:
    """Of an input and of an output, with what may be the reason."""
    tensor = {"name": "x", "shape": [1], "datatype": "FP32"}
    for document in (
        {"inputs": [{**tensor, "parameters": REGION}]},
        {"inputs": [{**tensor, "data": [1]}], "outputs": [{"name": "x", "parameters": REGION}]},
    ):
        with pytest.raises(BadInput, match=r"x: has shared_memory_region.*system_shared_memory_folder"):
            read_request(json.dumps(document).encode())


def test_a_file_that_was_shrunk_is_the_clients_fault(file: Path) -> None:
    """Nothing is read beyond its end, and it does not grow again by an answer."""
    read_from, write_to = span_of(file, 4, 8), span_of(file, 20, 8)
    os.truncate(file, 10)

    with pytest.raises(BadInput, match="x: its region's file ends at 10; it was shrunk"):
        read_span(read_from, "x")
    with pytest.raises(BadInput, match="y: its region's file ends before 28; it was shrunk"):
        write(write_to, [1, 2])
    assert file.stat().st_size == 10


@pytest.mark.parametrize("kind", ["gone", "file", "link", "pipe", "folder"])
def test_another_file_in_its_place_is_not_used(file: Path, kind: str) -> None:
    """Nor waited for, and no descriptor stays."""
    span = span_of(file, 0, 8)
    kept = file.rename(file.with_name("kept"))
    {
        "gone": lambda: None,
        "file": lambda: file.write_bytes(bytes(32)),
        "link": lambda: file.symlink_to(kept),
        "pipe": lambda: os.mkfifo(file),
        "folder": file.mkdir,
    }[kind]()
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(BadInput, match=r"x: .*region"):
        read_span(span, "x")
    with pytest.raises(BadInput, match=r"y: .*region"):
        write_span(span, "y", b"12345678")

    assert len(os.listdir("/proc/self/fd")) == before
    assert kept.read_bytes() == bytes(range(32))


def test_an_output_larger_than_its_memory_is_not_written(file: Path) -> None:
    """Its size and that of the memory are named."""
    with pytest.raises(BadInput, match=r"y: FP32 \[1, 3\]: has 12 bytes, and a shared_memory_byte_size of 8"):
        write(span_of(file, 0, 8), [[1, 2, 3]])

    assert file.read_bytes() == bytes(range(32))


def test_a_client_that_shrinks_its_file_all_the_time_harms_nobody(tmp_path: Path) -> None:
    """Each read and write ends with the values or with the client's fault; no signal comes."""
    file = tmp_path / "a"
    size = 1 << 20
    file.write_bytes(bytes(size))
    span = span_of(file, 0, size)
    is_over = threading.Event()

    def shrink() -> None:
        while not is_over.is_set():
            os.truncate(file, 0)
            os.truncate(file, size)

    shrinking = threading.Thread(target=shrink)
    shrinking.start()
    outcomes: list[object] = []
    try:
        for _ in range(300):
            try:
                outcomes.append(bool(read_span(span, "x").any()))
                write_span(span, "x", bytes(size))
            except BadInput as error:
                outcomes.append(error.field)
    finally:
        is_over.set()
        shrinking.join()

    assert set(outcomes) <= {False, "x"}


# ------------------------------------------------------------------------------------------- what fits


def test_an_input_is_a_copy_of_its_bytes(file: Path) -> None:
    """So that the client cannot change what was checked."""
    array = read(file).tensors["x"]
    file.write_bytes(bytes(32))

    assert array.shape == (1, 2)
    assert array.tobytes() == bytes(range(4, 12))


def test_an_output_is_written_and_described(file: Path) -> None:
    """The body has its size in place of its values; the bytes around it stay."""
    body, length = write(span_of(file, 4, 12), [[1, 2]])

    assert length is None
    assert json.loads(body)["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {**REGION, "binary_data_size": 0}},
    ]
    assert file.read_bytes() == bytes(range(4)) + np.array([1, 2], "<f4").tobytes() + bytes(range(12, 32))


def test_the_servers_header_says_where_tensors_lie(file: Path) -> None:
    """A request without one has none in memory."""
    span = span_of(file, 0, 8)
    value = json.dumps({"inputs": {"x": span}, "outputs": {}})

    assert shared_tensors([("explain", "False"), ("open_inference_shared_tensors", value)]) == ({"x": span}, {})
    assert shared_tensors([("explain", "False")]) is NONE
