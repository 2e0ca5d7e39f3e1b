"""What handlers say in texts and numbers that no protocol carries, over REST and gRPC, down to the files of the log."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from marserve.api.grpc.schema import INFERENCE, Schema
from support import hostile_handler
from support.hostile_handler import KINDS
from support.server import Server, make_archive

SCHEMA = Schema()


@pytest.mark.system
def test_every_surface_answers_and_the_worker_serves_on(tmp_path: Path) -> None:
    """Every request has its answer or its error, metrics and logs are text, and the process is the one that began."""
    (tmp_path / "store").mkdir()
    make_archive(tmp_path / "store" / "hostile.mar", Path(hostile_handler.__file__).read_text())
    with Server(tmp_path, settings={"metrics_mode": "log"}) as server:
        assert server.register("hostile.mar").status_code == 200
        pids = server.worker_pids("hostile")

        statuses = {kind: server.predict("hostile", kind.encode()).status_code for kind in KINDS}
        with grpc.insecure_channel(server.grpc_inference, options=[("grpc.enable_http_proxy", 0)]) as channel:
            predict = channel.unary_unary(
                f"/{INFERENCE}.InferenceAPIsService/Predictions",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=SCHEMA.message(f"{INFERENCE}.PredictionResponse").FromString,
            )
            codes = {kind: code_of(predict, kind) for kind in KINDS}

        assert all(200 <= status <= 999 for status in statuses.values())
        assert statuses["raise told with lone surrogates"] == 400
        assert statuses["header value 0"] == 200
        assert codes["raise told with lone surrogates"] is grpc.StatusCode.INVALID_ARGUMENT
        assert codes["header value 0"] is grpc.StatusCode.OK
        assert server.predict("hostile", b"well").content == b"well"
        assert server.worker_pids("hostile") == pids
        [worker] = server.describe("hostile")["workers"]
        assert "lastDeath" not in worker
    logs = [file.read_text("utf-8") for file in (tmp_path / "logs").rglob("*.log")]
    assert any("ValueError: \\ud800 and \\udfff" in text for text in logs)
    assert not any("\x1b[2J" in text for text in logs)


def code_of(predict: grpc.UnaryUnaryMultiCallable, kind: str) -> grpc.StatusCode:
    """How a call over gRPC ended."""
    request = SCHEMA.message(f"{INFERENCE}.PredictionsRequest")(model_name="hostile")
    request.input["data"] = kind.encode()
    try:
        predict(request, timeout=30)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK
