"""Servers that cannot start: real processes, one sentence, the right status, nothing left of them."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.small_disk import small_disk
from support.workplace import Workplace

# RELIABILITY F6: what a failed start may take of a machine that does nothing else.
LIMIT_S = 2.0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A folder to start servers in, in which nothing is left at the end."""
    with Workplace(tmp_path) as place:
        place.is_prepared = True
        yield place


def refused(place: Workplace, *words: str, entry: str = "marserve", **environment: str) -> tuple[int, str]:
    """Status and words of a start in front that fails soon and leaves neither process nor PID file."""
    if not place.is_prepared:
        environment.setdefault("PYTHONDONTWRITEBYTECODE", "")
    for _ in range(2):
        if entry == "marserve":
            ran = place.marserve("start", "--foreground", *words, **environment)
        else:
            ran = place.torchserve("--start", "--foreground", "--ncs", "--model-store", "store", *words, **environment)
        if place.took_s < LIMIT_S:
            break  # else Python may have had to compile what it imports; it has by now
    assert place.took_s < LIMIT_S
    assert place.server_pids() == []
    assert place.pid_files() == []
    said = ran.stdout + ran.stderr
    assert "Traceback" not in said
    return ran.returncode, said


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
        assert f"It is in use by process {os.getpid()} (" in said
        assert f"). Set {key}" in said
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


def test_a_store_that_may_not_be_read_is_named(place: Workplace) -> None:
    """A volume that belongs to somebody else; root is asked without what lets it read everything."""
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("there is no setpriv, and root may read everything")
        rights = "-dac_override,-dac_read_search"
        place.before = (setpriv, f"--inh-caps={rights}", f"--bounding-set={rights}")
    place.store.chmod(0)
    try:
        status, said = refused(place, "--models", "all")
    finally:
        place.store.chmod(0o755)

    assert status in (1, 2)
    assert "model_store is 'store'" in said
    assert "Permission denied" in said or "may not be read" in said


def test_a_full_disk_where_keys_and_downloads_go_is_named(place: Workplace) -> None:
    """What cannot do without room: the key file where keys are asked for, the cache of downloads."""
    with small_disk(place.folder / "full", 64) as disk:
        disk.fill()
        keys = refused(place, "--set", "disable_token_authorization=false", "--set", "token_file=full/keys.json")
        cache = refused(place, "--set", "download_cache=full/cache")
        left = sorted(path.name for path in disk.folder.rglob("*") if path.is_file())

    assert (keys[0], cache[0]) == (1, 1)
    assert "full/keys.json cannot be written (No space left on device)" in keys[1]
    assert "full/cache cannot be used (No space left on device)" in cache[1]
    assert left == ["ballast"]


@pytest.mark.parametrize("damage", ["{", '{"models": [', '{"models": {"m": {"1.0": {"marName": 7}}}}'])
def test_a_damaged_snapshot_is_named_and_a_way_out_with_it(place: Workplace, damage: str) -> None:
    """A restart after a disk that was full; without snapshots it starts all the same."""
    snapshots = place.folder / "logs" / "config"
    snapshots.mkdir(parents=True)
    snapshot = snapshots / "20260101000000000-shutdown.cfg"
    snapshot.write_text((place.folder / "config.properties").read_text() + f"version=1.0\nmodel_snapshot={damage}\n")

    status, said = refused(place, "--set", "config_snapshots=true", "--set", "log_location=logs")

    assert status == 1
    assert "InvalidSnapshotException" in said
    assert snapshot.name in said
    assert "--ncs" in said


def test_torchserves_words_and_status_stay_its_own(place: Workplace) -> None:
    """Also where what is named is a file."""
    place.is_prepared = False  # and imports are within the limit, too
    (place.folder / "file").write_text("mine")

    assert refused(place, "--model-store", "file", entry="torchserve") == (
        1,
        "--model-store directory not found: file\n",
    )
    status, said = refused(place, entry="torchserve", MARSERVE_STATE_FOLDER="file")
    assert (status, said.count("\n")) == (1, 1)
    assert "state_folder is 'file', where the server cannot write" in said
