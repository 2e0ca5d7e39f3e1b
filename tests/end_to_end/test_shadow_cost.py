"""What a shadow costs those whose requests it mirrors: their p99, while it is slow, wrong or dead (RELIABILITY E5)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from statistics import median
from urllib.parse import urlsplit

import pytest

from support.open_loop import OpenLoop, Outcome, Shot, evenly, percentile, post
from support.server import Server, make_archive

# The handler waits, as one that computes on a device does: what is seen is the server's own part.
HANDLER = """
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep(0.02)
    return ["right" for row in data]
"""
SHADOWS = {
    "2.0": HANDLER.replace("0.02", "0.2"),
    "2.1": HANDLER.replace("right", "wrong"),
    "2.2": HANDLER.replace("time.sleep(0.02)", "import os; os._exit(3)"),
}
CONFIG = "minWorkers: 2\nmaxWorkers: 2\n"
RATE = 40
PROMISED = 0.05


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with all versions; 1.0 answers."""
    folder = tmp_path_factory.mktemp("shadows")
    (folder / "store").mkdir()
    for version, source in {"1.0": HANDLER, **SHADOWS}.items():
        make_archive(folder / "store" / f"m-{version}.mar", source, name="m", version=version, config=CONFIG)
    with Server(folder) as server:
        for version in ("1.0", *SHADOWS):
            server.register(f"m-{version}.mar").raise_for_status()
        yield server


def p99_s(server: Server, seconds: float) -> float:
    """Of requests that come evenly, each with a body of its own, and are all answered."""
    shots = [Shot(due, str(number), post("m", b"%d" % number)) for number, due in enumerate(evenly(RATE, seconds))]
    port = urlsplit(server.inference).port
    assert port is not None
    outcomes: list[Outcome] = asyncio.run(OpenLoop(port).fire(shots))
    assert {(outcome.status, outcome.body) for outcome in outcomes} == {(200, b"right")}
    return percentile([outcome.exchange_s for outcome in outcomes], 0.99)


def growth(server: Server, version: str, rounds: int, seconds: float) -> float:
    """By how much the p99 grows when every request is mirrored; the median of rounds, each with and without in turn."""
    url = f"{server.management}/models/m/shadow"
    grown = []
    p99_s(server, 0.5)
    for number in range(rounds):
        spans = {}
        for is_mirrored in (False, True) if number % 2 else (True, False):
            if is_mirrored:
                server.client.put(url, json={"version": version, "share": 1.0}).raise_for_status()
            spans[is_mirrored] = p99_s(server, seconds)
            if is_mirrored:
                told = server.client.delete(url).json()
                seen = {"2.0": sum(told["dropped"].values()), "2.1": told["differing"], "2.2": len(told["errors"])}
                assert seen[version], told
        grown.append(spans[True] / spans[False] - 1)
    return median(grown)


@pytest.mark.parametrize("version", list(SHADOWS))
def test_a_slow_a_wrong_and_a_dying_shadow_leave_the_p99_alone(server: Server, version: str) -> None:
    """Within three times what is promised."""
    assert growth(server, version, rounds=3, seconds=1.5) < 3 * PROMISED


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", list(SHADOWS))
def test_a_shadow_moves_the_p99_by_less_than_is_promised(server: Server, version: str) -> None:
    """Over more rounds, exactly."""
    assert growth(server, version, rounds=9, seconds=5.0) < PROMISED
