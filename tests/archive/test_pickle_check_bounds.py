"""How far the check of pickles looks, and who is taken to read what: each bound to the last one, layouts of files."""

from __future__ import annotations

import errno
import pickle
import struct
from pathlib import Path

import pytest

from marserve.archive.pickle_check import check_files, check_folder
from marserve.errors import BadArchive, UnsafeArchive
from support.archives import FILE_MODE, ZipMember, raw_zip, zip_of

MODULE = "marserve.archive.pickle_check"
HARMLESS = pickle.dumps({"weight": [1.0, 2.0]}, 2)
SCRIPT = b"\x80\x02c__torch__\nNet\n)\x81."  # what only torch's C++ reader may be given
EVIL = b"\x80\x02csubprocess\nPopen\n)R."


def stored(name: str, data: bytes) -> ZipMember:
    """A record as torch stores it."""
    return ZipMember(name, data, FILE_MODE, 0)


def check(folder: Path, files: dict[str, bytes]) -> str | None:
    """Check these files: None where they pass, else the member that is refused."""
    for name, data in files.items():
        path = folder / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    try:
        check_folder(folder / "model")
    except UnsafeArchive as refused:
        return refused.member
    return None


def nested(levels: int, data: bytes = HARMLESS, method: int = 8) -> bytes:
    """A zip file in a zip file in …, the innermost with one pickle."""
    packed = zip_of({"a/a.pkl": data})
    for level in range(levels - 1):
        packed = raw_zip([ZipMember(f"a/{level}.zip", packed, FILE_MODE, method)])
    return packed


# ------------------------------------------------------------------------------------------------- how far


@pytest.mark.parametrize("method", [0, 8])
def test_four_zip_files_within_one_another_are_looked_into_and_a_fifth_is_refused(tmp_path: Path, method: int) -> None:
    """The pickle in the fourth is found, and judged, whether the inner ones are stored or deflated."""
    assert check(tmp_path / "4", {"a.zip": nested(4, method=method)}) is None
    assert check(tmp_path / "4 evil", {"a.zip": nested(4, EVIL, method)}) == "a.zip!2.zip!1.zip!0.zip!a.pkl"
    assert check(tmp_path / "5", {"a.zip": nested(5, method=method)}) == "a.zip!3.zip!2.zip!1.zip!0.zip"


def test_as_many_entries_as_allowed_pass_over_all_files_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is refused."""
    monkeypatch.setattr(f"{MODULE}._MAX_ENTRIES", 30)
    layer = zip_of({f"{index}.txt": b"" for index in range(10)})
    three = {f"{index}.zip": layer for index in range(3)}

    assert check(tmp_path / "30", three) is None
    assert check(tmp_path / "31", {**three, "3.zip": zip_of({"one.txt": b""})}) == "3.zip"


@pytest.mark.parametrize(("size", "words"), [(32 << 20, "is missing"), ((32 << 20) + 1, "at most 33554432 are read")])
def test_thirty_two_megabytes_of_names_are_read_and_no_byte_more(tmp_path: Path, size: int, words: str) -> None:
    """The directory of a zip file is held in memory; here it is a hole in the file, which is no directory."""
    with (tmp_path / "a.zip").open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(4 + size)
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, size, 4, 0))

    with pytest.raises(UnsafeArchive, match=words):
        check_folder(tmp_path)


def test_as_many_bytes_as_allowed_are_unpacked_over_all_files_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte more is refused, wherever it lies."""
    monkeypatch.setattr(f"{MODULE}._MAX_INFLATED_BYTES", 1000)
    half = zip_of({"a.txt": b"x" * 500})

    assert check(tmp_path / "1000", {"1.zip": half, "2.zip": half}) is None
    assert check(tmp_path / "1001", {"1.zip": half, "2.zip": zip_of({"a.txt": b"x" * 501})}) == "2.zip!a.txt"


def test_as_many_files_as_allowed_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are none of them."""
    monkeypatch.setattr(f"{MODULE}._MAX_FILES", 3)
    files = {"a": b"", "deep/b": b"", "deep/deeper/c": b""}

    assert check(tmp_path, files) is None
    with pytest.raises(BadArchive, match="more than 3 files"):
        check(tmp_path, {"d": b""})


def test_what_a_megabyte_shows_to_be_other_data_is_unpacked_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and pictures in a zip file cost no more; what is called a pickle is unpacked to its end."""
    monkeypatch.setattr(f"{MODULE}._MAX_INFLATED_BYTES", 2 << 20)

    assert check(tmp_path / "other", {"a.zip": zip_of({"a/data.bin": bytes(5 << 20)})}) is None
    assert check(tmp_path / "called", {"a.zip": zip_of({"a/data.pt": bytes(5 << 20)})}) == "a.zip!data.pt"


def npy(descr: str, data: bytes, version: int = 1, blanks: bytes = b"") -> bytes:
    """A numpy file."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}\n".encode() + blanks
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(header)) + header + data


LATE = pickle.dumps(["x" * 1000] * 2, 2)[:-1] + b"0" + b"X" + struct.pack("<I", 2 << 20) + b"y" * (2 << 20)

LARGE = {
    "a pickle": (LATE + EVIL[2:], "a.zip!data"),
    "a pickle of protocol 0": (
        b"(Vx\n" + (b"V" + b"y" * 4000 + b"\n0") * 550 + b"csubprocess\nPopen\n(tR.",
        "a.zip!data",
    ),
    "a damaged pickle": (b"\x80\x02" + b"N0" * 8 + b"\xff" * (2 << 20), "a.zip!data"),
    "a zip file": (raw_zip([stored("p/\n", bytes(2 << 20)), stored("p/a.pkl", EVIL)]), "a.zip!data!a.pkl"),
    "an array": (npy("'|O'", LATE + EVIL[2:]), "a.zip!data!array.pkl"),
}


@pytest.mark.parametrize("what", LARGE)
def test_what_a_megabyte_shows_to_be_more_is_unpacked_to_its_end(tmp_path: Path, what: str) -> None:
    """A bad end is found behind two megabytes of good beginning, whatever the member is called."""
    data, member = LARGE[what]

    assert check(tmp_path, {"a.zip": zip_of({"a/data": data, "a/other": b""})}) == member


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    "descr",
    [
        *(
            "'|O'",
            "'O'",
            "'|O8'",
            "[('a', '<f4'), ('b', '|O')]",
            "'object'",
            '"|O"',
            r"'\x4f'",
            "'|' 'O'",
            "('|O', (1,))",
        ),
        " " * 60_000 + "'|O'",
    ],
    ids=lambda descr: str(descr).strip(),
)
def test_an_array_of_objects_is_found_whatever_its_header_says_it_is(tmp_path: Path, version: int, descr: str) -> None:
    """Objects alone or in fields, in each version of the format, whose headers have lengths of two or four bytes."""
    assert check(tmp_path / "evil", {"a.npy": npy(descr, EVIL, version)}) == "a.npy!array.pkl"
    assert check(tmp_path / "good", {"a.npy": npy(descr, HARMLESS, version)}) is None


@pytest.mark.parametrize(
    "descr", ["'<f4'", "'|S5'", "'<M8[ns]'", "[('a', '<f4')]", "[('a b', '<f4', (2, 3)), ('b', '|b1')]"]
)
def test_an_array_of_plain_elements_is_not_looked_into(tmp_path: Path, descr: str) -> None:
    """numpy takes its bytes for what the header says, whatever else they could be."""
    assert check(tmp_path, {"a.npy": npy(descr, EVIL)}) is None


def test_a_header_of_more_than_64_kib_is_not_taken_for_that_of_plain_elements(tmp_path: Path) -> None:
    """So a file that claims a header of gigabytes costs no memory."""
    blanks = b" " * ((1 << 16) - len(npy("'<f4'", b"", 2)) + 12)

    assert check(tmp_path / "64 KiB", {"a.npy": npy("'<f4'", EVIL, 2, blanks)}) is None
    assert check(tmp_path / "more", {"a.npy": npy("'<f4'", EVIL, 2, blanks + b" ")}) == "a.npy!array.pkl"


@pytest.mark.parametrize("comment", [0, 1, 0xFFFF])
def test_a_zip_file_behind_a_picture_is_found_however_long_its_comment_is(tmp_path: Path, comment: int) -> None:
    """Torch's reader looks for the end record as far back as a comment can be long."""
    data = raw_zip([stored("a/data.pkl", EVIL)], prefix=b"\xff\xd8 a picture", comment=b"c" * comment)

    assert check(tmp_path, {"a.jpg": data}) == "a.jpg!data.pkl"


@pytest.mark.parametrize("start", [b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"7z\xbc\xaf\x27\x1c"])
@pytest.mark.parametrize("name", ["a.pkl", "a.log.gz", "weights.bin"])
def test_what_is_compressed_and_cannot_be_unpacked_is_refused_whatever_its_name(
    tmp_path: Path, start: bytes, name: str
) -> None:
    """Zstandard, lz4 and 7z: joblib and pandas open them by their content, where their packages are installed."""
    assert check(tmp_path, {name: start + b"rest"}) == name


@pytest.mark.parametrize("start", [b"\x1f\x8b\x08", b"BZh91AY&SY", b"\xfd7zXZ\0"])
def test_what_is_damaged_where_its_first_bytes_are_certain_is_refused(tmp_path: Path, start: bytes) -> None:
    """Another reader may get further."""
    assert check(tmp_path, {"data": start + b"rest"}) == "data"


@pytest.mark.parametrize("start", [b"x\x01", b"x^", b"x\x9c", b"x\xda", b"]\0\0\x80\0" + b"\xff" * 8])
def test_what_only_looks_compressed_is_judged_as_what_it_is(tmp_path: Path, start: bytes) -> None:
    """Two bytes may begin anything."""
    assert check(tmp_path, {"data": start + b"rest"}) is None


@pytest.mark.parametrize(
    ("start", "operations", "is_refused"),
    [(b"\x80\x05", 8, True), (b"\x80\x02", 8, True), (b"\x80\x02", 7, False), (b"\x80\x06", 8, False)],
)
def test_what_begins_like_a_pickle_for_long_enough_is_a_damaged_one(
    tmp_path: Path, start: bytes, operations: int, is_refused: bool
) -> None:
    """Two bytes may be of anything, as those of a protocol that no Python knows are."""
    data = start + (b"N0" * 4)[:operations] + b"\xff"

    assert check(tmp_path / "data", {"data": data}) == ("data" if is_refused else None)
    assert check(tmp_path / "behind", {"data": HARMLESS + data}) is None
    assert check(tmp_path / "called", {"a.pkl": b"\x80\x02N0\xff"}) == "a.pkl"


def test_a_guess_ends_after_as_many_operations_as_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on like a pickle for so long is refused if it may import; a pickle's file is read to its end."""
    program = b"(Vx\n" + b"Vy\n0" * 30 + b"csubprocess\nPopen\n(tR."
    assert check(tmp_path / "all", {"data": program}) == "data"

    monkeypatch.setattr(f"{MODULE}._GUESSED_OPERATIONS", 50)

    assert check(tmp_path / "behind", {"data": program}) == "data"
    assert check(tmp_path / "before", {"data": b"csubprocess\nPopen\n" + b"N0" * 30 + b"(tR."}) == "data"
    assert check(tmp_path / "in a second pickle", {"data": HARMLESS + program}) == "data"
    assert check(tmp_path / "constant", {"data": b")" * 1000}) is None
    assert check(tmp_path / "called", {"data.pkl": program}) == "data.pkl"
    assert check(tmp_path / "long", {"data.pkl": pickle.dumps(list(range(100)), 0)}) is None


# ------------------------------------------------------------------------------------------------- who reads it

EXPORTED = {"archive_format": b"pt2", "models/model.json": b"{}"}

READERS = {
    "TorchScript's data": ({"constants.pkl": HARMLESS, "data.pkl": SCRIPT}, None),
    "TorchScript's debug records": ({"constants.pkl": HARMLESS, "code/a.py.debug_pkl": SCRIPT}, None),
    "cut debug records": (
        {"constants.pkl": HARMLESS, "code/a.py.debug_pkl": b"(lp0\nI1"},
        "code/a.py.debug_pkl",
    ),
    "a state dict's data": ({"version": b"3", "data.pkl": SCRIPT}, "data.pkl"),
    "an extra file of TorchScript": ({"constants.pkl": HARMLESS, "extra/a.pkl": SCRIPT}, "extra/a.pkl"),
    "debug records of no code": ({"constants.pkl": HARMLESS, "other/a.debug_pkl": SCRIPT}, "other/a.debug_pkl"),
    "code that is a pickle": ({"constants.pkl": HARMLESS, "code/a.pkl": SCRIPT}, "code/a.pkl"),
    "an object of an exported program": (
        {**EXPORTED, "data/constants/custom_obj_12": zip_of({"o/data.pkl": SCRIPT, "o/constants.pkl": HARMLESS})},
        None,
    ),
    "an object of its data alone": (
        {**EXPORTED, "data/constants/custom_obj_1": zip_of({"o/data.pkl": SCRIPT, "o/version": b"3"})},
        None,
    ),
    "an object's own pickle": ({**EXPORTED, "data/constants/custom_obj_0": SCRIPT}, None),
    "another file of an exported program": (
        {**EXPORTED, "data/constants/custom_obj_a": SCRIPT},
        "data/constants/custom_obj_a",
    ),
    "an object that runs programs": ({**EXPORTED, "data/constants/custom_obj_0": EVIL}, "data/constants/custom_obj_0"),
}


@pytest.mark.parametrize("method", [0, 8])
@pytest.mark.parametrize("what", READERS)
def test_classes_of_torchscript_pass_only_where_torchs_own_reader_opens_them(
    tmp_path: Path, what: str, method: int
) -> None:
    """Python would import them; by the layout of the file it is known which of both will read."""
    records, member = READERS[what]
    data = raw_zip([ZipMember(f"a/{name}", content, FILE_MODE, method) for name, content in records.items()])

    assert check(tmp_path, {"a.pt": data}) == (None if member is None else f"a.pt!{member}")


@pytest.mark.parametrize(
    ("mark", "is_torchs"), [("data.pkl", True), ("archive_format", True), ("models/model.json", True), ("other", False)]
)
def test_a_record_that_cannot_be_looked_into_is_refused_in_torchs_files_alone(
    tmp_path: Path, mark: str, is_torchs: bool
) -> None:
    """What is not torch's, and is not called a pickle, nobody opens as one."""
    records = [stored(f"a/{mark}", HARMLESS), ZipMember("a/data/0", b"x", FILE_MODE, 12)]

    assert check(tmp_path, {"a.zip": raw_zip(records)}) == ("a.zip!data/0" if is_torchs else None)


def test_a_disk_that_fails_is_not_taken_for_a_record_without_a_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be read was not checked."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("marserve.archive.zip_records.ZipRecords.find_data", fail)

    with pytest.raises(OSError, match="Input/output"):
        check(tmp_path, {"a.zip": zip_of({"a/other.txt": b""})})


def test_members_of_files_without_one_folder_around_all_keep_their_names(tmp_path: Path) -> None:
    """So that the operator finds the one that is meant."""
    one, two = (raw_zip([stored("a/1.pkl", a), stored("b/2.pkl", b)]) for a, b in ((EVIL, b"N."), (b"N.", EVIL)))

    assert check(tmp_path / "1", {"a.zip": one}) == "a.zip!a/1.pkl"
    assert check(tmp_path / "2", {"a.zip": two}) == "a.zip!b/2.pkl"


def test_files_may_be_named_by_whoever_gives_them_and_all_findings_are_told(tmp_path: Path) -> None:
    """Where the operator trusts them: one sentence each, the harmless ones none."""
    for name, data in (("1", EVIL), ("2", HARMLESS), ("3", EVIL)):
        (tmp_path / name).write_bytes(data)
    files = [(f"named {name}", tmp_path / name) for name in "123"]

    findings = check_files(files, trusted=True)

    assert len(findings) == 2
    assert "'named 1'" in findings[0]
    assert "'named 3'" in findings[1]
    with pytest.raises(UnsafeArchive) as refused:
        check_files(reversed(files))
    assert refused.value.member == "named 3"
