"""Plays what a real TorchServe answered to management calls against ours, over pools without processes.

What only a worker can answer is left to the player that starts whole servers; here every status, type, message and
member that the registry and the management API decide is compared, in a second.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.api.rest.application import build_app
from marserve.api.rest.description import description_router
from marserve.api.rest.platforms.metrics import metrics_router
from marserve.settings import load_settings
from marserve.telemetry.metrics.server_metrics import Metrics
from support.fake_pool import Behaviour
from support.management_house import House, client_of
from support.metric_pages import scrapes_of

CONTRACT = Path(__file__).resolve().parents[3] / "shared" / "contract"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.shared,
    pytest.mark.skipif(not CONTRACT.is_dir(), reason="the recorded contract is not beside the checkout"),
]

# Models whose workers fail to load, as their handlers do; and one whose handler describes itself.
_BEHAVIOURS = {
    "broken_init": Behaviour(load="fail"),
    "broken_init_cfg": Behaviour(load="fail"),
    "bic": Behaviour(load="fail"),
    "func_unknown": Behaviour(load="fail"),
    "oom_init": Behaviour(load="memory"),
    "metadata": Behaviour(
        metadata=b'{"inputs": ["pixels"], "outputs": ["digit"], "author": "contract kit"}',
    ),
}
_MASKED = ("startTime", "memoryUsage", "pid", "gpuUsage", "id")


@pytest.fixture(scope="session")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archives of the recordings, those of tensors left out."""
    folder = tmp_path_factory.mktemp("fixtures")
    made = [sys.executable, str(CONTRACT / "fixtures" / "make_fixtures.py"), str(folder), "--no-torch"]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    return folder


def fill_store(house: House, fixtures: Path, names: list[str]) -> None:
    """Put the recording's archives into the store."""
    for name in names:
        if (fixtures / name).is_dir():
            shutil.copytree(fixtures / name, house.store / name)
        elif (fixtures / name).exists():
            shutil.copy(fixtures / name, house.store / name)


def settings_of(server: dict[str, Any]) -> dict[str, Any]:
    """The registry's options that the recording's configuration means."""
    config = server.get("config", {})
    workers = int(config.get("default_workers_per_model", 0))
    return {
        "workers_by_api": workers,
        "workers_at_startup": workers or 1,
        "models": read("models", config.get("models", "")),
    }


def load_models_of(server: dict[str, Any]) -> Any:
    """What the recording's server loads at start."""
    args = server.get("args", [])
    if "--models" in args:
        return read("load_models", ",".join(args[args.index("--models") + 1 :]))
    return read("load_models", str(server.get("config", {}).get("load_models", "")))


def read(name: str, text: str) -> Any:
    """A setting's value, as the server reads it."""
    flags = {name: text, "disable_token_authorization": "true", "model_store": str(CONTRACT)}
    return getattr(load_settings("torchserve", flags, {}, CONTRACT), name)


def differences(want: Any, got: Any, place: str = "") -> list[str]:
    """Where an answer is not as recorded. Objects that describe something may say more."""
    if isinstance(want, dict) and isinstance(got, dict):
        if "openapi" in want:
            return [] if str(got.get("openapi")).startswith("3.") else [f"{place}: no description"]
        found = [f"{place}.{key}: missing" for key in want if key not in got]
        for key in want.keys() & got.keys():
            if key not in _MASKED:
                found += differences(want[key], got[key], f"{place}.{key}")
        if not {"modelVersion", "startTime"} & set(want):
            found += [f"{place}.{key}: unexpected" for key in got if key not in want]
        return found
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        return [each for i in range(len(want)) for each in differences(want[i], got[i], f"{place}[{i}]")]
    return [] if want == got else [f"{place}: want {want!r}, got {got!r}"]


async def ask(client: httpx.AsyncClient, case: dict[str, Any], house: House) -> httpx.Response:
    """Send the case's request."""
    body = case.get("body", {})
    content = json.dumps(body["json"]) if "json" in body else body.get("text")
    headers = {"content-type": "application/json"} if "json" in body else {}
    path = case["path"].replace("{store}", str(house.store))
    return await client.request(case["method"], path, content=content, headers=headers | case.get("headers", {}))


def judge(case: dict[str, Any], expect: dict[str, Any], response: httpx.Response) -> list[str]:
    """What is wrong with an answer; doing better than a quirk is not."""
    found = [] if response.status_code == expect["status"] else [f"status {response.status_code}"]
    body = expect.get("body") or {}
    if "json" in body:
        found += differences(body["json"], response.json())
        if response.content != json.dumps(response.json(), indent=2, ensure_ascii=False).encode() + b"\n":
            found.append("layout")
    if "quirk" in case or "unstable" in case:
        return [] if response.status_code < 500 or expect["status"] >= 500 else found
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("management_register", "management_lifecycle", "health", "model_control_off", "startup_models"),
        *("startup_models_json", "startup_missing_model", "startup_named", "inference_basics", "kserve_v1"),
    ],
)
async def test_management_answers_as_recorded(tmp_path: Path, fixtures: Path, name: str) -> None:
    """Every case of the recording that needs no worker's answer, in its order, on one server."""
    document = json.loads((CONTRACT / "recorded" / f"{name}.json").read_text())
    server = document["server"]
    house = House(tmp_path, unregister_timeout_s=0.2, **settings_of(server))
    house.pools.behaviours |= {model: Behaviour(**vars(each)) for model, each in _BEHAVIOURS.items()}
    fill_store(house, fixtures, server.get("store", []))
    await house.registry.load_at_start(load_models_of(server))
    has_model_api = server.get("config", {}).get("enable_model_api") == "true"
    metrics = build_app(
        [description_router(house.registry), metrics_router(scrapes_of(Metrics("host")))], title="metrics"
    )
    applications = {
        "management": house.application(enable_model_api=has_model_api),
        "inference": house.application(management=False, inference=True),
        "metrics": metrics,
    }
    wrong: dict[str, list[str]] = {}
    played = 0

    for case in document["cases"]:
        request = case["request"] if case.get("do") == "poll" else case
        if case.get("do", "poll") != "poll" or "path" not in request or needs_worker(request):
            continue
        expect = case["expect"].get("last", case["expect"])
        async with client_of(applications[request["to"]]) as client:
            response = await ask(client, request, house)
        played += 1
        if found := judge(case, expect, response):
            wrong[case["id"]] = found

    assert wrong == {}
    assert played
    await house.registry.stop()
    assert house.folders() == []


def needs_worker(request: dict[str, Any]) -> bool:
    """Whether this is an inference request, which the connection takes before any application sees it."""
    first = request["path"].split("?")[0].split("/")[1]
    return request["to"] == "inference" and request["method"] != "OPTIONS" and first not in ("", "ping", "PING")
