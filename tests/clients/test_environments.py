"""The list of clients: each is pinned, made once, and made again when its line changes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clients import environments
from clients.environments import ENVIRONMENTS, SCRIPTS, CannotMake, Client, Environment, make

ENVIRONMENT = Environment("a-client", "a-client==1.0 .", "a_client.py")


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.name)
def test_a_client_is_pinned_and_has_a_script(environment: Environment) -> None:
    """So that a run in a year is of the same client."""
    packages = [word for word in environment.packages.split() if word != "."]

    assert packages
    assert all(re.fullmatch(r"(npm:)?[\w@/.-]+(\[[\w,-]+\])?(==|@)\d[\w.]*", word) for word in packages), packages
    assert (SCRIPTS / environment.script).is_file()
    assert [each.name for each in ENVIRONMENTS].count(environment.name) == 1


def test_an_environment_is_made_once_and_again_when_its_line_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose installation broke off is not taken for made."""
    steps: list[list[str]] = []
    status = 0

    def run(words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        steps.append(words)
        return subprocess.CompletedProcess(words, status, "", "there is no such version")

    monkeypatch.setattr(environments.subprocess, "run", run)
    made = [make(ENVIRONMENT, tmp_path), make(ENVIRONMENT, tmp_path)]
    assert (made, len(steps)) == ([True, False], 2)
    own = [str(environments.ROOT / "client"), str(environments.ROOT)]
    assert steps[1][-5:] == ["a-client==1.0", "--editable", own[0], "--editable", own[1]]

    newer, status = Environment("a-client", "a-client==2.0", "a_client.py"), 1
    with pytest.raises(CannotMake, match="a-client cannot be installed: there is no such version"):
        make(newer, tmp_path)
    status = 0

    assert make(newer, tmp_path)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.name)
def test_the_readme_says_which_version_of_a_client_is_run(environment: Environment) -> None:
    """The one that is installed, in the row that names the client; a runtime stands where archives are described."""
    if environment.name == "onnxruntime-openvino":
        assert f"\n    {environment.packages.split()[0]}\n" in (environments.ROOT / "docs/archives.md").read_text()
        return
    name, version = re.fullmatch(
        r"(?:npm:)?([\w-]+)(?:\[\w+\])?(?:==|@)([\d.]+)", environment.packages.split()[0]
    ).groups()  # type: ignore[union-attr]
    package = {"httpx": "httpx-sse"}.get(name, name)
    if package != name:
        version = environment.packages.split()[1].partition("==")[2]
    rows = [line for line in (environments.ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]

    assert [row for row in rows if package in row and version in row], (package, version)


def test_a_client_that_is_not_installed_is_skipped(tmp_path: Path) -> None:
    """With the command that installs it."""
    with pytest.raises(pytest.skip.Exception, match="make test-clients"):
        Client.of(ENVIRONMENTS[0].name, tmp_path)


def test_a_client_whose_programs_need_a_newer_c_library_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip would take an older package there, in silence."""
    environment = Environment("a-client", "a-client==1.0", "a_client.py", glibc="2.38")
    monkeypatch.setattr(environments, "ENVIRONMENTS", (environment,))

    whys = []
    for here in ("2.9", "2.36", "2.38", "3.0", ""):
        monkeypatch.setattr(environments.platform, "libc_ver", lambda here=here: ("glibc", here))
        whys.append(environment.why_not)

    assert whys == ["glibc 2.38 (here is 2.9)", "glibc 2.38 (here is 2.36)", "", "", ""]
    monkeypatch.setattr(environments.platform, "libc_ver", lambda: ("glibc", "2.36"))
    with pytest.raises(pytest.skip.Exception, match=r"it needs glibc 2\.38 \(here is 2\.36\)"):
        Client.of("a-client", tmp_path)
