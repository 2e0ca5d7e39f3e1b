"""Tests for archives on a node: fetched once, by content, from the nearest place, checked as on the server."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pickle
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from marserve.agent_link import ArchiveRef
from marserve.errors import BadArchive, MarserveError, UnsafeArchive
from marserve.files import digests
from marserve.files.leased_folders import Lease
from marserve.node import archives as module
from marserve.node.archives import ArchiveChanged, NodeArchives, NodeUnfit
from support.file_server import file_server, whole


def make(path: Path, **members: bytes) -> ArchiveRef:
    """An archive with these members, and a reference that names no place."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in members.items():
            archive.writestr(name.replace("__", "."), body)
    return ArchiveRef(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


class Sender:
    """Stands in for the server: writes this file, and counts."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls = path, 0

    def __call__(self, target: Path) -> None:
        """Write it."""
        self.calls += 1
        target.write_bytes(self.path.read_bytes())


def refuse(target: Path) -> None:
    """Stands in for a server that must not be asked."""
    raise AssertionError(f"asked for {target}")


def test_an_archive_is_sent_once_and_then_found_by_its_digest(tmp_path: Path) -> None:
    """The second worker of a node asks nobody."""
    ref, server = make(tmp_path / "m.mar", h__py=b"x = 1"), Sender(tmp_path / "m.mar")
    archives = NodeArchives(tmp_path / "node")

    first = archives.prepare(ref, server)
    second = NodeArchives(tmp_path / "node").prepare(ref, server)

    assert server.calls == 1
    assert first.folder == second.folder
    assert (first.folder / "h.py").read_bytes() == b"x = 1"
    assert list((tmp_path / "node" / "incoming").iterdir()) == []
    first.release()
    second.release()


def test_a_path_that_both_see_is_used_without_a_copy(tmp_path: Path) -> None:
    """A shared volume; nothing is sent."""
    ref = make(tmp_path / "m.mar", h__py=b"x = 1")
    shared = ArchiveRef(ref.sha256, ref.name, path=str(tmp_path / "m.mar"))

    NodeArchives(tmp_path / "node").prepare(shared, refuse).release()


def test_a_path_that_both_see_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at before it is unpacked and after, and its volume may be far away."""
    ref = make(tmp_path / "m.mar", h__py=b"x = 1")
    shared = ArchiveRef(ref.sha256, ref.name, path=str(tmp_path / "m.mar"))
    archives, real, hashed = NodeArchives(tmp_path / "node"), hashlib.sha256, []
    archives._digests._now = lambda: time.time() + 60.0
    monkeypatch.setattr(digests.hashlib, "sha256", lambda *given: hashed.append(given) or real(*given))

    archives.prepare(shared, refuse).release()

    assert len(hashed) == 1


def test_a_path_that_has_something_else_here_does_not_count(tmp_path: Path) -> None:
    """The digest decides, not the name."""
    ref, server = make(tmp_path / "m.mar", h__py=b"x = 1"), Sender(tmp_path / "m.mar")
    (tmp_path / "other.mar").write_bytes(b"something else")
    other = ArchiveRef(ref.sha256, ref.name, path=str(tmp_path / "other.mar"))

    NodeArchives(tmp_path / "node").prepare(other, server).release()

    assert server.calls == 1


def test_an_address_is_fetched_from_the_store_by_the_node(tmp_path: Path) -> None:
    """The bytes do not pass the server."""
    ref = make(tmp_path / "m.mar", h__py=b"x = 1")
    with file_server() as store:
        url = store.on("/m.mar", whole((tmp_path / "m.mar").read_bytes()))
        prepared = NodeArchives(tmp_path / "node").prepare(ArchiveRef(ref.sha256, ref.name, address=url), refuse)

    assert (prepared.folder / "h.py").exists()
    prepared.release()


def test_an_address_that_does_not_have_it_any_more_is_no_end(tmp_path: Path) -> None:
    """The server, which has it, is asked."""
    ref, server = make(tmp_path / "m.mar", h__py=b"x = 1"), Sender(tmp_path / "m.mar")
    with file_server() as store:
        url = store.on("/m.mar", whole(b"a newer one"))
        NodeArchives(tmp_path / "node").prepare(ArchiveRef(ref.sha256, ref.name, address=url), server).release()

    assert server.calls == 1


def test_what_has_another_digest_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    """Even from the server."""
    ref = make(tmp_path / "m.mar", h__py=b"x = 1")
    make(tmp_path / "wrong.mar", h__py=b"x = 2")

    with pytest.raises(ArchiveChanged, match=rf"m\.mar has changed on the server.* {ref.sha256}\. Swap"):
        NodeArchives(tmp_path / "node").prepare(ref, Sender(tmp_path / "wrong.mar"))

    assert list((tmp_path / "node" / "incoming").iterdir()) == []
    assert not (tmp_path / "node" / "models" / ref.sha256).exists()


def test_pickles_are_checked_and_trust_is_no_other_archives(tmp_path: Path) -> None:
    """What the operator trusts lies apart, so that nobody is served it who does not."""
    ref = make(tmp_path / "m.mar", weights__pt=pickle.dumps(print, protocol=0))
    server, archives = Sender(tmp_path / "m.mar"), NodeArchives(tmp_path / "node")
    trusted = ArchiveRef(ref.sha256, ref.name, is_trusted=True)

    archives.prepare(trusted, server).release()
    with pytest.raises(UnsafeArchive):
        archives.prepare(ref, server)

    assert [path.name for path in (tmp_path / "node" / "models").iterdir() if path.is_dir()] == [
        f"{ref.sha256}-trusted"
    ]


def test_what_nobody_uses_goes_first_when_there_is_too_much(tmp_path: Path) -> None:
    """What is in use stays, however old."""
    archives = NodeArchives(tmp_path / "node", max_bytes=250)
    refs = [make(tmp_path / f"{number}.mar", h__py=bytes([number]) * 100) for number in range(4)]
    held = archives.prepare(refs[0], Sender(tmp_path / "0.mar"))
    for number in (1, 2, 3):
        archives.prepare(refs[number], Sender(tmp_path / f"{number}.mar")).release()

    kept = {path.name for path in (tmp_path / "node" / "models").iterdir() if path.is_dir()}

    assert refs[0].sha256 in kept
    assert refs[1].sha256 not in kept
    held.release()


def test_two_workers_that_need_the_same_at_once_unpack_it_once(tmp_path: Path) -> None:
    """One waits for the other; one that is told to stop waits no longer."""
    ref = make(tmp_path / "m.mar", h__py=b"x = 1")
    begun, go_on = threading.Event(), threading.Event()

    def slowly(target: Path) -> None:
        begun.set()
        assert go_on.wait(10)
        target.write_bytes((tmp_path / "m.mar").read_bytes())

    first = threading.Thread(target=lambda: NodeArchives(tmp_path / "node").prepare(ref, slowly).release())
    first.start()
    assert begun.wait(10)
    stop = threading.Event()
    stop.set()
    with pytest.raises(MarserveError, match="server has gone"):
        NodeArchives(tmp_path / "node").prepare(ref, refuse, stop)
    go_on.set()
    NodeArchives(tmp_path / "node").prepare(ref, refuse).release()
    first.join()


def test_whoever_is_killed_before_pickles_are_checked_leaves_nothing_that_is_served(tmp_path: Path) -> None:
    """What has a name below `models` was checked; the rest is deleted by the next."""
    ref, server = make(tmp_path / "m.mar", weights__pt=pickle.dumps(print, protocol=0)), Sender(tmp_path / "m.mar")
    program = (
        "import os, sys; from pathlib import Path; from marserve.node import archives\n"
        "from marserve.agent_link import *\n"
        "archives.check_archive = lambda *_, **__: os._exit(9)\n"
        f"ref = ArchiveRef({ref.sha256!r}, 'm.mar', path={str(tmp_path / 'm.mar')!r})\n"
        f"archives.NodeArchives(Path({str(tmp_path / 'node')!r})).prepare(ref, None)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert len(list((tmp_path / "node" / "incoming").glob("*/unpacked/weights.pt"))) == 1

    with pytest.raises(UnsafeArchive):
        NodeArchives(tmp_path / "node").prepare(ref, server)

    assert list((tmp_path / "node" / "incoming").iterdir()) == []
    assert not (tmp_path / "node" / "models" / ref.sha256).exists()


def test_what_somebody_else_is_making_is_not_swept_away(tmp_path: Path) -> None:
    """However little the folder may hold; what nobody makes any more is."""
    slow, quick = (make(tmp_path / f"{name}.mar", h__py=name.encode()) for name in ("slow", "quick"))
    (tmp_path / "node" / "incoming" / f"{'0' * 64}.left").mkdir(parents=True)
    begun, go_on = threading.Event(), threading.Event()
    made: list[Path] = []

    def slowly(target: Path) -> None:
        begun.set()
        assert go_on.wait(10)
        target.write_bytes((tmp_path / "slow.mar").read_bytes())

    def prepare() -> None:
        prepared = NodeArchives(tmp_path / "node").prepare(slow, slowly)
        made.append(prepared.folder / "h.py")
        prepared.release()

    thread = threading.Thread(target=prepare)
    thread.start()
    assert begun.wait(10)
    NodeArchives(tmp_path / "node", max_bytes=0).prepare(quick, Sender(tmp_path / "quick.mar")).release()
    left = [path.name.partition(".")[0] for path in (tmp_path / "node" / "incoming").iterdir()]
    go_on.set()
    thread.join()

    assert left == [slow.sha256]
    assert [path.read_bytes() for path in made] == [b"slow"]


def test_a_full_disk_costs_what_nobody_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried once more then."""
    archives = NodeArchives(tmp_path / "node")
    used, unused, wanted = (make(tmp_path / f"{name}.mar", h__py=name.encode()) for name in ("used", "unused", "new"))
    held = archives.prepare(used, Sender(tmp_path / "used.mar"))
    archives.prepare(unused, Sender(tmp_path / "unused.mar")).release()
    unpack = module.unpack

    def unpack_where_there_is_room(archive: Path, target: Path, limits: Any) -> None:
        if (tmp_path / "node" / "models" / unused.sha256).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        unpack(archive, target, limits)

    monkeypatch.setattr(module, "unpack", unpack_where_there_is_room)
    archives.prepare(wanted, Sender(tmp_path / "new.mar")).release()

    kept = {path.name for path in (tmp_path / "node" / "models").iterdir() if path.is_dir()}
    assert kept == {used.sha256, wanted.sha256}
    held.release()


def test_a_disk_that_stays_full_is_the_nodes_fault(tmp_path: Path) -> None:
    """The sentence has the folder and the setting; nothing is left there."""
    ref = make(tmp_path / "m.mar", h__py=b"x = 1")

    def full(target: Path) -> None:
        target.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(NodeUnfit, match=f"m.mar does not fit: the disk of {tmp_path / 'node'} is full.* ray_cache"):
        NodeArchives(tmp_path / "node").prepare(ref, full)

    assert list((tmp_path / "node" / "incoming").iterdir()) == []


def test_a_folder_that_cannot_be_one_is_the_nodes_fault(tmp_path: Path) -> None:
    """A file has its name."""
    (tmp_path / "node").write_bytes(b"")

    with pytest.raises(NodeUnfit, match=r"node cannot be used \(Not a directory\).* ray_cache"):
        NodeArchives(tmp_path / "node")


def test_a_path_that_cannot_be_looked_at_here_does_not_count(tmp_path: Path) -> None:
    """A volume that is there, and says no; the server is asked."""
    ref, server = make(tmp_path / "m.mar", h__py=b"x = 1"), Sender(tmp_path / "m.mar")
    hidden = ArchiveRef(ref.sha256, ref.name, path=f"/{'n' * 300}")

    NodeArchives(tmp_path / "node").prepare(hidden, server).release()

    assert server.calls == 1


def test_a_path_that_is_replaced_while_it_is_unpacked_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer archive would be served under the old digest, for good."""
    ref = make(tmp_path / "m.mar", h__py=b"x = 1")
    make(tmp_path / "newer.mar", h__py=b"x = 2")
    shared = ArchiveRef(ref.sha256, ref.name, path=str(tmp_path / "m.mar"))
    unpack = module.unpack

    def unpack_the_newer(archive: Path, target: Path, limits: Any) -> None:
        (tmp_path / "newer.mar").rename(archive)
        unpack(archive, target, limits)

    monkeypatch.setattr(module, "unpack", unpack_the_newer)
    with pytest.raises(ArchiveChanged, match=rf"m\.mar was replaced at .* {ref.sha256}\. Swap"):
        NodeArchives(tmp_path / "node").prepare(shared, refuse)

    assert not (tmp_path / "node" / "models" / ref.sha256).exists()
    assert list((tmp_path / "node" / "incoming").iterdir()) == []


def test_what_is_deleted_as_its_lock_is_changed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent of the node makes room just then."""
    ref, server = make(tmp_path / "m.mar", h__py=b"x = 1"), Sender(tmp_path / "m.mar")
    archives = NodeArchives(tmp_path / "node")
    share, others = archives._kept.share, [NodeArchives(tmp_path / "node")]

    def share_late(lease: Lease) -> bool:
        if others:
            fcntl.flock(lease.descriptor, fcntl.LOCK_UN)  # what the kernel does first
            assert others.pop()._prune(0)
        return share(lease)

    monkeypatch.setattr(archives._kept, "share", share_late)
    prepared = archives.prepare(ref, server)

    assert (prepared.folder / "h.py").read_bytes() == b"x = 1"
    assert server.calls == 2
    prepared.release()


def full_until_gone(monkeypatch: pytest.MonkeyPatch, unused: Path, ending: str) -> None:
    """No new file or lock of this name can be made as long as there is `unused`."""
    real = os.open

    def open_where_there_is_room(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if str(path).endswith(ending) and not os.path.exists(path) and unused.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", open_where_there_is_room)


def test_a_disk_without_room_for_a_lock_costs_what_nobody_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is said of archives in use."""
    archives = NodeArchives(tmp_path / "node")
    unused, wanted = (make(tmp_path / f"{name}.mar", h__py=name.encode()) for name in ("unused", "new"))
    archives.prepare(unused, Sender(tmp_path / "unused.mar")).release()

    full_until_gone(monkeypatch, tmp_path / "node" / "models" / unused.sha256, f"{wanted.sha256}.lock")
    archives.prepare(wanted, Sender(tmp_path / "new.mar")).release()

    kept = {path.name for path in (tmp_path / "node" / "models").iterdir() if path.is_dir()}
    assert kept == {wanted.sha256}


def test_a_disk_without_room_for_a_folder_costs_what_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's first look at its folder, on which others have been."""
    unused = make(tmp_path / "unused.mar", h__py=b"x = 1")
    NodeArchives(tmp_path / "node").prepare(unused, Sender(tmp_path / "unused.mar")).release()
    folder, mkdir = tmp_path / "node" / "models" / unused.sha256, Path.mkdir

    def mkdir_where_there_is_room(path: Path, *args: Any, **more: Any) -> None:
        if folder.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir_where_there_is_room)
    NodeArchives(tmp_path / "node")

    assert not folder.exists()


@pytest.mark.parametrize(
    ("number", "expected", "match"),
    [
        (
            errno.ENAMETOOLONG,
            BadArchive,
            r"m\.mar cannot be unpacked: File name too long, for the member 'h\.py'\. Give",
        ),
        (errno.EILSEQ, BadArchive, r"for the member 'h\.py'"),
        (errno.EIO, NodeUnfit, r"node cannot be used \(Input/output error\)"),
        (errno.EACCES, NodeUnfit, r"node cannot be used \(Permission denied\)"),
    ],
)
def test_a_member_that_cannot_be_written_is_the_archives_fault_or_the_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception], match: str
) -> None:
    """A name that a file system refuses makes no node unfit, which would be spared for a minute."""
    ref, write = make(tmp_path / "m.mar", h__py=b"x = 1"), os.open

    def refuse_the_member(path: Any, *rest: Any, **more: Any) -> int:
        if Path(path).name == "h.py":
            raise OSError(number, os.strerror(number), str(path))
        return write(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse_the_member)
    with pytest.raises(expected, match=match):
        NodeArchives(tmp_path / "node").prepare(ref, Sender(tmp_path / "m.mar"))

    assert list((tmp_path / "node" / "incoming").iterdir()) == []
