"""Tests for the statuses, beside grpcio's own."""

from __future__ import annotations

import grpc

from marserve.api.grpc.transport.status import StatusCode


def test_numbers_and_words_are_those_of_every_client() -> None:
    """Each of them, and no other."""
    assert {code.name: code.value for code in StatusCode} == {code.name: code.value for code in grpc.StatusCode}
