"""A worker's orders one after the other, in this process: what is done, what is sent, and with which status it ends."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from marserve.messages import (
    AskLengths,
    Batch,
    Batches,
    Check,
    Checked,
    DeviceLost,
    DevicePeak,
    Hello,
    Item,
    Lengths,
    Load,
    Loaded,
    Metric,
    Metrics,
    NotLoaded,
    Piece,
    Raised,
    Rank,
    Result,
    Results,
    Stop,
    Warned,
    pack_head,
)
from marserve.option_values import Sample, Tolerance
from marserve.shared_page import Page, create_page
from marserve.worker import loop as worker_loop
from marserve.worker import serving
from marserve.worker.load import LoadedModel
from marserve.worker.loop import WorkerLoop
from marserve.worker.outgoing import raised
from marserve.worker.serving import recover
from marserve_handlers.context import send_intermediate_predict_response
from marserve_handlers.errors import PredictionException
from marserve_handlers.metrics import MetricsCache
from support.model_context import make_context

LOAD = Load("m", "1.0", "", "h.py", None, None, 4, max_answer_bytes=1000)


class Left(BaseException):
    """The process would have ended."""


STATUSES: list[int] = []
"""With which it would have ended: the first counts, for nothing runs after it in a process that ends."""


class Server:
    """The server's end: hands out orders, and keeps what it is sent. Afterwards it is gone, as `end` says."""

    def __init__(self, *orders: list[tuple[Any, list[bytearray]]], end: BaseException | None = None) -> None:
        self.orders = list(orders)
        self.sent: list[tuple[Any, list[bytes]]] = []
        self.end = end or EOFError()

    def receive(self) -> list[tuple[Any, list[bytearray]]]:
        """The next orders."""
        if not self.orders:
            raise self.end
        return self.orders.pop(0)

    def send(self, message: Any, bodies: Sequence[bytes] = ()) -> None:
        """What the worker says."""
        self.sent.append((message, list(bodies)))

    def of(self, kind: type[Any]) -> list[Any]:
        """What it said of this kind."""
        return [message for message, _ in self.sent if type(message) is kind]


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of its own."""
    descriptor = create_page()
    made = Page(descriptor)
    os.close(descriptor)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that runs tests does not end."""

    def leave(status: int) -> NoReturn:
        STATUSES.append(status)
        raise Left

    monkeypatch.setattr(worker_loop, "leave", leave)
    monkeypatch.setattr(serving, "leave", leave)
    monkeypatch.setattr(worker_loop, "keep_large_blocks", lambda who: None)


def model_of(handle: Callable[[Any, Any], Any], **load: Any) -> LoadedModel:
    """A model that was loaded by a template."""
    return LoadedModel(handle, make_context(), msgspec.structs.replace(LOAD, **load))


def echo(rows: list[dict[str, Any]], context: Any) -> list[Any]:
    """Answer what came."""
    return [bytes(row["body"]) for row in rows]


def item() -> Item:
    """One raw body."""
    return Item("id", [("body", None)], pack_head([], []), None)


def run(server: Server, page: Page, model: LoadedModel | None = None) -> int:
    """Run a worker to its end; the status."""
    STATUSES.clear()
    with pytest.raises(Left):
        WorkerLoop(server, page, model).run()  # type: ignore[arg-type]
    return STATUSES[0]


def test_a_forked_worker_says_hello_and_that_it_is_loaded_then_serves_in_order(page: Page) -> None:
    """Batches alone and several of one frame; the bodies are let go of before the next order is awaited."""
    alone, two = [bytearray(b"1")], [bytearray(b"2"), bytearray(b"3"), bytearray(b"4")]
    server = Server(
        [(Batch(1, [item()]), alone)],
        [(Batches([Batch(2, [item()]), Batch(3, [item(), item()])]), two)],
        [(Stop(), []), (Batch(4, [item()]), [bytearray(b"never")])],
    )

    assert run(server, page, model_of(echo)) == 0

    kinds = [type(message) for message, _ in server.sent]
    assert kinds == [Hello, Loaded, Results, Results, Results]
    hello, loaded = server.sent[0][0], server.sent[1][0]
    assert (hello.pid, hello.python) == (os.getpid(), sys.version.split()[0])
    assert (loaded.seconds, loaded.warnings, loaded.warm_up_s, loaded.has_length_of) == (0.0, [], 0.0, False)
    assert [(message.number, bodies) for message, bodies in server.sent[2:]] == [
        (1, [b"1"]),
        (2, [b"2"]),
        (3, [b"3", b"4"]),
    ]
    assert alone == two == []


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (EOFError(), 0),
        (BrokenPipeError(), 0),
        (ConnectionResetError(), 0),
        (SystemExit(7), 7),
        (ValueError("ours"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_how_a_worker_ends_is_seen_in_its_status(
    page: Page, capsys: pytest.CaptureFixture[str], end: BaseException, status: int
) -> None:
    """A server that is gone is an orderly end; what is ours to mend is printed."""
    assert run(Server(end=end), page) == status

    assert ("Traceback" in capsys.readouterr().err) is (status == 1)


def test_a_worker_ends_though_its_fault_cannot_be_printed(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The author's code may have closed the stream, or put anything in its place."""

    def refuse(text: str) -> NoReturn:
        raise ValueError("closed")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=refuse))

    assert run(Server(end=ValueError("ours")), page) == 1


def test_a_handler_that_says_how_long_inputs_are_is_told_and_asked(page: Page) -> None:
    """In its `Loaded`, and before a batch; without the page hearing of it."""
    model = model_of(echo)
    model.length_of = lambda row: len(row["body"])
    asked = [bytearray(b"four"), bytearray(b"seven77")]
    server = Server([(AskLengths(5, [item(), item()], 1.0), asked)])

    assert run(server, page, model) == 0

    assert server.of(Loaded)[0].has_length_of
    assert [list(each.lengths) for each in server.of(Lengths)] == [[4, 7]]
    assert asked == []


def test_what_a_handler_measured_is_sent_before_its_answer_and_once(page: Page) -> None:
    """Also what it measured before it raised; an object of the author's own that measures nothing is left alone."""
    metric = ("n", 1.0, "ms", "gauge", [("a", "b")], "r")
    model = model_of(echo)
    values = [[metric], [], [metric, metric], []]
    model.context.metrics = SimpleNamespace(drain=lambda: values.pop(0))  # type: ignore[assignment]

    assert run(Server([(Batch(1, [item()]), [bytearray(b"1")])]), page, model) == 0
    server = Server([(Batch(1, [item()]), [bytearray(b"1")])])
    assert run(server, page, model) == 0

    assert [type(message) for message, _ in server.sent] == [Hello, Metrics, Loaded, Results]
    assert server.of(Metrics)[0].values == [Metric(*metric)] * 2
    model.context.metrics = SimpleNamespace()  # type: ignore[assignment]
    server = Server([(Batch(1, [item()]), [bytearray(b"1")])])
    assert run(server, page, model) == 0
    assert not server.of(Metrics)


def test_what_a_handler_measured_before_it_raised_is_sent_before_its_failure(page: Page) -> None:
    """The line of the log that it belongs to comes with it."""
    values = [[], [("n", 1.0, "ms", "gauge", [], "r")]]

    def fail(rows: Any, context: Any) -> Any:
        raise ValueError("bad")

    model = model_of(fail)
    model.context.metrics = SimpleNamespace(drain=lambda: values.pop(0))  # type: ignore[assignment]
    server = Server([(Batch(1, [item()]), [bytearray(b"1")])])

    assert run(server, page, model) == 0

    assert [type(message) for message, _ in server.sent] == [Hello, Loaded, Metrics, Raised]


def test_only_a_handler_of_steps_is_asked_whether_more_follows(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that raises is the batch's failure; to end the process is still its own word."""
    asked: list[int] = []

    def say(context: Any, answered: Any) -> None:
        asked.append(len(answered))
        if answered == [b"bad"]:
            raise ValueError("no word")
        if answered == [b"end"]:
            raise SystemExit(6)

    monkeypatch.setattr(serving, "say_what_follows", say)
    monkeypatch.setattr(serving, "begin_step", lambda context, live: context.begin_batch(live))

    def orders(*bodies: bytes) -> list[list[tuple[Any, list[bytearray]]]]:
        return [[(Batch(number, [item()]), [bytearray(body)])] for number, body in enumerate(bodies, 1)]

    plain, steps = Server(*orders(b"good", b"bad")), Server(*orders(b"good", b"bad", b"end"))
    assert run(plain, page, model_of(echo)) == 0
    assert asked == []
    assert run(steps, page, model_of(echo, is_continuous=True)) == 6

    assert asked == [1, 1, 1]
    assert [each.number for each in plain.of(Results)] == [1, 2]
    assert [each.number for each in steps.of(Results)] == [1]
    assert [(each.number, each.kind) for each in steps.of(Raised)] == [(2, "handler")]


def test_a_handler_without_loading_is_a_fault_of_ours_and_told_so(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch before a `Load`."""
    assert run(Server([(Batch(1, [item()]), [bytearray(b"1")])]), page) == 1
    assert "no attribute '_served'" in capsys.readouterr().err


def test_a_load_is_told_with_its_time_or_its_fault(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is limited first, processors and threads are set, then the author's code is loaded."""
    done: list[Any] = []
    for name in ("limit_memory", "enter_model_folder", "stay_on", "use_threads"):
        monkeypatch.setattr(worker_loop, name, lambda what, name=name: done.append((name, what)))

    def load(order: Load) -> LoadedModel:
        done.append("load_model")
        if order.model == "bad":
            raise ModuleNotFoundError("No module named 'x'")
        if order.model == "exits":
            raise SystemExit(9)
        return model_of(echo)

    monkeypatch.setattr(worker_loop, "load_model", load)
    order = msgspec.structs.replace(LOAD, memory_limit_bytes=5, cpus=[0], threads=3)

    server = Server([(order, [])])
    assert run(server, page) == 0
    assert done == [
        ("limit_memory", 5),
        ("enter_model_folder", order),
        ("stay_on", [0]),
        ("use_threads", 3),
        "load_model",
    ]
    assert 0 <= server.of(Loaded)[0].seconds < 60
    bad = Server([(msgspec.structs.replace(order, model="bad"), [])])
    assert run(bad, page) == 1
    assert [each.kind for each in bad.of(NotLoaded)] == ["missing_module"]
    assert not bad.of(Loaded)
    exits = Server([(msgspec.structs.replace(order, model="exits"), [])])
    assert run(exits, page) == 9
    assert not exits.of(NotLoaded)


@pytest.mark.parametrize(("rank", "is_mirrored"), [(0, True), (0, False), (1, True), (1, False)])
def test_a_rank_takes_the_descriptors_of_its_place_and_what_it_starts_inherits_none(
    page: Page, monkeypatch: pytest.MonkeyPatch, rank: int, is_mirrored: bool
) -> None:
    """Rank 0 has the store's and one to each other rank, in order; another rank has one to rank 0."""
    seen: list[Any] = []
    ours, others = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    given = [one.detach() for one in ours]
    for descriptor in given:
        os.set_inheritable(descriptor, True)
    place = Rank(rank, 3, is_mirrored, 1)
    monkeypatch.setattr(worker_loop, "open_store", lambda place, descriptor: seen.append((place, descriptor)))
    monkeypatch.setattr(worker_loop, "Peer", lambda rank, sock: (rank, sock.detach()))
    monkeypatch.setattr(worker_loop, "Leader", lambda place, peers, *_: (place, peers))
    monkeypatch.setattr(worker_loop, "Follower", lambda place, leader, *_: (place, leader))
    loop: Any = WorkerLoop(Server(), page, None, given)  # type: ignore[arg-type]

    loop._join(place)

    assert seen == ([(place, given[0])] if rank == 0 else [])
    assert loop._leader == ((place, [(1, given[1]), (2, given[2])]) if rank == 0 else None)
    assert loop._follower == ((place, (0, given[0])) if rank == 1 else None)
    assert not any(map(os.get_inheritable, given))
    for descriptor in given:
        os.close(descriptor)
    for other in others:
        other.close()


class Lost:
    """A device that a handler loses: whoever asks afterwards is told so. `asked` are the words it was asked with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_lost = False
        self.asked: list[list[str]] = []
        monkeypatch.setattr(serving, "find_loss", self.find)

    def find(self, words: Sequence[str], gpu_id: int | None, *, wait: bool) -> str:
        """As the worker's own."""
        self.asked.append(list(words))
        return "device 1 is lost" if self.is_lost else ""

    def now(self) -> str:
        """Lose it; what the runtime says."""
        self.is_lost = True
        return "CUDA error: device-side assert triggered"


def losing(how: str, lost: Lost) -> Callable[[Any, Any], Any]:
    """A handler that loses its device with the row `lose`, and whose failure shows like this."""

    class Tensor(bytes):
        @property
        def __class__(self) -> Any:  # what the encoder asks of an object of the author's
            raise RuntimeError(lost.now())

    def handle(rows: Any, context: Any) -> Any:
        rows = [bytes(row["body"]) for row in rows]
        if b"lose" not in rows:
            return rows
        if how == "raises":
            raise RuntimeError(lost.now())
        if how == "answers otherwise":
            raise PredictionException(lost.now(), 400)
        if how == "too few answers":
            lost.now()
            return []
        bad: Any = RuntimeError(lost.now()) if how == "an item's exception" else Tensor()
        return [bad if row == b"lose" else row for row in rows]

    return handle


@pytest.mark.parametrize(
    "how", ["raises", "answers otherwise", "too few answers", "an item's exception", "fails while it is written"]
)
def test_a_worker_whose_device_is_lost_says_so_in_place_of_an_answer_and_ends(
    page: Page, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """However its failure shows: nothing of that batch is told, and the next one is not begun."""
    lost = Lost(monkeypatch)
    batches = [(Batch(1, [item(), item()]), [b"fine", b"fine"]), (Batch(2, [item(), item()]), [b"lose", b"fine"])]
    server = Server(*([(batch, list(map(bytearray, bodies)))] for batch, bodies in [*batches, batches[0]]))

    status = run(server, page, model_of(losing(how, lost)))

    assert status == 1
    assert [type(message) for message, _ in server.sent] == [Hello, Loaded, Results, DeviceLost]
    (told,) = server.of(DeviceLost)
    assert (told.number, told.detail) == (2, "device 1 is lost")
    assert bool(told.traceback) == (how in ("raises", "answers otherwise", "too few answers"))
    assert page.running[0] == 2


def test_a_device_is_asked_after_a_batch_with_a_failed_item_and_after_no_other(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with what runtimes said in the errors; a worker whose device is well serves on."""
    lost = Lost(monkeypatch)

    def handle(rows: Any, context: Any) -> Any:
        words = [bytes(row["body"]) for row in rows]
        if words == [b"raise"]:
            raise ValueError("CUDA error: device-side assert triggered")
        return [ValueError("x") if word == b"fail" else {1} if word == b"unwritable" else word for word in words]

    bodies = [[b"a", b"b"], [b"fail", b"unwritable", b"c"], [b"d"], [b"raise"], [b"e"]]
    orders = [
        [(Batch(number, [item()] * len(each)), list(map(bytearray, each)))] for number, each in enumerate(bodies, 1)
    ]
    server = Server(*orders)

    assert run(server, page, model_of(handle)) == 0
    assert lost.asked == [["", ""], [""]]
    assert len(server.of(Results)) == 4
    assert len(server.of(Raised)) == 1


def test_a_device_that_is_lost_by_a_warm_up_input_is_a_failed_load(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would serve nothing."""
    lost = Lost(monkeypatch)
    server = Server()

    status = run(server, page, model_of(losing("raises", lost), warm_up=[Sample(body=b"lose")]))

    assert status == 1
    assert server.of(NotLoaded) == [NotLoaded("device_lost", "device 1 is lost, by a warm-up input", "")]
    assert not server.of(Loaded)


def test_a_device_that_is_lost_in_a_check_ends_the_worker(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose errors are otherwise a verdict's."""
    lost = Lost(monkeypatch)
    items = [item(), item()]
    check = Check(1, items, 2, Tolerance(1e-3, 1e-5, []), 10.0)
    server = Server([(check, [bytearray(b"fine"), bytearray(b"lose")])])

    status = run(server, page, model_of(losing("raises", lost)))

    assert status == 1
    assert [told.number for told in server.of(DeviceLost)] == [1]
    assert not server.of(Checked)


def test_a_device_that_is_lost_over_a_length_ends_the_worker(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch behind the question is not begun."""
    lost = Lost(monkeypatch)

    def length_of(row: Any) -> int:
        raise RuntimeError(lost.now())

    model = model_of(echo)
    model.length_of = length_of
    server = Server([(AskLengths(1, [item()], 1.0), [bytearray(b"a")]), (Batch(1, [item()]), [bytearray(b"a")])])

    assert run(server, page, model) == 1
    assert [told.number for told in server.of(DeviceLost)] == [0]
    assert not server.of(Lengths)
    assert page.running[0] == 0


def test_what_a_handler_notes_for_describe_after_its_load_is_told_once(page: Page) -> None:
    """With the batch in which it was noted; what was noted at the load goes with that."""

    def note(rows: list[dict[str, Any]], context: Any) -> Any:
        context.load_warnings += [bytes(row["body"]).decode() for row in rows if row["body"] != b"-"]
        return ["x"] * len(rows)

    model = model_of(note)
    model.context.load_warnings.append("at its load")
    said = [b"first", b"-", b"second", b"-"]
    server = Server(*([(Batch(number, [item()]), [bytearray(body)])] for number, body in enumerate(said, 1)))

    assert run(server, page, model) == 0
    (loaded,) = server.of(Loaded)
    assert loaded.warnings == ["at its load"]
    assert [told.warnings for told in server.of(Warned)] == [["first"], ["second"]]


def test_a_handler_that_hides_what_it_notes_is_not_told_of(page: Page) -> None:
    """The list is the author's to replace; at most so many sentences count, of so many characters."""

    def note(rows: list[dict[str, Any]], context: Any) -> Any:
        context.load_warnings = None if rows[0]["body"] == b"1" else ["x" * 5000] * 50
        return ["x"] * len(rows)

    model = model_of(note)
    server = Server(*([(Batch(number, [item()]), [bytearray(b"%d" % number)])] for number in (1, 2, 3)))

    assert run(server, page, model) == 0
    (told,) = server.of(Warned)
    assert [len(warning) for warning in told.warnings] == [2000] * 20


@pytest.mark.parametrize("gpu_id", [None, 0])
def test_what_larger_batches_took_of_the_device_is_told_once_each(
    page: Page, monkeypatch: pytest.MonkeyPatch, gpu_id: int | None
) -> None:
    """Behind the answer, where it was more than ever; a worker without a device says nothing and is not looked at."""
    taken = [100, 100, 300, 300, 900]  # when it was loaded, and after batches of 1, 2, 3 and 4
    readings = iter(taken)
    monkeypatch.setattr(serving, "taken_bytes", lambda: next(readings))
    batches = [Batch(number, [item()] * size) for number, size in enumerate((1, 2, 1, 2, 3, 4, 4, 1), 1)]
    server = Server(*([(batch, [bytearray(b"1")] * len(batch.items))] for batch in batches))

    assert run(server, page, model_of(echo, gpu_id=gpu_id)) == 0
    assert [told.device_bytes for told in server.of(DevicePeak)] == ([] if gpu_id is None else [300, 900])
    kinds = [type(message) for message, _ in server.sent]
    assert all(kinds[place - 1] is Results for place, kind in enumerate(kinds) if kind is DevicePeak)
    assert len(list(readings)) == (4 if gpu_id is None else 0)


def test_memory_is_given_back_where_it_ran_out_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs milliseconds."""
    given: list[int] = []
    monkeypatch.setattr(serving, "give_back", lambda: given.append(1))

    recover(raised(1, 0.0, MemoryError()))
    recover(raised(1, 0.0, ValueError()))

    assert given == [1]


def test_the_time_in_the_authors_code_is_told_and_a_type_that_it_chose_stays(page: Page) -> None:
    """Among whatever other headers it set; without one a document of ours says that it is JSON."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        for row in range(2):
            context.set_response_header(row, "X-A", "1")
        context.set_response_header(0, "Content-Type", "text/x")
        return [{"a": 1}, {"a": 1}]

    server = Server([(Batch(1, [item(), item()]), [bytearray(b"1"), bytearray(b"2")])])

    assert run(server, page, model_of(handle)) == 0

    (results,) = server.of(Results)
    assert 0 <= results.handler_s < 60
    types = [[value for name, value in each.headers if name.lower() == "content-type"] for each in results.results]
    assert types == [["text/x"], ["application/json"]]


def one(body: bytes = b"1", number: int = 1) -> list[tuple[Any, list[bytearray]]]:
    """An order for a batch of one item."""
    return [(Batch(number, [item()]), [bytearray(body)])]


# ------------------------------------------------------------------------------------------- what was measured


def test_values_that_were_dropped_are_counted_once(page: Page) -> None:
    """By the cache because it was full, and by the wire because no metric can have them; with no value left, too."""
    model = model_of(echo)
    cache = model.context.metrics
    assert isinstance(cache, MetricsCache)
    cache.dropped = 3
    cache.store = [("n", 1.0, "ms", "no such kind", [], "r")]  # type: ignore[list-item]
    first, second = Server(one()), Server(one())

    assert run(first, page, model) == 0
    assert run(second, page, model) == 0

    assert [(each.values, each.dropped) for each in first.of(Metrics)] == [([], 4)]
    assert second.of(Metrics) == []
    assert cache.dropped == 0


def test_metrics_that_cannot_be_read_cost_no_answer(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    """The author reads why in the log; to end the process is still the author's own word."""
    model = model_of(echo)

    def fail() -> NoReturn:
        raise KeyboardInterrupt("mine")

    model.context.metrics = SimpleNamespace(drain=fail)  # type: ignore[assignment]
    server = Server(one())
    assert run(server, page, model) == 0
    assert (len(server.of(Results)), server.of(Metrics)) == (1, [])
    [record, _] = caplog.records  # after loading, and after the batch
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "what the handler measured cannot be read")
    assert record.exc_info is not None

    model.context.metrics = SimpleNamespace(drain=lambda: sys.exit(4))  # type: ignore[assignment]
    assert run(Server(one()), page, model) == 4


def test_what_a_check_measured_belongs_to_no_request(page: Page) -> None:
    """It is taken and thrown away; and a check that runs out of memory gives back what it took."""
    model = model_of(echo)

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        context.metrics.add_counter("Seen", 1)
        return echo(rows, context)

    model.handle = handle
    server = Server([(Check(3, [item(), item()], 2, Tolerance(), 10.0), [bytearray(b"a"), bytearray(b"b")])])

    assert run(server, page, model) == 0

    assert [each.number for each in server.of(Checked)] == [3]
    assert server.of(Metrics) == []


def test_a_check_of_one_item_that_runs_out_of_memory_gives_back_what_it_took(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch finds a worker as before."""
    given: list[int] = []
    monkeypatch.setattr(serving, "give_back", lambda: given.append(1))

    def fail(rows: Any, context: Any) -> Any:
        raise MemoryError

    check = Check(1, [item()], 1, Tolerance(), 10.0, [Result(200, "", [])])
    server = Server([(check, [bytearray(b"a"), bytearray(b"a")])])

    assert run(server, page, model_of(fail)) == 0

    assert (len(server.of(Checked)), given) == (1, [1])


# ------------------------------------------------------------------------------------------- what does not go out


@pytest.mark.parametrize("error", [ValueError("too long"), TypeError("no such type"), OverflowError("too large")])
def test_an_answer_that_cannot_be_written_is_told_as_the_batch_s_failure(page: Page, error: Exception) -> None:
    """With the time that the author's code took; the worker goes on."""
    server = Server(one(b"1", 1), one(b"2", 2))
    refuse_once(server, error)

    assert run(server, page, model_of(echo)) == 0

    [failure] = server.of(Raised)
    assert (failure.number, failure.kind) == (1, "handler")
    assert 0 <= failure.handler_s < 60
    assert str(error) in failure.traceback
    assert [each.number for each in server.of(Results)] == [2]


def test_an_answer_to_a_server_that_is_gone_ends_the_worker(page: Page) -> None:
    """In good order: there is nobody to tell."""
    server = Server(one())
    refuse_once(server, BrokenPipeError())

    assert run(server, page, model_of(echo)) == 0
    assert server.of(Raised) == []


def refuse_once(server: Server, error: Exception) -> None:
    """The first results cannot be sent."""
    send = server.send

    def refuse(message: Any, bodies: Sequence[bytes] = ()) -> None:
        if type(message) is Results and message.number == 1:
            raise error
        send(message, bodies)

    server.send = refuse  # type: ignore[method-assign]


def test_what_cannot_be_written_has_its_status_and_words(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    """An element of no type that goes out, one for which memory runs out, one that is too long: each alone."""

    class Huge(dict[str, str]):
        def items(self) -> Any:
            raise MemoryError

    server = Server([(Batch(1, [item()] * 4), [bytearray(b"x")] * 4)])
    assert run(server, page, model_of(lambda rows, context: [object(), Huge(a="b"), b"x" * 1001, b"fine"])) == 0

    assert [(each.status, each.reason, each.error) for each in server.of(Results)[0].results] == [
        (503, "Unsupported model output data type.", "handler"),
        (507, "Out of resources", "memory"),
        (503, "The answer has 1001 bytes, more than max_response_size, 1000.", "too_large"),
        (200, "", None),
    ]
    refused = [record for record in caplog.records if "cannot be written" in record.getMessage()]
    assert [(record.levelname, record.getMessage().partition(":")[0]) for record in refused] == [
        ("ERROR", f"the answer to request {item().id}, of type {name}, cannot be written")
        for name in ("object", "Huge")
    ]


def test_a_dict_that_json_cannot_say_is_logged_under_its_request(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    """A time, for example, which authors put into their answers; the type is named."""
    server = Server([(Batch(1, [item()]), [bytearray(b"x")])])
    assert run(server, page, model_of(lambda rows, context: [{"at": datetime(2026, 1, 1, tzinfo=UTC)}])) == 0

    assert f"the answer to request {item().id}, of type dict, cannot be written: " in caplog.text
    assert "datetime is not JSON serializable" in caplog.text


# ------------------------------------------------------------------------------------------- streams without clients


def test_a_stream_that_no_client_waits_for_any_more_is_broken_off(page: Page) -> None:
    """Where the next piece would be sent, so that it is not made in vain; while one of them waits it goes on."""
    sent: list[int] = []

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        number = len(rows)
        for gone in range(number):
            page.cancel(number, gone)
            send_intermediate_predict_response(["a"] * number, context.request_ids, "", 200, context)
            sent.append(number)
        return ["c"] * number

    two = Batch(2, [item(), item()])
    server = Server(one(), [(two, [bytearray(b"1"), bytearray(b"2")])], one(b"3", 3))

    assert run(server, page, model_of(handle)) == 0

    assert sent == [2, 1]  # of the batch of two the first piece, and the batch whose client is there
    assert [each.number for each in server.of(Piece)] == [2, 3]
    assert [(each.number, "NobodyWaits" in each.traceback) for each in server.of(Raised)] == [(1, True), (2, True)]
    assert [each.number for each in server.of(Results)] == [3]


# ------------------------------------------------------------------------------------------- ranks and coroutines


class FakeLeader:
    """Rank 0 of a group, that has other ranks make its calls."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.may_break_off = False

    def lead(self, model: LoadedModel) -> LoadedModel:
        """The model whose calls all make."""

        def handle(rows: Any, context: Any) -> Any:
            self.done.append("call")
            return model.handle(rows, context)

        return LoadedModel(handle, model.context, model.load, model.length_of, model.compare)

    def share(self, items: Sequence[Item], bodies: Sequence[bytearray], *, once: bool) -> None:
        """What the next call, or several, are made of."""
        self.done.append(("share", len(items), once))

    def settle(self) -> None:
        """All have ended the last call."""
        self.done.append("settle")


def test_rank_0_shares_each_batch_and_settles_before_the_next_order(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks make its calls: of batches, once; of the warm-up and of checks, as often as they take."""
    leader = FakeLeader()
    monkeypatch.setattr(worker_loop, "load_model", lambda load: model_of(echo, rank=load.rank, warm_up=load.warm_up))
    monkeypatch.setattr(WorkerLoop, "_join", lambda self, place: setattr(self, "_leader", leader))
    for name in ("limit_memory", "enter_model_folder", "stay_on", "use_threads"):
        monkeypatch.setattr(worker_loop, name, lambda what: None)
    load = msgspec.structs.replace(LOAD, rank=Rank(0, 2, True, 1), warm_up=[Sample(body=b"w")])
    check = Check(3, [item(), item()], 2, Tolerance(), 10.0)
    server = Server([(load, [])], one(), [(check, [bytearray(b"a"), bytearray(b"b")])])

    assert run(server, page) == 0

    assert leader.done[:2] == [("share", 1, False), "call"]
    batch = leader.done.index(("share", 1, True))
    assert leader.done[batch - 1 : batch + 3] == ["settle", ("share", 1, True), "call", "settle"]
    checked = leader.done.index(("share", 2, False))
    assert leader.done[checked + 1] == "call"
    assert leader.done[-1] == "settle"


@pytest.mark.parametrize(("rank", "is_warmed"), [(None, True), (0, True), (1, False)])
def test_the_warm_up_is_rank_0_s_to_run(page: Page, rank: int | None, is_warmed: bool) -> None:
    """The others are told of its calls; a worker alone has no rank."""
    seen: list[Any] = []

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        seen.append(rows)
        return echo(rows, context)

    place = None if rank is None else Rank(rank, 2, True, 1)
    server = Server()
    assert run(server, page, model_of(handle, rank=place, warm_up=[Sample(body=b"w")])) == 0

    assert bool(seen) is is_warmed
    assert (server.of(Loaded)[0].warm_up_s > 0) is is_warmed
    assert server.of(Loaded)[0].warnings == []


def test_a_handler_that_is_a_coroutine_is_warmed_up_one_by_one_and_then_served_by_its_own_loop(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the server was told that it is loaded."""
    done: list[Any] = []

    class Loop:
        def __init__(self, worker: Any, connection: Any, page: Page, model: LoadedModel) -> None:
            self.connection, self.model = connection, model

        def one_by_one(self) -> LoadedModel:
            """Called while nothing is served yet."""
            done.append("one by one")
            return self.model

        def serve(self) -> NoReturn:
            """Serve to the end."""
            done.append([type(message) for message, _ in self.connection.sent])
            raise EOFError

    monkeypatch.setattr("marserve.worker.coroutines.ConcurrentLoop", Loop)
    model = model_of(echo, is_concurrent=True, warm_up=[Sample(body=b"w")])

    assert run(Server(), page, model) == 0

    assert done == ["one by one", [Hello, Loaded]]


def test_a_rank_that_follows_makes_the_calls_of_rank_0(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has said that it is loaded, and with the model that it loaded."""
    done: list[Any] = []
    loaded = model_of(echo, rank=Rank(1, 2, True, 1))

    class Follower:
        def follow(self, model: LoadedModel) -> NoReturn:
            """Make the leader's calls."""
            done.append((model is loaded, len(server.of(Loaded))))
            raise EOFError

    monkeypatch.setattr(worker_loop, "load_model", lambda load: loaded)
    monkeypatch.setattr(WorkerLoop, "_join", lambda self, place: setattr(self, "_follower", Follower()))
    for name in ("limit_memory", "enter_model_folder", "stay_on", "use_threads"):
        monkeypatch.setattr(worker_loop, name, lambda what: None)
    server = Server([(msgspec.structs.replace(LOAD, rank=Rank(1, 2, True, 1)), [])])

    assert run(server, page) == 0
    assert done == [(True, 1)]


def test_a_rank_that_cannot_load_waits_a_moment_for_the_end_of_the_one_that_is_why(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is told the first cause; a worker alone does not wait."""
    slept: list[float] = []

    def fail(load: Load) -> NoReturn:
        raise ConnectionError("the other rank has gone")

    monkeypatch.setattr(worker_loop, "load_model", fail)
    monkeypatch.setattr(WorkerLoop, "_join", lambda self, place: None)
    monkeypatch.setattr(worker_loop.time, "sleep", slept.append)
    for name in ("limit_memory", "enter_model_folder", "stay_on", "use_threads"):
        monkeypatch.setattr(worker_loop, name, lambda what: None)

    for rank, waits in ((None, 0), (Rank(1, 2, True, 1), 1)):
        server = Server([(msgspec.structs.replace(LOAD, rank=rank), [])])
        assert run(server, page) == 1
        assert len(slept) == waits
        assert [each.kind for each in server.of(NotLoaded)] == ["load_failed"]
