"""What a browser sends for another site's page is refused where no key is asked for, and nothing else is."""

from __future__ import annotations

import httpx
import pytest
from fastapi import APIRouter

from marserve.api.browsers import OPEN_PATHS, BrowserRules, Origin, OwnHosts, read_origin, split_host
from marserve.api.errors import ForeignHost, ForeignOrigin
from marserve.api.rest.application import build_app
from marserve.api.rest.guard import BrowserGuard
from support.http_listener import listening
from support.management_house import client_of

HERE = OwnHosts()


def judge(rules: BrowserRules, method: str = "POST", **headers: str) -> str:
    """What becomes of a request with these header lines; `_` in a name stands for `-`."""
    lines = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    try:
        rules.check(method, lines)
    except (ForeignHost, ForeignOrigin) as error:
        return error.cause or ""
    return "passes"


# ------------------------------------------------------------------------------------------------- whose page it is


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1:8081"},
        {"Origin": "HTTP://127.0.0.1:8081"},
        {"Origin": "http://127.0.0.1:8081", "Sec_Fetch_Site": "same-origin"},
        {"Origin": "https://127.0.0.1", "Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "none"},
        {"Referer": "https://evil.example/"},
    ],
)
def test_what_no_other_sites_page_sends_passes(headers: dict[str, str]) -> None:
    """Programs name no origin. A proxy that ends TLS makes the schemes differ, and the browser says that it is one."""
    assert judge(BrowserRules("http"), Host="127.0.0.1:8081", **headers) == "passes"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"origin": "http://evil.example:8081"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://127.0.0.1:8080"},
        {"Origin": "https://127.0.0.1:8081"},
        {"Origin": "http://localhost:8081"},
        {"Origin": "http://127.0.0.1:8081.evil.example"},
        {"Origin": "http://127.0.0.1:8081@evil.example"},
        {"Origin": "http://127.0.0.1:8081 http://evil.example"},
        {"Origin": "http://evil.example", "Sec_Fetch_Site": "same-origin"},
        {"Origin": "http://127.0.0.1:8081", "ORIGIN": "http://evil.example"},
        {"Origin": "http://127.0.0.1:8081", "Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "cross-site"},
        {"sec_fetch_site": " Cross-Site "},
        {"Sec_Fetch_Site": "same-origin", "sec_fetch_site": "cross-site"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "BREW"])
def test_what_changes_something_for_another_sites_page_is_refused(method: str, headers: dict[str, str]) -> None:
    """An origin is scheme, host and port; a page of another port of this machine is another site's, too."""
    assert judge(BrowserRules("http"), method, Host="127.0.0.1:8081", **headers) == "foreign_origin"


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_what_changes_nothing_passes_whosever_page_it_is(method: str) -> None:
    """Browsers keep the answer from the page, and a preflight is an OPTIONS."""
    headers = {"Origin": "https://evil.example", "Sec_Fetch_Site": "cross-site"}

    assert judge(BrowserRules("http"), method, Host="x", **headers) == "passes"


@pytest.mark.parametrize(
    ("allowed", "origin", "becomes"),
    [
        ("https://ui.example", "https://ui.example", "passes"),
        ("https://ui.example", "https://UI.example:443", "passes"),
        ("https://ui.example/", "https://ui.example", "foreign_origin"),
        ("https://ui.example", "http://ui.example", "foreign_origin"),
        ("https://ui.example", "https://ui.example:8443", "foreign_origin"),
        ("https://ui.example", "https://ui.example.evil.example", "foreign_origin"),
        ("https://ui.example", "null", "foreign_origin"),
        ("null", "null", "passes"),
        ("*", "https://anywhere.example", "passes"),
        ("*", "null", "passes"),
    ],
)
def test_an_origin_that_may_call_passes(allowed: str, origin: str, becomes: str) -> None:
    """It is what `cors_allowed_origin` tells browsers."""
    rules = BrowserRules("http", None, [allowed])

    assert judge(rules, Host="h", Origin=origin, Sec_Fetch_Site="cross-site") == becomes


def test_several_origins_may_be_allowed_and_each_that_is_named_must_be() -> None:
    """Two lines are two origins."""
    rules = BrowserRules("http", None, ["https://a.example", "https://b.example"])

    assert judge(rules, Host="h", Origin="https://b.example") == "passes"
    assert judge(rules, Host="h", Origin="https://a.example", ORIGIN="https://b.example") == "passes"
    assert judge(rules, Host="h", Origin="https://a.example", ORIGIN="https://c.example") == "foreign_origin"


def test_no_page_is_of_a_server_that_the_request_does_not_name() -> None:
    """HTTP/1.0 without a Host."""
    assert judge(BrowserRules("http"), Origin="http://127.0.0.1:8081") == "foreign_origin"


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://A.example", Origin("https", "a.example", 443)),
        ("http://a.example.", Origin("http", "a.example", 80)),
        ("http://[::1]:8081", Origin("http", "::1", 8081)),
        ("http://[0:0:0:0:0:0:0:1]", Origin("http", "::1", 80)),
        ("ftp://a.example", None),
        ("http://", None),
        ("http://a.example/", None),
        ("http://a b", None),
        ("http://u@a", None),
        ("null", None),
    ],
)
def test_an_origin_has_one_form(text: str, origin: Origin | None) -> None:
    """None for what no page of http or https has."""
    assert read_origin(text) == origin


# ------------------------------------------------------------------------------------------------- whom it is for


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:8081", "localhost.", "localhost.:8081", "127.0.0.1", "127.0.0.1:8081", "127.8.9.1"),
        *("127.1", "[::1]", "[::1]:8081", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]:80", "0.0.0.0:8081", "[::]"),
        *("box.lan", "box.lan:1", ""),
    ],
)
def test_this_machines_own_names_are_known_in_every_spelling(host: str) -> None:
    """With any port: it may be forwarded from another. `box.lan` is what the address is called in the settings."""
    assert OwnHosts(address_host="Box.lan").has(host.encode())


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8081",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "x",
            "localhost..",
            ".",
        ),
        *("10.0.0.7", "[fe80::1]", "[::ffff:10.0.0.7]", "169.254.169.254", "1270.0.0.1", "%6cocalhost", "local_host"),
        *("box.lan", "localhost:x", "[::1", "127.0.0.1:80:80"),
    ],
)
def test_every_other_host_is_foreign(host: str) -> None:
    """A page can lead each of these names here, or nobody here is called so."""
    assert not HERE.has(host.encode())


@pytest.mark.parametrize(
    ("allowed", "host", "is_own"),
    [
        ("models.example.com", "Models.Example.com.:443", True),
        ("models.example.com", "www.models.example.com", False),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "notexample.com", False),
        ("10.0.0.7", "10.0.0.7:8081", True),
        ("fd00::7", "[FD00:0::7]:8081", True),
        ("models.example.com", "127.0.0.1", True),
        ("*", "evil.example", True),
    ],
)
def test_further_hosts_are_those_that_are_allowed(allowed: str, host: str, is_own: bool) -> None:
    """Whole names; a star stands for those below one. This machine's own names stay."""
    assert OwnHosts([allowed]).has(host.encode()) is is_own


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
def test_a_foreign_host_is_refused_whatever_is_asked(method: str) -> None:
    """For a page that led its name here everything is of its own site: it would read the answers."""
    rules = BrowserRules("http", HERE, ["*"])
    evil = {"Host": "evil.example:8081", "Origin": "http://evil.example:8081", "Sec_Fetch_Site": "same-origin"}

    assert judge(rules, method, **evil) == "foreign_host"
    assert judge(rules, method, Host="localhost:8081") == "passes"
    assert judge(rules, method) == "passes"


def test_the_refusals_name_what_was_seen_and_the_setting() -> None:
    """Bounded and quoted: it is the client's own text."""
    assert "cors_allowed_origin" in ForeignOrigin("https://evil.example").message
    assert "'https://evil.example'" in ForeignOrigin("https://evil.example").message
    assert "a page of another site" in ForeignOrigin("").message
    assert "set allowed_hosts=evil.example;" in ForeignHost("evil.example:8080").message
    assert "set allowed_hosts=[fd00::1];" in ForeignHost("[fd00::1]:8080").message
    assert "set allowed_hosts to its names;" in ForeignHost("evil.example,*").message
    assert len(ForeignHost("\x85" * 10_000).message) < 800


@pytest.mark.parametrize(
    ("value", "parts"),
    [(b"A.b:80", ("a.b", 80)), (b"[::1]:9", ("::1", 9)), (b"[::1]", ("::1", 0)), (b"a:", ("a", 0)), (b"", ("", 0))],
)
def test_a_host_is_read_with_its_port(value: bytes, parts: tuple[str, int]) -> None:
    """As the `Host` header has it."""
    assert split_host(value) == parts


# ------------------------------------------------------------------------------------------------- in their places


def application(rules: BrowserRules) -> object:
    """Routes as a listener has them, behind the guard."""
    router = APIRouter()
    for path in ("/models", "/logs", "/ping/{rest:path}", *OPEN_PATHS, "/health"):
        router.add_api_route(path, lambda: {"answered": True}, methods=["GET", "POST"])
    return build_app([router], title="test", guard=lambda app: BrowserGuard(app, rules))


async def ask(app: object, method: str, path: str, **headers: str) -> httpx.Response:
    """One request."""
    async with client_of(app) as client:
        return await client.request(method, path, headers={n.replace("_", "-"): v for n, v in headers.items()})


@pytest.mark.anyio
async def test_health_and_metrics_are_answered_to_all() -> None:
    """Probes come with any Host; what they are told changes nothing."""
    app = application(BrowserRules("http", HERE, (), [*OPEN_PATHS, "/health"]))
    evil = {"Host": "evil.example", "Origin": "https://evil.example", "Sec_Fetch_Site": "cross-site"}

    for path in ("/ping/", "/ping/more", *OPEN_PATHS, "/health"):
        for method in ("GET", "POST"):
            assert (await ask(app, method, path, **evil)).status_code == 200, path
    elsewhere = (
        "/models",
        "/%6dodels",
        "/pingx",
        "/nosuch",
        "//ping",
        "/ping%2F..%2Fmodels",
        "/PING",
        "/v2",
        "/v2/health",
    )
    for path in elsewhere:
        assert (await ask(app, "GET", path, **evil)).status_code == 403, path


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec_Fetch_Site": "none"}, 200),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
        ({"Origin": "http://localhost:8081"}, 200),
        ({"Origin": "https://ours.example", "Sec_Fetch_Site": "cross-site"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Origin": "http://localhost:3000", "Sec_Fetch_Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_the_places_of_logs_are_not_for_other_sites_pages(headers: dict[str, str], status: int) -> None:
    """A page that cannot read the answer could hold them all the same; other routes that only read stay open."""
    app = application(BrowserRules("http", HERE, ["https://ours.example"]))

    answers = [await ask(app, "GET", path, Host="localhost:8081", **headers) for path in ("/logs", "/models")]

    assert [answer.status_code for answer in answers] == [status, 200]


@pytest.mark.anyio
async def test_a_refusal_is_an_error_object_with_its_cause() -> None:
    """403 with the words that scripts look for."""
    app = application(BrowserRules("http", HERE))
    foreign_host = await ask(app, "GET", "/models", Host="evil.example")
    foreign_origin = await ask(app, "POST", "/models", Host="localhost", Origin="https://evil.example")

    told = [
        (each.status_code, each.json()["type"], each.headers["x-marserve-cause"])
        for each in (foreign_host, foreign_origin)
    ]
    assert told == [
        (403, "ForeignHostException", "foreign_host"),
        (403, "ForeignOriginException", "foreign_origin"),
    ]
    assert (await ask(app, "POST", "/models", Host="localhost")).status_code == 200


@pytest.mark.anyio
async def test_predictions_are_judged_before_their_body() -> None:
    """And a header that was refused is not remembered as accepted."""
    rules = BrowserRules("http", HERE)
    head = "POST /predictions/echo HTTP/1.1\r\nHost: {host}\r\n{line}Content-Length: 6000000\r\n\r\n"
    good = b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"
    async with listening(browser_rules=rules) as listener:
        for host, line in (("evil.example", ""), ("localhost", "Origin: https://evil.example\r\n")):
            for _ in range(2):
                async with listener.connect() as client:
                    refused = await client.ask(head.format(host=host, line=line).encode())
                    assert (refused.status, refused.header("connection")) == (403, "close")
        async with listener.connect() as client:
            answers = [await client.ask(good) for _ in range(2)]

    assert [answer.body for answer in answers] == [b"hi", b"hi"]
    assert len(listener.plane.submitted) == 2
    assert listener.counts.refused == {"foreign_host": 2, "foreign_origin": 2}


@pytest.mark.anyio
async def test_an_absolute_target_says_whom_a_request_is_for() -> None:
    """Its Host does not count beside it (RFC 9112, 3.2.2); a user or a path in its host is none."""
    async with listening(browser_rules=BrowserRules("http", HERE)) as listener:
        answers = []
        for target in ("http://evil.example", "http://localhost:8080", "http://u@localhost", "HTTP://[::1]"):
            host = "evil.example" if "local" in target else "localhost"
            line = f"GET {target}/predictions/echo?x HTTP/1.1\r\nHost: {host}"
            async with listener.connect() as client:
                answers.append((await client.ask(f"{line}\r\n\r\n".encode())).status)

    assert answers == [403, 200, 400, 200]
