"""Every method of gRPC on both ports: messages drawn from their descriptors, and the same with damaged bytes."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from marserve.api.grpc.schema import (
    HEALTH,
    INFERENCE,
    MANAGEMENT,
    OPEN_INFERENCE,
    OPEN_INFERENCE_OF_TORCHSERVE,
    REFLECTION,
    REFLECTION_OF_OLD_TOOLS,
    Schema,
)
from support.pages import block
from support.server import Server, make_archive

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SEED = 18
EXAMPLES = 200
LIMIT_S = 10.0
MOST_GROWN_BYTES = 100 << 20
MODELS = ("sums", "echo")
SERVICES = (
    f"{INFERENCE}.InferenceAPIsService",
    f"{OPEN_INFERENCE}.GRPCInferenceService",
    f"{OPEN_INFERENCE_OF_TORCHSERVE}.GRPCInferenceService",
    f"{HEALTH}.Health",
    f"{REFLECTION}.ServerReflection",
    f"{REFLECTION_OF_OLD_TOOLS}.ServerReflection",
    f"{MANAGEMENT}.ManagementAPIsService",
)
# A stream that ends when its client does.
ENDLESS = f"/{HEALTH}.Health/Watch"
# Messages that are answered with success, of methods whose drawn ones are too seldom.
PAIR = {"name": "pair", "datatype": "FP32", "shape": [1, 2]}
GOOD: dict[str, list[dict[str, Any]]] = {
    "ModelInfer": [
        {"model_name": "sums", "id": "a", "inputs": [{**PAIR, "contents": {"fp32_contents": [1, 2]}}]},
        {"model_name": "sums", "inputs": [PAIR], "outputs": [{"name": "sum"}], "raw_input_contents": [bytes(8)]},
    ],
    "SystemSharedMemoryRegister": [{"name": "other", "key": "/region", "offset": 8, "byte_size": 8}],
    "RegisterModel": [{"url": "spare.mar", "initial_workers": 1, "synchronous": True}],
    "Predictions": [{"model_name": "sums", "input": {"data": b'{"pair": [1, 2]}'}}],
}
GOOD |= {name: GOOD[like] for name, like in (("ModelStreamInfer", "ModelInfer"), ("StreamPredictions", "Predictions"))}
# It answered so of a missing model in TorchServe, and does here.
RECORDED = (f"/{OPEN_INFERENCE_OF_TORCHSERVE}.GRPCInferenceService/ModelInfer", grpc.StatusCode.INTERNAL)
WRONG = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.ABORTED}
ECHO = """
def handle(data, context):
    return [repr(sorted(row.items()))[:200] for row in data] if data else None
"""
TEXTS = (*MODELS, "1.0", "sums.mar", "spare.mar", "region", "/region", "pair", "FP32", "BYTES", "sum", "priority")
OF_FIELD = {
    "model_name": MODELS,
    "model_version": ("", "1.0"),
    "version": ("", "1.0"),
    "url": ("spare.mar", "sums.mar"),
    "name": ("sums", "region", "pair"),
    "key": ("region", "/region"),
    "datatype": ("FP32", "BYTES", "INT64"),
}
FEW_WORKERS = ("initial_workers", "min_worker", "max_worker")
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}
_SMALL = st.integers(0, 4)
_MOSTLY = st.sampled_from([True, True, True, False])


@st.composite
def messages(draw: st.DrawFn, schema: Schema, descriptor: Descriptor, depth: int = 4) -> Any:
    """A message with some of its fields set: to names that exist, to small numbers, and to anything."""
    message = schema.message(descriptor.full_name)()
    for field in descriptor.fields:
        if not draw(_MOSTLY) or (field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and not depth):
            continue
        is_repeated = getattr(field, "is_repeated", None)
        if is_repeated is None:
            is_repeated = field.label == FieldDescriptor.LABEL_REPEATED
        entry = field.message_type if field.message_type and field.message_type.GetOptions().map_entry else None
        if entry is not None:
            into = getattr(message, field.name)
            for _ in range(draw(_SMALL)):
                key = draw(_value(entry.fields_by_name["key"]))
                value = entry.fields_by_name["value"]
                if value.message_type is not None:
                    into[key].CopyFrom(draw(messages(schema, value.message_type, depth - 1)))
                else:
                    into[key] = draw(_value(value))
        elif field.message_type is not None:
            drawn = [draw(messages(schema, field.message_type, depth - 1)) for _ in range(draw(_SMALL))]
            if is_repeated:
                getattr(message, field.name).extend(drawn)
            elif drawn:
                getattr(message, field.name).CopyFrom(drawn[0])
        elif is_repeated:
            getattr(message, field.name).extend(draw(st.lists(_value(field), max_size=4)))
        else:
            setattr(message, field.name, draw(_value(field)))
    return message


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name in FEW_WORKERS:
        return st.integers(-2, 2)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        any_text = st.binary(max_size=20) if field.type == FieldDescriptor.TYPE_BYTES else st.text(max_size=20)
        known = st.sampled_from([*OF_FIELD.get(field.name, ()), *TEXTS])
        if field.name in OF_FIELD and field.type == FieldDescriptor.TYPE_STRING:
            return st.sampled_from(OF_FIELD[field.name]) | known | any_text
        return (known.map(str.encode) if field.type == FieldDescriptor.TYPE_BYTES else known) | any_text
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([each.number for each in field.enum_type.values])
    numbers = _NUMBERS[field.cpp_type]
    return numbers if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else _SMALL | numbers


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes as they are, mostly; or cut, changed in a place, doubled, or other ones."""
    if draw(_MOSTLY):
        return data
    at = draw(st.integers(0, len(data)))
    changes = (data[:at], data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at + 1 :], data + data)
    return draw(st.sampled_from(changes) | st.binary(max_size=100))


def bring_back(server: Server) -> None:
    """Whatever calls have done, each model is there with a worker."""
    listed = {each["modelName"] for each in server.client.get(f"{server.management}/models").json()["models"]}
    for name in listed - set(MODELS):
        server.client.delete(f"{server.management}/models/{name}")
    for name in MODELS:
        if name not in listed:
            server.register(f"{name}.mar")
        else:
            server.client.put(f"{server.management}/models/{name}", params={"min_worker": 1, "synchronous": "true"})
    region = f"{server.management}/v2/systemsharedmemory/region/region/register"
    server.client.post(region, json={"key": "region", "byte_size": 64})


class Drawn:
    """Calls with drawn messages over one channel: their statuses by method, and what is wrong with them."""

    def __init__(self, channel: grpc.Channel, schema: Schema) -> None:
        self._channel = channel
        self._schema = schema
        self.statuses: dict[str, Counter[str]] = {}
        self.faults: dict[tuple[str, str], str] = {}

    def play(self, service: str, name: str, method: Any) -> None:
        """`EXAMPLES` calls of one method, each with up to three messages where it takes a stream.

        Nothing for a method that is not offered there.
        """
        path = f"/{service}/{name}"
        if self._ask(path, method, [b""])[0] is grpc.StatusCode.UNIMPLEMENTED:
            return
        one = messages(self._schema, method.input_type)
        if name in GOOD:
            made = self._schema.message(method.input_type.full_name)
            one |= st.sampled_from([made(**fields) for fields in GOOD[name]])
        strategy = st.lists(one, min_size=1, max_size=3)

        @hypothesis.seed(SEED)
        @hypothesis.settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy, st.data())
        def ask(given: list[Any], data: st.DataObject) -> None:
            sent = [data.draw(damaged(each.SerializeToString())) for each in given]
            code, words = self._ask(path, method, sent if method.client_streaming else sent[:1])
            self.statuses.setdefault(path, Counter())[code.name] += 1
            is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED and path != ENDLESS
            if (code in WRONG and words and (path, code) != RECORDED) or is_late:
                self.faults.setdefault((path, code.name), f"{path}: {code.name}: {words} for {given!r} as {sent!r}")

        ask()

    def _ask(self, path: str, method: Any, sent: list[bytes]) -> tuple[grpc.StatusCode, str]:
        limit_s = 0.05 if path == ENDLESS else LIMIT_S
        try:
            if method.client_streaming:
                kind = self._channel.stream_stream if method.server_streaming else self._channel.stream_unary
                answers = kind(path, None, None)(iter(sent), timeout=limit_s)
            elif method.server_streaming:
                answers = self._channel.unary_stream(path, None, None)(sent[0], timeout=limit_s)
            else:
                answers = [self._channel.unary_unary(path, None, None)(sent[0], timeout=limit_s)]
            for _ in answers:
                pass
        except grpc.RpcError as error:
            trailers = dict(error.trailing_metadata() or ())
            if "x-marserve-cause" in trailers:  # such as workers that could not load a model
                return error.code(), ""
            return error.code(), str(error.details() or error)
        return grpc.StatusCode.OK, ""


def test_no_drawn_message_is_answered_wrongly(tmp_path: Path) -> None:
    """No INTERNAL, no hang, no death; the server and its workers are there afterwards, and it has not grown."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "sums.mar", block("docs/declared-handlers.md", "sums"))
    make_archive(store / "echo.mar", ECHO)
    make_archive(store / "spare.mar", ECHO)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "region").write_bytes(bytes(64))
    settings = {
        "load_models": "none",
        "open_inference_control": "true",
        "system_shared_memory_folder": str(tmp_path / "shared"),
        "allowed_urls": "file://.*",
    }
    schema = Schema()
    with Server(tmp_path, entry="marserve", store=store, settings=settings) as server:
        bring_back(server)
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        played: list[Drawn] = []
        with contextlib.ExitStack() as stack:
            for address in (server.grpc_inference, server.grpc_management):
                drawn = Drawn(stack.enter_context(grpc.insecure_channel(address)), schema)
                played.append(drawn)
                for service in SERVICES:
                    for name, method in schema.methods(service).items():
                        bring_back(server)
                        drawn.play(service, name, method)
        bring_back(server)

        faults = [words for drawn in played for words in drawn.faults.values()]
        count = sum(sum(each.values()) for drawn in played for each in drawn.statuses.values())
        grown = process.memory_info().rss - before
        sys.stdout.write(f"{count} calls, seed {SEED}, grown by {grown >> 10} KiB\n")
        for drawn in played:
            sys.stdout.writelines(f"{path} {dict(statuses)}\n" for path, statuses in drawn.statuses.items())
        assert server.process.poll() is None, server.output()[-4000:]
        assert not faults, "\n".join(faults)
        assert server.predict("sums", '{"pair": [1, 2]}').status_code == 200
        metrics = server.client.get(f"{server.metrics}/metrics").text.splitlines()
        assert not [line for line in metrics if "worker_deaths_total{" in line and not line.endswith(" 0.0")]
        assert grown < MOST_GROWN_BYTES
        assert count > 5000
