"""The books of memory: promises before processes, free only when it is, refused before it starts."""

from __future__ import annotations

import contextlib
import random

import pytest

from marserve.registry.admission import (
    INTERPRETER_BYTES,
    MIB,
    RUNTIME_BYTES,
    Account,
    DoesNotFit,
    Learned,
    Ledger,
    Need,
    budget_of,
    need_of,
)


def need(first: int, more: int = 10, peak: int = 0) -> Need:
    """What a version takes."""
    return Need(first, more, max(first, peak), "declared")


def nobody_stays(_: Account) -> bool:
    """All others make room."""
    return False


def everybody_stays(_: Account) -> bool:
    """No other makes room."""
    return True


# ------------------------------------------------------------------------------------------------- what is needed


def test_what_is_declared_is_believed() -> None:
    """Before what was learned and what the files say; further workers take what was learned of them."""
    learned = Learned(900, 30, 2000, 1.0)

    declared = need_of(declared_bytes=500, learned=learned, weight_bytes=10**9, shares_weights=True, uses_devices=False)

    assert declared == Need(500, 30, 500, "declared")


def test_what_was_learned_is_believed_before_an_estimate() -> None:
    """With the peak that was seen while it was loaded."""
    learned = Learned(900, 30, 2000, 1.0)

    assert need_of(
        declared_bytes=None, learned=learned, weight_bytes=10**9, shares_weights=True, uses_devices=False
    ) == Need(900, 30, 2000, "learned")


def test_an_estimate_counts_weights_interpreter_and_runtime() -> None:
    """Each further worker takes all of it again where weights are not shared; without weights there is no runtime."""
    weights = 1000 * MIB
    alone = need_of(declared_bytes=None, learned=None, weight_bytes=weights, shares_weights=False, uses_devices=False)
    shared = need_of(declared_bytes=None, learned=None, weight_bytes=weights, shares_weights=True, uses_devices=False)
    small = need_of(declared_bytes=None, learned=None, weight_bytes=0, shares_weights=True, uses_devices=False)

    assert alone.first_bytes == alone.more_bytes == weights + INTERPRETER_BYTES + RUNTIME_BYTES
    assert shared.first_bytes == alone.first_bytes
    assert shared.more_bytes < 100 * MIB
    assert small.first_bytes == INTERPRETER_BYTES
    assert {alone.source, shared.source, small.source} == {"estimated"}


def test_weights_for_a_device_only_pass_through() -> None:
    """They count while the model is loaded, and no longer."""
    weights = 1000 * MIB

    on_device = need_of(
        declared_bytes=None, learned=None, weight_bytes=weights, shares_weights=False, uses_devices=True
    )

    assert on_device.peak_bytes - on_device.first_bytes == weights
    assert on_device.first_bytes < 300 * MIB


def test_a_need_grows_with_workers() -> None:
    """The peak is of one load at a time; no worker takes nothing."""
    each = need(100, more=20, peak=150)

    assert [each.resident(workers) for workers in (0, 1, 3)] == [0, 100, 140]
    assert [each.loading(workers) for workers in (0, 1, 3)] == [0, 150, 190]


def test_auto_leaves_something_for_others() -> None:
    """A tenth, and never less than 256 MiB."""
    assert budget_of(100 * 1024 * MIB) == 90 * 1024 * MIB
    assert budget_of(1024 * MIB) == 768 * MIB
    assert budget_of(100 * MIB) == 0


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

    assert not books.waiting
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
    assert books.shortage(1) == 50
    size = books.leave(first)
    assert books.shortage(1) == 0
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
    assert list(books.waiting) == [small]


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

    assert books.shortage(0) == 30


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
    leaving: list[tuple[Account, int]] = []
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
    assert not books.waiting
