"""Claims of `marserve.arrivals.arrival_names`: which model and version an archive is."""

from __future__ import annotations

import random

import pytest

from marserve.arrivals.arrival_names import (
    PlaceName,
    choose_name,
    is_newer,
    name_from_place,
    oldest_first,
    version_order,
)


@pytest.mark.parametrize(
    ("key", "model", "version", "is_layout"),
    [
        ("digits.mar", "digits", None, False),
        ("my-model.tar.gz", "my_model", None, False),
        ("digits/", "digits", None, False),
        ("digits-1.2.mar", "digits", "1.2", False),
        ("digits-1.2rc1.mar", "digits", "1.2rc1", False),
        ("digits-v3.mar", "digits", "v3", False),
        ("digits_v3.1.mar", "digits", "v3.1", False),
        ("digits@abc123.mar", "digits", "abc123", False),
        ("resnet-18.mar", "resnet_18", None, False),
        ("bert-base-uncased-2.0.1.MAR", "bert_base_uncased", "2.0.1", False),
        ("team/digits-1.2.mar", "digits", "1.2", False),
        ("digits/1.2/model.mar", "digits", "1.2", True),
        ("digits/1/model.mar", "digits", "1", True),
        ("team/digits/2024-11-02/m.mar", "digits", "2024-11-02", True),
        ("digits/7.mar", "digits", "7", True),
        ("digits/1.2/", "digits", "1.2", True),
        ("digits/latest/m.mar", "m", None, False),
        ("", None, None, False),
    ],
)
def test_places_name_what_lies_there(key: str, model: str | None, version: str | None, is_layout: bool) -> None:
    """Files by their names, folders of versions by theirs."""
    assert name_from_place(key) == PlaceName(model, version, is_layout)


@pytest.mark.parametrize(
    ("key", "manifest", "rule", "wanted"),
    [
        ("digits-1.2.mar", ("numbers", "3.0"), "auto", ("numbers", "3.0")),
        ("digits-1.2.mar", ("digits", None), "auto", ("digits", "1.2")),
        ("digits-1.2.mar", (None, None), "auto", ("digits", "1.2")),
        ("digits-1.2.mar", (None, "3.0"), "auto", ("digits", "3.0")),
        ("yolo-v5.mar", ("yolo-v5", None), "auto", ("yolo-v5", "1.0")),
        ("digits-1.2.mar", ("numbers", "3.0"), "path", ("digits", "1.2")),
        ("digits.mar", (None, None), "auto", ("digits", "1.0")),
        ("digits.mar", (None, None), "path", ("digits", "1.0")),
        ("digits/2/m.mar", ("numbers", "3.0"), "auto", ("digits", "2")),
        ("digits/2/m.mar", ("numbers", "3.0"), "manifest", ("numbers", "3.0")),
        ("digits/2/m.mar", ("numbers", None), "manifest", ("numbers", "2")),
        ("digits/2/m.mar", (None, None), "manifest", ("digits", "2")),
        ("digits/2/", (None, None), "auto", ("digits", "2")),
    ],
)
def test_the_manifest_goes_first_but_for_folders_of_versions(
    key: str, manifest: tuple[str | None, str | None], rule: str, wanted: tuple[str, str]
) -> None:
    """What one leaves out the other fills in; the rule of the watch may say otherwise."""
    assert choose_name(key, *manifest, rule) == wanted  # type: ignore[arg-type]


def test_versions_are_in_the_order_that_people_mean() -> None:
    """Numbers count as numbers, and a version's preliminaries are before it."""
    ordered = ["1.0rc1", "1.0", "1.0.1", "1.2", "1.9", "1.10", "2.0a1", "2.0b2", "v2", "3", "2024-11-02", "2024-12-01"]
    mixed = ordered[:]
    random.Random(1).shuffle(mixed)

    assert sorted(mixed, key=version_order) == ordered


@pytest.mark.parametrize(
    ("version", "than", "newer"),
    [("1.10", "1.9", True), ("1.9", "1.10", False), ("1.0", "1.0", True), ("abc", "2.0", True), ("2.0", "abc", True)],
)
def test_only_a_lower_number_is_not_newer(version: str, than: str, newer: bool) -> None:
    """An old version that is put back does not take the default's place; names without order go by their coming."""
    assert is_newer(version, than) is newer


def test_versions_without_numbers_are_in_the_order_of_their_coming() -> None:
    """One such among them is enough."""
    assert oldest_first(["1.10", "1.9", "1.2"]) == ["1.2", "1.9", "1.10"]
    assert oldest_first(["beta", "1.9", "1.2"]) == ["beta", "1.9", "1.2"]
