"""One table of causes: every word of the code is in it, and no other word makes a series."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import marserve.api
from marserve.errors import MarserveError
from marserve.pool.worker_end.cause_of_death import Cause
from marserve.telemetry.metrics.causes import CAUSES, OTHER, by_known_cause
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.server_metrics import Metrics

SERVER = Path(marserve.api.__file__).parents[1]
SAID = re.compile(
    r"""(?:\bcause(?::\ str)?\ =\ |\bcause=|count_refused\(
    |Sequence(?:Gone|sFull)\([\w.]+,\ |\(job,\ |NodeFailed\([^\n]*,\ )
    (?:\w+\ or\ )?"(\w+)\"""",
    re.VERBOSE,
)


def subclasses(of: type[MarserveError]) -> Iterator[type[MarserveError]]:
    """All of them."""
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_cause_of_the_code_is_in_the_table() -> None:
    """Those of error classes, of workers' ends, and those that stand in calls."""
    for _, name, _ in pkgutil.walk_packages(marserve.api.__path__, "marserve.api."):
        importlib.import_module(name)

    of_classes = {cause for each in subclasses(MarserveError) if isinstance(cause := each.__dict__.get("cause"), str)}
    in_calls = {found[1] for file in SERVER.rglob("*.py") for found in SAID.finditer(file.read_text())}

    assert len(of_classes) > 30
    assert of_classes | {cause.value for cause in Cause} <= CAUSES.keys()
    assert {"sequence_ended", "too_many_sequences", "slow_reader", "not_json"} <= in_calls
    assert in_calls <= CAUSES.keys()


def test_words_that_are_not_in_the_table_share_one_series() -> None:
    """Whatever a part says, the page has no more series than the table has lines."""
    counts = {"handler": 2, "": 1, **{f"word{number}": 1 for number in range(1000)}}

    assert by_known_cause(counts) == {"handler": 2, "unknown": 1, OTHER: 1000}
    assert by_known_cause({"handler": 1}) == {"handler": 1}


def test_the_page_shows_causes_by_the_table() -> None:
    """Of versions and of the server."""
    metrics = Metrics("box")
    version = VersionMetrics("m", "1")
    metrics.register(version)
    for number in range(100):
        version.errors[f"odd{number}"] += 1
        version.refused["queue_full"] += 1
        metrics.count_refused(f"odd{number}")

    page = metrics.render().decode()

    assert 'marserve_errors_total{model="m",version="1",cause="other"} 100.0\n' in page
    assert 'marserve_model_refused_total{model="m",version="1",cause="queue_full"} 100.0\n' in page
    assert 'marserve_refused_total{cause="other"} 100.0\n' in page
    assert "odd" not in page
