"""A document decides which models a real server has: who wins, plan, apply, undo, edits, kills, adopted calls."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml

from marserve.api.grpc.schema import MANAGEMENT, Schema
from marserve.desired_state.document import read
from support.file_server import file_server, whole
from support.load_beside import LoadBeside
from support.object_stores import S3Server
from support.open_loop import count_by_status
from support.prepared import run
from support.processes import left_of
from support.server import Server, make_archive, poll

SCHEMA = Schema()
# Answers with its version; `SLOW` makes loading take as long as the environment says.
ECHO = """
import time

class Handler:
    def initialize(self, context):
        time.sleep({slow})
        self.version = context.manifest["model"]["modelVersion"]

    def handle(self, data, context):
        return [self.version.encode()] * len(data)
"""


class Declared(Server):
    """A server with a document, in a folder of its own; it may be killed and started again."""

    def __init__(
        self, folder: Path, text: str, *, environment: Mapping[str, str] | None = None, **settings: str
    ) -> None:
        self.document = folder / "models.yaml"
        self.address = ""
        super().__init__(
            folder,
            entry="marserve",
            arguments=["--desired-state", "models.yaml"],
            settings={"log_location": str(folder / "logs"), "desired_state_interval": "0.1", **settings},
            environment=environment,
        )
        self.document.write_text(text)
        for version in ("1.0", "2.0", "3.0"):
            for name in ("m", "n"):
                make_archive(self.store / f"{name}-{version}.mar", ECHO.format(slow=0), name=name, version=version)
        make_archive(self.store / "slow.mar", ECHO.format(slow=2), name="slow")
        make_archive(self.store / "bad.mar", "raise RuntimeError('no weights')", name="bad")
        (self.store / "cut.mar").write_bytes((self.store / "m-1.0.mar").read_bytes()[:-30])

    def command(self) -> list[str]:
        """What is run; with `address` the document lies there."""
        return [self.address if word == "models.yaml" and self.address else word for word in super().command()]

    def wait_until_ready(self) -> None:
        """Return once the models of the start have loaded."""
        for _ in poll(60, "the server is ready"):
            if self.client.get(f"{self.inference}/readyz").status_code == 200:
                return

    def kill(self) -> None:
        """End it as a fault would, and wait until its workers are gone too."""
        assert self.process is not None
        family = self.family()
        self.process.kill()
        self.process.wait()
        self.process = None
        for _ in poll(30, "the workers end"):
            if not any(process.is_running() and process.status() != "zombie" for process in family):
                return

    def models(self) -> dict[str, list[str]]:
        """Every model's versions, the default first."""
        found = {}
        for each in self.client.get(f"{self.management}/models").json()["models"]:
            answer = self.client.get(f"{self.management}/models/{each['modelName']}/all")
            if answer.status_code == 404:  # it went in this moment
                return self.models()
            described = answer.json()
            ordered = sorted(described, key=lambda one: (not one["isDefault"], one["modelVersion"]))
            found[each["modelName"]] = [one["modelVersion"] for one in ordered]
        return found

    def state(self) -> dict[str, Any]:
        """What the server says of its desired state."""
        told: dict[str, Any] = self.client.get(f"{self.management}/desired-state").json()
        return told

    def marserve(self, *words: str, status: int = 0) -> Any:
        """Run a command with `--json` and give its document."""
        done = run(
            [sys.executable, "-m", "marserve.cli", *words, "--management", self.management, "--json"],
            cwd=self.folder,
            text=True,
            timeout=60,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return json.loads(done.stdout)


def text(**models: list[str] | dict[str, Any]) -> str:
    """A document; of a list the first version is the default."""
    told: dict[str, Any] = {}
    for name, versions in models.items():
        if isinstance(versions, dict):
            told[name] = versions
            continue
        told[name] = {"versions": {version: f"{name}-{version}.mar" for version in versions}, "default": versions[0]}
        for version in versions:
            told[name]["versions"][version] = {"url": f"{name}-{version}.mar", "workers": 1}
    return yaml.safe_dump({"models": told})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Declared]:
    """Two versions of one model and one of another, started and ready."""
    with Declared(tmp_path, text(m=["1.0", "2.0"], n=["1.0"])) as server:
        server.wait_until_ready()  # type: ignore[attr-defined]
        yield server  # type: ignore[misc]


@pytest.mark.system
def test_calls_that_would_change_models_are_refused_with_what_to_do(server: Declared) -> None:
    """Over REST and gRPC alike; what asks is answered."""
    management, client = server.management, server.client
    calls = [
        ("POST", "/models", {"url": "m-3.0.mar"}),
        ("DELETE", "/models/n", {}),
        ("PUT", "/models/m", {"min_worker": 2}),
        ("PUT", "/models/m", {"batch_size": 2}),
        ("PUT", "/models/m/2.0/set-default", {}),
        ("DELETE", "/models/m/traffic", {}),
        ("DELETE", "/models/m/labels/stable", {}),
        ("POST", "/models/m/swap", {"url": "m-3.0.mar"}),
    ]
    for method, path, query in calls:
        answer = client.request(method, management + path, params=query)
        assert answer.status_code == 409, f"{method} {path}: {answer.text}"
        assert answer.json()["type"] == "ConflictStatusException"
        assert "models.yaml says which models this server has" in answer.json()["message"]
        assert "marserve apply FILE" in answer.json()["message"]
    bodies = [
        ("PUT", "/models/m/traffic", {"weights": {"1.0": 1}}),
        ("PUT", "/models/m/labels/stable", {"version": "1.0"}),
        ("PUT", "/models/m/shadow", {"version": "2.0"}),
    ]
    for method, path, body in bodies:
        assert client.request(method, management + path, json=body).status_code == 409, path

    with grpc.insecure_channel(server.grpc_management) as channel:
        for method, kind, fields in (
            ("RegisterModel", "RegisterModelRequest", {"url": "m-3.0.mar"}),
            ("UnregisterModel", "UnregisterModelRequest", {"model_name": "n"}),
            ("ScaleWorker", "ScaleWorkerRequest", {"model_name": "m", "min_worker": 2}),
            ("SetDefault", "SetDefaultRequest", {"model_name": "m", "model_version": "2.0"}),
        ):
            call = channel.unary_unary(
                f"/{MANAGEMENT}.ManagementAPIsService/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=SCHEMA.message(f"{MANAGEMENT}.ManagementResponse").FromString,
            )
            with pytest.raises(grpc.RpcError) as raised:
                call(SCHEMA.message(f"{MANAGEMENT}.{kind}")(**fields), timeout=10)
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "marserve apply FILE" in raised.value.details()

    assert server.models() == {"m": ["1.0", "2.0"], "n": ["1.0"]}
    assert server.describe("m")["declared"] == {"url": "m-1.0.mar", "minWorkers": 1, "maxWorkers": 1}


@pytest.mark.system
def test_a_document_is_planned_applied_and_undone_from_the_command_line(server: Declared) -> None:
    """Each command has `--json`; what changes something, a dry run."""
    wanted = server.folder / "next.yaml"
    wanted.write_text("# by hand\n" + text(m=["3.0"], n=["1.0"]))

    planned = server.marserve("plan", "next.yaml")
    dry = server.marserve("apply", "next.yaml", "--dry-run")
    assert server.models() == {"m": ["1.0", "2.0"], "n": ["1.0"]}
    assert dry == {**planned, "dryRun": True, "isDryRun": True}
    assert [step["step"] for step in planned["steps"] if "version" in step] == [
        "load",
        "wait-ready",
        "switch",
        "unload",
        "unload",
    ]
    assert planned["memoryBytes"]["atMost"] > 0

    applied = server.marserve("apply", "next.yaml")
    assert applied["applied"] == 2
    assert server.models() == {"m": ["3.0"], "n": ["1.0"]}
    assert server.predict("m").content == b"3.0"
    assert server.document.read_bytes() == wanted.read_bytes()
    assert server.marserve("apply", "next.yaml")["steps"] == []

    back = server.marserve("undo", "--dry-run")
    assert [step["version"] for step in back["steps"] if step["step"] == "load"] == ["1.0", "2.0"]
    assert server.models() == {"m": ["3.0"], "n": ["1.0"]}
    server.marserve("undo")
    assert server.models() == {"m": ["1.0", "2.0"], "n": ["1.0"]}
    assert read(server.document.read_bytes()) == read(text(m=["1.0", "2.0"], n=["1.0"]).encode())
    listed = server.marserve("history")["history"]
    assert [(entry["number"], entry["by"], entry["isCurrent"]) for entry in listed] == [
        (3, "undo", True),
        (2, "apply", False),
        (1, "start", False),
    ]
    assert "m-3.0.mar" in server.marserve("history", "2")["document"]
    assert "nothing to undo" in server.marserve("undo", status=1)["error"]["message"]
    assert server.marserve("plan")["isEmpty"]


def undo_under_load(folder: Path, bound_s: float) -> None:
    """Apply and undo three times; no request that is sent `bound_s` after the call gets what was taken back."""
    slow = make_archive(folder / "m-1.0.mar", ECHO.format(slow=2), name="m", version="1.0")
    server = Declared(folder, text(), job_queue_size="100000")
    slow.rename(server.store / "m-1.0.mar")
    with server:
        address = f"{server.management}/desired-state"
        server.client.put(address, content=text(m=["1.0"], n=["1.0"])).raise_for_status()
        pids = server.worker_pids("m")
        with LoadBeside(int(server.inference.rsplit(":", 1)[1]), "m", 100, 8) as load:
            called: list[tuple[float, float]] = []
            for _ in range(3):
                server.client.put(address, content=text(m=["2.0"], n=["2.0"])).raise_for_status()
                applied = time.monotonic() - load.started_at
                assert [(each["model"], each["version"]) for each in server.state()["keeps"]] == [
                    ("m", "1.0"),
                    ("n", "1.0"),
                ]
                assert all(psutil.pid_exists(pid) for pid in pids)
                assert server.predict("m").content == b"2.0"
                time.sleep(0.2)  # some of the load is answered by what is about to be taken back
                called.append((applied, time.monotonic() - load.started_at))
                undone = server.client.post(f"{address}/undo")
                assert undone.status_code == 200, undone.text
                assert [step.get("isLoaded") for step in undone.json()["steps"] if step["step"] == "load"] == [
                    True,
                    True,
                ]
                assert server.worker_pids("m") == pids

    assert count_by_status(load.outcomes) == {200: len(load.outcomes)}
    for number, (applied, undone_at) in enumerate(called):
        following = called[number + 1][0] if number + 1 < len(called) else math.inf
        after = [each for each in load.outcomes if undone_at + bound_s < each.sent_s < following]
        until = next((each.sent_s for each in after if each.body == b"2.0"), math.inf)
        during = {each.body for each in load.outcomes if applied < each.sent_s < undone_at}
        assert during == {b"2.0"}
        # The next apply's own moment lies somewhere before its end: what it answers comes last, and in one piece.
        assert all(each.body == (b"1.0" if each.sent_s < until else b"2.0") for each in after)
        assert number + 1 < len(called) or until == math.inf


def write(server: Declared, **models: list[str]) -> str:
    """Write a document beside the server's; its name."""
    (server.folder / "next.yaml").write_text(text(**models))
    return "next.yaml"


@pytest.mark.system
def test_undo_is_a_switch_and_nobody_notices(tmp_path: Path) -> None:
    """Every request is answered; the model that served takes seconds to load."""
    undo_under_load(tmp_path, bound_s=0.3)


@pytest.mark.long
def test_undo_takes_a_tenth_of_a_second_at_most(tmp_path: Path) -> None:
    """The bound as it is promised."""
    undo_under_load(tmp_path, bound_s=0.1)


@pytest.mark.system
def test_what_undo_would_need_is_gone_after_its_window_and_with_the_server(tmp_path: Path) -> None:
    """Its processes: after the window, and when the server is killed or stops within it."""
    server = Declared(tmp_path, text(m=["1.0"]), undo_window="1")
    with server:
        server.wait_until_ready()
        old = [psutil.Process(pid) for pid in server.worker_pids("m")]
        server.marserve("apply", write(server, m=["2.0"]))
        alive = left_of(old, 30)
        assert old
        assert not alive
        assert "keeps" not in server.state()
        assert server.predict("m").content == b"2.0"
        server.marserve("undo")
        assert server.predict("m").content == b"1.0"

    (tmp_path / "second").mkdir()
    server = Declared(tmp_path / "second", text(m=["1.0"]))
    with server:
        server.wait_until_ready()
        server.marserve("apply", write(server, m=["2.0"]))
        assert [each["version"] for each in server.state()["keeps"]] == ["1.0"]
        page = server.client.get(f"{server.metrics}/metrics").text
        assert 'marserve_desired_state_kept_versions{model="m"} 1.0' in page
        server.kill()  # waits until all of its family has gone
        server.start()
        server.wait_until_ready()
        assert server.predict("m").content == b"2.0"
        server.marserve("undo")
        server.marserve("apply", write(server, m=["3.0"]))
        assert [each["version"] for each in server.state()["keeps"]] == ["1.0"]


@pytest.mark.system
def test_a_document_that_fails_changes_nothing(server: Declared) -> None:
    """One broken archive among right ones: an error that names it, and everything as before, also on disk."""
    before = server.document.read_bytes()
    for bad, words in (("cut.mar", "n 2.0"), ("bad.mar", "n 2.0"), ("none.mar", "Model not found at: none.mar")):
        wanted = server.folder / "next.yaml"
        wanted.write_text(text(m=["3.0"], n={"versions": {"2.0": {"url": bad, "workers": 1}}}))
        error = server.marserve("apply", "next.yaml", status=1)["error"]
        assert words in error["message"], error
        assert "nothing was changed" in error["message"]
        assert server.models() == {"m": ["1.0", "2.0"], "n": ["1.0"]}
    assert server.document.read_bytes() == before
    assert len(server.marserve("history")["history"]) == 1
    assert server.predict("m").content == b"1.0"


def test_an_edit_of_the_file_is_taken_over_and_a_wrong_one_refused_as_a_whole(server: Declared) -> None:
    """The server looks by itself; what is wrong is said by probes, metrics and the call that asks."""
    server.document.write_text(text(m=["2.0"]))
    for _ in poll(30, "the edit is in force"):
        if server.models() == {"m": ["2.0"]}:
            break

    server.document.write_text(text(m=["3.0"]).replace("workers:", "wrokers:"))
    for _ in poll(30, "the wrong edit is noticed, and not the file before it is written"):
        if "wrokers" in server.state().get("failure", {}).get("message", ""):
            break
    assert "wrokers is no key of version 3.0 of model m; did you mean workers?" in server.state()["failure"]["message"]
    ready = server.client.get(f"{server.inference}/readyz")
    assert ready.status_code == 200
    assert "wrokers" in ready.json()["reasons"][0]
    page = server.client.get(f"{server.metrics}/metrics").text
    assert 'marserve_desired_state_changes_total{result="failed"} 1.0' in page
    digest = read(text(m=["2.0"]).encode()).digest
    assert f'marserve_desired_state_in_force{{digest="{digest}"}} 0.0' in page
    assert server.models() == {"m": ["2.0"]}

    server.document.write_text(text(m=["3.0"]))
    for _ in poll(30, "the mended edit is in force"):
        if server.models() == {"m": ["3.0"]}:
            break
    assert "failure" not in server.state()


@pytest.mark.long
def test_a_server_that_is_killed_in_the_middle_comes_back_with_one_of_the_two(server: Declared) -> None:
    """The new one loads slowly, so it is the old one here; after it has come into force, it is the new one."""
    slow = text(m=["3.0"], slow={"versions": {"1.0": {"url": "slow.mar", "workers": 1}}})

    def apply() -> None:
        with pytest.raises(Exception):  # noqa: B017 - the connection breaks in whatever way
            server.client.put(f"{server.management}/desired-state", content=slow).raise_for_status()

    applying = threading.Thread(target=apply)
    applying.start()
    for _ in poll(30, "the change is under way"):
        if server.state().get("underWay", {}).get("phase") == "wait-ready":
            break
    server.kill()
    applying.join(30)
    server.start()
    server.wait_until_ready()
    assert server.models() == {"m": ["1.0", "2.0"], "n": ["1.0"]}

    assert server.client.put(f"{server.management}/desired-state", content=slow).status_code == 200
    server.kill()
    server.start()
    server.wait_until_ready()
    assert server.models() == {"m": ["3.0"], "slow": ["1.0"]}
    assert server.state()["applied"] == 2
    server.client.post(f"{server.management}/desired-state/undo")
    assert server.models() == {"m": ["1.0", "2.0"], "n": ["1.0"]}


@pytest.mark.system
def test_calls_that_are_adopted_are_written_into_the_document(tmp_path: Path) -> None:
    """And are in force when they are answered, also after a restart."""
    with Declared(tmp_path, text(m=["1.0"]), desired_state_changes="adopt") as made:
        server = made
        assert isinstance(server, Declared)
        server.wait_until_ready()
        client, management = server.client, server.management

        assert server.register("m-2.0.mar").status_code == 200
        assert client.put(f"{management}/models/m/2.0", params={"min_worker": 2}).status_code == 200
        assert client.put(f"{management}/models/m/2.0", params={"batch_size": 4}).status_code == 200
        assert client.put(f"{management}/models/m/2.0/set-default").status_code == 200
        assert client.put(f"{management}/models/m/labels/old", json={"version": "1.0"}).status_code == 200
        weights = {"weights": {"1.0": 1, "2.0": 3}}
        assert client.put(f"{management}/models/m/traffic", json=weights).status_code == 200
        assert server.register("n-1.0.mar", memory="300MiB", pinned="true").status_code == 200
        declared = read(server.document.read_bytes()).models["n"].versions["1.0"].config
        assert (declared["memory"], declared["pinned"]) == (300 << 20, True)

        model = read(server.document.read_bytes()).models["m"]
        assert (model.default, model.labels, model.traffic) == ("2.0", {"old": "1.0"}, weights)
        assert model.versions["2.0"].config == {"minWorkers": 2, "maxWorkers": 2, "batchSize": 4}
        assert server.models() == {"m": ["2.0", "1.0"], "n": ["1.0"]}

        shadowed = client.put(f"{management}/models/m/shadow", json={"version": "1.0", "share": 0.5})
        assert (shadowed.status_code, shadowed.json()["version"]) == (200, "1.0")
        shadow = read(server.document.read_bytes()).models["m"].shadow
        assert shadow is not None
        assert (shadow["version"], shadow["share"]) == ("1.0", 0.5)
        assert client.delete(f"{management}/models/m/shadow").status_code == 200
        assert client.delete(f"{management}/models/m/shadow").status_code == 404
        assert read(server.document.read_bytes()).models["m"].shadow is None
        for path, call in (("swap", {"params": {"url": "m-3.0.mar"}}), ("rollout", {"json": {"version": "1.0"}})):
            told = client.post(f"{management}/models/m/{path}", **call)
            assert (told.status_code, "Register the new version and" in told.json()["message"]) == (409, True), (
                told.text
            )

        refused = client.delete(f"{management}/models/m/1.0")
        assert (refused.status_code, refused.json()["message"][:40]) == (
            409,
            "Version 1.0 of model m has a weight in t",
        )
        assert client.delete(f"{management}/models/m/2.0").status_code == 403
        assert client.delete(f"{management}/models/n").status_code == 200
        assert client.delete(f"{management}/models/n").status_code == 404
        assert server.register("cut.mar").status_code == 400
        assert server.register("m-2.0.mar").status_code == 409

        server.kill()
        server.start()
        server.wait_until_ready()
        assert server.models() == {"m": ["2.0", "1.0"]}
        described = server.describe("m")
        assert (described["minWorkers"], described["batchSize"]) == (2, 4)
        server.client.post(f"{management}/desired-state/undo")
        assert server.models() == {"m": ["2.0", "1.0"], "n": ["1.0"]}


@pytest.mark.system
def test_two_words_on_which_models_there_are_do_not_start_a_server(tmp_path: Path) -> None:
    """Both are named, with where they stand; snapshots are written and not read."""
    server = Declared(tmp_path, text(m=["1.0"]), load_models="n-1.0.mar")
    done = run_in_vain(server)
    assert "desired_state=models.yaml (--desired-state) decides alone which models there are, and load_models" in done
    assert "config.properties, line" in done

    server = Declared(tmp_path / "second", "modles: {}")
    assert "modles is no key of the document; did you mean models?" in run_in_vain(server)

    with Declared(tmp_path / "third", text(m=["1.0"]), config_snapshots="true") as made:
        assert isinstance(made, Declared)
        made.wait_until_ready()
        for _ in poll(30, "a snapshot is written"):
            if list((made.folder / "logs" / "config").glob("*.cfg")):
                break
        made.document.write_text(text(n=["1.0"]))
        made.stop()
        # Without a file that is named, a snapshot would be read; the document alone decides.
        (made.folder / "plain").mkdir()
        made.start()
        made.wait_until_ready()
        assert made.models() == {"n": ["1.0"]}
        told = made.output()
        assert "the desired state models.yaml decides alone" in told
        assert "desired_state=models.yaml is set by --desired-state" in told


def run_in_vain(server: Declared) -> str:
    """What a server says that does not start."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "MARSERVE_"))}
    done = run(server.command(), cwd=server.folder, env=environment, text=True, timeout=60)
    server.client.close()
    assert done.returncode in (1, 2)
    return done.stderr


def test_a_server_without_a_document_takes_one_by_a_call(tmp_path: Path) -> None:
    """Once, and other calls go on; what was applied in this life can be undone."""
    with Server(tmp_path, entry="marserve") as server:
        for version in ("1.0", "2.0"):
            make_archive(server.store / f"m-{version}.mar", ECHO.format(slow=0), name="m", version=version)
        assert server.register("m-1.0.mar", initial_workers=1).status_code == 200
        refused = server.client.put(f"{server.management}/desired-state", content=text(m=["2.0"]))
        assert (refused.status_code, "No document has named m 1.0" in refused.text) == (409, True)
        prune = {"prune": "true"}
        put = server.client.put(f"{server.management}/desired-state", content=text(m=["2.0"]), params=prune)
        assert put.status_code == 200, put.text
        assert server.predict("m").content == b"2.0"
        assert server.client.put(f"{server.management}/models/m", params={"min_worker": 2}).status_code == 202
        plan = server.client.post(f"{server.management}/desired-state/plan", content=text(m=["2.0"])).json()
        assert [step["step"] for step in plan["steps"]] == ["scale-down"]
        undone = server.client.post(f"{server.management}/desired-state/undo")
        assert (undone.status_code, server.predict("m").content) == (200, b"1.0")
        assert server.client.post(f"{server.management}/desired-state/undo").status_code == 409


@pytest.mark.system
def test_undo_brings_back_what_calls_had_made_after_a_restart(tmp_path: Path) -> None:
    """Between the document and the undo; a script is not asked, and has to say what goes."""
    with Server(tmp_path, entry="marserve", settings={"log_location": str(tmp_path / "logs")}) as server:
        for version in ("1.0", "2.0"):
            make_archive(server.store / f"m-{version}.mar", ECHO.format(slow=0), name="m", version=version)
        assert server.register("m-1.0.mar", initial_workers=1, batch_size=3).status_code == 200
        (tmp_path / "models.yaml").write_text(text(m=["2.0"]))
        command = [sys.executable, "-m", "marserve.cli", "apply", "models.yaml", "--management", server.management]
        asked = run(command, cwd=tmp_path, text=True, timeout=60)
        assert (asked.returncode, "would unload m 1.0" in asked.stderr) == (1, True), asked.stderr
        assert server.predict("m").content == b"1.0"
        command.append("--prune")
        assert run(command, cwd=tmp_path, timeout=60).returncode == 0
        assert server.predict("m").content == b"2.0"

        server.stop()
        server.start()
        undone = server.client.post(f"{server.management}/desired-state/undo")

        assert (undone.status_code, server.predict("m").content) == (200, b"1.0")
        assert server.describe("m")["batchSize"] == 3


def test_a_document_is_checked_without_a_server(tmp_path: Path) -> None:
    """Every line that is wrong, and the schema that editors read."""

    def marserve(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "marserve.cli", "plan", *words]
        return run(command, cwd=tmp_path, text=True, timeout=60)

    (tmp_path / "right.yaml").write_text(text(m=["1.0"]))
    (tmp_path / "wrong.yaml").write_text("models:\n  m:\n    vesions: {}\n    zzz: 1\n")

    assert [step["step"] for step in json.loads(marserve("right.yaml", "--offline", "--json").stdout)["steps"]] == [
        "load",
        "wait-ready",
        "switch",
        "default",
    ]
    refused = marserve("wrong.yaml", "--offline")
    assert refused.returncode == 1
    assert "line 3: vesions is no key of model m; did you mean versions?" in refused.stderr
    assert "line 4: zzz" in refused.stderr
    assert json.loads(marserve("--schema").stdout)["title"] == "marserve: desired state"


@pytest.mark.system
def test_a_document_and_its_archives_may_lie_elsewhere(tmp_path: Path) -> None:
    """Both behind addresses: what lies there now counts, whatever the store has kept under the same name."""
    archives = []
    for version in ("1.0", "2.0"):
        path = make_archive(tmp_path / f"{version}.mar", ECHO.format(slow=0), name="m", version=version)
        archives.append(path.read_bytes())
    with file_server() as files:
        archive = files.on("/m.mar?signature=planted-7c1e", whole(archives[0], etag='"a"'))

        def declare(version: str, data: bytes | None, etag: str) -> str:
            digest = {} if data is None else {"sha256": hashlib.sha256(data).hexdigest()}
            told = {"versions": {version: {"url": archive, "workers": 1, **digest}}}
            document = yaml.safe_dump({"models": {"m": told}}).encode()
            return files.on("/models.yaml?signature=planted-5a3d", whole(document, etag=etag))

        address = declare("1.0", None, '"1"')
        server = Declared(tmp_path / "run", "", allowed_urls=f"{files.url}/.*")
        server.document.unlink()
        server.address = address
        with server:
            server.wait_until_ready()
            shown = f"{files.url}/models.yaml?…"
            assert (server.state()["source"], server.predict("m").content) == (shown, b"1.0")

            answers = [
                server.client.get(f"{server.management}{path}").text
                for path in ("/desired-state", "/desired-state/document", "/desired-state/history/1", "/models/m")
            ]
            answers.append(server.client.post(f"{server.management}/desired-state/plan").text)
            assert "/m.mar" in answers[1]
            assert not [answer for answer in (*answers, server.output()) if "planted" in answer]

            files.on("/m.mar?signature=planted-7c1e", whole(archives[1], etag='"b"'))
            declare("2.0", archives[1], '"2"')
            for _ in poll(30, "the new document is in force"):
                if server.models() == {"m": ["2.0"]}:
                    break
            assert server.predict("m").content == b"2.0"

            declare("2.0", archives[0], '"3"')
            for _ in poll(30, "the wrong digest is noticed"):
                if "failure" in server.state():
                    break
            assert server.predict("m").content == b"2.0"
            refused = server.client.put(f"{server.management}/desired-state", content=text(m=["3.0"]))
            assert refused.status_code == 409
            assert "cannot be written from here" in refused.json()["message"]
            assert server.client.post(f"{server.management}/desired-state/undo").status_code == 409
            assert server.models() == {"m": ["2.0"]}
    assert planted_nowhere(server)


@pytest.mark.long
def test_a_fleet_follows_an_object_and_each_may_adopt_calls_into_it(s3: S3Server, tmp_path: Path) -> None:
    """What is applied at one server is in force at the other; of calls at one time none that was accepted is lost."""
    pytest.importorskip("obstore")
    bucket = s3.bucket()
    bucket.put("models.yaml", text(m=["1.0"]).encode())
    fleet = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        server = Declared(tmp_path / name, "", environment=s3.environment, desired_state_changes="adopt")
        server.document.unlink()
        server.address = f"s3://{bucket.name}/models.yaml"
        fleet.append(server)

    with fleet[0] as first, fleet[1] as second:
        for server in fleet:
            server.wait_until_ready()
        answer = first.client.put(f"{first.management}/desired-state", content=text(m=["2.0"]))
        assert answer.status_code == 200, answer.text
        for _ in poll(30, "the other server follows"):
            if second.predict("m").content == b"2.0":
                break

        calls = ((first, "n"), (second, "other"))
        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(lambda call: call[0].register("n-1.0.mar", model_name=call[1]), calls))
        assert {answer.status_code for answer in answers} <= {200, 409}  # 409: somebody was faster, try again
        adopted = {name for answer, (_, name) in zip(answers, calls, strict=True) if answer.status_code == 200}
        assert adopted
        for _ in poll(30, "both have what was adopted"):
            if fleet[0].models().keys() == fleet[1].models().keys() == {"m", *adopted}:
                break


def planted_nowhere(server: Declared) -> bool:
    """Nothing that was begun is left in the store or beside it."""
    return not [path for path in server.store.rglob("*") if path.name.endswith(".part")]
