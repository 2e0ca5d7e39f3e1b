"""`marserve migrate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.archives import manifest, zip_of
from support.command_line import marserve
from support.fake_apis import fake_apis
from support.old_installation import PLANTED, make_installation


def test_the_report_names_every_problem_and_what_to_do(tmp_path: Path) -> None:
    """Status 1: something needs doing; what works is not listed unless asked for."""
    ran = marserve("migrate", make_installation(tmp_path / "old"))

    assert ran.status == 1
    for place in PLANTED:
        assert place in ran.out
    assert "good.mar" not in ran.out
    assert ran.out.rstrip().endswith(" works.")
    assert f"{len(PLANTED)} needs action" in ran.out


def test_all_lists_what_works_too(tmp_path: Path) -> None:
    """Nothing is kept from who asks."""
    ran = marserve("migrate", make_installation(tmp_path / "old"), "--all")

    assert "model good 1.0" in ran.out


def test_scripts_get_a_document(tmp_path: Path) -> None:
    """Counts, and each finding with verdict, file, line, sentence and fix."""
    ran = marserve("migrate", make_installation(tmp_path / "old"), "--json")

    assert ran.status == 1
    assert ran.document["counts"]["action"] == len(PLANTED)
    places = {each["place"] for each in ran.document["findings"] if each["verdict"] == "action"}
    assert places == set(PLANTED)


def test_a_sound_folder_ends_with_0(tmp_path: Path) -> None:
    """So that a pipeline can ask."""
    (tmp_path / "model_store").mkdir()
    (tmp_path / "config.properties").write_text("model_store=model_store\ndisable_token_authorization=true\n")

    ran = marserve("migrate", tmp_path)

    assert ran.status == 0
    assert "0 needs action" in ran.out


def test_a_start_is_tried_before_nothing_is_said_to_need_action(tmp_path: Path) -> None:
    """A model that does not fit into the memory that models may take: each line by itself is sound."""
    (tmp_path / "model_store").mkdir()
    archive = {"h.py": b"def handle(d, c):\n    return d\n", "MAR-INF/MANIFEST.json": manifest("good")}
    (tmp_path / "model_store" / "good.mar").write_bytes(zip_of(archive))
    settings = tmp_path / "config.properties"
    settings.write_text("model_store=model_store\nload_models=all\n")

    sound = marserve("migrate", tmp_path, "--all")
    settings.write_text("model_store=model_store\nload_models=all\nmodel_memory=1MiB\n")
    too_small = marserve("migrate", tmp_path, "--json")

    assert "a start was tried with these settings" in sound.out
    assert too_small.status == 1
    (found,) = [each for each in too_small.document["findings"] if each["verdict"] == "action"]
    assert found["place"] == "config.properties:2"
    assert "good.mar would not be loaded" in found["what"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """With what to name."""
    ran = marserve("migrate", tmp_path / "nowhere")

    assert ran.status == 2
    assert "nowhere is no folder" in ran.err
    assert "config.properties" in ran.err


@pytest.mark.parametrize("arguments", [("--compare", "http://127.0.0.1:1"), ("--requests", "cases.json")])
def test_comparing_needs_both_a_server_and_requests(arguments: tuple[str, str]) -> None:
    """One alone says nothing."""
    ran = marserve("migrate", *arguments)

    assert ran.status == 2
    assert "belong together" in ran.err


def test_answers_of_two_servers_are_compared(tmp_path: Path) -> None:
    """Alike: status 0. Different: status 1, and where."""
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{"id": "one", "path": "/predictions/m", "method": "POST", "body": "x"}]))
    with fake_apis() as old, fake_apis() as new:
        old.answer("POST /predictions/m", {"cat": 0.5})
        new.answer("POST /predictions/m", {"cat": 0.5001})
        new.answer("POST /predictions/m", {"cat": 0.7})
        arguments = ("migrate", "--compare", old.url, "--requests", cases, "--inference", new.url)

        alike = marserve(*arguments)
        different = marserve(*arguments)

    assert (alike.status, alike.out) == (0, "1 requests: 1 answered alike, 0 not.\n")
    assert different.status == 1
    assert "$.cat" in different.out
    assert "0.7" in different.out


def test_what_both_servers_refuse_is_pointed_at(tmp_path: Path) -> None:
    """Two equal errors are alike, and prove nothing if the name of the model was misspelt."""
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{"id": "one", "path": "/predictions/m", "method": "POST", "body": "x"}]))
    with fake_apis() as old, fake_apis() as new:
        for server in (old, new):
            server.answer("POST /predictions/m", {"code": 404}, 404)
        ran = marserve("migrate", "--compare", old.url, "--requests", cases, "--inference", new.url)

    assert ran.status == 0
    assert "refused one (404)" in ran.out


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Nobody needs to guess which of the two."""
    cases = tmp_path / "cases.json"
    cases.write_text('[{"path": "/ping"}]')
    with fake_apis() as new:
        ran = marserve("migrate", "--compare", "http://127.0.0.1:1", "--requests", cases, "--inference", new.url)

    assert ran.status == 1
    assert "http://127.0.0.1:1/ping did not answer" in ran.err
