"""A rank: one process of a worker that is a group of them, and how its ranks stay in step.

Only rank 0 gets the server's messages. If all ranks make every call of the handler (`tp`, `pptp`), rank 0 announces
each call to the others just before it makes it, with the items that deadlines and cancels have left. So each decision
is made once, and a collective never waits for a rank that left an item out. A handler's question in a call (is this
item cancelled?) is answered by rank 0, too, on the shared page.

All ranks must end a call alike. If one raises and another does not, collectives may be half done, and would mix the
next call's tensors with this one's; the group then reports that it is out of step, and is formed anew.

If only rank 0 makes calls (`pp`), the others work for it in the handler's own ways. Rank 0 asks them for their devices
when a batch has failed.

Knows the wire and the page. Answers of the author's code in other ranks than 0 are dropped.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from socket import socket
from typing import TYPE_CHECKING, Any, NoReturn

from marserve import wire
from marserve.errors import BadFrame
from marserve.messages import (
    AskDevice,
    Call,
    CallEnded,
    DeviceLost,
    DeviceTold,
    EndProfile,
    Item,
    OutOfStep,
    Profile,
    Rank,
    RankProfiled,
    SetLevel,
    Share,
    ToRank,
)
from marserve.shared_page import Page
from marserve.worker.connection import Connection
from marserve.worker.device.device_loss import find_loss
from marserve.worker.device.device_memory import give_back
from marserve.worker.load import Handle, LoadedModel
from marserve.worker.outgoing import has_run_out, loss_told_by, traceback_of
from marserve.worker.process.printed_lines import running, set_level
from marserve.worker.rows import begin_unwatched, rows_of

if TYPE_CHECKING:
    from marserve.worker.profile import Operators

LOOPBACK = "127.0.0.1"
# After a rank has raised, how long the others have to end the call as well.
OUT_OF_STEP_S = 5.0
# How long after an error another rank's end may show, if that caused the error.
LOOK_FOR_ENDS_S = 0.05
# How long all ranks of a pipeline together have to say whether their devices are lost.
ASK_DEVICES_S = 5.0
# How long a rank has to write its trace.
PROFILE_S = 60.0
# How often a rank looks whether rank 0 has answered its question.
ASK_EVERY_S = 0.0005
# How long a rank waits for the server to end the group.
END_S = 10.0

log = logging.getLogger("marserve.worker")


class Peer:
    """Another rank, at the other end of a socket."""

    def __init__(self, rank: int, sock: socket) -> None:
        self.rank = rank
        self._connection = Connection(sock, wire.rank_decoder())
        self._heard: list[tuple[ToRank, list[Any]]] = []

    def tell(self, message: ToRank, bodies: Sequence[bytes | bytearray] = ()) -> None:
        """Write one message whole. Raises EOFError when the rank is gone."""
        try:
            self._connection.send(message, bodies)
        except OSError:
            raise EOFError from None

    def hear(self, limit_s: float | None = None) -> tuple[ToRank, list[Any]] | None:
        """The next message with its bodies; None after `limit_s` seconds. Raises EOFError when the rank is gone."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while not self._heard:
            if end is not None and not self._is_readable(end - time.monotonic()):
                return None
            try:
                self._heard += self._connection.receive_some()
            except (OSError, BadFrame):  # BadFrame: the author's code wrote to this socket
                raise EOFError from None
        return self._heard.pop(0)

    def hear_end(self, number: int, limit_s: float | None = None) -> CallEnded | None:
        """Wait for the rank's message that it has ended this call; None after `limit_s` seconds. Raises EOFError.

        Of what comes before only levels of logging are kept.
        """
        levels = []
        try:
            while (heard := self.hear(limit_s)) is not None:
                message, _ = heard
                if type(message) is CallEnded and message.number == number:
                    return message
                if type(message) is SetLevel:
                    levels.append(heard)
            return None
        finally:
            self._heard[:0] = levels

    def hear_profile(self, number: int, limit_s: float) -> tuple[RankProfiled, list[Any]] | None:
        """The rank's part of this profile; None after `limit_s` seconds. Raises EOFError when it is gone."""
        end = time.monotonic() + limit_s
        while (heard := self.hear(end - time.monotonic())) is not None:
            message, bodies = heard
            if type(message) is RankProfiled and message.number == number:
                return message, bodies
        return None

    def hear_of_device(self, number: int, limit_s: float) -> bool:
        """Whether the rank answers in this time that its device is lost. Raises EOFError when it is gone."""
        end = time.monotonic() + limit_s
        while (heard := self.hear(end - time.monotonic())) is not None:
            message, _ = heard
            if type(message) is DeviceTold and message.number == number:
                return message.is_lost
        return False

    def is_gone_within(self, seconds: float) -> bool:
        """Whether the rank is gone within that time. Its messages until then are too late, and dropped."""
        end = time.monotonic() + seconds
        try:
            while self.hear(end - time.monotonic()) is not None:
                pass
        except EOFError:
            return True
        return False

    def has_ended_within(self, seconds: float) -> bool:
        """Whether the rank ends, or sends a message, within that time."""
        return bool(self._heard) or self._is_readable(seconds)

    def _is_readable(self, within_s: float) -> bool:
        # Not select, which takes no descriptor above 1023: in a fresh rank they have the server's numbers.
        readable = select.poll()
        readable.register(self._connection, select.POLLIN)
        return bool(readable.poll(max(0.0, within_s) * 1000))


class Leader:
    """Rank 0: has the other ranks make its calls, too."""

    def __init__(self, place: Rank, peers: Sequence[Peer], server: Connection, page: Page) -> None:
        self._is_mirrored = place.is_mirrored
        self._peers = peers
        self._server = server
        self._page = page
        self._number = 0
        self._unsettled = False
        self._places: dict[int, int] = {}
        self._shared: Sequence[Item] = ()

    def lead(self, model: LoadedModel) -> LoadedModel:
        """The same model, but its `handle` has the other ranks make each call as well."""
        return model.calling(self._leading(model.handle))

    def share(self, items: Sequence[Item], bodies: Sequence[bytes | bytearray], *, once: bool) -> None:
        """Send the others the items of the next calls: of one call (`once`), or of several."""
        if not self._is_mirrored or not self._peers:
            return
        self.settle()
        self._shared = items  # kept alive, so that no other item gets the id of one of these
        self._places = {id(item): index for index, item in enumerate(items)}
        self._tell(Share(list(items), once), bodies)

    def settle(self) -> None:
        """Wait until the others have ended the last call, too. Does not return if they ended it differently."""
        if self._unsettled:
            self._unsettled = False
            self._compare(None)

    def begin_samples(self) -> None:
        """Wait until all ranks have loaded their parts, so that from now on none is late for another reason."""
        self._number += 1
        for peer in self._peers:
            try:
                peer.hear_end(self._number)
            except EOFError:
                await_the_end(self._server)
        self._tell(CallEnded(self._number, False))

    def end_sample(self, why: str) -> str:
        """This rank has ended a sample of the load, with an error if there is a `why`: what is wrong with that, or "".

        Does not return where another rank has raised alone, which says so itself.
        """
        self._number += 1
        self._tell(CallEnded(self._number, bool(why)))
        for peer in self._peers:
            try:
                ended = peer.hear_end(self._number, OUT_OF_STEP_S if why else None)
            except EOFError:
                await_the_end(self._server)
            if why and (ended is None or not ended.has_raised):
                return _otherwise(peer.rank, ended)
            if not why and ended is not None and ended.has_raised:
                await_the_end(self._server)
        return ""

    def set_level(self, level: str) -> None:
        """Have the other ranks log from this level on, too; one that is still loading does so when it has loaded."""
        self._tell(SetLevel(level))

    def begin_profile(self, order: Profile) -> None:
        """Have the other ranks record their operators, too."""
        self.settle()
        self._tell(order)

    def end_profile(self, end: EndProfile) -> tuple[list[tuple[int, bytes]], list[str]]:
        """End that: the ranks' traces, each with its rank, and sentences about those that have none."""
        self.settle()
        self._tell(end)
        traces: list[tuple[int, bytes]] = []
        remarks: list[str] = []
        for peer in self._peers if not end.drop else ():
            try:
                heard = peer.hear_profile(end.number, PROFILE_S)
            except EOFError:
                await_the_end(self._server)
            if heard is None:
                remarks.append(f"rank {peer.rank} did not send its trace within {PROFILE_S:g} s")
                continue
            message, bodies = heard
            traces += [(peer.rank, bytes(body)) for body in bodies]
            if message.no_operators:
                remarks.append(f"rank {peer.rank} has no operators: {message.no_operators}")
        return traces, remarks

    @property
    def may_break_off(self) -> bool:
        """Whether a call may end because all clients of its stream have gone: not if other ranks would go on."""
        return not self._is_mirrored or not self._peers

    def _leading(self, handle: Handle) -> Handle:
        def lead_call(rows: list[dict[str, Any]], context: Any) -> Any:
            self._begin(context.batch_items)
            context.ask_cancelled = self._answering(context.ask_cancelled)
            try:
                answered = handle(rows, context)
            except SystemExit:
                raise
            except BaseException as error:  # the author's code
                self._end_raised(error)
                raise
            self._end()
            return answered

        return lead_call

    def _begin(self, items: Sequence[Item]) -> None:
        if not self._is_mirrored or not self._peers:
            return
        self.settle()
        self._number += 1
        self._page.begin_call(self._number)
        self._tell(Call(self._number, [self._places[id(item)] for item in items]))

    def _answering(self, ask: Callable[[int], bool]) -> Callable[[int], bool]:
        """As `ask`, but the answer is also written to the page, so that it is the same for all ranks."""
        if not self._is_mirrored or not self._peers:
            return ask
        return lambda index: self._page.note_answer(index, ask(index))

    def _end(self) -> None:
        if self._is_mirrored and self._peers:
            self._tell(CallEnded(self._number, False))
            self._unsettled = True

    def _end_raised(self, error: BaseException) -> None:
        """Before the error is reported, find out whether another rank's end, or a difference, caused it."""
        if self._is_mirrored and self._peers:
            self._tell(CallEnded(self._number, True))
            self._compare(error)
        elif any(peer.is_gone_within(LOOK_FOR_ENDS_S) for peer in self._peers):
            await_the_end(self._server)

    def ask_devices(self, *, wait: bool) -> None:
        """Something has failed, and this rank's device is well: does not return if another rank has lost its own.

        With mirrored calls this asks nothing: each rank has checked its own device before this one could go on.
        """
        if self._is_mirrored or not self._peers:
            return
        self._number += 1
        self._tell(AskDevice(self._number, wait))
        end = time.monotonic() + ASK_DEVICES_S
        for peer in self._peers:
            try:
                is_lost = peer.hear_of_device(self._number, end - time.monotonic())
            except EOFError:
                is_lost = True
            if is_lost:
                await_the_end(self._server)

    def _compare(self, error: BaseException | None) -> None:
        """Check that every rank has ended the call as this one did. Does not return if one has not."""
        has_raised = error is not None
        for peer in self._peers:
            try:
                ended = peer.hear_end(self._number, OUT_OF_STEP_S if has_raised else None)
            except EOFError:
                await_the_end(self._server)
            if ended is None:
                self._report(f"rank 0 raised, and {OUT_OF_STEP_S:g} s later rank {peer.rank} was still at it", error)
            elif ended.has_raised != has_raised:
                ranks = (0, peer.rank) if has_raised else (peer.rank, 0)
                self._report(f"rank {ranks[0]} raised in a call that rank {ranks[1]} ended without", error)

    def _report(self, detail: str, error: BaseException | None) -> NoReturn:
        report(self._server, detail, error)

    def _tell(self, message: ToRank, bodies: Sequence[bytes | bytearray] = ()) -> None:
        for peer in self._peers:
            try:
                peer.tell(message, bodies)
            except EOFError:
                await_the_end(self._server)


class Follower:
    """Any other rank: makes the calls that rank 0 announces, logs at its level, says whether its device is lost."""

    def __init__(self, place: Rank, leader: Peer, server: Connection, page: Page) -> None:
        self._rank = place.rank
        self._leader = leader
        self._server = server
        self._page = page
        self._items: list[Item] = []
        self._bodies: list[bytearray] = []
        self._is_once = True
        self._operators: Operators | None = None  # while a profile is made
        self._samples = 0

    def begin_samples(self) -> None:
        """As `Leader.begin_samples`."""
        self.end_sample("")

    def end_sample(self, why: str) -> str:
        """As `Leader.end_sample`."""
        self._samples += 1
        try:
            self._leader.tell(CallEnded(self._samples, bool(why)))
            ended = self._leader.hear_end(self._samples, OUT_OF_STEP_S if why else None)
        except EOFError:
            await_the_end(self._server)
        if ended is not None and ended.has_raised == bool(why):
            return ""
        if not why:
            await_the_end(self._server)
        return _otherwise(0, ended)

    def follow(self, model: LoadedModel) -> NoReturn:
        """Do what rank 0 asks for, until rank 0 is gone."""
        while True:
            try:
                heard = self._leader.hear()
                assert heard is not None
                message, bodies = heard
                if type(message) is Share:
                    self._items, self._bodies, self._is_once = message.items, bodies, message.is_once
                elif type(message) is Call:
                    self._call(model, message)
                elif type(message) is SetLevel:
                    set_level(message.level)
                elif type(message) is Profile:
                    self._begin_profile(model, message)
                elif type(message) is EndProfile:
                    self._end_profile(message)
                elif type(message) is AskDevice:
                    loss = find_loss((), model.load.gpu_id, wait=message.wait)
                    if loss:
                        self._server.send(DeviceLost(0, loss, ""))
                    self._leader.tell(DeviceTold(message.number, bool(loss)))
            except EOFError:  # this rank's end might be seen before rank 0's, and be taken for the cause
                await_the_end(self._server)

    def _call(self, model: LoadedModel, call: Call) -> None:
        context = model.context
        items = [self._items[index] for index in call.chosen]
        running.items = items
        rows = rows_of(items, self._bodies_of(call.chosen), model.load.decode_input)
        begin_unwatched(context, items)
        questions = 0

        def ask(index: int) -> bool:
            nonlocal questions
            questions += 1
            return self._ask(call.number, questions, index)

        context.ask_cancelled = ask
        failure: BaseException | None = None
        try:
            model.handle(rows, context)
        except SystemExit:
            raise
        except BaseException as error:  # the author's code; if rank 0 raised as well, its traceback is reported
            failure = error
        running.items = ()
        if self._is_once:
            self._bodies = []
        if failure is not None:  # before rank 0 gets `CallEnded` and answers the batch
            self._end_if_lost(model, failure)
        # Responses and metrics of this rank are not used, only rank 0's. Both may be objects of the author's own.
        with contextlib.suppress(BaseException):
            context.end_stream()
        with contextlib.suppress(BaseException):
            drain = getattr(context.metrics, "drain", None)
            if drain is not None:
                drain()
        self._leader.tell(CallEnded(call.number, failure is not None))
        ended = self._leader.hear_end(call.number, OUT_OF_STEP_S if failure is not None else None)
        if failure is not None and ended is None:
            detail = f"rank {self._rank} raised, and {OUT_OF_STEP_S:g} s later rank 0 was still at it"
            report(self._server, detail, failure)
        elif failure is not None and ended is not None and not ended.has_raised:
            report(self._server, f"rank {self._rank} raised in a call that rank 0 ended without", failure)
        is_memory = failure is not None and has_run_out(failure)
        failure = None  # frees what its frames hold
        if is_memory:
            give_back()

    def _begin_profile(self, model: LoadedModel, order: Profile) -> None:
        from marserve.worker.profile import Operators  # here for a quicker start: most workers are never profiled

        # Not counted: what this rank runs beside the calls of rank 0 has no batches. Rank 0 ends it with its own.
        self._operators = Operators(order, has_device=model.load.gpu_id is not None, counts=False)

    def _end_profile(self, end: EndProfile) -> None:
        operators, self._operators = self._operators, None
        if end.drop or operators is None:
            if operators is not None:
                operators.drop()
            return
        operators.finish()
        self._leader.tell(RankProfiled(end.number, operators.why_none), operators.traces)

    def _end_if_lost(self, model: LoadedModel, failure: BaseException) -> None:
        """If this rank's device is lost, report that and wait for the end of the group."""
        loss = find_loss([loss_told_by(failure)], model.load.gpu_id, wait=True)
        if loss:
            self._server.send(DeviceLost(0, loss, traceback_of(failure)))
            await_the_end(self._server)

    def _bodies_of(self, chosen: Sequence[int]) -> list[bytearray]:
        """The bodies of these items' parts; copies if more calls follow."""
        found: list[bytearray] = []
        firsts = [0]
        for item in self._items:
            firsts.append(firsts[-1] + len(item.parts))
        for index in chosen:
            bodies = self._bodies[firsts[index] : firsts[index + 1]]
            found.extend(bodies if self._is_once else map(bytearray, bodies))
        return found

    def _ask(self, number: int, question: int, index: int) -> bool:
        """Rank 0's answer to the same question of its handler; False if its call ends without that question."""
        while (answer := self._page.answer_of(number, question, index)) is None:
            if self._leader.has_ended_within(ASK_EVERY_S):
                answer = self._page.answer_of(number, question, index)
                return bool(answer)
        return answer


def _otherwise(rank: int, ended: CallEnded | None) -> str:
    """How another rank ended a call in which this one raised."""
    return f"rank {rank} was still at it {OUT_OF_STEP_S:g} s later" if ended is None else f"rank {rank} answered it"


def open_store(place: Rank, descriptor: int) -> object | None:
    """Let the ranks find each other: a store of torch's on a listening socket of loopback. Keep what is returned.

    Handlers' `init_process_group` uses it as the store of torchrun's agent (`TORCHELASTIC_USE_AGENT_STORE`). A store
    that torch opens by itself would listen on all addresses. None without torch; handlers then use something else.
    Raises RuntimeError for a torch that is too old to take the socket.
    """
    try:
        distributed = importlib.import_module("torch.distributed")
        store: object = distributed.TCPStore(
            LOOPBACK, place.store_port, place.size, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
    except (ImportError, AttributeError) as error:
        os.close(descriptor)
        log.warning("the ranks of this worker have no store to find each other by: torch.distributed: %s", error)
        return None
    except TypeError:
        os.close(descriptor)
        raise RuntimeError(
            f"torch {importlib.import_module('torch').__version__} is too old for a worker of several ranks "
            "(parallelType): it cannot open its store on a socket that is there (master_listen_fd), and a store of its "
            "own listens on all addresses. Use a newer torch, or parallelType: custom"
        ) from None
    return store


def report(server: Connection, detail: str, error: BaseException | None) -> NoReturn:
    """Report that the group is out of step, and wait for the end that follows."""
    server.send(OutOfStep(detail, "" if error is None else traceback_of(error)))
    await_the_end(server)


def await_the_end(server: Connection) -> NoReturn:
    """Wait for the server to end this process, since another rank is gone, or the group is given up.

    No answer is sent meanwhile, so that the batch in flight is run again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(END_S)
    print("the other ranks of this worker are gone, and the server did not end this one", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)
