"""Changes as transactions: all models at once or none, one at a time, remembered, undone, watched."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from marserve.api.errors import error_status
from marserve.api.rest.models.desired_state import plan_document
from marserve.desired_state.document import DesiredVersion, NewVersions, read
from marserve.desired_state.document_place import DocumentUnreadable, FilePlace, Found
from marserve.desired_state.history import History
from marserve.desired_state.policies import Changes
from marserve.desired_state.reconciler import DesiredStateIsAnother, Reconciler
from marserve.errors import (
    ApplyFailed,
    ApplyUnderWay,
    BadDesiredState,
    DesiredStateMoved,
    NothingToUndo,
    VersionNotFound,
)
from marserve.messages import Answer, Part, Request
from marserve.registry.intake.registration import RegisterParameters
from support.checkpoints import safetensors_bytes
from support.fake_pool import Behaviour, FakePool
from support.management_house import House
from support.receivers import Told
from support.registrations import registration

pytestmark = pytest.mark.anyio


class Workshop(House):
    """A registry over pools without processes, a document in a file, and the reconciler between them."""

    def __init__(self, root: Path, undo_window_s: float = 0.0) -> None:
        super().__init__(root, unregister_timeout_s=0.2, undo_window_s=undo_window_s)
        self.undo_window_s = undo_window_s
        self.state = root / "state"
        self.path = root / "models.yaml"
        self.place = FilePlace(self.path, "models.yaml")
        self.times = iter(range(1000, 100_000))
        self.reconciler = self.another()
        for name in ("m", "n", "o"):
            for version in ("1.0", "2.0", "3.0"):
                self.put(name, version)

    def another(self) -> Reconciler:
        """A reconciler over what the folder holds, as after a restart."""
        return Reconciler(
            self.registry,
            History(self.state),
            self.place,
            interval_s=0.001,
            undo_window_s=self.undo_window_s,
            weigh=lambda version: len(version.url),
            now=lambda: float(next(self.times)),
        )

    def write(self, **models: Any) -> bytes:
        """Write the document; versions are given by their names, `m=["1.0"]` or `m={"1.0": {…}}`."""
        data = document(**models)
        self.path.write_bytes(data)
        return data

    async def start(self, **models: Any) -> None:
        """Start with a document."""
        self.write(**models)
        assert (await self.reconciler.start(self.place.read()))[1] == []

    def versions(self) -> dict[str, list[str]]:
        """What is registered, the default first."""
        return {
            name: sorted(model.versions, key=lambda version: (version != model.default, version))
            for name, model in sorted(self.registry.actual().items())
        }

    def ask(self, model: str, version: str | None = None) -> bytes:
        """One answer."""
        told = Told()
        self.registry.data_plane.submit(model, version, Request("id", [Part("body", b"x")]), told)
        assert isinstance(told.end, Answer)
        return bytes(told.end.body)


class Keeper(Workshop):
    """One that keeps what it replaces for a minute, on a clock of the test's."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, undo_window_s=60.0)
        self.now = 0.0
        self.registry.keeping._now = lambda: self.now

    def keeps(self) -> list[tuple[str, str]]:
        """What is kept now."""
        return [(each["model"], each["version"]) for each in self.reconciler.describe().get("keeps", [])]

    async def until_ended(self, *pools: FakePool) -> None:
        """Wait until these have ended."""
        async with asyncio.timeout(5):
            while not all(pool.is_stopped for pool in pools):
                await asyncio.sleep(0.001)


Shop = TypeVar("Shop", bound=Workshop)


def document(**models: Any) -> bytes:
    """A document; the first version of each model is its default."""
    told: dict[str, Any] = {}
    for name, versions in models.items():
        keys = versions if isinstance(versions, dict) else dict.fromkeys(versions)
        told[name] = {
            "versions": {
                version: {"url": f"{name}-{version}.mar", "workers": 1, **(more or {})}
                for version, more in keys.items()
            },
            "default": next(iter(keys)),
        }
    return json.dumps({"models": told}).encode()


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    """Everything; after the test nothing of it is left."""
    async with opened(Workshop(tmp_path)) as shop:
        yield shop


@pytest.fixture
async def keeper(tmp_path: Path) -> AsyncIterator[Keeper]:
    """The same, where what is replaced stays loaded."""
    async with opened(Keeper(tmp_path)) as keeper:
        yield keeper


@asynccontextmanager
async def opened(shop: Shop) -> AsyncIterator[Shop]:
    """A workshop; after the block nothing of it is left."""
    yield shop
    for pool in shop.pools.made:
        pool.behaviour.never_stops = False
        if pool.behaviour.load == "wait":
            pool.finish_load()
    await shop.registry.stop()
    await shop.reconciler.stop()
    assert shop.folders() == []
    assert shop.metrics.shown == []
    assert all(pool.is_stopped for pool in shop.pools.made)


async def test_the_start_loads_what_the_document_says(shop: Workshop) -> None:
    """With what it declares, whatever the archive and the server say otherwise."""
    await shop.start(m={"2.0": {"workers": 3, "batchSize": 7, "responseTimeout": 9}, "1.0": None}, n=["1.0"])

    assert shop.versions() == {"m": ["2.0", "1.0"], "n": ["1.0"]}
    described = shop.registry.describe("m")
    assert (described["minWorkers"], described["batchSize"], described["responseTimeout"]) == (3, 7, 9)
    assert described["declared"]["url"] == "m-2.0.mar"
    assert (await shop.reconciler.plan()).is_empty


async def test_all_models_change_at_one_moment_when_all_are_ready(shop: Workshop) -> None:
    """While the last of them loads, everything answers as before."""
    await shop.start(m=["1.0"], n=["1.0"])
    shop.pools.behaviours["n"] = Behaviour(load="wait")

    applying = asyncio.create_task(shop.reconciler.apply(document(m=["2.0"], n=["2.0"], o=["1.0"])))
    while not any(pool.options.model == "n" and pool.options.version == "2.0" for pool in shop.pools.made):
        await asyncio.sleep(0.001)

    assert shop.versions() == {"m": ["1.0"], "n": ["1.0"]}
    assert shop.ask("m") == b"m 1.0"
    with pytest.raises(VersionNotFound):
        shop.ask("m", "2.0")

    shop.pools.of("n", "2.0").finish_load()
    outcome = await applying

    assert shop.versions() == {"m": ["2.0"], "n": ["2.0"], "o": ["1.0"]}
    assert shop.ask("m") == b"m 2.0"
    assert outcome.entry is not None
    assert read(shop.path.read_bytes()) == outcome.entry.state()


@pytest.mark.parametrize("how", ["load", "missing", "broken", "version", "place"])
async def test_a_failure_leaves_everything_as_it_was(shop: Workshop, how: str) -> None:
    """What was begun is undone, the document and the history are untouched, and the error names the version."""
    await shop.start(m=["1.0"], n={"1.0": {"workers": 2}})
    before = shop.path.read_bytes(), shop.reconciler.history()
    wanted = json.loads(document(m=["2.0"], n={"1.0": {"workers": 4}}, o=["1.0"]))
    expected: type[Exception] = ApplyFailed
    if how == "load":
        shop.pools.behaviours["o"] = Behaviour(load="fail")
    elif how == "missing":
        wanted["models"]["o"]["versions"]["1.0"]["url"] = "nowhere.mar"
    elif how == "broken":
        (shop.store / "o-1.0.mar").write_bytes(b"PK\x03\x04 cut off")
    elif how == "version":
        wanted["models"]["o"]["versions"]["1.0"]["url"] = "o-2.0.mar"
    else:
        write = shop.place.write
        shop.place.write = lambda data, tag: write(data, "another")  # type: ignore[method-assign]
        expected = DesiredStateMoved

    with pytest.raises(expected) as raised:
        await shop.reconciler.apply(json.dumps(wanted).encode())

    if expected is ApplyFailed:
        assert "o 1.0" in str(raised.value)
    assert shop.versions() == {"m": ["1.0"], "n": ["1.0"]}
    assert shop.registry.describe("n")["minWorkers"] == 2
    assert (shop.path.read_bytes(), shop.reconciler.history()) == before
    assert len(shop.folders()) == 2
    assert len(shop.metrics.shown) == 2
    assert shop.reconciler.failure is None
    assert len(list(shop.state.glob("*.json"))) == 1


async def test_one_change_at_a_time(shop: Workshop) -> None:
    """A second one is refused, at once."""
    await shop.start(m=["1.0"])
    shop.pools.behaviours["m"] = Behaviour(load="wait")
    applying = asyncio.create_task(shop.reconciler.apply(document(m=["2.0"])))
    while len(shop.pools.made) < 2:
        await asyncio.sleep(0.001)

    with pytest.raises(ApplyUnderWay):
        await shop.reconciler.apply(document(m=["3.0"]))
    while shop.reconciler.describe()["underWay"]["phase"] != "wait-ready":
        await asyncio.sleep(0.001)

    shop.pools.of("m", "2.0").finish_load()
    await applying
    assert shop.versions() == {"m": ["2.0"]}


async def test_a_change_goes_on_when_its_caller_has_gone(shop: Workshop) -> None:
    """A client that hangs up leaves nothing half done."""
    await shop.start(m=["1.0"])
    shop.pools.behaviours["m"] = Behaviour(load="wait")
    applying = asyncio.create_task(shop.reconciler.apply(document(m=["2.0"])))
    while len(shop.pools.made) < 2:
        await asyncio.sleep(0.001)

    applying.cancel()
    shop.pools.of("m", "2.0").finish_load()
    await shop.reconciler.stop()

    assert shop.versions() == {"m": ["2.0"]}


async def test_undo_goes_back_and_back_again(shop: Workshop) -> None:
    """Each time to what was in force before; the document says it too. At the first there is nothing left to undo."""
    await shop.start(m=["1.0"])
    await shop.reconciler.apply(document(m=["2.0"]))
    await shop.reconciler.apply(document(m=["3.0"], n=["1.0"]))

    await shop.reconciler.undo()
    assert shop.versions() == {"m": ["2.0"]}
    await shop.reconciler.undo()
    assert shop.versions() == {"m": ["1.0"]}
    assert read(shop.path.read_bytes()) == read(document(m=["1.0"]))

    with pytest.raises(NothingToUndo):
        await shop.reconciler.undo()
    assert [entry["by"] for entry in shop.reconciler.history()] == ["undo", "undo", "apply", "apply", "start"]
    said = [entry["what"] for entry in shop.reconciler.history()[:2]]
    assert [words.partition(": ")[0] for words in said] == ["back to entry 1", "back to entry 2"]
    assert all(words.count("back to") == 1 for words in said)


async def test_undo_says_what_is_not_there_any_more(shop: Workshop) -> None:
    """An archive that was deleted meanwhile; what serves goes on."""
    await shop.start(m=["1.0"])
    await shop.reconciler.apply(document(m=["2.0"]))
    (shop.store / "m-1.0.mar").unlink()

    with pytest.raises(ApplyFailed, match=r"m 1\.0: Model not found at: m-1\.0\.mar"):
        await shop.reconciler.undo()

    assert shop.versions() == {"m": ["2.0"]}


async def test_a_restart_has_what_was_in_force(shop: Workshop) -> None:
    """The same document: no entry more. Undo knows what was before the restart."""
    await shop.start(m=["1.0"])
    await shop.reconciler.apply(document(m=["2.0"]))
    await shop.registry.unregister("m", "2.0")

    shop.reconciler = shop.another()
    assert await shop.reconciler.start(shop.place.read()) == (["m"], [])

    assert shop.versions() == {"m": ["2.0"]}
    assert len(shop.reconciler.history()) == 2
    await shop.reconciler.undo()
    assert shop.versions() == {"m": ["1.0"]}


@pytest.mark.parametrize("how", ["unreadable", "nonsense", "does not load"])
async def test_a_start_with_a_document_that_cannot_be_has_what_was_in_force_before(shop: Workshop, how: str) -> None:
    """And says so; the document is tried again when it changes."""
    await shop.start(m=["1.0"], n=["1.0"])
    for name in ("m", "n"):
        await shop.registry.unregister(name)
    found: Found | None = None
    if how == "nonsense":
        found = Found(b"modles: {}", "t")
    elif how == "does not load":
        shop.pools.behaviours["o"] = Behaviour(load="fail")
        shop.write(m=["2.0"], o=["1.0"])
        found = shop.place.read()

    shop.reconciler = shop.another()
    models, failures = await shop.reconciler.start(found)

    assert (models, failures) == (["m", "n"], [])
    assert shop.versions() == {"m": ["1.0"], "n": ["1.0"]}
    assert bool(shop.reconciler.remarks()) == (how != "unreadable")
    if how == "does not load":
        shop.pools.behaviours["o"] = Behaviour()
        await shop.reconciler.apply()
        assert shop.versions() == {"m": ["2.0"], "o": ["1.0"]}
        assert shop.reconciler.remarks() == []


async def test_a_first_start_serves_what_comes_up_and_says_what_does_not(shop: Workshop) -> None:
    """There is nothing to go back to: one broken archive takes no other model along."""
    shop.write(m=["1.0", "2.0"], n=["1.0"])
    (shop.store / "n-1.0.mar").unlink()

    models, failures = await shop.reconciler.start(shop.place.read())

    assert models == ["m", "n"]
    assert failures == ["n 1.0: Model not found at: n-1.0.mar"]
    assert shop.versions() == {"m": ["1.0", "2.0"]}


async def test_what_changes_in_the_place_comes_into_force(shop: Workshop) -> None:
    """Looked at from time to time; what has not changed is not even read."""
    await shop.start(m=["1.0"])
    looked = await shop.reconciler.look(None)
    reads: list[int] = []
    read_before = shop.place.read

    def counted() -> Found:
        reads.append(1)
        return read_before()

    shop.place.read = counted  # type: ignore[method-assign]
    assert await shop.reconciler.look(looked) == looked
    assert reads == []

    shop.write(m=["2.0"])
    await shop.reconciler.look(looked)

    assert shop.versions() == {"m": ["2.0"]}
    assert shop.reconciler.history()[0]["by"] == "watch"


async def test_a_document_that_fails_is_not_loaded_in_a_loop(shop: Workshop) -> None:
    """It is shown, and not tried again at the next look."""
    await shop.start(m=["1.0"])
    shop.pools.behaviours["n"] = Behaviour(load="fail")
    shop.write(m=["1.0"], n=["1.0"])
    looked = await shop.reconciler.look(None)
    made = len(shop.pools.made)

    for _ in range(5):
        looked = await shop.reconciler.look(looked)
    shop.path.write_bytes(shop.path.read_bytes())  # touched, and the same
    looked = await shop.reconciler.look(looked)

    assert len(shop.pools.made) == made
    assert "n 1.0 did not load: the handler raised" in shop.reconciler.remarks()[0]
    assert shop.reconciler.describe()["failure"]["message"] == shop.reconciler.failure.message  # type: ignore[union-attr]
    assert shop.reconciler.counts.failed == 1

    shop.write(m=["3.0"])
    await shop.reconciler.look(looked)
    assert shop.versions() == {"m": ["3.0"]}
    assert shop.reconciler.remarks() == []


async def test_a_document_that_failed_is_tried_again_a_few_times(shop: Workshop) -> None:
    """At growing pauses, and then not before it changes: what it lacked may come without it, and may never come."""
    await shop.start(m=["1.0"])
    archive = shop.store / "n-1.0.mar"
    archive.rename(shop.store / "away")
    shop.write(m=["2.0"], n=["1.0"])
    looked = await shop.reconciler.look(None)
    first = shop.reconciler.describe()["failure"]

    pauses = []
    for _ in range(5):
        before = next(shop.times)
        failed = shop.reconciler.counts.failed
        while shop.reconciler.counts.failed == failed:
            looked = await shop.reconciler.look(looked)
        pauses.append(next(shop.times) - before)
    given_up = shop.reconciler.describe()["failure"]
    for _ in range(1000):
        looked = await shop.reconciler.look(looked)

    assert (first["tries"], first["retryAt"] - first["at"]) == (1, 30.0)
    assert [later / earlier > 1.5 for earlier, later in itertools.pairwise(pauses)] == [True] * 4
    assert given_up["tries"] == 6
    assert "retryAt" not in given_up
    assert shop.reconciler.counts.failed == 6
    assert shop.versions() == {"m": ["1.0"]}


async def test_a_document_comes_into_force_when_what_it_lacked_is_there(shop: Workshop) -> None:
    """Nobody has to touch it."""
    await shop.start(m=["1.0"])
    archive = shop.store / "n-1.0.mar"
    archive.rename(shop.store / "away")
    shop.write(m=["2.0"], n=["1.0"])
    looked = await shop.reconciler.look(None)
    assert shop.versions() == {"m": ["1.0"]}

    (shop.store / "away").rename(archive)
    for _ in range(100):
        looked = await shop.reconciler.look(looked)

    assert shop.versions() == {"m": ["2.0"], "n": ["1.0"]}
    assert shop.reconciler.remarks() == []


async def test_a_document_that_came_with_a_call_is_written_where_there_is_none(shop: Workshop) -> None:
    """Somebody took the file away: applying and undoing bring it back; a call that edits it says what is missing."""
    await shop.start(m=["1.0"])
    await shop.reconciler.apply(document(m=["2.0"]))
    shop.path.unlink()
    looked = await shop.reconciler.look(None)
    with pytest.raises(DocumentUnreadable) as raised:
        await shop.reconciler.change(lambda state: state, "nothing")

    await shop.reconciler.apply(document(m=["3.0"]))

    assert error_status(raised.value) == 503
    assert read(shop.path.read_bytes()).models["m"].default == "3.0"
    assert shop.reconciler.remarks() == []
    await shop.reconciler.look(looked)
    assert shop.versions() == {"m": ["3.0"]}
    shop.path.unlink()
    await shop.reconciler.undo()
    assert read(shop.path.read_bytes()).models["m"].default == "2.0"


async def test_a_document_that_is_edited_wrongly_is_refused_as_a_whole(shop: Workshop) -> None:
    """Nothing of it is applied, also not the part that is right; mended, it is."""
    await shop.start(m=["1.0"])
    data = json.loads(document(m=["2.0"], n=["1.0"]))
    data["models"]["n"]["versions"]["1.0"]["batchsize"] = 3
    shop.path.write_text(json.dumps(data))

    looked = await shop.reconciler.look(None)

    assert shop.versions() == {"m": ["1.0"]}
    assert "batchsize is no key of version 1.0 of model n; did you mean batchSize?" in shop.reconciler.remarks()[0]
    shop.write(m=["2.0"], n=["1.0"])
    await shop.reconciler.look(looked)
    assert shop.versions() == {"m": ["2.0"], "n": ["1.0"]}


async def test_a_place_that_cannot_be_read_changes_nothing(shop: Workshop) -> None:
    """It is said as long as it lasts."""
    await shop.start(m=["1.0"])
    shop.path.rename(shop.path.with_suffix(".gone"))

    looked = await shop.reconciler.look(None)

    assert "models.yaml cannot be read (No such file or directory)" in shop.reconciler.remarks()[0]
    assert shop.versions() == {"m": ["1.0"]}
    shop.path.with_suffix(".gone").rename(shop.path)
    await shop.reconciler.look(looked)
    assert shop.reconciler.remarks() == []


async def test_a_fleet_converges(shop: Workshop, tmp_path: Path) -> None:
    """Three servers watch one document; each applies it for itself."""
    fleet = [shop, *(Workshop(tmp_path / str(number)) for number in range(2))]
    shop.write(m=["1.0"])
    watches = []
    for server in fleet:
        server.path, server.place = shop.path, FilePlace(shop.path, "models.yaml")
        server.reconciler = server.another()
        assert (await server.reconciler.start(server.place.read()))[1] == []
        watches.append(asyncio.create_task(server.reconciler.watch()))

    await shop.reconciler.apply(document(m=["2.0"], n=["1.0"]))
    async with asyncio.timeout(20):
        while any(server.versions() != {"m": ["2.0"], "n": ["1.0"]} for server in fleet):
            await asyncio.sleep(0.002)

    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    for server in fleet[1:]:
        await server.registry.stop()
        await server.reconciler.stop()


async def test_a_look_that_breaks_is_not_the_last(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever went wrong is logged, and the document's next change is followed."""
    await shop.start(m=["1.0"])
    look, looks = shop.place.look, 0

    def breaks_once() -> str:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("nobody thought of this")
        return look()

    monkeypatch.setattr(shop.place, "look", breaks_once)
    shop.write(m=["2.0"])
    watch = asyncio.create_task(shop.reconciler.watch())
    async with asyncio.timeout(20):
        while shop.versions() != {"m": ["2.0"]}:
            await asyncio.sleep(0.002)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)

    assert "A look at the desired state failed" in caplog.text


async def test_a_change_that_was_made_from_another_state_is_refused(shop: Workshop) -> None:
    """Two operators do not overwrite each other's work unseen."""
    await shop.start(m=["1.0"])
    digest = shop.reconciler.current.digest  # type: ignore[union-attr]
    await shop.reconciler.apply(document(m=["2.0"]), if_digest=digest)

    with pytest.raises(DesiredStateIsAnother):
        await shop.reconciler.apply(document(m=["3.0"]), if_digest=digest)

    assert shop.versions() == {"m": ["2.0"]}


async def test_a_plan_changes_nothing_and_says_what_it_would_take(shop: Workshop) -> None:
    """New versions cost what they are estimated at, old ones give it back."""
    await shop.start(m=["1.0"])

    diff = await shop.reconciler.plan(document(m=["2.0"]))

    assert [(step.kind, step.memory_bytes) for step in diff.of("load", "unload")] == [("load", 9), ("unload", -9)]
    assert shop.versions() == {"m": ["1.0"]}
    assert len(shop.pools.made) == 1


async def test_a_server_without_a_place_takes_documents_from_calls(shop: Workshop) -> None:
    """Other calls change its models too, and the next document is compared with what is there."""
    shop.reconciler = Reconciler(shop.registry, History(None))
    with pytest.raises(BadDesiredState):
        await shop.reconciler.plan()
    await shop.reconciler.apply(document(m=["1.0"]))
    shop.registry.tune("m", None, batch_size=9, max_batch_delay_s=None)

    diff = await shop.reconciler.plan(document(m=["1.0"]))

    assert [(step.kind, step.after) for step in diff.steps] == [("tune", {"batchSize": 1})]


async def test_traffic_and_labels_come_with_their_versions(shop: Workshop) -> None:
    """In the same moment."""
    await shop.start(m=["1.0"])
    told = json.loads(document(m=["2.0", "1.0"]))
    told["models"]["m"] |= {
        "labels": {"stable": "1.0", "canary": "2.0"},
        "traffic": {"weights": {"1.0": 3, "2.0": 1}, "sticky": {"header": "X-User"}},
    }

    await shop.reconciler.apply(json.dumps(told).encode())

    assert shop.registry.traffic.describe("m")["weights"] == {"1.0": 3, "2.0": 1}
    assert shop.ask("m", "canary") == b"m 2.0"
    assert (await shop.reconciler.plan()).is_empty
    await shop.reconciler.undo()
    assert shop.registry.traffic.describe("m") == {"weights": {"1.0": 100}, "isDefault": True}
    assert shop.registry.traffic.labels("m") == {}


async def test_a_version_is_replaced_under_its_own_name(shop: Workshop) -> None:
    """Another archive of the same version: the old one answers until the new one is ready, then goes."""
    await shop.start(m=["1.0"])
    shop.put("m", "1.0")
    (shop.store / "m-1.0.mar").rename(shop.store / "m-1.0-b.mar")
    old = shop.pools.of("m")

    await shop.reconciler.apply(document(m={"1.0": {"url": "m-1.0-b.mar"}}))
    async with asyncio.timeout(10):
        while not old.is_stopped:
            await asyncio.sleep(0.001)

    assert len(shop.metrics.shown) == 1
    assert shop.registry.describe("m")["modelUrl"] == "m-1.0-b.mar"
    assert shop.ask("m") == b"m 1.0"


async def test_the_end_of_the_server_ends_a_change_that_is_under_way(shop: Workshop) -> None:
    """Whatever it had begun."""
    await shop.start(m=["1.0"])
    shop.pools.behaviours["m"] = Behaviour(load="wait")
    applying = asyncio.create_task(shop.reconciler.apply(document(m=["2.0"])))
    while len(shop.pools.made) < 2:
        await asyncio.sleep(0.001)

    await shop.registry.stop()

    with pytest.raises(ApplyFailed):
        await applying


def test_a_version_says_how_it_is_registered() -> None:
    """With its digest, and without its secrets where it is shown."""
    version = DesiredVersion("https://u:p@host/m.mar?signature=planted", sha256="a" * 64)

    assert version.source.endswith(f"?signature=planted#sha256={'a' * 64}")
    assert "planted" not in version.shown


def test_a_document_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    """A folder neither."""
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(DocumentUnreadable):
            FilePlace(path).read()


# ------------------------------------------------------------------------------------------- back at once


async def test_undo_within_the_window_loads_nothing(keeper: Keeper) -> None:
    """The very workers that served before serve again, of every model; what was undone ends."""
    await keeper.start(m=["1.0"], n=["1.0"], o=["1.0"])
    before = list(keeper.pools.made)
    await keeper.reconciler.apply(document(m=["2.0"], n={"1.0": {"responseTimeout": 7}}))
    after = keeper.pools.made[3:]
    assert sorted(keeper.keeps()) == [("m", "1.0"), ("n", "1.0"), ("o", "1.0")]
    assert not any(pool.is_stopped for pool in keeper.pools.made)
    with pytest.raises(VersionNotFound):
        keeper.ask("m", "1.0")
    asked = [pool.metrics.requests for pool in before]
    planned = await keeper.reconciler.plan_undo()
    assert [(step.model, step.is_loaded, step.memory_bytes) for step in planned.of("load")] == [
        ("m", True, 0),
        ("n", True, 0),
        ("o", True, 0),
    ]

    await keeper.reconciler.undo()

    assert len(keeper.pools.made) == 5
    assert keeper.versions() == {"m": ["1.0"], "n": ["1.0"], "o": ["1.0"]}
    assert [keeper.ask(model) for model in "mno"] == [b"m 1.0", b"n 1.0", b"o 1.0"]
    assert [pool.metrics.requests for pool in before] == [count + 1 for count in asked]
    assert keeper.keeps() == []
    await keeper.until_ended(*after)
    assert not any(pool.is_stopped for pool in before)
    assert (await keeper.reconciler.plan()).is_empty


async def test_weights_beside_an_archive_of_a_digest_may_be_others_by_now(keeper: Keeper) -> None:
    """So that an apply loads them again, and only undo takes what is kept."""
    digest = hashlib.sha256((keeper.store / "m-1.0.mar").read_bytes()).hexdigest()
    weights = keeper.store / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(safetensors_bytes({"a": ("F32", [2, 3])}))
    with_weights = {"1.0": {"sha256": digest, "checkpoint": "weights"}}
    await keeper.start(m=with_weights)
    await keeper.reconciler.apply(document(m={"1.0": {"sha256": digest}}))

    planned = await keeper.reconciler.plan(document(m=with_weights))
    undone = await keeper.reconciler.plan_undo()

    assert [(step.detail, step.is_loaded) for step in planned.of("load")] == [("m-1.0.mar, checkpoint weights", False)]
    assert [step.is_loaded for step in undone.of("load")] == [True]


async def test_after_the_window_the_workers_are_gone_and_undo_loads(keeper: Keeper) -> None:
    """As it does without one."""
    await keeper.start(m=["1.0"])
    await keeper.reconciler.apply(document(m=["2.0"]))
    (old, new) = keeper.pools.made

    keeper.now = 59.9
    keeper.registry.keeping.look()
    assert keeper.reconciler.describe()["keeps"] == [
        {"model": "m", "version": "1.0", "secondsLeft": 0.1, "workers": 1},
    ]
    assert keeper.reconciler.kept_by_model() == {"m": 1}
    keeper.now = 60.0
    keeper.registry.keeping.look()

    assert "keeps" not in keeper.reconciler.describe()
    await keeper.until_ended(old)
    await keeper.reconciler.undo()
    assert keeper.ask("m") == b"m 1.0"
    assert len(keeper.pools.made) == 3
    await keeper.until_ended(new)


@pytest.mark.parametrize("how", ["dead", "loading", "given up"])
async def test_what_is_not_fit_any_more_is_loaded_again(keeper: Keeper, how: str) -> None:
    """Its workers died, or its memory was wanted; what is left of it ends."""
    await keeper.start(m=["1.0"])
    await keeper.reconciler.apply(document(m=["2.0"]))
    old = keeper.pools.made[0]
    if how == "dead":
        old._workers.clear()
    elif how == "loading":
        old._workers = [replace(worker, status="LOADING") for worker in old._workers]
    else:
        assert old.give_up is not None
        old.give_up()

    await keeper.reconciler.undo()

    assert len(keeper.pools.made) == 3
    assert keeper.ask("m") == b"m 1.0"
    await keeper.until_ended(*keeper.pools.made[:2])


async def test_the_next_change_of_a_model_ends_what_was_kept_of_it(keeper: Keeper) -> None:
    """So that never three of a model are in memory; what another change has not touched stays."""
    await keeper.start(m=["1.0"], n=["1.0"])
    await keeper.reconciler.apply(document(m=["2.0"], n=["2.0"]))
    first = keeper.pools.of("m", "1.0")
    keeper.pools.behaviours["m"] = Behaviour(load="wait")

    applying = asyncio.create_task(keeper.reconciler.apply(document(m=["3.0"], n=["2.0"])))
    await keeper.until_ended(first)
    assert keeper.keeps() == [("n", "1.0")]
    async with asyncio.timeout(5):
        while keeper.pools.made[-1].options.version != "3.0":
            await asyncio.sleep(0.001)
    keeper.pools.of("m", "3.0").finish_load()
    await applying

    assert keeper.keeps() == [("m", "2.0")]


async def test_a_failed_undo_keeps_what_it_wanted_back(keeper: Keeper) -> None:
    """Another model of the same change cannot load: all stays as it was, and the next undo is as quick."""
    await keeper.start(m=["1.0"], n=["1.0"])
    await keeper.reconciler.apply(document(m=["2.0"], n=["2.0"]))
    old = keeper.pools.of("m", "1.0")
    keeper.registry.keeping.give_up(
        [kept.version for kept in keeper.registry.keeping.all() if kept.version.model == "n"], "the test says so"
    )
    archive = (keeper.store / "n-1.0.mar").rename(keeper.store / "away.mar")

    with pytest.raises(ApplyFailed):
        await keeper.reconciler.undo()
    assert (keeper.ask("m"), keeper.ask("n")) == (b"m 2.0", b"n 2.0")
    assert keeper.keeps() == [("m", "1.0")]
    assert not old.is_stopped

    archive.rename(keeper.store / "n-1.0.mar")
    await keeper.reconciler.undo()
    assert keeper.pools.of("m", "1.0") is old
    assert (keeper.ask("m"), keeper.ask("n")) == (b"m 1.0", b"n 1.0")


async def test_a_plan_names_archives_that_cannot_be_had(shop: Workshop) -> None:
    """Of what would be loaded alone: what serves, and what a change leaves alone, needs no archive."""
    shop.reconciler = Reconciler(
        shop.registry, History(shop.state), find_trouble=lambda version: f"{version.url} is missing"
    )
    assert (await shop.reconciler.plan(document(m=["1.0"]))).problems == ("m 1.0: m-1.0.mar is missing",)

    await shop.reconciler.apply(document(m=["1.0"]))

    assert (await shop.reconciler.plan(document(m=["1.0"]))).problems == ()
    told_of = await shop.reconciler.plan(document(m=["1.0", "2.0"]))
    assert plan_document(told_of)["problems"] == ["m 2.0: m-2.0.mar is missing"]


async def test_a_document_that_says_nothing_of_workers_is_applied_twice_without_a_change(shop: Workshop) -> None:
    """What it does not say stays as a call left it: three workers here, where the server by itself gives one."""
    await shop.registry.register(registration("m-1.0.mar", initial_workers=3, batch_size=4))
    plain = json.dumps({"models": {"m": {"versions": {"1.0": {"url": "m-1.0.mar"}}}}}).encode()

    for _ in range(2):
        assert (await shop.reconciler.plan(plain)).steps == ()
        await shop.reconciler.apply(plain)
        found = shop.registry.actual()["m"].versions["1.0"]
        assert (found.workers, found.config["batchSize"]) == ((3, 3), 4)

    said = json.dumps({"models": {"m": {"versions": {"1.0": {"url": "m-1.0.mar", "workers": 1}}}}}).encode()
    await shop.reconciler.apply(said)
    assert shop.registry.actual()["m"].versions["1.0"].workers == (1, 1)
    await shop.reconciler.apply(plain)
    assert shop.registry.actual()["m"].versions["1.0"].workers == (3, 3)


async def test_applying_reads_the_address_again_and_undoing_does_not(keeper: Keeper) -> None:
    """What lies there may be another archive by now; with a digest it is the same, and is not loaded again."""
    digest = hashlib.sha256((keeper.store / "n-1.0.mar").read_bytes()).hexdigest()
    old = {"m": {"1.0": None}, "n": {"1.0": {"sha256": digest}}}
    await keeper.start(**old)
    await keeper.reconciler.apply(document(m=["2.0"], n=["2.0"]))
    (m, n) = keeper.pools.made[:2] if keeper.pools.made[0].options.model == "m" else keeper.pools.made[1::-1]

    await keeper.reconciler.apply(document(**old))

    assert keeper.pools.of("m", "1.0") is not m
    assert keeper.pools.of("n", "1.0") is n
    await keeper.until_ended(m)


async def test_a_server_that_drains_keeps_nothing(keeper: Keeper) -> None:
    """From when it takes no more requests."""
    await keeper.start(m=["1.0"])
    await keeper.reconciler.apply(document(m=["2.0"]))

    keeper.registry.refuse_new()

    assert keeper.keeps() == []
    await keeper.until_ended(keeper.pools.of("m", "1.0"))


async def test_what_was_accepted_before_a_change_is_answered_by_what_is_kept(keeper: Keeper) -> None:
    """And when that serves again, too."""
    await keeper.start(m=["1.0"])
    old = keeper.pools.made[0]
    old.behaviour = Behaviour(holds=True)
    told = Told()
    keeper.registry.data_plane.submit("m", None, Request("id", [Part("body", b"x")]), told)

    await keeper.reconciler.apply(document(m=["2.0"]))
    await keeper.reconciler.undo()

    assert told.end is None
    old.held.pop().receiver.on_answer(Answer(b"late"))
    assert isinstance(told.end, Answer)


async def test_what_an_earlier_document_let_in_at_the_last_moment_goes(shop: Workshop) -> None:
    """Though it was loaded after the document that does not name it; what came by no such policy is left alone."""
    await shop.start(m=["1.0"], n=["1.0"])
    await shop.registry.register(RegisterParameters("m-2.0.mar", synchronous=True))
    shop.registry.set_default("m", "2.0")

    await shop.reconciler.let_go([("n", NewVersions("m-", "load")), (None, NewVersions("o-", "load"))])
    assert shop.versions() == {"m": ["2.0", "1.0"], "n": ["1.0"]}

    await shop.reconciler.let_go([("m", NewVersions("m-", "load-and-default"))])
    assert shop.versions() == {"m": ["1.0"], "n": ["1.0"]}
    assert len(shop.reconciler.history()) == 1


async def test_a_label_names_no_version_to_leave_in_the_document_either(shop: Workshop) -> None:
    """The call and its dry run refuse it alike; by its own name the version goes."""
    await shop.start(m=["1.0", "2.0"])
    changes = Changes(shop.registry, adopts=shop.reconciler)
    await changes.put_label("m", "old", "2.0")
    before = shop.path.read_bytes()
    await changes.remove_label("m", "old", dry_run=True)

    with pytest.raises(VersionNotFound):
        shop.registry.rehearsal.unregister("m", "old", force=True)
    with pytest.raises(VersionNotFound):
        await changes.unregister("m", "old", force=True)
    assert (shop.path.read_bytes(), shop.versions()) == (before, {"m": ["1.0", "2.0"]})
    assert shop.registry.rehearsal.unregister("m", "2.0", force=True).version == "2.0"
    await changes.unregister("m", "2.0", force=True)

    assert shop.versions() == {"m": ["1.0"]}
