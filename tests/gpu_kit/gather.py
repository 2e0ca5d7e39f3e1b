"""Gathers the kit (`make gpu-kit`): wheels of marserve and of what it needs, for CPython 3.11 and 3.12 on x86-64 Linux.

    python -m gpu_kit.gather [FOLDER]        FOLDER is build/gpu-kit

Versions are those of constraints.txt. torch, numpy and Pillow are not in it: they come with the machine, whose torch is
the build for its GPU. `run.py` uses the kit there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The most that kit and checkout together may take.
MOST_BYTES = 50_000_000
PYTHONS = ("3.11", "3.12")
# pip takes each by its exact name. glibc 2.34 is that of the oldest systems that have Python 3.11 and CUDA 13.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)),
    *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")),
)
# What marserve needs, but for what comes with the machine.
NEEDED = (
    *("annotated-doc", "annotated-types", "anyio", "certifi", "click", "fastapi", "h11", "httpcore", "httptools"),
    *("httpx", "idna", "javaproperties", "markdown-it-py", "mdurl", "msgspec", "multipart", "opentelemetry-api"),
    *(
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "Pygments",
        "PyYAML",
        "rich",
        "safetensors",
        "setproctitle",
        "shellingham",
    ),
    *("starlette", "typer", "typing_extensions", "typing-inspection", "uvicorn", "uvloop", "watchfiles"),
)
# NVIDIA's library, and what tests and benchmarks need.
WANTED = (
    *("nvidia-ml-py", "execnet", "hypothesis", "iniconfig", "packaging", "pluggy", "psutil", "pytest"),
    *("pytest-timeout", "pytest-xdist", "sortedcontainers"),
)
# What is not in the kit.
THERE = ("torch", "numpy", "pillow")


def pins(constraints: str) -> list[str]:
    """`NAME==VERSION` of all that the kit has. Raises KeyError for one without a version."""
    found = {plain(name): f"{name}=={version}" for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)$", constraints)}
    return [found[plain(name)] for name in (*NEEDED, *WANTED)]


def plain(name: str) -> str:
    """A package's name, whatever its spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()


def gather(folder: Path) -> None:
    """Make the kit anew. Raises CalledProcessError where pip fails, ValueError where the kit is too large."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    own = [str(ROOT), str(ROOT / "client"), str(ROOT / "handlers/marserve_handlers/ts_compat")]
    building = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels)]
    subprocess.run([*pip, "wheel", "--quiet", *building, *own], check=True)
    pinned = pins((ROOT / "constraints.txt").read_text("utf-8"))
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    for python in PYTHONS:
        choosing = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms]
        command = [*pip, "download", "--quiet", "--no-deps", *choosing, "--dest", str(wheels), *pinned]
        subprocess.run(command, check=True)
    built = [wheel.name.split("-")[:2] for wheel in wheels.glob("marserve*.whl")]
    marserve = [f"{plain(name)}=={version}" for name, version in built]
    (folder / "requirements.txt").write_text("\n".join([*sorted(marserve), *pinned]) + "\n")
    here, there = size_of(wheels.iterdir()), size_of(tracked())
    print(f"{folder}: {here / 1e6:.1f} MB of wheels, and a checkout of {there / 1e6:.1f} MB", flush=True)
    if here + there > MOST_BYTES:
        raise ValueError(f"kit and checkout take {(here + there) / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f} MB")
    print("On the machine, in the checkout: python3 tests/gpu_kit/run.py tests    (or bench)", flush=True)


def tracked() -> list[Path]:
    """The files of the checkout that git knows."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in told.stdout.split("\0") if name and (ROOT / name).is_file()]


def size_of(files: Iterable[Path]) -> int:
    """Of these files together, in bytes."""
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    gather(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/gpu-kit")
