"""Taking workflow archives in: where they are looked for, what they must hold, what is left behind."""

from __future__ import annotations

import contextlib
import hashlib
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest

from marserve.archive.reading.reader import Limits
from marserve.errors import BadDag, BadWorkflow, DigestMismatch, Draining, UnsafeArchive, WorkflowArchiveNotFound
from marserve.store.fetching.fetcher import Fetched, Fetcher
from marserve.workflows import intake as intake_module
from marserve.workflows.intake import WorkflowIntake
from support.workflow_archives import THREE_NODES, war_manifest, write_war


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The workflow store."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def intake(tmp_path: Path, store: Path) -> WorkflowIntake:
    """Takes in from the store."""
    return WorkflowIntake(store, tmp_path / "scratch", Limits())


def left(tmp_path: Path) -> list[Path]:
    """What lies in the scratch folder."""
    scratch = tmp_path / "scratch"
    return list(scratch.iterdir()) if scratch.exists() else []


def test_an_archive_is_unpacked_into_a_folder_of_its_own_and_read(
    intake: WorkflowIntake, store: Path, tmp_path: Path
) -> None:
    """Manifest, spec and handler; the folder goes with `discard`."""
    write_war(store / "w.war")

    taken = intake.take_in("w.war")

    assert (taken.manifest.workflow_name, taken.manifest.handler) == ("w", "nodes.py")
    assert list(taken.spec.nodes) == ["prepare", "middle", "finish"]
    assert (taken.folder / "nodes.py").is_file()
    taken.discard()
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gone.war", "Workflow not found in workflow store: gone.war"),
        ("deep/gone.war", "Workflow not found in workflow store: gone.war"),
        ("folder", "Workflow not found at: folder"),
        ("../w.war", "Relative path is not allowed in url: ../w.war"),
        ("http://example.org/w.war", "Given URL http://example.org/w.war does not match any allowed URL(s)"),
        ("", "Workflow not found at: "),
    ],
)
def test_what_the_store_does_not_hold_is_not_found(intake: WorkflowIntake, store: Path, url: str, message: str) -> None:
    """In TorchServe's words; a folder is no workflow."""
    (store / "folder").mkdir()

    with pytest.raises(WorkflowArchiveNotFound) as caught:
        intake.take_in(url)

    assert caught.value.message == message
    assert (caught.value.cause == "address_not_allowed") is ("allowed URL" in message)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"document": {}}, "has no WAR-INF/MANIFEST.json, so it is no workflow"),
        ({"spec": None}, "has no workflow.yaml, which its manifest names as specFile"),
        ({"functions": None}, "has no nodes.py, which its manifest names as handler"),
        ({"document": war_manifest(handler=None)}, "prepare, finish of workflow.yaml are no models, and the manifest"),
        ({"spec": "models: ["}, "Failed to parse yaml"),
    ],
)
def test_an_archive_that_says_too_little_is_refused_and_leaves_nothing(
    intake: WorkflowIntake, store: Path, tmp_path: Path, made: dict[str, Any], message: str
) -> None:
    """Each with the file that is missing or wrong."""
    write_war(store / "w.war", **made)

    with pytest.raises(BadWorkflow, match=message):
        intake.take_in("w.war")

    assert left(tmp_path) == []


def test_a_workflow_of_models_alone_needs_no_handler_file(intake: WorkflowIntake, store: Path) -> None:
    """TorchServe's archiver wants one all the same."""
    spec = "models: {a: {url: a.mar}, b: {url: b.mar}}\ndag: {a: [b]}"
    write_war(store / "w.war", spec, None, document=war_manifest(handler=None))

    assert [node.is_function for node in intake.take_in("w.war").spec.nodes.values()] == [False, False]


def test_a_graph_that_cannot_be_run_and_a_file_that_is_no_archive_are_told_apart(
    intake: WorkflowIntake, store: Path, tmp_path: Path
) -> None:
    """Their types differ."""
    write_war(store / "loop.war", THREE_NODES + "  finish: [middle]\n")
    (store / "text.war").write_text("hello")

    with pytest.raises(BadDag):
        intake.take_in("loop.war")
    with pytest.raises(BadWorkflow, match="no model archive"):
        intake.take_in("text.war")

    assert left(tmp_path) == []


def test_what_must_not_be_unpacked_is_refused_unless_it_is_a_trusted_pickle(
    intake: WorkflowIntake, store: Path, tmp_path: Path
) -> None:
    """As for models' archives: paths that lead outside, pickles that run code."""
    write_war(store / "slip.war", **{"../slipped.txt": b"x"})
    write_war(store / "pickle.war", **{"data.pkl": b"cos\nsystem\n(S'true'\ntR."})

    for name in ("slip.war", "pickle.war"):
        with pytest.raises(UnsafeArchive):
            intake.take_in(name)
    taken = WorkflowIntake(store, tmp_path / "scratch", Limits(), ["pickle.war"]).take_in("pickle.war")

    assert any("trusted all the same" in warning for warning in taken.warnings)
    assert not (tmp_path / "slipped.txt").exists()


class FakeFetcher:
    """Puts what it was given under the last part of an address."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.is_closed = False

    def fetch_address(self, url: str, folder: Path) -> Fetched | None:
        """Fetch."""
        if "://" not in url:
            return None
        path = folder / url.rpartition("/")[2]
        path.write_bytes(self.content)
        return Fetched(path, path.name, None, path, contextlib.ExitStack())

    def close(self) -> None:
        """No more."""
        self.is_closed = True


def test_an_archive_that_is_replaced_after_its_digest_was_compared_is_refused(
    intake: WorkflowIntake, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was unpacked is what its digest says, or nothing is left of it."""
    path = write_war(store / "w.war")
    word = hashlib.sha256(path.read_bytes()).hexdigest()
    real = intake_module.compare_digest

    def replace_after(*given: Any) -> None:
        real(*given)
        path.write_bytes(write_war(tmp_path / "other.war", document=war_manifest("other")).read_bytes())

    monkeypatch.setattr(intake_module, "compare_digest", replace_after)

    with pytest.raises(DigestMismatch):
        intake.take_in(f"w.war#sha256={word}")

    assert left(tmp_path) == []


def test_an_address_is_fetched_into_the_store_and_what_cannot_be_used_goes_again(store: Path, tmp_path: Path) -> None:
    """Names of the store are not fetched."""
    good = write_war(tmp_path / "good.war").read_bytes()
    fetcher = FakeFetcher(good)
    intake = WorkflowIntake(store, tmp_path / "scratch", Limits(), fetcher=cast("Fetcher", fetcher))

    taken = intake.take_in("http://example.org/w.war")
    fetcher.content = b"no archive"
    with pytest.raises(BadWorkflow):
        intake.take_in("http://example.org/bad.war")
    with pytest.raises(WorkflowArchiveNotFound):
        intake.take_in("gone.war")
    intake.stop_taking_in()

    assert taken.manifest.workflow_name == "good"
    assert [path.name for path in store.iterdir()] == ["w.war"]
    assert fetcher.is_closed


def test_a_workflow_that_is_checked_when_the_server_stops_is_given_up_and_leaves_nothing(
    store: Path, tmp_path: Path
) -> None:
    """As a model's archive."""
    path = write_war(store / "w.war")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("data.bin", b"N." * 10_000)
    intake = WorkflowIntake(store, tmp_path / "scratch", Limits())

    intake.stop_taking_in()

    with pytest.raises(Draining):
        intake.take_in("w.war")
    assert list((tmp_path / "scratch").iterdir()) == []
