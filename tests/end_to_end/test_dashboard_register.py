"""Registering a model on the dashboard, in a true browser: uploads with progress, refusals, cancelling.

`make test-browser` runs these; what the browser showed is in `build/browser`, to be looked at.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browsing import DESK, NAMELESS, PHONE, Browsing, launched
from support.fault_proxy import Fault, fault_proxy
from support.range_origin import range_origin
from support.server import Server, free_ports, make_archive, poll

pytestmark = pytest.mark.browser

ECHO = """
def handle(data, context):
    return [row.get("body") for row in data or []]
"""
HOSTILE = "<img src=x onerror='window.hit = 1'>"
NEVER_LOADS = f"""
class Handler:
    def initialize(self, context):
        raise ValueError("{HOSTILE} no weights")
    def handle(self, data, context):
        return data
"""
LOADS_SLOWLY = """
import time

class Handler:
    def initialize(self, context):
        time.sleep(60)
    def handle(self, data, context):
        return data
"""
MB = 1_000_000
SLOW_LINE = 2 * MB  # bytes a second
REFUSED = "Failed to load resource: the server responded with a status of "


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skips where Playwright or Chromium is missing."""
    with launched() as found:
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server with an empty store, which takes 40 MB at most."""
    (tmp_path / "server").mkdir()
    with Server(tmp_path / "server", entry="marserve", settings={"max_upload_size": str(40 * MB)}) as running:
        yield running


def archive(path: Path, size: int = 0, handler: str = ECHO, **more: Any) -> Path:
    """An archive with so many bytes that do not compress."""
    return make_archive(path, handler, weights=random.Random(5).randbytes(size), **more)


def left(server: Server) -> list[str]:
    """The names in the store, hidden ones too."""
    return sorted(path.name for path in server.store.iterdir())


def models(server: Server) -> list[str]:
    """The names of the registered models."""
    listed = server.client.get(f"{server.management}/models").json()["models"]
    return [each["modelName"] for each in listed]


def open_page(browsing: Browsing, server: Server) -> Any:
    """The form."""
    return browsing.open(f"{server.management}/#/register", "form.register")


def slow_down(browsing: Browsing, bytes_per_s: int) -> None:
    """Let the browser send no more than so many bytes a second."""
    session = browsing.context.new_cdp_session(browsing.page)
    line = {"offline": False, "latency": 1, "downloadThroughput": -1, "uploadThroughput": bytes_per_s}
    session.send("Network.emulateNetworkConditions", line)


@pytest.mark.parametrize(
    ("scheme", "size"), [("light", DESK), ("dark", DESK), ("light", PHONE), ("dark", PHONE)], ids=str
)
def test_an_archive_is_sent_with_progress_and_its_model_answers(
    browser: Any, server: Server, tmp_path: Path, scheme: str, size: tuple[int, int]
) -> None:
    """The name, the workers and the batch size are those of the form; then its page is one click away."""
    browsing = Browsing(browser, scheme, size)
    page = open_page(browsing, server)
    assert page.evaluate(NAMELESS) == []
    browsing.picture(f"register-{scheme}-{size[0]}-begin")
    page.set_input_files("input[type=file]", archive(tmp_path / "echo.mar", 4 * MB))
    page.fill(".grid input >> nth=0", "mirror")
    page.fill(".grid input >> nth=1", "2")
    page.fill(".grid input >> nth=2", "8")
    slow_down(browsing, SLOW_LINE)
    page.click("button[type=submit]")
    parts = set()
    for _ in poll(60, "the archive is sent"):
        part = page.evaluate("(document.querySelector('.steps li:first-child.now progress') || {}).value")
        parts.add(part)
        if part and 0.4 < part < 0.9 and len(parts) > 3:
            break
    browsing.picture(f"register-{scheme}-{size[0]}-sending")
    page.wait_for_selector(".pill.good")
    browsing.picture(f"register-{scheme}-{size[0]}-done")

    assert "compared with yours" in page.inner_text(".steps")
    described = server.client.get(f"{server.management}/models/mirror").json()[0]
    assert (described["minWorkers"], described["batchSize"], described["modelUrl"]) == (2, 8, "echo.mar")
    assert server.predict("mirror", b"here").content == b"here"
    page.click("a:has-text('Its page')")
    page.wait_for_selector("h2:has-text('mirror')")
    browsing.check_calm(server.management)
    browsing.context.close()  # that page follows the log, which would begin while the server stops


def test_a_file_that_is_no_archive_is_refused_and_nothing_of_it_is_left(
    browser: Any, server: Server, tmp_path: Path
) -> None:
    """In the server's words; the form still has what was entered."""
    browsing = Browsing(browser, "dark")
    (tmp_path / f"{HOSTILE}.mar".replace("/", "")).write_bytes(b"no archive")
    page = open_page(browsing, server)
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert]:has-text('Choose a file.')")
    page.set_input_files("input[type=file]", next(tmp_path.glob("*.mar")))
    page.fill(".register label:has-text('Its name in the model store') input", "some.mar")
    page.fill(".grid input >> nth=1", "many")
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert]:has-text('The number of workers is whole')")
    page.fill(".grid input >> nth=1", "1")
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert]:has-text('some.mar is no model archive')")
    browsing.picture("register-dark-refused")

    assert "Nothing of the file was kept." in page.inner_text("main")
    assert left(server) == []
    page.click("button:has-text('Change it')")
    assert page.input_value(".register label:has-text('Its name in the model store') input") == "some.mar"
    assert page.evaluate("window.hit") is None
    assert all(each.startswith(f"{REFUSED}400") for each in browsing.complaints)


def test_a_model_that_does_not_load_is_not_registered_and_its_traceback_is_shown(
    browser: Any, server: Server, tmp_path: Path
) -> None:
    """A better archive of the same name replaces it without a question."""
    browsing = Browsing(browser, "light", PHONE)
    (tmp_path / "other").mkdir()
    page = open_page(browsing, server)
    page.set_input_files("input[type=file]", archive(tmp_path / "m.mar", handler=NEVER_LOADS))
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert]")
    page.wait_for_selector(".lines p:has-text('Traceback')")
    browsing.picture("register-light-390-failed")

    assert f"ValueError: {HOSTILE} no weights" in page.inner_text(".lines")
    assert "marserve logs --request " in page.inner_text(".copied")
    assert "Nothing is registered." in page.inner_text("main")
    assert models(server) == []
    assert page.evaluate("window.hit") is None
    page.click("button:has-text('Change it')")
    page.set_input_files("input[type=file]", archive(tmp_path / "other" / "m.mar"))
    page.click("button[type=submit]")
    page.wait_for_selector(".pill.good")
    assert server.predict("m", b"here").content == b"here"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_upload_that_is_cancelled_leaves_nothing(browser: Any, server: Server, tmp_path: Path) -> None:
    """Neither in the store nor registered."""
    browsing = Browsing(browser)
    page = open_page(browsing, server)
    page.set_input_files("input[type=file]", archive(tmp_path / "large.mar", 20 * MB))
    slow_down(browsing, SLOW_LINE)
    page.click("button[type=submit]")
    for _ in poll(60, "the server takes it"):
        if any(name.endswith(".part") for name in left(server)):
            break
    page.click("button:has-text('Cancel')")
    page.wait_for_selector("[role=status]:has-text('It is cancelled.')")
    browsing.picture("register-light-cancelled")

    for _ in poll(10, "nothing is left of it"):
        if left(server) == []:
            break
    assert models(server) == []


def test_a_load_that_is_cancelled_is_unregistered(browser: Any, server: Server, tmp_path: Path) -> None:
    """Though it had begun; other pages may be looked at meanwhile."""
    browsing = Browsing(browser, "dark", PHONE)
    page = open_page(browsing, server)
    page.set_input_files("input[type=file]", archive(tmp_path / "slow.mar", handler=LOADS_SLOWLY))
    page.click("button[type=submit]")
    page.wait_for_selector(".steps .now .what:has-text('0 of 1 worker ready')")
    browsing.picture("register-dark-390-loading")
    page.click("nav a:has-text('Overview')")
    page.wait_for_selector(".models")
    page.click("nav a:has-text('Register')")
    page.click("button:has-text('Cancel')")
    page.wait_for_selector("[role=status]:has-text('It is cancelled, and nothing is registered.')")

    assert models(server) == []
    assert "is in the model store" in page.inner_text("main")


def test_another_archive_of_the_name_is_replaced_only_if_that_is_said(
    browser: Any, server: Server, tmp_path: Path
) -> None:
    """And one that a version uses is not."""
    browsing = Browsing(browser)
    archive(server.store / "m.mar", version="1.0")
    mine = archive(tmp_path / "m.mar", 1000, version="2.0")
    page = open_page(browsing, server)
    page.set_input_files("input[type=file]", mine)
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert]:has-text('m.mar')")
    browsing.picture("register-light-taken")
    kept = (server.store / "m.mar").read_bytes()
    page.click("button:has-text('Replace that file')")
    page.wait_for_selector(".pill.good")

    assert kept != mine.read_bytes() == (server.store / "m.mar").read_bytes()
    page.click("button:has-text('Register another')")
    (tmp_path / "third").mkdir()
    page.set_input_files("input[type=file]", archive(tmp_path / "third" / "m.mar", 2000, version="3.0"))
    page.check(".register input[type=checkbox]")
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert]")
    assert (server.store / "m.mar").read_bytes() == mine.read_bytes()


def test_what_is_larger_than_the_server_takes_is_refused_in_its_words(
    browser: Any, server: Server, tmp_path: Path
) -> None:
    """Before all of it is sent."""
    browsing = Browsing(browser)
    page = open_page(browsing, server)
    page.set_input_files("input[type=file]", archive(tmp_path / "large.mar", 45 * MB))
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert]:has-text('max_upload_size')")

    assert left(server) == []


def test_a_name_of_the_store_and_an_address_are_registered(browser: Any, server: Server, tmp_path: Path) -> None:
    """An address that is not allowed is refused in the server's words."""
    browsing = Browsing(browser)
    archive(server.store / "m.mar")
    page = open_page(browsing, server)
    page.click("text=An address, or the store")
    page.fill(".register > label input", "https://models.example.org/m.mar?token=secret")
    page.click("button[type=submit]")
    page.wait_for_selector("[role=alert]:has-text('matches none of the server')")
    assert "secret" not in page.inner_text("h3")
    page.click("button:has-text('Change it')")
    page.fill(".register > label input", "m.mar")
    page.click("button[type=submit]")
    page.wait_for_selector(".pill.good")

    assert server.predict("m", b"here").content == b"here"


def test_a_download_shows_how_far_it_is_and_can_be_cancelled(browser: Any, tmp_path: Path) -> None:
    """Nothing is registered then, and nothing is left."""
    browsing = Browsing(browser, "light", PHONE)
    (tmp_path / "server").mkdir()
    with range_origin() as origin, fault_proxy(origin.url) as proxy:
        origin.put("/echo.mar", archive(tmp_path / "echo.mar", 6 * MB).read_bytes())
        proxy.on(Fault(stall_at=3 * MB), times=50)
        with Server(tmp_path / "server", entry="marserve", settings={"allowed_urls": proxy.pattern}) as server:
            page = open_page(browsing, server)
            page.click("text=An address, or the store")
            page.fill(".register > label input", f"{proxy.url}/echo.mar?Signature=secret")
            page.click("button[type=submit]")
            page.wait_for_selector(".steps .now .what:text-matches('[1-9][0-9.]* MiB of 5.72 MiB')")
            browsing.picture("register-light-390-download")
            page.click("button:has-text('Cancel')")
            page.wait_for_selector("[role=status]:has-text('It is cancelled, and nothing is registered.')")

            assert (models(server), left(server)) == ([], [])
            assert "secret" not in page.inner_text("main")


def test_it_can_be_tried_where_one_address_has_all(browser: Any, tmp_path: Path) -> None:
    """The form at /docs is open."""
    [port] = free_ports(1)
    names = ("inference_address", "management_address", "metrics_address")
    server = Server(tmp_path, entry="marserve", settings=dict.fromkeys(names, f"http://127.0.0.1:{port}"))
    server.inference = server.management = server.metrics = f"http://127.0.0.1:{port}"
    with server:
        archive(server.store / "m.mar")
        browsing = Browsing(browser)
        page = open_page(browsing, server)
        page.click("text=An address, or the store")
        page.fill(".register > label input", "m.mar")
        page.click("button[type=submit]")
        page.click("a:has-text('Try it')")
        page.wait_for_selector("[id='model-m'][open] form")

        browsing.check_calm(server.management)


def test_a_key_is_asked_for_before_anything_is_kept(browser: Any, tmp_path: Path) -> None:
    """With the right one it is registered."""
    with Server(tmp_path, entry="marserve", settings={"disable_token_authorization": "false"}) as server:
        key = json.loads((server.folder / "key_file.json").read_text())["management"]["key"]
        browsing = Browsing(browser)
        page = open_page(browsing, server)
        page.set_input_files("input[type=file]", archive(tmp_path / "echo.mar", 5 * MB))
        page.click("button[type=submit]")
        page.wait_for_selector("#key-panel")
        browsing.picture("register-light-key")
        assert left(server) == []
        page.fill("#key-panel input", key)
        page.click("#key-panel button")
        page.click("button:has-text('Change it')")
        page.click("button[type=submit]")
        page.wait_for_selector(".pill.good")

        assert key not in page.content()
