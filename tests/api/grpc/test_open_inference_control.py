"""Tests for the Open Inference Protocol's calls that change the server, over gRPC."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marserve.api.grpc.open_inference_control import ServerControl
from marserve.api.open_inference.regions import Regions
from marserve.api.open_inference.repository import Repository
from marserve.api.open_inference.server_settings import TRACE, LogSettings, TraceSettings
from marserve.desired_state.policies import Changes
from marserve.errors import WrongKey
from support.grpc_house import SCHEMA, Client, client_of, inference_port, management_port, refusal
from support.management_house import House

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_grpc_loop")]

PARAMETER, LOG_VALUE, TRACE_VALUE = (
    SCHEMA.message(f"inference.{name}")
    for name in ("ModelRepositoryParameter", "LogSettingsRequest.SettingValue", "TraceSettingRequest.SettingValue")
)
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("RepositoryModelLoad", {"model_name": "m"}),
    ("RepositoryModelUnload", {"model_name": "m"}),
    ("LogSettings", {"settings": {"log_verbose_level": LOG_VALUE(uint32_param=1)}}),
    ("TraceSetting", {"settings": {"trace_rate": TRACE_VALUE(value=["0"])}}),
    ("SystemSharedMemoryRegister", {"name": "r", "key": "/a", "byte_size": 10}),
    ("SystemSharedMemoryUnregister", {}),
    ("CudaSharedMemoryUnregister", {}),
]


class Levels:
    """The level of a log."""

    server = "info"

    def set(self, level: str, model: str | None) -> None:
        """Change it."""
        self.server = level


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A store with one archive."""
    house = House(tmp_path)
    (house.store / house.put("m")).rename(house.store / "m.mar")
    return house


@pytest.fixture
def control(house: House) -> ServerControl:
    """What the calls change."""
    repository = Repository(house.registry, Changes(house.registry), enable_model_api=True)
    check_exists = house.registry.data_plane.check_exists
    (house.store / "a").write_bytes(bytes(100))
    regions = Regions(house.store, most_bytes=200, most_regions=2)
    return ServerControl(repository, LogSettings(Levels(), "", "default"), check_exists, regions)


def call(client: Client, method: str, **fields: Any) -> Any:
    """Begin a call."""
    return client.method("inference.GRPCInferenceService", method)(**fields)


@pytest.mark.parametrize(("method", "fields"), CHANGES)
async def test_an_inference_port_takes_no_changes_unless_it_is_open(
    house: House, control: ServerControl, method: str, fields: dict[str, Any]
) -> None:
    """The setting is named; what is in force is told."""
    async with (
        inference_port(house.registry, has_open_inference=True, is_open_inference_whole=True, control=control) as port,
        client_of(port) as client,
    ):
        code, words = await refusal(call(client, method, **fields))
        trace = await call(client, "TraceSetting")
        index = await call(client, "RepositoryIndex")

    assert (code, "open_inference_control=true" in words) == ("PERMISSION_DENIED", True)
    assert list(trace.settings["trace_level"].value) == TRACE["trace_level"]
    assert (house.pools.made, list(index.models)) == ([], [])


@pytest.mark.parametrize(("method", "fields"), CHANGES)
async def test_an_open_inference_port_asks_for_the_key_of_management(
    house: House, control: ServerControl, method: str, fields: dict[str, Any]
) -> None:
    """And for its own with every other call."""

    def authorize(wanted: str) -> Any:
        def check(value: str | bytes | None) -> None:
            if value != wanted:
                raise WrongKey(wanted)

        return check

    async with (
        inference_port(
            house.registry,
            authorize=authorize("inference"),
            has_open_inference=True,
            is_open_inference_whole=True,
            control=control,
            authorize_control=authorize("management"),
            is_control_open=True,
        ) as port,
        client_of(port) as client,
    ):
        other = await refusal(call(client, method, **fields, metadata=(("authorization", "inference"),)))
        if method == "RepositoryModelUnload":
            await call(client, "RepositoryModelLoad", model_name="m", metadata=(("authorization", "management"),))
        await call(client, method, **fields, metadata=(("authorization", "management"),))
        index = await call(client, "RepositoryIndex", metadata=(("authorization", "inference"),))
        mine = await refusal(call(client, "RepositoryIndex", metadata=(("authorization", "management"),)))

    assert (other[0], mine[0]) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
    assert [each.name for each in index.models] == ["m"]


async def test_the_management_port_loads_lists_and_unloads(house: House, control: ServerControl) -> None:
    """The states and their reasons are REST's."""
    async with management_port(house.registry, control=control) as port, client_of(port) as client:

        async def index() -> list[tuple[str, ...]]:
            models = (await call(client, "RepositoryIndex")).models
            return [(each.name, each.version, each.state, each.reason) for each in models]

        before = await index()
        await call(client, "RepositoryModelLoad", model_name="m")
        loaded = await index()
        await call(
            client,
            "RepositoryModelUnload",
            model_name="m",
            parameters={"unload_dependents": PARAMETER(bool_param=True)},
        )
        after = await index()

    assert before == [("m", "", "UNAVAILABLE", "not loaded")]
    assert loaded == [("m", "1.0", "READY", "")]
    assert after == [("m", "", "UNAVAILABLE", "unloaded")]


async def test_the_logs_level_is_changed(house: House, control: ServerControl) -> None:
    """The answer has what is in force."""
    async with management_port(house.registry, control=control) as port, client_of(port) as client:
        changed = await call(client, "LogSettings", settings={"log_info": LOG_VALUE(bool_param=False)})
        looked = await call(client, "LogSettings")

    assert changed == looked
    assert (looked.settings["log_warnings"].bool_param, looked.settings["log_info"].bool_param) == (True, False)
    assert looked.settings["log_verbose_level"].WhichOneof("parameter_choice") == "uint32_param"
    assert looked.settings["log_format"].string_param == "default"


@pytest.mark.parametrize(
    ("method", "fields", "code", "words"),
    [
        ("RepositoryModelLoad", {}, "INVALID_ARGUMENT", "model_name"),
        ("RepositoryModelLoad", {"model_name": "x"}, "NOT_FOUND", "'x'"),
        (
            "RepositoryModelLoad",
            {"model_name": "m", "parameters": {"config": PARAMETER(string_param="{}")}},
            "INVALID_ARGUMENT",
            "Parameter config",
        ),
        (
            "RepositoryModelLoad",
            {"model_name": "m", "parameters": {"file:1/a": PARAMETER(bytes_param=b"x")}},
            "INVALID_ARGUMENT",
            "file:1/a",
        ),
        ("RepositoryModelUnload", {"model_name": "m"}, "NOT_FOUND", "m"),
        ("RepositoryModelUnload", {}, "INVALID_ARGUMENT", "model_name"),
        ("LogSettings", {"settings": {"log_info": LOG_VALUE()}}, "INVALID_ARGUMENT", "log_info"),
        ("LogSettings", {"settings": {"log_file": LOG_VALUE(string_param="/x")}}, "INVALID_ARGUMENT", "log_file"),
        ("TraceSetting", {"settings": {"trace_rate": TRACE_VALUE(value=["9"])}}, "INVALID_ARGUMENT", "trace_rate"),
        ("TraceSetting", {"model_name": "x"}, "NOT_FOUND", "x"),
    ],
)
async def test_what_cannot_be_is_named(
    house: House, control: ServerControl, method: str, fields: dict[str, Any], code: str, words: str
) -> None:
    """With the status of what it is; nothing is changed."""
    async with management_port(house.registry, control=control) as port, client_of(port) as client:
        found, told = await refusal(call(client, method, **fields))

    assert (found, words in told) == (code, True)
    assert house.pools.made == []


async def test_trace_settings_are_those_of_the_server(house: House, control: ServerControl) -> None:
    """Of a server that sends a tenth."""
    control = replace(control, trace_settings=TraceSettings(0.1))
    async with management_port(house.registry, control=control) as port, client_of(port) as client:
        found = await call(client, "TraceSetting")

    assert {name: list(value.value) for name, value in found.settings.items()} == {
        **{name: [value] for name, value in TRACE.items()},
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": ["10"],
        "trace_count": ["-1"],
    }


async def test_without_the_protocol_management_has_no_such_calls(house: House) -> None:
    """As under `torchserve`."""
    async with management_port(house.registry) as port, client_of(port) as client:
        assert (await refusal(call(client, "RepositoryModelLoad", model_name="m")))[0] == "UNIMPLEMENTED"


# ------------------------------------------------------------------------------------------- shared memory


async def test_regions_are_registered_shown_and_unregistered(house: House, control: ServerControl) -> None:
    """One by one, and all of them; one that is not there is unregistered already."""
    async with management_port(house.registry, control=control) as port, client_of(port) as client:

        async def status(name: str = "") -> dict[str, tuple[Any, ...]]:
            regions = (await call(client, "SystemSharedMemoryStatus", name=name)).regions
            return {name: (each.name, each.key, each.offset, each.byte_size) for name, each in regions.items()}

        await call(client, "SystemSharedMemoryRegister", name="r", key="/a", offset=4, byte_size=96)
        await call(client, "SystemSharedMemoryRegister", name="s/1", key="a", byte_size=100)
        both, one = await status(), await status("r")
        await call(client, "SystemSharedMemoryUnregister", name="r")
        await call(client, "SystemSharedMemoryUnregister", name="r")
        left = await status()
        await call(client, "SystemSharedMemoryUnregister")
        none, cuda = await status(), await call(client, "CudaSharedMemoryStatus")
        await call(client, "CudaSharedMemoryUnregister")

    assert both == {"r": ("r", "/a", 4, 96), "s/1": ("s/1", "a", 0, 100)}
    assert (one, left) == ({"r": both["r"]}, {"s/1": both["s/1"]})
    assert (none, dict(cuda.regions)) == ({}, {})


@pytest.mark.parametrize(
    ("method", "fields", "words"),
    [
        ("SystemSharedMemoryRegister", {"key": "/a", "byte_size": 10}, "A region's name is ''"),
        ("SystemSharedMemoryRegister", {"name": "r", "byte_size": 10}, "Parameter key is ''"),
        ("SystemSharedMemoryRegister", {"name": "r", "key": "../a", "byte_size": 10}, "Parameter key is '../a'"),
        ("SystemSharedMemoryRegister", {"name": "r", "key": "a"}, "Parameter byte_size is 0"),
        ("SystemSharedMemoryRegister", {"name": "r", "key": "a", "byte_size": 101}, "the file 'a' has 100 bytes"),
        (
            "SystemSharedMemoryRegister",
            {"name": "r", "key": "a", "offset": (1 << 64) - 1, "byte_size": 1},
            "Parameter offset is 18446744073709551615",
        ),
        ("SystemSharedMemoryStatus", {"name": "r"}, "the name 'r'"),
        ("CudaSharedMemoryStatus", {"name": "r"}, "the name 'r'; this server takes none"),
        ("CudaSharedMemoryRegister", {"name": "r", "byte_size": 10}, "takes no CUDA shared memory"),
    ],
)
async def test_memory_that_cannot_be_had_is_an_invalid_argument(
    house: House, control: ServerControl, method: str, fields: dict[str, Any], words: str
) -> None:
    """It names what is wrong, and registers nothing."""
    async with management_port(house.registry, control=control) as port, client_of(port) as client:
        code, told = await refusal(call(client, method, **fields))

    assert (code, words in told) == ("INVALID_ARGUMENT", True)
    assert control.regions.status() == []
