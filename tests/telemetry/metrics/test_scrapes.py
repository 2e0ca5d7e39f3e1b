"""Pages for those who ask: shared, in short steps, bounded, with what others collect."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from marserve.errors import TooManyScrapes
from marserve.machine.own_thread import in_own_thread
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.page.foreign import ForeignCollectors, Source
from marserve.telemetry.metrics.scrapes import MAX_SCRAPES, PATIENCE_S, Page, Scrapes
from marserve.telemetry.metrics.server_metrics import Metrics
from support.metric_pages import as_the_library_calls_it, canonical, scrapes_of

pytestmark = pytest.mark.anyio

OPEN = "application/openmetrics-text;version=1.0.0"


@pytest.fixture
def anyio_backend() -> str:
    """These are asyncio's tasks."""
    return "asyncio"


def text_of(page: Page) -> str:
    """The whole page."""
    return b"".join(page.parts).decode()


def metrics_of(versions: int) -> Metrics:
    """Metrics with so many versions, each of which was asked."""
    metrics = Metrics("box")
    for index in range(versions):
        version = VersionMetrics(f"m{index}", "1.0")
        version.requests = 1
        version.total_seconds.observe(0.01)
        metrics.register(version)
    return metrics


async def test_the_page_is_what_the_library_writes_of_the_servers_registry() -> None:
    """Ours and others', in both formats; the parsers take them."""
    others = CollectorRegistry()
    Counter("acme_things", "Things.", ["kind"], registry=others).labels("a").inc(2)
    metrics = metrics_of(3)
    scrapes = scrapes_of(metrics, Source("acme", "acme", others))

    text, opened = text_of(await scrapes.page()), text_of(await scrapes.page(OPEN))

    its = metrics.families
    by_library = generate_latest(scrapes.registry()).decode()
    ours = as_the_library_calls_it(text, its)
    # The library writes when a counter was made, which text 0.0.4 shows in a family of its own.
    assert canonical(ours) == canonical(by_library)
    assert {family.name for family in parse_open(opened)} >= {"acme_things", "marserve_requests"}
    assert len(list(parse_text(text))) > len(its)


async def test_twenty_scrapes_at_once_cost_two_pages() -> None:
    """Those who ask before a page is begun share it; who asks later gets one that is newer than the question."""
    metrics = metrics_of(1)
    version = metrics.views()[0].of
    scrapes = scrapes_of(metrics)
    await scrapes.page()

    first = [asyncio.ensure_future(scrapes.page()) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    version.requests = 7
    later = [asyncio.ensure_future(scrapes.page()) for _ in range(10)]
    pages = await asyncio.gather(*first, *later)

    assert len({id(page.parts) for page in pages}) <= 2
    assert all('marserve_requests_total{model="m0",version="1.0"} 7.0' in text_of(page) for page in pages[10:])


async def test_a_client_that_goes_leaves_the_page_to_the_others() -> None:
    """It is cancelled alone."""
    scrapes = scrapes_of(metrics_of(1))
    gone, stays = asyncio.ensure_future(scrapes.page()), asyncio.ensure_future(scrapes.page())
    await asyncio.sleep(0)

    gone.cancel()

    assert "marserve_requests_total" in text_of(await stays)
    assert gone.cancelled()


async def test_a_page_is_written_in_steps_between_which_the_loop_runs() -> None:
    """By a clock on which each piece takes 0.4 ms: after three of them, others have their turn."""
    ticks = itertools.count()
    scrapes = Scrapes(metrics_of(1), ForeignCollectors([], in_own_thread), clock=lambda: next(ticks) * 0.0004)
    await scrapes.page()
    turns = 0
    is_over = asyncio.Event()

    async def others() -> None:
        nonlocal turns
        while not is_over.is_set():
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    page = await scrapes.page()
    is_over.set()
    await task

    pieces = sum(1 for _ in metrics_of(1).pieces())
    assert turns >= pieces // 4
    assert len(page.parts) >= pieces // 4


async def test_versions_that_go_while_a_page_is_written_do_not_break_it() -> None:
    """Each step sees the versions that are there then."""
    ticks = itertools.count()
    metrics = metrics_of(300)
    scrapes = Scrapes(metrics, ForeignCollectors([], in_own_thread), clock=lambda: next(ticks) * 1.0)
    task = asyncio.ensure_future(scrapes.page(OPEN))

    views = list(metrics.views())
    while not task.done():
        await asyncio.sleep(0)
        if views:
            metrics.remove(views.pop().of)

    assert len(list(parse_open(text_of(task.result())))) == len(metrics.families)


async def test_exemplars_are_kept_from_the_first_page_in_openmetrics_on() -> None:
    """Until then they cost nothing."""
    metrics = metrics_of(1)
    version = metrics.views()[0].of
    scrapes = scrapes_of(metrics)

    await scrapes.page("text/plain")
    assert version.total_seconds.examples is None
    await scrapes.page(OPEN)
    version.total_seconds.observe(0.01)
    version.total_seconds.exemplify(0.01, "6a0f")
    later = VersionMetrics("later", "1.0")
    metrics.register(later)

    assert later.total_seconds.examples is not None
    assert '# {request_id="6a0f"} 0.01' in text_of(await scrapes.page(OPEN))
    assert "6a0f" not in text_of(await scrapes.page())


async def test_without_negotiation_every_client_gets_the_text_format() -> None:
    """As TorchServe, for `torchserve`."""
    scrapes = Scrapes(metrics_of(1), ForeignCollectors([], in_own_thread), negotiates=False)

    page = await scrapes.page(OPEN)

    assert page.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert not text_of(page).endswith("# EOF\n")


async def test_more_clients_than_the_bound_are_refused() -> None:
    """So that pages for clients that do not read are bounded."""
    scrapes = scrapes_of(metrics_of(1))
    async with contextlib.AsyncExitStack() as taking:
        for _ in range(MAX_SCRAPES):
            await taking.enter_async_context(scrapes.taking())

        with pytest.raises(TooManyScrapes, match="32 clients are taking the metrics page"):
            await taking.enter_async_context(scrapes.taking())

    assert scrapes.open == 0


async def test_who_takes_too_long_loses_its_place_to_a_new_client() -> None:
    """Clients that hang must not keep Prometheus away; those that came later stay."""
    now = [100.0]
    metrics = metrics_of(1)
    scrapes = Scrapes(metrics, ForeignCollectors([], in_own_thread), now=lambda: now[0])
    cut: list[int] = []

    async def hang(number: int) -> None:
        try:
            async with scrapes.taking():
                await asyncio.Event().wait()
        except TimeoutError:
            cut.append(number)

    tasks = [asyncio.ensure_future(hang(number)) for number in range(MAX_SCRAPES)]
    await asyncio.sleep(0)
    now[0] += PATIENCE_S
    async with scrapes.taking():
        await asyncio.wait(tasks[:1], timeout=30)
        assert (cut, scrapes.open) == ([0], MAX_SCRAPES)

    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks)
    assert scrapes.open == 0
    assert 'marserve_refused_total{cause="slow_reader"} 1.0' in metrics.render().decode()


class Hanging:
    """A collector that gives one gauge, when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls = 0

    def collect(self) -> Iterator[object]:
        """Waits."""
        self.calls += 1
        assert self.go.wait(30)
        registry = CollectorRegistry()
        Gauge("acme_depth", "Depth.", registry=registry).set(3)
        yield from registry.collect()


async def test_a_collector_that_hangs_is_left_out_holds_one_thread_and_is_there_when_it_answers_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages after the first do not wait for it."""
    monkeypatch.setattr("marserve.telemetry.metrics.page.foreign.WAIT_S", 0.05)
    hanging = Hanging()
    source = Source("acme", "the plug-in acme", hanging)
    scrapes = scrapes_of(metrics_of(1), source)

    pages = [text_of(await scrapes.page()) for _ in range(3)]
    hanging.go.set()
    assert source.call is not None
    await source.call
    last = text_of(await scrapes.page())

    assert all("marserve_requests_total" in page and "acme_depth" not in page for page in pages)
    assert hanging.calls == 2
    assert "acme_depth 3.0\n" in last
    assert 'marserve_collector_failures_total{collector="acme",why="slow"} 3.0' in last
    assert caplog.text.count("lacks what the plug-in acme collects") == 1


async def test_a_collector_that_raises_costs_its_own_families_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it raises; it is said once."""

    class Raising:
        def collect(self) -> Iterator[object]:
            raise KeyError("no such thing")
            yield

    scrapes = scrapes_of(metrics_of(1), Source("acme", "the plug-in acme", Raising()))

    first, second = text_of(await scrapes.page()), text_of(await scrapes.page())

    assert "marserve_requests_total" in first
    assert 'marserve_collector_failures_total{collector="acme",why="raised"} 2.0' in second
    assert caplog.text.count("KeyError: 'no such thing' (said once)") == 1


async def test_a_name_that_the_page_has_is_not_taken_from_a_collector() -> None:
    """Prometheus refuses a page on which a name stands twice; the collector's other families are there."""
    others = CollectorRegistry()
    Gauge("marserve_queue_length", "Mine.", registry=others).set(1)
    Gauge("acme_depth", "Depth.", registry=others).set(3)
    more = CollectorRegistry()
    Gauge("acme_depth", "Depth, too.", registry=more).set(4)
    scrapes = scrapes_of(metrics_of(1), Source("one", "one", others), Source("two", "two", more))

    await scrapes.page()
    page = text_of(await scrapes.page(OPEN))

    assert len(list(parse_open(page)))
    assert "acme_depth 3.0\n" in page
    assert 'marserve_collector_failures_total{collector="one",why="clash"} 2.0' in page
    assert 'marserve_collector_failures_total{collector="two",why="clash"} 2.0' in page


async def test_a_collector_is_called_about_once_a_second_however_often_pages_are() -> None:
    """And again for a page in another format."""
    now = [100.0]
    calls = []

    class Counting:
        def collect(self) -> Iterator[object]:
            calls.append(now[0])
            registry = CollectorRegistry()
            Gauge("acme_depth", "Depth.", registry=registry).set(len(calls))
            yield from registry.collect()

    foreign = ForeignCollectors([Source("acme", "acme", Counting())], in_own_thread, now=lambda: now[0])
    scrapes = Scrapes(metrics_of(1), foreign)
    seen = []
    for after_s in (0.0, 0.9, 0.2):
        now[0] += after_s
        seen.append(re.findall(r"\nacme_depth (\S+)", text_of(await scrapes.page())))
    opened = text_of(await scrapes.page(OPEN))

    assert seen == [["1.0"], ["1.0"], ["2.0"]]
    assert "acme_depth 3.0" in opened
    assert calls == pytest.approx([100.0, 101.1, 101.1])


async def test_what_is_looked_at_before_a_page_is_on_it() -> None:
    """Figures that take a thread to read."""
    metrics = metrics_of(1)

    async def look() -> None:
        metrics.views()[0].of.requests = 99

    scrapes = Scrapes(metrics, ForeignCollectors([], in_own_thread), looks=[look])

    assert 'marserve_requests_total{model="m0",version="1.0"} 99.0' in text_of(await scrapes.page())
