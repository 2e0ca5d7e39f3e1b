"""What every test may use.

Cheap tests: servers start through `support/server.py: Server` or `support/prepared.py`, which fork them from a process
that has imported them; applications of the management API come from `support/management_house.py: House.application`,
which lends one that is made once; `support/command_line.py: marserve` runs commands without a process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.again import Outcome
from support.by_file import ByFile
from support.cost import CostReport
from support.object_stores import S3Server, s3_server
from support.trust import keep_default_trust

# On a busy machine a draw may take long: that says nothing of the test.
settings.register_profile("suite", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("suite"), max_examples=500)
settings.load_profile("suite")

keep_default_trust()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Flags of `support/cost.py`, `support/by_file.py` and `support/again.py`."""
    parser.addoption("--cost", type=Path, help="append each test's seconds of a processor to this file")
    parser.addoption("--by-file", action="store_true", help="collect a file where it is run (`support/by_file.py`)")
    parser.addoption("--order-seed", type=int, help="with --by-file, run the files in the random order of this seed")
    parser.addoption("--outcome", type=Path, help="write what passed and failed to this file (`support/again.py`)")


def pytest_configure(config: pytest.Config) -> None:
    """Each runner writes its own lines. Ctrl-C is heard by the programs under test, though a shell in the background
    has the signal ignored, which every child would inherit.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path: Path | None = config.getoption("--cost")
    if path is not None:
        config.pluginmanager.register(CostReport(path), "cost")
    if config.getoption("--by-file"):
        config.pluginmanager.register(ByFile(config.getoption("--order-seed")), "by_file")
    outcome: Path | None = config.getoption("--outcome")
    if outcome is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcome(outcome), "outcome")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs torch where there is none: `make test-lowest PYTHON=python3.12` has none."""
    if item.get_closest_marker("torch") and find_spec("torch") is None:
        pytest.skip("torch is not installed")


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio alone: the server does too."""
    return "asyncio"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A stand-in for S3, one a test session; each test takes a bucket of its own."""
    with s3_server() as server:
        yield server


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """SIGHUP ends what does not handle it, also in a test run under nohup, which ignores it and hands that on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
