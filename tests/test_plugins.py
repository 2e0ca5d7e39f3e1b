"""What installed packages add is found, checked and named; what cannot be keeps the server from starting."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

import pytest

from marserve import plugins
from marserve.errors import BadSettings
from marserve.plugins import find_collectors, find_endpoints, find_snapshot_store
from support.plugin_packages import ENDPOINT, STORE, Installation


@pytest.fixture
def installation(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Installation:
    """A folder that packages are installed into, on `sys.path`."""
    made = Installation(tmp_path)  # type: ignore[arg-type]
    monkeypatch.syspath_prepend(str(made.folder))
    return made


def test_nothing_installed_is_nothing_found(installation: Installation) -> None:
    """As for nearly everybody."""
    assert find_endpoints() == []
    assert find_snapshot_store() is None


def test_an_installed_endpoint_is_found_and_made(installation: Installation) -> None:
    """With what brought it."""
    installation.install("acme-reports", ENDPOINT, {"marserve.endpoints": {"reports": "{module}:Reports"}})

    (found,) = find_endpoints()

    assert (found.endpoint.pattern, found.endpoint.listener, found.endpoint.access) == (
        "reports",
        "management",
        "management",
    )
    assert found.origin.startswith("the plug-in reports of acme-reports (")


def test_distributions_are_looked_through_once_until_one_is_installed(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start asks for several groups; a package that is installed after that is found all the same."""
    looks = []
    monkeypatch.setattr(plugins, "entry_points", lambda: looks.append("look") or entry_points())
    find_endpoints()
    find_snapshot_store()
    assert len(looks) == 1

    os.utime(installation.folder, ns=(0, 0))  # the clock of a file system may stand still for milliseconds
    installation.install("acme-reports", ENDPOINT, {"marserve.endpoints": {"reports": "{module}:Reports"}})

    assert len(find_endpoints()) == 1
    assert len(looks) == 2


def test_two_endpoints_for_one_pattern_stop_the_start(installation: Installation) -> None:
    """Both are named; on different listeners they do no harm to each other."""
    installation.install("acme-one", ENDPOINT, {"marserve.endpoints": {"one": "{module}:Reports"}})
    installation.install("acme-two", ENDPOINT, {"marserve.endpoints": {"two": "{module}:Reports"}})

    with pytest.raises(BadSettings, match=r"two of acme-two .* and .* one of acme-one .* both answer /reports"):
        find_endpoints()


def test_one_pattern_may_stand_on_both_listeners(installation: Installation) -> None:
    """They are different addresses."""
    installation.install("acme-one", ENDPOINT, {"marserve.endpoints": {"one": "{module}:Reports"}})
    other = ENDPOINT.replace('listener = "management"', 'listener = "inference"')
    installation.install("acme-two", other, {"marserve.endpoints": {"two": "{module}:Reports"}})

    assert [found.endpoint.listener for found in find_endpoints()] == ["management", "inference"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('pattern = "reports"', 'pattern = "a/b"', "its pattern is 'a/b'"),
        ('pattern = "reports"', "pattern = None", "its pattern is None"),
        ('listener = "management"', 'listener = "metrics"', "its listener is 'metrics'"),
        ('access = "management"', 'access = "everybody"', "its access is 'everybody'"),
        ("def answer", "def reply", "it has no method answer"),
        ("class Reports", "import nowhere_at_all\nclass Reports", r"cannot be loaded \(ModuleNotFoundError"),
        ("class Reports", "class Other", r"cannot be loaded \(AttributeError"),
        ('pattern = "reports"', "def __init__(self): 1 / 0", r"cannot be loaded \(ZeroDivisionError"),
    ],
)
def test_an_endpoint_that_is_none_stops_the_start(
    installation: Installation, before: str, after: str, said: str
) -> None:
    """With its name and what is wrong."""
    source = ENDPOINT.replace(before, after)
    installation.install("acme-reports", source, {"marserve.endpoints": {"reports": "{module}:Reports"}})

    with pytest.raises(BadSettings, match=f"^the plug-in reports of acme-reports .*{said}"):
        find_endpoints()


def test_an_installed_place_for_snapshots_is_found(installation: Installation) -> None:
    """And two are one too many."""
    installation.install("acme-store", STORE, {"marserve.snapshots": {"store": "{module}:Store"}})

    store = find_snapshot_store()
    installation.install("acme-more", STORE, {"marserve.snapshots": {"more": "{module}:Store"}})

    assert store is not None
    assert store.where == "the planted store"
    with pytest.raises(BadSettings, match="all want to keep the snapshots"):
        find_snapshot_store()


def test_a_place_for_snapshots_that_is_none_stops_the_start(installation: Installation) -> None:
    """It must say where it is, and have both methods."""
    source = STORE.replace("def newest", "def latest")
    installation.install("acme-store", source, {"marserve.snapshots": {"store": "{module}:Store"}})

    with pytest.raises(BadSettings, match="is no place for snapshots"):
        find_snapshot_store()


COLLECTOR = """
class Depths:
    def collect(self):
        return []
"""


def test_an_installed_collector_is_found_and_one_that_is_none_stops_the_start(installation: Installation) -> None:
    """It needs one method."""
    installation.install("acme-depths", COLLECTOR, {"marserve.collectors": {"depths": "{module}:Depths"}})
    (found,) = find_collectors()
    installation.install("acme-none", "class None_: pass", {"marserve.collectors": {"none": "{module}:None_"}})

    assert (found.name, list(found.collector.collect())) == ("depths", [])
    assert found.origin.startswith("the plug-in depths of acme-depths (")
    with pytest.raises(BadSettings, match=r"the plug-in none of acme-none .* collects no metrics"):
        find_collectors()
