"""Tests for how the ranks of a group stay in step: calls are mirrored, decisions are made once, ends must be alike."""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from marserve.messages import (
    Call,
    CallEnded,
    DeviceLost,
    EndProfile,
    Item,
    Load,
    OutOfStep,
    Profile,
    Rank,
    SetLevel,
    Share,
    ToServer,
    pack_head,
)
from marserve.shared_page import Page, create_page
from marserve.worker import rank as rank_module
from marserve.worker.load import Handle, LoadedModel
from marserve.worker.rank import Follower, Leader, Peer, open_store
from support.descriptors import more_descriptors
from support.model_context import make_context
from support.patience import PATIENCE_S

LOAD = Load("m", "1.0", "", "h.py", None, None, 4)


class Ended(BaseException):
    """What a rank does at its end, in place of waiting to be killed."""


class Server:
    """The server's end: keeps what a rank reports."""

    def __init__(self) -> None:
        self.told: list[ToServer] = []

    def send(self, message: ToServer, bodies: Sequence[bytes | bytearray | memoryview] = ()) -> None:
        """Keep it."""
        self.told.append(message)

    def receive(self) -> list[tuple[Any, list[Any]]]:
        """Nothing comes."""
        raise EOFError


class Group:
    """Rank 0 in the test's thread, rank 1 in one of its own, over a real socket and a real page."""

    def __init__(self, handle: Handle, other: Handle | None = None, *, is_mirrored: bool = True) -> None:
        ours, theirs = socket.socketpair()
        self._sockets = [ours, theirs]
        descriptor = create_page()
        self._pages = [Page(descriptor), Page(descriptor)]
        os.close(descriptor)
        self.server, self.other_server = Server(), Server()
        place = Rank(0, 2, is_mirrored, 1)
        self.leader = Leader(place, [Peer(1, ours)], self.server, self._pages[0])
        self.model = self.leader.lead(LoadedModel(handle, make_context(), LOAD))
        self._follower = Follower(Rank(1, 2, is_mirrored, 1), Peer(0, theirs), self.other_server, self._pages[1])
        self._other = LoadedModel(other or handle, make_context(), LOAD)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self._follower.follow(self._other)
        except (EOFError, Ended):
            pass
        except SystemExit:
            self._sockets[1].close()

    def end_other(self) -> None:
        """Rank 1 is gone."""
        self._sockets[1].shutdown(socket.SHUT_RDWR)

    def call(self, *bodies: bytes, ask: Callable[[int], bool] = lambda index: False, once: bool = True) -> Any:
        """Share items with these bodies and have them handled by all."""
        items = [Item(f"r{index}", [("body", None)], pack_head([], []), None) for index in range(len(bodies))]
        return self.run(items, [bytearray(body) for body in bodies], range(len(bodies)), ask=ask, once=once)

    def run(
        self,
        items: list[Item],
        bodies: list[bytearray],
        chosen: Sequence[int],
        *,
        ask: Callable[[int], bool] = lambda index: False,
        once: bool = True,
    ) -> Any:
        """Share the items, and have those that were chosen handled by all."""
        self.leader.share(items, bodies, once=once)
        return self.handle(items, bodies, chosen, ask=ask)

    def handle(
        self,
        items: list[Item],
        bodies: list[bytearray],
        chosen: Sequence[int],
        *,
        ask: Callable[[int], bool] = lambda index: False,
    ) -> Any:
        """Have some of the shared items handled by all."""
        context = self.model.context
        context.begin_batch([items[index] for index in chosen])
        context.ask_cancelled = ask
        return self.model.handle([{"body": bytearray(bodies[index])} for index in chosen], context)

    def close(self) -> None:
        """End both."""
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._thread.join(10)
        assert not self._thread.is_alive()
        for sock in self._sockets:
            sock.close()
        for page in self._pages:
            page.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    """Makes groups, whose ranks end by an exception where real ones wait for the server to end them."""

    def end(server: object) -> None:
        raise Ended

    monkeypatch.setattr(rank_module, "await_the_end", end)
    monkeypatch.setattr(rank_module, "OUT_OF_STEP_S", 0.2)
    groups: list[Group] = []

    def make(*arguments: Any, **options: Any) -> Group:
        groups.append(Group(*arguments, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def reporting(seen: list[Any]) -> Handle:
    """A handler that keeps what it sees."""

    def handle(rows: list[dict[str, Any]], context: Any) -> Any:
        seen.append(([bytes(row["body"]) for row in rows], [context.get_request_id(i) for i in range(len(rows))]))
        return ["x"] * len(rows)

    return handle


def test_every_call_of_rank_0_is_made_by_the_others(start: Callable[..., Group]) -> None:
    """The same bodies, the same request ids, in the same order."""
    mine: list[Any] = []
    others: list[Any] = []
    group = start(reporting(mine), reporting(others))

    assert group.call(b"a", b"b") == ["x", "x"]
    group.call(b"c")
    group.leader.settle()

    assert mine == others == [([b"a", b"b"], ["r0", "r1"]), ([b"c"], ["r0"])]


def test_what_rank_0_left_out_is_left_out_by_all(start: Callable[..., Group]) -> None:
    """Deadlines and cancels were looked at once, there."""
    others: list[Any] = []
    group = start(reporting([]), reporting(others))
    items = [Item(f"r{index}", [("body", None), ("more", None)], pack_head([], []), None) for index in range(4)]
    bodies = [bytearray(f"{index}".encode()) for index in range(8)]

    group.leader.share(items, bodies, once=True)
    group.model.context.begin_batch([items[3], items[1]])
    group.model.handle([{"body": bodies[6]}, {"body": bodies[2]}], group.model.context)
    group.leader.settle()

    assert others == [([b"6", b"2"], ["r3", "r1"])]


def test_items_of_several_calls_stay_as_they_came(start: Callable[..., Group]) -> None:
    """A check calls again and again, and handlers may change what they are given."""
    others: list[bytes] = []

    def spoil(rows: list[dict[str, Any]], context: Any) -> Any:
        others.extend(bytes(row["body"]) for row in rows)
        for row in rows:
            row["body"][:] = b"!"
        return ["x"] * len(rows)

    group = start(reporting([]), spoil)
    items = [Item("a", [("body", None)], pack_head([], []), None)]
    bodies = [bytearray(b"abc")]

    group.run(items, bodies, [0], once=False)
    group.handle(items, bodies, [0, 0])
    group.leader.settle()

    assert others == [b"abc", b"abc", b"abc"]


def test_whether_an_item_is_cancelled_is_decided_once_for_all(start: Callable[..., Group]) -> None:
    """At the same question, however fast a rank is; what rank 0 never asked is no."""
    answers: dict[int, list[bool]] = {0: [], 1: []}

    def asking(rank: int, pause_s: float) -> Handle:
        def handle(rows: list[dict[str, Any]], context: Any) -> Any:
            for _ in range(20):
                answers[rank] += [context.is_cancelled(0), context.is_cancelled(1)]
                time.sleep(pause_s)
            if rank == 1:
                answers[rank].append(context.is_cancelled(1))
            return ["x"] * len(rows)

        return handle

    questions: list[int] = []

    def ask(index: int) -> bool:
        questions.append(index)
        return index == 1 and len(questions) > 11

    group = start(asking(0, 0.001), asking(1, 0.0))
    group.call(b"a", b"b", ask=ask)
    group.leader.settle()
    questions.clear()
    group.call(b"a", b"b", ask=ask)
    group.leader.settle()

    once = [False] * 11 + [True] + [False, True] * 14
    assert answers[0] == once * 2
    assert answers[1] == ([*once, False]) * 2


def test_all_ranks_raising_is_the_handlers_own_affair(start: Callable[..., Group]) -> None:
    """A bad input is bad everywhere."""

    def fail(rows: list[dict[str, Any]], context: Any) -> Any:
        if bytes(rows[0]["body"]) == b"bad":
            raise ValueError("bad")
        return ["x"]

    group = start(fail)

    with pytest.raises(ValueError, match="bad"):
        group.call(b"bad")

    assert group.call(b"good") == ["x"]
    group.leader.settle()
    assert group.server.told == group.other_server.told == []


def test_a_rank_that_raised_alone_is_reported_with_its_traceback(start: Callable[..., Group]) -> None:
    """By itself, and by rank 0, which has answered but takes no further call."""

    def fail(rows: list[dict[str, Any]], context: Any) -> Any:
        raise ValueError("only here")

    group = start(reporting([]), fail)

    assert group.call(b"a") == ["x"]
    with pytest.raises(Ended):
        group.leader.settle()

    (told,) = group.server.told
    assert told == OutOfStep("rank 1 raised in a call that rank 0 ended without", "")
    group.close()
    (own,) = group.other_server.told
    assert isinstance(own, OutOfStep)
    assert own.detail == told.detail
    assert "only here" in own.traceback


def test_a_raise_of_rank_0_alone_is_reported_before_it_is_told(start: Callable[..., Group]) -> None:
    """Whether the others end the call, or still wait for rank 0 in a collective."""

    def fail(rows: list[dict[str, Any]], context: Any) -> Any:
        raise ValueError("only here")

    let_go = threading.Event()

    def wait(rows: list[dict[str, Any]], context: Any) -> Any:
        let_go.wait(10)
        return ["x"]

    for other, detail in (
        (reporting([]), "rank 0 raised in a call that rank 1 ended without"),
        (wait, "rank 0 raised, and 0.2 s later rank 1 was still at it"),
    ):
        group = start(fail, other)
        with pytest.raises(Ended):
            group.call(b"a")
        (told,) = group.server.told
        assert isinstance(told, OutOfStep)
        assert told.detail == detail
        assert "only here" in told.traceback
    let_go.set()


def test_a_rank_that_raised_does_not_wait_for_ever_for_rank_0(start: Callable[..., Group]) -> None:
    """Rank 0 is in a collective that this one will not come to: the group is reported long before the limit."""
    heard = threading.Event()

    def fail(rows: list[dict[str, Any]], context: Any) -> Any:
        raise ValueError("before the collective")

    def wait(rows: list[dict[str, Any]], context: Any) -> Any:
        end = time.monotonic() + 10
        while not group.other_server.told and time.monotonic() < end:
            time.sleep(0.005)
        heard.set()
        raise Ended

    group = start(wait, fail)

    with pytest.raises(Ended):
        group.call(b"a")

    assert heard.is_set()
    told = group.other_server.told[0]
    assert isinstance(told, OutOfStep)
    assert told.detail == "rank 1 raised, and 0.2 s later rank 0 was still at it"
    assert "before the collective" in told.traceback


def test_a_rank_that_lost_its_device_says_so_before_rank_0_can_answer(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though rank 0 raised as well: a group that raises alike would go on with a dead rank."""
    lost = threading.Event()

    def find_loss(words: Sequence[str], gpu_id: int | None, *, wait: bool) -> str:
        lost.set()
        return "device 1 is lost"

    monkeypatch.setattr(rank_module, "find_loss", find_loss)

    def fail(rows: list[dict[str, Any]], context: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    group = start(fail)

    with pytest.raises(Ended):
        group.call(b"bad")
    group.close()

    assert lost.is_set()
    (told,) = group.other_server.told
    assert isinstance(told, DeviceLost)
    assert (told.number, told.detail) == (0, "device 1 is lost")
    assert "device-side assert" in told.traceback


@pytest.mark.parametrize("is_mirrored", [True, False])
def test_what_raised_because_another_rank_is_gone_is_not_told_as_the_handlers(
    start: Callable[..., Group], is_mirrored: bool
) -> None:
    """The server is about to end the group, and to run again elsewhere what it had."""

    def lose(rows: list[dict[str, Any]], context: Any) -> Any:
        group.end_other()
        raise RuntimeError("Connection closed by peer")

    group = start(lose, reporting([]), is_mirrored=is_mirrored)

    with pytest.raises(Ended):
        group.call(b"a")

    assert group.server.told == []


@pytest.mark.parametrize("is_mirrored", [True, False])
def test_a_level_of_logging_is_passed_on_between_two_calls(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, is_mirrored: bool
) -> None:
    """In a pipeline, too, where no call is."""
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(rank_module, "set_level", said.put)
    group = start(reporting([]), is_mirrored=is_mirrored)

    levels = []
    for level in ("DEBUG", "INFO"):
        group.leader.set_level(level)
        group.call(b"a")
        levels.append(said.get(timeout=10))

    assert levels == ["DEBUG", "INFO"]


def test_in_a_pipeline_nothing_is_mirrored(start: Callable[..., Group]) -> None:
    """Rank 0's handler is called, and what it raises is told, as in any worker."""

    def handle(rows: list[dict[str, Any]], context: Any) -> Any:
        if not bytes(rows[0]["body"]):
            raise ValueError("empty")
        return [context.is_cancelled(0)]

    group = start(handle, is_mirrored=False)

    assert group.call(b"a", ask=lambda index: True) == [True]
    with pytest.raises(ValueError, match="empty"):
        group.call(b"")
    assert group.leader.may_break_off
    assert not start(handle).leader.may_break_off


@pytest.mark.parametrize("wait", [True, False])
def test_in_a_pipeline_a_rank_that_lost_its_device_says_so_when_rank_0_asks(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """Its own calls are the handler's affair, so no one sees them fail; rank 0 does not answer then."""
    asked: list[tuple[list[str], bool]] = []
    losses = iter(["", "device 1 is lost"])

    def find_loss(words: Sequence[str], gpu_id: int | None, *, wait: bool) -> str:
        asked.append((list(words), wait))
        return next(losses)

    monkeypatch.setattr(rank_module, "find_loss", find_loss)
    group = start(reporting([]), is_mirrored=False)

    group.leader.ask_devices(wait=wait)
    before = list(group.other_server.told)
    with pytest.raises(Ended):
        group.leader.ask_devices(wait=wait)
    group.close()

    assert before == []
    assert group.other_server.told == [DeviceLost(0, "device 1 is lost", "")]
    assert asked == [([], wait)] * 2


def test_in_a_pipeline_a_rank_that_says_nothing_of_its_device_holds_up_no_answer(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be at work. What it says later is not taken for its end, nor for the answer to the next question."""
    goes_on = threading.Event()
    monkeypatch.setattr(rank_module, "ASK_DEVICES_S", 0.05)

    def find_loss(words: Sequence[str], gpu_id: int | None, *, wait: bool) -> str:
        goes_on.wait(10)
        return ""

    monkeypatch.setattr(rank_module, "find_loss", find_loss)

    def fail(rows: list[dict[str, Any]], context: Any) -> Any:
        raise ValueError("bad input")

    group = start(fail, is_mirrored=False)

    group.leader.ask_devices(wait=True)
    goes_on.set()
    with pytest.raises(ValueError, match="bad input"):
        group.call(b"a")
    monkeypatch.setattr(rank_module, "ASK_DEVICES_S", 10.0)
    group.leader.ask_devices(wait=True)

    assert group.other_server.told == []


def test_in_a_pipeline_a_rank_that_is_gone_has_no_device_to_ask(start: Callable[..., Group]) -> None:
    """The server is about to end the group."""
    group = start(reporting([]), is_mirrored=False)
    group.end_other()

    with pytest.raises(Ended):
        group.leader.ask_devices(wait=True)


def test_where_calls_are_mirrored_no_rank_is_asked_for_its_device(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has looked before rank 0 could go on."""
    asked: list[object] = []
    monkeypatch.setattr(rank_module, "find_loss", lambda *_, **__: asked.append(1))
    group = start(reporting([]))

    group.leader.ask_devices(wait=True)
    group.call(b"a")
    group.leader.settle()

    assert asked == []


def test_messages_between_ranks_come_whole() -> None:
    """However the bytes come; a rank that says nothing in time, or is gone, is told apart."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Peer(1, ours), Peer(0, theirs)
        item = Item("a", [("body", None)], pack_head([], []), None)
        sender.tell(Share([item], True), [b"x" * 1000])
        sender.tell(Call(1, [0]))
        sender.tell(CallEnded(1, False))

        told = receiver.hear()
        assert told is not None
        assert told == (Share([item], True), [bytearray(b"x" * 1000)])
        assert receiver.has_ended_within(0.0)
        assert receiver.hear_end(1) == CallEnded(1, False)
        assert receiver.hear(0.01) is None
        assert not receiver.has_ended_within(0.0)
        ours.close()
        with pytest.raises(EOFError):
            receiver.hear()
        with pytest.raises(EOFError):
            receiver.tell(Call(2, [0]))


def test_without_torch_there_is_no_store_and_the_handler_may_do_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its listening socket is closed, so that nobody waits on it; the model log says what is missing."""

    def no_torch(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(rank_module.importlib, "import_module", no_torch)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        descriptor = os.dup(sock.fileno())

        assert open_store(Rank(0, 2, True, sock.getsockname()[1]), descriptor) is None

    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert "No module named 'torch.distributed'" in caplog.text


def test_a_torch_that_cannot_take_the_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store that it would open by itself listens on all addresses; the sentence says what to do."""

    class OldStore:
        def __init__(self, host: str, port: int, size: int, *, is_master: bool, wait_for_workers: bool) -> None:
            raise AssertionError("it would listen on all addresses")

    old = SimpleNamespace(TCPStore=OldStore, __version__="1.12.1")
    monkeypatch.setattr(rank_module.importlib, "import_module", lambda name: old)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        descriptor = os.dup(sock.fileno())

        with pytest.raises(RuntimeError, match=r"torch 1\.12\.1 is too old for a worker of several ranks"):
            open_store(Rank(0, 2, True, sock.getsockname()[1]), descriptor)

    with pytest.raises(OSError):
        os.fstat(descriptor)


def listening() -> set[tuple[str, int]]:
    """Where this process listens; tests before may have left servers that end with it."""
    sockets = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}


@pytest.mark.torch
def test_the_store_listens_on_the_socket_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback, and nowhere else; the ranks' `init_process_group` connects to it."""
    distributed = pytest.importorskip("torch.distributed")
    before = listening()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    port = sock.getsockname()[1]
    descriptor = os.dup(sock.fileno())
    sock.close()

    store = open_store(Rank(0, 1, True, port), descriptor)
    client = distributed.TCPStore("127.0.0.1", port, 1, is_master=False)
    client.set("word", "heard")

    assert client.get("word") == b"heard"
    assert listening() - before == {("127.0.0.1", port)}
    del client, store


def test_a_rank_that_nobody_ends_ends_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says nothing to the server meanwhile."""

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(rank_module, "END_S", 0.0)
    monkeypatch.setattr(rank_module.os, "_exit", end)
    server = Server()

    with pytest.raises(SystemExit) as ended:
        rank_module.await_the_end(server)

    assert ended.value.code == 1
    assert server.told == []
    assert "the other ranks of this worker are gone" in capfd.readouterr().err


def test_a_rank_hears_another_whatever_the_number_of_its_descriptor() -> None:
    """A fresh rank has the numbers of the server, and that may have thousands of connections."""
    ours, theirs = socket.socketpair()
    with more_descriptors(), ours, theirs:
        high = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 1024))
        with high:
            peer = Peer(1, high)

            assert peer.hear(0.0) is None
            Peer(0, theirs).tell(CallEnded(3, False))

            assert peer.hear_end(3, 5.0) == CallEnded(3, False)


def test_the_other_ranks_record_with_rank_0_and_send_it_what_they_have(start: Callable[..., Group]) -> None:
    """Between calls, which go on; a profile that is dropped sends nothing."""
    group = start(lambda rows, context: ["done"])
    group.leader.begin_profile(Profile(3, 0, 0))
    assert group.call(b"a") == ["done"]
    ended = group.leader.end_profile(EndProfile(3))
    group.leader.begin_profile(Profile(4, 0, 0))
    dropped = group.leader.end_profile(EndProfile(4, drop=True))

    assert ended == ([], ["rank 1 has no operators: they were not asked for"])
    assert dropped == ([], [])
    assert group.call(b"a") == ["done"]


class Loading:
    """Rank 0 and two others while they load, each in a thread of its own."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.sockets = [each for pair in pairs for each in pair]
        descriptor = create_page()
        self.pages = [Page(descriptor) for _ in range(3)]
        os.close(descriptor)
        server: Any = Server()
        peers = [Peer(number, ours) for number, (ours, _) in enumerate(pairs, 1)]
        self.ranks: list[Leader | Follower] = [Leader(Rank(0, 3, True, 1), peers, server, self.pages[0])]
        for number, (_, theirs) in enumerate(pairs, 1):
            self.ranks.append(Follower(Rank(number, 3, True, 1), Peer(0, theirs), server, self.pages[number]))

    def run(self, *does: Callable[[Leader | Follower], str]) -> list[str]:
        """What each rank is told at the end of a sample; "ended" where it waits for the server to end it."""

        def one(rank: Leader | Follower, do: Callable[[Leader | Follower], str]) -> str:
            try:
                return do(rank)
            except Ended:
                return "ended"

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(one, self.ranks, does))

    def close(self) -> None:
        """Close all."""
        for sock in self.sockets:
            sock.close()
        for page in self.pages:
            page.close()


@pytest.fixture
def loading(start: object) -> Iterator[Loading]:
    """Three ranks, whose ends are exceptions."""
    group = Loading()
    yield group
    group.close()


def _sample(why: str) -> Callable[[Leader | Follower], str]:
    def do(rank: Leader | Follower) -> str:
        rank.begin_samples()
        return rank.end_sample(why)

    return do


def test_samples_that_all_ranks_end_alike_are_the_handlers_own_affair(loading: Loading) -> None:
    """Whether they raise or not, as often as there are samples; levels of logging are kept for later."""
    leader = loading.ranks[0]
    assert isinstance(leader, Leader)
    leader.set_level("DEBUG")

    def do(rank: Leader | Follower) -> str:
        rank.begin_samples()
        return rank.end_sample("") + rank.end_sample("ValueError") + rank.end_sample("")

    assert loading.run(do, do, do) == ["", "", ""]
    follower = loading.ranks[1]
    assert isinstance(follower, Follower)
    assert follower._leader.hear(0.0) == (SetLevel("DEBUG"), [])


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        ((True, False, False), ["rank 1 answered it", "ended", "ended"]),
        ((False, True, False), ["ended", "rank 0 answered it", ""]),
        ((False, False, True), ["ended", "", "rank 0 answered it"]),
        ((True, False, True), ["rank 1 answered it", "ended", ""]),
    ],
)
def test_a_rank_that_raises_alone_says_so_and_the_others_wait_for_the_end(
    loading: Loading, raises: tuple[bool, ...], said: list[str]
) -> None:
    """At least one of them says it, and none that knows nothing."""
    assert loading.run(*(_sample("ValueError" * each) for each in raises)) == said


def test_a_rank_that_raises_does_not_wait_for_ranks_that_hang(loading: Loading) -> None:
    """In a collective that it never comes to; but for one that has not loaded yet it does."""
    told, waits, has_loaded = threading.Event(), threading.Event(), threading.Event()

    def raises(rank: Leader | Follower) -> str:
        waits.set()
        rank.begin_samples()
        assert has_loaded.is_set()
        try:
            return rank.end_sample("ValueError")
        finally:
            told.set()

    def hangs(rank: Leader | Follower) -> str:
        rank.begin_samples()
        assert has_loaded.is_set()
        assert told.wait(PATIENCE_S)
        return "hung"

    def hangs_late(rank: Leader | Follower) -> str:
        assert waits.wait(PATIENCE_S)
        has_loaded.set()
        return hangs(rank)

    assert loading.run(hangs, raises, hangs_late) == ["hung", "rank 0 was still at it 0.2 s later", "hung"]
