"""The course of a call, step by step, with a clock and a chance that the test holds: nothing is sent."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import httpx
import pytest

from marserve_client import inference
from marserve_client.calls import MOST_KNOWN_URLS, Call, Pause, Reply, Sent, Session, Try, path_of
from marserve_client.errors import BadAnswer, BadInput, ConnectionLost, DeadlinePassed, NoConnection, Overloaded
from marserve_client.retries import Retries


class Course:
    """A call's steps: what they want, and what they are told. `now` is the clock."""

    def __init__(self, **arguments: Any) -> None:
        self.now = 0.0
        self.sent: list[Sent] = []
        self.session = Session(
            **{
                "addresses": {"inference": "http://host"},
                "key": lambda api: None,
                "retries": Retries(),
                "timeout_s": 10.0,
                "connect_timeout_s": 5.0,
                "after": (lambda sending, sent: self.sent.append(sent),),
                "clock": lambda: self.now,
                "chance": lambda: 0.0,
                **arguments,
            }
        )

    def begin(self, what: Any) -> tuple[Generator[Any, Any, Any], Any]:
        """The steps, and the first action."""
        steps = what.steps(self.session)
        return steps, next(steps)


def reply(status: int = 200, document: Any = None, **headers: str) -> Reply:
    """An answer."""
    found = httpx.Headers({name.replace("_", "-"): value for name, value in headers.items()})
    return Reply(status, found, json.dumps(document or {}).encode())


def result_of(steps: Generator[Any, Any, Any], outcome: Any) -> Any:
    """The end of the steps, once they are told this."""
    with pytest.raises(StopIteration) as done:
        steps.send(outcome)
    return done.value.value


def test_a_refusal_is_waited_for_and_tried_again_with_the_time_that_is_left() -> None:
    """A try, a pause of the server's length, a try that knows what is left; hooks hear of both."""
    course = Course()
    steps, first = course.begin(inference.predict("m", b"x"))
    assert isinstance(first, Try)
    assert first.sending.headers["x-marserve-timeout-ms"] == "10000"

    course.now = 1
    assert steps.send(reply(503, retry_after="3")) == Pause(3)
    course.now = 4.5
    second = steps.send(None)
    course.now = 5

    assert second.sending.headers["x-marserve-timeout-ms"] == "5500"
    assert (second.sending.number, second.timeout.connect, second.timeout.read) == (2, 5, 5.75)
    assert result_of(steps, reply(200)).status == 200
    assert [(sent.status, sent.seconds) for sent in course.sent] == [(None, 1), (None, 0.5)]
    assert isinstance(course.sent[0].error, Overloaded)


def test_a_broken_connection_ends_what_may_have_run() -> None:
    """And is tried again where nothing was sent."""
    course = Course()
    steps, _ = course.begin(inference.predict("m", b"x"))
    assert steps.throw(httpx.ConnectError("refused")) == Pause(0.1)
    steps.send(None)
    with pytest.raises(ConnectionLost) as lost:
        steps.throw(httpx.ReadError("reset"))

    assert isinstance(lost.value.__cause__, httpx.ReadError)


def test_a_try_that_ends_with_the_calls_time_is_too_late() -> None:
    """Whatever of it took the time."""
    for error in (httpx.ConnectTimeout("t"), httpx.ReadTimeout("t"), httpx.WriteTimeout("t"), httpx.PoolTimeout("t")):
        course = Course()
        steps, _ = course.begin(inference.predict("m", b"x"))
        course.now = 10
        with pytest.raises(DeadlinePassed):
            steps.throw(error)
    course = Course()
    steps, _ = course.begin(inference.predict("m", b"x", timeout=None))
    course.now = 1000
    assert steps.throw(httpx.ConnectTimeout("t")) == Pause(0.1)


def test_an_answer_that_cannot_be_read_is_final() -> None:
    """The model ran."""
    steps, _ = Course().begin(inference.metadata("m"))

    with pytest.raises(BadAnswer):
        steps.send(Reply(200, httpx.Headers(), b"<html>"))


def test_a_course_that_is_given_up_is_told_to_the_hooks() -> None:
    """As when its task is cancelled."""
    course = Course()
    steps, _ = course.begin(inference.predict("m"))

    steps.close()

    assert [(sent.status, sent.error) for sent in course.sent] == [(None, None)]


def test_waiting_ends_with_what_the_last_look_saw() -> None:
    """Also where the last one had no time left to see anything."""
    course = Course()
    steps, _ = course.begin(inference.wait_until_ready(timeout=1))
    reasons = {"status": "not ready", "reasons": ["m has no worker"]}
    assert steps.send(reply(503, reasons)) == Pause(0.05)
    steps.send(None)

    course.now = 1.3
    with pytest.raises(DeadlinePassed, match=r"^The server was not ready after 1 s: m has no worker\.$"):
        steps.throw(httpx.ReadTimeout("t"))


def test_a_server_that_never_came_is_named_by_the_wait() -> None:
    """One look a pause, without retries of its own; the pauses grow to a second."""
    course = Course()
    steps, _ = course.begin(inference.wait_until_ready("m", timeout=4))
    pauses = []
    for _ in range(7):
        action = steps.throw(httpx.ConnectError("refused"))
        pauses.append(action.seconds)
        course.now += action.seconds
        steps.send(None)
    with pytest.raises(DeadlinePassed, match="Model m was not ready after 4 s: No server answers at") as late:
        steps.throw(httpx.ConnectError("refused"))

    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert isinstance(late.value.__cause__, NoConnection)


def test_addresses_are_read_once_and_not_kept_without_bound() -> None:
    """A program that asks ever new versions fills no memory."""
    course = Course()
    for number in range(MOST_KNOWN_URLS + 10):
        course.begin(Call("GET", f"/models/{number}", lambda each: each))

    assert len(course.session.urls) <= MOST_KNOWN_URLS


def test_names_become_one_path() -> None:
    """Escaped, and never another path."""
    assert path_of("models", "a/b", "\u00fc ?") == "/models/a%2Fb/%C3%BC%20%3F"
    for wrong in ("", ".", "..", "\ud800"):
        with pytest.raises(BadInput, match=r"^name: "):
            path_of("models", wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorization", "Bearer secret\n"),
        ("x-note", "secret\r\nx-other: 1"),
        ("x-note", "secret\0"),
        ("x-note", "secr\xe9t"),
        ("x-note", " secret"),
        ("x note", "secret"),
        ("", "secret"),
        ("content-length", "3"),
        ("Transfer-Encoding", "chunked"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(name: str, value: str) -> None:
    """It may be a key. httpx would say that the connection broke, with the value, or raise errors of its own."""
    with pytest.raises(BadInput, match=r"^headers: ") as error:
        Course().begin(inference.predict("m", b"x", headers={name: value}))

    assert "secr" not in str(error.value)


def test_a_key_with_a_line_end_is_refused_before_it_is_sent() -> None:
    """As of a file that was read whole."""
    with pytest.raises(BadInput, match=r"the value of authorization cannot be sent") as error:
        Course(key=lambda api: "secret\n").begin(inference.predict("m", b"x"))

    assert "secret" not in str(error.value)


def test_what_a_hook_writes_is_checked_too() -> None:
    """Hooks come last."""

    def write(sending: Any) -> None:
        sending.headers["x-note"] = "a\nb"

    with pytest.raises(BadInput, match=r"the value of x-note"):
        Course(before=(write,)).begin(inference.predict("m", b"x"))


def test_usual_headers_are_sent() -> None:
    """Spaces and tabs within a value, an empty one, and all marks of a name."""
    headers = {"x-a": "one two\tthree", "x_b.c~": "", "accept": "text/plain; q=0.5, */*"}

    _, first = Course().begin(inference.predict("m", b"x", headers=headers))

    assert headers.items() <= first.sending.headers.items()


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 2.0**31])
def test_a_time_beyond_every_clock_is_no_bound(timeout: float) -> None:
    """Neither the header nor a socket could say it."""
    _, first = Course().begin(inference.predict("m", b"x", timeout=timeout))

    assert "x-marserve-timeout-ms" not in first.sending.headers
    assert first.timeout.read is None


def test_an_address_that_is_too_long_is_refused() -> None:
    """By the client's own class of errors."""
    with pytest.raises(BadInput, match=r"cannot be sent \(URL too long"):
        Course().begin(inference.predict("m" * 70_000, b"x"))
