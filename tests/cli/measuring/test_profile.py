"""`marserve profile`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from marserve.cli.progress import wait_progress
from support.command_line import marserve
from support.fake_apis import FakeApis, fake_apis
from support.profiles import a_profile


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files go to a folder of the test's."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server that has profiled a model."""
    with fake_apis() as running:
        running.answer("POST /models/digits/profile", msgspec.to_builtins(a_profile()))
        running.answer("GET /models/digits/profile/trace", b"packed", content_type="application/gzip")
        yield running


def test_a_profile_becomes_a_folder_of_files_and_a_few_lines(apis: FakeApis, tmp_path: Path) -> None:
    """It says how many of the requests it got."""
    ran = marserve("profile", "digits", "--requests", "50", "--out", "p", "--management", apis.url)

    assert ran.status == 0
    assert ran.out.startswith("digits 1.0: 50 of the 50 asked for requests in 50 batches, 1.0 s, W-9000-digits_1.0\n")
    assert "[4, 4] [4, 4]" in ran.out
    names = ["operators.svg", "profile.json", "python.svg", "report.html", "trace.json.gz"]
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == names
    assert (tmp_path / "p/trace.json.gz").read_bytes() == b"packed"
    assert json.loads((tmp_path / "p/profile.json").read_text())["requests"] == 50
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    asked = {"operators": "true", "shapes": "true", "memory": "false", "stacks": "false", "requests": "50"}
    assert apis.orders("POST")[0].parameters == asked


def test_several_servers_make_one_report(apis: FakeApis, tmp_path: Path) -> None:
    """With a trace of each; the folder is named after the model and the time."""
    with fake_apis() as other:
        other.answer("POST /models/digits/profile", msgspec.to_builtins(a_profile(hasTrace=False)))
        ran = marserve("profile", "digits", "--management", apis.url, "--management", other.url, "--json")

    [folder] = tmp_path.iterdir()
    assert folder.name.startswith("profile-digits-2")
    assert ran.document["folder"] == folder.name
    assert "The servers beside each other" in (folder / "report.html").read_text()
    assert sorted(ran.document["files"]) == [
        "operators-1.svg",
        "operators-2.svg",
        "profile-1.json",
        "profile-2.json",
        "python-1.svg",
        "python-2.svg",
        "report.html",
        "trace-1.json.gz",
    ]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            {"isRunning": True, "seconds": 3.0, "requests": 50, "readingSeconds": 2.0},
            "Profiling digits: measured (50 requests); a process of low priority reads what was recorded",
        ),
        (
            {"isRunning": True, "seconds": 3.0, "requests": 0},
            "Profiling digits: 0 of 50 requests, 3 s; send the model requests, as many as it gets in service",
        ),
        ({"isRunning": True, "seconds": 3.0, "requests": 20}, ""),
        ({"isRunning": "maybe"}, ""),
    ],
)
def test_what_it_waits_for_is_said_once_without_a_terminal(
    apis: FakeApis, monkeypatch: pytest.MonkeyPatch, state: dict[str, object], said: str
) -> None:
    """On standard error, as other commands do; requests that come need no word."""
    monkeypatch.setattr(wait_progress, "NOTE_AFTER_S", 0.05)
    apis.answer("GET /models/digits/profile", state)
    apis.wait_for("POST /models/digits/profile", "GET /models/digits/profile", 3)

    ran = marserve("profile", "digits", "--requests", "50", "--management", apis.url)

    assert ran.status == 0
    assert ran.err == (f"{said}\n" if said else "")


def test_a_profile_without_a_request_is_status_1(apis: FakeApis) -> None:
    """The server's remark says what is missing, without a table of noughts; how to send requests stands below it."""
    remarks = ["No request came to this worker meanwhile"]
    idle = a_profile(requests=0, batches=0, operators=[], noOperators="no batch ran", hasTrace=False, remarks=remarks)
    with fake_apis() as quiet:
        quiet.answer("POST /models/digits/profile", msgspec.to_builtins(idle))
        ran = marserve("profile", "digits", "--management", quiet.url)

    assert ran.status == 1
    said, note, files = ran.out.splitlines()
    assert "0 of the 50 asked for requests" in said
    assert note == "note: No request came to this worker meanwhile"
    assert "report.html" in files
    assert "`marserve bench digits --inputs FOLDER`" in ran.err


def test_what_cannot_be_done_is_said_and_leaves_no_files(apis: FakeApis, tmp_path: Path) -> None:
    """A folder that is there, one without a parent, a server named twice, a model that is not there."""
    (tmp_path / "p").mkdir()
    words = ("profile", "digits", "--management", apis.url)

    there = marserve(*words, "--out", "p")
    no_parent = marserve(*words, "--out", "no/p")
    twice = marserve(*words, "--management", apis.url)
    assert apis.asked == []
    unknown = marserve("profile", "nope", "--management", apis.url)

    assert (there.status, no_parent.status, twice.status, unknown.status) == (2, 2, 2, 1)
    assert "p is there already" in there.err
    assert f"There is no folder {tmp_path}/no" in no_parent.err
    assert "given twice" in twice.err
    assert "Model not found: /models/nope/profile" in unknown.err
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_an_answer_that_is_no_profile_is_refused(apis: FakeApis, tmp_path: Path) -> None:
    """Some other server listens there."""
    with fake_apis() as other:
        other.answer("POST /models/digits/profile", {"hello": 1})
        ran = marserve("profile", "digits", "--management", other.url)

    assert ran.status == 1
    assert "is no profile" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_answer_of_lists_in_lists_is_no_profile(apis: FakeApis, tmp_path: Path) -> None:
    """Status 1 with a sentence, and no folder."""
    apis.answer("POST /models/deep/profile", b"[" * 100_000)

    ran = marserve("profile", "deep", "--management", apis.url)

    assert ran.status == 1
    assert "is no JSON" in ran.err
    assert list(tmp_path.iterdir()) == []
