"""`docker/systemd/` and its page: what systemd itself says of the unit, and a server started as the unit starts it.

No systemd runs as process 1 where tests run. In its place a few lines here read the unit, and do what it says.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from marserve.app.server import longest_stop_s
from marserve.settings import load_settings
from support.commands import type_in
from support.distributions import ROOT
from support.pages import block
from support.server import free_ports, poll

PAGE = "docs/deploy/systemd.md"
FOLDER = ROOT / "docker" / "systemd"
UNIT = FOLDER / "marserve.service"
PROGRAMS = Path(sys.executable).parent


def unit(text: str | None = None) -> dict[str, list[str]]:
    """The unit's lines, by key; a key may come several times."""
    found: dict[str, list[str]] = {}
    for line in (text if text is not None else UNIT.read_text()).splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def one(key: str) -> str:
    """The value of a key that stands once."""
    (value,) = unit()[key]
    return value


# --------------------------------------------------------------------------------------------- what systemd says of it


def verified(folder: Path, **drop_ins: str) -> subprocess.CompletedProcess[str]:
    """`systemd-analyze verify`, where the unit's program is one that exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = folder / "marserve.service"
    copy.write_text(UNIT.read_text().replace("/opt/marserve/bin/marserve", "/bin/true"))
    for name, text in drop_ins.items():
        (folder / "marserve.service.d").mkdir(exist_ok=True)
        (folder / "marserve.service.d" / f"{name}.conf").write_text(text)
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    """Neither an unknown key nor a value that it would pass over."""
    ran = verified(tmp_path)

    assert (ran.returncode, ran.stderr) == (0, "")


def test_systemd_finds_nothing_wrong_with_the_drop_ins(tmp_path: Path) -> None:
    """The one for GPUs, and the page's example."""
    ran = verified(tmp_path, gpu=(FOLDER / "gpu.conf").read_text(), limits=block(PAGE, "limits"))

    assert (ran.returncode, ran.stderr) == (0, "")


def test_systemd_would_have_found_a_mistake(tmp_path: Path) -> None:
    """So silence above means something."""
    assert "MemoryMaximum" in verified(tmp_path, bad="[Service]\nMemoryMaximum=1G\n").stderr


def test_the_service_is_exposed_below_2() -> None:
    """Of 10, by systemd's own points; the page says so."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    ran = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_account_is_made_as_the_file_says(tmp_path: Path) -> None:
    """systemd-sysusers reads it, into a root of its own."""
    if shutil.which("systemd-sysusers") is None or os.geteuid() != 0:
        pytest.skip("systemd-sysusers is not installed, or the tests do not run as root")
    (tmp_path / "etc").mkdir()

    ran = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", str(FOLDER / "marserve.sysusers")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^marserve:.*:/var/lib/marserve:.*/nologin$", (tmp_path / "etc/passwd").read_text(), re.MULTILINE)
    assert one("User") == one("Group") == "marserve"


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_installs_what_the_unit_names(tmp_path: Path) -> None:
    """Its lines are typed below a root of their own; systemctl and what makes the account are told, and do nothing.

    The environment is one in name only: that these two lines make one is tested with the page on installing.
    """
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    told = f'echo "${{0##*/}} $*" >> "{tmp_path}/told"'
    for name in ("systemctl", "systemd-sysusers", "pip", "marserve"):
        (stubs / name).write_text(f"#!/bin/sh\n{told}\n")
    (stubs / "python3").write_text(f'#!/bin/sh\nmkdir -p "$3/bin"; cp {stubs}/pip {stubs}/marserve "$3/bin"\n')
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    root = tmp_path / "root"
    root.mkdir()
    lines = block(PAGE, "install") + block(PAGE, "gpu")
    typed = re.sub(r" (?=/(?:etc|opt|var)/)", f" {root}", re.sub(r"^(?=/opt/)", str(root), lines, flags=re.MULTILINE))
    typed = typed.replace(" -o marserve -g marserve", "")  # who is no account here

    ran = type_in(f"cd {ROOT}\n{typed}", tmp_path, stubs)

    assert ran.returncode == 0, ran.stderr
    program, *_ = one("ExecStart").split()
    assert (root / program.lstrip("/")).exists()
    assert (root / "etc/marserve/config.properties").exists()
    assert (root / one("WorkingDirectory").lstrip("/") / "model_store").is_dir()
    assert (root / "etc/systemd/system/marserve.service").read_text() == UNIT.read_text()
    assert (root / "etc/systemd/system/marserve.service.d/gpu.conf").exists()
    assert (tmp_path / "told").read_text().splitlines() == [
        "pip install marserve",
        "systemd-sysusers ",
        "systemctl daemon-reload",
        "systemctl enable --now marserve",
        "systemctl daemon-reload",
        "systemctl restart marserve",
    ]


def test_the_page_watches_the_unit_by_its_name() -> None:
    """Both lines name it."""
    assert all("marserve" in line for line in block(PAGE, "look").splitlines())


# -------------------------------------------------------------------------------------------- started as the unit says


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Where the service tells how it is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        yield listener


def start(folder: Path, config: str, prefix: list[str] | None = None) -> subprocess.Popen[str]:
    """What `ExecStart=` says, with the unit's umask and folder, and the two paths of an installation in `folder`."""
    (folder / "config.properties").write_text(config)
    (folder / "state" / "model_store").mkdir(parents=True)
    (folder / "tmp").mkdir()
    line = one("ExecStart").replace("/opt/marserve/bin", str(PROGRAMS))
    line = line.replace("/etc/marserve/config.properties", str(folder / "config.properties"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MARSERVE_", "TS_"))}
    return subprocess.Popen(
        [*(prefix or []), *line.split()],
        cwd=folder / "state",
        umask=int(one("UMask"), 8),
        env={**inherited, "NOTIFY_SOCKET": str(folder / "notify"), "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def settings(ports: list[int]) -> str:
    """A file with these ports, and otherwise the defaults."""
    keys = [f"{api}_address=http://127.0.0.1:" for api in ("inference", "management", "metrics")]
    keys += [f"grpc_{api}_port=" for api in ("inference", "management")]
    lines = [f"{key}{port}" for key, port in zip(keys, ports, strict=True)]
    return "\n".join([*lines, "model_store=model_store", "load_models=all", "drain_timeout=100", ""])


def in_a_sandbox(folder: Path) -> list[str]:
    """What of the unit's hardening bubblewrap can do: a read-only root but for the state, no devices, no rights."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return (
        "bwrap --ro-bind / / --dev /dev --proc /proc --unshare-pid --unshare-ipc --unshare-user --uid 4711 --gid 4711 "
        f"--tmpfs /tmp --ro-bind {ROOT} {ROOT} --bind {folder} {folder} --cap-drop ALL --new-session --die-with-parent"
    ).split()


@pytest.mark.parametrize("is_sandboxed", [False, True])
def test_the_service_says_when_it_is_ready_and_how_long_its_end_may_take(
    manager: socket.socket, tmp_path: Path, is_sandboxed: bool
) -> None:
    """At READY=1 it answers; at SIGTERM it asks for the time that its settings may need, and ends with status 0."""
    ports = free_ports(5)
    service = start(tmp_path, settings(ports), in_a_sandbox(tmp_path) if is_sandboxed else None)
    try:
        ready = manager.recv(4096).decode().splitlines()
        answer = httpx.get(f"http://127.0.0.1:{ports[0]}/livez")
        os.kill(child_of(service.pid) if is_sandboxed else service.pid, signal.SIGTERM)
        stopping = manager.recv(4096).decode().splitlines()
        said, _ = service.communicate(timeout=30)
    finally:
        service.kill()

    assert ready == ["READY=1", f"STATUS=Answers at http://127.0.0.1:{ports[0]} and http://127.0.0.1:{ports[1]} and "
                     f"http://127.0.0.1:{ports[2]}"]  # fmt: skip
    assert answer.status_code == 200
    assert stopping[0] == "STOPPING=1"
    assert stopping[-1] == "EXTEND_TIMEOUT_USEC=130000000"
    assert service.returncode == 0, said
    assert list((tmp_path / "tmp").iterdir()) == []


def child_of(pid: int) -> int:
    """The server below a program that passes no signal on: the first process of marserve's."""
    family = psutil.Process(pid).children(recursive=True)
    return min(each.pid for each in family if each.name().startswith("marserve"))


def test_wrong_settings_end_with_the_status_that_is_not_tried_again(tmp_path: Path) -> None:
    """One sentence, status 2: the unit's RestartPreventExitStatus."""
    service = start(tmp_path, "job_queue_size=many\n")
    said, _ = service.communicate(timeout=30)

    assert str(service.returncode) == one("RestartPreventExitStatus")
    assert "job_queue_size" in said


def test_the_units_limit_is_above_the_longest_stop_of_the_defaults(tmp_path: Path) -> None:
    """For a systemd that does not hear of the extension in time."""
    (tmp_path / "model_store").mkdir()
    defaults = load_settings("marserve", {}, {}, tmp_path)

    assert float(one("TimeoutStopSec")) > longest_stop_s(defaults)


@pytest.mark.long
@pytest.mark.torch
def test_no_call_of_a_server_and_its_workers_is_filtered(tmp_path: Path) -> None:
    """What strace sees of a start, a prediction with torch and a stop is in the unit's SystemCallFilter."""
    if shutil.which("strace") is None or shutil.which("systemd-analyze") is None:
        pytest.skip("strace or systemd-analyze is not installed")
    ports = free_ports(5)
    (tmp_path / "config.properties").write_text(settings(ports))
    shutil.copytree(ROOT / "model_store", tmp_path / "model_store")
    program = [str(PROGRAMS / "marserve"), "start", "--foreground", "--config", "config.properties"]
    service = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", str(tmp_path / "trace"), *program],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in poll(60, "the model is loaded"):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{ports[0]}/readyz").status_code == 200:
                    break
        picture = (ROOT / "examples/digits/pictures/7.png").read_bytes()
        answer = httpx.post(f"http://127.0.0.1:{ports[0]}/predictions/digits", content=picture, timeout=30)
        os.kill(child_of(service.pid), signal.SIGTERM)
        status = service.wait(60)
    finally:
        service.kill()

    made = set(re.findall(r"^\d+ +([a-z_0-9]+)\(", (tmp_path / "trace").read_text(errors="replace"), re.MULTILINE))
    assert (answer.status_code, status) == (200, 0)
    assert len(made) > 50
    assert made - allowed(unit()["SystemCallFilter"]) == set()


def allowed(filters: list[str]) -> set[str]:
    """The calls that these lines let through, taken in order."""
    calls: set[str] = set()
    for line in filters:
        named = {call for word in line.removeprefix("~").split() for call in calls_of_group(word)}
        calls = calls - named if line.startswith("~") else calls | named
    return calls


def calls_of_group(name: str) -> set[str]:
    """The calls of a group such as @system-service, with those of the groups in it."""
    if not name.startswith("@"):
        return {name}
    listed = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
    words = [line.strip() for line in listed.stdout.splitlines()[1:] if line.strip() and "#" not in line]
    return {call for word in words for call in calls_of_group(word)}
