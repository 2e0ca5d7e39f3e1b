"""What docs/deploy/docker.md tells its reader to type: run with podman in Docker's place, or checked otherwise."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from images.test_dockerfile import instructions, stages
from support.images import BASE, ROOT, docker_in, has_image, make_base, missing, run
from support.pages import block

PAGE = "docs/deploy/docker.md"

built = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.skipif(missing() is not None, reason=str(missing()))]
need_a_builder = [*built, pytest.mark.xdist_group("docker's ports")]


def words_of(name_of_text: str) -> list[list[str]]:
    """The commands of a block, in words."""
    return [shlex.split(line) for line in name_of_text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize(
    "text",
    [block(PAGE, "gpu"), block(PAGE, "gpu-index"), block(PAGE, "rocm"), block(PAGE, "build"), block(PAGE, "dev")],
    ids=["gpu", "gpu-index", "rocm", "build", "dev"],
)
def test_builds_name_targets_and_arguments_that_there_are(text: str) -> None:
    """What cannot be built here is at least what the Dockerfile takes."""
    (build, *_) = words_of(text)
    arguments = {rest.partition("=")[0] for word, line in instructions() if word == "ARG" for rest in line.split()}

    assert build[:4] == ["docker", "build", "-f", "docker/Dockerfile"]
    assert build[build.index("--target") + 1] in stages()
    given = [build[place + 1].partition("=")[0] for place, word in enumerate(build) if word == "--build-arg"]
    assert set(given) <= arguments
    assert build[-1] == "."


def test_a_lock_for_another_index_is_written_as_the_page_says(tmp_path: Path) -> None:
    """With an index that has one build of torch; the lock holds that build's hash."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed: the group `images` of pyproject.toml has it")
    version = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert version
    named = f"torch-{version[1]}+cu126"
    wheel = tmp_path / "index/torch" / f"{named}-cp311-cp311-manylinux_2_28_x86_64.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as made:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version[1]}+cu126\n"
        made.writestr(f"{named}.dist-info/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: cp311-cp311-manylinux_2_28_x86_64\n"
        made.writestr(f"{named}.dist-info/WHEEL", tags)
        made.writestr(f"{named}.dist-info/RECORD", "")
    digest = sha256(wheel.read_bytes()).hexdigest()
    link = f'<a href="{wheel.name.replace("+", "%2B")}#sha256={digest}">{wheel.name}</a>'
    (wheel.parent / "index.html").write_text(link)
    environment = os.environ | {
        "TORCH_INDEX": (tmp_path / "index").as_uri(),
        "TORCH_LOCK": str(tmp_path / "torch.txt"),
        "PATH": f"{Path(uv).parent}{os.pathsep}{os.environ['PATH']}",
        "UV_OFFLINE": "1",
    }

    ran = subprocess.run(
        ["sh", "-euc", block(PAGE, "relock")], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
    written = (tmp_path / "torch.txt").read_text("utf-8")
    assert re.fullmatch(rf"torch=={re.escape(version[1])}\+cu126 \\\n +--hash=sha256:{digest}\n", written)


class Reader:
    """Someone who types what the page says, in the root of a checkout."""

    def __init__(self, tools: Path) -> None:
        self._environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}

    def types(self, text: str, limit_s: float = 900) -> str:
        """Run it in a shell; what it printed."""
        ran = subprocess.run(
            ["sh", "-euc", text],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader who has built the image; no container of his stays."""
    if not has_image(BASE):
        make_base(tmp_path_factory.mktemp("base"))
    with socket.socket() as sock:
        if sock.connect_ex(("127.0.0.1", 8080)) == 0:
            pytest.skip("port 8080, which the page names, is somebody else's here")
    made = Reader(docker_in(tmp_path_factory.mktemp("tools")))
    made.types(block(PAGE, "build"))
    return made


@pytest.fixture
def containers(reader: Reader) -> Iterator[Reader]:
    """A reader whose containers go with the test."""
    yield reader
    for name in ("marserve", "torchserve"):
        run("podman", "rm", "--force", "--time", "0", "--volumes", "--ignore", name)


@pytest.mark.usefixtures("containers")
class TestTyped:
    """Blocks that are run as they stand."""

    pytestmark = need_a_builder

    def test_a_container_is_run_asked_looked_into_and_stopped(self, reader: Reader) -> None:
        """The first blocks, one after the other."""
        reader.types(block(PAGE, "run"))
        answer = reader.types(block(PAGE, "predict"), 120)
        seen = reader.types(block(PAGE, "look"))
        reader.types(block(PAGE, "stop"))

        assert '"7": 0.9' in answer
        assert "digits" in seen
        assert "Model server started." in seen
        assert "marserve" not in run("podman", "ps", "--all", "--format", "{{.Names}}").split()

    def test_a_command_line_for_torchserves_image_serves(self, reader: Reader) -> None:
        """But for the image's name it is theirs."""
        reader.types(block(PAGE, "torchserve"))

        assert '"7": 0.9' in reader.types(block(PAGE, "predict"), 120)

    def test_least_rights_suffice(self, reader: Reader) -> None:
        """As the page writes them."""
        reader.types(block(PAGE, "hardened"))

        assert '"7": 0.9' in reader.types(block(PAGE, "predict"), 120)
        assert run("podman", "exec", "marserve", "id", "-u") == "12345"

    def test_management_asks_for_the_key_that_the_page_shows(self, reader: Reader) -> None:
        """And takes it."""
        reader.types(block(PAGE, "keys"))
        reader.types("until curl -fs http://127.0.0.1:8080/readyz; do sleep 0.5; done", 120)

        key = json.loads(reader.types(block(PAGE, "key")))["management"]["key"]

        assert httpx.get("http://127.0.0.1:8081/models").status_code == 400
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get("http://127.0.0.1:8081/models", headers=headers).json() == {"models": []}
        assert "http://0.0.0.0:8081" in reader.types("docker logs marserve")

    def test_management_is_open_where_that_is_said(self, reader: Reader) -> None:
        """To everybody who reaches it."""
        reader.types(block(PAGE, "open"))
        reader.types("until curl -fs http://127.0.0.1:8080/readyz; do sleep 0.5; done", 120)

        assert "Management API listens on http://0.0.0.0:8081" in reader.types("docker logs marserve")
        assert httpx.get("http://127.0.0.1:8081/models").status_code == 200

    def test_an_image_with_pip_is_made_of_ours(self, reader: Reader, tmp_path: Path) -> None:
        """And runs as the user of ours."""
        (tmp_path / "Dockerfile").write_text(block(PAGE, "with-pip").replace("marserve:cpu", "localhost/marserve:cpu"))
        reader.types(f"docker build -t localhost/marserve-test:pip {tmp_path}")

        said = reader.types("docker run --rm localhost/marserve-test:pip python -m pip --version; true")
        assert "/home/venv/lib" in said

    def test_the_list_of_packages_is_written_beside_the_image(self, reader: Reader) -> None:
        """Into the folder that the page names."""
        reader.types(block(PAGE, "sbom"))

        listed = json.loads((ROOT / "build/sbom/sbom.cdx.json").read_text("utf-8"))
        assert "marserve" in {each["name"] for each in listed["components"]}

    def test_the_image_for_development_runs_tests(self, reader: Reader) -> None:
        """Those that the page names."""
        assert " passed" in reader.types(block(PAGE, "dev"), 1500)
