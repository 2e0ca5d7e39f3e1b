"""Lines of the logs as records, and which of them are asked for."""

from __future__ import annotations

import json

import pytest

from marserve.telemetry.logs.records import LogName, Record, Wanted, read_line, read_records

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
AT = "2026-01-31T12:00:00,007"
MODEL = f"{AT} [ERROR] W-9000-digits_1.0-stderr MODEL_LOG [r-1,r-2/theirs] - "
SERVER = f"{AT} [WARN ] main marserve.pool [r-3] - W-9000-digits_1.0 ended (raised): no"
ACCESS = f'{AT} - /127.0.0.1:1 "POST /predictions/digits?x=1 HTTP/1.1" 503 12 r-1'

PRINTED_ACCESS = ACCESS.replace(" - ", " [INFO ] access ACCESS_LOG - ", 1)


def read(text: str, log: LogName | None = None) -> list[Record]:
    """The records of a text."""
    return list(read_records(text.split("\n"), log))


def chosen(wanted: Wanted, text: str) -> list[str]:
    """The texts of the wanted records; what bytes are looked for first may leave none of them out."""
    found = [record.text for record in read(text) if wanted.filter()(record)]
    assert not found or not wanted.needles() or any(needle in text.encode() for needle in wanted.needles())
    return found


@pytest.mark.parametrize(
    "line",
    [
        f"{ACCESS} trace_id={TRACE} span_id={'1' * 16}",
        f"{ACCESS} trace_id={TRACE} span_id={'1' * 16} broken_off=client",
        json.dumps({"logger": "ACCESS_LOG", "target": "/x", "status": 200, "request_id": "r", "trace_id": TRACE}),
        json.dumps({"logger": "MODEL_LOG", "message": "x", "trace_id": ["other", TRACE]}),
        json.dumps({"logger": "marserve.api", "message": "x", "trace_id": TRACE}),
    ],
)
def test_lines_are_found_by_the_trace_of_their_request(line: str) -> None:
    """As by its id."""
    assert chosen(Wanted(request=TRACE), line) == [line]
    assert chosen(Wanted(request=TRACE[:-1]), line) == []
    assert read(line)[0].ids in ("r-1", "r", "")


@pytest.mark.parametrize(
    ("line", "log", "level", "ids", "source"),
    [
        (MODEL + "no - such [a] picture", "model", "ERROR", "r-1,r-2/theirs", "digits_1.0"),
        (SERVER, "server", "WARN", "r-3", ""),
        (SERVER.replace(" [r-3]", ""), "server", "WARN", "", ""),
        (ACCESS, "access", "ERROR", "r-1", "/predictions/digits?x=1"),
        (ACCESS + " theirs", "access", "ERROR", "r-1/theirs", "/predictions/digits?x=1"),
        (ACCESS[:-4].replace("503", "200"), "access", "INFO", "", "/predictions/digits?x=1"),
        (ACCESS.replace("503", "200") + " broken_off=client", "access", "INFO", "r-1", "/predictions/digits?x=1"),
        (ACCESS.replace("503", "200") + " broken_off=handler", "access", "ERROR", "r-1", "/predictions/digits?x=1"),
        (
            '{"logger": "ACCESS_LOG", "target": "/x", "status": 200, "request_id": "r", "broken_off": "handler"}',
            "access",
            "ERROR",
            "r",
            "/x",
        ),
        (
            ACCESS.replace(" - ", " [INFO ] access ACCESS_LOG - ", 1),
            "access",
            "ERROR",
            "r-1",
            "/predictions/digits?x=1",
        ),
        ("Model server started.", "server", "INFO", "", ""),
        (
            '{"time": "t", "level": "INFO", "logger": "ACCESS_LOG", "target": "/x", "status": 200, "request_id": "r"}',
            "access",
            "INFO",
            "r",
            "/x",
        ),
        (
            '{"level": "ERROR", "logger": "MODEL_LOG", "model": "m", "version": "1", "request_id": ["a", "b"]}',
            "model",
            "ERROR",
            "a,b",
            "m_1",
        ),
        (
            '{"level": "INFO", "logger": "marserve.app", "request_id": "a", "client_request_id": "c"}',
            "server",
            "INFO",
            "a,c",
            "",
        ),
        ("{broken", "server", "INFO", "", ""),
    ],
)
def test_a_line_of_either_layout_is_read(line: str, log: str, level: str, ids: str, source: str) -> None:
    """Of the file of its log, and of standard output."""
    record = read_line(line, None)

    assert record is not None
    assert (record.log, record.level, record.ids, record.source, record.text) == (log, level, ids, source, line)


@pytest.mark.parametrize("line", ["", f"{AT} [INFO ] metrics TS_METRICS - x", '{"logger": "MODEL_METRICS"}'])
def test_metrics_and_empty_lines_are_no_records(line: str) -> None:
    """They have logs of their own."""
    assert read(line) == []


def test_a_traceback_stays_with_its_line() -> None:
    """Its lines are indented; what continues an unknown record is left out."""
    text = f"    of another\n{SERVER}\n    Traceback\n    ValueError\n{ACCESS}"

    first, second = read(text)

    assert (first.text, first.lines) == (f"{SERVER}\n    Traceback\n    ValueError", 3)
    assert second.log == "access"


def test_lines_that_a_worker_wrote_at_once_are_one_record() -> None:
    """A traceback in the model log has a head before each of its lines."""
    text = f"{MODEL}one\n{MODEL}two\n{MODEL.replace('r-1,', '')}three"

    assert [record.lines for record in read(text)] == [2, 1]


@pytest.mark.parametrize(("level", "count"), [(None, 4), ("debug", 4), ("info", 4), ("warning", 3), ("error", 2)])
def test_a_level_is_the_least_that_is_shown(level: str | None, count: int) -> None:
    """A request that the server failed is an error of the access log."""
    text = "\n".join([MODEL + "x", SERVER, ACCESS, ACCESS.replace("503", "404")])

    assert len(chosen(Wanted(level=level), text)) == count


@pytest.mark.parametrize(
    ("request_id", "count"), [("r-1", 2), ("r-2", 1), ("theirs", 1), ("r-3", 1), ("r", 0), ("r-", 0), ("digits", 0)]
)
def test_a_requests_lines_are_found_by_its_whole_id(request_id: str, count: int) -> None:
    """The server's id and the client's."""
    text = "\n".join([MODEL + "x", SERVER, ACCESS])

    assert len(chosen(Wanted(request=request_id), text)) == count


def test_a_sentence_that_names_a_request_belongs_to_it() -> None:
    """Text lines of `torchserve` have no ids before them."""
    line = f"{AT} [INFO ] W-9000-m_1-stderr MODEL_LOG - Request order.17, order.18: no such picture"

    assert chosen(Wanted(request="order.17"), line) == [line]
    assert chosen(Wanted(request="order.18"), line) == [line]
    assert chosen(Wanted(request="order"), line) == []


@pytest.mark.parametrize(
    ("model", "versions", "count"),
    [
        ("digits", ["1.0"], 3),
        ("digits", [], 3),
        ("digit", [], 0),
        ("igits", [], 0),
        ("9000", [], 0),
    ],
)
def test_a_models_lines_are_those_about_it(model: str, versions: list[str], count: int) -> None:
    """In the model log by its worker, in the access log by the path, in the server log where its name stands."""
    text = "\n".join([MODEL + "x", SERVER, ACCESS])

    assert len(chosen(Wanted(model=model, versions=versions), text)) == count


def test_what_a_model_says_while_it_is_loaded_is_found() -> None:
    """A template loads it, which is no worker with a number; its end is in the server log."""
    printed = f"{AT} [INFO ] W-template-digits_1.0-stdout MODEL_LOG - begun"
    ended = f"{AT} [WARN ] main marserve.pool - W-template-digits_1.0 ended"

    for line in (printed, ended):
        assert chosen(Wanted(model="digits", versions=["1.0"]), line) == [line]
        assert chosen(Wanted(model="template"), line) == []


def test_a_version_with_an_underscore_is_known_from_the_registry() -> None:
    """Else the last underscore ends the model's name."""
    line = f"{AT} [INFO ] W-9000-m_1_0-stdout MODEL_LOG - x"

    assert chosen(Wanted(model="m", versions=["1_0"]), line) == [line]
    assert chosen(Wanted(model="m_1", versions=["0"]), line) == [line]


@pytest.mark.parametrize("model", ["é m", "a%b", 'a"b', "a.b*", "x" * 500])
def test_odd_names_are_found(model: str) -> None:
    """Percent-encoded in targets, escaped in JSON."""
    from json import dumps
    from urllib.parse import quote

    for line in (
        f"{AT} [INFO ] W-9000-{model}_1-stdout MODEL_LOG - x",
        f'{AT} - /p:1 "GET /models/{quote(model, safe="")} HTTP/1.1" 200 1',
        f"{AT} [INFO ] main marserve - Model {model} loaded",
        dumps({"logger": "MODEL_LOG", "model": model, "version": "1"}),
    ):
        assert chosen(Wanted(model=model), line) == [line]


def test_logs_can_be_asked_for_alone() -> None:
    """One, or several."""
    text = "\n".join([MODEL + "x", SERVER, ACCESS])

    assert len(chosen(Wanted(logs=["access"]), text)) == 1
    assert len(chosen(Wanted(logs=["model", "server"]), text)) == 2
