"""What docs/deploy/docker.md tells its reader to type: run with podman in Docker's place, or checked otherwise."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import trustme

import marserve
from images.test_dockerfile import instructions, stages
from support.connect_proxy import connect_proxy
from support.images import BASE, ROOT, configuration, docker_in, missing, run
from support.own_network import cannot_be_had, own_network
from support.pages import block

PAGE = "docs/deploy/docker.md"
PUBLIC_BASE = "docker.io/library/python:3.11-slim"
MODELS = "http://127.0.0.1:8081/models"
STATUS = "curl -s -o /dev/null -w '%{http_code}'"

built = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.skipif(missing() is not None, reason=str(missing()))]
need_a_builder = [*built, pytest.mark.xdist_group("the page's containers")]


def words_of(name_of_text: str) -> list[list[str]]:
    """The commands of a block, in words."""
    return [shlex.split(line) for line in name_of_text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize(
    "text",
    [
        *(block(PAGE, "gpu"), block(PAGE, "gpu-index"), block(PAGE, "rocm")),
        *(block(PAGE, "build"), block(PAGE, "dev"), block(PAGE, "proxy")),
    ],
    ids=["gpu", "gpu-index", "rocm", "build", "dev", "proxy"],
)
def test_builds_name_targets_and_arguments_that_there_are(text: str) -> None:
    """What cannot be built here is at least what the Dockerfile takes."""
    (build, *_) = words_of(text)
    arguments = {rest.partition("=")[0] for word, line in instructions() if word == "ARG" for rest in line.split()}

    assert build[:4] == ["docker", "build", "-f", "docker/Dockerfile"]
    assert build[build.index("--target") + 1] in stages()
    given = [build[place + 1].partition("=")[0] for place, word in enumerate(build) if word == "--build-arg"]
    assert set(given) <= arguments | {"HTTP_PROXY", "HTTPS_PROXY"}  # which every engine knows
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
    """Someone who types what the page says, in the root of a checkout, on a machine where no port is taken."""

    def __init__(self, tools: Path, network: list[str]) -> None:
        self._environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        self._network = network

    def with_tools(self, tools: Path) -> Reader:
        """The same reader, with this folder's `docker`."""
        return Reader(tools, self._network)

    def types(self, text: str, limit_s: float = 120) -> str:
        """Run it in a shell; what it printed."""
        return self._run([*self._network, "sh", "-euc", text], limit_s)

    def builds(self, text: str, limit_s: float = 1500) -> str:
        """Run what needs the machine's own network, for packages."""
        return self._run(["sh", "-euc", text], limit_s)

    def waits(self) -> None:
        """Until the server is ready."""
        self.types("until curl -fs http://127.0.0.1:8080/readyz; do sleep 0.5; done")

    def _run(self, words: list[str], limit_s: float) -> str:
        ran = subprocess.run(
            words, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
        assert ran.returncode == 0, f"{words[-1]}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[Reader]:
    """A reader who has built the image; no container of his stays.

    After `image`: old buildahs take a label whose build argument has changed from what was built before.
    """
    if why := cannot_be_had():
        pytest.skip(f"{why}: the ports that the page names may be somebody else's")
    with own_network() as network:
        made = Reader(docker_in(tmp_path_factory.mktemp("tools")), network)
        made.builds(block(PAGE, "build"))
        yield made


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
        answer = reader.types(block(PAGE, "predict"))
        seen = reader.types(block(PAGE, "look"))
        reader.types(block(PAGE, "stop"))

        assert '"7": 0.9' in answer
        assert "digits" in seen
        assert '"7": 0.9' in seen
        assert "Model server started." in seen
        assert "marserve" not in run("podman", "ps", "--all", "--format", "{{.Names}}").split()

    def test_a_command_line_for_torchserves_image_serves(self, reader: Reader) -> None:
        """But for the image's name it is theirs."""
        reader.types(block(PAGE, "torchserve"))

        assert '"7": 0.9' in reader.types(block(PAGE, "predict"))

    def test_least_rights_suffice(self, reader: Reader) -> None:
        """As the page writes them."""
        reader.types(block(PAGE, "hardened"))

        assert '"7": 0.9' in reader.types(block(PAGE, "predict"))
        assert run("podman", "exec", "marserve", "id", "-u") == "12345"

    def test_management_asks_for_the_key_that_the_page_shows(self, reader: Reader) -> None:
        """And takes it."""
        reader.types(block(PAGE, "keys"))
        reader.waits()

        key = json.loads(reader.types(block(PAGE, "key")))["management"]["key"]

        assert reader.types(f"{STATUS} {MODELS}") == "400"
        assert json.loads(reader.types(f"curl -s -H 'Authorization: Bearer {key}' {MODELS}")) == {"models": []}
        assert "http://0.0.0.0:8081" in reader.types("docker logs marserve")

    def test_management_is_open_where_that_is_said(self, reader: Reader) -> None:
        """To everybody who reaches it."""
        reader.types(block(PAGE, "open"))
        reader.waits()

        assert "Management API listens on http://0.0.0.0:8081" in reader.types("docker logs marserve")
        assert reader.types(f"{STATUS} {MODELS}") == "200"

    def test_an_image_with_pip_is_made_of_ours(self, reader: Reader, tmp_path: Path) -> None:
        """It has the one pip that the lock names, and runs as the user of ours."""
        (tmp_path / "Dockerfile").write_text(block(PAGE, "with-pip"))
        reader.builds(f"docker build -t localhost/marserve-test:pip {tmp_path}")

        said = reader.types("docker run --rm localhost/marserve-test:pip python -m pip --version")
        version = re.search(r"^pip==(\S+)", (ROOT / "docker/locks/pip.txt").read_text("utf-8"), re.MULTILINE)
        assert version
        assert said.startswith(f"pip {version[1]} from /home/venv/lib")
        assert reader.types("docker run --rm localhost/marserve-test:pip id -u").strip() == "1000"

    def test_the_list_of_packages_is_written_beside_the_image(self, reader: Reader) -> None:
        """Into the folder that the page names, with versions, as installed."""
        reader.builds(block(PAGE, "sbom"))

        document = json.loads((ROOT / "build/sbom/sbom.cdx.json").read_text("utf-8"))
        assert document["bomFormat"] == "CycloneDX"
        listed = {each["name"]: each["version"] for each in document["components"]}
        assert listed["marserve"] == marserve.__version__
        assert {"torch", "onnxruntime", "uvicorn"} <= set(listed)
        assert not {"pip", "setuptools"} & set(listed)

    def test_the_image_for_development_runs_tests(self, reader: Reader) -> None:
        """Those that the page names; it has a compiler, git and pip."""
        assert " passed" in reader.builds(block(PAGE, "dev"))
        for program in ("g++", "git", "make", "python -m pip", "ruff", "mypy"):
            reader.types(f"docker run --rm marserve:dev {program} --version")


# Where kernels that are compiled for a device stay: a folder that the image's user may write to.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.usefixtures("containers")
class TestStandIns:
    """Blocks that are run with something in the place of what is not here."""

    pytestmark = need_a_builder

    @pytest.mark.parametrize(
        ("text", "variables"),
        [
            (
                block(PAGE, "gpu"),
                {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", *CACHES},
            ),
            (block(PAGE, "rocm"), {*CACHES}),
        ],
        ids=["gpu", "rocm"],
    )
    def test_an_image_for_devices_serves_from_torchs_cpu_build(
        self, reader: Reader, text: str, variables: set[str], tmp_path: Path
    ) -> None:
        """By the CPU build's lock, without the device: the rest of the image is what it will be."""
        without_device = reader.with_tools(docker_in(tmp_path / "tools", torch_lock="docker/locks/torch-cpu.txt"))
        build, run_word, rest = text.partition("docker run")

        without_device.builds(build)
        without_device.types(run_word + rest)

        assert '"7": 0.9' in reader.types(block(PAGE, "predict"))
        (image,) = re.findall(r"marserve:\w+", rest)
        of_cpu, here = (set(configuration(name)["Env"]) for name in ("localhost/marserve:cpu", f"localhost/{image}"))
        assert {each.partition("=")[0] for each in here - of_cpu} == variables

    @pytest.mark.parametrize(
        ("text", "lock"),
        [(block(PAGE, "gpu-index"), "torch-cu126.txt"), (block(PAGE, "rocm"), "torch-rocm.txt")],
        ids=["gpu-index", "rocm"],
    )
    def test_a_build_without_its_lock_says_so(self, reader: Reader, text: str, lock: str) -> None:
        """Which one is missing, which there are, and where it is told how to write it."""
        with pytest.raises(AssertionError) as failed:
            reader.builds(text.replace(PUBLIC_BASE, BASE))

        assert f"There is no lock docker/locks/{lock} in the checkout; there are: docker/locks/torch-cpu.txt" in str(
            failed.value
        )

    def test_a_build_behind_a_proxy_asks_the_proxy(self, reader: Reader) -> None:
        """The first stage that fetches anything stands for all; what the proxy is called stays out of it."""
        with connect_proxy() as (address, asked):
            text = block(PAGE, "proxy").replace("http://proxy.example.org:3128", address)
            assert text.count(address) == 2
            tag = "localhost/marserve-test:proxied"
            reader.builds(text.replace("--target cpu -t marserve:cpu", f"--no-cache --target marserve-layer -t {tag}"))
            assert address not in run("podman", "image", "inspect", tag)

        assert asked
        assert {place.rpartition(":")[2] for place in asked} == {"443"}

    def test_a_base_may_trust_a_certificate_of_ones_own(self, reader: Reader, tmp_path: Path) -> None:
        """Of it pip takes what its index shows."""
        authority = trustme.CA(organization_name="planted")
        authority.cert_pem.write_to_path(str(tmp_path / "company.crt"))
        (tmp_path / "Dockerfile").write_text(block(PAGE, "base").replace(PUBLIC_BASE, BASE))
        run("buildah", "bud", "--format", "docker", "-t", "localhost/marserve-test:base", tmp_path)

        shown = (
            "import os, ssl; context = ssl.create_default_context(cafile=os.environ['PIP_CERT']); "
            "print([pair for each in context.get_ca_certs() for pair in each['subject'] if 'planted' in pair[0][1]])"
        )
        said = reader.types(f'docker run --rm localhost/marserve-test:base python -c "{shown}"')
        assert "planted" in said
