"""The check of pickles (RELIABILITY H5): canaries are refused wherever torch or Python would open them; none runs."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import pickle
import pickletools
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.pickles.pickle_check import PYTHON_GLOBALS, check_files, check_folder
from marserve.errors import BadArchive, UnsafeArchive
from support.archives import FILE_MODE, ZipMember, raw_zip, zip_of
from support.pickles import (
    STYLES,
    canary,
    forget_extension,
    long_text,
    register_extension,
    remove_canary,
    text,
)

HARMLESS = pickle.dumps({"weight": [1.0, 2.0]}, 2)
TORCH_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """Where the canary would make a folder; the test fails when it is there at the end."""
    bird = str(tmp_path / "canary")
    register_extension()
    yield bird
    forget_extension()
    assert not remove_canary(bird), "the canary ran"


def refusal_of(folder: Path, files: dict[str, bytes]) -> UnsafeArchive:
    """Lay out an archive and give the error that its check ends with."""
    for name, data in files.items():
        file = folder / "model" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    with pytest.raises(UnsafeArchive) as refusal:
        check_folder(folder / "model")
    return refusal.value


# ---------------------------------------------------------------------------------------------------- styles


@pytest.mark.parametrize("style", STYLES)
def test_a_canary_in_any_style_is_refused_and_would_have_run(tmp_path: Path, path: str, style: str) -> None:
    """Each style is alive (the standard unpickler runs it) and none passes."""
    data = STYLES[style].make(path)
    stream = io.BytesIO(data)
    try:
        for _ in range(STYLES[style].loads):
            pickle.load(stream)
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError):
        pass
    assert remove_canary(path), "this style does nothing"

    error = refusal_of(tmp_path, {"weights.pt": data})

    assert error.member == "weights.pt"


@pytest.mark.parametrize("style", STYLES)
def test_a_canary_is_refused_also_where_no_name_says_pickle(tmp_path: Path, path: str, style: str) -> None:
    """`pytorch_model.bin` and files without an ending are known by their content."""
    if style == "EXT":
        data = b"\x80\x02" + STYLES[style].make(path)[2:]
    else:
        data = STYLES[style].make(path)

    error = refusal_of(tmp_path, {"pytorch_model.bin": data})

    assert error.member == "pytorch_model.bin"


def test_twenty_styles_or_more_are_tried() -> None:
    """H5 asks for twenty."""
    assert len(STYLES) >= 20


REFUSED_PROGRAMS = {
    "an attribute of an allowed class": (
        b"\x80\x02ctorch.nn.parameter\nParameter\nN}" + long_text("__reduce__") + b"Ns\x86b.",
        "BUILD changes torch.nn.parameter.Parameter",
    ),
    "an item of an allowed class": (b"\x80\x02ccollections\nOrderedDict\nK\x01K\x02s.", "SETITEM changes"),
    "items of an allowed class": (b"\x80\x02ccollections\nCounter\n(K\x01K\x02u.", "SETITEMS changes"),
    "elements of an allowed class": (b"\x80\x02ctorch\nSize\n(K\x01K\x02e.", "APPENDS changes"),
    "one element of an allowed class": (b"\x80\x02ctorch\nSize\nK\x01a.", "APPEND changes"),
    "members of an allowed class": (b"\x80\x04ctorch\nSize\n(K\x01\x90.", "ADDITEMS changes"),
    "a call of an object": (b"\x80\x02ccollections\nOrderedDict\n)R)R.", "REDUCE calls what is no global"),
    "a call of a text": (b"\x80\x02" + long_text("os") + b")R.", "REDUCE calls what is no global"),
    "a call of a persistent object": (b"\x80\x02K\x01Q)R.", "REDUCE calls what is no global"),
    "a class named by an object": (b"\x80\x04]" + text("x") + b"\x93.", "not written out"),
    "a class named by a long text": (b"\x80\x04" + long_text("m" * 600) + text("x") + b"\x93.", "not written out"),
    "NEWOBJ of another class": (b"\x80\x02csubprocess\nPopen\n)\x81.", "subprocess.Popen"),
    "NEWOBJ_EX of another class": (b"\x80\x04csubprocess\nPopen\n)}\x92.", "subprocess.Popen"),
    "a class below an allowed one": (b"\x80\x02ccollections\nOrderedDict.fromkeys\n.", "OrderedDict.fromkeys"),
    "a name with blanks": (b"\x80\x02c torch\nSize\n.", " torch.Size"),
    "torch.load": (b"\x80\x02ctorch\nload\n.", "torch.load"),
    "an import alone": (b"\x80\x02cantigravity\nfly\n.", "antigravity.fly"),
    "a TorchScript class": (b"\x80\x02c__torch__\nNet\n)\x81.", "__torch__.Net"),
    "a place far out in the memo": (b"\x80\x02Nr\xff\xff\xff\x7f.", "LONG_BINPUT fills place 2147483647"),
    "EXT2": (b"\x80\x02\x83\x01\x02.", "EXT2"),
    "EXT4": (b"\x80\x02\x84\x01\x02\0\0.", "EXT4"),
}


@pytest.mark.parametrize("what", REFUSED_PROGRAMS)
def test_a_program_that_calls_or_changes_what_it_may_not_is_refused_with_its_opcode(tmp_path: Path, what: str) -> None:
    """The error says which opcode does what."""
    data, words = REFUSED_PROGRAMS[what]

    error = refusal_of(tmp_path, {"weights.pt": data})

    assert words in error.message
    assert "trusted_models" in error.message


UNREADABLE = {
    "cut": HARMLESS[:-1],
    "cut in a text": HARMLESS[: HARMLESS.index(b"weight") + 3],
    "cut in a length": b"\x80\x02X\x01",
    "no opcode": b"\x80\x02]\xff.",
    "nothing on the stack": b"\x80\x02]0.",
    "no such memo": b"\x80\x02h\x05.",
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "bytes of 2^60": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "a line without end": b"\x80\x02c" + b"a" * 100_000,
    "newer protocol's opcode": b"\x80\x05\x99.",
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_pickle_that_cannot_be_read_to_its_end_is_refused(tmp_path: Path, what: str) -> None:
    """What the check cannot follow, nobody opens."""
    error = refusal_of(tmp_path, {"weights.pt": UNREADABLE[what]})

    assert "to its end" in error.message


# ---------------------------------------------------------------------------------------------------- places


def zip_with(name: str, data: bytes, root: str = "archive", **more: bytes) -> bytes:
    """A file as torch writes it, with one record that matters."""
    records = {name: data, "version": b"3\n", "byteorder": b"little", **more}
    return zip_of({f"{root}/{record}": content for record, content in records.items()})


def stored(name: str, data: bytes, **fields: Any) -> ZipMember:
    """A record as torch stores it: not compressed."""
    return ZipMember(name, data, FILE_MODE, 0, **fields)


def npy_of_objects(data: bytes) -> bytes:
    """A numpy file whose elements are pickled."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def tar_of(name: str, data: bytes) -> bytes:
    """torch's oldest form."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return raw.getvalue()


def places(bird: bytes) -> dict[str, tuple[dict[str, bytes], str]]:
    """Everywhere torch or Python would unpickle: the archive's files, and the member that is refused."""
    harmless = zip_with("data.pkl", HARMLESS)
    evil = zip_with("data.pkl", bird)
    script = {"constants.pkl": b"\x80\x02).", "code/__torch__.py": b"class Net: pass"}
    exported = {"archive_format": b"pt2", "models/model.json": b"{}"}
    old = [TORCH_MAGIC, pickle.dumps(1001, 2), pickle.dumps({"little_endian": True}, 2)]
    return {
        "state dict": ({"sample.pt": evil}, "sample.pt!data.pkl"),
        "state dict, stored": ({"a.pth": raw_zip([stored("a/data.pkl", bird)])}, "a.pth!data.pkl"),
        "state dict, old form": ({"a.pt": b"".join(old) + bird}, "a.pt"),
        "storage keys, old form": ({"a.pt": b"".join(old) + HARMLESS + bird + b"raw"}, "a.pt"),
        "TorchScript's data": ({"s.pt": zip_with("data.pkl", bird, **script)}, "s.pt!data.pkl"),
        "TorchScript's constants": ({"s.pt": zip_with("constants.pkl", bird)}, "s.pt!constants.pkl"),
        "TorchScript's attributes": ({"s.pt": zip_with("attributes.pkl", bird, **script)}, "s.pt!attributes.pkl"),
        "TorchScript's debug records": (
            {"s.pt": zip_with("code/__torch__.py.debug_pkl", bird, **script)},
            "s.pt!code/__torch__.py.debug_pkl",
        ),
        "TorchScript's extra files": ({"s.pt": zip_with("extra/x.pkl", bird, **script)}, "s.pt!extra/x.pkl"),
        "TorchScript without an ending": ({"model": zip_with("data.pkl", bird, **script)}, "model!data.pkl"),
        "sample inputs": (
            {"m.pt2": zip_with("data/sample_inputs/model.pt", evil, **exported)},
            "m.pt2!data/sample_inputs/model.pt!data.pkl",
        ),
        "exported weights": (
            {"m.pt2": zip_with("data/weights/weight_0", evil, **exported)},
            "m.pt2!data/weights/weight_0!data.pkl",
        ),
        "exported weights, stored": (
            {"m.pt2": raw_zip([stored("m/archive_format", b"pt2"), stored("m/data/weights/weight_0", evil)])},
            "m.pt2!data/weights/weight_0!data.pkl",
        ),
        "exported weights, old form": (
            {"m.pt2": zip_with("data/weights/weight_0", TORCH_MAGIC + bird, **exported)},
            "m.pt2!data/weights/weight_0",
        ),
        "exported constants": (
            {"m.pt2": zip_with("data/constants/tensor_0", evil, **exported)},
            "m.pt2!data/constants/tensor_0!data.pkl",
        ),
        "exported objects": (
            {"m.pt2": zip_with("data/constants/opaque_obj_0", bird, **exported)},
            "m.pt2!data/constants/opaque_obj_0",
        ),
        "distributed checkpoint": ({"checkpoint/.metadata": bird}, "checkpoint/.metadata"),
        "optimiser": ({"optimizer.pt": evil}, "optimizer.pt!data.pkl"),
        "transformers' weights": ({"pytorch_model.bin": evil}, "pytorch_model.bin!data.pkl"),
        "checkpoint": ({"last.ckpt": bird}, "last.ckpt"),
        "a handler's own pickle": ({"sub/vocab.pkl": bird}, "sub/vocab.pkl"),
        "joblib": ({"scaler.joblib": bird}, "scaler.joblib"),
        "compressed joblib": ({"scaler.joblib": zlib.compress(bird)}, "scaler.joblib!unpacked"),
        "compressed pickle": ({"vocab.pkl.gz": gzip.compress(bird)}, "vocab.pkl.gz!unpacked"),
        "compressed pickle, other name": ({"vocab.pkl": bz2.compress(bird)}, "vocab.pkl!unpacked"),
        "7z instead of zip": ({"a.pt": b"7z\xbc\xaf\x27\x1c" + bird}, "a.pt"),
        "tar": ({"a.pt": tar_of("pickle", bird)}, "a.pt!pickle"),
        "upper case": ({"WEIGHTS.PT": bird}, "WEIGHTS.PT"),
        "upper case in a zip file": ({"a.bin": zip_with("DATA.PKL", bird)}, "a.bin!DATA.PKL"),
        "no ending": ({"weights": bird}, "weights"),
        "text": ({"notes.txt": b"cos\nmkdir\n(Vx\ntR."}, "notes.txt"),
        "numpy objects": ({"a.npy": npy_of_objects(bird)}, "a.npy!array.pkl"),
        "numpy archive": ({"a.npz": zip_of({"a.npy": npy_of_objects(bird)})}, "a.npz!a.npy!array.pkl"),
        "zip in a zip": (
            {"all.zip": zip_of({"deep/inner.zip": zip_of({"x/weights.pt": evil})})},
            "all.zip!inner.zip!weights.pt!data.pkl",
        ),
        "twice in one zip file": (
            {"a.pt": raw_zip([stored("a/data.pkl", HARMLESS), stored("a/data.pkl", bird)])},
            "a.pt!data.pkl",
        ),
        "twice but for case": (
            {"a.pt": raw_zip([stored("a/data.pkl", HARMLESS), stored("a/DATA.pkl", bird)])},
            "a.pt!DATA.pkl",
        ),
        "unknown compression": ({"a.pt": raw_zip([ZipMember("a/data.pkl", bird, method=12)])}, "a.pt!data.pkl"),
        "encrypted flag": ({"a.pt": raw_zip([stored("a/data.pkl", bird, flags=1)])}, "a.pt!data.pkl"),
        "two names for one record": (
            {"a.pt": raw_zip([stored("a/data.pkl", bird, local_name=b"a/other.txt")])},
            "a.pt!data.pkl",
        ),
        "wrong checksum": ({"a.pt": raw_zip([stored("a/data.pkl", bird, crc=1)])}, "a.pt!data.pkl"),
        "behind other data": ({"a.jpg": behind(b"\xff\xd8 a picture ", bird)}, "a.jpg!data.pkl"),
        "damaged directory": ({"a.bin": evil + b"something behind"}, "a.bin"),
        "second root": (
            {"a.pt": raw_zip([stored("b/constants.pkl", HARMLESS), stored("a/data.pkl", b"\x80\x02c__torch__\nN\n.")])},
            "a.pt!a/data.pkl",
        ),
        "behind a harmless one": ({"a.pt": harmless, "b.pt": evil}, "b.pt!data.pkl"),
    }


def behind(prefix: bytes, bird: bytes) -> bytes:
    """A file that another program takes for a picture and torch's C++ reader for a zip file."""
    return raw_zip([stored("a/data.pkl", bird), stored("a/constants.pkl", HARMLESS)], prefix=prefix)


@pytest.mark.parametrize("place", places(b""))
def test_a_canary_in_any_place_is_refused_by_member(tmp_path: Path, path: str, place: str) -> None:
    """H5: in every place that torch reads, and in those that handlers do."""
    files, member = places(canary(path))[place]

    error = refusal_of(tmp_path, files)

    assert error.member == member


DECEPTIVE = {
    "twice in one zip file": (
        [stored("a/data.pkl", HARMLESS), stored("a/data.pkl", HARMLESS)],
        "a.pt!data.pkl",
        "it is in there twice",
    ),
    "twice but for case": (
        [stored("a/data.pkl", HARMLESS), stored("a/DATA.pkl", HARMLESS)],
        "a.pt!DATA.pkl",
        "it is in there twice",
    ),
    "unknown compression": (
        [ZipMember("a/data.pkl", HARMLESS, method=12)],
        "a.pt!data.pkl",
        "is compressed by method 12",
    ),
    "encrypted flag": ([stored("a/data.pkl", HARMLESS, flags=1)], "a.pt!data.pkl", "is encrypted"),
    "encrypted flag, deflated": (
        [ZipMember("a/data.pkl", HARMLESS, flags=1)],
        "a.pt!data.pkl",
        "is encrypted",
    ),
    "two names for one record": (
        [stored("a/data.pkl", HARMLESS, local_name=b"a/evil.pkl")],
        "a.pt!data.pkl",
        "has another name in its own record",
    ),
    "two methods for one record": (
        [stored("a/data.pkl", HARMLESS, local_method=8)],
        "a.pt!data.pkl",
        "the two records of 'a/data.pkl' disagree",
    ),
    "two sizes for one stored record": (
        [stored("a/data.pkl", HARMLESS, size=len(HARMLESS) + 1)],
        "a.pt!data.pkl",
        "its two sizes differ",
    ),
    "wrong checksum": (
        [ZipMember("a/data.pkl", HARMLESS, crc=1)],
        "a.pt!data.pkl",
        "fails its checksum",
    ),
    "wrong checksum in the middle of torch's files": (
        [stored("a/data.pkl", HARMLESS), ZipMember("a/data/0", bytes(8), crc=1)],
        "a.pt!data/0",
        "fails its checksum",
    ),
}


@pytest.mark.parametrize("what", DECEPTIVE)
def test_what_two_readers_may_read_differently_is_refused_whatever_it_holds(tmp_path: Path, what: str) -> None:
    """Every record is harmless here: it is the zip file itself that is refused, with what is wrong with it."""
    members, member, words = DECEPTIVE[what]

    error = refusal_of(tmp_path, {"a.pt": raw_zip(members)})

    assert error.member == member
    assert words in error.message


def test_a_stored_record_is_judged_by_its_bytes_whatever_its_checksum_says(tmp_path: Path) -> None:
    """What torch would open in place is read in place, and gigabytes of weights are not read for their checksum."""
    (tmp_path / "a.pt").write_bytes(raw_zip([stored("a/data.pkl", HARMLESS, crc=1)]))

    assert check_folder(tmp_path) == []


def test_other_files_may_stand_twice_but_for_case(tmp_path: Path) -> None:
    """Only what torch would open as a pickle is looked up without regard to case."""
    (tmp_path / "a.zip").write_bytes(raw_zip([stored("a/readme", b"x"), stored("a/README", b"y")]))

    assert check_folder(tmp_path) == []


def test_the_operator_may_trust_an_archive_and_is_told_what_is_in_it(tmp_path: Path, path: str) -> None:
    """With `trusted` nothing is raised; the sentences are for the log."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.pt").write_bytes(canary(path))
    (tmp_path / "model" / "b.pt").write_bytes(canary(path))

    findings = check_folder(tmp_path / "model", trusted=True)

    assert len(findings) == 2
    assert "'a.pt': GLOBAL names os.mkdir" in findings[0]


def test_files_behind_links_to_folders_are_checked(tmp_path: Path, path: str) -> None:
    """A folder that is served in place may hold links, as mounted volumes do; also one to itself."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.pt").write_bytes(canary(path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "data").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "model" / "loop").symlink_to(tmp_path / "model")

    with pytest.raises(UnsafeArchive) as refusal:
        check_folder(tmp_path / "model")

    assert refusal.value.member == "data/a.pt"


# ----------------------------------------------------------------------------------------------- what passes

PASSING = {
    "vocabulary, protocol 2": ("vocab.pkl", pickle.dumps({"a": 1, "b": [1.5, None, True, ("x", b"y")]}, 2)),
    "vocabulary, protocol 0": ("vocab.pkl", pickle.dumps({"a": 1, "b": [1.5, None, True]}, 0)),
    "vocabulary, protocol 5": ("vocab.pkl", pickle.dumps({"a": {1, 2}, "b": bytearray(b"x")}, 5)),
    "ordered dict": ("labels.pkl", pickle.dumps(OrderedDict(a=1), 4)),
    "long text": ("text.pkl", pickle.dumps("x" * 1_000_000, 4)),
    "several pickles": ("all.pkl", pickle.dumps([1], 2) * 3),
    "text that is called weights": ("weights.pt", b"weights"),
    "one letter": ("weights.pt", b"w"),
    "nothing": ("weights.pt", b""),
    "labels": ("labels.txt", b"cat\ndog\nbird\n"),
    "labels that begin like a call": ("labels.txt", b"(in brackets)\nout\ncut\n)\nR\n"),
    "code": ("h.py", b"class Net:\n    pass\n"),
    "raw numbers": ("data.bin", b"\x80\x02" + bytes(range(256))),
    "raw constant": ("data.bin", b")" * 100_000),
    "raw protocol marks": ("data.bin", b"\x80\x02" * 1000),
    "plain array": ("a.npy", b"\x93NUMPY\x01\x00\x36\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n"),
    "wheel": ("x.whl", zip_of({"x/__init__.py": b"", "x-1.0.dist-info/METADATA": b"Name: x"})),
    "empty zip": ("x.zip", zip_of({})),
    "picture that ends like a zip file": ("x.png", b"\x89PNG" + bytes(100) + b"PK\x05\x06" + bytes(18)),
}


@pytest.mark.parametrize("what", PASSING)
def test_harmless_files_pass(tmp_path: Path, what: str) -> None:
    """Plain data in pickles, text, raw numbers and other formats are no concern of the check."""
    name, data = PASSING[what]
    (tmp_path / name).write_bytes(data)

    assert check_folder(tmp_path) == []


def test_a_bomb_inside_of_a_zip_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2, nested: what is looked into is bounded for the whole archive."""
    monkeypatch.setattr("marserve.archive.pickles.pickle_check._MAX_INFLATED_BYTES", 1 << 20)
    layer = zip_of({f"{index}.pkl": pickle.dumps("0" * 300_000, 2) for index in range(4)})

    error = refusal_of(tmp_path, {"a.zip": layer})

    assert "unpacks to more" in error.message


def test_zip_files_nested_without_end_are_refused(tmp_path: Path) -> None:
    """H2, nested: a file of files of files is opened four deep."""
    data = zip_of({"a/a.pkl": HARMLESS})
    for level in range(5):
        data = zip_of({f"a/{level}.zip": data})

    error = refusal_of(tmp_path, {"a.zip": data})

    assert "deep" in error.message


def test_many_nested_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2, nested: the number of entries is bounded over all files together."""
    monkeypatch.setattr("marserve.archive.pickles.pickle_check._MAX_ENTRIES", 30)
    layer = zip_of({f"{index}.txt": b"" for index in range(10)})

    error = refusal_of(tmp_path, {f"{index}.zip": layer for index in range(4)})

    assert error.member == "3.zip"


def test_a_program_over_the_bound_of_operations_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle of a billion steps would hold the check for hours."""
    monkeypatch.setattr("marserve.archive.pickles.check_budget.MAX_OPERATIONS", 199)
    (tmp_path / "a.pkl").write_bytes(b"\x80\x02" + b"N0" * 100 + b"N.")

    with pytest.raises(UnsafeArchive, match="more than 199 operations"):
        check_folder(tmp_path)


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder served in place was never held to the bounds of unpacking."""
    monkeypatch.setattr("marserve.archive.pickles.pickle_check._MAX_FILES", 2)
    for name in "abc":
        (tmp_path / name).write_bytes(b"")

    with pytest.raises(BadArchive, match="more than 2 files"):
        check_folder(tmp_path)


def test_every_opcode_that_can_import_or_call_is_judged() -> None:
    """A new opcode of a later Python that names globals must not be followed as if it were data."""
    assert len(pickletools.opcodes) == 68, "look at what the new opcodes do, and at `_SPECIAL` in pickle_program"


# ------------------------------------------------------------------------------------------------ torch's own


RECORDED_GLOBALS = Path(__file__).with_name("weights_only_globals.txt").read_text().splitlines()


def test_the_list_is_what_torch_was_recorded_to_allow() -> None:
    """So a name that is lost or added is noticed where torch is not installed, too."""
    assert sorted(PYTHON_GLOBALS) == RECORDED_GLOBALS


@pytest.mark.torch
def test_the_record_is_what_the_installed_torch_allows() -> None:
    """The list is our own copy; a torch that allows less or more is noticed here."""
    pytest.importorskip("torch")
    from torch import _weights_only_unpickler

    assert sorted(_weights_only_unpickler._get_allowed_globals()) == RECORDED_GLOBALS


@pytest.fixture(scope="module")
def torch_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as the installed torch writes them, in each of its forms."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("torch")
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    example = torch.zeros(1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(net.state_dict(), folder / "state.pt")
        torch.save(net.state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
        odd = {"set": {1}, "bytes": b"1", "array": bytearray(b"1"), "complex": 1j, "type": torch.float16, "big": 2**200}
        torch.save({**odd, "layout": torch.strided, "size": torch.Size([1])}, folder / "odd.pth")
        torch.save(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), folder / "quantized.pt")
        torch.save(torch.eye(2).to_sparse(), folder / "sparse.bin")
        torch.jit.trace(net, example).save(folder / "traced.pt")
        torch.jit.script(net).save(folder / "scripted.pt")
        torch.jit.freeze(torch.jit.script(net)).save(folder / "frozen.pt")
        torch.jit.script(net)._save_for_lite_interpreter(str(folder / "lite.ptl"))
        torch.export.save(torch.export.export(net, (example,)), folder / "exported.pt2")
        optimizer = torch.optim.Adam(net.parameters())
        net(example).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


@pytest.mark.torch
def test_what_torch_writes_passes(torch_files: Path) -> None:
    """State dicts in both forms, TorchScript in four, an exported program, an optimiser."""
    assert len(list(torch_files.iterdir())) == 11

    assert check_folder(torch_files) == []


@pytest.mark.torch
def test_a_pickled_module_is_refused(tmp_path: Path) -> None:
    """`torch.save(model)` names classes; the error says which, and what to do."""
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "whole.pt")

    with pytest.raises(UnsafeArchive, match=r"whole\.pt!data\.pkl.*torch\.nn\.modules\.linear\.Linear.*state dict"):
        check_folder(tmp_path)


@pytest.mark.torch
def test_torch_runs_the_canary_of_an_exported_program_and_the_check_refuses_it(
    torch_files: Path, tmp_path: Path
) -> None:
    """Why `.pt2` files are looked into: torch's own loader runs what stands in their sample inputs."""
    torch = pytest.importorskip("torch")
    bird = str(tmp_path / "canary")
    poisoned = tmp_path / "poisoned.pt2"
    with zipfile.ZipFile(torch_files / "exported.pt2") as good, zipfile.ZipFile(poisoned, "w") as bad:
        for info in good.infolist():
            data = good.read(info)
            if info.filename.endswith("sample_inputs/model.pt"):
                data = zip_of({"model/data.pkl": canary(bird), "model/version": b"3\n", "model/byteorder": b"little"})
            bad.writestr(info.filename, data)

    with pytest.raises(UnsafeArchive) as refusal:
        check_files([("poisoned.pt2", poisoned)])
    assert refusal.value.member == "poisoned.pt2!data/sample_inputs/model.pt!data.pkl"
    assert not remove_canary(bird)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):
            torch.export.load(poisoned)
    assert remove_canary(bird), "torch no longer runs it: the check may be loosened"
