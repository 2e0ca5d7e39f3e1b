"""Tests for pickles in disguise: compressed, in a tar, behind a prefix, under any name. None runs, none passes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve.archive.pickles.pickle_check import check_folder
from marserve.errors import UnsafeArchive
from support.archives import zip_of

EVIL = b"\x80\x02csubprocess\nPopen\n)R."
HARMLESS = pickle.dumps({"weight": [1.0, 2.0]}, 2)
TEXT = b"the 0\nof 1\nand 2\n" * 1000


def tar_of(data: bytes, form: int = tarfile.USTAR_FORMAT, name: str = "data", mode: str = "w") -> bytes:
    """A tar file with a text and this file."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode, format=form) as tar:  # type: ignore[call-overload]
        for each, content in (("words.txt", TEXT), (name, data)):
            info = tarfile.TarInfo(each)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def version_7(data: bytes) -> bytes:
    """The oldest tar form, which has no magic: `tarfile` goes by the checksum."""
    block = bytearray(tar_of(data)[: tarfile.BLOCKSIZE])
    block[:100] = b"data".ljust(100, b"\0")
    block[124:136] = b"%011o\0" % len(data)
    block[156:] = bytes(tarfile.BLOCKSIZE - 156)
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data.ljust(-(-len(data) // 512) * 512, b"\0") + bytes(1024)


def prefixed(data: bytes) -> bytes:
    """A zip file behind other data that its offsets do not count, as Python's `zipfile` opens it."""
    return b"some other data " * 20 + zip_of({"data": data})


def joblib_of_old(data: bytes) -> bytes:
    """What joblib wrote before 0.10: a length in hexadecimal, then zlib's."""
    return b"ZF" + hex(len(data)).encode().ljust(19) + zlib.compress(data)


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "zlib": zlib.compress,
    "zlib of a small window": lambda data: _zlib(data, 9),
    "gzip": gzip.compress,
    "gzip of two streams": lambda data: gzip.compress(data[:3]) + gzip.compress(data[3:]),
    "gzip, zeros between": lambda data: gzip.compress(data[:3]) + bytes(600) + gzip.compress(data[3:]),
    "bzip2": bz2.compress,
    "bzip2 of two streams": lambda data: bz2.compress(data[:3]) + bz2.compress(data[3:]),
    "xz": lzma.compress,
    "lzma as joblib writes it": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "joblib's old form": joblib_of_old,
    "tar": tar_of,
    "tar of the oldest form": version_7,
    "tar of GNU's with a long name": lambda data: tar_of(data, tarfile.GNU_FORMAT, "d" * 300),
    "tar of pax with a long name": lambda data: tar_of(data, tarfile.PAX_FORMAT, "d" * 300),
    "compressed tar": lambda data: tar_of(data, mode="w:gz"),
    "zip behind a prefix": prefixed,
    "zip behind a prefix, bytes behind": lambda data: prefixed(data) + b"\n\n",
    "gzip in xz": lambda data: lzma.compress(gzip.compress(data)),
    "zlib in a zip": lambda data: zip_of({"a": zlib.compress(data)}),
    "prefixed zip of megabytes in gzip": lambda data: gzip.compress(TEXT * 100 + zip_of({"data": data})),
}


def _zlib(data: bytes, window: int) -> bytes:
    packer = zlib.compressobj(wbits=window)
    return packer.compress(data) + packer.flush()


def refusal(folder: Path, name: str, data: bytes) -> UnsafeArchive | None:
    """What the check says of one file; None where it passes."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    try:
        check_folder(folder)
    except UnsafeArchive as error:
        return error
    return None


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("name", ["weights.bin", "weights", "notes.txt", "scaler.joblib"])
def test_a_pickle_in_any_form_under_any_name_is_refused(tmp_path: Path, form: str, name: str) -> None:
    """`joblib.load` and pandas unpack by the content, whatever a file is called."""
    error = refusal(tmp_path, name, PACKED[form](EVIL))

    assert error is not None
    assert "subprocess.Popen" in error.message or "cannot be looked into" in error.message
    assert error.member.startswith(name)


@pytest.mark.parametrize("form", [form for form in PACKED if "megabytes" not in form])
def test_what_is_harmless_in_any_form_passes(tmp_path: Path, form: str) -> None:
    """A vocabulary of texts, and a pickle of plain data."""
    assert refusal(tmp_path / "text", "vocabulary.bin", PACKED[form](TEXT)) is None
    assert refusal(tmp_path / "pickle", "vocabulary.bin", PACKED[form](HARMLESS)) is None


def alone(data: bytes, dictionary: int | None = None) -> bytes:
    """lzma's old form, its header with this size of the dictionary."""
    packed = lzma.compress(data, lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 16}])
    return packed if dictionary is None else packed[:1] + struct.pack("<I", dictionary) + packed[5:]


def lzip(data: bytes) -> bytes:
    """lzip's form, whose data is lzma's."""
    raw = alone(data)[13:]
    return b"LZIP\x01\x10" + raw + struct.pack("<IQQ", zlib.crc32(data), len(data), 6 + len(raw) + 20)


NOISE = random.Random(5).randbytes(60_000)
ODD: dict[str, Callable[[bytes], bytes]] = {
    "lzma behind an empty xz": lambda data: lzma.compress(b"") + alone(data),
    "xz behind an empty lzma": lambda data: alone(b"") + lzma.compress(data),
    "lzma behind zeros behind xz": lambda data: lzma.compress(b"") + bytes(8) + alone(data),
    "lzma behind lzma of an odd size": lambda data: alone(b"", 0x123400) + alone(data, 0x123400),
    "lzma with a dictionary of 1 GiB": lambda data: alone(data, 1 << 30),
    "lzma with the largest dictionary": lambda data: alone(data, 0xFFFFFFFF),
    "lzma with a dictionary of an odd size": lambda data: alone(data, 0x123400),
    "lzma with a dictionary of an odd and large size": lambda data: alone(data, 0x71234567),
    "lzma with an odd length": lambda data: alone(data)[:5] + struct.pack("<Q", 1 << 50) + alone(data)[13:],
    "lzma with a damaged end": lambda data: _damage(lzma.compress(data + NOISE, lzma.FORMAT_ALONE), 40_000),
    "lzma damaged early": lambda data: _damage(alone(data + NOISE), 300),
    "zlib with a wrong checksum": lambda data: zlib.compress(data + NOISE)[:-4] + bytes(4),
    "zlib with a damaged end": lambda data: zlib.compress(data + NOISE)[:-9] + b"\xff" * 9,
    "zlib of a small window that is also lzma": lambda data: _zlib_like_lzma(data),
    "lzip": lzip,
    "lzip behind an empty xz": lambda data: lzma.compress(b"") + lzip(data),
    "zstandard behind a skippable frame": lambda data: b"\x50\x2a\x4d\x18\4\0\0\0abcd\x28\xb5\x2f\xfd" + data,
    "lz4 behind another skippable frame": lambda data: b"\x5f\x2a\x4d\x18\4\0\0\0abcd\x04\x22\x4d\x18" + data,
}


def _damage(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(byte ^ 255 for byte in data[at:])


def _zlib_like_lzma(data: bytes) -> bytes:
    """Its data is stored behind an empty block, so that a zero stands where lzma's data begins."""
    body = b"\0\0\0\xff\xff" * 3 + b"\1" + struct.pack("<HH", len(data), len(data) ^ 0xFFFF) + data
    made = b"\x48\x0d" + body[:15] + body[15:] + struct.pack(">I", zlib.adler32(data))
    assert made[12] == 0
    return made[:2] + b"\0\0\0\xff\xff" + made[2:]


@pytest.mark.parametrize("form", ODD)
@pytest.mark.parametrize("name", ["weights.bin", "scaler.joblib"])
def test_a_pickle_in_an_odd_form_is_refused(tmp_path: Path, form: str, name: str) -> None:
    """Readers take streams of several forms, headers that no encoder writes, and give what comes before damage."""
    for inner in (EVIL, zip_of({"a": EVIL}) if "damaged" not in form else EVIL):
        assert refusal(tmp_path, name, ODD[form](inner)) is not None


def test_the_oldest_form_of_torch_is_refused(tmp_path: Path) -> None:
    """Between the pickles of `storages` lies raw data, which no check of pickles can step over."""
    storages = pickle.dumps(1, 2) + pickle.dumps(("0", "cpu", "x"), 2) + struct.pack("<q", 0) + EVIL
    forms = {
        "plain": tar_of(storages, name="storages"),
        "long": tar_of(storages, tarfile.GNU_FORMAT, "d" * 200 + "/storages"),
        "pax": tar_of(storages, tarfile.PAX_FORMAT, "d" * 300 + "/storages"),
    }

    for what, data in forms.items():
        error = refusal(tmp_path / what, "weights.pt", data)
        assert error is not None
        assert "torch's oldest form" in error.message


@pytest.mark.parametrize("form", ["zlib", "gzip", "xz", "lzma as joblib writes it", "bzip2"])
def test_what_is_unpacked_before_the_damage_counts(tmp_path: Path, form: str) -> None:
    """An unpickler reads as it unpacks: it has run what came before."""
    whole = PACKED[form](EVIL + bytes(range(256)) * 4000)

    assert refusal(tmp_path, "data", whole[: len(whole) - 9]) is not None


def test_a_file_that_is_a_pickle_and_a_tar_is_judged_as_both(tmp_path: Path) -> None:
    """A tar begins with the name of its first file."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("csubprocess\nPopen\n(tR."))

    error = refusal(tmp_path, "data", made.getvalue())

    assert error is not None
    assert "subprocess.Popen" in error.message


def test_a_tar_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    """Its files would have other bytes than those that were judged."""
    sparse = bytearray(tar_of(TEXT)[:512])
    sparse[156:157] = b"S"
    sparse[148:156] = b"        "
    sparse[148:156] = b"%06o\0 " % sum(sparse)

    for number, data in enumerate((bytes(sparse), tar_of(TEXT)[:600])):
        error = refusal(tmp_path / str(number), "data", data)
        assert error is not None
        assert "cannot be looked into" in error.message


def test_bombs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept, and what is only unpacked to find its end."""
    monkeypatch.setattr("marserve.archive.pickles.pickle_check._MAX_INFLATED_BYTES", 3 << 20)
    monkeypatch.setattr("marserve.archive.pickles.pickle_check._MAX_SKIMMED_BYTES", 3 << 20)

    for name, data in {"kept": b"N" * (8 << 20), "skimmed": b"\0" * (8 << 20)}.items():
        error = refusal(tmp_path / name, name, gzip.compress(data, 1))
        assert error is not None
        assert "unpacks to more" in error.message


@pytest.mark.parametrize("form", [gzip.compress, bz2.compress])
def test_zeros_without_end_behind_a_stream_are_refused(tmp_path: Path, form: Callable[[bytes], bytes]) -> None:
    """A sparse file of 256 GiB costs nothing to make, and took minutes to read."""
    with (tmp_path / "x.bin").open("wb") as file:
        file.write(form(TEXT))
        file.truncate(1 << 38)

    with pytest.raises(UnsafeArchive, match="more than 16777216 zero bytes follow"):
        check_folder(tmp_path)


def test_raw_data_that_begins_with_zeros_passes(tmp_path: Path) -> None:
    """Zeros are an empty stream of lzma's old form, which only readers of that form take; weights may be all zero."""
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(40 << 20)
        file.seek(0, 2)
        file.write(b"raw weights" * 100)

    check_folder(tmp_path)


def test_what_follows_padding_is_looked_into(tmp_path: Path) -> None:
    """As readers of the format do, and padding alone passes."""
    padded = gzip.compress(b"") + bytes(3 << 20)

    assert refusal(tmp_path / "padded", "x.bin", padded) is None
    assert refusal(tmp_path / "evil", "x.bin", padded + gzip.compress(EVIL)) is not None


PTH = {
    "distutils-precedence.pth": b"import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'local') "
    b"== 'local'; enabled and __import__('_distutils_hack').add_shim(); \n",
    "protobuf-nspkg.pth": b"import sys, types, os;has_mfs = sys.version_info > (3, 5);p = os.path.join(sys._getframe(1)"
    b".f_locals['sitedir'], *('google',));m = has_mfs and sys.modules\n",
    "paths.pth": b"# where\nBin/here\n./there\nC:\\lib\n",
}


@pytest.mark.parametrize("name", PTH)
def test_text_that_site_reads_is_no_pickle_of_torchs(tmp_path: Path, name: str) -> None:
    """As setuptools' and protobuf's own wheels have it, in a folder or in a wheel."""
    assert refusal(tmp_path / "folder", f"packages/{name}", PTH[name]) is None
    assert refusal(tmp_path / "wheel", "x-1.0-py3-none-any.whl", zip_of({name: PTH[name]})) is None


@pytest.mark.parametrize(
    "text",
    [
        b"csubprocess\nPopen\n(S'true'\ntR.",
        b"(S'true'\nisubprocess\nPopen\n.",
        b"csubprocess\nPopen\n",
    ],
)
def test_text_that_is_a_pickle_of_the_oldest_protocol_is_refused_as_one(tmp_path: Path, text: bytes) -> None:
    """All its bytes are letters."""
    assert refusal(tmp_path, "weights.pth", text) is not None


def test_zip_files_that_zipfile_opens_are_found_as_it_finds_them(tmp_path: Path) -> None:
    """Behind other data, and with bytes behind them."""
    for form in ("zip behind a prefix", "zip behind a prefix, bytes behind"):
        with zipfile.ZipFile(io.BytesIO(PACKED[form](b"seen"))) as opened:
            assert opened.read("data") == b"seen"
