"""The locks of the images: whole, by hashes, and of the versions that marserve is tested with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What an image can do beside torch and ONNX, which have layers of their own.
EXTRAS = ("grpc", "cloud", "hf", "security", "gpu")
LOCKS = sorted((ROOT / "docker/locks").glob("*.txt"))


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: Path) -> dict[str, tuple[str, int]]:
    """By distribution, its version and how many hashes it has."""
    text = lock.read_text("utf-8").replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, version = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line).groups()  # type: ignore[union-attr]
            found[canonical(name)] = (version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", line)))
    return found


def pinned() -> dict[str, str]:
    """The versions of `constraints.txt`."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonical(name): version for name, version in pairs}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_package_has_a_hash_and_the_version_that_is_tested(lock: Path) -> None:
    """A build tag (`+cpu`) makes no other version."""
    versions = pinned()
    found = locked(lock)

    assert found
    assert all(hashes for _, hashes in found.values())
    wrong = {
        name: version
        for name, (version, _) in found.items()
        if name in versions and version.partition("+")[0] != versions[name]
    }
    assert not wrong, "write the locks again: make image-locks"


def test_the_lock_of_the_server_has_all_that_it_asks_for() -> None:
    """A dependency that was added to pyproject.toml is in the images, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    names = {canonical(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in asked}
    names.remove("marserve-client")  # built from the checkout, as marserve is; what it asks for is locked
    client = tomllib.loads((ROOT / "client/pyproject.toml").read_text("utf-8"))["project"]
    names |= {canonical(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in client["dependencies"]}

    assert not names - set(locked(ROOT / "docker/locks/server.txt")), "write the locks again: make image-locks"


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_no_image_has_pip_or_setuptools(image: str) -> None:
    """Whoever wants a model's own requirements installed adds pip to an image of his own."""
    onnx, runtime = ("onnx", "onnxruntime") if image == "cpu" else ("onnx-gpu", "onnxruntime-gpu")
    names = {name for lock in ("server", onnx, f"torch-{image}") for name in locked(ROOT / f"docker/locks/{lock}.txt")}

    assert not names & {"pip", "setuptools", "wheel"}
    assert {"torch", runtime, "uvicorn"} <= names


def test_the_gpu_images_cuda_is_that_of_its_torch_and_its_onnx_runtime_is_the_tested_one() -> None:
    """NVIDIA's toolkit is told the CUDA that the driver must run; the two packages of one ONNX Runtime never meet."""
    dockerfile = (ROOT / "docker/Dockerfile").read_text("utf-8")
    cuda, _ = locked(ROOT / "docker/locks/torch-gpu.txt")["nvidia-cuda-runtime"]
    runtime, _ = locked(ROOT / "docker/locks/onnx-gpu.txt")["onnxruntime-gpu"]

    assert f"\nARG CUDA={'.'.join(cuda.split('.')[:2])}\n" in dockerfile
    assert 'NVIDIA_REQUIRE_CUDA="cuda>=${CUDA}"' in dockerfile
    assert runtime == pinned()["onnxruntime"]
    assert "onnxruntime" not in locked(ROOT / "docker/locks/onnx-gpu.txt")


def test_torch_for_processors_brings_no_cuda() -> None:
    """Several gigabytes that nobody would use."""
    assert not [name for name in locked(ROOT / "docker/locks/torch-cpu.txt") if name.startswith(("nvidia", "cuda"))]
    assert [name for name in locked(ROOT / "docker/locks/torch-gpu.txt") if name.startswith("nvidia")]
