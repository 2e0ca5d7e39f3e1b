"""Finding archives in the model store: what is found, and the recorded words for what is not (contract 2.2, 6.4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.errors import ArchiveNotFound
from marserve.store.sources.local import Found, LocalStore
from support.archives import good_members, tgz_of, zip_of


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with one of each kind, beside a file that is not in it."""
    root = tmp_path / "store"
    root.mkdir()
    (root / "echo.mar").write_bytes(zip_of(good_members()))
    (root / "empty.mar").write_bytes(zip_of({}))
    (root / "echo.tar.gz").write_bytes(tgz_of(good_members()))
    (root / "flat" / "MAR-INF").mkdir(parents=True)
    (root / "flat" / "h.py").write_bytes(b"")
    (root / "nested" / "inner").mkdir(parents=True)
    (root / "nested" / "inner" / "h.py").write_bytes(b"")
    (root / "script" / "code").mkdir(parents=True)
    (root / "script" / "code" / "inference.py").write_bytes(b"")
    (root / "old.model").write_bytes(zip_of(good_members()))
    (root / "README.md").write_bytes(b"text")
    (root / ".hidden.mar").write_bytes(b"")
    (root / ".cache").mkdir()
    (tmp_path / "outside.mar").write_bytes(zip_of(good_members()))
    return LocalStore(root)


@pytest.mark.parametrize(
    ("url", "kind", "path"),
    [
        ("echo.mar", "zip", "echo.mar"),
        ("empty.mar", "zip", "empty.mar"),
        ("echo.tar.gz", "tar", "echo.tar.gz"),
        ("README.md", "tar", "README.md"),
        ("flat", "folder", "flat"),
        ("flat/", "folder", "flat"),
        ("nested", "folder", "nested/inner"),
        ("script", "folder", "script"),
        ("ftp://host/models/echo.mar", "zip", "echo.mar"),
        ("/some/where/echo.mar", "zip", "echo.mar"),
        ("some\\where\\echo.mar", "zip", "echo.mar"),
    ],
)
def test_the_last_path_component_names_an_entry_of_the_store(store: LocalStore, url: str, kind: str, path: str) -> None:
    """A path in front of it counts for nothing; a folder with one in it is that one, but for a script's `code`."""
    assert store.root is not None

    found = store.find(url)

    assert (found.path, found.kind) == (store.root / path, kind)
    assert isinstance(found, Found)
    assert found.name == path.partition("/")[0]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "empty url"),
        ("not_there.mar", "Model not found at: not_there.mar"),
        ("../store/echo.mar", "Relative path is not allowed in url: ../store/echo.mar"),
        ("a..b.mar", "Relative path is not allowed in url: a..b.mar"),
        ("ftp://127.0.0.1/x.mar", "Model not found at: ftp://127.0.0.1/x.mar"),
        ("http://h/kinds.mar", "Given URL http://h/kinds.mar does not match any allowed URL(s)"),
        ("HTTPS://h/kinds.mar", "Given URL HTTPS://h/kinds.mar does not match any allowed URL(s)"),
        ("http://", "Given URL http:// does not match any allowed URL(s)"),
        ("file:///x/echo.mar", "Given URL file:///x/echo.mar does not match any allowed URL(s)"),
        ("s3://other/a/echo.mar", "Given URL s3://other/a/echo.mar does not match any allowed URL(s)"),
        ("hf://other/echo.mar", "Given URL hf://other/echo.mar does not match any allowed URL(s)"),
        ("/", "Model not found at: /"),
        (".", "Model not found at: ."),
        ("x/.", "Model not found at: x/."),
        ("a\0b", "Model not found at: a\0b"),
        ("x" * 300, "Model not found at: " + "x" * 300),
    ],
)
def test_what_is_not_in_the_store_is_refused_in_the_recorded_words(store: LocalStore, url: str, words: str) -> None:
    """Clients know these sentences."""
    with pytest.raises(ArchiveNotFound) as refusal:
        store.find(url)

    assert refusal.value.message == words


def test_a_file_elsewhere_is_out_of_reach(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by its whole path nor from the working directory (Q12)."""
    monkeypatch.chdir(tmp_path)

    for url in (str(tmp_path / "outside.mar"), "outside.mar", "./outside.mar", str(tmp_path / "store")):
        with pytest.raises(ArchiveNotFound):
            store.find(url)


def test_without_a_store_nothing_is_found() -> None:
    """The contract has words for it."""
    with pytest.raises(ArchiveNotFound, match="Model store has not been configured"):
        LocalStore(None).find("echo.mar")
    assert LocalStore(None).names() == []


def test_a_link_out_of_a_folder_is_not_taken_for_its_only_folder(store: LocalStore, tmp_path: Path) -> None:
    """What a folder of the store holds may have been written by others than its owner."""
    assert store.root is not None
    (tmp_path / "elsewhere").mkdir()
    (store.root / "linked").mkdir()
    (store.root / "linked" / "inner").symlink_to(tmp_path / "elsewhere")

    assert store.find("linked").path == store.root / "linked"


def test_all_means_every_folder_and_archive_that_is_not_hidden(store: LocalStore) -> None:
    """Chapter 6.4, in order of names."""
    assert store.names() == ["echo.mar", "echo.tar.gz", "empty.mar", "flat", "nested", "old.model", "script"]


# ------------------------------------------------------------------------------------------- further roots


@pytest.fixture
def roots(tmp_path: Path) -> LocalStore:
    """A store with two further roots, one of them reached by a link, and what leads out of them."""
    store, models, real = tmp_path / "store", tmp_path / "models", tmp_path / "real"
    for folder in (store, models, real):
        folder.mkdir()
    (tmp_path / "linked").symlink_to(real)
    (models / "team" / "echo").mkdir(parents=True)
    (models / "team" / "echo" / "h.py").write_bytes(b"")
    (models / "echo.mar").write_bytes(zip_of(good_members()))
    (real / "other.mar").write_bytes(zip_of(good_members()))
    (tmp_path / "models2").mkdir()
    (tmp_path / "models2" / "echo.mar").write_bytes(zip_of(good_members()))
    (store / "echo.mar").write_bytes(b"the store's")
    (models / "out.mar").symlink_to(tmp_path / "models2" / "echo.mar")
    (models / "out").symlink_to(tmp_path / "models2")
    (models / "across.mar").symlink_to(real / "other.mar")
    (models / "inner.mar").symlink_to(models / "echo.mar")
    return LocalStore(store, roots=[models, tmp_path / "linked"])


@pytest.mark.parametrize(
    ("url", "kind", "path"),
    [
        ("models/echo.mar", "zip", "models/echo.mar"),
        ("models/team/echo", "folder", "models/team/echo"),
        ("models/team", "folder", "models/team/echo"),
        ("models/inner.mar", "zip", "models/echo.mar"),
        ("linked/other.mar", "zip", "real/other.mar"),
        ("real/other.mar", "zip", "real/other.mar"),
        ("models/across.mar", "zip", "real/other.mar"),
    ],
)
def test_an_absolute_path_below_a_root_is_found(
    roots: LocalStore, tmp_path: Path, url: str, kind: str, path: str
) -> None:
    """By its real path, which is what is read; a link may lead to what lies below a root."""
    found = roots.find(str(tmp_path / url))

    assert (found.kind, found.path) == (kind, tmp_path / path)
    assert found.name.startswith(str(tmp_path))


@pytest.mark.parametrize("url", ["models/out.mar", "models/out/echo.mar", "models/gone.mar", "models/team/gone"])
def test_what_leads_out_of_all_roots_or_to_nothing_is_refused(roots: LocalStore, tmp_path: Path, url: str) -> None:
    """Never looked for in the store instead."""
    with pytest.raises(ArchiveNotFound, match=r"leads out of model_roots|Model not found at"):
        roots.find(str(tmp_path / url))


def test_what_is_not_below_a_root_names_an_entry_of_the_store_as_ever(roots: LocalStore, tmp_path: Path) -> None:
    """Also what only begins like a root, and a root itself."""
    assert roots.root is not None

    for url in (tmp_path / "models2" / "echo.mar", tmp_path / "echo.mar"):
        assert roots.find(str(url)).path == roots.root / "echo.mar"
    with pytest.raises(ArchiveNotFound, match="Model not found at"):
        roots.find(str(tmp_path / "models"))
    with pytest.raises(ArchiveNotFound, match="Relative path"):
        roots.find(str(tmp_path / "models" / ".." / "models2" / "echo.mar"))
