"""Decides which loads there is memory for, and keeps the books: who holds how much, who waits, who is about to leave.
Pure: it reads no memory and ends no process; whoever does tells it.

Every version has an account. What an account is charged is the larger of what it was promised and what its processes
were last seen to hold. A promise is made before a process is started, so several loads at once never count on the
same bytes; it is for the peak while loading, and falls to what is needed afterwards once that is over. Memory that is
about to come free is not free: it stays on the books until the processes that hold it have ended.

A load that would not fit even if everything left that may leave is refused before it starts (`DoesNotFit`). One that
fits only when others have left waits; the line is first come, first served, so that a large model gets its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

MIB = 1024 * 1024

# What a worker's interpreter with its handler takes before there are any weights, and what importing torch adds.
INTERPRETER_BYTES = 40 * MIB
RUNTIME_BYTES = 220 * MIB
# What a worker takes that is forked from a loaded template: its own pages, while it answers.
FORKED_BYTES = 48 * MIB
# With `auto` so much of the machine's (or the container's) memory is not for models: the server, files' pages, others.
RESERVE_SHARE = 0.1
LEAST_RESERVE_BYTES = 256 * MIB

Source = Literal["declared", "learned", "estimated"]


class DoesNotFit(Exception):
    """A load has no room, and nothing that may leave would make enough. Sizes in bytes.

    `holders` are the accounts that stay, by label, largest first; `could_be_had` is what they leave of the budget.
    """

    def __init__(self, needed_bytes: int, could_be_had: int, holders: Sequence[tuple[str, int]]) -> None:
        self.needed_bytes, self.could_be_had, self.holders = needed_bytes, could_be_had, holders
        super().__init__(f"{needed_bytes} bytes are needed, {could_be_had} could be had")


def budget_of(total_bytes: int) -> int:
    """The budget for models that `auto` means on a machine, or in a container, of so much memory."""
    return max(0, total_bytes - max(LEAST_RESERVE_BYTES, int(RESERVE_SHARE * total_bytes)))


@dataclass(frozen=True, slots=True)
class Need:
    """What a version takes, in bytes: `first_bytes` with one worker (its template counted), `more_bytes` each further
    one, `peak_bytes` for a moment while the first is loaded. `source` says how that is known.
    """

    first_bytes: int
    more_bytes: int
    peak_bytes: int
    source: Source

    def resident(self, workers: int) -> int:
        """With so many workers that have loaded the model."""
        return self.first_bytes + (workers - 1) * self.more_bytes if workers > 0 else 0

    def loading(self, workers: int) -> int:
        """While it is loaded, to have so many workers then."""
        return max(self.peak_bytes, self.first_bytes) - self.first_bytes + self.resident(workers) if workers > 0 else 0


@dataclass(frozen=True, slots=True)
class Learned:
    """What a version was seen to take. As `Need`; `load_s` is how long loading took, in seconds."""

    first_bytes: int
    more_bytes: int
    peak_bytes: int
    load_s: float


def need_of(
    *,
    declared_bytes: int | None,
    learned: Learned | None,
    weight_bytes: int,
    shares_weights: bool,
    uses_devices: bool,
) -> Need:
    """What a version takes, as far as is known before it is loaded.

    What its configuration declares is believed, for the first worker; then what was seen of it before; else it is
    estimated: the weights, an interpreter, a runtime where there are weights. Weights that go to a device are not held
    here for long, but they pass through. `shares_weights`: its workers are forked from a template that has loaded them.
    """
    runtime = RUNTIME_BYTES if weight_bytes else 0
    held = 0 if uses_devices else weight_bytes
    estimated = INTERPRETER_BYTES + runtime + held
    more = FORKED_BYTES if shares_weights else estimated
    if declared_bytes is not None:
        if learned is not None:
            more = learned.more_bytes
        elif not shares_weights:
            more = declared_bytes
        return Need(declared_bytes, more, declared_bytes, "declared")
    if learned is not None:
        return Need(learned.first_bytes, learned.more_bytes, learned.peak_bytes, "learned")
    return Need(estimated, more, estimated - held + weight_bytes, "estimated")


@dataclass(slots=True, eq=False)
class Account:
    """One version's account, in bytes. `leaving_bytes` is what its processes hold that have been told to end."""

    label: str
    need: Need
    workers: int = 0
    promised_bytes: int = 0
    measured_bytes: int = 0
    leaving_bytes: int = 0
    is_waiting: bool = False

    @property
    def own_bytes(self) -> int:
        """What it is charged, without what is leaving."""
        return max(self.promised_bytes, self.measured_bytes)

    @property
    def added_bytes(self) -> int:
        """What it is promised beyond what its processes hold."""
        return self.own_bytes - self.measured_bytes


class Ledger:
    """The books of one server. `shared_bytes` is what processes hold that belong to no version."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.shared_bytes = 0
        self.accounts: list[Account] = []
        self._line: list[Account] = []

    @property
    def held_bytes(self) -> int:
        """What is spoken for: held, promised (to those that wait, too), or about to come free."""
        return self.shared_bytes + sum(account.own_bytes + account.leaving_bytes for account in self.accounts)

    @property
    def free_bytes(self) -> int:
        """What nobody holds, is promised or is yet to give back."""
        return max(0, self.budget_bytes - self.held_bytes)

    @property
    def leaving_bytes(self) -> int:
        """What is about to come free."""
        return sum(account.leaving_bytes for account in self.accounts)

    @property
    def waiting(self) -> Sequence[Account]:
        """Those that wait for others to leave, first come first."""
        return self._line

    def open(self, label: str, need: Need) -> Account:
        """A new account."""
        account = Account(label, need)
        self.accounts.append(account)
        return account

    def close(self, account: Account) -> None:
        """The version and all of its processes are gone."""
        self.withdraw(account)
        if account in self.accounts:
            self.accounts.remove(account)

    def ask(self, account: Account, workers: int, stays: Callable[[Account], bool]) -> bool:
        """Promise what so many workers need, now or when others have left. True: now; False: the account waits.

        `stays` says which of the others never make room. Raises DoesNotFit, and nothing has changed then.
        """
        own, _ = self.weigh(account, workers, stays)
        grows = own > account.own_bytes
        account.workers = workers
        account.promised_bytes = max(account.promised_bytes, account.need.loading(workers))
        if grows and not account.is_waiting and (self._line or self.held_bytes > self.budget_bytes):
            account.is_waiting = True
            self._line.append(account)
        return not account.is_waiting

    def weigh(self, account: Account, workers: int, stays: Callable[[Account], bool]) -> tuple[int, int]:
        """What an account would be charged for so many workers, and what it could have at most. Changes nothing.

        The account need not be open. Raises DoesNotFit.
        """
        own = max(account.promised_bytes, account.need.loading(workers), account.measured_bytes)
        staying = [other for other in self.accounts if other is not account and stays(other)]
        could_be_had = self.budget_bytes - self.shared_bytes - sum(other.own_bytes for other in staying)
        if own > account.own_bytes and own > could_be_had:
            holders = sorted(((other.label, other.own_bytes) for other in staying), key=lambda holder: -holder[1])
            raise DoesNotFit(own, max(0, could_be_had), [holder for holder in holders if holder[1]])
        return own, max(0, could_be_had)

    def grow(self, account: Account, workers: int) -> int:
        """Promise as many of so many workers as there is room for without anybody leaving. Returns how many."""
        allowed = min(workers, account.workers)
        while allowed < workers:
            more = max(0, account.need.resident(allowed + 1) - account.own_bytes)
            if self._line or more > self.free_bytes:
                break
            allowed += 1
            account.promised_bytes = max(account.promised_bytes, account.need.resident(allowed))
        account.workers = max(account.workers, allowed)
        return allowed

    def shrink(self, account: Account, workers: int) -> None:
        """There are to be so few workers; what those that go hold is on the books until it is measured again."""
        if account.is_waiting and not workers:
            self.withdraw(account)
            return
        account.workers = workers
        if not account.is_waiting:
            account.promised_bytes = account.need.resident(workers)

    def settle(self, account: Account, measured_bytes: int, learned: Learned) -> None:
        """The model is loaded: the promise falls from the peak to what is needed now."""
        need = account.need
        if need.source == "declared":
            need = replace(need, more_bytes=learned.more_bytes)
        else:
            need = Need(learned.first_bytes, learned.more_bytes, learned.peak_bytes, "learned")
        account.need = need
        account.promised_bytes = need.resident(account.workers)
        account.measured_bytes = measured_bytes

    def leave(self, account: Account) -> int:
        """Its processes are told to end. Returns how much will come free; `gone` gives that back."""
        size = account.own_bytes
        self.withdraw(account)
        account.workers = account.promised_bytes = account.measured_bytes = 0
        account.leaving_bytes += size
        return size

    def gone(self, account: Account, size: int) -> None:
        """The processes that held so much have ended."""
        account.leaving_bytes = max(0, account.leaving_bytes - size)

    def withdraw(self, account: Account) -> None:
        """It waits no longer, and is promised nothing any more that it waited for."""
        if account.is_waiting:
            self._line.remove(account)
            account.is_waiting = False
            account.workers = account.promised_bytes = 0

    def grant(self) -> list[Account]:
        """Let those begin, in order, for whom there is room by now."""
        granted: list[Account] = []
        while self._line and self._begun_bytes() + self._line[0].added_bytes <= self.budget_bytes:
            account = self._line.pop(0)
            account.is_waiting = False
            granted.append(account)
        return granted

    def shortage(self, places: int) -> int:
        """How much more must be told to leave so that the first `places` of those that wait can begin; 0 for nothing.

        With 0 places: what is held beyond the budget, since models grow while they serve.
        """
        wanted = sum(account.added_bytes for account in self._line[:places])
        return max(0, self._begun_bytes() - self.leaving_bytes + wanted - self.budget_bytes)

    def _begun_bytes(self) -> int:
        return self.held_bytes - sum(account.added_bytes for account in self._line)
