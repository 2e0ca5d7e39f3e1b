"""The books of memory: promises before processes, free only when it is, refused before it starts."""

from __future__ import annotations

import contextlib
import random

import pytest

from marserve.memory.ledger import HOST, DoesNotFit, HostReservation, Ledger
from marserve.memory.needs import Learned, Need


def need(first: int, more: int = 10, peak: int = 0) -> Need:
    """What a version takes."""
    return Need(first, more, max(first, peak), "declared")


def shortage(books: Ledger, places: int) -> int:
    """How much more must leave so that so many of the line can begin; with 0 what is held beyond the budget."""
    return max(0, books.shortage(books.line[places - 1])[HOST]) if places else books.excess_bytes


def nobody_stays(_: HostReservation) -> bool:
    """All others make room."""
    return False


def everybody_stays(_: HostReservation) -> bool:
    """No other makes room."""
    return True


# ------------------------------------------------------------------------------------------------------ promises


def test_several_loads_at_once_never_count_on_the_same_bytes() -> None:
    """A promise is made before anything is started."""
    books = Ledger(250)
    accounts = [books.open(name, need(100)) for name in "abc"]

    assert books.ask(accounts[0], 1, everybody_stays)
    assert books.ask(accounts[1], 1, everybody_stays)
    with pytest.raises(DoesNotFit) as refused:
        books.ask(accounts[2], 1, everybody_stays)

    assert (refused.value.needed_bytes, refused.value.could_be_had) == (100, 50)
    assert refused.value.holders == [("a", 100), ("b", 100)]
    assert books.free_bytes == 50
    assert accounts[2].own_bytes == 0


def test_a_promise_falls_from_the_peak_to_what_is_needed() -> None:
    """Once the model is loaded, others may have the rest."""
    books = Ledger(300)
    account = books.open("a", need_of_estimate(100, peak=250))

    assert books.ask(account, 1, everybody_stays)
    before = books.free_bytes
    books.settle(account, 90, Learned(90, 5, 240, 1.0))

    assert (before, books.free_bytes) == (50, 210)
    assert account.need == Need(90, 5, 240, "learned")


def need_of_estimate(first: int, peak: int) -> Need:
    """An estimate."""
    return Need(first, 10, peak, "estimated")


def test_what_is_declared_stays_promised_though_less_is_held() -> None:
    """It is what its first large request will take; and what is held beyond it counts, too."""
    books = Ledger(300)
    account = books.open("a", need(100))
    books.ask(account, 1, everybody_stays)

    books.settle(account, 40, Learned(40, 5, 60, 1.0))
    free = books.free_bytes
    account.measured_bytes = 180

    assert (free, books.free_bytes) == (200, 120)


def test_a_model_larger_than_the_budget_is_refused_though_all_would_leave() -> None:
    """Before anybody has to."""
    books = Ledger(300)
    resident, huge = books.open("a", need(100)), books.open("huge", need(301))
    books.ask(resident, 1, nobody_stays)

    with pytest.raises(DoesNotFit):
        books.ask(huge, 1, nobody_stays)

    assert not books.line
    assert resident.own_bytes == 100


def test_more_workers_are_refused_when_they_cannot_fit() -> None:
    """As a first one is; what there is stays as it is."""
    books = Ledger(150)
    account = books.open("a", need(100, more=30))
    books.ask(account, 2, everybody_stays)

    with pytest.raises(DoesNotFit):
        books.ask(account, 3, everybody_stays)

    assert (account.workers, account.own_bytes) == (2, 130)


# ------------------------------------------------------------------------------------------------------- waiting


def test_memory_that_is_leaving_is_not_free_before_it_is() -> None:
    """Who waits for it begins when the processes are gone, not when they are told to go."""
    books = Ledger(150)
    first, second = books.open("a", need(100)), books.open("b", need(100))
    books.ask(first, 1, nobody_stays)

    assert not books.ask(second, 1, nobody_stays)
    assert shortage(books, 1) == 50
    size = books.leave(first)
    assert shortage(books, 1) == 0
    assert books.grant() == []

    books.gone(first, size)
    assert books.grant() == [second]
    assert not second.is_waiting


def test_those_who_wait_are_let_in_in_order() -> None:
    """A small one that came later does not keep a large one waiting for ever."""
    books = Ledger(200)
    there, large, small = (books.open(name, need(size)) for name, size in (("a", 150), ("large", 180), ("small", 40)))
    books.ask(there, 1, nobody_stays)
    books.ask(large, 1, nobody_stays)

    assert not books.ask(small, 1, nobody_stays)
    assert books.grant() == []
    books.gone(there, books.leave(there))

    assert books.grant() == [large]
    assert list(books.line) == [small]


def test_who_gives_up_waiting_is_promised_nothing() -> None:
    """Those behind go on."""
    books = Ledger(200)
    there, large, small = (books.open(name, need(size)) for name, size in (("a", 150), ("large", 180), ("small", 40)))
    for account in (there, large, small):
        books.ask(account, 1, nobody_stays)

    books.withdraw(large)

    assert books.grant() == [small]
    assert books.free_bytes == 10


def test_who_is_woken_while_it_leaves_waits_for_itself() -> None:
    """Its old processes still hold what the new ones need."""
    books = Ledger(150)
    account = books.open("a", need(100))
    books.ask(account, 1, nobody_stays)
    size = books.leave(account)

    assert not books.ask(account, 1, nobody_stays)
    assert books.grant() == []
    books.gone(account, size)
    assert books.grant() == [account]


def test_what_has_grown_beyond_the_budget_is_a_shortage_that_nobody_waits_for() -> None:
    """So that somebody idle can be told to leave before the kernel kills somebody busy."""
    books = Ledger(200)
    account = books.open("a", need(100))
    books.ask(account, 1, nobody_stays)

    account.measured_bytes = 230

    assert shortage(books, 0) == 30


def test_shared_processes_count() -> None:
    """Templates that have only imported belong to nobody and take their memory all the same."""
    books = Ledger(200)
    books.shared_bytes = 120

    with pytest.raises(DoesNotFit):
        books.ask(books.open("a", need(100)), 1, nobody_stays)


# ------------------------------------------------------------------------------------------------- one worker more


def test_a_worker_more_takes_only_what_is_free() -> None:
    """As many as fit; nobody has to leave, and nobody who waits is overtaken."""
    books = Ledger(150)
    account, other = books.open("a", need(100, more=20)), books.open("b", need(120))
    books.ask(account, 1, nobody_stays)

    assert books.grow(account, 9) == 3
    assert books.free_bytes == 10
    books.shrink(account, 1)
    books.ask(other, 1, nobody_stays)
    assert books.grow(account, 2) == 1


def test_fewer_workers_give_back_what_they_were_promised() -> None:
    """But what is still held is on the books until it is measured again."""
    books = Ledger(150)
    account = books.open("a", need(100, more=20))
    books.ask(account, 3, nobody_stays)
    account.measured_bytes = 135

    books.shrink(account, 1)
    held = books.held_bytes
    account.measured_bytes = 90

    assert (held, books.held_bytes) == (135, 100)


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_events_promises_more_than_there_is(seed: int) -> None:
    """Loads, growth, evictions and ends in any order: those that have begun and what is leaving never pass the budget,
    and at rest nothing is left on the books."""
    chance = random.Random(seed)
    books = Ledger(1000)
    accounts = [
        books.open(str(number), need(chance.randrange(50, 400), chance.randrange(5, 60))) for number in range(8)
    ]
    leaving: list[tuple[HostReservation, int]] = []
    for _ in range(600):
        account = chance.choice(accounts)
        step = chance.randrange(6)
        if step <= 1:
            with contextlib.suppress(DoesNotFit):
                books.ask(account, chance.randrange(1, 4), lambda _: chance.random() < 0.2)
        elif step == 2 and account.workers and not account.is_waiting:
            leaving.append((account, books.leave(account)))
        elif step == 3 and leaving:
            books.gone(*leaving.pop(chance.randrange(len(leaving))))
        elif step == 4 and account.workers and not account.is_waiting:
            books.grow(account, account.workers + 1)
        elif step == 5 and account.workers:
            books.shrink(account, chance.randrange(account.workers + 1))
        books.grant()

        begun = sum(each.leaving_bytes + (0 if each.is_waiting else each.own_bytes) for each in accounts)
        assert begun <= 1000
        assert all(each.leaving_bytes >= 0 for each in accounts)

    for account, size in leaving:
        books.gone(account, size)
    for account in accounts:
        books.close(account)
    assert books.held_bytes == 0
    assert not books.line


# ------------------------------------------------------------------------------------------------------- at the edges


def test_a_load_that_fits_exactly_begins_at_once() -> None:
    """To the last byte; one more waits, and what nobody could make room for is refused."""
    books = Ledger(200)
    first, second, third = (books.open(name, need(size)) for name, size in (("a", 150), ("b", 50), ("c", 1)))

    assert books.ask(first, 1, nobody_stays)
    assert books.ask(second, 1, nobody_stays)
    assert books.free_bytes == 0
    assert not books.ask(third, 1, nobody_stays)
    assert shortage(books, 0) == 0
    assert shortage(books, 1) == 1
    with pytest.raises(DoesNotFit, match="1 bytes are needed, 0 could be had"):
        books.ask(books.open("d", need(1)), 1, lambda other: other is not third)


def test_a_refusal_names_those_that_stay_the_largest_first() -> None:
    """By what each is charged; who holds nothing is not named, and nobody has less than nothing."""
    books = Ledger(100)
    small, large, idle, leaves = (books.open(name, need(10)) for name in ("small", "large", "idle", "leaves"))
    small.measured_bytes, large.measured_bytes, leaves.measured_bytes = 30, 90, 5

    with pytest.raises(DoesNotFit) as refused:
        books.ask(idle, 1, lambda other: other is not leaves)

    assert refused.value.holders == [("large", 90), ("small", 30)]
    assert (refused.value.needed_bytes, refused.value.could_be_had) == (10, 0)
    assert idle.workers == 0


def test_weighing_changes_nothing_and_may_be_done_for_who_has_no_account() -> None:
    """What it would be charged, and what it could have: a dry run."""
    books = Ledger(300)
    books.shared_bytes = 20
    books.ask(books.open("a", need(100)), 1, nobody_stays)

    assert books.weigh(HostReservation("new", need(100, more=15, peak=120)), 2, everybody_stays) == (135, 180)
    assert books.weigh(HostReservation("new", need(100)), 2, nobody_stays) == (110, 280)
    assert books.held_bytes == 120
    assert len(books.on_host) == 1


def test_who_asks_again_for_no_more_than_it_has_never_waits() -> None:
    """Though others wait, and though models have grown beyond the budget."""
    books = Ledger(150)
    there, waiting = books.open("a", need(100, more=20)), books.open("b", need(80))
    books.ask(there, 2, nobody_stays)
    books.ask(waiting, 1, nobody_stays)
    there.measured_bytes = 160

    assert books.ask(there, 2, nobody_stays)
    assert books.ask(there, 1, everybody_stays)
    assert there.workers == 1
    assert there.promised_bytes == 120
    assert list(books.line) == [waiting]


def test_who_asks_twice_waits_once_and_for_the_larger() -> None:
    """In its first place in the line."""
    books = Ledger(150)
    there, first, second = (books.open(name, need(100, more=20)) for name in "abc")
    for account in (there, first, second):
        books.ask(account, 1, nobody_stays)

    assert not books.ask(first, 2, nobody_stays)

    assert list(books.line) == [first, second]
    assert (first.workers, first.promised_bytes, first.added_bytes) == (2, 120, 120)


def test_those_who_wait_in_one_place_begin_together_where_there_is_room() -> None:
    """As many as fit, in order; whoever begins takes its room from the next."""
    books = Ledger(200)
    there = books.open("a", need(200))
    small = [books.open(name, need(90)) for name in "bcd"]
    for account in (there, *small):
        books.ask(account, 1, nobody_stays)
    assert [shortage(books, places) for places in (0, 1, 2, 3)] == [0, 90, 180, 270]

    size = books.leave(there)
    assert [shortage(books, places) for places in (0, 1, 2, 3)] == [0, 0, 0, 70]
    assert books.leaving(HOST) == 200
    books.gone(there, size)

    assert books.grant() == small[:2]
    assert shortage(books, 1) == 70


def test_what_a_waiting_one_is_told_to_shrink_to_it_waits_for() -> None:
    """To nothing: it waits no longer. What was promised to it stays until it begins."""
    books = Ledger(150)
    there, waiting = books.open("a", need(100)), books.open("b", need(100, more=20))
    books.ask(there, 1, nobody_stays)
    books.ask(waiting, 3, nobody_stays)

    books.shrink(waiting, 1)
    assert (waiting.workers, waiting.promised_bytes, waiting.is_waiting) == (1, 140, True)
    books.shrink(waiting, 0)

    assert (waiting.workers, waiting.promised_bytes, waiting.is_waiting) == (0, 0, False)
    assert not books.line
    books.shrink(there, 0)
    assert books.held_bytes == 0


def test_growing_asks_for_no_more_than_is_missing() -> None:
    """Workers that it has already are not paid for twice, and what it holds beyond its promise counts as theirs."""
    books = Ledger(200)
    account = books.open("a", need(100, more=20))
    books.ask(account, 2, nobody_stays)
    assert books.grow(account, 1) == 1
    assert account.workers == 2

    account.measured_bytes = 150
    assert books.grow(account, 4) == 4
    assert (account.workers, account.promised_bytes, books.free_bytes) == (4, 160, 40)
    assert books.grow(account, 9) == 6


def test_what_a_loaded_model_declared_stays_but_for_its_further_workers() -> None:
    """Those take what was seen; what it holds is what was measured."""
    books = Ledger(900)
    account = books.open("a", need(100, more=100, peak=300))
    books.ask(account, 3, nobody_stays)

    books.settle(account, 140, Learned(90, 5, 240, 1.0))

    assert account.need == Need(100, 5, 300, "declared")
    assert (account.promised_bytes, account.measured_bytes, account.own_bytes) == (110, 140, 140)
    assert account.added_bytes == 0


def test_who_leaves_twice_before_its_processes_have_ended_has_all_of_them_on_the_books() -> None:
    """Each end gives back its own, and none more than there is."""
    books = Ledger(500)
    account = books.open("a", need(100))
    books.ask(account, 1, nobody_stays)
    first = books.leave(account)
    books.ask(account, 1, nobody_stays)
    account.measured_bytes = 130
    second = books.leave(account)

    assert (first, second, books.leaving(HOST), account.workers) == (100, 130, 230, 0)
    books.gone(account, first)
    assert books.held_bytes == 130
    books.gone(account, 1000)
    assert books.held_bytes == 0
    books.close(account)
    books.close(account)
    assert books.on_host == []


# ------------------------------------------------------------------------------------------------- the account itself


def test_an_account_stands_behind_those_that_wait_until_they_are_let_in() -> None:
    """Memory has come free for both; the first in the line is the first to begin."""
    ledger = Ledger(100)
    busy, large, small = (ledger.open(name, need(size)) for name, size in (("busy", 80), ("large", 50), ("small", 10)))
    ledger.ask(busy, 1, nobody_stays)
    ledger.ask(large, 1, nobody_stays)
    ledger.close(busy)

    is_in = ledger.ask(small, 1, nobody_stays)

    assert not is_in
    assert ledger.grant() == [large, small]


def test_an_account_does_not_stand_in_its_own_way() -> None:
    """What it holds already is no other's, though it never makes room."""
    ledger = Ledger(100)
    account = ledger.open("a", need(60, more=20))
    ledger.ask(account, 1, everybody_stays)

    assert ledger.ask(account, 2, everybody_stays)

    assert account.promised_bytes == 80


def test_a_refusal_names_those_that_hold_something() -> None:
    """A version that sleeps holds nothing that unloading it would free."""
    ledger = Ledger(100)
    holds, _, large = (ledger.open(name, need(size)) for name, size in (("holds", 30), ("sleeps", 60), ("large", 80)))
    ledger.ask(holds, 1, everybody_stays)

    with pytest.raises(DoesNotFit) as refused:
        ledger.ask(large, 1, everybody_stays)

    assert refused.value.holders == [("holds", 30)]
