"""What a container of ours does with the command lines of TorchServe's users, its own defaults in force.

The server is started by the entry point's program as a container's engine starts it, in a folder that stands for
`/home/model-server`; a network address of this machine stands for the way in from outside.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from marserve.cli.platforms.container import with_defaults
from marserve.cli.platforms.healthcheck import ask, inference_address
from marserve.settings import load_settings
from support.processes import living
from support.server import Server, make_archive
from support.workplace import ECHO

ROOT = Path(__file__).resolve().parents[2]
HOME = "/home/model-server"


def outer_address() -> str:
    """An address of this machine that is not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this machine has no network address but loopback, so nothing can be asked from outside")


class Container(Server):
    """A server that the image's entry point starts with these arguments, in a copy of the image's home."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        config: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(folder, store=folder / "model-store", arguments=arguments)
        (folder / "wf-store").mkdir()
        defaults = (ROOT / "docker/defaults.properties").read_text("utf-8").replace(HOME, str(folder))
        (folder / "defaults.properties").write_text(defaults)
        ports = {name: address.rpartition(":")[2] for name, address in self._settings.items() if "address" in name}
        ports |= {name: port for name, port in self._settings.items() if name.startswith("grpc_")}
        lines = {name: f"http://0.0.0.0:{port}" if "address" in name else port for name, port in ports.items()}
        self._lines = lines | (config or {})
        # The image's search path begins with its environment's programs.
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._environment = {"MARSERVE_DEFAULTS_FILE": "defaults.properties", "MARSERVE_DRAIN_DELAY": "0"}
        self._environment["PATH"] = programs
        self._environment |= environment or {}
        make_archive(self.store / "echo.mar", ECHO)

    def command(self) -> list[str]:
        """The entry point and its arguments."""
        text = (ROOT / "docker/config.properties").read_text("utf-8").replace(HOME, str(self.folder))
        text += "".join(f"{name}={value}\n" for name, value in self._lines.items())
        (self.folder / "config.properties").write_text(text)
        return [sys.executable, "-P", "-m", "marserve.cli.container", *self._arguments]


def from_outside(address: str, path: str, method: str = "GET", **more: object) -> httpx.Response:
    """One request to the port of this address, as another machine would send it."""
    port = address.rpartition(":")[2]
    return httpx.request(method, f"http://{outer_address()}:{port}{path}", timeout=20, **more)  # type: ignore[arg-type]


def test_serve_answers_everybody_and_is_managed_from_within(tmp_path: Path) -> None:
    """Tokens are off as in TorchServe's image, so management stays inside, and the log says what opens it."""
    with Container(tmp_path, "serve", config={"load_models": "all"}) as container:
        assert from_outside(container.inference, "/predictions/echo", "POST", content=b"x").content == b"x"
        assert from_outside(container.metrics, "/metrics").status_code == 200
        with pytest.raises(httpx.ConnectError):
            from_outside(container.management, "/models")
        assert container.client.get(f"{container.management}/models").status_code == 200
        environment = container._environment | {"TEMP": str(container.temporary)}
        address = inference_address(["serve"], environment, tmp_path)
        assert ask(address) == (True, "The server is ready.")
        said = container.output()

    assert "disable_token_authorization=false" in said
    assert "MARSERVE_ALLOW_OPEN_MANAGEMENT=true" in said
    assert not ask(address)[0]


def test_management_is_open_with_keys_and_predictions_need_none(tmp_path: Path) -> None:
    """One variable does it."""
    environment = {"MARSERVE_DISABLE_TOKEN_AUTHORIZATION": "false"}
    with Container(tmp_path, config={"load_models": "all"}, environment=environment) as container:
        key = json.loads((tmp_path / "tmp" / "key_file.json").read_text())["management"]["key"]

        assert from_outside(container.management, "/models").status_code == 400
        listed = from_outside(container.management, "/models", headers={"Authorization": f"Bearer {key}"})
        assert [model["modelName"] for model in listed.json()["models"]] == ["echo"]
        assert from_outside(container.inference, "/predictions/echo", "POST", content=b"x").content == b"x"
        assert from_outside(container.inference, "/ping").status_code == 200


def test_management_is_open_where_somebody_answers_for_it(tmp_path: Path) -> None:
    """As in TorchServe's image, but said."""
    with Container(tmp_path, "serve", environment={"MARSERVE_ALLOW_OPEN_MANAGEMENT": "true"}) as container:
        assert from_outside(container.management, "/models").json() == {"models": []}


def test_an_address_that_management_shares_answers_it_to_callers_within(tmp_path: Path) -> None:
    """KServe's configuration has one port for both, and its wrapper asks from inside the pod."""
    with Container(tmp_path, "serve", config={"load_models": "all"}) as made:
        shared = made._lines["inference_address"]
    again = tmp_path / "again"
    again.mkdir()
    config = {"load_models": "all", "inference_address": shared, "management_address": shared}
    container = Container(again, "serve", config=config)
    container.inference = container.management = made.inference
    with container:
        assert from_outside(shared, "/predictions/echo", "POST", content=b"x").content == b"x"
        assert from_outside(shared, "/readyz").status_code == 200
        refused = from_outside(shared, "/models/echo")
        assert (refused.status_code, refused.json()["type"]) == (403, "ManagementClosedException")
        assert from_outside(shared, "/events/minio", "POST", content=b"{}").status_code == 403
        assert container.client.get(f"{made.inference}/models/echo").status_code == 200


@pytest.mark.system
@pytest.mark.parametrize(
    "line",
    [
        ["torchserve", "--start", "--ncs", "--model-store", "model-store", "--models", "echo.mar"],
        ["torchserve --start --ncs --model-store=model-store --models echo=echo.mar && echo done"],
        ["marserve", "start", "--models", "echo.mar"],
    ],
)
def test_a_container_lives_as_long_as_its_server_however_that_was_started(tmp_path: Path, line: list[str]) -> None:
    """SIGTERM to the container ends the server in order; nothing of either is left."""
    container = Container(tmp_path, *line)
    container.start()
    try:
        assert container.predict("echo", b"x").content == b"x"
        assert container.process is not None
        family = {process.pid for process in container.family()}
        assert len(family) > 2
        container.process.send_signal(signal.SIGTERM)

        assert container.process.wait(30) == 0, container.output()
        assert not living(family)
    finally:
        container.stop(check=False)
        container.client.close()


def test_a_container_ends_when_its_server_dies(tmp_path: Path) -> None:
    """And says so with its status: somebody restarts it then."""
    container = Container(tmp_path, "serve")
    container.start()
    try:
        assert container.process is not None
        server = psutil.Process(container.process.pid).children()[0]
        os.kill(server.pid, signal.SIGKILL)

        assert container.process.wait(20) == 128 + signal.SIGKILL
    finally:
        container.stop(check=False)
        container.client.close()


def test_settings_that_cannot_be_end_the_container_with_their_sentence(tmp_path: Path) -> None:
    """No process sleeps in the server's place."""
    container = Container(tmp_path, "serve", config={"job_queue_size": "many"})

    with pytest.raises(AssertionError, match=r"ended with 1(?s:.*)job_queue_size is 'many'"):
        container.start()
    container.stop(check=False)
    container.client.close()


def test_a_container_goes_on_serving_for_five_seconds_unless_told_otherwise(tmp_path: Path) -> None:
    """The time that platforms take until they send elsewhere."""
    container = Container(tmp_path, "serve")
    container.client.close()
    container.command()
    config = {"ts_config": str(tmp_path / "config.properties")}
    environment = {name: value for name, value in container._environment.items() if name != "MARSERVE_DRAIN_DELAY"}
    environment["TEMP"] = str(tmp_path)

    settings = load_settings("torchserve", config, with_defaults(["serve"], environment), tmp_path)

    assert settings.drain_delay == 5
    assert settings.origins["drain_delay"][-1].where.startswith("defaults.properties")
