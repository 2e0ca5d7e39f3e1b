"""What the calls of the inference API send, and what is refused before anything is sent."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marserve_client import BadAnswer, BadInput, CallFailed, Client, DeadlinePassed, NoConnection, NotFound, WrongKey
from support.both_clients import Clients
from support.scripted_server import Act, Asked, ScriptedServer, answer, scripted
from support.server import free_ports

NO_ROUTE = b'{"code": 404, "type": "ResourceNotFoundException", "message": "Requested resource is not found."}'
NO_MODEL = b'{"code": 404, "type": "ModelNotFoundException", "message": "Model not found: m"}'


def sent(clients: Clients, *arguments: Any, **keywords: Any) -> Asked:
    """What a prediction sends."""
    with scripted(answer(200, b"done")) as server:
        assert clients(server.address).predict(*arguments, **keywords).content == b"done"
        return server.asked[0]


@pytest.fixture(name="picture")
def _picture(tmp_path: Path) -> Path:
    path = tmp_path / "seven.png"
    path.write_bytes(b"\x89PNG")
    return path


# --------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("data", "body", "kind"),
    [
        (b"raw", b"raw", None),
        (bytearray(b"raw"), b"raw", None),
        (memoryview(b"raw"), b"raw", None),
        ("zw\u00f6lf", "zw\u00f6lf".encode(), "text/plain; charset=utf-8"),
        ({"pair": [1, 2.5]}, b'{"pair":[1,2.5]}', "application/json"),
        ([1, None, True], b"[1,null,true]", "application/json"),
        (3, b"3", "application/json"),
        (None, b"", None),
    ],
)
def test_each_kind_of_data_has_its_body_and_type(clients: Clients, data: Any, body: bytes, kind: str | None) -> None:
    """Bytes have the type that the model declares: none is named."""
    asked = sent(clients, "m", data)

    assert (asked.line, asked.body, asked.headers.get("content-type")) == ("POST /predictions/m HTTP/1.1", body, kind)


def test_files_are_sent_with_the_type_of_their_name(clients: Clients, picture: Path) -> None:
    """A path, an open file, one without a name; a type that is given goes before."""
    with picture.open("rb") as opened:
        found = [sent(clients, "m", data) for data in (picture, opened, io.BytesIO(b"\x89PNG"))]
    found.append(sent(clients, "m", picture, content_type="image/x-own"))
    found.append(sent(clients, "m", picture, headers={"Content-Type": "image/x-own"}))

    assert [asked.body for asked in found] == [b"\x89PNG"] * 5
    kinds = [asked.headers.get("content-type") for asked in found]
    assert kinds == ["image/png", "image/png", None, "image/x-own", "image/x-own"]


def test_a_form_has_files_and_fields(clients: Clients, picture: Path) -> None:
    """Each with its name and type; fields are texts or JSON."""
    files = {"image": picture, "raw": b"abc", "own": ("o.bin", b"def", "x/own")}

    asked = sent(clients, "m", {"label": "seven", "box": [1, 2]}, files=files)

    assert asked.headers["content-type"].startswith("multipart/form-data; boundary=")
    for part in (
        b'name="label"\r\n\r\nseven',
        b'name="box"\r\n\r\n[1, 2]',
        b'name="image"; filename="seven.png"\r\nContent-Type: image/png\r\n\r\n\x89PNG',
        b'name="raw"; filename="raw"\r\nContent-Type: application/octet-stream\r\n\r\nabc',
        b'name="own"; filename="o.bin"\r\nContent-Type: x/own\r\n\r\ndef',
    ):
        assert part in asked.body


def test_a_file_is_read_once_and_sent_again(clients: Clients, picture: Path) -> None:
    """A try that is refused does not use it up."""
    full = answer(503, b"{}", retry_after="0")
    with scripted(full, answer(), full, answer()) as server, picture.open("rb") as opened:
        client = clients(server.address)
        client.predict("m", opened)
        client.predict("m", files={"image": picture})

    bodies = [asked.body for asked in server.asked]
    assert bodies[0] == bodies[1] == b"\x89PNG"
    assert b"\x89PNG" in bodies[3]


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        (("", b""), {}, "name: '' names no model"),
        (("..", b""), {}, "name: '..' names no model"),
        ((None, b""), {}, "name: None names no model"),
        (("m", b""), {"version": ""}, "name: '' names no model, version"),
        (("m", b""), {"priority": 10}, "priority: is 10; it must be"),
        (("m", b""), {"priority": "3"}, "priority: is '3'; it must be"),
        (("m", np.ones(2)), {}, r"data: ndarray cannot be sent as JSON .* infer\(\)"),
        (("m", {"a": object()}), {}, "data: dict cannot be sent as JSON"),
        (("m", Path("not there")), {}, "data: not there cannot be read"),
        (("m", io.StringIO("text")), {}, "data: the file is open for text"),
        (("m",), {"files": {"a": Path("not there")}}, "a: not there cannot be read"),
        (("m",), {"files": {"a": "text"}}, "a: got str; a file is bytes"),
        (("m", b"raw"), {"files": {"a": b""}}, "data: got bytes; beside files it is a dict"),
        (("m",), {"files": {"a": b""}, "content_type": "a/b"}, "content_type: a form has a type of its own"),
    ],
)
def test_what_cannot_be_sent_is_refused_here(
    clients: Clients, arguments: tuple[Any, ...], keywords: dict[str, Any], words: str
) -> None:
    """By the argument's name; nothing is sent."""
    with scripted() as server:
        with pytest.raises(BadInput, match=f"^{words}"):
            clients(server.address).predict(*arguments, **keywords)

        assert not server.asked


def test_names_are_escaped_and_wishes_are_headers(clients: Clients) -> None:
    """A version in the path, a priority, headers of the caller."""
    asked = sent(clients, "a/b \u00fc", b"", version="1.0/x", priority=0, headers={"TS_Request_Sequence_Id": "7"})

    assert asked.line == "POST /predictions/a%2Fb%20%C3%BC/1.0%2Fx HTTP/1.1"
    assert asked.headers["x-marserve-priority"] == "0"
    assert asked.headers["ts_request_sequence_id"] == "7"


def test_an_answer_says_what_came(clients: Clients) -> None:
    """Text, JSON, type, the request's id, the version."""
    headers = {"x_request_id": "r-1", "x_marserve_version": "2.0", "content_type": "application/json"}
    with scripted(answer(200, b'{"a": 1}', **headers), answer(200, b"\xff")) as server:
        client = clients(server.address)
        came, odd = client.predict("m"), client.explain("m")

    assert (came.json(), came.text, came.content_type) == ({"a": 1}, '{"a": 1}', "application/json")
    assert (came.request_id, came.model_version, came.status) == ("r-1", "2.0", 200)
    assert (odd.text, odd.request_id, odd.model_version, odd.content_type) == ("\ufffd", None, None, "")
    with pytest.raises(BadAnswer, match="no JSON"):
        odd.json()
    assert server.asked[1].line == "POST /explanations/m HTTP/1.1"


def test_tensors_are_refused_by_name_before_anything_is_sent(clients: Clients) -> None:
    """The rest of it is in the tests of tensors."""
    with scripted() as server:
        with pytest.raises(BadInput) as refused:
            clients(server.address).infer("m", {"x": np.zeros(1, "complex64")})

        assert refused.value.field == "x"
        assert not server.asked


def test_an_inference_goes_to_the_version_that_is_named(clients: Clients) -> None:
    """With the length of its JSON where values stand behind it."""
    body = json.dumps({"outputs": [{"name": "y", "datatype": "INT8", "shape": [1], "data": [3]}]}).encode()
    with scripted(answer(200, body), answer(200, body)) as server:
        client = clients(server.address)
        assert client.infer("m", {"x": np.ones(1, "int8")}, version="2")["y"].tolist() == [3]
        client.infer("m", {"x": [1]})

    binary, plain = server.asked
    assert binary.line == "POST /v2/models/m/versions/2/infer HTTP/1.1"
    assert binary.body[int(binary.headers["inference-header-content-length"]) :] == b"\x01"
    assert plain.line == "POST /v2/models/m/infer HTTP/1.1"
    assert "inference-header-content-length" not in plain.headers


# --------------------------------------------------------------------------------------------------------------- health


def test_health_is_told_truly(clients: Clients) -> None:
    """Whether a server answers, and whether requests should be sent there, with the reasons."""
    (port,) = free_ports(1)
    away = clients(f"http://127.0.0.1:{port}")
    not_ready = b'{"status": "not ready", "reasons": ["m has no worker"]}'
    ready = b'{"status": "ready", "reasons": []}'
    with scripted(answer(200, ready), answer(503, not_ready), answer(200, ready), answer(503, b"a proxy")) as server:
        client = clients(server.address)
        assert client.is_alive() is True
        assert client.readiness() == (False, ("m has no worker",))
        assert client.readiness() == (True, ())
        with pytest.raises(CallFailed, match="a proxy"):
            client.readiness()

    assert away.is_alive() is False
    with pytest.raises(NoConnection):
        away.readiness()


def test_a_server_that_comes_up_is_waited_for(clients: Clients) -> None:
    """Nobody listens, then it is not ready, then the model is not there, then it has no worker, then it answers."""
    (port,) = free_ports(1)
    acts = [
        Act((), closes=True),
        answer(404, NO_MODEL),
        answer(503, b'{"name": "m", "ready": false}'),
        answer(200, b'{"name": "m", "ready": true}'),
    ]
    looks: list[str] = []
    server: list[ScriptedServer] = []

    def start(sending: Any) -> None:
        looks.append(sending.url)
        if len(looks) == 2:
            server.append(ScriptedServer(acts, port))

    client = clients(f"http://127.0.0.1:{port}", before=start)
    try:
        assert client.wait_until_ready("m", timeout=20) is None
    finally:
        for each in server:
            each.close()

    assert len(looks) == 5
    assert {url.partition(str(port))[2] for url in looks} == {"/v2/models/m/ready"}


def test_what_was_in_the_way_is_told_in_the_end(clients: Clients) -> None:
    """In time, for a server and for a model."""
    reasons = b'{"status": "not ready", "reasons": ["m has no worker"]}'
    with scripted(*[answer(503, reasons)] * 9) as server:
        begun = time.monotonic()
        with pytest.raises(DeadlinePassed, match=r"The server was not ready after 1 s: m has no worker\.$"):
            clients(server.address).wait_until_ready(timeout=1)
        assert time.monotonic() - begun < 4
    with (
        scripted(*[answer(404, NO_MODEL, x_request_id="r-1")] * 9) as server,
        pytest.raises(DeadlinePassed, match=r"Model m 2 was not ready after 1 s: Model not found: m") as late,
    ):
        clients(server.address).wait_until_ready("m", version="2", timeout=1)

    assert isinstance(late.value.__cause__, NotFound)
    assert server.asked[0].line == "GET /v2/models/m/versions/2/ready HTTP/1.1"


def test_what_waiting_cannot_mend_is_told_at_once(clients: Clients) -> None:
    """A wrong key, and a server that speaks no Open Inference where no management address is known."""
    wrong = b'{"code": 403, "type": "InvalidKeyException", "message": "Wrong."}'
    with scripted(answer(403, wrong), answer(404, NO_ROUTE)) as server:
        client = clients(server.address)
        with pytest.raises(WrongKey):
            client.wait_until_ready("m", timeout=20)
        with pytest.raises(NotFound):
            client.wait_until_ready("m", timeout=20)

        assert len(server.asked) == 2


def test_without_open_inference_the_management_address_is_asked(clients: Clients) -> None:
    """As of a server that TorchServe's command line started."""
    acts = [answer(404, NO_ROUTE), answer(200, b'{"ready": false}'), answer(200, b'{"ready": true}')]
    with scripted(*acts) as server:
        clients(server.address, server.address).wait_until_ready("m", timeout=20)

    lines = [asked.line.split()[1] for asked in server.asked]
    assert lines == ["/v2/models/m/ready", "/v1/models/m", "/v1/models/m"]


def test_a_client_is_of_the_addresses_that_it_was_given(clients: Clients) -> None:
    """A call of the other API is refused; with none they are those of this machine."""
    with scripted() as server:
        with pytest.raises(BadInput, match=r"^management: this client has no address of that API"):
            clients(server.address).register("m.mar")
        with pytest.raises(BadInput, match=r"^inference: this client has no address of that API"):
            clients(management=server.address).predict("m")
        assert not server.asked

    assert dict(Client()._session.addresses) == {
        "inference": "http://127.0.0.1:8080",
        "management": "http://127.0.0.1:8081",
    }


@pytest.fixture(autouse=True)
def _key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read it, the client does not."""
    monkeypatch.setenv("MARSERVE_TOKEN", "not mine")
