"""Tests for the choice of the version that answers."""

from __future__ import annotations

import pytest

from marserve.errors import VersionNotFound
from marserve.registry.traffic import choose_version


def test_a_request_that_names_no_version_gets_the_default_one() -> None:
    """The default is used whatever its place among the versions."""
    versions = {"1.0": "old", "2.0": "new"}

    assert choose_version("m", versions, "2.0", None) == "new"


def test_a_request_gets_the_version_it_names() -> None:
    """A name wins over the default."""
    versions = {"1.0": "old", "2.0": "new"}

    assert choose_version("m", versions, "2.0", "1.0") == "old"


@pytest.mark.parametrize("named", ["3.0", "", "1"])
def test_a_version_that_is_not_there_is_never_replaced_by_another(named: str) -> None:
    """Even an empty name is a name."""
    with pytest.raises(VersionNotFound) as raised:
        choose_version("m", {"1.0": "old"}, "1.0", named)

    assert raised.value.message == f"Model version: {named} does not exist for model: m"
