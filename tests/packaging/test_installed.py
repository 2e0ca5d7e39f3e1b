"""The wheel alone in an empty environment: what `pip install marserve` brings, and the README typed from there.

Takes minutes and asks the package index: `make package-test` runs it, `make test` does not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.commands import addresses, type_in
from support.distributions import ROOT, installable
from support.installed import environment, install, interpreter, serving, wait_until_ready
from support.pages import block
from support.server import free_ports
from support.wheels import write_wheel

pytestmark = pytest.mark.long

PAGE = "docs/deploy/install.md"
RUNTIMES = ("torch", "onnxruntime", "grpc", "nvidia", "triton", "ray", "obstore")
PYTHONS = ("3.11", "3.12", "3.13")
START_WITHIN_S = 1.0
STARTS = 5


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel of this checkout; that of its client is found beside it."""
    with installable(tmp_path_factory.mktemp("wheel")) as built:
        yield built


@pytest.fixture(scope="module")
def programs(wheel: Path) -> Iterator[Path]:
    """The programs of an environment with the wheel, and what it asks for at the versions that are pinned."""
    with environment(sys.executable, f"{wheel}") as folder:
        yield folder


def distributions(programs: Path) -> set[str]:
    """What is installed."""
    ask = "import importlib.metadata as m; print(*(each.name.lower() for each in m.distributions()))"
    return set(type_in(f"python -c '{ask}'", programs, programs).stdout.split())


def test_no_runtime_and_nothing_of_cuda_comes_by_itself(wheel: Path, tmp_path: Path) -> None:
    """At the newest versions that the index has, asked without installing."""
    report = tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    asked = subprocess.run(
        [*pip, "--report", str(report), str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    names = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}

    assert {"marserve", "marserve-client", "fastapi", "uvicorn"} <= names
    assert not [name for name in names if name.startswith(RUNTIMES) or "cuda" in name]


def test_every_module_of_the_server_can_be_imported(programs: Path, tmp_path: Path) -> None:
    """Nothing that is not asked for is needed; of handlers and surfaces, those that have an extra say its name."""
    imports = "import marserve.app.server, marserve.worker.loop, marserve.cli.command_list as cli; cli.build_commands()"
    ran = type_in(f"python -c '{imports}'", tmp_path, programs)

    assert ran.returncode == 0, ran.stderr
    assert "marserve" in distributions(programs)
    assert not distributions(programs) & set(RUNTIMES)


def test_it_starts_in_under_a_second(programs: Path, tmp_path: Path) -> None:
    """From the command to the first answer of `/livez`: the fastest of five, after one that fills caches.

    What else the machine does at the time only adds to it, so the wait for a core is taken off where it is counted.
    """
    (tmp_path / "model_store").mkdir()
    taken = []
    for _ in range(STARTS + 1):
        ports = free_ports(5)
        begun = time.monotonic()
        with serving(programs, tmp_path, ports) as server:
            taken.append(time.monotonic() - begun - wait_for_a_core_s(server.pid))

    assert min(taken[1:]) < START_WITHIN_S, taken


def wait_for_a_core_s(pid: int) -> float:
    """How long a process's first thread was ready to run and did not; 0 where nobody counts it."""
    counted = Path(f"/proc/{pid}/schedstat")
    return int(counted.read_text().split()[1]) / 1e9 if counted.exists() else 0.0


def test_without_a_model_store_it_starts_and_says_so(programs: Path, tmp_path: Path) -> None:
    """It is honest outside of a checkout: no model, a line in the log, 404; and it can be told to load one."""
    ports = free_ports(5)
    with serving(programs, tmp_path, ports) as server:
        answer = httpx.post(f"http://127.0.0.1:{ports[0]}/predictions/digits", content=b"")
        ready = httpx.get(f"http://127.0.0.1:{ports[0]}/readyz")

    assert answer.status_code == 404
    assert ready.status_code == 200
    assert "model_store is 'model_store', and there is no such folder" in server.console.read_text()


def test_the_manual_page_is_found(programs: Path, tmp_path: Path) -> None:
    """`man marserve`, as soon as the environment's programs are on the path."""
    if shutil.which("man") is None:
        pytest.skip("man is not installed")

    ran = type_in("unset MANPATH; man --where marserve", tmp_path, programs)

    assert ran.stdout.strip() == str(programs.parent / "share" / "man" / "man1" / "marserve.1")


def test_the_page_on_installing_works_with_the_wheel_alone(programs: Path, tmp_path: Path) -> None:
    """The first answer and the extras, typed as they stand there."""
    (tmp_path / "hello.py").write_text(block(PAGE, "hello.py"))
    ports = free_ports(5)
    variables = {**addresses(*ports), "TMPDIR": str(tmp_path)}

    try:
        ran = type_in(block(PAGE, "answer").replace(":8080", f":{ports[0]}"), tmp_path, programs, variables)
    finally:
        type_in("marserve stop --kill", tmp_path, programs, variables)

    assert "Hello, world!" in ran.stdout, ran.stdout + ran.stderr


def test_without_pip_what_models_require_is_installed_all_the_same(wheel: Path, tmp_path: Path) -> None:
    """As in the images, and in environments of uv's: nothing but marserve and what it asks for."""
    write_wheel(tmp_path, "tiny")
    (tmp_path / "requirements.txt").write_text("--no-index\n./tiny-1.0-py3-none-any.whl\n")
    (tmp_path / "asks.py").write_text(
        "import tiny\n\ndef handle(rows, context):\n    return [tiny.version for _ in rows or []]\n"
    )
    archive = (
        "marserve archive asks --handler asks.py --requirements-file requirements.txt "
        "--extra-file tiny-1.0-py3-none-any.whl --export-path model_store"
    )
    (tmp_path / "model_store").mkdir()
    ports = free_ports(5)
    settings = {
        "INSTALL_PY_DEP_PER_MODEL": "true",
        "ENVIRONMENT_FOLDER": str(tmp_path / "kept"),
        "STRICT_START": "true",
    }
    with tempfile.TemporaryDirectory(prefix="marserve-package-") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        programs = Path(folder) / "bin"
        pip = [sys.executable, "-m", "pip", "--python", f"{programs}/python", "install", "-q"]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel)], check=True)
        packed = type_in(archive, tmp_path, programs)
        assert packed.returncode == 0, packed.stderr
        with serving(
            programs,
            tmp_path,
            ports,
            "marserve start --foreground --models asks.mar",
            **{f"MARSERVE_{name}": value for name, value in settings.items()},
        ):
            wait_until_ready(ports[0])
            answer = httpx.post(f"http://127.0.0.1:{ports[0]}/predictions/asks", content=b"x", timeout=30)
        there = distributions(programs)

    assert answer.text == "1.0"
    assert not {"pip", "tiny"} & there


@pytest.mark.parametrize("version", PYTHONS)
def test_other_pythons_serve_a_handler_with_the_extras_beside_it(version: str, wheel: Path, tmp_path: Path) -> None:
    """With the extras of the page: the server answers over REST with a handler; what they brought can be imported."""
    variables = {"PIP_FIND_LINKS": os.environ["PIP_FIND_LINKS"]}
    (tmp_path / "hello.py").write_text(block(PAGE, "hello.py"))
    ports = free_ports(5)
    variables |= {**addresses(*ports), "TMPDIR": str(tmp_path)}
    typed = [block(PAGE, "extras"), "python --version", block(PAGE, "answer").replace(":8080", f":{ports[0]}")]

    with environment(interpreter(version), "pip") as programs:
        try:
            ran = type_in("\n".join(typed), tmp_path, programs, variables)
        finally:
            stopped = type_in("marserve stop --kill", tmp_path, programs, variables)
        found = type_in("python -c 'import onnxruntime, google.protobuf, h2'", tmp_path, programs)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"Python {version}." in ran.stdout
    assert "Hello, world!" in ran.stdout
    assert "No server runs" in stopped.stdout + stopped.stderr
    assert found.returncode == 0, found.stderr


# ------------------------------------------------------------------------------------------------------ the README


def readme_blocks() -> list[str]:
    """What stands indented in the README, in order; empty lines part blocks, but not the program in Python."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    blocks = [re.sub(r"^    ", "", each, flags=re.MULTILINE).strip("\n") for each in found]
    return [part for each in blocks for part in ([each] if "import" in each else each.split("\n\n"))]


def test_the_readme_can_be_followed_with_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """All it has typed, from `make serve` (whose line `marserve start …` is typed here) to a second version.

    Beside the wheel there is what the README names: the model store, the settings and the pictures of the example.
    """
    for name in ("model_store", "examples/digits/pictures"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "config.properties", tmp_path)
    ports = free_ports(5)
    serve = re.search(r"^serve:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert serve
    (python_program,) = (each for each in readme_blocks() if "import Client" in each)
    torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch

    with environment(sys.executable, f"torch=={torch[1]}") as programs:
        install(programs, f"{wheel}[torch,grpc]")
        with serving(programs, tmp_path, ports, serve[1]):
            wait_until_ready(ports[0])
            said = ""
            # `make serve` is above, images and `marserve run` have tests of their own, and /path/to is a TorchServe.
            others = ("make ", "docker ", "{", "from ", "# digits.py", "torchserve ", "marserve run ")
            elsewhere = ("/path/to/", '"pixels"')
            typed = [
                each
                for each in readme_blocks()
                if not each.startswith(others) and not any(word in each for word in elsewhere)
            ]
            for each in typed:
                line = each.replace(".venv/bin/", "").replace(":8080", f":{ports[0]}")
                ran = type_in(line, tmp_path, programs, {**addresses(*ports), "TMPDIR": str(tmp_path)})
                assert ran.returncode == 0, f"{each}\n{ran.stdout}{ran.stderr}"
                said += ran.stdout
            (tmp_path / "ask.py").write_text(python_program.replace(":8080", f":{ports[0]}"))
            asked = type_in("python ask.py", tmp_path, programs)
            unregister = type_in(
                "marserve set-default digits 2.0; marserve unregister digits --version 1.0",
                tmp_path,
                programs,
                {**addresses(*ports), "TMPDIR": str(tmp_path)},
            )

    first = next(json.loads(each) for each in readme_blocks() if each.startswith("{"))
    answers = [json.loads(each) for each in re.findall(r"\{[^{}]*\}", said)]
    assert answers
    assert all(answer == pytest.approx(first, abs=1e-4) for answer in answers)
    assert "2.0" in said
    assert "'7'" in asked.stdout, asked.stderr
    assert unregister.returncode == 0, unregister.stderr
