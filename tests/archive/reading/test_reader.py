"""Unpacking archives: what comes out of good ones, and that hostile ones (RELIABILITY H1, H2) leave nothing behind."""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve.archive.reading.reader import Limits, unpack
from marserve.errors import BadArchive, UnsafeArchive
from support.archives import (
    FILE_MODE,
    LINK_MODE,
    ZipMember,
    deflated_zeros,
    good_members,
    raw_tar_header,
    raw_zip,
    snapshot,
    tar_file,
    tar_special,
    tgz_of,
    tgz_with,
    zip64_end,
    zip_of,
)

MIB = 1 << 20


@pytest.fixture
def unpack_bytes(tmp_path: Path) -> Callable[..., Path]:
    """Unpack bytes as `store/{name}` into `work/target`; gives the target."""

    def run(data: bytes, name: str = "m.mar", limits: Limits | None = None) -> Path:
        (tmp_path / "store").mkdir(exist_ok=True)
        (tmp_path / "work").mkdir(exist_ok=True)
        archive = tmp_path / "store" / name
        archive.write_bytes(data)
        target = tmp_path / "work" / "target"
        unpack(archive, target, limits)
        return target

    return run


def files_of(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------- good archives


@pytest.mark.parametrize("data", [zip_of(good_members()), tgz_of(good_members())], ids=["zip", "tgz"])
def test_both_formats_unpack_to_the_same_files(unpack_bytes: Callable[..., Path], data: bytes) -> None:
    """A tar file's first folder is stripped, a zip file's members lie at the top."""
    target = unpack_bytes(data)

    assert files_of(target) == good_members()


@pytest.mark.parametrize(
    ("data", "name"),
    [(tgz_of(good_members()), "m.mar"), (zip_of(good_members()), "m.tar.gz"), (zip_of(good_members()), "m")],
)
def test_the_format_is_told_by_content_not_by_name(unpack_bytes: Callable[..., Path], data: bytes, name: str) -> None:
    """A misnamed archive is read all the same."""
    target = unpack_bytes(data, name)

    assert files_of(target) == good_members()


def test_a_tar_file_made_of_the_current_folder_unpacks_to_the_top(unpack_bytes: Callable[..., Path]) -> None:
    """`tar czf m.tar.gz .` writes names that begin with `./`; that is the first component, which goes."""
    target = unpack_bytes(tgz_with([tar_special("./", tarfile.DIRTYPE), *map_good("./")]))

    assert files_of(target) == good_members()


def map_good(top: str) -> list[tuple[tarfile.TarInfo, bytes]]:
    """The ordinary members below `top`."""
    return [tar_file(top + name, data) for name, data in good_members().items()]


def test_a_zip_file_without_entries_is_an_empty_folder(unpack_bytes: Callable[..., Path]) -> None:
    """An empty archive lacks a name, which is the registration's to say; it is no damage."""
    target = unpack_bytes(zip_of({}))

    assert list(target.iterdir()) == []


def test_modes_are_ours_whatever_the_archive_says(unpack_bytes: Callable[..., Path]) -> None:
    """No set-user-id bit, nothing unreadable, nothing that others may write comes out of an archive."""
    members = [ZipMember("a", mode=stat.S_IFREG | 0o6777), ZipMember("d/b", mode=stat.S_IFREG)]

    target = unpack_bytes(raw_zip(members))

    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in target.rglob("*")} == {
        "a": 0o644,
        "d": 0o755,
        "b": 0o644,
    }
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_folders_named_twice_and_after_their_files_are_fine(unpack_bytes: Callable[..., Path]) -> None:
    """Archivers differ in whether and when they name folders."""
    folder = stat.S_IFDIR | 0o755
    members = [ZipMember("d/a", b"1"), ZipMember("d/", b"", folder, 0), ZipMember("d/", b"", folder, 0)]

    assert files_of(unpack_bytes(raw_zip(members))) == {"d/a": b"1"}


def test_long_names_of_tar_files_are_whole_in_each_dialect(unpack_bytes: Callable[..., Path]) -> None:
    """Names over 100 bytes travel in headers of their own, which differ between GNU's and POSIX's tar."""
    name = "m/" + "d" * 90 + "/" + "ä" * 60
    for index, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)):
        long_name = name if form != tarfile.USTAR_FORMAT else "m/" + "d" * 90 + "/" + "a" * 60
        target = unpack_bytes(tgz_with([tar_file(long_name, b"%d" % index)], form))

        assert list(files_of(target).values()) == [b"%d" % index]
        assert next(iter(files_of(target))) == long_name[2:]
        for path in sorted(target.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        target.rmdir()


def test_an_empty_folder_at_the_target_is_replaced_and_a_full_one_is_not(tmp_path: Path) -> None:
    """Who reserves a folder first may; nothing that is there is lost or mixed."""
    archive = tmp_path / "m.mar"
    archive.write_bytes(zip_of(good_members()))
    reserved = tmp_path / "reserved"
    reserved.mkdir(mode=0o700)
    unpack(archive, reserved)

    with pytest.raises(FileExistsError):
        unpack(archive, reserved)

    assert files_of(reserved) == good_members()


def test_an_entry_over_four_gigabytes_in_32_bit_fields_reads_its_zip64_sizes(tmp_path: Path) -> None:
    """The standard library's own zip64 entries are read."""
    archive = tmp_path / "m.mar"
    with zipfile.ZipFile(archive, "w") as file, file.open("big", "w", force_zip64=True) as member:
        member.write(b"data")

    unpack(archive, tmp_path / "target")

    assert files_of(tmp_path / "target") == {"big": b"data"}


# -------------------------------------------------------------------------------------------- H1: leading outside

HOSTILE_NAMES = {
    "parent": "../out",
    "parent in the middle": "a/../../out",
    "parent at the end": "a/..",
    "parent alone": "..",
    "sibling with the same prefix": "../target-evil/x",
    "deep parent": "a/b/c/../../../../out",
    "absolute": "/abs/out",
    "absolute twice": "//abs/out",
    "drive": "C:/out",
    "drive without slash": "c:out",
    "backslash parent": "..\\out",
    "backslash": "a\\b",
    "network share": "\\\\host\\share",
    "control character": "a\nb",
    "escape character": "a\x1b[2Jb",
    "full-width dots": "．．/out",
    "two-dot leader": "‥/out",
    "one-dot leaders": "․․/out",
    "full-width slash": "a／b",
    "full-width backslash": "a＼b",
    "full-width drive": "Ｃ:/out",
    "account of": "a℀b",
    "line separator": "a\u2028b",
    "long component": "x" * 300,
    "long name": "/".join(["y" * 200] * 8),
    "deep": "d/" * 40 + "f",
}

CLASHES = {
    "twice": ["a", "a"],
    "case": ["Model.py", "model.py"],
    "sharp s": ["straße", "STRASSE"],
    "composed and decomposed": ["caf\u00e9", "cafe\u0301"],
    "ligature": ["ﬁle", "file"],
    "folder's case": ["A/x", "a/y"],
    "file, then folder": ["a", "a/b"],
    "folder, then file": ["a/b", "a"],
    "file, then folder in another case": ["A", "a/b"],
    "full-width": ["ａ", "a"],
}

ZIP_SPECIALS = {
    "symbolic link": [ZipMember("link", b"/etc/passwd", LINK_MODE)],
    "relative symbolic link": [ZipMember("link", b"../../out", LINK_MODE)],
    "chain of links": [
        ZipMember("inner", b"..", LINK_MODE),
        ZipMember("link", b"inner/..", LINK_MODE),
        ZipMember("link/out", b"x"),
    ],
    "character device": [ZipMember("device", b"", stat.S_IFCHR | 0o666)],
    "block device": [ZipMember("device", b"", stat.S_IFBLK | 0o666)],
    "pipe": [ZipMember("pipe", b"", stat.S_IFIFO | 0o666)],
    "socket": [ZipMember("socket", b"", stat.S_IFSOCK | 0o666)],
    "folder with bytes": [ZipMember("folder/", b"data", stat.S_IFDIR | 0o755)],
    "NUL in the name": [ZipMember(b"h.py\0.txt", b"x")],
}

TAR_SPECIALS = {
    "hard link": [tar_special("m/link", tarfile.LNKTYPE, "/etc/passwd")],
    "hard link inside": [tar_file("m/a"), tar_special("m/link", tarfile.LNKTYPE, "m/a")],
    "symbolic link": [tar_special("m/link", tarfile.SYMTYPE, "/etc/passwd")],
    "relative symbolic link": [tar_special("m/link", tarfile.SYMTYPE, "../../out")],
    "chain of links": [
        tar_special("m/inner", tarfile.SYMTYPE, ".."),
        tar_special("m/link", tarfile.SYMTYPE, "inner/.."),
        tar_file("m/link/out"),
    ],
    "link at the top folder": [tar_special("m", tarfile.SYMTYPE, ".."), tar_file("m/out")],
    "link with a long target": [tar_special("m/link", tarfile.SYMTYPE, "../" * 60 + "out")],
    "character device": [tar_special("m/device", tarfile.CHRTYPE)],
    "block device": [tar_special("m/device", tarfile.BLKTYPE)],
    "pipe": [tar_special("m/pipe", tarfile.FIFOTYPE)],
    "sparse": [tar_special("m/sparse", tarfile.GNUTYPE_SPARSE)],
    "unknown type": [tar_special("m/odd", b"Z")],
}


def hostile_zips() -> dict[str, tuple[bytes, str]]:
    """Archive and the member it must be refused for, by what is wrong."""
    cases = {what: (raw_zip([ZipMember("ok"), ZipMember(name)]), name) for what, name in HOSTILE_NAMES.items()}
    cases |= {what: (raw_zip(ZipMember(name) for name in names), names[-1]) for what, names in CLASHES.items()}
    for what, members in ZIP_SPECIALS.items():
        cases[what] = (raw_zip(members), members[0].raw_name.decode())
    return cases


def hostile_tars() -> dict[str, tuple[bytes, str]]:
    """The same for tar files, with the names below a top folder as those need."""
    cases = {}
    for what, name in HOSTILE_NAMES.items():
        member = name if "absolute" in what or "drive" in what or what == "parent alone" else f"m/{name}"
        cases[what] = (tgz_with([tar_file("m/ok"), tar_file(member)]), member)
    for what, names in CLASHES.items():
        cases[what] = (tgz_with([tar_file(f"m/{name}") for name in names]), f"m/{names[-1]}")
    for what, members in TAR_SPECIALS.items():
        name = next(info.name for info, _ in members if info.type != tarfile.REGTYPE)
        cases[what] = (tgz_with(members), name)
    return cases


HOSTILE = {f"zip: {what}": case for what, case in hostile_zips().items()}
HOSTILE |= {f"tar: {what}": case for what, case in hostile_tars().items()}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_member_that_leads_outside_is_refused_by_name_and_nothing_is_written(
    unpack_bytes: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    """H1: the whole folder around target and store is the same before and after."""
    data, member = HOSTILE[what]
    (tmp_path / "work" / "target-evil").mkdir(parents=True)
    (tmp_path / "work" / "target-evil" / "x").write_bytes(b"precious")
    (tmp_path / "out").write_bytes(b"precious")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "m.mar").write_bytes(data)
    before = snapshot(tmp_path)

    with pytest.raises(UnsafeArchive) as refusal:
        unpack_bytes(data)

    assert refusal.value.member.rstrip("…") == member[: len(refusal.value.member.rstrip("…"))]
    assert repr(refusal.value.member) in refusal.value.message
    assert snapshot(tmp_path) == before


def test_there_are_sixty_hostile_archives_or_more() -> None:
    """H1 asks for sixty."""
    assert len(HOSTILE) >= 60


# -------------------------------------------------------------------------------------------------- H2: bombs


def written_bytes() -> int:
    """What this process has written so far, by the kernel's count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise AssertionError("the kernel does not count what is written")


@pytest.mark.parametrize("form", ["zip", "zip that lies", "tar"])
def test_ten_gigabytes_of_zeros_are_refused_within_the_limit(
    unpack_bytes: Callable[..., Path], tmp_path: Path, form: str
) -> None:
    """H2: what is written stays below 1.1 times the limit, and it takes seconds, not minutes."""
    size = 10 * 1024 * MIB
    zeros = deflated_zeros(size)
    limits = Limits(free_bytes=32 * MIB)
    if form == "tar":
        data = gzip_frame(raw_tar_header(b"m/zeros", b"\x80" + size.to_bytes(11, "big")), zeros)
    else:
        declared = 0xFFFFFFF0 if form == "zip" else 31 * MIB
        data = raw_zip([ZipMember("zeros", packed=zeros, size=declared, crc=0)])
    archive = tmp_path / "bomb"
    archive.write_bytes(data)
    before, begun = written_bytes(), time.monotonic()

    with pytest.raises(UnsafeArchive, match="zeros"):
        unpack(archive, tmp_path / "target", limits)

    assert written_bytes() - before < 1.1 * limits.free_bytes
    assert time.monotonic() - begun < 6
    assert os.listdir(tmp_path) == ["bomb"]


def gzip_frame(head: bytes, deflated: bytes) -> bytes:
    """A gzip stream of `head` and then of what `deflated` holds; its checksum is wrong."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    start = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + start + deflated + bytes(8)


def test_a_million_entries_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    """H2: the end record says how many there are; listing them is the attack."""
    one = raw_zip([ZipMember("a", b"", method=0)])
    entry = one[31:78]
    archive = tmp_path / "many.mar"
    directory = entry * 1_000_000
    archive.write_bytes(one[:31] + directory + zip64_end(1_000_000, len(directory), 31, 31 + len(directory)))
    begun = time.monotonic()

    with pytest.raises(BadArchive, match="1000000 entries"):
        unpack(archive, tmp_path / "target")

    assert time.monotonic() - begun < 6
    assert not (tmp_path / "target").exists()


def test_a_directory_that_holds_more_entries_than_the_end_record_says_is_damaged(
    unpack_bytes: Callable[..., Path],
) -> None:
    """A small count would hide a large directory."""
    with pytest.raises(BadArchive, match="more than the 1 "):
        unpack_bytes(raw_zip([ZipMember("a"), ZipMember("b")], count=1))


def test_a_gigabyte_of_names_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """H2: the size of the directory is bounded as well as its count."""
    archive = tmp_path / "names.mar"
    size = 1 << 30
    with archive.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(4 + size)
        file.write(zip64_end(10, size, 4, 4 + size))

    with pytest.raises(BadArchive, match="names take"):
        unpack(archive, tmp_path / "target")


@pytest.mark.parametrize(
    ("kind", "size"),
    [(b"x", 1 << 30), (b"g", 1 << 30), (b"L", 1 << 30), (b"K", 1 << 30)],
    ids=["pax", "global pax", "GNU long name", "GNU long link"],
)
def test_extended_headers_of_tar_files_are_bounded(tmp_path: Path, kind: bytes, size: int) -> None:
    """A name of a gigabyte is refused by its length, before it is read."""
    archive = tmp_path / "bomb"
    archive.write_bytes(gzip_frame(raw_tar_header(b"m/long", size, kind), deflated_zeros(16 * MIB)))

    with pytest.raises(UnsafeArchive, match="extended header"):
        unpack(archive, tmp_path / "target")


def test_extended_headers_without_end_are_refused(unpack_bytes: Callable[..., Path]) -> None:
    """Headers that only announce more headers are no archive."""
    blocks = b"".join(raw_tar_header(b"m/x", 0, b"g") for _ in range(50))

    with pytest.raises(UnsafeArchive, match="too many extended headers"):
        unpack_bytes(gzip.compress(blocks))


def test_entries_that_share_bytes_are_refused(unpack_bytes: Callable[..., Path]) -> None:
    """H2: overlapping entries unpack to far more than the file holds, at a harmless ratio each."""
    kernel = ZipMember("kernel", bytes(100_000))
    others = [ZipMember(f"f{number}", b"", packed=b"", size=100_000, offset=0) for number in range(50)]

    with pytest.raises(UnsafeArchive, match="shares bytes"):
        unpack_bytes(raw_zip([kernel, *others]))


@pytest.mark.parametrize("make", [zip_of, tgz_of], ids=["zip", "tgz"])
@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (Limits(max_entries=2), "entries"),
        (Limits(max_total_bytes=1500), "at most 1500"),
        (Limits(max_member_bytes=900), "at most 900"),
        (Limits(max_ratio=5, free_bytes=500), "times as many"),
        (Limits(max_names_bytes=20), "names"),
        (Limits(max_name_bytes=6), "at most 6"),
        (Limits(max_depth=1), "folders deep"),
    ],
    ids=["entries", "total", "member", "ratio", "names", "name", "depth"],
)
def test_every_bound_is_kept_in_both_formats(
    unpack_bytes: Callable[..., Path],
    tmp_path: Path,
    make: Callable[[dict[str, bytes]], bytes],
    limits: Limits,
    word: str,
) -> None:
    """One archive breaks each bound in turn, and nothing is left of it."""
    members = {"one": b"1" * 1000, "three/three": b"3" * 1000, "two": b"2" * 1000, "four": b"4" * 20000}

    with pytest.raises(BadArchive, match=word):
        unpack_bytes(make(members), limits=limits)

    assert os.listdir(tmp_path / "work") == []


# ------------------------------------------------------------------------------------------------- damage


def damaged_archives() -> dict[str, bytes]:
    """Archives that are cut, or whose records disagree, by what is wrong."""
    good, packed = zip_of(good_members()), tgz_of(good_members())
    data = b"some data"
    return {
        "nothing": b"",
        "text": b"this is no archive\n" * 20,
        "a tar file that is not compressed": raw_tar_header(b"m/x", 0) + bytes(1024),
        "zip cut in the middle": good[: len(good) // 2],
        "zip cut at the end": good[:-1],
        "zip with something behind it": good + b"x",
        "zip with something before it": b"PK\x03\x04" + good,
        "zip with a gap before its end": raw_zip([ZipMember("a")], between=b"hidden"),
        "directory beyond the end": raw_zip([ZipMember("a")], directory_offset=10_000),
        "directory too long": raw_zip([ZipMember("a")], directory_bytes=10_000),
        "more entries than fit": raw_zip([ZipMember("a")], count=3),
        "wrong checksum": raw_zip([ZipMember("a", data, crc=1)]),
        "size too small": raw_zip([ZipMember("a", data, size=3)]),
        "size too large": raw_zip([ZipMember("a", data, size=30)]),
        "stored with two sizes": raw_zip([ZipMember("a", data, method=0, size=3)]),
        "not deflated": raw_zip([ZipMember("a", data, packed=b"\xff\xff\xff")]),
        "other name in the local record": raw_zip([ZipMember("a", data, local_name=b"../b")]),
        "other method in the local record": raw_zip([ZipMember("a", data, local_method=0)]),
        "encrypted": raw_zip([ZipMember("a", data, flags=1)]),
        "bzip2": raw_zip([ZipMember("a", data, method=12)]),
        "name that is not UTF-8": raw_zip([ZipMember(b"\xff\xfe", flags=0x800)]),
        "tgz cut in the middle": packed[: len(packed) // 2],
        "tgz cut at the end": packed[:-4],
        "tgz with a wrong checksum": packed[:-8] + bytes(8),
        "gzip of text": gzip_frame(b"no tar file " * 100, b"\x03\x00"),
        "tar with a negative size": gzip_frame(raw_tar_header(b"m/x", b"\xff" * 12), b"\x03\x00"),
        "tar with a size that is no number": gzip_frame(raw_tar_header(b"m/x", b"size"), b"\x03\x00"),
    }


@pytest.mark.parametrize("what", damaged_archives())
def test_damage_is_told_in_a_sentence_and_leaves_nothing(
    unpack_bytes: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    """Never another kind of error, never half an archive."""
    with pytest.raises(BadArchive) as refusal:
        unpack_bytes(damaged_archives()[what])

    assert str(tmp_path) not in refusal.value.message
    assert os.listdir(tmp_path / "work") == []


@pytest.mark.parametrize("data", [zip_of(good_members()), tgz_of(good_members())], ids=["zip", "tgz"])
def test_an_archive_cut_anywhere_is_refused(unpack_bytes: Callable[..., Path], tmp_path: Path, data: bytes) -> None:
    """A download that broke off is never taken for a whole archive."""
    for end in range(0, len(data) - 1, 7):
        with pytest.raises(BadArchive):
            unpack_bytes(data[:end])

    assert os.listdir(tmp_path / "work") == []


@pytest.mark.parametrize("data", [zip_of(good_members()), tgz_of(good_members())], ids=["zip", "tgz"])
def test_flipped_bytes_are_refused_or_do_no_harm(tmp_path: Path, data: bytes) -> None:
    """Each byte in turn: the archive unpacks to the same files, to other metadata, or is refused in a sentence."""
    archive = tmp_path / "m.mar"
    for index in range(0, len(data), 3):
        archive.write_bytes(data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :])
        try:
            unpack(archive, tmp_path / f"target{index}")
        except BadArchive:
            assert not (tmp_path / f"target{index}").exists()

    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle of a file removes what was written before."""
    archive = tmp_path / "m.mar"
    archive.write_bytes(zip_of(good_members()))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", fail)
    with pytest.raises(OSError, match="No space"):
        unpack(archive, tmp_path / "target")

    assert os.listdir(tmp_path) == ["m.mar"]


def test_regular_modes_are_accepted(unpack_bytes: Callable[..., Path]) -> None:
    """Zip files from systems without Unix modes record none at all."""
    assert files_of(unpack_bytes(raw_zip([ZipMember("a", mode=0), ZipMember("b", mode=FILE_MODE)]))) == {
        "a": b"x",
        "b": b"x",
    }
