"""The kit for a machine with a GPU and no package index: that it is whole, and that a run tells what it saw."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpu_kit import gather, run

ROOT = Path(__file__).parents[2]
# What tests/gpu and benchmarks/gpu.py import beside marserve's own dependencies.
ALSO = ("hypothesis", "nvidia-ml-py", "psutil", "pytest", "pytest-timeout", "pytest-xdist")


def needs(name: str, seen: set[str]) -> None:
    """A package and all that it needs, but for what comes with the machine."""
    if gather.plain(name) in (*seen, *gather.THERE):
        return
    seen.add(gather.plain(name))
    for line in importlib.metadata.requires(name) or ():
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            needs(need.name, seen)


def test_the_kit_has_all_that_marserve_and_its_tests_need() -> None:
    """Nothing is fetched there, and dependencies are not followed: each is named."""
    for pin in gather.pins((ROOT / "constraints.txt").read_text("utf-8")):
        name, _, version = pin.partition("==")
        if importlib.metadata.version(name) != version:
            pytest.skip(f"{name} is not {version} here, and other versions have other dependencies")
    seen: set[str] = set()
    for name in ("marserve", *ALSO):
        needs(name, seen)

    assert sorted(map(gather.plain, (*gather.NEEDED, *gather.WANTED))) == sorted(seen - {"marserve", "marserve-client"})


def test_each_package_of_the_kit_has_its_version_from_the_constraints() -> None:
    """However its name is spelled."""
    pins = gather.pins((ROOT / "constraints.txt").read_text("utf-8"))

    assert len(pins) == len(gather.NEEDED) + len(gather.WANTED)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    with pytest.raises(KeyError):
        gather.pins("msgspec==1.0\n")


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.Run:
    """A run whose environment is this one."""
    kit = tmp_path / "kit"
    kit.mkdir()
    started = run.Run(kit, tmp_path / "out", tmp_path / "env", most_s=run.END_S + 60)
    monkeypatch.setattr(run.Run, "python", sys.executable)
    return started


def summary(running: run.Run) -> list[str]:
    """Its lines without their times."""
    return [line.split(" s  ", 1)[1].strip() for line in (running.out / "summary.txt").read_text().splitlines()]


def test_results_of_tests_are_told_one_by_one(running: run.Run, tmp_path: Path) -> None:
    """With the reason of a failure, and of what was skipped."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): assert 1 == 2\n"
        "@pytest.mark.parametrize('x', [1, 2])\ndef test_c(x): pytest.skip('no GPU here')\n"
    )

    is_well = run.run_tests(running, "", str(tmp_path / "test_it.py"))

    told = summary(running)
    assert not is_well
    assert [line.split(" ")[0] for line in told if "::test_" in line] == ["PASSED", "FAILED", "SKIPPED", "SKIPPED"]
    assert any("assert 1 == 2" in line for line in told)
    assert "skipped 2 times: no GPU here" in told
    assert "1 failed, 1 passed, 2 skipped" in told


def test_what_takes_too_long_is_ended_and_what_was_seen_stays(
    running: run.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to end first; what does not listen is killed with what it started."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('seen', flush=True)\n"
    heard: list[str] = []
    monkeypatch.setattr(run, "END_S", 2.5)

    status = running.stream([sys.executable, "-c", program + "time.sleep(60)"], "x.log", heard.append, 0.5)

    assert status < 0
    assert heard == ["seen\n"]
    assert (running.out / "x.log").read_text() == "seen\n"
    assert summary(running)[0].startswith("the time is over")


def test_a_run_without_its_kit_says_what_is_missing(running: run.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with another Python than the wheels are for."""
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    with pytest.raises(run.Failed, match=r"requirements.txt is not there: make the kit with `make gpu-kit`"):
        running.prepare()
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    with pytest.raises(run.Failed, match=r"for Python 3.11 and 3.12"):
        running.prepare()


def test_a_machine_without_a_device_is_told_so(running: run.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the status of the program that warms up; any other failure ends the run."""
    monkeypatch.setattr(run, "WARM_UP", "print('torch 2.11.0'); raise SystemExit(3)")
    assert not running._warm_up()
    monkeypatch.setattr(run, "WARM_UP", "print('missing here: torch'); raise SystemExit(1)")
    with pytest.raises(run.Failed):
        running._warm_up()

    assert summary(running) == [
        "torch 2.11.0",
        "There is no device here: torch.cuda.is_available() is False.",
        "missing here: torch",
    ]
