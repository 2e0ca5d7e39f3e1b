"""The timelines of `docs/batching.md` and `docs/batching-goal.md`, played: they draw what the dispatcher does."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from marserve.errors import WorkerDied
from marserve.messages import Part, Raised, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Question
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from support.receivers import Told


class Timeline:
    """Workers that take a while, requests named by letters (capitals are long ones), and a clock in milliseconds.

    `batches` are (when it began, its letters, its worker). A batch with a letter of `guilty` raises, one with a letter
    of `deadly` ends its worker, in whose place nobody comes.
    """

    def __init__(self, run_ms: float, guilty: str = "", deadly: str = "", workers: int = 1, **options: Any) -> None:
        self.batches: list[tuple[float, str, str]] = []
        self.told: dict[str, Told] = {}
        self.sent: list[tuple[float, str]] = []
        self.asked: list[tuple[float, str]] = []
        self._run_ms, self._guilty, self._deadly = run_ms, guilty, deadly
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._flights: dict[str, list[Flight]] = {}
        self.dispatcher = Dispatcher(PoolOptions("m", "1", 1, 4, **options), VersionMetrics("m", "1"), self)
        self.dispatcher.living_slots = workers
        for number in range(workers, 0, -1):
            self.dispatcher.open_lane(f"worker {number}", 0.0)

    def play(self, arrivals: dict[str, float]) -> None:
        """Let the requests come at their milliseconds, and everything come to rest."""
        for letter, at in arrivals.items():
            self._at(at, lambda letter=letter: self._submit(letter))  # type: ignore[misc]
        while True:
            wake = self.dispatcher.next_wake()
            if not self._events and wake is None:
                return
            if self._events and (wake is None or self._events[0][0] <= wake * 1000):
                self._now, _, event = heapq.heappop(self._events)
                event()
            else:
                assert wake is not None
                self._now = max(self._now, wake * 1000)
                self.dispatcher.pump(self._now / 1000)

    def ends(self) -> dict[str, str]:
        """How each request ended: `answer`, or the name of its error."""
        return {letter: type(told.ends[0]).__name__ for letter, told in self.told.items()}

    def send(self, key: str, flight: Flight) -> None:
        """A batch leaves."""
        self.sent.append((self._now, letters_of(flight)))
        flights = self._flights.setdefault(key, [])
        flights.append(flight)
        if len(flights) == 1:
            self._begin(key)

    def ask_lengths(self, key: str, question: Question) -> None:
        """A worker is asked for lengths, and answers before it begins the batch that follows."""
        self.asked.append((self._now, "".join(job.request.id for job in question.jobs)))
        lengths = [len(job.request.parts[0].body) for job in question.jobs]
        self._at(self._now, lambda: self.dispatcher.told_lengths(key, question.number, 0.0, lengths))

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """Nobody cancels here."""

    def lane_emptied(self, key: str) -> None:
        """No worker is retired here."""

    def all_ended(self) -> None:
        """The last one left."""

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, len(self._events) + len(self.sent), event))

    def _submit(self, letter: str) -> None:
        told = self.told[letter] = Told()
        body = letter.encode() * (900 if letter.isupper() else 100)
        self.dispatcher.submit(Request(letter, [Part("body", body)]), told, self._now / 1000)

    def _begin(self, key: str) -> None:
        self.batches.append((self._now, letters_of(self._flights[key][0]), key))
        self._at(self._now + self._run_ms, lambda: self._end(key))

    def _end(self, key: str) -> None:
        flight = self._flights[key][0]
        letters, now, run_s = letters_of(flight), self._now / 1000, self._run_ms / 1000
        if set(letters) & set(self._deadly):
            self.dispatcher.died(key, flight.number, WorkerDied("exit"), may_retry=True, now=now)
            return
        self._flights[key].pop(0)
        if self._flights[key]:
            self._begin(key)
        if set(letters) & set(self._guilty):
            self.dispatcher.raised(key, Raised(flight.number, run_s, "handler", "Prediction failed", 503, ""), now)
        else:
            results = [Result(200, "", [])] * len(letters)
            self.dispatcher.finished(key, flight.number, run_s, results, [b""] * len(letters), now)


def letters_of(flight: Flight) -> str:
    """The requests of a batch."""
    return "".join(job.request.id for job in flight.jobs)


ARRIVALS = {"a": 0.0, "b": 5.0, "c": 10.0, "d": 20.0}


def test_idle_nobody_waits_while_a_worker_is_free() -> None:
    """`a` leaves alone, the rest when it is done."""
    timeline = Timeline(20.0, batch_size=4, max_batch_delay_s=0.1)

    timeline.play(ARRIVALS)

    assert [(at, letters) for at, letters, _ in timeline.batches] == [(0.0, "a"), (20.0, "bcd")]


def test_fixed_waits_until_the_batch_is_full_or_the_delay_over() -> None:
    """TorchServe's way."""
    full = Timeline(20.0, batch_size=4, max_batch_delay_s=0.1, batch_policy="fixed")
    short = Timeline(20.0, batch_size=4, max_batch_delay_s=0.1, batch_policy="fixed")

    full.play(ARRIVALS)
    short.play({"a": 0.0, "b": 5.0, "c": 10.0})

    assert [(at, letters) for at, letters, _ in full.batches] == [(20.0, "abcd")]
    assert [(at, letters) for at, letters, _ in short.batches] == [(100.0, "abc")]


def test_a_full_batch_is_sent_ahead_to_a_quick_handler() -> None:
    """And begun the moment the one before ends."""
    timeline = Timeline(5.0, batch_size=4, max_batch_delay_s=0.1)
    timeline.play({"z": 0.0})

    timeline.play({"a": 10.0, **dict.fromkeys("bcde", 13.0)})

    assert timeline.sent[1:] == [(10.0, "a"), (13.0, "bcde")]
    assert [(at, letters) for at, letters, _ in timeline.batches[1:]] == [(10.0, "a"), (15.0, "bcde")]


def test_a_batch_that_raises_is_cut_until_the_guilty_request_stands_alone() -> None:
    """Its mates are answered, and those who came later run after them."""
    timeline = Timeline(20.0, guilty="c", batch_size=4)

    timeline.play({"x": 0.0, **dict.fromkeys("abcd", 1.0), **dict.fromkeys("ef", 30.0)})

    assert [letters for _, letters, _ in timeline.batches] == ["x", "abcd", "ab", "cd", "c", "d", "ef"]
    assert {letter for letter, end in timeline.ends().items() if end != "Answer"} == {"c"}


def test_what_a_dead_worker_held_is_run_again_one_by_one() -> None:
    """Who kills twice is given up."""
    timeline = Timeline(20.0, deadly="b", workers=3, batch_size=3)
    busy = {"x": 0.0, "y": 0.0, "z": 0.0}

    timeline.play({**busy, **dict.fromkeys("abc", 1.0)})

    batches = [(letters, worker) for _, letters, worker in timeline.batches[3:]]
    assert batches[0][0] == "abc"
    assert sorted(letters for letters, _ in batches[1:]) == ["a", "b", "c"]
    assert timeline.ends()["b"] == "WorkerDied"
    assert [timeline.ends()[letter] for letter in "ac"] == ["Answer", "Answer"]


# ------------------------------------------------------------------------------------------- batches for a goal


def for_goal(run_ms: float, *, size: int = 8, **options: Any) -> Timeline:
    """A timeline whose policy knows already that batches of any size and length take so long."""
    timeline = Timeline(run_ms, batch_policy="goal", latency_goal_s=1.0, batch_size=size, **options)
    assert timeline.dispatcher.goal is not None
    for length in (1, 100, 900):
        for number in range(1, size + 1):
            timeline.dispatcher.goal.learn(number, run_ms / 1000, length=length)
    return timeline


def test_goal_nobody_waits_but_for_the_batch_before() -> None:
    """Batches grow as requests wait for busy workers."""
    timeline = for_goal(20.0)

    timeline.play({"a": 0.0, "b": 5.0, "c": 10.0, "d": 15.0, "e": 25.0, "f": 30.0})

    assert [(at, letters) for at, letters, _ in timeline.batches] == [(0.0, "a"), (20.0, "bcd"), (40.0, "ef")]


def test_goal_a_full_batch_of_a_quick_handler_is_sent_ahead() -> None:
    """And begun the moment the one before ends; a slow handler is sent nothing."""
    quick, slow = for_goal(2.0, size=4), for_goal(20.0, size=4)

    for timeline in (quick, slow):
        timeline.play({"z": 0.0})  # how long the worker's batches take is known from then on
        timeline.play({"a": 100.0, **dict.fromkeys("bcde", 100.5)})

    assert quick.sent[1:] == [(100.0, "a"), (100.5, "bcde")]
    assert [(at, letters) for at, letters, _ in quick.batches[1:]] == [(100.0, "a"), (102.0, "bcde")]
    assert slow.sent[1:] == [(100.0, "a"), (120.0, "bcde")]


LONG_AND_SHORT = {"x": 0.0, "A": 5.0, "b": 6.0, "C": 7.0, "d": 10.0, "e": 15.0}


def test_goal_inputs_of_one_length_leave_together_behind_the_one_whose_turn_it_is() -> None:
    """`b` waits for a batch that it would not fit into."""
    timeline = for_goal(20.0, length_from="body_bytes")

    timeline.play(LONG_AND_SHORT)

    assert [(at, letters) for at, letters, _ in timeline.batches] == [(0.0, "x"), (20.0, "AC"), (40.0, "bde")]


def test_goal_the_question_about_those_left_behind_goes_before_the_batch() -> None:
    """So the answer is there before the next batch is formed; who comes to a free worker is never asked about."""
    timeline = for_goal(20.0)
    timeline.dispatcher.offer_lengths()

    timeline.play(LONG_AND_SHORT)

    assert timeline.asked == [(20.0, "bde")]
    assert [(at, letters) for at, letters, _ in timeline.batches] == [(0.0, "x"), (20.0, "AC"), (40.0, "bde")]
