"""Model versions as a person reads them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from marserve.cli.output import Step
from marserve.cli.versions import (
    deaths,
    has_failed,
    is_ready,
    label,
    last_death,
    last_words,
    progress_of,
    ready_workers,
    versions_table,
    waiting_workers,
    worker_deaths,
    workers_table,
)
from support.fake_apis import description, worker

DEATH = {"cause": "killed", "at": "2026-01-31T13:44:53.034Z", "detail": "Traceback:\n  ValueError: no weights\n"}


def drawn(table: Table) -> list[list[str]]:
    """The table's rows, headline first, as words."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_version_is_named_with_its_model() -> None:
    """Model, stroke, version."""
    assert label(description("digits", "2.0")) == "digits/2.0"


@pytest.mark.parametrize(
    ("statuses", "wanted", "expected"),
    [(["READY"], 1, True), (["READY", "LOADING"], 2, False), ([], 1, False), ([], 0, True)],
)
def test_a_version_is_ready_when_all_its_workers_are(statuses: list[str], wanted: int, expected: bool) -> None:
    """As many loaded workers as it must have at least."""
    version = description(minWorkers=wanted, workers=[worker(status) for status in statuses])

    assert is_ready(version) is expected
    assert ready_workers(version) == statuses.count("READY")


def test_a_version_has_failed_when_nothing_is_left_to_wait_for() -> None:
    """The server says so, or all that was seen of it is a death; missing workers alone may still come."""
    assert has_failed(description(state="failed"))
    assert has_failed(description(state="loading", workers=[worker("LOADING")], lastDeath=DEATH))
    assert not has_failed(description(state="loading", workers=[]))
    assert not has_failed(description(state="loading", minWorkers=2, lastDeath=DEATH))


def test_progress_counts_the_workers_that_are_ready() -> None:
    """Of those that the version must have."""
    version = description(minWorkers=2, workers=[worker(), worker("LOADING")])

    assert progress_of(version) == Step("digits/1.0: 1 of 2 workers ready", 1, 2)


def test_progress_says_why_a_worker_is_missing() -> None:
    """The last line of a traceback says it; once all are there it no longer matters."""
    missing = description(workers=[], lastDeath=DEATH)
    recovered = description(lastDeath=DEATH)

    assert progress_of(missing).text.endswith("0 of 1 workers ready (last worker died: killed: ValueError: no weights)")
    assert "died" not in progress_of(recovered).text


def test_progress_says_what_a_worker_waits_for() -> None:
    """Processors of a cluster, for example, for which a registration may wait without end."""
    waiting = description(workers=[{**worker("STARTING"), "waitsFor": "2 CPUs, and no node has more than 1"}])
    step = progress_of(waiting)

    assert step.text == "digits/1.0: 0 of 1 workers ready (one waits: 2 CPUs, and no node has more than 1)"
    assert step.waits_for == "2 CPUs, and no node has more than 1"
    assert progress_of(description()).waits_for == ""


@pytest.mark.parametrize(
    ("death", "expected"),
    [
        (None, ""),
        ({"cause": "exit", "at": "", "detail": ""}, "exit"),
        ({"cause": "exit", "at": "", "detail": None}, "exit"),
        (DEATH, "killed: ValueError: no weights"),
    ],
)
def test_a_death_is_told_in_one_line(death: dict[str, str] | None, expected: str) -> None:
    """The cause, and the end of the detail where there is any."""
    assert last_death({"lastDeath": death}) == expected


def test_a_death_for_want_of_what_was_not_installed_names_the_setting() -> None:
    """Without it nobody would look there."""
    death = {"cause": "missing_module", "at": "", "detail": "No module named 'x'"}

    assert "install_py_dep_per_model" in last_death(
        {"lastDeath": death, "requirements": {"status": "not installed", "file": "requirements.txt"}}
    )
    assert "install_py_dep_per_model" not in last_death({"lastDeath": death})


def test_the_table_of_versions_marks_the_default_one() -> None:
    """One row a version, in the order given."""
    rows = drawn(
        versions_table(
            [description(), description("digits", "2.0", isDefault=False, maxWorkers=3, state="loading", workers=[])]
        )
    )

    assert rows[1] == ["digits", "1.0", "*", "ready", "1", "of", "1", "1", "0", "digits.mar"]
    assert rows[2] == ["digits", "2.0", "loading", "0", "of", "1", "to", "3", "1", "0", "digits.mar"]


def test_the_table_of_versions_shows_the_last_minute_where_it_is_known() -> None:
    """Requests a second, the 95th percentile, and how full batches were; no column before the first sample."""
    busy = {"requestsPerSecond": 12.345, "p95Milliseconds": 41.27, "meanBatch": 3.21}
    versions = [description(batchSize=8, lastMinute=busy), description("b", lastMinute={"requestsPerSecond": 0.0})]

    rows = drawn(versions_table([*versions, description("c")]))

    assert rows[0][4:8] == ["batch", "req/s", "p95", "queued"]
    assert rows[1][7:12] == ["8", "(3.21)", "12.3", "41.3", "ms"]
    assert rows[2][7:10] == ["1", "0", "-"]
    assert rows[3][7:10] == ["1", "-", "-"]
    assert "req/s" not in drawn(versions_table([description()]))[0]


@pytest.mark.parametrize(
    ("requests", "p95", "shown"),
    [
        (0.3426, 999.4, ["0.343", "999", "ms"]),
        (999.4, 999.6, ["999", "1", "s"]),
        (12_345.6, 23_456.0, ["12,346", "23.5", "s"]),
        (1e6, 3_600_000.0, ["1,000,000", "3,600", "s"]),
    ],
)
def test_large_figures_are_shown_as_people_write_them(requests: float, p95: float, shown: list[str]) -> None:
    """A model that takes long to answer showed `2.4e+04 ms`."""
    version = description(lastMinute={"requestsPerSecond": requests, "p95Milliseconds": p95})

    assert drawn(versions_table([version]))[1][-5:-2] == shown


def test_the_table_of_versions_shows_memory_where_it_is_counted() -> None:
    """What a version holds, or in brackets what it would take; no column where nobody counts."""
    held = {"residentBytes": 412 << 20, "neededBytes": 400 << 20}
    versions = [
        description(memory=held),
        description("a", memory={"residentBytes": 0, "neededBytes": 400 << 20}),
        description("b"),
    ]

    rows = drawn(versions_table(versions))

    assert rows[0][4:6] == ["memory", "batch"]
    assert rows[1][6:9] == ["1", "412", "MiB"]
    assert rows[2][6:9] == ["1", "(400", "MiB)"]
    assert rows[3][6:8] == ["1", "-"]
    assert "memory" not in drawn(versions_table([description()]))[0]


def test_traffic_has_a_column_where_there_is_some() -> None:
    """Shares and labels; a version that has none of it has an empty cell."""
    versions = [
        description("digits", "1.0", trafficShare=0.75, labels=["stable"]),
        description("digits", "2.0", trafficShare=0.25),
        description("noop", "1.0"),
    ]

    rows = drawn(versions_table(versions))

    assert rows[0][:4] == ["model", "version", "state", "traffic"]
    assert "75 %, stable" in " ".join(rows[1])
    assert "25 %" in " ".join(rows[2])
    assert "traffic" not in drawn(versions_table([description()]))[0]


def test_a_version_without_a_state_is_judged_by_its_workers() -> None:
    """TorchServe's own answer has no state."""
    version = description()
    del version["state"], version["isDefault"]

    assert drawn(versions_table([version]))[1][2] == "ready"


def test_the_table_of_workers_has_their_process_memory_and_device() -> None:
    """One row a worker; what is not known yet is a stroke."""
    workers = [
        worker(),
        worker("LOADING", id="9001", pid=-1, memoryUsage=0, gpu=True, gpuId=3, restarts=2, lastDeath=DEATH),
    ]

    rows = drawn(workers_table([description(workers=workers)]))

    assert rows[1] == ["digits/1.0", "9000", "READY", "4711", "1", "MiB", "-", "0"]
    assert rows[2][:7] == ["digits/1.0", "9001", "LOADING", "-", "-", "3", "2"]


def test_the_last_words_of_a_version_are_its_traceback_and_its_last_lines() -> None:
    """Cause and detail alone where nothing more is known, and nothing of a version that lost no worker."""
    death = DEATH | {"traceback": "Traceback:\n  ValueError: no weights\n", "lastLines": ["loading", "no weights"]}

    assert last_words([description()]) == []
    assert last_words([description(lastDeath=DEATH)]) == [
        "",
        f"digits/1.0: last death at {DEATH['at']}: killed: {DEATH['detail']}",
    ]
    assert last_words([description("digits", "2.0", lastDeath=death)]) == [
        "",
        f"digits/2.0: last death at {DEATH['at']}: killed: {DEATH['detail']}",
        "  Traceback:",
        "    ValueError: no weights",
        "  it said last:",
        "    loading",
        "    no weights",
    ]


def test_a_last_death_has_a_line_below_the_table() -> None:
    """In a cell it would be broken into pieces."""
    died = description("m", "2.0", workers=[worker(lastDeath=DEATH)], lastDeath=DEATH)

    assert deaths([description()]) == worker_deaths([description()]) == []
    assert deaths([description(), died]) == ["", f"m/2.0: a worker died {DEATH['at']}: killed: ValueError: no weights"]
    assert worker_deaths([died]) == ["", f"m/2.0, worker 9000: died {DEATH['at']}: killed: ValueError: no weights"]


@pytest.mark.parametrize(
    ("status", "next_start", "shown", "told"),
    [
        ("LOADING", "2026-01-31T13:45:00.000Z", "waiting", "; started again 2026-01-31T13:45:00.000Z"),
        ("UNLOADING", "2026-01-31T13:50:00.000Z", "given up", "; started again 2026-01-31T13:50:00.000Z"),
        ("UNLOADING", "when scaled", "given up", "; not started again before the model is scaled"),
        ("LOADING", None, "LOADING", ""),
    ],
)
def test_a_worker_that_waits_says_for_what(status: str, next_start: str | None, shown: str, told: str) -> None:
    """TorchServe has no word for it: status in the table, and the time below it."""
    next_member = {} if next_start is None else {"nextStart": next_start}
    waiting = description("m", "2.0", workers=[worker(status, pid=-1, lastDeath=DEATH, **next_member)])

    row = drawn(workers_table([waiting]))[1]

    assert " ".join(row).startswith(f"m/2.0 9000 {shown} -")
    assert worker_deaths([waiting])[1].endswith(f"no weights{told}")


def test_versions_with_workers_that_wait_for_a_lost_device_say_so() -> None:
    """Below the tables, each reason once; what is awaited of a cluster stands in its column."""
    reason = "device 1 takes no worker: GPU is lost"
    workers = [worker("LOADING", id=number, pid=-1, waitsFor=reason) for number in ("9000", "9001")]
    here = description("m", "2.0", workers=workers, lostDevices={"1": "GPU is lost"})
    elsewhere = description(workers=[worker("LOADING", pid=-1, waitsFor="it needs 1 GPU")])

    rows = drawn(workers_table([here]))

    assert waiting_workers([here, elsewhere]) == ["", f"m/2.0: workers wait for a device: {reason}"]
    assert waiting_workers([elsewhere]) == []
    assert " ".join(rows[1]).startswith("m/2.0 9000 waiting -")


def test_workers_elsewhere_have_their_node_or_what_they_wait_for() -> None:
    """A column that is there where any worker has something for it."""
    waits = "it needs 1 GPU"
    workers = [worker(node="10.0.0.7 (c07f0bab)"), worker("LOADING", id="9001", pid=-1, waitsFor=waits)]

    rows = drawn(workers_table([description(workers=workers)]))

    assert rows[0][3] == "node"
    assert rows[1][3:5] == ["10.0.0.7", "(c07f0bab)"]
    assert rows[2][3:7] == waits.split()
