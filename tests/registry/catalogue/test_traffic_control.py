"""Tests for the traffic of registered models: who answers which request, and what can be asked and ordered about it."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marserve.api.errors import error_headers, error_status
from marserve.errors import (
    BadInput,
    DefaultVersionInUse,
    LabelNotFound,
    LabelTaken,
    MarserveError,
    ModelNotFound,
    NoWorker,
    VersionConflict,
    VersionInUse,
    VersionNotFound,
)
from marserve.messages import Answer, Part, Request
from marserve.registry.catalogue.snapshot import SnapshotVersion, read_models, write_models
from marserve.registry.catalogue.traffic import VERSION_HEADER, Sticky, Traffic
from marserve.registry.intake.registration import RegisterParameters
from support.echo_archives import manifest, write_mar
from support.fake_pool import Behaviour, a_death
from support.management_house import House as ManagementHouse

pytestmark = pytest.mark.anyio


class Told:
    """A receiver that keeps what it was told: the version that each answer names, and its body."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.bodies: list[bytes] = []
        self.errors: list[MarserveError] = []

    def on_answer(self, answer: Answer) -> None:
        """The answer."""
        self.versions += [value for name, value in answer.headers if name == VERSION_HEADER]
        self.bodies.append(bytes(answer.body))

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece."""
        self.on_answer(piece)

    def on_error(self, error: MarserveError) -> None:
        """An error."""
        self.errors.append(error)


class House(ManagementHouse):
    """The house with short ways to register and to ask."""

    async def add(self, version: str = "1.0", *, workers: int = 1) -> None:
        """Register a version of the model `m`."""
        await self.registry.register(
            RegisterParameters(self.put("m", version), initial_workers=workers, synchronous=False)
        )

    def ask(self, version: str | None = None, **request: Any) -> Told:
        """Send a request and give its receiver."""
        told = Told()
        request.setdefault("names_version", version is not None)
        self.registry.data_plane.submit("m", version, Request("id", [Part("body", b"x")], **request), told)
        return told

    def answered_by(self, version: str | None = None, **request: Any) -> str:
        """The version whose answer says that it answered."""
        told = self.ask(version, **request)
        assert told.bodies == [b"m " + told.versions[0].encode()]
        return told.versions[0]

    def shares(self, count: int = 1000, **request: Any) -> Counter[str]:
        """Which versions answer so many requests."""
        return Counter(self.answered_by(**request) for _ in range(count))


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with two versions of `m`, 1.0 the default; afterwards nothing of it is left."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    await house.add("1.0")
    await house.add("2.0")
    yield house
    await house.registry.stop()
    assert house.folders() == []
    assert house.metrics.shown == []


# ------------------------------------------------------------------------------------------- who answers


async def test_a_model_without_weights_has_its_default_version_answer(house: House) -> None:
    """And says so when it is asked."""
    assert house.shares(50) == {"1.0": 50}
    assert house.registry.traffic.describe("m") == {"weights": {"1.0": 100}, "isDefault": True}


async def test_requests_are_shared_out_by_weights_from_the_call_on(house: House) -> None:
    """And go back to the default version from the call that deletes them."""
    told = house.registry.traffic.put("m", Traffic({"1.0": 80, "2.0": 20}))

    assert told == {"weights": {"1.0": 80, "2.0": 20}} == house.registry.traffic.describe("m")
    assert 190 <= house.shares()["2.0"] <= 210

    assert house.registry.traffic.reset("m") == {"weights": {"1.0": 100}, "isDefault": True}
    assert house.shares(50) == {"1.0": 50}


async def test_the_path_goes_before_the_header_and_the_header_before_weights(house: House) -> None:
    """What the client names answers, whatever weight it has."""
    house.registry.traffic.put("m", Traffic({"1.0": 1, "2.0": 0}))

    assert house.answered_by(asked_version="2.0") == "2.0"
    assert house.answered_by("1.0", asked_version="2.0") == "1.0"
    assert house.answered_by("2.0", asked_version="1.0") == "2.0"
    with pytest.raises(VersionNotFound, match=r"Model version: 3.0 does not exist for model: m"):
        house.ask(asked_version="3.0")


async def test_the_header_counts_for_a_model_of_one_version_too(tmp_path: Path) -> None:
    """Its answers name no version: there is nothing to tell."""
    house = House(tmp_path)
    await house.add("1.0")

    assert house.ask(asked_version="1.0").versions == []
    with pytest.raises(VersionNotFound):
        house.ask(asked_version="2.0")

    await house.registry.stop()


async def test_a_sticky_key_is_found_among_headers_and_metadata(house: House) -> None:
    """REST has the first, gRPC the second; the same key means the same version."""
    house.registry.traffic.put("m", Traffic({"1.0": 50, "2.0": 50}, Sticky(header="X-User")))

    for user in range(30):
        key = b"user-%d" % user
        assert house.answered_by(headers=[(b"X-User", key)]) == house.answered_by(metadata=[(b"x-user", key)])
    assert len({house.answered_by(headers=[(b"X-User", b"user-%d" % user)]) for user in range(30)}) == 2


async def test_why_a_version_was_chosen_is_counted(house: House) -> None:
    """By the version that answered; a node of a workflow is nobody's client."""
    house.registry.traffic.put("m", Traffic({"1.0": 0, "2.0": 1}, Sticky(cookie="sid")))
    for _ in range(3):
        house.ask()
    for _ in range(4):
        house.ask(headers=[(b"cookie", b"sid=ada")])
    for _ in range(5):
        house.ask(asked_version="2.0")
    for _ in range(6):
        house.ask("2.0")
    house.ask(is_inner=True)
    house.registry.traffic.reset("m")
    house.registry.set_default("m", "2.0")
    for _ in range(7):
        house.ask()

    metrics = house.pools.of("m", "2.0").metrics
    assert metrics.reasons() == {"weight": 3, "sticky": 4, "override": 5, "path": 6, "default": 7}
    assert house.pools.of("m", "1.0").metrics.reasons() == {}


async def test_the_share_that_is_told_is_the_one_in_force(house: House) -> None:
    """Of the requests that name no version."""

    def told() -> dict[str, float | None]:
        return {one.version: None if one.read_share is None else one.read_share() for one in house.metrics.shown}

    assert told() == {"1.0": 1.0, "2.0": 0.0}
    house.registry.traffic.put("m", Traffic({"1.0": 3, "2.0": 1}))
    assert told() == {"1.0": 0.75, "2.0": 0.25}
    house.pools.of("m", "1.0").scale(0, 0)
    assert told() == {"1.0": 0.0, "2.0": 1.0}


async def test_a_refusal_names_the_version_that_refused(house: House) -> None:
    """In the contract's words where the client named it, and in a header."""
    house.pools.of("m", "2.0").scale(0, 0)

    with pytest.raises(NoWorker, match=r'Model "m" Version 2.0 has no worker') as raised:
        house.ask("2.0")

    assert (VERSION_HEADER, "2.0") in error_headers(raised.value)
    with pytest.raises(NoWorker, match=r'Model "m" Version 2.0 has no worker'):
        house.ask(asked_version="2.0")


async def test_what_no_header_can_hold_is_encoded_in_it(house: House) -> None:
    """A version may be called anything."""
    await house.add("β 1%")

    assert house.ask("β 1%").versions == ["%CE%B2%201%25"]


async def test_describe_tells_of_traffic_where_there_is_some(house: House) -> None:
    """What TorchServe's clients know is as it was; ours comes behind."""
    assert not {"labels", "trafficShare"} & set(house.registry.describe("m"))

    house.registry.traffic.put("m", Traffic({"1.0": 3, "2.0": 1}))
    house.registry.traffic.put_label("m", "canary", "2.0")

    told = {
        each["modelVersion"]: (each.get("labels"), each["trafficShare"]) for each in house.registry.describe_all("m")
    }
    assert told == {"1.0": (None, 0.75), "2.0": (["canary"], 0.25)}


# ------------------------------------------------------------------------------------------- readiness


async def test_a_weight_takes_effect_when_its_version_is_ready(house: House) -> None:
    """Until then it is told as pending, and the others answer."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    await house.add("3.0")
    told = house.registry.traffic.put("m", Traffic({"1.0": 50, "3.0": 50}))

    assert told == {"weights": {"1.0": 50, "3.0": 50}, "pending": ["3.0"]}
    assert house.shares(100) == {"1.0": 100}

    house.pools.of("m", "3.0").finish_load()

    assert house.shares(100)["3.0"] in range(47, 54)  # four off its share is too far: `traffic.py`
    assert "pending" not in house.registry.traffic.describe("m")


async def test_a_version_that_sleeps_or_wakes_has_its_part(house: House) -> None:
    """It holds what comes until it is awake, so its keys need not go elsewhere; one that dies of waking is left out."""
    config = "minWorkers: 0\nmaxWorkers: 1\nidleTimeout: 60\n"
    archive = write_mar(house.store / "sleeper.mar", manifest("m", "3.0"), config=config).name
    house.pools.behaviours["m"] = Behaviour(load="wait")
    await house.registry.register(RegisterParameters(archive))
    sleeper = house.pools.of("m", "3.0")
    assert sleeper.workers() == []

    told = house.registry.traffic.put("m", Traffic({"1.0": 1, "3.0": 1}))
    assert told == {"weights": {"1.0": 1, "3.0": 1}}

    sleeper.scale(1, 1)
    assert [worker.status for worker in sleeper.workers()] == ["LOADING"]
    assert "pending" not in house.registry.traffic.describe("m")
    assert house.shares(100)["3.0"] in range(47, 54)

    sleeper._workers = [replace(worker, last_death=a_death()) for worker in sleeper.workers()]
    assert house.registry.traffic.describe("m")["pending"] == ["3.0"]
    assert house.shares(20) == {"1.0": 20}


async def test_with_no_weighted_version_ready_the_default_one_answers(house: House) -> None:
    """And when that is not ready either, its queue or its refusal is the honest answer."""
    house.registry.traffic.put("m", Traffic({"2.0": 1}))
    assert house.shares(20) == {"2.0": 20}

    house.pools.of("m", "2.0").scale(0, 0)
    assert house.shares(20) == {"1.0": 20}

    house.pools.of("m", "1.0").scale(0, 0)
    with pytest.raises(NoWorker):
        house.ask()


# ------------------------------------------------------------------------------------------- labels


async def test_a_label_stands_where_a_version_stands(house: House) -> None:
    """In paths, in the header, in describe."""
    assert house.registry.traffic.put_label("m", "canary", "2.0") == {"version": "2.0"}

    assert house.answered_by("canary") == "2.0"
    assert house.answered_by(asked_version="canary") == "2.0"
    assert house.registry.describe("m", "canary")["modelVersion"] == "2.0"
    assert house.registry.traffic.labels("m") == {"canary": {"version": "2.0"}}


async def test_a_label_goes_over_when_its_version_is_ready(house: House) -> None:
    """What it named before answers until then."""
    house.registry.traffic.put_label("m", "stable", "1.0")
    house.pools.behaviours["m"] = Behaviour(load="wait")
    await house.add("3.0")

    told = house.registry.traffic.put_label("m", "stable", "3.0")
    assert told == {"version": "3.0", "isPending": True, "answeredBy": "1.0"}
    assert house.answered_by("stable") == "1.0"

    house.pools.of("m", "3.0").finish_load()
    assert house.answered_by("stable") == "3.0"
    assert house.registry.traffic.labels("m") == {"stable": {"version": "3.0"}}


async def test_a_label_can_be_taken_back_before_it_went_over(house: House) -> None:
    """It then goes on naming what it named."""
    house.registry.traffic.put_label("m", "stable", "1.0")
    house.pools.of("m", "2.0").scale(0, 0)
    house.registry.traffic.put_label("m", "stable", "2.0")

    assert house.registry.traffic.put_label("m", "stable", "1.0") == {"version": "1.0"}
    assert house.answered_by("stable") == "1.0"


async def test_a_label_and_a_version_never_have_one_name(house: House) -> None:
    """Whichever comes second is refused."""
    await house.add("next")
    with pytest.raises(LabelTaken, match="next is a label of model m or to become one, and a version of it"):
        house.registry.traffic.put_label("m", "next", "1.0")
    house.registry.traffic.put_label("m", "later", "1.0")
    with pytest.raises(VersionConflict) as raised:
        await house.add("later")

    assert isinstance(raised.value, LabelTaken)
    assert error_status(raised.value) == 409


@pytest.mark.parametrize(
    ("label", "version", "kind"),
    [
        ("1.0", "2.0", BadInput),
        ("all", "2.0", BadInput),
        ("canary", "3.0", VersionNotFound),
        ("c", "c", VersionNotFound),
    ],
)
async def test_a_label_that_cannot_be_is_refused(
    house: House, label: str, version: str, kind: type[MarserveError]
) -> None:
    """And nothing is changed."""
    with pytest.raises(kind):
        house.registry.traffic.put_label("m", label, version)

    assert house.registry.traffic.labels("m") == {}


async def test_a_removed_label_names_nothing(house: House) -> None:
    """Asked for twice it says so."""
    house.registry.traffic.put_label("m", "canary", "2.0")
    house.registry.traffic.remove_label("m", "canary")

    with pytest.raises(VersionNotFound):
        house.ask("canary")
    with pytest.raises(LabelNotFound, match="Model m has no label canary"):
        house.registry.traffic.remove_label("m", "canary")


async def test_all_labels_are_put_at_once(house: House) -> None:
    """Those that are not among them go."""
    house.registry.traffic.put_label("m", "old", "1.0")
    house.registry.traffic.put_all_labels("m", {"stable": "1.0", "canary": "2.0"})

    assert house.registry.traffic.labels("m") == {"stable": {"version": "1.0"}, "canary": {"version": "2.0"}}


# ------------------------------------------------------------------------------------------- refusals


async def test_weights_name_versions_that_are_there(house: House) -> None:
    """A label is none, and says whose it is; nothing is changed."""
    house.registry.traffic.put_label("m", "canary", "2.0")
    with pytest.raises(VersionNotFound, match=r"Model version: 3.0 does not exist"):
        house.registry.traffic.put("m", Traffic({"1.0": 1, "3.0": 1}))
    with pytest.raises(BadInput, match=r"canary is a label, and weights are of versions; version 2.0 has it"):
        house.registry.traffic.put("m", Traffic({"1.0": 1, "canary": 1}))
    with pytest.raises(ModelNotFound):
        house.registry.traffic.put("n", Traffic({"1.0": 1}))

    assert house.registry.traffic.rule_of("m") is None


async def test_a_dry_run_changes_nothing(house: House) -> None:
    """It says what would be, and refuses what would be refused."""
    changes = house.changes
    traffic = house.registry.traffic

    assert traffic.put("m", Traffic({"2.0": 1}), dry_run=True) == {"weights": {"2.0": 1}}
    assert traffic.put_label("m", "canary", "2.0", dry_run=True) == {"version": "2.0"}
    with pytest.raises(VersionNotFound):
        traffic.put("m", Traffic({"3.0": 1}), dry_run=True)
    assert (traffic.rule_of("m"), traffic.labels("m"), house.changes) == (None, {}, changes)

    traffic.put("m", Traffic({"2.0": 1}))
    traffic.put_label("m", "canary", "2.0")
    traffic.reset("m", dry_run=True)
    traffic.remove_label("m", "canary", dry_run=True)
    assert traffic.describe("m") == {"weights": {"2.0": 1}}
    assert traffic.labels("m") == {"canary": {"version": "2.0"}}


# ------------------------------------------------------------------------------------------- versions that go


@pytest.mark.parametrize(
    ("weight", "labels", "words"),
    [
        (20, [], "Version 2.0 of model m has a weight in the model's traffic, so"),
        (0, ["canary"], "Version 2.0 of model m has the label canary, so"),
        (20, ["a", "b"], "Version 2.0 of model m has a weight in the model's traffic and the label a and the label b,"),
    ],
)
async def test_a_version_in_use_does_not_go_unnoticed(
    house: House, weight: float, labels: list[str], words: str
) -> None:
    """It answers on; by force it goes, and its weight and labels with it."""
    house.registry.traffic.put("m", Traffic({"1.0": 80, "2.0": weight}))
    for label in labels:
        house.registry.traffic.put_label("m", label, "2.0")

    with pytest.raises(VersionInUse) as raised:
        await house.registry.unregister("m", "2.0")
    assert raised.value.message.startswith(words)
    assert error_status(raised.value) == 409
    assert house.answered_by("2.0") == "2.0"

    await house.registry.unregister("m", "2.0", force=True)
    assert house.registry.traffic.describe("m") == {"weights": {"1.0": 80}}
    assert house.registry.traffic.labels("m") == {}
    assert house.ask().bodies == [b"m 1.0"]


async def test_a_version_without_weight_and_label_goes_as_ever(house: House) -> None:
    """A weight of zero is none."""
    house.registry.traffic.put("m", Traffic({"1.0": 80, "2.0": 0}))

    await house.registry.unregister("m", "2.0")

    assert house.registry.traffic.describe("m") == {"weights": {"1.0": 80}}


async def test_the_last_version_goes_with_all_its_model_has(house: House) -> None:
    """A model that comes again begins anew."""
    await house.registry.unregister("m", "2.0")
    house.registry.traffic.put("m", Traffic({"1.0": 1}))
    house.registry.traffic.put_label("m", "stable", "1.0")

    await house.registry.unregister("m")
    await house.add("1.0")

    assert house.registry.traffic.rule_of("m") is None
    assert house.registry.traffic.labels("m") == {}


async def test_a_label_is_no_name_to_unregister_by(house: House) -> None:
    """Who moves a label would take another version away."""
    house.registry.traffic.put_label("m", "canary", "2.0")

    with pytest.raises(VersionNotFound):
        await house.registry.unregister("m", "canary", force=True)


async def test_the_default_may_change_under_weights(house: House) -> None:
    """They go on to decide."""
    house.registry.traffic.put("m", Traffic({"1.0": 1}))
    house.registry.set_default("m", "2.0")

    assert house.shares(20) == {"1.0": 20}
    house.registry.traffic.reset("m")
    assert house.shares(20) == {"2.0": 20}


# ------------------------------------------------------------------------------------------- snapshots


async def restarted(tmp_path: Path, house: House) -> tuple[House, list[SnapshotVersion]]:
    """A house that starts from what another one would write."""
    saved = read_models(write_models(house.registry.snapshot(), "x.cfg", 1))
    again = House(tmp_path)
    await again.registry.restore(saved)
    return again, saved


async def test_a_restart_has_weights_keys_and_labels_back(house: House, tmp_path: Path) -> None:
    """The same users get the same versions."""
    traffic = Traffic({"1.0": 70, "2.0": 30}, Sticky(header="X-User", salt="spring"))
    house.registry.traffic.put("m", traffic)
    house.registry.traffic.put_label("m", "stable", "1.0")
    house.registry.traffic.put_label("m", "canary", "2.0")
    before = [house.answered_by(headers=[(b"X-User", b"%d" % user)]) for user in range(50)]

    again, _ = await restarted(tmp_path, house)

    assert again.registry.traffic.rule_of("m") == traffic
    assert again.registry.traffic.labels("m") == house.registry.traffic.labels("m")
    assert [again.answered_by(headers=[(b"X-User", b"%d" % user)]) for user in range(50)] == before
    await again.registry.stop()


async def test_a_version_that_cannot_be_restored_keeps_its_weight_for_later(house: House, tmp_path: Path) -> None:
    """The others share its part meanwhile, and the next snapshot still has it."""
    house.registry.traffic.put("m", Traffic({"1.0": 70, "2.0": 30}))
    (house.store / "m-2.0.mar").unlink()

    again, saved = await restarted(tmp_path, house)

    assert again.registry.traffic.describe("m") == {"weights": {"1.0": 70}}
    assert sorted(again.registry.snapshot(), key=lambda one: one.version) == saved
    await again.registry.stop()


async def test_a_snapshot_of_a_model_without_traffic_is_as_it_was(house: House) -> None:
    """TorchServe reads it; ours is a member more, and only where there is something to say."""
    assert "traffic" not in write_models(house.registry.snapshot(), "x.cfg", 1)

    house.registry.traffic.put_label("m", "stable", "1.0")

    assert '"traffic": {"labels": ["stable"]}' in write_models(house.registry.snapshot(), "x.cfg", 1)


async def test_a_change_of_traffic_is_a_change_to_be_kept(house: House) -> None:
    """A snapshot is written after each."""
    before = house.changes
    house.registry.traffic.put("m", Traffic({"1.0": 1}))
    house.registry.traffic.put_label("m", "stable", "1.0")
    house.registry.traffic.remove_label("m", "stable")
    house.registry.traffic.reset("m")
    house.registry.traffic.reset("m")  # nothing to reset

    assert house.changes == before + 4


# ------------------------------------------------------------------------------------------- orders at random


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 20))])
async def test_whatever_is_ordered_every_request_is_answered_by_a_version_that_may(house: House, seed: int) -> None:
    """Weights, labels, defaults, versions that come and go, workers that die: no request finds a hole."""
    chance = random.Random(seed)
    traffic = house.registry.traffic

    def versions() -> list[str]:
        return [described["modelVersion"] for described in house.registry.describe_all("m")]

    async def order(one: str) -> None:
        deed = chance.randrange(8)
        if deed == 0:
            weights = {name: chance.choice([0, 1, 10]) for name in chance.sample(versions(), len(versions()))}
            if any(weights.values()):
                traffic.put("m", Traffic(weights, chance.choice([None, Sticky(header="k")])))
        elif deed == 1:
            traffic.reset("m")
        elif deed == 2:
            traffic.put_label("m", chance.choice(["a", "b"]), one)
        elif deed == 3:
            house.registry.set_default("m", one)
        elif deed == 4:
            await house.add(f"{chance.randrange(6)}.0")
        elif deed == 5 and len(versions()) > 1:
            await house.registry.unregister("m", one, force=True)
        else:
            house.pools.of("m", one).scale(*chance.choice([(0, 0), (1, 1)]))

    def ask() -> None:
        try:
            told = house.ask(headers=[(b"k", b"%d" % chance.randrange(9))])
        except NoWorker:
            default = next(each for each in house.registry.describe_all("m") if each["isDefault"])
            assert not [worker for worker in default["workers"] if worker["status"] == "READY"]
        else:
            assert told.errors == []
            assert told.bodies[0].split()[1].decode() in versions()

    for _ in range(150):
        with contextlib.suppress(DefaultVersionInUse, VersionConflict):
            await order(chance.choice(versions()))
        for _ in range(5):
            ask()
        assert {names["version"] for names in traffic.labels("m").values()} <= set(versions())
        rule = traffic.rule_of("m")
        assert rule is None or set(rule.weights) <= set(versions())
