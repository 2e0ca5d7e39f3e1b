"""The clients that `make test-clients` runs, each unmodified and in an environment of its own.

A line of `ENVIRONMENTS` is a client: its name, what is installed for it (pip's words, `npm:` before npm's), and the
script of `scripts/` that speaks through it. A new client is a line, a script, and tests that take `Client.of(name)`.
`.` stands for this checkout: marserve beside the client, as its users have it. `python -m clients.environments FOLDER`
makes them; one whose line has not changed is left as it is.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
FOLDER = Path(sys.prefix) / "clients"
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Environment:
    """One client: its name, the words of its installation, and its script.

    `glibc` is the oldest version of the C library that its programs run with, empty for any.
    """

    name: str
    packages: str
    script: str
    glibc: str = ""

    @property
    def is_node(self) -> bool:
        """Whether npm installs it and node runs it."""
        return self.packages.startswith("npm:")

    @property
    def why_not(self) -> str:
        """What is missing here; empty if it can be made."""
        if self.is_node and not (shutil.which("node") and shutil.which("npm")):
            return "node and npm"
        here = platform.libc_ver()[1]
        is_older = self.glibc and here and _numbers(here) < _numbers(self.glibc)
        return f"glibc {self.glibc} (here is {here})" if is_older else ""


ENVIRONMENTS = (
    Environment("litserve", "litserve==0.2.19 requests==2.34.2 .", "litserve_client.py"),
    Environment("requests", "requests==2.34.2 urllib3==2.8.0", "requests_client.py"),
    Environment("httpx-sse", "httpx==0.28.1 httpx-sse==0.4.3", "httpx_sse_client.py"),
    Environment("node", "npm:eventsource@4.1.0", "node_client.mjs"),
    Environment("tritonclient", "tritonclient[all]==2.73.0 ml_dtypes==0.5.4", "triton_client.py"),
    Environment("kserve", "kserve==0.21.0", "kserve_client.py"),
    Environment("mlserver", "mlserver==1.7.1 httpx==0.28.1", "mlserver_client.py"),
    # No client: ONNX Runtime's build for OpenVINO cannot be beside the usual one.
    Environment("onnxruntime-openvino", "onnxruntime-openvino==1.24.1 .", "openvino_provider.py"),
    # Where the C library is older pip takes 0.1.0, which is empty.
    Environment("perf-analyzer", "perf-analyzer==2.60.0", "perf_analyzer_client.py", glibc="2.38"),
)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


class CannotMake(Exception):
    """An environment cannot be made; the text has what the installer said."""


def make(environment: Environment, folder: Path) -> bool:
    """Make an environment below the folder; False if it is there already, as its line says. Raises CannotMake."""
    own, is_complete = folder / environment.name, folder / environment.name / "is-made-of"
    if is_complete.exists() and is_complete.read_text() == environment.packages:
        return False
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    if environment.is_node:
        words = [word.removeprefix("npm:") for word in environment.packages.split()]
        steps = [["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix", str(own), *words]]
    else:
        words = environment.packages.split()
        own_packages = ["--editable", str(ROOT / "client"), "--editable", str(ROOT)] if "." in words else []
        installs = [word for word in words if word != "."] + own_packages
        pip = [str(own / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # Beside marserve its versions hold; a client alone takes what it wants.
        constraints = ["--constraint", str(ROOT / "constraints.txt")] if "." in words else []
        steps = [[sys.executable, "-m", "venv", str(own)], [*pip, *constraints, *installs]]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotMake(f"{environment.name} cannot be installed: {done.stderr.strip()[-2000:]}")
    is_complete.write_text(environment.packages)
    return True


@dataclass(frozen=True, slots=True)
class Client:
    """A client whose environment is made."""

    environment: Environment
    folder: Path

    @classmethod
    def of(cls, name: str, folder: Path = FOLDER) -> Client:
        """The client of this name. Skips the test where its environment is not made."""
        [environment] = [each for each in ENVIRONMENTS if each.name == name]
        own = folder / name
        if not (own / "is-made-of").exists():
            why = environment.why_not
            says = f"it needs {why}" if why else "make test-clients does it"
            pytest.skip(f"the client {name} is not installed: {says}")
        return cls(environment, own)

    @property
    def program(self) -> str:
        """What runs its programs: its own Python, or node."""
        return "node" if self.environment.is_node else str(self.folder / "bin" / "python")

    def run(self, *words: object) -> Any:
        """Run its script with these words, in its environment alone; returns the JSON that it prints."""
        variables = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        script = SCRIPTS / self.environment.script
        if self.environment.is_node:  # node looks for packages from the script's own folder on
            script = Path(shutil.copy(script, self.folder))
        ran = subprocess.run(
            [self.program, str(script), *map(str, words)],
            capture_output=True,
            text=True,
            env=variables,
            cwd=self.folder,
            timeout=LIMIT_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)


def main(folder: Path) -> int:
    """Make all that can be made here; 1 if an installation failed."""
    failed = False
    for environment in ENVIRONMENTS:
        if environment.why_not:
            print(f"{environment.name} is left out: {environment.why_not} is missing", file=sys.stderr)
            continue
        try:
            if make(environment, folder):
                print(f"made {environment.name}: {environment.packages}", file=sys.stderr)
        except CannotMake as why:
            print(why, file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
