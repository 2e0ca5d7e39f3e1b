"""What clients cause in the server log: how much of it is written, and that the rest is counted."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

import marserve
from marserve.telemetry.logs.log_limit import (
    CLIENT_BURST_BYTES,
    CLIENT_BYTES_PER_S,
    HEAD_BYTES,
    KIND_BURST_BYTES,
    KIND_BYTES_PER_S,
    MAX_CLIENTS,
    TELL_EVERY_S,
    LogLimit,
    caused_by,
)


def written(limit: LogLimit, client: str, now: float, *, kind: str = "k", size: int = 412, tries: int = 1000) -> int:
    """How many of `tries` records are written."""
    return sum(limit.admit(kind, "It failed", client, size, now) for _ in range(tries))


def test_a_client_has_a_burst_and_then_a_rate() -> None:
    """The first failures are there to be read."""
    limit = LogLimit()
    cost = HEAD_BYTES + 412

    assert written(limit, "a", 0.0) == CLIENT_BURST_BYTES // cost
    later = sum(written(limit, "a", float(second), tries=50) for second in range(1, 1001))
    assert 50 * cost > CLIENT_BYTES_PER_S
    assert later == pytest.approx(1000 * CLIENT_BYTES_PER_S / cost, rel=0.01)


def test_other_clients_and_other_kinds_are_still_written() -> None:
    """One client's noise hides nothing of another's, and a failure of one kind hides no other kind."""
    limit = LogLimit()
    written(limit, "a", 0.0)

    assert limit.admit("k", "It failed", "b", 412, 0.0)
    assert limit.admit("other", "It failed", "a", 412, 0.0)


def test_all_clients_together_have_a_bound() -> None:
    """Addresses cost an attacker little."""
    limit = LogLimit()

    at_once = sum(written(limit, str(number), 0.0, tries=5) for number in range(10_000))
    later = sum(
        written(limit, f"{number} later", float(second), tries=50)
        for second in range(1, 11)
        for number in range(second * 30)
    )

    assert at_once == KIND_BURST_BYTES // (HEAD_BYTES + 412)
    assert later <= 10 * KIND_BYTES_PER_S // (HEAD_BYTES + 412) + 1
    assert len(limit._clients) <= MAX_CLIENTS


def test_a_client_that_goes_on_is_not_forgotten_for_new_ones() -> None:
    """Or it would have a new burst each time that a thousand addresses were seen."""
    limit = LogLimit()
    written(limit, "a", 0.0)

    again = 0
    for number in range(3 * MAX_CLIENTS):
        limit.admit("other", "It failed", str(number), 412, 0.0)
        again += limit.admit("k", "It failed", "a", 412, 0.0)

    assert again == 0


def test_a_kind_without_a_client_has_the_bound_of_all() -> None:
    """Libraries do not say which client it was."""
    assert written(LogLimit(), "", 0.0) == KIND_BURST_BYTES // (HEAD_BYTES + 412)


def test_a_record_that_is_larger_than_the_burst_is_written_once() -> None:
    """A very long traceback is not left out for good."""
    limit = LogLimit()

    assert written(limit, "a", 0.0, size=1_000_000) == 1
    assert written(limit, "a", 1.0 + CLIENT_BURST_BYTES / CLIENT_BYTES_PER_S, size=1_000_000) == 1


def test_what_is_left_out_is_reported_once_and_not_too_often() -> None:
    """How many records, of which kind, and the last client."""
    limit = LogLimit()
    left_out = 1000 - written(limit, "10.0.0.1", 5.0)

    assert limit.sentences(5.0 + TELL_EVERY_S - 0.1) == []
    assert limit.sentences(5.0 + TELL_EVERY_S) == [
        f"{left_out} more records like 'It failed' were left out; the last was caused by 10.0.0.1"
    ]
    assert limit.sentences(1000.0) == []
    written(limit, "", 2000.0, kind="other", size=KIND_BURST_BYTES, tries=9)
    assert limit.sentences(math.inf) == ["1 more records like 'It failed' were left out"]


def test_where_clients_are_served_each_log_call_names_its_cause() -> None:
    """A call without `extra=caused_by(…)` is not limited. `Remarks` has a bound of its own."""
    root = Path(marserve.__file__).parent
    unlimited = [
        f"{path.relative_to(root)}: {ast.unparse(call.args[0])}"
        for path in [*(root / "api").rglob("*.py"), root / "workflows" / "engine.py"]
        if "log." in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("info", "warning", "error", "exception")
        and ast.unparse(call.func.value) == "log"
        and "extra" not in [word.arg for word in call.keywords]
    ]

    assert unlimited == ["api/rest/models/management.py: '%s: %s'"]


@pytest.mark.parametrize(
    ("peer", "client"),
    [("127.0.0.1:64003", "127.0.0.1"), ("/127.0.0.1:64003", "127.0.0.1"), ("::1:5000", "::1"), ("/", ""), ("", "")],
)
def test_a_client_is_known_by_its_address(peer: str, client: str) -> None:
    """Not by its port, of which it has thousands; a Unix socket has neither."""
    assert caused_by(peer) == {"client": client}
