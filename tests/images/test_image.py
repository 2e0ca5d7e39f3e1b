"""The cpu image, built and run for real: what is in it, how big it is, whom it runs as, and how it ends.

`make image-test` runs these. They need buildah, podman and runc, and are skipped, saying so, where those are missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import marserve
from support.image_containers import HOME, Running
from support.images import BASE, ROOT, RUN_FLAGS, configuration, is_compiler, layers, missing, mounted, run
from support.load import Load
from support.server import poll

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

SITE = "home/venv/lib/python3.11/site-packages"
OWN_BYTES_LIMIT = 200_000_000
PICTURE = ROOT / "examples/digits/pictures/7.png"


@pytest.fixture(scope="module")
def added(image: str) -> dict[str, int]:
    """What the image has above its base: by path, the bytes of each file; 0 for folders and links."""

    def files(root: Path) -> dict[str, int]:
        found = {}
        for folder, folders, names in os.walk(root):
            for name in [*names, *folders]:
                path = Path(folder, name)
                is_file = path.is_file() and not path.is_symlink()
                found[str(path.relative_to(root))] = path.stat().st_size if is_file else 0
        return found

    with mounted(BASE) as below, mounted(image) as above:
        before, after = files(below), files(above)
    return {path: size for path, size in after.items() if before.get(path) != size}


@pytest.fixture
def running(image: str, tmp_path: Path) -> Iterator[Running]:
    """The image with the digits model, ready."""
    container = Running(image, tmp_path, "serve", "--models", "all")
    try:
        container.wait_until_ready()
        yield container
    finally:
        container.remove()


def say(figure: str) -> None:
    """A line for the report that `make image-test` ends with."""
    sys.stdout.write(f"{figure}\n")


# ------------------------------------------------------------------------------------------------------- what it is


def test_it_says_how_it_is_run(image: str) -> None:
    """User, programs, ports, folders, health: what engines read from an image and not from a Dockerfile."""
    found = configuration(image)

    assert found["User"] == "1000:0"
    assert found["Entrypoint"] == ["/home/venv/bin/python", "-P", "-m", "marserve.cli.container"]
    assert found["Cmd"] == ["serve"]
    assert set(found["ExposedPorts"]) == {f"{port}/tcp" for port in (8080, 8081, 8082, 7070, 7071)}
    assert set(found["Volumes"]) == {"/home/model-server/tmp", "/home/model-server/logs"}
    assert found["Healthcheck"]["Test"][-1] == "marserve.cli.healthcheck"
    assert found["Labels"]["org.opencontainers.image.version"] == marserve.__version__
    assert found["Labels"]["org.opencontainers.image.revision"] == "0123abc"


def test_it_holds_what_serves_and_nothing_else(added: dict[str, int]) -> None:
    """No compilers, caches, tests, secrets, history or installers, and nothing of the repository but its packages."""
    packages = {path.partition(f"{SITE}/")[2].partition("/")[0] for path in added if path.startswith(SITE)}
    unwanted = {
        "compilers": [path for path in added if is_compiler(path)],
        "caches": [
            path for path in added if re.match(r"var/(?:cache|lib/apt/lists)/.*[^/]$|.*/\.cache/", path) and added[path]
        ],
        "tests": [path for path in added if re.search(r"/site-packages/(?!torch/|marserve).*/tests?/", path)],
        "history": [path for path in added if re.search(r"(?:^|/)\.(?:git|hg|venv|github|ci)(?:/|$)", path)],
        "secrets": [
            path
            for path in added
            if re.search(
                r"\.(?:pem|key|p12|pfx|jks)$|(?:^|/)(?:id_[a-z0-9]+|\.env|\.netrc|\.pypirc|pip\.conf|credentials)$",
                path,
            )
            and not path.endswith(("certifi/cacert.pem", "grpc/_cython/_credentials/roots.pem"))
        ],
        "installers": sorted(packages & {"pip", "setuptools", "wheel", "pkg_resources", "hatchling", "uv"}),
        "the build's own": [path for path in added if path.startswith(("build", "layer", "root/", "tmp/"))],
    }

    assert {kind: found[:5] for kind, found in unwanted.items() if found} == {}
    assert {"marserve", "marserve_client", "marserve_handlers", "torch", "onnxruntime"} <= packages
    outside = {path.split("/")[0] for path in added}
    assert outside <= {"home", "etc", "usr", "var"}


def test_without_torch_and_onnx_it_is_small(image: str, added: dict[str, int]) -> None:
    """Under 200 MB above the base, beside torch and ONNX Runtime with what these ask for themselves."""
    with mounted(image) as root:
        theirs = closure(root / SITE, {"torch", "onnxruntime"})
        owned = {str(Path(SITE, path)) for name in theirs for path in files_of(root / SITE, name)}
    sizes = {"torch and ONNX Runtime": 0, "all else": 0}
    for path, size in added.items():
        is_theirs = path in owned or re.sub(r"__pycache__/([^/]+)\.cpython-\d+\.pyc$", r"\1.py", path) in owned
        sizes["torch and ONNX Runtime" if is_theirs else "all else"] += size

    for layer in layers(image):
        say(f"{layer.size / 1e6:8.1f} MB  {layer.made_by[:110]}")
    say(f"{ {name: f'{size / 1e6:.1f} MB' for name, size in sizes.items()} }, the former with {sorted(theirs)}")
    assert sizes["all else"] < OWN_BYTES_LIMIT
    assert sizes["torch and ONNX Runtime"] > OWN_BYTES_LIMIT


def closure(site: Path, roots: set[str]) -> set[str]:
    """These distributions and all that they require, of what is installed there."""
    found = {name_of(dist.metadata["Name"]): dist for dist in importlib.metadata.distributions(path=[str(site)])}
    done: set[str] = set()
    left = set(roots)
    while left:
        name = left.pop()
        if name in found and name not in done:
            done.add(name)
            left |= {name_of(line) for line in found[name].requires or [] if "extra" not in line}
    return done


def name_of(requirement: str) -> str:
    """The distribution that a requirement names, as indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]).lower()


def files_of(site: Path, name: str) -> list[str]:
    """The files of a distribution, as its record has them."""
    found = importlib.metadata.distributions(path=[str(site)])
    return [str(path) for dist in found if name_of(dist.metadata["Name"]) == name for path in dist.files or []]


# ------------------------------------------------------------------------------------------------------ how it runs


def test_any_user_runs_it_under_a_read_only_root_without_capabilities(running: Running) -> None:
    """OpenShift's restricted profile and Kubernetes' agree on that much; a digit is read under it."""
    answer = httpx.post(f"{running.address}/predictions/digits", content=PICTURE.read_bytes(), timeout=30)
    assert max(answer.json(), key=answer.json().get) == "7"

    status = dict(
        line.split(":\t", 1) for line in running.inside("cat", "/proc/1/status").splitlines() if ":\t" in line
    )
    assert status["Uid"].split()[0] == "12345"
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"

    places = ["/", "/tmp", "/etc", "/home/venv", HOME, f"{HOME}/model-store", f"{HOME}/tmp", f"{HOME}/logs"]
    asked = f"import os; print([place for place in {places!r} if os.access(place, os.W_OK)])"
    assert running.inside("python", "-c", asked) == f"['{HOME}/tmp', '{HOME}/logs']"

    words = configuration(running.image)["Healthcheck"]["Test"]
    assert words[0] == "CMD"
    assert running.inside(*words[1:]) == "The server is ready."


def test_what_it_brings_can_be_imported(image: str) -> None:
    """Packages' tests were taken out; none of them is imported by what was left."""
    modules = (
        "torch, torch.testing, onnxruntime, numpy.testing, PIL.Image, grpc, obstore, huggingface_hub, cryptography, ts"
    )
    said = run(
        "podman",
        "run",
        "--rm",
        *RUN_FLAGS,
        image,
        "python",
        "-c",
        f"import {modules}; print('all')",
    )

    assert said == "all"


def test_sigterm_under_load_loses_nothing_and_ends_with_0(running: Running) -> None:
    """For the five seconds that a platform needs, then no more; what was accepted is answered."""
    picture = PICTURE.read_bytes()
    with Load(running.address, "digits", clients=4, pause_s=0.002, body=lambda _: picture) as load:
        for _ in poll(30, "the load is under way"):
            if load.statuses()[200] > 100:
                break
        running.signal(signal.SIGTERM)
        told = time.monotonic()
        status = running.wait()
        took = time.monotonic() - told

    assert status == 0, running.output()[-3000:]
    assert 5 <= took < 15
    statuses = load.statuses()
    late = [reply for reply in load.replies if reply.status == 200 and reply.began > told + 4]
    assert late, "no request was answered any more in the time that others need to look away"
    assert set(statuses) <= {200, 503, 0}
    assert {failure.partition("(")[0] for failure in load.failures} <= {"ConnectionRefusedError"}
    say(f"{statuses[200]} answered, {statuses[503]} refused, then refused connections; ended after {took:.1f} s")


def test_a_container_that_is_managed_from_outside_says_how(running: Running) -> None:
    """Both ways stand in its log; the command line inside it manages it meanwhile."""
    said = running.output()

    assert "disable_token_authorization=false" in said
    assert "MARSERVE_ALLOW_OPEN_MANAGEMENT=true" in said
    assert "digits" in running.inside("marserve", "models", "--config", "/home/model-server/config.properties")


def test_torchserves_command_line_runs_it_and_it_ends_with_its_server(image: str, tmp_path: Path) -> None:
    """`torchserve --start …` stays in front; when the server dies, so does the container."""
    line = ["torchserve", "--start", "--ncs", "--model-store", "model-store", "--models", "digits=digits.mar"]
    container = Running(image, tmp_path, *line)
    try:
        container.wait_until_ready()
        kill = f"import os; os.kill(int(open('{HOME}/tmp/.model_server.pid').read()), 9)"
        container.inside("python", "-c", kill)
        assert container.wait() == 137
    finally:
        container.remove()


def test_the_first_answer_comes_soon(image: str, tmp_path: Path) -> None:
    """From `podman run` to the digits model's first answer, beside what importing torch takes there; printed."""
    clock = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
    container = Running(image, tmp_path, "serve", "--models", "all")
    try:
        container.wait_until_ready()
        answer = httpx.post(f"{container.address}/predictions/digits", content=PICTURE.read_bytes(), timeout=60)
        took = time.monotonic() - container.began
        assert answer.status_code == 200
        importing = float(container.inside("python", "-c", clock))
    finally:
        container.remove()
    say(f"first answer {took:.2f} s after the start; importing torch alone takes {importing:.2f} s there")
