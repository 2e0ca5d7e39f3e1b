"""A world without processes: a clock that jumps, workers that are numbers, and everything that can go wrong, by seed.

It drives the real `Dispatcher` through its real interface. Each request carries its own number as its body; a worker
echoes it, so that an answer that went to the wrong client shows. Some worlds have a clock that rings late, as real ones
do; some are scaled to nothing for a while; some clients send another request, or give up others, while they are told.
In some worlds requests have priorities, in some handlers say how long inputs are, and workers die of that question.
In some requests belong to sequences, run in steps that others join (continuous batching), or run many at once. In some
the server reads answers late: those of several batches together, or none of them any more when the worker has died.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from marserve.errors import (
    BadFrame,
    DeadlinePassed,
    FingerprintRefused,
    HandlerFailed,
    MarserveError,
    NoWorker,
    QueueFull,
    SequenceGone,
    SequencesFull,
    WaitTooLong,
    WorkerDied,
)
from marserve.messages import Answer, Part, Raised, Request, Result
from marserve.pool.dispatch.batcher import MAX_IN_FLIGHT, MAX_JOBS_IN_FLIGHT
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Job, JobState, Question
from marserve.pool.dispatch.queue import AGEING_S, LEAST_URGENT
from marserve.pool.options import PoolOptions, SequenceOptions
from marserve.telemetry.metrics.counts import VersionMetrics

ECHO = Result(200, "", [])
MORE = Result(200, "", [("ts_stream_next", "true")])
LAST = Result(200, "", [("ts_stream_next", "false")])


@dataclass
class Client:
    """One request's sender, and all that it was told."""

    nonce: bytes
    kind: str
    deadline: float | None
    job: Job | None = None
    is_gone: bool = False
    refused: MarserveError | None = None
    ends: list[object] = field(default_factory=list)
    told_when_gone: bool = False
    killed: int = 0
    pieces: list[bytes] = field(default_factory=list)
    sequence: str | None = None
    begins: bool = False
    ends_sequence: bool = False
    steps: int = 1
    ended_at: float = 0.0
    when_told: Callable[[], float] = lambda: 0.0
    when_streamed: Callable[[], None] = lambda: None

    def on_answer(self, answer: Answer) -> None:
        """The whole answer."""
        self._told(answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece of a stream."""
        if last:
            self._told(piece)
        else:
            self.told_when_gone = self.told_when_gone or self.is_gone
            self.pieces.append(piece.body)
            self.when_streamed()

    def on_error(self, error: MarserveError) -> None:
        """An error."""
        self._told(error)

    def _told(self, what: object) -> None:
        self.told_when_gone = self.told_when_gone or self.is_gone
        self.ends.append(what)
        self.ended_at = self.when_told()


@dataclass
class FakeWorker:
    """A worker: its flights in order, the one it runs, whether it still lives."""

    key: str
    flights: list[Flight] = field(default_factory=list)
    begun: int = 0
    questions: list[Question] = field(default_factory=list)
    is_running: bool = False
    is_dead: bool = False
    left: dict[str, int] = field(default_factory=dict)
    unread: list[tuple[int, float, list[Result], list[bytes]]] = field(default_factory=list)


@dataclass
class Home:
    """Where a sequence ran last, since when, and whether it has ended."""

    key: str
    last: float
    number: int
    is_over: bool = False


class World:
    """One seed's world. `run()` plays it to its end."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        dice = self.dice
        self.options = PoolOptions(
            "m",
            "1",
            min_workers=1,
            max_workers=4,
            batch_size=dice.choice([1, 2, 4, 16]),
            max_batch_delay_s=dice.choice([0.0, 0.005, 0.1]),
            batch_policy=dice.choice(["idle", "idle", "fixed", "goal"]),
            latency_goal_s=dice.choice([0.001, 0.02, 0.5]),
            length_from=dice.choice([None, "body_bytes"]),  # where none, the handler may be asked
            padding_budget=dice.choice([0.0, 0.3]),
            queue_size=dice.choice([2, 10, 100]),
            use_job_ticket=dice.random() < 0.1,
            client_timeout_s=dice.choice([None, None, 0.3]),
            retry_on_worker_death=dice.random() < 0.9,
            batch_isolation=dice.random() < 0.9,
            default_priority=dice.choice([5, 5, 0, 9]),
        )
        self._modes = random.Random(f"mode {seed}")
        self.mode = self._modes.choice(["plain"] * 4 + ["sequences", "steps", "both", "concurrent"])
        self._choose_mode()
        self.metrics = VersionMetrics("m", "1")
        self.dispatcher = Dispatcher(self.options, self.metrics, self)
        self.homes: dict[str, Home] = {}
        self.begun_anew: dict[str, float] = {}
        self.lost_sequences = 0
        self.now = 0.0
        self.clients: list[Client] = []
        self.by_request: dict[str, Client] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.worker_numbers = count(1)
        self.slots = dice.randint(1, 4)
        self.problems: list[str] = []
        self.closing: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._run_s = dice.choice([0.0001, 0.0005, 0.01, 0.2])
        self._late_s = dice.choice([0.0, 0.03, 0.5])
        self._streams = dice.random() < 0.3
        self._urgency = dice.choice([0.0, 0.0, 0.1, 0.7])  # how many requests name a priority
        self.displaced = 0
        self.sent: set[str] = set()
        self.held: set[str] = set()
        self.was_empty_of_workers = False
        self.is_asleep = False
        self._largest_batch = self.options.batch_size
        self._starts = random.Random(f"starts {seed}")
        self._lengths = random.Random(f"lengths {seed}")
        self._says_lengths = self._lengths.random() < 0.7
        self._dies_of_asking = self._lengths.choice([0.0, 0.05, 0.5])
        self.asked = self.died_of_asking = 0
        self._reads = random.Random(f"reads {seed}")
        self._reads_late = self.mode == "plain" and self._reads.random() < 0.4
        self.read_together = 0
        # Like their pools, these worlds have workers of one kind.
        self._overlaps = self.mode == "plain" and random.Random(f"overlap {seed}").random() < 0.3
        self.sent_ahead_overlapping = 0

    def _choose_mode(self) -> None:
        """Some worlds have workers that know something of requests between calls, or that run many at once."""
        dice, options = self._modes, self.options
        if self.mode in ("sequences", "both"):
            sequences = SequenceOptions(
                max_idle_s=dice.choice([0.02, 0.5]),
                timeout_s=dice.choice([0.0, 0.0, 0.0, 0.3]),
                queue_size=dice.choice([1, 4, 20]),
                most=dice.choice([1, 3, 10]),
                frees_ended=dice.random() < 0.3,
            )
            options = dataclasses.replace(options, sequences=sequences)
        if self.mode in ("steps", "both"):
            options = dataclasses.replace(options, continuous_batching=True)
        if self.mode == "concurrent":
            options = dataclasses.replace(
                options, is_concurrent=True, most_concurrent=dice.choice([2, 20]), response_timeout_s=1.0
            )
        if self.mode != "plain":
            policy = dice.choice(["idle", "fixed"]) if self.mode == "concurrent" else "idle"
            isolation = options.batch_isolation and self.mode == "concurrent"
            options = dataclasses.replace(options, batch_policy=policy, batch_isolation=isolation)
        self.options = options

    # ---------------------------------------------------------------------------------------------- the story

    def run(self) -> None:
        """Let everything happen, then let everything come to rest."""
        dice = self.dice
        recycles = random.Random(dice.random())
        self.dispatcher.living_slots = self.slots
        for _ in range(self.slots):
            self.at(dice.random() * 0.05, self.start_worker)
        span = dice.choice([0.05, 0.5, 3.0])
        for _ in range(dice.randint(5, 120)):
            self.at(dice.random() * span, self.send_request)
        for _ in range(dice.randint(0, 6)):
            self.at(dice.random() * span, self.kill_some_worker)
        for _ in range(dice.randint(0, 3)):
            self.at(dice.random() * span, self.swap_some_worker)
        for _ in range(recycles.randint(0, 4)):
            self.at(recycles.random() * span, self.recycle_some_worker)
        if dice.random() < 0.15:
            self.at(dice.random() * span, self.scale_to_nothing)
        elif dice.random() < 0.15:
            for _ in range(dice.randint(1, 5)):
                self.at(dice.random() * span, self.fall_asleep)
        for _ in range(dice.choice([0, 0, 3])):
            self.at(dice.random() * span, self.want_a_check)
        for _ in range(dice.choice([0, 0, 3])):
            self.at(dice.random() * span, self.reconfigure)
        steps = 0
        while self._events or self.dispatcher.next_wake() is not None:
            steps += 1
            if steps > 100_000:
                self.problems.append("the world does not come to rest")
                return
            wake = self.dispatcher.next_wake()
            if wake is not None:
                wake += dice.random() * self._late_s
            if self._events and (wake is None or self._events[0][0] <= wake):
                self.now, _, event = heapq.heappop(self._events)
                event()
            else:
                assert wake is not None
                self.now = max(self.now, wake)
                self.dispatcher.wake(self.now)
        self.check()

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have `event` happen at `when`."""
        heapq.heappush(self._events, (when, next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have `event` happen that many seconds from now."""
        self.at(self.now + seconds, event)

    # ---------------------------------------------------------------------------------------------- clients

    def send_request(self) -> None:
        """A client sends a request of some kind, perhaps with a deadline, and perhaps leaves later."""
        dice = self.dice
        number = len(self.clients)
        kind = dice.choices(["good", "bad", "poison", "hang"], [80, 6, 3, 1])[0]
        deadline = self.now + dice.random() * 0.5 if dice.random() < 0.2 else None
        client = Client(b"%d" % number, kind, deadline, when_told=lambda: self.be_told(client))
        client.when_streamed = lambda: self.be_slow(client)
        self.clients.append(client)
        self.by_request[str(number)] = client
        is_describe = dice.random() < 0.03
        priority = dice.randint(0, LEAST_URGENT) if dice.random() < self._urgency else None
        request = Request(
            str(number),
            [Part("body", client.nonce)],
            self._headers_of(client, is_describe=is_describe),
            deadline=deadline,
            is_describe=is_describe,
            priority=priority,
        )
        length = len(self.dispatcher.queue)
        was_idle = any(not worker.flights for worker in self.workers.values() if not worker.is_dead)
        if self.is_asleep:
            self.is_asleep = False
            self.after(0.05, self.wake_up)
        try:
            client.job = self.dispatcher.submit(request, client, self.now)
        except (NoWorker, FingerprintRefused, WaitTooLong, DeadlinePassed) as error:
            client.refused = error
            self._check_refusal(number, error, deadline, was_idle=was_idle)
            if client.ends:
                self.problems.append(f"{number}: refused and answered")
            return
        if client.begins and client.sequence is not None:
            self.begun_anew[client.sequence] = self.now
        # What dead workers gave back may have made it longer; who makes room for another leaves it as it is.
        if len(self.dispatcher.queue) > max(length, self.options.queue_size + self.options.batch_size):
            self.problems.append("the queue is longer than its bound")
        if dice.random() < 0.15:
            self.after(dice.random() * 0.3, lambda: self.hang_up(client))

    def _headers_of(self, client: Client, *, is_describe: bool) -> list[tuple[bytes, bytes]]:
        """What a client says of its sequence, if it has one; and for how many steps it will run."""
        dice = self._modes
        if is_describe:
            return []
        if self.options.continuous_batching:
            client.steps = dice.choice([1, 1, 2, 5])
        if self.options.sequences is None or dice.random() < 0.1:
            return []
        client.sequence = f"s{dice.randint(0, 5)}"
        headers = [(b"TS_request_sequence_id" if dice.random() < 0.1 else b"ts_request_sequence_id", client.sequence)]
        client.begins, client.ends_sequence = dice.random() < 0.3, dice.random() < 0.1
        if client.begins:
            headers.append((b"ts_request_sequence_start", "true"))
        if client.ends_sequence:
            headers.append((b"ts_request_sequence_end", "true"))
        return [(name, value.encode()) for name, value in headers]

    def _check_refusal(self, number: int, error: MarserveError, deadline: float | None, *, was_idle: bool) -> None:
        """A deadline is a reason to refuse only where there is one, and no worker is free."""
        if isinstance(error, SequencesFull | SequenceGone) and self.options.sequences is None:
            self.problems.append(f"{number}: refused for a sequence where there are none")
        if isinstance(error, WaitTooLong):
            if was_idle and not self.closing:
                self.problems.append(f"{number}: refused for its wait, though a worker was idle")
            if deadline is None and self.options.client_timeout_s is None:
                self.problems.append(f"{number}: refused for a deadline that it does not have")
        elif isinstance(error, DeadlinePassed) and (deadline is None or deadline > self.now):
            self.problems.append(f"{number}: refused as late before its deadline")

    def hang_up(self, client: Client) -> None:
        """A client leaves; some surfaces say so twice."""
        if client.job is None:  # it was told something before `submit` came back
            return
        if not client.ends:
            client.is_gone = True
        client.job.cancel()
        if self.dice.random() < 0.3:
            client.job.cancel()

    def be_told(self, client: Client) -> float:
        """A client hears its end, and may do something at once. Returns when that was."""
        if self.dice.random() < 0.05 and len(self.clients) < 300:
            self.send_request()
        if self.dice.random() < 0.05:
            self.hang_up(self.dice.choice(self.clients))
        return self.now

    def be_slow(self, client: Client) -> None:
        """A client that is streamed to may not keep up, and catch up later; or leave, or be told its end, before."""
        if client.job is not None and self.dice.random() < 0.5:
            client.job.hold()
            self.after(self.dice.random() * 0.2, client.job.resume)

    # ---------------------------------------------------------------------------------------------- workers

    def start_worker(self) -> None:
        """A worker has loaded the model, unless it is no longer wanted."""
        worker = FakeWorker(f"w{next(self.worker_numbers)}")
        if self.dispatcher.living_slots > 0:
            self.workers[worker.key] = worker
            if self._says_lengths:
                self.dispatcher.offer_lengths()
            self.dispatcher.open_lane(worker.key, self.now, overlaps=self._overlaps)

    def want_a_check(self) -> None:
        """The server wants a worker for itself, or does not any more."""
        if self.dice.random() < 0.2:
            self.dispatcher.want_no_lane()
        else:
            self.dispatcher.want_lane(self.lane_lent, self.now)

    def lane_lent(self, key: str, flight: Flight) -> None:
        """The dispatcher lends a worker."""
        worker = self.workers[key]
        if worker.is_dead or worker.flights or flight.jobs:
            self.problems.append(f"{key} was lent though it was not free")
        worker.flights.append(flight)
        worker.is_running = True
        worker.begun = flight.number
        self.after(self._run_s * self.dice.random(), lambda: self.end_check(worker, flight))

    def end_check(self, worker: FakeWorker, flight: Flight) -> None:
        """A lent worker is done."""
        if worker.is_dead:
            return
        self.read(worker)
        worker.flights.pop(0)
        worker.is_running = False
        self.dispatcher.end_loan(worker.key, flight.number, self.now)

    def reconfigure(self) -> None:
        """Batches are formed by other values from now on."""
        size = self.dice.choice([1, 2, 8])
        self._largest_batch = max(self._largest_batch, size)
        self.options = dataclasses.replace(self.options, batch_size=size)
        self.dispatcher.reconfigure(batch_size=size, max_batch_delay_s=self.dice.choice([0.0, 0.02]), now=self.now)

    def kill_some_worker(self) -> None:
        """A worker is killed, whatever it does."""
        alive = [worker for worker in self.workers.values() if not worker.is_dead]
        if alive:
            self.bury(self.dice.choice(alive), may_retry=True, cause="killed")

    def swap_some_worker(self) -> None:
        """A worker is retired and another comes in its place."""
        alive = [key for key, worker in self.workers.items() if not worker.is_dead and key not in self.closing]
        if alive:
            key = self.dice.choice(alive)
            self.closing.add(key)
            if self.dispatcher.close_lane(key):
                self.workers[key].is_dead = True
            self.after(0.01, self.start_worker)

    def recycle_some_worker(self) -> None:
        """A worker has served long enough: another is there before it is given nothing more."""
        alive = [key for key, worker in self.workers.items() if not worker.is_dead and key not in self.closing]
        if not alive or self.was_empty_of_workers:
            return
        key = self.dice.choice(alive)
        self.start_worker()
        self.closing.add(key)
        if self.dispatcher.close_lane(key):
            self.workers[key].is_dead = True

    def scale_to_nothing(self) -> None:
        """All workers are told to go when they are done; later there is one again, or not."""
        self.was_empty_of_workers = True
        self.dispatcher.living_slots = 0
        self.fail_a_start()
        for key, worker in self.workers.items():
            if not worker.is_dead:
                self.closing.add(key)
                if self.dispatcher.close_lane(key):
                    worker.is_dead = True
        self.dispatcher.fail_stranded(self.now)
        if self.dice.random() < 0.5:
            self.after(self.dice.random() * 0.2, self.scale_up_again)

    def fail_a_start(self) -> None:
        """A start has failed, once more or for the first time: the next one is known, or none is."""
        if self.dispatcher.living_slots > 0:
            return
        pause_s = self._starts.choice([None, 0.0, 0.05, 0.5, 4.0, 60.0])
        self.dispatcher.hold_for_start.note(None if pause_s is None else self.now + pause_s, self.now)
        self.dispatcher.fail_stranded(self.now)
        if self._starts.random() < 0.5:
            self.after(self._starts.random() * 2, self.fail_a_start)

    def scale_up_again(self) -> None:
        """There is a worker again."""
        self.dispatcher.living_slots = self.slots
        self.dispatcher.hold_for_start.end()
        self.start_worker()

    def fall_asleep(self) -> None:
        """If nobody asks there is no worker, though one may be waited for."""
        if not self.dispatcher.is_empty or self.dispatcher.living_slots <= 0:
            return
        self.is_asleep = True
        for key, worker in self.workers.items():
            if not worker.is_dead:
                self.closing.add(key)
                worker.is_dead = self.dispatcher.close_lane(key)

    def wake_up(self) -> None:
        """The worker that a request woke has loaded the model, or could not: then who waits is told so."""
        if self.dispatcher.living_slots > 0 and self.dice.random() < 0.2:
            self.was_empty_of_workers = True
            self.dispatcher.living_slots = 0
            self.fail_a_start()
            self.after(0.1, self.scale_up_again)
        else:
            self.start_worker()

    def send(self, key: str, flight: Flight) -> None:
        """The dispatcher sends a flight."""
        worker = self.workers[key]
        if worker.is_dead:
            self.problems.append(f"{key} was sent work after its end")
        flights = worker.flights
        if self.mode != "plain":
            self._check_modal_send(worker, flight)
            return
        if len(flights) >= MAX_IN_FLIGHT and len(flights) * len(flights[-1].jobs) >= MAX_JOBS_IN_FLIGHT:
            self.problems.append(f"{key} has {len(flights)} flights already")
        if flight.is_group and worker.flights:
            self.problems.append("a group was sent ahead")
        if self._overlaps and flights:
            self.sent_ahead_overlapping += 1
            if len(flights) >= MAX_IN_FLIGHT or flights[0].is_group:
                self.problems.append(f"{key} preprocesses beside a suspect, or has {len(flights)} flights already")
        # What was formed before the size was changed runs as it is.
        if not 1 <= len(flight.jobs) <= (self._largest_batch if flight.is_group else self.options.batch_size):
            self.problems.append(f"a batch of {len(flight.jobs)}")
        if any(job.deadline is not None and job.deadline <= self.now for job in flight.jobs):
            self.problems.append("a request was sent to a worker after its deadline")
        has_lengths = self.options.length_from is not None or self._says_lengths
        if not flight.is_group and not (self.options.batch_policy == "goal" and has_lengths):
            self._check_order(flight)
        if len(flight.jobs) > 1 and any(job.request.is_describe for job in flight.jobs):
            self.problems.append("a describe request has company")
        worker.flights.append(flight)
        if not worker.is_running:
            worker.is_running = True
            self.after(0.0001, lambda: self.begin(worker))

    def _check_modal_send(self, worker: FakeWorker, flight: Flight) -> None:
        """What must hold where a flight is a step, has sequences in it, or is one of many."""
        say = self.problems.append
        if worker.flights and self.mode != "concurrent":
            say(f"{worker.key} has {len(worker.flights)} flights already")
        if not 1 <= len(flight.jobs) <= self._largest_batch:
            say(f"a batch of {len(flight.jobs)}")
        held = sum(len(each.jobs) for each in worker.flights)
        has_room = not held or flight.is_group or held + len(flight.jobs) <= self.options.most_concurrent
        if self.mode == "concurrent" and not has_room:
            say(f"{worker.key} has more requests than it may")
        joined = [job for job in flight.jobs if not job.has_sent_pieces]
        if flight.is_group and len(joined) != 1 and self.mode in ("steps", "both"):
            say("one who is run again has joined with others")
        if any(job.deadline is not None and job.deadline <= self.now for job in flight.jobs):
            say("a request was sent to a worker after its deadline")
        if len(flight.jobs) > 1 and any(job.request.is_describe for job in flight.jobs):
            say("a describe request has company")
        if self.options.sequences is not None:
            self._check_sequences(worker, flight)
        worker.flights.append(flight)
        if self.mode == "concurrent":
            self.after(0.0001, lambda: self._run(worker, flight))
        elif not worker.is_running:
            worker.is_running = True
            self.after(0.0001, lambda: self.begin(worker))

    def _check_sequences(self, worker: FakeWorker, flight: Flight) -> None:
        """Each sequence runs in order, one request at a time, where it ran before; or has ended, or begins anew."""
        say, sequences = self.problems.append, self.options.sequences
        assert sequences is not None
        running = [
            self.by_request[job.request.id].sequence
            for other in [flight, *(each for one in self.workers.values() if not one.is_dead for each in one.flights)]
            for job in other.jobs
        ]
        named = [name for name in running if name is not None]
        if len(set(named)) < len(named) and not sequences.timeout_s:
            say(f"a sequence runs twice at a time: {sorted(named)}")
        for job in flight.jobs:
            client = self.by_request[job.request.id]
            home = self.homes.get(client.sequence or "")
            if home is None:
                continue
            if int(job.request.id) < home.number and not sequences.timeout_s:
                say(f"{job.request.id}: overtaken in its sequence")
            has_ended = home.is_over or job.arrived - home.last >= sequences.max_idle_s or sequences.timeout_s
            is_restart = client.begins or self.begun_anew.get(client.sequence or "", -1.0) >= home.last
            is_restart = is_restart and self.workers[home.key].is_dead
            if home.key != worker.key and not has_ended and not is_restart:
                say(f"{job.request.id}: went to {worker.key}, though {home.key} had its sequence")

    def _note_sequences(self, worker: FakeWorker, flight: Flight) -> None:
        """A worker has run a flight: it knows of its sequences now."""
        sequences = self.options.sequences
        if sequences is None:
            return
        for job in flight.jobs:
            client = self.by_request[job.request.id]
            if client.sequence is not None:
                # Whether it is over is the dispatcher's to say, if others wait: then either is right.
                is_over = client.ends_sequence and (sequences.frees_ended or client.steps > 1)
                self.homes[client.sequence] = Home(worker.key, self.now, int(job.request.id), is_over)

    def _check_order(self, flight: Flight) -> None:
        """Nobody who still waits should have gone before the last of this batch. What came back unrun goes first."""
        sent = {job.request.id for job in flight.jobs}
        last = max(job.arrived + job.priority * AGEING_S for job in flight.jobs)
        came_back = bool(sent & self.sent)
        self.sent |= sent
        for client in self.clients:
            job = client.job
            if came_back or job is None or job.request.id in self.sent:
                continue
            if job.state is JobState.WAITING:
                company = job.request.is_describe or any(other.request.is_describe for other in flight.jobs)
                if job.arrived + job.priority * AGEING_S < last and not company:
                    self.problems.append(f"{job.request.id} was passed over")

    def ask_lengths(self, key: str, question: Question) -> None:
        """The dispatcher asks for lengths before a batch."""
        worker = self.workers[key]
        if worker.is_dead or worker.questions or not self._says_lengths or not question.jobs:
            self.problems.append(f"{key} was asked for lengths it cannot say")
        if worker.flights and worker.flights[-1].number >= question.number:
            self.problems.append(f"{key} was asked for lengths after the batch that they go before")
        worker.questions.append(question)

    def say_lengths(self, worker: FakeWorker, question: Question) -> None:
        """A worker says lengths, all of them or not, or that it cannot; or it ends, or is ended, over the question."""
        if worker.is_dead:
            return
        self.read(worker)
        dice = self._lengths
        if dice.random() < self._dies_of_asking:
            self.died_of_asking += 1
            before = self._count_killed()
            is_killed = dice.random() < 0.5
            self.bury(worker, may_retry=is_killed, cause="killed" if is_killed else "response_timeout")
            if self._count_killed() > before:
                self.problems.append(f"{worker.key} ended while it was asked for lengths, and a request with it")
            return
        self.asked += 1
        said = [dice.choice([-1, 0, 1, 7, 500]) for _ in question.jobs]
        said = said[: dice.randint(1, len(said))]
        worker.questions.pop(0)
        self.dispatcher.told_lengths(worker.key, question.number, dice.random() * 0.001, said)
        self.begin(worker)

    def _count_killed(self) -> int:
        """Clients that were told that a worker died with their request."""
        return sum(isinstance(end, WorkerDied) for client in self.clients for end in client.ends)

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """The dispatcher cancels a running item. The worker may see it or not."""
        if self.workers[key].is_dead:
            self.problems.append(f"{key} was told of a cancel after its end")

    def hold(self, key: str) -> None:
        """Nothing more is read from a worker."""
        if key in self.held or self.workers[key].is_dead:
            self.problems.append(f"{key} is held twice, or after its end")
        self.held.add(key)

    def resume(self, key: str) -> None:
        """A worker is read again."""
        if key not in self.held:
            self.problems.append(f"{key} is resumed, and was not held")
        self.held.discard(key)

    def lane_emptied(self, key: str) -> None:
        """A closed worker has nothing left."""
        self.workers[key].is_dead = True

    def all_ended(self) -> None:
        """A cancel left nothing behind."""
        if not self.dispatcher.is_empty:
            self.problems.append("said to be empty, and is not")

    def begin(self, worker: FakeWorker) -> None:
        """A worker begins its oldest flight, and what comes of it depends on who is in it."""
        if worker.is_dead:
            return
        if not worker.flights:
            worker.is_running = False
            return
        flight = worker.flights[0]
        if flight.is_check:  # it was lent in between; `end_check` goes on
            return
        if worker.questions and worker.questions[0].number == flight.number:
            question = worker.questions[0]
            self.after(self._lengths.random() * 0.001, lambda: self.say_lengths(worker, question))
            return
        self._run(worker, flight)

    def _run(self, worker: FakeWorker, flight: Flight) -> None:
        """A worker runs a flight."""
        if worker.is_dead or flight not in worker.flights:
            return
        worker.begun = max(worker.begun, flight.number)
        clients = [self.by_request[job.request.id] for job in flight.jobs]
        deadlines = [math.inf if job.deadline is None else job.deadline for job in flight.jobs]
        live = [client for client, deadline in zip(clients, deadlines, strict=True) if deadline > self.now]
        for client, job in zip(clients, flight.jobs, strict=True):
            if client in live and client.pieces and job.request.id not in worker.left:
                self.problems.append("run again after bytes of an answer had gone out")
        if self.options.continuous_batching:
            for client, job in zip(clients, flight.jobs, strict=True):
                worker.left.setdefault(job.request.id, client.steps)
        kinds = {client.kind for client in live}
        run_s = self._run_s * (0.5 + self.dice.random())
        if "poison" in kinds:
            for client in live:
                client.killed += client.kind == "poison"
            self.after(run_s, lambda: self.bury(worker, may_retry=True, cause="exit"))
        elif "hang" in kinds:
            self.at(
                max(self.now, flight.sent_at + 1.0),
                lambda: self.bury(worker, may_retry=False, cause="response_timeout"),
            )
        elif "bad" in kinds:
            self.after(run_s, lambda: self.raise_batch(worker, flight, run_s))
        else:
            if self._streams and self.dice.random() < 0.5 and self.options.sequences is None:
                self.after(run_s * self.dice.random(), lambda: self.send_piece(worker, flight, live))
            self.after(run_s, lambda: self.answer(worker, flight, live, run_s))

    def send_piece(self, worker: FakeWorker, flight: Flight, live: list[Client]) -> None:
        """A worker sends a piece of a stream for each item."""
        if worker.is_dead:
            return
        clients = [self.by_request[job.request.id] for job in flight.jobs]
        if flight not in worker.flights:
            return
        self.read(worker)
        results = [ECHO if client in live else Result(504, "", [], "expired") for client in clients]
        bodies = [client.nonce for client in clients]
        for job in flight.jobs:
            worker.left.setdefault(job.request.id, 1)
        self.dispatcher.piece(worker.key, flight.number, results, bodies, self.now)

    def answer(self, worker: FakeWorker, flight: Flight, live: list[Client], run_s: float) -> None:
        """A worker answers a flight."""
        clients = [self.by_request[job.request.id] for job in flight.jobs]
        results = [
            self._result(worker, job, client) if client in live else Result(504, "", [], "expired")
            for client, job in zip(clients, flight.jobs, strict=True)
        ]
        bodies = [client.nonce for client in clients]
        if worker.is_dead:  # a late answer: nobody may be given it
            try:
                self.dispatcher.finished(worker.key, flight.number, run_s, results, bodies, self.now)
            except BadFrame:
                return
            self.problems.append("an answer of a dead worker was taken")
            return
        worker.flights.remove(flight)
        self._note_sequences(worker, flight)
        worker.unread.append((flight.number, run_s, results, bodies))
        if self._reads_late and worker.flights and self._reads.random() < 0.7:
            self.after(self._run_s * self._reads.random() * 2, lambda: self.read(worker))
        else:
            self.read(worker)
        self._go_on(worker)

    def read(self, worker: FakeWorker) -> None:
        """The server reads the answers that a worker has written, as a slot does with those of several batches."""
        if worker.is_dead or not worker.unread:
            return
        unread, worker.unread = worker.unread, []
        if len(unread) == 1:
            self.dispatcher.finished(worker.key, *unread[0], self.now)
            return
        self.read_together += len(unread)
        landed = [self.dispatcher.land(worker.key, *answer, self.now) for answer in unread]
        self.dispatcher.pump(self.now)
        for batch in landed:
            self.dispatcher.tell(batch, self.now)

    def _result(self, worker: FakeWorker, job: Job, client: Client) -> Result:
        """An echo; in continuous batching with the word whether more follows, and perhaps that the sequence is over."""
        if not self.options.continuous_batching:
            return ECHO
        worker.left[job.request.id] -= 1
        if worker.left[job.request.id] > 0:
            return MORE
        if client.ends_sequence and client.steps > 1:
            return Result(200, "", [("ts_request_sequence_end", f"none;{client.sequence}")])
        return LAST

    def _go_on(self, worker: FakeWorker) -> None:
        """A worker has ended a flight: the next one is already on its way where many run at once."""
        if self.mode != "concurrent":
            self.begin(worker)

    def raise_batch(self, worker: FakeWorker, flight: Flight, run_s: float) -> None:
        """A worker's handler raises for a flight."""
        if worker.is_dead:
            return
        self.read(worker)
        worker.flights.remove(flight)
        self._note_sequences(worker, flight)
        raised = Raised(flight.number, run_s, "handler", "Prediction failed", 503, "")
        self.dispatcher.raised(worker.key, raised, self.now)
        self._go_on(worker)

    def bury(self, worker: FakeWorker, *, may_retry: bool, cause: str) -> None:
        """A worker is gone."""
        if worker.is_dead:
            return
        # What it had written is read before its end is, unless its connection broke.
        if not may_retry or worker.questions or self._reads.random() < 0.8:
            self.read(worker)
        worker.is_dead = True
        self.dispatcher.died(worker.key, worker.begun, WorkerDied(cause), may_retry=may_retry, now=self.now)
        if worker.key not in self.closing:
            self.after(self.dice.choice([0.0, 0.02]), self.start_worker)

    # ---------------------------------------------------------------------------------------------- the verdict

    def check(self) -> None:
        """What must hold in every world."""
        say = self.problems.append
        if not self.dispatcher.is_empty:
            say("something waits or runs for ever")
        if any(not self.workers[key].is_dead for key in self.held):
            say("a worker is held for ever")
        if self.mode != "plain" and any(not self.workers[key].is_dead for key in self.closing):
            say("a worker that was to go is kept for ever")
        if self.metrics.expired_run:
            say(f"{self.metrics.expired_run} requests were run after their deadline")
        for number, client in enumerate(self.clients):
            if client.refused is not None:
                continue
            if client.told_when_gone:
                say(f"{number}: told something after it had gone")
            if client.is_gone:
                continue
            if len(client.ends) != 1:
                say(f"{number} ({client.kind}): {len(client.ends)} ends: {client.ends}")
                continue
            self._check_end(number, client, client.ends[0])
            if client.killed > 2:
                say(f"{number}: killed {client.killed} workers")

    def _check_end(self, number: int, client: Client, end: object) -> None:
        say = self.problems.append
        assert client.job is not None
        deaths = client.job.deaths
        if isinstance(end, Answer):
            if {end.body, *client.pieces} != {client.nonce}:
                say(f"{number}: was given the answer of {end.body!r}")
            if self.options.continuous_batching and not self._streams and len(client.pieces) != client.steps - 1:
                say(f"{number}: had {len(client.pieces)} pieces in {client.steps} steps")
            if client.job.deadline is not None and client.ended_at >= client.job.deadline:
                say(f"{number}: answered after its deadline")
            if client.kind != "good":
                say(f"{number}: a {client.kind} request was answered")
        elif isinstance(end, HandlerFailed):
            if client.kind != "bad" and self.options.batch_isolation and not client.pieces:
                say(f"{number}: a {client.kind} request failed for another's fault")
        elif isinstance(end, WorkerDied):
            allowed = deaths >= 2 or not self.options.retry_on_worker_death or end.cause == "response_timeout"
            if not allowed and not client.pieces and self.options.sequences is None:
                say(f"{number}: failed after {deaths} deaths")
        elif isinstance(end, DeadlinePassed):
            if client.job.deadline is None or client.ended_at < client.job.deadline:
                say(f"{number}: past a deadline that had not come")
        elif isinstance(end, SequenceGone) and self.options.sequences is not None:
            self.lost_sequences += end.cause == "sequence_lost"
        elif isinstance(end, QueueFull):
            self.displaced += 1
            if not self._urgency or client.job.priority == 0:
                say(f"{number}: displaced, though nobody was more urgent")
        elif not (isinstance(end, NoWorker) and self.was_empty_of_workers):
            say(f"{number}: ended with {end!r}")
