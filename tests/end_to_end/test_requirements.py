"""A real server installs what its models require: found by workers, kept over restarts, refused, ended with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.processes import until_blocking
from support.server import Server
from support.wheels import waiting_index, write_wheel

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="processes are told by /proc")]

HANDLER = """
import json, os, subprocess, sys
import tiny

def handle(data, context):
    if data is None:
        return None
    script = "import tiny; print(tiny.__file__)"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    return [{"version": tiny.version, "file": tiny.__file__, "child": child, "prefix": sys.prefix}] * len(data)
"""


def write_archive(store: Path, name: str, requirements: str, *, wheel: Path | None = None, config: str = "") -> str:
    """An archive with requirements, and perhaps a wheel; its name in the store."""
    model: dict[str, Any] = {"modelName": name, "modelVersion": "1.0", "handler": "handler.py"}
    model |= {"requirementsFile": "requirements.txt", **({"configFile": "model-config.yaml"} if config else {})}
    document = {"createdOn": "01/02/2026 03:04:05", "runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
        archive.writestr("handler.py", HANDLER)
        archive.writestr("requirements.txt", requirements)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(document))
        if config:
            archive.writestr("model-config.yaml", config)
        if wheel is not None:
            archive.write(wheel, wheel.name)
    return f"{name}.mar"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, Server]]:
    """A store with models that need a package of theirs, and a server that installs it."""
    store = tmp_path / "store"
    store.mkdir()
    wheel = write_wheel(tmp_path, "tiny")
    text = "--no-index\n./tiny-1.0-py3-none-any.whl\n"
    write_archive(store, "needs", text, wheel=wheel)
    write_archive(store, "needs_venv", text, wheel=wheel, config="useVenv: true\n")
    write_archive(store, "missing", "--no-index\nno-such-package-anywhere==9.9\n")
    write_archive(store, "outside", "/etc/passwd\n")
    settings = {"install_py_dep_per_model": "true", "environment_folder": str(tmp_path / "environments")}
    settings |= {
        "load_models": "needs.mar,missing.mar",
        "default_workers_per_model": "1",
        "allowed_urls": "http://127.*",
    }
    server = Server(tmp_path, store=store, settings=settings, environment={"PIP_CONFIG_FILE": os.devnull})
    with server:
        yield tmp_path, server


def test_a_servers_models_have_what_they_require(place: tuple[Path, Server]) -> None:
    """At the start and by registration, in a folder and in a virtual environment; a failure leaves nothing."""
    folder, server = place
    client = server.client

    def is_ready() -> bool:
        described = client.get(f"{server.management}/models/needs").json()
        return isinstance(described, list) and described[0]["state"] == "ready"

    until_blocking(is_ready, "the model of the start", timeout_s=60)
    assert "no-such-package-anywhere" in server.output()

    answer = client.post(f"{server.inference}/predictions/needs", content=b"x").json()
    [described] = client.get(f"{server.management}/models/needs").json()
    assert answer["version"] == "1.0"
    assert answer["file"] == answer["child"] == f"{described['requirements']['folder']}/packages/tiny.py"
    assert described["requirements"]["status"] == "installed"
    assert described["requirements"]["installed"][0].startswith("tiny==1.0 --hash=sha256:")
    assert "Successfully installed tiny-1.0" in Path(described["requirements"]["log"]).read_text()

    assert server.register("needs_venv.mar").status_code == 200
    answer = client.post(f"{server.inference}/predictions/needs_venv", content=b"x").json()
    [described] = client.get(f"{server.management}/models/needs_venv").json()
    assert answer["prefix"] == f"{described['requirements']['folder']}/venv"
    assert answer["file"] == answer["child"]
    assert described["requirements"]["kind"] == "venv"

    for name, words in (
        ("missing", ""),
        ("outside", ": requirements.txt, line 1: '/etc/passwd' must be a path inside"),
    ):
        refused = server.register(f"{name}.mar")
        assert (refused.status_code, refused.json()["type"]) == (400, "ModelException")
        wanted = f"Custom pip package installation failed for model {name}{words}"
        assert refused.json()["message"].startswith(wanted)
        assert client.get(f"{server.management}/models/{name}").status_code == 404
    assert len([path for path in (folder / "environments").iterdir() if path.is_dir()]) == 2

    again = server.register("needs.mar", model_name="again")
    assert again.status_code == 200
    [described] = client.get(f"{server.management}/models/again").json()
    assert described["requirements"]["wasInstalledBefore"]


def test_an_installation_ends_with_the_server(place: tuple[Path, Server]) -> None:
    """SIGTERM does not wait for pip, and nothing of it is left."""
    folder, server = place
    with waiting_index() as index:
        write_archive(server.store, "slow", f"--index-url {index}\ntiny\n")
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        asked = threading.Thread(target=_register_quietly, args=[server.management, "slow.mar"], daemon=True)
        asked.start()
        until_blocking(lambda: "model slow: pip installs" in server.output(), "pip is begun", timeout_s=60)
        until_blocking(lambda: any("pip" in child.cmdline() for child in process.children()), "pip runs", timeout_s=60)
        server.stop(number=signal.SIGTERM)
        asked.join(30)

    assert not list((folder / "environments").glob("*.tmp"))


def _register_quietly(management: str, url: str) -> None:
    """Register, whatever becomes of it: the server may end before it answers."""
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{management}/models", params={"url": url}, timeout=60)
