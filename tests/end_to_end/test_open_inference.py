"""A real server spoken to in the Open Inference Protocol: documents, tensors both ways, and what does not fit."""

from __future__ import annotations

import gzip
import json
import math
import shlex
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from marserve.api.grpc.schema import Schema
from support.pages import block
from support.server import Server, make_archive, poll

PAIR = {"name": "pair", "datatype": "FP32", "shape": [2, 2]}
ECHO = """
def handle(data, context):
    rows = [row['body'] for row in data or []]
    return [{**row, "outputs": row["inputs"]} if "model_name" in row else row for row in rows] if data else None
"""
ASKED_IF_READY = (("sums", ""), ("sums", "1.0"), ("sums", "9"), ("other", ""))
MODELS = ["breaks", "counts", "echo", "plain", "sums", "talk"]
PLAIN = "def handle(data, context): return [row['body'] for row in data or []]"
BREAKS = """
from collections.abc import Iterator

from marserve_handlers import Event, model


@model
def breaks(request: dict) -> Iterator[Event]:
    yield Event("first")
    if request.get("waits"):
        import time

        while True:
            time.sleep(0.05)
            yield Event("on")
    raise ValueError("in the middle")
"""
TALK = """
def handle(data, context):
    names = [f"ts_request_sequence_{word}" for word in ("id", "start", "end")]
    return [[context.get_request_header(at, name) for name in names] for at in range(len(data))] if data else None
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the whole file: a model that declares its tensors, and one that declares nothing."""
    folder = tmp_path_factory.mktemp("open-inference")
    store = folder / "store"
    store.mkdir()
    sums = block("docs/declared-handlers.md", "sums")
    make_archive(store / "sums.mar", sums, config="minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\n")
    make_archive(store / "echo.mar", ECHO)
    counts = block("docs/open-inference.md", "counts")
    make_archive(store / "counts.mar", counts, config="minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\n")
    make_archive(store / "plain.mar", PLAIN)
    make_archive(store / "breaks.mar", BREAKS)
    make_archive(store / "talk.mar", TALK, config="sequenceBatching: true\nsequenceMaxIdleMSec: 5000\n")
    with Server(folder, entry="marserve", store=store, settings={"load_models": "none"}) as server:
        server.register("sums.mar").raise_for_status()
        for name in ("breaks", "counts", "echo", "plain", "talk"):
            server.register(f"{name}.mar").raise_for_status()
        yield server


def test_what_does_not_fit_is_told_under_the_protocols_key(server: Server) -> None:
    """By the worker, by the listener and by the routes about models; the server serves on."""
    model = f"{server.inference}/v2/models/sums"

    wrong = server.client.post(f"{model}/infer", json={"inputs": [{**PAIR, "data": [1, 2, 3]}]})
    missing = server.client.post(f"{server.inference}/v2/models/other/infer", json={"inputs": [PAIR]})
    version = server.client.get(f"{model}/versions/3.0")
    cut = server.client.post(f"{model}/infer", content=b"{}", headers={"Inference-Header-Content-Length": "3"})

    assert (wrong.status_code, wrong.json()["error"]) == (400, "pair: has 3 values, and its shape [2, 2] has 4")
    assert (missing.status_code, missing.json()["error"]) == (404, missing.json()["message"])
    assert (version.status_code, version.json()["error"]) == (404, version.json()["message"])
    assert cut.status_code == 400
    assert cut.json()["error"].startswith("Inference-Header-Content-Length: expected a number of bytes from 0 to the")


def test_a_models_tensors_are_told_taken_and_given(server: Server) -> None:
    """In JSON and raw, whatever the content type says; a version may be named; the answer is as it was asked for."""
    model = f"{server.inference}/v2/models/sums"
    values = struct.pack("<4f", 1, 2, 3, 4)
    head = json.dumps(
        {
            "id": "7",
            "inputs": [{**PAIR, "parameters": {"binary_data_size": len(values)}}],
            "outputs": [{"name": "sum", "parameters": {"binary_data": True}}],
        }
    ).encode()
    headers = {"Content-Type": "application/json", "Inference-Header-Content-Length": str(len(head))}

    told = server.client.get(model).json()
    raw = server.client.post(f"{model}/versions/1.0/infer", content=head + values, headers=headers)
    plain = server.client.post(f"{model}/infer", json={"inputs": [{**PAIR, "data": [1, 2, 3, 4]}]})

    assert (told["versions"], told["inputs"], told["outputs"]) == (
        ["1.0"],
        [{"name": "pair", "datatype": "FP32", "shape": [-1, 2]}],
        [{"name": "sum", "datatype": "FP32", "shape": [-1]}],
    )
    assert raw.status_code == 200, raw.text
    length = int(raw.headers["inference-header-content-length"])
    assert json.loads(raw.content[:length])["id"] == "7"
    assert struct.unpack("<2f", raw.content[length:]) == (3, 7)
    assert plain.json() == {
        "model_name": "sums",
        "model_version": "1.0",
        "outputs": [{"name": "sum", "datatype": "FP32", "shape": [2], "data": [3, 7]}],
    }


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_body_is_answered_and_bounded(
    server: Server, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    """With the content type of JSON and raw; a bomb, damage and another encoding are refused, and no worker dies."""
    url = f"{server.inference}/v2/models/sums/infer"
    workers = server.worker_pids("sums")
    document = json.dumps({"inputs": [{**PAIR, "data": [1, 2, 3, 4]}]}).encode()
    head = json.dumps({"inputs": [{**PAIR, "parameters": {"binary_data_size": 16}}]}).encode()
    json_type = {"Content-Type": "application/json", "Content-Encoding": encoding}
    raw_type = {"Content-Encoding": encoding, "Inference-Header-Content-Length": str(len(head))}

    plain = server.client.post(url, content=pack(document), headers=json_type)
    raw = server.client.post(url, content=pack(head + struct.pack("<4f", 1, 2, 3, 4)), headers=raw_type)
    bomb = server.client.post(url, content=pack(bytes(100_000_000)), headers=json_type)
    cut = server.client.post(url, content=pack(document)[:-3], headers=json_type)
    other = server.client.post(url, content=document, headers={**json_type, "Content-Encoding": "br"})
    asking = pack(json.dumps({"inputs": [], "parameters": {"priority": 1}}).encode())
    of_rows = server.client.post(f"{server.inference}/v2/models/plain/infer", content=asking, headers=json_type)

    assert [each.json()["outputs"][0]["data"] for each in (plain, raw)] == [[3, 7], [3, 7]]
    assert (bomb.status_code, bomb.json()["error"]) == (
        400,
        "the body is larger than max_request_size, 6553500 bytes, when it is decompressed",
    )
    assert (cut.status_code, f"cannot be read as {encoding}" in cut.json()["error"]) == (400, True)
    assert (other.status_code, "Content-Encoding: 'br'" in other.json()["error"]) == (415, True)
    assert (of_rows.status_code, "the model 'plain' takes none" in of_rows.json()["error"]) == (415, True)
    assert server.worker_pids("sums") == workers


def test_the_pages_commands_get_the_pages_answers(server: Server) -> None:
    """What is told of the model, and an inference."""
    commands = block("docs/open-inference.md", "commands").replace("http://127.0.0.1:8080", server.inference)
    told, infer = map(shlex.split, commands.splitlines())

    answers = [
        server.client.get(told[-1]),
        server.client.post(
            infer[-1], content=infer[infer.index("-d") + 1], headers={"Content-Type": "application/json"}
        ),
    ]

    assert [answer.json() for answer in answers] == json.loads(block("docs/open-inference.md", "answers"))


def asking(channel: grpc.Channel) -> Callable[..., Any]:
    """Makes calls of the protocol's service: `ask(word, **fields)` is the answer."""
    schema = Schema()

    def ask(word: str, /, **fields: Any) -> Any:
        method = schema.methods("inference.GRPCInferenceService")[word]
        call = channel.unary_unary(
            f"/inference.GRPCInferenceService/{word}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=schema.message(method.output_type.full_name).FromString,
        )
        return call(schema.message(method.input_type.full_name)(**fields), timeout=30)

    return ask


def test_over_grpc_the_same_tensors_are_told_taken_and_given(server: Server) -> None:
    """Typed and raw; a handler of rows gets the protocol's JSON."""
    with grpc.insecure_channel(server.grpc_inference) as channel:
        ask = asking(channel)
        told = ask("ModelMetadata", name="sums")
        ready = [ask("ModelReady", name=name, version=version).ready for name, version in ASKED_IF_READY]
        typed = ask("ModelInfer", model_name="sums", inputs=[{**PAIR, "contents": {"fp32_contents": [1, 2, 3, 4]}}])
        raw = ask(
            "ModelInfer",
            model_name="sums",
            model_version="1.0",
            inputs=[PAIR],
            raw_input_contents=[struct.pack("<4f", 1, 2, 3, 4)],
        )
        echoed = ask("ModelInfer", model_name="echo", inputs=[{**PAIR, "contents": {"fp32_contents": [1, 2, 3, 4]}}])
        config = ask("ModelConfig", name="sums", version="1.0").config
        index = ask("RepositoryIndex", ready=True)
        counts = ask("ModelStatistics", name="sums")
        regions = [ask(f"{kind}SharedMemoryStatus").regions for kind in ("System", "Cuda")]
        with pytest.raises(grpc.RpcError) as caught:
            ask("ModelInfer", model_name="sums", inputs=[PAIR], raw_input_contents=[b"1234"])

    assert ready == [True, True, False, False]  # as Triton says it of what is not there
    assert [(each.name, each.datatype, list(each.shape)) for each in told.inputs] == [("pair", "FP32", [-1, 2])]
    assert list(typed.outputs[0].contents.fp32_contents) == [3, 7]
    assert (list(raw.raw_output_contents), raw.model_version) == ([struct.pack("<2f", 3, 7)], "1.0")
    assert list(echoed.outputs[0].contents.fp32_contents) == [1, 2, 3, 4]
    assert (config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == (4, 11, [2])
    assert [(each.name, each.state) for each in index.models] == [(name, "READY") for name in MODELS]
    assert counts.model_stats[0].inference_stats.success.count == counts.model_stats[0].inference_count > 0
    assert regions == [{}, {}]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "4 bytes came, and its shape takes 16" in caught.value.details()


def test_parameters_ask_for_a_deadline_and_name_a_sequence(server: Server) -> None:
    """A wrong one names itself; a handler finds the sequence under its header's name."""
    document = {"inputs": [{**PAIR, "data": [1, 2, 3, 4]}]}

    def ask(model: str, **parameters: Any) -> Any:
        at = f"{server.inference}/v2/models/{model}/infer"
        return server.client.post(at, json={**document, "parameters": parameters})

    late, wrong, taken = ask("sums", timeout=1), ask("sums", timeout="1s"), ask("sums", timeout=60_000_000, priority=1)
    named = ask("talk", sequence_id="a", sequence_start=True, sequence_end=True)

    assert late.status_code in (503, 504)
    assert (wrong.status_code, wrong.json()["error"].partition(" is ")[0]) == (400, "Parameter timeout")
    assert taken.json()["outputs"][0]["data"] == [3, 7]
    assert named.json() == ["a", "true", "true"]


def test_one_stream_has_generators_whole_answers_and_refusals(server: Server) -> None:
    """Each under its request's id; a generator gives as many answers as it yields, and the end of them if asked."""
    schema = Schema()
    request, parameter = schema.message("inference.ModelInferRequest"), schema.message("inference.InferParameter")
    upto = {"name": "upto", "datatype": "INT64", "shape": [1], "contents": {"int64_contents": [3]}}
    pair = {**PAIR, "contents": {"fp32_contents": [1, 2, 3, 4]}}
    asked = [
        request(
            model_name="counts",
            id="a",
            inputs=[upto],
            parameters={"triton_enable_empty_final_response": parameter(bool_param=True)},
        ),
        request(model_name="counts", id="b", inputs=[upto]),
        request(model_name="sums", id="c", inputs=[pair]),
        request(model_name="sums", id="d", inputs=[upto]),
    ]

    heard: dict[str, list[Any]] = {}
    with grpc.insecure_channel(server.grpc_inference) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=schema.message("inference.ModelStreamInferResponse").FromString,
        )
        for answer in call(iter(asked), timeout=30):
            heard.setdefault(answer.infer_response.id, []).append(answer)

    def told(name: str) -> list[tuple[list[float], bool]]:
        found = [each.infer_response for each in heard[name]]
        return [
            (
                [
                    value
                    for one in each.outputs
                    for value in (*one.contents.int64_contents, *one.contents.fp32_contents)
                ],
                each.parameters["triton_final_response"].bool_param,
            )
            for each in found
        ]

    pieces = [([number], False) for number in range(3)]
    assert (told("a"), told("b"), told("c")) == ([*pieces, ([], True)], pieces, [([3, 7], True)])
    [refused] = heard["d"]
    assert refused.error_message.startswith("upto: there is no such input")


def test_the_server_tells_of_itself_and_its_versions(server: Server) -> None:
    """Readiness, the index and the counts."""
    at = f"{server.inference}/v2"

    assert server.client.get(f"{at}/health/ready").json() == {"ready": True}
    assert server.client.get(f"{at}/models/echo/versions/1.0/ready").json() == {"name": "echo", "ready": True}
    index = server.client.post(f"{at}/repository/index").json()
    assert [(each["name"], each["state"]) for each in index] == [(name, "READY") for name in MODELS]
    assert server.client.get(f"{at}/models/sums/config").json()["max_batch_size"] == 4
    before = server.client.get(f"{at}/models/sums/stats").json()["model_stats"][0]["inference_count"]
    server.client.post(f"{at}/models/sums/infer", json={"inputs": [{**PAIR, "data": [1, 2, 3, 4]}]}).raise_for_status()
    assert server.client.get(f"{at}/models/sums/stats").json()["model_stats"][0]["inference_count"] == before + 1


def test_what_a_worker_refuses_counts_as_a_failure(server: Server) -> None:
    """Over REST and gRPC, in both documents; it is no inference."""
    at = f"{server.inference}/v2/models/sums"

    def counted() -> tuple[int, int, int]:
        stats = server.client.get(f"{at}/stats").json()["model_stats"][0]
        each = stats["inference_stats"]
        return stats["inference_count"], each["success"]["count"], each["fail"]["count"]

    before = counted()
    refused = server.client.post(f"{at}/infer", json={"inputs": [{**PAIR, "data": [1, 2, 3]}]})
    between = counted()
    with grpc.insecure_channel(server.grpc_inference) as channel:
        ask = asking(channel)
        with pytest.raises(grpc.RpcError) as caught:
            ask("ModelInfer", model_name="sums", inputs=[{**PAIR, "contents": {"fp32_contents": [1, 2, 3]}}])
        [after] = ask("ModelStatistics", name="sums").model_stats

    assert refused.status_code == 400
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert between == (before[0], before[1], before[2] + 1)
    assert (after.inference_count, after.inference_stats.fail.count) == (before[0], before[2] + 2)
    assert after.inference_stats.fail.ns > 0


def test_a_handler_of_rows_gets_the_body_as_ever(server: Server) -> None:
    """What the protocol's JSON means is its own or its envelope's."""
    document = {"inputs": [{**PAIR, "data": [1, 2, 3, 4]}]}

    answer = server.client.post(f"{server.inference}/v2/models/echo/infer", json=document)

    assert answer.json() == document


# ------------------------------------------------------------------------------------------- V1


def test_instances_of_v1_share_batches_and_are_answered_in_order(server: Server) -> None:
    """As the page says; a bad one is the answer, by its index; a text and bytes become JSON."""
    command, answer = (block("docs/open-inference.md", name) for name in ("v1", "v1-answer"))
    words = shlex.split(command)
    at = words[1].replace("http://127.0.0.1:8080", server.inference)
    form = {"Content-Type": "application/x-www-form-urlencoded"}

    def batches() -> int:
        stats = server.client.get(f"{server.inference}/v2/models/sums/stats").json()["model_stats"][0]
        return int(stats["execution_count"])

    assert server.client.post(at, content=words[-1], headers=form).json() == json.loads(answer)
    before = batches()
    many = server.client.post(at, json={"instances": [{"pair": [number, 1]} for number in range(400)]})
    count = batches() - before
    bad = server.client.post(at, json={"instances": [{"pair": [1, 2]}, {"pair": [1, 2, 3]}]})
    none = server.client.post(at, json={"instances": []})
    missing = server.client.post(at.replace("sums", "other"), json={"instances": []})
    plain = server.client.post(
        f"{server.inference}/v1/models/plain:predict",
        json={"instances": ["word", {"b64": "iVBORw=="}, {"n": 1}]},
    )

    assert many.json() == {"predictions": [{"sum": number + 1.0} for number in range(400)]}
    assert 100 <= count < 150
    assert (bad.status_code, bad.json()["message"]) == (400, "instances[1]: pair: expected float32 [2], got [3]")
    assert (none.json(), missing.status_code) == ({"predictions": []}, 404)
    assert plain.json() == {"predictions": ["word", {"b64": "iVBORw=="}, {"n": 1}]}


def test_v1s_models_are_told_on_both_addresses(server: Server) -> None:
    """With the keys of KServe and of OpenAI."""
    for address in (server.inference, server.management):
        one = server.client.get(f"{address}/v1/models/sums")
        listed = server.client.get(f"{address}/v1/models").json()

        assert (one.status_code, one.json()["name"], one.json()["id"], one.json()["ready"]) == (
            200,
            "sums",
            "sums",
            True,
        )
        assert listed["models"] == [each["id"] for each in listed["data"]] == MODELS


# ------------------------------------------------------------------------------------------- control


def test_the_pages_calls_load_list_and_unload_a_model(server: Server) -> None:
    """On the management address, over gRPC's too; the inference address refuses and names the setting."""
    commands = block("docs/open-inference.md", "control").replace("http://127.0.0.1:8081", server.management)
    load, index, unload, log = map(shlex.split, commands.splitlines())
    refused = server.client.post(load[-1].replace(server.management, server.inference))

    def names() -> dict[str, tuple[str, str]]:
        return {each["name"]: (each["state"], each["reason"]) for each in server.client.post(index[-1]).json()}

    before = names()
    assert server.client.post(unload[-1]).status_code == 200
    without = names()
    assert server.client.post(f"{server.inference}/v2/models/sums/infer", json={}).status_code == 404
    assert server.client.post(load[-1]).status_code == 200
    louder = server.client.post(log[-1], content=log[log.index("-d") + 1])

    assert refused.status_code == 403
    assert "open_inference_control=true" in refused.json()["error"]
    assert (before["sums"], without["sums"], names()["sums"]) == (
        ("READY", ""),
        ("UNAVAILABLE", "unloaded"),
        ("READY", ""),
    )
    assert louder.json()["log_verbose_level"] == 1
    assert server.client.get(f"{server.management}/logging").json()["level"] == "debug"
    server.client.post(log[-1], json={"log_verbose_level": 0}).raise_for_status()


def test_an_open_inference_address_asks_for_the_management_key(tmp_path: Path) -> None:
    """Over REST and gRPC; the key of inference changes nothing."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "echo.mar", ECHO)
    settings = {"load_models": "none", "disable_token_authorization": "false", "open_inference_control": "true"}
    with Server(tmp_path, entry="marserve", store=store, settings=settings) as server:
        keys = json.loads((tmp_path / "key_file.json").read_text())
        management, inference = (
            {"Authorization": f"Bearer {keys[name]['key']}"} for name in ("management", "inference")
        )
        load, index = (f"{server.inference}/v2/repository/{end}" for end in ("models/echo/load", "index"))

        answers = [server.client.post(load, headers=headers) for headers in ({}, inference, management)]
        listed = server.client.post(index, headers=inference)
        infer = server.client.post(f"{server.inference}/v2/models/echo/infer", json={"x": 1}, headers=management)

    assert [answer.status_code for answer in answers] == [401, 403, 200]
    assert [(each["name"], each["state"]) for each in listed.json()] == [("echo", "READY")]
    assert infer.status_code == 403


def test_a_stream_that_fails_and_one_whose_client_leaves_are_failures(server: Server) -> None:
    """Though both began with 200."""
    url = f"{server.inference}/predictions/breaks"
    headers = {"Accept": "text/event-stream"}

    failed = server.client.post(url, json={}, headers=headers)
    with server.client.stream("POST", url, json={"waits": True}, headers=headers) as left:
        next(left.iter_raw())
    stats: dict[str, Any] = {}
    for _ in poll(20, "both are counted"):
        stats = server.client.get(f"{server.inference}/v2/models/breaks/stats").json()["model_stats"][0]
        if stats["inference_stats"]["fail"]["count"] == 2:
            break

    assert (failed.status_code, left.status_code) == (200, 200)
    assert failed.text.endswith('event: error\ndata: {"code":500,"message":"Prediction failed"}\n\n'), failed.text
    assert stats["inference_count"] == stats["inference_stats"]["success"]["count"] == 0


ROWS = """
def handle(data, context):
    return [{"got": row} for row in data] if data else None
"""


@pytest.fixture(scope="module", params=["kservev2", pytest.param("kserve", marks=pytest.mark.system)])
def enveloped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    """A server with an envelope around all handlers: one that takes rows, and a program of one row."""
    folder = tmp_path_factory.mktemp("enveloped")
    store = folder / "store"
    store.mkdir()
    make_archive(store / "rows.mar", ROWS)
    make_archive(store / "sums.mar", block("docs/declared-handlers.md", "sums"))
    settings = {"load_models": "none", "service_envelope": request.param}
    with Server(folder, entry="marserve", store=store, settings=settings) as server:
        for name in ("rows", "sums"):
            server.register(f"{name}.mar").raise_for_status()
        yield request.param, server


def sent(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A tensor for each input of a model's metadata: sizes that vary are 2."""
    made = []
    for each in inputs:
        shape = [2 if int(size) < 0 else int(size) for size in each["shape"]]
        value: Any = "dGV4dA==" if each["datatype"] == "BYTES" else 1.5
        made.append({**each, "shape": shape, "data": [value] * math.prod(shape)})
    return made


@pytest.mark.parametrize("model", ["rows", "sums"])
def test_a_call_made_of_the_metadata_alone_is_answered(enveloped: tuple[str, Server], model: str) -> None:
    """Over REST, in JSON and raw, and over gRPC. Under an envelope of another protocol a row handler has no tensors."""
    envelope, server = enveloped
    address = f"{server.inference}/v2/models/{model}"
    told = server.client.get(address).json()
    config = server.client.get(f"{address}/config").json()
    if (model, envelope) == ("rows", "kserve"):
        assert (told["inputs"], told["outputs"], config["input"]) == ([], [], [])
        return

    tensors = sent(told["inputs"])
    names = [{"name": each["name"]} for each in told["outputs"]]
    plain = server.client.post(f"{address}/infer", json={"inputs": tensors, "outputs": names})
    raw = server.client.post(f"{address}/infer", **as_raw(tensors))
    with grpc.insecure_channel(server.grpc_inference) as channel:
        ask = asking(channel)
        described = ask("ModelMetadata", name=model)
        inputs = [
            {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in described.inputs
        ]
        wanted = [{"name": each.name} for each in described.outputs]
        given = [tensor_of(each) for each in sent(inputs)]
        answer = ask("ModelInfer", model_name=model, inputs=given, outputs=wanted)

    assert [each["name"] for each in inputs] == [each["name"] for each in told["inputs"]] != []
    assert [each["name"] for each in config["input"]] == [each["name"] for each in told["inputs"]]
    assert (plain.status_code, raw.status_code) == (200, 200), plain.text + raw.text
    assert plain.json()["outputs"] == raw.json()["outputs"]
    expected = told["outputs"] or told["inputs"]
    assert [each["name"] for each in plain.json()["outputs"]] == [each["name"] for each in expected]
    assert [each.name for each in answer.outputs] == [each["name"] for each in expected]
    if model == "rows":
        assert plain.json()["outputs"][0]["data"] == [{"got": "dGV4dA=="}]


def as_raw(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """The request with the tensors' values behind its JSON."""
    values, described = b"", []
    for each in tensors:
        if each["datatype"] == "BYTES":
            elements = [text.encode() for text in each["data"]]
            own = b"".join(len(one).to_bytes(4, "little") + one for one in elements)
        else:
            own = struct.pack(f"<{len(each['data'])}f", *each["data"])
        values += own
        kept = {key: each[key] for key in ("name", "datatype", "shape")}
        described.append({**kept, "parameters": {"binary_data_size": len(own)}})
    head = json.dumps({"inputs": described}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return {"content": head + values, "headers": headers}


def tensor_of(tensor: dict[str, Any]) -> dict[str, Any]:
    """An input of gRPC's messages, with typed contents."""
    values = tensor["data"]
    is_bytes = tensor["datatype"] == "BYTES"
    contents = {"bytes_contents": [each.encode() for each in values]} if is_bytes else {"fp32_contents": values}
    return {**{key: tensor[key] for key in ("name", "datatype", "shape")}, "contents": contents}
