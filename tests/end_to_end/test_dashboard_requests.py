"""The dashboard's request explorer in a true browser: why real requests were slow, found by filters and by id.

`make test-browser` runs these; what the browser showed is in `build/browser`, to be looked at.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browsing import DESK, NAMELESS, PHONE, Browsing, launched
from support.explained import explained
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.browser

HANDLER = """
import json
import sys
import threading
import time

def handle(data, context):
    if data is None:
        return None
    asked = [json.loads(bytes(next(iter(row.values()))) or b"{}") for row in data]
    with context.span("tokenise"):
        time.sleep(0.01)
    with context.span("generate"):
        time.sleep(max(each.get("sleep", 0) for each in asked))
    for each in asked:
        if each.get("print"):
            print(each["print"], flush=True)
        if each.get("fail"):
            raise ValueError(each["fail"])
    return ["done"] * len(data)
"""
HOSTILE = "<img src=x onerror='window.hit = 1'><script>window.hit = 2</script>"
# What the console says of an answer that is an error; the page says what it means.
REFUSED = "Failed to load resource: the server responded with a status of "


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skips where Playwright or Chromium is missing."""
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one worker that has answered quick requests, a slow one, some that waited for it, and failed ones."""
    folder = tmp_path_factory.mktemp("explorer")
    make_archive(folder / "texts.mar", HANDLER)
    make_archive(folder / "hostile.mar", HANDLER, name=HOSTILE)
    settings = {"load_models": "texts.mar", "default_workers_per_model": "1"}
    with Server(folder, entry="marserve", store=folder, settings=settings) as running:
        assert running.register("texts.mar", model_name="other", initial_workers=1).status_code == 200
        running.client.post(
            f"{running.management}/models?url=texts.mar&model_name=batched&initial_workers=1&batch_size=4"
        )
        assert running.register("hostile.mar", initial_workers=1).status_code == 200
        for number in range(8):
            assert ask(running, "texts", f"quick-{number}") == 200
        slow = threading.Thread(target=ask, args=(running, "texts", "report-of-the-year"), kwargs={"sleep": 1.2})
        slow.start()
        for _ in poll(10, "the slow one is with the worker"):
            if running.client.get(f"{running.management}/models/texts").json()[0]["runningRequests"]:
                break
        waiting = [
            threading.Thread(target=ask, args=(running, "texts", f"order-{number}"), kwargs={"print": "an order"})
            for number in range(17, 20)
        ]
        for thread in waiting:
            thread.start()
        for thread in (slow, *waiting):
            thread.join()
        for number in range(3):
            assert ask(running, "other", f"failed-{number}", fail=HOSTILE) >= 500
        explained(running, "failed-2")
        yield running


def ask(server: Server, model: str, request_id: str, **asked: Any) -> int:
    """Send a request of this id; returns the answer's status."""
    return server.predict(model, json.dumps(asked), **{"X-Request-Id": request_id}).status_code


def test_a_request_that_waited_is_explained_with_the_one_it_waited_for(browser: Any, server: Server) -> None:
    """Its stages as bars, whose lengths are its times; its log line; and from there to the slow one."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/#/requests/order-17", ".waterfall")
    page.wait_for_selector(".lines p:has-text('an order')")
    recorded = explained(server, "order-17")
    browsing.picture("request-light-1100")

    assert page.inner_text("#why").endswith("queue")
    assert recorded["why"] in page.inner_text(".why-panel")
    names = [each["name"] for each in recorded["stages"]]
    at = names.index("handle") + 1
    assert page.locator(".waterfall th").all_inner_texts()[-len(names) - 2 :] == [
        *names[:at], "tokenise", "generate", *names[at:],
    ]  # fmt: skip
    row = ".waterfall tr:has(th:text-is('queue')) .course"
    width, whole = (page.locator(each).bounding_box()["width"] for each in (f"{row} i", row))
    queue_ms = next(each["ms"] for each in recorded["stages"] if each["name"] == "queue")
    assert width / whole == pytest.approx(queue_ms / recorded["wall_ms"], abs=0.02)
    assert "marserve explain order-17" in page.inner_text(".copied")
    page.click(".why-panel a:has-text('report-of-the-year')")
    page.wait_for_selector("#why:has-text('handler')")
    assert page.inner_text("h2") == "Request report-of-the-year"
    browsing.check_calm(server.management)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_list_is_filtered_by_model_time_cause_and_failure(
    browser: Any, server: Server, scheme: str, size: tuple[int, int]
) -> None:
    """Slowest first, or newest; the causes are counted, and chosen by a click; the address leads there again."""
    browsing = Browsing(browser, scheme, size)
    page = browsing.open(f"{server.management}/#/requests", ".requests tbody tr")
    listed = page.locator(".requests tbody th").all_inner_texts()
    browsing.picture(f"requests-{scheme}-{size[0]}")

    assert sorted(listed[:4]) == ["order-17", "order-18", "order-19", "report-of-the-year"]
    page.select_option(".filters select >> nth=1", "newest")
    page.wait_for_selector(".requests tbody tr:first-child th:has-text('failed-2')")
    page.fill(".filters input >> nth=0", "texts")
    browsing.until(
        "![...document.querySelectorAll('.requests th')].some(each => each.textContent.startsWith('failed'))"
    )
    page.fill(".filters input >> nth=1", "soon")
    page.wait_for_selector("#slower-wrong")
    page.fill(".filters input >> nth=1", "100ms")
    page.wait_for_selector("[role=status]:text-matches('^4 of ')")
    page.click(".causes button:has-text('queue')")
    page.wait_for_selector("[role=status]:text-matches('^3 of ')")
    assert page.evaluate("location.hash") == "#/requests?model=texts&slower_than=100ms&cause=queue&order=newest"
    page.reload()
    page.wait_for_selector("[role=status]:text-matches('^3 of ')")
    page.click(".chosen button")
    page.fill(".filters input >> nth=0", "")
    page.fill(".filters input >> nth=1", "")
    page.check(".filters input[type=checkbox]")
    named = "[...document.querySelectorAll('.requests tbody th')].map(each => each.textContent)"
    browsing.until(f"{named}.sort().join() === 'failed-0,failed-1,failed-2'")
    browsing.check_calm(server.management)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_batch_is_shown_with_its_mates(browser: Any, server: Server, scheme: str, size: tuple[int, int]) -> None:
    """And with how much of it would be padding."""
    ahead = threading.Thread(target=ask, args=(server, "batched", "ahead"), kwargs={"sleep": 0.4})
    ahead.start()
    for _ in poll(10, "the first one is with the worker"):
        if server.client.get(f"{server.management}/models/batched").json()[0]["runningRequests"]:
            break
    asked = [{"text": "x" * 100}, {"text": "x" * 900}, {"text": "x"}]
    mates = [
        threading.Thread(target=ask, args=(server, "batched", f"mate-{number}"), kwargs=each)
        for number, each in enumerate(asked)
    ]
    for thread in mates:
        thread.start()
    for thread in (ahead, *mates):
        thread.join()
    batch = explained(server, "mate-0")["batch"]
    browsing = Browsing(browser, scheme, size)

    page = browsing.open(f"{server.management}/#/requests/mate-0", ".waterfall")
    page.wait_for_selector("#its-log")
    shown = page.inner_text("section:has(#batch)")
    browsing.picture(f"request-batch-{scheme}-{size[0]}")

    assert batch["size"] == 3
    assert "3 requests" in shown
    assert f"{batch['padding'] * 100:.3g} % padding" in shown
    assert sorted(page.locator(".mates a").all_inner_texts()) == ["mate-1", "mate-2"]
    browsing.check_calm(server.management)


def test_what_clients_and_models_write_is_only_text(browser: Any, server: Server) -> None:
    """Names, errors, log lines and ids in the address never run."""
    from urllib.parse import quote

    assert server.client.post(f"{server.inference}/predictions/{quote(HOSTILE, safe='')}", content=json.dumps({"print": HOSTILE}), headers={"x-request-id": "hostile"}).status_code == 200  # fmt: skip  # noqa: E501
    explained(server, "hostile")
    browsing = Browsing(browser, "light", PHONE)
    page = browsing.open(f"{server.management}/#/requests", ".requests tbody tr")
    browsing.picture("requests-hostile-390")
    assert HOSTILE in page.inner_text(".requests")
    page.goto(f"{server.management}/#/requests/hostile")
    page.wait_for_selector(".lines p:has-text('window.hit')")
    browsing.picture("request-hostile-390")
    assert page.inner_text(".facts a") == f"{HOSTILE} 1.0"
    page.goto(f"{server.management}/#/requests/failed-0")
    page.wait_for_selector(".lines p:has-text('window.hit')")
    page.goto(f"{server.management}/#/requests/{quote(HOSTILE, safe='')}")
    page.wait_for_selector(".problem:has-text('Request not found')")

    assert HOSTILE in page.inner_text("h2")
    assert page.evaluate("window.hit") is None
    assert [each for each in browsing.complaints if not each.startswith(f"{REFUSED}404")] == []


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("gone", "Request not found: gone."),
        ("a%0Ab", "Request not found: a"),
        ("%ff%fe", "Request not found: %25ff%25fe."),
        ("%00", "Request not found:"),
        ("a%2F..%2Fb", "Request not found: a%2F..%2Fb"),
        ("..", "No address can name the id .."),
        ("x" * 10_000, "The id has 10,000 characters; a request's id has at most 128."),
    ],
    ids=["gone", "newline", "encoding", "null", "path", "dots", "long"],
)
def test_an_id_that_leads_nowhere_gets_a_clear_answer(browser: Any, server: Server, written: str, words: str) -> None:
    """And the list is one click away."""
    browsing = Browsing(browser, "dark", PHONE)
    page = browsing.open(f"{server.management}/#/requests/{written}", "[role=alert]")
    browsing.picture("request-gone-390")

    shown = page.inner_text("[role=alert]")
    assert words in shown
    assert len(page.inner_text("main")) < 2000
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click(".crumb a")
    page.wait_for_selector(".requests tbody tr")
    assert all(each.startswith(REFUSED) for each in browsing.complaints)


def test_the_keyboard_finds_a_request_and_each_control_has_a_name(browser: Any, server: Server) -> None:
    """The id is typed; the heading of the page that follows has the focus."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/#/requests", ".requests tbody tr")
    assert page.evaluate(NAMELESS) == []
    page.focus(".find input")
    page.keyboard.type("order-18")
    page.keyboard.press("Enter")
    page.wait_for_selector(".waterfall")

    assert page.evaluate("document.activeElement.id") == "page-heading"
    assert page.evaluate(NAMELESS) == []
    page.go_back()
    page.wait_for_selector(".requests tbody tr")
    page.uncheck(".head input[type=checkbox]")
    sent = len([each for each in browsing.requests if "/requests?" in each.url])
    ask(server, "texts", "new-one")
    explained(server, "new-one")
    page.wait_for_timeout(3500)
    assert len([each for each in browsing.requests if "/requests?" in each.url]) <= sent + 1
    page.click(".head button")
    page.wait_for_selector(".requests th:has-text('new-one')")
    browsing.check_calm(server.management)


def test_a_server_that_records_nothing_says_so(browser: Any, tmp_path: Path) -> None:
    """With the setting that would change it."""
    with Server(tmp_path, entry="marserve", settings={"flight_recorder_size": "0"}) as server:
        page = Browsing(browser).open(f"{server.management}/#/requests", "[role=alert]")

        assert "This server records no requests: flight_recorder_size is 0." in page.inner_text("[role=alert]")
