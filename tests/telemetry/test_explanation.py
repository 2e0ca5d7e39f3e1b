"""Why a request took as long as it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from marserve.messages import Work
from marserve.telemetry.explanation import CAUSES, Cause, Evidence, explain
from marserve.telemetry.happenings import Happening, Kind
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.timeline import BatchTimes, Timeline

M = StageSeconds("m", "1", (0.1,))


class World:
    """Requests of one version, which usually take 10 ms in batches of up to 4, and what the server did."""

    def __init__(self) -> None:
        self.known: list[Timeline] = []
        self.happenings: list[Happening] = []
        for number in range(20):
            self.run([f"usual{number}"], at=50.0 + number, handler_s=0.01)

    def run(
        self,
        names: list[str],
        at: float,
        *,
        handler_s: float,
        queued_s: float = 0.0,
        bytes_in: int = 100,
        is_first: bool = False,
        collected_s: float = 0.0,
        waited_s: float = 0.0,
        printed_s: float = 0.0,
    ) -> list[Timeline]:
        """A batch of these, which came `queued_s` before it was sent at `at`."""
        batch = BatchTimes("9000/0", len(names), at, is_first)
        batch.land(
            at + handler_s + 0.002, handler_s, Work(at + 0.0005, 0.0005, 0.0005, collected_s, waited_s, printed_s)
        )
        made = []
        for name in names:
            timeline = Timeline(name, at - queued_s - 0.0001, bytes_in, admitted_at=at - queued_s, of=M)
            timeline.left_in(batch)
            timeline.end(batch.landed_at + 0.0005, 200, 10)
            made.append(timeline)
        self.known += made
        return made

    def note(self, kind: Kind, began: float, ended: float, text: str = "it happened", model: str = "m") -> None:
        """Something that the server did."""
        self.happenings.append(Happening(kind, began, ended, model, "1", text))

    def explain(self, timeline: Timeline) -> tuple[str, str]:
        """The cause and the sentence."""
        found = explain(timeline, Evidence(self.known, self.happenings))
        assert sum(found.seconds.values()) == pytest.approx(timeline.wall_s)
        return found.cause, found.why


def slow_handler(world: World) -> Timeline:
    """Alone, and slow."""
    return world.run(["slow"], 100.0, handler_s=0.8)[0]


def behind_a_slow_one(world: World) -> Timeline:
    """The only worker ran another request."""
    world.run(["long"], 99.5, handler_s=0.5)
    return world.run(["slow"], 100.0, handler_s=0.01, queued_s=0.4)[0]


def behind_full_batches(world: World) -> Timeline:
    """More came than leave."""
    for number in range(6):
        world.run([f"f{number}{place}" for place in "abcd"], 99.0 + number / 10, handler_s=0.09)
    return world.run(["slow", "b", "c", "d"], 99.6, handler_s=0.09, queued_s=0.55)[0]


def with_a_slow_mate(world: World) -> Timeline:
    """One of the batch takes long."""
    mine, mate = world.run(["slow", "mate"], 100.0, handler_s=0.7)
    mate.bytes_in = 5000
    return mine


def of_a_cold_worker(world: World) -> Timeline:
    """The worker was started for it."""
    world.note("load", 99.0, 100.0)
    return world.run(["slow"], 100.0, handler_s=0.01, queued_s=0.9)[0]


def in_a_first_batch(world: World) -> Timeline:
    """The handler warms up."""
    return world.run(["slow"], 100.0, handler_s=0.5, is_first=True)[0]


def after_an_eviction(world: World) -> Timeline:
    """It was put to sleep for another model."""
    world.note("eviction", 90.0, 90.0)
    world.note("load", 99.0, 100.0)
    return world.run(["slow"], 100.0, handler_s=0.01, queued_s=0.9)[0]


def while_the_loop_stood(world: World) -> Timeline:
    """Something held the event loop."""
    world.note("stall", 99.2, 100.0, model="")
    timeline = world.run(["slow"], 100.0, handler_s=0.01)[0]
    timeline.began = 99.2
    return timeline


def while_the_loop_was_busy(world: World) -> Timeline:
    """Too short for a stall that is noted."""
    timeline = world.run(["slow"], 100.0, handler_s=0.01)[0]
    assert timeline.last is not None
    timeline.last.landed_at += 0.2
    timeline.written_at += 0.2
    return timeline


def of_a_server_at_rest(world: World) -> Timeline:
    """All is quick, and most of it is the way to the worker and back."""
    timeline = world.run(["quick"], 100.0, handler_s=0.0003)[0]
    assert timeline.last is not None
    timeline.body_at = timeline.began + 0.00005
    return timeline


def with_a_large_body(world: World) -> Timeline:
    """It is 64 MiB, and comes fast."""
    timeline = world.run(["slow"], 100.0, handler_s=0.01, bytes_in=64 << 20)[0]
    timeline.body_at, timeline.head_at, timeline.began = timeline.began, timeline.began - 0.5, timeline.began - 0.5
    return timeline


def of_a_slow_client(world: World) -> Timeline:
    """It is small, and comes slowly."""
    timeline = world.run(["slow"], 100.0, handler_s=0.01)[0]
    timeline.body_at, timeline.head_at, timeline.began = timeline.began, timeline.began - 3.0, timeline.began - 3.0
    return timeline


def of_a_client_that_takes_slowly(world: World) -> Timeline:
    """A large answer."""
    timeline = world.run(["slow"], 100.0, handler_s=0.01)[0]
    timeline.bytes_out = 10 << 20
    timeline.written_at += 4.0
    return timeline


def of_a_client_that_takes_its_stream_slowly(world: World) -> Timeline:
    """The worker was held meanwhile."""
    timeline = world.run(["slow"], 100.0, handler_s=2.0)[0]
    timeline.first_piece_at = 100.1
    timeline.hold(100.2)
    timeline.hold(100.3)
    timeline.resume(101.9)
    return timeline


def beside_neighbours(world: World) -> Timeline:
    """Other processes had the processor."""
    return world.run(["slow"], 100.0, handler_s=0.5, waited_s=0.4)[0]


def while_it_printed(world: World) -> Timeline:
    """The log is read slowly."""
    return world.run(["slow"], 100.0, handler_s=0.5, printed_s=0.4)[0]


def while_it_collected(world: World) -> Timeline:
    """In the worker."""
    return world.run(["slow"], 100.0, handler_s=0.5, collected_s=0.4)[0]


def while_the_server_collected(world: World) -> Timeline:
    """In the server's process."""
    world.note("collection", 99.5, 100.0, model="")
    timeline = world.run(["slow"], 100.0, handler_s=0.01)[0]
    timeline.began = 99.5
    return timeline


def whose_node_waited(world: World) -> Timeline:
    """A workflow's: its second node waited for a worker that ran another request."""
    world.run(["long"], 99.5, handler_s=0.5)
    first, second = world.run(["n"], 99.5, handler_s=0.05)[0], world.run(["n"], 100.0, handler_s=0.01, queued_s=0.4)[0]
    del world.known[-2:]
    return made_of(world, ("node first", first), ("node second", second))


def made_of(world: World, *parts: tuple[str, Timeline]) -> Timeline:
    """A request that made these, one after the other."""
    began, ended = parts[0][1].began, parts[-1][1].written_at
    batch = BatchTimes("", 1, began)
    batch.land(ended, ended - began, Work(began, 0.0, 0.0))
    whole = Timeline("whole", began, 100, admitted_at=began, of=StageSeconds("w", "", (0.1,)))
    whole.left_in(batch)
    whole.parts = []
    for what, part in parts:
        part.what = what
        whole.parts.append(part)
    whole.end(ended, 200, 10)
    world.known.append(whole)
    return whole


def test_which_node_took_the_time_is_said() -> None:
    """And why: as of a request of its own. Those that ran in nodes are what others waited for, too."""
    world = World()

    cause, why = world.explain(whose_node_waited(world))
    behind = world.run(["behind"], 100.012, handler_s=0.001, queued_s=0.011)[0]

    assert cause == "queue"
    assert "node second took 41" in why
    assert "it waited for a worker; one ran a batch of 1, request long" in why
    assert "request n, for 10.0 ms" in world.explain(behind)[1]


def after_a_rollback(world: World) -> Timeline:
    """Another version gave it back."""
    world.note("rollback", 99.9, 99.9)
    timeline = world.run(["slow"], 100.0, handler_s=0.01, queued_s=0.8)[0]
    timeline.moved_from = "2"
    return timeline


FAULTS: dict[Callable[[World], Timeline], Cause] = {
    slow_handler: "handler",
    behind_a_slow_one: "queue",
    behind_full_batches: "full_batches",
    with_a_slow_mate: "slow_mate",
    of_a_cold_worker: "cold_worker",
    in_a_first_batch: "cold_worker",
    after_an_eviction: "eviction",
    while_the_loop_stood: "loop_stalled",
    while_the_loop_was_busy: "loop_stalled",
    of_a_server_at_rest: "handler",
    with_a_large_body: "large_body",
    of_a_slow_client: "slow_client",
    of_a_client_that_takes_slowly: "slow_client",
    of_a_client_that_takes_its_stream_slowly: "slow_client",
    beside_neighbours: "neighbour",
    while_it_printed: "printing",
    while_it_collected: "garbage_collection",
    while_the_server_collected: "garbage_collection",
    after_a_rollback: "rollback",
}


@pytest.mark.parametrize("make", FAULTS, ids=lambda make: make.__name__)
def test_the_cause_of_most_of_the_time_is_named(make: Callable[[World], Timeline]) -> None:
    """Each second belongs to one cause."""
    world = World()

    assert world.explain(make(world))[0] == FAULTS[make]


def test_every_cause_is_tried() -> None:
    """None is a word that nothing ever says."""
    assert set(FAULTS.values()) == set(CAUSES)


def test_of_a_quick_request_it_is_said_that_nothing_held_it() -> None:
    """No loop stood still: the server's own work was little, though it was most of it."""
    world = World()
    found = explain(of_a_server_at_rest(world), Evidence(world.known, []))

    assert found.why == "2.9 ms: nothing held it, and 1.6 ms of this is the server's own work"
    assert found.also == []


def test_a_quick_request_that_was_held_as_well_is_not_said_to_have_been_held_by_nothing() -> None:
    """What held it stands beside."""
    world = World()
    found = explain(world.run(["quick"], 100.0, handler_s=0.0001, queued_s=0.001)[0], Evidence(world.known, []))

    assert found.cause == "handler"
    assert found.why == "2.7 ms: the work on it, and 1.6 ms of this is the server's own work"
    assert found.also == ["1.0 ms: it waited for a worker, or for others to fill its batch"]


def test_the_servers_work_stands_beside_a_larger_cause() -> None:
    """If it is a tenth of the whole."""
    world = World()
    found = explain(world.run(["quick"], 100.0, handler_s=0.003)[0], Evidence(world.known, []))

    assert (found.cause, found.why) == ("handler", "4.0 ms: the handler ran it")
    assert found.also == ["1.6 ms: the server's own work"]


@pytest.mark.parametrize(("more_s", "cause"), [(0.003, "handler"), (0.004, "loop_stalled")])
def test_the_loop_was_busy_only_if_the_servers_work_took_long(more_s: float, cause: Cause) -> None:
    """Five milliseconds and more."""
    world = World()
    timeline = world.run(["a"], 100.0, handler_s=0.0001)[0]
    assert timeline.last is not None
    timeline.last.landed_at += more_s
    timeline.written_at += more_s

    assert world.explain(timeline)[0] == cause


def test_a_request_that_came_in_two_pieces_has_no_slow_client() -> None:
    """Both came at once; it is one only from five milliseconds on."""
    world = World()
    timeline = world.run(["a"], 100.0, handler_s=0.0001)[0]
    timeline.body_at, timeline.head_at, timeline.began = timeline.began, timeline.began - 0.004, timeline.began - 0.004

    assert world.explain(timeline)[0] == "handler"


def test_the_request_that_it_waited_for_is_named() -> None:
    """With how long its batch took."""
    world = World()

    assert world.explain(behind_a_slow_one(world))[1] == (
        "400.0 ms: it waited for a worker; one ran a batch of 1, request long, for 500.0 ms meanwhile"
    )


def test_a_larger_mate_is_named() -> None:
    """It is the likely one."""
    world = World()

    assert "request mate, of 4.9 KiB, is slow" in world.explain(with_a_slow_mate(world))[1]


def test_the_larger_mate_itself_is_not_slow_by_its_mates() -> None:
    """The handler took that long for it."""
    world = World()
    with_a_slow_mate(world)

    assert world.explain(world.known[-1])[0] == "handler"


def test_what_happened_to_another_model_is_not_the_cause() -> None:
    """A load of its own would be."""
    world = World()
    world.note("load", 99.0, 100.0, model="other")

    assert world.explain(world.run(["slow"], 100.0, handler_s=0.01, queued_s=0.9)[0])[0] == "queue"


def test_a_batch_that_began_long_before_is_found_among_many_that_were_sent_after_it() -> None:
    """On a second worker the short ones passed by."""
    world = World()
    (long,) = world.run(["long"], 90.0, handler_s=9.9)
    for number in range(30):
        world.run([f"short{number}"], 90.1 + number / 10, handler_s=0.01)

    cause, why = world.explain(world.run(["slow"], 100.0, handler_s=0.01, queued_s=4.0)[0])

    assert cause == "queue"
    assert f"request {long.id}," in why


def test_other_causes_of_a_tenth_and_more_are_named_beside() -> None:
    """The larger first."""
    world = World()
    found = explain(
        world.run(["slow"], 100.0, handler_s=1.0, collected_s=0.2, printed_s=0.3)[0], Evidence(world.known, [])
    )

    assert found.cause == "handler"
    assert [sentence.partition(":")[2].strip() for sentence in found.also] == [
        "the worker waited while it printed",
        "the worker collected garbage while it ran the batch",
    ]


def test_a_request_that_nothing_is_known_of_is_explained_all_the_same() -> None:
    """As one that was refused at once."""
    refused = Timeline("a", 1.0)
    refused.end(1.0, 503, 0, "queue_full")

    assert explain(refused, Evidence([], []))[:2] == ("handler", "0.0 ms: nothing held it")


def test_a_request_that_was_refused_was_held_by_nothing() -> None:
    """It took what the server needs to say so."""
    refused = Timeline("a", 1.0)
    refused.end(1.0004, 503, 0, "queue_full")

    assert explain(refused, Evidence([], [])).why == "0.4 ms: nothing held it, and this is the server's own work"
