"""`optimise` of a model's configuration, when a version is registered: what cannot be used is refused in a sentence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from marserve.api.errors import error_status
from marserve.errors import BadArchive
from marserve.registry.intake.registration import RegisterParameters
from support.echo_archives import manifest, write_mar
from support.management_house import House

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry of which nothing is left."""
    house = House(tmp_path)
    yield house
    await house.registry.stop()
    assert house.folders() == []


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("3", "optimise of the model's configuration is 3; it must be a map with the keys candidates, inputs, or both"),
        ("{candidate: auto}", "optimise of the model's configuration is {'candidate': 'auto'}; it must be a map"),
        ("{candidates: [onyx]}", "must be a map whose candidates are auto or a list of channels-last, bf16, onnx,"),
        ("{inputs: ../in}", "must be a map whose inputs are a folder of the archive, named by its path inside of it"),
        ("{inputs: requests}", "of model m is 'requests', which is no folder of the archive: put request bodies there"),
        ("{inputs: MAR-INF/MANIFEST.json}", "'MAR-INF/MANIFEST.json', which is no folder of the archive"),
        (f"{{inputs: {'x' * 300}}}", "xxx', which is no folder of the archive"),
    ],
)
async def test_a_value_that_cannot_be_used_is_refused_with_what_it_must_be(
    house: House, value: str, sentence: str
) -> None:
    """As 400, and nothing of the archive is left."""
    name = write_mar(house.store / "m.mar", manifest("m", "1.0"), config=f"optimise: {value}\n").name

    with pytest.raises(BadArchive) as refused:
        await house.registry.register(RegisterParameters(name))

    assert sentence in refused.value.message
    assert error_status(refused.value) == 400
    assert house.folders() == []


async def test_a_value_that_can_be_used_says_that_a_build_is_looked_for(house: House) -> None:
    """A folder that is there; describe's options do not change."""
    name = write_mar(house.store / "m.mar", manifest("m", "1.0"), config="optimise: {inputs: MAR-INF}\n").name

    await house.registry.register(RegisterParameters(name))

    options = next(house.registry._versions.all()).facts.options
    assert (options.optimise.is_asked, options.optimise.inputs) == (True, "MAR-INF")
