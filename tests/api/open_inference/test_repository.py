"""Tests for loading and unloading models by their names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from marserve.api.open_inference import repository
from marserve.api.open_inference.repository import Repository
from marserve.desired_state.policies import Changes
from marserve.errors import BadInput, DesiredStateDecides, LoadFailed, ModelApiClosed, ModelNotFound, NotInStore
from marserve.registry.intake.registration import RegisterParameters
from support.fake_pool import Behaviour
from support.management_house import House

pytestmark = pytest.mark.anyio


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A store with two archives, of which none is registered."""
    house = House(tmp_path)
    house.put("m", "1.0").replace("m-1.0", "m")
    (house.store / "m-1.0.mar").rename(house.store / "m.mar")
    house.put("n", "2.0")
    return house


def of(house: House, *, enable_model_api: bool = True, **changes: Any) -> Repository:
    """The repository of a registry."""
    return Repository(house.registry, Changes(house.registry, **changes), enable_model_api=enable_model_api)


async def shown(repository: Repository, *, only_ready: bool = False) -> list[tuple[str, str, str, str]]:
    """The index, without its keys."""
    return [tuple(each.values()) for each in await repository.index(only_ready=only_ready)]  # type: ignore[misc]


# ------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"config": "{}"}, "Parameter config of a load is not taken"),
        ({"file:1/model.onnx": "aGk="}, "Parameter 'file:1/model.onnx' of a load is not taken"),
        ({"file:" + "x" * 1000: 1}, "of a load is not taken"),
        ({"other": True}, "Parameter 'other' of a load is not known"),
    ],
)
async def test_a_load_with_parameters_is_refused_by_their_names(
    house: House, parameters: dict[str, Any], words: str
) -> None:
    """Nothing is registered, and the sentence is bounded."""
    with pytest.raises(BadInput) as caught:
        await of(house).load("m", parameters)

    assert words in str(caught.value)
    assert len(str(caught.value)) < 400
    assert house.registry.default_of("m") is None


@pytest.mark.parametrize("parameters", [{"unload_dependents": "yes"}, {"config": "{}"}, {"unload_dependents": None}])
async def test_an_unload_with_other_parameters_is_refused(house: House, parameters: dict[str, Any]) -> None:
    """And the model stays."""
    await of(house).load("m", {})

    with pytest.raises(BadInput):
        await of(house).unload("m", parameters)
    assert house.registry.default_of("m") == "1.0"


@pytest.mark.parametrize("name", ["other", "", "..", "../m", "x/m", "m/", "m.ma", "M", "m\0", "n", "é" * 5000])
async def test_a_name_that_is_nowhere_is_not_found(house: House, name: str) -> None:
    """An archive of the store is found by its own name alone, whatever leads to it."""
    with pytest.raises(NotInStore):
        await of(house).load(name, {})
    with pytest.raises(ModelNotFound):
        await of(house).unload(name, {})


async def test_without_the_model_api_nothing_is_loaded_or_listed(house: House) -> None:
    """As over the management API."""
    closed = of(house, enable_model_api=False)

    for call in (closed.load, closed.unload):
        with pytest.raises(ModelApiClosed, match="enable_model_api"):
            await call("m", {})
    assert await shown(closed) == []


async def test_a_desired_state_decides(house: House) -> None:
    """Where it refuses calls."""
    with pytest.raises(DesiredStateDecides):
        await of(house, refused_by="models.yaml").load("m", {})


async def test_a_model_that_cannot_load_is_not_left_behind(house: House) -> None:
    """The error is that of a registration, and the index has the model as it was."""
    house.pools.behaviours["m"] = Behaviour(load="fail")
    models = of(house)

    with pytest.raises(LoadFailed):
        await models.load("m", {})
    assert ("m", "", "UNAVAILABLE", "not loaded") in await shown(models)


# ------------------------------------------------------------------------------------------- done


async def test_a_model_of_the_store_is_loaded_until_it_is_ready(house: House) -> None:
    """By the archive's name, with or without its ending; again it changes nothing."""
    models = of(house)

    await models.load("m", {})
    await models.load("m", {})
    await models.load("n-2.0", {})

    assert house.registry.data_plane.is_model_ready("m")
    assert len(house.pools.made) == 2
    assert await shown(models) == [("m", "1.0", "READY", ""), ("n-2.0", "2.0", "READY", "")]
    assert await shown(models, only_ready=True) == await shown(models)


async def test_a_registered_model_without_workers_is_given_one(house: House) -> None:
    """The call returns when it is ready."""
    await house.registry.register(RegisterParameters("m.mar", initial_workers=0))
    models = of(house)
    assert ("m", "1.0", "UNAVAILABLE", "idle") in await shown(models)

    await models.load("m", {})

    assert house.registry.data_plane.is_model_ready("m")


async def test_an_unloaded_model_is_listed_and_comes_back_from_where_it_was(house: House) -> None:
    """All its versions go, whatever its archive is called; its default one comes back."""
    for version in ("2.0", "3.0"):
        await house.registry.register(RegisterParameters(house.put("n", version), initial_workers=1))
    models = of(house)

    await models.unload("n", {"unload_dependents": True})
    assert house.registry.default_of("n") is None
    assert [each for each in await shown(models) if each[0] == "n"] == [("n", "", "UNAVAILABLE", "unloaded")]
    with pytest.raises(ModelNotFound):
        await models.unload("n", {})

    await models.load("n", {})
    assert [each for each in await shown(models) if each[0] == "n"] == [("n", "2.0", "READY", "")]


async def test_two_loads_at_once_are_one(house: House) -> None:
    """Both return when the model is ready."""
    models = of(house)

    await asyncio.gather(models.load("m", {}), models.load("m", {}))

    assert house.registry.data_plane.is_model_ready("m")
    assert await shown(models, only_ready=True) == [("m", "1.0", "READY", "")]


async def test_an_archive_that_is_gone_is_forgotten(house: House) -> None:
    """The next load looks in the store."""
    models = of(house)
    await house.registry.register(RegisterParameters("n-2.0.mar", initial_workers=1))
    await models.unload("n", {})
    (house.store / "n-2.0.mar").rename(house.store / "n.mar")

    with pytest.raises(NotInStore):
        await models.load("n", {})
    await models.load("n", {})
    assert house.registry.data_plane.is_model_ready("n")


async def test_what_is_remembered_is_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten."""
    monkeypatch.setattr(repository, "MOST_REMEMBERED", 1)
    models = of(house)
    for name in ("m", "n-2.0"):
        await models.load(name, {})
        await models.unload(name, {})

    assert models._unloaded == {"n-2.0": "n-2.0.mar"}
