"""Tests for pickles in disguise: compressed, in a tar, behind a prefix, under any name. None runs, none passes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve.archive.pickle_check import check_folder
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
    monkeypatch.setattr("marserve.archive.pickle_check._MAX_INFLATED_BYTES", 3 << 20)
    monkeypatch.setattr("marserve.archive.pickle_check._MAX_SKIMMED_BYTES", 3 << 20)

    for name, data in {"kept": b"N" * (8 << 20), "skimmed": b"\0" * (8 << 20)}.items():
        error = refusal(tmp_path / name, name, gzip.compress(data, 1))
        assert error is not None
        assert "unpacks to more" in error.message


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
