"""The dashboard in a true browser: what a server does, a model's page, and changes that are asked about first.

`make test-browser` runs these; what the browser showed is in `build/browser`, to be looked at.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.browsing import DESK, NAMELESS, PHONE, Browsing, launched
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
MOST_BYTES, MOST_MS = 200_000, 1000
VISITS_IF_BUSY = 5
NO_KEY = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"

ECHO = """
def handle(data, context):
    return [row.get("body") for row in data or []]
"""
HOSTILE = "<img src=x onerror=window.hit=1>"
PRINTS = """
def handle(data, context):
    if data is None:
        return None
    print("<script>window.hit=2</script><img src=x onerror='window.hit=3'>", flush=True)
    return ["ok"] * len(data)
"""
NEVER_LOADS = """
class Handler:
    def initialize(self, context):
        raise ValueError("<img src=x onerror='window.hit=4'> no weights")
    def handle(self, data, context):
        return data
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skips where Playwright or Chromium is missing."""
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two versions of a model, one with a hostile name and log, one that never loads."""
    folder = tmp_path_factory.mktemp("dashboard")
    store = folder / "store"
    store.mkdir()
    make_archive(store / "echo-1.mar", ECHO, name="echo")
    make_archive(store / "echo-2.mar", ECHO, name="echo", version="2.0")
    make_archive(store / "prints.mar", PRINTS, name=HOSTILE)
    make_archive(store / "broken.mar", NEVER_LOADS, name="broken")
    settings = {"load_models": "all", "default_workers_per_model": "1", "default_response_timeout": "20"}
    with Server(folder, entry="marserve", store=store, settings=settings) as running:
        for model in ("echo", HOSTILE):
            for _ in poll(30, f"{model} is ready"):
                if running.predict(httpx.URL(path=model).raw_path.decode(), b"x").status_code == 200:
                    break
        yield running


class Asking:
    """Asks a model until it is stopped, so that there is something to see."""

    def __init__(self, server: Server, model: str) -> None:
        self._url = f"{server.inference}/predictions/{model}"
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client() as client:
            for number in itertools.count():
                if self._has_ended.wait(0.02):
                    return
                client.post(self._url, content=b"x", headers={"x-request-id": f"asked-{number}"})


def key_of(server: Server) -> str:
    """The management key of a server with keys."""
    return str(json.loads((server.folder / "key_file.json").read_text())["management"]["key"])


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_overview_shows_what_the_server_does(
    browser: Any, server: Server, scheme: str, size: tuple[int, int]
) -> None:
    """Why it is not ready, each version, and rates that move; nothing wider than the window, no complaint."""
    browsing = Browsing(browser, scheme, size)
    with Asking(server, "echo"):
        page = browsing.open(f"{server.management}/", ".models tbody tr")
        browsing.until("parseFloat(document.querySelector('.legend b').textContent) > 5")
        page.wait_for_timeout(5000)  # for the picture
        browsing.picture(f"dashboard-{scheme}-{size[0]}-overview")

    rows = page.locator(".models tbody tr:not(.why)").all_inner_texts()
    why = page.locator(".models .why").all_inner_texts()
    assert page.title() == "Overview · marserve"
    assert page.inner_text(".head .pill") == "not ready"
    assert 'no worker of model "broken" version 1.0' in page.inner_text(".reasons")
    assert {row.split()[0] for row in rows} == {"echo", "broken", "<img"}
    assert any("died: load_failed: ValueError: <img src=x onerror='window.hit=4'> no weights" in each for each in why)
    browsing.check_calm(server.management)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_model_s_page_shows_its_stages_workers_and_requests(
    browser: Any, server: Server, scheme: str, size: tuple[int, int]
) -> None:
    """And its log, as it comes."""
    browsing = Browsing(browser, scheme, size)
    with Asking(server, "echo"):
        page = browsing.open(f"{server.management}/#/models/echo", ".lines p")
        browsing.until("/handle [0-9.]+ ms/.test(document.querySelector('.wide-chart [role=img]').ariaLabel)")
        page.wait_for_selector("a.id")
        page.wait_for_timeout(5000)  # for the picture
        browsing.picture(f"dashboard-{scheme}-{size[0]}-model")

    assert page.title() == "echo · marserve"
    assert page.inner_text(".stack tbody tr td:nth-child(2)") == "ready"
    assert page.locator("a.id").first.get_attribute("href").startswith("#/requests/asked-")
    browsing.check_calm(server.management)


def test_devices_and_stalls_are_shown_where_there_are_some(browser: Any, server: Server) -> None:
    """With why one takes no worker: here as a server with GPUs would say it."""

    def with_devices(route: Any) -> None:
        answer = route.fetch()
        body = answer.json()
        device = {"gpuId": 0, "busyPercent": 87.5, "usedBytes": 12 << 30, "totalBytes": 80 << 30, "celsius": 61}
        body["devices"] = [device, {"gpuId": 1, "trouble": "<b>Xid 79</b>: it has fallen off the bus"}]
        body["eventLoop"] |= {"stalls": 2, "longestStallSeconds": 1.5}
        route.fulfill(response=answer, json=body)

    browsing = Browsing(browser, "dark", PHONE)
    browsing.page.route("**/stats?*", with_devices)
    page = browsing.open(f"{server.management}/", "[aria-labelledby=devices] td")

    rows = [row.split("\t") for row in page.locator("[aria-labelledby=devices] tbody tr").all_inner_texts()]
    assert [each.strip() for each in rows[0]] == ["0", "87.5 %", "12 GiB of 80 GiB", "61 °C"]
    assert [row[0].strip() for row in rows[1:]] == ["1", "<b>Xid 79</b>: it has fallen off the bus"]
    assert "2 stalls, 1.5 s at most" in page.inner_text(".tiles")
    browsing.picture("dashboard-dark-390-devices")
    page.unroute_all(behavior="wait")
    browsing.check_calm(server.management)


def test_the_first_view_is_small_and_quickly_there(
    browser: Any, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under 200 kB in all, uncompressed and with its data, and within a second. Both values are printed.

    Each visit is a first one: a new context's cache is empty. The browser itself has shown a page before. One visit
    counts, but on a busy machine, where the time says what others do: there it is the best of several.
    """
    Browsing(browser).open("data:text/html,<p>begun</p>", "p")
    is_busy = os.getloadavg()[0] > len(os.sched_getaffinity(0))
    shown_ms: list[float] = []
    for _ in range(VISITS_IF_BUSY if is_busy else 1):
        browsing = Browsing(browser)
        page = browsing.open(f"{server.management}/", ".models tbody tr")
        shown_ms.append(page.evaluate("performance.now()"))
        asked = [each for each in browsing.requests if each.timing["requestStart"] >= 0]
        size = sum(each.sizes()["responseBodySize"] for each in asked)
        assert size < MOST_BYTES
        browsing.check_calm(server.management)

    with capsys.disabled():
        times = ", ".join(f"{each:.0f}" for each in shown_ms)
        sys.stdout.write(f"\nThe dashboard's first view: {size / 1000:.0f} kB, shown after {times} ms\n")
    assert min(shown_ms) < MOST_MS


def test_it_is_found_at_dashboard_and_leads_to_docs(browser: Any, server: Server) -> None:
    """With and without a slash."""
    for path in ("/dashboard", "/dashboard/"):
        browsing = Browsing(browser)
        page = browsing.open(f"{server.management}{path}", ".models tbody tr")
        assert page.url == f"{server.management}/dashboard"
    page.click("footer >> text=API")
    page.wait_for_selector(".route")
    browsing.check_calm(server.management)


def test_going_to_a_page_moves_the_focus_to_its_heading(browser: Any, server: Server) -> None:
    """By the keyboard alone, from the link that skips the header on."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/", ".models tbody tr")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.focus(".models a >> text=echo")
    page.keyboard.press("Enter")
    browsing.until("document.activeElement.id === 'page-heading'")

    assert page.inner_text("#page-heading") == "echo"
    page.wait_for_selector("dl.tiles")
    assert page.evaluate("document.activeElement.id") == "page-heading"
    page.go_back()
    browsing.until("document.activeElement.textContent === 'Overview'")
    browsing.check_calm(server.management)


def test_each_control_has_a_name(browser: Any, server: Server) -> None:
    """And each figure of a chart stands in a table, too."""
    for place in ("#/", "#/models/echo", "#/models/broken"):
        browsing = Browsing(browser)
        page = browsing.open(f"{server.management}/{place}", "dl.tiles")
        page.wait_for_timeout(2500)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")

        assert not page.evaluate(NAMELESS)
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
        assert len(ids) == len(set(ids))
        assert page.locator("figure").count() == page.locator("figure [role=img][aria-label]").count() > 0
        assert page.locator("figure").count() == page.locator("figure table").count()
        assert page.locator("main").count() == page.locator("header").count() == page.locator("h1").count() == 1
        browsing.check_calm(server.management)


def test_weights_are_asked_about_and_hold_only_then(browser: Any, server: Server) -> None:
    """The sum stays 100, by the keyboard too; cancelling leaves all as it was, an error is told and changes nothing."""

    def weights() -> Any:
        return server.client.get(f"{server.management}/models/echo/traffic").json()

    before = weights()
    browsing = Browsing(browser, "light")
    page = browsing.open(f"{server.management}/#/models/echo", ".weight")
    first, second = page.locator(".weight input").all()
    outputs = page.locator(".weight output")

    first.focus()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert outputs.all_inner_texts() == ["95 %", "5 %"]
    second.fill("30")
    assert outputs.all_inner_texts() == ["70 %", "30 %"]
    page.wait_for_timeout(2500)  # figures that come meanwhile change nothing of what was drawn up
    assert outputs.all_inner_texts() == ["70 %", "30 %"]
    page.click("text=Apply…")
    page.wait_for_selector("dialog button.primary:enabled")
    browsing.picture("dashboard-light-1100-weights")
    assert page.locator("dialog li").all_inner_texts() == ["version 1.0: 100 % → 70 %", "version 2.0: 0 % → 30 %"]
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert outputs.all_inner_texts() == ["100 %", "0 %"]
    assert weights() == before

    second.fill("25")
    page.click("text=Apply…")
    page.wait_for_selector("dialog button.primary:enabled")
    page.route("**/traffic", lambda route: route.abort() if route.request.method == "PUT" else route.continue_())
    page.click("dialog button.primary")
    page.wait_for_selector("dialog .problem:has-text('Nothing was changed')")
    page.unroute("**/traffic")
    page.click("dialog >> text=Cancel")
    page.wait_for_selector("dialog", state="detached")  # the browser tells a dialog's end a moment later
    assert outputs.all_inner_texts() == ["100 %", "0 %"]
    assert weights() == before

    sticky = {"header": "X-User"}
    document = {"weights": {"1.0": 1}, "sticky": sticky}
    assert server.client.put(f"{server.management}/models/echo/traffic", json=document).status_code == 200
    page.wait_for_selector("text=Without weights")
    second.fill("25")
    page.click("text=Apply…")
    page.click("dialog button.primary:enabled")
    page.wait_for_selector("dialog", state="detached")
    assert weights() == {"weights": {"1.0": 75, "2.0": 25}, "sticky": sticky}
    assert page.evaluate("document.activeElement.textContent") == "Apply…"
    assert outputs.all_inner_texts() == ["75 %", "25 %"]
    page.click("text=Without weights")
    page.click("dialog button.primary:enabled")
    page.wait_for_selector("text=No weights are set")
    assert weights() == before
    assert [each for each in browsing.complaints if "ERR_FAILED" not in each] == []


SHARES = """
async () => {
    const { percentsOf, withPercent } = await import("/docs/dashboard/samples.js");
    const wrong = [];
    let seed = 7;
    const draw = (most) => { seed = (seed * 16807) % 2147483647; return seed % (most + 1); };
    for (let round = 0; round < 2000; round++) {
        const names = Array.from({ length: 1 + draw(6) }, (_, index) => `v${index}`);
        let shares = percentsOf(Object.fromEntries(names.map((name) => [name, draw(1) && draw(1000)])));
        for (let change = 0; change < 3; change++) {
            const name = names[draw(names.length - 1)];
            const value = draw(100);
            shares = withPercent(shares, name, value);
            const all = Object.values(shares);
            const isRight = all.every((each) => Number.isInteger(each) && each >= 0)
                && all.reduce((sum, each) => sum + each, 0) === 100 && (names.length === 1 || shares[name] === value);
            if (!isRight) wrong.push(JSON.stringify(shares));
        }
    }
    return [wrong, percentsOf({ a: 1, b: 1, c: 1 }), withPercent({ a: 100, b: 0, c: 0 }, "a", 0)];
}
"""


def test_shares_are_whole_percents_of_sum_100(browser: Any, server: Server) -> None:
    """Whatever is drawn from whatever; what the others had decides what they share."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/", ".models tbody tr")

    wrong, thirds, evenly = page.evaluate(SHARES)

    assert wrong == []
    assert thirds == {"a": 34, "b": 33, "c": 33}
    assert evenly == {"a": 0, "b": 50, "c": 50}


def test_workers_are_scaled_after_a_question(browser: Any, server: Server) -> None:
    """With what the server says that it would do; a number that is none is refused before it is sent."""
    browsing = Browsing(browser, "dark", PHONE)
    page = browsing.open(f"{server.management}/#/models/echo/2.0", ".scale")
    least, most = page.locator(".scale input").all()

    least.fill("3")
    assert page.inner_text(".scale .problem") == "The least is more than the most."
    least.fill("x")
    assert "whole, from 0" in page.inner_text(".scale .problem")
    least.fill("2")
    most.fill("2")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog button.primary:enabled")
    browsing.picture("dashboard-dark-390-scale")
    page.click("dialog >> text=Cancel")
    assert server.describe("echo", "2.0")["minWorkers"] == 1
    least.fill("2")
    most.fill("2")
    page.click("text=Scale…")
    page.click("dialog button.primary:enabled")
    page.wait_for_selector("dialog", state="detached")
    browsing.until("document.querySelectorAll('.stack tbody .state.good').length === 2")

    assert server.describe("echo", "2.0")["minWorkers"] == 2
    browsing.check_calm(server.management)


def test_a_roll_out_shows_its_steps_and_evidence_and_takes_orders(browser: Any, server: Server) -> None:
    """Paused and aborted from its panel, each after a question."""
    url = f"{server.management}/models/echo/rollout"
    spec = {"version": "2.0", "steps": [20, 100], "hold": 4, "min_requests": 20}
    with Asking(server, "echo"):
        assert server.client.post(url, json=spec).status_code == 202
        browsing = Browsing(browser)
        page = browsing.open(f"{server.management}/#/models/echo", "[role=progressbar]")
        page.wait_for_selector("text=What its judge found")
        page.wait_for_selector(".panel:has(h3:text-is('Roll-out')) th:text-is('errors')")
        page.click("text=Pause…")
        page.click("dialog button.primary:enabled")
        page.wait_for_selector(".pill:has-text('paused')")
        browsing.picture("dashboard-light-1100-rollout")
        page.click("text=Abort…")
        page.click("dialog button.primary:enabled")
        page.wait_for_selector(".pill:has-text('aborted')")

    assert server.client.get(url).json()["state"] == "aborted"
    browsing.check_calm(server.management)


def test_names_log_lines_and_reasons_never_run(browser: Any, server: Server) -> None:
    """They are shown as the text that they are."""
    server.predict("%3Cimg%20src%3Dx%20onerror%3Dwindow.hit%3D1%3E", b"x")
    browsing = Browsing(browser, "light", PHONE)
    page = browsing.open(f"{server.management}/", ".models tbody tr")
    page.click(f".models a >> text={HOSTILE}")
    page.wait_for_selector(".lines p:has-text('window.hit=2')")
    browsing.picture("dashboard-light-390-hostile")
    assert page.inner_text("#page-heading") == HOSTILE
    assert page.title() == f"{HOSTILE} · marserve"
    page.goto(f"{server.management}/#/models/broken")
    page.wait_for_selector(".death")
    assert "<img src=x onerror='window.hit=4'> no weights" in page.locator(".death").first.inner_text()

    assert page.evaluate("window.hit") is None
    browsing.check_calm(server.management)


@pytest.mark.parametrize(
    "place",
    ["#/models/nosuch", f"#/models/{'x' * 10_000}", "#/models/%E0%A4%A", "#/nosuch", "#/models/a/b/c/d", "#//", "#<b>"],
    ids=lambda place: place[:20],
)
def test_an_address_that_leads_nowhere_is_answered(browser: Any, server: Server, place: str) -> None:
    """With a sentence and a way back."""
    browsing = Browsing(browser, "light", PHONE)
    page = browsing.open(f"{server.management}/{place}", "main a[href='#/']")

    page.wait_for_selector("main :text-matches('There is no such page|not found: nosuch')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click("main a[href='#/'] >> nth=-1")
    page.wait_for_selector(".models tbody tr")


def test_a_key_is_asked_for_and_figures_come_with_it(browser: Any, tmp_path: Path) -> None:
    """A wrong one is told; it stands in no address and no storage."""
    make_archive(tmp_path / "echo.mar", ECHO)
    settings = {"disable_token_authorization": "false", "load_models": "all"}
    with Server(tmp_path, entry="marserve", store=tmp_path, settings=settings) as server:
        key = key_of(server)
        browsing = Browsing(browser, "dark")
        page = browsing.open(f"{server.management}/", "#key-panel")
        browsing.picture("dashboard-dark-1100-key")
        page.fill("#key-panel input", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-panel :text('asks for a key')")
        assert page.locator(".models").count() == 0
        page.fill("#key-panel input", key)
        page.keyboard.press("Enter")
        page.click(".models a >> text=echo")
        page.wait_for_selector(".lines p")

        kept = "[document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage), location.href].join()"
        assert key not in page.evaluate(kept) + page.content() + "".join(each.url for each in browsing.requests)
        assert set(browsing.complaints) <= {NO_KEY, NO_KEY.replace("401 (Unauthorized)", "403 (Forbidden)")}


def test_it_says_that_the_server_is_away_and_comes_back_by_itself(browser: Any, tmp_path: Path) -> None:
    """The old figures stay, marked as such."""
    make_archive(tmp_path / "echo.mar", ECHO)
    with Server(tmp_path, entry="marserve", store=tmp_path, settings={"load_models": "all"}) as server:
        browsing = Browsing(browser)
        page = browsing.open(f"{server.management}/", ".models tbody tr")
        server.stop()
        page.wait_for_selector(".banner:has-text('does not answer')")
        page.wait_for_selector(".old .models tbody tr")
        browsing.picture("dashboard-light-1100-away")
        asked = len(browsing.requests)
        page.wait_for_timeout(6000)
        assert len(browsing.requests) - asked <= 2  # more rarely than each two seconds
        server.start()
        page.wait_for_selector(".banner", state="detached")
        page.wait_for_selector(".models tbody tr")


def test_a_tab_that_is_not_seen_asks_nothing(browser: Any, server: Server) -> None:
    """And asks at once when it is seen again."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/", ".models tbody tr")
    see = "Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true});" + (
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.evaluate(see % "true")
    page.wait_for_timeout(2500)
    asked = len(browsing.requests)
    page.wait_for_timeout(5000)
    assert len(browsing.requests) == asked
    with page.expect_request("**/stats?*", timeout=1000):
        page.evaluate(see % "false")


def test_many_versions_come_in_pages_and_are_searched_for(browser: Any, tmp_path: Path) -> None:
    """With one call each two seconds, whatever there is."""
    for number in range(60):
        make_archive(tmp_path / f"m{number:02}.mar", ECHO, config="minWorkers: 0\nmaxWorkers: 0\n")
    with Server(tmp_path, entry="marserve", store=tmp_path, settings={"load_models": "all"}) as server:
        browsing = Browsing(browser)
        page = browsing.open(f"{server.management}/", ".models tbody tr")
        page.wait_for_selector(".pages :text('1 to 50 of 60')")
        page.click(".sort >> text=Model")
        page.wait_for_selector("[aria-sort=ascending]")
        page.click(".pages >> text=Next")
        page.wait_for_selector(".models th[scope=row]:has-text('m59')")
        assert page.locator(".models tbody tr:not(.why)").count() == 10
        page.fill(".filter", "M4")
        page.wait_for_selector(".pages", state="detached")
        browsing.until("document.querySelectorAll('.models tbody tr:not(.why)').length === 10")
        browsing.picture("dashboard-light-1100-many")
        paths = {each.url.removeprefix(server.management).partition("?")[0] for each in browsing.requests}
        assert not [path for path in paths if path.startswith("/models")]
        browsing.check_calm(server.management)


@pytest.mark.timeout(300)
def test_open_pages_cost_the_server_nothing_that_stays(browser: Any, server: Server) -> None:
    """200 clients make a model page's requests, and some tabs follow its log: memory and sockets are as before."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    follow = f"{server.management}/logs?model=echo&tail=100&log=server,model&follow=true"

    def visits(count: int) -> None:
        for _ in range(count):
            with httpx.Client(timeout=60) as client:
                for path in (
                    "/",
                    "/stats",
                    "/models/echo/all",
                    "/models/echo/stats",
                    "/models/echo/traffic",
                    "/rollouts",
                ):
                    answer = client.get(f"{server.management}{path}", headers={"accept": "text/html"})
                    assert answer.status_code == 200

    visits(20)
    sockets = len(process.net_connections())
    tabs = [Browsing(browser) for _ in range(4)]
    for tab in tabs:
        tab.open(f"{server.management}/#/models/echo", ".lines p")
    visits(50)
    resident = process.memory_info().rss
    visits(200)
    grown = process.memory_info().rss - resident
    for tab in tabs:
        tab.context.close()

    for _ in poll(30, "the sockets are closed"):
        if len(process.net_connections()) <= sockets + 2:
            break
    assert grown < 12 << 20  # the recorder and the kept lines fill up to their bounds meanwhile
    with server.client.stream("GET", follow) as answer:
        assert answer.status_code == 200
