"""Tests for TorchServe's management service over gRPC, over pools without processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from marserve.api.grpc.management import SERVICE
from support.fake_pool import Behaviour
from support.grpc_house import Client, client_of, management_port, refusal
from support.management_house import House

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_grpc_loop")]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with a store; stopped in the end, with nothing left."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    yield house
    await house.registry.stop()
    assert house.folders() == []


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    """Who speaks to the management port."""
    async with management_port(house.registry) as port, client_of(port) as client:
        yield client


def begin(client: Client, method: str, **fields: Any) -> Any:
    """Begin a call."""
    return client.method(SERVICE, method)(**fields)


async def told(client: Client, method: str, **fields: Any) -> str:
    """What the server says to a call that succeeds."""
    message: str = (await begin(client, method, **fields)).msg
    return message


async def refused(client: Client, method: str, **fields: Any) -> tuple[str, str]:
    """Status and sentence of one that fails, without TorchServe's class."""
    code, description = await refusal(begin(client, method, **fields))
    return code, description.split("\n")[0]


async def test_a_model_is_registered_with_all_that_is_asked(house: House, client: Client) -> None:
    """All fields arrive; the answer is HTTP's sentence."""
    message = await told(
        client,
        "RegisterModel",
        url=house.put(),
        model_name="full",
        handler="echo.py",
        runtime="python",
        batch_size=5,
        max_batch_delay=77,
        response_timeout=44,
        startup_timeout=55,
        initial_workers=1,
        synchronous=True,
    )

    assert message == 'Model "full" Version: 1.0 registered with 1 initial workers'
    [described] = json.loads(await told(client, "DescribeModel", model_name="full"))
    names = ["batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout", "minWorkers", "maxWorkers"]
    assert [described[name] for name in names] == [5, 77, 44, 55, 1, 1]


async def test_a_registration_does_not_wait_unless_it_is_asked_to(house: House, client: Client) -> None:
    """The other way round than over HTTP."""
    house.pools.behaviours["m"] = Behaviour(load="wait")

    assert await told(client, "RegisterModel", url=house.put(), initial_workers=1) == "Processing worker updates..."


async def test_numbers_below_one_are_not_given(house: House, client: Client) -> None:
    """Every field has a value in these messages."""
    message = await told(client, "RegisterModel", url=house.put(), batch_size=-1, initial_workers=0, max_batch_delay=0)

    assert "registered with 0 initial workers" in message
    [described] = json.loads(await told(client, "DescribeModel", model_name="m"))
    assert (described["batchSize"], described["maxBatchDelay"]) == (1, 100)


@pytest.mark.parametrize(
    ("method", "fields", "expected"),
    [
        ("RegisterModel", {}, ("INVALID_ARGUMENT", "Parameter url is required.")),
        ("RegisterModel", {"url": "gone.mar"}, ("NOT_FOUND", "Model not found at: gone.mar")),
        ("DescribeModel", {"model_name": "x"}, ("NOT_FOUND", "Model not found: x")),
        ("DescribeModel", {"model_name": "x", "customized": True}, ("NOT_FOUND", "Model not found: x")),
        ("DescribeModel", {}, ("INVALID_ARGUMENT", "Parameter model_name is required.")),
        ("DescribeModel", {"customized": True}, ("INVALID_ARGUMENT", "Parameter model_name is required.")),
        ("ScaleWorker", {"model_name": "x"}, ("NOT_FOUND", "Model not found: x")),
        ("ScaleWorker", {"min_worker": 1}, ("INVALID_ARGUMENT", "Parameter model_name is required.")),
        ("SetDefault", {"model_name": "x", "model_version": "1"}, ("NOT_FOUND", "Model not found: x")),
        ("SetDefault", {"model_version": "1"}, ("INVALID_ARGUMENT", "Parameter model_name is required.")),
        ("UnregisterModel", {"model_name": "x"}, ("NOT_FOUND", "Model not found: x")),
        ("UnregisterModel", {}, ("INVALID_ARGUMENT", "Parameter model_name is required.")),
    ],
)
async def test_what_cannot_be_done_says_why(
    client: Client, method: str, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    """A status a client can act on."""
    assert await refused(client, method, **fields) == expected


async def test_versions_are_kept_apart(house: House, client: Client) -> None:
    """Conflicts and the default version have statuses of their own, which TorchServe lacks."""
    for version in ("1.0", "2.0"):
        await told(client, "RegisterModel", url=house.put(version=version))

    assert await refused(client, "RegisterModel", url="m-1.0.mar") == (
        "ALREADY_EXISTS",
        "Model version 1.0 is already registered for model m",
    )
    assert await refused(client, "UnregisterModel", model_name="m", model_version="1.0") == (
        "FAILED_PRECONDITION",
        "Cannot remove default version for model m",
    )
    assert await refused(client, "SetDefault", model_name="m", model_version="9") == (
        "NOT_FOUND",
        "Model version 9 does not exist for model m",
    )
    changed = await told(client, "SetDefault", model_name="m", model_version="2.0")
    assert changed == 'Default version successfully updated for model "m" to "2.0"'
    assert len(json.loads(await told(client, "DescribeModel", model_name="m", model_version="all"))) == 2
    gone = await told(client, "UnregisterModel", model_name="m", model_version="1.0")
    assert gone == 'Model "m" unregistered'
    [described] = json.loads(await told(client, "DescribeModel", model_name="m", model_version="2.0"))
    assert described["modelVersion"] == "2.0"


async def test_workers_are_scaled(house: House, client: Client) -> None:
    """The greatest number is the least where it is not given; fewer than one is one."""
    await told(client, "RegisterModel", url=house.put())

    waited = await told(client, "ScaleWorker", model_name="m", min_worker=2, synchronous=True)
    begun = await told(client, "ScaleWorker", model_name="m", model_version="1.0", min_worker=-3, number_gpu=9)

    assert (waited, begun) == ("Workers scaled to 2 for model: m", "Processing worker updates...")
    assert house.pools.made[0].scaled == [(2, 2), (1, 1)]


async def test_models_are_listed_in_pages(house: House, client: Client) -> None:
    """Without a limit there are a hundred on a page, not none."""
    for name in ("a", "b", "c"):
        await told(client, "RegisterModel", url=house.put(name))

    everything = json.loads(await told(client, "ListModels"))
    first = json.loads(await told(client, "ListModels", limit=2))
    second = json.loads(await told(client, "ListModels", limit=2, next_page_token=2))

    assert [model["modelName"] for model in everything["models"]] == ["a", "b", "c"]
    assert (first["nextPageToken"], len(first["models"]), "nextPageToken" in second) == ("2", 2, False)
    assert second["models"] == [{"modelName": "c", "modelUrl": "c-1.0.mar"}]


async def test_memory_is_declared_as_over_http(house: House, client: Client) -> None:
    """In fields of ours, whose numbers TorchServe has not got."""
    await told(client, "RegisterModel", url=house.put(), memory="2GiB", load="on_demand", pinned=True)

    [version] = house.registry.snapshot()
    assert {**version.options}.items() >= {"memory_bytes": 2 << 30, "load": "on_demand", "is_pinned": True}.items()
    code, sentence = await refused(client, "RegisterModel", url="m-1.0.mar", memory="much")
    assert (code, "memory" in sentence, "much" in sentence) == ("INVALID_ARGUMENT", True, True)


async def test_a_handler_may_describe_itself(house: House, client: Client) -> None:
    """As over HTTP."""
    house.pools.behaviours["m"] = Behaviour(metadata=b'{"author": "somebody"}')
    await told(client, "RegisterModel", url=house.put(), initial_workers=1, synchronous=True)

    [described] = json.loads(await told(client, "DescribeModel", model_name="m", customized=True))

    assert described["customizedMetadata"] == {"author": "somebody"}


async def test_without_the_model_api_nothing_is_registered(house: House) -> None:
    """In TorchServe's words; what changes no list of models may be done."""
    archive = house.put()
    async with management_port(house.registry, enable_model_api=False) as port, client_of(port) as client:
        refusals = [
            await refusal(begin(client, "RegisterModel", url=archive)),
            await refusal(begin(client, "UnregisterModel", model_name="m")),
        ]
        assert json.loads(await told(client, "ListModels")) == {"models": []}

    wanted = ("PERMISSION_DENIED", "Model API disabled\norg.pytorch.serve.archive.model.ModelException")
    assert refusals == [wanted, wanted]


async def test_a_client_that_hangs_up_does_not_stop_a_registration(house: House, client: Client) -> None:
    """Nothing is left half done."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    call = begin(client, "RegisterModel", url=house.put(), initial_workers=1, synchronous=True)
    while not house.pools.made:
        assert not call.done()
        await told(client, "ListModels")
    call.cancel()
    house.pools.made[0].finish_load()

    [described] = json.loads(await told(client, "DescribeModel", model_name="m"))
    assert described["modelName"] == "m"


async def test_describe_says_how_far_the_archive_of_another_version_is(house: House, client: Client) -> None:
    """The answer is HTTP's document, with `arriving`, of a model that is there; one that is not is only not found."""
    await told(client, "RegisterModel", url=house.put(), initial_workers=1, synchronous=True)

    with (
        house.registry.coming.awaiting("http://origin/m-2.0.mar", "m", None),
        house.registry.coming.awaiting("http://origin/n.mar", "n", None),
    ):
        [described] = json.loads(await told(client, "DescribeModel", model_name="m"))
        not_there = await refused(client, "DescribeModel", model_name="n")

    assert [(each["url"], each["state"]) for each in described["arriving"]] == [("http://origin/m-2.0.mar", "waiting")]
    assert not_there == ("NOT_FOUND", "Model not found: n")
