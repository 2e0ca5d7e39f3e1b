"""Where calls over gRPC are sent, and how a request body becomes one."""

from __future__ import annotations

import builtins
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from marserve.api.grpc.schema import Schema
from marserve.cli.measuring.grpc_target import Messages
from marserve.cli.output import WrongArguments
from marserve.tuning.payloads import Payload
from support.command_line import marserve
from support.fake_apis import fake_apis
from support.grpc_answers import GrpcAnswers, grpc_answers

JSON = "application/json"
TENSORS = {
    "id": "7",
    "parameters": {"temperature": 0.5},
    "inputs": [
        {"name": "pair", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2], [3, 4.5]]},
        {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["grüße"], "parameters": {"content_type": "str"}},
    ],
    "outputs": [{"name": "sum", "parameters": {"classification": 3}}],
}


@pytest.fixture
def answers() -> Iterator[GrpcAnswers]:
    """A server that answers everything."""
    with grpc_answers() as running:
        yield running


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Two request bodies."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "a.json").write_text("[1]")
    (folder / "b.json").write_text(json.dumps(TENSORS))
    return folder


def _refusing(code: grpc.StatusCode, said: str) -> Any:
    return lambda call: (code, said, [("x-request-id", "r")])


def test_a_body_is_one_input_of_predictions(answers: GrpcAnswers) -> None:
    """As it is, under the name that was given."""
    call = Messages("digits", "1.0", "body").call_of(Payload(b"\x89PNG", "image/png"))

    message = Schema().message("org.pytorch.serve.grpc.inference.PredictionsRequest").FromString(call.message)
    assert call.path == "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    assert (message.model_name, message.model_version, dict(message.input)) == ("digits", "1.0", {"body": b"\x89PNG"})


def test_tensors_of_the_open_inference_protocol_are_a_model_infer() -> None:
    """Flat, in the field of their type, with all parameters that have a type there."""
    call = Messages("sums", None).call_of(Payload(json.dumps(TENSORS).encode(), JSON))

    message = Schema().message("inference.ModelInferRequest").FromString(call.message)
    pair, text = message.inputs
    assert call.path == "/inference.GRPCInferenceService/ModelInfer"
    assert (message.model_name, message.id) == ("sums", "7")
    assert message.parameters["temperature"].double_param == 0.5
    assert (pair.name, list(pair.shape), list(pair.contents.fp32_contents)) == ("pair", [2, 2], [1.0, 2.0, 3.0, 4.5])
    assert list(text.contents.bytes_contents) == ["grüße".encode()]
    assert text.parameters["content_type"].string_param == "str"
    assert message.outputs[0].parameters["classification"].int64_param == 3


@pytest.mark.parametrize(
    "body", ['{"inputs": [1, 2]}', '{"inputs": []}', '{"pair": [1, 2]}', '{"inputs": "text"}', "["]
)
def test_other_json_is_a_body_as_any(body: str) -> None:
    """KServe's first protocol also has inputs, and is none of tensors."""
    assert Messages("m", None).call_of(Payload(body.encode(), JSON)).path.endswith("/Predictions")


@pytest.mark.parametrize(
    "tensor",
    [
        {"name": "x", "datatype": "FP32", "shape": [1], "data": ["one"]},
        {"name": "x", "datatype": "FP16", "shape": [1], "data": [1]},
        {"name": "x", "datatype": "FLOAT", "shape": [1], "data": [1]},
        {"name": "x", "datatype": "FP32", "shape": [1]},
        {"name": "x", "datatype": "FP32", "shape": "two", "data": [1]},
    ],
)
def test_tensors_that_a_message_cannot_have_are_refused_with_their_file(tensor: dict[str, Any]) -> None:
    """Before anything is sent."""
    payload = Payload(json.dumps({"inputs": [tensor]}).encode(), JSON, "a.json")

    with pytest.raises(WrongArguments) as refused:
        Messages("m", None).call_of(payload)

    assert refused.value.message.startswith("a.json: its tensors cannot be sent over gRPC (")


def test_a_model_is_measured_over_grpc(answers: GrpcAnswers, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key, the method that each body needs, and the figures of every measurement."""
    monkeypatch.setenv("MARSERVE_TOKEN", "K")

    ran = marserve(
        *("bench", "digits", "--inputs", inputs, "--requests", 50, "--timeout", 60),
        *("--inference", f"grpc://127.0.0.1:{answers.port}"),
    )

    assert ran.status == 0, ran.err
    assert ran.out.startswith(f"digits at grpc://127.0.0.1:{answers.port}: one at a time.\n50 answered, 0 failed in ")
    methods = [call.method.rpartition("/")[2] for call in answers.asked]
    assert len(methods) == 70
    assert methods[20:24] == ["Predictions", "ModelInfer", "Predictions", "ModelInfer"]
    assert {call.metadata["authorization"] for call in answers.asked} == {"Bearer K"}
    assert all(30 < (call.left_s or 0) < 61 for call in answers.asked)


def test_the_baseline_may_be_http(answers: GrpcAnswers, inputs: Path) -> None:
    """Each is sent what its protocol has."""
    with fake_apis() as apis:
        apis.answer("POST /predictions/digits", [1])
        ran = marserve(
            *("bench", "digits", "--inputs", inputs, "--requests", 45, "--warm-up", 1, "--allow", 10, "--json"),
            *("--baseline", apis.url, "--inference", f"grpc://127.0.0.1:{answers.port}"),
        )

        assert ran.status == 0, ran.err
        assert (len(answers.asked), len(apis.asked)) == (46, 46)
        assert ran.document["timesAsLong"]["pairs"] == 9


def test_failures_have_the_name_of_their_status(answers: GrpcAnswers, inputs: Path) -> None:
    """In the table, and as text for scripts."""
    refuse = _refusing(grpc.StatusCode.UNAVAILABLE, "Full. Wait.")
    answers.refuse = lambda call: refuse(call) if len(answers.asked) > 40 else None
    words = ("bench", "digits", "--inputs", inputs, "--requests", 60, "--inference", f"grpc://127.0.0.1:{answers.port}")

    ran = marserve(*words, "--json")

    assert ran.status == 0, ran.err
    assert (ran.document["answered"], ran.document["failed"]) == (20, 40)
    assert ran.document["failures"] == [
        {"status": "UNAVAILABLE", "reason": "no reason given", "count": 40, "example": "Full. Wait."}
    ]
    answers.refuse = _refusing(grpc.StatusCode.INVALID_ARGUMENT, "wants numbers")
    refused = marserve(*words)
    assert refused.status == 1
    assert "none of 19 requests was answered; the first got INVALID_ARGUMENT (no reason given): wants" in refused.err
    assert "Is it the body that the model takes?" in refused.err


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (grpc.StatusCode.NOT_FOUND, "`marserve models` lists"),
        (grpc.StatusCode.UNAUTHENTICATED, "set MARSERVE_TOKEN to a key"),
        (grpc.StatusCode.PERMISSION_DENIED, "set MARSERVE_TOKEN to a key"),
        (grpc.StatusCode.UNIMPLEMENTED, "Is it the inference port"),
    ],
)
def test_what_all_calls_would_be_refused_for_is_said_after_one(
    answers: GrpcAnswers, inputs: Path, code: grpc.StatusCode, step: str
) -> None:
    """In the server's words, with what to do."""
    answers.refuse = _refusing(code, "No, thanks.")

    ran = marserve("bench", "digits", "--inputs", inputs, "--inference", f"grpc://127.0.0.1:{answers.port}")

    assert ran.status == 1
    assert f"answered Predictions with {code.name}: No, thanks." in ran.err
    assert step in ran.err
    assert len(answers.asked) == 1


@pytest.mark.parametrize(
    "address",
    ["grpc://127.0.0.1", "grpc://:7070", "grpc://127.0.0.1:7070/predictions", "grpcs://127.0.0.1:many"],
)
def test_an_address_without_host_and_port_is_refused(inputs: Path, address: str) -> None:
    """Also as a baseline; with one that would do."""
    for flag in ("--inference", "--baseline"):
        ran = marserve("bench", "digits", "--inputs", inputs, flag, address)

        assert ran.status == 2
        assert f"'{address}' is no address of gRPC; it must look like grpc://127.0.0.1:7070" in ran.err
        assert f"({flag})" in ran.err


def test_ports_of_nothing_and_of_something_else_are_said_so(answers: GrpcAnswers, inputs: Path) -> None:
    """A port that is closed, one of HTTP, and one without TLS."""
    words = ("bench", "digits", "--inputs", inputs, "--inference")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nothing = marserve(*words, f"grpc://127.0.0.1:{closed.getsockname()[1]}")
    with fake_apis() as apis:
        http = marserve(*words, apis.url.replace("http", "grpc"))
    plain = marserve(*words, f"grpcs://127.0.0.1:{answers.port}")

    assert (nothing.status, http.status, plain.status) == (1, 1, 1)
    assert "(Connection refused)" in nothing.err
    assert "what listens there speaks no HTTP/2" in http.err
    assert "speaks no TLS" in plain.err
    assert all("Is it its grpc_inference_port (7070 by default)" in ran.err for ran in (nothing, http, plain))
    assert answers.asked == []


def test_tls_is_trusted_as_over_https(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine exactly the certificate that this folder's settings name, whatever its host; no other one."""
    issued = trustme.CA().issue_cert("models.example")
    chain, key = b"".join(each.bytes() for each in issued.cert_chain_pems), issued.private_key_pem.bytes()
    (tmp_path / "cert.pem").write_bytes(chain)
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "store").mkdir()
    settings = tmp_path / "config.properties"
    monkeypatch.chdir(tmp_path)

    with grpc_answers(grpc.ssl_server_credentials([(key, chain)])) as answers:
        words = ("bench", "m", "--inputs", inputs, "--requests", 3, "--inference", f"grpcs://127.0.0.1:{answers.port}")
        unknown = marserve(*words)
        settings.write_text("model_store=store\ncertificate_file=cert.pem\nprivate_key_file=key.pem\n")
        known = marserve(*words)
        plain = marserve(*words[:-1], f"grpc://127.0.0.1:{answers.port}")

    assert unknown.status == 1
    assert "is not trusted: " in unknown.err
    assert "SSL_CERT_FILE" in unknown.err
    assert known.status == 0, known.err
    assert "3 answered, 0 failed" in known.out
    assert plain.status == 1
    assert "grpc or grpcs" in plain.err


def test_without_grpcio_the_sentence_says_what_brings_it(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And addresses of HTTP are measured as ever."""
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name == "marserve.tuning.grpc_line":
            raise ModuleNotFoundError("No module named 'grpc'", name="grpc")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)

    ran = marserve("bench", "digits", "--inputs", inputs, "--inference", "grpc://127.0.0.1:7070")

    assert ran.status == 1
    assert "Calls over gRPC are sent by grpcio, which cannot be used here" in ran.err
    assert "No module named 'grpc'" in ran.err
    assert "pip install 'marserve[grpc]' grpcio" in ran.err
