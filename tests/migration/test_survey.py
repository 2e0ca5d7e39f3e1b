"""The survey of a TorchServe folder: every planted problem found by its place, and nothing found where nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.migration.findings import counts
from support.archives import manifest, zip_of
from support.old_installation import PLANTED, make_installation
from support.surveys import look


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A folder with everything planted."""
    return make_installation(tmp_path / "old")


@pytest.mark.parametrize("place", PLANTED)
def test_a_planted_problem_is_found_at_its_place(installation: Path, place: str) -> None:
    """By file and line, as something to be done, with what to do."""
    found = [each for each in look(installation) if each.place == place and PLANTED[place] in each.what]

    assert [each.verdict for each in found] == ["action"]
    assert found[0].fix


def test_nothing_else_needs_action(installation: Path) -> None:
    """What works is said to work: no false alarms beside the planted ones."""
    places = {each.place for each in look(installation) if each.verdict == "action"}

    assert places == set(PLANTED)


def test_what_works_and_what_differs_is_said_too(installation: Path) -> None:
    """A sound archive, a Java line that may go, a flag without effect."""
    findings = {(each.verdict, each.place): each.what for each in look(installation)}

    assert findings["works", "model-store/good.mar"] == "model good 1.0"
    assert "openjdk-17-jdk" in findings["differs", "Dockerfile:2"]
    assert "--log-config" in findings["differs", "start.sh:5"]
    assert "model-store here" in findings["works", "config.properties:4"]
    assert "torch-model-archiver" in findings["differs", "requirements.txt:4"]
    assert "is not read" in findings["differs", "log4j2.xml"]
    assert "JAVA_HOME" in findings["differs", "torchserve.service:2"]
    assert "ts.model_loader.ModelLoaderFactory" in findings["differs", "model-store/internals.mar!h.py:2"]
    assert findings["works", "docker-compose.yml:5"] == "TS_NUMBER_OF_NETTY_THREADS=4"
    assert findings["works", "cluster.yaml:16"] == "TS_SERVICE_ENVELOPE=kserve"


def test_what_needs_action_comes_first(installation: Path) -> None:
    """Then what differs, then what works."""
    verdicts = [each.verdict for each in look(installation)]

    assert verdicts == sorted(verdicts, key=["action", "differs", "works"].index)
    assert counts(look(installation))["action"] == len(PLANTED)


def test_nothing_of_the_folder_is_run_or_changed(installation: Path) -> None:
    """A survey reads."""
    before = {path: path.stat().st_mtime_ns for path in installation.rglob("*")}

    look(installation)

    assert {path: path.stat().st_mtime_ns for path in installation.rglob("*")} == before


def test_a_sound_installation_needs_nothing(tmp_path: Path) -> None:
    """Settings, an archive and a start script as TorchServe's own guide has them."""
    store = tmp_path / "model_store"
    store.mkdir()
    archive = zip_of({"h.py": b"def handle(d, c):\n    return d\n", "MAR-INF/MANIFEST.json": manifest("m")})
    (store / "m.mar").write_bytes(archive)
    (tmp_path / "config.properties").write_text(
        "inference_address=http://127.0.0.1:8080\nmodel_store=model_store\nload_models=all\n"
        "disable_token_authorization=true\n"
    )
    (tmp_path / "run.sh").write_text(
        "torchserve --start --ncs --model-store model_store --models all --disable-token-auth\n"
    )

    assert counts(look(tmp_path))["action"] == 0


def test_settings_that_do_not_go_together_are_found(tmp_path: Path) -> None:
    """The server's own rules are applied to the file as a whole."""
    (tmp_path / "model_store").mkdir()
    (tmp_path / "config.properties").write_text(
        "model_store=model_store\ninference_address=unix:/tmp.sock\nuse_native_io=false\ndisable_token_authorization=true\n"
    )

    found = [each for each in look(tmp_path) if each.verdict == "action"]

    assert [each.place for each in found] == ["config.properties:2"]
    assert "use_native_io=false" in found[0].what


def test_a_folder_of_something_else_is_told_apart(tmp_path: Path) -> None:
    """With what to name instead."""
    (tmp_path / "notes.txt").write_text("hello")

    (found,) = look(tmp_path)

    assert found.verdict == "action"
    assert "config.properties" in found.fix


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    """There is nothing to look through."""
    (tmp_path / "file").write_text("x")

    with pytest.raises(NotADirectoryError):
        look(tmp_path / "file")


def test_a_snapshot_whose_store_is_gone_is_found(tmp_path: Path) -> None:
    """The server would not start on it; of several snapshots the newest counts, and strays are left alone."""
    folder = tmp_path / "logs" / "config"
    folder.mkdir(parents=True)
    snapshot = "workflow_store=gone\nmodel_snapshot={}\n"
    (folder / "20200102030405006-startup.cfg").write_text("model_store=older\nmodel_snapshot={}\n")
    (folder / "20200102030405007-shutdown.cfg").write_text(snapshot.format('{"models": {}}'))
    (folder / "notes.cfg").write_text("x=1\n")
    (tmp_path / "start.sh").write_text("torchserve --start --model-store .\n")

    found = {each.place: each for each in look(tmp_path) if each.file.startswith("logs")}

    assert found["logs/config/20200102030405007-shutdown.cfg:1"].verdict == "action"
    assert found["logs/config/notes.cfg"].verdict == "differs"
    assert not [place for place in found if "006" in place]


def test_requirements_count_where_the_server_installs_them(tmp_path: Path) -> None:
    """What an archive brings is no missing package then; otherwise the line of its requirements is named."""
    store = tmp_path / "model_store"
    store.mkdir()
    members = {
        "h.py": b"import no_such_package\n\ndef handle(d, c):\n    return d\n",
        "requirements.txt": b"# ours\nno-such-package==1.0\n",
        "MAR-INF/MANIFEST.json": manifest("m", requirementsFile="requirements.txt"),
    }
    (store / "m.mar").write_bytes(zip_of(members))
    config = tmp_path / "config.properties"
    config.write_text("model_store=model_store\ndisable_token_authorization=true\n")

    without = {each.place for each in look(tmp_path) if each.verdict == "action"}
    config.write_text("model_store=model_store\ndisable_token_authorization=true\ninstall_py_dep_per_model=true\n")
    with_it = {each.place for each in look(tmp_path) if each.verdict == "action"}

    assert without == {"model_store/m.mar!requirements.txt:2", "model_store/m.mar!h.py:1"}
    assert not {place for place in with_it if "m.mar" in place}


def test_a_line_of_requirements_that_pip_would_not_be_given_is_found(tmp_path: Path) -> None:
    """An address that no pattern allows is one; with the pattern it is none."""
    store = tmp_path / "model_store"
    store.mkdir()
    members = {
        "h.py": b"def handle(d, c):\n    return d\n",
        "requirements.txt": b"# ours\n--extra-index-url https://wheels.test/cpu\nno-such-package==1.0\n",
        "MAR-INF/MANIFEST.json": manifest("m", requirementsFile="requirements.txt"),
    }
    (store / "m.mar").write_bytes(zip_of(members))
    config = tmp_path / "config.properties"
    lines = "model_store=model_store\ndisable_token_authorization=true\ninstall_py_dep_per_model=true\n"

    config.write_text(lines)
    [without] = [each for each in look(tmp_path) if each.place.startswith("model_store/m.mar")]
    config.write_text(lines + "allowed_urls=[,https://wheels[.]test/.*\n")
    [with_it] = [each for each in look(tmp_path) if each.place.startswith("model_store/m.mar")]

    assert (without.place, without.verdict) == ("model_store/m.mar!requirements.txt:2", "action")
    assert "matches none of allowed_urls" in without.what
    assert with_it.verdict == "works"


@pytest.mark.parametrize(
    "source",
    [
        b"from ts.handler_utils.distributed.pt_pippy import get_pipeline_driver\n",
        b"from ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers, get_pipeline_driver as make\n",
        b"import ts.handler_utils.distributed.pt_pippy as pippy\ndriver = pippy.get_pipeline_driver\n",
    ],
)
def test_what_always_refuses_needs_action(tmp_path: Path, source: bytes) -> None:
    """A name that can be imported and never works: the handler would fail when it loads."""
    archive = {"h.py": source + b"def handle(d, c): ...\n", "MAR-INF/MANIFEST.json": manifest("m")}
    (tmp_path / "m.mar").write_bytes(zip_of(archive))

    (found,) = [each for each in look(tmp_path) if each.verdict == "action"]

    assert found.place == "m.mar!h.py:1"
    assert "get_pipeline_driver, which refuses whenever it is called" in found.what


def test_what_works_beside_it_needs_none(tmp_path: Path) -> None:
    """The ranks of PiPPy work."""
    source = b"from ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers\ndef handle(d, c): ...\n"
    (tmp_path / "m.mar").write_bytes(zip_of({"h.py": source, "MAR-INF/MANIFEST.json": manifest("m")}))

    assert [each.what for each in look(tmp_path) if each.verdict == "action"] == []
