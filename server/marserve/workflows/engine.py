"""Runs requests through the graph of one workflow: each node is a request to a model of the registry (contract 4.4).

    `submit` → `Execution`: start node → every node whose parents have answered → the leaves' answer to the receiver

All nodes of a request share its id, its deadline and its priority. The engine has no queue: a node's request waits in
that model's own bounded queue, and if that is full the client is refused at once. At most `most_running` requests are
on their way at a time, so the answers held between nodes are bounded too. Each attempt at a node ends after its
time-out, whatever the model does, so no request waits for ever. When a client goes, all attempts of its request end.

Everything happens on the event loop, from callbacks; there are no tasks. It knows neither archives nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import getrandbits
from time import monotonic

import msgspec

from marserve.errors import (
    DeadlinePassed,
    DrainedAway,
    FingerprintRefused,
    MarserveError,
    ModelNotFound,
    NodeFailed,
    NoTicket,
    NoWorker,
    QueueFull,
    Unavailable,
    VersionNotFound,
    WorkflowBusy,
)
from marserve.messages import Accepted, Answer, Part, Receiver, Request, Work, line_ids
from marserve.registry.data_plane import DataPlane
from marserve.telemetry.logs.log_limit import caused_by
from marserve.telemetry.timeline import CLIENT_GONE, BatchTimes, Timeline
from marserve.telemetry.traces.spans import NODE
from marserve.workflows.dag import Dag, Walk

log = logging.getLogger("marserve.workflows")

JSON_HEADERS = [("content-type", "application/json")]
# `Retry-After` for a request that finds a workflow full.
RETRY_AFTER_S = 1.0
# Leaves' answers that are longer are joined in a thread.
SHORT_LEAVES_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True)
class RunnableNode:
    """The model version behind a node of the graph; `timeout_s` is for each of `retry_attempts` + 1 attempts."""

    model: str
    version: str
    retry_attempts: int
    timeout_s: float


class WorkflowTimes:
    """What timelines keep of a workflow: its name. Its nodes' stages are counted with their models."""

    version = ""

    def __init__(self, model: str) -> None:
        self.model = model
        self.slow_above_s = 0.0

    def observe_ended(self, ended: Sequence[Timeline]) -> None:
        """Its nodes have been counted."""


class Engine:
    """One workflow's requests. `nodes` has an entry for each node of `dag`; sizes in bytes.

    `max_answer_bytes` bounds what a streaming node may answer in all; other answers are bounded by their workers.
    """

    def __init__(
        self,
        workflow: str,
        dag: Dag,
        nodes: Mapping[str, RunnableNode],
        models: DataPlane,
        *,
        most_running: int = 100,
        max_answer_bytes: int = 6_553_500,
    ) -> None:
        self.workflow = workflow
        self.times_of = WorkflowTimes(workflow)
        self.dag = dag
        self.nodes = nodes
        self.models = models
        self.most_running = most_running
        self.max_answer_bytes = max_answer_bytes
        self._running: set[Execution] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def running(self) -> int:
        """How many requests are on their way."""
        return len(self._running)

    def submit(self, request: Request, receiver: Receiver) -> Execution:
        """Begin a request; its answer comes to `receiver`, possibly before this returns. Raises WorkflowBusy."""
        if len(self._running) >= self.most_running:
            raise WorkflowBusy(self.workflow, retry_after_s=RETRY_AFTER_S)
        execution = Execution(self, request, receiver)
        self._running.add(execution)
        self._is_idle.clear()
        execution.begin()
        return execution

    async def wait_until_idle(self, limit_s: float) -> int:
        """Wait until no request is on its way, at most `limit_s` seconds. Returns how many are left."""
        try:
            async with asyncio.timeout(limit_s):
                await self._is_idle.wait()
        except TimeoutError:
            pass
        return self.running

    def give_up(self) -> list[str]:
        """End every request that is on its way: its client gets Draining. Returns their ids."""
        executions = list(self._running)
        for execution in executions:
            execution.end_with(DrainedAway())
        return [execution.request.id for execution in executions]

    def forget(self, execution: Execution) -> None:
        """Remove a request that has ended."""
        self._running.discard(execution)
        if not self._running:
            self._is_idle.set()


class Execution:
    """One request on its way through the graph. Surfaces treat it as a job."""

    keeps_the_only_worker = False

    def __init__(self, engine: Engine, request: Request, receiver: Receiver) -> None:
        self.engine = engine
        self.request = request
        self._receiver = receiver
        self._walk = Walk(engine.dag)
        # Answers that a node still needs, or that the leaves gave; `_readers` counts the nodes that have not begun yet.
        self._answers: dict[str, bytes | bytearray] = {}
        self._readers = {node: len(children) for node, children in engine.dag.children.items()}
        self._attempts: dict[str, _Attempt] = {}
        self._is_over = False
        self._times: BatchTimes | None = None
        """From the first node's begin to the last one's end, as if one worker ran them; None without a timeline."""

    # ------------------------------------------------------------------------------------------- as a job

    def begin(self) -> None:
        """Give the start node what the client sent."""
        timeline = self.request.timeline
        if timeline is not None and not timeline.admitted_at:
            now = monotonic()
            timeline.admitted_at, timeline.of = now, self.engine.times_of
            self._times = BatchTimes("", 1, now, of=timeline.of)
            timeline.left_in(self._times)
        self._try(self.engine.dag.start, self.request.parts, 1)

    def cancel(self) -> None:
        """The client has gone: the nodes that run are cancelled, no further one begins."""
        self._end()

    def hold(self) -> None:
        """Do nothing: the answer is sent whole."""

    def resume(self) -> None:
        """Do nothing, as `hold`."""

    # ------------------------------------------------------------------------------------------- as the engine's

    def end_with(self, error: MarserveError) -> None:
        """End it with an error, unless it is over."""
        if not self._is_over:
            self._end()
            self._receiver.on_error(error)

    def _try(self, node: str, parts: list[Part], number: int, before: tuple[_Attempt, ...] = ()) -> None:
        attempt = self._attempts[node] = _Attempt(self, node, parts, number, before)
        attempt.begin()

    def try_again(self, attempt: _Attempt) -> None:
        """Give a node the same input once more."""
        if not self._is_over:
            self._try(attempt.node, attempt.parts, attempt.number + 1, (*attempt.before, attempt))

    def answered(self, node: str, body: bytes | bytearray) -> None:
        """Note a node's answer: begin the nodes that may run now, or end."""
        self._attempts.pop(node).forget()
        self._answers[node] = body
        for ready in self._walk.complete(node):
            parts = self._take_input(ready)
            self._try(ready, parts, 1)
            if self._is_over:
                return
        if self._walk.is_complete:
            self._finish()

    def _take_input(self, node: str) -> list[Part]:
        """One parameter for each parent, `body` where there is one (contract 4.4); drops answers no longer needed."""
        parents = self.engine.dag.parents[node]
        parts = [
            Part("body" if len(parents) == 1 else parent, self._answers[parent], content_type=None)
            for parent in parents
        ]
        for parent in parents:
            self._readers[parent] -= 1
            if not self._readers[parent]:
                del self._answers[parent]
        return parts

    def failed(self, attempt: _Attempt, error: MarserveError) -> None:
        """An attempt has failed: try again, or answer the client with the error."""
        engine, node = self.engine, attempt.node
        verdict = self._judge(attempt, error)
        left = engine.nodes[node].retry_attempts + 1 - attempt.number if verdict is None else 0
        log.warning(
            "Workflow %s, request %s: attempt %d at node %s failed (%s: %s); %d left",
            engine.workflow,
            self.request.id,
            attempt.number,
            node,
            error.cause or type(error).__name__,
            error.message,
            left,
            extra=caused_by("", line_ids([self.request])),
        )
        if left:
            # Not inside the callback of the pool: that pool would take it again.
            asyncio.get_running_loop().call_soon(self.try_again, attempt)
        else:
            self.end_with(verdict or NodeFailed(engine.workflow, node, error.cause))

    def _judge(self, attempt: _Attempt, error: MarserveError) -> MarserveError | None:
        """The error to answer the client with at once; None if another attempt may succeed."""
        engine, deadline = self.engine, self.request.deadline
        if isinstance(error, DeadlinePassed) and deadline is not None and deadline <= monotonic():
            return error
        if isinstance(error, QueueFull | NoTicket):
            return WorkflowBusy(
                engine.workflow, attempt.node, cause=error.cause or "queue_full", retry_after_s=error.retry_after_s
            )
        if type(error) is NoWorker:  # scaled to zero; TorchServe's message names the model and no version
            text = NoWorker(engine.nodes[attempt.node].model).message
            return NodeFailed(engine.workflow, attempt.node, error.cause, text)
        if isinstance(error, ModelNotFound | VersionNotFound):  # it was unregistered meanwhile
            return NodeFailed(engine.workflow, attempt.node, "no_worker")
        if isinstance(error, FingerprintRefused) and attempt.number > 1:  # the attempt before killed the worker
            return NodeFailed(engine.workflow, attempt.node, error.cause)
        return error if isinstance(error, Unavailable) else None

    def _finish(self) -> None:
        leaves = self.engine.dag.leaves
        if len(leaves) == 1:
            self._answer(self._answers[leaves[0]])
        elif sum(len(self._answers[leaf]) for leaf in leaves) > SHORT_LEAVES_BYTES:
            joining = asyncio.get_running_loop().run_in_executor(None, self._join, leaves)
            joining.add_done_callback(self._joined)
        else:
            try:
                body = self._join(leaves)
            except NodeFailed as error:
                self.end_with(error)
            else:
                self._answer(body)

    def _joined(self, joining: asyncio.Future[bytes]) -> None:
        """A thread has joined long answers."""
        error = None if joining.cancelled() else joining.exception()
        if self._is_over or joining.cancelled():
            return
        if error is None:
            self._answer(joining.result())
        elif isinstance(error, MarserveError):
            self.end_with(error)
        else:
            workflow = self.engine.workflow
            extra = caused_by("", line_ids([self.request]))
            log.error("Workflow %s could not join its answers", workflow, exc_info=error, extra=extra)
            self.end_with(NodeFailed(self.engine.workflow, self.engine.dag.leaves[0], "not_json"))

    def _answer(self, body: bytes | bytearray) -> None:
        self._end()
        self._receiver.on_answer(Answer(body, headers=JSON_HEADERS))

    def _join(self, leaves: tuple[str, ...]) -> bytes:
        """The leaves' JSON objects as members of one; numbers stay as their authors wrote them."""
        members = {}
        for leaf in leaves:
            body = bytes(self._answers[leaf])
            try:
                value = msgspec.json.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                value = None
            if not isinstance(value, dict):
                log.warning(
                    "Workflow %s, request %s: leaf %s answered no JSON object, and where there are several leaves each "
                    "must; let one function join them",
                    self.engine.workflow,
                    self.request.id,
                    leaf,
                    extra=caused_by("", line_ids([self.request])),
                )
                raise NodeFailed(self.engine.workflow, leaf, "not_json")
            members[leaf] = msgspec.Raw(body)
        return msgspec.json.format(msgspec.json.encode(members), indent=2) + b"\n"

    def _end(self) -> None:
        self._is_over = True
        if self._times is not None and not self._times.landed_at:
            now, began = monotonic(), self._times.sent_at
            self._times.land(now, now - began, Work(began, 0.0, 0.0))
        attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            attempt.abandon()
            attempt.forget()
        self.engine.forget(self)


class _Attempt:
    """One attempt at one node: the receiver of its model's answer, and the clock that ends it."""

    def __init__(
        self, execution: Execution, node: str, parts: list[Part], number: int, before: tuple[_Attempt, ...] = ()
    ) -> None:
        """`before` are the attempts that failed."""
        self.before = before
        self.timed_out: Accepted | None = None
        self.node = node
        self.parts = parts
        self.number = number
        self._execution = execution
        self._is_open = True
        self._job: Accepted | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._pieces = bytearray()
        self._timeline: Timeline | None = None

    def begin(self) -> None:
        """Give the node its input."""
        engine, given = self._execution.engine, self._execution.request
        target = engine.nodes[self.node]
        if given.timeline is not None:
            what = f"{NODE}{self.node}" if self.number == 1 else f"{NODE}{self.node}, attempt {self.number}"
            self._timeline = given.timeline.part(what, monotonic())
        request = Request(
            given.id,
            self.parts,
            given.headers,
            given.server_headers,
            given.deadline,
            priority=given.priority,
            is_inner=True,
            key=getrandbits(62) | 1,  # nodes of one model would else have requests of one id
            client_id=given.client_id,
            timeline=self._timeline,
        )
        self._clock = asyncio.get_running_loop().call_later(target.timeout_s, self._time_out)
        try:
            job = engine.models.submit(target.model, target.version, request, self)
        except MarserveError as error:
            self.on_error(error)
        else:
            if self._is_open:
                self._job = job

    def abandon(self) -> None:
        """Cancel the job: its answer is no longer wanted."""
        self._close(CLIENT_GONE, error="not_wanted")
        job, self._job = self._job, None
        if job is not None:
            job.cancel()

    def forget(self) -> None:
        """No further attempt follows: drop the jobs of those that timed out, which refer to their attempts."""
        for each in (*self.before, self):
            each.timed_out = None

    def on_answer(self, answer: Answer) -> None:
        """The node's answer; the status and headers that its handler set are ignored (contract 4.4)."""
        if self._is_open:
            self._close(answer.status, len(answer.body))
            self._execution.answered(self.node, answer.body)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece of the node's answer; the next nodes get it whole."""
        if not self._is_open:
            return
        self._pieces += piece.body
        engine = self._execution.engine
        if len(self._pieces) > engine.max_answer_bytes:
            self.abandon()
            self._execution.failed(self, NodeFailed(engine.workflow, self.node, "too_large"))
        elif last:
            self.on_answer(Answer(self._pieces))

    def on_error(self, error: MarserveError) -> None:
        """The node gave no answer."""
        if self._is_open:
            self._close(503, error=error.cause or "error")
            self._execution.failed(self, error)

    def _time_out(self) -> None:
        self.timed_out = self._job
        self._close(504, error="node_timeout")
        self.abandon()
        cause = "worker_busy" if self._waited_for_one_before() else "node_timeout"
        self._execution.failed(self, NodeFailed(self._execution.engine.workflow, self.node, cause))

    def _waited_for_one_before(self) -> bool:
        """Whether the model's only worker still runs an earlier attempt; logs it if so.

        A handler that blocks and does not ask whether it is cancelled runs to its end.
        """
        for each in self.before:
            if each.timed_out is not None and each.timed_out.keeps_the_only_worker:
                log.warning(
                    "Workflow %s, request %s: attempt %d at node %s never began: the only worker of %s is still at "
                    "attempt %d, which was cancelled there and runs on",
                    self._execution.engine.workflow,
                    self._execution.request.id,
                    self.number,
                    self.node,
                    self._execution.engine.nodes[self.node].model,
                    each.number,
                    extra=caused_by("", line_ids([self._execution.request])),
                )
                return True
        return False

    def _close(self, status: int, size: int = 0, error: str = "") -> None:
        if self._timeline is not None and not self._timeline.written_at:
            self._timeline.end(monotonic(), status, size, error)
        self._is_open = False
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
