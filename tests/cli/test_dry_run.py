"""Dry runs of commands: which have them, what they send, what they show."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from marserve.cli.command_list import build_commands
from marserve.cli.server.pid_file import marserve_pid_file
from support.command_line import marserve
from support.fake_apis import FakeApis, description, description_with_dry_runs, fake_apis

# Commands that change nothing, each with why; every other one has --dry-run.
CHANGES_NOTHING = {
    "run": "it serves a model of this folder until it ends",
    "status": "it reads",
    "compare": "it reads, and runs both models in processes that end with it",
    "optimise": "it writes a new file, and only the search can say which",
    "export": "it writes a new file, and only after it has been compared",
    "debug": "it reads, and runs the model in a process that ends with it",
    "models": "it reads",
    "top": "it reads, and scales only when a person says y to a question",
    "bench": "it asks a model, as clients do",
    "check": "workers answer samples, as they answer requests",
    "profile": "a worker is measured while it serves",
    "plan": "it is a dry run itself",
    "history": "it reads",
    "watches": "--look has a watch look now that looks by itself a moment later",
    "logs": "it reads",
    "log-level": "it shows a word, and sets another that the next call sets back",
    "explain": "it reads",
    "replay": "a worker answers a request again, and it is no client's",
    "infer": "it asks a model, as any client does",
    "version": "it reads",
}
TOLD = {
    "status": 'Model "digits" Version: 2.0 would be registered with 1 initial worker',
    "isDryRun": True,
    "modelName": "digits",
    "modelVersion": "2.0",
    "before": {"versions": ["1.0"], "defaultVersion": "1.0", "minWorkers": 0, "labels": []},
    "after": {"versions": ["1.0", "2.0"], "defaultVersion": "1.0", "minWorkers": 1, "labels": []},
    "memory": {
        "moreBytes": 300 << 20,
        "source": "estimated",
        "freeBytes": 200 << 20,
        "couldBeHadBytes": 900 << 20,
        "budgetBytes": 1000 << 20,
    },
    "deviceMemory": {"bytesPerWorker": 700 << 20, "source": "learned", "places": 2},
    "notes": ["other models would make room"],
}
# The calls of commands that TorchServe has too, which it would make where it is told of a dry run.
CALLS: tuple[tuple[list[str], str, dict[str, str]], ...] = (
    (
        ["register", "second.mar", "--workers", "2"],
        "POST /models",
        {"url": "second.mar", "initial_workers": "2", "synchronous": "true"},
    ),
    (["scale", "digits", "3", "--max", "4"], "PUT /models/digits", {"min_worker": "3", "max_worker": "4"}),
    (["scale", "digits", "3", "--version", "2.0"], "PUT /models/digits/2.0", {"min_worker": "3", "max_worker": "3"}),
    (["tune", "digits", "--batch-size", "8"], "PUT /models/digits", {"batch_size": "8"}),
    (["set-default", "digits", "2.0"], "PUT /models/digits/2.0/set-default", {}),
    (["unregister", "digits", "--version", "2.0", "--force"], "DELETE /models/digits/2.0", {"force": "true"}),
    (["rollout", "digits", "--abort"], "PUT /models/digits/rollout/abort", {}),
    (["rollout", "digits", "--pause"], "PUT /models/digits/rollout/pause", {}),
)


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server that knows dry runs."""
    with fake_apis() as running:
        running.answer("OPTIONS /", description_with_dry_runs())
        running.answer("GET /models", {"models": []})
        yield running


def command_tree() -> dict[str, set[str]]:
    """Every command with the names of its options."""
    group: Any = typer.main.get_command(build_commands())
    return {
        name: {word for parameter in command.params for word in parameter.opts}
        for name, command in group.commands.items()
    }


def test_every_command_that_changes_something_has_a_dry_run_and_json() -> None:
    """All of them speak JSON; a new command gets a dry run, or a reason here."""
    tree = command_tree()

    assert [name for name, options in tree.items() if "--json" not in options] == []
    assert [name for name, options in tree.items() if "--dry-run" not in options] == list(CHANGES_NOTHING)


@pytest.mark.parametrize(("words", "call", "parameters"), CALLS)
def test_a_dry_run_is_the_call_with_a_word_more(
    apis: FakeApis, words: list[str], call: str, parameters: dict[str, str]
) -> None:
    """Nothing else is sent that is no question; the answer is printed as it is under --json."""
    apis.answer(call, TOLD)

    ran = marserve(*words, "--dry-run", "--json", "--management", apis.url)

    assert (ran.status, ran.document) == (0, TOLD)
    (sent,) = [asked for asked in apis.asked if asked.method not in ("GET", "OPTIONS")]
    assert f"{sent.method} {sent.path}" == call
    assert sent.parameters == {**parameters, "dry_run": "true"}


@pytest.mark.parametrize(("words", "call", "parameters"), CALLS)
def test_a_server_that_would_do_it_is_sent_nothing(words: list[str], call: str, parameters: dict[str, str]) -> None:
    """TorchServe ignores parameters that it does not know."""
    with fake_apis() as apis:
        apis.answer("OPTIONS /", description_with_dry_runs(knows=False))

        ran = marserve(*words, "--dry-run", "--management", apis.url)

    assert ran.status == 1
    assert "knows no dry run of this: it would do it" in ran.err
    assert {asked.method for asked in apis.asked} <= {"GET", "OPTIONS"}


def test_what_would_be_is_shown_beside_what_is(apis: FakeApis) -> None:
    """Only what there is to say; memory against the room that is left."""
    apis.answer("POST /models", TOLD)

    ran = marserve("register", "second.mar", "--dry-run", "--management", apis.url)

    assert [line.split() for line in ran.out.splitlines()[2:6]] == [
        ["now", "then"],
        ["versions", "1.0", "1.0,", "2.0"],
        ["default", "version", "1.0", "1.0"],
        ["min", "workers", "0", "1"],
    ]
    assert ran.out.splitlines()[:2] == ["This would be, and nothing was changed:", f"{TOLD['status']}."]
    assert ran.out.splitlines()[6:] == [
        "Memory: 300 MiB more (estimated); of 1,000 MiB for models 200 MiB are free, and 900 MiB can be had.",
        "On its devices: 700 MiB a worker (learned); there are places for 2 more.",
        "Note: other models would make room.",
    ]


def test_a_dry_run_fails_as_the_call_would(apis: FakeApis) -> None:
    """Status 1 and the server's words."""
    error = {"code": 507, "type": "InsufficientStorageException", "message": "Model digits does not fit into memory."}
    apis.answer("PUT /models/digits", error, status=507)

    ran = marserve("scale", "digits", "300", "--dry-run", "--json", "--management", apis.url)

    assert ran.status == 1
    assert ran.document["error"]["message"] == "Model digits does not fit into memory."


def test_a_server_that_lets_nobody_in_says_so_itself() -> None:
    """Whether it knows dry runs is then not the question."""
    with fake_apis() as apis:
        error = {"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}
        apis.answer("OPTIONS /", error, status=400)
        apis.answer("GET /models", error, status=400)

        ran = marserve("set-default", "digits", "2.0", "--dry-run", "--management", apis.url)

    assert (ran.status, "Token Authorization failed." in ran.err) == (1, True)
    assert apis.orders("PUT") == []


@pytest.mark.parametrize(
    "words",
    [
        ["rollout", "digits", "--dry-run"],
        ["rollout", "digits", "2.0", "--follow", "--dry-run"],
        ["shadow", "digits", "--dry-run"],
    ],
)
def test_a_dry_run_of_nothing_is_a_usage_error(apis: FakeApis, words: list[str]) -> None:
    """Nothing is asked."""
    assert marserve(*words, "--management", apis.url).status == 2
    assert apis.asked == []


# ------------------------------------------------------------------------------------------- without a server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a handler and an empty model store, to work in."""
    (tmp_path / "h.py").write_text("def handle(data, context):\n    return data\n")
    (tmp_path / "model_store").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> list[str]:
    """All of them."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def make_archive(*more: str) -> Any:
    """Run `marserve archive` into the model store."""
    return marserve("archive", "echo", "--handler", "h.py:handle", "-o", "model_store", *more)


def test_an_archive_is_told_and_not_written(folder: Path) -> None:
    """With its members; one that is there already is refused as ever."""
    before = files(folder)

    told = make_archive("--dry-run", "--json").document
    left = files(folder)
    make_archive()
    again, forced = make_archive("--dry-run"), make_archive("--dry-run", "--force", "--json").document

    assert (left, told["isDryRun"], told["overwrites"]) == (before, True, False)
    assert [member["name"] for member in told["members"]] == ["h.py"]
    assert (again.status, "already exists" in again.err) == (1, True)
    assert forced["overwrites"] is True


def test_what_would_be_fetched_is_told_with_its_size(folder: Path) -> None:
    """The folder is not even made; what is not there is a failure, as it would be."""
    make_archive()
    archive = folder / "model_store" / "echo.mar"
    before = files(folder)

    told = marserve("fetch", archive.as_uri(), "--to", "new", "--dry-run", "--json")
    kept = marserve("fetch", archive.as_uri(), "--to", "model_store", "--dry-run")
    gone = marserve("fetch", f"{archive.as_uri()}x", "--to", "new", "--dry-run")

    assert told.document["isDryRun"] is True
    (one,) = told.document["archives"]
    assert (one["outcome"], one["bytes"]) == ("would be fetched", archive.stat().st_size)
    assert "echo.mar is there already" in kept.out
    assert gone.status == 1
    assert files(folder) == before


def test_a_fetch_that_is_only_told_leaves_the_cache_alone(folder: Path) -> None:
    """Its folders are neither made nor swept."""
    make_archive()
    archive = folder / "model_store" / "echo.mar"
    (folder / "config.properties").write_text("download_cache=cache\n")
    before = files(folder)

    ran = marserve("fetch", archive.as_uri(), "--to", "new", "--dry-run")

    assert (ran.status, files(folder)) == (0, before)


@pytest.mark.parametrize("place", ["h.py", "h.py/below"])
def test_a_fetch_to_what_is_no_folder_is_refused_as_the_call_is(folder: Path, place: str) -> None:
    """A file is there, or on the way."""
    make_archive()
    url = (folder / "model_store" / "echo.mar").as_uri()

    tried, done = marserve("fetch", url, "--to", place, "--dry-run"), marserve("fetch", url, "--to", place)

    for ran in (tried, done):
        assert (ran.status, f"The folder {place} cannot be made (" in ran.err) == (1, True)


@pytest.fixture
def addresses() -> list[str]:
    """Options of a start on an address that is free, the system gave it and has it back; its gRPC ports are any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    grpc = [word for name in ("inference", "management") for word in ("--set", f"grpc_{name}_port=0")]
    return [word for name in ("inference", "management", "metrics") for word in (f"--{name}-address", address)] + grpc


def test_a_start_is_told_with_its_models_and_the_sources_of_its_settings(folder: Path, addresses: list[str]) -> None:
    """Nothing is begun or written."""
    make_archive()
    (folder / "config.properties").write_text("job_queue_size=7\n")
    before = files(folder)

    ran = marserve("start", *addresses, "--models", "all", "--dry-run", "--json")

    assert ran.status == 0, ran.out
    assert ran.document["isDryRun"] is True
    assert [each["archive"] for each in ran.document["models"]] == ["echo.mar"]
    assert ran.document["models"][0]["memoryBytes"] > 1 << 20
    assert "job_queue_size=7 is set by config.properties, line 1" in ran.document["sources"]
    assert files(folder) == before


def test_a_start_that_would_fail_does(folder: Path, addresses: list[str]) -> None:
    """An archive that is not there, and an address that somebody has."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = ["--metrics-address", f"http://127.0.0.1:{taken.getsockname()[1]}"]
        ran = marserve("start", *addresses, *used, "--models", "gone.mar", "--dry-run")

    assert ran.status == 1
    assert "gone.mar would not be loaded: Model not found at: gone.mar" in ran.err
    assert "Failed to bind to address: http://127.0.0.1" in ran.err
    assert "Set metrics_address to a free one." in ran.err


def test_a_metrics_address_that_would_not_be_used_may_be_taken(folder: Path, addresses: list[str]) -> None:
    """The start does not listen there; nor does the rehearsal say that it would."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = ["--metrics-address", f"http://127.0.0.1:{taken.getsockname()[1]}"]
        ran = marserve("start", *addresses, *used, "--set", "enable_metrics_api=false", "--dry-run", "--json")

    assert (ran.status, ran.document["metrics"]) == (0, None), ran.out


@pytest.mark.parametrize("name", ["grpc_inference", "grpc_management"])
def test_a_taken_grpc_port_fails_as_in_the_start(folder: Path, addresses: list[str], name: str) -> None:
    """Where gRPC is installed, and by the key that names another."""
    pytest.importorskip("grpc")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = marserve("start", *addresses, "--set", f"{name}_port={port}", "--dry-run")

    assert ran.status == 1
    assert f"Failed to bind to address: 127.0.0.1:{port} (Address already in use)." in ran.err
    assert f"Set {name}_port or {name}_address to a free one." in ran.err


def test_a_socket_of_a_server_or_a_file_in_its_place_fails(folder: Path, addresses: list[str]) -> None:
    """One that a dead server left does not, and stays: the start replaces it."""
    (folder / "file").write_text("x")
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as live:
        dead.bind(str(folder / "dead"))
        live.bind(str(folder / "live"))
        live.listen()
        dead.close()
        ran = {
            name: marserve("start", *addresses, "--inference-address", f"unix:{folder}/{name}", "--dry-run")
            for name in ("live", "file", "dead", "free", "none/free")
        }

    assert {name: each.status for name, each in ran.items()} == {
        "live": 1,
        "file": 1,
        "dead": 0,
        "free": 0,
        "none/free": 1,
    }
    assert "Address already in use" in ran["live"].err
    assert "there is a file that is no socket" in ran["file"].err
    assert files(folder) == ["dead", "file", "h.py", "live", "model_store"]


def test_a_folder_that_a_start_cannot_use_is_a_sentence(folder: Path, addresses: list[str]) -> None:
    """The words and the status of the start."""
    (folder / "file").write_text("x")

    ran = marserve("start", *addresses, "--set", "state_folder=file", "--dry-run")

    assert (ran.status, "state_folder is 'file', where the server cannot write (it is a file)" in ran.err) == (2, True)


def test_a_store_is_listed_only_where_the_start_lists_it(
    folder: Path, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a store whose files may be read and not listed, a named archive loads."""

    def unreadable(self: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    make_archive()
    monkeypatch.setattr("marserve.store.sources.local.LocalStore.names", unreadable)

    assert marserve("start", *addresses, "--models", "echo.mar", "--dry-run").status == 0


def test_a_stop_is_told_with_what_would_be_answered_first(
    apis: FakeApis, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """The server goes on."""
    monkeypatch.setattr("marserve.cli.server.pid_file.PidFile.running_pid", lambda self: os.getpid())

    ran = marserve("stop", "--dry-run", "--json", "--management", apis.url)

    none = {"models": 0, "pendingRequests": 0, "runningRequests": 0}
    assert ran.document == {"stopped": False, "pid": os.getpid(), **none, "isDryRun": True}
    assert not marserve_pid_file(apis.url).path.exists()


def test_a_stop_tells_what_waits_and_what_is_being_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all versions together; a server that does not tell the one tells the other."""
    monkeypatch.setattr("marserve.cli.server.pid_file.PidFile.running_pid", lambda self: os.getpid())
    queue = {"jobQueueStatus": {"remainingCapacity": 1, "pendingRequests": 3}}
    versions = [{**description(version=version), **queue} for version in ("1.0", "2.0")]

    with fake_apis() as apis:
        apis.answer("GET /models", {"models": [{"modelName": "digits", "modelUrl": "digits.mar"}]})
        apis.answer("GET /models/digits/all", versions)
        apis.answer("GET /models/digits/all", [{**version, "runningRequests": 2} for version in versions])
        before = marserve("stop", "--dry-run", "--management", apis.url)
        now = marserve("stop", "--dry-run", "--management", apis.url)

    assert "answer what it has accepted first: of 2 versions of models 6 wait." in before.out
    assert "of 2 versions of models 4 requests are being answered, 6 wait." in now.out


def test_a_stop_needs_no_answer_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has its rehearsal to have its key: the numbers are unknown then, and why."""
    monkeypatch.setattr("marserve.cli.server.pid_file.PidFile.running_pid", lambda self: os.getpid())
    with fake_apis() as apis:
        error = {"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}
        apis.answer("GET /models", error, status=400)

        told = marserve("stop", "--dry-run", "--management", apis.url)
        document = marserve("stop", "--dry-run", "--json", "--management", apis.url).document

    assert told.status == 0, told.err
    assert "it does not tell (" in told.out
    assert "Token Authorization failed" in told.out
    assert (document["pid"], document["models"], document["runningRequests"]) == (os.getpid(), None, None)
