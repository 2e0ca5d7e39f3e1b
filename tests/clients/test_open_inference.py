"""Clients of the Open Inference Protocol, unmodified: tritonclient's four, kserve's and MLServer's codecs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from clients.environments import Client
from support.command_line import marserve
from support.pages import block
from support.server import Server, make_archive
from support.triton_models import write_onnx

pytestmark = pytest.mark.clients

MODELS = """
import numpy
import torch
from marserve_handlers import Tensor, model

PAIR = {"pair": Tensor("float32", ["batch", 2])}


@model(inputs=PAIR, outputs={"sum": Tensor("float32", ["batch"]), "largest": Tensor("float32", ["batch"])})
def sums(pair):
    return {"sum": pair.sum(axis=1), "largest": pair.max(axis=1)}


@model(inputs=PAIR, outputs={"scores": Tensor("float32", ["batch", 3])})
def scores(pair):
    return {"scores": numpy.stack([pair[:, 0], pair[:, 1], -pair[:, 0]], axis=1)}


@model(
    inputs={"left": Tensor("float64", ["batch", 1]), "right": Tensor("float64", ["batch", 1])},
    outputs={name: Tensor("float64", ["batch", 1]) for name in ("left", "right", "both")},
)
def columns(left, right):
    return {"left": left, "right": right, "both": left + right}


@model(
    inputs={name: Tensor("float64", ["batch"]) for name in ("left", "right")},
    outputs={"both": Tensor("float64", ["batch"])},
)
def lists(left, right):
    return left + right


@model
def turned(data: bytes) -> bytes:
    return data[::-1]


@model
def measured(text: str) -> dict:
    return {"length": len(text)}


@model(inputs={"half": Tensor("float16", ["batch", "n"])}, outputs={"half": Tensor("float16", ["batch", "n"])})
def halves(half):
    return {"half": half * 2}


@model(inputs={"brain": Tensor("bfloat16", ["batch", "n"])}, outputs={"brain": Tensor("bfloat16", ["batch", "n"])})
def brains(brain: torch.Tensor):
    return {"brain": brain * 2}
"""
FLOATS = {"x": ("FLOAT", ["batch", 2])}
INVALID, NOT_FOUND = ("400", "StatusCode.INVALID_ARGUMENT"), ("404", "StatusCode.NOT_FOUND")
FURTHER = ("shout", "identity", "counted")
NAMES = {name: name for name in ("sums", "scores", "halves", "brains", "columns", "lists", "turned", "measured")} | {
    "spare": "sums"
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of `marserve start` with the models that clients ask."""
    folder = tmp_path_factory.mktemp("open-inference")
    store = folder / "store"
    store.mkdir()
    (folder / "models.py").write_text(MODELS)
    for name, made_of in NAMES.items():
        made = marserve("archive", name, "--handler", f"{folder / 'models.py'}:{made_of}", "--export-path", store)
        assert made.status == 0, made.err
    (folder / "shout.py").write_text(block("docs/open-inference.md", "shout"))
    file = write_onnx(folder / "identity.onnx", [("Identity", ["x"], ["y"])], FLOATS, {"y": FLOATS["x"]})
    for name, *words in (("shout", "--handler", folder / "shout.py"), ("identity", "--serialized-file", file)):
        made = marserve("archive", name, *words, "--export-path", store)
        assert made.status == 0, made.err
    made = marserve(
        "archive", "counted", "--version", "1", "--handler", f"{folder / 'models.py'}:sums", "--export-path", store
    )
    assert made.status == 0, made.err
    settings = {"load_models": "none", "open_inference_control": "true", "system_shared_memory_folder": "/dev/shm"}
    with Server(folder, entry="marserve", store=store, settings=settings) as server:
        for name in (*NAMES, *FURTHER):
            server.register(f"{name}.mar").raise_for_status()
        yield server


SUMS = {"sum": [3.0, 7.0], "largest": [2.0, 4.0]}


@pytest.mark.parametrize("way", ["http", "http.aio", "grpc", "grpc.aio"])
def test_every_form_of_tritonclient_gets_what_it_asks_for(server: Server, way: str) -> None:
    """Documents, tensors of each type, classes, parameters, errors, control."""
    said = Client.of("tritonclient").run(way, server.inference.removeprefix("http://"), server.grpc_inference)

    is_grpc = way.startswith("grpc")
    shape = ["-1", "2"] if is_grpc else [-1, 2]
    assert (said["live"], said["ready"], said["models"], said["version"]) == (True, True, [True, True, False], True)
    assert said["server"]["name"] == "marserve"
    assert said["metadata"]["inputs"] == [{"name": "pair", "datatype": "FP32", "shape": shape}]
    config = said["config"]["config"] if is_grpc else said["config"]
    assert [each["name"] for each in config["output"]] == ["sum", "largest"]
    index = said["index"]["models"] if is_grpc else said["index"]
    assert {(each["name"], each["state"]) for each in index} == {(name, "READY") for name in (*NAMES, *FURTHER)}
    nameless = {"version": "1.0", "id": ""}
    assert said["infer"] == {"version": "1.0", "id": "my-7", **SUMS}
    assert said["described"] == {**nameless, "sum": [2.0, 2.0], "largest": [1.0, 1.0]}
    assert said["described_text"] == {**nameless, "output": ["MQ==", "MQ=="]}
    assert said["version_infer"] == said["wishes"] == {**nameless, **SUMS}
    assert said["wanted"] == {**nameless, "sum": SUMS["sum"]}
    assert said["half"] == {**nameless, "half": [1.0, -4.0]}
    assert said["brain"] == {**nameless, "brain": [1.0, -4.0]}
    assert said["texts"] == {**nameless, "output": ["AB", "Ä"]}
    assert said["bytes"] == {**nameless, "output": ["\0\\xff"]}
    told = {"name": "input", "datatype": "BYTES", "shape": ["-1", "1"] if is_grpc else [-1, 1]}
    of_rest = {} if is_grpc else {"parameters": {"content_type": "str"}}
    assert said["texts_metadata"]["inputs"] == [{**told, **of_rest}]
    assert said["classes"] == {**nameless, "scores": ["2.000000:1", "1.000000:0", "4.000000:1", "3.000000:0"]}
    refusals = {word: said[word] for word in ("wrong_shape", "wrong_name", "wrong_type", "unknown")}
    assert {word: each["status"] for word, each in refusals.items()} == {
        **dict.fromkeys(("wrong_shape", "wrong_name", "wrong_type"), INVALID[is_grpc]),
        "unknown": NOT_FOUND[is_grpc],
    }
    assert "pair: expected float32 [batch, 2], got [2, 1]" in refusals["wrong_shape"]["message"]
    assert "Model not found: other" in refusals["unknown"]["message"]
    assert said["control"] == [None, False, None, True]
    assert int(said["statistics"]["model_stats"][0]["inference_count"]) >= 4
    assert said.get("async", SUMS["sum"]) == SUMS["sum"]
    if way != "grpc.aio":
        assert said["gzip"] == {**nameless, **SUMS}
    if not is_grpc:
        assert said["json"] == {**nameless, "sum": SUMS["sum"]}
        assert said["texts_json"] == {**nameless, "output": ["AB", "Ä"]}
        assert said["deflate"] == {**nameless, **SUMS}


@pytest.mark.parametrize("way", ["http", "http.aio", "grpc", "grpc.aio"])
def test_tritonclient_calls_a_row_handler_by_its_metadata_alone(rows: Server, way: str) -> None:
    """Under the protocol's envelope: raw tensors over REST, which tritonclient sends, are unwrapped too."""
    said = Client.of("tritonclient").run(
        way, rows.inference.removeprefix("http://"), rows.grpc_inference, "described_row"
    )

    # Over gRPC the handler gets the bytes as base64.
    assert said["described_row"]["input-0"] == ["TVE9PQ==" if way.startswith("grpc") else "MQ=="]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the protocol's envelope around a handler that takes rows."""
    folder = tmp_path_factory.mktemp("rows")
    make_archive(folder / "rows.mar", "def handle(data, context): return list(data or [])")
    settings = {"load_models": "none", "service_envelope": "kservev2"}
    with Server(folder, entry="marserve", store=folder, settings=settings) as server:
        server.register("rows.mar").raise_for_status()
        yield server


def test_kserves_clients_get_what_they_ask_for(server: Server) -> None:
    """Over REST in both protocols, and over gRPC; each is asynchronous."""
    said = Client.of("kserve").run(server.inference, server.grpc_inference)

    assert said["ready"] == {"v1": True, "v2": True, "grpc": True, "server": [True, True, True, True]}
    assert said["v1"] == {"predictions": [{"sum": 3.0, "largest": 2.0}, {"sum": 7.0, "largest": 4.0}]}
    assert said["v2"] == said["v2_json"] == said["grpc"] == {"sum": [3.0, 7.0], "largest": [2.0, 4.0]}
    assert said["texts"] == [["AB", "Ä"]] * 3
    assert "pair" in said["v2_wrong"]
    assert "pair" in said["grpc_wrong"]


def test_what_mlservers_codecs_encode_is_taken_and_what_they_decode_is_given(server: Server) -> None:
    """Numbers, frames, texts, bytes, dates, JSON: to models of tensors, of one text or of bytes, and to ONNX."""
    said = Client.of("mlserver").run(server.inference)

    assert said["numpy"] == {name: ["np", values] for name, values in SUMS.items()}
    assert said["onnx"] == ["np", [[False, True]]]
    assert said["lists"] == [3.0, 4.0]
    rows = [{"left": 1.0, "right": 3.0, "both": 4.0}, {"left": 2.0, "right": -1.0, "both": -1.0}]
    assert said["frame"] == ["pd", rows]
    assert said["string"] == ["str", ["HELLO", "Ä"], "str", ["ONE"]]
    assert said["text_frame"] == ["pd_json", [{"length": 1}, {"length": 3}]]
    assert said["base64"] == ["base64", ["00ff", b"ba".hex()]]
    assert said["datetime"] == ["datetime", "2026-11-27T12:00:00"]
    assert said["json"] == ["json", [{"length": len('{"a":[1]}')}]]
    for name, words in {
        "wrong": "pair: expected float32 [batch, 2], got [2, 1]",
        "wrong_text": "pair: expected float32 [batch, 2], got BYTES",
        "wrong_array": "pair: expected BYTES [batch], got FP32",
    }.items():
        assert (said[name][0], json.loads(said[name][1])["error"]) == (400, words)
    assert said["wrong_base64"][0] == 400
    assert "data[0]: is no base64" in said["wrong_base64"][1]


def test_the_pages_words_with_mlservers_codec_are_answered_as_it_says(server: Server) -> None:
    """The example of the page, run in the client's environment."""
    code = block("docs/open-inference.md", "codecs").replace("http://127.0.0.1:8080", server.inference)

    ran = subprocess.run([Client.of("mlserver").program, "-c", code], capture_output=True, text=True, check=False)

    assert ran.stdout == block("docs/open-inference.md", "decoded"), ran.stderr


def test_tritons_perf_analyzer_measures_models_of_tensors_and_of_texts(server: Server) -> None:
    """By both protocols, with threads and without, in a stream, by shared memory; what the server counts is shown."""
    said = Client.of("perf-analyzer").run(server.inference.removeprefix("http://"), server.grpc_inference)

    unknown = {name: said.pop(name) for name in ("http_unknown", "grpc_unknown")}
    assert [(name, run) for name, run in said.items() if run[:2] != [0, 50]] == []
    # It reads versions as whole numbers, so that of "1.0" it finds no counts.
    assert [said[f"{way}_counted"][2] for way in ("http", "grpc")] == [50, 50]
    for status, *_, words in unknown.values():
        assert status != 0
        assert "Model not found: other" in words
