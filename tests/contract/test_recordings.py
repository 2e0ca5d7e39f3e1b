"""What a real TorchServe 0.12 answered, played against `torchserve` of this distribution, one recording a test.

A recording (`recorded/*.json`) says how a server is started and what it answered; `play.py` starts ours the same way,
asks the same, and compares. Archives are made by `fixtures/make_fixtures.py`; those with trained weights need the data
beside the checkout. Cases that a recording marks as a quirk need not be copied, and docs/migrating.md names those that
are not; everything else counts.

`make test` plays five, chosen for their many kinds of answers (`support/selected_recordings.py`). The others bear the
mark `long`; `make test-contract`, which is part of `.ci/run`, plays all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.selected_recordings import Kind, kinds, select
from support.shared import SHARED

HERE = Path(__file__).resolve().parent
RECORDINGS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text("utf-8")) for path in sorted((HERE / "recorded").glob("*.json"))
}
SELECTED = select(RECORDINGS, most=5)
# Recordings whose models have trained weights, and whose handlers import torchvision: `make test` plays none of them.
WITH_WEIGHTS = {"tensor_models"}
# Recordings that are about the command itself: it is started as users start it.
TRUE_STARTS = {"command_lines", "start_stop"}
SECONDS = 300


def _cases_with(mark: str) -> set[str]:
    """`recording/case` of all cases that have this mark."""
    return {
        f"{recording}/{case['id']}"
        for recording, document in RECORDINGS.items()
        for case in document["cases"]
        if case.get(mark)
    }


QUIRKS, UNSTABLE = _cases_with("quirk"), _cases_with("unstable")
_GUIDE = (HERE.parents[1] / "docs" / "migrating.md").read_text("utf-8").partition("## Recorded answers")[2]
NOT_COPIED = set(re.findall(r"^\| `([\w]+/[\w.\-]+)` \|", _GUIDE, re.MULTILINE))
COPIED = set(re.findall(r"`([\w]+/[\w.\-]+)`", _GUIDE.rpartition("answered as recorded")[2]))

pytestmark = [pytest.mark.contract, pytest.mark.torch, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of player and servers: our commands first, and where trained weights are."""
    folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "CONTRACT_DATA": str(SHARED / "data")}


def make_fixtures(folder: Path, environment: dict[str, str], *options: str) -> Path:
    """The archives that the recordings name, in a folder."""
    subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "fixtures" / "make_fixtures.py", folder, *options],
        env=environment,
        check=True,
        capture_output=True,
        timeout=SECONDS,
    )
    return folder


@pytest.fixture(scope="session")
def fixtures(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """The archives without weights, which need no torch to be made."""
    return make_fixtures(tmp_path_factory.mktemp("fixtures"), environment, "--no-torch")


@pytest.fixture(scope="session")
def fixtures_with_weights(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """All archives."""
    return make_fixtures(tmp_path_factory.mktemp("fixtures"), environment)


@pytest.fixture(scope="session")
def torchvision(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, str]:
    """The environment with torchvision, which the handlers of some recordings import; a folder of the test's own."""
    folder = tmp_path_factory.mktemp("torchvision")
    version = ["--no-deps", "--quiet", "--target", folder, "torchvision==0.28.0"]
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *version]
    found = {**environment, "PYTHONPATH": str(folder)}
    installed = subprocess.run(install, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    if installed.returncode:
        pytest.skip(f"torchvision 0.28.0 cannot be installed here: {installed.stderr[-500:]}")
    mend = [sys.executable, HERE / "fixtures" / "fix_torchvision.py"]
    subprocess.run(mend, env=found, check=True, capture_output=True, timeout=SECONDS)
    return found


class Player:
    """A process that plays recordings, one after the other (`player.py`)."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "player.py"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, words: list[str], environment: dict[str, str]) -> dict[str, Any]:
        """Run `play.py` with these words in this environment: its status and what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"words": words, "environment": environment}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """No more orders."""
        self._process.communicate(timeout=SECONDS)


@pytest.fixture(scope="module")
def player(environment: dict[str, str]) -> Iterator[Player]:
    """One for all recordings."""
    made = Player(environment)
    yield made
    made.close()


@pytest.mark.parametrize(
    "recording",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in WITH_WEIGHTS or name not in SELECTED))
        for name in RECORDINGS
    ],
)
def test_a_recording_is_answered_as_torchserve_did(
    recording: str,
    fixtures: Path,
    environment: dict[str, str],
    player: Player,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Every case that is no quirk; none is left out."""
    if recording in WITH_WEIGHTS:
        if not (SHARED / "data" / "mnist").exists():
            pytest.skip(f"{recording} needs ../shared/data/mnist beside the checkout")
        environment = request.getfixturevalue("torchvision")
        fixtures = request.getfixturevalue("fixtures_with_weights")
    verdicts = tmp_path / "verdicts.json"

    command = "torchserve" if recording in TRUE_STARTS else f"{sys.executable} -m marserve.cli.torchserve"
    words = ["--cmd", command, "--fixtures", str(fixtures), "--only", f"^{recording}$", "--no-skips"]

    played = player.play(
        [*words, "--json", str(verdicts)],
        {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")},  # models' requirements are kept there
    )

    told = played["output"].rstrip()
    assert played["status"] == 0, told[-6000:]
    assert told.endswith(" passed, 0 failed")
    assert not told.endswith("\n0 passed, 0 failed")
    cases = {name: case for row in json.loads(verdicts.read_text())["scenarios"] for name, case in row["cases"].items()}
    assert cases
    not_copied = {f"{recording}/{name}" for name, case in cases.items() if case["verdict"] == "quirk"}
    assert not_copied <= NOT_COPIED | UNSTABLE, "docs/migrating.md says of these that they are answered as recorded"


def test_the_guide_tells_of_every_quirk_once() -> None:
    """In its table of those that are not copied, or in its list of those that are."""
    assert NOT_COPIED.isdisjoint(COPIED)
    assert NOT_COPIED | COPIED == QUIRKS


def test_most_kinds_of_answers_are_among_the_recordings_that_are_selected() -> None:
    """In whatever order they are read; without a bound every kind is, and what is left out has no kind of its own."""
    backwards = dict(reversed(RECORDINGS.items()))
    every = set[Kind]().union(*map(kinds, RECORDINGS.values()))

    assert select(backwards, most=5) == SELECTED
    assert SELECTED.isdisjoint(WITH_WEIGHTS)
    assert len(SELECTED) == 5
    assert len(_kinds_of(SELECTED)) > len(every) / 2
    assert _kinds_of(select(RECORDINGS)) == every
    assert len(select(RECORDINGS)) < len(RECORDINGS)


def _kinds_of(names: set[str]) -> set[Kind]:
    return {kind for name in names for kind in kinds(RECORDINGS[name])}
