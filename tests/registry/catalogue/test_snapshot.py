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
from marserve.model_options import Said, say
from marserve.registry.catalogue.snapshot import (
    SnapshotVersion,
    archive_name,
    check_archives,
    lies_as,
    read_models,
    write_models,
)
from support.inventory import inventory

OPTIONS = say(
    min_workers=1, max_workers=2, batch_size=4, max_batch_delay_s=0.1, response_timeout_s=21, startup_timeout_s=120
)
NOOP = SnapshotVersion("noop", "1.0", "noop.mar", True, OPTIONS)
ALL = say(parallel_level=2, memory_bytes=1 << 30, load="on_demand", is_pinned=True)
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
        replace(NOOP, version="2.0", options=Said(OPTIONS, ALL), handler="other:handle", runtime="python3"),
        replace(
            NOOP, model="späte Rose", options=Said(OPTIONS, say(min_workers=0, max_workers=0, response_timeout_s=0.5))
        ),
    ]

    assert read_models(write_models(versions, "n", 1)) == versions


# Written by the build before options had one record.
OF_THE_BUILD_BEFORE = """
{"name": "20260102030405678-snapshot.cfg", "modelCount": 2, "created": 1585635869526, "models": {"digits": {
"2.0": {"defaultVersion": true, "marName": "s3://models/digits-2.mar", "minWorkers": 0, "maxWorkers": 3, "batchSize": 8,
"maxBatchDelay": 250, "responseTimeout": 2.5, "startupTimeout": 120, "runtimeType": "python3", "parallelLevel": 2,
"handler": "other.py:handle", "memory": 2147483648, "load": "on_demand", "pinned": true}, "1.0": {"defaultVersion":
false, "marName": "digits.mar", "minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100,
"responseTimeout": 120, "startupTimeout": 60, "runtimeType": "python", "pinned": false}}}}
"""


def test_a_snapshot_of_the_build_before_is_read_and_written_as_it_was() -> None:
    """A server that is upgraded has its models back, and one that goes back reads the new one."""
    second, first = read_models(OF_THE_BUILD_BEFORE)

    workers = say(min_workers=0, max_workers=3, batch_size=8, max_batch_delay_s=0.25, response_timeout_s=2.5)
    rest = say(startup_timeout_s=120, parallel_level=2, memory_bytes=2 << 30, load="on_demand", is_pinned=True)
    assert second.options == Said(workers, rest)
    assert (first.options["is_pinned"], "memory_bytes" in first.options) == (False, False)
    written = write_models([second, first], "20260102030405678-snapshot.cfg", 1585635869526)
    assert json.loads(written) == json.loads(OF_THE_BUILD_BEFORE)


def test_time_outs_and_runtime_have_torchserves_defaults() -> None:
    """KServe's files leave them out."""
    (version,) = read_models(document())

    assert version.runtime == "python"
    assert version.options == Said(OPTIONS, say(response_timeout_s=120, startup_timeout_s=120))


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
        ({"parallelLevel": -1}, "parallelLevel .* is -1; it must be a whole number of 0 or more"),
        ({"memory": "much"}, 'memory .* is "much"; it must be a number of bytes above 0'),
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
    version = replace(NOOP, options=Said(OPTIONS, say(parallel_level=2)))

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
        assert read_models(changed) != [replace(version, options=Said(version.options, say(response_timeout_s=120)))], (
            key
        )


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
