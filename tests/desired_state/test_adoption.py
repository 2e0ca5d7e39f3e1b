"""A document on a server that no document governs: it unloads nothing unasked, and undo brings back what was there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marserve.desired_state.adoption import adopt, as_document
from marserve.desired_state.diff import compare
from marserve.desired_state.document import DesiredState, read
from marserve.desired_state.document_place import FilePlace
from marserve.desired_state.history import History
from marserve.desired_state.reconciler import Reconciler
from marserve.errors import ApplyFailed, BadInput, NothingToUndo, WouldUnload
from marserve.registry.catalogue.traffic import read_traffic
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.observing.shadow_spec import ShadowSpec
from support.echo_archives import manifest, write_mar
from support.management_house import House
from support.registrations import registration

pytestmark = pytest.mark.anyio


class Ungoverned(House):
    """A registry whose models come by calls, and a reconciler without a document's place."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, unregister_timeout_s=0.2, **options)
        self.root = root
        self.reconciler = self.another()
        for name in ("m", "n", "o"):
            for version in ("1.0", "2.0"):
                self.put(name, version)

    def another(self) -> Reconciler:
        """A reconciler over what the folder holds, as after a restart."""
        return Reconciler(self.registry, History(self.root / "state", is_needed=False), undo_window_s=0.0)

    async def register(self, name: str, version: str = "1.0", **more: Any) -> None:
        """Register an archive of the store, as a call does."""
        await self.registry.register(registration(f"{name}-{version}.mar", **{"initial_workers": 1, **more}))

    def described(self) -> dict[str, Any]:
        """Everything that undo has to bring back."""
        told = {}
        for name, model in sorted(self.registry.actual().items()):
            workers = {version: (found.source, found.workers) for version, found in sorted(model.versions.items())}
            batches = {
                version: {key: found.config[key] for key in ("batchSize", "maxBatchDelay", "responseTimeout")}
                for version, found in sorted(model.versions.items())
            }
            told[name] = (model.default, dict(model.labels), model.traffic, model.shadow, workers, batches)
        return told

    def by(self) -> list[str]:
        """What brought the entries of the history, the oldest first."""
        return [entry["by"] for entry in reversed(self.reconciler.history())]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Ungoverned]:
    """Two models in use, with all that calls can say of them; nothing is left after the test."""
    house = Ungoverned(tmp_path)
    await house.register("m", "1.0", batch_size=4, max_batch_delay_s=0.02, response_timeout_s=33)
    await house.register("m", "2.0", initial_workers=2)
    await house.register("n", "1.0", memory_bytes=1 << 20, is_pinned=True)
    house.registry.traffic.put("m", read_traffic({"weights": {"1.0": 90, "2.0": 10}}))
    house.registry.traffic.put_label("m", "canary", "2.0")
    yield house
    await house.registry.stop()
    await house.reconciler.stop()
    assert house.folders() == []


def document(**models: Sequence[str]) -> bytes:
    """A document; the first version of each model is its default."""
    told = {
        name: {
            "versions": {version: {"url": f"{name}-{version}.mar", "workers": 1} for version in versions},
            "default": versions[0],
        }
        for name, versions in models.items()
    }
    return json.dumps({"models": told}).encode()


ALL = (("m", "1.0"), ("m", "2.0"), ("n", "1.0"))


async def test_models_that_came_by_calls_are_not_unloaded_unasked(house: Ungoverned) -> None:
    """The plan says which; applying names them, and nothing at all has changed."""
    before = house.described()

    planned = await house.reconciler.plan(document(o=["1.0"]))
    with pytest.raises(WouldUnload, match=r"m 1\.0, m 2\.0, n 1\.0 .*prune=true.*adopt=true") as refused:
        await house.reconciler.apply(document(o=["1.0"]))

    assert planned.unnamed == refused.value.versions == ALL
    assert house.described() == before
    assert (house.by(), house.reconciler.current) == ([], None)
    assert not (house.root / "state").exists()


async def test_a_further_version_of_a_named_model_counts_too(house: Ungoverned) -> None:
    """Clients use it by its name as they use a model."""
    with pytest.raises(WouldUnload) as refused:
        await house.reconciler.apply(document(m=["1.0"], n=["1.0"]))

    assert refused.value.versions == (("m", "2.0"),)


async def test_a_document_that_unloads_nothing_needs_no_consent(house: Ungoverned) -> None:
    """It may replace a version that it names."""
    wanted = json.loads(document(m=["1.0", "2.0"], n=["1.0"], o=["1.0"]))
    wanted["models"]["n"]["versions"]["1.0"]["responseTimeout"] = 9

    outcome = await house.reconciler.apply(json.dumps(wanted).encode())

    assert outcome.diff.of("unload")
    assert house.registry.describe("n")["responseTimeout"] == 9


@pytest.mark.parametrize("restarts", [False, True])
async def test_undo_brings_back_what_calls_had_made(house: Ungoverned, restarts: bool) -> None:
    """Workers, batches, time-outs, weights, labels: all of it, also for a server that was started again meanwhile."""
    before = house.described()
    await house.reconciler.apply(document(o=["1.0"]), unnamed="prune")
    assert list(house.described()) == ["o"]
    assert house.by() == ["found", "apply"]

    if restarts:
        house.reconciler = house.another()
        assert house.reconciler.current is None
    planned = await house.reconciler.plan_undo()
    await house.reconciler.undo()

    assert planned.unnamed == ()
    assert house.described() == before
    assert house.registry.describe("n")["minWorkers"] == 1
    with pytest.raises(NothingToUndo):
        await house.reconciler.undo()


async def test_what_calls_change_between_two_documents_comes_back_too(house: Ungoverned) -> None:
    """Each document finds a server as calls have left it, and undoing it goes back to that."""
    await house.reconciler.apply(document(o=["1.0"]), unnamed="prune")
    await house.registry.scale("o", None, min_workers=3, max_workers=3, synchronous=True)
    await house.register("n", "2.0")
    before = house.described()

    with pytest.raises(WouldUnload) as refused:
        await house.reconciler.apply(document(m=["1.0"]))
    await house.reconciler.apply(document(m=["1.0"]), unnamed="prune")
    await house.reconciler.undo()

    assert refused.value.versions == (("n", "2.0"),)  # a document has named the other one
    assert house.described() == before
    assert house.by() == ["found", "apply", "found", "apply", "undo"]


async def test_a_server_that_went_back_asks_again(house: Ungoverned) -> None:
    """No document governs it then; the entry that undo went to came from calls, after a restart too."""
    for _ in range(2):
        await house.reconciler.apply(document(o=["1.0"]), unnamed="prune")
        await house.reconciler.undo()
        with pytest.raises(WouldUnload) as refused:
            await house.reconciler.apply(document(o=["1.0"]))
        assert refused.value.versions == ALL

    house.reconciler = house.another()
    with pytest.raises(WouldUnload):
        await house.reconciler.apply(document(o=["1.0"]))


async def test_undo_does_not_unload_what_came_by_a_call_since(house: Ungoverned) -> None:
    """It would take with it what neither document knows; consent, or adoption, decides."""
    await house.reconciler.apply(document(o=["1.0"]), unnamed="prune")
    await house.register("n", "2.0")

    with pytest.raises(WouldUnload) as refused:
        await house.reconciler.undo()
    await house.reconciler.undo(unnamed="adopt")

    assert refused.value.versions == (("n", "2.0"),)
    assert list(house.described()["n"][4]) == ["1.0", "2.0"]
    assert "o" in house.described()  # it was unloaded by nothing: adopting keeps all that is there


async def test_adopting_adds_what_is_there_and_changes_nothing_of_it(house: Ungoverned) -> None:
    """No worker is started or ended for it, and the document is a fixed point: applied again it changes nothing."""
    before, made = house.described(), len(house.pools.made)

    outcome = await house.reconciler.apply(document(o=["1.0"]), unnamed="adopt")

    assert outcome.diff.adopted == ALL
    assert {step.model for step in outcome.diff.steps} == {"o"}
    assert len(house.pools.made) == made + 1
    after = house.described()
    assert {name: after[name] for name in before} == before
    written = outcome.document()["document"].encode()
    again = await house.reconciler.apply(written)
    assert (again.diff.is_empty, again.entry) == (True, outcome.entry)
    assert house.by() == ["found", "apply"]
    assert read(written).models["m"].document() == {
        "versions": {
            "1.0": {
                "url": "m-1.0.mar",
                "batchSize": 4,
                "maxBatchDelay": 20,
                "maxWorkers": 1,
                "minWorkers": 1,
                "responseTimeout": 33,
            },
            "2.0": {"url": "m-2.0.mar", "maxWorkers": 2, "minWorkers": 2},
        },
        "default": "1.0",
        "labels": {"canary": "2.0"},
        "traffic": {"weights": {"1.0": 90, "2.0": 10}},
    }


async def test_what_was_adopted_is_loaded_alike_by_another_server(house: Ungoverned, tmp_path: Path) -> None:
    """The document says all that calls had said."""
    outcome = await house.reconciler.apply(document(o=["1.0"]), unnamed="adopt")
    other = Ungoverned(tmp_path / "other")

    await other.reconciler.apply(outcome.document()["document"].encode())

    assert other.described() == house.described()
    await other.registry.stop()


async def test_a_model_that_the_document_names_keeps_the_documents_default_and_weights(house: Ungoverned) -> None:
    """The added version keeps its label; the document decides the rest."""
    outcome = await house.reconciler.apply(document(m=["1.0"], n=["1.0"]), unnamed="adopt")

    assert outcome.state is not None
    model = outcome.state.models["m"]
    assert list(model.versions) == ["1.0", "2.0"]
    assert (model.default, model.labels, model.traffic) == ("1.0", {"canary": "2.0"}, None)
    assert outcome.diff.adopted == (("m", "2.0"),)


async def test_a_shadow_and_a_version_on_demand_are_adopted_as_they_are(house: Ungoverned) -> None:
    """Their documents have words for both, and workers that sleep are not started."""
    await house.register("o", "1.0", initial_workers=2, load="on_demand")
    house.registry.mirrors.put("m", ShadowSpec("2.0", share=0.5))
    before = house.described()
    assert before["o"][4]["1.0"][1] == (0, 2)

    await house.reconciler.apply(document(n=["1.0"]), unnamed="prune")
    await house.reconciler.undo()

    assert house.described() == before
    assert house.pools.of("o", "1.0").options.least_awake == 2  # so many are woken
    outcome = await house.reconciler.apply(document(m=["1.0"]), unnamed="adopt")
    assert outcome.state is not None
    assert (await house.reconciler.plan(outcome.state.write())).is_empty


async def test_an_archive_of_its_own_words_is_captured_without_them(house: Ungoverned) -> None:
    """What the archive says by itself, the document does not repeat; a registration's handler it does."""
    config = "minWorkers: 2\nmaxWorkers: 3\nbatchSize: 5\nhandler: {any: thing}\n"
    write_mar(house.store / "own.mar", manifest("own"), config=config, other__py=b"def handle(data, context): ...\n")
    await house.registry.register(RegisterParameters("own.mar", handler="other.py"))

    state = as_document({"own": house.registry.actual()["own"]})

    assert state.models["own"].versions["1.0"].document() == {
        "url": "own.mar",
        "handler": "other.py",
        "minWorkers": 2,
        "maxWorkers": 3,
    }
    assert compare(
        house.registry.actual(), adopt(DesiredState(), house.registry.actual(), [*ALL, ("own", "1.0")])
    ).is_empty


async def test_an_address_with_a_key_is_not_written_out(house: Ungoverned) -> None:
    """Its key would be told to the caller; undo, which tells nobody, has it."""
    version = house.registry._versions.find("n", "1.0")
    version.facts = replace(version.facts, url="https://u:p@store.example/n-1.0.mar?sig=planted")

    with pytest.raises(BadInput, match=r"^n 1\.0 came from \S+, an address with a key in it") as refused:
        await house.reconciler.apply(document(o=["1.0"]), unnamed="adopt")

    assert "planted" not in str(refused.value)
    state = as_document(house.registry.actual())
    assert state.models["n"].versions["1.0"].url.endswith("planted")


async def test_names_that_no_document_can_have_are_said(house: Ungoverned, caplog: pytest.LogCaptureFixture) -> None:
    """Adopting them is refused; pruning goes on, and the log says that undo will not bring them back."""
    await house.registry.register(RegisterParameters("o-1.0.mar", model_name="x" * 201, initial_workers=1))

    with pytest.raises(BadInput, match="is no name of a model"):
        await house.reconciler.apply(document(o=["1.0"]), unnamed="adopt")
    await house.reconciler.apply(document(o=["1.0"]), unnamed="prune")

    assert "`undo` will not go back to it" in caplog.text
    assert house.by() == ["apply"]


async def test_a_governed_server_is_asked_nothing_and_adopts_nothing(house: Ungoverned, tmp_path: Path) -> None:
    """Its document decides which models there are, as ever."""
    path = tmp_path / "models.yaml"
    path.write_bytes(document(o=["1.0"]))
    governed = Reconciler(house.registry, History(tmp_path / "governed"), FilePlace(path))

    with pytest.raises(
        BadInput, match=r"models\.yaml decides which models this server has, so there are none to adopt"
    ):
        await governed.apply(document(o=["2.0"]), unnamed="adopt")
    assert (await governed.plan()).unnamed == ()
    await governed.apply()

    assert list(house.described()) == ["o"]


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_folder_that_cannot_be_written_keeps_undo_for_this_process(
    house: Ungoverned, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    """A read-only container applies documents as ever; the log says what is lost, at the start or at the first one."""
    if is_known:
        (house.root / "state").write_text("no folder")
    house.reconciler = house.another()
    (house.root / "state").write_text("no folder")
    before = house.described()

    await house.reconciler.apply(document(o=["1.0"]), unnamed="prune")
    await house.reconciler.undo()

    assert house.described() == before
    assert caplog.text.count("`undo` works until the server ends") == 1


async def test_a_change_that_fails_leaves_no_entry(house: Ungoverned) -> None:
    """Neither the document's nor that of what was there."""
    with pytest.raises(ApplyFailed):
        await house.reconciler.apply(document(z=["1.0"]), unnamed="prune")

    assert house.by() == []
    assert list(house.described()) == ["m", "n"]
