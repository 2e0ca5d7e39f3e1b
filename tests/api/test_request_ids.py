"""Which ids of clients are taken, and that those of the server stay its own."""

from __future__ import annotations

import pytest

from marserve.api.request_ids import RequestIds, read_client_id


@pytest.mark.parametrize("value", [b"a", b"A-z0.9_:-", b"x" * 128])
def test_an_id_of_up_to_128_plain_characters_is_read(value: bytes) -> None:
    """Letters, digits and `. _ : -`."""
    assert read_client_id(value) == value.decode()


@pytest.mark.parametrize(
    "value", [b"", b"x" * 129, b"x" * 10_000, b"a b", b"a\nb", b"a\n", b"\xe9", b"a~2", b"a/b", b"a,b"]
)
def test_any_other_id_is_not_read(value: bytes) -> None:
    """Above all none that could forge a line, or pass for two."""
    assert read_client_id(value) == ""


def test_a_server_takes_clients_ids_or_makes_its_own() -> None:
    """A setting says which."""
    taking, making = RequestIds(takes_clients=True), RequestIds()

    assert taking.of("theirs") == "theirs"
    assert making.of("theirs") != "theirs"
    assert len({taking.of(""), taking.of(""), taking.next()}) == 3


def test_no_client_takes_an_id_that_the_server_may_make() -> None:
    """It could otherwise pass for another client's request: the next id is easily guessed."""
    ids = RequestIds(takes_clients=True)
    guessed = ids.next()[:-1] + "7"

    assert ids.of(guessed) != guessed


def test_keys_tell_requests_of_one_id_apart() -> None:
    """0 is left to ids that are unique."""
    ids = RequestIds(takes_clients=True)

    assert [ids.next_key(), ids.next_key()] == [1, 2]
