"""`marserve register`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve.errors import VersionConflict
from support.command_line import marserve
from support.fake_apis import FakeApis, description, description_with_dry_runs, fake_apis


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with one version that takes a second."""
    with fake_apis() as running:
        running.answer("GET /models", {"models": [{"modelName": "digits"}]})
        running.answer("GET /models/digits/all", [description()])
        running.answer("GET /models/digits/all", [description(), description(version="2.0", isDefault=False)])
        running.answer("POST /models", {"status": 'Model "digits" Version: 2.0 registered with 1 initial workers'})
        yield running


def test_an_archive_is_registered_with_one_worker(apis: FakeApis) -> None:
    """The command waits for it and repeats the server's words."""
    ran = marserve("register", "second.mar", "--management", apis.url)

    assert (ran.status, ran.out) == (0, 'Model "digits" Version: 2.0 registered with 1 initial workers\n')
    assert apis.orders("POST")[0].parameters == {"url": "second.mar", "initial_workers": "1", "synchronous": "true"}


def test_a_script_learns_what_was_registered(apis: FakeApis) -> None:
    """Only the version that was not there before."""
    ran = marserve("register", "second.mar", "--json", "--management", apis.url)

    assert ran.document["registered"] == [
        {"model": "digits", "version": "2.0", "isDefault": False, "readyWorkers": 1},
    ]


def test_options_reach_the_server_under_its_names(apis: FakeApis) -> None:
    """Delay in milliseconds, time-outs in seconds, as its API has them."""
    options = {
        "--name": ("model_name", "numbers"),
        "--workers": ("initial_workers", "3"),
        "--handler": ("handler", "image_classifier"),
        "--batch-size": ("batch_size", "8"),
        "--max-batch-delay": ("max_batch_delay", "20"),
        "--response-timeout": ("response_timeout", "5"),
        "--startup-timeout": ("startup_timeout", "60"),
    }
    words = [word for flag, (_, value) in options.items() for word in (flag, value)]

    assert marserve("register", "second.mar", *words, "--management", apis.url).status == 0

    assert apis.orders("POST")[0].parameters == {
        "url": "second.mar",
        "synchronous": "true",
        **dict(options.values()),
    }


def test_a_refused_archive_is_a_failure() -> None:
    """Status 1 and the server's words."""
    with fake_apis() as apis:
        apis.answer("GET /models", {"models": []})
        apis.answer("POST /models", {"code": 404, "message": "Model not found at: gone.mar"}, 404)

        ran = marserve("register", "gone.mar", "--json", "--management", apis.url)

    assert ran.status == 1
    assert ran.document["error"]["message"] == "Model not found at: gone.mar"
    assert ran.document["error"]["code"] == 404


def test_a_model_that_does_not_load_is_told_with_its_reason() -> None:
    """One line of it, for a person and for a script."""
    with fake_apis() as apis:
        apis.headers["x-marserve-reason"] = "SyntaxError: expected ':' (bad.py, line 1)"
        apis.answer("GET /models", {"models": []})
        apis.answer("POST /models", {"code": 500, "message": "Failed to start workers for model bad"}, 500)

        told = marserve("register", "bad.mar", "--management", apis.url)
        document = marserve("register", "bad.mar", "--json", "--management", apis.url)

    assert told.status == document.status == 1
    assert "  Reason: SyntaxError: expected ':' (bad.py, line 1)" in told.err.splitlines()
    assert document.document["error"]["reason"] == "SyntaxError: expected ':' (bad.py, line 1)"


def test_a_registration_that_is_not_waited_for_goes_on(apis: FakeApis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the command, and it says what it does not end."""

    def interrupt(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("marserve.cli.progress.registering.while_showing", interrupt)

    ran = marserve("register", "second.mar", "--management", apis.url)

    assert ran.status == 130
    assert "second.mar goes on in the server" in ran.err


DATA = b"an archive"
SHA256 = hashlib.sha256(DATA).hexdigest()
SENT = {"archive": "second.mar", "sha256": SHA256, "bytes": len(DATA)}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an archive."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "second.mar").write_bytes(DATA)
    return tmp_path


@pytest.mark.parametrize("words", [["./second.mar"], ["second.mar", "--upload"], ["{here}/second.mar"]])
def test_a_file_of_this_machine_is_sent_and_registered(apis: FakeApis, here: Path, words: list[str]) -> None:
    """Under its last name, with its digest; the server's words are repeated."""
    apis.answer("PUT /archives/second.mar", SENT, 201)

    ran = marserve("register", *[word.format(here=here) for word in words], "--management", apis.url)

    assert (ran.status, ran.out) == (0, 'Model "digits" Version: 2.0 registered with 1 initial workers\n')
    [put] = apis.orders("PUT")
    digest = base64.b64encode(hashlib.sha256(DATA).digest()).decode()
    assert (put.body, put.headers["digest"], put.parameters) == (DATA, f"sha-256={digest}", {})
    assert apis.orders("POST")[0].parameters["url"] == "second.mar"


def test_a_script_learns_what_was_sent(apis: FakeApis, here: Path) -> None:
    """A file may be meant to take another one's place, and its digest may be pinned."""
    apis.answer("PUT /archives/second.mar", SENT, 201)

    ran = marserve("register", f"./second.mar#sha256={SHA256}", "--replace", "--json", "--management", apis.url)

    assert ran.document["upload"] == SENT
    assert apis.orders("PUT")[0].parameters == {"replace": "true"}
    assert apis.orders("POST")[0].parameters["url"] == f"second.mar#sha256={SHA256}"


@pytest.mark.parametrize("word", ["second.mar", "https://origin/a/second.mar", "/srv/models/team/digits"])
def test_what_is_no_file_here_is_left_to_the_server(apis: FakeApis, here: Path, word: str) -> None:
    """A name of the store, an address, and a path that only the server has."""
    apis.answer("GET /downloads", {"downloads": []})

    ran = marserve("register", word, "--management", apis.url)

    assert (ran.status, apis.orders("PUT")) == (0, [])
    assert apis.orders("POST")[0].parameters["url"] == word


def test_a_file_may_be_left_to_the_server(apis: FakeApis, here: Path) -> None:
    """So may one below a folder of `model_roots`, as the server reads that."""
    (here / "config.properties").write_text(f"model_roots={here}\nmanagement_address={apis.url}\n")

    for words in (["./second.mar", "--no-upload", "--management", apis.url], [f"{here}/second.mar"]):
        assert marserve("register", *words).status == 0

    assert apis.orders("PUT") == []
    assert [asked.parameters["url"] for asked in apis.orders("POST")] == ["./second.mar", f"{here}/second.mar"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./gone.mar"], "There is no file ./gone.mar here."),
        (["gone.mar", "--upload"], "There is no file gone.mar here."),
        (["./folder"], "./folder is a folder, and what is sent to a server is one file."),
    ],
)
def test_what_can_only_be_a_file_here_and_is_none_is_a_wrong_argument(
    apis: FakeApis, here: Path, words: list[str], said: str
) -> None:
    """Status 2, and nothing was tried."""
    (here / "folder").mkdir()

    ran = marserve("register", *words, "--management", apis.url)

    assert (ran.status, apis.asked) == (2, [])
    assert said in ran.err


def test_a_refused_file_is_not_registered(apis: FakeApis, here: Path) -> None:
    """The server's words, and what may help."""
    apis.answer("PUT /archives/second.mar", {"code": 409, "message": "The model store has second.mar"}, 409)

    ran = marserve("register", "./second.mar", "--management", apis.url)

    assert (ran.status, apis.orders("POST")) == (1, [])
    assert "--replace" in ran.err


def test_a_server_that_takes_no_uploads_is_asked_for_the_name(apis: FakeApis, here: Path) -> None:
    """As it was before there were uploads."""
    ran = marserve("register", "./second.mar", "--management", apis.url)

    assert (ran.status, apis.orders("POST")[0].parameters["url"]) == (0, "second.mar")
    assert "takes no uploads" in ran.err


def test_a_dry_run_sends_the_file_to_be_checked_alone(here: Path) -> None:
    """What the registration would do cannot be said before it is there."""
    error = {"code": 404, "type": "ModelNotFoundException", "message": "Model not found at: second.mar"}
    with fake_apis() as fresh:
        fresh.answer("OPTIONS /", description_with_dry_runs())
        fresh.answer("PUT /archives/second.mar", {**SENT, "isDryRun": True})
        fresh.answer("POST /models", error, 404)

        ran = marserve("register", "./second.mar", "--dry-run", "--json", "--management", fresh.url)

    assert ran.status == 0, ran.err
    assert ran.document == {"upload": {**SENT, "isDryRun": True}, "isDryRun": True}
    assert fresh.orders("PUT")[0].parameters == {"dry_run": "true"}


def test_an_upload_that_is_not_waited_for_is_broken_off(
    apis: FakeApis, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends it, and nothing is registered."""

    def interrupt(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("marserve.cli.progress.uploads.while_showing", interrupt)

    ran = marserve("register", "./second.mar", "--management", apis.url)

    assert (ran.status, apis.orders("POST")) == (130, [])
    assert "broken off" in ran.err


@pytest.mark.parametrize("words", [VersionConflict("net", "1.0").message, VersionConflict("net", "1.0").own_message])
def test_a_version_that_is_there_has_a_next_step(words: str) -> None:
    """The swap, or another version; under torchserve, too."""
    with fake_apis() as apis:
        apis.answer("GET /models", {"models": []})
        apis.answer("POST /models", {"code": 409, "message": words}, 409)

        ran = marserve("register", "net.mar", "--management", apis.url)

    assert words in ran.err
    assert "`marserve swap net ARCHIVE`" in ran.err
    assert "--version" in ran.err
