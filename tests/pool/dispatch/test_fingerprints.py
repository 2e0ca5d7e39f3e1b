"""Bodies that killed workers: what tells them again, how long and how many of them are refused."""

from __future__ import annotations

import pytest

from marserve.messages import Part, Request
from marserve.pool.dispatch import fingerprints
from marserve.pool.dispatch.fingerprints import MAX_REFUSED, REFUSE_S, Fingerprints, fingerprint_of


def request_of(body: bytes) -> Request:
    """A request with that body."""
    return Request("r", [Part("body", body)])


def test_a_body_is_refused_until_its_time_is_up() -> None:
    """And no other body is."""
    refused = Fingerprints()
    refused.refuse(request_of(b"poison"), 10.0)

    assert refused.refused_for_s(request_of(b"other"), 10.0) == 0.0
    assert refused.refused_for_s(request_of(b"poison"), 10.0) == REFUSE_S
    assert refused.refused_for_s(request_of(b"poison"), 9.5 + REFUSE_S) == 0.5
    assert refused.refused_for_s(request_of(b"poison"), 10.0 + REFUSE_S) == 0.0
    assert not refused.until


def test_a_body_that_kills_again_is_refused_from_then_on() -> None:
    """The later time counts, and it makes room later than those refused meanwhile."""
    refused = Fingerprints()
    for body, now in ((b"twice", 0.0), (b"once", 1.0), (b"twice", 2.0)):
        refused.refuse(request_of(body), now)

    assert list(refused.until.values()) == [1.0 + REFUSE_S, 2.0 + REFUSE_S]
    assert refused.refused_for_s(request_of(b"once"), 1.0 + REFUSE_S) == 0.0
    assert refused.refused_for_s(request_of(b"twice"), 1.0 + REFUSE_S) == 1.0


def test_the_one_that_ends_soonest_makes_room() -> None:
    """An attacker with many poisons fills no memory."""
    refused = Fingerprints()
    for number in range(MAX_REFUSED + 1):
        refused.refuse(request_of(b"%d" % number), 0.0)

    assert len(refused.until) == MAX_REFUSED
    assert refused.refused_for_s(request_of(b"0"), 0.0) == 0.0
    assert refused.refused_for_s(request_of(b"1"), 0.0) == refused.refused_for_s(request_of(b"1000"), 0.0) == REFUSE_S


def test_while_nothing_is_refused_no_body_is_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The common case costs nothing: not before the first death, and not after the last one's time."""
    refused = Fingerprints()
    refused.refuse(request_of(b"poison"), 0.0)
    monkeypatch.setattr(fingerprints, "fingerprint_of", None)

    assert refused.refused_for_s(request_of(b"any"), REFUSE_S) == 0.0
    assert refused.refused_for_s(request_of(b"any"), REFUSE_S + 1) == 0.0


def test_two_bodies_with_different_names_have_different_fingerprints() -> None:
    """Names and bytes count, and where one ends and the next begins."""
    prints = {
        fingerprint_of(Request("1", parts))
        for parts in (
            [Part("a", b"xy")],
            [Part("b", b"xy")],
            [Part("a", b"x"), Part("a", b"y")],
            [Part("ax", b"y")],
            [],
            [Part("", b"")],
        )
    }

    assert len(prints) == 6
    assert fingerprint_of(Request("1", [Part("a", b"x")])) == fingerprint_of(Request("2", [Part("a", b"x")]))
