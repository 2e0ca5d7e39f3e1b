"""When snapshots are written and read, seen from the assembly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from marserve.app.building.cannot_start import CannotStart
from marserve.app.building.snapshots import build_snapshots, read_snapshot, write_snapshots
from marserve.settings import Settings, load_settings


def load(here: Path, lines: str) -> Settings:
    """Settings from these lines."""
    (here / "config.properties").write_text(f"model_store=.\n{lines}")
    return load_settings("marserve", {}, {}, here)


class Writer:
    """Notes that it was run."""

    def __init__(self) -> None:
        self.has_run = False

    async def run(self, models: Any) -> None:
        """Note it."""
        self.has_run = True


class Models:
    """A registry without models."""

    def snapshot(self) -> list[Any]:
        """None."""
        return []


@pytest.mark.anyio
@pytest.mark.parametrize("reads", [True, False])
async def test_none_is_written_of_half_of_the_models(reads: bool) -> None:
    """When the models of the start could not be read, the snapshot before is the better one."""

    async def read() -> None:
        if not reads:
            raise ValueError("broken")

    writer: Any = Writer()
    models: Any = Models()
    reading = asyncio.ensure_future(read())
    await write_snapshots(writer, models, reading)

    assert writer.has_run == reads
    assert (reading.exception() is None) == reads


def test_without_a_snapshot_nothing_is_restored_and_off_is_off(tmp_path: Path) -> None:
    """`--ncs` makes no folder either."""
    settings = load(tmp_path, "config_snapshots=false\n")

    assert read_snapshot(settings) is None
    assert build_snapshots(settings, 0) is None
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (
            '{"m": {"1.0": {"marName": "gone.mar", "defaultVersion": true, "minWorkers": 1, "maxWorkers": 1, '
            '"batchSize": 1, "maxBatchDelay": 100, "responseTimeout": 120}}}',
            "model :m, version :1.0 not found in model store",
        ),
        ('{"m": {"1.0": {"marName": 7, "defaultVersion": true}}}', "marName"),
    ],
)
def test_a_snapshot_that_cannot_be_meant_keeps_the_server_from_starting(tmp_path: Path, models: str, said: str) -> None:
    """It says what is wrong and both ways out."""
    document = f'{{"name": "startup.cfg", "modelCount": 1, "models": {models}}}'
    settings = load(tmp_path, f"model_snapshot={document}\n")

    with pytest.raises(CannotStart, match=said) as caught:
        read_snapshot(settings)

    assert "remove model_snapshot" in str(caught.value)
