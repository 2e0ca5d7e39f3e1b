"""The client's own wheel and source distribution: small, alone, of marserve's version, for Python 3.10."""

from __future__ import annotations

import re
import subprocess
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from marserve import __version__
from support.distributions import CLIENT, ROOT, build, sdist_members, unpack_sdist, wheel_members
from support.installed import environment, interpreter

# Run in an environment that has the client and what it asks for.
ALONE = """\
import sys
from marserve_client import BadInput, Client, NoConnection, NO_RETRIES
import marserve_client.tensors as tensors

assert tensors.np is None
assert not {"torch", "marserve", "pydantic"} & set(sys.modules)
client = Client("http://127.0.0.1:9", retries=NO_RETRIES)
for call in (lambda: client.infer("m", {"x": [[1.0]]}), lambda: client.predict("m", "text")):
    try:
        call()
    except NoConnection as error:
        print(type(error).__name__)
print(sys.version_info[:2])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's wheel."""
    return build("wheel", tmp_path_factory.mktemp("wheel"), CLIENT)


def test_the_clients_wheel_holds_its_package_and_nothing_else(wheel: Path) -> None:
    """And the mark for type checkers."""
    info = f"marserve_client-{__version__}.dist-info"
    around = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    package = {f"marserve_client/{file.name}" for file in (CLIENT / "marserve_client").iterdir() if file.is_file()}

    assert wheel.name == f"marserve_client-{__version__}-py3-none-any.whl"
    assert wheel_members(wheel) == package | around
    assert "marserve_client/py.typed" in package


def test_the_clients_wheel_asks_for_httpx_alone(wheel: Path) -> None:
    """numpy is an extra; Python 3.10 will do."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist") or []

    assert [re.split(r"[^a-z]", line)[0] for line in required if "extra ==" not in line] == ["httpx"]
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_clients_sources_build_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Without the rest of the checkout."""
    sdist = build("sdist", tmp_path / "sdist", CLIENT)

    again = build("wheel", tmp_path / "built", source=unpack_sdist(sdist, tmp_path / "unpacked"))

    assert {name.partition("/")[0] for name in sdist_members(sdist)} >= {"marserve_client", "README.md", "LICENSE"}
    assert again.read_bytes() == wheel.read_bytes()
    assert (ROOT / "LICENSE").read_bytes() == (CLIENT / "LICENSE").read_bytes()


@pytest.mark.long  # asks the package index
@pytest.mark.parametrize("version", ["3.10", "3.11"])
def test_the_client_works_alone_on_old_pythons(version: str, wheel: Path) -> None:
    """Without numpy and without the server: it is imported, and asks."""
    with environment(interpreter(version), str(wheel)) as programs:
        ran = subprocess.run([programs / "python", "-c", ALONE], capture_output=True, text=True, check=False)

    major, minor = version.split(".")
    assert ran.stdout.splitlines() == ["NoConnection", "NoConnection", f"({major}, {minor})"], ran.stderr
