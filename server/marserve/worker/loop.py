"""The worker's end: load a model, then carry out the server's messages. One thread, blocking.

Knows the wire; no settings, no store, no HTTP. The end of the connection is the end of the worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from socket import socket
from typing import TYPE_CHECKING, Final, NoReturn

from marserve.allocator import BY_WORKER, keep_large_blocks
from marserve.messages import (
    FLOPS_NOT_COUNTED,
    AskHealth,
    AskLengths,
    Batch,
    Batches,
    Check,
    Counted,
    EndProfile,
    Hello,
    Load,
    Profile,
    Rank,
    SetLevel,
    Stop,
    Warned,
)
from marserve.shared_page import Page
from marserve.worker.connection import Connection
from marserve.worker.device.device_use import check_device_use
from marserve.worker.load import LoadedModel, enter_model_folder, load_model
from marserve.worker.outgoing import not_loaded
from marserve.worker.process.memory_limit import limit_memory
from marserve.worker.process.own_process import exit_status, leave, stay_on, use_inter_threads, use_threads
from marserve.worker.process.printed_lines import set_level
from marserve.worker.rank import LOOK_FOR_ENDS_S, Follower, Leader, Peer, open_store
from marserve.worker.serving import ServedModel

if TYPE_CHECKING:
    from marserve.worker.overlap.turns import OverlappedModel

NOT_WARMED: Final = (
    "pt2 compiles the model when its first requests come, and anew for batches of other sizes, for seconds each: "
    "with samples, or inputs that are declared (keys samples and signature), that would be over before it is ready"
)


class WorkerLoop:
    """One worker: loads a model unless a template has, then serves batches until the server stops it.

    `more` are the descriptors of a rank of a group: rank 0 has the listening socket of the store and one socket to each
    other rank in order, the others have one to rank 0.
    """

    _served: ServedModel  # once it is loaded

    def __init__(
        self, connection: Connection, page: Page, model: LoadedModel | None = None, more: Sequence[int] = ()
    ) -> None:
        self._connection = connection
        self._messages: Connection | OverlappedModel = connection
        self._page = page
        self._model = model
        self._more = more
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._store: object | None = None

    def run(self) -> NoReturn:
        """Serve until the server says stop or is gone, then end the process."""
        try:
            self._connection.send(Hello(os.getpid(), sys.version.split()[0]))
            if self._model is not None:
                self._ready(self._model, 0.0)
            while True:
                for message, bodies in self._messages.receive():
                    if type(message) is Batch:
                        self._served.serve_batch(message, bodies)
                        bodies.clear()  # not kept while the next ones are awaited
                    elif type(message) is Batches:
                        self._served.serve_batches(message, bodies)
                        bodies.clear()
                    elif type(message) is AskLengths:
                        self._served.serve_lengths(message, bodies)
                        bodies.clear()
                    elif type(message) is AskHealth:
                        self._served.serve_health(message)
                    elif type(message) is Check:
                        self._served.serve_check(message, bodies)
                    elif type(message) is Load:
                        self._load(message)
                    elif type(message) is SetLevel:
                        set_level(message.level)
                        if self._leader is not None:
                            self._leader.set_level(message.level)
                    elif type(message) is Profile:
                        self._served.begin_profile(message)
                    elif type(message) is EndProfile:
                        self._served.end_profile(message)
                    elif type(message) is Stop:
                        leave(0)
                    if self._leader is not None:
                        self._leader.settle()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            leave(0)
        except SystemExit as error:  # the author's code asked to end; the server gets its status
            leave(exit_status(error))
        except BaseException:  # a defect of marserve; a thread of the author's code must not keep the process
            with contextlib.suppress(BaseException):  # the author's code may have left no stream to print to
                traceback.print_exc()
            leave(1)

    def _load(self, load: Load) -> None:
        began = time.monotonic()
        try:
            limit_memory(load.loading_limit_bytes)
            enter_model_folder(load)
            stay_on(load.cpus)
            use_threads(load.threads)
            if load.rank is not None:
                self._join(load.rank)
            model = load_model(load)
            if load.parallel is not None:
                from marserve.worker.checks import compare_ranks  # here for a quicker start: few models are divided

                compare_ranks(model, self._leader or self._follower)
            use_inter_threads(load.inter_threads)
            check_device_use(model)
            if self._leader is not None:
                model = self._leader.lead(model)
        except SystemExit:
            raise
        except BaseException as error:
            if load.rank is not None:  # if another rank's end caused the error, this one is ended meanwhile
                time.sleep(LOOK_FOR_ENDS_S)
            self._connection.send(not_loaded(error))
            leave(1)
        self._ready(model, time.monotonic() - began)

    def _join(self, place: Rank) -> None:
        """Take this process's place in its group; the other ranks may be looking for the store already."""
        descriptors = list(self._more)
        for descriptor in descriptors:  # not for processes that the author's code starts
            os.set_inheritable(descriptor, False)
        if place.rank == 0:
            self._store = open_store(place, descriptors.pop(0))
            peers = [Peer(rank, socket(fileno=descriptor)) for rank, descriptor in enumerate(descriptors, 1)]
            self._leader = Leader(place, peers, self._connection, self._page)
        else:
            leader = Peer(0, socket(fileno=descriptors[0]))
            self._follower = Follower(place, leader, self._connection, self._page)

    def _ready(self, model: LoadedModel, seconds: float) -> None:
        keep_large_blocks(BY_WORKER)  # not before: memory that loading frees should go back to the system
        overlapped: OverlappedModel | None = None
        if model.overlap is None:
            served = self._served = ServedModel(self._connection, self._page, model, self._leader)
        else:
            from marserve.worker.overlap.turns import OverlappedModel  # here for a quicker start: few models ask for it

            served = self._served = overlapped = OverlappedModel(self._connection, self._page, model, model.overlap)
        load = model.load
        concurrent = None
        if load.is_concurrent:
            from marserve.worker.coroutines import ConcurrentLoop  # here for a quicker start: few workers need asyncio

            concurrent = ConcurrentLoop(served, self._connection, self._page, model)
        warm_up_s: float = 0.0
        problems: list[str] = []
        failure = ""
        is_first = load.rank is None or load.rank.rank == 0
        if load.warm_up and is_first:
            alone = model if concurrent is None else concurrent.one_by_one()
            warm_up_s, problems, failure = served.warm_up(alone, load.warm_up)
        elif model.context.is_compiled and is_first:
            model.context.load_warnings.append(NOT_WARMED)
        if load.peak_flops is not None:
            if self._leader is None and self._follower is None:
                self._watch_flops(model, load.peak_flops)
            else:
                model.context.load_warnings.append(f"{FLOPS_NOT_COUNTED}: each rank has a part of the model")
        served.say_loaded(seconds, warm_up_s, problems, failure)
        if self._follower is not None:
            self._follower.follow(model)
        if concurrent is not None:
            concurrent.serve()
        if overlapped is not None:
            self._messages = overlapped

    def _watch_flops(self, model: LoadedModel, peaks: dict[str, float]) -> None:
        """Have the model's operations counted, beside its first batches, and told to the server."""
        try:
            from marserve_handlers.flops.watch import Outcome, open_watch  # here: few models ask for it, and for numpy
        except ImportError as error:
            model.context.load_warnings.append(f"{FLOPS_NOT_COUNTED}: {error}")
            return

        # Both are called by a thread of the watch's: the server need not wait for the next batch.
        def tell(outcome: Outcome) -> None:
            per_batch, per_request = outcome.cost.per_batch, outcome.cost.per_row
            counted = Counted(per_batch, per_request, outcome.peak, outcome.dtype, outcome.inputs[:1000])
            with contextlib.suppress(OSError):  # the server is gone, or ends the worker
                self._connection.send(counted)

        def warn(sentence: str) -> None:
            with contextlib.suppress(OSError):
                self._connection.send(Warned([sentence]))

        watch = open_watch(model.handle, model.context, peaks, is_concurrent=model.load.is_concurrent)
        if watch is not None:
            watch.tell, watch.warn = tell, warn
            self._served.flops_watch = watch
