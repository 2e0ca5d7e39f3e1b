"""Who is let in, for real: keys, TLS and cross-origin headers, as a client and an operator meet them."""

from __future__ import annotations

import json
import re
import ssl
import stat
from pathlib import Path

import httpx
import pytest
import trustme

from marserve.api.tls import make_up_identity
from support.server import Server, make_archive
from support.workplace import ECHO, Workplace

TOKENS_ON = {"disable_token_authorization": "false"}


def keys_of(folder: Path) -> dict[str, str]:
    """What stands in the key file."""
    return {name: entry["key"] for name, entry in json.loads((folder / "key_file.json").read_text()).items()}


def bearer(key: str) -> dict[str, str]:
    """The header."""
    return {"Authorization": f"Bearer {key}"}


def test_every_listener_asks_for_its_key_and_the_file_goes_with_the_server(tmp_path: Path) -> None:
    """Health probes and metrics ask for none; no key is in any log."""
    make_archive(tmp_path / "echo.mar", ECHO)
    with Server(tmp_path, store=tmp_path, settings=TOKENS_ON) as server:
        keys = keys_of(tmp_path)
        assert stat.S_IMODE((tmp_path / "key_file.json").stat().st_mode) == 0o600

        assert server.register("echo.mar").status_code == 400
        server.client.headers = httpx.Headers(bearer(keys["management"]))
        assert server.register("echo.mar").status_code == 200
        assert server.predict("echo", b"x").status_code == 400
        server.client.headers = httpx.Headers(bearer(keys["inference"]))
        assert server.predict("echo", b"x").content == b"x"
        assert server.client.get(f"{server.inference}/ping").status_code == 200

        server.client.headers = httpx.Headers(bearer(keys["API"]))
        assert server.client.get(f"{server.management}/token?type=inference").status_code == 200
        renewed = keys_of(tmp_path)
        assert server.predict("echo", b"x", **bearer(keys["inference"])).status_code == 400
        assert server.predict("echo", b"x", **bearer(renewed["inference"])).status_code == 200

        server.client.headers = httpx.Headers()
        assert server.client.get(f"{server.inference}/ping").status_code == 400
        for address in (server.inference, server.management):
            assert server.client.get(f"{address}/readyz").status_code == 200
        assert server.client.get(f"{server.metrics}/metrics").status_code == 200
        written = server.output() + "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log"))

    assert not [key for key in (*keys.values(), *renewed.values()) if key in written]
    assert not (tmp_path / "key_file.json").exists()


# What needs no key, as the API's description has it.
OPEN = {"/", "/api-description", "/livez", "/readyz", "/startupz", "/metrics"}
FILLED = {"model_name": "m", "model_version": "1.0", "order": "pause"}


@pytest.mark.parametrize("kind", ["inference", "management"])
def test_no_route_that_the_api_describes_answers_without_its_key(tmp_path: Path, kind: str) -> None:
    """The table of routes is the server's own, so that a new one cannot be forgotten."""
    make_archive(tmp_path / "m.mar", ECHO)
    with Server(tmp_path, store=tmp_path, settings=TOKENS_ON | {"load_models": "m.mar"}) as server:
        keys = keys_of(tmp_path)
        base = {"inference": server.inference, "management": server.management}[kind]
        described = server.client.options(base).json()["paths"]
        let_in, refused = set(), set()
        for path, methods in described.items():
            if path in OPEN or path == "/token":
                continue
            url = base + re.sub(r"\{(\w+)\}", lambda part: FILLED.get(part[1], "x"), path)
            for method in methods:
                for name, key in {**keys, "wrong": "wrong", "none": None}.items():
                    if name == kind:
                        continue  # what it does with the right key is not asked here
                    answer = server.client.request(method, url, headers=bearer(key) if key else {})
                    is_refused = answer.status_code == 400 and answer.json()["type"] == "InvalidKeyException"
                    (refused if is_refused else let_in).add((method, path, name))

    assert not let_in
    assert len(refused) >= 4 * 5


def test_one_address_for_both_asks_each_route_for_its_own_key(tmp_path: Path) -> None:
    """TorchServe asks for both keys in one header, which nobody can send."""
    make_archive(tmp_path / "echo.mar", ECHO)
    server = Server(tmp_path, store=tmp_path, settings={**TOKENS_ON, "allow_open_ping": "true"})
    server._settings["management_address"] = server.inference
    server.management = server.inference
    with server:
        keys = keys_of(tmp_path)
        server.client.headers = httpx.Headers(bearer(keys["management"]))
        assert server.register("echo.mar").status_code == 200
        assert server.client.get(f"{server.inference}/models/echo/1.0").status_code == 200
        assert server.predict("echo", b"x").status_code == 400
        server.client.headers = httpx.Headers(bearer(keys["inference"]))
        assert server.predict("echo", b"x").status_code == 200
        assert server.client.get(f"{server.inference}/models").status_code == 400
        server.client.headers = httpx.Headers()
        assert server.client.get(f"{server.inference}/ping").status_code == 200


def test_a_folder_that_cannot_hold_the_keys_keeps_the_server_from_starting(tmp_path: Path) -> None:
    """It says which setting helps."""
    with Workplace(tmp_path) as place:
        place.configure(disable_token_authorization="false", token_file="no/such/folder/keys.json")

        done = place.torchserve("--start", "--foreground", "--ncs")

    assert done.returncode == 1
    assert "name another place with token_file" in done.stderr


@pytest.mark.system
def test_the_commands_find_the_keys_of_their_folder(tmp_path: Path) -> None:
    """From the start in the background to the stop, without a word about tokens."""
    with Workplace(tmp_path) as place:
        place.configure(disable_token_authorization="false", load_models="all")
        place.add_echo()

        started = place.marserve("start")
        listed = place.marserve("models")
        refused = place.marserve("models", MARSERVE_TOKEN="wrong")
        stopped = place.marserve("stop")
        place.wait_until_gone()

    assert started.returncode == 0, started.stderr
    assert "echo" in listed.stdout
    assert refused.returncode == 1
    assert "MARSERVE_TOKEN" in refused.stderr
    assert stopped.returncode == 0


@pytest.mark.system
def test_https_with_a_certificate_of_ones_own_is_trusted_by_who_trusts_it(tmp_path: Path) -> None:
    """On all three addresses."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    client = ssl.create_default_context()
    authority.configure_trust(client)
    make_archive(tmp_path / "echo.mar", ECHO)
    files = {"certificate_file": "cert.pem", "private_key_file": "key.pem"}

    with Server(tmp_path, store=tmp_path, settings=files, tls=client) as server:
        assert server.register("echo.mar").status_code == 200
        assert server.predict("echo", b"x" * 100_000).content == b"x" * 100_000
        assert server.client.get(f"{server.metrics}/metrics").status_code == 200
        plain = server.inference.replace("https", "http")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{plain}/ping")


@pytest.mark.system
def test_the_commands_trust_the_certificate_of_their_folders_settings(tmp_path: Path) -> None:
    """Nobody certified it, and it is for another host: it is the server's own all the same."""
    identity = make_up_identity(["models.example.org"])
    (tmp_path / "cert.pem").write_bytes(identity.chain_pem)
    (tmp_path / "key.pem").write_bytes(identity.key_pem)
    with Workplace(tmp_path) as place:
        place.configure(
            inference_address=place.inference.replace("http", "https"),
            management_address=place.management.replace("http", "https"),
            certificate_file="cert.pem",
            private_key_file="key.pem",
        )

        started = place.marserve("start")
        listed = place.marserve("models")
        stopped = place.marserve("stop")
        place.wait_until_gone()

    assert (started.returncode, listed.returncode, stopped.returncode) == (0, 0, 0), started.stderr + listed.stderr


def test_https_without_a_certificate_has_one_made_up(tmp_path: Path) -> None:
    """Who looks away may call; the log says that nobody can check it."""
    nobody_checks = ssl.create_default_context()
    nobody_checks.check_hostname = False
    nobody_checks.verify_mode = ssl.CERT_NONE

    with Server(tmp_path, tls=nobody_checks) as server:
        assert server.client.get(f"{server.inference}/ping").json() == {"status": "Healthy"}
        assert "one is made up at each start" in server.output()


@pytest.mark.parametrize("tokens", ["off", "on"])
def test_browsers_are_told_what_they_may_do(tmp_path: Path, tokens: str) -> None:
    """With every answer of every listener, errors too; and before they send a key."""
    make_archive(tmp_path / "echo.mar", ECHO)
    settings = {
        "cors_allowed_origin": "https://example.org",
        "cors_allowed_methods": "GET, POST",
        "cors_allowed_headers": "Authorization",
        "load_models": "echo.mar",
        "disable_token_authorization": "false" if tokens == "on" else "true",
    }
    told = {
        "access-control-allow-origin": "https://example.org",
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "Authorization",
    }
    with Server(tmp_path, store=tmp_path, settings=settings) as server:
        preflight = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        asked = server.client.options(f"{server.inference}/predictions/echo", headers=preflight)
        if tokens == "on":
            server.client.headers = httpx.Headers(bearer(keys_of(tmp_path)["inference"]))
        answers = [
            asked,
            server.predict("echo", b"x"),
            server.predict("nobody", b"x"),
            server.client.get(f"{server.inference}/ping"),
            server.client.get(f"{server.management}/nosuch"),
            server.client.get(f"{server.metrics}/metrics"),
        ]

    assert [answer.status_code for answer in answers] == [200, 200, 404, 200, 404 if tokens == "off" else 400, 200]
    for answer in answers:
        assert {name: answer.headers[name] for name in told} == told


@pytest.mark.parametrize("entry", ["marserve", "torchserve"])
def test_each_route_that_exists_answers_a_browsers_preflight(tmp_path: Path, entry: str) -> None:
    """Without keys; `marserve` sends the one of several origins that asks, `torchserve` the setting as it stands."""
    settings = {
        "cors_allowed_origin": "https://one.example, https://two.example",
        "disable_token_authorization": "true",
        "enable_model_api": "true",
    }
    paths = {
        "management": [
            *("/models", "/models/m", "/models/m/1.0", "/models/m/traffic", "/workflows", "/workflows/w"),
            *("/downloads", "/watches", "/desired-state"),
        ],
        "inference": [
            "/predictions/m",
            "/explanations/m",
            "/invocations",
            "/m/predict",
            "/v1/models/m:predict",
            "/ping",
        ],
        "metrics": ["/metrics"],
    }
    with Server(tmp_path, settings=settings, entry=entry) as server:

        def ask(listener: str, path: str, origin: str = "https://two.example") -> httpx.Response:
            asks = {"Origin": origin, "Access-Control-Request-Method": "PUT"}
            return server.client.options(f"{getattr(server, listener)}{path}", headers=asks)

        answers = {path: ask(listener, path) for listener, known in paths.items() for path in known}
        unknown = [ask(listener, "/no/such/route").status_code for listener in paths]
        foreign = ask("management", "/models", "https://other.example")
        plain = server.client.options(f"{server.management}/models")
        listed = server.client.get(f"{server.management}/models", headers={"Origin": "https://one.example"})

    refused = {path for path, answer in answers.items() if answer.status_code != 200}
    origins = {answer.headers["access-control-allow-origin"] for answer in answers.values()}
    assert refused == set()
    assert unknown == [404] * 3
    assert plain.status_code == 405
    if entry == "torchserve":
        assert origins == {settings["cors_allowed_origin"]}
        assert "vary" not in listed.headers
    else:
        assert origins == {"https://two.example"}
        assert listed.headers["access-control-allow-origin"] == "https://one.example"
        assert (listed.headers["vary"], foreign.headers["vary"]) == ("Origin", "Origin")
        assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize("entry", ["marserve", "torchserve"])
def test_no_page_of_another_site_manages_a_server_without_keys(tmp_path: Path, entry: str) -> None:
    """Neither by a form it sends nor by leading its own name here; what is no browser, and health, are as ever."""
    make_archive(tmp_path / "echo.mar", ECHO)
    settings = {"cors_allowed_origin": "https://ui.example", "disable_token_authorization": "true"}
    origins = [None, "https://ui.example", "https://evil.example", "null"]
    with Server(tmp_path, entry=entry, store=tmp_path, settings=settings) as server:
        own = server.management.removeprefix("http://")

        def ask(address: str, method: str = "GET", **headers: str | None) -> httpx.Response:
            told = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
            return server.client.request(method, address, headers=told)

        posts = f"{server.management}/models?url=echo.mar&initial_workers=1&synchronous=true"
        refused = [ask(posts, "POST", Origin=each) for each in origins[2:]]
        refused.append(ask(posts, "POST", Sec_Fetch_Site="cross-site"))
        rebound = ask(f"{server.management}/models", Host="evil.example")
        untouched = ask(f"{server.management}/models").json()
        taken = [ask(posts, "POST", Origin=each).status_code for each in (*origins[:2], f"http://{own}")]
        predictions = [ask(f"{server.inference}/predictions/echo", "POST", Origin=each) for each in origins]
        host = ask(f"{server.inference}/predictions/echo", "POST", Host="evil.example").status_code
        health = [
            ask(f"{address}{path}", Host="evil.example", Origin="https://evil.example").status_code
            for address in (server.inference, server.management)
            for path in ("/livez", "/readyz", "/startupz")
        ]
        health.append(ask(f"{server.inference}/ping", "POST", Host="evil.example", Origin="null").status_code)
        health.append(ask(f"{server.metrics}/metrics", Host="evil.example").status_code)

    assert [each.status_code for each in refused] == [403] * 3
    assert all("cors_allowed_origin" in each.json()["message"] for each in refused)
    assert rebound.status_code == 403
    assert "allowed_hosts" in rebound.json()["message"]
    assert untouched == {"models": []}
    assert taken == [200, 409, 409]
    assert [each.status_code for each in predictions] == [200, 200, 403, 403]
    assert host == (403 if entry == "marserve" else 200)
    assert health == [200] * 8
