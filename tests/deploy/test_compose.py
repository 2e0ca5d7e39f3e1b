"""`docker/compose.yaml` and what it mounts: right by the schema, each service behind the health of the one before."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import check_jsonschema
import httpx
import jsonschema
import pytest

import marserve
from support.container import Container, Running
from support.manifests import KUBERNETES, Refused, documents, judge
from support.object_stores import Bucket, S3Server
from support.pages import ROOT
from support.server import free_ports, make_archive, poll

FOLDER = ROOT / "docker"
FILE = FOLDER / "compose.yaml"

# Tells what it was asked, and takes a fifth of a second for it, so that requests beside it wait.
SLOW_ECHO = """
import os, time
def handle(data, context):
    time.sleep(0.2 if data else 0)
    hidden = b"hidden" if "AWS_SECRET_ACCESS_KEY" not in os.environ else b"seen"
    return [hidden + bytes(row.get("body") or row.get("data")) for row in data or []]
"""


def compose() -> dict[str, Any]:
    """The file, before variables count."""
    [document] = documents(FILE.read_text())
    return document


def example_variables() -> dict[str, str]:
    """What the example of an environment file says."""
    lines = (FOLDER / "compose/example.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """As compose does: `${NAME:?…}` is the variable, which must be there and not empty, `$$` a dollar."""
    if isinstance(value, dict):
        return {key: interpolate(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolate(each, variables) for each in value]
    if not isinstance(value, str):
        return value

    def meaning(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        assert variables.get(found[1]), f"{found[1]} is not set"
        return variables[found[1]]

    return re.sub(r"\$\$|\$\{(\w+):\?[^}]*\}", meaning, value)


def effective() -> dict[str, Any]:
    """The file with the example's variables."""
    found = interpolate(compose(), example_variables())
    assert "${" not in json.dumps(found)
    return found


def judge_compose(document: dict[str, Any]) -> None:
    """Judge by the schema of the Compose Specification. Raises Refused."""
    place = Path(check_jsonschema.__file__).parent / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(place.read_text())
    errors = jsonschema.validators.validator_for(schema)(schema).iter_errors(document)
    for error in errors:
        raise Refused(f"{'.'.join(map(str, error.path))}: {error.message}")


# -------------------------------------------------------------------------------------------------------- the file


def test_the_file_is_right_by_the_specifications_schema() -> None:
    """Before and after variables count."""
    judge_compose(compose())
    judge_compose(effective())


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file["services"]["server"].update(helthcheck={}),
        lambda file: file["services"]["server"]["healthcheck"].update(retries=[]),
        lambda file: file["services"]["server"]["depends_on"]["models"].update(condition="service_helthy"),
        lambda file: file["services"]["store"].update(ports=8080),
        lambda file: file.update(servces={}),
    ],
)
def test_a_planted_mistake_is_found(change: Any) -> None:
    """So the test above can fail."""
    document = copy.deepcopy(compose())
    change(document)

    with pytest.raises(Refused):
        judge_compose(document)


def test_each_service_waits_for_the_health_of_the_one_it_needs() -> None:
    """Store, models, server, Prometheus, Grafana: one after the other."""
    services = compose()["services"]
    needs = {name: service.get("depends_on", {}) for name, service in services.items()}

    assert {name: list(each) for name, each in needs.items()} == {
        "store": [],
        "models": ["store"],
        "server": ["models"],
        "prometheus": ["server"],
        "grafana": ["prometheus"],
    }
    for each in needs.values():
        for name, how in each.items():
            has_health = "healthcheck" in services[name]
            assert how["condition"] == ("service_healthy" if has_health else "service_completed_successfully")
    assert [name for name, service in services.items() if "healthcheck" not in service] == ["models"]


def test_images_are_pinned_and_ours_is_this_version() -> None:
    """By a tag that stays."""
    images = {name: service["image"] for name, service in compose()["services"].items()}

    assert images["server"] == f"marserve:{marserve.__version__}-cpu"
    assert all(re.search(r":(v?\d+\.\d+\.\d+|RELEASE\.[\dTZ-]+)(-cpu)?$", image) for image in images.values())


def test_secrets_come_from_the_environment_and_the_example_names_them_all() -> None:
    """Not one is in the file, and git ignores the copy of the example."""
    text = FILE.read_text()
    asked = set(re.findall(r"\$\{(\w+)", text))

    assert asked == set(example_variables())
    for service in compose()["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|KEY|ADMIN", name):
                assert re.fullmatch(r"\$\{\w+:\?[^}]*\}", value), name
    assert not any(value in text for value in example_variables().values() if len(value) > 10)
    assert "/docker/.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_ports_are_published_on_this_machine_alone_and_management_is_not() -> None:
    """A demonstration must not open a laptop to its network."""
    services = compose()["services"]
    published = [port for service in services.values() for port in service.get("ports", [])]

    assert all(port.startswith("127.0.0.1:") for port in published)
    assert not any(port.endswith((":8081", ":7071")) for port in published)


def test_what_is_mounted_is_there_and_the_server_can_write_nothing_else() -> None:
    """A missing file would become a folder, made by the engine."""
    services = compose()["services"]
    for service in services.values():
        for mount in service.get("volumes", []):
            source, _, _ = mount.partition(":")
            if source.startswith("."):
                assert (FOLDER / source).exists(), mount
                assert mount.endswith(":ro"), mount
            else:
                assert source in compose()["volumes"]
    server = services["server"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert (ROOT / server["build"]["dockerfile"]).is_file()


def test_grafanas_data_source_is_right_and_is_the_prometheus_beside_it() -> None:
    """Its provisioning is refused as a whole where a key is wrong."""
    [document] = documents((FOLDER / "compose/grafana-datasources.yml").read_text())
    judge(document, "grafana-datasources")

    assert [source["url"] for source in document["datasources"]] == ["http://prometheus:9090"]
    document["datasources"][0]["datasource"] = "prometheus"
    with pytest.raises(Refused):
        judge(document, "grafana-datasources")


# --------------------------------------------------------------------------------------------------- what it starts


@pytest.mark.parametrize("is_again", [False, True], ids=["first", "again"])
def test_the_bucket_is_filled_by_commands_that_can_run_twice(tmp_path: Path, is_again: bool) -> None:
    """The shell's part, with a program in the place of MinIO's own that refuses what MinIO would refuse."""
    service = effective()["services"]["models"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "model_store").mkdir()
    (tmp_path / "model_store/digits.mar").write_bytes(b"")
    refuses = 'case "$*" in *"policy attach"*) exit 1;; esac\n' if is_again else ""
    program = tmp_path / "bin/mc"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/asked"\n{refuses}')
    program.chmod(0o755)
    script = service["command"][0].replace("/model_store", str(tmp_path / "model_store"))

    run = subprocess.run(
        [*service["entrypoint"], script],
        env={**service["environment"], "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )

    variables = example_variables()
    assert run.returncode == 0, run.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:4] == [
        f"alias set store http://store:9000 {variables['STORE_ADMIN']} {variables['STORE_ADMIN_PASSWORD']}",
        "mb --ignore-existing store/models",
        f"cp {tmp_path}/model_store/digits.mar store/models/",
        f"admin user add store {variables['STORE_KEY']} {variables['STORE_SECRET']}",
    ]
    assert asked[4] == f"admin policy attach store readonly --user {variables['STORE_KEY']}"
    assert asked[5:] == ([f"admin user info store {variables['STORE_KEY']}"] if is_again else [])


@pytest.fixture
def stand(tmp_path: Path, s3: S3Server) -> Container:
    """The server's container, with the stand-in for S3 in the store's place."""
    container = Container(tmp_path / "server")
    text = (FOLDER / "compose/config.properties").read_text().replace("http://store:9000", s3.url)
    container.write("/home/model-server/config/config.properties", text)
    archive = make_archive(tmp_path / "digits.mar", SLOW_ECHO, config="minWorkers: 1\nmaxWorkers: 1\n")
    bucket = Bucket(s3.url, "models")
    assert httpx.put(f"{s3.url}/models").status_code in (200, 409)
    bucket.put("digits.mar", archive.read_bytes())
    return container


@pytest.mark.system
def test_the_server_takes_its_model_from_the_store_and_prometheus_its_metrics_from_the_server(
    stand: Container, tmp_path: Path
) -> None:
    """Its health check holds, handlers see no key, and the autoscalers' queries tell how long requests waited."""
    service = effective()["services"]["server"]
    prometheus_file = (FOLDER / "compose/prometheus.yml").read_text()
    assert "server:8082" in prometheus_file

    with stand.running(service["command"], service["environment"]) as running:
        running.wait_until(8080, "/readyz")
        health = subprocess.run(
            stand.here(service["healthcheck"]["test"][1:]),
            env=stand.environment(service["environment"]),
            cwd=stand.path("/home/model-server"),
            timeout=20,
            check=False,
        )
        answer = httpx.post(stand.url(8080, "/predictions/digits"), content=b"7", timeout=30)
        page = running.get(8082, "/metrics").text
        if shutil.which("prometheus") is not None:
            waited = waits_by_prometheus(running, tmp_path, prometheus_file)

    assert health.returncode == 0
    assert answer.content == b"hidden7"
    names = set(re.findall(r"\bmarserve_\w+", " ".join([series(), *queries()])))
    assert names == {"marserve_request_seconds_sum", "marserve_request_seconds_count"}
    for name in names:
        assert re.search(rf'^{name}{{model="digits",[^}}]*stage="queue"[^}}]*}} ', page, re.MULTILINE), name
    assert "`marserve_request_seconds`" in (ROOT / "docs/metrics.md").read_text()
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: that it understands the queries was not tried")
    assert all(0.1 < each < 2 for each in waited), waited


def queries() -> list[str]:
    """What the autoscalers ask Prometheus: KEDA as it stands, the adapter with what it fills in."""
    [scaled] = documents((KUBERNETES / "components/keda/scaled-object.yaml").read_text())
    [adapter] = documents((KUBERNETES / "components/hpa/prometheus-adapter-rule.yaml").read_text())
    [rule] = adapter["rules"]
    filled = rule["metricsQuery"].replace("<<.GroupBy>>", "pod")
    return [
        scaled["spec"]["triggers"][0]["metadata"]["query"],
        filled.replace("<<.LabelMatchers>>", 'namespace="marserve",pod=~"one|two"'),
    ]


def series() -> str:
    """By which series the adapter finds out which pods have the metric."""
    [adapter] = documents((KUBERNETES / "components/hpa/prometheus-adapter-rule.yaml").read_text())
    return str(adapter["rules"][0]["seriesQuery"])


def waits_by_prometheus(running: Running, folder: Path, text: str) -> list[float]:
    """What a real Prometheus answers to the queries, once it has looked often enough at a server with a queue."""
    [port] = free_ports(1)
    metrics = running.container.url(8082).removeprefix("http://")
    labels = "\n        labels: {namespace: marserve, pod: one}"
    text = text.replace("[server:8082]", f"[{metrics}]{labels}").replace("5s", "250ms")
    (folder / "prometheus.yml").write_text(text)
    base = f"http://127.0.0.1:{port}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/prometheus",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )

    def ask(query: str) -> list[Any]:
        answer = httpx.get(f"{base}/api/v1/query", params={"query": query}, timeout=10)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"]["result"])

    try:
        ready = compose()["services"]["prometheus"]["healthcheck"]["test"][-1].replace("http://127.0.0.1:9090", base)
        for _ in poll(30, "Prometheus is ready"):
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            try:
                if httpx.get(ready).status_code == 200 and ask("up == 1"):
                    break
            except httpx.TransportError:
                continue
        with ThreadPoolExecutor(4) as pool:
            url = running.container.url(8080, "/predictions/digits")
            for _ in poll(30, "the queries have answers"):
                for each in [pool.submit(httpx.post, url, content=b"x", timeout=30) for _ in range(4)]:
                    assert each.result().status_code == 200
                answers = [ask(query) for query in queries()]
                if all(answers) and all(float(each[0]["value"][1]) > 0.1 for each in answers):
                    [found] = ask(series())
                    assert (found["metric"]["namespace"], found["metric"]["pod"]) == ("marserve", "one")
                    return [float(each[0]["value"][1]) for each in answers]
        raise AssertionError
    finally:
        process.terminate()
        process.wait(20)


def test_prometheus_takes_its_file() -> None:
    """By its own judgement."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: Prometheus' file was not judged by it")
    run = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", str(FOLDER / "compose/prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_the_server_has_the_time_that_its_end_may_take() -> None:
    """The engine kills at the end of its patience."""
    text = (FOLDER / "compose/config.properties").read_text()
    delay, timeout = (float(re.search(rf"^drain_{key}=(\d+)$", text, re.MULTILINE)[1]) for key in ("delay", "timeout"))
    patience = compose()["services"]["server"]["stop_grace_period"]

    assert delay + timeout + 15 <= float(patience.removesuffix("s"))
