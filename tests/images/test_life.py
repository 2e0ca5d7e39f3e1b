"""Containers of the cpu image that are stopped, killed, started again, or run by a user whom nobody planned for.

`make image-test` runs these, as those of `test_image.py`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from support.archives import manifest, zip_of
from support.image_containers import HOME, MODELS, STORE, Running
from support.images import missing, run
from support.server import make_archive, poll
from support.wheels import write_wheel

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

Runs = Callable[..., Running]

# Takes as many seconds as it is told.
SLOW = """
import time
def handle(data, context):
    for row in data or []:
        print("a request is here", flush=True)
        time.sleep(float(bytes(row.get("body") or row.get("data"))))
    return ["done" for _ in data or []]
"""
VERSION_OF_ITS_OWN = """
import needed
def handle(data, context):
    return [needed.version for _ in data or []]
"""


@pytest.fixture
def runs(image: str, tmp_path: Path) -> Iterator[Runs]:
    """Runs containers of the image, each with a folder of its own; none stays."""
    made: list[Running] = []

    def run_one(*arguments: str, **more: object) -> Running:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Running(image, folder, *arguments, **more))  # type: ignore[arg-type]
        return made[-1]

    yield run_one
    for container in made:
        container.remove()


def slow_model(folder: Path) -> dict[str, Path]:
    """A store in this folder with one archive, as a volume."""
    folder.mkdir()
    make_archive(folder / "slow.mar", SLOW)
    return {STORE: folder}


# ------------------------------------------------------------------------------------------------- ends and beginnings


def test_a_request_that_takes_longer_than_the_drain_is_answered(runs: Runs, tmp_path: Path) -> None:
    """`docker stop --time 40`: the container ends when the last answer is out, with 0, and not before."""
    container = runs("serve", "--models", "all", volumes=slow_model(tmp_path / "store"), drain_delay="1")
    container.wait_until_ready()
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{container.address}/predictions/slow", content=b"5", timeout=60))
    )
    asking.start()
    for _ in poll(10, "the worker has the request"):
        if "a request is here" in container.output():
            break

    began = time.monotonic()
    run("podman", "stop", "--time", "40", container.name)
    took = time.monotonic() - began
    asking.join(60)

    assert container.wait() == 0, container.output()
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, "done")]
    assert 2 < took < 20


@pytest.mark.parametrize("kind", ["killed", "stopped"])
def test_a_container_starts_again(runs: Runs, kind: str) -> None:
    """Whatever the one before left in its folders, the file with its process's number among it."""
    container = runs("serve", "--models", "all", drain_delay="0")
    container.wait_until_ready()
    if kind == "killed":
        run("podman", "kill", container.name)
        assert container.wait() == 128 + signal.SIGKILL
    else:
        run("podman", "stop", "--time", "40", container.name)
        assert container.wait() == 0

    container.again()
    container.wait_until_ready()

    assert "already running" not in container.output()
    assert "digits" in container.inside("marserve", "models")


def test_what_was_registered_is_there_after_a_restart_with_torchserves_command_line(runs: Runs) -> None:
    """Snapshots lie in the volume of the logs; what the image says by itself is not in them."""
    words = ["torchserve", "--start", "--model-store", "model-store", "--disable-token-auth", "--enable-model-api"]
    container = runs(*words, drain_delay="0")
    container.wait_until_ready()
    parameters = {"url": "digits.mar", "model_name": "second", "initial_workers": "1", "synchronous": "true"}
    assert httpx.post(f"{container.management}/models", params=parameters, timeout=60).status_code == 200
    run("podman", "stop", "--time", "40", container.name)
    assert container.wait() == 0

    container.again()
    container.wait_until_ready()

    assert [each["modelName"] for each in httpx.get(f"{container.management}/models").json()["models"]] == ["second"]
    written = container.inside("sh", "-c", f"cat {HOME}/logs/config/*-shutdown.cfg")
    assert "inference_address=" in written
    assert "unprotected_management" not in written
    assert "token_file" not in written


def test_an_init_of_the_engines_own_makes_no_difference(runs: Runs, tmp_path: Path) -> None:
    """`docker run --init`: signals, status and health go through it; a shell stands for the engine's."""
    init = tmp_path / "init"
    init.write_text('#!/bin/sh\nshift\n"$@" &\ntrap "kill -TERM $!" TERM\nwait $!\nwait $!\n')
    init.chmod(0o755)
    container = runs("serve", "--models", "all", drain_delay="0", flags=("--init", f"--init-path={init}"))
    container.wait_until_ready()

    assert container.inside("python", "-P", "-m", "marserve.cli.healthcheck") == "The server is ready."
    container.signal(signal.SIGTERM)
    assert container.wait() == 0


# ---------------------------------------------------------------------------------------------------- users and folders


@pytest.mark.parametrize("user", ["99999", "1000"])
def test_a_number_alone_is_of_group_0_and_serves(runs: Runs, user: str) -> None:
    """As engines give it, without a line in any file of users."""
    container = runs("serve", "--models", "all", user=user, drain_delay="0")
    container.wait_until_ready()

    assert container.inside("id", "-u") == user
    assert container.inside("id", "-g") == "0"


def test_a_user_of_another_group_is_told_what_to_do(runs: Runs) -> None:
    """He may not write the image's folders."""
    container = runs("serve", user="99999:99999")

    assert container.wait() == 2
    assert f"{HOME}/tmp (TEMP) may not be written by user 99999 of group 99999" in container.output()
    assert "--user 99999:0" in container.output()


def test_a_user_of_another_group_serves_from_folders_of_his_own(runs: Runs, tmp_path: Path) -> None:
    """In the place of the image's two."""
    flags = []
    for name in ("tmp", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o1777)
        flags += ["--volume", f"{tmp_path / name}:{HOME}/{name}"]
    container = runs("serve", "--models", "all", user="99999:99999", flags=flags, drain_delay="0")

    container.wait_until_ready()

    assert container.inside("id", "-g") == "99999"


def test_a_folder_of_logs_that_belongs_to_somebody_else_is_named(runs: Runs, tmp_path: Path) -> None:
    """With the setting and the next step; nothing is started."""
    logs = tmp_path / "logs"
    logs.mkdir(mode=0o755)
    container = runs("serve", flags=("--volume", f"{logs}:{HOME}/logs"))

    assert container.wait() != 0
    assert f"log_location is '{HOME}/logs', where logs cannot be written (Permission denied)" in container.output()
    assert "Model server started." not in container.output()


def test_a_model_store_that_cannot_be_read_is_named(runs: Runs, tmp_path: Path) -> None:
    """Else a server without models would say that it is ready."""
    volumes = slow_model(tmp_path / "store")
    (tmp_path / "store").chmod(0o700)
    container = runs("serve", "--models", "all", volumes=volumes)

    assert container.wait() != 0
    assert f"model_store is '{STORE}'" in container.output()
    assert "Traceback" not in container.output()


def test_a_models_own_requirements_are_installed_without_a_pip_in_the_image(runs: Runs, tmp_path: Path) -> None:
    """From the wheel of pip that the base's Python brings, into the one folder that can be written."""
    wheel = write_wheel(tmp_path, "needed", "3.2")
    requirements = f"--no-index\n./{wheel.name}\n".encode()
    members = {
        "MAR-INF/MANIFEST.json": manifest("needy", "handler.py", requirementsFile="requirements.txt"),
        "handler.py": VERSION_OF_ITS_OWN.encode(),
        "requirements.txt": requirements,
        wheel.name: wheel.read_bytes(),
    }
    store = tmp_path / "store"
    store.mkdir()
    (store / "needy.mar").write_bytes(zip_of(members))
    keys = {"install_py_dep_per_model": "true", "drain_delay": "0"}
    container = runs("serve", "--models", "all", volumes={STORE: store}, **keys)
    container.wait_until_ready()

    answer = httpx.post(f"{container.address}/predictions/needy", content=b"?", timeout=30)

    assert (answer.status_code, answer.text) == (200, "3.2"), container.output()


def test_models_of_a_store_are_the_images_by_default(runs: Runs) -> None:
    """TorchServe's `--model-store … --models all`, word for word."""
    words = ["torchserve", "--start", "--ncs", "--model-store", STORE, "--models", "all", "--disable-token-auth"]
    container = runs(*words, volumes=MODELS, drain_delay="0")
    container.wait_until_ready()

    assert httpx.get(f"{container.management}/models/digits").status_code == 200
