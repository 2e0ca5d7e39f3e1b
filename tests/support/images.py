"""Images built and run without a Docker engine, by buildah, podman and runc, as root; and a `docker` made of them.

A base is built once with debootstrap where the machine has none. What pip is told of indexes here is told to the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASE = os.environ.get("MARSERVE_BASE_IMAGE", "localhost/python:3.11-slim")
TOOLS = ("buildah", "podman", "runc")
# For a sandbox that gives containers no network, no further limits and no systemd; crun does not start there.
RUN_FLAGS = (
    *("--network=host", "--runtime=runc", "--no-healthcheck"),
    *("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"),
)
# Flags of `docker run`, with a word each, that need a device.
DEVICE_FLAGS = ("--gpus", "--device", "--group-add")


def missing() -> str | None:
    """Why no image can be built here, None if one can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian's packages buildah, podman, runc): no image is built"
    if os.geteuid() != 0:
        return "images are built here as root alone, for want of user namespaces"
    if not has_image(BASE) and shutil.which("debootstrap") is None:
        return f"there is no image {BASE} and no debootstrap to make one: name one with MARSERVE_BASE_IMAGE"
    return None


def run(*words: str | Path, limit_s: float = 900, check: bool = True, **more: Any) -> str:
    """Run a program to its end and return what it printed; with `check`, of one that failed raise all it said."""
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    ran = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=environment,
        check=False,
        **more,
    )
    assert not check or ran.returncode == 0, f"{words} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout.strip()


def has_image(name: str) -> bool:
    """Whether this machine has it."""
    return subprocess.run(["podman", "image", "exists", name], check=False).returncode == 0


def make_base(folder: Path) -> None:
    """Build the base: Debian with Python, in minutes."""
    packages = "ca-certificates,python3,python3-venv,python3-pip"
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", folder / "root")
    (folder / "root/usr/bin/python").symlink_to("python3")
    run("tar", "-C", folder / "root", "-cf", folder / "base.tar", ".")
    (folder / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["python3"]\n')
    run("buildah", "bud", "--format", "docker", "-t", BASE, folder)


def build_flags() -> list[str]:
    """What a build needs to know of this machine: its base, its pip's indexes and certificates."""
    flags = ["--layers", "--force-rm", "--format", "docker", "--build-arg", f"BASE={BASE}"]
    found: dict[str, str] = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2].strip()] = value.strip("'\"")
    wheels = next((Path(word) for word in found.get("find-links", "").split() if Path(word).is_dir()), None)
    if wheels is not None:
        flags += ["--volume", f"{wheels}:/mnt:ro", "--build-arg", "PIP_FIND_LINKS=/mnt"]
        if any(wheels.glob("torch-*")):
            flags += ["--build-arg", "TORCH_INDEX="]
    if index := found.get("index-url"):
        flags += ["--build-arg", f"PIP_INDEX_URL={index}"]
    certificates = Path(found.get("cert", ""))
    if certificates.is_file():
        flags += ["--volume", f"{certificates}:{certificates}:ro"]
    return flags


def build(target: str, tag: str, *more: str) -> None:
    """Build a target of docker/Dockerfile."""
    run("buildah", "bud", *build_flags(), "-f", ROOT / "docker/Dockerfile", "--target", target, "-t", tag, *more, ROOT)


@contextmanager
def mounted(image: str) -> Iterator[Path]:
    """The image's files, to look at."""
    container = run("buildah", "from", image)
    try:
        yield Path(run("buildah", "mount", container))
    finally:
        run("buildah", "rm", container)


@dataclass(frozen=True)
class Layer:
    """One layer of an image: its bytes, and the instruction that made it."""

    size: int
    made_by: str


def layers(image: str) -> list[Layer]:
    """The image's layers that hold anything, the first one first."""
    history = json.loads(run("podman", "history", "--no-trunc", "--format", "json", image))
    found = [Layer(int(each.get("size", 0)), str(each.get("CreatedBy", each.get("createdBy", "")))) for each in history]
    return [layer for layer in reversed(found) if layer.size]


def configuration(image: str) -> dict[str, Any]:
    """What the image says of its programs, ports, users and health."""
    (found,) = json.loads(run("podman", "image", "inspect", image))
    return {"Healthcheck": found.get("Healthcheck"), **found["Config"]}


def docker_in(folder: Path, *, torch_lock: str | None = None) -> Path:
    """A folder with a program `docker`, for command lines out of the documentation.

    With `torch_lock` images are built by that lock, whatever the line says, and run without the devices that it names.
    """
    folder.mkdir(exist_ok=True)
    program = folder / "docker"
    builds = build_flags()
    instead = [] if torch_lock is None else [*torch_index(builds), "--build-arg", f"TORCH_LOCK={torch_lock}"]
    program.write_text(
        textwrap.dedent(f"""\
        #!{sys.executable}
        import os, sys
        words = sys.argv[1:]
        if words[0] == "build":
            line = ["buildah", "bud", *{builds!r}, *words[1:-1], *{instead!r}, words[-1]]
        elif words[0] == "run":
            while {torch_lock!r} and (found := [word for word in {DEVICE_FLAGS!r} if word in words]):
                place = words.index(found[0])
                del words[place : place + 2]
            line = ["podman", "run", *{RUN_FLAGS!r}, *words[1:]]
        else:
            line = ["podman", *words]
        os.environ["BUILDAH_ISOLATION"] = "chroot"
        os.execvp(line[0], line)
        """)
    )
    program.chmod(0o755)
    return folder


def torch_index(flags: Sequence[str]) -> list[str]:
    """What says to a build where torch's CPU build is: in a folder of wheels that the flags name, or at its makers'."""
    is_here = "TORCH_INDEX=" in flags
    return ["--build-arg", "TORCH_INDEX=" if is_here else "TORCH_INDEX=https://download.pytorch.org/whl/cpu"]


def is_compiler(path: str) -> bool:
    """Whether a file of an image is a compiler, an assembler or a linker, by its name."""
    name = path.rpartition("/")[2]
    in_path = re.search(r"(^|/)(?:s?bin|libexec|lib/gcc[^/]*)/", path)
    pattern = (
        r"(?:[a-z0-9_]+-linux-gnu-)?(?:gcc|g\+\+|cc|c\+\+|clang|cpp|ld|as|make|cmake|rustc|cargo|go|nvcc)(?:-[\d.]+)?"
    )
    return bool(in_path) and (name in ("cc1", "cc1plus", "collect2") or re.fullmatch(pattern, name) is not None)
