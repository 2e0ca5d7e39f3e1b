"""The page at `/docs` in a true browser: predictions through its forms, with and without keys, in both colour schemes.

`make test-browser` runs these; what the browser showed is in `build/browser`, to be looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browsing import DESK, NAMELESS, PHONE, Browsing, launched
from support.server import Server, make_archive

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
SEVEN = ROOT / "examples" / "digits" / "pictures" / "7.png"

# Answers a page that would run, and its own input beside it.
EVIL = """
def handle(data, context):
    context.set_response_content_type(0, "text/html")
    return ["<script>window.hit = 1</script><img src=x onerror='window.hit = 2'>" for row in data or []]
"""
ECHO = """
def handle(data, context):
    return [row.get("body") for row in data or []]
"""
STREAM = """
from ts.handler_utils.utils import send_intermediate_predict_response as send

def handle(data, context):
    if data is None:
        return None
    for number in range(3):
        send([f"piece {number} "] * len(data), context.request_ids, "ok", 200, context)
    return ["the end"] * len(data)
"""

SUMS = """
from marserve_handlers import Tensor, model

@model(
    inputs={"pair": Tensor("float32", ["batch", 2]), "more": Tensor("int64", ["batch", "n"], optional=True)},
    outputs={"sum": Tensor("float32", ["batch"])},
)
def sums(pair, more):
    return {"sum": pair.sum(axis=1)}
"""
GREET = """
from dataclasses import dataclass
from typing import Literal
from marserve_handlers import model

@dataclass
class Person:
    name: str
    age: int = 30
    tongue: Literal["en", "de"] = "en"

@model
def greet(person: Person) -> dict:
    return {"words": ("Hallo " if person.tongue == "de" else "Hello ") + person.name, "age": person.age}
"""
GREY = """
from PIL import Image
from marserve_handlers import model

@model
def grey(picture: Image.Image) -> Image.Image:
    return picture.convert("L").resize((64, 64))
"""
TICK = """
from collections.abc import Iterator
from marserve_handlers import Event, model

@model
def tick(text: str) -> Iterator[Event]:
    for word in text.split():
        yield Event(word)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skips where Playwright or Chromium is missing."""
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without keys, with the digits model."""
    pytest.importorskip("torch")
    settings = {"load_models": "digits.mar", "default_workers_per_model": "1"}
    folder = tmp_path_factory.mktemp("digits")
    with Server(folder, entry="marserve", store=ROOT / "model_store", settings=settings) as server:
        yield server


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_is_read_through_the_form(browser: Any, digits: Server, scheme: str, size: tuple[int, int]) -> None:
    """The likeliest digit stands first, with the bars of all; the command beside it is for a shell."""
    browsing = Browsing(browser, scheme, size)
    page = browsing.open(f"{digits.inference}/docs", ".state.good:has-text('ready')")
    browsing.picture(f"docs-{scheme}-{size[0]}-begin")

    page.set_input_files(".model input[type=file]", SEVEN)
    page.click(".model button[type=submit]")
    page.wait_for_selector(".model .pill.good")
    likeliest = page.inner_text(".scores tr:first-child")
    line = page.inner_text(".model .line pre")
    browsing.picture(f"docs-{scheme}-{size[0]}-answered")

    assert likeliest.split() == ["7", "97.5", "%"]
    assert line == f"curl -H 'content-type: image/png' --data-binary @7.png {digits.inference}/predictions/digits"
    browsing.check_calm(digits.inference)


def test_the_root_is_the_page_too_and_is_quickly_there(browser: Any, digits: Server) -> None:
    """With all that it loads under 100 kB."""
    browsing = Browsing(browser)

    browsing.open(f"{digits.inference}/", ".model form")
    sizes = [each.sizes()["responseBodySize"] for each in browsing.requests if "openapi.json" not in each.url]

    assert sum(sizes) < 100_000
    browsing.check_calm(digits.inference)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_keyboard_alone_suffices(browser: Any, digits: Server, scheme: str) -> None:
    """From the link that skips the header to the answer's body."""
    browsing = Browsing(browser, scheme)
    page = browsing.open(f"{digits.inference}/docs", ".model:has(.state.good) form")
    press = page.keyboard.press

    press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    press("Enter")
    press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    press("Tab")
    assert page.evaluate("document.activeElement.type") == "radio"
    press("ArrowRight")
    press("Tab")
    page.keyboard.type("no picture")
    press("Control+Enter")
    page.wait_for_selector(".model .pill.bad")
    browsing.picture(f"docs-{scheme}-refused")

    assert "message" in page.inner_text(".model .body")


def test_each_control_has_a_name(browser: Any, digits: Server) -> None:
    """A screen reader says what to enter where, for every route of each port."""
    for base in (digits.inference, digits.management, digits.metrics):
        browsing = Browsing(browser)
        page = browsing.open(f"{base}/docs", ".route")
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        page.wait_for_selector(".route form")

        nameless = page.evaluate(NAMELESS)

        assert not nameless
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
        assert len(ids) == len(set(ids))
        browsing.check_calm(base)


def test_every_described_route_is_shown_and_found(browser: Any, digits: Server) -> None:
    """Those of management too; a GET is made from its form."""
    browsing = Browsing(browser, "light", PHONE)
    described = digits.client.get(f"{digits.management}/openapi.json").json()["paths"]
    page = browsing.open(f"{digits.management}/docs", ".route")

    assert page.locator(".route").count() == sum(len(item) for item in described.values())
    page.fill(".filter", "describe default")
    assert page.locator(".route").count() == 1
    page.click(".route summary")
    page.fill(".route input", "digits")
    page.click(".route button[type=submit]")
    page.wait_for_selector(".route .facts .pill.good")
    browsing.picture("management-light-390")

    assert '"modelName": "digits"' in page.inner_text(".route .body")
    browsing.check_calm(digits.management)


def test_an_archive_is_uploaded_and_registered_through_the_forms(browser: Any, tmp_path: Path) -> None:
    """A file is a body, and gives its own name to the path."""
    make_archive(tmp_path / "echo.mar", ECHO)
    (tmp_path / "server").mkdir()
    with Server(tmp_path / "server", entry="marserve") as server:
        browsing = Browsing(browser, "dark")
        page = browsing.open(f"{server.management}/docs", ".route")
        put = page.locator(".route:has(code:has-text('/archives/'))")
        put.locator("summary").first.click()
        put.locator("input[type=file]").set_input_files(tmp_path / "echo.mar")
        put.locator("button[type=submit]").click()
        put.locator(".facts .pill:has-text('201')").wait_for()
        browsing.picture("upload-dark-1100")
        post = page.locator(".route:has(.method.post):has(code:text-is('/models'))")
        post.locator("summary").first.click()
        post.locator(".more > summary").first.click()
        post.locator("label:has(.label:text-matches('^url')) input").fill("echo.mar")
        post.locator("button[type=submit]").click()
        post.locator(".facts .pill.good").wait_for()
        models = server.client.get(f"{server.management}/models").json()["models"]

    assert [each["modelName"] for each in models] == ["echo"]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    """A server with keys and three models: one that answers a page of its own, one with a name that looks like one."""
    make_archive(tmp_path / "evil.mar", EVIL)
    make_archive(tmp_path / "echo.mar", ECHO, name="<img src=x onerror=alert(1)>")
    make_archive(tmp_path / "stream.mar", STREAM)
    settings = {"disable_token_authorization": "false", "load_models": "all", "default_workers_per_model": "1"}
    with Server(tmp_path, entry="marserve", store=tmp_path, settings=settings) as server:
        yield server


def test_a_key_is_asked_for_kept_in_the_page_and_sent_as_a_header(browser: Any, guarded: Server) -> None:
    """It stands in no address, no command, no cookie and no storage; a reload forgets it."""
    key = json.loads((guarded.folder / "key_file.json").read_text())["inference"]["key"]
    browsing = Browsing(browser, "dark")
    page = browsing.open(f"{guarded.inference}/docs", "#key-panel")
    browsing.picture("docs-dark-key")

    page.fill("#key-panel input", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-panel :text('asks for a key')")
    assert page.locator(".model").count() == 0
    page.fill("#key-panel input", key)
    page.keyboard.press("Enter")
    page.wait_for_selector(".model")
    page.wait_for_selector(".model:has-text('evil') .state.good")
    page.click(".model:has-text('evil') summary")
    page.click(".model:has-text('evil') label:has-text('Text')")
    page.click(".model:has-text('evil') button[type=submit]")
    page.wait_for_selector(".model:has-text('evil') .pill.good")

    sent = [each for each in browsing.requests if each.url.endswith("/predictions/evil")][-1]
    assert sent.headers["authorization"] == f"Bearer {key}"
    assert '"Authorization: Bearer $KEY"' in page.inner_text(".model:has-text('evil') .line pre")
    kept = page.evaluate(
        "[document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage), location.href]"
    )
    assert key not in "".join(kept) + page.content() + "".join(each.url for each in browsing.requests)
    page.reload()
    page.wait_for_selector("#key-panel")


def test_names_and_answers_never_run(browser: Any, guarded: Server) -> None:
    """They are shown as the text that they are."""
    key = json.loads((guarded.folder / "key_file.json").read_text())["inference"]["key"]
    browsing = Browsing(browser, "light", PHONE)
    page = browsing.open(f"{guarded.inference}/docs", "#key-panel")
    page.fill("#key-panel input", key)
    page.keyboard.press("Enter")
    page.wait_for_selector(".model[open] form")
    for name in ("evil", "onerror"):
        card = page.locator(f".model:has(h3:has-text('{name}'))")
        if card.get_attribute("open") is None:
            card.locator("summary").click()
        card.locator(".state.good").wait_for()
        card.locator("label:has-text('Text')").first.click()
        card.locator("textarea").fill("<script>window.hit = 3</script>")
        card.locator("button[type=submit]").click()
        card.locator(".pill.good").wait_for()
    browsing.picture("docs-light-390-hostile")

    assert "<img src=x onerror=alert(1)>" in page.locator("h3").all_inner_texts()
    assert any("window.hit = 1" in each for each in page.locator(".body").all_inner_texts())
    assert page.evaluate("window.hit") is None
    # Without the key that the page then asked for.
    assert browsing.complaints == ["Failed to load resource: the server responded with a status of 401 (Unauthorized)"]


def test_a_stream_is_shown_as_it_comes(browser: Any, guarded: Server) -> None:
    """All of its pieces, in order."""
    key = json.loads((guarded.folder / "key_file.json").read_text())["inference"]["key"]
    browsing = Browsing(browser)
    page = browsing.open(f"{guarded.inference}/docs#stream", "#key-panel")
    page.fill("#key-panel input", key)
    page.keyboard.press("Enter")
    page.wait_for_selector(".model[open]:has(.state.good) form")
    page.click(".model[open] button[type=submit]")
    page.wait_for_selector(".model[open] .body:has-text('the end')")

    assert page.inner_text(".model[open] .body") == "piece 0 piece 1 piece 2 the end"


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with models that declare what they take."""
    folder = tmp_path_factory.mktemp("declared")
    for name, handler in {"sums": SUMS, "greet": GREET, "grey": GREY, "tick": TICK}.items():
        make_archive(folder / f"{name}.mar", handler)
    settings = {"load_models": "all", "default_workers_per_model": "1"}
    with Server(folder, entry="marserve", store=folder, settings=settings) as server:
        yield server


def open_model(browsing: Browsing, server: Server, name: str) -> Any:
    """Go to a model's form once the model is ready; only its card is open."""
    page = browsing.open(f"{server.inference}/docs#{name}", f"[id='model-{name}']:has(.state.good) form")
    assert page.locator(".model[open]").count() == 1
    return page


def test_declared_tensors_have_a_field_each(browser: Any, declared: Server) -> None:
    """Filled in with what fits; what does not is refused with the field's name, and an optional one is left out."""
    browsing = Browsing(browser, "dark", PHONE)
    page = open_model(browsing, declared, "sums")
    page.wait_for_selector("#of-sums-pair")  # once a worker has loaded the model
    sending = ".model[open] button[type=submit]"

    page.click(sending)
    page.wait_for_selector(".model[open] .pill.good")
    assert '"sum": 0.0' in page.inner_text(".model[open] .body")
    assert page.inner_text(".model[open] .line pre").count('"more"') == 0
    page.fill("#of-sums-pair", "[1, 2")
    page.click(sending)
    page.wait_for_selector(".model[open] .problem:has-text('pair is not JSON')")
    page.fill("#of-sums-pair", "[1, 2, 3]")
    page.click(sending)
    page.wait_for_selector(".model[open] .pill.bad")
    browsing.picture("declared-dark-390")

    assert "pair: expected float32 [2], got [3]" in page.inner_text(".model[open] .body")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_declared_item_has_a_field_for_each_member(browser: Any, declared: Server) -> None:
    """Each of its kind, with its default."""
    browsing = Browsing(browser)
    page = open_model(browsing, declared, "greet")

    page.fill("#of-greet-name", "Ada")
    page.select_option("#of-greet-tongue", "de")
    page.click(".model[open] button[type=submit]")
    page.wait_for_selector(".model[open] .pill.good")
    browsing.picture("declared-light-1100")

    assert json.loads(page.inner_text(".model[open] .body")) == {"words": "Hallo Ada", "age": 30}
    browsing.check_calm(declared.inference)


def test_a_picture_that_a_model_answers_is_shown(browser: Any, declared: Server) -> None:
    """Though the page may load pictures of this server alone."""
    browsing = Browsing(browser)
    page = open_model(browsing, declared, "grey")

    page.set_input_files(".model[open] input[type=file]", SEVEN)
    page.click(".model[open] button[type=submit]")
    page.wait_for_selector(".model[open] img.picture")

    assert page.wait_for_function("document.querySelector('img.picture').naturalWidth === 64")
    browsing.check_calm(declared.inference)


def test_events_are_asked_for_where_a_model_declares_them(browser: Any, declared: Server) -> None:
    """And shown as they come, with their end."""
    browsing = Browsing(browser)
    page = open_model(browsing, declared, "tick")

    page.fill(".model[open] textarea", "one two")
    page.click(".model[open] button[type=submit]")
    page.wait_for_selector(".model[open] .body:has-text('event: end')")

    shown = page.inner_text(".model[open] .body")
    assert [line for line in shown.splitlines() if line.startswith("data: ")][:2] == ["data: one", "data: two"]
    browsing.check_calm(declared.inference)
