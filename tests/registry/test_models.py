"""Tests for the registry: names, versions, and what may be done to them, over pools without processes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from marserve import wire
from marserve.api.errors import ErrorRules, error_status
from marserve.documents import unpack
from marserve.errors import (
    ArchiveExists,
    BadArchive,
    BadInput,
    BadName,
    CleanUpTimedOut,
    DefaultVersionInUse,
    HandlerFailed,
    LoadFailed,
    MarserveError,
    ModelNotFound,
    NoDescribeWorker,
    VersionConflict,
    VersionNotFound,
)
from marserve.messages import Answer, Load
from marserve.model_options import IN_FORCE, ModelOptions, Said, said_of, say
from marserve.names import encodable, escaped
from marserve.pool.options import PoolOptions
from marserve.registry import models as models_module
from marserve.registry.catalogue.snapshot import SnapshotVersion, read_models, write_models
from marserve.registry.changes import registering
from marserve.registry.changes.swap import SwapParameters
from marserve.registry.intake.registration import Registered, RegisterParameters, Scaled
from marserve.registry.observing.shadow_spec import ShadowSpec
from marserve.settings import ModelDefaults, ModelToLoad
from marserve.store.addresses.fetch_guard import AllowedUrls
from marserve.store.fetching.fetcher import Fetcher
from support.bare_connection import turn_loop
from support.echo_archives import manifest, write_mar
from support.fake_pool import Behaviour, a_death
from support.registrations import registration
from support.registry_house import House

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry whose time-outs are short; after the test it is stopped and nothing of it is left."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    yield house
    for pool in house.pools.made:
        pool.behaviour.never_stops = False
    await house.registry.stop()
    assert house.folders() == []
    assert house.metrics.shown == []


# ------------------------------------------------------------------------------------------- register


async def test_a_version_without_workers_is_registered_and_says_so(house: House) -> None:
    """The sentence is the contract's."""
    registered = await house.add(workers=0)

    assert registered.message == (
        'Model "m" Version: 1.0 registered with 0 initial workers. Use scale workers API to add workers for the model.'
    )
    assert house.pools.of("m").is_started


async def test_a_version_that_wakes_does_not_send_its_client_to_scale_it(house: House) -> None:
    """To scale it would keep it awake for good."""
    archive = house.put("m", "1.0")

    registered = await house.registry.register(registration(archive, load="on_demand"))

    assert registered.message == (
        'Model "m" Version: 1.0 registered with 0 initial workers. The first request starts them.'
    )


async def test_a_registration_waits_for_its_workers(house: House) -> None:
    """It returns when they have loaded the model, not before."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    registration = asyncio.create_task(house.add(workers=2))
    while not house.pools.made:
        await asyncio.sleep(0.001)
    assert not registration.done()

    house.pools.of("m").finish_load()

    assert (await registration).message == 'Model "m" Version: 1.0 registered with 2 initial workers'


async def test_a_registration_that_need_not_wait_does_not(house: House) -> None:
    """The version is listed meanwhile."""
    house.pools.behaviours["m"] = Behaviour(load="wait")

    registered = await house.add(synchronous=False)

    assert (registered.progress, registered.message) == ("begun", "Processing worker updates...")
    assert house.registry.describe("m")["state"] == "loading"


async def test_workers_that_do_not_become_ready_are_told_as_partial(house: House) -> None:
    """For example because the pool was scaled meanwhile."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    registration = asyncio.create_task(house.add())
    while not house.pools.made:
        await asyncio.sleep(0.001)

    await house.registry.unregister("m")

    assert (await registration).message == "Workers scaling in progress..."


@pytest.mark.parametrize(("load", "out_of_memory"), [("fail", False), ("memory", True)])
async def test_a_version_whose_workers_cannot_load_is_gone_again(house: House, load: str, out_of_memory: bool) -> None:
    """Nothing of it is left: no name, no folder, no pool, no metrics."""
    house.pools.behaviours["m"] = Behaviour(load=load)

    with pytest.raises(LoadFailed) as raised:
        await house.add()

    assert raised.value.message == "Failed to start workers for model m version: 1.0"
    assert raised.value.out_of_memory is out_of_memory
    assert house.pools.of("m").is_stopped
    assert (house.folders(), house.metrics.shown) == ([], [])
    with pytest.raises(ModelNotFound):
        house.registry.describe("m")


async def test_a_new_version_that_cannot_load_leaves_the_old_one_serving(house: House) -> None:
    """The default stays, and its requests are answered throughout."""
    await house.add()
    house.pools.behaviours["m"].load = "fail"

    with pytest.raises(LoadFailed):
        await house.add(version="2.0")

    assert house.send().answers == [Answer(b"m 1.0")]
    assert [version["modelVersion"] for version in house.registry.describe_all("m")] == ["1.0"]


async def test_a_version_whose_load_fails_behind_the_back_stays_and_says_why(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it, so the log and describe tell."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    await house.add(synchronous=False)
    pool = house.pools.of("m")

    with caplog.at_level(logging.ERROR, "marserve.registry"):
        pool.last_death = a_death("load_failed", detail="ValueError: no weights")
        pool.is_healthy = False
        pool.finish_load("fail")
        await asyncio.sleep(0.01)

    described = house.registry.describe("m")
    assert described["state"] == "failed"
    assert described["lastDeath"]["detail"] == "ValueError: no weights"
    assert "failed to load: the handler raised" in caplog.text


async def test_the_first_version_is_the_default_and_later_ones_are_not(house: House) -> None:
    """Until somebody says otherwise."""
    await house.add(version="2.0")
    await house.add(version="1.0")

    assert house.send().answers == [Answer(b"m 2.0")]


async def test_a_version_is_registered_once(house: House) -> None:
    """Whatever archive it comes from; the second leaves no folder."""
    await house.add(workers=0)
    write_mar(house.store / "other.mar", manifest("other"))

    with pytest.raises(VersionConflict) as raised:
        await house.registry.register(RegisterParameters("other.mar", model_name="m"))

    assert raised.value.message == "Model version 1.0 is already registered for model m"
    assert len(house.folders()) == 1


async def test_of_registrations_of_one_version_at_the_same_time_exactly_one_wins(house: House) -> None:
    """The others conflict, and leave nothing."""
    write_mar(house.store / "m.mar")
    calls = [house.registry.register(RegisterParameters("m.mar", initial_workers=1)) for _ in range(5)]

    results = await asyncio.gather(*calls, return_exceptions=True)

    assert sum(isinstance(result, Registered) for result in results) == 1
    assert sum(isinstance(result, VersionConflict) for result in results) == 4
    assert (len(house.folders()), len(house.pools.made)) == (1, 1)


async def test_a_caller_that_hangs_up_leaves_nothing_half_done(house: House) -> None:
    """The registration goes on to its end without it."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    registration = asyncio.create_task(house.add())
    while not house.pools.made:
        await asyncio.sleep(0.001)

    registration.cancel()
    await asyncio.wait([registration])
    house.pools.of("m").finish_load("fail")
    while house.folders():
        await asyncio.sleep(0.001)

    with pytest.raises(ModelNotFound):
        house.registry.describe("m")


async def test_names_and_handler_of_the_registration_win(house: House) -> None:
    """Over the manifest's; the manifest that the handler sees stays as it is."""
    write_mar(house.store / "m.mar", manifest("m", None, handler="gone.py"))

    await house.registry.register(RegisterParameters("m.mar", model_name="n", handler="echo.py", initial_workers=1))

    load = house.pools.of("n").load
    assert (load.model, load.version, load.handler) == ("n", "1.0", "echo.py")
    assert load.manifest is not None
    assert load.manifest["model"]["modelName"] == "m"


async def test_dates_of_the_configuration_reach_the_worker_as_dates(tmp_path: Path) -> None:
    """And whatever else YAML has and the wire has not."""
    house = House(tmp_path)
    write_mar(house.store / "m.mar", config="day: 2024-05-06\nlarge: 99999999999999999999\n1: one\n")

    await house.registry.register(RegisterParameters("m.mar"))

    [frame] = wire.encode(house.pools.of("m").load)
    [(load, _)] = wire.Decoder(Load, bytes).feed(bytes(frame))
    assert unpack(load.model_config) == {"day": date(2024, 5, 6), "large": 99999999999999999999, 1: "one"}
    await house.registry.stop()


async def test_a_worker_is_told_all_that_it_needs(tmp_path: Path) -> None:
    """Folder, manifest, configuration and the server's settings travel in one message."""
    house = House(tmp_path, decode_input=False, max_answer_bytes=7, threads=3, envelope="json", gpu_count=2)
    write_mar(house.store / "m.mar", config="batchSize: 4\nmine: {a: [1]}\n")

    await house.registry.register(RegisterParameters("m.mar"))

    load = house.pools.of("m").load
    assert Path(load.model_dir).parent == house.scratch
    assert load.import_paths == []
    assert load.model_config == {"batchSize": 4, "mine": {"a": [1]}}
    assert (load.batch_size, load.decode_input, load.max_answer_bytes, load.threads) == (4, False, 7, 3)
    assert (load.envelope, load.device_type) == ("json", "gpu")
    assert house.pools.of("m").options.gpu_ids == (0, 1)
    await house.registry.stop()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "Model name is not defined."),
        ({"runtime": "python"}, "Model name is not defined."),
        ({"runtime": "python", "model": None}, "Missing Model entry in manifest file."),
        (manifest(None), "Model name is not defined."),
        ({**manifest(), "runtime": "ruby"}, "Runtime is not defined or invalid."),
        ({**manifest(), "runtime": "LSP"}, "Runtime is not defined or invalid."),
    ],
)
async def test_an_archive_that_says_too_little_is_refused(house: House, document: dict[str, Any], message: str) -> None:
    """In the contract's words, and without a folder left."""
    write_mar(house.store / "m.mar", document)

    with pytest.raises(BadArchive) as raised:
        await house.registry.register(RegisterParameters("m.mar"))

    assert raised.value.message == message
    assert house.folders() == []


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"runtime": "ruby"}, "Invalid RuntimeType value: ruby"),
        ({"runtime": "Python"}, "Invalid RuntimeType value: Python"),
        ({"runtime": "LSP"}, "LSP"),
        ({"initial_workers": -1}, "initial_workers must be 0 or more."),
        ({"initial_workers": 10**6}, "initial_workers must be 4096 or less."),
    ],
)
async def test_values_that_cannot_be_meant_are_refused(house: House, values: dict[str, Any], word: str) -> None:
    """Before anything is unpacked."""
    with pytest.raises(BadInput) as raised:
        await house.registry.register(RegisterParameters("m.mar", **values))

    assert word in raised.value.message


async def test_a_handler_that_is_nowhere_is_found_before_a_worker_starts(house: House) -> None:
    """As a failed load where the caller waits for workers, else as a bad archive; nothing is registered."""
    write_mar(house.store / "m.mar", manifest(handler="gone.py"))

    with pytest.raises(LoadFailed) as load_failed:
        await house.registry.register(RegisterParameters("m.mar", initial_workers=1))
    with pytest.raises(BadArchive):
        await house.registry.register(RegisterParameters("m.mar"))
    with pytest.raises(BadArchive):
        await house.registry.register(RegisterParameters("m.mar", initial_workers=1, synchronous=False))

    assert load_failed.value.message == "Failed to start workers for model m version: 1.0"
    assert "gone.py" in load_failed.value.reason
    assert (house.pools.made, house.folders()) == ([], [])


async def test_an_archive_without_a_handler_gets_the_server_s_default_one(tmp_path: Path) -> None:
    """The setting `default_service_handler`."""
    house = House(tmp_path, default_handler="echo.py")
    write_mar(house.store / "m.mar", manifest(handler=None))

    await house.registry.register(RegisterParameters("m.mar"))

    assert house.pools.of("m").load.handler == "echo.py"
    await house.registry.stop()


async def test_what_was_not_used_is_logged_once_and_shown(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """From the registration and from the archive."""
    write_mar(house.store / "m.mar", config="batchSize: many\n")

    await house.registry.register(RegisterParameters("m.mar", warnings=("colour is not known",)))

    warnings = house.registry.describe("m")["warnings"]
    assert warnings[0] == "colour is not known"
    assert "batchSize" in warnings[1]
    assert caplog.text.count("colour is not known") == 1


# ------------------------------------------------------------------------------------------- scale


async def test_a_version_is_scaled_and_the_answer_says_which(house: House) -> None:
    """Named or not, waited for or not."""
    await house.add(workers=0)
    scale = house.registry.scale

    waited = await scale("m", None, min_workers=2, max_workers=3, synchronous=True)
    named = await scale("m", "1.0", min_workers=1, max_workers=1, synchronous=True)
    begun = await scale("m", None, min_workers=1, max_workers=1, synchronous=False)

    assert waited.message == "Workers scaled to 2 for model: m"
    assert named.message == "Workers scaled to 1 for model: m, version: 1.0"
    assert begun == Scaled("m", None, 1, "begun")
    assert house.pools.of("m").scaled == [(2, 3), (1, 1), (1, 1)]
    assert [house.registry.describe("m")[key] for key in ("minWorkers", "maxWorkers")] == [1, 1]


async def test_scaling_to_none_ends_all_workers_whatever_the_most_may_be(house: House) -> None:
    """Nobody is lost from the books (contract, Q14)."""
    await house.add(workers=2)

    await house.registry.scale("m", None, min_workers=0, max_workers=3, synchronous=True)

    assert house.pools.of("m").scaled == [(0, 0)]
    assert house.registry.describe("m")["workers"] == []


async def test_scaling_to_the_same_number_reaches_the_pool(house: House) -> None:
    """There it starts dead workers again (contract, Q15)."""
    await house.add(workers=1)

    await house.registry.scale("m", None, min_workers=1, max_workers=1, synchronous=False)

    assert house.pools.of("m").scaled == [(1, 1)]


@pytest.mark.parametrize(
    ("least", "most", "message"),
    [
        (3, 1, "max_worker cannot be less than min_worker."),
        (-1, 1, "min_worker and max_worker must be between 0 and 4096."),
        (1, 10**9, "min_worker and max_worker must be between 0 and 4096."),
    ],
)
async def test_numbers_of_workers_that_cannot_be_meant_are_refused(
    house: House, least: int, most: int, message: str
) -> None:
    """And nothing changes."""
    await house.add(workers=0)

    with pytest.raises(BadInput) as raised:
        await house.registry.scale("m", None, min_workers=least, max_workers=most, synchronous=True)

    assert raised.value.message == message
    assert house.pools.of("m").scaled == []


@pytest.mark.parametrize(("named", "word"), [(None, "null"), ("1.0", "1.0")])
async def test_scaling_a_version_that_cannot_load_fails_and_keeps_it(
    house: House, named: str | None, word: str
) -> None:
    """The contract writes `null` where no version was named."""
    await house.add(workers=0)
    house.pools.of("m").behaviour.load = "memory"

    with pytest.raises(LoadFailed) as raised:
        await house.registry.scale("m", named, min_workers=1, max_workers=1, synchronous=True)

    assert raised.value.message == f"Failed to start workers for model m version: {word}"
    assert raised.value.out_of_memory
    assert house.registry.describe("m")["modelName"] == "m"


# ------------------------------------------------------------------------------------------- describe, list


async def test_describe_customized_carries_what_the_handler_says(house: House) -> None:
    """The request is of its own kind and carries the header that handlers look for."""
    house.pools.behaviours["m"] = Behaviour(metadata=b'{"inputs": ["pixels"]}', headers=[("x-mine", "1")])
    await house.add()

    described, answer = await house.registry.describe_customized("m")

    assert described["customizedMetadata"] == {"inputs": ["pixels"]}
    assert answer.headers == [("x-mine", "1")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b"null", None), (b"[1]", {}), (b"no json", {}), (b'"text"', {}), (b'{"a": NaN}', {}), (b"[" * 100_000, {})],
)
async def test_only_an_object_is_metadata(house: House, body: bytes, expected: dict[str, Any] | None) -> None:
    """null is none at all, anything else an empty object."""
    house.pools.behaviours["m"] = Behaviour(metadata=body)
    await house.add()

    described, _ = await house.registry.describe_customized("m")

    assert described.get("customizedMetadata") == expected


async def test_describe_customized_needs_a_worker(house: House) -> None:
    """Its refusal speaks of describing."""
    await house.add(workers=0)

    with pytest.raises(NoDescribeWorker) as raised:
        await house.registry.describe_customized("m")

    assert raised.value.message == (
        'Model "m" has no worker to serve describe request. Please use scale workers API to add workers.'
    )


async def test_describe_customized_at_a_full_queue_is_a_refusal_for_overload(house: House) -> None:
    """In the words of a describe, with the cause and the time to come back; a setting may make it 429."""
    house.pools.behaviours["m"] = Behaviour(holds=True)
    await house.add()
    pool = house.pools.of("m")
    pool.options = replace(pool.options, queue_size=0)

    with pytest.raises(NoDescribeWorker) as raised:
        await house.registry.describe_customized("m")

    assert (raised.value.cause, raised.value.retry_after_s) == ("queue_full", 2.0)
    assert raised.value.message.startswith('Model "m" has no worker to serve describe request.')
    assert error_status(raised.value) == 503
    assert error_status(raised.value, ErrorRules(429)) == 429


async def test_describe_customized_does_not_wait_for_ever(house: House) -> None:
    """After the response time-out the request is taken back."""
    house.pools.behaviours["m"] = Behaviour(metadata=None)
    write_mar(house.store / "m.mar")
    await house.registry.register(registration("m.mar", initial_workers=1, response_timeout_s=1))

    with pytest.raises(HandlerFailed) as raised:
        await house.registry.describe_customized("m")

    assert raised.value.code == 500
    assert house.pools.of("m").held == []


async def test_the_list_names_default_versions_and_pages_end_where_models_do(house: House) -> None:
    """A token is there only if something follows (contract, Q17)."""
    for name in "cab":
        await house.add(name, workers=0)
    await house.add("a", "2.0", workers=0)
    house.registry.set_default("a", "2.0")

    first = house.registry.list_models(limit=2)
    last = house.registry.list_models(limit=2, offset=first.next_offset)
    exact = house.registry.list_models(limit=3)

    assert first.models == [("a", "a-2.0.mar"), ("b", "b-1.0.mar")]
    assert (last.models, last.next_offset) == ([("c", "c-1.0.mar")], None)
    assert exact.next_offset is None


@pytest.mark.parametrize(
    ("limit", "offset", "count"), [(0, None, 3), (-1, -5, 3), (101, 0, 3), (None, 10**30, 0), (1, 2, 1)]
)
async def test_odd_limits_and_offsets_have_a_meaning(
    house: House, limit: int | None, offset: int | None, count: int
) -> None:
    """0 is the default too, so that nobody pages for ever."""
    for name in "abc":
        await house.add(name, workers=0)

    assert len(house.registry.list_models(limit, offset).models) == count


# ------------------------------------------------------------------------------------------- unregister, default


async def test_an_unregistered_version_answers_what_it_had_accepted(house: House) -> None:
    """What comes later is not found; afterwards its folder is gone."""
    house.pools.behaviours["m"] = Behaviour(holds=True)
    await house.add()
    told = house.send()

    unregistering = asyncio.create_task(house.registry.unregister("m"))
    await turn_loop()
    with pytest.raises(ModelNotFound):
        house.send()
    assert not unregistering.done()
    house.pools.of("m").held[0].answer(Answer(b"late"))
    await unregistering

    assert told.answers == [Answer(b"late")]
    assert house.folders() == []


async def test_the_same_version_can_be_registered_while_the_old_one_drains(house: House) -> None:
    """They share nothing."""
    house.pools.behaviours["m"] = Behaviour(holds=True)
    await house.add()
    told = house.send()
    unregistering = asyncio.create_task(house.registry.unregister("m"))
    await turn_loop()

    await house.add()
    house.pools.made[0].held[0].answer(Answer(b"old"))
    await unregistering

    assert told.answers == [Answer(b"old")]
    assert len(house.folders()) == 1
    assert house.registry.describe("m")["modelName"] == "m"


async def test_the_default_version_cannot_go_while_others_exist(house: House) -> None:
    """Named or unnamed; as the last one it can."""
    await house.add()
    await house.add(version="2.0")

    for version in ("1.0", None):
        with pytest.raises(DefaultVersionInUse, match="Cannot remove default version for model m"):
            await house.registry.unregister("m", version)
    await house.registry.unregister("m", "2.0")
    await house.registry.unregister("m")

    assert house.registry.list_models().models == []


async def test_unregistering_what_is_not_there_is_refused(house: House) -> None:
    """Model and version are told apart."""
    await house.add(workers=0)

    with pytest.raises(ModelNotFound):
        await house.registry.unregister("nobody")
    with pytest.raises(VersionNotFound):
        await house.registry.unregister("m", "7")


async def test_a_version_whose_workers_will_not_end_is_told_of_and_gone_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is free at once."""
    monkeypatch.setattr(registering, "KILL_GRACE_S", 0.01)
    house.pools.behaviours["m"] = Behaviour(never_stops=True)
    await house.add()

    with pytest.raises(CleanUpTimedOut, match="Timed out while cleaning resources: m"):
        await house.registry.unregister("m")

    with pytest.raises(ModelNotFound):
        house.registry.describe("m")
    monkeypatch.setattr(models_module, "STOP_LIMIT_S", 0.05)
    await house.registry.stop()


async def test_a_shadow_ends_with_its_model_though_another_of_the_name_came_meanwhile(house: House) -> None:
    """It would find the workers of the new one, and make them yield."""
    house.pools.behaviours["m"] = Behaviour(holds=True)
    await house.add()
    await house.add(version="2.0")
    house.registry.mirrors.put("m", ShadowSpec("2.0"))
    shadow = house.registry.mirrors.shadow_of("m")
    assert shadow is not None
    await house.registry.unregister("m", "2.0")
    house.send()
    last = asyncio.create_task(house.registry.unregister("m"))
    while "m" in house.registry.actual():
        await asyncio.sleep(0.001)

    await house.add()
    await last

    assert shadow.is_stopped
    assert house.registry.mirrors.shadow_of("m") is None


async def test_a_new_default_answers_from_the_next_request_on(house: House) -> None:
    """And what it replaced still answers by name."""
    await house.add()
    await house.add(version="2.0")

    house.registry.set_default("m", "2.0")

    assert house.send().answers == [Answer(b"m 2.0")]
    assert house.send(version="1.0").answers == [Answer(b"m 1.0")]
    assert [version["isDefault"] for version in house.registry.describe_all("m")] == [False, True]


async def test_a_default_that_is_not_there_is_refused(house: House) -> None:
    """The text has no colon here."""
    await house.add(workers=0)

    with pytest.raises(ModelNotFound):
        house.registry.set_default("nobody", "1.0")
    with pytest.raises(VersionNotFound) as raised:
        house.registry.set_default("m", "5.5")
    assert raised.value.message == "Model version 5.5 does not exist for model m"


async def test_when_a_default_version_fails_to_load_the_oldest_other_becomes_it(house: House) -> None:
    """Registered while the first one was still loading."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    first = asyncio.create_task(house.add())
    while not house.pools.made:
        await asyncio.sleep(0.001)
    await house.add(version="2.0", workers=0)

    house.pools.of("m").finish_load("fail")
    with pytest.raises(LoadFailed):
        await first

    assert house.registry.describe("m")["modelVersion"] == "2.0"


# ------------------------------------------------------------------------------------------- start-up


async def test_models_of_the_start_are_loaded_in_the_order_of_the_setting(tmp_path: Path) -> None:
    """They get the configured number of workers, and the first version of a name is its default."""
    house = House(tmp_path, workers_at_startup=3)
    write_mar(house.store / "b.mar", manifest("b", "2.0"))
    write_mar(house.store / "a.mar", manifest("b", "1.0"))

    await house.registry.load_at_start((ModelToLoad("b.mar"), ModelToLoad("a.mar")))

    described = house.registry.describe("b")
    assert (described["modelVersion"], described["minWorkers"], described["loadedAtStartup"]) == ("2.0", 3, True)
    assert house.registry.data_plane.only_startup_model == "b"
    await house.registry.stop()


async def test_all_loads_what_the_store_holds_and_a_bad_one_is_left_out(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts with the others and tells why one is missing."""
    write_mar(house.store / "a.mar", manifest("a"))
    (house.store / "bad.mar").write_bytes(b"noise")
    write_mar(house.store / "nameless file.mar", manifest(None))

    await house.registry.load_at_start("all")
    await turn_loop()

    assert [name for name, _ in house.registry.list_models().models] == ["a", "nameless_file"]
    assert "Failed to load model: bad.mar" in caplog.text
    readiness = house.registry.readiness()
    assert (readiness.is_ready, readiness.is_started) == (True, True)
    assert "bad.mar was not loaded" in readiness.startup_reasons[0]
    assert house.registry.data_plane.only_startup_model is None


async def test_the_models_setting_configures_models_of_the_start(tmp_path: Path) -> None:
    """It configures and does not load."""
    values = ModelDefaults(
        say(min_workers=1, max_workers=2, batch_size=6, max_batch_delay_s=0.04, response_timeout_s=25)
    )
    house = House(tmp_path, models={"m": {"1.0": values}, "other": {"1.0": values}})
    write_mar(house.store / "m.mar")

    await house.registry.load_at_start((ModelToLoad("m.mar"),))

    described = house.registry.describe("m")
    keys = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout")
    assert [described[key] for key in keys] == [1, 2, 6, 40, 25]
    assert len(house.registry.list_models().models) == 1
    await house.registry.stop()


async def test_a_server_has_started_when_its_models_have(house: House) -> None:
    """Not when they were only found."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    write_mar(house.store / "m.mar")
    assert not house.registry.readiness().is_started

    await house.registry.load_at_start((ModelToLoad("m.mar"),))
    before = house.registry.readiness()
    house.pools.of("m").finish_load()
    await turn_loop()
    after = house.registry.readiness()

    assert (before.is_started, before.is_ready) == (False, False)
    assert (after.is_started, after.is_ready) == (True, True)


# ------------------------------------------------------------------------------------------- the end


async def test_a_server_that_is_about_to_drain_is_not_ready_and_still_answers(house: House) -> None:
    """Requests that are on their way already must not be refused."""
    await house.add()
    await house.registry.load_at_start(())

    house.registry.begin_drain()

    assert not house.registry.readiness().is_ready
    assert house.send().answers == [Answer(b"m 1.0")]


async def test_stopping_ends_a_registration_that_waits(house: House) -> None:
    """Nobody hangs, and nothing is left."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    registration = asyncio.create_task(house.add())
    while not house.pools.made:
        await asyncio.sleep(0.001)

    await house.registry.stop()

    assert (await registration).progress == "partial"
    assert not house.scratch.exists()


async def test_stopping_hurries_a_version_that_is_leaving(tmp_path: Path) -> None:
    """Its requests are given up then."""
    house = House(tmp_path, unregister_timeout_s=60.0)
    house.pools.behaviours["m"] = Behaviour(holds=True)
    await house.add()
    told = house.send()
    unregistering = asyncio.create_task(house.registry.unregister("m"))
    await turn_loop()

    await house.registry.stop()
    await unregistering

    assert len(told.errors) == 1
    assert house.folders() == []


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_done_at_once_the_end_is_the_sum_of_what_was_accepted(house: House, seed: int) -> None:
    """Random registrations, removals, scalings and defaults side by side: typed errors only, and true books."""
    dice = random.Random(seed)
    for name in "ab":
        for version in ("1.0", "2.0", "3.0"):
            write_mar(house.store / f"{name}{version}.mar", manifest(name, version))
    expected: set[tuple[str, str]] = set()

    async def act() -> None:
        for _ in range(25):
            name, version = dice.choice("ab"), dice.choice(("1.0", "2.0", "3.0"))
            parameters = RegisterParameters(f"{name}{version}.mar", initial_workers=dice.randrange(3))
            try:
                match dice.randrange(5):
                    case 0 | 1:
                        await house.registry.register(parameters)
                        expected.add((name, version))
                    case 2:
                        await house.registry.unregister(name, version)
                    case 3:
                        await house.registry.scale(name, None, min_workers=1, max_workers=2, synchronous=True)
                    case _:
                        house.registry.set_default(name, version)
            except MarserveError:
                continue

    await asyncio.gather(*(act() for _ in range(6)))

    listed = {
        (name, described["modelVersion"])
        for name, _ in house.registry.list_models().models
        for described in house.registry.describe_all(name)
    }
    living = {(pool.options.model, pool.options.version) for pool in house.pools.made if not pool.is_stopped}
    assert listed == living
    assert listed <= expected
    assert len(house.folders()) == len(listed) == len(house.metrics.shown)
    for name, _ in house.registry.list_models().models:
        assert sum(described["isDefault"] for described in house.registry.describe_all(name)) == 1


# ------------------------------------------------------------------------------------------- snapshots


def version_of(model: str, version: str, **changes: Any) -> SnapshotVersion:
    """A version of the house's store, as a snapshot has it."""
    options = Said(
        said_of(PoolOptions(model, version, 1, 1), *IN_FORCE),
        {name: changes.pop(name) for name in list(changes) if name in ModelOptions.__dataclass_fields__},
    )
    plain = SnapshotVersion(model, version, f"{model}-{version}.mar", False, options)
    return replace(plain, **changes)


async def test_a_snapshot_holds_what_the_models_are_now(house: House) -> None:
    """What was scaled, tuned and made the default since; the handler where a registration named one."""
    await house.add("m", "1.0", workers=2, batch_size=4, max_batch_delay_s=0.033, response_timeout_s=21)
    await house.add("m", "2.0", handler="echo.py:handle")
    await house.registry.scale("m", "1.0", min_workers=1, max_workers=3, synchronous=True)
    house.registry.tune("m", "2.0", batch_size=8, max_batch_delay_s=None)
    house.registry.set_default("m", "2.0")

    assert house.registry.snapshot() == [
        version_of("m", "1.0", max_workers=3, batch_size=4, max_batch_delay_s=0.033, response_timeout_s=21),
        version_of("m", "2.0", is_default=True, batch_size=8, handler="echo.py:handle"),
    ]


async def test_what_a_snapshot_holds_comes_back(house: House) -> None:
    """Values, versions, defaults; loaded at the start and yet not by the setting."""
    await house.add("a", "1.0", workers=0, batch_size=3)
    await house.add("b", "1.0", workers=2)
    await house.add("b", "2.0", handler="echo.py:handle")
    house.registry.set_default("b", "2.0")
    versions = house.registry.snapshot()

    for model, version in (("a", None), ("b", "1.0"), ("b", None)):
        await house.registry.unregister(model, version)
    changes = house.changes

    await house.registry.restore(read_models(write_models(versions, "x", 1)))

    assert house.registry.snapshot() == versions
    described = house.registry.describe("b")
    assert (described["modelUrl"], described["loadedAtStartup"]) == ("b-2.0.mar", False)
    assert house.changes == changes


async def test_the_values_of_a_snapshot_go_before_the_archives(house: House) -> None:
    """Though the archive's go before a registration's."""
    config = "minWorkers: 4\nmaxWorkers: 4\nbatchSize: 7\nresponseTimeout: 5\nmaxBatchDelay: 9\n"
    write_mar(house.store / "m-1.0.mar", manifest("m", "1.0"), config=config)
    wanted = version_of("m", "1.0", is_default=True, min_workers=1, max_workers=2, batch_size=2, response_timeout_s=60)

    await house.registry.restore([wanted])

    assert house.registry.snapshot() == [wanted]


async def test_what_cannot_be_restored_stays_in_snapshots_until_it_is_unregistered(house: House) -> None:
    """The others are there, the log and the probes say what is missing, and the next start tries it again."""
    good, bad = version_of("good", "1.0", is_default=True), version_of("bad", "1.0", is_default=True)
    house.put("good")
    (house.store / "bad-1.0.mar").write_bytes(b"no archive")

    await house.registry.restore([bad, good])

    assert [name for name, _ in house.registry.list_models().models] == ["good"]
    assert set(house.registry.snapshot()) == {good, bad}
    assert any("bad-1.0.mar was not loaded" in reason for reason in house.registry.readiness().startup_reasons)
    with pytest.raises(ModelNotFound):
        await house.registry.unregister("bad")
    assert house.registry.snapshot() == [good]
    assert house.changes == 1


ODD_NAMES = ["a\x1b[2J", "a\u202eb", "a\u2028b", "\ud800", ".", ".."]


@pytest.mark.parametrize("odd", ODD_NAMES)
async def test_no_model_or_version_is_newly_registered_under_a_name_that_misleads(house: House, odd: str) -> None:
    """Whether the call or the archive gives it; nothing is left of it, and nothing is fetched for the call's."""
    write_mar(house.store / "model.mar", manifest(odd, "1.0"))
    write_mar(house.store / "version.mar", manifest("m", odd))

    for parameters in (
        RegisterParameters("not_there.mar", model_name=odd),
        RegisterParameters("model.mar"),
        RegisterParameters("version.mar"),
    ):
        with pytest.raises(BadName):
            await house.registry.register(parameters)

    assert error_status(BadName("")) == 400
    assert (house.registry.list_models().models, house.folders()) == ([], [])


@pytest.mark.parametrize("odd", ODD_NAMES)
async def test_a_start_keeps_such_a_name_and_warns(house: House, odd: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of the setting and of a snapshot alike; the warning shows it escaped."""
    house.put("m")
    write_mar(house.store / "other.mar", manifest("other", odd))

    await house.registry.load_at_start([ModelToLoad("m-1.0.mar", odd)])
    await house.registry.restore([version_of("other", odd, archive="other.mar", is_default=True)])

    kept, shown = encodable(odd), escaped(odd)
    assert {one.model for one in house.registry.snapshot()} == {kept, "other"}
    assert all(msgspec.msgpack.encode(pool.load) for pool in house.pools.made)  # a worker can be told
    [model], [version] = house.registry.describe(kept)["warnings"], house.registry.describe("other")["warnings"]
    assert model.startswith(f"the model name '{shown}' ")
    assert version.startswith(f"the version name '{shown}' ")
    assert any(model in record.getMessage() for record in caplog.records)


async def test_a_model_that_is_there_gets_no_version_of_such_a_name(house: House) -> None:
    """The version's name is new."""
    await house.add("m", "1.0", workers=0)
    write_mar(house.store / "odd.mar", manifest("m", "2\u202e"))

    with pytest.raises(BadName, match="The version name"):
        await house.registry.register(RegisterParameters("odd.mar"))

    assert [each["modelVersion"] for each in house.registry.describe_all("m")] == ["1.0"]


@pytest.mark.parametrize("word", ["all", "check", "logs", "optimise", "profile", "stats"])
async def test_no_version_is_newly_called_as_a_word_of_the_api(house: House, word: str) -> None:
    """`/models/m/stats` is not about a version of that name."""
    house.put("m", word)

    with pytest.raises(
        BadName, match=f"'{word}' is one of all, check, logs, optimise, profile, stats.*choose another version name"
    ):
        await house.registry.register(RegisterParameters(f"m-{word}.mar"))

    assert (house.registry.list_models().models, house.folders()) == ([], [])


async def test_a_start_keeps_a_version_that_is_called_as_a_word_of_the_api(house: House) -> None:
    """With a warning."""
    house.put("m", "stats")

    await house.registry.load_at_start([ModelToLoad("m-stats.mar", "m")])

    [warning] = house.registry.describe("m", "stats")["warnings"]
    assert warning.startswith("the version name 'stats' is one of")


async def test_as_torchserve_such_a_version_is_registered_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As TorchServe takes any text; the log says it."""
    house = House(tmp_path, as_torchserve=True)
    house.put("m", "stats")

    await house.registry.register(RegisterParameters("m-stats.mar"))

    assert [each["modelVersion"] for each in house.registry.describe_all("m")] == ["stats"]
    assert any("'stats' is one of" in record.getMessage() for record in caplog.records)


async def test_a_model_that_has_such_a_name_can_be_swapped(house: House) -> None:
    """It is not a new name."""
    house.put("m")
    await house.registry.load_at_start([ModelToLoad("m-1.0.mar", "a\u202eb")])

    swapped = await house.registry.swap(SwapParameters("a\u202eb", RegisterParameters("m-1.0.mar")))

    assert swapped.version == "1.0"


async def test_a_snapshot_of_too_many_workers_is_not_restored(house: House) -> None:
    """A slip of the finger must not start a hundred thousand processes."""
    house.put("m")

    await house.registry.restore([version_of("m", "1.0", max_workers=100_000)])

    assert house.registry.list_models().models == []


async def test_every_change_that_somebody_asked_for_is_told(house: House) -> None:
    """Once it has succeeded; what failed and what the start loads is none."""
    await house.add("m", "1.0")
    await house.add("m", "2.0", workers=0)
    await house.add("m", "3.0", synchronous=False)
    assert house.changes == 3
    house.pools.behaviours["broken"] = Behaviour(load="fail")
    with pytest.raises(LoadFailed):
        await house.add("broken")
    with pytest.raises(ModelNotFound):
        house.registry.set_default("nobody", "1.0")
    assert house.changes == 3

    await house.registry.scale("m", None, min_workers=2, max_workers=2, synchronous=True)
    house.registry.tune("m", None, batch_size=2, max_batch_delay_s=None)
    house.registry.set_default("m", "2.0")
    await house.registry.unregister("m", "1.0")

    assert house.changes == 7
    house.put("later")
    await house.registry.load_at_start((ModelToLoad("later-1.0.mar"),))
    assert house.changes == 7


async def test_what_an_earlier_start_fetched_is_not_fetched_again(tmp_path: Path) -> None:
    """At the start the store's archive is taken; a registration is refused as by TorchServe."""
    source = write_mar(tmp_path / "m.mar", manifest("m", "1.0"))
    house = House(tmp_path / "house", fetcher=Fetcher(AllowedUrls(["file://.*"])))
    address = f"file://{source}"
    await house.registry.load_at_start((ModelToLoad(address),))
    first = house.registry.snapshot()
    await house.registry.unregister("m")

    await house.registry.load_at_start((ModelToLoad(address),))
    second = house.registry.snapshot()
    await house.registry.unregister("m")
    with pytest.raises(ArchiveExists):
        await house.registry.register(RegisterParameters(address))
    await house.registry.stop()

    assert first == second
    assert [version.archive for version in first] == ["m.mar"]
    assert [path.name for path in house.store.iterdir()] == ["m.mar"]


async def test_nodes_of_workflows_are_in_no_snapshot(house: House) -> None:
    """Their workflow registers them."""
    await house.add("w__m", workflow="w")

    assert house.registry.snapshot() == []
    assert house.changes == 0
