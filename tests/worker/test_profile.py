"""How a worker measures its batches: by its clocks, and by torch's profiler within the memory it may use."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.messages import Batch, EndProfile, Item, Load, Profile, Profiled, Stop, pack_head
from marserve.worker import profile as profile_module
from marserve.worker.load import LoadedModel
from marserve.worker.profile import BATCH_MARK, Measured, Operators
from support.model_context import make_context
from support.model_folders import write_model
from support.worker_process import WorkerUnderTest

LOAD = Load("m", "1.0", "", "h.py", None, None, 1)

PLAIN = """
import gc, time
def handle(data, context):
    if data is None:
        return None
    time.sleep(0.03)
    gc.collect()
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    return [bytes(row["body"]) for row in data]
"""


@pytest.fixture
def worker() -> Iterator[WorkerUnderTest]:
    """A fresh worker, told nothing yet."""
    with WorkerUnderTest() as worker:
        yield worker


def test_a_worker_measures_so_many_requests_and_answers_them(worker: WorkerUnderTest, tmp_path: Path) -> None:
    """Sleeping, Python and collections are told apart; without torch there are no operators, and the reason says so."""
    worker.tell(write_model(tmp_path, PLAIN))
    worker.tell(Profile(7, 2, 1 << 26))
    for number in (1, 2, 3):
        worker.batch(number, b"a")
    worker.tell(EndProfile(7))  # too late: it has ended by itself
    worker.tell(Stop())

    heard = [worker.hear() for _ in range(6)]

    assert worker.end() == (0, "", "")
    profiled = heard[4][0]
    assert type(profiled) is Profiled
    assert [bodies for message, bodies in heard[2:4] + heard[5:]] == [[b"a"]] * 3
    assert [(each.number, each.requests) for each in profiled.batches] == [(1, 1), (2, 1)]
    for each in profiled.batches:
        blocked = each.handler_s - each.cpu_s - each.waited_s
        assert 0.03 <= blocked < 0.03 + 0.5 * each.handler_s
        assert each.cpu_s - each.collected_s >= 0.019
        assert each.collected_s > 0
    assert profiled.no_operators == "this model does not use torch"
    assert (profiled.number, profiled.traces, heard[4][1]) == (7, [], [])
    assert profiled.began < profiled.batches[0].began < profiled.batches[1].began < profiled.ended


def test_a_profile_ends_when_it_is_told_and_a_dropped_one_says_nothing(worker: WorkerUnderTest, tmp_path: Path) -> None:
    """A second order drops the first profile, too."""
    worker.tell(write_model(tmp_path, PLAIN))
    worker.tell(Profile(1, 0, 0))
    worker.tell(Profile(2, 0, 0))
    worker.tell(EndProfile(1))
    worker.tell(EndProfile(2))
    worker.tell(Profile(3, 0, 0))
    worker.tell(EndProfile(3, drop=True))
    worker.tell(Stop())

    heard = [worker.hear()[0] for _ in range(3)]

    assert worker.end()[0] == 0
    assert (heard[2].number, heard[2].batches) == (2, [])
    assert heard[2].no_operators == "they were not asked for"


def _batch(number: int, *ids: str) -> Batch:
    return Batch(number, [Item(each, [("body", None)], pack_head([], []), None) for each in ids])


def _measure(batches: int, order: Profile) -> Measured:
    """Batches of one product of matrices and one sum, measured in this process."""
    torch = pytest.importorskip("torch")
    rows = torch.ones(8, 8)

    def handle(data: Any, context: Any) -> Any:
        return [(rows @ rows).sum()]

    context = make_context()
    measured = Measured(order, LoadedModel(handle, context, LOAD))
    for number in range(1, batches + 1):
        measured.run(_batch(number, f"id-{number}"), lambda: measured.model.handle([{}], context))
    measured.close()
    measured.operators.finish()
    return measured


def _events(trace: bytes, category: str) -> list[dict[str, Any]]:
    return [each for each in json.loads(gzip.decompress(trace))["traceEvents"] if each.get("cat") == category]


def test_one_batch_is_counted_and_then_as_many_are_recorded_as_fit() -> None:
    """Each is named with its number and its requests' ids; shapes are there as asked."""
    operators = len(_events(_measure(1, Profile(1, 0, 1 << 26)).operators.traces[0], "cpu_op"))

    measured = _measure(6, Profile(1, 0, 3 * operators * 22 * 1024))

    first, rest = measured.operators.traces
    assert measured.operators.recorded == 4
    assert [each["name"] for each in _events(first, "user_annotation")] == [f"{BATCH_MARK} 1: id-1"]
    assert [each["name"] for each in _events(rest, "user_annotation")] == [
        f"{BATCH_MARK} {n}: id-{n}" for n in (2, 3, 4)
    ]
    product = next(each for each in _events(first, "cpu_op") if each["name"] == "aten::mm")
    assert product["args"]["Input Dims"] == [[8, 8], [8, 8]]
    assert len(measured.batches) == 6


def test_a_handler_that_profiles_by_itself_keeps_its_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two profilers at once would fail its requests."""
    pytest.importorskip("torch")
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "TRUE")

    operators = Operators(Profile(1, 0, 1 << 26), has_device=False)

    assert not operators.is_recording
    assert "ENABLE_TORCH_PROFILER" in operators.why_none


def test_traces_beyond_the_bound_are_left_out_and_said_to_be() -> None:
    """The server would take a larger frame for a broken worker's."""
    measured = Measured(Profile(1, 0, 10), LoadedModel(lambda rows, context: [], make_context(), LOAD))
    measured.close()

    kept, said = measured.fitting([(0, b"123456"), (0, b"7890"), (1, b"x")])

    assert kept == [(0, b"123456"), (0, b"7890")]
    assert said == "1 of 3 traces are left out: they have more than max_bytes, 10"


def test_a_profile_without_a_batch_has_no_operators_and_no_trace() -> None:
    """An empty trace would be of no use."""
    operators = _measure(0, Profile(1, 0, 1 << 26)).operators

    assert (operators.traces, operators.why_none) == ([], "no batch ran")


def test_a_full_disk_costs_the_trace_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks go on, and the reason is said."""

    def full(**words: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile_module.tempfile, "TemporaryDirectory", full)

    measured = _measure(2, Profile(1, 0, 1 << 26))

    assert len(measured.batches) == 2
    assert measured.operators.traces == []
    assert "No space left on device" in measured.operators.why_none
