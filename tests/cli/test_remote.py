"""A running server as the commands see it."""

from __future__ import annotations

import gzip
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from marserve.api.errors import error_headers, error_status, error_type
from marserve.cli import remote
from marserve.cli.output import CommandFailed
from marserve.cli.remote import Inference, Listener, Management, Probe, find_address, model_path
from marserve.cli.server.start_behind import command_for
from marserve.errors import (
    AddressNotAllowed,
    ArchiveExists,
    BadSettings,
    DependencyFailed,
    InvalidToken,
    MarserveError,
    MethodNotAllowed,
    NotInStore,
    RequirementsRefused,
)
from support.fake_apis import FakeApis, description, fake_apis


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server that answers what the test says."""
    with fake_apis() as running:
        yield running


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_given_address_needs_no_settings() -> None:
    """And loses its closing stroke."""
    assert find_address("management", "http://127.0.0.1:9081/", None) == "http://127.0.0.1:9081"
    assert find_address("inference", "unix:/run/marserve.sock", None) == "unix:/run/marserve.sock"


@pytest.mark.parametrize("address", ["localhost:8081", "8081", "ftp://a", "http://", "unix:"])
def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    """The refusal names the flag and shows an address."""
    with pytest.raises(BadSettings, match="is no address") as refused:
        find_address("management", address, None)

    assert "--management" in str(refused.value)


def test_an_address_that_is_not_given_is_as_configured(tmp_path: Path) -> None:
    """The commands find the server that `marserve start` would start with the same settings."""
    file = tmp_path / "mine.properties"
    file.write_text("inference_address=http://127.0.0.1:9080\nmanagement_address=http://127.0.0.1:9081\n")

    assert find_address("inference", None, file) == "http://127.0.0.1:9080"
    assert find_address("management", None, file) == "http://127.0.0.1:9081"


def test_nobody_there_is_told_with_what_was_tried(nobody: str) -> None:
    """And how a server is started."""
    with Management(nobody) as server, pytest.raises(CommandFailed) as failed:
        server.describe("digits")

    assert nobody in failed.value.message
    assert "marserve start" in str(failed.value.next_step)
    assert "`marserve run` shows its address" in str(failed.value.next_step)


def test_somebody_else_who_listens_there_is_told() -> None:
    """A peer that speaks no HTTP is not waited for."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def hang_up() -> None:
            connection, _ = listening.accept()
            connection.recv(1)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with Management(url) as server, pytest.raises(CommandFailed, match="broke") as failed:
            server.describe("digits")
        thread.join()

    assert "Is it marserve" in str(failed.value.next_step)


def test_an_answer_that_takes_too_long_is_told() -> None:
    """With the time that was waited."""

    def too_slow(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("slow", request=request)

    slow = Listener("http://127.0.0.1:1", httpx.MockTransport(too_slow))
    with slow as server, pytest.raises(CommandFailed, match=r"did not answer GET /x within 2\.5 s"):
        server.ask("GET", "/x", timeout_s=2.5)


def test_an_answer_that_drips_is_told_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its pieces comes in time, and the answer does not."""
    clock = itertools.count(100.0, 2.0)
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def too_slow(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=(b"x" for _ in range(1000)))

    with (
        Inference("http://127.0.0.1:1", httpx.MockTransport(too_slow)) as server,
        pytest.raises(CommandFailed, match=r"did not answer POST /predictions/m within 10 s"),
    ):
        server.predict("m", None, b"1", None, 120.0, 10.0)

    assert next(clock) < 120


def test_an_answer_that_never_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed bytes count as what they are unpacked to."""
    monkeypatch.setattr(remote, "MOST_ANSWER", 10_000)
    packed = gzip.compress(bytes(20_000))
    for content, headers in ((bytes(20_000), {}), (packed, {"content-encoding": "gzip"})):
        answer = httpx.Response(200, headers=headers, content=content)
        server = Management("http://s", httpx.MockTransport(lambda _, answer=answer: answer))
        with server, pytest.raises(CommandFailed, match="The answer of http://s has more than 10000 bytes"):
            server.ask("GET", "/models")


def test_an_answer_that_was_packed_is_unpacked_once() -> None:
    """With its other headers."""
    headers = {"content-encoding": "gzip", "x-request-id": "7"}
    answer = httpx.Response(200, headers=headers, content=gzip.compress(b'{"a": 1}'))
    with Management("http://s", httpx.MockTransport(lambda _: answer)) as server:
        assert server.order("GET", "/models") == {"a": 1}
        again = server.ask("GET", "/models")

    assert (again.headers["x-request-id"], again.headers["content-length"]) == ("7", "8")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "GET /models/m, with status 200, is no JSON"),
        (b"<html>login</html>", "GET /models/m, with status 200, is no JSON"),
        (b"[]", "GET /models/m describes no version"),
        (b"7", "GET /models/m describes no model: Expected `array`, got `int`"),
        (b"[{}]", "GET /models/m describes no model: Object missing required field `modelName`"),
    ],
)
def test_an_answer_that_is_none_of_marserve_is_told(content: bytes, words: str) -> None:
    """As of a proxy that wants a login, or of another server."""
    answer = httpx.Response(200, content=content)
    with Management("http://s", httpx.MockTransport(lambda _: answer)) as server:
        with pytest.raises(CommandFailed) as told:
            server.describe("m", None)
        with pytest.raises(CommandFailed, match="The answer of http://s to GET /models"):
            list(server.model_names())

    assert told.value.message.startswith(f"The answer of http://s to {words}")
    assert told.value.next_step == "Is it marserve that listens there?"


def test_a_refusal_is_told_in_the_servers_words(apis: FakeApis) -> None:
    """With status and type; a refusal is in no log, so nobody is sent there."""
    apis.answer("PUT /models/m", {"code": 400, "type": "BadRequestException", "message": "max_worker is less."}, 400)

    with Management(apis.url) as server, pytest.raises(CommandFailed) as failed:
        server.order("PUT", "/models/m")

    assert failed.value.message == "max_worker is less."
    assert failed.value.detail == {"code": 400, "type": "BadRequestException", "request_id": "6f1c-42"}
    assert failed.value.next_step is None


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (MethodNotAllowed(), "enable_model_api"),
        (InvalidToken("Authorization"), "key file"),
        (AddressNotAllowed("http://a/b.mar"), "allowed_urls"),
        (NotInStore("Model not found at: s3://bucket/m.mar"), "model store"),
        (ArchiveExists("m.mar"), "whether it is served already"),
        (DependencyFailed("Custom pip package installation failed for model m"), "pip said last"),
    ],
)
def test_where_torchserves_sentence_does_not_help_a_next_step_does(
    apis: FakeApis, error: MarserveError, names: str
) -> None:
    """It names the setting, or where more stands; the answer's type and cause decide, and no word of its sentence."""
    apis.headers.update(error_headers(error))
    apis.answer("POST /models", {"type": error_type(error), "message": "said so"}, error_status(error))

    with Management(apis.url) as server, pytest.raises(CommandFailed) as failed:
        server.order("POST", "/models")

    assert names in str(failed.value.next_step)


def test_a_sentence_that_says_why_gets_no_next_step(apis: FakeApis) -> None:
    """Whatever words it has."""
    said = "Custom pip package installation failed for model m: requirements.txt, line 2: Model not found at: x"
    apis.headers.update(error_headers(RequirementsRefused(said)))
    apis.answer("POST /models", {"type": "ModelException", "message": said}, 400)

    with Management(apis.url) as server, pytest.raises(CommandFailed) as failed:
        server.order("POST", "/models")

    assert failed.value.next_step is None


def test_a_failure_of_the_server_is_told_with_the_id_in_its_log(apis: FakeApis) -> None:
    """There its traceback stands."""
    apis.answer("PUT /models/m", {"message": "It broke."}, 500)

    with Management(apis.url) as server, pytest.raises(CommandFailed) as failed:
        server.order("PUT", "/models/m")

    assert "6f1c-42" in str(failed.value.next_step)


def test_the_reason_that_the_server_gives_is_kept(apis: FakeApis) -> None:
    """It is one of the facts for scripts, and the server's log, which says how loading failed, has the rest."""
    apis.headers["x-marserve-reason"] = "SyntaxError: expected ':'"
    apis.answer("POST /models", {"message": "Failed to start workers"}, 500)

    with Management(apis.url) as server, pytest.raises(CommandFailed) as failed:
        server.order("POST", "/models")

    assert failed.value.detail["reason"] == "SyntaxError: expected ':'"
    # `make serve` has no log_location, and writes no files.
    assert "`marserve logs" in str(failed.value.next_step)


def test_a_refusal_without_words_is_told_by_its_status(apis: FakeApis) -> None:
    """A proxy in between answers no JSON."""
    apis.answer("GET /models", b"<html>", 502, "text/html")

    with Management(apis.url) as server, pytest.raises(CommandFailed, match="GET /models got 502"):
        list(server.model_names())


def test_all_pages_of_models_are_read(apis: FakeApis) -> None:
    """A token leads from page to page; a page without one is the last."""
    apis.answer("GET /models", {"nextPageToken": "1", "models": [{"modelName": "a"}]})
    apis.answer("GET /models", {"models": [{"modelName": "b"}]})

    with Management(apis.url) as server:
        assert list(server.model_names()) == ["a", "b"]

    assert [asked.parameters.get("next_page_token") for asked in apis.asked] == [None, "1"]


def test_a_model_that_vanishes_meanwhile_is_left_out(apis: FakeApis) -> None:
    """Between list and describe it may have been unregistered."""
    apis.answer("GET /models", {"models": [{"modelName": "gone"}, {"modelName": "here"}]})
    apis.answer("GET /models/here/all", [description("here")])

    with Management(apis.url) as server:
        assert [version["modelName"] for version in server.describe_all()] == ["here"]


def test_any_other_refusal_to_describe_is_an_error(apis: FakeApis) -> None:
    """An incomplete list is never shown as a complete one."""
    apis.answer("GET /models", {"models": [{"modelName": "m"}]})
    apis.answer("GET /models/m/all", {"message": "broken"}, 500)

    with Management(apis.url) as server, pytest.raises(CommandFailed, match="broken"):
        server.describe_all()


def test_names_are_quoted_in_paths() -> None:
    """A name with a stroke or a question mark stays one segment."""
    assert model_path("a/b?", "1 0") == "/models/a%2Fb%3F/1%200"
    assert model_path("a") == "/models/a"


@pytest.mark.parametrize(
    ("status", "document", "expected"),
    [
        (200, {"status": "ready"}, Probe(True, [])),
        (503, {"reasons": ["loading"]}, Probe(False, ["loading"])),
    ],
)
def test_a_probe_is_the_status_and_its_reasons(
    apis: FakeApis, status: int, document: dict[str, object], expected: Probe
) -> None:
    """200 is well; 503 says why not."""
    apis.answer("GET /readyz", document, status)
    apis.answer("GET /startupz", document, status)

    with Inference(apis.url) as server, Management(apis.url) as back:
        assert server.readiness() == server.startup() == back.readiness() == expected


def test_somebody_without_readiness_is_no_marserve(apis: FakeApis, nobody: str) -> None:
    """TorchServe answers 404 there, and an absent server nothing."""
    with Inference(apis.url) as server:
        assert not server.is_alive()
        with pytest.raises(CommandFailed):
            server.readiness()
    with Inference(nobody) as server:
        assert not server.is_alive()


def test_a_server_on_a_unix_socket_is_reached(tmp_path: Path) -> None:
    """`unix:/path` is an address like the others."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

        thread = threading.Thread(target=answer)
        thread.start()
        with Inference(f"unix:{path}") as server:
            assert server.is_alive()
        thread.join()


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "127.0.0.1"])
def test_a_server_on_every_address_is_called_on_this_machine(
    apis: FakeApis, everywhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a proxy of the environment is not asked for it."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    apis.answer("GET /livez", {})

    with Inference(apis.url.replace("127.0.0.1", everywhere)) as server:
        assert server.is_alive()


@pytest.mark.parametrize(
    ("address", "trust"),
    [("http://127.0.0.1:8081", False), ("http://0.0.0.0:8081", False), ("http://models.test", True)],
)
def test_a_command_to_plain_http_of_this_machine_reads_no_certificates(
    address: str, trust: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a proxy of the environment may be one of https."""
    made: list[object] = []
    monkeypatch.setattr("marserve.cli.remote.httpx.Client", lambda **given: made.append(given["verify"]))

    Management(address)

    assert made == [trust]


def test_a_run_on_the_inference_address_is_pointed_at(
    apis: FakeApis, nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`marserve run` serves all on one port."""
    monkeypatch.chdir(tmp_path)
    Path("config.properties").write_text(f"inference_address={apis.url}\nmanagement_address={nobody}\n")
    apis.answer("GET /models", {"models": []})

    with Management(nobody) as server, pytest.raises(CommandFailed) as failed:
        server.describe("digits")

    assert failed.value.next_step == f"A server answers at {apis.url}: add --management {apis.url} for that one."


def test_a_stop_is_named_with_the_address_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where this folder's settings name it."""
    monkeypatch.chdir(tmp_path)
    Path("config.properties").write_text("management_address=http://127.0.0.1:9081\n")

    assert command_for("stop", "http://127.0.0.1:9081") == "`marserve stop`"
    assert command_for("stop", "http://127.0.0.1:8032") == "`marserve stop --management http://127.0.0.1:8032`"
