"""Snapshots of real servers: written while they run, restored by the next, and never a surprise."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marserve.settings.load import read_properties
from support.file_server import file_server, whole
from support.hub_server import hub_server
from support.plugin_packages import ENDPOINT, STORE, Installation
from support.prepared import run
from support.server import Server, make_archive, poll

ECHO = """
def handle(data, context):
    return [bytes(row.get("body") or b"") for row in data or []]
"""
PLANTED = "planted-5f1d"


class Restarted(Server):
    """A server with snapshots, in its folder `run`; from the second start on nobody names a file of settings."""

    names_file = True

    def command(self) -> list[str]:
        """What is run."""
        command = [word for word in super().command() if word != "--ncs"]
        if not self.names_file:
            at = command.index("--ts-config")
            del command[at : at + 2]
            (self.folder / "config.properties").unlink()
        return command

    def start_again(self) -> None:
        """Start without a file of settings."""
        self.names_file = False
        self.start()

    def snapshots(self) -> list[Path]:
        """All of them, oldest first."""
        return sorted((self.folder / "logs" / "config").glob("*.cfg"))

    def kinds(self) -> list[str]:
        """What each was written for."""
        return [path.stem.split("-")[1] for path in self.snapshots()]

    def kill(self) -> None:
        """End it as a fault would, and wait until its workers are gone too."""
        assert self.process is not None
        family = self.family()
        self.process.kill()
        self.process.wait()
        self.process = None
        for _ in poll(30, "the workers end"):
            if not any(process.is_running() and process.status() != "zombie" for process in family):
                break


def lines_of(path: Path) -> dict[str, str]:
    """A snapshot's lines."""
    return {name: text for name, text, _ in read_properties(path.read_bytes(), path.name)}


def models_of(path: Path) -> dict[str, Any]:
    """A snapshot's models."""
    models: dict[str, Any] = json.loads(lines_of(path)["model_snapshot"])["models"]
    return models


def wait_for_models(server: Restarted, expected: dict[str, int]) -> None:
    """Return once the newest snapshot has these models, with so many versions each."""
    for _ in poll(30, f"a snapshot has {expected}"):
        found = server.snapshots()
        if found and {name: len(versions) for name, versions in models_of(found[-1]).items()} == expected:
            return


def wait_until_ready(server: Server) -> None:
    """Return once the models of the start have loaded."""
    for _ in poll(60, "the models are there"):
        if server.client.get(f"{server.inference}/readyz").status_code == 200:
            return


@pytest.fixture
def server(tmp_path: Path) -> Restarted:
    """A server with two versions of one model, and another, in its store. Not started."""
    server = Restarted(tmp_path)
    for version in ("1.0", "2.0"):
        make_archive(server.store / f"vers-{version}.mar", ECHO, name="vers", version=version)
    make_archive(server.store / "echo.mar", ECHO, config="minWorkers: 3\nmaxWorkers: 3\n")
    return server


def test_a_killed_server_comes_back_with_its_models(server: Restarted) -> None:
    """Models, versions, workers, default and settings, without a file or a flag; what it is restored from is said."""
    with server:
        server.register("vers-1.0.mar", batch_size=4, response_timeout=21)
        server.register("vers-2.0.mar")
        server.client.put(f"{server.management}/models/vers/2.0/set-default")
        wait_for_models(server, {"vers": 2})
        for _ in poll(30, "the default is in a snapshot"):
            if models_of(server.snapshots()[-1])["vers"]["2.0"]["defaultVersion"]:
                break
        server.kill()

        server.start_again()
        wait_until_ready(server)

        assert server.describe("vers")["modelVersion"] == "2.0"
        first = server.describe("vers", "1.0")
        assert (first["batchSize"], first["responseTimeout"], len(first["workers"])) == (4, 21, 1)
        assert server.predict("vers", b"x").content == b"x"
        (told,) = [line for line in server.output().splitlines() if "restored from the newest snapshot" in line]
        assert "--ncs" in told
        server.stop()
    assert server.kinds()[0] == "startup"
    assert server.kinds()[-1] == "shutdown"


@pytest.mark.system
def test_the_values_of_a_snapshot_go_before_the_archives(server: Restarted) -> None:
    """Three workers by its YAML, one after it was scaled, one after the restart."""
    with server:
        server.register("echo.mar")
        server.client.put(
            f"{server.management}/models/echo", params={"min_worker": 1, "max_worker": 1, "synchronous": "true"}
        )
        server.stop()
        assert models_of(server.snapshots()[-1])["echo"]["1.0"]["minWorkers"] == 1

        server.start_again()
        wait_until_ready(server)

        described = server.describe("echo")
        assert (described["minWorkers"], described["maxWorkers"], len(described["workers"])) == (1, 1, 1)


def test_a_snapshot_whose_archive_has_gone_stops_the_start(server: Restarted) -> None:
    """In TorchServe's words, with status 1, the file that says it, and the way out; nothing is left behind."""
    with server:
        server.register("echo.mar")
        wait_for_models(server, {"echo": 1})
        server.stop()
    (server.store / "echo.mar").unlink()
    server.names_file = False

    done = run(server.command(), cwd=server.folder, env=server.environment, text=True, timeout=60)

    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "Model archive file for model :echo, version :1.0 not found in model store" in said
    assert "InvalidSnapshotException" in said
    assert server.snapshots()[-1].name in said
    assert "--ncs" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "no JSON"), ('{"models": {"m": {"1.0": {}}}}', "defaultVersion of model m, version 1.0 is missing")],
)
def test_a_damaged_snapshot_is_one_sentence_and_status_1(server: Restarted, text: str, said: str) -> None:
    """Half a server is not started."""
    folder = server.folder / "logs" / "config"
    folder.mkdir(parents=True)
    (folder / "20260131120000000-startup.cfg").write_text(f"model_snapshot={text}\n")
    server.names_file = False

    done = run(server.command(), cwd=server.folder, env=server.environment, text=True, timeout=60)

    assert done.returncode == 1
    assert said in done.stderr.strip().splitlines()[-1]


@pytest.mark.system
def test_what_was_fetched_at_the_start_comes_back_from_the_store(tmp_path: Path) -> None:
    """The address is asked once; its key is in no snapshot, and neither start needs it again."""
    with file_server() as files:
        archive = make_archive(tmp_path / "far.mar", ECHO, config="minWorkers: 1\nmaxWorkers: 1\n").read_bytes()
        url = files.on(f"/far.mar?X-Amz-Signature={PLANTED}", whole(archive))
        settings = {"load_models": f"far={url}", "allowed_urls": f"{files.url}/.*"}
        server = Restarted(tmp_path, settings=settings)
        with server:
            wait_until_ready(server)
            server.stop()
            server.start()
            wait_until_ready(server)
            server.stop()
            server.start_again()
            wait_until_ready(server)
            answer = server.predict("far", b"x").content

    assert answer == b"x"
    assert len(files.asked) == 1
    assert models_of(server.snapshots()[-1])["far"]["1.0"]["marName"] == "far.mar"
    assert not [path for path in server.snapshots() if PLANTED in path.read_text()]


@pytest.mark.system
@pytest.mark.parametrize("entry", ["torchserve --ncs", "marserve"])
def test_no_snapshot_is_written_where_none_was_asked_for(tmp_path: Path, entry: str) -> None:
    """`--ncs`, and `marserve` by itself."""
    with Server(tmp_path, entry=entry.split()[0]) as server:
        make_archive(server.store / "echo.mar", ECHO)
        server.register("echo.mar")
    assert not list(tmp_path.rglob("*.cfg"))


@pytest.mark.system
def test_marserve_keeps_as_many_as_a_key_says(tmp_path: Path) -> None:
    """Once a key asks for them; the newest stays."""
    settings = {"config_snapshots": "true", "config_snapshots_kept": "2", "log_location": str(tmp_path / "logs")}
    server = Restarted(tmp_path, entry="marserve", settings=settings)
    make_archive(server.store / "echo.mar", ECHO)
    with server:
        wait_for_models(server, {})
        server.register("echo.mar")
        wait_for_models(server, {"echo": 1})
        server.client.delete(f"{server.management}/models/echo")
        wait_for_models(server, {})
    assert server.kinds() == ["snapshot", "shutdown"]


def test_no_secret_of_the_server_is_in_a_snapshot(tmp_path: Path) -> None:
    """Passwords, keys, and what a variable holds; nor may others read the files."""
    settings = {
        "keystore_pass": f"{PLANTED}-1",
        "disable_token_authorization": "false",
        "system_metrics_cmd": "measure.py $$MEASURE_KEY$$",
        "load_models": f"http://127.0.0.1:1/m.mar?X-Amz-Signature={PLANTED}-3",
    }
    environment = {"MEASURE_KEY": f"{PLANTED}-2", "MARSERVE_TOKEN": f"{PLANTED}-4"}
    server = Restarted(tmp_path, settings=settings, environment=environment)
    with server:
        keys = [entry["key"] for entry in json.loads((tmp_path / "key_file.json").read_text()).values()]
        for _ in poll(30, "a snapshot is written"):
            if server.snapshots():
                break
    assert len(keys) == 3
    for path in server.snapshots():
        text = path.read_text()
        assert not [secret for secret in (PLANTED, *keys) if secret in text]
        assert path.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_is_told_and_the_server_serves(tmp_path: Path) -> None:
    """A snapshot is worth less than an answer."""
    server = Restarted(tmp_path)
    make_archive(server.store / "echo.mar", ECHO)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "config").write_text("in the way")

    with server:
        server.register("echo.mar")
        assert server.predict("echo", b"x").content == b"x"
        for _ in poll(30, "the log says so"):
            if "A snapshot cannot be written to" in server.output():
                break


# ------------------------------------------------------------------------------------------------ plug-ins


def run_until_ended(server: Server, words: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the server's command; it is expected to end by itself."""
    environment = {"PYTHONPATH": server._environment["PYTHONPATH"], "PATH": "/usr/bin:/bin"}
    environment |= dict.fromkeys(("TMPDIR", "TEMP"), str(server.temporary))  # another's PID file is not met there
    return subprocess.run(
        [*server.command(), *words], cwd=server.folder, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.system
def test_an_installed_endpoint_answers_who_has_its_key(tmp_path: Path) -> None:
    """On its listener alone, and the log says who answers there."""
    installation = Installation(tmp_path)
    installation.install("acme-reports", ENDPOINT, {"marserve.endpoints": {"reports": "{module}:Reports"}})
    settings = {"disable_token_authorization": "false"}
    environment = {"PYTHONPATH": str(installation.folder)}
    with Server(tmp_path, settings=settings, environment=environment) as server:
        keys = json.loads((tmp_path / "key_file.json").read_text())
        bearer = {"authorization": f"Bearer {keys['management']['key']}"}
        url = f"{server.management}/reports/today?x=1"
        refused = server.client.post(url, content=b"hello")
        answered = server.client.post(url, content=b"hello", headers=bearer)
        elsewhere = server.client.get(
            f"{server.inference}/reports", headers={"authorization": f"Bearer {keys['inference']['key']}"}
        )
        output = server.output()

    assert refused.status_code == 400
    assert (answered.status_code, answered.headers["x-report"]) == (201, "yes")
    assert answered.json() == {
        "method": "POST",
        "path": "/reports/today",
        "query": [["x", "1"]],
        "body": "hello",
        "models": [],
    }
    assert elsewhere.status_code == 404
    assert "/reports is answered by the plug-in reports of acme-reports" in output


@pytest.mark.system
def test_two_endpoints_for_one_pattern_stop_the_server(tmp_path: Path) -> None:
    """Also where one of the two is the server's own."""
    installation = Installation(tmp_path)
    installation.install("acme-one", ENDPOINT, {"marserve.endpoints": {"one": "{module}:Reports"}})
    taken = ENDPOINT.replace('pattern = "reports"', 'pattern = "models"')
    server = Server(tmp_path, environment={"PYTHONPATH": str(installation.folder)})

    installation.install("acme-two", ENDPOINT, {"marserve.endpoints": {"two": "{module}:Reports"}})
    twice = run_until_ended(server)
    (installation.folder / "acme_two-1.0.dist-info" / "entry_points.txt").write_text("")
    installation.install("acme-three", taken, {"marserve.endpoints": {"three": "{module}:Reports"}})
    own = run_until_ended(server)

    assert (twice.returncode, own.returncode) == (1, 1)
    assert "both answer /reports" in twice.stderr
    assert "/models, which the server answers itself" in own.stderr


@pytest.mark.system
def test_an_installed_place_takes_and_gives_snapshots(tmp_path: Path) -> None:
    """The log folder has none then."""
    installation = Installation(tmp_path)
    installation.install("acme-store", STORE, {"marserve.snapshots": {"store": "{module}:Store"}})
    server = Restarted(tmp_path, environment={"PYTHONPATH": str(installation.folder)})
    make_archive(server.store / "echo.mar", ECHO)
    with server:
        server.register("echo.mar")
        server.stop()
        kept = sorted((installation.folder / "planted").iterdir())
        server.start_again()
        wait_until_ready(server)
        assert server.describe("echo")["modelVersion"] == "1.0"
        assert "in the planted store" in server.output()

    assert kept[-1].name.endswith("-shutdown.cfg")
    assert server.snapshots() == []


@pytest.mark.system
def test_a_restart_has_the_commit_that_served(tmp_path: Path) -> None:
    """Of a hub's branch the commit is kept: whatever the branch is by then, the same model comes back."""
    pytest.importorskip("huggingface_hub")
    manifest = {"model": {"modelName": "hubbed", "modelVersion": "2.0", "handler": "handler.py"}}
    files = {"MAR-INF/MANIFEST.json": json.dumps(manifest).encode(), "handler.py": ECHO.encode()}
    with hub_server() as hub:
        commit = hub.commit("org/model", files)
        hub.token = PLANTED
        server = Restarted(
            tmp_path,
            settings={"allowed_urls": "hf://org/.*"},
            environment={
                "HF_ENDPOINT": hub.url,
                "HF_TOKEN": PLANTED,
                "HF_HOME": str(tmp_path / "home"),
                "HF_HUB_DISABLE_XET": "1",
            },
        )
        with server:
            assert server.register("hf://org/model@main").status_code == 200
            wait_for_models(server, {"hubbed": 1})
            server.kill()
            hub.commit("org/model", {**files, "handler.py": ECHO.replace('row.get("body")', 'b"moved"').encode()})

            server.start_again()
            wait_until_ready(server)

            assert server.describe("hubbed")["modelUrl"] == f"hf://org/model@{commit}"
            assert server.predict("hubbed", b"x").content == b"x"
        assert not [path for path in server.snapshots() if PLANTED in path.read_text()]
