"""Servers that cannot start: real processes, one sentence, the right status, nothing left of them."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.workplace import Workplace

# What a failed start may compute for: its time on a machine that does nothing else, whatever this one does.
LIMIT_S = 3.0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A folder to start servers in, in which nothing is left at the end."""
    with Workplace(tmp_path) as place:
        yield place


def refused(place: Workplace, *words: str, entry: str = "marserve", **environment: str) -> tuple[int, str]:
    """Status and words of a start in front that fails soon and leaves neither process nor PID file."""
    before = computed_s()
    if entry == "marserve":
        ran = place.marserve("start", "--foreground", *words, **environment)
    else:
        ran = place.torchserve("--start", "--foreground", "--ncs", "--model-store", "store", *words, **environment)
    assert computed_s() - before < LIMIT_S
    assert place.server_pids() == []
    assert place.pid_files() == []
    said = ran.stdout + ran.stderr
    assert "Traceback" not in said
    return ran.returncode, said


def computed_s() -> float:
    """Processor time of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ports(place: Workplace) -> dict[str, int]:
    """The keys of the five listeners, and their ports."""
    http = {"inference": place.inference, "management": place.management, "metrics": place.metrics}
    grpc = dict(zip(("grpc_inference_port", "grpc_management_port"), place.grpc_ports, strict=True))
    return {f"{name}_address": int(address.rsplit(":", 1)[1]) for name, address in http.items()} | grpc


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ("marserve", "inference_address"),
        ("marserve", "management_address"),
        ("marserve", "metrics_address"),
        ("marserve", "grpc_inference_port"),
        ("marserve", "grpc_management_port"),
        ("torchserve", "management_address"),
    ],
)
def test_a_port_in_use_is_named_with_its_key(place: Workplace, entry: str, key: str) -> None:
    """Status 1; whoever has the port keeps it, and the other four are free again."""
    all_ports = ports(place)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", all_ports[key]))
        taken.listen()

        status, said = refused(place, entry=entry)

        assert status == 1
        assert f"Failed to bind to address: {'http://' if 'address' in key else ''}127.0.0.1:{all_ports[key]} " in said
        assert f"Is another server running there? Set {key}" in said
    for port in all_ports.values():
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", port)) != 0


def test_the_socket_of_a_server_that_listens_is_not_taken_from_it(place: Workplace) -> None:
    """Only one that nobody listens on is removed; and no file that is none of ours."""
    path = place.folder / "live.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        status, said = refused(place, "--inference-address", f"unix:{path}")
        assert path.is_socket()
    path.unlink()
    path.write_text("mine")
    second = refused(place, "--inference-address", f"unix:{path}")

    assert status == 1
    assert f"Failed to bind to address: unix:{path} (Address already in use). Is another server" in said
    assert second[0] == 1
    assert f"unix:{path} (there is a file that is no socket). Set inference_address" in second[1]
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("state_folder=file", "state_folder is 'file', where the server cannot write (it is a file); name a folder"),
        ("log_location=file", "where logs cannot be written (File exists); name a folder"),
        ("model_store=file", "model_store is 'file', which is a file; name a folder with --model-store"),
        ("workflow_store=gone", "workflow_store is 'gone', and there is no such folder; create it"),
        ("temporary_folder=file", "Invalid temp directory: file"),
        ("worker_cgroup=store", "worker_cgroup is 'store', which is no cgroup v2 folder"),
    ],
)
def test_a_folder_that_cannot_be_used_is_status_2(place: Workplace, setting: str, said: str) -> None:
    """Key, value, reason, next step; nothing is written meanwhile."""
    (place.folder / "file").write_text("mine")

    status, words = refused(place, "--set", setting)

    assert status == 2
    assert said in words
    assert (place.folder / "file").read_text() == "mine"
    assert list(place.store.iterdir()) == []
    assert not (place.folder / "logs").exists()


def test_a_temporary_folder_in_which_nothing_can_be_made_is_named(place: Workplace) -> None:
    """A volume that an image needs is missing: its root is read-only."""
    # No folder can be made or written in any of them, whoever asks.
    (place.folder / "file").write_text("mine")
    told = {"TMPDIR": str(place.folder / "file"), "MARSERVE_TEMPORARY_FOLDER": "/proc"}

    status, said = refused(place, TEMP=str(place.temporary), **told)

    assert status == 1
    assert "No folder can be made in the temporary folder /proc (" in said
    assert "name another with temporary_folder" in said


def test_torchserves_words_and_status_stay_its_own(place: Workplace) -> None:
    """Also where what is named is a file."""
    (place.folder / "file").write_text("mine")

    assert refused(place, "--model-store", "file", entry="torchserve") == (
        1,
        "--model-store directory not found: file\n",
    )
    status, said = refused(place, entry="torchserve", MARSERVE_STATE_FOLDER="file")
    assert (status, said.count("\n")) == (1, 1)
    assert "state_folder is 'file', where the server cannot write" in said
