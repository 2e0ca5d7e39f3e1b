"""The three logs: their files and layouts, JSON, and what a hostile line can do."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.telemetry.logs.access_log import Sampling, access_line
from marserve.telemetry.logs.line_ids import about_request, with_traceback
from marserve.telemetry.logs.log_limit import caused_by
from marserve.telemetry.logs.logs import Logs, configure_logs
from marserve.telemetry.logs.worker_lines import WorkerLines

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"


class Console:
    """A pipe in the place of standard output."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()

    def lines(self) -> list[str]:
        """All that was written, once the writer has ended."""
        os.close(self.write_end)
        with open(self.read_end, "rb") as pipe:
            return pipe.read().decode().splitlines()


@contextmanager
def opened(console: Console, folder: Path | None = None, **how: object) -> Iterator[Logs]:
    """Logs that are closed at the end, their threads proven gone and Python's logging given back."""
    before = logging.getLogger().handlers[:]
    logs = configure_logs(folder=folder, stdout=console.write_end, **how)  # type: ignore[arg-type]
    try:
        yield logs
    finally:
        logs.close()
    assert logging.getLogger().handlers == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("log-")]


def test_each_log_has_its_file_and_its_layout(tmp_path: Path) -> None:
    """Lines as TorchServe prints them; standard output has them all in the long form."""
    console = Console()
    with opened(console, tmp_path / "logs") as logs:
        logs.access.write(access_line("127.0.0.1:64003", "POST", "/predictions/noop", "HTTP/1.1", 200, 118))
        logging.getLogger("marserve.registry.models").warning("Loaded %s", "noop")
        logs.workers.write(WorkerLines("noop", "1.0", "9000", "stdout", "INFO", ["hello"]))
        logs.workers.write(WorkerLines("noop", "1.0", "9000", "stderr", "WARNING", ["beware"]))

    access = (tmp_path / "logs" / "access_log.log").read_text()
    server = (tmp_path / "logs" / "ts_log.log").read_text()
    model = (tmp_path / "logs" / "model_log.log").read_text().splitlines()
    assert re.fullmatch(rf'{STAMP} - /127\.0\.0\.1:64003 "POST /predictions/noop HTTP/1\.1" 200 118\n', access)
    assert re.fullmatch(rf"{STAMP} \[WARN \] main marserve\.registry\.models - Loaded noop\n", server)
    assert re.fullmatch(rf"{STAMP} \[INFO \] W-9000-noop_1\.0-stdout MODEL_LOG - hello", model[0])
    assert re.fullmatch(rf"{STAMP} \[WARN \] W-9000-noop_1\.0-stderr MODEL_LOG - beware", model[1])
    printed = console.lines()
    assert len(printed) == 4
    assert all(re.match(rf"{STAMP} \[(INFO |WARN )\] \S+ \S+ - ", line) for line in printed)


@pytest.mark.parametrize(
    ("how", "expected"), [({}, False), ({"has_request_ids": True}, True), ({"format": "json"}, True)]
)
def test_who_writes_access_lines_is_told_whether_they_have_ids(how: dict[str, bool | str], expected: bool) -> None:
    """In TorchServe's layout only where they are asked for; in JSON always."""
    with opened(Console(), **how) as logs:
        assert logs.access.has_ids is expected


def test_an_access_line_in_json_has_its_requests_id() -> None:
    """Where the line ends with one."""
    console = Console()
    with opened(console, format="json") as logs:
        for target in ("/ping", '/x" 200 7 ab'):
            logs.access.write(access_line("127.0.0.1:1", "GET", target, "HTTP/1.1", 200, 3, "0b1c-22"))

    first, second = (json.loads(line) for line in console.lines())
    assert (first["request_id"], first["milliseconds"]) == ("0b1c-22", 3)
    assert (second["request_id"], second["target"]) == ("0b1c-22", "/x%22 200 7 ab")


def test_an_access_line_in_json_has_its_requests_trace() -> None:
    """Behind its ids, whether or not its stream ended well."""
    console = Console()
    with opened(console, format="json") as logs:
        line = access_line("127.0.0.1:1", "GET", "/x", "HTTP/1.1", 200, 3, "r-1 c")
        for end in ("", " broken_off=handler"):
            logs.access.write(f"{line} trace_id={TRACE} span_id={SPAN}{end}")

    for read in map(json.loads, console.lines()):
        assert [read[name] for name in ("request_id", "client_request_id", "trace_id", "span_id")] == [
            *("r-1", "c", TRACE, SPAN)
        ]


def test_a_line_that_was_sampled_says_of_how_many_it_is_one() -> None:
    """So that counts of lines can be scaled; lines that are always there stand for themselves."""
    console = Console()
    with opened(console, format="json", sampling=Sampling(0.01, slow_ms=1000)) as logs:
        for method, status, milliseconds in (
            ("GET", 200, 3),
            ("GET", 404, 3),
            ("GET", 200, 1000),
            ("gRPC", 0, 3),
            ("gRPC", 5, 3),
        ):
            logs.access.write(access_line("::1:1", method, "/x", "HTTP/1.1", status, milliseconds, "r-1"))
        assert logs.access.sampling == Sampling(0.01, 1000)

    samples = [json.loads(line).get("sample") for line in console.lines()]
    assert samples == [0.01, None, None, 0.01, None]


def test_a_stream_that_was_broken_off_says_why_in_json() -> None:
    """With ids and without."""
    console = Console()
    with opened(console, format="json") as logs:
        for ids in ("", "r-1", "r-1 theirs"):
            logs.access.write(access_line("::1:1", "GET", "/x", "HTTP/1.1", 200, 3, f"{ids} broken_off=client".strip()))

    lines = [json.loads(line) for line in console.lines()]
    assert [line["broken_off"] for line in lines] == ["client"] * 3
    assert [line.get("request_id") for line in lines] == [None, "r-1", "r-1"]
    assert lines[2]["client_request_id"] == "theirs"


def test_json_is_one_object_a_line() -> None:
    """Every log's fields, parsed back."""
    console = Console()
    with opened(console, format="json") as logs:
        logs.access.write(access_line("127.0.0.1:1", "GET", "/ping?x=%22", "HTTP/1.1", 200, 3))
        logs.workers.write(WorkerLines("noop", "1.0", "9000", "stdout", "INFO", ["a\nb\x1b[31m"]))
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("marserve.app").exception("It failed")

    access, worker, server = (json.loads(line) for line in console.lines())
    assert access | {"time": ""} == {
        "time": "",
        "level": "INFO",
        "logger": "ACCESS_LOG",
        "peer": "127.0.0.1:1",
        "method": "GET",
        "target": "/ping?x=%22",
        "protocol": "HTTP/1.1",
        "status": 200,
        "milliseconds": 3,
    }
    assert (worker["model"], worker["worker"], worker["message"]) == ("noop", "9000", "a\nb\x1b[31m")
    assert server["message"] == "It failed"
    assert server["exception"].endswith("ValueError: broken")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", server["time"])


@pytest.mark.parametrize("evil", ["a\nb", "a\rb", "\x1b[2Ja", "a\x85b", "a\u2028b", "a\x00b", "\ud800", "a\u202eb"])
def test_no_text_breaks_a_line_or_reaches_the_terminal(evil: str) -> None:
    """Control characters and ANSI codes of clients and handlers are escaped."""
    console = Console()
    with opened(console) as logs:
        logs.access.write(access_line("127.0.0.1:1", "GET", evil, "HTTP/1.1", 200, 3))
        logs.workers.write(WorkerLines(evil, evil, "9000", "stdout", "INFO", [evil]))
        logging.getLogger("marserve").info("%s", evil)

    lines = console.lines()
    assert len(lines) == 3 + evil.count("\n")  # a worker's record of two lines has two
    assert all(line.isprintable() for line in lines)
    assert all(re.match(STAMP, line) for line in lines)


def test_lines_name_the_requests_that_they_belong_to() -> None:
    """Behind the logger, where no text can forge them: of workers, of calls that say it, and of what runs in them."""
    console = Console()
    with opened(console, has_line_ids=True) as logs:
        logs.workers.write(WorkerLines("m", "1", "9000", "stdout", "INFO", ["[forged] a\nb"], "r-1@t@s,r-2/theirs@t@s"))
        logs.workers.write(WorkerLines("m", "1", "9000", "stdout", "INFO", ["c"]))
        logging.getLogger("marserve.api").error("said", extra=caused_by("", "r-3"))
        with about_request("r-4"):
            logging.getLogger("marserve.api").error("inside")
        logging.getLogger("marserve.api").error("outside")

    assert [re.sub(rf"^{STAMP} \[.....\] ", "", line) for line in console.lines()] == [
        "W-9000-m_1-stdout MODEL_LOG [r-1,r-2/theirs] - [forged] a",
        "W-9000-m_1-stdout MODEL_LOG [r-1,r-2/theirs] - b",
        "W-9000-m_1-stdout MODEL_LOG - c",
        "main marserve.api [r-3] - said",
        "main marserve.api [r-4] - inside",
        "main marserve.api - outside",
    ]


def test_text_lines_stay_torchserves_unless_ids_are_asked_for() -> None:
    """Scripts read them."""
    console = Console()
    with opened(console) as logs:
        logs.workers.write(WorkerLines("m", "1", "9000", "stdout", "INFO", ["a"], "r-1"))
        logging.getLogger("marserve.api").error("said", extra=caused_by("", "r-3"))

    assert [line.split("] ", 1)[1] for line in console.lines()] == [
        "W-9000-m_1-stdout MODEL_LOG - a",
        "main marserve.api - said",
    ]


@pytest.mark.parametrize(
    ("ids", "members"),
    [
        ("", {}),
        ("a", {"request_id": "a"}),
        ("a/c", {"request_id": "a", "client_request_id": "c"}),
        ("a,b", {"request_id": ["a", "b"]}),
        (f"a/c@{TRACE}@{SPAN}", {"request_id": "a", "client_request_id": "c", "trace_id": TRACE, "span_id": SPAN}),
        (
            f"a@{TRACE}@{SPAN},b@{TRACE[::-1]}@{SPAN}",
            {"request_id": ["a", "b"], "trace_id": [TRACE, TRACE[::-1]], "span_id": [SPAN, SPAN]},
        ),
        ("a@@@,b", {"request_id": ["a", "b"]}),
        ("a,b/c,+7", {"request_id": ["a", "b"], "client_request_id": ["", "c"], "more_requests": 7}),
    ],
)
def test_json_has_the_requests_of_a_line_as_members(ids: str, members: dict[str, object]) -> None:
    """One id is a text, several are a list."""
    console = Console()
    with opened(console, format="json") as logs:
        logs.workers.write(WorkerLines("m", "1", "9000", "stdout", "INFO", ["a"], ids))
        logging.getLogger("marserve.api").error("said", extra=caused_by("", ids))

    for line in console.lines():
        read = json.loads(line)
        assert {name: read[name] for name in read if "request" in name or name in ("trace_id", "span_id")} == members


def test_json_has_one_object_for_a_traceback() -> None:
    """Of a logged record, of one that was printed alone, and of a worker that ended."""
    console = Console()
    traceback = 'Traceback (most recent call last):\n  File "h.py", line 1\nValueError: no'
    with opened(console, format="json") as logs:
        logs.workers.write(WorkerLines("m", "1", "9000", "stderr", "ERROR", [f"It failed\n{traceback}", traceback]))
        logging.getLogger("marserve.pool").warning("W-9000 ended", extra=with_traceback(traceback, "r"))

    objects = [json.loads(line) for line in console.lines()]
    assert [(each["message"], each["exception"]) for each in objects] == [
        ("It failed", traceback),
        ("ValueError: no", traceback),
        ("W-9000 ended", traceback),
    ]
    assert objects[2]["request_id"] == "r"


def test_a_traceback_cannot_forge_a_line() -> None:
    """Only real records begin at the left margin."""
    console = Console()
    with opened(console):
        try:
            raise ValueError("2026-01-01T00:00:00,000 [INFO ] main forged - x\n2026-01-01T00:00:00,000 forged")
        except ValueError:
            logging.getLogger("marserve").exception("It failed")

    first, *rest = console.lines()
    assert first.endswith("marserve - It failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)


def test_levels_under_the_least_are_left_out() -> None:
    """`log_level` is about the server log."""
    console = Console()
    with opened(console, level="error") as logs:
        logging.getLogger("marserve").warning("not this")
        logging.getLogger("marserve").error("this")
        logs.workers.write(WorkerLines("m", "1", "9000", "stdout", "DEBUG", ["and this"]))

    assert [line.split(" - ")[1] for line in console.lines()] == ["this", "and this"]


@pytest.mark.parametrize("name", ["hpack.hpack", "httpx", "botocore.auth", "urllib3.connectionpool"])
def test_libraries_that_log_what_they_carry_do_not_at_any_level(name: str) -> None:
    """At DEBUG one of them logs each header of a call over gRPC, keys among them."""
    console = Console()
    before = logging.getLogger(name).isEnabledFor(logging.INFO)
    with opened(console, level="debug") as logs:
        logging.getLogger(name).debug("Decoded (b'authorization', b'Bearer key')")
        logs.set_level("debug")
        logging.getLogger(name).info("HTTP Request: GET https://bucket/key?X-Amz-Signature=0")
        logging.getLogger(name).warning("this")

    assert [line.split(" - ")[1] for line in console.lines()] == ["The server log has the level debug now", "this"]
    assert logging.getLogger(name).isEnabledFor(logging.INFO) == before


def test_arguments_that_do_not_fit_are_logged_all_the_same() -> None:
    """A mistake in a log call must neither raise nor be lost."""
    console = Console()
    with opened(console):
        logging.getLogger("marserve").info("%d items", "many")

    (line,) = console.lines()
    assert "'%d items' with arguments that do not fit it" in line


@pytest.mark.parametrize(
    ("name", "extra"), [("marserve.api", caused_by("10.0.0.1:4711")), ("asyncio", None), ("uvicorn.error", None)]
)
def test_what_clients_cause_is_limited(name: str, extra: dict[str, str] | None, tmp_path: Path) -> None:
    """The first records are written, the others counted; an attack of megabytes costs kilobytes."""
    with opened(Console(), tmp_path) as logs:
        for number in range(2000):
            try:
                raise ValueError("x" * 1000)
            except ValueError:
                logging.getLogger(name).error("Request %d failed", number, exc_info=True, extra=extra)
        logs.tell_left_out(time.monotonic())
        assert "left out" not in (tmp_path / "ts_log.log").read_text()

    text = (tmp_path / "ts_log.log").read_text()
    shown = text.count("Traceback")
    assert len(text) < 100_000
    assert "Request 0 failed" in text
    assert f"{2000 - shown} more records like 'Request %d failed' were left out" in text
    assert ("caused by 10.0.0.1" in text) is (extra is not None)


def test_a_long_record_that_a_client_causes_is_cut(tmp_path: Path) -> None:
    """A handler's message may have a megabyte, and so may an exception: each costs a few kilobytes of the log."""
    with opened(Console(), tmp_path):
        try:
            raise ValueError("x" * 1_000_000)
        except ValueError:
            logging.getLogger("marserve.api").exception("It failed: %s", "y" * 1_000_000, extra=caused_by(""))

    text = (tmp_path / "ts_log.log").read_text()
    assert len(text) < 20_000
    assert text.count("characters are left out") == 2
    assert "It failed: yyy" in text
    assert "ValueError: xxx" in text


def test_what_the_server_says_of_itself_is_not_limited(tmp_path: Path) -> None:
    """A start with a thousand models has a line for each."""
    with opened(Console(), tmp_path):
        for number in range(5000):
            logging.getLogger("marserve.registry").info("Model %d is loaded", number)

    assert (tmp_path / "ts_log.log").read_text().count("is loaded") == 5000


def test_an_announcement_is_a_line_of_its_own() -> None:
    """Start scripts look for exactly this line."""
    console = Console()
    with opened(console) as logs:
        logs.announce("Model server started.")

    assert console.lines() == ["Model server started."]


def test_a_very_long_line_is_cut() -> None:
    """A handler that prints megabytes does not fill the buffer with them."""
    console = Console()
    with opened(console) as logs:
        logs.workers.write(WorkerLines("m", "1", "9000", "stdout", "INFO", ["x" * 100_000]))

    (line,) = console.lines()
    assert len(line) < 9000
    assert line.endswith("(91808 more characters)")


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """The server does not start with logs that go nowhere."""
    (tmp_path / "file").write_text("")

    with pytest.raises(BadSettings, match=r"log_location is .*file/logs.* LOG_LOCATION"):
        configure_logs(folder=tmp_path / "file" / "logs", to_stdout=False)


def test_a_log_that_cannot_be_written_is_told_by_the_others(tmp_path: Path) -> None:
    """`/dev/full` is a disk without room; standard output says which log, why, and what becomes of its lines."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "model_log.log").symlink_to("/dev/full")
    console = Console()
    with opened(console, tmp_path) as logs:
        logs.workers.write(WorkerLines("m", "1.0", "9000", "stdout", "INFO", ["hello"]))
        said = b""
        while b"lost" not in said:
            said += os.read(console.read_end, 1 << 16)
    os.close(console.write_end)
    os.close(console.read_end)

    assert b"model_log.log cannot be written (No space left on device): its lines are lost until it can" in said


def test_lost_lines_are_counted_by_outlet(tmp_path: Path) -> None:
    """Metrics read these counts."""
    console = Console()
    with opened(console, tmp_path) as logs:
        logs.workers.budget.allowance().leave_out(3, 30)
        assert logs.dropped() == {
            "workers": 3,
            "access_log.log": 0,
            "ts_log.log": 0,
            "model_log.log": 0,
            "stdout": 0,
        }
    os.close(console.write_end)
    os.close(console.read_end)


@pytest.mark.parametrize("format", ["text", "json"])
def test_lines_of_one_outlet_come_in_the_order_in_which_they_were_written(format: str) -> None:
    """Lines of the access log are made otherwise than others, and many at once; none overtakes another."""
    console = Console()
    expected = []
    with opened(console, format=format) as logs:
        for number in range(300):  # as many as the pipe holds
            logs.access.write(access_line("127.0.0.1:1", "GET", f"/{number}", "HTTP/1.1", 200, 3))
            expected.append(f"/{number}")
            if number % 30 == 7:
                logging.getLogger("marserve").info("/between")
                expected.append("/between")

    assert re.findall(r"/(?:between|\d+(?=[ \"]))", "\n".join(console.lines()).replace("/1.1", "")) == expected


def test_a_line_of_the_access_log_has_the_time_at_which_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the millisecond, also when the clock is set back; in the file and on standard output alike."""
    console = Console()
    times_s = [10.0001, 10.0004, 10.0011, 10.9999, 11.0, 10.0011]
    with opened(console, tmp_path) as logs:
        for at_s in times_s:
            monkeypatch.setattr("marserve.telemetry.logs.access_log.time.time", lambda at_s=at_s: at_s)
            logs.access.write(f"/ {at_s}")
        monkeypatch.undo()

    printed = console.lines()
    filed = (tmp_path / "access_log.log").read_text().splitlines()
    assert [line.split(" ")[0][-6:] for line in printed] == ["10,000", "10,000", "10,001", "10,999", "11,000", "10,001"]
    assert [line.replace(" [INFO ] access ACCESS_LOG", "") for line in printed] == filed
    assert [line.split(" - ")[1] for line in filed] == [f"/ {at_s}" for at_s in times_s]
