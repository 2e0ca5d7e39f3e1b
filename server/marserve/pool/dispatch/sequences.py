"""The sequences of one model version: which request is next in each, which worker has it, and when it ends. Pure.

A request names its sequence in a header. Requests of one sequence run in the order they came, one at a time, and all on
the worker that ran the first: the handler keeps the sequence's state there. Requests of several sequences may share a
batch.

A sequence lives until no request of it has come for `max_idle_s`, its `timeout_s` is over, or its handler ends it by a
response header. When its worker ends, its state is lost: its requests are refused until one begins the sequence anew,
or `max_idle_s` is over. Only a sequence without a state, of which no request has run, moves to another worker.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable
from itertools import count

import msgspec

from marserve.errors import SequenceGone, SequencesFull
from marserve.messages import Request, Result
from marserve.pool.dispatch.jobs import Job, JobState
from marserve.pool.dispatch.queue import JobQueue
from marserve.pool.options import SequenceOptions

# Lost sequences that are remembered; the oldest are forgotten first.
MAX_LOST = 10_000

NO_SEQUENCES: deque[Sequence] = deque()


class Sequence:
    """One sequence. `waiting` has `length` living jobs; `running` is with a worker, or waits to be run again.

    `lane` is the worker that has it, None before its first request ran. `has_state`: a request of it was run, so its
    worker may keep a state for it. `id` is None for a describe request, which belongs to no sequence.
    """

    __slots__ = ("began", "has_state", "heard", "id", "is_over", "is_ready", "lane", "length", "running", "waiting")

    def __init__(self, sequence_id: str | None, now: float) -> None:
        self.id = sequence_id
        self.began = self.heard = now
        self.waiting: deque[Job] = deque()
        self.length = 0
        self.running: Job | None = None
        self.lane: str | None = None
        self.has_state = False
        self.is_ready = False
        self.is_over = False

    def first(self) -> Job | None:
        """The next job; jobs that ended meanwhile are dropped."""
        waiting = self.waiting
        while waiting and waiting[0].state is JobState.DONE:
            waiting.popleft()
        return waiting[0] if waiting else None


class SequenceQueue(JobQueue):
    """Waiting jobs, each in the line of its sequence. Priorities do not count: a sequence has one order."""

    def __init__(self, options: SequenceOptions, model: str) -> None:
        super().__init__()
        self._options = options
        self._model = model
        self._living: dict[str, Sequence] = {}
        self._lost: dict[str, float] = {}  # until when, by id; soonest first
        self._ready: dict[str | None, deque[Sequence]] = {}  # by worker; None for those that any worker may take
        self._bound: dict[str, int] = {}
        self._of: dict[Job, Sequence] = {}
        self._looks: list[tuple[float, int, Sequence]] = []  # for each living sequence: when to look whether it ends
        self._tiebreak = count()

    # ------------------------------------------------------------------------------------------- admission

    def admit(self, request: Request) -> Request:
        """Check that there is room for a request; return it with its sequence's headers and without a priority.

        Raises SequencesFull or SequenceGone. The caller has called `expire` before, and enqueues it at once, or never.
        """
        options = self._options
        if request.is_describe:
            return request
        if options.max_idle_s <= 0:
            raise SequenceGone(self._model, "no_sequence_idle_limit")
        sequence_id, is_spelt = self._read(request, options.id_header)
        added: list[tuple[str, str]] = []
        if not sequence_id:
            sequence_id = f"ts-seq-{request.id}-{request.key}" if request.key else f"ts-seq-{request.id}"
            added = [(options.id_header, sequence_id), (options.start_header, "true")]
        elif not is_spelt:
            added = [(options.id_header, sequence_id)]  # as the handler looks it up
        sequence = self._living.get(sequence_id)
        if sequence is None:
            if sequence_id in self._lost and not self._says(request, options.start_header):
                raise SequenceGone(self._model, "sequence_lost")
            if len(self._living) >= options.most:
                raise SequencesFull(self._model, "too_many_sequences")
        elif sequence.length >= options.queue_size:
            raise SequencesFull(self._model, "sequence_queue_full")
        if added or request.priority is not None:
            headers = [*request.server_headers, *added]
            request = msgspec.structs.replace(request, server_headers=headers, priority=None)
        return request

    def lane_of(self, request: Request) -> str | None:
        """The worker that has the sequence of an admitted request, None if any worker may take it."""
        sequence = self._living.get(self._read(request, self._options.id_header)[0])
        return None if sequence is None else sequence.lane

    def _read(self, request: Request, name: str) -> tuple[str, bool]:
        """The value of a header that the server or the client set, and whether it is spelt as it should be."""
        for said, text in request.server_headers:
            if said == name:
                return text, True
        wanted = name.encode("latin-1", "replace")
        folded = wanted.lower()
        found, is_spelt = "", False
        for raw_name, raw_value in request.headers:
            if raw_name == wanted:
                found, is_spelt = raw_value.decode("latin-1"), True
            elif not is_spelt and raw_name.lower() == folded:
                found = raw_value.decode("latin-1")
        return found, is_spelt

    def _says(self, request: Request, name: str) -> bool:
        return self._read(request, name)[0].lower() == "true"

    # ------------------------------------------------------------------------------------------- as a queue

    def enqueue(self, job: Job) -> None:
        """Put an admitted job at the end of its sequence's line; the first one begins the sequence."""
        now = job.arrived
        sequence: Sequence | None
        if job.request.is_describe:
            sequence = Sequence(None, now)
        else:
            sequence_id = self._read(job.request, self._options.id_header)[0]
            sequence = self._living.get(sequence_id)
            if sequence is None:
                self._lost.pop(sequence_id, None)
                sequence = self._living[sequence_id] = Sequence(sequence_id, now)
                self._look_at(sequence, now)
        self._of[job] = sequence
        sequence.heard = now
        sequence.waiting.append(job)
        sequence.length += 1
        self._length += 1
        self._make_ready(sequence)

    def put_back(self, jobs: Iterable[Job]) -> None:
        """Put jobs that a worker gave back unrun at the head of their lines."""
        for job in jobs:
            sequence = self._of[job]
            self._unbind(sequence)  # it has no state, else its jobs would not be put back
            sequence.running = None
            sequence.waiting.appendleft(job)
            sequence.length += 1
            self._length += 1
            self._make_ready(sequence)

    def oldest(self) -> Job | None:
        """The job that has waited longest, or None."""
        heads = [sequence.first() for line in self._ready.values() for sequence in line]
        return min((head for head in heads if head is not None), key=_arrival, default=None)

    def first(self) -> Job | None:
        """The job that has waited longest, or None."""
        return self.oldest()

    def before(self, priority: int) -> int:
        """How many jobs wait: their order depends on their workers."""
        return self._length

    def displaceable(self, priority: int) -> Job | None:
        """None: a request of a sequence makes room for no other."""
        return None

    def leave(self, job: Job) -> None:
        """A waiting job was ended; the caller has set its state to DONE."""
        sequence = self._of.pop(job)
        sequence.length -= 1
        self._length -= 1
        self._forget_unused(sequence)

    def jobs(self) -> list[Job]:
        """All waiting jobs, in the order they came."""
        return [job for job, sequence in self._of.items() if job is not sequence.running]

    def clear(self) -> list[Job]:
        """Take all waiting jobs out. The sequences live on."""
        jobs = self.jobs()
        for job in jobs:
            sequence = self._of.pop(job)
            sequence.waiting.clear()
            sequence.length = 0
            self._forget_unused(sequence)
        self._length = 0
        return jobs

    # ------------------------------------------------------------------------------------------- turns

    def take_for(self, lane: str, most: int, *, mate: Job | None, may_bind: bool) -> list[Job]:
        """Take up to `most` jobs for worker `lane`: the next ones of as many sequences.

        `mate` is one of the jobs that run beside them already. With `may_bind` the worker may get further sequences.
        """
        taken: list[Job] = []
        own = self._ready.get(lane, NO_SEQUENCES)
        free = self._ready.get(None, NO_SEQUENCES) if may_bind else NO_SEQUENCES
        while len(taken) < most:
            line = self._line_of_next(own, free)
            if line is None:
                break
            sequence = line[0]
            job = sequence.waiting[0]
            company = mate if mate is not None else taken[0] if taken else None
            if company is not None and not may_run_together(company.request, job.request):
                break
            line.popleft()
            sequence.is_ready = False
            sequence.waiting.popleft()
            sequence.length -= 1
            self._length -= 1
            sequence.running = job
            taken.append(job)
        if not own:
            self._ready.pop(lane, None)
        return taken

    def _line_of_next(self, own: deque[Sequence], free: deque[Sequence]) -> deque[Sequence] | None:
        """The line whose next job came first; sequences without a job are dropped from both."""
        best: deque[Sequence] | None = None
        arrived = 0.0
        for line in (own, free):
            while line:
                job = line[0].first()
                if job is None:
                    line.popleft().is_ready = False
                    continue
                if best is None or job.arrived < arrived:
                    best, arrived = line, job.arrived
                break
        return best

    def began(self, job: Job, lane: str) -> None:
        """A job goes to worker `lane`, which has its sequence from now on."""
        sequence = self._of[job]
        if sequence.lane != lane:
            self._unbind(sequence)
            sequence.lane = lane
            if not sequence.is_over and sequence.id is not None:
                self._bound[lane] = self._bound.get(lane, 0) + 1

    def ended(self, job: Job, now: float | None, *, has_run: bool) -> None:
        """A job that was taken has ended, or will not be run again: the next one of its sequence may run."""
        sequence = self._of.pop(job, None)
        if sequence is None:
            return
        sequence.running = None
        if now is not None:
            sequence.heard = now
        sequence.has_state = sequence.has_state or has_run
        if sequence.is_over:
            return
        is_last = has_run and self._options.frees_ended and not sequence.length
        if is_last and self._says(job.request, self._options.end_header):
            self._end(sequence)
            return
        self._forget_unused(sequence)
        self._make_ready(sequence)

    def has_state(self, job: Job) -> bool:
        """Whether the job's sequence has a state in its worker."""
        return self._of[job].has_state

    # ------------------------------------------------------------------------------------------- ends

    def end(self, results: Iterable[Result], lane: str) -> list[Job]:
        """End the sequences that the handler of worker `lane` has named in results. Returns the jobs that waited."""
        name, jobs = self._options.end_header, list[Job]()
        said = [value for each in results for header, value in each.headers if header == name]
        for sequence_id in ";".join(said).split(";"):
            sequence = self._living.get(sequence_id.strip())
            if sequence is not None and sequence.lane == lane:
                jobs += self._end(sequence)
        return jobs

    def expire(self, now: float) -> list[Job]:
        """End the sequences whose time is up. Returns the jobs that still waited."""
        jobs: list[Job] = []
        looks = self._looks
        while looks and looks[0][0] <= now:
            sequence = heapq.heappop(looks)[2]
            if sequence.is_over:
                continue
            if self._due(sequence) <= now:
                jobs += self._end(sequence)
            else:
                self._look_at(sequence, now)
        while self._lost:
            sequence_id, until = next(iter(self._lost.items()))
            if until > now:
                break
            del self._lost[sequence_id]
        return jobs

    def lane_lost(self, lane: str, moving: Collection[Job], now: float) -> list[Job]:
        """Worker `lane` is gone; its `moving` jobs will be run elsewhere, with their sequences if these have no state.

        All its other sequences are lost. Returns the jobs that still waited in these.
        """
        jobs: list[Job] = []
        for sequence in [each for each in self._living.values() if each.lane == lane]:
            running = sequence.running
            if not sequence.has_state and running in moving:
                self._unbind(sequence)
                continue
            if running is not None:
                del self._of[running]
            jobs += self._end(sequence)
            if sequence.id is not None:
                self._lost.pop(sequence.id, None)
                self._lost[sequence.id] = now + self._options.max_idle_s
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        self._ready.pop(lane, None)
        self._bound.pop(lane, None)
        return jobs

    def has_on(self, lane: str) -> bool:
        """Whether worker `lane` has living sequences."""
        return self._bound.get(lane, 0) > 0

    def count_on(self, lane: str) -> int:
        """How many living sequences worker `lane` has."""
        return self._bound.get(lane, 0)

    def next_expiry(self) -> float | None:
        """When to call `expire` again, or None."""
        while self._looks and self._looks[0][2].is_over:
            heapq.heappop(self._looks)
        return self._looks[0][0] if self._looks else None

    @property
    def living(self) -> int:
        """How many sequences live."""
        return len(self._living)

    @property
    def lost(self) -> int:
        """How many sequences are refused because their worker is gone."""
        return len(self._lost)

    def _end(self, sequence: Sequence) -> list[Job]:
        """End a sequence. Its running job runs on; returns the jobs that still waited."""
        jobs = [job for job in sequence.waiting if job.state is not JobState.DONE]
        for job in jobs:
            del self._of[job]
        self._length -= sequence.length
        sequence.waiting.clear()
        sequence.length = 0
        sequence.is_over = True
        self._unbind(sequence)
        if sequence.id is not None:
            del self._living[sequence.id]
        return jobs

    def _unbind(self, sequence: Sequence) -> None:
        lane, sequence.lane = sequence.lane, None
        if lane is not None and sequence.id is not None and self._bound.get(lane, 0) > 0:
            self._bound[lane] -= 1
            if not self._bound[lane]:
                del self._bound[lane]

    def _forget_unused(self, sequence: Sequence) -> None:
        """End a sequence that has no state and no jobs."""
        if not (sequence.has_state or sequence.running is not None or sequence.length or sequence.is_over):
            self._end(sequence)

    def _make_ready(self, sequence: Sequence) -> None:
        if not sequence.is_ready and sequence.running is None and sequence.length:
            sequence.is_ready = True
            self._ready.setdefault(sequence.lane, deque()).append(sequence)

    def _due(self, sequence: Sequence) -> float:
        """When the sequence ends if no further request comes."""
        options = self._options
        is_busy = sequence.running is not None or sequence.length > 0
        idle = float("inf") if is_busy else sequence.heard + options.max_idle_s
        return min(idle, sequence.began + options.timeout_s) if options.timeout_s else idle

    def _look_at(self, sequence: Sequence, now: float) -> None:
        """Plan the next look at a sequence: when it may be due, and at the latest after `max_idle_s`."""
        when = min(self._due(sequence), now + self._options.max_idle_s)
        if self._options.timeout_s:
            when = min(when, sequence.began + self._options.timeout_s)
        heapq.heappush(self._looks, (when, next(self._tiebreak), sequence))


def may_run_together(one: Request, other: Request) -> bool:
    """Whether two requests may be rows of one call: a describe request comes alone, explanations apart."""
    return not (one.is_describe or other.is_describe) and one.is_explain == other.is_explain


def _arrival(job: Job) -> float:
    return job.arrived
