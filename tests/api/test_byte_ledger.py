"""The books of bytes in flight, alone and in simulated worlds of clients (`byte_ledger.py`)."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass, field

import pytest

from marserve.api.byte_ledger import (
    FAMILIES,
    LEAST_RESERVE_BYTES,
    PATIENCE_S,
    READ_BYTES,
    SMALL_BYTES,
    STUCK_S,
    UNBOUNDED,
    ByteLedger,
    HeldBytes,
    Hold,
    Refusal,
)

MIB = 1024 * 1024


@dataclass
class Client:
    """A reader that notes what it is told."""

    told: list[str] = field(default_factory=list)
    is_reading: bool = True

    def go_on(self) -> None:
        """There is room."""
        self.told.append("go_on")

    def give_up(self, why: Refusal) -> None:
        """There is none."""
        self.told.append(why)


def opened(ledger: ByteLedger, length: int | None, client: Client | None = None, now: float = 0.0) -> Hold:
    """A body that begins to come."""
    return ledger.open(length, client or Client(), now)


def test_bodies_get_room_until_there_is_none_and_then_wait_in_their_order() -> None:
    """Who waits goes on when room was given back, the oldest first, and none before it."""
    ledger, second, third = ByteLedger(10 * MIB), Client(), Client()
    first = opened(ledger, 8 * MIB)
    large, small = opened(ledger, 6 * MIB, second), opened(ledger, 1 * MIB, third)

    assert not first.is_waiting
    assert large.is_waiting
    assert small.is_waiting
    ledger.turn(0.5)
    assert (second.told, third.told) == ([], [])

    first.close()
    ledger.turn(0.6)

    assert (second.told, third.told) == (["go_on"], ["go_on"])
    assert ledger.figures() == {"bodies": 7 * MIB, "small_bodies": 0, "waiting": 0, "answers": 0}


def test_small_bodies_pass_while_large_ones_hold_everything() -> None:
    """They have a reserve of their own, and beyond it what is free."""
    ledger = ByteLedger(10 * MIB)
    hold = opened(ledger, 10 * MIB)
    opened(ledger, MIB)

    taken = 0
    while ledger.take_small(SMALL_BYTES):
        taken += SMALL_BYTES
    assert taken == ledger.reserve // 2 == LEAST_RESERVE_BYTES // 2
    hold.close()
    assert ledger.take_small(SMALL_BYTES)
    assert ledger.room == 10 * MIB - SMALL_BYTES


def test_a_body_waits_no_longer_than_its_patience() -> None:
    """Then it is refused, however much the others hold on."""
    ledger, client = ByteLedger(MIB), Client()
    holds = ledger.take(MIB)
    waiting = opened(ledger, MIB, client, now=100.0)

    ledger.turn(100.0 + PATIENCE_S - 0.1)
    assert client.told == []
    ledger.turn(100.0 + PATIENCE_S)

    assert client.told == ["no_room"]
    assert not waiting.is_waiting
    assert holds is not None


def test_first_bytes_of_who_waits_are_bounded() -> None:
    """They came before the connection stopped; beyond the reserve the body must be refused at once."""
    ledger = ByteLedger(MIB)
    full = ledger.take(MIB)
    waiting = [opened(ledger, MIB // 2) for _ in range(LEAST_RESERVE_BYTES // READ_BYTES + 1)]

    taken = [hold.take(READ_BYTES, 0.0) for hold in waiting]

    assert taken == [True] * (len(waiting) - 1) + [False]
    waiting[-1].close()
    assert ledger.ahead == LEAST_RESERVE_BYTES
    assert full is not None


def test_bodies_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    """Chunked ones that hold everything among them: the youngest is refused, and the oldest goes on."""
    ledger = ByteLedger(4 * MIB)
    clients = [Client() for _ in range(4)]
    holds = [opened(ledger, None, client) for client in clients]
    for size in (SMALL_BYTES + 1, MIB // 2, MIB // 2):
        for hold in holds:
            if not hold.is_waiting:
                assert hold.take(size, 0.0)
    assert all(hold.is_waiting for hold in holds)

    ledger.turn(STUCK_S)

    assert clients[0].told == ["go_on"]
    assert clients[3].told == ["no_room"]
    assert clients[1].told == []


def test_a_body_that_dribbles_loses_its_place_when_others_are_stuck_and_not_before() -> None:
    """One that comes quickly, or whose client is not let, keeps it."""
    ledger = ByteLedger(3 * MIB)
    held_up, slow, quick, waiting = Client(is_reading=False), Client(), Client(), Client()
    _, *holds = [opened(ledger, MIB, client) for client in (held_up, slow, quick)]
    ledger.turn(50.0)
    assert slow.told == []

    last = opened(ledger, MIB, waiting, now=50.0)
    holds[0].take(1024, 51.0)
    holds[1].take(MIB // 2, 51.0)
    ledger.turn(50.0 + STUCK_S)

    assert slow.told == ["too_slow"]
    assert (quick.told, held_up.told, waiting.told) == ([], [], ["go_on"])
    assert not last.is_waiting


def test_answers_count_and_are_never_refused() -> None:
    """They take room from bodies, and may take more than there is."""
    rooms: list[int] = []
    ledger, client = ByteLedger(MIB, lambda: rooms.append(1)), Client()

    ledger.count_answers(3 * MIB)
    assert opened(ledger, SMALL_BYTES + 1, client).is_waiting
    ledger.count_answers(1)
    assert rooms == []
    ledger.count_answers(-3 * MIB - 1)
    assert rooms == [1]
    ledger.turn(0.1)

    assert client.told == ["go_on"]


def test_a_complete_body_keeps_what_it_takes_until_nothing_refers_to_it() -> None:
    """A chunked one that asked for more gives the rest back; a thread may have the last reference."""
    rooms = []
    ledger = ByteLedger(MIB, lambda: rooms.append(ledger.limit))
    hold = opened(ledger, None)
    assert hold.take(100_000, 0.0)
    assert ledger.bodies > 100_000
    assert hold.complete()
    assert ledger.bodies == 100_000
    body = HeldBytes(b"x" * 100_000)
    body.hold = hold
    waiting = opened(ledger, MIB)

    del hold
    assert ledger.room == MIB - 100_000
    del body

    assert ledger.room == MIB
    assert rooms
    assert waiting.is_waiting


def test_a_small_body_that_turns_out_large_moves() -> None:
    """From the reserve to the others' room."""
    ledger = ByteLedger(MIB)
    hold = opened(ledger, None)
    assert hold.take(SMALL_BYTES, 0.0)
    assert ledger.figures()["small_bodies"] == SMALL_BYTES

    assert hold.take(1, 0.0)

    assert ledger.parts == 0
    assert ledger.bodies == hold.granted > SMALL_BYTES


def test_small_bodies_that_dribble_leave_half_of_the_reserve_to_those_that_have_come() -> None:
    """What came of them counts, not what they announce."""
    ledger = ByteLedger(MIB)
    full = ledger.take(MIB)
    dribbling = [opened(ledger, SMALL_BYTES) for _ in range(1000)]

    taken = [hold.take(8192, 0.0) for hold in dribbling]

    assert sum(taken) * 8192 == ledger.parts == ledger.reserve // 2
    assert ledger.take_small(SMALL_BYTES)
    assert full is not None


def test_small_bodies_have_their_reserve_though_answers_hold_more_than_there_is() -> None:
    """Those that have come, and those that dribble in; what they give back lets others go on."""
    rooms: list[int] = []
    ledger = ByteLedger(MIB, lambda: rooms.append(1))
    ledger.count_answers(3 * MIB)

    assert ledger.take_small(ledger.half)
    assert not ledger.take_small(1)
    dribbles = opened(ledger, SMALL_BYTES)
    assert dribbles.take(SMALL_BYTES, 0.0)
    ledger.release_small(ledger.half)
    assert (ledger.small, rooms) == (0, [])
    assert ledger.take_small(1)
    waiting = opened(ledger, MIB)
    ledger.release_small(1)
    assert (ledger.figures()["small_bodies"], rooms) == (SMALL_BYTES, [1])
    assert waiting.is_waiting


def test_a_body_that_is_whole_before_it_had_room_is_kept_if_it_has_now_and_refused_if_not() -> None:
    """It gives its place in line back either way."""
    for has_room in (True, False):
        ledger = ByteLedger(MIB)
        full = ledger.take(MIB)
        hold = opened(ledger, 100_000)
        assert hold.take(60_000, 0.0)
        assert hold.take(40_000, 0.0)
        assert ledger.ahead == 100_000
        if has_room:
            full = None
        assert hold.complete() is has_room
        assert (hold.is_waiting, ledger.ahead, ledger.waiting) == (False, 0, [])
        assert ledger.room == (MIB - 100_000 if has_room else 0)
        del full


def test_bodies_lose_their_place_only_when_another_is_stuck_and_they_had_their_second() -> None:
    """Neither one that began a moment ago, nor before the first in line has waited for a second."""
    for waited_s, is_stuck in ((STUCK_S - 0.05, False), (STUCK_S, True)):
        ledger, slow, fresh, waiting, later = ByteLedger(3 * MIB), Client(), Client(), Client(), Client()
        opened(ledger, MIB, slow, now=40.0)
        opened(ledger, MIB, fresh, now=50.9)
        opened(ledger, 2 * MIB, waiting, now=50.0)
        opened(ledger, MIB, later, now=50.9)

        ledger.turn(50.0 + waited_s)

        assert (slow.told, fresh.told, waiting.told) == ((["too_slow"], [], ["go_on"]) if is_stuck else ([], [], []))
        assert later.told == [], "it holds nothing that the first in line could have"


@pytest.mark.parametrize(("missing", "told"), [(0, []), (1, ["too_slow"])])
def test_a_body_is_slow_that_comes_with_less_than_64_kib_a_second(missing: int, told: list[str]) -> None:
    """Over all of the time since it was last looked at."""
    ledger, client = ByteLedger(MIB), Client()
    assert opened(ledger, MIB, client, now=48.0).take(2 * 64 * 1024 - missing, 49.0)
    opened(ledger, MIB, now=49.0)

    ledger.turn(50.0)

    assert client.told == told


def test_a_body_that_came_quickly_once_and_then_stops_is_slow() -> None:
    """Each second is judged by itself, so that a good start buys no minutes."""
    ledger, client = ByteLedger(MIB), Client()
    hold = opened(ledger, MIB, client, now=48.0)
    assert hold.take(MIB // 2, 48.5)
    ledger.turn(49.0)
    opened(ledger, MIB, now=49.0)

    ledger.turn(50.0)

    assert client.told == ["too_slow"]


def test_the_time_that_a_body_waited_for_room_is_not_held_against_its_client() -> None:
    """Its second begins when it may send."""
    ledger, client = ByteLedger(2 * MIB), Client()
    holds = [ledger.take(MIB), ledger.take(MIB)]
    opened(ledger, MIB, client, now=50.0)
    opened(ledger, 2 * MIB, now=50.0)
    ledger.turn(50.9)
    holds.pop()
    ledger.turn(50.95)
    assert client.told == ["go_on"]

    ledger.turn(51.8)
    assert client.told == ["go_on"]
    ledger.turn(52.0)

    assert client.told == ["go_on", "too_slow"]


def test_who_waits_without_holding_anything_is_not_refused_to_make_room() -> None:
    """The first in line would have nothing of it."""
    ledger, first, second = ByteLedger(MIB), Client(), Client()
    full = ledger.take(MIB)
    opened(ledger, MIB, first)
    opened(ledger, MIB, second)

    ledger.turn(PATIENCE_S - 0.1)

    assert (first.told, second.told) == ([], [])
    assert full is not None


def test_room_that_was_given_back_in_time_is_given_to_who_has_waited_longest() -> None:
    """Though its patience ends with the very turn that finds the room."""
    ledger, client = ByteLedger(MIB), Client()
    full = ledger.take(MIB)
    opened(ledger, MIB, client)
    assert full is not None
    full.close()

    ledger.turn(PATIENCE_S)

    assert client.told == ["go_on"]


def test_the_last_byte_of_room_is_given_and_none_beyond_it() -> None:
    """To a chunked body that is no longer small, to small ones that are whole, and to those that are not."""
    wanted = SMALL_BYTES + 1 + READ_BYTES
    for missing in (0, 1):
        ledger, client = ByteLedger(MIB), Client()
        full = ledger.take(MIB - wanted + missing)
        grows = opened(ledger, None, client)
        assert grows.take(SMALL_BYTES + 1, 0.0)
        ledger.turn(0.1)
        assert client.told == []
        assert (grows.is_waiting, ledger.room) == ((True, wanted - 1) if missing else (False, 0))
        del full

    ledger = ByteLedger(MIB)
    full = ledger.take(MIB - 2000)
    assert ledger.take_small(ledger.half)
    assert not ledger.take_small(2001)
    assert ledger.take_small(1000)
    assert ledger.take_small(1000)
    assert not ledger.take_small(1)
    ledger.release_small(1000)
    parts = [opened(ledger, SMALL_BYTES) for _ in range(ledger.half // SMALL_BYTES + 1)]
    assert all(part.take(SMALL_BYTES, 0.0) for part in parts[:-1])
    assert not parts[-1].take(1001, 0.0)
    assert parts[-1].take(1000, 0.0)
    assert ledger.room == 0
    assert not ledger.take_small(1)
    assert full is not None


def test_a_small_body_that_goes_to_the_application_counts_in_the_reserve_until_nothing_refers_to_it() -> None:
    """And is refused where the reserve has no room, nor anything else."""
    ledger = ByteLedger(MIB)
    full = ledger.take(MIB)
    hold = ledger.take(SMALL_BYTES)
    assert hold is not None
    assert ledger.figures() == {"bodies": MIB, "small_bodies": SMALL_BYTES, "waiting": 0, "answers": 0}

    assert ledger.take_small(ledger.half - SMALL_BYTES)
    assert ledger.take(1) is None
    del hold
    assert ledger.figures()["small_bodies"] == ledger.half - SMALL_BYTES
    hold = ledger.take(SMALL_BYTES)
    del hold
    assert ledger.take(1) is not None, "what was given back is there at once"

    parts = [opened(ledger, SMALL_BYTES) for _ in range(ledger.half // SMALL_BYTES)]
    assert all(part.take(SMALL_BYTES, 0.0) and part.complete() for part in parts)
    another = opened(ledger, 1)
    assert not another.take(1, 0.0)
    del parts
    assert another.take(1, 0.0)
    assert full is not None


def test_a_body_that_has_come_or_gone_keeps_neither_its_connection_nor_a_place_in_the_books() -> None:
    """However it ended: a server that runs for months forgets what is over."""
    ledger = ByteLedger(MIB)
    clients = [Client() for _ in range(4)]
    references = [weakref.ref(client) for client in clients]
    whole, closed, emptied, waits = (opened(ledger, MIB // 3, client) for client in clients)
    assert whole.take(MIB // 3, 0.0)
    assert whole.complete()
    for hold in (closed, emptied, waits):
        hold.close()
    del clients
    gc.collect()
    assert [reference() for reference in references] == [None] * 4

    del hold, closed, emptied, waits
    assert [thing for thing in gc.get_objects() if type(thing) is Hold and thing._ledger is ledger] == [whole]


def test_a_ledger_without_a_bound_has_room_for_whatever_a_machine_could_hold() -> None:
    """`max_bytes_in_flight=0`."""
    assert ByteLedger(UNBOUNDED).take(1 << 60) is not None


def test_what_is_held_is_told_as_metrics_by_kind() -> None:
    """Under the names that dashboards have."""
    ledger = ByteLedger(MIB)
    hold = ledger.take(100_000)

    assert {name: dict(read(ledger)) for name, read in FAMILIES} == {
        "marserve_bytes_in_flight": {"bodies": 100_000, "small_bodies": 0, "waiting": 0, "answers": 0},
        "marserve_bytes_in_flight_limit": {"": MIB},
    }
    assert hold is not None


def test_an_older_body_that_grows_goes_before_younger_ones_that_wait() -> None:
    """Else chunked ones would be overtaken at each step; and room that is given back is used at once."""
    rooms: list[int] = []
    ledger, old, young = ByteLedger(MIB, lambda: rooms.append(1)), Client(), Client()
    grows = opened(ledger, None, old)
    full = opened(ledger, 900_000)
    large = opened(ledger, 300_000, young)
    assert grows.take(SMALL_BYTES + 1, 0.0)
    assert ledger.waiting == [grows, large]
    assert rooms == []

    full.close()

    assert rooms == [1]
    ledger.turn(0.1)
    assert (old.told, young.told) == (["go_on"], ["go_on"])
    rooms.clear()
    large.close()
    assert rooms == [], "nobody waits"


def test_an_older_body_that_grows_is_given_what_is_free_though_younger_ones_wait_for_more() -> None:
    """Those behind the first in line are given nothing before it, however little they want."""
    ledger = ByteLedger(MIB)
    grows = opened(ledger, None)
    assert opened(ledger, MIB // 2).granted
    first = opened(ledger, MIB)

    assert grows.take(SMALL_BYTES + 1, 0.0)
    behind = opened(ledger, SMALL_BYTES + 1)

    assert not grows.is_waiting
    assert ledger.waiting == [first, behind]


def test_a_chunked_body_asks_for_more_when_its_next_read_might_not_fit() -> None:
    """Not before; then for as much again as it has."""
    ledger = ByteLedger(8 * MIB)
    hold = opened(ledger, None)
    assert hold.take(SMALL_BYTES + 1, 0.0)
    assert hold.take(1, 0.0)
    granted = hold.granted
    assert granted == 2 * (SMALL_BYTES + 1 + READ_BYTES)

    assert hold.take(granted - READ_BYTES - hold.received, 0.0)
    assert hold.granted == granted
    assert hold.take(1, 0.0)

    assert hold.granted == ledger.bodies == 2 * granted


def test_a_body_with_a_length_never_has_more_room_than_its_length() -> None:
    """However near its end is: only of a chunked one it is not known how much comes."""
    ledger = ByteLedger(MIB)
    hold = opened(ledger, MIB // 2)

    assert all(hold.take(MIB // 8, 0.0) for _ in range(4))

    assert hold.granted == ledger.bodies == MIB // 2
    assert hold.waited_s(100.0) == 0.0


def test_a_chunked_body_that_waits_stands_in_line_once_and_asks_for_no_more_meanwhile() -> None:
    """What comes of it counts ahead as far as it has no room yet."""
    ledger = ByteLedger(MIB)
    full = ledger.take(MIB // 2)
    hold = opened(ledger, None)
    assert hold.take(SMALL_BYTES + 1, 0.0)
    assert hold.take(hold.granted - hold.received, 0.0)
    assert (hold.is_waiting, ledger.ahead, hold.waited_s(2.0)) == (True, 0, 2.0)
    wanted = hold.wanted

    assert hold.take(1000, 1.0)
    assert hold.take(1000, 2.0)

    assert (ledger.waiting, ledger.ahead, hold.wanted) == ([hold], 2000, wanted)
    assert hold.waited_s(2.0) == 2.0
    assert full is not None


def test_a_turn_is_asked_for_when_room_was_given_back_and_only_then() -> None:
    """A body that waited and holds nothing leaves no more room than before."""
    rooms: list[int] = []
    ledger = ByteLedger(MIB, lambda: rooms.append(1))
    full = opened(ledger, MIB)
    leaves, stays = opened(ledger, MIB), opened(ledger, MIB)

    leaves.close()
    assert full.take(MIB, 0.0)
    assert full.complete()
    assert rooms == []
    full.close()

    assert rooms == [1]
    assert stays.is_waiting


def test_a_ledger_is_pressed_when_the_first_in_line_is_stuck_or_a_small_body_might_find_no_room() -> None:
    """Then whole requests that wait behind answers which nobody takes give way."""
    ledger = ByteLedger(MIB)
    full = ledger.take(MIB)
    assert not ledger.is_pressed(100.0)
    waiting = opened(ledger, MIB, now=100.0)
    assert not ledger.is_pressed(100.0 + STUCK_S - 0.1)
    assert ledger.is_pressed(100.0 + STUCK_S)
    waiting.close()
    assert not ledger.is_pressed(200.0)

    assert ledger.take_small(ledger.half - SMALL_BYTES)
    assert not ledger.is_pressed(200.0)
    assert ledger.take_small(1)
    assert ledger.is_pressed(200.0)
    assert full is not None
    full.close()
    assert not ledger.is_pressed(200.0), "small bodies may have what is free beside their reserve"


# ------------------------------------------------------------------------------------------- worlds


class Sender:
    """A simulated client: sends `length` bytes at `rate` a second, chunked or with its length, and a server's use."""

    def __init__(self, world: World, length: int, rate: float, *, is_chunked: bool, uses_s: float) -> None:
        self.world, self.length, self.rate, self.is_chunked, self.uses_s = world, length, rate, is_chunked, uses_s
        self.received = 0
        self.is_open = True
        self.end = ""
        self.begun = world.now
        self.hold: Hold | None = world.ledger.open(None if is_chunked else length, self, world.now)
        self.body = HeldBytes()
        self.done_at: float | None = None

    @property
    def is_reading(self) -> bool:
        """Whether the server reads from it."""
        return self.hold is not None and not self.hold.is_waiting

    def go_on(self) -> None:
        """Read again."""

    def give_up(self, why: Refusal) -> None:
        """Refused."""
        self.end, self.is_open = why, False
        if self.hold is not None:
            self.hold.close()
        self.hold = None
        self.body = HeldBytes()

    def step(self, passed: float) -> None:
        """What happens to it in so many seconds."""
        if not self.is_open:
            return
        if self.done_at is not None:
            if self.world.now >= self.done_at:
                self.end, self.is_open, self.body = "answered", False, HeldBytes()
            return
        assert self.hold is not None
        if self.hold.is_waiting:
            return
        piece = min(int(self.rate * passed) + 1, READ_BYTES, self.length - self.received)
        self.received += piece
        self.body += b"x" * (piece // 1024)
        if not self.hold.take(piece, self.world.now):
            self.give_up("no_room")
        elif self.received == self.length:
            if self.hold.complete():
                assert self.hold.received == self.length
                self.body.hold = self.hold
                self.hold = None
                self.done_at = self.world.now + self.uses_s
            else:
                self.give_up("no_room")


class World:
    """A server's ledger and its clients, with a clock of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.ledger = ByteLedger(self.random.choice([2, 8, 32]) * MIB)
        self.senders: list[Sender] = []

    def run(self) -> None:
        """Clients come for 8 s; all have ended a while after."""
        draw = self.random
        while self.now < 8 or any(sender.is_open for sender in self.senders):
            assert self.now < 400, "somebody waits for ever"
            if self.now < 8 and draw.random() < 0.7:
                length = min(draw.choice([1000, SMALL_BYTES, 300_000, 2 * MIB, 7 * MIB]), self.ledger.limit)
                rate = draw.choice([30_000, 300_000, 3 * MIB, 50 * MIB])
                is_chunked, uses_s = draw.random() < 0.4, draw.choice([0.0, 0.2, 2.0])
                self.senders.append(Sender(self, length, rate, is_chunked=is_chunked, uses_s=uses_s))
            for sender in draw.sample(self.senders, len(self.senders)):
                sender.step(0.1)
            self.check()
            if draw.random() < 0.05:  # a client goes
                draw.choice(self.senders).give_up("no_room") if self.senders else None
            self.now = round(self.now + 0.1, 1)
            self.ledger.turn(self.now)
            self.check()

    def check(self) -> None:
        """The bounds hold, and no byte is in the books that no client has."""
        ledger = self.ledger
        figures = ledger.figures()
        assert min(figures.values()) >= 0
        half = ledger.reserve // 2
        assert figures["bodies"] + max(0, ledger.small - half) + max(0, ledger.parts - half) <= ledger.limit
        assert figures["waiting"] <= ledger.reserve
        held = sum(sender.received for sender in self.senders if sender.is_open)
        assert held <= sum(figures.values())
        assert all(hold.waited_s(self.now) <= PATIENCE_S + 0.2 for hold in ledger.waiting)


@pytest.mark.parametrize("seed", range(10))
def test_in_any_world_the_sum_keeps_its_bound_and_every_body_ends(seed: int) -> None:
    """Answered or refused; in the end nothing is held."""
    world = World(seed)

    world.run()

    ends = {sender.end for sender in world.senders}
    assert "answered" in ends
    assert ends <= {"answered", "no_room", "too_slow"}
    assert world.ledger.figures() == {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}
    assert not world.ledger.waiting
