"""What a handler sees of its requests, and how its responses reach the worker's loop."""

from __future__ import annotations

from typing import Any

import pytest

from marserve_handlers.context import Context, RequestProcessor, send_intermediate_predict_response
from marserve_handlers.errors import BadResponse, PredictionException
from support.model_context import FakeItem, make_context


def test_system_properties_are_those_of_the_contract() -> None:
    """A context built by hand has the six system properties, the server's name among them."""
    context = Context("mnist", "model_dir", {"model": {}}, 8, 1, "0.12.0")

    assert context.system_properties == {
        "model_dir": "model_dir",
        "gpu_id": 1,
        "batch_size": 8,
        "server_name": "MMS",
        "server_version": "0.12.0",
        "limit_max_image_pixels": True,
    }
    assert context.model_name == "mnist"
    assert context.metrics is None
    assert context.model_yaml_config is None
    assert context.request_ids is None
    assert context.get_request_id() is None


def test_a_context_built_by_hand_stands_for_one_request_without_headers() -> None:
    """Unit tests of handlers may ask for headers before any batch began."""
    context = Context("mnist", "model_dir", None, 1, None, "0")

    assert context.get_request_header(0, "explain") is None
    assert context.get_all_request_header(0) == {}
    assert len(context.request_processor) == 1


def test_request_processors_can_be_put_in_by_hand() -> None:
    """Tests set `request_processor`, and what they ask of the context comes from there."""
    context = Context("mnist", "model_dir", None, 1, None, "0")

    context.request_processor = [RequestProcessor({"a": "1"}), RequestProcessor({"a": "2"})]

    assert [context.get_request_header(i, "a") for i in range(2)] == ["1", "2"]


def test_the_last_header_of_a_name_wins_and_case_is_kept() -> None:
    """Headers are a case-sensitive dict of what the client sent."""
    context = make_context()
    context.begin_batch([FakeItem(headers=[(b"X-My", b"one"), (b"X-My", b"two"), (b"x-my", b"\xe9")])])

    assert context.get_all_request_header(0) == {"X-My": "two", "x-my": "é"}
    assert context.get_request_header(0, "X-MY") is None


def test_a_client_cannot_speak_for_the_server() -> None:
    """Client headers explain, describe and url_path are dropped in any case; the server's own are there."""
    client = [(b"Describe", b"True"), (b"EXPLAIN", b"True"), (b"url_path", b"/x"), (b"explain", b"True")]
    context = make_context()
    context.begin_batch([FakeItem(headers=client, server_headers=[("url_path", "v1/models")])])

    assert context.get_all_request_header(0) == {"url_path": "v1/models"}


def test_a_parameter_gives_its_content_type_unless_a_header_has_its_name() -> None:
    """Each parameter stands under its name with its content type; a real header and the server's win over it."""
    parts: list[tuple[str, str | None]] = [("data", "image/png"), ("size", None), ("Host", "text/plain"), ("a", "x")]
    item = FakeItem(headers=[(b"Host", b"h")], server_headers=[("a", "server")], parts=parts)
    context = make_context()
    context.begin_batch([item])

    assert context.get_all_request_header(0) == {
        "data": {"content-type": "image/png"},
        "size": {"content-type": ""},
        "Host": "h",
        "a": "server",
    }


def test_headers_are_not_read_before_somebody_asks() -> None:
    """An untouched batch never looks at headers, which is what makes contexts cheap."""

    class Item(FakeItem):
        @property
        def headers(self) -> Any:  # type: ignore[override]
            raise AssertionError("headers were read")

        @headers.setter
        def headers(self, value: Any) -> None:
            pass

    context = make_context()
    context.begin_batch([Item()])

    assert context.get_request_id(0) == "id-0"
    assert context.response_of(0) is None
    context.set_response_header(0, "a", "b")
    assert context.response_of(0) == (200, "", [("a", "b")])


def test_request_ids_are_those_of_the_batch() -> None:
    """`request_ids` maps index to id, for the context and for its metrics."""
    context = make_context()
    context.begin_batch([FakeItem("a"), FakeItem("b")])

    assert context.request_ids == {0: "a", 1: "b"}
    assert context.get_request_id(1) == "b"
    assert context.get_request_id(2) is None
    assert context.metrics.request_ids == {0: "a", 1: "b"}


def test_an_untouched_response_is_none() -> None:
    """The loop learns without building anything that a response is plain."""
    context = make_context()
    context.begin_batch([FakeItem("a"), FakeItem("b")])
    context.set_response_status(404, "not here", idx=1)

    assert context.response_of(0) is None
    assert context.response_of(1) == (404, "not here", [])


def test_reading_headers_leaves_a_response_untouched() -> None:
    """Only what a handler sets counts."""
    context = make_context()
    context.begin_batch([FakeItem("a")])
    context.get_request_header(0, "x")
    context.get_response_headers(0)

    assert context.response_of(0) is None


def test_status_headers_and_content_type_are_collected() -> None:
    """The content type is the header `content-type`; `get_response_headers` gives the dict itself."""
    context = make_context()
    context.begin_batch([FakeItem()])
    context.set_response_status(201, "Made")
    context.set_response_content_type(0, "text/css")
    context.set_response_header(0, "X-A", "1")
    context.get_response_headers(0)["X-B"] = "2"

    assert context.get_response_status(0) == (201, "Made")
    assert context.get_response_content_type(0) == "text/css"
    assert context.response_of(0) == (201, "Made", [("content-type", "text/css"), ("X-A", "1"), ("X-B", "2")])


def test_all_statuses_can_be_set_at_once() -> None:
    """`set_all_response_status` reaches every request of the batch."""
    context = make_context()
    context.begin_batch([FakeItem("a"), FakeItem("b"), FakeItem("c")])
    context.set_all_response_status(418, "teapot")

    assert [context.response_of(i) for i in range(3)] == [(418, "teapot", [])] * 3


def test_the_next_batch_starts_afresh() -> None:
    """Nothing of a batch's responses reaches the next one."""
    context = make_context()
    context.begin_batch([FakeItem("a", headers=[(b"h", b"1")])])
    context.set_response_status(500, "x")
    context.get_request_header(0, "h")
    context.stopping_criteria = [lambda _: True]

    context.begin_batch([FakeItem("b")])

    assert context.response_of(0) is None
    assert context.get_request_header(0, "h") is None
    assert context.stopping_criteria is None


@pytest.mark.parametrize("status", ["404", None, 99, 1000, 3.5])
def test_a_status_that_is_no_status_fails_its_item(status: Any) -> None:
    """What no status line can carry is refused by name, when the loop collects it."""
    context = make_context()
    context.begin_batch([FakeItem()])
    context.set_response_status(status)

    with pytest.raises(BadResponse, match="100 to 999"):
        context.response_of(0)


@pytest.mark.parametrize(("count", "length"), [(1, 65_536), (64, 1025), (7000, 2)])
def test_too_many_bytes_of_headers_fail_their_item(count: int, length: int) -> None:
    """64 KiB in all; the message says how many there are, and not what they say."""
    context = make_context()
    context.begin_batch([FakeItem()])
    for number in range(count):
        context.set_response_header(0, str(number), "v" * (length - 8))
    context.response_of(0)
    for number in range(count):
        context.set_response_header(0, str(number), "v" * length)

    with pytest.raises(BadResponse, match=r"response headers of \d+ bytes; they may have 65536 in all") as caught:
        context.response_of(0)

    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(("name", "value"), [("a", 1), (1, "a"), ("a", b"b"), ("a", None)])
def test_a_header_that_is_no_text_fails_its_item(name: Any, value: Any) -> None:
    """Names and values must be text."""
    context = make_context()
    context.begin_batch([FakeItem()])
    context.set_response_header(0, name, value)

    with pytest.raises(BadResponse, match="must be text"):
        context.response_of(0)


def test_an_index_outside_the_batch_is_an_index_error() -> None:
    """As with the list that TorchServe keeps."""
    context = make_context()
    context.begin_batch([FakeItem()])

    with pytest.raises(IndexError):
        context.set_response_status(404, "", 1)


def test_a_request_processor_has_its_members() -> None:
    """The members that handlers use on a processor of their own."""
    processor = RequestProcessor({"a": "b"})
    assert processor.get_response_status_code() == 200
    assert processor.get_response_status_phrase() is None

    processor.report_status(503, "busy")
    processor.add_response_property("x", "y")

    assert processor.get_request_property("a") == "b"
    assert processor.get_request_properties() == {"a": "b"}
    assert processor.get_response_status_code() == 503
    assert processor.get_response_status_phrase() == "busy"
    assert processor.get_response_headers() == {"x": "y"}
    assert processor.get_response_header("x") == "y"
    assert processor.get_response_header("z") is None


def test_the_sequence_id_is_the_header_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Header names for sequences come from the environment, with TorchServe's as defaults."""
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_ID", "seq")
    context = make_context()
    context.begin_batch([FakeItem(server_headers=[("seq", "s1")]), FakeItem()])

    assert context.get_sequence_id(0) == "s1"
    assert context.get_sequence_id(1) is None
    assert context.header_key_sequence_start == "ts_request_sequence_start"
    assert context.header_key_sequence_end == "ts_request_sequence_end"


def test_deadline_and_cancel_are_asked_of_the_loop() -> None:
    """A handler can see when nobody waits any more."""
    context = make_context()
    assert context.deadline() is None
    assert context.is_cancelled() is False
    context.ask_cancelled = lambda idx: idx == 1
    context.begin_batch([FakeItem(deadline=12.5), FakeItem()])

    assert context.deadline() == 12.5
    assert context.deadline(1) is None
    assert [context.is_cancelled(i) for i in range(2)] == [False, True]


def test_pieces_are_sent_and_marked() -> None:
    """An intermediate answer carries `ts_stream_next: true`; the loop flips it for the last one."""
    sent: list[tuple[list[Any], Any]] = []
    context = make_context()
    context.send_pieces = lambda pieces: sent.append((pieces, context.response_of(0)))
    context.begin_batch([FakeItem("a"), FakeItem("b")])

    send_intermediate_predict_response(["x", "y"], context.request_ids, "Intermediate", 200, context)

    assert sent == [(["x", "y"], (200, "", [("ts_stream_next", "true")]))]
    assert context.is_streaming
    assert context.end_stream() is True
    assert context.response_of(1) == (200, "", [("ts_stream_next", "false")])
    assert context.end_stream() is False


def test_a_batch_without_pieces_is_no_stream() -> None:
    """Without an intermediate call no header appears."""
    context = make_context()
    context.begin_batch([FakeItem()])

    assert context.end_stream() is False
    assert context.response_of(0) is None


def test_a_piece_with_an_error_code_ends_the_batch() -> None:
    """A code other than 200 is an error of the author's choosing."""
    context = make_context()
    context.send_pieces = lambda pieces: None

    with pytest.raises(PredictionException, match="no more"):
        send_intermediate_predict_response(["x"], None, "no more", 500, context)


def test_outside_a_worker_streaming_says_so() -> None:
    """Nobody would receive the piece; silence would hide that."""
    with pytest.raises(RuntimeError, match="send_pieces"):
        send_intermediate_predict_response(["x"], None, "Intermediate", 200, make_context())


def test_contexts_made_alike_are_equal() -> None:
    """Equality compares all attributes, those of the handler's own included."""
    one, other = make_context(), make_context()
    one.metrics = other.metrics = None
    assert one == other

    other.cache = {"a": 1}  # type: ignore[attr-defined]
    assert one != other
    assert one != "context"


def test_a_handler_finds_the_headers_of_a_trace() -> None:
    """In any case; lists in several lines are one, and of the traceparents the server's counts, which is the last."""
    context = make_context()
    assert (context.traceparent(), context.trace_headers()) == (None, {})
    lines = [(b"Traceparent", b"the client's"), (b"TraceState", b"a=1"), (b"tracestate", b"b=2"), (b"baggage", b"k=v")]
    context.begin_batch([FakeItem(), FakeItem(headers=[*lines, (b"x", b"y"), (b"traceparent", b"the server's")])])

    assert context.traceparent(0) is None
    assert context.traceparent(1) == "the server's"
    assert context.trace_headers(1) == {"traceparent": "the server's", "tracestate": "a=1,b=2", "baggage": "k=v"}


@pytest.mark.parametrize("value", [b"k=\xe4", b"k=\x7f", b"k=\x1b[31m"])
def test_trace_headers_have_nothing_that_a_client_cannot_send(value: bytes) -> None:
    """Otherwise a caller decides that the handler's own calls fail."""
    context = make_context()
    context.begin_batch([FakeItem(headers=[(b"baggage", value), (b"tracestate", b"a=1")])])

    assert context.trace_headers() == {"tracestate": "a=1"}


def test_outside_a_worker_there_is_no_archive_to_load_a_model_from() -> None:
    """It says what to set in a test; inside one it is what the worker gave."""
    context = Context("m", "/nowhere", None, 1, None, "0")
    with pytest.raises(RuntimeError, match=r"set context\.open_model to a function in its place"):
        context.load_model()

    context.open_model = lambda given: (given.model_name, "model")

    assert context.load_model() == ("m", "model")
