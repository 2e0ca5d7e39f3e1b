"""Claims of `marserve.arrivals.arrivals`: what becomes of archives that appear, change and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import ModelConfig
from marserve.arrivals import arrivals as arrivals_module
from marserve.arrivals.arrivals import MOST_GONE, MOST_TRIES, ArrivalPolicy, Arrivals
from marserve.errors import (
    BadArchive,
    DefaultVersionInUse,
    DownloadFailed,
    Draining,
    LoadFailed,
    RolloutUnderWay,
    VersionInUse,
    VersionNotFound,
)
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.intake.registration import Registered, RegisterParameters
from marserve.store.sources.source import Entry
from marserve.store.watching.sightings import Change, ChangeKind

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """asyncio is what the server runs on."""
    return "asyncio"


class FakeModels:
    """A registry in memory: model to version to source, and the default of each."""

    def __init__(self) -> None:
        self.versions: dict[str, dict[str, str]] = {}
        self.defaults: dict[str, str] = {}
        self.calls: list[str] = []
        self.trouble: dict[str, Exception] = {}
        self.in_use: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.loading = 0
        self.most_loading = 0

    def put(self, model: str, version: str, source: str) -> None:
        """Somebody registers a version."""
        self.versions.setdefault(model, {})[version] = source
        self.defaults.setdefault(model, version)

    def source_of(self, model: str, version: str) -> str | None:
        """As the registry."""
        return self.versions.get(model, {}).get(version)

    def default_of(self, model: str) -> str | None:
        """As the registry."""
        return self.defaults.get(model)

    async def load(self, parameters: RegisterParameters, unpacked: Unpacked) -> Registered:
        """As the registry."""
        return await self._take("load", parameters, unpacked)

    async def swap(self, parameters: RegisterParameters, unpacked: Unpacked) -> None:
        """As the registry."""
        await self._take("swap", parameters, unpacked)

    async def _take(self, call: str, parameters: RegisterParameters, unpacked: Unpacked) -> Registered:
        model, version = unpacked.manifest.model_name, unpacked.manifest.model_version
        assert model is not None
        assert version is not None
        assert parameters.is_arrival
        assert parameters.model_name == model
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        try:
            await self.gate.wait()
            if version in self.trouble:
                raise self.trouble[version]
        finally:
            self.loading -= 1
        self.calls.append(f"{call} {model} {version}")
        self.put(model, version, parameters.url)
        return Registered(model, version, 1, "done")

    def set_default(self, model: str, version: str) -> None:
        """As the registry."""
        self.calls.append(f"default {model} {version}")
        self.defaults[model] = version

    async def unload(self, model: str, version: str) -> None:
        """As the registry."""
        if version not in self.versions.get(model, {}):
            raise VersionNotFound(model, version)
        if self.defaults[model] == version and len(self.versions[model]) > 1:
            raise DefaultVersionInUse(model)
        if version in self.in_use:
            raise VersionInUse(model, version, has_weight=True, labels=[])
        self.calls.append(f"unload {model} {version}")
        del self.versions[model][version]


class Stage:
    """Arrivals over a store in memory: key to manifest, or to the error that taking it in raises."""

    def __init__(self, tmp_path: Path, policy: ArrivalPolicy, **more: Any) -> None:
        self.models = FakeModels()
        self.store: dict[str, tuple[str | None, str | None] | Exception] = {}
        self.taken: list[str] = []
        self._folder = tmp_path / "scratch"
        self._folder.mkdir()
        self._number = 0
        self.arrivals = Arrivals(
            "w", policy, self.models, self._take_in, lambda key: f"store/{key}", first_retry_s=0.001, **more
        )

    def _take_in(self, key: str) -> Unpacked:
        self.taken.append(key)
        content = self.store[key]
        if isinstance(content, Exception):
            raise content
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        return Unpacked(folder, Manifest(model_name=content[0], model_version=content[1]), ModelConfig())

    def folders(self) -> int:
        """How many unpacked archives nobody has let go of or handed over."""
        return len(list(self._folder.iterdir()))

    def put(self, key: str, model: str | None = "m", version: str | None = "1.0", *, was_there: bool = False) -> None:
        """An archive appears, or is another one now."""
        kind: ChangeKind = "replaced" if key in self.store else "added"
        self.store[key] = (model, version)
        self.tell(kind, key, was_there=was_there)

    def tell(self, kind: ChangeKind, key: str, *, was_there: bool = False) -> None:
        """The watch tells a change."""
        self.arrivals.take([Change(kind, Entry(key, 1, f'"{len(self.taken)}"'), was_there)])

    async def rest(self) -> None:
        """Wait until nothing is under way."""
        async with asyncio.timeout(10):
            while not self.arrivals.is_idle:
                await asyncio.sleep(0.001)

    def state(self, key: str) -> tuple[str, str]:
        """State and reason of an archive."""
        record = self.arrivals.records[key]
        return record.state, record.reason


@contextlib.asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[Stage]:
    """Run the arrivals."""
    task = asyncio.create_task(stage.arrivals.run())
    try:
        yield stage
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_retry_whose_turn_is_not_yet_costs_nothing_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another archive of its model loads for long; its own time has come, and passes."""
    rounds = 0
    begin = Arrivals._begin_what_can

    def counted(self: Arrivals, now: float) -> None:
        nonlocal rounds
        rounds += 1
        begin(self, now)

    monkeypatch.setattr(Arrivals, "_begin_what_can", counted)
    async with running(Stage(tmp_path, ArrivalPolicy("load", model="m"))) as stage:
        stage.store["m-1.0.mar"] = DownloadFailed("http://a/m.mar", reason="503")
        stage.models.gate.clear()
        stage.arrivals._first_retry_s = 0.05
        stage.tell("added", "m-1.0.mar")
        while "m-1.0.mar" not in stage.arrivals.records or stage.state("m-1.0.mar")[0] != "retrying":
            await asyncio.sleep(0.001)
        stage.put("m-2.0.mar", None, "2.0")
        while not stage.models.loading:
            await asyncio.sleep(0.001)
        at = stage.arrivals._retry_at["m-1.0.mar"]
        while asyncio.get_running_loop().time() < at + 0.05:
            await asyncio.sleep(0.005)
        assert rounds < 10

        stage.store["m-1.0.mar"] = (None, "1.0")
        stage.models.gate.set()
        await stage.rest()

    assert stage.models.calls == ["load m 2.0", "load m 1.0"]


async def test_ignore_loads_nothing_and_says_what_is_there(tmp_path: Path) -> None:
    """The policy that only looks."""
    async with running(Stage(tmp_path, ArrivalPolicy("ignore"))) as stage:
        stage.put("m.mar")
        await stage.rest()

    assert stage.models.calls == []
    assert stage.taken == []
    assert stage.state("m.mar") == ("ignored", "the policy of this watch is ignore")


async def test_load_leaves_the_default_where_it_is(tmp_path: Path) -> None:
    """A new version is there to be asked for by name."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.put("m-1.0.mar", "m", "1.0")
        await stage.rest()
        stage.put("m-2.0.mar", "m", "2.0")
        await stage.rest()

    assert stage.models.calls == ["load m 1.0", "load m 2.0"]
    assert stage.models.defaults == {"m": "1.0"}
    assert stage.state("m-1.0.mar")[0] == "loaded"


async def test_load_and_default_takes_effect_when_the_version_is_ready(tmp_path: Path) -> None:
    """Until a worker has loaded it, the old default answers."""
    async with running(Stage(tmp_path, ArrivalPolicy("load-and-default"))) as stage:
        stage.put("m-1.0.mar", "m", "1.0")
        await stage.rest()
        stage.models.gate.clear()
        stage.put("m-2.0.mar", "m", "2.0")
        while not stage.models.loading:
            await asyncio.sleep(0.001)
        assert stage.models.defaults == {"m": "1.0"}
        stage.models.gate.set()
        await stage.rest()

    assert stage.models.calls == ["load m 1.0", "load m 2.0", "default m 2.0"]
    assert stage.state("m-2.0.mar") == ("loaded", "the default, in the place of 1.0")


async def test_an_older_version_does_not_become_the_default(tmp_path: Path) -> None:
    """Somebody puts an old archive back beside a newer one."""
    async with running(Stage(tmp_path, ArrivalPolicy("load-and-default"))) as stage:
        stage.put("m-1.10.mar", "m", "1.10")
        await stage.rest()
        stage.put("m-1.9.mar", "m", "1.9")
        await stage.rest()

    assert stage.models.defaults == {"m": "1.10"}
    assert stage.state("m-1.9.mar") == ("loaded", "not the default: 1.10 is newer")


async def test_a_version_that_cannot_be_loaded_leaves_everything_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported once, not tried again, and the default answers on; mended, it is loaded."""
    async with running(Stage(tmp_path, ArrivalPolicy("load-and-default"))) as stage:
        stage.put("m-1.0.mar", "m", "1.0")
        await stage.rest()
        stage.models.trouble["2.0"] = LoadFailed("m", "2.0", reason="ValueError: no weights")
        stage.put("m-2.0.mar", "m", "2.0")
        await stage.rest()

        assert stage.models.defaults == {"m": "1.0"}
        assert stage.models.versions == {"m": {"1.0": "store/m-1.0.mar"}}
        assert stage.state("m-2.0.mar") == (
            "refused",
            "Failed to start workers for model m version: 2.0: ValueError: no weights",
        )
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
            "Watch w: m-2.0.mar is refused until it changes: Failed to start workers for model m version: 2.0: "
            "ValueError: no weights"
        ]
        stage.models.trouble.clear()
        stage.put("m-2.0.mar", "m", "2.0")
        await stage.rest()

    assert stage.models.defaults == {"m": "2.0"}


async def test_a_broken_archive_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not taken in again until it changes."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.store["m.mar"] = BadArchive("m.mar is damaged")
        stage.tell("added", "m.mar")
        await stage.rest()

    assert stage.taken == ["m.mar"]
    assert stage.state("m.mar") == ("refused", "m.mar is damaged")
    assert stage.arrivals.outcomes["refused"] == 1
    assert caplog.text.count("refused until it changes") == 1


async def test_what_time_may_mend_is_tried_again_and_then_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that fails in mid-download is asked again, a bounded number of times."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.store["a.mar"] = DownloadFailed("s3://b/a.mar", "the connection was cut")
        stage.tell("added", "a.mar")
        await stage.rest()
        assert stage.taken == ["a.mar"] * MOST_TRIES
        assert stage.state("a.mar")[0] == "refused"

        stage.store["b.mar"] = DownloadFailed("s3://b/b.mar", "the connection was cut")
        stage.tell("added", "b.mar")
        while stage.taken.count("b.mar") < 2:
            await asyncio.sleep(0.001)
        stage.store["b.mar"] = ("b", "1.0")
        await stage.rest()

    assert stage.state("b.mar")[0] == "loaded"
    assert caplog.text.count("a.mar is not loaded yet, and tried again") == 1
    assert caplog.text.count("a.mar is refused until it changes") == 1


async def test_a_defect_with_one_archive_keeps_no_other_waiting(tmp_path: Path) -> None:
    """An unexpected error refuses the archive like any other error."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.store["a.mar"] = ZeroDivisionError("a defect")
        stage.tell("added", "a.mar")
        stage.put("b.mar", "b")
        await stage.rest()

    assert stage.state("a.mar")[0] == "refused"
    assert stage.state("b.mar")[0] == "loaded"


async def test_a_replaced_archive_of_the_same_version_takes_its_place(tmp_path: Path) -> None:
    """The version is swapped, and the default stays what it was."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.put("m.mar")
        await stage.rest()
        stage.put("m.mar")
        await stage.rest()

    assert stage.models.calls == ["load m 1.0", "swap m 1.0"]
    assert stage.arrivals.outcomes["swapped"] == 1


async def test_a_replaced_archive_of_another_version_is_a_new_version(tmp_path: Path) -> None:
    """One name in the store, whose content moves on."""
    async with running(Stage(tmp_path, ArrivalPolicy("load-and-default"))) as stage:
        stage.put("m.mar", "m", "1.0")
        await stage.rest()
        stage.put("m.mar", "m", "2.0")
        await stage.rest()

    assert stage.models.calls == ["load m 1.0", "load m 2.0", "default m 2.0"]
    assert stage.models.versions["m"].keys() == {"1.0", "2.0"}


async def test_a_version_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    """An archive that claims a version registered from elsewhere is refused, saying from where."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.models.put("m", "1.0", "https://host/m.mar")
        stage.put("m.mar", "m", "1.0")
        await stage.rest()

    assert stage.models.calls == []
    state, reason = stage.state("m.mar")
    assert state == "refused"
    assert "version 1.0 of model m is registered already, from https://host/m.mar" in reason
    assert stage.folders() == 0


async def test_what_was_registered_from_the_same_archive_is_known_and_swapped_when_it_changes(tmp_path: Path) -> None:
    """Models of the start, and of calls, are not loaded twice; their archives are watched all the same."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.models.put("m", "1.0", "store/m.mar")
        stage.put("m.mar", was_there=True)
        await stage.rest()
        assert stage.models.calls == []
        assert stage.state("m.mar") == ("loaded", "it was registered before this watch saw it")
        stage.put("m.mar")
        await stage.rest()

    assert stage.models.calls == ["swap m 1.0"]
    assert stage.folders() == 1  # the registry's


async def test_what_a_registration_fetched_is_left_to_it(tmp_path: Path) -> None:
    """A download that lands in the watched folder belongs to the call that asked for it."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"), is_expected=lambda key: key == "m.mar")) as stage:
        stage.put("m.mar")
        await stage.rest()

    assert stage.models.calls == []
    assert stage.state("m.mar") == ("ignored", "it was fetched for a registration")


async def test_a_removed_archive_leaves_its_version_alone(tmp_path: Path) -> None:
    """Unless the policy says otherwise."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.put("m.mar")
        await stage.rest()
        stage.tell("removed", "m.mar")
        await stage.rest()

    assert stage.models.calls == ["load m 1.0"]
    assert stage.state("m.mar") == ("gone", "the archive has gone; its version goes on")


async def test_a_removed_archive_takes_its_version_with_it_where_asked_for(tmp_path: Path) -> None:
    """But not the default while there are others, what has traffic, nor what somebody else registered."""
    async with running(Stage(tmp_path, ArrivalPolicy("load", on_removed="unload"))) as stage:
        for version in ("1.0", "2.0", "3.0"):
            stage.put(f"m-{version}.mar", "m", version)
            await stage.rest()
        stage.models.put("n", "1.0", "store/n.mar")
        stage.put("n.mar", "n", "1.0", was_there=True)
        stage.models.in_use.add("3.0")
        await stage.rest()
        for key in ("m-1.0.mar", "m-2.0.mar", "m-3.0.mar", "n.mar"):
            stage.tell("removed", key)
        await stage.rest()

    assert [call for call in stage.models.calls if call.startswith("unload")] == ["unload m 2.0"]
    assert stage.state("m-1.0.mar") == ("gone", "the archive has gone; its version is in use and goes on")
    assert stage.state("m-2.0.mar") == ("gone", "the archive has gone, and its version with it")
    assert stage.state("n.mar") == ("gone", "the archive has gone; its version goes on")


async def test_a_version_that_others_unloaded_is_not_shown_as_loaded(tmp_path: Path) -> None:
    """A call did, or a desired state; loaded again from there it is shown as that."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.put("m-1.0.mar", "m", "1.0")
        stage.put("m-2.0.mar", "m", "2.0")
        await stage.rest()
        del stage.models.versions["m"]["2.0"]
        described = stage.arrivals.describe()
        stage.tell("removed", "m-2.0.mar")
        await stage.rest()

    shown = {each["key"]: each["state"] for each in described["archiveList"]}
    assert shown == {"m-1.0.mar": "loaded", "m-2.0.mar": "unloaded"}
    assert described["states"] == {"loaded": 1, "unloaded": 1}
    assert list(stage.arrivals.records) == ["m-1.0.mar"]


async def test_archives_that_have_gone_are_not_remembered_for_ever(tmp_path: Path) -> None:
    """The last of them are: a thousand builds a year leave no thousand records."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        for number in range(MOST_GONE + 20):
            stage.put(f"m-{number}.0.mar", "m", f"{number}.0")
            await stage.rest()
            stage.tell("removed", f"m-{number}.0.mar")
            await stage.rest()

    assert list(stage.arrivals.records) == [f"m-{number}.0.mar" for number in range(20, MOST_GONE + 20)]


async def test_a_version_that_came_back_by_its_digest_is_still_its_archive_s(tmp_path: Path) -> None:
    """A snapshot restored exactly what served; the watch takes it for what it loaded before."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.models.put("m", "1.0", f"store/m.mar#sha256={'a' * 64}")
        stage.put("m.mar", was_there=True)
        await stage.rest()
        assert stage.state("m.mar") == ("loaded", "it was registered before this watch saw it")
        stage.put("m.mar")
        await stage.rest()

    assert stage.models.calls == ["swap m 1.0"]


async def test_a_renamed_archive_is_the_same_version(tmp_path: Path) -> None:
    """The old name goes, the new one brings what is loaded already: at worst it is loaded once more, never refused."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.put("m.mar")
        await stage.rest()
        stage.tell("removed", "m.mar")
        await stage.rest()
        stage.put("renamed.mar")
        await stage.rest()

    assert stage.state("renamed.mar")[0] == "loaded"
    assert stage.models.versions == {"m": {"1.0": "store/renamed.mar"}}


async def test_only_so_many_versions_stay_loaded(tmp_path: Path) -> None:
    """Of those that make themselves the default: it and the one before; what is in use stays beyond the number."""
    async with running(Stage(tmp_path, ArrivalPolicy("load-and-default"))) as stage:
        for number in range(1, 5):
            stage.put(f"m-{number}.0.mar", "m", f"{number}.0")
            await stage.rest()
            if number == 2:
                stage.models.in_use.add("2.0")

    assert stage.models.versions["m"].keys() == {"2.0", "3.0", "4.0"}
    assert stage.models.defaults == {"m": "4.0"}
    assert stage.state("m-1.0.mar") == ("unloaded", "2 newer versions are loaded")
    assert stage.state("m-2.0.mar")[0] == "loaded"


async def test_the_version_to_go_back_to_is_the_one_that_stays(tmp_path: Path) -> None:
    """Also when the older ones were there at the start, or come after newer ones."""
    async with running(Stage(tmp_path, ArrivalPolicy("load-and-default"))) as stage:
        for version in ("1.0", "2.0"):
            stage.store[f"m-{version}.mar"] = ("m", version)
        stage.arrivals.take(
            [Change("added", Entry(f"m-{version}.mar", 1, '"1"'), was_there=True) for version in ("1.0", "2.0")]
        )
        await stage.rest()
        assert stage.models.calls == ["load m 2.0", "load m 1.0"]
        stage.put("m-3.0.mar", "m", "3.0")
        await stage.rest()
        assert stage.models.versions["m"].keys() == {"2.0", "3.0"}
        stage.put("m-1.5.mar", "m", "1.5")
        await stage.rest()

    assert stage.models.versions["m"].keys() == {"2.0", "3.0"}
    assert stage.models.defaults == {"m": "3.0"}
    assert stage.state("m-1.5.mar") == ("left out", "the newest 2 versions are loaded")


async def test_at_the_start_the_newest_versions_are_loaded_the_newest_first(tmp_path: Path) -> None:
    """Twenty versions in the store: two are loaded, the newest is the default, the others are not even unpacked."""
    async with running(Stage(tmp_path, ArrivalPolicy("load-and-default"))) as stage:
        changes = []
        for number in range(1, 21):
            key = f"m/{number}/m.mar"
            stage.store[key] = ("other", "0.1")
            changes.append(Change("added", Entry(key, 1, '"1"', float(100 - number)), was_there=True))
        stage.arrivals.take(changes)
        await stage.rest()

    assert stage.models.calls == ["load m 20", "load m 19"]
    assert stage.models.defaults == {"m": "20"}
    assert stage.taken == ["m/20/m.mar", "m/19/m.mar"]
    assert stage.state("m/1/m.mar") == ("left out", "the newest 2 versions are loaded")


async def test_versions_of_one_model_come_one_after_the_other_and_others_beside(tmp_path: Path) -> None:
    """Two at a time, never two of one model; a slow one keeps the other place free for others."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.models.gate.clear()
        for key in ("a/1.mar", "a/2.mar", "b/1.mar", "c/1.mar"):
            stage.put(key)
        while stage.models.loading < 2:
            await asyncio.sleep(0.001)
        assert sorted(stage.taken) == ["a/1.mar", "b/1.mar"]
        stage.models.gate.set()
        await stage.rest()

    assert stage.models.most_loading == 2
    assert stage.models.calls.index("load a 1") < stage.models.calls.index("load a 2")


async def test_of_one_archive_only_the_newest_change_counts(tmp_path: Path) -> None:
    """What is replaced ten times while another one loads is taken in once."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.models.gate.clear()
        stage.put("m/1.mar")
        while not stage.models.loading:
            await asyncio.sleep(0.001)
        for _ in range(10):
            stage.put("m/2.mar")
        stage.models.gate.set()
        await stage.rest()

    assert stage.taken == ["m/1.mar", "m/2.mar"]


async def test_a_change_while_it_loads_is_carried_out_after_it(tmp_path: Path) -> None:
    """The archive that was replaced in mid-load ends up as what it is now."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.models.gate.clear()
        stage.put("m.mar")
        while not stage.models.loading:
            await asyncio.sleep(0.001)
        stage.put("m.mar")
        stage.models.gate.set()
        await stage.rest()

    assert stage.models.calls == ["load m 1.0", "swap m 1.0"]


class FakeCanaries:
    """Roll-outs in memory."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.is_under_way = False
        self.taken_back: set[str] = set()

    def begin(self, model: str, version: str) -> str:
        """As roll-outs."""
        if self.is_under_way:
            raise RolloutUnderWay("Model m has a roll-out already.")
        self.begun.append((model, version))
        return "its roll-out is begun"

    def was_taken_back(self, model: str, version: str) -> bool:
        """As roll-outs."""
        return version in self.taken_back


async def test_a_canary_is_begun_for_a_newer_version_only(tmp_path: Path) -> None:
    """The first version has nobody to be compared with; an older one is not rolled out."""
    canaries = FakeCanaries()
    async with running(Stage(tmp_path, ArrivalPolicy("canary", keep=0), canaries=canaries)) as stage:
        for version in ("1.0", "2.0", "0.5"):
            stage.put(f"m-{version}.mar", "m", version)
            await stage.rest()

    assert canaries.begun == [("m", "2.0")]
    assert stage.models.defaults == {"m": "1.0"}
    assert stage.state("m-2.0.mar") == ("loaded", "its roll-out is begun")
    assert stage.state("m-0.5.mar") == ("loaded", "no roll-out: 1.0 is newer")


async def test_of_canaries_that_wait_for_a_roll_out_only_the_newest_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three uploads during one roll-out are one roll-out after it."""
    monkeypatch.setattr(arrivals_module, "CANARY_LOOK_S", 0.01)
    canaries = FakeCanaries()
    async with running(Stage(tmp_path, ArrivalPolicy("canary", keep=0), canaries=canaries)) as stage:
        stage.put("m-1.0.mar", "m", "1.0")
        await stage.rest()
        canaries.is_under_way = True
        for version in ("2.0", "3.0", "4.0"):
            stage.put(f"m-{version}.mar", "m", version)
            await stage.rest()
        assert stage.state("m-4.0.mar")[1] == "its roll-out waits: Model m has a roll-out already."
        canaries.is_under_way = False
        async with asyncio.timeout(10):
            while not canaries.begun:
                await asyncio.sleep(0.005)

    assert canaries.begun == [("m", "4.0")]


async def test_a_version_whose_roll_out_was_taken_back_is_not_loaded_at_the_next_start(tmp_path: Path) -> None:
    """Though its archive still lies there; put again, it is tried again."""
    canaries = FakeCanaries()
    canaries.taken_back.add("2.0")
    async with running(Stage(tmp_path, ArrivalPolicy("canary"), canaries=canaries)) as stage:
        stage.put("m-2.0.mar", "m", "2.0", was_there=True)
        stage.put("m-1.0.mar", "m", "1.0", was_there=True)
        await stage.rest()
        assert stage.models.versions == {"m": {"1.0": "store/m-1.0.mar"}}
        assert stage.state("m-2.0.mar") == ("left out", "its roll-out was taken back, before this start")
        stage.put("m-2.0.mar", "m", "2.0")
        await stage.rest()

    assert canaries.begun == [("m", "2.0")]


async def test_all_archives_of_a_watch_may_be_versions_of_one_model(tmp_path: Path) -> None:
    """As a desired state says it of a prefix; the manifest still says the version."""
    async with running(Stage(tmp_path, ArrivalPolicy("load", model="digits"))) as stage:
        stage.put("x-2.0.mar", "x", "2.0")
        stage.put("y.mar", "y", None)
        await stage.rest()

    assert stage.models.versions["digits"].keys() == {"2.0", "1.0"}


async def test_a_server_that_stops_refuses_nothing(tmp_path: Path) -> None:
    """What could not be begun any more is no error."""
    async with running(Stage(tmp_path, ArrivalPolicy("load"))) as stage:
        stage.models.trouble["1.0"] = Draining()
        stage.put("m.mar")
        await stage.rest()

    assert stage.state("m.mar") == ("waiting", "the server stops")
    assert stage.arrivals.outcomes["refused"] == 0


async def test_what_is_described_is_bounded_and_whole(tmp_path: Path) -> None:
    """Counts of all, the archives themselves up to a number."""
    async with running(Stage(tmp_path, ArrivalPolicy("ignore"))) as stage:
        for number in range(1100):
            stage.put(f"{number}.mar", was_there=True)
        await stage.rest()
        described = stage.arrivals.describe()

    assert described["states"] == {"ignored": 1100}
    assert len(described["archiveList"]) == described["archivesShown"] == 1000


async def test_nothing_that_was_taken_in_is_left_when_it_is_not_handed_over(tmp_path: Path) -> None:
    """Folders of archives that turned out to be somebody else's are deleted."""
    wanted: Callable[[str], bool] = lambda key: False  # noqa: E731
    async with running(Stage(tmp_path, ArrivalPolicy("load"), is_expected=wanted)) as stage:
        stage.models.put("m", "1.0", "store/a.mar")
        stage.put("a.mar", was_there=True)
        stage.put("b.mar", was_there=True)
        await stage.rest()

    assert stage.folders() == 0


async def test_what_is_taken_in_when_the_watch_has_ended_is_deleted(tmp_path: Path) -> None:
    """An archive that was being unpacked on a thread leaves nothing."""
    stage = Stage(tmp_path, ArrivalPolicy("load"))
    begun, go_on = threading.Event(), threading.Event()
    take_in = stage.arrivals._take_in

    def slowly(key: str) -> Unpacked:
        begun.set()
        go_on.wait(10)
        return take_in(key)

    stage.arrivals._take_in = slowly
    async with running(stage):
        stage.put("m.mar")
        await asyncio.to_thread(begun.wait, 10)
    go_on.set()

    async with asyncio.timeout(10):
        while not stage.taken or stage.folders():
            await asyncio.sleep(0.005)
    assert stage.models.calls == []
