"""`marserve traffic`, `marserve label` and `marserve swap`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.command_line import marserve
from support.fake_apis import FakeApis, description, fake_apis

PATH = "/models/digits/traffic"
LABELS = "/models/digits/labels"
SWAP = "/models/digits/swap"
WEIGHTS = {"weights": {"1.0": 80, "2.0": 20}, "sticky": {"header": "X-User"}}
SWAPPED = {
    "status": 'Model "digits" Version: 2.0 has taken the place of version 1.0',
    "modelName": "digits",
    "modelVersion": "2.0",
    "replacedVersion": "1.0",
    "order": "load_first",
    "workers": 1,
    "seconds": 0.5,
}


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server."""
    with fake_apis() as running:
        yield running


# ------------------------------------------------------------------------------------------- traffic


def test_weights_are_sent_as_they_were_said(apis: FakeApis) -> None:
    """In percent too, and with a sticky key; what is in force is shown."""
    apis.answer(f"PUT {PATH}", WEIGHTS)

    ran = marserve("traffic", "digits", "1.0=80%", "2.0=19.5", "--sticky-header", "X-User", "--management", apis.url)

    assert ran.status == 0
    (asked,) = apis.orders("PUT")
    assert json.loads(asked.body) == {"weights": {"1.0": 80, "2.0": 19.5}, "sticky": {"header": "X-User"}}
    assert asked.parameters == {}
    assert [line.split() for line in ran.out.splitlines()[:3]] == [
        ["version", "weight", "share"],
        ["1.0", "80", "80", "%"],
        ["2.0", "20", "20", "%"],
    ]
    assert "Requests alike in header X-User stay together." in ran.out


def test_a_version_s_name_may_hold_an_equals_sign(apis: FakeApis) -> None:
    """The last one counts."""
    apis.answer(f"PUT {PATH}", {"weights": {"a=b": 1}})

    marserve("traffic", "digits", "a=b=1", "--management", apis.url)

    assert json.loads(apis.orders("PUT")[0].body) == {"weights": {"a=b": 1}}


def test_weights_are_shown(apis: FakeApis) -> None:
    """Those that are pending as such."""
    apis.answer(f"GET {PATH}", {**WEIGHTS, "sticky": {"cookie": "sid"}, "pending": ["2.0"]})

    ran = marserve("traffic", "digits", "--management", apis.url)

    assert ran.out.splitlines()[2].split() == ["2.0", "20", "20", "%", "not", "ready"]
    assert "cookie sid" in ran.out
    assert "the others have their share meanwhile" in ran.out


def test_a_model_without_weights_says_who_answers(apis: FakeApis) -> None:
    """And so does one that is reset."""
    told = {"weights": {"1.0": 100}, "isDefault": True}
    apis.answer(f"GET {PATH}", told)
    apis.answer(f"DELETE {PATH}", told)

    shown = marserve("traffic", "digits", "--management", apis.url)
    reset = marserve("traffic", "digits", "--reset", "--json", "--management", apis.url)

    assert shown.out == "No weights: version 1.0, the default one, answers.\n"
    assert reset.document == {"model": "digits", **told}


def test_a_dry_run_is_one(apis: FakeApis) -> None:
    """The server looks, and changes nothing."""
    apis.answer(f"PUT {PATH}", WEIGHTS)

    ran = marserve("traffic", "digits", "1.0=80", "2.0=20", "--dry-run", "--management", apis.url)

    assert apis.orders("PUT")[0].parameters == {"dry_run": "true"}
    assert ran.out.startswith("This would be, and nothing was changed:\n")


def test_the_server_s_refusal_is_told(apis: FakeApis) -> None:
    """In its words."""
    error = {"code": 404, "type": "ModelVersionNotFoundException", "message": "Model version: 3.0 does not exist"}
    apis.answer(f"PUT {PATH}", error, status=404)

    ran = marserve("traffic", "digits", "3.0=1", "--management", apis.url)

    assert (ran.status, "Model version: 3.0 does not exist" in ran.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["1.0"], 2, "'1.0' is no weight of a version"),
        (["=80"], 2, "'=80' is no weight of a version"),
        (["1.0=many"], 2, "'1.0=many' is no weight of a version"),
        (["--reset", "1.0=80"], 2, "weights are set, or they are reset"),
        (["--sticky-cookie", "sid"], 2, "it needs weights"),
        (["--dry-run"], 2, "it needs something to do"),
    ],
)
def test_what_cannot_be_meant_reaches_no_server(apis: FakeApis, arguments: list[str], status: int, words: str) -> None:
    """It is said here."""
    ran = marserve("traffic", "digits", *arguments, "--management", apis.url)

    assert ran.status == status
    assert words in " ".join(ran.err.replace("│", " ").split())
    assert apis.asked == []


# ------------------------------------------------------------------------------------------- labels


def test_a_label_is_set_shown_and_removed(apis: FakeApis) -> None:
    """Three forms of one command."""
    apis.answer(f"PUT {LABELS}/canary", {"version": "3.0", "isPending": True, "answeredBy": "2.0"})
    apis.answer(f"GET {LABELS}", {"canary": {"version": "2.0"}, "stable": {"version": "1.0", "isPending": True}})
    apis.answer(f"DELETE {LABELS}/canary", {"status": 'Label "canary" of model "digits" removed'})

    put = marserve("label", "digits", "canary", "3.0", "--management", apis.url)
    shown = marserve("label", "digits", "--management", apis.url)
    one = marserve("label", "digits", "canary", "--json", "--management", apis.url)
    removed = marserve("label", "digits", "canary", "--remove", "--management", apis.url)

    assert put.out == "canary names 3.0 (not ready, 2.0 until then)\n"
    assert json.loads(apis.orders("PUT")[0].body) == {"version": "3.0"}
    assert [line.split(maxsplit=1) for line in shown.out.splitlines()] == [
        ["label", "version"],
        ["canary", "2.0"],
        ["stable", "1.0 (not ready)"],
    ]
    assert one.document == {"model": "digits", "labels": {"canary": {"version": "2.0"}}}
    assert removed.out == 'Label "canary" of model "digits" removed\n'


def test_a_label_can_be_tried(apis: FakeApis) -> None:
    """Both what sets it and what removes it."""
    apis.answer(f"PUT {LABELS}/canary", {"version": "2.0"})
    apis.answer(f"DELETE {LABELS}/canary", {"status": "would be"})

    put = marserve("label", "digits", "canary", "2.0", "--dry-run", "--management", apis.url)
    marserve("label", "digits", "canary", "--remove", "--dry-run", "--management", apis.url)

    assert put.out == "canary would name 2.0\n"
    assert [asked.parameters for asked in apis.asked] == [{"dry_run": "true"}] * 2


@pytest.mark.parametrize("arguments", [["--remove"], ["canary", "1.0", "--remove"], ["canary", "--dry-run"]])
def test_a_label_s_usage_errors(apis: FakeApis, arguments: list[str]) -> None:
    """Status 2; nothing is sent."""
    assert marserve("label", "digits", *arguments, "--management", apis.url).status == 2
    assert apis.asked == []


def test_a_model_without_labels_says_so(apis: FakeApis) -> None:
    """Of all, or of one."""
    apis.answer(f"GET {LABELS}", {})

    assert marserve("label", "digits", "--management", apis.url).out == "Model digits has no labels.\n"
    assert marserve("label", "digits", "x", "--management", apis.url).out == "Model digits has no label x.\n"


# ------------------------------------------------------------------------------------------- swaps


def swap(apis: FakeApis, *arguments: str, told: dict[str, Any] = SWAPPED) -> Any:
    """Run the command against a server that answers so."""
    apis.answer("GET /models/digits/all", [description()])
    apis.answer(f"POST {SWAP}", told)
    return marserve("swap", "digits", "digits-2.mar", *arguments, "--management", apis.url)


def test_a_swap_waits_and_tells(apis: FakeApis) -> None:
    """Only what was given is sent."""
    ran = swap(apis)

    assert (ran.status, ran.out) == (0, SWAPPED["status"] + "\n")  # type: ignore[operator]
    assert apis.orders("POST")[0].parameters == {"url": "digits-2.mar"}


def test_a_swap_says_all_that_can_be_said(apis: FakeApis) -> None:
    """Each option is a parameter."""
    options = ["--version", "1.0", "--order", "unload_first", "--workers", "2", "--no-check", "--batch-size", "8"]
    swap(apis, *options, "--keep-old", "--dry-run", "--handler", "h.py")

    assert apis.orders("POST")[0].parameters == {
        "url": "digits-2.mar",
        "version": "1.0",
        "order": "unload_first",
        "initial_workers": "2",
        "keep_old": "true",
        "check": "false",
        "handler": "h.py",
        "batch_size": "8",
        "dry_run": "true",
    }


def test_a_swap_tells_what_was_not_looked_at(apis: FakeApis) -> None:
    """And a script gets the server's document."""
    told = {**SWAPPED, "notes": ["it has no samples"]}

    assert "Note: it has no samples." in swap(apis, told=told).out
    assert swap(apis, "--json", told=told).document == told


def test_a_swap_that_is_tried_tells_what_is_and_what_would_be(apis: FakeApis) -> None:
    """As other dry runs, and an older server's sentence alone."""
    told = {**SWAPPED, "isDryRun": True, "before": {"versions": ["1.0"]}, "after": {"versions": ["2.0"]}}

    lines = swap(apis, "--dry-run", told={**told, "notes": ["it has no samples"]}).out.splitlines()
    older = swap(apis, "--dry-run", told={**SWAPPED, "isDryRun": True}).out

    assert lines[0] == "This would be, and nothing was changed:"
    assert any(line.split() == ["versions", "1.0", "2.0"] for line in lines)
    assert lines[-1] == "Note: it has no samples."
    assert SWAPPED["status"] in older


def test_a_swap_that_failed_says_what_goes_on_and_why(apis: FakeApis) -> None:
    """The reason travels beside the sentence."""
    apis.answer("GET /models/digits/all", [description()])
    message = "Version 2.0 of model digits was not taken, version 1.0 goes on answering: its workers could not load it"
    apis.answer(f"POST {SWAP}", {"code": 500, "type": "InternalServerException", "message": message}, status=500)
    apis.headers["x-marserve-reason"] = "ValueError: no weights"

    ran = marserve("swap", "digits", "bad.mar", "--management", apis.url)

    assert ran.status == 1
    assert message in ran.err
    assert "ValueError: no weights" in ran.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "The swap of digits goes on in the server"),
        (["--dry-run"], "The dry run was ended; of digits nothing was changed."),
    ],
)
def test_a_swap_that_is_not_waited_for_goes_on_if_it_is_one(
    apis: FakeApis, monkeypatch: pytest.MonkeyPatch, options: list[str], sentence: str
) -> None:
    """Ctrl-C ends the command; of a dry run nothing goes on."""

    def interrupt(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("marserve.cli.models.swap.while_showing", interrupt)

    ran = swap(apis, *options)

    assert (ran.status, sentence in ran.err) == (130, True)


def test_a_swap_of_no_model_is_said_before_it_begins(apis: FakeApis) -> None:
    """No archive is looked at."""
    ran = marserve("swap", "nobody", "digits.mar", "--management", apis.url)

    assert (ran.status, apis.orders("POST")) == (1, [])
