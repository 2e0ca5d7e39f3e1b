"""Repositories of a hub: fetched at a commit, from the cache where it has them, and every trouble as a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.settings.stores import STORES
from marserve.settings.values import Reading
from marserve.store.addresses.fetch_guard import parse_target
from marserve.store.sources.hub import Hub, Repository, Selection, read_repository
from marserve.store.sources.source import Broken, Cancel, Failed, Gathered, Missing, SourceError
from support.hub_server import HubProgram, HubServer, hub_server
from support.server import poll

pytest.importorskip("huggingface_hub")

SECRET = "hf_plantedsecret"


FOLDER = {"MAR-INF/MANIFEST.json": b"{}", "handler.py": b"pass", "weights/w.safetensors": b"w" * 10_000}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    """A hub, whose repositories each test names for itself."""
    with hub_server() as server:
        yield server


@pytest.fixture(autouse=True)
def plain(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it begins: open to everybody, and asked nothing."""
    monkeypatch.setattr(subprocess, "Popen", HubProgram)
    hub.token = hub.status = hub.stuck = None
    hub.asked.clear()
    hub.tokens.clear()


class Place:
    """A cache of its own, and who fetches into it."""

    def __init__(self, hub: HubServer, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder),
            "HF_HUB_DISABLE_XET": "1",
        }
        self.options = options
        self.progress: list[tuple[int, int | None]] = []

    def gather(
        self,
        url: str,
        cancel: Cancel | None = None,
        max_bytes: int = 10**9,
        selection: Selection | None = None,
        **variables: str,
    ) -> Gathered:
        """Fetch what an address names."""
        document = json.dumps({"hf://": self.options})
        stores = STORES.read(document, Reading("stores", self.folder, lambda sentence: None))
        fetcher = Hub(stores, {**self.environment, **variables}, max_bytes=max_bytes, selection=selection)
        return fetcher.gather(parse_target(url), cancel or Cancel(), lambda *numbers: self.progress.append(numbers))


@pytest.mark.parametrize(
    ("url", "repository"),
    [
        ("hf://org/name", Repository("org", "name", "main", None)),
        ("hf://Org/my.name-2@v1.0", Repository("Org", "my.name-2", "v1.0", None)),
        ("hf://org/name@main/a/m.mar", Repository("org", "name", "main", "a/m.mar")),
    ],
)
def test_an_address_names_a_repository_and_maybe_a_file(url: str, repository: Repository) -> None:
    """Without a revision it is the main branch."""
    assert read_repository(parse_target(url)) == repository


@pytest.mark.parametrize("url", ["hf://org/na+me", "hf://org/name@a@b", "hf://org/name@-x", "hf://org/name@"])
def test_what_names_no_repository_is_refused(url: str) -> None:
    """Before anybody is asked."""
    with pytest.raises(Failed, match="it is no hf://organisation/name@revision"):
        read_repository(parse_target(url))


def test_a_model_folder_is_fetched_at_the_commit_of_its_branch(hub: HubServer, tmp_path: Path) -> None:
    """And the same address means another commit when the branch has moved; both stay in the cache."""
    place = Place(hub, tmp_path)
    first = hub.commit("org/folder", FOLDER)

    gathered = place.gather("hf://org/folder@main")
    second = hub.commit("org/folder", {**FOLDER, "handler.py": b"other"})
    moved = place.gather("hf://org/folder@main")

    assert gathered.address == f"hf://org/folder@{first}"
    assert {
        str(path.relative_to(gathered.path)): path.read_bytes() for path in gathered.path.rglob("*") if path.is_file()
    } == FOLDER
    assert (moved.address, (moved.path / "handler.py").read_bytes()) == (f"hf://org/folder@{second}", b"other")
    assert (gathered.path / "handler.py").read_bytes() == b"pass"
    assert place.progress[-1][0] > 0


def test_a_pinned_folder_that_is_in_the_cache_asks_nobody(hub: HubServer, tmp_path: Path) -> None:
    """Its commit never changes."""
    place = Place(hub, tmp_path)
    commit = hub.commit("org/pinned", FOLDER)
    first = place.gather(f"hf://org/pinned@{commit}")
    hub.asked.clear()

    again = place.gather(f"hf://org/pinned@{commit}")

    assert again == first
    assert hub.asked == []


def test_the_only_archive_of_a_repository_is_what_is_meant(hub: HubServer, tmp_path: Path) -> None:
    """Alone, without the other files; a model folder is one even with an archive in it; of two none is chosen."""
    place = Place(hub, tmp_path)
    one = hub.commit("org/one", {"README.md": b"r", "a/m.mar": b"PK"})
    hub.commit("org/two", {"a.mar": b"PK", "b.mar": b"PK"})
    hub.commit("org/both", {**FOLDER, "a.mar": b"PK"})

    archive = place.gather("hf://org/one@main")

    assert (archive.path.name, archive.path.read_bytes(), archive.address) == ("m.mar", b"PK", f"hf://org/one@{one}")
    assert not [path for _, path in hub.asked if path.endswith("README.md")]
    assert place.gather("hf://org/two").path.is_dir()
    assert place.gather("hf://org/both").path.is_dir()
    assert place.gather("hf://org/two@main/b.mar").path.read_bytes() == b"PK"


@pytest.mark.system
def test_what_was_fetched_serves_without_the_hub(hub: HubServer, tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE, and when it is down; what was not fetched is told."""
    place = Place(hub, tmp_path)
    hub.commit("org/kept", FOLDER)
    hub.commit("org/file", {"README.md": b"r", "a/m.mar": b"PK"})
    folder, archive = place.gather("hf://org/kept@main"), place.gather("hf://org/file@main")
    hub.asked.clear()

    assert place.gather("hf://org/kept@main", HF_HUB_OFFLINE="1") == folder
    assert place.gather("hf://org/file@main", HF_HUB_OFFLINE="1") == archive
    assert place.gather("hf://org/file@main/a/m.mar", HF_HUB_OFFLINE="1").path == archive.path
    with pytest.raises(Broken, match=r"not complete in the cache, and the hub is not asked .HF_HUB_OFFLINE."):
        place.gather("hf://org/never@main", HF_HUB_OFFLINE="1")
    assert hub.asked == []
    assert place.gather("hf://org/kept@main", HF_ENDPOINT="http://127.0.0.1:9") == folder
    assert place.gather("hf://org/file@main", HF_ENDPOINT="http://127.0.0.1:9") == archive


def test_a_branch_is_refused_where_only_commits_count(hub: HubServer, tmp_path: Path) -> None:
    """By an option of the operator's."""
    place = Place(hub, tmp_path, pinned_only=True)
    commit = hub.commit("org/strict", FOLDER)

    with pytest.raises(Failed, match="main is no commit, and pinned_only in stores wants one"):
        place.gather("hf://org/strict@main")
    assert hub.asked == []
    assert place.gather(f"hf://org/strict@{commit}").path.is_dir()


@pytest.mark.system
def test_the_token_is_sent_and_never_told(hub: HubServer, tmp_path: Path) -> None:
    """The setting's goes before the variable's; anonymous sends none."""
    hub.commit("org/private", FOLDER)
    hub.token = SECRET

    with pytest.raises(Failed, match=r"the hub has no org/private, or the token .HF_TOKEN. may not see it") as refused:
        Place(hub, tmp_path / "1").gather("hf://org/private@main", HF_TOKEN="hf_wrong")
    assert "hf_wrong" not in str(refused.value)
    assert Place(hub, tmp_path / "2").gather("hf://org/private@main", HF_TOKEN=SECRET).path.is_dir()
    assert Place(hub, tmp_path / "3", token={"env": "MINE"}).gather(
        "hf://org/private@main", MINE=SECRET, HF_TOKEN="hf_wrong"
    )
    hub.tokens.clear()
    with pytest.raises(Failed):
        Place(hub, tmp_path / "4", anonymous=True).gather("hf://org/private@main", HF_TOKEN=SECRET)
    assert set(hub.tokens) == {None}
    with pytest.raises(Failed, match="the variable MINE, which is not set"):
        Place(hub, tmp_path / "5", token={"env": "MINE"}).gather("hf://org/private@main")


@pytest.mark.parametrize(
    ("url", "status", "kind", "words"),
    [
        ("hf://org/nobody@main", None, Failed, "the hub has no org/nobody"),
        ("hf://org/there@v9", None, Failed, "org/there has no revision v9"),
        ("hf://org/there@main/none.mar", None, Missing, "org/there has no file none.mar"),
        ("hf://org/gated@main", None, Failed, "org/gated is gated: ask for access"),
        ("hf://org/there@main", 403, Failed, "may not see it .403."),
        ("hf://org/there@main", 418, Failed, "the hub's answer was 418"),
    ],
)
def test_every_trouble_is_told(
    hub: HubServer, tmp_path: Path, url: str, status: int | None, kind: type[SourceError], words: str
) -> None:
    """By what may help."""
    hub.commit("org/there", FOLDER)
    hub.commit("org/gated", FOLDER)
    hub.gated.add("org/gated")
    hub.status = status

    with pytest.raises(kind, match=words):
        Place(hub, tmp_path).gather(url)


def test_more_bytes_than_an_archive_may_have_are_refused(hub: HubServer, tmp_path: Path) -> None:
    """Before any of them is fetched."""
    hub.commit("org/large", FOLDER)

    with pytest.raises(Failed, match="more bytes than an archive may have"):
        Place(hub, tmp_path).gather("hf://org/large@main", max_bytes=5_000)
    assert not [path for _, path in hub.asked if "/resolve/" in path]


SELECTION = Selection(("*.json", "*.safetensors"), ("*/*.safetensors",), {"*.safetensors": "has no safetensors"})


@pytest.mark.system
def test_of_a_selection_no_other_file_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    """Nor counted; the snapshot is then complete for the selection and not for all; an archive comes whole."""
    place = Place(hub, tmp_path)
    files = {"config.json": b"{}", "w.safetensors": b"w", "a/w.safetensors": b"w", "w.bin": b"w" * 10_000}
    commit = hub.commit("org/some", files)
    hub.commit("org/archive", FOLDER)

    some = place.gather("hf://org/some@main", max_bytes=5_000, selection=SELECTION)
    fetched = {path.name for path in some.path.rglob("*") if path.is_file()}
    hub.asked.clear()
    again = place.gather(f"hf://org/some@{commit}", selection=SELECTION)
    asked = list(hub.asked)
    whole = place.gather(f"hf://org/some@{commit}")
    archive = place.gather("hf://org/archive@main", selection=SELECTION)

    assert fetched == {"config.json", "w.safetensors"}
    assert (again, asked) == (some, [])
    assert (whole.path / "w.bin").is_file()
    assert (archive.path / "handler.py").is_file()


@pytest.mark.parametrize("variables", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_a_repository_without_what_a_selection_needs_is_refused(
    hub: HubServer, tmp_path: Path, variables: dict[str, str]
) -> None:
    """Before anything is fetched, and also where the cache has the rest of it."""
    place = Place(hub, tmp_path)
    hub.commit("org/lacks", {"config.json": b"{}", "w.bin": b"w"})
    if variables:
        place.gather("hf://org/lacks@main")
        hub.asked.clear()

    with pytest.raises(Failed, match=r"^org/lacks has no safetensors$"):
        place.gather("hf://org/lacks@main", selection=SELECTION, **variables)
    assert not [path for _, path in hub.asked if "/resolve/" in path]


def test_a_fetch_that_is_given_up_ends_at_once(hub: HubServer, tmp_path: Path) -> None:
    """With its process, though the hub sends nothing."""
    import psutil

    hub.commit("org/stuck", FOLDER)
    hub.stuck = threading.Event()
    cancel = Cancel()
    found: list[BaseException] = []

    def fetch() -> None:
        try:
            Place(hub, tmp_path).gather("hf://org/stuck@main", cancel)
        except SourceError as error:
            found.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    for _ in poll(30, "a file is asked for"):
        if [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]:
            break
    [process] = [
        child
        for child in psutil.Process().children()
        if "marserve.store.sources.hub_program" in " ".join(child.cmdline())
    ]
    assert SECRET not in " ".join(process.cmdline())
    cancel.set("the server stops")
    thread.join(5)

    assert (not thread.is_alive(), [str(error) for error in found]) == (True, ["the server stops"])
    assert not process.is_running()
    hub.stuck.set()


def test_without_the_extra_the_sentence_names_it(hub: HubServer, tmp_path: Path) -> None:
    """And the command."""
    (tmp_path / "huggingface_hub.py").write_text("raise RuntimeError('built for another Python')\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    with pytest.raises(Failed, match=r"the extra hf: .*built for another.*; pip install 'marserve\[hf\]'"):
        Place(hub, tmp_path).gather("hf://org/name@main", PYTHONPATH=paths)
