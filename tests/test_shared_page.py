"""Tests for the shared page: what a worker writes the server reads, and the other way round."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator

import pytest

from marserve.pool.dispatch.batcher import MAX_IN_FLIGHT, MAX_JOBS_IN_FLIGHT
from marserve.shared_page import FIRST_YES, MAX_CANCEL_INDEX, PAGE_BYTES, SLOTS, Page, create_page


@pytest.fixture
def pages() -> Iterator[tuple[Page, Page]]:
    """The same page, mapped twice: the worker's and the server's."""
    descriptor = create_page()
    worker, server = Page(descriptor), Page(descriptor)
    yield worker, server
    worker.close()
    server.close()
    os.close(descriptor)


def test_a_new_page_says_that_nothing_runs(pages: tuple[Page, Page]) -> None:
    """Zeros."""
    _, server = pages

    assert server.running == (0, 0.0)
    assert server.finished == 0


def test_the_server_sees_which_batch_runs_and_since_when(pages: tuple[Page, Page]) -> None:
    """Though the worker is in the middle of a handler that never returns."""
    worker, server = pages

    worker.begin(7, 123.25)

    assert server.running == (7, 123.25)


def test_after_a_batch_nothing_runs_and_one_more_is_finished(pages: tuple[Page, Page]) -> None:
    """The number of batches finished is the number of the last one."""
    worker, server = pages

    for number in range(1, 4):
        worker.begin(number, float(number))
        worker.finish()

    assert server.running[0] == 0
    assert server.finished == 3


@pytest.mark.parametrize("index", [0, 1, 63, 64, 127, 128, 1000, MAX_CANCEL_INDEX - 1])
def test_the_worker_sees_which_item_was_cancelled(pages: tuple[Page, Page], index: int) -> None:
    """That one and no other."""
    worker, server = pages

    server.cancel(5, index)

    assert worker.has_cancels(5)
    assert [other for other in range(MAX_CANCEL_INDEX) if worker.is_cancelled(5, other)] == [index]


def test_cancels_of_one_batch_add_up(pages: tuple[Page, Page]) -> None:
    """Clients leave one after the other."""
    worker, server = pages

    for index in (3, 70, 4):
        server.cancel(9, index)

    assert [index for index in range(200) if worker.is_cancelled(9, index)] == [3, 4, 70]


def test_a_cancel_of_one_batch_says_nothing_of_another(pages: tuple[Page, Page]) -> None:
    """The next batch's items have the same places."""
    worker, server = pages

    server.cancel(1, 0)

    for number in (2, SLOTS, 1 + SLOTS, 1 + 2 * SLOTS):
        assert not worker.has_cancels(number)
        assert not worker.is_cancelled(number, 0)


def test_a_slot_that_is_used_again_has_forgotten(pages: tuple[Page, Page]) -> None:
    """A worker lives for millions of batches; the page has room for a few."""
    worker, server = pages
    server.cancel(1, 0)
    server.cancel(1, 77)

    server.cancel(1 + SLOTS, 5)

    assert [index for index in range(200) if worker.is_cancelled(1 + SLOTS, index)] == [5]
    assert not worker.is_cancelled(1, 0)


def test_all_batches_in_flight_have_room_for_their_cancels(pages: tuple[Page, Page]) -> None:
    """One running, the others sent ahead: as many as a worker is ever given."""
    worker, server = pages
    numbers = range(41, 41 + max(MAX_IN_FLIGHT, MAX_JOBS_IN_FLIGHT))

    for number in numbers:
        server.cancel(number, number % 7)

    for number in numbers:
        assert [index for index in range(64) if worker.is_cancelled(number, index)] == [number % 7]


def test_items_beyond_the_pages_room_are_not_marked(pages: tuple[Page, Page]) -> None:
    """They run in vain, and nothing else happens."""
    worker, server = pages

    server.cancel(1, MAX_CANCEL_INDEX)
    server.cancel(1, 10**6)

    assert not worker.has_cancels(1)
    assert not worker.is_cancelled(1, MAX_CANCEL_INDEX)


def test_large_numbers_fit(pages: tuple[Page, Page]) -> None:
    """A worker at a million batches a second would need half a million years to reach the end."""
    worker, server = pages

    worker.begin(2**64 - 1, 1e300)
    server.cancel(2**63, 0)

    assert server.running == (2**64 - 1, 1e300)
    assert worker.is_cancelled(2**63, 0)


def test_a_page_is_not_inherited_by_chance() -> None:
    """It is handed on by name, as every descriptor."""
    descriptor = create_page()

    try:
        assert not os.get_inheritable(descriptor)
        assert os.fstat(descriptor).st_size == PAGE_BYTES
    finally:
        os.close(descriptor)


def test_closing_leaves_the_descriptor_to_its_owner() -> None:
    """And needs nothing of the other side."""
    descriptor = create_page()
    page = Page(descriptor)

    page.close()

    os.close(descriptor)
    with pytest.raises(ValueError, match="released"):
        page.begin(1, 0.0)


# ------------------------------------------------------------------------------------------- between ranks


def test_the_other_ranks_are_told_what_rank_0_was_told(pages: tuple[Page, Page]) -> None:
    """Question by question: what is not asked yet is not known, and a yes is for all later questions."""
    first, other = pages
    first.begin_call(3)
    assert other.answer_of(3, 1, 0) is None

    assert [first.note_answer(0, False), first.note_answer(1, True), first.note_answer(0, True)] == [False, True, True]

    assert [other.answer_of(3, question, 0) for question in (1, 2, 3, 4)] == [False, False, True, None]
    assert [other.answer_of(3, question, 1) for question in (1, 2, 3)] == [False, True, True]
    assert other.answer_of(4, 1, 0) is None


def test_a_new_call_has_no_answers_yet(pages: tuple[Page, Page]) -> None:
    """What was cancelled in the last one is another item now."""
    first, other = pages
    first.begin_call(1)
    first.note_answer(5, True)

    first.begin_call(2)
    assert other.answer_of(2, 1, 5) is None
    first.note_answer(5, False)

    assert other.answer_of(2, 1, 5) is False
    assert other.answer_of(1, 1, 5) is None


def test_an_item_beyond_the_ranks_room_is_cancelled_for_none_of_them(pages: tuple[Page, Page]) -> None:
    """Rank 0 must not know more than it can say."""
    first, other = pages
    first.begin_call(1)
    last = PAGE_BYTES // 8 - FIRST_YES - 1

    assert first.note_answer(last, True)
    assert not first.note_answer(last + 1, True)

    assert other.answer_of(1, 2, last)
    assert other.answer_of(1, 2, last + 1) is False


def test_what_a_worker_elsewhere_has_on_its_page_is_mirrored(pages: tuple[Page, Page]) -> None:
    """The server reads it as a worker's own."""
    mirror, server = pages

    mirror.mirror(7, 12.5, 6)

    assert server.running == (7, 12.5)
    assert server.finished == 6


def test_a_worker_reads_how_far_the_servers_clock_is_ahead(pages: tuple[Page, Page]) -> None:
    """Nothing, on the same machine."""
    worker, agent = pages

    assert worker.clock_ahead_s == 0.0
    agent.set_clock_ahead(-3.25)
    assert worker.clock_ahead_s == -3.25


@pytest.mark.skipif(sys.platform != "linux", reason="seals are Linux's")
@pytest.mark.parametrize("size", [0, PAGE_BYTES - 1, PAGE_BYTES + 1, 1 << 30])
def test_the_size_of_a_page_cannot_be_changed(size: int) -> None:
    """Who holds the descriptor could otherwise end every process that looks at the page."""
    descriptor = create_page()
    page = Page(descriptor)

    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size)

    assert os.fstat(descriptor).st_size == PAGE_BYTES
    page.begin(1, 1.0)
    assert page.running == (1, 1.0)
    page.close()
    os.close(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="seals are Linux's")
def test_nobody_can_forbid_the_other_side_to_write() -> None:
    """No seal can be added to a page."""
    descriptor = create_page()

    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    os.close(descriptor)


def test_a_page_of_garbage_is_read_without_an_error(pages: tuple[Page, Page]) -> None:
    """Whatever the words hold, they are numbers; the server's own writing works as before."""
    worker, server = pages
    for word in range(PAGE_BYTES // 8):
        worker._words[word] = 2**64 - 1

    number, began = server.running
    server.cancel(3, 5)

    assert (number, server.finished) == (2**64 - 1, 2**64 - 1)
    assert began != began
    assert worker.is_cancelled(3, 5)
    assert not worker.is_cancelled(3, 6)
