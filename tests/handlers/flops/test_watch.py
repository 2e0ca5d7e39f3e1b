"""A model is watched for some batches, counted beside them, and left alone afterwards (`flops/watch.py`)."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.messages import FLOPS_NOT_COUNTED, FLOPS_WATCHED_BATCHES
from marserve_handlers.context import Context
from marserve_handlers.flops import counting
from marserve_handlers.flops import watch as watching
from marserve_handlers.flops.cost import Cost, NotCounted
from marserve_handlers.flops.counting import BATCHES
from marserve_handlers.flops.watch import MOST_CALLS, Outcome, Watch, open_watch
from marserve_handlers.optimising.call_arrays import Call

np = pytest.importorskip("numpy")


class InferenceSession:
    """A session of ONNX Runtime, as far as it is looked at."""

    _model_path = ""

    def __init__(self) -> None:
        self.ran = 0

    def run(self, names: Any, feed: Any) -> list[Any]:
        """Counts its calls."""
        self.ran += 1
        return [feed]

    def get_providers(self) -> list[str]:
        """As on a processor."""
        return ["CPUExecutionProvider"]


class Counter:
    """Counts 100 a row, and ten times the length of what is behind it."""

    dtype = "float32"

    def __init__(self, failure: str = "", uncounted: frozenset[str] = frozenset()) -> None:
        self.failure = failure
        self.uncounted = set(uncounted)

    def count(self, call: Call, rows: int) -> int:
        """As it was told."""
        if self.failure:
            raise NotCounted(self.failure)
        [leaf] = call.leaves.values() or [SimpleNamespace(shape=(1, 0))]
        return rows * (100 + 10 * leaf.shape[1])


class House:
    """A watched session, and what it tells."""

    def __init__(self, counter: Callable[[], Any] = Counter, peaks: dict[str, float] | None = None) -> None:
        self.context = Context("m", "/m", {}, 4, None, "1")
        self.session = InferenceSession()
        self.told: list[Outcome] = []
        self.warned: list[str] = []

        def count(packed: bytes) -> counting.Counted:
            return counting.count(counter(), pickle.loads(pickle.loads(packed)[-1])[1])

        peaks = {"": 1e9} if peaks is None else peaks
        self.watch = Watch(self.session, self.context, "", peaks, "cpu", count=count)
        self.watch.tell, self.watch.warn = self.told.append, self.warned.append
        self.watch.__enter__()

    def batch(self, requests: int, *shapes: tuple[int, ...]) -> None:
        """A batch that calls the model with arrays of these shapes."""
        self.context.begin_batch([SimpleNamespace(id=str(each)) for each in range(requests)])  # type: ignore[misc]
        for shape in shapes:
            self.session.run(None, {"x": np.zeros(shape, np.float32)})

    def serve(self, requests: int, *shapes: tuple[int, ...]) -> None:
        """As many equal batches as are watched; then wait until they are counted."""
        for _ in range(BATCHES + 1):
            self.batch(requests, *shapes)
        self.wait()

    def wait(self) -> None:
        """Until they are counted."""
        assert self.watch._thread is not None
        self.watch._thread.join()


def test_the_outcome_is_told_without_a_further_call_and_the_next_one_ends_the_watch() -> None:
    """The model is then called as if there had been none."""
    house = House()
    house.serve(2, (2, 3))
    told = [Outcome(Cost(0.0, 130.0), 1e9, "float32", "x float32 [n, 3]")]
    assert house.told == told
    assert "run" in vars(house.session)

    house.batch(2, (2, 3), (2, 3))

    assert house.told == told
    assert "run" not in vars(house.session)
    assert house.session.ran == BATCHES + 3


def test_a_batch_that_calls_its_model_otherwise_has_the_mean_of_a_request() -> None:
    """Two calls a batch, of rows that are no requests, and of several lengths."""
    house = House()
    house.serve(2, (6, 3), (1, 8))

    [outcome] = house.told
    assert outcome.cost == Cost(0.0, (6 * 130 + 180) / 2)
    assert outcome.inputs == "x float32 [n, 3] and others, the mean of them"


@pytest.mark.parametrize(
    ("peaks", "peak"), [({"": 5.0}, 5.0), ({"float32": 7.0, "": 5.0}, 7.0), ({}, 9.0), ({"bfloat16": 5.0}, 9.0)]
)
def test_the_peak_is_the_given_one_else_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, peaks: dict[str, float], peak: float
) -> None:
    """That of the model's dtype before that of any."""
    monkeypatch.setattr(watching, "cached_peak", lambda dtype, threads, device: 9.0)
    house = House(peaks=peaks)
    house.serve(1, (1, 3))

    assert house.told[0].peak == peak


@pytest.mark.parametrize(
    ("counter", "said"),
    [
        (lambda: Counter("it looks at numbers"), "FLOPs are not counted: it looks at numbers"),
        (lambda: 1 / 0, "FLOPs are not counted: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_counted_says_why_in_describe_and_the_watch_ends(counter: Callable[[], Any], said: str) -> None:
    """And nothing else happens to what is served."""
    house = House(counter)
    house.serve(1, (1, 3))

    assert house.told == []
    assert house.context.load_warnings == house.warned == [said]
    house.batch(1, (1, 3))
    assert "run" not in vars(house.session)


def test_operators_that_are_not_counted_are_named() -> None:
    """Beside the figure."""
    house = House(lambda: Counter(uncounted=frozenset({"LSTM", "x::y"})))
    house.serve(1, (1, 3))

    assert house.context.load_warnings == ["FLOPs are counted without LSTM, x::y"]


def test_a_batch_of_very_many_calls_is_not_counted() -> None:
    """A loop that writes text word by word: each call has another shape."""
    house = House()
    house.batch(1, *[(1, 3)] * MOST_CALLS)
    house.wait()

    assert house.context.load_warnings == [
        f"FLOPs are not counted: one batch called the model {MOST_CALLS} times and more"
    ]


def test_of_batches_with_many_calls_the_whole_ones_count() -> None:
    """The last one may not have ended when enough was seen."""
    house = House()
    for _ in range(3):
        house.batch(1, *[(1, 3)] * 30)
    house.wait()

    assert house.told[0].cost == Cost(0.0, 30 * 130.0)


def test_odd_arguments_fail_no_request() -> None:
    """The watch ends, and says what it met."""

    class Odd(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise RuntimeError("not now")

    house = House()
    house.context.begin_batch([SimpleNamespace(id="r")])  # type: ignore[misc]

    house.session.run(None, {"x": Odd()})

    assert house.session.ran == 1
    assert house.context.load_warnings == [
        "FLOPs are not counted: what the model is called with cannot be looked at (RuntimeError: not now)"
    ]
    assert "run" not in vars(house.session)


def test_nothing_begins_while_it_is_held_and_the_copy_is_made_before() -> None:
    """A profile shows the batches alone: no operator of a copy, and no process beside them that began meanwhile."""
    house = House()
    house.watch.hold()
    for _ in range(BATCHES + 2):
        house.batch(1, (1, 3))
    assert house.watch._thread is None

    house.watch.release()
    for _ in range(BATCHES):
        house.batch(1, (1, 3))
    house.watch._is_free.clear()  # as `hold` does, before the copy is made
    house.watch._keep((), {"x": np.zeros((1, 3), np.float32)})
    assert house.watch._thread is None
    house.watch.release()
    house.batch(1, (1, 3))
    house.watch.hold()

    assert house.watch._is_packed.is_set()
    house.watch.release()
    house.wait()
    assert len(house.told) == 1


def test_a_profile_holds_what_has_the_copy_but_no_process_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on afterwards."""
    house = House()
    copying, may_copy = threading.Event(), threading.Event()

    def pack(model: Any, path: str, batches: Any) -> bytes:
        copying.set()
        assert may_copy.wait(10)
        return whole(model, path, batches)

    whole = watching.pack
    monkeypatch.setattr(watching, "pack", pack)
    for _ in range(BATCHES + 1):
        house.batch(1, (1, 3))
    assert copying.wait(10)
    house.watch._is_free.clear()
    may_copy.set()

    house.watch.hold()

    assert house.watch._is_packed.is_set()
    assert house.told == []
    house.watch.release()
    house.wait()
    assert len(house.told) == 1


def test_the_server_knows_how_the_sentence_begins_and_how_many_batches_are_watched() -> None:
    """It does not import this."""
    assert (FLOPS_NOT_COUNTED, FLOPS_WATCHED_BATCHES) == (watching.NOT_COUNTED, BATCHES)


def test_calls_in_threads_of_the_authors_are_not_seen() -> None:
    """Nobody knows for which batch they are; the wire belongs to the main thread."""
    house = House()
    thread = threading.Thread(target=house.batch, args=(1, (1, 3)))
    thread.start()
    thread.join()

    assert house.watch._batches == []


def test_a_handler_without_a_model_is_not_watched() -> None:
    """The reason stands in describe; so does that of a build whose parent is not there."""
    context = Context("m", "/m", {}, 4, None, "1")
    assert open_watch(lambda rows, context: rows, context, {}) is None
    assert context.load_warnings == [
        "FLOPs are not counted: the handler holds no module of torch and no session of ONNX Runtime"
    ]


KNOWN: dict[str, Any] = {
    "perBatch": 10.0, "perRequest": 20.0, "dtype": "float32", "inputs": "x [n, 3]", "uncounted": ["LSTM"]
}  # fmt: skip


def served_build(flops: dict[str, Any] | None) -> tuple[Context, InferenceSession, Watch | None]:
    """A build that serves in its model's place, and whose archive says this of it."""
    context = Context("m", "/m", {}, 4, None, "1")
    context.build, context.build_flops = "onnx-int8", flops
    session = InferenceSession()
    return context, session, open_watch(SimpleNamespace(model=session), context, {"": 5.0})


def test_a_build_has_what_its_archive_says_of_its_parent() -> None:
    """It is not counted itself: what it does is another matter."""
    context, session, watch = served_build(KNOWN)
    told: list[Outcome] = []
    assert watch is not None
    watch.tell = told.append
    session.run(None, {"x": np.zeros((1, 3), np.float32)})
    assert watch._thread is not None
    watch._thread.join()

    assert told == [Outcome(Cost(10.0, 20.0), 5.0, "float32", "x [n, 3]")]
    assert context.load_warnings == ["FLOPs are counted without LSTM"]


@pytest.mark.parametrize(
    ("flops", "said"),
    [
        (None, "the build onnx-int8 serves, and its archive does not say"),
        ({}, "the archive's figures cannot be read (KeyError('perBatch'))"),
        (KNOWN | {"perBatch": "many"}, "cannot be read (ValueError("),
        (KNOWN | {"perRequest": -1}, "cannot be read (ValueError("),
        (KNOWN | {"perRequest": 10**400}, "cannot be read (OverflowError("),
        (KNOWN | {"perBatch": 1.7e308, "perRequest": 1.7e308}, "cannot be read (ValueError("),
        (KNOWN | {"uncounted": None}, "cannot be read (TypeError("),
    ],
)
def test_a_build_of_which_its_archive_says_nothing_is_not_watched(flops: dict[str, Any] | None, said: str) -> None:
    """Nor is one whose figures are none: archives are written by anybody."""
    context, _, watch = served_build(flops)

    assert watch is None
    assert said in context.load_warnings[0]


def test_what_is_counted_for_an_archive_is_read_as_it_was() -> None:
    """By a server, later."""
    counter = Counter(uncounted=frozenset({"LSTM"}))
    counted = counting.count(counter, [counting.Seen(1, [Call((), {"x": np.zeros((1, 3))})])])

    _, _, watch = served_build(counting.as_document(counted))

    assert watch is not None
    assert watch._known == counted
    assert counted.cost == Cost(0.0, 130.0)


def test_coroutines_are_not_watched() -> None:
    """Their batches run side by side."""
    context = Context("m", "/m", {}, 4, None, "1")
    assert open_watch(SimpleNamespace(model=InferenceSession()), context, {}, is_concurrent=True) is None
    assert "with asyncCommunication" in context.load_warnings[0]
