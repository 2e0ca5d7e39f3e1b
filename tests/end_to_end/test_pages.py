"""What a browser finds at a server's ports: a page, its data, and with keys only what needs none."""

from __future__ import annotations

import json
from pathlib import Path

from marserve.api.rest.pages.files import DASHBOARD_FILES, FILES
from support.server import Server, free_ports, make_archive
from support.workplace import ECHO


def test_a_page_needs_no_key_and_what_it_shows_of_models_does(tmp_path: Path) -> None:
    """On each port of its own kind; a prediction with the key comes through."""
    make_archive(tmp_path / "echo.mar", ECHO)
    settings = {"disable_token_authorization": "false", "load_models": "echo.mar"}
    with Server(tmp_path, entry="marserve", store=tmp_path, settings=settings) as server:
        keys = {name: each["key"] for name, each in json.loads((tmp_path / "key_file.json").read_text()).items()}
        get = server.client.get
        for base, link in (
            (server.inference, "predictions"),
            (server.management, "models"),
            (server.metrics, "metrics"),
        ):
            card = get(base).json()
            assert (card["name"], card["status"]) == ("marserve", "alive")
            assert link in card["links"]
            assert {get(f"{base}{path}").status_code for path in FILES} == {200}
            assert get(f"{base}/", headers={"accept": "text/html"}).headers["content-type"].startswith("text/html")
            assert "/openapi.json" in get(f"{base}{card['links']['openapi']}").json()["paths"]
        assert {get(f"{server.management}{path}").status_code for path in DASHBOARD_FILES} == {200}
        assert {get(f"{server.inference}{path}").status_code for path in DASHBOARD_FILES} == {401}
        offers = f"{server.inference}/docs/models"
        without, wrong, management = (
            get(offers, headers=headers)
            for headers in ({}, {"authorization": "Bearer x"}, {"authorization": f"Bearer {keys['management']}"})
        )
        right = {"authorization": f"Bearer {keys['inference']}"}
        names = get(offers, headers=right).json()
        versions = get(f"{offers}/echo/versions", headers=right).json()
        answer = server.client.post(f"{server.inference}/predictions/echo", content=b"x", headers=right)
        on_management = get(
            f"{server.management}/docs/models", headers={"authorization": f"Bearer {keys['management']}"}
        )

    assert {each.json()["type"] for each in (without, wrong, management)} == {"InvalidKeyException"}
    assert [each["name"] for each in names["models"]] == ["echo"]
    assert versions["versions"][0]["expects"] == "anything"
    assert answer.content == b"x"
    assert on_management.status_code == 404


def test_torchserve_answers_as_recorded_unless_the_setting_says_otherwise(tmp_path: Path) -> None:
    """405 and 404; with `enable_docs` the pages."""
    with Server(tmp_path) as server:
        recorded = [
            server.client.get(f"{server.inference}{path}").status_code for path in ("/", "/docs", "/openapi.json")
        ]
    (tmp_path / "on").mkdir()
    with Server(tmp_path / "on", settings={"enable_docs": "true"}) as server:
        switched_on = [
            server.client.get(f"{server.inference}{path}").status_code for path in ("/", "/docs", "/openapi.json")
        ]
        dashboard = server.client.get(f"{server.management}/dashboard").status_code

    assert recorded == [405, 404, 404]
    assert switched_on == [200, 200, 200]
    assert dashboard == 404


def test_one_address_for_all_apis_has_the_dashboard_at_its_root(tmp_path: Path) -> None:
    """For browsers; the page of all routes is beside it, and so is what each of them gets of models."""
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    settings = dict.fromkeys(("inference_address", "management_address", "metrics_address"), address)
    server = Server(tmp_path, entry="marserve", settings=settings)
    server.inference = address
    with server:
        root, dashboard, docs = (
            server.client.get(f"{address}{path}", headers={"accept": "text/html"})
            for path in ("/", "/dashboard", "/docs")
        )
        links = server.client.get(address).json()["links"]
        data = [server.client.get(f"{address}{path}").status_code for path in ("/stats", "/docs/models")]

    assert root.content == dashboard.content != docs.content
    assert {"dashboard", "docs", "metrics", "predictions", "models"} <= set(links)
    assert data == [200, 200]
