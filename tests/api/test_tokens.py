"""Keys: which requests they let pass, their file, their renewal, and which route asks for which."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from marserve.api.browsers import BrowserRules, OwnHosts
from marserve.api.http.listener import KnownHeads
from marserve.api.http.request_head import Head
from marserve.api.rest.application import build_app
from marserve.api.rest.guard import Guard, token_router
from marserve.api.tokens import Access, CannotKeepTokens, Kind, Tokens, authorization_of
from marserve.errors import ExpiredKey, InvalidToken, MissingKey, WrongKey
from support.http_client import Cut
from support.http_listener import listening
from support.management_house import client_of

AUTHORIZATION = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
AUTHENTICATION = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"


class Clock:
    """Wall-clock time, as the test says."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that stands."""
    return Clock()


@pytest.fixture
def tokens(tmp_path: Path, clock: Clock) -> Tokens:
    """Keys for an hour, in a file."""
    made = Tokens(tmp_path / "key_file.json", 3600, clock)
    made.write()
    return made


@pytest.fixture
def keys(tokens: Tokens, tmp_path: Path) -> dict[str, str]:
    """What a client reads in the file."""
    return read_keys(tmp_path)


def read_keys(folder: Path) -> dict[str, str]:
    """The keys in the file."""
    return {name: entry["key"] for name, entry in json.loads((folder / "key_file.json").read_text()).items()}


def lets_in(tokens: Tokens, kind: Kind, value: str | bytes | None) -> bool:
    """Whether a request with this header passes."""
    try:
        tokens.check(kind, value)
    except InvalidToken:
        return False
    return True


# ----------------------------------------------------------------------------------------------------- checking


def test_each_key_opens_its_own_api_alone(tokens: Tokens, keys: dict[str, str]) -> None:
    """The API key opens neither."""
    opened = {
        (kind, name)
        for kind in ("inference", "management")
        for name in keys
        if lets_in(tokens, kind, f"Bearer {keys[name]}")
    }  # type: ignore[arg-type]

    assert opened == {("inference", "inference"), ("management", "management")}


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "bearer {key}",
        "BEARER {key}",
        "Basic {key}",
        "{key}",
        "Bearer {key}x",
        "Bearer x{key}",
        "Bearer {key} {key}",
        "Bearer \xe9",
    ],
)
def test_only_bearer_and_the_whole_key_will_do(tokens: Tokens, keys: dict[str, str], value: str | None) -> None:
    """The word as TorchServe writes it; text and bytes are judged alike."""
    text = None if value is None else value.replace("{key}", keys["inference"])

    with pytest.raises(InvalidToken, match=AUTHORIZATION):
        tokens.check("inference", text)
    assert not lets_in(tokens, "inference", None if text is None else text.encode("latin-1"))


def test_text_and_bytes_are_both_taken(tokens: Tokens, keys: dict[str, str]) -> None:
    """HTTP has bytes, gRPC's metadata text."""
    tokens.check("management", f"Bearer {keys['management']}")
    tokens.check("management", f"Bearer {keys['management']}".encode())


def test_a_key_ends_at_its_time_and_the_api_key_never(tokens: Tokens, keys: dict[str, str], clock: Clock) -> None:
    """By the wall clock, because clients read the time in the file."""
    clock.now += 3599.9
    assert lets_in(tokens, "inference", f"Bearer {keys['inference']}")

    clock.now += 0.1
    assert not lets_in(tokens, "inference", f"Bearer {keys['inference']}")
    assert not lets_in(tokens, "management", f"Bearer {keys['management']}")

    clock.now += 10**9
    tokens.renew("inference", f"Bearer {keys['API']}")


def test_either_key_but_the_api_key_opens_what_both_apis_have(tokens: Tokens, keys: dict[str, str]) -> None:
    """`/ping` on an address that both share."""
    tokens.check_either(f"Bearer {keys['inference']}".encode())
    tokens.check_either(f"Bearer {keys['management']}".encode())
    with pytest.raises(InvalidToken):
        tokens.check_either(f"Bearer {keys['API']}".encode())


def test_no_key_is_ever_in_a_message_or_a_log(
    tokens: Tokens, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor in what Python shows of the objects."""
    caplog.set_level(logging.DEBUG)

    with pytest.raises(InvalidToken) as refusal:
        tokens.check("inference", f"Bearer {keys['management']}")
    tokens.renew("inference", f"Bearer {keys['API']}")

    said = f"{refusal.value!r} {tokens!r} {vars(refusal.value)} {caplog.text}"
    assert not [key for key in keys.values() if key in said]


def test_keys_are_long_and_new_for_every_server(tmp_path: Path, clock: Clock) -> None:
    """256 bits each, in letters that a header takes as they are."""
    made = [Tokens(tmp_path / "key_file.json", 60, clock) for _ in range(2)]

    found = {tokens.key_of(kind) for tokens in made for kind in ("inference", "management")}  # type: ignore[arg-type]

    assert len(found) == 4
    assert all(re.fullmatch(rb"[A-Za-z0-9_-]{43}", key) for key in found)


def test_blanks_around_a_key_and_half_a_character_do_not_count(tokens: Tokens, keys: dict[str, str]) -> None:
    """Clients fold and pad; a text that no header can have is a wrong key and no fault of the server's."""
    assert lets_in(tokens, "inference", f"Bearer  {keys['inference']} ")
    assert not lets_in(tokens, "inference", f"Bearer {keys['inference']}\ud800")
    assert not lets_in(tokens, "inference", f"Bearer\t{keys['inference']}")


def test_a_kind_has_expired_at_its_time_and_not_before(tmp_path: Path, tokens: Tokens, clock: Clock) -> None:
    """Each by its own: a renewed one lives on."""
    clock.now += 3599.999
    assert not tokens.has_expired("management")
    tokens.renew("management", f"Bearer {read_keys(tmp_path)['API']}")
    clock.now += 0.001

    assert tokens.has_expired("inference")
    assert not tokens.has_expired("management")


def test_the_authorization_of_a_request_is_its_first() -> None:
    """In any case of letters; a name of as many is none."""
    lines = [(b"authorisation", b"0"), (b"X-Authorization", b"1"), (b"AUTHORIZATION", b"2"), (b"authorization", b"3")]

    assert authorization_of(lines) == b"2"
    assert authorization_of(lines[:2]) is None


# ----------------------------------------------------------------------------------------------------- the file


def test_the_file_has_torchserves_form(tmp_path: Path, tokens: Tokens) -> None:
    """Its clients read it."""
    document = json.loads((tmp_path / "key_file.json").read_text())

    assert {name: sorted(entry) for name, entry in document.items()} == {
        "management": ["expiration time", "key"],
        "inference": ["expiration time", "key"],
        "API": ["key"],
    }
    assert document["inference"]["expiration time"] == "2026-01-02T04:04:05.000000Z"
    assert len({entry["key"] for entry in document.values()}) == 3


def test_the_file_is_begun_in_its_own_folder(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files may be on another disk, from which no file can be moved in one step."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "another disk"))

    Tokens(tmp_path / "key_file.json", 60, clock).write()

    assert set(read_keys(tmp_path)) == {"API", "inference", "management"}


def test_only_its_owner_may_read_the_file(tmp_path: Path, clock: Clock) -> None:
    """Whatever the umask, and whatever stood there before; a link is replaced, not followed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    elsewhere.chmod(0o644)
    (tmp_path / "key_file.json").symlink_to(elsewhere)

    before = os.umask(0)
    try:
        Tokens(tmp_path / "key_file.json", 60, clock).write()
    finally:
        os.umask(before)

    status = (tmp_path / "key_file.json").lstat()
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert elsewhere.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "key_file.json"]


def test_a_file_that_cannot_be_written_is_told_with_ways_out(tmp_path: Path, clock: Clock) -> None:
    """And no key with it."""
    with pytest.raises(CannotKeepTokens, match="token_file") as error:
        Tokens(tmp_path / "no" / "such" / "key_file.json", 60, clock).write()

    assert "disable_token_authorization=true" in str(error.value)


def test_the_file_goes_with_its_server_unless_it_is_anothers(tmp_path: Path, clock: Clock) -> None:
    """A server that was started later in the same folder has written its own."""
    file = tmp_path / "key_file.json"
    first, second = Tokens(file, 60, clock), Tokens(file, 60, clock)
    first.write()
    second.write()

    first.remove()
    assert file.exists()

    second.remove()
    second.remove()
    assert not file.exists()


def test_a_life_longer_than_calendars_never_ends(tmp_path: Path, clock: Clock) -> None:
    """As far as anybody will see."""
    tokens = Tokens(tmp_path / "key_file.json", 1e300, clock)
    tokens.write()

    assert json.loads((tmp_path / "key_file.json").read_text())["inference"]["expiration time"].startswith("9999-12-31")
    assert not tokens.has_expired("inference")


# ----------------------------------------------------------------------------------------------------- renewal


def test_renewing_replaces_one_key_and_its_expiry(
    tmp_path: Path, tokens: Tokens, keys: dict[str, str], clock: Clock
) -> None:
    """The other stays, and the file says so."""
    clock.now += 1800

    ends = tokens.renew("inference", f"Bearer {keys['API']}")

    renewed = read_keys(tmp_path)
    assert ends == "2026-01-02T04:34:05.000000Z"
    assert {name for name in keys if keys[name] != renewed[name]} == {"inference"}
    assert not lets_in(tokens, "inference", f"Bearer {keys['inference']}")
    assert lets_in(tokens, "inference", f"Bearer {renewed['inference']}")


@pytest.mark.parametrize(("kind", "by"), [("inference", "management"), ("banana", "API"), ("", "API"), ("API", "API")])
def test_only_the_api_key_renews_and_only_the_two_kinds(
    tokens: Tokens, keys: dict[str, str], kind: str, by: str
) -> None:
    """In TorchServe's other word."""
    with pytest.raises(InvalidToken, match=AUTHENTICATION):
        tokens.renew(kind, f"Bearer {keys[by]}")


def test_what_cannot_be_written_is_not_renewed(tmp_path: Path, tokens: Tokens, keys: dict[str, str]) -> None:
    """A key that no client can find would lock everybody out."""
    (tmp_path / "key_file.json").unlink()
    tmp_path.rename(tmp_path.with_name("moved"))

    try:
        with pytest.raises(CannotKeepTokens):
            tokens.renew("inference", f"Bearer {keys['API']}")
        assert lets_in(tokens, "inference", f"Bearer {keys['inference']}")
    finally:
        tmp_path.with_name("moved").rename(tmp_path)


@pytest.mark.parametrize("step", ["new", "replace"])
def test_a_file_that_stays_unfinished_is_removed_and_the_old_one_stays(
    tmp_path: Path, tokens: Tokens, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A full disk leaves no key behind, and the server still knows its own file."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "marserve.files.atomic.Part.__init__" if step == "new" else "marserve.files.atomic.os.replace", fail
    )
    with pytest.raises(CannotKeepTokens, match="No space left on device"):
        tokens.renew("inference", f"Bearer {keys['API']}")
    monkeypatch.undo()

    assert os.listdir(tmp_path) == ["key_file.json"]
    assert read_keys(tmp_path) == keys
    tokens.remove()
    assert os.listdir(tmp_path) == []


def test_a_header_is_remembered_as_long_as_its_key_lets_in(tokens: Tokens, keys: dict[str, str], clock: Clock) -> None:
    """All of them are forgotten with the key: at its end, and when it is renewed."""
    known, head = KnownHeads(tokens), Head(b"POST", b"/predictions/m", "1.1", True, [])
    known[b"POST"] = head
    clock.now += 3599
    assert known.get(b"POST") is head

    clock.now += 1
    assert known.get(b"POST", head) is head
    assert not known
    tokens.renew("inference", f"Bearer {keys['API']}")
    assert known.get(b"POST") is None
    known[b"GET"] = head
    assert known.get(b"GET") is head


# ----------------------------------------------------------------------------------- a listener's application


def application(tokens: Tokens, otherwise: Access = "either", **options: Any) -> Any:
    """Two APIs on one address, as FastAPI serves them."""
    routers: list[tuple[APIRouter, Access]] = []
    for path, access in (("/ping", "either"), ("/models/{model}", "management"), ("/metrics", "open")):
        router = APIRouter()
        router.add_api_route(path, lambda: {"answered": True})
        routers.append((router, access))  # type: ignore[arg-type]
    routers.append((token_router(tokens), "open"))
    return build_app(
        [router for router, _ in routers],
        title="test",
        guard=lambda app: Guard(app, tokens, routers, otherwise, ("/livez",), **options),
    )


async def ask(app: Any, method: str, path: str, key: str | None = None, **headers: str) -> httpx.Response:
    """One request."""
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    async with client_of(app) as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.anyio
async def test_a_key_that_cannot_be_kept_is_said_not_to_be_replaced(
    tokens: Tokens, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: 503 with the system's words and no path; the old key stays in force."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("marserve.files.atomic.Part.__init__", fail)

    answer = await ask(application(tokens), "GET", "/token?type=inference", keys["API"])

    assert answer.status_code == 503
    assert answer.json()["message"] == (
        "The key was not replaced, the old one stays in force: its file cannot be written (No space left on device)"
    )
    assert lets_in(tokens, "inference", f"Bearer {keys['inference']}")


@pytest.mark.parametrize("said", [None, "", "Bearer", "Bearer ", "nonsense"])
def test_a_request_without_a_key_is_told_so(tmp_path: Path, said: str | None) -> None:
    """Where keys are told apart: 401, and how to send one."""
    tokens = Tokens(tmp_path / "key_file.json", 3600, tells_apart=True)

    with pytest.raises(MissingKey, match="needs the inference key: send it in the header `Authorization: Bearer KEY`"):
        tokens.check("inference", said)


def test_a_wrong_key_and_an_expired_one_are_told_apart(tmp_path: Path, clock: Clock) -> None:
    """403 for the one that never fits, 401 for the one that a new key replaces; the way to it is named."""
    tokens = Tokens(tmp_path / "key_file.json", 3600, clock, tells_apart=True)
    tokens.write()
    keys = read_keys(tmp_path)

    with pytest.raises(WrongKey, match="not the management key"):
        tokens.check("management", f"Bearer {keys['inference']}")
    with pytest.raises(WrongKey, match="not the inference or the management key"):
        tokens.check_either(f"Bearer {keys['API']}")
    with pytest.raises(WrongKey, match="not the API key"):
        tokens.renew("inference", f"Bearer {keys['inference']}")
    clock.now += 3600
    with pytest.raises(ExpiredKey, match="/token\\?type=inference"):
        tokens.check("inference", f"Bearer {keys['inference']}")


@pytest.mark.anyio
async def test_keys_that_are_told_apart_have_the_statuses_of_http(tmp_path: Path) -> None:
    """401 without a key, 403 with a wrong one; both name the scheme."""
    app = application(Tokens(tmp_path / "key_file.json", 3600, tells_apart=True))

    missing, wrong = await ask(app, "GET", "/models/m", None), await ask(app, "GET", "/models/m", "nonsense")

    assert (missing.status_code, wrong.status_code) == (401, 403)
    assert missing.json()["type"] == wrong.json()["type"] == "InvalidKeyException"
    assert missing.headers["www-authenticate"] == "Bearer"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "open_to"),
    [
        ("/ping", {"inference", "management"}),
        ("/models/m", {"management"}),
        ("/models/%6d", {"management"}),
        ("/models/m///", {"management"}),
        ("/metrics", {"inference", "management", "API", None}),
        ("/nosuch", {"inference", "management"}),
        ("/api-description", {"inference", "management", "API", None}),
        ("/livez", {"inference", "management", "API", None}),
        ("/livez/more", {"inference", "management"}),
    ],
)
async def test_a_route_asks_for_the_key_of_its_api(
    tokens: Tokens, keys: dict[str, str], path: str, open_to: set[str | None]
) -> None:
    """And nobody without one learns what there is: an unknown path is refused as a known one."""
    app = application(tokens)

    got = {name: (await ask(app, "GET", path, keys[name] if name else None)) for name in (*keys, None)}

    refused = {name for name, answer in got.items() if answer.status_code == 400}
    assert set(got) - refused == open_to
    for name in refused:
        assert got[name].json() == {"code": 400, "type": "InvalidKeyException", "message": AUTHORIZATION}
        assert got[name].headers["www-authenticate"] == "Bearer"


@pytest.mark.anyio
async def test_every_method_of_a_route_asks(tokens: Tokens) -> None:
    """A method that the route has not is no way round."""
    app = application(tokens)

    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert (await ask(app, method, "/models/m")).status_code == 400


@pytest.mark.anyio
async def test_the_token_api_renews_for_the_api_key(tmp_path: Path, tokens: Tokens, keys: dict[str, str]) -> None:
    """The new key is in the file, not in the answer."""
    app = application(tokens)

    answer = await ask(app, "GET", "/token?type=inference", keys["API"])
    again = await ask(app, "POST", "/token?type=management", keys["API"])
    refused = await ask(app, "GET", "/token?type=inference", keys["management"])

    renewed = read_keys(tmp_path)
    assert (answer.status_code, again.status_code) == (200, 200)
    assert answer.json()["expires"] == "2026-01-02T04:04:05.000000Z"
    assert renewed["inference"] not in answer.text
    assert {name for name in keys if keys[name] != renewed[name]} == {"inference", "management"}
    assert (refused.status_code, refused.json()["message"]) == (400, AUTHENTICATION)


@pytest.mark.anyio
async def test_what_is_open_to_all_is_these_paths_alone(tokens: Tokens) -> None:
    """The description of the API, also as `OPTIONS /`, and those that the listener names; not what begins like them."""
    app = application(tokens)
    answers = {
        (method, path): (await ask(app, method, path)).status_code
        for method, path in (
            *(("OPTIONS", "/"), ("GET", "/"), ("OPTIONS", "/ping")),
            *(("GET", "/metrics"), ("POST", "/metrics")),
        )
    }

    refused = {asked for asked, status in answers.items() if status == 400}
    assert refused == {("GET", "/"), ("OPTIONS", "/ping")}


@pytest.mark.anyio
async def test_what_is_no_request_over_http_is_passed_on(tokens: Tokens) -> None:
    """The start and the end of an application carry no key."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    await Guard(app, tokens, [], "either", answers_preflight=True)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]

    assert seen == [{"type": "lifespan"}]


@pytest.mark.anyio
@pytest.mark.parametrize("missing", ["Origin", "Access-Control-Request-Method"])
async def test_half_a_preflight_is_none(tokens: Tokens, missing: str) -> None:
    """It needs a key as any other request does; so does one by another method."""
    asks = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    app = application(tokens, answers_preflight=True)

    assert (await ask(app, "GET", "/models/m", **asks)).status_code == 400
    del asks[missing]
    assert (await ask(app, "OPTIONS", "/models/m", **asks)).status_code == 400


@pytest.mark.anyio
async def test_a_browsers_preflight_is_answered_without_a_key_where_cors_is_on(tokens: Tokens) -> None:
    """Browsers never send one with it. It says nothing of models, and opens nothing else."""
    asks = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}

    allowed = await ask(application(tokens, answers_preflight=True), "OPTIONS", "/models/m", **asks)
    plain = await ask(application(tokens, answers_preflight=True), "OPTIONS", "/models/m")
    off = await ask(application(tokens), "OPTIONS", "/models/m", **asks)

    assert (allowed.status_code, allowed.content) == (200, b"")
    assert (plain.status_code, off.status_code) == (400, 400)


# ----------------------------------------------------------------------------------- the short path of inference


@pytest.mark.anyio
async def test_what_a_setting_opened_is_judged_as_where_no_key_is_asked_for(
    tokens: Tokens, keys: dict[str, str]
) -> None:
    """A page cannot send a key, so what needs one is not judged."""
    router, managed = APIRouter(), APIRouter()
    router.add_api_route("/ours", lambda: {"answered": True}, methods=["POST"])
    managed.add_api_route("/models", lambda: {"answered": True}, methods=["POST"])
    routers: list[tuple[APIRouter, Access]] = [(router, "unprotected"), (managed, "management")]
    app = build_app(
        [router, managed],
        title="test",
        guard=lambda inner: Guard(inner, tokens, routers, "management", browser_rules=BrowserRules("http", OwnHosts())),
    )
    evil = {"Host": "localhost", "Origin": "https://evil.example"}

    assert (await ask(app, "POST", "/ours", **evil)).status_code == 403
    assert (await ask(app, "POST", "/ours", Host="evil.example")).status_code == 403
    assert (await ask(app, "POST", "/ours", Host="localhost")).status_code == 200
    assert (await ask(app, "POST", "/models", **evil)).status_code == 400
    assert (await ask(app, "POST", "/models", keys["management"], **evil)).status_code == 200


def post(key: str | None, body: bytes = b"hello") -> bytes:
    """A prediction."""
    line = "" if key is None else f"authorization: Bearer {key}\r\n"
    head = f"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n{line}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.anyio
async def test_predictions_ask_for_the_inference_key(tokens: Tokens, keys: dict[str, str]) -> None:
    """Refused in TorchServe's words before the data plane hears of it; the connection closes."""
    async with listening(tokens=tokens) as listener:
        async with listener.connect() as client:
            response = await client.ask(post(keys["inference"]))
            refusal = await client.ask(post(keys["management"]))
            assert await client.is_at_end()

        assert response.body == b"hello"
        assert refusal.status == 400
        assert json.loads(refusal.body) == {"code": 400, "type": "InvalidKeyException", "message": AUTHORIZATION}
        assert len(listener.plane.submitted) == 1
        assert listener.counts.refused == {"token": 1}
        assert keys["management"] not in "".join(listener.log.lines)


@pytest.mark.anyio
async def test_who_has_no_key_is_refused_before_its_body(tokens: Tokens) -> None:
    """Nothing of it is kept, or even waited for."""
    head = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 6000000\r\n\r\n"
    async with listening(tokens=tokens) as listener, listener.connect() as client:
        refusal = await client.ask(head)

    assert refusal.status == 400


@pytest.mark.anyio
async def test_a_repeated_request_is_let_in_no_longer_than_its_key(
    tokens: Tokens, keys: dict[str, str], clock: Clock
) -> None:
    """A header that was seen before is not read again, but its key is still asked after."""
    async with listening(tokens=tokens) as listener:
        async with listener.connect() as client:
            for _ in range(3):
                assert (await client.ask(post(keys["inference"]))).status == 200
            clock.now += 3600
            assert (await client.ask(post(keys["inference"]))).status == 400
        assert len(listener.plane.submitted) == 3


@pytest.mark.anyio
async def test_a_repeated_request_is_refused_once_its_key_was_renewed(
    tmp_path: Path, tokens: Tokens, keys: dict[str, str]
) -> None:
    """At once, on a connection that is open."""
    async with listening(tokens=tokens) as listener:
        async with listener.connect() as client:
            for _ in range(3):
                assert (await client.ask(post(keys["inference"]))).status == 200
            tokens.renew("inference", f"Bearer {keys['API']}")
            assert (await client.ask(post(keys["inference"]))).status == 400
        async with listener.connect() as client:
            assert (await client.ask(post(read_keys(tmp_path)["inference"]))).status == 200


@pytest.mark.anyio
async def test_requests_sent_ahead_of_a_refusal_are_answered_and_none_after_it(
    tokens: Tokens, keys: dict[str, str]
) -> None:
    """In their order."""
    async with listening(tokens=tokens) as listener, listener.connect() as client:
        await client.send(post(keys["inference"]) + post(None) + post(keys["inference"]))
        statuses = []
        try:
            statuses = [response.status for response in await client.read_all()]
        except Cut:
            pytest.fail("an answer was cut off")

    assert statuses == [200, 400]
    assert len(listener.plane.submitted) == 1


def test_the_word_before_a_key_may_have_any_case_where_that_is_asked_for(tmp_path: Path) -> None:
    """RFC 9110, 11.1; TorchServe takes one spelling, and another word is none in either."""
    both = {any_case: Tokens(tmp_path / "key_file.json", 60, takes_any_case=any_case) for any_case in (False, True)}

    def passes(tokens: Tokens, scheme: str) -> bool:
        try:
            tokens.check("inference", f"{scheme} {tokens.key_of('inference').decode()}")
        except InvalidToken:
            return False
        return True

    spellings = ("Bearer", "bearer", "BEARER", "Basic", "")
    assert [passes(both[False], each) for each in spellings] == [True, False, False, False, False]
    assert [passes(both[True], each) for each in spellings] == [True, True, True, False, False]


def test_the_key_file_is_made_beside_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files may lie on another disk, from which no file can be moved into its place."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no folder"))

    Tokens(tmp_path / "key_file.json", 60.0).write()

    assert [file.name for file in tmp_path.iterdir()] == ["key_file.json"]


def test_a_failure_without_a_text_of_the_system_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that Python raises itself the system knows no sentence."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("no more files")

    monkeypatch.setattr("marserve.files.atomic.Part.__init__", fail)

    with pytest.raises(CannotKeepTokens) as refused:
        Tokens(tmp_path / "key_file.json", 60.0).write()

    assert refused.value.why == "no more files"
    assert "cannot be written (no more files): tokens are on" in str(refused.value)
