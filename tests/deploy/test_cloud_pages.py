"""What the pages on SageMaker and Vertex AI tell to type, typed; `docker` is a program that starts the entry point."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from marserve.settings import load_settings
from support.pages import ROOT, block
from support.platforms import ImageHome
from support.server import poll

SAGEMAKER = "docs/deploy/sagemaker.md"
VERTEX = "docs/deploy/vertex.md"

pytestmark = [
    pytest.mark.system,
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed, and the pages ask with it"),
]

# `docker run --rm -p … -v HERE:THERE:ro -e NAME=VALUE … IMAGE WORDS…`: no container, but what would run in one. What a
# folder is called there is put in the place of what it is called here, as mounting it would do.
DOCKER = """#!{python}
import os, sys
words = sys.argv[2:]
places, told = {{}}, dict({environment!r})
while words[0].startswith("-"):
    flag = words.pop(0)
    if flag in ("-p", "-v", "-e"):
        value = words.pop(0)
        if flag == "-p":
            port = value.partition(":")[0]
        if flag == "-v":
            here, there, _ = value.split(":")
            places[there] = here
        if flag == "-e":
            name, _, said = value.partition("=")
            told[name] = said
told = {{name: places.get(value, value) for name, value in told.items()}}
if "/opt/ml" in places:
    told |= {{"SAGEMAKER_BASE_DIR": places["/opt/ml"], "SAGEMAKER_BIND_TO_PORT": port}}
    told["SAGEMAKER_SAFE_PORT_RANGE"] = {ports!r}  # the other ports would be the machine's 8081 and 8082
os.chdir({folder!r})
os.execve(sys.executable, [sys.executable, "-m", "marserve.cli.container", *words[1:]], os.environ | told)
"""


@pytest.fixture
def image(tmp_path: Path) -> ImageHome:
    """An image's file system."""
    (tmp_path / "home").mkdir()
    return ImageHome(tmp_path / "home")


@pytest.fixture
def checkout(tmp_path: Path, image: ImageHome) -> Path:
    """A folder that looks like a checkout, with `docker` on the way."""
    pytest.importorskip("torch")
    pytest.importorskip("PIL.Image")
    folder = tmp_path / "checkout"
    (folder / "bin").mkdir(parents=True)
    for name in ("model_store", "examples"):
        (folder / name).symlink_to(ROOT / name)
    environment = image.environment | {"TEMP": str(tmp_path), "TMPDIR": str(tmp_path)}
    program = folder / "bin" / "docker"
    ports = f"{image.further[0]}-{image.further[-1]}"
    program.write_text(
        DOCKER.format(python=sys.executable, folder=str(image.folder), environment=environment, ports=ports)
    )
    program.chmod(0o755)
    return folder


def typed(checkout: Path, text: str) -> subprocess.CompletedProcess[str]:
    """What these lines print, typed in the checkout."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=checkout, capture_output=True, text=True, timeout=60, check=True
    )


@contextlib.contextmanager
def running(checkout: Path, text: str, address: str) -> Iterator[None]:
    """The server that these lines start, until it says at this address that it is well; ended as Ctrl-C would."""
    path = f"{checkout / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    console = checkout / "console"
    with console.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=checkout,
            env=os.environ | {"PATH": path},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for _ in poll(60, f"{address} says yes"):
            assert process.poll() is None, console.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(address).status_code == 200:
                    break
        family = psutil.Process(process.pid).children(recursive=True)
        yield
        os.killpg(process.pid, signal.SIGINT)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive, f"left running: {alive}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_page_on_sagemaker_serves_a_digit(checkout: Path, image: ImageHome) -> None:
    """Packed, unpacked where SageMaker would, and asked as SageMaker asks."""
    port = str(image.port)
    typed(checkout, block(SAGEMAKER, "pack"))
    with tarfile.open(checkout / "model.tar.gz") as packed:
        assert packed.getnames() == ["digits.mar"]
    with running(checkout, block(SAGEMAKER, "try").replace("8080", port), f"http://127.0.0.1:{port}/ping"):
        told = typed(checkout, block(SAGEMAKER, "ask").replace("8080", port)).stdout

    ping, _, answer = told.partition("}\n")
    assert json.loads(f"{ping}}}") == {"Status": "Healthy"}
    assert next(iter(json.loads(answer))) == "7"


def test_the_page_on_vertex_serves_a_digit(checkout: Path, image: ImageHome) -> None:
    """At the routes and the port that its variables name."""
    port = str(image.port)
    with running(checkout, block(VERTEX, "try").replace("7080", port), f"http://127.0.0.1:{port}/health"):
        told = typed(checkout, block(VERTEX, "ask").replace("7080", port)).stdout

    health, _, answer = told.partition("}\n")
    assert json.loads(f"{health}}}") == {"status": "Healthy"}
    assert next(iter(json.loads(answer)["predictions"][0])) == "7"


def test_another_archive_of_vertexs_folder_is_named_in_the_file(tmp_path: Path) -> None:
    """And may be fetched."""
    (tmp_path / "config.properties").write_text(f"model_store=.\n{block(VERTEX, 'other')}")

    settings = load_settings("torchserve", {}, {"AIP_STORAGE_URI": "gs://bucket/4"}, tmp_path)

    assert [str(model) for model in settings.load_models] == ["gs://bucket/4/digits.mar"]
    assert settings.allowed_urls == ("gs://bucket/4/.*",)
