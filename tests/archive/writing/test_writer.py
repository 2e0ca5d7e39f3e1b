"""Making archives: what goes in under which name, the same bytes twice, and never half an archive."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.archive.contents.manifest import read_manifest
from marserve.archive.reading.reader import unpack
from marserve.archive.writing.writer import FORMATS, ArchiveSpec, Packed, plan_archive, write_archive
from marserve.errors import CannotArchive
from support.archives import snapshot


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one of everything an author may have, all files of one time."""
    folder = tmp_path / "inputs"
    files = {
        "src/my_handler.py": "def handle(data, context):\n    return data\n",
        "net.py": "x = 1\n",
        "weights.bin": "w" * 1000,
        "requirements.txt": "",
        "cfg.yaml": "minWorkers: 1\n",
        "a.json": "{}",
        "b.json": "[]",
        "more/c.txt": "c",
        "more/deep/d.txt": "d",
        "more/.git/config": "secret",
        "more/.env": "kept",
        "more/__pycache__/x.pyc": "",
        "more/__MACOSX/x": "",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, (1_577_934_246, 1_577_934_246))
    monkeypatch.chdir(folder)
    return folder


def full_spec() -> ArchiveSpec:
    """Everything that can be named."""
    return ArchiveSpec(
        "full",
        "2.5",
        "src/my_handler.py",
        serialized_file=Path("weights.bin"),
        model_file=Path("net.py"),
        extra_files=("*.json", "more"),
        requirements_file=Path("requirements.txt"),
        config_file=Path("cfg.yaml"),
    )


NAMES = [
    ".env",
    "MAR-INF/MANIFEST.json",
    "a.json",
    "b.json",
    "c.txt",
    "cfg.yaml",
    "deep/d.txt",
    "my_handler.py",
    "net.py",
    "requirements.txt",
    "weights.bin",
]


def names_in(archive: Path) -> list[str]:
    """The files of an archive of any format, in their order; folders in order of names."""
    if archive.is_dir():
        return sorted(path.relative_to(archive).as_posix() for path in archive.rglob("*") if path.is_file())
    if archive.suffix == ".mar":
        with zipfile.ZipFile(archive) as file:
            return file.namelist()
    with tarfile.open(archive) as packed:
        return packed.getnames()


@pytest.mark.parametrize(
    ("archive_format", "name", "top"),
    [
        ("default", "full.mar", ""),
        ("zip-store", "full.mar", ""),
        ("tgz", "full.tar.gz", "full/"),
        ("no-archive", "full", ""),
    ],
)
def test_every_format_holds_all_files_flat_and_sorted(
    inputs: Path, tmp_path: Path, archive_format: str, name: str, top: str
) -> None:
    """Folders are merged into the top; hidden folders and those that systems leave behind stay out."""
    path = write_archive(full_spec(), tmp_path / "out", archive_format=archive_format)

    assert path == tmp_path / "out" / name
    assert names_in(path) == [top + member for member in NAMES]
    assert os.listdir(tmp_path / "out") == [name]


def test_the_manifest_says_what_was_named(inputs: Path, tmp_path: Path) -> None:
    """Base names only, keys in TorchServe's order, the newest input's time."""
    path = write_archive(full_spec(), tmp_path, archive_format="no-archive")

    document = json.loads((path / "MAR-INF" / "MANIFEST.json").read_text())

    assert list(document) == ["createdOn", "runtime", "model", "archiverVersion"]
    assert document["createdOn"] == "02/01/2020 03:04:06"
    assert document["runtime"] == "python"
    assert document["model"] == {
        "modelName": "full",
        "serializedFile": "weights.bin",
        "handler": "my_handler.py",
        "modelFile": "net.py",
        "modelVersion": "2.5",
        "requirementsFile": "requirements.txt",
        "configFile": "cfg.yaml",
    }


@pytest.mark.parametrize(
    ("word", "entry", "has_file"),
    [
        ("src/my_handler.py", "my_handler.py", True),
        ("src/my_handler", "my_handler", True),
        ("src/my_handler:run", "my_handler:run", True),
        ("src/my_handler.py:run", "my_handler.py:run", True),
        ("image_classifier", "image_classifier", False),
        ("base_handler", "base_handler", False),
    ],
)
def test_a_handler_may_be_named_in_each_way(
    inputs: Path, tmp_path: Path, word: str, entry: str, has_file: bool
) -> None:
    """A file with or without its ending, a function behind a colon, a built-in name."""
    path = write_archive(ArchiveSpec("m", "1", word), tmp_path, archive_format="no-archive")

    assert read_manifest(path).handler == entry
    assert (path / "my_handler.py").is_file() is has_file


@pytest.mark.parametrize("archive_format", FORMATS)
def test_the_same_files_give_the_same_bytes(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive_format: str
) -> None:
    """Wherever they lie, in whichever order they were made and are named, whatever their modes are."""
    one = write_archive(full_spec(), tmp_path / "one", archive_format=archive_format)
    moved = tmp_path / "elsewhere" / "far down"
    for path in sorted(inputs.rglob("*"), reverse=True):
        if path.is_file():
            copy = moved / path.relative_to(inputs)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
            copy.chmod(0o600)
    shutil.rmtree(inputs)
    monkeypatch.chdir(moved)
    old = os.umask(0o077)
    try:
        spec = replace(full_spec(), extra_files=("more", str(moved / "b.json"), "a.json"))
        other = write_archive(spec, tmp_path / "deeper" / "other", archive_format=archive_format)
    finally:
        os.umask(old)

    if archive_format == "no-archive":
        assert {name: data for name, (_, _, data) in snapshot(one).items()} == {
            name: data for name, (_, _, data) in snapshot(other).items()
        }
    else:
        assert one.read_bytes() == other.read_bytes()


def test_the_callers_date_wins_over_the_newest_files(inputs: Path, tmp_path: Path) -> None:
    """SOURCE_DATE_EPOCH, as builds set it."""
    first = write_archive(full_spec(), tmp_path / "one", source_date_epoch=0)
    os.utime("a.json")
    second = write_archive(full_spec(), tmp_path / "two", source_date_epoch=0)

    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as file:
        assert json.loads(file.read("MAR-INF/MANIFEST.json"))["createdOn"] == "01/01/1970 00:00:00"


def test_a_gzip_file_holds_neither_time_nor_name(inputs: Path, tmp_path: Path) -> None:
    """Both differ from one machine to the next."""
    data = write_archive(full_spec(), tmp_path, archive_format="tgz").read_bytes()

    assert data[3:8] == bytes(5)
    assert gzip.decompress(data)


def test_members_and_bytes_are_told_as_they_go_in(inputs: Path, tmp_path: Path) -> None:
    """The command line draws its bar and its table from them."""
    plan = plan_archive(full_spec())
    members: list[Packed] = []
    counts: list[int] = []

    write_archive(plan, tmp_path, on_member=members.append, on_bytes=counts.append)

    assert [member.name for member in members] == NAMES
    weights = members[-1]
    assert weights.size_bytes == 1000
    assert len(weights.sha256) == 64
    manifest_bytes = next(member.size_bytes for member in members if member.name.startswith("MAR-INF"))
    assert sum(counts) - manifest_bytes == plan.total_bytes


def test_what_is_there_already_stays_unless_forced(inputs: Path, tmp_path: Path) -> None:
    """Also a folder, and forced, nothing of the old one remains."""
    for archive_format in FORMATS:
        path = write_archive(full_spec(), tmp_path, archive_format=archive_format, force=True)
        with pytest.raises(CannotArchive, match="already exists"):
            write_archive(full_spec(), tmp_path, archive_format=archive_format)

        write_archive(ArchiveSpec("full", "1", "image_classifier"), tmp_path, archive_format=archive_format, force=True)

        assert [name for name in names_in(path) if not name.endswith("MANIFEST.json")] == []
    assert sorted(os.listdir(tmp_path)) == ["full", "full.mar", "full.tar.gz", "inputs"]


def test_an_earlier_archive_among_the_extra_files_is_left_out(inputs: Path, tmp_path: Path) -> None:
    """`--extra-files .` in the folder where the archive is made would put each archive into the next."""
    spec = ArchiveSpec("m", "1", "src/my_handler.py", extra_files=("more",))
    first = write_archive(spec, Path("more")).read_bytes()

    second = write_archive(spec, Path("more"), force=True).read_bytes()

    assert first == second


def test_a_file_named_twice_is_one_member(inputs: Path, tmp_path: Path) -> None:
    """The handler is often in the folder of extra files, too."""
    spec = ArchiveSpec("m", "1", "src/my_handler.py", extra_files=("src", "src/my_handler.py"))

    assert names_in(write_archive(spec, tmp_path)) == ["MAR-INF/MANIFEST.json", "my_handler.py"]


def test_an_unpacked_archive_can_be_packed_again(inputs: Path, tmp_path: Path) -> None:
    """Its old manifest gives way to the new one."""
    folder = write_archive(full_spec(), tmp_path, archive_format="no-archive")

    path = write_archive(ArchiveSpec("again", "3", "src/my_handler.py", extra_files=(str(folder),)), tmp_path)

    assert "c.txt" in names_in(path)
    with zipfile.ZipFile(path) as file:
        assert read_manifest(file.read("MAR-INF/MANIFEST.json")).model_version == "3"


def test_a_wildcard_without_a_match_warns_and_a_file_with_such_a_name_is_itself(inputs: Path, tmp_path: Path) -> None:
    """TorchServe's archiver warns as well."""
    Path("odd[1].txt").write_text("x")

    plan = plan_archive(ArchiveSpec("m", "1", "image_classifier", extra_files=("*.none", "odd[1].txt", "?.json")))

    assert plan.warnings == ["No file matches *.none"]
    assert list(plan.members) == ["a.json", "b.json", "odd[1].txt"]


REFUSED = {
    "a name with a slash": (ArchiveSpec("a/b", "1", "image_classifier"), "model name 'a/b'"),
    "a name with a blank": (ArchiveSpec("a b", "1", "image_classifier"), "model name 'a b'"),
    "a name with a line end": (ArchiveSpec("a\n", "1", "image_classifier"), "model name"),
    "a name that begins with a dot": (ArchiveSpec(".a", "1", "image_classifier"), "must begin with a letter"),
    "no version": (ArchiveSpec("m", "", "image_classifier"), "version is empty"),
    "a version that misleads": (ArchiveSpec("m", "1\u202e0", "image_classifier"), "holds U\\+202E"),
    "no such runtime": (ArchiveSpec("m", "1", "image_classifier", runtime="ruby"), "no runtime 'ruby'"),
    "no handler": (ArchiveSpec("m", "1", ""), "names no module"),
    "no handler's file": (ArchiveSpec("m", "1", "gone.py"), "Handler file does not exist: gone.py"),
    "no serialized file": (
        ArchiveSpec("m", "1", "image_classifier", serialized_file=Path("gone.pt")),
        "File does not exist: gone.pt",
    ),
    "a folder as model file": (
        ArchiveSpec("m", "1", "image_classifier", model_file=Path("more")),
        "File does not exist: more",
    ),
    "no extra file": (
        ArchiveSpec("m", "1", "image_classifier", extra_files=("gone.txt",)),
        "File does not exist: gone.txt",
    ),
    "two files of one name": (
        ArchiveSpec("m", "1", "image_classifier", extra_files=("a.json", "clash")),
        "a.json and clash/a.json would both become a.json",
    ),
    "two names that differ by case": (
        ArchiveSpec("m", "1", "image_classifier", extra_files=("a.json", "case")),
        "differs from 'a.json' only by case",
    ),
    "a name that servers refuse": (
        ArchiveSpec("m", "1", "image_classifier", extra_files=("back",)),
        "holds a backslash",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_become_an_archive_is_refused_and_leaves_nothing(inputs: Path, tmp_path: Path, what: str) -> None:
    """The sentence names the file or the value."""
    for name, content in {"clash/a.json": "other", "case/A.JSON": "other", "back/a\\b": ""}.items():
        Path(name).parent.mkdir()
        Path(name).write_text(content)
    spec, words = REFUSED[what]

    with pytest.raises(CannotArchive, match=words.replace("[", r"\[")):
        write_archive(spec, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_odd_formats_places_and_dates_are_refused(inputs: Path, tmp_path: Path) -> None:
    """What the command line's parser does not judge is judged here."""
    spec = ArchiveSpec("m", "1", "image_classifier")
    with pytest.raises(CannotArchive, match="no archive format 'rar'"):
        write_archive(spec, tmp_path, archive_format="rar")
    with pytest.raises(CannotArchive, match=r"a\.json is no folder"):
        write_archive(spec, Path("a.json"))
    with pytest.raises(CannotArchive, match="is no time"):
        write_archive(spec, tmp_path, source_date_epoch=10**18)


@pytest.mark.parametrize("archive_format", FORMATS)
def test_a_failure_in_the_middle_keeps_the_old_archive_whole(inputs: Path, tmp_path: Path, archive_format: str) -> None:
    """The new one appears by a rename when it is complete, or not at all."""
    path = write_archive(full_spec(), tmp_path / "out", archive_format=archive_format)
    before = snapshot(tmp_path / "out")

    def fail(member: Packed) -> None:
        if member.name == "net.py":
            raise OSError(28, "No space left on device")

    with pytest.raises(CannotArchive, match="cannot be written"):
        write_archive(full_spec(), tmp_path / "out", archive_format=archive_format, force=True, on_member=fail)

    assert snapshot(tmp_path / "out") == before
    assert path.exists()


# ------------------------------------------------------------------------------------------------ round trip

PART = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=12).map(
    lambda part: f"f{part}"
)
TREES = st.dictionaries(st.lists(PART, min_size=1, max_size=4).map("/".join), st.binary(max_size=2000), max_size=8)


@given(tree=TREES, archive_format=st.sampled_from(["default", "zip-store", "tgz"]))
def test_what_was_written_is_what_is_read(tree: dict[str, bytes], archive_format: str) -> None:
    """Any tree of files that a system can hold comes out as it went in, or is refused by the writer."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for member, data in tree.items():
            path = root / "in" / member
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                return
        (root / "in").mkdir(exist_ok=True)
        try:
            archive = write_archive(
                ArchiveSpec("m", "1", "image_classifier", extra_files=(str(root / "in"),)),
                root,
                archive_format=archive_format,
            )
        except CannotArchive:
            return

        unpack(archive, root / "out")

        files = {
            path.relative_to(root / "out").as_posix(): path.read_bytes()
            for path in (root / "out").rglob("*")
            if path.is_file()
        }
        del files["MAR-INF/MANIFEST.json"]
        assert files == tree
