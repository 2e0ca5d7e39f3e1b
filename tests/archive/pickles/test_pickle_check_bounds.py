"""How far the check of pickles looks, and who is taken to read what: each bound to the last one, layouts of files."""

from __future__ import annotations

import errno
import gzip
import lzma
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.pickles.pickle_check import check_files, check_folder
from marserve.errors import BadArchive, UnsafeArchive
from support.archives import FILE_MODE, ZipMember, raw_zip, zip_of

MODULE = "marserve.archive.pickles.pickle_check"
HARMLESS = pickle.dumps({"weight": [1.0, 2.0]}, 2)
SCRIPT = b"\x80\x02c__torch__\nNet\n)\x81."  # what only torch's C++ reader may be given
EVIL = b"\x80\x02csubprocess\nPopen\n)R."


def stored(name: str, data: bytes, **fields: Any) -> ZipMember:
    """A record as torch stores it."""
    return ZipMember(name, data, FILE_MODE, 0, **fields)


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


@pytest.mark.parametrize("mark", ["data.pkl", "archive_format", "other"])
@pytest.mark.parametrize("method", [9, 12, 14, 93, 95])
def test_a_record_by_another_method_is_refused_whatever_it_is_called(tmp_path: Path, mark: str, method: int) -> None:
    """`zipfile` unpacks bzip2 and lzma too, and numpy's `load` any record by its content."""
    records = [stored(f"a/{mark}", HARMLESS), ZipMember("a/data/0", b"x", FILE_MODE, method)]

    assert check(tmp_path, {"a.zip": raw_zip(records)}) == "a.zip!data/0"


def test_records_that_say_otherwise_than_the_directory_or_fail_their_checksum_are_refused(tmp_path: Path) -> None:
    """Another reader has given what lies before the damage, or goes by the other record."""
    damaged = {
        "method": stored("a/other.npy", HARMLESS, local_method=8),
        "checksum": ZipMember("a/other.bin", HARMLESS + bytes(range(256)) * 8000, crc=1),
        "encrypted": stored("a/other.txt", b"x", flags=1),
        "folder": ZipMember("a/folder/", EVIL),
    }

    for what, record in damaged.items():
        data = raw_zip([stored("a/first", b""), record])
        assert check(tmp_path / what, {"a.zip": data}) == "a.zip!" + str(record.name).removeprefix("a/"), what


def test_a_disk_that_fails_is_not_taken_for_a_record_without_a_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be read was not checked."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("marserve.archive.reading.zip_records.ZipRecords.find_data", fail)

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


def test_arrays_and_pickles_that_follow_an_array_in_its_file_are_looked_into(tmp_path: Path) -> None:
    """`numpy.load` and `pickle.load` of one open file read them one after the other."""
    plain = npy("'<f4'", b"1234")
    text = npy("'<U2'", b"12345678")
    fields = npy("[('a', '<f4', (2, 3)), ('b', '|b1')]", b"x" * 25)

    for number, first in enumerate((plain, text, fields, plain + text + HARMLESS, npy("'|O'", HARMLESS))):
        assert check(tmp_path / f"{number} good", {"a.npy": first + npy("'|O'", HARMLESS)}) is None
        assert check(tmp_path / f"{number} evil", {"a.npy": first + npy("'|O'", EVIL)}) == "a.npy!array.pkl"
        assert check(tmp_path / f"{number} pickle", {"a.npy": first + EVIL}) in ("a.npy", "a.npy!array.pkl")


def test_an_array_whose_shape_cannot_be_read_takes_no_room(tmp_path: Path) -> None:
    """numpy cannot read it either."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header

    assert check(tmp_path, {"a.npy": data + b"1234"}) is None


HONEST = {
    "one line of text": b"very long text " * 20_000,
    "one line of digits": b"1234567890" * 20_000,
    "one line of bases": b"catgcatt" * 30_000,
    "long lines of bases": (b"catgcatt" * 10_000 + b"\n") * 40,
    "short lines of bases": (b"catgcattaacg" * 6 + b"\n") * 1000,
    "one line of JSON": b'{"vocabulary": [' + b", ".join(b'"word %d"' % n for n in range(20_000)) + b"]}",
    "a table": b"column,count\n" + b"".join(b"item%d,%d\n" % (n, n * n) for n in range(20_000)),
    "a table of long lines": (b",".join(b"%d" % n for n in range(20_000)) + b"\n") * 3,
    "base64": b"c2VjcmV0" * 20_000,
    "zeros": bytes(3 << 20),
    "zeros behind a number": struct.pack("<d", 0.1) + bytes(3 << 20),
    "floats": b"".join(struct.pack("<f", n / 7) for n in range(100_000)),
    "integers of 64 bits": b"".join(struct.pack("<q", n) for n in range(50_000)),
    "safetensors": struct.pack("<Q", 64)
    + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64)
    + bytes(36),
    "ONNX": b"\x08\x08\x12\x07pytorch\x1a\x052.0.0:\xa2\x01\n\x0b\n\x01x\x12\x01y" + bytes(range(256)) * 100,
    "a picture": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x01\0\0\0\x01\0\x08\x02" + bytes(range(256)) * 100,
    "a sentencepiece model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\n\x0c" * 2000,
}


@pytest.mark.parametrize("what", HONEST)
@pytest.mark.parametrize("name", ["a.zip", "data.bin"])
def test_honest_data_passes_plain_and_in_a_zip_file(tmp_path: Path, what: str, name: str) -> None:
    """However long its lines are, and whatever it begins like."""
    data = HONEST[what]

    assert check(tmp_path, {name: zip_of({"a/data": data}) if name == "a.zip" else data}) is None


def test_random_bytes_pass(tmp_path: Path) -> None:
    """Weights that are compressed or encrypted look so: whatever they begin with, little of it can be followed."""
    source = random.Random(7)
    files = {str(number): source.randbytes(source.choice((40, 300, 5000))) for number in range(1000)}

    assert check(tmp_path, files) is None


# ------------------------------------------------------------------------------------------------- how much

MANY = {
    "pickles of two bytes": b"N." * 100_000,
    "pickles of four bytes": b"\x80\x02N." * 60_000,
    "marks of the protocol": b"\x80\x02" * 200_000,
    "places in the memo": b"\x80\x02N" + b"\x94" * 200_000 + b".",
    "empty texts": b"\x80\x02(" + b"\x8c\0" * 200_000 + b"t.",
    "empty gzip streams": gzip.compress(b"") * 10_000,
    "empty lzma streams": lzma.compress(b"", lzma.FORMAT_ALONE) * 10_000,
    "empty arrays": npy("'<f4'", b"").replace(b"(1,)", b"(0,)") * 15_000,
}


@pytest.mark.parametrize("what", MANY)
def test_what_takes_more_operations_than_an_archive_may_is_refused(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is counted, also one that does nothing, and over all files together."""
    monkeypatch.setattr("marserve.archive.pickles.check_budget.MAX_OPERATIONS", 190_000)

    (tmp_path / "data").write_bytes(MANY[what])

    with pytest.raises(UnsafeArchive, match="more than 190000 operations together"):
        check_folder(tmp_path)
