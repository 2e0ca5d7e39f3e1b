"""The document of the models: what TorchServe writes is read, what is written is read again, the rest is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.errors import InvalidSnapshot
from marserve.registry.catalogue.snapshot import (
    SnapshotVersion,
    archive_name,
    check_archives,
    lies_as,
    read_models,
    write_models,
)
from support.inventory import inventory

NOOP = SnapshotVersion("noop", "1.0", "noop.mar", True, 1, 2, 4, 0.1, 21, 120, "python")
VALUES: dict[str, Any] = {
    "defaultVersion": True,
    "marName": "noop.mar",
    "minWorkers": 1,
    "maxWorkers": 2,
    "batchSize": 4,
    "maxBatchDelay": 100,
}


def document(**changes: Any) -> str:
    """A document of one version; None takes a value away."""
    values = {key: value for key, value in (VALUES | changes).items() if value is not None}
    return json.dumps({"name": "startup.cfg", "modelCount": 1, "created": 1, "models": {"noop": {"1.0": values}}})


def test_the_contracts_document_is_written() -> None:
    """`parallelLevel` only where there is one, and `handler` only where a registration named one."""
    written = json.loads(write_models([NOOP], "x-snapshot.cfg", 1585635869526))

    assert written == {
        "name": "x-snapshot.cfg",
        "modelCount": 1,
        "created": 1585635869526,
        "models": {
            "noop": {"1.0": {**VALUES, "responseTimeout": 21, "startupTimeout": 120, "runtimeType": "python"}},
        },
    }


def test_what_is_written_is_read_again() -> None:
    """In the same order, with all that may be left out."""
    versions = [
        replace(NOOP, is_default=False),
        replace(NOOP, version="2.0", parallel_level=2, handler="other:handle", runtime="python3"),
        replace(NOOP, model="späte Rose", min_workers=0, max_workers=0, response_timeout_s=0.5),
    ]

    assert read_models(write_models(versions, "n", 1)) == versions


def test_time_outs_and_runtime_have_torchserves_defaults() -> None:
    """KServe's files leave them out."""
    (version,) = read_models(document())

    assert (version.response_timeout_s, version.startup_timeout_s, version.runtime) == (120, 120, "python")


@pytest.mark.parametrize(
    "text", ['{"name": "startup.cfg", "modelCount": 0}', '{"models": {}}', '{"models": {"m": {}}}']
)
def test_a_snapshot_may_have_no_models(text: str) -> None:
    """A server without any writes such."""
    assert read_models(text) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({key: None}, f"{key} of model noop, version 1.0 is missing") for key in VALUES),
        ({"maxBatchDelay": 10**400}, "maxBatchDelay .* is 1000"),
        ({"minWorkers": -1}, "minWorkers .* is -1; it must be a whole number of 0 or more"),
        ({"maxWorkers": 0}, "maxWorkers .* is 0; it must be a whole number of 1 or more"),
        ({"batchSize": 0}, "batchSize .* is 0"),
        ({"batchSize": True}, "batchSize .* is true"),
        ({"maxBatchDelay": "100"}, 'maxBatchDelay .* is "100"'),
        ({"responseTimeout": 0}, "responseTimeout .* is 0; it must be a number of seconds"),
        ({"startupTimeout": 1e99}, "startupTimeout"),
        ({"defaultVersion": "yes"}, "it must be true or false"),
        ({"marName": ".."}, "marName"),
        ({"marName": ""}, "marName"),
        ({"runtimeType": 3}, "runtimeType"),
        ({"handler": 3}, "handler"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_version_that_cannot_be_meant_is_refused(changes: dict[str, Any], said: str) -> None:
    """With the key, the version and what would be right."""
    with pytest.raises(InvalidSnapshot, match=said):
        read_models(document(**changes))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"models": []}', '{"models": {"m": 1}}', '{"models": {"m": {"1": 2}}}', "[" * 100_000]
)
def test_what_is_no_such_document_is_refused(text: str) -> None:
    """As a whole."""
    with pytest.raises(InvalidSnapshot):
        read_models(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(sorted(VALUES)),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["models", *VALUES]), inner),
        max_leaves=30,
    )
)
def test_whatever_stands_there_is_read_or_refused(value: Any) -> None:
    """Nothing else is raised."""
    for text in (json.dumps(value), json.dumps({"models": {"m": {"1.0": value}}})):
        with contextlib.suppress(InvalidSnapshot):
            read_models(text)


def test_an_archive_that_is_not_in_the_store_is_named_in_torchserves_words() -> None:
    """The first one."""
    versions = [NOOP, replace(NOOP, model="gone", archive="gone.mar")]

    with pytest.raises(
        InvalidSnapshot, match=r"^Model archive file for model :gone, version :1\.0 not found in model store$"
    ):
        check_archives(versions, {"noop.mar"}.__contains__)
    check_archives([NOOP], {"noop.mar"}.__contains__)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("noop.mar", "noop.mar"),
        ("folder/", "folder"),
        ("/models/noop.mar", "noop.mar"),
        ("https://example.org/a/noop.mar?key=a/b", "noop.mar"),
        ("file:///srv/noop.mar", "noop.mar"),
    ],
)
def test_an_archive_is_called_as_it_lies_in_the_store(url: str, name: str) -> None:
    """However it got there: what was fetched has its last part for a name, and its key is nobody's business."""
    assert archive_name(url) == name


@pytest.mark.parametrize(
    "word", ["https://example.org/m.mar", "s3://bucket/m.mar", "/models/team/echo", "noop.mar", "folder"]
)
def test_what_got_no_name_in_the_store_is_restored_from_where_it_is(word: str) -> None:
    """A read-only store gives none, and a further root is not the store."""
    document = write_models([replace(NOOP, archive=word)], "s.cfg", 1)

    [version] = read_models(document)

    assert version.archive == word


def test_every_key_of_torchserves_snapshots_is_written_and_read() -> None:
    """The inventory's lists, and what each key becomes."""
    keys = inventory("snapshot_keys")
    version = replace(NOOP, parallel_level=2)

    written = json.loads(write_models([version], "n", 1))

    assert set(keys["file"]) == written.keys()
    assert set(keys["version"]) == written["models"]["noop"]["1.0"].keys()
    other = {
        "defaultVersion": False,
        "marName": "other.mar",
        "minWorkers": 2,
        "maxWorkers": 3,
        "runtimeType": "python3",
    }
    for key in keys["version"]:
        changed = document(**{"parallelLevel": 2, key: other.get(key, 33)})
        assert read_models(changed) != [replace(version, response_timeout_s=120)], key


@pytest.mark.parametrize(
    ("word", "says_version", "names_it"),
    [
        ("/srv/store/digits/2/any.mar", True, True),
        ("/srv/store/digits/2.mar", True, True),
        ("/srv/store/digits/2", True, True),
        ("s3://bucket/my/digits/2/any.mar", True, True),
        ("digits-2.mar", True, False),
        ("digits-2.mar", False, True),
        ("digits@2.tar.gz", False, True),
        ("/srv/store/digits/3/any.mar", False, False),
        ("2.mar", False, False),
        ("digits.mar", False, False),
        ("", False, False),
    ],
)
def test_what_a_watch_named_by_its_path_comes_back_under_that_name(
    word: str, says_version: bool, names_it: bool
) -> None:
    """Its manifest may say something else."""
    assert lies_as(word, "digits", "2", says_version=says_version) is names_it
